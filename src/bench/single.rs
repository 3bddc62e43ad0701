//! One connection that posts one command after another.

use super::report::Tally;
use super::target::{ID_LENGTH, fresh_id};
use super::wire::{Head, Wire};
use super::{Load, PAUSE_MAX, PAUSE_MIN, Settled};
use std::time::{Duration, Instant};

/// Sends commands until the run ends and all of its own are settled.
pub(super) async fn connection(load: &Load, connection: usize) -> Tally {
    let mut tally = Tally::default();
    let mut template = load.target.template();
    let mut wire = None;
    let mut id = [0; ID_LENGTH];
    for step in 0.. {
        let started = Instant::now();
        if started >= load.stop {
            break;
        }
        let entity = load.entity(connection, step);
        fresh_id(&mut id);
        let request = template.fill(&load.target.entities[entity], &id);
        let settled = settle(load, &mut wire, request).await;
        load.settle(&mut tally, entity, started, settled);
    }
    tally
}

/// What one try came to.
enum Try {
    Settled(Settled),
    /// It did not happen: try again later.
    NotYet {
        kind: String,
        pause: Option<Duration>,
    },
    /// It may have happened: try again with the same id.
    Unknown {
        kind: String,
    },
    /// No connection.
    Unconnected {
        kind: String,
    },
}

/// Sends one request until it is known what became of it.
async fn settle(load: &Load, wire: &mut Option<Wire>, request: &[u8]) -> Settled {
    let mut may_have_happened = false;
    let mut pause = PAUSE_MIN;
    loop {
        let (kind, asked) = match attempt(load, wire, request).await {
            Try::Settled(Settled::Failed(kind)) if may_have_happened => return Settled::Unresolved(kind),
            Try::Settled(settled) => return settled,
            Try::NotYet { kind, pause } => (kind, pause),
            Try::Unknown { kind } => {
                may_have_happened = true;
                (kind, None)
            }
            Try::Unconnected { kind } => (kind, None),
        };
        let wait = asked.unwrap_or(pause).min(PAUSE_MAX);
        pause = (pause * 2).min(PAUSE_MAX);
        if Instant::now() + wait >= load.give_up(may_have_happened) {
            return if may_have_happened { Settled::Unresolved(kind) } else { Settled::Failed(kind) };
        }
        tokio::time::sleep(wait).await;
    }
}

async fn attempt(load: &Load, slot: &mut Option<Wire>, request: &[u8]) -> Try {
    let mut wire = match slot.take() {
        Some(wire) => wire,
        None => match Wire::connect(&load.target).await {
            Ok(wire) => wire,
            Err(error) => return Try::Unconnected { kind: format!("no connection: {error}") },
        },
    };
    match exchange(&mut wire, request).await {
        Ok((outcome, head)) => {
            if head.keep_alive {
                *slot = Some(wire);
            }
            outcome
        }
        Err(error) => Try::Unknown { kind: format!("connection lost: {error}") },
    }
}

async fn exchange(wire: &mut Wire, request: &[u8]) -> Result<(Try, Head), std::io::Error> {
    let mut head = wire.request(request).await?;
    if head.status == 200 {
        wire.skip(&mut head).await?;
        return Ok((Try::Settled(Settled::Accepted), head));
    }
    let body = wire.body(&mut head).await?;
    let outcome = match (head.status, code(&body)) {
        (422, code) if code == "rejected" => Try::Settled(Settled::Rejected),
        (429 | 503, code) => Try::NotYet { kind: kind(head.status, &code), pause: head.retry_after },
        (504, code) => Try::Unknown { kind: kind(504, &code) },
        (status, code) => Try::Settled(Settled::Failed(kind(status, &code))),
    };
    Ok((outcome, head))
}

/// The `code` of a problem; empty where the body is something else.
pub(super) fn code(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Problem {
        code: String,
    }
    serde_json::from_slice(body).map(|problem: Problem| problem.code).unwrap_or_default()
}

/// How an error is counted, such as `404 entity-not-found`.
pub(super) fn kind(status: u16, code: &str) -> String {
    format!("{status} {code}").trim_end().to_string()
}
