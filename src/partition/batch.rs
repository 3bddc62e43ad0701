//! Batches: commands that are committed together, and what becomes of each.

use super::cache::CachedState;
use super::queue::Envelope;
use super::run::{Base, Run};
use super::worker::Core;
use super::{CommandError, queue};
use crate::core::{Answer, CommandId, EntityId, Event, Outcome, Replay, State};
use crate::store::barrier_since;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::time::Instant;

/// What becomes of one command of a batch.
pub(super) enum Verdict {
    /// It is recorded.
    Answer(Arc<Answer>, Replay),
    /// It did not happen.
    Failed(CommandError),
    /// It belongs in the next batch.
    Later,
    /// Its caller gave it up before it was claimed: nobody waits for an answer.
    Abandoned,
}

/// Commands that are decided together.
#[derive(Default)]
pub(super) struct Batch {
    /// One for each command id.
    pub leaders: Vec<Envelope>,
    verdicts: Vec<Option<Verdict>>,
    /// Further tries of a leader's command id, by the leader's index: they take part in its answer.
    followers: Vec<(usize, Envelope)>,
    by_id: HashMap<(EntityId, CommandId), usize>,
}

/// A batch that is to be answered.
pub(super) struct Decided {
    pub leaders: Vec<(Envelope, Verdict)>,
    /// Further tries of a leader's command id, by the leader's index.
    pub followers: Vec<(usize, Envelope)>,
}

impl Envelope {
    /// Whether both ask for the same thing in all respects.
    pub fn is_same_try(&self, other: &Envelope) -> bool {
        let (a, b) = (&self.command, &other.command);
        a.name == b.name && a.request == b.request && a.precondition == b.precondition
    }
}

impl Batch {
    pub fn add(&mut self, envelope: Envelope) {
        let key = (envelope.command.entity_id.clone(), envelope.command.command_id.clone());
        if let Some(leader) = self.by_id.get(&key) {
            self.followers.push((*leader, envelope));
            return;
        }
        self.by_id.insert(key, self.leaders.len());
        self.leaders.push(envelope);
        self.verdicts.push(None);
    }

    /// Adds a further try of a command id that is in the batch already; gives the others back.
    pub fn join(&mut self, envelope: Envelope) -> Option<Envelope> {
        let key = (envelope.command.entity_id.clone(), envelope.command.command_id.clone());
        match self.by_id.get(&key) {
            Some(_) if !envelope.claim() => None,
            Some(leader) => {
                self.followers.push((*leader, envelope));
                None
            }
            None => Some(envelope),
        }
    }

    /// Takes the commands for deciding. False where the callers of some have gone, so that what was run before no longer counts.
    pub fn claim(&mut self) -> bool {
        self.followers.retain(|(_, envelope)| envelope.claim());
        let mut are_all_there = true;
        for (index, (leader, verdict)) in self.leaders.iter_mut().zip(&mut self.verdicts).enumerate() {
            if verdict.is_some() || leader.claim() {
                continue;
            }
            are_all_there = false;
            match self.followers.iter().position(|(of, _)| *of == index) {
                Some(next) => *leader = self.followers.remove(next).1,
                None => *verdict = Some(Verdict::Abandoned),
            }
        }
        are_all_there
    }

    /// The commands in their order, further tries last, to be gathered again.
    pub fn into_envelopes(self) -> impl Iterator<Item = Envelope> {
        self.leaders.into_iter().chain(self.followers.into_iter().map(|(_, envelope)| envelope))
    }

    pub fn has_undecided(&self) -> bool {
        self.verdicts.iter().any(Option::is_none)
    }

    pub fn undecided(&self) -> Vec<usize> {
        (0..self.verdicts.len()).filter(|index| self.verdicts[*index].is_none()).collect()
    }

    /// Gives up commands whose callers have stopped waiting; nothing of them is under way between two attempts. Whether there were any.
    pub fn expire(&mut self, now: Instant) -> bool {
        let mut any = false;
        for (envelope, verdict) in self.leaders.iter().zip(&mut self.verdicts) {
            if verdict.is_none() && envelope.deadline <= now {
                *verdict = Some(Verdict::Failed(CommandError::Overloaded { retry_after: queue::RETRY_AFTER }));
                any = true;
            }
        }
        any
    }

    /// When the last caller stops waiting.
    pub fn deadline(&self) -> Instant {
        self.leaders.iter().map(|envelope| envelope.deadline).max().unwrap_or_else(Instant::now)
    }

    pub fn fail_rest(&mut self, error: CommandError) {
        for verdict in self.verdicts.iter_mut().filter(|verdict| verdict.is_none()) {
            *verdict = Some(Verdict::Failed(error.clone()));
        }
    }

    /// Leaves the second half of the commands given for the next batch.
    pub fn halve(&mut self, indices: &[usize]) {
        for index in &indices[indices.len().div_ceil(2)..] {
            self.verdicts[*index] = Some(Verdict::Later);
        }
    }

    /// Whether some commands belong in the next batch, before all that was taken since.
    pub fn has_later(&self) -> bool {
        let is_later = |verdict: &Option<Verdict>| matches!(verdict, Some(Verdict::Later));
        self.verdicts.iter().any(is_later) || self.followers.iter().any(|(leader, follower)| self.runs_itself(*leader, follower))
    }

    /// Whether a further try of a command id gets nothing from its leader's verdict.
    fn runs_itself(&self, leader: usize, follower: &Envelope) -> bool {
        match &self.verdicts[leader] {
            Some(Verdict::Answer(..)) => false,
            Some(Verdict::Failed(_)) => !self.leaders[leader].is_same_try(follower),
            Some(Verdict::Later | Verdict::Abandoned) | None => true,
        }
    }

    /// The batch with every verdict in place.
    pub fn decided(self) -> Decided {
        let verdicts = self.verdicts.into_iter().map(|verdict| verdict.unwrap_or(Verdict::Later));
        Decided { leaders: self.leaders.into_iter().zip(verdicts).collect(), followers: self.followers }
    }
}

/// What a look after a conflict brought.
pub(super) struct Found {
    /// Some commands were recorded already.
    pub any_found: bool,
    /// Some entities have moved on.
    pub any_moved: bool,
}

impl Core {
    /// After a commit: answers for the recorded commands, new states for the memory.
    pub(super) fn accept(&self, batch: &mut Batch, run: &Run, indices: &[usize], events: &[Event]) {
        for (index, event) in indices.iter().zip(events) {
            let answer = Arc::new(Answer::of(&self.partition, event));
            self.shared.caches.keep_answer(&answer);
            batch.verdicts[*index] = Some(Verdict::Answer(answer, Replay::First));
        }
        for Base { before, after, .. } in run.bases.iter().filter(|base| base.after.version > base.before.version) {
            let state = after.state.as_ref().and_then(State::text).cloned();
            self.shared.caches.keep_state(&self.partition, &before.id, CachedState { version: after.version, state, is_durable: true });
        }
        for (index, outcome) in run.indices.iter().zip(&run.outcomes) {
            if matches!(outcome, Outcome::NoRoom) {
                batch.verdicts[*index] = Some(Verdict::Later);
            }
        }
    }

    /// After a conflict: answers what is recorded, brings the states up to date. Where neither changed anything, the same outcomes may be
    /// appended again at a new head. `own` are the events that an append of unknown outcome may have left there.
    pub(super) async fn reconcile(&self, batch: &mut Batch, run: &Run, own: &[Event]) -> Result<Found, CommandError> {
        let found = self.find_recorded(batch, &run.indices).await?;
        let any_found = !found.is_empty();
        for (index, stored) in found {
            let command = &batch.leaders[index].command;
            let answer = Arc::new(Answer::of(&self.partition, &stored));
            // Found rows come without their state.
            let is_own = own
                .iter()
                .any(|event| event.event_id == stored.event_id && *event == Event { state: event.state.clone(), patch: event.patch.clone(), ..stored.clone() });
            let replay = if is_own { Replay::First } else { answer.replay_for(&command.name, &command.request) };
            self.shared.caches.keep_answer(&answer);
            batch.verdicts[index] = Some(Verdict::Answer(answer, replay));
        }
        let ids: Vec<EntityId> = run.bases.iter().map(|base| base.before.id.clone()).collect();
        let newest = self.read_newest(&ids).await?;
        let mut any_moved = false;
        for (base, stored) in run.bases.iter().zip(newest) {
            let version = stored.as_ref().map_or(0, |stored| stored.event.version);
            if version == base.before.version {
                continue;
            }
            any_moved = true;
            match stored {
                Some(stored) => {
                    let cached = CachedState { version, state: stored.event.state, is_durable: false };
                    self.shared.caches.keep_state(&self.partition, &base.before.id, cached);
                }
                None => self.shared.caches.forget_state(&self.partition, &base.before.id),
            }
        }
        Ok(Found { any_found, any_moved })
    }

    /// The events that the given commands made already, durable.
    async fn find_recorded(&self, batch: &Batch, indices: &[usize]) -> Result<Vec<(usize, Event)>, CommandError> {
        let keys: Vec<_> =
            indices.iter().map(|index| &batch.leaders[*index].command).map(|command| (command.entity_id.clone(), command.command_id.clone())).collect();
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let mut patience = self.patience();
        loop {
            let epoch = self.shared.store.epoch();
            let look = async {
                let found = self.shared.store.find(&self.partition.entity_type, &keys).await?;
                if found.iter().any(Option::is_some) {
                    barrier_since(&*self.shared.store, epoch).await?;
                }
                Ok(found)
            };
            match look.await {
                Ok(found) => return Ok(indices.iter().zip(found).filter_map(|(index, stored)| Some((*index, stored?.event))).collect()),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    /// Before a failure is told: an earlier try of the same command id may have been recorded, and a state from memory may be out of
    /// date. Neither may show in what callers hear.
    pub(super) async fn confirm_failures(&self, batch: &mut Batch, run: Run) -> Result<(), CommandError> {
        let failed: Vec<usize> = (0..run.outcomes.len()).filter(|at| matches!(run.outcomes[*at], Outcome::Failed(_))).collect();
        if failed.is_empty() {
            return Ok(());
        }
        let known: Vec<usize> = failed.iter().map(|at| run.indices[*at]).filter(|index| !batch.leaders[*index].command.is_fresh_id).collect();
        for (index, stored) in self.find_recorded(batch, &known).await? {
            let command = &batch.leaders[index].command;
            let answer = Arc::new(Answer::of(&self.partition, &stored));
            let replay = answer.replay_for(&command.name, &command.request);
            self.shared.caches.keep_answer(&answer);
            batch.verdicts[index] = Some(Verdict::Answer(answer, replay));
        }
        // An event of this batch confirmed its entity's state by its version.
        let mut is_confirmed: Vec<bool> = run.bases.iter().map(|base| base.is_read).collect();
        for (entity, outcome) in run.entities.iter().zip(&run.outcomes) {
            is_confirmed[*entity] |= outcome.event_outcome().is_some();
        }
        let mut doubtful: Vec<usize> = failed.iter().filter(|at| batch.verdicts[run.indices[**at]].is_none()).map(|at| run.entities[*at]).collect();
        doubtful.sort_unstable();
        doubtful.dedup();
        doubtful.retain(|entity| !is_confirmed[*entity]);
        if !doubtful.is_empty() {
            let ids: Vec<EntityId> = doubtful.iter().map(|entity| run.bases[*entity].before.id.clone()).collect();
            for (entity, stored) in doubtful.into_iter().zip(self.read_newest(&ids).await?) {
                let base = &run.bases[entity].before;
                is_confirmed[entity] = stored.map_or(0, |stored| stored.event.version) == base.version;
                if !is_confirmed[entity] {
                    self.shared.caches.forget_state(&self.partition, &base.id);
                }
            }
        }
        // What the callers hear rests on rows that were only read, and that are gone where the database crashed since.
        let mut patience = self.patience();
        while let Err(error) = self.shared.store.barrier().await {
            patience.wait(error).await?;
        }
        if self.shared.store.epoch() != run.epoch {
            run.bases.iter().for_each(|base| self.shared.caches.forget_state(&self.partition, &base.before.id));
            return Ok(());
        }
        for (at, outcome) in run.outcomes.into_iter().enumerate() {
            let verdict = &mut batch.verdicts[run.indices[at]];
            if let Outcome::Failed(failure) = outcome
                && verdict.is_none()
                && is_confirmed[run.entities[at]]
            {
                *verdict = Some(Verdict::Failed(CommandError::Failed(failure)));
            }
        }
        Ok(())
    }
}
