//! Whatever text an event holds, the server stores exactly that: no literal ever ends early or changes on its way.

use crate::support::server::Database;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use quokka::core::{Event, Json};
use quokka::store::conformance::{account, event, partition, store};

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
        let mut head = 0;
        // Failing cases are printed; files of seeds would only hold texts that this suite then keeps as named tests.
        let mut runner = TestRunner::new(Config { cases: 20, failure_persistence: None, ..Config::default() });
        let head = std::cell::RefCell::new(&mut head);
        runner.run(&prop::collection::vec((text(), text(), prop::option::of(text())), 1..60), |texts| {
            let mut head = head.borrow_mut();
            let events: Vec<Event> = (**head + 1..)
                .zip(texts)
                .map(|(event_id, (request, response, state))| Event {
                    request: Json::trusted(request),
                    response: Json::trusted(response),
                    state: state.map(Json::trusted),
                    ..event(event_id, &format!("e{event_id}"), 1, "k")
                })
                .collect();
            runtime.block_on(store.append(&partition(7), &events)).unwrap();
            **head += events.len() as u64;
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
