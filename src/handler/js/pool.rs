//! The handler processes of one set of modules, from the server's side.
//!
//! A batch takes one process for itself, waiting until one is free. Its outcomes count as they arrive, so whatever a process
//! dies of, only the tasks without an outcome are run again, elsewhere, and careful: with each outcome told of at once. The task
//! at which two processes in a row die is the guilty one. Processes that are used up are replaced in the background.

use super::child::SUBCOMMAND;
use super::module::LOG_PREFIX;
use super::protocol::{End, Flush, HEADER, Message, Report, frame};
use super::states::States;
use crate::core::batch::HandlerFaultKind;
use crate::core::patch::PatchError;
use crate::core::{Failure, HandlerFault, Json, Outcome, State, Work};
use crate::handler::{HandlersUnavailable, Ran};
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tracing::{debug, warn};

/// How often starting a process is tried before a batch gives up.
const START_TRIES: u32 = 3;
/// How many silences a process may let pass with no outcome at all, telling only that it lives.
const EMPTY_BEATS_MAX: u32 = 60;

/// How processes are started.
pub struct Start {
    /// The program; it must call `child_main` where its first argument is [`SUBCOMMAND`].
    pub program: PathBuf,
    /// What the processes are called in a list of processes: the folder of sources.
    pub label: String,
    /// The message that loads the modules.
    pub load: Vec<u8>,
    /// How many modules it loads.
    pub modules: usize,
    /// How long a process may be silent.
    pub stall_limit: Duration,
}

/// A process, ready for batches. Dropping it kills it.
pub struct Worker {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    buffer: Vec<u8>,
    stall_limit: Duration,
}

/// How an exchange with a process ended.
enum Ended {
    Told(End),
    Died(String),
}

impl Worker {
    /// Starts a process and has it load the modules: its reports, and how loading ended.
    pub async fn start(start: &Start) -> Result<(Worker, Vec<Report>, End), String> {
        let mut command = Command::new(&start.program);
        command.arg(SUBCOMMAND).arg(&start.label).env_clear().env("TZ", "UTC").current_dir("/").kill_on_drop(true);
        // A Ctrl-C at the terminal is for the server, which still has batches to finish.
        command.process_group(0);
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{} cannot be started: {error}", start.program.display()))?;
        let pipes = (process.stdin.take(), process.stdout.take(), process.stderr.take());
        let (Some(input), Some(output), Some(errors)) = pipes else { return Err("the process has no pipes".into()) };
        tokio::spawn(log(errors));
        let mut worker = Worker { process, input, output: BufReader::new(output), buffer: Vec::new(), stall_limit: start.stall_limit };
        let mut reports = Vec::with_capacity(start.modules);
        match worker.exchange(&start.load, &mut reports, start.modules).await {
            Ended::Told(end) => Ok((worker, reports, end)),
            Ended::Died(error) => Err(format!("the process died while it loaded the modules: {error}")),
        }
    }

    /// Sends a message and collects the items of the answer, at most `items_max`.
    async fn exchange<T: DeserializeOwned>(&mut self, message: &[u8], items: &mut Vec<T>, items_max: usize) -> Ended {
        let failed = match self.try_exchange(message, items, items_max).await {
            Ok(end) => return Ended::Told(end),
            Err(error) => error,
        };
        // Whatever went wrong, the process is of no more use; how it ended explains more than a closed pipe.
        let _ = self.process.start_kill();
        let status = timeout(self.stall_limit, self.process.wait()).await;
        let status = status.ok().and_then(Result::ok).map_or_else(|| "it does not end".to_owned(), |status| status.to_string());
        Ended::Died(format!("{failed} ({status})"))
    }

    async fn try_exchange<T: DeserializeOwned>(&mut self, message: &[u8], items: &mut Vec<T>, items_max: usize) -> Result<End, String> {
        let silent = |_| "it was silent for too long".to_owned();
        for part in message.chunks(1 << 20) {
            timeout(self.stall_limit, self.input.write_all(part)).await.map_err(silent)?.map_err(|error| error.to_string())?;
        }
        let mut empty_beats = 0;
        loop {
            let mut header = [0; HEADER];
            timeout(self.stall_limit, self.output.read_exact(&mut header)).await.map_err(silent)?.map_err(|error| error.to_string())?;
            let (end, count, length) = End::read(header).ok_or("it told nonsense")?;
            self.buffer.resize(length.checked_sub(HEADER - 4).ok_or("it told nonsense")?, 0);
            timeout(self.stall_limit, self.output.read_exact(&mut self.buffer)).await.map_err(silent)?.map_err(|error| error.to_string())?;
            let mut rest = self.buffer.as_slice();
            for _ in 0..count {
                let (item, after) = postcard::take_from_bytes(rest).map_err(|error| error.to_string())?;
                items.push(item);
                rest = after;
            }
            if items.len() > items_max || end == End::Done && items.len() < items_max {
                return Err("it told of another number of items than were asked for".into());
            }
            self.buffer.clear();
            self.buffer.shrink_to(1 << 20);
            empty_beats = if count > 0 { 0 } else { empty_beats + 1 };
            if end != End::More {
                return Ok(end);
            }
            if empty_beats > EMPTY_BEATS_MAX {
                return Err("it lives but gets nothing done".into());
            }
        }
    }
}

/// Passes what a process writes to its standard error on to the log: what handlers log, and complaints of its own.
async fn log(errors: ChildStderr) {
    let mut lines = BufReader::new(errors).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match line.strip_prefix(LOG_PREFIX) {
            Some(line) => debug!(target: "quokka::handler::console", "{}", line.trim_start()),
            None => warn!(line, "handler process"),
        }
    }
}

/// The processes.
pub struct Pool {
    start: Start,
    idle: Mutex<Vec<Worker>>,
    places: Arc<Semaphore>,
}

impl Pool {
    /// A pool of at most `processes`, the first of which is there already.
    pub fn new(start: Start, processes: usize, first: Worker) -> Arc<Pool> {
        Arc::new(Pool { start, idle: Mutex::new(vec![first]), places: Arc::new(Semaphore::new(processes)) })
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Worker>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process that is ready: an idle one, or a new one.
    async fn worker(&self) -> Result<Worker, HandlersUnavailable> {
        let idle = self.idle().pop();
        match idle {
            Some(worker) => Ok(worker),
            None => self.start_one().await,
        }
    }

    async fn start_one(&self) -> Result<Worker, HandlersUnavailable> {
        let mut last = String::new();
        for _ in 0..START_TRIES {
            match Worker::start(&self.start).await {
                Ok((worker, reports, End::Done)) if reports.iter().all(Result::is_ok) => return Ok(worker),
                Ok(_) => last = "the modules no longer load".to_owned(),
                Err(error) => last = error,
            }
            warn!(error = last, "a handler process does not start");
        }
        Err(HandlersUnavailable(last))
    }

    /// Runs a batch on one module.
    pub async fn run(self: &Arc<Self>, module: usize, mut work: Work) -> Result<Ran, HandlersUnavailable> {
        let place = self.places.clone().acquire_owned().await.map_err(|error| HandlersUnavailable(error.to_string()))?;
        let first = work.done;
        let total = work.tasks.len() - first;
        let mut outcomes: Vec<Outcome> = Vec::with_capacity(total);
        let mut states = States::new(&work.entities);
        let mut flush = Flush::AtEnd;
        // How many processes have died at the task that is next, as far as is known.
        let mut deaths = 0;
        while outcomes.len() < total {
            // What is known already has happened as far as the rest is concerned.
            follow(&mut work, &mut states, &outcomes, first)?;
            let mut worker = self.worker().await?;
            let message = Message::Run { module, flush, work: Cow::Borrowed(&work) };
            let message = frame(&message).map_err(|error| HandlersUnavailable(format!("the batch cannot be sent: {error}")))?;
            let before = outcomes.len();
            match worker.exchange(&message, &mut outcomes, total).await {
                Ended::Told(End::Done) => {
                    self.idle().push(worker);
                    let states = follow(&mut work, &mut states, &outcomes, first)?;
                    return Ok(Ran { outcomes, states });
                }
                Ended::Told(End::UsedUp | End::More) => {}
                Ended::Told(End::Overran) => {
                    outcomes.push(failed(HandlerFaultKind::TimeLimit, "the handler used more CPU time than allowed, and its process was ended".into()));
                    deaths = 0;
                }
                Ended::Died(error) => {
                    warn!(error, "a handler process died");
                    // Where outcomes are told of one by one, the task after the last one is where it died.
                    deaths = match flush {
                        Flush::AtEnd => 0,
                        Flush::EachCommand if outcomes.len() > before => 1,
                        Flush::EachCommand => deaths + 1,
                    };
                    flush = Flush::EachCommand;
                    if deaths == 2 {
                        outcomes.push(failed(HandlerFaultKind::Crash, error));
                        deaths = 0;
                    }
                }
            }
            drop(worker);
        }
        self.replace(place);
        let states = follow(&mut work, &mut states, &outcomes, first)?;
        Ok(Ran { outcomes, states })
    }

    /// Starts a process for the place of one that was used up, for whoever comes next.
    fn replace(self: &Arc<Self>, place: OwnedSemaphorePermit) {
        let pool = Arc::downgrade(self);
        tokio::spawn(async move {
            let Some(pool) = pool.upgrade() else { return };
            if let Ok(worker) = pool.start_one().await {
                pool.idle().push(worker);
            }
            drop(place);
        });
    }
}

/// Notes the outcomes that are new; the whole states after them.
fn follow(work: &mut Work, states: &mut States, outcomes: &[Outcome], first: usize) -> Result<Vec<Option<Json>>, HandlersUnavailable> {
    let broken = |error: PatchError| HandlersUnavailable(error.to_string());
    while work.done - first < outcomes.len() {
        let outcome = &outcomes[work.done - first];
        states.follow(work.tasks[work.done].entity, outcome).map_err(broken)?;
        work.record(outcome.clone());
    }
    let texts = states.texts().map_err(broken)?;
    for (entity, text) in work.entities.iter_mut().zip(&texts) {
        entity.state = text.clone().map(State::Whole);
    }
    Ok(texts)
}

fn failed(kind: HandlerFaultKind, message: String) -> Outcome {
    Outcome::Failed(Failure::HandlerFailed(HandlerFault { kind, message }))
}
