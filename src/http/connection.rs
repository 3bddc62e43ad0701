//! Connections: accepting them, the time they may take, and ending them without losing an answer.
//!
//! Each connection is one task that drives hyper and watches a clock. Between requests a connection may be silent for
//! `idle_timeout`; once a request's first byte has come its head must be complete within `header_timeout`; while a
//! request is being answered the request's own limits hold. (hyper's own timer starts when a connection falls idle
//! and knows nothing of the time before it sees which version of HTTP is spoken.)
//!
//! A connection beyond `connections_max` is told so and closed. When the listener cannot accept, it pauses instead of
//! spinning. Both are logged at most once a second.
//!
//! To stop: connections that the system has taken already are still served, every answer from then on says
//! `Connection: close`, idle connections are closed a little later, and what remains at the end of the grace is cut.
//! A socket is closed only after the peer was given time to close its end: closing it with unread bytes would reset it,
//! and the peer might never see its last answer.

use super::Options;
use super::body::Body;
use super::incoming::{RequestBody, Turns};
use super::problem;
use crate::metrics;
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What a client that speaks HTTP/2 sends first.
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0";
/// The most fields of a request's head.
const HEADER_FIELDS_MAX: usize = 64;
/// The most requests that run at once on one HTTP/2 connection.
const H2_STREAMS_MAX: u32 = 256;
/// How many bytes of one HTTP/2 request, and of all requests of a connection, may be on their way unread.
const H2_STREAM_WINDOW: u32 = 256 * 1024;
const H2_CONNECTION_WINDOW: u32 = 1024 * 1024;
/// The most HTTP/2 requests that a client may open and cancel before it is cut off.
const H2_RESETS_MAX: usize = 20;
/// How long a peer has to close its end after this one was closed, and how much it may send until then.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES_MAX: usize = 64 * 1024 * 1024;
/// The most connections beyond the limit that are told so at once; further ones are closed without a word.
const REFUSED_MAX: usize = 64;
/// How long to wait when no connection can be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// After the stop began, how long an idle connection may still begin a request.
const STOP_LINGER: Duration = Duration::from_millis(500);

/// Serves all connections until `shutdown` ends and all that was begun is finished, or the grace is over.
pub async fn serve<S, F>(listener: TcpListener, options: &Options, service: S, stop: CancellationToken, shutdown: impl Future<Output = ()>)
where
    S: Fn(Request<RequestBody>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let mut server = Server {
        builder: Arc::new(builder(options)),
        limits: Limits { header_timeout: options.header_timeout, idle_timeout: options.idle_timeout, stop_linger: STOP_LINGER.min(options.grace / 4) },
        connections_max: options.connections_max,
        service,
        stop: stop.clone(),
        cut: CancellationToken::new(),
        tasks: TaskTracker::new(),
        open: Arc::default(),
        refused: Arc::new(Semaphore::new(REFUSED_MAX)),
        refused_log: LogGate::default(),
    };
    let mut failed_log = LogGate::default();
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut shutdown => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => server.take(stream),
            // The peer gave up before it was accepted; nothing is wrong here.
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted) => {}
            Err(error) => {
                if failed_log.opens() {
                    tracing::error!(%error, open = server.open.load(Ordering::Relaxed), "cannot accept connections");
                }
                tokio::select! {
                    () = &mut shutdown => break,
                    () = sleep(ACCEPT_PAUSE) => {}
                }
            }
        }
    }
    stop.cancel();
    // Those that the system has taken already may have sent a request, and closing the listener would reset them.
    while let Some(Ok((stream, _))) = listener.accept().now_or_never() {
        server.take(stream);
    }
    drop(listener);
    server.finish(options.grace).await;
}

fn builder(options: &Options) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        // The clock of this module takes its place.
        .header_read_timeout(None)
        .max_buf_size(options.header_bytes_max.max(8192))
        .max_headers(HEADER_FIELDS_MAX)
        // A client that closes its end after its request still gets its answer.
        .half_close(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10))
        .max_concurrent_streams(H2_STREAMS_MAX)
        .initial_stream_window_size(H2_STREAM_WINDOW)
        .initial_connection_window_size(H2_CONNECTION_WINDOW)
        .max_header_list_size(u32::try_from(options.header_bytes_max).unwrap_or(u32::MAX))
        .max_pending_accept_reset_streams(H2_RESETS_MAX);
    builder
}

/// Lets a line through once a second.
#[derive(Default)]
struct LogGate(Option<Instant>);

impl LogGate {
    fn opens(&mut self) -> bool {
        let opens = self.0.is_none_or(|last| last.elapsed() >= Duration::from_secs(1));
        if opens {
            self.0 = Some(Instant::now());
        }
        opens
    }
}

/// The times that hold for every connection.
#[derive(Debug, Clone, Copy)]
struct Limits {
    header_timeout: Duration,
    idle_timeout: Duration,
    stop_linger: Duration,
}

struct Server<S> {
    builder: Arc<Builder<TokioExecutor>>,
    limits: Limits,
    connections_max: usize,
    service: S,
    /// Cancelled when the stop begins.
    stop: CancellationToken,
    /// Cancelled at the end of the grace.
    cut: CancellationToken,
    tasks: TaskTracker,
    open: Arc<AtomicUsize>,
    refused: Arc<Semaphore>,
    refused_log: LogGate,
}

/// Counts a connection as open until it is dropped.
struct Open(Arc<AtomicUsize>);

impl Open {
    fn new(open: &Arc<AtomicUsize>) -> Open {
        open.fetch_add(1, Ordering::Relaxed);
        metrics::connections().increment(1.0);
        Open(open.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        metrics::connections().decrement(1.0);
    }
}

impl<S, F> Server<S>
where
    S: Fn(Request<RequestBody>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    /// Serves a connection, or refuses it where there are too many.
    fn take(&mut self, stream: TcpStream) {
        if self.open.load(Ordering::Relaxed) >= self.connections_max {
            if self.refused_log.opens() {
                tracing::warn!(connections_max = self.connections_max, "too many connections, refusing more");
            }
            if let Ok(permit) = self.refused.clone().try_acquire_owned() {
                let cut = self.cut.clone();
                self.tasks.spawn(async move {
                    let _permit = permit;
                    let _ = cut.run_until_cancelled(tokio::time::timeout(LINGER, refuse(stream))).await;
                });
            }
            return;
        }
        // Answers are written whole; waiting to fill a packet would only delay them.
        let _ = stream.set_nodelay(true);
        let open = Open::new(&self.open);
        let (builder, limits, service, stop, cut) = (self.builder.clone(), self.limits, self.service.clone(), self.stop.clone(), self.cut.clone());
        self.tasks.spawn(async move {
            let _open = open;
            cut.run_until_cancelled(drive(stream, &builder, limits, service, stop)).await;
        });
    }

    /// Waits until all connections have ended; cuts what is left at the end of the grace.
    async fn finish(self, grace: Duration) {
        self.tasks.close();
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_err() {
            tracing::warn!(connections = self.open.load(Ordering::Relaxed), "the grace is over, cutting connections");
            self.cut.cancel();
            self.tasks.wait().await;
        }
    }
}

/// Answers a connection that is one too many, and waits until the peer has read it.
async fn refuse(mut stream: TcpStream) -> io::Result<()> {
    stream.write_all(problem::too_many_connections().as_bytes()).await?;
    stream.shutdown().await?;
    let mut scratch = [0; 1024];
    while stream.read(&mut scratch).await? > 0 {}
    Ok(())
}

/// Serves one connection to its end.
async fn drive<S, F>(stream: TcpStream, builder: &Builder<TokioExecutor>, limits: Limits, service: S, stop: CancellationToken)
where
    S: Fn(Request<RequestBody>) -> F,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let activity = Arc::new(Activity::new());
    let turns = Turns::default();
    let service = service_fn(|request: Request<Incoming>| {
        let in_flight = InFlight::new(&activity);
        let version = request.version();
        let is_http1 = version <= Version::HTTP_11;
        let (head, body) = request.into_parts();
        let (body, was_left) = RequestBody::new(body, version);
        let mut request = Request::from_parts(head, body);
        turns.take(&mut request);
        let (answered, stop) = (service(request), stop.clone());
        async move {
            let mut response = answered.await;
            // What is left of a body stands in the way of the next request.
            if is_http1 && (stop.is_cancelled() || was_left.load(Ordering::Relaxed)) {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            response.body_mut().hold(in_flight);
            Ok::<_, Infallible>(response)
        }
    });
    let socket = TokioIo::new(Socket { stream, activity: activity.clone(), preface: Preface::default(), linger: None });
    let mut connection = pin!(builder.serve_connection(socket, service));
    let mut stopped = pin!(stop.cancelled());
    let mut clock = pin!(sleep_until(activity.opened + limits.idle_timeout));
    let mut ending = Ending::No;
    std::future::poll_fn(|cx| {
        loop {
            if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                if let Err(error) = ended {
                    tracing::debug!(%error, "connection ended");
                }
                return Poll::Ready(());
            }
            if matches!(ending, Ending::No) && stopped.as_mut().poll(cx).is_ready() {
                let time = if activity.is_h2() { Duration::ZERO } else { limits.stop_linger };
                ending = Ending::Soon(Instant::now() + time);
            }
            let (deadline, act) = match ending {
                Ending::Soon(time) => (time, Act::Close),
                Ending::Closing(time) => (time, Act::Cut),
                Ending::No => activity.deadline(limits),
            };
            if deadline < clock.deadline() {
                clock.as_mut().reset(deadline);
            }
            ready!(clock.as_mut().poll(cx));
            let now = Instant::now();
            if deadline > now {
                clock.as_mut().reset(deadline);
                continue;
            }
            match act {
                Act::Cut if activity.is_busy() => {
                    ending = Ending::Closing(now + limits.idle_timeout);
                }
                Act::Cut => return Poll::Ready(()),
                Act::Close => {
                    // Idle connections end at once, busy ones after what they are busy with.
                    connection.as_mut().graceful_shutdown();
                    ending = Ending::Closing(now + LINGER * 2);
                }
            }
        }
    })
    .await;
}

/// What a connection's clock does when it strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Ends it by the rules of its protocol.
    Close,
    /// Drops it, unless a request is being answered.
    Cut,
}

/// How far the end of a connection has come.
enum Ending {
    No,
    /// To be closed at this time.
    Soon(Instant),
    /// Closed, and to be dropped at this time.
    Closing(Instant),
}

/// What a connection is doing, as seen by its socket and its requests. Times are milliseconds since it was opened.
#[derive(Debug)]
struct Activity {
    opened: Instant,
    /// Requests that are being answered.
    in_flight: AtomicUsize,
    /// When something was last finished or sent.
    idle_since: AtomicU64,
    /// When the first byte of a request's head came, plus one; 0 where none has come.
    head_since: AtomicU64,
    is_h2: AtomicBool,
}

impl Activity {
    fn new() -> Activity {
        Activity {
            opened: Instant::now(),
            in_flight: AtomicUsize::new(0),
            idle_since: AtomicU64::new(0),
            head_since: AtomicU64::new(0),
            is_h2: AtomicBool::new(false),
        }
    }

    fn now(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }

    fn is_busy(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) > 0
    }

    fn is_h2(&self) -> bool {
        self.is_h2.load(Ordering::Relaxed)
    }

    /// Until when the connection may go on as it is, and what is to be done then.
    fn deadline(&self, limits: Limits) -> (Instant, Act) {
        let at = |milliseconds| self.opened + Duration::from_millis(milliseconds);
        if self.is_busy() {
            // Requests have their own limits; this only says when to look again.
            return (Instant::now() + limits.idle_timeout, Act::Close);
        }
        match self.head_since.load(Ordering::Relaxed) {
            // The frames of an HTTP/2 connection are more than heads; one that only pings is idle.
            since if since > 0 && !self.is_h2() => (at(since - 1) + limits.header_timeout, Act::Cut),
            _ => (at(self.idle_since.load(Ordering::Relaxed)) + limits.idle_timeout, Act::Close),
        }
    }
}

/// Counts a request as being answered until it is dropped.
pub struct InFlight(Arc<Activity>);

impl InFlight {
    fn new(activity: &Arc<Activity>) -> InFlight {
        activity.in_flight.fetch_add(1, Ordering::Relaxed);
        activity.head_since.store(0, Ordering::Relaxed);
        InFlight(activity.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.idle_since.store(self.0.now(), Ordering::Relaxed);
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The first bytes of a connection, compared with [`H2_PREFACE`].
#[derive(Default)]
struct Preface {
    matched: usize,
    is_over: bool,
}

impl Preface {
    /// True once, when the preface is complete.
    fn completes(&mut self, bytes: &[u8]) -> bool {
        if self.is_over {
            return false;
        }
        let rest = &H2_PREFACE[self.matched..];
        let length = rest.len().min(bytes.len());
        self.matched += length;
        let matches = rest[..length] == bytes[..length];
        self.is_over = !matches || self.matched == H2_PREFACE.len();
        matches && self.is_over
    }
}

/// A socket that notes what happens on it and, when it is closed, waits for the peer.
struct Socket {
    stream: TcpStream,
    activity: Arc<Activity>,
    preface: Preface,
    linger: Option<Linger>,
}

struct Linger {
    end: Pin<Box<Sleep>>,
    bytes_left: usize,
}

impl Socket {
    fn note_read(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if self.preface.completes(bytes) {
            self.activity.is_h2.store(true, Ordering::Relaxed);
        }
        if !self.activity.is_busy() && self.activity.head_since.load(Ordering::Relaxed) == 0 {
            self.activity.head_since.store(self.activity.now() + 1, Ordering::Relaxed);
        }
    }

    fn note_write(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(1..)) = written {
            self.activity.idle_since.store(self.activity.now(), Ordering::Relaxed);
        }
        written
    }

    /// Ready when the peer has closed its end, or was given enough time.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let linger = self.linger.get_or_insert_with(|| Linger { end: Box::pin(sleep(LINGER)), bytes_left: LINGER_BYTES_MAX });
        if linger.end.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let mut scratch = [0; 8192];
        loop {
            let mut buffer = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() && linger.bytes_left > 0 => linger.bytes_left = linger.bytes_left.saturating_sub(buffer.filled().len()),
                Ok(()) | Err(_) => return Poll::Ready(()),
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        self.note_read(&buffer.filled()[before..]);
        Poll::Ready(read)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note_write(written)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.note_write(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        }
        ready!(self.poll_linger(cx));
        Poll::Ready(Ok(()))
    }
}
