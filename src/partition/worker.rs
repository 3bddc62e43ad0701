//! The worker of one partition: waits for a command, drains what else is there, decides the batch, answers everybody.

use super::batch::{Batch, Decided, Verdict};
use super::queue::{Envelope, Holdup, LookUp, Request};
use super::{CommandError, HandlersInForce, Shared, TypeQueues, metrics};
use crate::core::{Answer, CommandId, EntityId, Partition};
use crate::store::StoreError;
use futures_util::FutureExt;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// The first wait before something is tried again; each further one is twice as long, up to [`BACKOFF_MAX`].
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// How long a commit takes, until one was measured.
const COMMIT_EXPECTED: Duration = Duration::from_millis(5);
/// The longest wait for a turn against other writers.
const TURN_MAX: Duration = Duration::from_millis(200);

/// The service: owns the queue's receiving end and all that is remembered about the partition.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) partition: Partition,
    queues: Arc<TypeQueues>,
    requests: mpsc::Receiver<Request>,
    pub(super) holdup: Arc<Holdup>,
    /// Commands that had no room in the last batch, or wait for another one of the same id; older than all in the queue.
    carried: VecDeque<Envelope>,
    /// The largest event id seen committed; none where it must be read.
    pub(super) head: Option<u64>,
    /// How long the last commit took, and how many conflicts came since.
    last_commit: Duration,
    conflicts: u32,
}

impl Worker {
    pub fn new(shared: Arc<Shared>, queues: Arc<TypeQueues>, partition: Partition, requests: mpsc::Receiver<Request>, holdup: Arc<Holdup>) -> Worker {
        Worker { shared, partition, queues, requests, holdup, carried: VecDeque::new(), head: None, last_commit: COMMIT_EXPECTED, conflicts: 0 }
    }

    /// Runs until the node stops taking commands and all that were taken are answered.
    pub async fn run(mut self) {
        let closing = self.shared.closing.clone();
        loop {
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
            let (batch, look_ups) = self.gather(first);
            // A fault of quokka in one batch must not silence the partition: its callers hear that the outcome is unknown, and
            // the next batch starts from what the database says.
            if AssertUnwindSafe(self.settle(batch)).catch_unwind().await.is_err() {
                tracing::error!(partition = %self.partition, "a batch broke down; its callers are told that the outcome is unknown");
                self.head = None;
            }
            for look_up in look_ups {
                let found = self.find_answer(&look_up.entity_id, &look_up.command_id).await;
                let _ = look_up.reply.send(found);
            }
        }
    }

    /// Takes what is there, up to the limits of a batch, and answers at once what was answered before.
    fn gather(&mut self, first: Option<Request>) -> (Batch, Vec<LookUp>) {
        let options = &self.shared.options;
        let mut batch = Batch::default();
        let mut look_ups = Vec::new();
        let mut bytes = 0;
        let mut taken = 0;
        let mut carried = std::mem::take(&mut self.carried);
        let mut next = first;
        while batch.leaders.len() < options.batch_rows_max && bytes < options.batch_bytes_max {
            let request = match next.take() {
                Some(request) => request,
                None => match carried.pop_front() {
                    Some(envelope) => {
                        bytes += envelope.command.request.len();
                        self.admit(&mut batch, envelope);
                        continue;
                    }
                    None => match self.requests.try_recv() {
                        Ok(request) => request,
                        Err(_) => break,
                    },
                },
            };
            taken += 1;
            match request {
                Request::Command(envelope) => {
                    bytes += envelope.command.request.len();
                    self.admit(&mut batch, envelope);
                }
                Request::LookUp(look_up) => look_ups.push(look_up),
            }
        }
        self.carried = carried;
        self.shared.queued.fetch_sub(taken, Ordering::Relaxed);
        (batch, look_ups)
    }

    fn admit(&self, batch: &mut Batch, envelope: Envelope) {
        if !envelope.claim() {
            return;
        }
        let command = &envelope.command;
        if !command.is_fresh_id
            && let Some(answer) = self.shared.caches.answer(&self.partition, &command.entity_id, &command.command_id)
        {
            let replay = answer.replay_for(&command.name, &command.request);
            self.answer(envelope, Verdict::Answer(answer, replay));
            return;
        }
        batch.add(envelope);
    }

    /// Decides a batch and answers it.
    async fn settle(&mut self, mut batch: Batch) {
        if batch.leaders.is_empty() {
            return;
        }
        match self.queues.handlers.load_full() {
            Some(handlers) => self.decide(&mut batch, &handlers).await,
            None => batch.fail_rest(CommandError::UnknownEntityType),
        }
        self.holdup.set(false);
        self.deliver(batch.decided());
    }

    /// Tries until every command of the batch has its verdict.
    async fn decide(&mut self, batch: &mut Batch, handlers: &HandlersInForce) {
        loop {
            batch.expire(Instant::now());
            if !batch.has_undecided() {
                return;
            }
            if let Err(error) = self.attempt(batch, handlers.handlers.as_ref()).await {
                batch.fail_rest(error);
            }
        }
    }

    fn deliver(&mut self, batch: Decided) {
        let mut carried = Vec::new();
        for (leader, follower) in batch.followers {
            let (first, verdict) = &batch.leaders[leader];
            match verdict {
                Verdict::Answer(answer, _) => {
                    let replay = answer.replay_for(&follower.command.name, &follower.command.request);
                    self.answer(follower, Verdict::Answer(answer.clone(), replay));
                }
                Verdict::Failed(error) if first.is_same_try(&follower) => self.answer(follower, Verdict::Failed(error.clone())),
                Verdict::Failed(_) | Verdict::Later => carried.push(follower),
            }
        }
        let mut later = Vec::new();
        for (envelope, verdict) in batch.leaders {
            match verdict {
                Verdict::Later => later.push(envelope),
                verdict => self.answer(envelope, verdict),
            }
        }
        // Before what waits already: those are younger.
        for envelope in later.into_iter().chain(carried).rev() {
            envelope.release();
            self.carried.push_front(envelope);
        }
    }

    fn answer(&self, envelope: Envelope, verdict: Verdict) {
        let result = match verdict {
            Verdict::Answer(answer, crate::core::Replay::Mismatch) if self.shared.options.refuse_reuse => {
                Err(CommandError::Reused(Box::new(Answer::clone(&answer))))
            }
            Verdict::Answer(answer, replay) => Ok((answer, replay)),
            Verdict::Failed(error) => Err(error),
            Verdict::Later => return,
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
            let found = async {
                let found = self.shared.store.find(&self.partition.entity_type, &key).await?;
                self.shared.store.barrier().await?;
                Ok(found)
            };
            match found.await {
                Ok(mut found) => return Ok(found.pop().flatten().map(|stored| Arc::new(Answer::of(&self.partition, &stored.event)))),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    pub(super) fn won_race(&mut self, took: Duration) {
        self.last_commit = took;
        self.conflicts = 0;
    }

    /// Waits up to twice the time of a commit, longer with each conflict in a row.
    pub(super) async fn wait_for_turn(&mut self) {
        let reach = self.last_commit.max(Duration::from_millis(1)) * 2 * (1 << self.conflicts.min(5));
        self.conflicts += 1;
        tokio::time::sleep(reach.min(TURN_MAX).mul_f64(rand::random())).await;
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
