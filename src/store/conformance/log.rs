//! Reading partitions in order: heads, pages both ways, whole states wherever a page starts.

use super::{account, event, id, partition, store};
use crate::core::{EntityType, Event, Json, Partition, ShardId, StatePatch};
use crate::store::{Order, Store};

/// Reads all of a partition in pages.
async fn all(store: &dyn Store, partition: &Partition, order: Order, limit: usize, bytes_max: usize) -> Vec<Event> {
    let (mut read, mut bound) = (Vec::new(), 0);
    loop {
        let page = store.read(partition, order, bound, limit, bytes_max).await.unwrap();
        assert!(page.len() <= limit);
        let Some(last) = page.last() else { return read };
        bound = last.event.event_id;
        read.extend(page.into_iter().map(|stored| stored.event));
        if order == Order::Descending && bound == 1 {
            return read;
        }
    }
}

/// Of several types at once; partitions without events are left out.
pub async fn heads_are_those_of_all_partitions(url: &str) {
    let store = store(url).await;
    let other = EntityType::new("order").unwrap();
    store.create_type(&other).await.unwrap();
    let types = [account(), other.clone()];
    assert_eq!(store.heads(&types).await.unwrap(), []);
    assert_eq!(store.heads(&[]).await.unwrap(), []);
    for shard in [0, 7, 63] {
        for event_id in 1..=u64::from(shard) + 1 {
            store.append(&partition(shard), &[event(event_id, &format!("e{shard}"), event_id, &format!("k{event_id}"))]).await.unwrap();
        }
    }
    let elsewhere = Partition { entity_type: other.clone(), shard: ShardId(7) };
    store.append(&elsewhere, &[event(1, "o", 1, "k1"), event(2, "o", 2, "k2")]).await.unwrap();
    let mut heads = store.heads(&types).await.unwrap();
    heads.sort();
    assert_eq!(heads, [(partition(0), 1), (partition(7), 8), (partition(63), 64), (elsewhere.clone(), 2)]);
    assert_eq!(store.heads(&[other]).await.unwrap(), [(elsewhere, 2)]);
}

/// Bounds are exclusive, 0 is none, and every page size gives the same events.
pub async fn partitions_are_read_in_order_from_any_place(url: &str) {
    let store = store(url).await;
    let events: Vec<Event> = (0..120).map(|row| event(row + 1, &format!("e{}", row % 7), row / 7 + 1, &format!("k{row}"))).collect();
    store.append(&partition(7), &events).await.unwrap();
    store.append(&partition(8), &[event(1, "other", 1, "k")]).await.unwrap();
    let backwards: Vec<Event> = events.iter().rev().cloned().collect();
    for limit in [1, 7, 8, 9, 1000] {
        assert_eq!(all(&*store, &partition(7), Order::Ascending, limit, 1 << 20).await, events, "{limit}");
        assert_eq!(all(&*store, &partition(7), Order::Descending, limit, 1 << 20).await, backwards, "{limit}");
    }
    assert_eq!(store.read(&partition(7), Order::Ascending, 120, 10, 1 << 20).await.unwrap(), []);
    assert_eq!(store.read(&partition(7), Order::Descending, 1, 10, 1 << 20).await.unwrap(), []);
    assert_eq!(store.read(&partition(9), Order::Ascending, 0, 10, 1 << 20).await.unwrap(), []);
}

/// A page ends with the event that reaches the limit, and holds one where there is one.
pub async fn pages_are_bounded_in_bytes(url: &str) {
    let store = store(url).await;
    let state = Some(Json::canonical(format!("\"{}\"", "x".repeat(10_000)).as_bytes()).unwrap());
    let events: Vec<Event> = (1..=30).map(|number| Event { state: state.clone(), ..event(number, "a", number, &format!("k{number}")) }).collect();
    for events in events.chunks(10) {
        store.append(&partition(7), events).await.unwrap();
    }
    for (bytes_max, expected) in [(1, 1), (10_000, 1), (30_000, 3), (150_000, 15), (1 << 20, 30)] {
        let page = store.read(&partition(7), Order::Ascending, 0, 1000, bytes_max).await.unwrap();
        assert_eq!(page.len(), expected, "{bytes_max}");
    }
    assert_eq!(all(&*store, &partition(7), Order::Ascending, 1000, 25_000).await, events);
}

/// Rows of one append hold changes, those of several entities between one another: a page may start anywhere among them.
pub async fn pages_that_start_between_changes_hold_whole_states(url: &str) {
    let store = store(url).await;
    let (mut events, mut whole) = (Vec::new(), Vec::new());
    for row in 0..24_u64 {
        let (name, version) = (["a", "b"][(row % 2) as usize], row / 2 + 1);
        let told = event(row + 1, name, version, &format!("k{version}"));
        whole.push(told.clone());
        let is_whole = version == 1 || version == 12;
        let patch = Json::trusted(format!(r#"[{{"op":"replace","path":"/version","value":{version}}}]"#));
        events.push(if is_whole { told } else { Event { state: None, patch: Some(StatePatch { base: 1, patch }), ..told } });
    }
    store.append(&partition(7), &events).await.unwrap();
    for after in 0..24 {
        for limit in [1, 2, 5, 100] {
            let page = store.read(&partition(7), Order::Ascending, after, limit, 1 << 20).await.unwrap();
            let page: Vec<Event> = page.into_iter().map(|stored| stored.event).collect();
            let from = after as usize;
            assert_eq!(page, whole[from..(from + limit).min(24)], "after {after}, {limit}");
        }
    }
    let backwards: Vec<Event> = whole.iter().rev().cloned().collect();
    assert_eq!(all(&*store, &partition(7), Order::Descending, 3, 1 << 20).await, backwards);
}

/// The highest version that is not above the event id.
pub async fn versions_are_found_by_event_id(url: &str) {
    let store = store(url).await;
    let events = [event(1, "a", 1, "k1"), event(2, "b", 1, "k1"), event(3, "a", 2, "k2"), event(4, "b", 2, "k2"), event(5, "a", 3, "k3")];
    store.append(&partition(7), &events).await.unwrap();
    for (name, event_id, expected) in
        [("a", 0, 0), ("a", 1, 1), ("a", 2, 1), ("a", 3, 2), ("a", 4, 2), ("a", u64::MAX >> 1, 3), ("b", 1, 0), ("b", 3, 1), ("c", 9, 0)]
    {
        assert_eq!(store.version_at(&account(), &id(name), event_id).await.unwrap(), expected, "{name} {event_id}");
    }
}
