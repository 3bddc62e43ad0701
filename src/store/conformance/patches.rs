//! Rows that tell their state as a change are read back whole.

use super::{account, event, id, partition, store};
use crate::core::patch::Draft;
use crate::core::{Event, EventOutcome, Json, StatePatch};
use crate::store::{Content, Order, Store, StoreError};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Changes of a document with the members `list`, `n` and whatever was added; odd keys and values among them.
fn change(rng: &mut StdRng, step: u64) -> String {
    let value =
        ["1.5", "-0.25", "9007199254740993", "18446744073709551615", "1e300", "\"it's \\\\ \\u0000 \u{1f363}\"", "{\"b\":[],\"a\":null}", "[1,[2]]", "true"];
    let value = value[rng.random_range(0..value.len())];
    match rng.random_range(0..6) {
        0 => "[]".into(),
        1 => format!(r#"[{{"op":"add","path":"/list/-","value":{value}}}]"#),
        2 => format!(r#"[{{"op":"add","path":"/~0~1 \u00fc{}","value":{value}}}]"#, step % 5),
        3 => format!(r#"[{{"op":"replace","path":"/n","value":{value}}},{{"op":"add","path":"/list/0","value":{step}}}]"#),
        4 => format!(r#"[{{"op":"remove","path":"/n"}},{{"op":"add","path":"/n","value":{value}}}]"#),
        _ => format!(r#"[{{"op":"add","path":"/Z{}","value":{{"deep":{{"er":{value}}}}}}}]"#, step % 7),
    }
}

/// Several entities, each with whole rows and patches in turn, over many appends: every way of reading gives whole states, byte for byte.
pub async fn states_told_as_changes_are_read_whole(url: &str) {
    let store = store(url).await;
    let mut rng = StdRng::seed_from_u64(7);
    let names = ["a", "b", "c"];
    let mut told: BTreeMap<&str, Vec<Event>> = BTreeMap::new();
    let (mut event_id, mut patches) = (0, 0);
    for _ in 0..25 {
        let mut events = Vec::new();
        let rows = rng.random_range(3..12);
        let mut bases: BTreeMap<&str, u64> = names.iter().map(|name| (*name, told.get(name).map_or(0, |rows| rows.len() as u64))).collect();
        for row in 0..rows {
            event_id += 1;
            // The last three rows are whole, one for each entity: the newest of every entity always is.
            let name = if row + 3 >= rows { names[row + 3 - rows] } else { names[rng.random_range(0..names.len())] };
            let before = told.entry(name).or_default();
            let version = before.len() as u64 + 1;
            let mut event = event(event_id, name, version, &format!("k{version}"));
            let text = match before.last() {
                None => Json::canonical(br#"{"list":[],"n":0}"#).unwrap(),
                Some(last) => {
                    let patch = Json::canonical(change(&mut rng, event_id).as_bytes()).unwrap();
                    let mut draft = Draft::new(last.state.as_ref().unwrap()).unwrap();
                    draft.apply(&patch).unwrap();
                    if row + 3 < rows && rng.random_range(0..5) > 0 && bases[name] > 0 {
                        event.patch = Some(StatePatch { base: bases[name], patch: patch.clone() });
                    }
                    if patch.as_str() == "[]" {
                        event.outcome = EventOutcome::Rejected;
                    }
                    draft.text().unwrap()
                }
            };
            if event.patch.is_none() {
                bases.insert(name, version);
            }
            before.push(Event { state: Some(text.clone()), patch: None, ..event.clone() });
            event.state = event.patch.is_none().then_some(text);
            events.push(event);
        }
        patches += events.iter().filter(|event| event.patch.is_some()).count();
        store.append(&partition(7), &events).await.unwrap();
    }
    assert!(patches > 30, "{patches}");
    for (name, rows) in &told {
        check(store.as_ref(), name, rows).await;
    }
}

async fn check(store: &dyn Store, name: &str, rows: &[Event]) {
    let newest = store.newest(&account(), &[id(name)]).await.unwrap().remove(0).unwrap();
    assert_eq!(newest.event, *rows.last().unwrap());
    for row in rows {
        let stored = store.at_version(&account(), &id(name), row.version).await.unwrap().unwrap();
        assert_eq!(stored.event, *row);
        let at = store.at_time(&account(), &id(name), stored.committed_at).await.unwrap().unwrap();
        assert_eq!(at.event, rows[at.event.version as usize - 1]);
    }
    for limit in [1, 2, 7, 1000] {
        for order in [Order::Ascending, Order::Descending] {
            let mut read = Vec::new();
            let mut bound = 0;
            loop {
                let page = store.history(&account(), &id(name), order, bound, limit, Content::Whole).await.unwrap();
                let Some(last) = page.last() else { break };
                bound = last.event.version;
                read.extend(page.into_iter().map(|stored| stored.event));
                if order == Order::Descending && bound == 1 {
                    break;
                }
            }
            read.sort_by_key(|event| event.version);
            assert_eq!(read, rows, "{order:?} {limit}");
        }
    }
    let bare = store.history(&account(), &id(name), Order::Ascending, 0, 1000, Content::WithoutState).await.unwrap();
    assert!(bare.iter().zip(rows).all(|(stored, row)| stored.event == Event { state: None, ..row.clone() }));
    assert_eq!(store.list(&account(), None, 10).await.unwrap().len(), 3);
}

/// An event with the version's state told as a change.
fn changed(event_id: u64, name: &str, version: u64, base: u64, patch: &str) -> Event {
    Event { state: None, patch: Some(StatePatch { base, patch: Json::trusted(patch.to_owned()) }), ..event(event_id, name, version, &format!("k{version}")) }
}

/// No append leaves one, but what is there is there: it must neither be told as the state nor hide the entity.
pub async fn a_newest_row_with_a_change_is_read_whole(url: &str) {
    let store = store(url).await;
    let replace = |version| format!(r#"[{{"op":"replace","path":"/version","value":{version}}}]"#);
    let rows = [event(1, "a", 1, "k1"), changed(2, "a", 2, 1, &replace(2)), changed(3, "a", 3, 1, &replace(3)), event(4, "b", 1, "k1")];
    store.append(&partition(7), &rows).await.unwrap();
    let newest = store.newest(&account(), &[id("b"), id("a"), id("c")]).await.unwrap();
    let newest: Vec<Option<Event>> = newest.into_iter().map(|stored| stored.map(|stored| stored.event)).collect();
    assert_eq!(newest, [Some(event(4, "b", 1, "k1")), Some(event(3, "a", 3, "k3")), None]);
    let listed = store.list(&account(), None, 10).await.unwrap();
    assert_eq!(listed.iter().map(|listed| (listed.entity_id.as_str(), listed.version)).collect::<Vec<_>>(), [("a", 3), ("b", 1)]);
}

const KEYS: [&str; 9] = ["", "a", "B", "~/", "~1", "/", "\"\\\n", "\u{fc}\u{2028}", "\u{1f363}"];

fn leaf(rng: &mut StdRng) -> Value {
    match rng.random_range(0..7) {
        0 => Value::Null,
        1 => json!(rng.random::<bool>()),
        2 => json!(rng.random::<i64>()),
        3 => json!(rng.random::<u64>()),
        4 => json!(f64::from_bits(rng.random::<u64>())),
        5 => json!(rng.random_range(-1e6..1e6)),
        _ => json!(format!("{}'\u{0}\u{1f}", KEYS[rng.random_range(0..KEYS.len())])),
    }
}

fn document(rng: &mut StdRng, depth: usize) -> Value {
    match rng.random_range(0..4) {
        0 | 1 if depth > 0 => {
            let members = (0..rng.random_range(0..6)).map(|_| (KEYS[rng.random_range(0..KEYS.len())].to_owned(), document(rng, depth - 1)));
            Value::Object(members.collect::<Map<_, _>>())
        }
        2 if depth > 0 => (0..rng.random_range(0..5)).map(|_| document(rng, depth - 1)).collect(),
        _ => leaf(rng),
    }
}

/// Changes a document in one place or a few.
fn mutate(rng: &mut StdRng, value: &mut Value, depth: usize) {
    match value {
        Value::Object(members) if rng.random_range(0..5) > 0 => {
            let key = KEYS[rng.random_range(0..KEYS.len())];
            match members.get_mut(key) {
                Some(_) if rng.random_range(0..3) == 0 => drop(members.remove(key)),
                Some(member) => mutate(rng, member, depth.saturating_sub(1)),
                None => drop(members.insert(key.to_owned(), document(rng, depth.saturating_sub(1)))),
            }
        }
        Value::Array(elements) if rng.random_range(0..5) > 0 => match elements.len() {
            0 => elements.push(leaf(rng)),
            length if rng.random::<bool>() => elements.truncate(length - 1),
            length => {
                let at = rng.random_range(0..length);
                mutate(rng, &mut elements[at], depth.saturating_sub(1));
            }
        },
        value => *value = document(rng, depth),
    }
}

/// What turns one document into the other; knows nothing of how patches are applied.
fn difference(path: &str, from: &Value, to: &Value, operations: &mut Vec<Value>) {
    match (from, to) {
        (Value::Object(from), Value::Object(to)) => {
            let at = |key: &str| format!("{path}/{}", key.replace('~', "~0").replace('/', "~1"));
            operations.extend(from.keys().filter(|key| !to.contains_key(*key)).map(|key| json!({"op": "remove", "path": at(key)})));
            for (key, value) in to {
                match from.get(key) {
                    Some(before) => difference(&at(key), before, value, operations),
                    None => operations.push(json!({"op": "add", "path": at(key), "value": value})),
                }
            }
        }
        (Value::Array(from), Value::Array(to)) => {
            for (at, (before, value)) in from.iter().zip(to).enumerate() {
                difference(&format!("{path}/{at}"), before, value, operations);
            }
            operations.extend((to.len()..from.len()).rev().map(|at| json!({"op": "remove", "path": format!("{path}/{at}")})));
            operations.extend(to.iter().skip(from.len()).map(|value| json!({"op": "add", "path": format!("{path}/-"), "value": value})));
        }
        (from, to) if from == to => {}
        (_, to) => operations.push(json!({"op": "replace", "path": path, "value": to})),
    }
}

/// What is read is what the documents themselves are written as, whether or not their rows held them whole; also where the model shares nothing
/// with the code that applies patches.
pub async fn random_documents_are_read_back_byte_for_byte(url: &str) {
    let store = store(url).await;
    for seed in 0..6 {
        let mut rng = StdRng::seed_from_u64(seed);
        let name = format!("e{seed}");
        let first_id = store.head(&partition(7)).await.unwrap() + 1;
        let mut now = json!({"a": document(&mut rng, 3), "~/": []});
        let (mut rows, mut told, mut base) = (Vec::new(), Vec::new(), 0);
        for version in 1..=30 {
            let before = now.clone();
            if version > 1 && rng.random_range(0..5) > 0 {
                mutate(&mut rng, &mut now, 3);
            }
            let whole = Event { state: Some(Json::from_serialize(&now).unwrap()), ..event(first_id + version - 1, &name, version, &format!("k{version}")) };
            let mut operations = Vec::new();
            difference("", &before, &now, &mut operations);
            let patch = Json::from_serialize(&operations).unwrap();
            if version % 11 == 1 || version == 30 {
                base = version;
                rows.push(whole.clone());
            } else {
                rows.push(changed(whole.event_id, &name, version, base, patch.as_str()));
            }
            told.push(whole);
        }
        store.append(&partition(7), &rows).await.unwrap();
        for limit in [4, 100] {
            let mut bound = 0;
            while bound < 30 {
                let page = store.history(&account(), &id(&name), Order::Ascending, bound, limit, Content::Whole).await.unwrap();
                for stored in &page {
                    assert_eq!(stored.event, told[stored.event.version as usize - 1], "seed {seed}");
                }
                assert_eq!(page.len(), limit.min(30 - bound as usize), "seed {seed}");
                bound = page.last().unwrap().event.version;
            }
        }
        for event in &told {
            let stored = store.at_version(&account(), &id(&name), event.version).await.unwrap().unwrap();
            assert_eq!(stored.event, *event, "seed {seed}");
        }
    }
}

/// A row that somebody deleted is not skipped: what the ones above it change is something else.
pub async fn a_row_that_is_gone_is_missed(url: &str) {
    let store = store(url).await;
    let fits = r#"[{"op":"add","path":"/x","value":1}]"#;
    // Version 2 is gone from `a`; version 3 is gone from `b`, where the page itself holds the hole.
    let of_a = [event(1, "a", 1, "k1"), changed(2, "a", 3, 1, fits), event(3, "a", 4, "k4")];
    let of_b = [event(4, "b", 1, "k1"), changed(5, "b", 2, 1, fits), changed(6, "b", 4, 1, fits), event(7, "b", 5, "k5")];
    store.append(&partition(7), &[of_a.to_vec(), of_b.to_vec()].concat()).await.unwrap();
    for (name, version) in [("a", 3), ("b", 4)] {
        let told = format!("the state of {name} at version {version}:");
        let read = [
            store.at_version(&account(), &id(name), version).await.map(|_| ()),
            store.history(&account(), &id(name), Order::Ascending, 0, 9, Content::Whole).await.map(|_| ()),
            store.history(&account(), &id(name), Order::Descending, 0, 2, Content::Whole).await.map(|_| ()),
        ];
        for outcome in read {
            assert!(matches!(&outcome, Err(StoreError::Corrupt(reason)) if reason.contains(&told)), "{outcome:?}");
        }
    }
    assert_eq!(store.at_version(&account(), &id("b"), 2).await.unwrap().unwrap().event.state.unwrap().as_str(), r#"{"version":1,"x":1}"#);
}

/// A state that cannot be put together is an error that names entity and version, never a guess; what does not rest on it is read as ever.
pub async fn changes_that_do_not_fit_are_told_as_corrupt(url: &str) {
    let store = store(url).await;
    let fits = r#"[{"op":"add","path":"/x","value":1}]"#;
    // Versions 1 and 4 are whole, 2 and 3 changes. The version that the error names comes last.
    let cases = [
        ("misfit", (1, fits), (1, r#"[{"op":"remove","path":"/y"}]"#), 3),
        ("misfit-below", (1, r#"[{"op":"remove","path":"/y"}]"#), (1, fits), 2),
        ("no-patch", (1, fits), (1, r#"{"version":3}"#), 3),
        ("base-is-a-change", (1, fits), (2, fits), 2),
        ("base-is-itself", (1, fits), (3, fits), 3),
        ("base-is-above", (1, fits), (4, fits), 3),
        ("base-is-nowhere", (1, fits), (0, fits), 0),
    ];
    for (at, (name, second, third, named)) in (0..).zip(cases) {
        let ids = at * 4;
        let rows = [
            event(ids + 1, name, 1, "k1"),
            changed(ids + 2, name, 2, second.0, second.1),
            changed(ids + 3, name, 3, third.0, third.1),
            event(ids + 4, name, 4, "k4"),
        ];
        store.append(&partition(7), &rows).await.unwrap();
        let entity = id(name);
        let outcome = store.at_version(&account(), &entity, 3).await;
        if named == 0 {
            // All rows from the first one on are there: it is put together although the base is wrong.
            assert_eq!(outcome.unwrap().unwrap().event.state.unwrap().as_str(), r#"{"version":1,"x":1}"#);
            continue;
        }
        let told = format!("the state of {name} at version {named}:");
        assert!(matches!(&outcome, Err(StoreError::Corrupt(reason)) if reason.contains(&told)), "{name}: {outcome:?}");
        let page = store.history(&account(), &entity, Order::Descending, 4, 1, Content::Whole).await;
        assert!(matches!(&page, Err(StoreError::Corrupt(reason)) if reason.contains(&told)), "{name}: {page:?}");
        assert_eq!(store.history(&account(), &entity, Order::Ascending, 0, 9, Content::WithoutState).await.unwrap().len(), 4);
        assert_eq!(store.at_version(&account(), &entity, 1).await.unwrap().unwrap().event, rows[0]);
        assert_eq!(store.newest(&account(), &[entity]).await.unwrap()[0].as_ref().unwrap().event, rows[3]);
    }
}
