//! Reads, on a store in memory.

use super::body::Body;
use super::problem::Problem;
use super::reads;
use super::tests_support::{Memory, handlers};
use crate::core::event::EventOutcome;
use crate::core::{CommandId, CommandName, EntityId, EntityType, Event, HandlerVersion, Json, StoredEvent};
use crate::partition::EntityKey;
use hyper::Response;
use hyper::header::HeaderMap;

/// `a1` was opened, charged, and refused a charge; `a2` was refused at its opening.
fn memory() -> Memory {
    let event = |event_id, id: &str, version, outcome, request: &str, state: Option<&str>| StoredEvent {
        event: Event {
            event_id,
            entity_id: EntityId::trusted(id),
            version,
            command_id: CommandId::trusted(&format!("k{version}")),
            command: CommandName::trusted("charge"),
            outcome,
            handler_version: HandlerVersion("0123456789abcdef".into()),
            request: Json::trusted(request.to_owned()),
            response: Json::trusted(format!("\"r{version}\"")),
            state: state.map(|state| Json::trusted(state.to_owned())),
            patch: None,
            handled_at: 0,
        },
        // One second apart, from 2023-11-14T22:13:21Z on.
        committed_at: (1_700_000_000 + event_id as i64) * 1_000_000 + 5,
    };
    let events = vec![
        event(1, "a1", 1, EventOutcome::Accepted, "{\"amount\":1}", Some("{\"n\":1}")),
        event(2, "a1", 2, EventOutcome::Accepted, "null", Some("{\"n\":2}")),
        event(3, "a2", 1, EventOutcome::Rejected, "null", None),
        event(4, "a1", 3, EventOutcome::Rejected, "null", Some("{\"n\":2}")),
        event(5, "b1", 1, EventOutcome::Rejected, "null", None),
        event(6, "b1", 2, EventOutcome::Accepted, "null", Some("{}")),
    ];
    Memory::holding(events)
}

fn key(id: &str) -> EntityKey {
    EntityKey { entity_type: EntityType::trusted("account"), entity_id: EntityId::trusted(id) }
}

fn shown(answered: Result<Response<Body>, Problem>) -> String {
    match answered {
        Ok(response) => format!("{} {}", response.status().as_u16(), String::from_utf8_lossy(response.body().bytes())),
        Err(problem) => format!("{} {}", problem.code().status().as_u16(), problem.code().as_str()),
    }
}

#[tokio::test]
async fn an_entity_is_read_now_and_in_the_past() {
    let now = r#"200 {"entity_type":"account","entity_id":"a1","version":3,"state":{"n":2},"committed_at":"2023-11-14T22:13:24.000005Z"}"#;
    let first = r#"200 {"entity_type":"account","entity_id":"a1","version":1,"state":{"n":1},"committed_at":"2023-11-14T22:13:21.000005Z"}"#;
    for (id, query, expected) in [
        ("a1", None, now),
        ("a1", Some("version=3"), now),
        ("a1", Some("version=1"), first),
        ("a1", Some("at=2023-11-14T22:13:21.000005Z"), first),
        ("a1", Some("at=2023-11-14T23:13:21.5+01:00"), first),
        ("a1", Some("at=2023-11-14T23:13:21.5%2B01:00"), first),
        ("a1", Some("at=2999-01-01T00:00:00Z"), now),
        ("a1", Some("at=9999-12-31T23:59:59.999999Z"), now),
        ("a1", Some("at=0001-01-01T00:00:00-12:00"), "404 version-not-found"),
        ("a1", Some("at=2023-11-14T22:13:21.000004Z"), "404 version-not-found"),
        ("a1", Some("version=4"), "404 version-not-found"),
        ("a1", Some("version=9223372036854775807"), "404 version-not-found"),
        ("b1", Some("version=1"), "404 version-not-found"),
        ("a2", None, "404 entity-not-found"),
        ("a2", Some("version=1"), "404 entity-not-found"),
        ("a3", None, "404 entity-not-found"),
        ("a3", Some("at=2999-01-01T00:00:00Z"), "404 entity-not-found"),
        ("A1", None, "404 entity-not-found"),
        ("a1", Some("version=0"), "400 invalid-query"),
        ("a1", Some("version=-1"), "400 invalid-query"),
        ("a1", Some("version=1&version=1"), "400 invalid-query"),
        ("a1", Some("version=99999999999999999999"), "400 invalid-query"),
        ("a1", Some("at=yesterday"), "400 invalid-query"),
        ("a1", Some("at=2023-11-14T22:13:21"), "400 invalid-query"),
        ("a1", Some("version=1&at=2023-11-14T22:13:21Z"), "400 invalid-query"),
        ("a1", Some("versio=1"), "400 invalid-query"),
    ] {
        let store = memory();
        assert_eq!(shown(reads::entity(&store, &key(id), query, &HeaderMap::new(), |_| false).await), expected, "{id} {query:?}");
        assert_eq!(store.barriers.into_inner(), usize::from(expected.starts_with("200")), "{id} {query:?}");
    }
}

#[tokio::test]
async fn a_reader_that_has_the_version_gets_no_body_but_its_tag() {
    let mut headers = HeaderMap::new();
    headers.insert("if-none-match", "\"3\"".parse().unwrap());
    let response = reads::entity(&memory(), &key("a1"), None, &headers, |_| false).await.unwrap();
    assert_eq!((response.status().as_u16(), response.body().bytes(), &response.headers()["etag"]), (304, &b""[..], &"\"3\"".parse().unwrap()));
    assert_eq!(shown(reads::entity(&memory(), &key("b1"), None, &headers, |_| false).await).split(' ').next(), Some("200"));
}

#[tokio::test]
async fn history_comes_in_pages_both_ways() {
    for (id, query, versions, next) in [
        ("a1", None, &[1, 2, 3][..], None),
        ("a1", Some("limit=3"), &[1, 2, 3], None),
        ("a1", Some("limit=2"), &[1, 2], Some(2)),
        ("a1", Some("limit=2&after=2"), &[3], None),
        ("a1", Some("after=3"), &[], None),
        ("a1", Some("order=desc&limit=2"), &[3, 2], Some(2)),
        ("a1", Some("order=desc&limit=2&after=2"), &[1], None),
        ("a1", Some("order=desc&after=1"), &[], None),
        ("a1", Some("order=desc&after=0"), &[], None),
        ("a2", Some("order=asc"), &[1], None),
    ] {
        let store = memory();
        let response = reads::history(&store, &key(id), query).await.unwrap();
        let page: serde_json::Value = serde_json::from_slice(response.body().bytes()).unwrap();
        let found: Vec<i64> = page["events"].as_array().unwrap().iter().map(|event| event["version"].as_i64().unwrap()).collect();
        assert_eq!((&found[..], page["next"].as_i64()), (versions, next), "{id} {query:?}");
        assert_eq!(store.barriers.into_inner(), 1);
    }
    for (id, query, expected) in [
        ("a3", None, "404 entity-not-found"),
        ("a1", Some("order=up"), "400 invalid-query"),
        ("a1", Some("include=all"), "400 invalid-query"),
        ("a1", Some("after=x"), "400 invalid-query"),
        ("a1", Some("limit=1001"), "400 invalid-query"),
        ("a1", Some("state"), "400 invalid-query"),
    ] {
        assert_eq!(shown(reads::history(&memory(), &key(id), query).await), expected, "{id} {query:?}");
    }
}

#[tokio::test]
async fn an_event_is_shown_in_the_order_of_the_contract() {
    let event = |version, request, rejected, second, state| {
        format!(
            r#"{{"version":{version},"event_id":{version},"command_id":"k{version}","command":"charge","request":{request},"response":"r{version}","rejected":{rejected},"handler_version":"0123456789abcdef","committed_at":"2023-11-14T22:13:{second}.000005Z"{state}}}"#
        )
    };
    let first = event(1, r#"{"amount":1}"#, false, 21, "");
    assert_eq!(shown(reads::history(&memory(), &key("a1"), Some("limit=1")).await), format!("200 {{\"events\":[{first}],\"next\":1}}"));
    let second = event(2, "null", false, 22, r#","state":{"n":2}"#);
    assert_eq!(shown(reads::history(&memory(), &key("a1"), Some("limit=1&after=1&include=state")).await), format!("200 {{\"events\":[{second}],\"next\":2}}"));
    let refused = shown(reads::history(&memory(), &key("a2"), Some("include=state")).await);
    assert!(refused.contains(r#""rejected":true"#) && refused.ends_with(r#","state":null}],"next":null}"#), "{refused}");
}

#[tokio::test]
async fn a_page_of_large_events_ends_early_and_goes_on() {
    let large = Json::trusted(format!("\"{}\"", "x".repeat(1 << 20)));
    let template = memory().events.into_inner().unwrap()[0].clone();
    let events = (1..=200)
        .map(|version| {
            let mut stored = template.clone();
            stored.event.version = version;
            stored.event.state = Some(large.clone());
            stored
        })
        .collect();
    let store = Memory::holding(events);
    let mut seen = Vec::new();
    let mut query = "limit=1000&include=state".to_owned();
    loop {
        let response = reads::history(&store, &key("a1"), Some(&query)).await.unwrap();
        let page: serde_json::Value = serde_json::from_slice(response.body().bytes()).unwrap();
        let versions: Vec<u64> = page["events"].as_array().unwrap().iter().map(|event| event["version"].as_u64().unwrap()).collect();
        assert!((1..=10).contains(&versions.len()), "{versions:?}");
        seen.extend(versions);
        let Some(next) = page["next"].as_u64() else { break };
        query = format!("limit=1000&include=state&after={next}");
    }
    assert_eq!(seen, (1..=200).collect::<Vec<u64>>());
    assert!(store.largest_page.load(std::sync::atomic::Ordering::Relaxed) <= 64);
    // States that nobody asked for neither take memory nor end a page.
    let bare = reads::history(&store, &key("a1"), Some("limit=200")).await.unwrap();
    let bare: serde_json::Value = serde_json::from_slice(bare.body().bytes()).unwrap();
    assert_eq!(bare["events"].as_array().unwrap().len(), 200);
}

#[tokio::test]
async fn a_listing_names_existing_entities_in_pages() {
    let handlers = handlers();
    let list = async |query| shown(reads::list(&memory(), &handlers, "account", query).await);
    assert_eq!(list(None).await, r#"200 {"entities":[{"entity_id":"a1","version":3},{"entity_id":"b1","version":2}],"next":null}"#);
    assert_eq!(list(Some("limit=1")).await, r#"200 {"entities":[{"entity_id":"a1","version":3}],"next":"a1"}"#);
    assert_eq!(list(Some("limit=1&after=a1")).await, r#"200 {"entities":[{"entity_id":"b1","version":2}],"next":null}"#);
    assert_eq!(list(Some("after=b1")).await, r#"200 {"entities":[],"next":null}"#);
    for query in ["after=", "after=a%20b", "after=aaaaaaaaaaaaaaaaaaaaa", "limit=0", "order=asc"] {
        assert_eq!(list(Some(query)).await, "400 invalid-query", "{query}");
    }
    assert_eq!(shown(reads::list(&memory(), &handlers, "acount", None).await), "404 unknown-entity-type");
}

#[tokio::test]
async fn a_version_that_is_known_to_be_durable_needs_no_barrier() {
    let store = memory();
    let read = reads::entity(&store, &key("a1"), None, &HeaderMap::new(), |version| version == 3).await;
    assert!(read.is_ok());
    assert_eq!(store.barriers.into_inner(), 0);
}

/// The database crashes between a read and its barrier, comes back without what was read, and lets the barrier pass.
#[tokio::test]
async fn durable_before_answer_what_a_crash_took_back_is_not_told() {
    let template = memory().events.into_inner().unwrap()[0].clone();
    let crashing = |crashes: usize| {
        let events = (1..=9).map(|version| StoredEvent { event: Event { version, event_id: version, ..template.event.clone() }, ..template.clone() });
        let store = Memory::holding(events.collect());
        store.crashes.store(crashes, std::sync::atomic::Ordering::Relaxed);
        store
    };
    let handlers = handlers();
    for (crashes, newest) in [(0, 9), (1, 8), (3, 6)] {
        let entity = reads::entity(&crashing(crashes), &key("a1"), None, &HeaderMap::new(), |_| false).await.unwrap();
        assert_eq!(entity.headers()["etag"], format!("\"{newest}\""), "{crashes} crashes");
        let history = shown(reads::history(&crashing(crashes), &key("a1"), Some("order=desc&limit=1")).await);
        assert!(history.contains(&format!("{{\"version\":{newest},")), "{history}");
        let listed = shown(reads::list(&crashing(crashes), &handlers, "account", None).await);
        assert!(listed.contains(&format!("\"version\":{newest}}}")), "{listed}");
    }
    let never = shown(reads::entity(&crashing(7), &key("a1"), None, &HeaderMap::new(), |_| false).await);
    assert_eq!(never, "503 storage-unavailable");
}
