//! The suite that every store passes. Each test takes the URL of a fresh, empty database and fails by panicking.
//!
//! [`store_conformance!`](crate::store_conformance) makes one `#[test]` of each. What only one engine can be made to do (a lost
//! reply, a deadlock, a killed query) is tested beside that engine.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a suite of tests: its failures are panics")]

pub mod keys;
pub mod lease;
pub mod log;
pub mod opening;
pub mod patches;
pub mod reads;
pub mod together;
pub mod writes;

use super::{AppendError, Options, Store, open};
use crate::core::{CommandId, CommandName, EntityId, EntityType, Event, EventOutcome, HandlerVersion, Json, Partition, ShardCount, ShardId};
use std::sync::Arc;
use std::time::Duration;

/// Makes one test of each case of the suite; `$database` is an expression that is evaluated in each test, to a value with a method
/// `url()`, and dropped after the test. Where it is `None`, the engine is not there and the test ends.
#[macro_export]
macro_rules! store_conformance {
    ($database:expr; $($module:ident::$case:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                if let Some(database) = $database {
                    $crate::store::conformance::$module::$case(database.url()).await;
                }
            }
        )*
    };
    ($database:expr) => {
        $crate::store_conformance! { $database;
            writes::every_field_is_read_back
            writes::odd_texts_are_read_back
            writes::large_states_are_read_back
            writes::more_than_one_statement_may_hold_is_refused
            writes::partitions_have_heads_of_their_own
            writes::reserved_words_are_fine_as_names
            writes::dropped_appends_leave_nothing_in_the_way
            writes::what_was_appended_is_seen_by_others
            keys::taken_keys_are_told_apart
            keys::appends_are_atomic
            keys::racing_writers_make_a_dense_log
            keys::one_of_two_equal_appends_wins
            keys::a_command_id_belongs_to_one_entity
            keys::ids_that_nearly_agree_are_different
            reads::newest_events_come_in_the_order_asked
            reads::commands_are_found_without_states
            reads::versions_and_times_are_exact
            reads::history_pages_are_exclusive
            reads::listings_hold_existing_entities_only
            reads::listings_pass_what_does_not_exist
            patches::states_told_as_changes_are_read_whole
            patches::a_newest_row_with_a_change_is_read_whole
            patches::random_documents_are_read_back_byte_for_byte
            patches::changes_that_do_not_fit_are_told_as_corrupt
            patches::a_row_that_is_gone_is_missed
            log::heads_are_those_of_all_partitions
            log::partitions_are_read_in_order_from_any_place
            log::pages_are_bounded_in_bytes
            log::pages_that_start_between_changes_hold_whole_states
            log::versions_are_found_by_event_id
            opening::opening_twice_at_once_gives_one_log
            opening::the_number_of_shards_is_fixed
            opening::stores_are_ready_and_pass_the_barrier
            together::appends_happen_together_or_not_at_all
            together::racing_writers_of_several_tables_leave_dense_logs
            lease::a_lease_changes_hands_only_as_it_was_seen
            lease::of_many_who_take_a_lease_one_gets_it
        }
    };
}

/// Options for tests.
pub fn options(url: &str) -> Options {
    Options { url: url.to_owned(), shards: ShardCount::new(64).unwrap(), pool: 8, statement_timeout: Duration::from_secs(30) }
}

/// A store on the database, with the entity type `account`.
pub async fn store(url: &str) -> Arc<dyn Store> {
    let store = open(&options(url)).await.unwrap();
    store.create_type(&account()).await.unwrap();
    store
}

/// The entity type that most tests use.
pub fn account() -> EntityType {
    EntityType::new("account").unwrap()
}

/// A partition of it.
pub fn partition(shard: u16) -> Partition {
    Partition { entity_type: account(), shard: ShardId(shard) }
}

/// An entity id.
pub fn id(text: &str) -> EntityId {
    EntityId::new(text, 64).unwrap()
}

/// A command id.
pub fn command(text: &str) -> CommandId {
    CommandId::new(text).unwrap()
}

/// An event of the entity, with a state that tells its version.
pub fn event(event_id: u64, entity_id: &str, version: u64, command_id: &str) -> Event {
    Event {
        event_id,
        entity_id: id(entity_id),
        version,
        command_id: command(command_id),
        command: CommandName::new("charge").unwrap(),
        outcome: EventOutcome::Accepted,
        handler_version: HandlerVersion("0123456789abcdef".into()),
        request: Json::canonical(br#"{"amount":10}"#).unwrap(),
        response: Json::canonical(br#"{"balance":90}"#).unwrap(),
        state: Some(Json::canonical(format!(r#"{{"version":{version}}}"#).as_bytes()).unwrap()),
        patch: None,
        handled_at: 1_700_000_000_123,
    }
}

/// Appends at the head, reading it again as often as others take the place.
pub async fn append_at_head(store: &dyn Store, partition: &Partition, mut events: Vec<Event>) -> u64 {
    loop {
        let head = store.head(partition).await.unwrap();
        for (event, event_id) in events.iter_mut().zip(head + 1..) {
            event.event_id = event_id;
        }
        match store.append(partition, &events).await {
            Ok(()) => return head + 1,
            Err(AppendError::PositionTaken | AppendError::Interrupted(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
