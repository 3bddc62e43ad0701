//! A closed-loop load generator: as many connections as asked, each sending its next command when the last is answered.
//!
//! It costs little CPU itself (own sockets, prepared request bytes, reused buffers, few threads), because it usually
//! shares the machine with what it measures. It holds the server to its word: a command whose outcome is unknown is sent again
//! with the same id until it is known, and in the end each entity's version must be the number of commands that were
//! recorded on it.
//!
//! It writes only to entities that it makes up for the run, and never deletes anything.

mod bulk;
mod report;
mod single;
mod target;
mod verify;
mod wire;

pub use report::Report;
pub use verify::Disagreement;

use report::Tally;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use target::Target;

/// How long after the end of the run a command is tried again whose outcome is not known.
const RESOLVE_FOR: Duration = Duration::from_secs(30);
/// How long after the end of the run a command is tried again that surely did not happen.
const RETRY_FOR: Duration = Duration::from_secs(5);
/// How long to wait for one answer before its outcome counts as unknown.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Pauses before a broken connection is made again, and the longest that `Retry-After` is followed.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The most connections.
const CONNECTIONS_MAX: usize = 20_000;
/// The most entities.
const ENTITIES_MAX: usize = 10_000_000;

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the server is: `http://host:port`.
    pub url: String,
    /// How many fresh entities the commands go to.
    pub entities: usize,
    /// How many connections send.
    pub connections: usize,
    /// For how long.
    pub duration: Duration,
    /// The entity type.
    pub entity_type: String,
    /// The command.
    pub command: String,
    /// Its request, as JSON.
    pub request: String,
    /// Whether to stream commands to `POST /v1/commands` instead of posting each.
    pub bulk: bool,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An argument cannot be used.
    #[error("{0}")]
    Argument(String),
    /// No connection, or no HTTP.
    #[error("{url} cannot be reached: {reason}\nIs the server running? Start it with `quokka serve`, or say where it is with --url http://HOST:PORT.")]
    Unreachable {
        /// Where it was looked for.
        url: String,
        /// What went wrong.
        reason: String,
    },
    /// A thread or a runtime cannot be made.
    #[error("the load generator cannot start: {0}")]
    Start(std::io::Error),
}

/// What was measured, and whether the server kept its word.
#[derive(Debug)]
pub struct Outcome {
    /// The figures.
    pub report: Report,
    /// Errors by kind, such as `404 entity-not-found`, with their number.
    pub errors: Vec<(String, u64)>,
    /// How many entities were compared.
    pub checked: usize,
    /// Entities whose version is not the number of commands recorded on them.
    pub disagreements: Vec<Disagreement>,
}

impl Outcome {
    /// Why the run counts as failed, where it does.
    pub fn failure(&self) -> Option<String> {
        if let Some((kind, _)) = self.errors.first()
            && self.report.committed == 0
            && (kind.contains("unknown-entity-type") || kind.contains("unknown-command"))
        {
            return Some(format!("no command was recorded: {kind}; name what the server has with --type and --command"));
        }
        if let Some(first) = self.disagreements.first() {
            let count = self.disagreements.len();
            return Some(format!("{count} of {} entities disagree with the answers, such as {first}", self.checked));
        }
        if self.report.committed > 0 {
            return None;
        }
        Some(match self.errors.first() {
            Some((kind, _)) if kind.contains("entity-not-found") => {
                "no command was recorded: the entities are new, so the command must create them (creates: true or \"if-missing\")".into()
            }
            Some((kind, _)) => format!("no command was recorded: {kind}"),
            None => "no command was recorded in this time".into(),
        })
    }
}

/// What the answers said about one entity.
#[derive(Default)]
struct Count {
    accepted: AtomicU32,
    rejected: AtomicU32,
    /// Commands that may or may not have happened.
    unresolved: AtomicU32,
}

/// What all connections share.
struct Load {
    target: Target,
    counts: Vec<Count>,
    connections: usize,
    /// No new command is sent after this.
    stop: Instant,
    recorded: AtomicU64,
}

/// What became of one command, as far as it will be known.
enum Settled {
    Accepted,
    Rejected,
    /// It did not happen: `404 entity-not-found`, for instance.
    Failed(String),
    /// It may have happened.
    Unresolved(String),
}

impl Load {
    fn give_up(&self, may_have_happened: bool) -> Instant {
        self.stop + if may_have_happened { RESOLVE_FOR } else { RETRY_FOR }
    }

    /// The entity that a connection's command goes to: they take turns, so that all are used evenly.
    fn entity(&self, connection: usize, step: usize) -> usize {
        (connection + step * self.connections) % self.counts.len()
    }

    fn settle(&self, tally: &mut Tally, entity: usize, started: Instant, settled: Settled) {
        let count = &self.counts[entity];
        match settled {
            Settled::Accepted => count.accepted.fetch_add(1, Ordering::Relaxed),
            Settled::Rejected => count.rejected.fetch_add(1, Ordering::Relaxed),
            Settled::Failed(kind) => return tally.fail(kind),
            Settled::Unresolved(kind) => {
                count.unresolved.fetch_add(1, Ordering::Relaxed);
                return tally.fail(kind);
            }
        };
        tally.record(started.elapsed());
        self.recorded.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs the load and checks the outcome. Blocks; shows its progress where standard error is a terminal.
pub fn run(options: &Options) -> Result<Outcome, BenchError> {
    let target = Target::new(options)?;
    let connections = options.connections;
    verify::reach(&target, &options.url)?;
    let started = Instant::now();
    let counts = std::iter::repeat_with(Count::default).take(options.entities).collect();
    let load = Arc::new(Load { target, counts, connections, stop: started + options.duration, recorded: AtomicU64::new(0) });
    let tally = drive(&load, options, started)?;
    let checked = verify::verify(&load)?;
    let report = tally.report(started, options);
    Ok(Outcome { report, errors: tally.errors(), checked: checked.checked, disagreements: checked.disagreements })
}

/// Spreads the connections over a few threads, each with a runtime of its own, and waits for all.
fn drive(load: &Arc<Load>, options: &Options, started: Instant) -> Result<Tally, BenchError> {
    let threads = (std::thread::available_parallelism().map_or(1, usize::from) / 4).clamp(1, 8).min(load.connections);
    let (send, receive) = mpsc::channel();
    for thread in 0..threads {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(BenchError::Start)?;
        let (load, send, is_bulk) = (load.clone(), send.clone(), options.bulk);
        let work = move || {
            let tally = runtime.block_on(async {
                let mut tasks = tokio::task::JoinSet::new();
                for connection in (thread..load.connections).step_by(threads) {
                    let load = load.clone();
                    tasks.spawn(async move { if is_bulk { bulk::connection(&load, connection).await } else { single::connection(&load, connection).await } });
                }
                tasks.join_all().await.into_iter().reduce(Tally::add).unwrap_or_default()
            });
            // The receiver waits for every thread; it is gone only where the process ends.
            let _ = send.send(tally);
        };
        std::thread::Builder::new().name("bench".into()).spawn(work).map_err(BenchError::Start)?;
    }
    drop(send);
    let progress = progress_bar(options.duration);
    let mut total = Tally::default();
    // Ends when the last thread has sent its part and is gone.
    loop {
        match receive.recv_timeout(Duration::from_millis(100)) {
            Ok(tally) => total = total.add(tally),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let elapsed = started.elapsed();
                progress.set_position(elapsed.min(options.duration).as_millis() as u64);
                let recorded = load.recorded.load(Ordering::Relaxed);
                progress.set_message(format!("{recorded} recorded, {:.0} a second", recorded as f64 / elapsed.as_secs_f64()));
            }
        }
    }
    progress.finish_and_clear();
    Ok(total)
}

fn progress_bar(duration: Duration) -> indicatif::ProgressBar {
    if !std::io::stderr().is_terminal() {
        return indicatif::ProgressBar::hidden();
    }
    let bar = indicatif::ProgressBar::new(duration.as_millis() as u64);
    match indicatif::ProgressStyle::with_template("{elapsed} {bar:30} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests;
