//! Whatever text an event holds, the server stores exactly that: no literal ever ends early or changes on its way.

use crate::support::server::Database;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use quokka::core::{Event, Json};
use quokka::store::conformance::{account, event, partition, store};
use std::cell::Cell;

super::on_both_servers! { database: arbitrary_texts_are_read_back }

fn text() -> impl Strategy<Value = String> {
    let nasty =
        prop::sample::select(vec!['\'', '"', '\\', '\0', '\u{1a}', '\n', '\r', '`', '%', '_', ';', '-', '#', '/', '*', 'N', '0', 'é', '🍣', '\u{feff}', ' ']);
    prop_oneof![any::<String>(), prop::collection::vec(nasty, 0..40).prop_map(String::from_iter)]
}

async fn arbitrary_texts_are_read_back(database: Database) {
    let store = store(database.url()).await;
    let runtime = tokio::runtime::Handle::current();
    let property = move || {
        let head = Cell::new(0);
        // A failing case is printed; what it shows then becomes a named test, so no file of seeds is kept.
        let mut runner = TestRunner::new(Config { cases: 20, failure_persistence: None, ..Config::default() });
        runner.run(&prop::collection::vec((text(), text(), prop::option::of(text())), 1..60), |texts| {
            let events: Vec<Event> = (head.get() + 1..)
                .zip(texts)
                .map(|(event_id, (request, response, state))| Event {
                    request: Json::trusted(request),
                    response: Json::trusted(response),
                    state: state.map(Json::trusted),
                    ..event(event_id, &format!("e{event_id}"), 1, "k")
                })
                .collect();
            runtime.block_on(store.append(&partition(7), &events)).unwrap();
            head.set(head.get() + events.len() as u64);
            let ids: Vec<_> = events.iter().map(|event| event.entity_id.clone()).collect();
            let read = runtime.block_on(store.newest(&account(), &ids)).unwrap();
            for (stored, event) in read.into_iter().zip(events) {
                prop_assert_eq!(stored.unwrap().event, event);
            }
            Ok(())
        })
    };
    tokio::task::spawn_blocking(property).await.unwrap().unwrap();
}
