//! The handler processes of one set of modules, from the server's side.
//!
//! A batch takes one process for itself, waiting until one is free. Its outcomes count as they arrive, so whatever a process
//! dies of, only the tasks without an outcome are run again, elsewhere, and careful: with each outcome told of at once. The task
//! at which two processes in a row die is the guilty one. Processes that are used up are replaced in the background.
//!
//! Large states stay in processes between batches. A batch goes to the process that has its states, where that is idle, and names them
//! instead of sending them; a process that has lost one says so and gets it whole.

use super::child::SUBCOMMAND;
use super::held::{Drafts, Held};
use super::module::LOG_PREFIX;
use super::protocol::{End, Flush, HEADER, Keep, Message, Named, Report, frame};
use super::states::States;
use crate::core::batch::HandlerFaultKind;
use crate::core::patch::PatchError;
use crate::core::{Failure, HandlerFault, Json, Outcome, State, Work};
use crate::handler::{HandlersUnavailable, Ran};
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
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
    /// From how many bytes of text on a state stays in a process.
    pub resident_min: usize,
    /// How many bytes of text the states take at most that stay in a process of one module.
    pub resident_bytes_max: usize,
}

/// A process, ready for batches. Dropping it kills it.
pub struct Worker {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    buffer: Vec<u8>,
    stall_limit: Duration,
    held: Held,
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
        let mut worker = Worker { process, input, output: BufReader::new(output), buffer: Vec::new(), stall_limit: start.stall_limit, held: Held::default() };
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
    drafts: Mutex<Drafts>,
    drafts_bytes_max: usize,
    /// The name that a state was given last.
    last_name: AtomicU64,
}

impl Pool {
    /// A pool of at most `processes`, the first of which is there already.
    pub fn new(start: Start, processes: usize, first: Worker) -> Arc<Pool> {
        let drafts_bytes_max = start.resident_bytes_max.saturating_mul(processes);
        let (drafts, last_name) = Default::default();
        Arc::new(Pool { start, idle: Mutex::new(vec![first]), places: Arc::new(Semaphore::new(processes)), drafts, drafts_bytes_max, last_name })
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Worker>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn drafts(&self) -> std::sync::MutexGuard<'_, Drafts> {
        self.drafts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process that is ready: the idle one that keeps a large state of the batch, else one that keeps nothing, else any, or a new one.
    async fn worker(&self, module: usize, work: &Work, large: &[usize]) -> Result<Worker, HandlersUnavailable> {
        let idle = {
            let mut idle = self.idle();
            let known = |worker: &Worker| large.iter().filter(|entity| held_name(worker, module, work, **entity).is_some()).count();
            let best = if large.is_empty() { None } else { (0..idle.len()).max_by_key(|at| known(&idle[*at])).filter(|at| known(&idle[*at]) > 0) };
            let best = best.or_else(|| idle.iter().rposition(|worker| worker.held.is_empty())).or(idle.len().checked_sub(1));
            best.map(|at| idle.remove(at))
        };
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
        // Whether large states stay in the process: not once they may have been in the way of a command.
        let mut may_keep = true;
        // How many processes have died at the task that is next, as far as is known.
        let mut deaths = 0;
        while outcomes.len() < total {
            if work.done - first < outcomes.len() {
                // What is known already has happened as far as the rest is concerned.
                let texts = self.follow(&work, &mut states, &outcomes[work.done - first..])?;
                go_on(&mut work, &outcomes, first, texts);
            }
            let large = if may_keep { self.large(&work) } else { Vec::new() };
            let mut worker = self.worker(module, &work, &large).await?;
            let names: Vec<Named> = large.iter().map(|entity| self.name(&worker, module, &work, *entity)).collect();
            let keep = if may_keep { Keep::Large(names.clone()) } else { Keep::Nothing };
            let message = encode(module, flush, keep, &mut work)?;
            for entity in &work.entities {
                worker.held.forget(module, &entity.id);
            }
            let before = outcomes.len();
            match worker.exchange(&message, &mut outcomes, total).await {
                Ended::Told(End::Done) => {
                    let texts = self.follow(&work, &mut states, &outcomes[work.done - first..])?;
                    for Named { entity, after, .. } in names {
                        if let Some(text) = texts[entity].as_ref().filter(|text| text.len() >= self.start.resident_min) {
                            worker.held.keep(module, &work.entities[entity].id, text.clone(), after, self.start.resident_bytes_max);
                        }
                    }
                    self.idle().push(worker);
                    states.leave(&mut self.drafts(), self.drafts_bytes_max);
                    return Ok(Ran { outcomes, states: texts });
                }
                // The same process gets the whole; what it keeps of others is still good.
                Ended::Told(End::Missing) => {
                    self.idle().push(worker);
                    continue;
                }
                Ended::Told(End::UsedUp | End::More) => may_keep = may_keep && outcomes.len() > before,
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
        let texts = self.follow(&work, &mut states, &outcomes[work.done - first..])?;
        states.leave(&mut self.drafts(), self.drafts_bytes_max);
        Ok(Ran { outcomes, states: texts })
    }

    /// The entities of a batch whose states may stay in a process.
    fn large(&self, work: &Work) -> Vec<usize> {
        let is_large = |entity: &usize| work.entities[*entity].state.as_ref().is_some_and(|state| state.len() >= self.start.resident_min);
        (0..work.entities.len()).filter(is_large).collect()
    }

    /// How an entity's state is called before the batch, where the process keeps it, and after.
    fn name(&self, worker: &Worker, module: usize, work: &Work, entity: usize) -> Named {
        Named { entity, before: held_name(worker, module, work, entity), after: self.last_name.fetch_add(1, Relaxed) + 1 }
    }

    /// The whole states after the outcomes of the tasks that are next.
    fn follow(&self, work: &Work, states: &mut States, outcomes: &[Outcome]) -> Result<Vec<Option<Json>>, HandlersUnavailable> {
        let broken = |error: PatchError| HandlersUnavailable(error.to_string());
        for (task, outcome) in work.tasks[work.done..].iter().zip(outcomes) {
            states.follow(task.entity, outcome, |text| self.drafts().take(text)).map_err(broken)?;
        }
        states.texts().map_err(broken)
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

/// Notes in the work what is done of it, with the states after that.
fn go_on(work: &mut Work, outcomes: &[Outcome], first: usize, texts: Vec<Option<Json>>) {
    for outcome in &outcomes[work.done - first..] {
        work.record(outcome.clone());
    }
    for (entity, text) in work.entities.iter_mut().zip(texts) {
        entity.state = text.map(State::Whole);
    }
}

/// How a process calls the state of an entity of a batch; none where it does not keep it.
fn held_name(worker: &Worker, module: usize, work: &Work, entity: usize) -> Option<u64> {
    let entity = &work.entities[entity];
    worker.held.name(module, &entity.id, entity.state.as_ref()?.text()?)
}

/// A batch as a message. States that the process keeps are named, not sent.
fn encode(module: usize, flush: Flush, keep: Keep, work: &mut Work) -> Result<Vec<u8>, HandlersUnavailable> {
    let mut texts = Vec::new();
    if let Keep::Large(names) = &keep {
        for Named { entity, .. } in names.iter().filter(|name| name.before.is_some()) {
            let state = &mut work.entities[*entity].state;
            let held = state.as_ref().map(|state| State::Held { len: state.len() });
            texts.push((*entity, std::mem::replace(state, held)));
        }
    }
    let message = frame(&Message::Run { module, flush, keep, work: Cow::Borrowed(work) });
    for (entity, text) in texts {
        work.entities[entity].state = text;
    }
    message.map_err(|error| HandlersUnavailable(format!("the batch cannot be sent: {error}")))
}

fn failed(kind: HandlerFaultKind, message: String) -> Outcome {
    Outcome::Failed(Failure::HandlerFailed(HandlerFault { kind, message }))
}
