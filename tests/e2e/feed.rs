//! The feed from outside: pages, long polls, streams, and what it costs.

use super::follow::{Chain, Stream};
use crate::support::place::{Place, on_each_engine};
use crate::support::quokka::{Server, client, get, post, send};
use serde_json::Value;
use std::time::Duration;

async fn deposit(base: &str, entity: &str, command_id: &str, amount: i64) -> Value {
    let reply = post(&client(), base, &format!("account/{entity}/deposit"), command_id, &format!("{{\"amount\":{amount}}}")).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

async fn page(base: &str, query: &str) -> Value {
    let reply = get(&client(), base, &format!("/v1/feed?{query}")).await.unwrap();
    assert_eq!(reply.status, 200, "{query}: {}", reply.body);
    reply.json()
}

async fn told(base: &str, query: &str) -> (String, String) {
    let reply = get(&client(), base, &format!("/v1/feed?{query}")).await.unwrap();
    (reply.told(), reply.json()["detail"].as_str().unwrap_or_default().to_owned())
}

fn events(page: &Value) -> Vec<String> {
    let events = page["events"].as_array().unwrap();
    events.iter().map(|event| format!("{}/{}", event["entity_id"].as_str().unwrap(), event["version"])).collect()
}

fn token(page: &Value) -> String {
    page["next_batch"].as_str().unwrap().to_owned()
}

/// An event has all that the contract says, and a rejected one only where it is asked for.
async fn events_are_whole(place: Place) {
    let server = place.setup().start();
    let base = &server.base;
    deposit(base, "alice", "d-1", 5).await;
    let refused = post(&client(), base, "account/alice/charge", "c-1", r#"{"amount":50}"#).await.unwrap();
    assert_eq!(refused.status, 422);
    let all = page(base, "types=account&rejected=true").await;
    assert_eq!(events(&all), ["alice/1", "alice/2"]);
    let history = get(&client(), base, "/v1/entities/account/alice/events?include=state").await.unwrap().json();
    for (event, told) in all["events"].as_array().unwrap().iter().zip(history["events"].as_array().unwrap()) {
        let mut event = event.as_object().unwrap().clone();
        assert_eq!((event.remove("entity_type"), event.remove("entity_id")), (Some("account".into()), Some("alice".into())));
        assert!(event.remove("shard").unwrap().is_u64());
        assert_eq!(Value::Object(event), *told);
    }
    let accepted = page(base, "types=account").await;
    assert_eq!(events(&accepted), ["alice/1"]);
    assert_eq!(events(&page(base, &format!("types=account&since={}&rejected=true", token(&accepted))).await), [] as [&str; 0]);
    assert_eq!(events(&page(base, "").await), ["alice/1"], "all types where none is named");
    assert_eq!(server.stop().code(), Some(0));
}

on_each_engine!(events_in_the_feed_are_those_of_the_history, events_are_whole);

/// Every page size gives every event once, in the order of its entity; and backwards the same.
async fn pages_hold_everything_once(place: Place) {
    let server = place.setup().start();
    let base = &server.base;
    for number in 0..60 {
        deposit(base, &format!("e{}", number % 9), &format!("d-{number}"), 1).await;
    }
    let mut all = Vec::new();
    for limit in [1, 7, 1000] {
        let mut chain = Chain::new(base, &format!("types=account&limit={limit}"));
        while chain.step().await > 0 {}
        assert_eq!(chain.seen.len(), 60, "limit {limit}");
        all = chain.seen.keys().cloned().collect();
    }
    for limit in [1, 7, 1000] {
        let (mut seen, mut since) = (Vec::new(), String::new());
        loop {
            let page = page(base, &format!("types=account&order=desc&limit={limit}{since}")).await;
            assert!(page["events"].as_array().unwrap().len() <= limit);
            seen.extend(page["events"].as_array().unwrap().iter().map(|event| (event["shard"].as_u64().unwrap(), event["event_id"].as_u64().unwrap())));
            let times: Vec<&str> = page["events"].as_array().unwrap().iter().map(|event| event["committed_at"].as_str().unwrap()).collect();
            assert!(times.is_sorted_by(|newer, older| newer >= older), "{times:?}");
            let Some(next) = page["next_batch"].as_str() else { break };
            since = format!("&since={next}");
        }
        seen.sort();
        let expected: Vec<(u64, u64)> = all.iter().map(|(_, shard, event_id)| (*shard, *event_id)).collect();
        assert_eq!(seen, expected, "backwards, limit {limit}");
    }
    let newest = page(base, "entity=account/e0&order=desc&limit=2").await;
    assert_eq!(events(&newest), ["e0/7", "e0/6"]);
    let older = page(base, &format!("entity=account/e0&order=desc&limit=2&since={}", token(&newest))).await;
    assert_eq!(events(&older), ["e0/5", "e0/4"]);
    let on = page(base, &format!("entity=account/e0&since={}", newest["start"].as_str().unwrap())).await;
    assert_eq!(events(&on), [] as [&str; 0]);
    deposit(base, "e0", "more", 1).await;
    assert_eq!(events(&page(base, &format!("entity=account/e0&since={}", token(&on))).await), ["e0/8"]);
}

on_each_engine!(dense_log_pages_of_every_size_hold_every_event_once, pages_hold_everything_once);

/// What tokens are good for, and what is said of those that are not.
async fn tokens_are_told_apart(place: Place) {
    let server = place.setup().start();
    let base = &server.base;
    let answer = deposit(base, "alice", "d-1", 5).await;
    let answer = answer["token"].as_str().unwrap();
    deposit(base, "alice", "d-2", 5).await;
    deposit(base, "bob", "d-1", 5).await;
    assert_eq!(events(&page(base, &format!("entity=account/alice&since={answer}")).await), ["alice/2"]);
    let now = page(base, "types=account&since=now").await;
    assert_eq!(events(&now), [] as [&str; 0]);
    assert!(token(&now).len() < 400);
    let entity = page(base, "entity=account/alice").await;
    assert_eq!(events(&entity), ["alice/1", "alice/2"]);
    // A type that is new to the token starts at its oldest event, and one that is left out for a while keeps its place.
    post(&client(), base, "red_packet/p1/create", "c-1", r#"{"amount":100,"count":2}"#).await.unwrap();
    let both = page(base, &format!("types=account,red_packet&since={}", token(&now))).await;
    let only = page(base, &format!("types=red_packet&since={}", token(&both))).await;
    assert_eq!(events(&page(base, &format!("types=account,red_packet&since={}", token(&only))).await), [] as [&str; 0]);
    let (now, entity) = (token(&now), token(&entity));
    let forged = format!("{}{}", &now[..now.len() - 1], if now.ends_with('A') { "Q" } else { "A" });
    for (query, code, detail) in [
        (format!("types=account&since={answer}"), "400 invalid-token", "entity=type/id"),
        (format!("types=account&since={entity}"), "400 invalid-token", "entity=type/id"),
        (format!("entity=account/bob&since={entity}"), "400 invalid-token", "another entity"),
        (format!("types=account&since={forged}"), "400 invalid-token", "not made by this database"),
        ("types=account&since=5".into(), "400 invalid-token", "not made by this database"),
        ("types=account&limit=1001".into(), "400 invalid-query", ""),
        ("types=account&timeout=6m".into(), "400 invalid-query", "5m"),
        ("types=account&entity=account/alice".into(), "400 invalid-query", ""),
        ("entity=alice".into(), "400 invalid-query", "type/id"),
        ("types=account&rejected=yes".into(), "400 invalid-query", ""),
        ("types=nothing".into(), "404 unknown-entity-type", ""),
    ] {
        let told = told(base, &query).await;
        assert!(told.0 == code && told.1.contains(detail), "{query}: {told:?}");
    }
}

on_each_engine!(tokens_of_the_feed_are_told_apart, tokens_are_told_apart);

/// A long poll ends with the commit, of this node or of another one, and not before; without one at its timeout.
async fn long_polls_wake_on_commits(place: Place) {
    let servers = [place.setup().start(), place.setup().start()];
    deposit(&servers[0].base, "alice", "d-0", 1).await;
    let mut since = token(&page(&servers[0].base, "types=account").await);
    for (number, writer) in [0, 1, 0, 1].into_iter().enumerate() {
        let (query, command_id) = (format!("types=account&timeout=4m&since={since}"), format!("d-{}", number + 1));
        let (waiting, _) = tokio::join!(page(&servers[0].base, &query), deposit(&servers[writer].base, "alice", &command_id, 1));
        assert_eq!(events(&waiting), [format!("alice/{}", number + 2)]);
        since = token(&waiting);
    }
    let nothing = page(&servers[0].base, &format!("types=account&timeout=300ms&since={since}")).await;
    assert_eq!((events(&nothing), token(&nothing)), (vec![], since.clone()));
    // The node stops: whoever waits is answered, and can go on at another one.
    let [first, second] = servers;
    let base = first.base.clone();
    let query = format!("types=account&timeout=4m&since={since}");
    let waiting = tokio::spawn(async move { page(&base, &query).await });
    followers(&first, 1.0).await;
    assert_eq!(first.stop().code(), Some(0));
    assert_eq!(token(&waiting.await.unwrap()), since);
    deposit(&second.base, "alice", "last", 1).await;
    assert_eq!(events(&page(&second.base, &format!("types=account&since={since}")).await), ["alice/6"]);
}

on_each_engine!(long_polls_wake_on_commits_of_any_node, long_polls_wake_on_commits);

async fn metric(server: &Server, name: &str) -> f64 {
    let text = get(&client(), &server.base, "/metrics").await.unwrap().body;
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap_or(0.0)
}

async fn followers(server: &Server, count: f64) {
    let give_up = std::time::Instant::now() + Duration::from_secs(60);
    while metric(server, "quokka_feed_followers").await != count {
        assert!(std::time::Instant::now() < give_up, "never {count} followers");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A filter that leaves everything out still moves the token, and what comes after it is found (no event is skipped or doubled).
async fn filtered_events_move_the_token(place: Place) {
    let server = place.setup().start();
    let base = &server.base;
    deposit(base, "alice", "d-1", 1).await;
    let start = token(&page(base, "types=account").await);
    for number in 0..3 {
        post(&client(), base, "account/alice/charge", &format!("c-{number}"), r#"{"amount":50}"#).await.unwrap();
    }
    let moved = page(base, &format!("types=account&since={start}&timeout=50ms")).await;
    assert_eq!(events(&moved), [] as [&str; 0]);
    assert_ne!(token(&moved), start);
    deposit(base, "alice", "d-2", 1).await;
    assert_eq!(events(&page(base, &format!("types=account&since={}", token(&moved))).await), ["alice/5"]);
    assert_eq!(events(&page(base, &format!("types=account&since={start}&rejected=true")).await), ["alice/2", "alice/3", "alice/4", "alice/5"]);
}

on_each_engine!(a_filter_moves_the_token, filtered_events_move_the_token);

/// A stream gives what is there, what comes, and goes on where a client left it.
async fn streams_resume(place: Place) {
    let server = place.setup().start();
    let base = &server.base;
    for number in 0..5 {
        deposit(base, &format!("e{number}"), "d", 1).await;
    }
    let mut stream = Stream::open(base, "types=account", None).await;
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(stream.event().await.unwrap());
    }
    deposit(base, "e5", "d", 1).await;
    let (last, event) = stream.event().await.unwrap();
    assert_eq!(event["entity_id"], "e5");
    for (seen, (id, _)) in ids.iter().enumerate() {
        let mut resumed = Stream::open(base, "types=account", Some(id)).await;
        for (_, expected) in &ids[seen + 1..] {
            assert_eq!(resumed.event().await.unwrap().1["entity_id"], expected["entity_id"]);
        }
        assert_eq!(resumed.event().await.unwrap().1["entity_id"], "e5");
    }
    assert_eq!(events(&page(base, &format!("types=account&since={last}")).await), [] as [&str; 0]);
    assert_eq!(server.stop().code(), Some(0));
    assert!(stream.event().await.is_none(), "a stream ends cleanly when the node stops");
}

on_each_engine!(streams_resume_after_any_event, streams_resume);

/// A client that does not read holds up nobody, and gets everything once it does.
async fn slow_readers_get_everything(place: Place) {
    let server = place.setup().set("feed.memory_max", "64 KiB").set("commands.timeout", "5m").start();
    let base = &server.base;
    let mut stream = Stream::open(base, "types=account&since=now", None).await;
    let lines: String = (0..4000)
        .map(|number| {
            format!(
                "{{\"entity_type\":\"account\",\"entity_id\":\"e{}\",\"command\":\"deposit\",\"command_id\":\"d-{number}\",\"request\":{{\"amount\":1}}}}\n",
                number % 5
            )
        })
        .collect();
    let bulk = client().post(format!("{base}/v1/commands")).header("content-type", "application/x-ndjson").body(lines);
    let answers = send(bulk).await.unwrap().body;
    assert_eq!(answers.lines().filter(|line| line.starts_with("{\"status\":200,")).count(), 4000, "{}", answers.lines().last().unwrap());
    let mut versions = std::collections::HashMap::new();
    for _ in 0..4000 {
        let (_, event) = stream.event().await.unwrap();
        let version: &mut u64 = versions.entry(event["entity_id"].as_str().unwrap().to_owned()).or_default();
        *version += 1;
        assert_eq!(event["version"].as_u64(), Some(*version));
    }
    assert_eq!(versions.values().sum::<u64>(), 4000);
}

on_each_engine!(dense_log_a_slow_stream_gets_everything, slow_readers_get_everything);

/// More than may follow are told so.
async fn followers_are_bounded(place: Place) {
    let server = place.setup().set("feed.followers_max", "2").start();
    let first = Stream::open(&server.base, "types=account", None).await;
    let _second = Stream::open(&server.base, "types=account", None).await;
    followers(&server, 2.0).await;
    assert_eq!(told(&server.base, "types=account").await.0, "503 overloaded");
    drop(first);
    followers(&server, 1.0).await;
    assert_eq!(events(&page(&server.base, "types=account").await), [] as [&str; 0]);
}

on_each_engine!(bounded_followers_beyond_the_limit_are_refused, followers_are_bounded);
