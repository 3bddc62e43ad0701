//! Every way for an append to fail says truly whether it happened, and appending again decides where it cannot be said.

use super::{until, waiting_inserts};
use crate::support::proxy::{Fault, Proxy};
use crate::support::server::Database;
use mysql_async::prelude::Queryable;
use quokka::core::Event;
use quokka::store::conformance::{account, command, event, id, options, partition, store};
use quokka::store::{AppendError, Options, Store, StoreError, open};
use std::sync::Arc;
use std::time::Duration;

super::on_both_servers! { database:
    a_request_that_never_arrived_is_unknown
    half_a_request_is_unknown
    a_lost_reply_is_unknown
    silence_is_unknown
    no_connection_means_not_done
    a_key_that_a_stranger_holds_interrupts
    a_holder_that_gives_up_lets_one_through
    a_strangers_lock_holds_up_its_own_partition_alone
    appends_in_company_hear_each_their_own_outcome
    a_killed_query_is_surely_not_done
    a_killed_connection_is_unknown
}

const INSERT: &str = "INSERT INTO `account`";

/// A store behind a proxy, with little patience.
async fn behind_proxy(database: &Database) -> (Proxy, Arc<dyn Store>) {
    let proxy = Proxy::start(database.server().port()).await;
    let options = Options { statement_timeout: Duration::from_secs(2), ..options(&database.url_through(proxy.port())) };
    let store = open(&options).await.unwrap();
    store.create_type(&account()).await.unwrap();
    store.append(&partition(7), &[event(1, "a", 1, "k1")]).await.unwrap();
    (proxy, store)
}

fn second() -> [Event; 2] {
    [event(2, "a", 2, "k2"), event(3, "b", 1, "k1")]
}

async fn is_there(store: &dyn Store) -> bool {
    store.find(&account(), &[(id("b"), command("k1"))]).await.unwrap()[0].is_some()
}

async fn a_request_that_never_arrived_is_unknown(database: Database) {
    let (proxy, store) = behind_proxy(&database).await;
    proxy.set(Fault::CutBeforeRequest(INSERT));
    let outcome = store.append(&partition(7), &second()).await;
    assert!(matches!(outcome, Err(AppendError::Unknown(_))), "{outcome:?}");
    assert_eq!(proxy.cuts(), 1, "nothing is sent twice");
    assert!(!is_there(store.as_ref()).await);
    proxy.set(Fault::PassThrough);
    store.append(&partition(7), &second()).await.unwrap();
}

async fn half_a_request_is_unknown(database: Database) {
    let (proxy, store) = behind_proxy(&database).await;
    proxy.set(Fault::CutInsideRequest(INSERT));
    let outcome = store.append(&partition(7), &second()).await;
    assert!(matches!(outcome, Err(AppendError::Unknown(_))), "{outcome:?}");
    assert_eq!(proxy.cuts(), 1);
    proxy.set(Fault::PassThrough);
    store.append(&partition(7), &second()).await.unwrap();
}

async fn a_lost_reply_is_unknown(database: Database) {
    let (proxy, store) = behind_proxy(&database).await;
    proxy.set(Fault::CutReply(INSERT));
    let outcome = store.append(&partition(7), &second()).await;
    assert!(matches!(outcome, Err(AppendError::Unknown(_))), "{outcome:?}");
    assert_eq!(proxy.cuts(), 1);
    proxy.set(Fault::PassThrough);
    assert!(is_there(store.as_ref()).await);
    let again = store.append(&partition(7), &second()).await;
    assert!(matches!(again, Err(AppendError::PositionTaken)), "{again:?}");
}

async fn silence_is_unknown(database: Database) {
    let (proxy, store) = behind_proxy(&database).await;
    let connections = proxy.connections();
    proxy.set(Fault::BlackHole);
    let outcome = store.append(&partition(7), &second()).await;
    assert!(matches!(outcome, Err(AppendError::Unknown(_))), "{outcome:?}");
    assert!(matches!(store.head(&partition(7)).await, Err(StoreError::Unavailable(_))));
    proxy.set(Fault::PassThrough);
    store.append(&partition(7), &second()).await.unwrap();
    assert!(proxy.connections() > connections, "the silent connection is not used again");
}

async fn no_connection_means_not_done(database: Database) {
    let (proxy, store) = behind_proxy(&database).await;
    proxy.set(Fault::RefuseConnections);
    assert!(matches!(store.ready().await, Err(StoreError::Unavailable(_))), "the last connection that was open goes");
    let outcome = store.append(&partition(7), &second()).await;
    assert!(matches!(outcome, Err(AppendError::Unavailable(_))), "{outcome:?}");
    proxy.set(Fault::PassThrough);
    store.append(&partition(7), &second()).await.unwrap();
}

/// A transaction of somebody else that holds the next event id.
async fn stranger(database: &Database) -> mysql_async::Conn {
    let mut stranger = database.admin().await;
    stranger.query_drop("BEGIN").await.unwrap();
    let row = "INSERT INTO account (shard, event_id, entity_id, version, command_id, command_name, outcome, handler_version, response, handled_at, committed_at) \
        VALUES (7, 1, 's', 1, 'k', 'open', 'accepted', 'v', '{}', 0, UTC_TIMESTAMP(6))";
    stranger.query_drop(row).await.unwrap();
    stranger
}

async fn a_key_that_a_stranger_holds_interrupts(database: Database) {
    let store = store(database.url()).await;
    let mut stranger = stranger(&database).await;
    let outcome = store.append(&partition(7), &[event(1, "a", 1, "k")]).await;
    assert!(matches!(&outcome, Err(AppendError::Interrupted(text)) if text.contains("1205")), "{outcome:?}");
    stranger.query_drop("ROLLBACK").await.unwrap();
    store.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
}

async fn a_holder_that_gives_up_lets_one_through(database: Database) {
    let store = store(database.url()).await;
    let mut admin = database.admin().await;
    let mut stranger = stranger(&database).await;
    let appends: Vec<_> = (0..3)
        .map(|number| {
            let store = store.clone();
            tokio::spawn(async move { store.append(&partition(7), &[event(1, &format!("e{number}"), 1, "k")]).await })
        })
        .collect();
    until("three appends wait", async || waiting_inserts(&database, &mut admin).await.len() == 3).await;
    stranger.query_drop("ROLLBACK").await.unwrap();
    let mut written = 0;
    for append in appends {
        match append.await.unwrap() {
            Ok(()) => written += 1,
            Err(AppendError::Interrupted(_) | AppendError::PositionTaken) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(written, 1);
    assert_eq!(store.list(&account(), None, 10).await.unwrap().len(), 1);
}

async fn a_strangers_lock_holds_up_its_own_partition_alone(database: Database) {
    let store = store(database.url()).await;
    let mut stranger = stranger(&database).await;
    let append = |shard: u16, round: u64| {
        let store = store.clone();
        let event = event(round, &format!("e{shard}"), round, &format!("k{round}"));
        tokio::spawn(async move { store.append(&partition(shard), &[event]).await })
    };
    // More than go at once, so that they share statements; the stranger holds the first key of partition 7.
    let mut others: Vec<_> = (0..40).map(|shard| append(shard, 1)).collect();
    let held = others.remove(7);
    for round in 2..=4 {
        for other in others {
            other.await.unwrap().unwrap();
        }
        assert!(!held.is_finished());
        others = (8..40).map(|shard| append(shard, round)).collect();
    }
    for other in others {
        other.await.unwrap().unwrap();
    }
    stranger.query_drop("ROLLBACK").await.unwrap();
    held.await.unwrap().unwrap();
    assert_eq!(store.list(&account(), None, 100).await.unwrap().len(), 40);
}

async fn appends_in_company_hear_each_their_own_outcome(database: Database) {
    let store = store(database.url()).await;
    store.append(&partition(3), &[event(1, "e3", 1, "k1")]).await.unwrap();
    store.append(&partition(5), &[event(1, "e5", 1, "k1")]).await.unwrap();
    // Partition 3 meets a taken position, 5 a taken key.
    let appends: Vec<_> = (0..40)
        .map(|shard| {
            let store = store.clone();
            let event = event(if shard == 5 { 2 } else { 1 }, &format!("e{shard}"), 1, "k2");
            tokio::spawn(async move { store.append(&partition(shard), &[event]).await })
        })
        .collect();
    for (shard, append) in appends.into_iter().enumerate() {
        let outcome = append.await.unwrap();
        match shard {
            3 => assert!(matches!(outcome, Err(AppendError::PositionTaken)), "{outcome:?}"),
            5 => assert!(matches!(outcome, Err(AppendError::KeyTaken)), "{outcome:?}"),
            _ => outcome.unwrap(),
        }
    }
    assert_eq!(store.list(&account(), None, 100).await.unwrap().len(), 40);
}

/// An append that waits for a stranger's key, killed with the statement given; then the stranger gives up.
async fn killed(database: &Database, how: &str) -> (Arc<dyn Store>, Result<(), AppendError>) {
    let store = store(database.url()).await;
    let mut admin = database.admin().await;
    let mut stranger = stranger(database).await;
    let append = tokio::spawn({
        let store = store.clone();
        async move { store.append(&partition(7), &[event(1, "a", 1, "k")]).await }
    });
    until("the append waits", async || waiting_inserts(database, &mut admin).await.len() == 1).await;
    let session = waiting_inserts(database, &mut admin).await[0];
    admin.query_drop(format!("{how} {session}")).await.unwrap();
    let outcome = append.await.unwrap();
    stranger.query_drop("ROLLBACK").await.unwrap();
    (store, outcome)
}

async fn a_killed_query_is_surely_not_done(database: Database) {
    let (store, outcome) = killed(&database, "KILL QUERY").await;
    assert!(matches!(&outcome, Err(AppendError::Interrupted(text)) if text.contains("1317")), "{outcome:?}");
    assert_eq!(store.head(&partition(7)).await.unwrap(), 0);
    store.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
}

async fn a_killed_connection_is_unknown(database: Database) {
    let (store, outcome) = killed(&database, "KILL CONNECTION").await;
    // A server may still say that it interrupted the statement before it closes the connection.
    assert!(matches!(outcome, Err(AppendError::Unknown(_) | AppendError::Interrupted(_))), "{outcome:?}");
    store.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
}
