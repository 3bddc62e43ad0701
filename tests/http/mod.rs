//! Rules of HTTP that a real server keeps, tried on raw sockets: each function takes the base URL of a running server
//! with the example account and, unless it says otherwise, the limits that are the defaults.

mod served;

use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn connect(base: &str) -> TcpStream {
    TcpStream::connect(base.trim_start_matches("http://")).await.unwrap()
}

/// Sends bytes and reads until the server closes or the text `until` has come.
async fn exchange(base: &str, request: &[u8], until: &str) -> String {
    let mut stream = connect(base).await;
    stream.write_all(request).await.unwrap();
    let mut read = Vec::new();
    let mut chunk = [0; 4096];
    while !String::from_utf8_lossy(&read).contains(until) {
        match stream.read(&mut chunk).await {
            Ok(length @ 1..) => read.extend_from_slice(&chunk[..length]),
            Ok(0) | Err(_) => break,
        }
    }
    String::from_utf8_lossy(&read).into_owned()
}

fn post(headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("POST /v1/entities/account/http-1/deposit HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// Odd bytes are a 4xx with a code, and the server lives on.
pub async fn odd_bodies_are_told_apart(base: &str) {
    let json = "content-type: application/json\r\n";
    let deep = |depth| [vec![b'['; depth], vec![b']'; depth]].concat();
    let cases: Vec<(Vec<u8>, u16, &str)> = vec![
        (post(json, b"\xef\xbb\xbf{\"amount\":1}"), 400, "malformed-json"),
        (post(json, b"{\"amount\":1} x"), 400, "malformed-json"),
        (post(json, b"{\"amount\":1}{\"amount\":1}"), 400, "malformed-json"),
        (post(json, b"{\"amount\":\"\xff\"}"), 400, "malformed-json"),
        (post(json, b"{\"amount\":1,\"\\u0061mount\":2}"), 400, "malformed-json"),
        (post(json, b"{\"amount\":1e400}"), 400, "malformed-json"),
        (post(json, b"{\"amount\":\"\\ud800\"}"), 400, "malformed-json"),
        (post(json, &deep(101)), 400, "malformed-json"),
        (post(json, &vec![b'['; 500_000]), 400, "malformed-json"),
        (post("", b"{\"amount\":1}"), 415, "unsupported-media-type"),
        (post("content-type: text/plain\r\n", b"{\"amount\":1}"), 415, "unsupported-media-type"),
        (post("content-type: application/json\r\ncontent-encoding: gzip\r\n", b"\x1f\x8b\x08"), 415, "unsupported-media-type"),
        (post(&format!("{json}idempotency-key: \u{1f363}\r\n"), b"{\"amount\":1}"), 400, "invalid-command-id"),
        (
            b"POST /v1/entities/account/http-1/deposit HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000000\r\n\r\n".to_vec(),
            413,
            "request-too-large",
        ),
        (b"POST /v1/entities/account//deposit HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".to_vec(), 400, "invalid-entity-id"),
        (b"GET /v1/entities/account/a%00b HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), 400, "invalid-entity-id"),
        (b"GET /v1/entities/account/%f0%9f HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(), 400, "invalid-entity-id"),
    ];
    for (request, status, code) in cases {
        let answer = exchange(base, &request, "}").await;
        let shown = String::from_utf8_lossy(&request[..request.len().min(200)]).into_owned();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(&format!("\"code\":\"{code}\"")), "{shown}\n{answer}");
    }
    assert!(exchange(base, b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n", "live\"}").await.starts_with("HTTP/1.1 200 "));
}

/// 300 sockets that send one byte of a head at a time are closed, and others are served meanwhile. Wants a short
/// `limits.header_timeout`, such as one second.
pub async fn slow_heads_are_closed(base: &str) {
    let mut slow = Vec::new();
    for _ in 0..300 {
        let (mut reader, mut writer) = connect(base).await.into_split();
        slow.push(tokio::spawn(async move {
            let dripping = async {
                while writer.write_all(b"G").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            };
            let mut byte = [0];
            tokio::select! {
                () = dripping => {}
                _ = reader.read(&mut byte) => {}
            }
        }));
    }
    assert!(exchange(base, b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n", "live\"}").await.starts_with("HTTP/1.1 200 "));
    for slow in slow {
        slow.await.unwrap();
    }
}

/// Thousands of silent connections disturb nobody. The process that runs the test must be allowed as many open files.
pub async fn idle_connections_are_fine(base: &str, count: usize) {
    let mut idle = Vec::with_capacity(count);
    for _ in 0..count {
        idle.push(connect(base).await);
    }
    assert!(exchange(base, b"GET /health/ready HTTP/1.1\r\nhost: x\r\n\r\n", "ready\"}").await.starts_with("HTTP/1.1 200 "));
    drop(idle);
}

/// Requests sent together are answered in order on one connection.
pub async fn pipelined_requests_are_answered(base: &str) {
    let requests = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\nGET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let answers = exchange(base, requests, "\0").await;
    let statuses: Vec<&str> = answers.match_indices("HTTP/1.1 ").map(|(at, _)| &answers[at + 9..at + 12]).collect();
    assert_eq!(statuses, ["200", "404"], "{answers}");
}

/// HTTP/2 with prior knowledge, many requests at once on one connection.
pub async fn http2_is_spoken(base: &str) {
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let answers = futures_util::future::join_all((0..100).map(|_| client.get(format!("{base}/health/live")).send())).await;
    for answer in answers {
        let answer = answer.unwrap();
        assert_eq!((answer.version(), answer.status().as_u16()), (reqwest::Version::HTTP_2, 200));
    }
}

/// Commands that one HTTP/2 connection sends one after another to one entity are handled in that order, though each is a stream of its own.
pub async fn http2_keeps_commands_in_order(base: &str) {
    let stream = connect(base).await;
    let (mut requests, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut answers = Vec::new();
    for number in 0..100 {
        requests = requests.ready().await.unwrap();
        let request = hyper::Request::post(format!("{base}/v1/entities/account/in-order/deposit"))
            .header("content-type", "application/json")
            .header("idempotency-key", number.to_string())
            .body(())
            .unwrap();
        let (answer, mut body) = requests.send_request(request, false).unwrap();
        body.send_data("{\"amount\":1}".into(), true).unwrap();
        answers.push(answer);
    }
    for (number, answer) in answers.into_iter().enumerate() {
        let answer = answer.await.unwrap();
        let version = answer.headers()["etag"].to_str().unwrap();
        assert_eq!((answer.status().as_u16(), version), (200, format!("\"{}\"", number + 1).as_str()));
    }
}

/// An empty body is no request, also where its length was not known before it ended, and needs no content type.
pub async fn empty_bodies_are_no_requests(base: &str) {
    let chunked = b"POST /v1/entities/account/empty-1/open HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
    let announced = b"POST /v1/entities/account/empty-2/open HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n";
    for request in [&chunked[..], &announced[..]] {
        let answer = exchange(base, request, "}").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    let lines = exchange(base, b"POST /v1/commands HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", "\0").await;
    assert!(lines.starts_with("HTTP/1.1 200 "), "{lines}");
}

/// A body that nobody wants does not keep the client from reading why.
pub async fn early_refusals_are_heard(base: &str) {
    let refused = post("content-type: text/plain\r\n", &vec![b'x'; 3_000_000]);
    let answer = exchange(base, &refused, "}").await.to_lowercase();
    assert!(answer.starts_with("http/1.1 415 ") && answer.contains("\r\nconnection: close\r\n"), "{answer}");
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    for (kind, status) in [("application/json", 413), ("text/plain", 415)] {
        let request = client.post(format!("{base}/v1/entities/account/a/deposit")).header("content-type", kind).body(vec![b'1'; 3_000_000]);
        let answer = request.send().await.unwrap();
        assert_eq!((answer.version(), answer.status().as_u16()), (reqwest::Version::HTTP_2, status));
        assert!(answer.text().await.unwrap().contains("\"code\""));
    }
}
