//! What is written is read back, whole or not at all.

use super::{account, append_at_head, event, id, options, partition, store};
use crate::core::{EntityType, EventOutcome, Json, Partition, ShardId};
use crate::store::{AppendError, open};
use futures_util::FutureExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}

/// All fields, with and without a request and a state; the time of commit is the database's, in UTC whatever its zone.
pub async fn every_field_is_read_back(url: &str) {
    let store = store(url).await;
    let before = now();
    let accepted = event(1, "a", 1, "k1");
    let mut rejected = event(2, "b", 1, "!~k2'\"\\`;--");
    rejected.outcome = EventOutcome::Rejected;
    rejected.request = Json::null();
    rejected.state = None;
    rejected.handled_at = -1;
    let events = [accepted, rejected];
    store.append(&partition(7), &events).await.unwrap();
    let after = now();
    let read = store.newest(&account(), &[id("a"), id("b")]).await.unwrap();
    for (stored, event) in read.into_iter().zip(events) {
        let stored = stored.unwrap();
        assert_eq!(stored.event, event);
        let slack = 2_000_000;
        assert!((before - slack..=after + slack).contains(&stored.committed_at), "{} outside {before}..{after}", stored.committed_at);
    }
}

/// Texts that trip up literals, character sets and JSON readers.
pub async fn odd_texts_are_read_back(url: &str) {
    let store = store(url).await;
    let deep = "[".repeat(100) + &"]".repeat(100);
    let texts = [
        r#""\u0000""#,
        r#"{"\u0000":"\u001a\u001a"}"#,
        "\"\u{1f363}\u{1f37a}\u{10ffff}\u{feff}\u{2028}\u{7f}\u{80}\"",
        r#""it's \\ \\\\ \\' '' \" ` ? % _ ; -- /* # $1 :a @b {} \\N \\0""#,
        r#""\n\r\t\b\f""#,
        r#"{"":{"":[]},"e\u0301":1,"\u00e9":2,"ss":3,"ß":4}"#,
        "9007199254740993",
        "18446744073709551615",
        "-9223372036854775808",
        "1.5777777777770001",
        "1e308",
        "5e-324",
        "\"trailing spaces   \"",
        "\"\"",
        "true",
        "[null]",
        &deep,
    ];
    let mut events = Vec::new();
    for (number, text) in (1..).zip(texts) {
        let json = Json::canonical(text.as_bytes()).unwrap();
        let mut event = event(number, &format!("e{number}"), 1, "k");
        (event.request, event.response, event.state) = (json.clone(), json.clone(), Some(json));
        events.push(event);
    }
    store.append(&partition(7), &events).await.unwrap();
    for event in events {
        let stored = store.at_version(&account(), &event.entity_id, 1).await.unwrap();
        assert_eq!(stored.unwrap().event, event);
    }
}

/// A state of a megabyte, all of it characters that have to be escaped.
pub async fn large_states_are_read_back(url: &str) {
    let store = store(url).await;
    let mut event = event(1, "a", 1, "k");
    event.state = Some(Json::trusted(format!("\"{}\"", "'\\\\".repeat(350_000))));
    store.append(&partition(7), std::slice::from_ref(&event)).await.unwrap();
    assert_eq!(store.newest(&account(), &[id("a")]).await.unwrap().pop().unwrap().unwrap().event, event);
}

/// `append_bytes_max` is what surely goes; far more is refused before anything is sent.
pub async fn more_than_one_statement_may_hold_is_refused(url: &str) {
    let store = store(url).await;
    let max = store.append_bytes_max();
    assert!(max >= 1 << 20, "{max}");
    let filled = |bytes: usize| {
        let mut events: Vec<_> = (1..=8).map(|number| event(number, &format!("e{number}"), 1, "k")).collect();
        for event in &mut events {
            let rest = bytes / 8 - (event.weight() - event.response.len()) - 2;
            event.response = Json::trusted(format!("\"{}\"", "x".repeat(rest)));
        }
        events
    };
    let over = filled(max * 2 + 4096);
    assert!(matches!(store.append(&partition(7), &over).await, Err(AppendError::TooLarge)));
    assert_eq!(store.head(&partition(7)).await.unwrap(), 0);
    let full = filled(max);
    assert!(full.iter().map(crate::core::Event::weight).sum::<usize>() > max - 64);
    store.append(&partition(7), &full).await.unwrap();
    assert_eq!(store.head(&partition(7)).await.unwrap(), 8);
}

/// Event ids count up in each shard of each entity type alone.
pub async fn partitions_have_heads_of_their_own(url: &str) {
    let store = store(url).await;
    let transfer = EntityType::new("transfer").unwrap();
    store.create_type(&transfer).await.unwrap();
    let other = Partition { entity_type: transfer, shard: ShardId(7) };
    assert_eq!(store.head(&partition(7)).await.unwrap(), 0);
    store.append(&partition(7), &[event(1, "a", 1, "k"), event(2, "a", 2, "l"), event(3, "b", 1, "k")]).await.unwrap();
    store.append(&partition(8), &[event(1, "c", 1, "k")]).await.unwrap();
    store.append(&other, &[event(1, "a", 1, "k"), event(2, "b", 1, "k")]).await.unwrap();
    let partitions = [partition(7), partition(8), partition(9), other];
    let heads = partitions.iter().map(|partition| store.head(partition));
    assert_eq!(futures_util::future::try_join_all(heads).await.unwrap(), [3, 1, 0, 2]);
}

/// Every name that the rules allow names a table, words of SQL included.
pub async fn reserved_words_are_fine_as_names(url: &str) {
    let store = store(url).await;
    let longest = "a".repeat(48);
    for name in ["order", "group", "select", "table", "index", "key", "values", "a", "sqlite_master", "sqlite_x", "mysql", &longest] {
        let entity_type = EntityType::new(name).unwrap();
        for _ in 0..2 {
            store.create_type(&entity_type).await.unwrap();
        }
        let partition = Partition { entity_type: entity_type.clone(), shard: ShardId(0) };
        store.append(&partition, &[event(1, "a", 1, "k")]).await.unwrap();
        assert_eq!(store.head(&partition).await.unwrap(), 1, "{name}");
        assert_eq!(store.list(&entity_type, None, 10).await.unwrap().len(), 1, "{name}");
    }
}

/// On one connection, two hundred appends are dropped at any point; each is there whole or not at all, and the store works on.
pub async fn dropped_appends_leave_nothing_in_the_way(url: &str) {
    let writer = open(&crate::store::Options { pool: 1, ..options(url) }).await.unwrap();
    writer.create_type(&account()).await.unwrap();
    for round in 0..200_u64 {
        let events = [event(round * 2 + 1, &format!("e{round}"), 1, "k"), event(round * 2 + 2, &format!("e{round}"), 2, "l")];
        let partition = partition(7);
        let mut append = writer.append(&partition, &events);
        match round % 4 {
            0 => drop((&mut append).now_or_never()),
            1 => drop(tokio::time::timeout(Duration::from_micros(round * 20), &mut append).await),
            2 => drop(tokio::time::timeout(Duration::from_millis(1), &mut append).await),
            _ => {}
        }
    }
    let mut last = event(0, "last", 1, "k");
    last.event_id = append_at_head(writer.as_ref(), &partition(9), vec![last.clone()]).await;
    let reader = open(&options(url)).await.unwrap();
    assert_eq!(reader.newest(&account(), &[id("last")]).await.unwrap().pop().unwrap().unwrap().event, last);
    for round in 0..200 {
        let versions =
            reader.history(&account(), &id(&format!("e{round}")), crate::store::Order::Ascending, 0, 10, crate::store::Content::Whole).await.unwrap().len();
        assert!(versions == 0 || versions == 2, "append {round} is there by half");
    }
}

/// Two stores on one database see each other's events at once.
pub async fn what_was_appended_is_seen_by_others(url: &str) {
    let (one, other) = (store(url).await, store(url).await);
    for version in 1..=20 {
        let (writer, reader) = if version % 2 == 0 { (&one, &other) } else { (&other, &one) };
        writer.append(&partition(7), &[event(version, "a", version, &format!("k{version}"))]).await.unwrap();
        assert_eq!(reader.newest(&account(), &[id("a")]).await.unwrap().pop().unwrap().unwrap().event.version, version);
        assert_eq!(reader.head(&partition(7)).await.unwrap(), version);
    }
}
