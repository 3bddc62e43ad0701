//! Holding the server to its answers: an entity's version is the number of commands recorded on it.

use super::wire::Wire;
use super::{BenchError, Count, Load, PAUSE_MIN, Target, single};
use std::fmt;
use std::io::{Error, ErrorKind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The most entities that are compared; with more, the first ones stand for all.
const CHECKED_MAX: usize = 10_000;
const CONNECTIONS: usize = 32;
/// How long to try to read an entity.
const READ_FOR: Duration = Duration::from_secs(10);

/// An entity that is not as the answers say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disagreement {
    /// `type/id`
    pub entity: String,
    /// Commands recorded on it.
    pub answered: u64,
    /// Commands that may have been recorded besides.
    pub unresolved: u64,
    /// Its version, or why it cannot be read.
    pub found: Result<u64, String>,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Disagreement { entity, answered, unresolved, found } = self;
        match found {
            Ok(version) => write!(f, "{entity}: version {version}, but {answered} commands were answered as recorded")?,
            Err(reason) => write!(f, "{entity}: cannot be read ({reason}); {answered} commands were answered as recorded")?,
        }
        if *unresolved > 0 { write!(f, " (and {unresolved} more may have been)") } else { Ok(()) }
    }
}

pub(super) struct Checked {
    pub checked: usize,
    pub disagreements: Vec<Disagreement>,
}

fn runtime() -> Result<tokio::runtime::Runtime, BenchError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(BenchError::Start)
}

fn get(target: &Target, path: &str) -> Vec<u8> {
    format!("GET {}{path} HTTP/1.1\r\nHost: {}\r\n\r\n", target.base, target.authority).into_bytes()
}

/// Whether something at the address speaks HTTP.
pub(super) fn reach(target: &Target, url: &str) -> Result<(), BenchError> {
    let asked = runtime()?.block_on(async { Wire::connect(target).await?.request(&get(target, "/health/live")).await });
    asked.map(drop).map_err(|error| BenchError::Unreachable { url: url.into(), reason: reason(&error) })
}

fn reason(error: &Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => "connection refused".into(),
        ErrorKind::UnexpectedEof => "the connection was closed without an answer".into(),
        _ => error.to_string(),
    }
}

/// Reads the entities back and compares.
pub(super) fn verify(load: &Load) -> Result<Checked, BenchError> {
    let checked = load.counts.len().min(CHECKED_MAX);
    let next = AtomicUsize::new(0);
    let reader = || async {
        let mut wire = None;
        let mut found = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= checked {
                return found;
            }
            let version = version(load, &mut wire, at).await;
            found.extend(compare(&load.target, at, &load.counts[at], version));
        }
    };
    let found = runtime()?.block_on(futures_util::future::join_all((0..CONNECTIONS.min(checked)).map(|_| reader())));
    Ok(Checked { checked, disagreements: found.into_iter().flatten().collect() })
}

fn compare(target: &Target, at: usize, count: &Count, found: Result<u64, String>) -> Option<Disagreement> {
    let [accepted, rejected, unresolved] = [&count.accepted, &count.rejected, &count.unresolved].map(|count| u64::from(count.load(Ordering::Relaxed)));
    let answered = accepted + rejected;
    let agrees = match found {
        // An entity whose creation was only ever refused has a history, but does not exist.
        Ok(0) => accepted == 0,
        Ok(version) => (answered..=answered + unresolved).contains(&version),
        Err(_) => false,
    };
    let entity = format!("{}/{}", target.entity_type, String::from_utf8_lossy(&target.entities[at]));
    (!agrees).then_some(Disagreement { entity, answered, unresolved, found })
}

/// The entity's version; 0 where it does not exist.
async fn version(load: &Load, slot: &mut Option<Wire>, at: usize) -> Result<u64, String> {
    let id = String::from_utf8_lossy(&load.target.entities[at]);
    let request = get(&load.target, &format!("/v1/entities/{}/{id}", load.target.entity_type));
    let until = Instant::now() + READ_FOR;
    loop {
        let failed = match read(&load.target, slot, &request).await {
            Ok((200, body)) => return parse_version(&body),
            Ok((404, body)) if single::code(&body) == "entity-not-found" => return Ok(0),
            Ok((status @ 400..500, body)) => return Err(single::kind(status, &single::code(&body))),
            Ok((status, body)) => single::kind(status, &single::code(&body)),
            Err(error) => reason(&error),
        };
        if Instant::now() >= until {
            return Err(failed);
        }
        tokio::time::sleep(PAUSE_MIN).await;
    }
}

fn parse_version(body: &[u8]) -> Result<u64, String> {
    #[derive(serde::Deserialize)]
    struct Entity {
        version: u64,
    }
    serde_json::from_slice(body).map(|entity: Entity| entity.version).map_err(|error| format!("the answer is no entity: {error}"))
}

async fn read(target: &Target, slot: &mut Option<Wire>, request: &[u8]) -> Result<(u16, bytes::BytesMut), Error> {
    let mut wire = match slot.take() {
        Some(wire) => wire,
        None => Wire::connect(target).await?,
    };
    let mut head = wire.request(request).await?;
    let body = wire.body(&mut head).await?;
    if head.keep_alive {
        *slot = Some(wire);
    }
    Ok((head.status, body))
}
