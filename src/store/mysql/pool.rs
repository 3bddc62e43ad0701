//! Connections to MySQL or MariaDB: owns all of them, and the settings of their sessions.
//!
//! A connection is used for one statement at a time and goes back only after an answer that left it as it was; after an error, a
//! timeout, or where the caller's future was dropped, it is closed. So no statement ever meets what another one left behind. The driver's own
//! pool is not used: it repairs connections of which this cannot be known, at the price of round trips and of waits without a limit.
//!
//! Connections that idle longer than [`IDLE_MAX`] are closed too: the server drops them at `wait_timeout`, and a statement sent then would have an
//! unknown outcome. Nothing is retried here.

use super::server::Server;
use crate::store::error::{mysql_connect_text, mysql_is_duplicate_key, mysql_is_read_only, mysql_is_unknown_database};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Row};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// How long a connection may lie idle and still be used again; well below the session's `wait_timeout`.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// How long connecting may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long saying goodbye may take.
const DISCONNECT_MAX: Duration = Duration::from_secs(1);

/// Sent once on every connection. Whatever the server's defaults are, values are refused rather than changed, a backslash escapes, a frozen
/// client loses its session, and messages are in the language in which the name of a key stands last.
const SESSION: &str = "SET NAMES utf8mb4, \
    sql_mode = 'STRICT_TRANS_TABLES,STRICT_ALL_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION', \
    time_zone = '+00:00', lc_messages = 'en_US', \
    /*!80000 transaction_isolation = 'READ-COMMITTED', */ /*M! tx_isolation = 'READ-COMMITTED', */ \
    innodb_lock_wait_timeout = 5, wait_timeout = 60, net_read_timeout = 30, autocommit = 1";

/// Why there is no answer to a statement.
pub(super) enum Failure {
    /// It was surely not sent: no connection could be had.
    NotSent(NotConnected),
    /// It was sent, and the server or the connection failed.
    Sent(mysql_async::Error),
    /// It was sent, and no answer came in time.
    TimedOut,
}

/// Why no connection could be had.
#[derive(Debug)]
pub(super) enum NotConnected {
    /// The server does not know the database.
    UnknownDatabase,
    /// Anything else, in words.
    Other(String),
}

impl std::fmt::Display for NotConnected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotConnected::UnknownDatabase => f.write_str("the database does not exist"),
            NotConnected::Other(text) => f.write_str(text),
        }
    }
}

/// A bounded number of connections; a clone shares them.
#[derive(Clone)]
pub(super) struct Pool(Arc<Shared>);

struct Shared {
    opts: Opts,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Idle>>,
    /// Raised when all connections become stale; a connection of an earlier generation does not go back.
    generation: AtomicU64,
    statement_timeout: Duration,
    server: Mutex<Option<Arc<Server>>>,
}

struct Idle {
    conn: Conn,
    since: Instant,
}

/// A connection in use. Dropping it closes the connection; only [`Borrowed::give_back`] keeps it.
struct Borrowed {
    conn: Option<Conn>,
    permit: Option<OwnedSemaphorePermit>,
    generation: u64,
    shared: Arc<Shared>,
}

impl Pool {
    /// Connects when first needed.
    pub(super) fn new(opts: Opts, size: usize, statement_timeout: Duration) -> Pool {
        // Known values spare a round trip at each connect. The socket file is never preferred: the URL says where to go.
        let opts = OptsBuilder::from_opts(opts).prefer_socket(false).tcp_nodelay(true).max_allowed_packet(Some(1 << 30)).wait_timeout(Some(60));
        Pool(Arc::new(Shared {
            opts: opts.into(),
            permits: Arc::new(Semaphore::new(size.max(1))),
            idle: Mutex::default(),
            generation: AtomicU64::new(0),
            statement_timeout,
            server: Mutex::default(),
        }))
    }

    /// Runs one statement in the text protocol and returns its rows, in one round trip.
    pub(super) async fn query(&self, statement: &[u8]) -> Result<Vec<Row>, Failure> {
        self.run(statement, None).await
    }

    /// The same, but asks the server after `patience` to give the statement up where it still can. What became of it is told as ever.
    pub(super) async fn query_within(&self, statement: &[u8], patience: Duration) -> Result<Vec<Row>, Failure> {
        self.run(statement, Some(patience)).await
    }

    async fn run(&self, statement: &[u8], patience: Option<Duration>) -> Result<Vec<Row>, Failure> {
        let mut borrowed = self.borrow().await.map_err(Failure::NotSent)?;
        let Some(conn) = &mut borrowed.conn else { unreachable!("a connection is taken out only at its end") };
        let id = conn.id();
        let is_asked = AtomicBool::new(false);
        let give_up = async {
            let Some(patience) = patience else { return std::future::pending().await };
            tokio::time::sleep(patience).await;
            is_asked.store(true, Ordering::Relaxed);
            // Boxed, since this runs a statement in its turn. Whether it gets through shows in what becomes of the other one.
            let kill = format!("KILL QUERY {id}");
            let _ = Box::pin(self.run(kill.as_bytes(), None)).await;
            std::future::pending().await
        };
        let answer = async {
            tokio::select! {
                answer = timeout(self.0.statement_timeout, conn.query::<Row, _>(statement)) => answer,
                never = give_up => never,
            }
        };
        match answer.await {
            // What was asked of the server may still be on its way and would meet the next statement: that connection is closed.
            Ok(Ok(rows)) if is_asked.load(Ordering::Relaxed) => Ok(rows),
            Ok(Ok(rows)) => {
                borrowed.give_back();
                Ok(rows)
            }
            Ok(Err(error)) => {
                if mysql_is_duplicate_key(&error) && !is_asked.load(Ordering::Relaxed) {
                    borrowed.give_back();
                } else if error.is_fatal() || mysql_is_read_only(&error) {
                    self.drop_idle();
                }
                Err(Failure::Sent(error))
            }
            Err(_) => {
                // Where this one hears nothing, the others may be as deaf; each would cost its caller as long a wait.
                self.drop_idle();
                Err(Failure::TimedOut)
            }
        }
    }

    /// What the server that was connected to last said about itself.
    pub(super) fn server(&self) -> Option<Arc<Server>> {
        lock(&self.0.server).clone()
    }

    /// Raised whenever a connection was lost.
    pub(super) fn generation(&self) -> u64 {
        self.0.generation.load(Ordering::Acquire)
    }

    /// Closes every connection as soon as nobody uses it: the server went away or changed its role, and what else lies here is stale as well.
    fn drop_idle(&self) {
        self.0.generation.fetch_add(1, Ordering::Relaxed);
        for idle in lock(&self.0.idle).drain(..) {
            close(idle.conn, None);
        }
    }

    async fn borrow(&self) -> Result<Borrowed, NotConnected> {
        let shared = Arc::clone(&self.0);
        let permit = timeout(shared.statement_timeout, Arc::clone(&shared.permits).acquire_owned()).await;
        let Ok(Ok(permit)) = permit else { return Err(NotConnected::Other("all connections are busy".into())) };
        let generation = shared.generation.load(Ordering::Relaxed);
        let conn = match self.take_idle() {
            Some(conn) => conn,
            None => self.connect().await?,
        };
        Ok(Borrowed { conn: Some(conn), permit: Some(permit), generation, shared })
    }

    /// The connection that was used last; closes those that idled too long, which lie at the bottom.
    fn take_idle(&self) -> Option<Conn> {
        let mut stack = lock(&self.0.idle);
        let stale = stack.partition_point(|idle| idle.since.elapsed() >= IDLE_MAX);
        for idle in stack.drain(..stale) {
            close(idle.conn, None);
        }
        stack.pop().map(|idle| idle.conn)
    }

    async fn connect(&self) -> Result<Conn, NotConnected> {
        let connecting = async {
            let mut conn = Conn::new(self.0.opts.clone()).await?;
            conn.query_drop(SESSION).await?;
            let server = Server::read(&mut conn).await?;
            Ok((conn, server))
        };
        match timeout(CONNECT_MAX.min(self.0.statement_timeout), connecting).await {
            Ok(Ok((conn, server))) => {
                self.learn(server);
                Ok(conn)
            }
            Ok(Err(error)) if mysql_is_unknown_database(&error) => Err(NotConnected::UnknownDatabase),
            Ok(Err(error)) => Err(NotConnected::Other(mysql_connect_text(&error))),
            Err(_) => Err(NotConnected::Other("connecting takes too long".into())),
        }
    }

    /// Keeps what a new connection told, and warns where it is new and endangers commits.
    fn learn(&self, server: Server) {
        let mut known = lock(&self.0.server);
        if known.as_deref() != Some(&server) {
            server.warn();
            *known = Some(Arc::new(server));
        }
    }
}

impl Borrowed {
    fn give_back(mut self) {
        let is_current = self.generation == self.shared.generation.load(Ordering::Relaxed);
        if is_current && let Some(conn) = self.conn.take() {
            lock(&self.shared.idle).push(Idle { conn, since: Instant::now() });
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take() {
            close(conn, self.permit.take());
        }
    }
}

/// Closes a connection without anybody waiting for it; its permit is free once it is closed.
fn close(conn: Conn, permit: Option<OwnedSemaphorePermit>) {
    // Without a runtime the process is ending, and the socket closes with it.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(async move {
            // How the server takes the goodbye changes nothing.
            let _ = timeout(DISCONNECT_MAX, conn.disconnect()).await;
            drop(permit);
        });
    }
}

/// The lock guards plain values that no panic can leave half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
