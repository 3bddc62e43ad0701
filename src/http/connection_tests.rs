//! Rules of connections, over real sockets: a small service stands in for the routes.

use super::body::{self, Body};
use super::connection::serve;
use super::limits::read_body;
use super::request::RequestId;
use super::{Options, problem};
use crate::http::incoming::RequestBody;
use hyper::{Request, Response};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

fn options() -> Options {
    Options {
        node: "n1".into(),
        body_max: 1000,
        bulk_line_max: 1000,
        bundle_max: 1000,
        header_timeout: Duration::from_secs(60),
        header_bytes_max: 8192,
        body_timeout: Duration::from_secs(60),
        connections_max: 1000,
        idle_timeout: Duration::from_secs(60),
        grace: Duration::from_secs(60),
    }
}

struct Running {
    address: SocketAddr,
    shutdown: oneshot::Sender<()>,
    ended: JoinHandle<()>,
    /// Each answer of `/wait` takes a permit.
    permits: Arc<Semaphore>,
    /// Told when a request for `/wait` has come.
    waiting: Arc<Notify>,
    stop: CancellationToken,
}

/// `/wait` waits for a permit; every path answers with the length of the body.
async fn start(options: Options) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (shutdown, ended) = oneshot::channel();
    let (permits, waiting, stop) = (Arc::new(Semaphore::new(0)), Arc::new(Notify::new()), CancellationToken::new());
    let (service_permits, service_waiting, service_stop) = (permits.clone(), waiting.clone(), stop.clone());
    let ended = tokio::spawn(async move {
        let (max, time) = (options.body_max, options.body_timeout);
        let service = move |request: Request<RequestBody>| answer(request, service_permits.clone(), service_waiting.clone(), max, time);
        let shutdown = async move {
            let _ = ended.await;
        };
        serve(listener, &options, service, service_stop, shutdown).await;
    });
    Running { address, shutdown, ended, permits, waiting, stop }
}

async fn answer(request: Request<RequestBody>, permits: Arc<Semaphore>, waiting: Arc<Notify>, max: usize, time: Duration) -> Response<Body> {
    if request.uri().path() == "/wait" {
        waiting.notify_one();
        permits.acquire().await.unwrap().forget();
    }
    match read_body(request.into_body(), max, time).await {
        Ok(read) => body::response(read.len().to_string().into_bytes()),
        Err(problem) => problem.respond(&RequestId::fresh()),
    }
}

impl Running {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }
}

async fn send(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).await.unwrap();
}

/// Reads until the text has come.
async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains(text) {
        let mut chunk = [0; 4096];
        let length = stream.read(&mut chunk).await.unwrap();
        assert!(length > 0, "{text} did not come, but {}", String::from_utf8_lossy(&read));
        read.extend_from_slice(&chunk[..length]);
    }
    String::from_utf8(read).unwrap()
}

/// Reads to the end of the connection, however it ends.
async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut read = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut chunk).await {
        read.extend_from_slice(&chunk[..length]);
    }
    String::from_utf8(read).unwrap()
}

const GET: &str = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";

#[tokio::test]
async fn slow_heads_are_cut_and_others_are_served() {
    let server = start(Options { header_timeout: Duration::from_millis(200), ..options() }).await;
    let mut slow = Vec::new();
    for _ in 0..300 {
        let (reader, mut writer) = server.connect().await.into_split();
        let writing = tokio::spawn(async move {
            // Never ends by itself: writing fails once the server has closed.
            while writer.write_all(b"G").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        slow.push((reader, writing));
    }
    let mut healthy = server.connect().await;
    send(&mut healthy, GET).await;
    read_until(&mut healthy, "\r\n\r\n0").await;
    for (mut reader, writing) in slow {
        let mut byte = [0];
        assert!(matches!(reader.read(&mut byte).await, Ok(0) | Err(_)));
        writing.await.unwrap();
    }
    send(&mut healthy, GET).await;
    read_until(&mut healthy, "\r\n\r\n0").await;
}

#[tokio::test]
async fn silent_connections_are_closed_before_and_after_a_request() {
    let server = start(Options { idle_timeout: Duration::from_millis(100), ..options() }).await;
    let mut silent = server.connect().await;
    assert_eq!(read_to_end(&mut silent).await, "");
    let mut once = server.connect().await;
    send(&mut once, GET).await;
    assert!(read_to_end(&mut once).await.ends_with("\r\n\r\n0"));
}

#[tokio::test]
async fn a_request_that_takes_long_is_not_idle() {
    let server = start(Options { idle_timeout: Duration::from_millis(50), header_timeout: Duration::from_millis(50), ..options() }).await;
    let mut stream = server.connect().await;
    send(&mut stream, "GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await;
    server.waiting.notified().await;
    // Longer than both timeouts; nothing is asserted about the time itself.
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.permits.add_permits(1);
    read_until(&mut stream, "\r\n\r\n0").await;
}

#[tokio::test]
async fn bodies_beyond_the_limit_are_refused_before_they_are_sent() {
    let server = start(options()).await;
    let announced = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n";
    let chunked = format!("POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n{}\r\n", "x".repeat(1001));
    for request in [announced, &chunked] {
        let mut stream = server.connect().await;
        send(&mut stream, request).await;
        let answer = read_until(&mut stream, "}").await;
        assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("request-too-large"), "{answer}");
    }
}

#[tokio::test]
async fn a_client_that_sends_too_much_before_it_reads_still_gets_its_answer() {
    let server = start(options()).await;
    let mut stream = server.connect().await;
    let body = "x".repeat(4_000_000);
    send(&mut stream, &format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
    let answer = read_to_end(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[tokio::test]
async fn a_body_that_stays_away_is_a_408_and_one_that_breaks_off_a_400() {
    let server = start(Options { body_timeout: Duration::from_millis(50), ..options() }).await;
    let request = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n123";
    let mut stream = server.connect().await;
    send(&mut stream, request).await;
    assert!(read_until(&mut stream, "}").await.starts_with("HTTP/1.1 408 "));
    let server = start(options()).await;
    let mut stream = server.connect().await;
    send(&mut stream, request).await;
    stream.shutdown().await.unwrap();
    assert!(read_to_end(&mut stream).await.starts_with("HTTP/1.1 400 "));
}

#[tokio::test]
async fn heads_beyond_the_limits_are_refused() {
    let server = start(options()).await;
    let fields: String = (0..100).map(|number| format!("x-{number}: 1\r\n")).collect();
    let long = "x".repeat(10_000);
    for request in [format!("GET / HTTP/1.1\r\nhost: x\r\n{fields}\r\n"), format!("GET / HTTP/1.1\r\nhost: x\r\nlong: {long}\r\n\r\n")] {
        let mut stream = server.connect().await;
        send(&mut stream, &request).await;
        let answer = read_to_end(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = start(options()).await;
    let mut stream = server.connect().await;
    let requests: String = (1..=3).map(|length| format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{}", "x".repeat(length))).collect();
    send(&mut stream, &(requests + "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await;
    let answers = read_to_end(&mut stream).await;
    let bodies: Vec<&str> = answers.split("\r\n\r\n").skip(1).map(|rest| &rest[..1]).collect();
    assert_eq!(bodies, ["1", "2", "3", "0"], "{answers}");
}

#[tokio::test]
async fn a_client_that_closes_its_end_after_the_request_gets_its_answer() {
    let server = start(options()).await;
    let mut stream = server.connect().await;
    send(&mut stream, "GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await;
    stream.shutdown().await.unwrap();
    server.waiting.notified().await;
    server.permits.add_permits(1);
    assert!(read_to_end(&mut stream).await.ends_with("\r\n\r\n0"));
}

#[tokio::test]
async fn http2_is_spoken_with_prior_knowledge_and_idles_out() {
    let server = start(Options { idle_timeout: Duration::from_millis(200), header_timeout: Duration::from_millis(50), ..options() }).await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let url = format!("http://{}/", server.address);
    let requests = (0..20).map(|length| client.post(&url).body("x".repeat(length)).send());
    for (length, answer) in futures_util::future::join_all(requests).await.into_iter().enumerate() {
        let answer = answer.unwrap();
        assert_eq!(answer.version(), reqwest::Version::HTTP_2);
        assert_eq!(answer.text().await.unwrap(), length.to_string());
    }
    let mut silent = server.connect().await;
    send(&mut silent, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    let mut frames = Vec::new();
    silent.read_to_end(&mut frames).await.unwrap();
    // The server says goodbye (a GOAWAY frame) before it closes.
    assert!(frames.windows(4).any(|window| window[3] == 7), "{frames:?}");
}

#[tokio::test]
async fn one_connection_too_many_is_told_so() {
    let server = start(Options { connections_max: 2, ..options() }).await;
    let mut served = [server.connect().await, server.connect().await];
    for stream in &mut served {
        send(stream, GET).await;
        read_until(stream, "\r\n\r\n0").await;
    }
    let mut refused = server.connect().await;
    let answer = read_to_end(&mut refused).await;
    assert!(answer.starts_with("HTTP/1.1 503 Service Unavailable\r\n") && answer.contains("retry-after: 1"), "{answer}");
    let (head, content) = answer.split_once("\r\n\r\n").unwrap();
    let value: serde_json::Value = serde_json::from_str(content).unwrap();
    assert_eq!(value["code"], "overloaded");
    assert!(head.contains(&format!("content-length: {}", content.len())), "{answer}");
    drop(served);
    // A place is free as soon as the server has noticed that the others are gone.
    loop {
        let mut stream = server.connect().await;
        let _ = stream.write_all(GET.as_bytes()).await;
        let _ = stream.shutdown().await;
        if read_to_end(&mut stream).await.starts_with("HTTP/1.1 200 ") {
            break;
        }
    }
}

#[tokio::test]
async fn a_stop_finishes_what_runs_and_says_goodbye_to_kept_connections() {
    let server = start(options()).await;
    let (mut busy, mut kept, mut idle) = (server.connect().await, server.connect().await, server.connect().await);
    for stream in [&mut kept, &mut idle] {
        send(stream, GET).await;
        let answer = read_until(stream, "\r\n\r\n0").await;
        assert!(!answer.contains("connection: close"), "{answer}");
    }
    send(&mut busy, "GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await;
    server.waiting.notified().await;
    server.shutdown.send(()).unwrap();
    server.stop.cancelled().await;
    send(&mut kept, GET).await;
    let answer = read_to_end(&mut kept).await;
    assert!(answer.contains("connection: close") && answer.ends_with("\r\n\r\n0"), "{answer}");
    assert_eq!(read_to_end(&mut idle).await, "");
    server.permits.add_permits(1);
    let answer = read_to_end(&mut busy).await;
    assert!(answer.contains("connection: close") && answer.ends_with("\r\n\r\n0"), "{answer}");
    server.ended.await.unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}

#[tokio::test]
async fn connections_that_the_system_took_before_the_stop_are_served() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    send(&mut stream, GET).await;
    let service = async |_: Request<RequestBody>| body::response("0");
    let service = move |request| -> std::pin::Pin<Box<dyn Future<Output = Response<Body>> + Send>> { Box::pin(service(request)) };
    let served = tokio::spawn(async move { serve(listener, &options(), service, CancellationToken::new(), async {}).await });
    let answer = read_to_end(&mut stream).await;
    assert!(answer.contains("connection: close") && answer.ends_with("\r\n\r\n0"), "{answer}");
    served.await.unwrap();
}

#[tokio::test]
async fn what_does_not_end_within_the_grace_is_cut() {
    let server = start(Options { grace: Duration::from_millis(100), ..options() }).await;
    let mut stuck = server.connect().await;
    send(&mut stuck, "GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await;
    server.waiting.notified().await;
    server.shutdown.send(()).unwrap();
    server.ended.await.unwrap();
    assert_eq!(read_to_end(&mut stuck).await, "");
}

#[test]
fn the_refusal_is_one_whole_answer() {
    let answer = problem::too_many_connections();
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.ends_with('}'), "{answer}");
}
