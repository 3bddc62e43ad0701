//! Rows that tell their state as a change are read back whole.

use super::{account, event, id, partition, store};
use crate::core::patch::Draft;
use crate::core::{Event, EventOutcome, Json, StatePatch};
use crate::store::{Content, Order, Store};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
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
