//! The owner's end of a link: takes commands, hands them to the workers in their order, sends answers as they come.
//!
//! A full queue makes only the commands of its own partition wait, and only where their senders want that (lines of many commands); the others
//! are told at once. When the node stops, what was taken is still answered.

use super::wire::{Ask, FromOwner, Reader, ToOwner, write};
use crate::core::{Answer, Partition, Replay};
use crate::partition::{CommandError, EntityKey, Partitions, Pending, WhenFull};
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// Answers are sent when they are this many bytes, even where more are ready.
const CHUNK_BYTES: usize = 64 << 10;
/// After how much silence the other end, which asks several times a second whether this one is there, counts as gone.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// How often a full queue is tried again.
const RETRY: Duration = Duration::from_millis(2);

/// Serves one link until the other end is gone, or this node stops and has answered all that it took, or cannot reach its database.
pub async fn serve(
    partitions: Partitions,
    mut chunks: mpsc::Receiver<Bytes>,
    answers: mpsc::Sender<Bytes>,
    mut is_storage_ready: watch::Receiver<bool>,
    stop: CancellationToken,
) {
    let mut owner = Owner { partitions, running: FuturesUnordered::new(), waiting: HashMap::new(), out: BytesMut::new() };
    let mut reader = Reader::default();
    let (mut is_leaving, mut heard) = (false, Instant::now());
    let mut retries = tokio::time::interval(RETRY);
    retries.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        if owner.flush(&answers).await.is_err() || (is_leaving && owner.is_idle()) {
            return;
        }
        tokio::select! {
            chunk = tokio::time::timeout_at(heard + SILENCE_MAX, chunks.recv()) => {
                let Ok(Some(chunk)) = chunk else { return };
                heard = Instant::now();
                reader.take(&chunk);
                loop {
                    match reader.next() {
                        Ok(Some(message)) => owner.take(message),
                        Ok(None) => break,
                        Err(error) => {
                            tracing::warn!(%error, "a link is closed: the other node may be of another version");
                            return;
                        }
                    }
                }
            }
            Some(answer) = owner.running.next(), if !owner.running.is_empty() => owner.write(&answer),
            _ = retries.tick(), if !owner.waiting.is_empty() => owner.retry(),
            () = is_lost(&mut is_storage_ready) => {
                owner.write(&FromOwner::NoStorage);
                let _ = owner.flush(&answers).await;
                return;
            }
            () = stop.cancelled(), if !is_leaving => {
                is_leaving = true;
                owner.write(&FromOwner::Leaving);
            }
        }
        owner.gather();
    }
}

/// Waits until the database is away.
async fn is_lost(is_storage_ready: &mut watch::Receiver<bool>) {
    let _ = is_storage_ready.wait_for(|is_ready| !is_ready).await;
}

struct Owner {
    partitions: Partitions,
    running: FuturesUnordered<BoxFuture<'static, FromOwner>>,
    /// Commands whose partition's queue is full, in their order.
    waiting: HashMap<Partition, VecDeque<Ask>>,
    out: BytesMut,
}

impl Owner {
    fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    fn take(&mut self, message: ToOwner<'_>) {
        match message {
            ToOwner::Command(ask) => {
                let ask = ask.into_owned();
                let shard = self.partitions.store().shards().shard_of(&ask.command.entity_id);
                let partition = Partition { entity_type: ask.entity_type.clone(), shard };
                match self.waiting.get_mut(&partition) {
                    // Behind those that wait already.
                    Some(waiting) if ask.when_full == WhenFull::Wait => waiting.push_back(ask),
                    Some(_) => self.fail(ask.number, CommandError::Overloaded { retry_after: Duration::from_secs(1) }),
                    None => {
                        if let Some(ask) = self.submit(ask) {
                            self.waiting.entry(partition).or_default().push_back(ask);
                        }
                    }
                }
            }
            ToOwner::LookUp { number, timeout, entity_type, entity_id, command_id } => {
                let partitions = self.partitions.clone();
                self.running.push(Box::pin(async move {
                    let entity = EntityKey { entity_type, entity_id };
                    let look_up = partitions.look_up(&entity, &command_id);
                    let found = tokio::time::timeout(timeout, look_up).await.unwrap_or(Err(CommandError::OutcomeUnknown));
                    FromOwner::Found { number, result: found.map(|answer| answer.map(Arc::unwrap_or_clone)) }
                }));
            }
            ToOwner::Ping => self.write(&FromOwner::Pong),
        }
    }

    /// Queues a command; gives it back where it is to wait for a place.
    fn submit(&mut self, ask: Ask) -> Option<Ask> {
        let again = (ask.when_full == WhenFull::Wait).then(|| ask.clone());
        let Ask { number, timeout, when_full: _, trace_id, entity_type, command } = ask;
        match self.partitions.try_submit(&entity_type, command, timeout, None) {
            Ok(pending) => self.running.push(answer_of(number, pending, trace_id)),
            Err(CommandError::Overloaded { .. }) if again.is_some() => return again,
            Err(error) => self.fail(number, error),
        }
        None
    }

    /// Tries those that wait for a place in a queue.
    fn retry(&mut self) {
        for (partition, mut asks) in std::mem::take(&mut self.waiting) {
            while let Some(mut ask) = asks.pop_front() {
                ask.timeout = ask.timeout.saturating_sub(RETRY);
                if ask.timeout.is_zero() {
                    self.fail(ask.number, CommandError::Overloaded { retry_after: Duration::from_secs(1) });
                } else if let Some(ask) = self.submit(ask) {
                    asks.push_front(ask);
                    break;
                }
            }
            if !asks.is_empty() {
                self.waiting.insert(partition, asks);
            }
        }
    }

    fn fail(&mut self, number: u64, error: CommandError) {
        self.write(&FromOwner::Answer { number, result: Err(error) });
    }

    /// Adds what else is ready.
    fn gather(&mut self) {
        while self.out.len() < CHUNK_BYTES
            && let Some(Some(answer)) = self.running.next().now_or_never()
        {
            self.write(&answer);
        }
    }

    fn write(&mut self, message: &FromOwner) {
        if let Err(error) = write(&mut self.out, message) {
            // The other end hears nothing of this one and handles it itself once its time is up.
            tracing::error!(%error, "an answer cannot be written to a link");
        }
    }

    async fn flush(&mut self, answers: &mpsc::Sender<Bytes>) -> Result<(), mpsc::error::SendError<Bytes>> {
        if self.out.is_empty() {
            return Ok(());
        }
        answers.send(self.out.split().freeze()).await
    }
}

fn answer_of(number: u64, pending: Pending, trace_id: Option<String>) -> BoxFuture<'static, FromOwner> {
    Box::pin(async move {
        let result = pending.answer().await.map(|(answer, replay): (Arc<Answer>, Replay)| (Arc::unwrap_or_clone(answer), replay));
        if let Some(trace_id) = trace_id {
            // The node that the client asked logs what is wrong; this tells where it was handled.
            tracing::debug!(trace_id, is_recorded = result.is_ok(), "a command that was passed on is answered");
        }
        FromOwner::Answer { number, result }
    })
}
