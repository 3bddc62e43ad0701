//! The whole server in this process, on a store in memory.

use super::tests_support::{Memory, handlers};
use super::{App, Health, Options, serve};
use crate::cluster::{self, Cluster, Topology};
use crate::core::{EntityType, HandlerVersion, LogIdentity, Member, NodeId};
use crate::feed::{self, Feed};
use crate::http::{HandlerError, Reload, ReloadError};
use crate::partition::{self, Partitions};
use metrics_exporter_prometheus::PrometheusBuilder;
use reqwest::{Client, Method, RequestBuilder};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

struct Server {
    base: String,
    client: Client,
    shutdown: oneshot::Sender<()>,
    ended: JoinHandle<std::io::Result<()>>,
    partitions: Partitions,
}

async fn start() -> Server {
    let second = Duration::from_secs(1);
    let options = partition::Options {
        timeout: 10 * second,
        queue_max: 10_000,
        batch_rows_max: 100,
        batch_bytes_max: 1 << 20,
        row_bytes_max: 1 << 20,
        refuse_reuse: false,
        cache_bytes_max: 1 << 20,
        retry_for: second,
    };
    let store = Arc::new(Memory::holding(Vec::new()));
    let partitions = Partitions::new(options, store.clone(), handlers());
    let options = Options {
        node: "n1".into(),
        body_max: 10_000,
        bulk_line_max: 1000,
        bundle_max: 1000,
        header_timeout: 60 * second,
        header_bytes_max: 16_384,
        body_timeout: 60 * second,
        connections_max: 1000,
        idle_timeout: 60 * second,
        grace: 10 * second,
    };
    let own = Member { id: NodeId::trusted("node-1"), url: "http://127.0.0.1:1".into() };
    let cluster = cluster::Options { own, heartbeat: second, forward_timeout: second };
    let app = App {
        partitions: partitions.clone(),
        cluster: Cluster::start(cluster, Topology::Single, partitions.clone()),
        feed: Feed::start(&feed::Options { followers_max: 100, memory_max: 1 << 20, poll: second / 10 }, partitions.clone()),
        options,
        health: Health::new(store),
        reload: Some(reload()),
        metrics: PrometheusBuilder::new().build_recorder().handle(),
        identity: LogIdentity::new([7; 32]),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let (shutdown, asked) = oneshot::channel();
    let ended = tokio::spawn(serve(listener, app, async move {
        let _ = asked.await;
    }));
    Server { base, client: Client::new(), shutdown, ended, partitions }
}

/// Works the first time, finds a fault the second time.
fn reload() -> Reload {
    let is_first = AtomicBool::new(true);
    Arc::new(move || {
        let loaded = if is_first.swap(false, Ordering::Relaxed) {
            Ok(vec![(EntityType::trusted("account"), HandlerVersion("1".into()))])
        } else {
            Err(ReloadError::Invalid(vec![HandlerError { file: Some("account.js".into()), line: Some(7), message: "no".into() }]))
        };
        Box::pin(std::future::ready(loaded))
    })
}

impl Server {
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base))
    }

    fn post(&self, path: &str, key: &str, body: &'static str) -> RequestBuilder {
        self.request(Method::POST, path).header("content-type", "application/json").header("idempotency-key", key).body(body)
    }
}

/// Status, the headers that say something about a command, and the body.
async fn shown(request: RequestBuilder) -> (u16, Vec<String>, String) {
    let answer = request.send().await.unwrap();
    assert_eq!(answer.headers()["quokka-handled-by"], "n1");
    assert!(answer.headers().contains_key("request-id"));
    let names = ["allow", "content-type", "etag", "idempotency-key", "idempotency-mismatch", "idempotency-replayed", "location", "retry-after"];
    let headers = names.iter().filter_map(|name| answer.headers().get(*name).map(|value| format!("{name}: {}", value.to_str().unwrap()))).collect();
    (answer.status().as_u16(), headers, answer.text().await.unwrap())
}

async fn problem(request: RequestBuilder) -> String {
    let (status, headers, body) = shown(request).await;
    assert!(headers.contains(&"content-type: application/problem+json".to_owned()), "{headers:?} {body}");
    let value: Value = serde_json::from_str(&body).unwrap();
    format!("{status} {}", value["code"].as_str().unwrap())
}

#[tokio::test]
async fn a_command_is_answered_once_and_replayed_byte_for_byte() {
    let server = start().await;
    let path = "/v1/entities/account/a1/open";
    let (status, headers, body) = shown(server.post(path, "k1", "5")).await;
    assert_eq!((status, &*headers), (200, &["content-type: application/json", "etag: \"1\"", "idempotency-key: k1"].map(str::to_owned)[..]));
    let start = r#"{"entity_type":"account","entity_id":"a1","version":1,"command_id":"k1","response":{"sum":5},"token":"s_"#;
    assert!(body.starts_with(start) && body.ends_with("\"}"), "{body}");
    let replayed = [&headers[..], &["idempotency-replayed: true".to_owned()]].concat();
    assert_eq!(shown(server.post(path, "k1", " 5.0 ").header("if-match", "\"9\"")).await, (200, replayed.clone(), body.clone()));
    assert_eq!(shown(server.request(Method::GET, "/v1/entities/account/a1/commands/k1")).await, (200, replayed.clone(), body.clone()));
    let (status, mismatch, again) = shown(server.post(path, "k1", "6")).await;
    assert_eq!((status, again), (200, body));
    assert!(mismatch.contains(&"idempotency-mismatch: true".to_owned()) && mismatch.contains(&"idempotency-replayed: true".to_owned()), "{mismatch:?}");
}

#[tokio::test]
async fn a_rejection_is_recorded_and_replayed_byte_for_byte() {
    let server = start().await;
    let path = "/v1/entities/account/a1/add";
    let first = shown(server.post(path, "k1", "-5")).await;
    assert_eq!(first.0, 422);
    let value: Value = serde_json::from_str(&first.2).unwrap();
    assert_eq!((&value["code"], &value["detail"], &value["version"]), (&"rejected".into(), &"the sum is too low".into(), &1.into()));
    assert_eq!(shown(server.post("/v1/entities/account/a1/open", "k2", "9")).await.0, 200);
    let again = shown(server.post(path, "k1", "-5")).await;
    assert_eq!((again.0, &again.2), (first.0, &first.2));
    let looked_up = shown(server.request(Method::GET, "/v1/entities/account/a1/commands/k1")).await;
    assert_eq!(looked_up, again);
}

#[tokio::test]
async fn an_entity_without_an_id_gets_one_that_a_retry_meets_again() {
    let server = start().await;
    let (status, headers, body) = shown(server.post("/v1/entities/account/open", "k", "5")).await;
    let id = "0vn4gv9pq00n3rvagu60";
    assert_eq!(status, 200, "{body}");
    assert!(headers.contains(&format!("location: /v1/entities/account/{id}")), "{headers:?}");
    let again = shown(server.post("/v1/entities/account/open", "k", "5")).await;
    assert_eq!((again.0, again.2), (200, body));
    let fresh = server.request(Method::POST, "/v1/entities/account/open").header("content-type", "application/json").body("5");
    let (status, headers, _) = shown(fresh).await;
    assert_eq!(status, 200);
    assert!(headers.iter().any(|header| header.starts_with("idempotency-key: ") && header.len() == "idempotency-key: ".len() + 20), "{headers:?}");
}

#[tokio::test]
async fn what_was_answered_is_read_and_not_sent_twice() {
    let server = start().await;
    for (key, body) in [("k1", "5"), ("k2", "6")] {
        assert_eq!(shown(server.post("/v1/entities/account/a1/add", key, body)).await.0, 200);
    }
    let path = "/v1/entities/account/a1";
    let (status, headers, body) = shown(server.request(Method::GET, path)).await;
    let expected = r#"{"entity_type":"account","entity_id":"a1","version":2,"state":11,"committed_at":"2023-11-14T22:13:20.000000Z"}"#;
    assert_eq!((status, &*body), (200, expected));
    assert!(headers.contains(&"etag: \"2\"".to_owned()));
    let (status, head, body) = shown(server.request(Method::HEAD, path)).await;
    assert_eq!((status, head, body), (200, headers, String::new()));
    assert_eq!(shown(server.request(Method::GET, path).header("if-none-match", "W/\"1\", \"2\"")).await, (304, vec!["etag: \"2\"".into()], String::new()));
    let (_, _, events) = shown(server.request(Method::GET, "/v1/entities/account/a1/events?limit=1&order=desc")).await;
    assert!(events.contains("\"version\":2") && events.ends_with("\"next\":2}"), "{events}");
    let (_, _, list) = shown(server.request(Method::GET, "/v1/entities/account")).await;
    assert_eq!(list, r#"{"entities":[{"entity_id":"a1","version":2}],"next":null}"#);
}

#[tokio::test]
async fn what_cannot_be_served_says_why() {
    let server = start().await;
    assert_eq!(shown(server.post("/v1/entities/account/a1/open", "k0", "5")).await.0, 200);
    let post = |path: &str| server.post(path, "k", "5");
    let get = |path: &str| server.request(Method::GET, path);
    let plain = |body: &'static str| server.request(Method::POST, "/v1/entities/account/a1/add").body(body);
    let json = |body: &'static str| plain(body).header("content-type", "application/json");
    for (request, expected) in [
        (post("/v1/entities/account/a1/open"), "409 entity-exists"),
        (post("/v1/entities/account/a1/nothing"), "404 unknown-command"),
        (post("/v1/entities/account/a1/Nothing"), "404 unknown-command"),
        (post("/v1/entities/acount/a1/add"), "404 unknown-entity-type"),
        (post("/v1/entities/account//add"), "400 invalid-entity-id"),
        (post("/v1/entities/account/a%001/add"), "400 invalid-entity-id"),
        (post("/v1/entities/account/%ff%fe/add"), "400 invalid-entity-id"),
        (post("/v1/entities/account/aaaaaaaaaaaaaaaaaaaaa/add"), "400 invalid-entity-id"),
        (post("/v1/entities/account/a1/break"), "500 handler-failed"),
        (post("/v1/entities/account/a1/add").header("if-match", "\"7\""), "412 version-mismatch"),
        (post("/v1/entities/account/a1/add").header("if-match", "7"), "400 invalid-query"),
        (post("/v1/entities/account/a1/add").header("idempotency-key", "k"), "400 invalid-command-id"),
        (post("/v1/entities/account/a1/add").header("accept", "text/html"), "406 not-acceptable"),
        (post("/v1/entities/account/a1/add?x=1"), "400 invalid-query"),
        (plain("5"), "415 unsupported-media-type"),
        (plain("5").header("content-type", "application/x-www-form-urlencoded"), "415 unsupported-media-type"),
        (json("5").header("content-encoding", "gzip"), "415 unsupported-media-type"),
        (json("5").header("idempotency-key", ""), "400 invalid-command-id"),
        (json("5 6"), "400 malformed-json"),
        (json("\u{feff}5"), "400 malformed-json"),
        (json(r#"{"a":1,"a":2}"#), "400 malformed-json"),
        (json("{}"), "400 invalid-request"),
        (plain(""), "400 invalid-request"),
        (json(Box::leak("1".repeat(10_001).into_boxed_str())), "413 request-too-large"),
        (get("/v1/entities/account/a2"), "404 entity-not-found"),
        (get("/v1/entities/account/a1?version=2"), "404 version-not-found"),
        (get("/v1/entities/account/a1/commands/other"), "404 command-not-found"),
        (get("/v1/entities/account/a1/commands/a%20b"), "400 invalid-command-id"),
        (get("/v1/entities/account/a1/add"), "405 method-not-allowed"),
        (get("/v1/commands"), "405 method-not-allowed"),
        (get("/v1/feed?since=5"), "400 invalid-token"),
        (get("/v1/nothing"), "404 not-found"),
        (server.request(Method::PUT, "/v1/entities/account/a1"), "405 method-not-allowed"),
        (server.request(Method::OPTIONS, "/"), "405 method-not-allowed"),
        (server.request(Method::POST, "/v1/commands").header("content-type", "application/json").body("{}"), "415 unsupported-media-type"),
    ] {
        let case = format!("{request:?}");
        assert_eq!(problem(request).await, expected, "{case}");
    }
    assert_eq!(problem(server.request(Method::POST, "/v1/entities/account/a1/events/more")).await, "404 not-found");
    let (_, headers, _) = shown(server.request(Method::DELETE, "/v1/entities/account/a1/events")).await;
    assert!(headers.contains(&"allow: GET, HEAD, POST".to_owned()), "{headers:?}");
}

#[tokio::test]
async fn a_command_may_be_named_like_a_page() {
    let server = start().await;
    assert_eq!(shown(server.post("/v1/entities/account/a1/events", "k", "5")).await.0, 200);
    assert_eq!(shown(server.request(Method::GET, "/v1/entities/account/a1/events")).await.0, 200);
}

#[tokio::test]
async fn many_commands_are_answered_line_by_line_and_bad_ones_fail_alone() {
    let server = start().await;
    let long = "x".repeat(1001);
    let lines = [
        r#"{"entity_type":"account","entity_id":"b1","command":"open","command_id":"k1","request":5}"#,
        "",
        r#"{"command":"add","entity_type":"account","entity_id":"b1","command_id":"k2","request":-9}"#,
        r#"{"entity_type":"account","entity_id":"b1""#,
        &long,
        r#"{"entity_type":"account","entity_id":"b1","command":"open","command_id":"k1","request":5}"#,
        r#"{"entity_type":"account","entity_id":"b1","command":"open","command_id":"k1","request":6}"#,
        r#"{"entity_type":"account","entity_id":"b1","command":"add","command_id":"k3","request":1,"if_version":1}"#,
        r#"{"entity_type":"account","entity_id":"b1","command":"add","command_id":"k4","request":1,"if_version":2}"#,
        r#"{"entity_type":"account","command":"open","command_id":"k","request":1}"#,
        r#"{"entity_type":"nothing","entity_id":"b1","command":"open"}"#,
    ];
    let request = server.request(Method::POST, "/v1/commands").header("content-type", "application/x-ndjson").body(lines.join("\r\n"));
    let (status, headers, body) = shown(request).await;
    assert_eq!((status, &*headers), (200, &["content-type: application/x-ndjson".to_owned()][..]));
    let show = |line: &str| {
        let value: Value = serde_json::from_str(line).unwrap();
        let text = |name: &str| value.get(name).map(|value| format!(" {}", value.as_str().map_or(value.to_string(), str::to_owned))).unwrap_or_default();
        assert!(line.starts_with("{\"status\":"), "{line}");
        let marks = ["replayed", "mismatch"].iter().filter(|name| value[**name] == true).map(|name| format!(" {name}")).collect::<String>();
        format!("{}{}{}{}{marks}", value["status"], text("code"), text("version"), text("response"))
    };
    let answers: Vec<String> = body.lines().map(show).collect();
    let expected = [
        r#"200 1 {"sum":5}"#,
        "422 rejected 2",
        "400 malformed-json",
        "413 request-too-large",
        r#"200 1 {"sum":5} replayed"#,
        r#"200 1 {"sum":5} replayed mismatch"#,
        "412 version-mismatch 2",
        r#"200 3 {"sum":6}"#,
        r#"200 1 {"sum":1}"#,
        "404 unknown-entity-type",
    ];
    assert_eq!(answers, expected);
    assert!(body.contains(r#""entity_id":"0vn4gv9pq00n3rvagu60""#), "{body}");
    assert!(body.ends_with('\n'));
}

#[tokio::test]
async fn a_client_may_wait_for_each_answer_before_its_next_line() {
    let server = start().await;
    let (lines, body) = tokio::sync::mpsc::channel::<Result<String, std::io::Error>>(1);
    let body = futures_util::stream::unfold(body, async |mut body| body.recv().await.map(|line| (line, body)));
    let request = server.request(Method::POST, "/v1/commands").header("content-type", "application/x-ndjson").body(reqwest::Body::wrap_stream(body));
    let line = |number| format!("{{\"entity_type\":\"account\",\"entity_id\":\"c1\",\"command\":\"add\",\"command_id\":\"k{number}\",\"request\":1}}\n");
    lines.send(Ok(line(1))).await.unwrap();
    let mut answer = request.send().await.unwrap();
    for number in 1..=5 {
        let chunk = answer.chunk().await.unwrap().unwrap();
        let value: Value = serde_json::from_slice(&chunk).unwrap();
        assert_eq!((value["status"].as_u64(), value["version"].as_u64()), (Some(200), Some(number)));
        if number < 5 {
            lines.send(Ok(line(number + 1))).await.unwrap();
        }
    }
    drop(lines);
    assert_eq!(answer.chunk().await.unwrap(), None);
}

#[tokio::test]
async fn ten_thousand_lines_of_one_entity_keep_their_order() {
    let server = start().await;
    let lines: String = (0..10_000)
        .map(|number| format!("{{\"entity_type\":\"account\",\"entity_id\":\"d1\",\"command\":\"add\",\"command_id\":\"k{number}\",\"request\":1}}\n"))
        .collect();
    let request = server.request(Method::POST, "/v1/commands").header("content-type", "application/x-ndjson").body(lines);
    let (_, _, body) = shown(request).await;
    let mut count = 0;
    for (number, line) in body.lines().enumerate() {
        let expected = format!("{{\"status\":200,\"entity_type\":\"account\",\"entity_id\":\"d1\",\"version\":{},\"command_id\":\"k{number}\",", number + 1);
        assert!(line.starts_with(&expected), "{line}");
        count += 1;
    }
    assert_eq!(count, 10_000);
}

#[tokio::test]
async fn operators_see_health_and_metrics_and_reload_handlers() {
    let server = start().await;
    let (_, _, index) = shown(server.request(Method::GET, "/")).await;
    assert!(index.starts_with("{\"name\":\"quokka\","), "{index}");
    assert_eq!(shown(server.request(Method::GET, "/health/live")).await.2, r#"{"status":"live"}"#);
    assert_eq!(shown(server.request(Method::GET, "/health/ready")).await.2, r#"{"status":"ready"}"#);
    assert!(shown(server.request(Method::GET, "/metrics")).await.1[0].starts_with("content-type: text/plain"));
    let reload = || server.request(Method::POST, "/v1/admin/handlers/reload");
    assert_eq!(shown(reload()).await.2, r#"{"entity_types":[{"name":"account","handler_version":"1"}]}"#);
    let (status, _, body) = shown(reload()).await;
    assert_eq!(status, 422);
    assert!(body.ends_with(r#""errors":[{"file":"account.js","line":7,"message":"no"}]}"#), "{body}");
}

#[tokio::test]
async fn a_request_id_is_echoed_and_in_the_problem() {
    let server = start().await;
    let answer = server.post("/v1/entities/account/a1/break", "k", "5").header("request-id", "abc-1").send().await.unwrap();
    assert_eq!(answer.headers()["request-id"], "abc-1");
    let body = answer.text().await.unwrap();
    assert!(body.ends_with(r#""entity_type":"account","entity_id":"a1","command_id":"k","request_id":"abc-1"}"#) && !body.contains("SECRET"), "{body}");
}

#[tokio::test]
async fn a_node_that_stops_answers_what_it_took_and_refuses_the_rest() {
    let server = start().await;
    let mut bulk = TcpStream::connect(server.base.trim_start_matches("http://")).await.unwrap();
    let line = |number| {
        let line = format!("{{\"entity_type\":\"account\",\"entity_id\":\"e1\",\"command\":\"add\",\"command_id\":\"k{number}\",\"request\":1}}\n");
        format!("{:x}\r\n{line}\r\n", line.len())
    };
    let head = "POST /v1/commands HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n";
    bulk.write_all(format!("{head}{}", line(1)).as_bytes()).await.unwrap();
    let mut read = String::new();
    while !read.contains("\"version\":1") {
        let mut chunk = [0; 4096];
        let length = bulk.read(&mut chunk).await.unwrap();
        read.push_str(std::str::from_utf8(&chunk[..length]).unwrap());
    }
    server.shutdown.send(()).unwrap();
    // The listener is gone only after the stop has begun.
    while TcpStream::connect(server.base.trim_start_matches("http://")).await.is_ok() {}
    bulk.write_all(format!("{}0\r\n\r\n", line(2)).as_bytes()).await.unwrap();
    let mut rest = String::new();
    bulk.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains("{\"status\":503,") && rest.contains("shutting-down") && rest.ends_with("0\r\n\r\n"), "{rest}");
    server.ended.await.unwrap().unwrap();
    server.partitions.shut_down().await;
}
