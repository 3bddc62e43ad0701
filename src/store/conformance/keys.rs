//! The three keys decide who wins, and nothing is ever half won. Guards the invariants unique-truth and dense-log.

use super::{account, append_at_head, command, event, id, partition, store};
use crate::core::Event;
use crate::store::{AppendError, Content, Order};
use futures_util::future::join_all;

fn name(outcome: &Result<(), AppendError>) -> &'static str {
    match outcome {
        Ok(()) => "written",
        Err(AppendError::PositionTaken) => "position taken",
        Err(AppendError::KeyTaken) => "key taken",
        Err(AppendError::Interrupted(_)) => "interrupted",
        Err(AppendError::Unavailable(_)) => "unavailable",
        Err(AppendError::TooLarge) => "too large",
        Err(AppendError::Refused(_)) => "refused",
        Err(AppendError::Unknown(_)) => "unknown",
    }
}

/// The first event that meets a taken key names it; within an event, the position goes before the version and the command.
pub async fn taken_keys_are_told_apart(url: &str) {
    let store = store(url).await;
    let there = [event(1, "a", 1, "k1"), event(2, "a", 2, "k2"), event(3, "b", 1, "k1")];
    store.append(&partition(7), &there).await.unwrap();
    let free = |event_id| event(event_id, "c", 1, "k1");
    for (what, events, expected) in [
        ("the same again", there.to_vec(), "position taken"),
        ("only the position", vec![event(3, "c", 1, "k1")], "position taken"),
        ("only the version", vec![event(4, "a", 2, "k9")], "key taken"),
        ("only the command", vec![event(4, "a", 3, "k1")], "key taken"),
        ("version and command", vec![event(4, "a", 2, "k2")], "key taken"),
        ("position and version", vec![event(3, "a", 2, "k9")], "position taken"),
        ("position and command", vec![event(3, "a", 9, "k2")], "position taken"),
        ("the version of the second event", vec![free(4), event(5, "b", 1, "k9")], "key taken"),
        ("the version of the first, the position of the second", vec![event(0, "a", 1, "k9"), free(1)], "key taken"),
        ("the same version twice in one append", vec![free(4), event(5, "c", 1, "k2")], "key taken"),
        ("the same command twice in one append", vec![free(4), event(5, "c", 2, "k1")], "key taken"),
        ("another shard", vec![free(4)], "written"),
    ] {
        assert_eq!(name(&store.append(&partition(7), &events).await), expected, "{what}");
    }
    assert_eq!(name(&store.append(&partition(8), &[event(1, "a", 2, "k9")]).await), "key taken", "keys of entities hold across shards");
}

/// A key that is taken at the end undoes what stood before it.
pub async fn appends_are_atomic(url: &str) {
    let store = store(url).await;
    store.append(&partition(7), &[event(1, "a", 1, "k1")]).await.unwrap();
    let mut events: Vec<Event> = (2..500).map(|event_id| event(event_id, &format!("e{event_id}"), 1, "k")).collect();
    events.push(event(500, "a", 2, "k1"));
    assert_eq!(name(&store.append(&partition(7), &events).await), "key taken");
    assert_eq!(store.head(&partition(7)).await.unwrap(), 1);
    assert_eq!(store.list(&account(), None, 1000).await.unwrap().len(), 1);
    events.pop();
    store.append(&partition(7), &events).await.unwrap();
    assert_eq!(store.head(&partition(7)).await.unwrap(), 499);
}

/// Writers on two stores race for one partition; every batch lands once, and the ids have no holes.
pub async fn racing_writers_make_a_dense_log(url: &str) {
    const WRITERS: u64 = 6;
    const BATCHES: u64 = 12;
    let stores = [store(url).await, store(url).await];
    let writers = (0..WRITERS).map(|writer| {
        let store = stores[usize::try_from(writer).unwrap() % 2].clone();
        tokio::spawn(async move {
            for batch in 0..BATCHES {
                let entity = format!("w{writer}");
                let events = (1..=3).map(|row| event(0, &entity, batch * 3 + row, &format!("k{batch}-{row}"))).collect();
                append_at_head(store.as_ref(), &partition(7), events).await;
            }
        })
    });
    for writer in join_all(writers).await {
        writer.unwrap();
    }
    let mut ids = Vec::new();
    for writer in 0..WRITERS {
        let history = stores[0].history(&account(), &id(&format!("w{writer}")), Order::Ascending, 0, 1000, Content::Whole).await.unwrap();
        let versions: Vec<_> = history.iter().map(|stored| stored.event.version).collect();
        assert_eq!(versions, (1..=BATCHES * 3).collect::<Vec<_>>());
        let own: Vec<_> = history.iter().map(|stored| stored.event.event_id).collect();
        assert!(own.is_sorted(), "versions of an entity come in the order of their event ids");
        ids.extend(own);
    }
    ids.sort_unstable();
    assert_eq!(ids, (1..=WRITERS * BATCHES * 3).collect::<Vec<_>>());
}

/// Of many equal appends at once exactly one is written, whatever the others are told; told again until it is decided, all learn it.
pub async fn one_of_two_equal_appends_wins(url: &str) {
    let stores = [store(url).await, store(url).await];
    for round in 1..=20 {
        let appends = (0..4_usize).map(|caller| {
            let store = stores[caller % 2].clone();
            let event = event(round, &format!("e{round}"), 1, &format!("k{caller}"));
            async move {
                loop {
                    match store.append(&partition(7), std::slice::from_ref(&event)).await {
                        Err(AppendError::Interrupted(_)) => {}
                        outcome => return name(&outcome),
                    }
                }
            }
        });
        let mut outcomes = join_all(appends).await;
        outcomes.sort_unstable();
        assert_eq!(outcomes, ["position taken", "position taken", "position taken", "written"]);
    }
}

/// The same command id on two entities of one partition makes two events.
pub async fn a_command_id_belongs_to_one_entity(url: &str) {
    let store = store(url).await;
    store.append(&partition(7), &[event(1, "a", 1, "k"), event(2, "b", 1, "k")]).await.unwrap();
    let found = store.find(&account(), &[(id("a"), command("k")), (id("b"), command("k"))]).await.unwrap();
    assert_eq!(found.into_iter().map(|stored| stored.unwrap().event.event_id).collect::<Vec<_>>(), [1, 2]);
}

/// Case, length and the last character count.
pub async fn ids_that_nearly_agree_are_different(url: &str) {
    let store = store(url).await;
    let long = |last: &str| "x".repeat(63) + last;
    let entities = ["abc".to_owned(), "ABC".into(), "abC".into(), "abc-".into(), "abc_".into(), long("y"), long("z"), "0".into(), "00".into()];
    let commands = ["k".to_owned(), "K".into(), "k.".into(), "x".repeat(255) + "y", "x".repeat(255) + "z"];
    let mut events = Vec::new();
    for entity in &entities {
        for (version, command) in (1..).zip(&commands) {
            events.push(event(events.len() as u64 + 1, entity, version, command));
        }
    }
    store.append(&partition(7), &events).await.unwrap();
    for event in &events {
        let key = (event.entity_id.clone(), event.command_id.clone());
        assert_eq!(store.find(&account(), &[key]).await.unwrap().pop().unwrap().unwrap().event.event_id, event.event_id);
        assert_eq!(store.at_version(&account(), &event.entity_id, event.version).await.unwrap().unwrap().event, *event);
    }
    assert!(store.newest(&account(), &[id("Abc")]).await.unwrap().pop().unwrap().is_none());
    let mut sorted: Vec<_> = entities.iter().map(|entity| id(entity)).collect();
    sorted.sort();
    let listed = store.list(&account(), None, 100).await.unwrap();
    assert_eq!(listed.into_iter().map(|listed| listed.entity_id).collect::<Vec<_>>(), sorted, "listings go by bytes");
}
