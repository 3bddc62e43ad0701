//! What each way of reading finds, in which order, and where its bounds are.

use super::{account, command, event, id, partition, store};
use crate::core::{Event, EventOutcome};
use crate::store::{Content, Order, Store};

/// Entities `e0000`, `e0001` … with two versions each.
async fn many(store: &dyn Store, count: u64) {
    let events: Vec<Event> = (0..count * 2).map(|row| event(row + 1, &format!("e{:04}", row / 2), row % 2 + 1, &format!("k{row}"))).collect();
    for chunk in events.chunks(1000) {
        store.append(&partition(7), chunk).await.unwrap();
    }
}

fn rejected_creation(event_id: u64, entity_id: &str, version: u64) -> Event {
    Event { outcome: EventOutcome::Rejected, state: None, ..event(event_id, entity_id, version, &format!("k{version}")) }
}

/// More ids than one statement names, some of them twice, some unknown.
pub async fn newest_events_come_in_the_order_asked(url: &str) {
    let store = store(url).await;
    many(store.as_ref(), 1100).await;
    let mut ids: Vec<_> = (0..1100).rev().map(|number| id(&format!("e{number:04}"))).collect();
    ids.insert(3, id("unknown"));
    ids.push(id("e0007"));
    let read = store.newest(&account(), &ids).await.unwrap();
    assert_eq!(read.len(), ids.len());
    for (stored, id) in read.into_iter().zip(ids) {
        match stored {
            Some(stored) => {
                assert_eq!((stored.event.entity_id, stored.event.version), (id, 2));
                assert_eq!(stored.event.state.unwrap().as_str(), r#"{"version":2}"#);
            }
            None => assert_eq!(id.as_str(), "unknown"),
        }
    }
    assert!(store.newest(&account(), &[]).await.unwrap().is_empty());
}

/// Commands by entity and id; the rest of the event is whole.
pub async fn commands_are_found_without_states(url: &str) {
    let store = store(url).await;
    many(store.as_ref(), 600).await;
    let mut asked: Vec<_> = (0..1200).map(|row| (id(&format!("e{:04}", row / 2)), command(&format!("k{row}")))).collect();
    asked.insert(5, (id("e0000"), command("k5")));
    asked.push((id("e0000"), command("k0")));
    let read = store.find(&account(), &asked).await.unwrap();
    assert_eq!(read.len(), asked.len());
    for (stored, (entity_id, command_id)) in read.into_iter().zip(asked) {
        let Some(stored) = stored else {
            assert_eq!((entity_id.as_str(), command_id.as_str()), ("e0000", "k5"));
            continue;
        };
        let row: u64 = command_id.as_str()[1..].parse().unwrap();
        assert_eq!(stored.event, Event { state: None, ..event(row + 1, entity_id.as_str(), row % 2 + 1, command_id.as_str()) });
        assert!(stored.committed_at > 0);
    }
    assert!(store.find(&account(), &[]).await.unwrap().is_empty());
}

/// One version, or the one of a time.
pub async fn versions_and_times_are_exact(url: &str) {
    let store = store(url).await;
    for version in 1..=3 {
        store.append(&partition(7), &[event(version, "a", version, &format!("k{version}"))]).await.unwrap();
    }
    store.append(&partition(7), &[event(4, "b", 1, "k")]).await.unwrap();
    for (version, there) in [(0, false), (1, true), (3, true), (4, false), (u64::MAX, false)] {
        let read = store.at_version(&account(), &id("a"), version).await.unwrap();
        assert_eq!(read.map(|stored| stored.event.version), there.then_some(version));
    }
    let times: Vec<_> =
        store.history(&account(), &id("a"), Order::Ascending, 0, 9, Content::Whole).await.unwrap().iter().map(|stored| stored.committed_at).collect();
    assert!(times.is_sorted());
    for time in times.iter().flat_map(|time| [time - 1, *time, time + 1]) {
        let expected = times.iter().filter(|committed_at| **committed_at <= time).count() as u64;
        let read = store.at_time(&account(), &id("a"), time).await.unwrap();
        assert_eq!(read.map_or(0, |stored| stored.event.version), expected, "at {time} of {times:?}");
    }
    for (time, version) in [(i64::MAX, 3), (i64::MIN, 0), (0, 0)] {
        let read = store.at_time(&account(), &id("a"), time).await.unwrap();
        assert_eq!(read.map_or(0, |stored| stored.event.version), version);
    }
}

/// Both directions, with the bound left out.
pub async fn history_pages_are_exclusive(url: &str) {
    let store = store(url).await;
    let events: Vec<Event> = (1..=10).map(|version| event(version, "a", version, &format!("k{version}"))).collect();
    store.append(&partition(7), &events).await.unwrap();
    store.append(&partition(7), &[event(11, "b", 1, "k")]).await.unwrap();
    for (order, bound, limit, expected) in [
        (Order::Ascending, 0, 3, vec![1, 2, 3]),
        (Order::Ascending, 3, 3, vec![4, 5, 6]),
        (Order::Ascending, 9, 3, vec![10]),
        (Order::Ascending, 10, 3, vec![]),
        (Order::Ascending, 0, 100, (1..=10).collect()),
        (Order::Descending, 0, 3, vec![10, 9, 8]),
        (Order::Descending, 8, 3, vec![7, 6, 5]),
        (Order::Descending, 2, 3, vec![1]),
        (Order::Descending, 1, 3, vec![]),
        (Order::Descending, u64::MAX >> 1, 1, vec![10]),
        (Order::Ascending, 0, 0, vec![]),
    ] {
        let page = store.history(&account(), &id("a"), order, bound, limit, Content::Whole).await.unwrap();
        let versions: Vec<u64> = page.iter().map(|stored| stored.event.version).collect();
        assert_eq!(versions, expected, "{order:?} from {bound}, {limit} of them");
        assert!(page.iter().all(|stored| stored.event == events[usize::try_from(stored.event.version - 1).unwrap()]));
    }
    let bare = store.history(&account(), &id("a"), Order::Ascending, 0, 1, Content::WithoutState).await.unwrap();
    assert_eq!(bare[0].event, Event { state: None, ..events[0].clone() });
    assert!(store.history(&account(), &id("c"), Order::Ascending, 0, 9, Content::Whole).await.unwrap().is_empty());
}

async fn pages(store: &dyn Store, limit: usize) -> Vec<(String, u64)> {
    let mut listed = Vec::new();
    let mut after = None;
    loop {
        let page = store.list(&account(), after.as_ref(), limit).await.unwrap();
        assert!(page.len() <= limit);
        let is_last = page.len() < limit;
        after = page.last().map(|listed| listed.entity_id.clone());
        listed.extend(page.into_iter().map(|listed| (listed.entity_id.as_str().to_owned(), listed.version)));
        if is_last {
            return listed;
        }
    }
}

/// An entity whose creation was only ever rejected is not listed; one whose last command was rejected is.
pub async fn listings_hold_existing_entities_only(url: &str) {
    let store = store(url).await;
    assert!(pages(store.as_ref(), 10).await.is_empty());
    let mut last_rejected = event(6, "c", 2, "k2");
    last_rejected.outcome = EventOutcome::Rejected;
    let rows = [
        event(1, "a", 1, "k1"),
        event(2, "a", 2, "k2"),
        rejected_creation(3, "b", 1),
        rejected_creation(4, "b", 2),
        event(5, "c", 1, "k1"),
        last_rejected,
        rejected_creation(7, "d", 1),
        event(8, "d", 2, "k2"),
        event(9, "B", 1, "k1"),
    ];
    store.append(&partition(7), &rows).await.unwrap();
    let expected = [("B", 1), ("a", 2), ("c", 2), ("d", 2)].map(|(id, version)| (id.to_owned(), version));
    for limit in [1, 2, 3, 4, 100] {
        assert_eq!(pages(store.as_ref(), limit).await, expected, "{limit} at a time");
    }
    assert!(store.list(&account(), None, 0).await.unwrap().is_empty());
}

/// Neither many entities that do not exist nor one with very many versions ends a listing early.
pub async fn listings_pass_what_does_not_exist(url: &str) {
    let store = store(url).await;
    let mut rows = Vec::new();
    for number in 0..1500 {
        let is_there = number % 700 == 3;
        let event_id = rows.len() as u64 + 1;
        let id = format!("e{number:04}");
        rows.push(if is_there { event(event_id, &id, 1, "k1") } else { rejected_creation(event_id, &id, 1) });
    }
    for version in 1..=3000 {
        rows.push(event(rows.len() as u64 + 1, "e0703-hot", version, &format!("k{version}")));
    }
    for chunk in rows.chunks(1000) {
        store.append(&partition(7), chunk).await.unwrap();
    }
    let expected = [("e0003", 1), ("e0703", 1), ("e0703-hot", 3000), ("e1403", 1)].map(|(id, version)| (id.to_owned(), version));
    for limit in [1, 3, 100] {
        assert_eq!(pages(store.as_ref(), limit).await, expected, "{limit} at a time");
    }
}
