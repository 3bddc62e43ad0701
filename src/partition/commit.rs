//! Committing a batch: one append, tried until it is known whether it happened.

use super::CommandError;
use super::worker::{Backoff, Core};
use crate::core::Event;
use crate::metrics::Conflict;
use crate::store::AppendError;
use std::time::Duration;
use tokio::time::Instant;

/// How often an append that the database gave up on is sent again before callers are told that it did not happen.
const INTERRUPTIONS_MAX: u32 = 5;

/// What became of an append.
pub(super) enum Commit {
    /// It is durable, and how long that took.
    Done(Duration),
    /// Surely not there, or there already: some key is taken.
    Taken {
        /// Whether an earlier try of the same append had an unknown outcome, so that what took the key may be the append itself.
        was_unknown: bool,
    },
    /// Surely not there; fewer events at once may get through.
    TooMany,
    /// Surely not there, and a single event that is refused will be refused again.
    NotDone(CommandError),
}

impl Core {
    /// Appends the events; returns when it is known what became of them, however long that takes. What surely did not happen is given up where
    /// another try would end after `deadline`, so that callers hear so while they still listen.
    pub(super) async fn commit(&self, events: &[Event], deadline: Instant) -> Commit {
        let started = Instant::now();
        let _under_way = self.shared.commits.begin();
        let mut patience = self.patience();
        let mut backoff = Backoff::new();
        let mut interruptions = 0;
        let mut was_unknown = false;
        loop {
            let sent = Instant::now();
            let error = match self.shared.store.append(&self.partition, events).await {
                Ok(()) => {
                    self.shared.metrics.rows.record(events.len() as f64);
                    let took = started.elapsed();
                    self.shared.metrics.commit_seconds.record(took);
                    return Commit::Done(took);
                }
                Err(error) => error,
            };
            match error {
                AppendError::PositionTaken => {
                    self.shared.metrics.conflict(Conflict::Position);
                    return Commit::Taken { was_unknown };
                }
                AppendError::KeyTaken => {
                    self.shared.metrics.conflict(Conflict::Key);
                    return Commit::Taken { was_unknown };
                }
                AppendError::Unknown(reason) => {
                    if !was_unknown {
                        tracing::warn!(partition = %self.partition, events = events.len(), reason, "outcome of an append unknown; appending again until it is decided");
                    }
                    was_unknown = true;
                    self.holdup.set(true);
                    self.shared.metrics.conflict(Conflict::Unknown);
                    backoff.wait().await;
                }
                // Once a try may have landed, only a definite answer to the same append ends the doubt.
                AppendError::Interrupted(_) | AppendError::Unavailable(_) if was_unknown => backoff.wait().await,
                // It cannot come: nothing more is learnt by sending what is refused.
                AppendError::TooLarge | AppendError::Refused(_) if was_unknown => return Commit::NotDone(CommandError::OutcomeUnknown),
                AppendError::Interrupted(reason) => {
                    self.shared.metrics.conflict(Conflict::Interrupted);
                    interruptions += 1;
                    if interruptions > INTERRUPTIONS_MAX || Instant::now() + sent.elapsed() >= deadline {
                        return Commit::NotDone(CommandError::Unavailable(reason));
                    }
                    backoff.wait().await;
                }
                AppendError::Unavailable(reason) if Instant::now() + sent.elapsed() >= deadline => return Commit::NotDone(CommandError::Unavailable(reason)),
                AppendError::Unavailable(reason) => {
                    if let Err(error) = patience.wait(crate::store::StoreError::Unavailable(reason)).await {
                        return Commit::NotDone(error);
                    }
                }
                AppendError::TooLarge | AppendError::Refused(_) if events.len() > 1 => return Commit::TooMany,
                AppendError::TooLarge => return Commit::NotDone(CommandError::Internal("the event is larger than a statement may be".into())),
                AppendError::Refused(reason) => return Commit::NotDone(CommandError::Internal(reason)),
            }
        }
    }
}
