//! The load generator against servers that are honest, troubled, or lying.

use super::*;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::collections::HashMap;
use std::sync::Mutex;

/// What a fake server does besides answering.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Honest,
    /// Refuses a third by a business rule; those are versions too.
    Rejecting,
    /// Is overloaded, does not know, or breaks the connection, before or after it recorded the command.
    Troubled,
    /// Gives an entity one version more than it answered.
    Lying,
    /// Loses each tenth command that it answered.
    Forgetful,
    /// Knows no such entity.
    Refusing,
}

struct Fake {
    manner: Manner,
    /// The answers by entity and command id; their number is the version.
    recorded: Mutex<HashMap<String, HashMap<String, u16>>>,
    tries: AtomicU64,
}

impl Fake {
    /// Status and body for one try of a command; none where the connection breaks.
    fn handle(&self, entity: &str, id: &str) -> Option<(u16, String)> {
        let tries = self.tries.fetch_add(1, Ordering::Relaxed);
        // Broken connections are rarer: one takes the answers of a whole window with it.
        let trouble = match tries % 997 {
            _ if self.manner != Manner::Troubled => 0,
            at @ (4 | 500) => at,
            at => [0, 0, 2, 3, 0, 5][(at % 6) as usize],
        };
        match (self.manner, trouble) {
            (Manner::Refusing, _) => return Some((404, r#"{"code":"entity-not-found","status":404}"#.into())),
            (_, 2) => return Some((503, r#"{"code":"overloaded","status":503}"#.into())),
            (_, 3) => return Some((504, r#"{"code":"outcome-unknown","status":504}"#.into())),
            (_, 4) => return None,
            _ => {}
        }
        let mut recorded = self.recorded.lock().unwrap();
        let answers = recorded.entry(entity.to_string()).or_default();
        let status = *answers.entry(id.to_string()).or_insert(if self.manner == Manner::Rejecting && tries.is_multiple_of(3) { 422 } else { 200 });
        let version = answers.len();
        if self.manner == Manner::Forgetful && tries % 10 == 9 {
            answers.remove(id);
        }
        match trouble {
            5 => Some((504, r#"{"code":"outcome-unknown","status":504}"#.into())),
            500 => None,
            _ if status == 200 => Some((200, format!(r#"{{"status":200,"version":{version}}}"#))),
            _ => Some((422, r#"{"code":"rejected","status":422,"rejection":{"code":"insufficient_funds"}}"#.into())),
        }
    }

    fn version(&self, entity: &str) -> usize {
        let recorded = self.recorded.lock().unwrap().get(entity).map_or(0, HashMap::len);
        recorded + usize::from(self.manner == Manner::Lying)
    }
}

fn broken() -> Response {
    let body = futures_util::stream::once(async { Err::<Bytes, _>(std::io::Error::other("broken")) });
    Response::new(Body::from_stream(body))
}

async fn command(State(fake): State<Arc<Fake>>, Path((_, entity, _)): Path<(String, String, String)>, headers: HeaderMap, body: Bytes) -> Response {
    assert_eq!(body, r#"{"amount":1}"#);
    assert_eq!(headers[header::CONTENT_TYPE], "application/json");
    match fake.handle(&entity, headers["idempotency-key"].to_str().unwrap()) {
        Some((status, body)) => (StatusCode::from_u16(status).unwrap(), [(header::RETRY_AFTER, "0")], body).into_response(),
        None => broken(),
    }
}

async fn read(State(fake): State<Arc<Fake>>, Path((_, entity)): Path<(String, String)>) -> Response {
    match fake.version(&entity) {
        0 => (StatusCode::NOT_FOUND, r#"{"code":"entity-not-found"}"#).into_response(),
        version => format!(r#"{{"state":{{}},"version":{version}}}"#).into_response(),
    }
}

/// Answers each line as it comes, while later ones are still being sent.
async fn bulk(State(fake): State<Arc<Fake>>, body: Body) -> Response {
    use futures_util::StreamExt;
    let lines = futures_util::stream::unfold((body.into_data_stream(), Vec::new(), fake), |(mut body, mut rest, fake)| async move {
        let bytes = body.next().await?.ok()?;
        rest.extend_from_slice(&bytes);
        let whole = rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines: Vec<u8> = rest.drain(..whole).collect();
        let mut answers = String::new();
        for line in String::from_utf8(lines).unwrap().lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!((&line["command"], &line["request"]["amount"]), (&"deposit".into(), &1.into()));
            match fake.handle(line["entity_id"].as_str().unwrap(), line["command_id"].as_str().unwrap()) {
                Some((_, answer)) => answers += &(answer + "\n"),
                None => return Some((Err(std::io::Error::other("broken")), (body, rest, fake))),
            }
        }
        Some((Ok(answers), (body, rest, fake)))
    });
    Response::new(Body::from_stream(lines))
}

/// Runs the load against a server of this manner, both posting and streaming.
fn outcomes(manner: Manner, entities: usize) -> Vec<(Outcome, Arc<Fake>)> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let run_one = |bulk| {
        let fake = Arc::new(Fake { manner, recorded: Mutex::default(), tries: AtomicU64::new(0) });
        let routes = Router::new()
            .route("/v1/entities/{type}/{id}/{command}", post(command))
            .route("/v1/entities/{type}/{id}", get(read))
            .route("/v1/commands", post(self::bulk))
            .with_state(fake.clone());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = runtime.spawn(async { axum::serve(listener, routes).await });
        let outcome = run(&Options { url, bulk, entities, ..options() }).unwrap();
        server.abort();
        (outcome, fake)
    };
    [false, true].map(run_one).into()
}

fn options() -> Options {
    Options {
        url: "http://127.0.0.1:9865".into(),
        entities: 10,
        connections: 4,
        duration: Duration::from_millis(200),
        entity_type: "account".into(),
        command: "deposit".into(),
        request: r#"{ "amount": 1 }"#.into(),
        bulk: false,
    }
}

fn recorded(fake: &Fake) -> u64 {
    fake.recorded.lock().unwrap().values().map(|answers| answers.len() as u64).sum()
}

#[test]
fn every_answer_of_an_honest_server_counts() {
    for (outcome, fake) in outcomes(Manner::Honest, 10) {
        assert!(outcome.report.committed > 0 && outcome.failure().is_none(), "{outcome}");
        assert_eq!((outcome.report.committed, outcome.report.errors, outcome.checked), (recorded(&fake), 0, 10), "{outcome}");
        assert_eq!(fake.recorded.lock().unwrap().len(), 10, "all entities are written");
        assert!(outcome.report.p50_ms > 0.0 && outcome.report.p50_ms <= outcome.report.p99_ms, "{outcome}");
    }
}

#[test]
fn rejections_are_versions_too() {
    for (outcome, fake) in outcomes(Manner::Rejecting, 1) {
        assert!(outcome.report.committed > 0 && outcome.failure().is_none(), "{outcome}");
        assert_eq!((outcome.report.committed, outcome.report.errors), (recorded(&fake), 0), "{outcome}");
    }
}

#[test]
fn trouble_is_followed_up_with_the_same_command_id() {
    for (outcome, fake) in outcomes(Manner::Troubled, 3) {
        assert!(fake.tries.load(Ordering::Relaxed) > outcome.report.committed, "there was trouble");
        assert_eq!((outcome.failure(), outcome.report.errors), (None, 0), "{outcome}");
        assert_eq!(outcome.report.committed, recorded(&fake), "{outcome}");
    }
}

#[test]
fn a_server_that_lies_about_versions_is_found_out() {
    for manner in [Manner::Lying, Manner::Forgetful] {
        for (outcome, _) in outcomes(manner, 3) {
            let failure = outcome.failure().unwrap_or_default();
            assert!(failure.contains("3 of 3 entities disagree with the answers, such as account/"), "{failure}\n{outcome}");
        }
    }
}

#[test]
fn a_run_without_a_recorded_command_fails_with_the_reason() {
    for (outcome, _) in outcomes(Manner::Refusing, 3) {
        assert_eq!((outcome.report.committed, outcome.report.tps), (0, 0.0));
        assert_eq!(outcome.errors[0].0, "404 entity-not-found");
        assert_eq!(outcome.errors[0].1, outcome.report.errors);
        assert!(outcome.failure().unwrap_or_default().contains("the command must create them"));
    }
}

#[test]
fn a_server_that_is_away_is_named() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = run(&Options { url: format!("http://{closed}"), ..options() }).unwrap_err().to_string();
    assert!(error.starts_with(&format!("http://{closed} cannot be reached: connection refused")) && error.contains("quokka serve"), "{error}");
}

#[test]
fn what_does_not_speak_http_is_named() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || std::io::Write::write_all(&mut listener.accept().unwrap().0, b"5.7.0 mysql\n\n").unwrap());
    let error = run(&Options { url, ..options() }).unwrap_err().to_string();
    assert!(error.contains("does not speak HTTP"), "{error}");
    server.join().unwrap();
}

#[test]
fn arguments_outside_their_range_are_named() {
    let refused = |options: Options| run(&options).unwrap_err().to_string();
    assert_eq!(refused(Options { connections: 0, ..options() }), "--connections is 0; allowed: 1 to 20000");
    assert_eq!(refused(Options { entities: 0, ..options() }), "--entities is 0; allowed: 1 to 10000000");
    assert!(refused(Options { duration: Duration::ZERO, ..options() }).starts_with("--duration is 0"));
    assert!(refused(Options { request: "{amount:1}".into(), ..options() }).starts_with("--request is no JSON: "));
    assert!(refused(Options { entity_type: "Account".into(), ..options() }).starts_with("--type \"Account\": "));
    assert!(refused(Options { command: "".into(), ..options() }).starts_with("--command \"\": "));
    assert!(refused(Options { url: "localhost:9865".into(), ..options() }).starts_with("--url \"localhost:9865\" is no http URL"));
    assert!(refused(Options { url: "https://localhost".into(), ..options() }).starts_with("--url is https"));
}

#[test]
fn the_json_line_has_the_promised_keys_in_order() {
    let report = Report { tps: 1.5, p50_ms: 0.25, p99_ms: 2.0, committed: 3, errors: 0, seconds: 2.0, connections: 4, entities: 5 };
    let expected = r#"{"tps":1.5,"p50_ms":0.25,"p99_ms":2.0,"committed":3,"errors":0,"seconds":2.0,"connections":4,"entities":5}"#;
    assert_eq!(serde_json::to_string(&report).unwrap(), expected);
}

#[test]
fn bodies_are_read_however_they_are_cut() {
    let whole = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nRetry-After: 2\r\n\r\n4\r\nab\r\n\r\n3;x=y\r\nc\nd\r\n0\r\nA: b\r\n\r\nnext";
    for cut in 0..whole.len() {
        let (mut input, mut content, mut head) = (bytes::BytesMut::new(), bytes::BytesMut::new(), None);
        let mut is_whole = false;
        for part in [&whole[..cut], &whole[cut..]] {
            input.extend_from_slice(part);
            if head.is_none() {
                head = wire::Head::take(&mut input).unwrap();
            }
            is_whole |= head.as_mut().is_some_and(|head| head.body.take(&mut input, &mut content).unwrap());
        }
        let head = head.unwrap();
        assert_eq!((head.status, head.retry_after), (200, Some(Duration::from_secs(2))));
        assert_eq!((is_whole, &content[..], &input[..]), (true, &b"ab\r\nc\nd"[..], &b"next"[..]), "cut at {cut}");
    }
}
