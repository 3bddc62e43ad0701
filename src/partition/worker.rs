//! The worker of one partition: waits for a command, drains what else is there, decides the batch, answers everybody.
//!
//! While a batch commits, the next one is gathered and run already, on the states that the first one leaves if it gets through. Nothing of it is
//! sent before that, and where the first one fails in any way it goes back to the queue, in its old order. Its commands are claimed only when they
//! are about to be sent, so that until then their callers may give up and know that nothing happened.

use super::batch::{Batch, Decided, Verdict};
use super::commit::Commit;
use super::queue::{Envelope, Holdup, LookUp, Request};
use super::run::{Chunk, Executed, Run};
use super::{CommandError, HandlersInForce, Shared, Turn, TypeQueues, metrics};
use crate::core::{Answer, CommandId, EntityId, Event, LoadedEntity, Partition, State, StoredEvent};
use crate::store::{StoreError, barrier_since};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// The first wait before something is tried again; each further one is twice as long, up to [`BACKOFF_MAX`].
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// How long a commit takes, until one was measured.
const COMMIT_EXPECTED: Duration = Duration::from_millis(5);
/// The longest wait for a turn against other writers.
const TURN_MAX: Duration = Duration::from_millis(200);
/// While a batch commits, how often to look whether enough waits to be run, and the shortest time between two looks.
const LOOKS_PER_COMMIT: u32 = 8;
const LOOK_MIN: Duration = Duration::from_millis(1);
/// What waits is run once it makes this part of the batch that commits: each run costs a message to a handler process.
const CHUNKS_PER_BATCH: usize = 4;
/// From how many bytes of whole states on a batch waits for company, for which part of a commit at most, and how often it looks.
const HEAVY_BYTES: usize = 64 << 10;
const LINGER_PART: u32 = 3;
const LINGER_STEP: Duration = Duration::from_millis(3);

/// What the tasks of one partition share.
pub(super) struct Core {
    pub shared: Arc<Shared>,
    pub partition: Partition,
    queues: Arc<TypeQueues>,
    pub holdup: Arc<Holdup>,
}

/// The service: owns the queue's receiving end and all that is remembered about the partition.
pub(super) struct Worker {
    core: Arc<Core>,
    requests: mpsc::Receiver<Request>,
    /// What had no room in the last batch, or waits for another command of the same id; older than all in the queue.
    carried: VecDeque<Request>,
    /// The largest event id seen committed; none where it must be read.
    head: Option<u64>,
    /// How long the last commit took, and how many conflicts came since.
    last_commit: Duration,
    conflicts: u32,
    /// A batch that is decided and whose callers are not told yet.
    untold: Option<(Batch, Vec<LookUp>)>,
    /// Whether the last batch was slow for the size of the states that it left, however many commands it held.
    is_heavy: bool,
    /// Held while a batch is decided, and how many bundles had appended when it was held last.
    turn: Arc<Mutex<Turn>>,
    strangers: u64,
}

/// A batch before its commit.
#[derive(Default)]
struct Prepared {
    batch: Batch,
    look_ups: Vec<LookUp>,
    /// What its handlers made so far, on the states that the batch before it leaves; none where it is still to be run.
    run: Option<Run>,
    /// Commands of it that are being run.
    running: Option<BoxFuture<'static, Result<Executed, CommandError>>>,
    /// Something went wrong on the way; running it again, from the start, decides.
    is_spoilt: bool,
    bytes: usize,
}

impl Worker {
    pub fn new(
        shared: Arc<Shared>,
        queues: Arc<TypeQueues>,
        partition: Partition,
        requests: mpsc::Receiver<Request>,
        holdup: Arc<Holdup>,
        turn: Arc<Mutex<Turn>>,
    ) -> Worker {
        let core = Arc::new(Core { shared, partition, queues, holdup });
        let (carried, head, untold, last_commit) = (VecDeque::new(), None, None, COMMIT_EXPECTED);
        Worker { core, requests, carried, head, last_commit, conflicts: 0, untold, is_heavy: false, turn, strangers: 0 }
    }

    /// Runs until the node stops taking commands and all that were taken are answered.
    pub async fn run(mut self) {
        let closing = self.core.shared.closing.clone();
        let mut prepared = Prepared::default();
        loop {
            if prepared.is_empty() {
                self.tell();
                let first = if self.carried.is_empty() {
                    tokio::select! {
                        biased;
                        () = closing.cancelled(), if !self.requests.is_closed() => {
                            self.requests.close();
                            continue;
                        }
                        request = self.requests.recv() => match request {
                            Some(request) => Some(request),
                            None => return,
                        },
                    }
                } else {
                    None
                };
                self.gather(first, &mut prepared, None);
            }
            // A fault of quokka in one batch must not silence the partition: its callers hear that the outcome is unknown, and
            // the next batch starts from what the database says.
            prepared = AssertUnwindSafe(self.settle(prepared)).catch_unwind().await.unwrap_or_else(|_| {
                tracing::error!(partition = %self.core.partition, "a batch broke down; its callers are told that the outcome is unknown");
                self.head = None;
                Prepared::default()
            });
        }
    }

    /// How many commands wait here.
    fn waiting(&self) -> usize {
        self.carried.len() + self.requests.len()
    }

    /// Takes what is there, up to the limits of a batch, and answers at once what was answered before. Further tries of commands in
    /// `committing` take part in its answers.
    fn gather(&mut self, first: Option<Request>, prepared: &mut Prepared, mut committing: Option<&mut Batch>) {
        let (rows_max, bytes_max) = (self.core.shared.options.batch_rows_max, self.core.shared.options.batch_bytes_max);
        let mut taken = usize::from(first.is_some());
        let mut next = first;
        while prepared.batch.leaders.len() < rows_max && prepared.bytes < bytes_max {
            let request = match next.take().or_else(|| self.carried.pop_front()) {
                Some(request) => request,
                None => match self.requests.try_recv() {
                    Ok(request) => {
                        taken += 1;
                        request
                    }
                    Err(_) => break,
                },
            };
            match request {
                Request::Command(envelope) => {
                    prepared.bytes += envelope.command.request.len();
                    self.admit(&mut prepared.batch, &mut committing, envelope);
                }
                Request::LookUp(look_up) => prepared.look_ups.push(look_up),
            }
        }
        if let Some(first) = next {
            self.carried.push_front(first);
        }
        self.core.shared.queued.fetch_sub(taken, Ordering::Relaxed);
    }

    fn admit(&self, batch: &mut Batch, committing: &mut Option<&mut Batch>, mut envelope: Envelope) {
        if envelope.is_abandoned() {
            return;
        }
        if let Some(committing) = committing {
            match committing.join(envelope) {
                None => return,
                Some(other) => envelope = other,
            }
        }
        let command = &envelope.command;
        if !command.is_fresh_id
            && let Some(answer) = self.core.shared.caches.answer(&self.core.partition, &command.entity_id, &command.command_id)
        {
            let replay = answer.replay_for(&command.name, &command.request);
            if envelope.claim() {
                self.core.answer(envelope, Verdict::Answer(answer, replay));
            }
            return;
        }
        batch.add(envelope);
    }

    /// Decides a batch, and prepares the next one while this one commits.
    async fn settle(&mut self, mut prepared: Prepared) -> Prepared {
        prepared.finish_running().await;
        let turn = self.turn.clone().lock_owned().await;
        let Prepared { mut batch, look_ups, mut run, .. } = prepared;
        if turn.strangers != self.strangers {
            // A bundle came in between, so the head has moved, and perhaps the states on which this one was run.
            (self.strangers, self.head, run) = (turn.strangers, None, None);
        }
        let is_as_run = batch.claim() & !batch.expire(Instant::now());
        let mut next = Prepared::default();
        match self.core.queues.handlers.load_full() {
            _ if !batch.has_undecided() => {}
            Some(handlers) => {
                let run = run.filter(|_| is_as_run);
                if let Err(error) = self.attempt(&mut batch, &handlers, run, Some(&mut next)).await {
                    batch.fail_rest(error);
                }
                if batch.has_undecided() {
                    self.set_back(&mut next).await;
                    self.decide(&mut batch, &handlers).await;
                }
            }
            None => batch.fail_rest(CommandError::UnknownEntityType),
        }
        drop(turn);
        self.core.holdup.set(false);
        self.tell();
        if batch.has_later() {
            // These come before all that was gathered since.
            self.set_back(&mut next).await;
        }
        let is_shared = batch.leaders.len() > 1;
        self.untold = Some((batch, look_ups));
        if next.running.is_some() {
            self.tell();
            next.finish_running().await;
        }
        // A single caller has nobody to wait for.
        let expects_company = self.is_heavy && is_shared;
        if expects_company {
            // The callers of the last batch are about to come back.
            self.tell();
            self.linger().await;
        }
        let is_worth_it = expects_company || next.batch.leaders.len() < self.waiting();
        if is_worth_it && !next.is_empty() && next.can_grow(&self.core.shared.options) {
            // Most of what waits came too late to be run along; a commit without it would be a small one.
            self.tell();
            self.gather(None, &mut next, None);
            next.start(&self.core, &HashMap::new());
        }
        next
    }

    /// Tries until every command of the batch has its verdict.
    async fn decide(&mut self, batch: &mut Batch, handlers: &Arc<HandlersInForce>) {
        loop {
            batch.expire(Instant::now());
            if !batch.has_undecided() {
                return;
            }
            if let Err(error) = self.attempt(batch, handlers, None, None).await {
                batch.fail_rest(error);
            }
        }
    }

    /// One try: every command that gets through it has a verdict afterwards; the others are left for another try.
    async fn attempt(
        &mut self,
        batch: &mut Batch,
        handlers: &Arc<HandlersInForce>,
        run: Option<Run>,
        mut next: Option<&mut Prepared>,
    ) -> Result<(), CommandError> {
        let core = self.core.clone();
        if run.is_none() || self.head.is_none() {
            self.tell();
        }
        let run = match run {
            Some(run) => run,
            None => core.run_all(batch, handlers).await?,
        };
        let (indices, events) = loop {
            let head = self.read_head().await?;
            let (indices, events) = run.events(batch, head);
            let events = Arc::new(events);
            if events.is_empty() {
                break (indices, events);
            }
            match self.commit(&events, batch, &run, next.take()).await {
                Commit::Done(took) => {
                    (self.last_commit, self.conflicts) = (took, 0);
                    self.head = Some(head + events.len() as u64);
                    self.core.shared.commits.publish(&self.core.partition, head + events.len() as u64);
                    break (indices, events);
                }
                Commit::Taken { was_unknown } => {
                    self.head = None;
                    let own: &[Event] = if was_unknown { &events } else { &[] };
                    // What took the key may be the append itself, so a look-up that cannot be made leaves its callers in doubt.
                    let found = core.reconcile(batch, &run, own).await.map_err(|error| if was_unknown { CommandError::OutcomeUnknown } else { error })?;
                    if !found.any_found {
                        // Lost a race against another writer: whoever waits longest here loses the next one, so the waits are drawn.
                        self.wait_for_turn().await;
                    }
                    if found.any_found || found.any_moved {
                        return Ok(());
                    }
                }
                Commit::TooMany => {
                    batch.halve(&indices);
                    return Ok(());
                }
                Commit::NotDone(error) => return Err(error),
            }
        };
        self.is_heavy = run.whole_bytes() >= HEAVY_BYTES;
        core.accept(batch, &run, &indices, &events);
        core.confirm_failures(batch, run).await
    }

    /// Commits the events of a batch. Meanwhile its predecessor's callers are told, and the next batch is prepared on the states that
    /// this one leaves if it gets through.
    async fn commit(&mut self, events: &Arc<Vec<Event>>, batch: &mut Batch, run: &Run, next: Option<&mut Prepared>) -> Commit {
        let (core, events, deadline) = (self.core.clone(), events.clone(), batch.deadline());
        let mut committing = tokio::spawn(async move { core.commit(&events, deadline).await });
        self.tell();
        let committed = match next {
            // What had no room here goes first in the next batch, and is known only after this one.
            Some(next) if !run.is_full() => {
                let committed = self.prepare(&mut committing, batch, run, next).await;
                if !matches!(committed, Ok(Commit::Done(_))) {
                    // It was run on states that are not there.
                    self.set_back(next).await;
                }
                committed
            }
            _ => (&mut committing).await,
        };
        committed.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }

    /// Gathers and runs, in as few chunks as it takes, until the commit is through.
    async fn prepare(
        &mut self,
        committing: &mut JoinHandle<Commit>,
        batch: &mut Batch,
        run: &Run,
        next: &mut Prepared,
    ) -> Result<Commit, tokio::task::JoinError> {
        let ahead: HashMap<&EntityId, &LoadedEntity> = run.bases.iter().map(|base| (&base.before.id, &base.after)).collect();
        let look = (self.last_commit / LOOKS_PER_COMMIT).max(LOOK_MIN);
        let wanted = (batch.leaders.len() / CHUNKS_PER_BATCH).max(1);
        loop {
            if next.running.is_none() && next.can_grow(&self.core.shared.options) && self.waiting() >= wanted {
                self.gather(None, next, Some(batch));
                next.start(&self.core, &ahead);
            }
            tokio::select! {
                biased;
                committed = &mut *committing => return committed,
                () = next.finish_running(), if next.running.is_some() => {}
                () = tokio::time::sleep(look), if next.running.is_none() => {}
            }
        }
    }

    /// Waits for more commands, as long as they keep coming and for a part of what a commit takes: each batch writes its large states anew.
    async fn linger(&mut self) {
        let until = Instant::now() + self.last_commit / LINGER_PART;
        let mut waiting = self.waiting();
        while Instant::now() < until {
            tokio::time::sleep(LINGER_STEP).await;
            let before = std::mem::replace(&mut waiting, self.waiting());
            if waiting == before {
                return;
            }
        }
    }

    /// Puts what was gathered too early back in front of the queue.
    async fn set_back(&mut self, prepared: &mut Prepared) {
        let mut prepared = std::mem::take(prepared);
        // Handlers that run are left to end: their process would have to be replaced.
        prepared.finish_running().await;
        let look_ups = prepared.look_ups.into_iter().map(Request::LookUp);
        let requests: Vec<Request> = prepared.batch.into_envelopes().map(Request::Command).chain(look_ups).collect();
        for request in requests.into_iter().rev() {
            self.carried.push_front(request);
        }
    }

    async fn read_head(&mut self) -> Result<u64, CommandError> {
        let mut patience = self.core.patience();
        loop {
            if let Some(head) = self.head {
                return Ok(head);
            }
            match self.core.shared.store.head(&self.core.partition).await {
                Ok(head) => self.head = Some(head),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    /// Tells the callers of the last batch.
    fn tell(&mut self) {
        let Some((batch, look_ups)) = self.untold.take() else { return };
        self.deliver(batch.decided());
        for look_up in look_ups {
            let core = self.core.clone();
            self.core.shared.workers.spawn(async move {
                let found = core.find_answer(&look_up.entity_id, &look_up.command_id).await;
                let _ = look_up.reply.send(found);
            });
        }
    }

    fn deliver(&mut self, batch: Decided) {
        let mut carried = Vec::new();
        for (leader, follower) in batch.followers {
            let (first, verdict) = &batch.leaders[leader];
            match verdict {
                Verdict::Answer(answer, _) => {
                    let replay = answer.replay_for(&follower.command.name, &follower.command.request);
                    self.core.answer(follower, Verdict::Answer(answer.clone(), replay));
                }
                Verdict::Failed(error) if first.is_same_try(&follower) => self.core.answer(follower, Verdict::Failed(error.clone())),
                Verdict::Failed(_) | Verdict::Later | Verdict::Abandoned => carried.push(follower),
            }
        }
        let mut later = Vec::new();
        for (envelope, verdict) in batch.leaders {
            match verdict {
                Verdict::Later => later.push(envelope),
                verdict => self.core.answer(envelope, verdict),
            }
        }
        // Before what waits already: those are younger.
        for envelope in later.into_iter().chain(carried).rev() {
            envelope.release();
            self.carried.push_front(Request::Command(envelope));
        }
    }

    /// Waits up to twice the time of a commit, longer with each conflict in a row.
    async fn wait_for_turn(&mut self) {
        let reach = self.last_commit.max(Duration::from_millis(1)) * 2 * (1 << self.conflicts.min(5));
        self.conflicts += 1;
        tokio::time::sleep(reach.min(TURN_MAX).mul_f64(rand::random())).await;
    }
}

impl Prepared {
    fn is_empty(&self) -> bool {
        self.batch.leaders.is_empty() && self.look_ups.is_empty()
    }

    /// Whether more may be gathered and run.
    fn can_grow(&self, options: &super::Options) -> bool {
        !self.is_spoilt
            && self.batch.leaders.len() < options.batch_rows_max
            && self.run.as_ref().is_none_or(|run| !run.is_full() && run.bytes_left(options.batch_bytes_max) > 0)
    }

    /// Starts to run what was gathered and not run yet. `ahead` are the states that commits under way leave.
    fn start(&mut self, core: &Arc<Core>, ahead: &HashMap<&EntityId, &LoadedEntity>) {
        let from = self.run.as_ref().map_or(0, |run| run.indices.len());
        let Some(handlers) = self.run.as_ref().map(|run| run.handlers.clone()).or_else(|| core.queues.handlers.load_full()) else {
            self.is_spoilt = true;
            return;
        };
        if from == self.batch.leaders.len() {
            return;
        }
        let run = self.run.get_or_insert_with(|| Run::new(handlers.clone(), core.shared.store.epoch()));
        let known = |id: &EntityId| run.after(id).or_else(|| ahead.get(id).copied()).cloned().or_else(|| core.cached(id));
        let indices = (from..self.batch.leaders.len()).collect();
        let chunk = Chunk::new(&self.batch, indices, run.bytes_left(core.shared.options.batch_bytes_max), known);
        self.running = Some(chunk.execute(core.clone(), handlers).boxed());
    }

    /// Waits for the commands that are being run; dropping the wait loses nothing.
    async fn finish_running(&mut self) {
        let Some(running) = self.running.as_mut() else { return };
        let executed = running.await;
        self.running = None;
        match executed {
            Ok(executed) => {
                if let Some(run) = &mut self.run {
                    run.take(executed);
                }
            }
            Err(_) => (self.run, self.is_spoilt) = (None, true),
        }
    }
}

impl Core {
    /// Runs all undecided commands of a batch.
    async fn run_all(self: &Arc<Self>, batch: &Batch, handlers: &Arc<HandlersInForce>) -> Result<Run, CommandError> {
        let mut run = Run::new(handlers.clone(), self.shared.store.epoch());
        let chunk = Chunk::new(batch, batch.undecided(), self.shared.options.batch_bytes_max, |id| self.cached(id));
        run.take(chunk.execute(self.clone(), handlers.clone()).await?);
        Ok(run)
    }

    /// The entity as it is remembered.
    fn cached(&self, id: &EntityId) -> Option<LoadedEntity> {
        let cached = self.shared.caches.state(&self.partition, id)?;
        Some(LoadedEntity { id: id.clone(), version: cached.version, state: cached.state.map(State::Whole) })
    }

    pub async fn read_newest(&self, ids: &[EntityId]) -> Result<Vec<Option<StoredEvent>>, CommandError> {
        let mut patience = self.patience();
        loop {
            match self.shared.store.newest(&self.partition.entity_type, ids).await {
                Ok(newest) => return Ok(newest),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    fn answer(&self, envelope: Envelope, verdict: Verdict) {
        let result = match verdict {
            Verdict::Answer(answer, crate::core::Replay::Mismatch) if self.shared.options.refuse_reuse => {
                Err(CommandError::Reused(Box::new(Answer::clone(&answer))))
            }
            Verdict::Answer(answer, replay) => Ok((answer, replay)),
            Verdict::Failed(error) => Err(error),
            Verdict::Later | Verdict::Abandoned => return,
        };
        if let Some(handlers) = self.queues.handlers.load().as_ref() {
            handlers.counters.count(&envelope.command.name, metrics::outcome(&result), envelope.queued_at.elapsed());
        }
        envelope.answer(result);
    }

    async fn find_answer(&self, entity_id: &EntityId, command_id: &CommandId) -> Result<Option<Arc<Answer>>, CommandError> {
        if let Some(answer) = self.shared.caches.answer(&self.partition, entity_id, command_id) {
            return Ok(Some(answer));
        }
        let mut patience = self.patience();
        let key = [(entity_id.clone(), command_id.clone())];
        loop {
            let epoch = self.shared.store.epoch();
            let found = async {
                let found = self.shared.store.find(&self.partition.entity_type, &key).await?;
                barrier_since(&*self.shared.store, epoch).await?;
                Ok(found)
            };
            match found.await {
                Ok(mut found) => return Ok(found.pop().flatten().map(|stored| Arc::new(Answer::of(&self.partition, &stored.event)))),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    pub(super) fn patience(&self) -> Patience {
        Patience { ends: Instant::now() + self.shared.options.retry_for, backoff: Backoff::new(), holdup: self.holdup.clone() }
    }
}

/// Waits between tries of something that changed nothing, until the time for that is used up.
pub(super) struct Patience {
    ends: Instant,
    backoff: Backoff,
    holdup: Arc<Holdup>,
}

impl Patience {
    /// Waits before the next try, or says what callers are told.
    pub async fn wait(&mut self, error: StoreError) -> Result<(), CommandError> {
        match error {
            StoreError::Unavailable(reason) if Instant::now() >= self.ends => Err(CommandError::Unavailable(reason)),
            StoreError::Unavailable(_) => {
                self.holdup.set(true);
                self.backoff.wait().await;
                Ok(())
            }
            StoreError::Corrupt(reason) => Err(CommandError::Internal(reason)),
        }
    }
}

/// Growing waits with jitter.
pub(super) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub fn new() -> Backoff {
        Backoff { next: BACKOFF_FIRST }
    }

    pub async fn wait(&mut self) {
        let wait = self.next.mul_f64(rand::random_range(0.5..1.5));
        self.next = (self.next * 2).min(BACKOFF_MAX);
        tokio::time::sleep(wait).await;
    }
}
