//! Deciding a batch: load, run, commit, and on a conflict look up what happened and run again.

use super::cache::CachedState;
use super::commit::Commit;
use super::queue::Envelope;
use super::worker::Worker;
use super::{CommandError, queue};
use crate::core::{Answer, Change, CommandId, EntityId, Event, EventOutcome, Json, LoadedEntity, Outcome, Replay, State, StatePatch, StoredEvent, Task, Version, Work};
use crate::handler::{Handlers, Ran};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::time::Instant;

/// From how many bytes on a state that a rejection left as it was is not written again, unless it is the newest.
const UNCHANGED_MIN: usize = 256;

/// What becomes of one command of a batch.
pub(super) enum Verdict {
    /// It is recorded.
    Answer(Arc<Answer>, Replay),
    /// It did not happen.
    Failed(CommandError),
    /// It belongs in the next batch.
    Later,
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

    pub fn has_undecided(&self) -> bool {
        self.verdicts.iter().any(Option::is_none)
    }

    fn undecided(&self) -> Vec<usize> {
        (0..self.verdicts.len()).filter(|index| self.verdicts[*index].is_none()).collect()
    }

    /// Gives up commands whose callers have stopped waiting; nothing of them is under way between two attempts.
    pub fn expire(&mut self, now: Instant) {
        for (envelope, verdict) in self.leaders.iter().zip(&mut self.verdicts) {
            if verdict.is_none() && envelope.deadline <= now {
                *verdict = Some(Verdict::Failed(CommandError::Overloaded { retry_after: queue::RETRY_AFTER }));
            }
        }
    }

    /// When the last caller stops waiting.
    fn deadline(&self) -> Instant {
        self.leaders.iter().map(|envelope| envelope.deadline).max().unwrap_or_else(Instant::now)
    }

    pub fn fail_rest(&mut self, error: CommandError) {
        for verdict in self.verdicts.iter_mut().filter(|verdict| verdict.is_none()) {
            *verdict = Some(Verdict::Failed(error.clone()));
        }
    }

    /// Leaves the second half of the commands given for the next batch.
    fn halve(&mut self, indices: &[usize]) {
        for index in &indices[indices.len().div_ceil(2)..] {
            self.verdicts[*index] = Some(Verdict::Later);
        }
    }

    /// The batch with every verdict in place.
    pub fn decided(self) -> Decided {
        let verdicts = self.verdicts.into_iter().map(|verdict| verdict.unwrap_or(Verdict::Later));
        Decided { leaders: self.leaders.into_iter().zip(verdicts).collect(), followers: self.followers }
    }
}

/// An entity as one attempt found it.
struct Base {
    loaded: LoadedEntity,
    /// Whether it was read from the database during this attempt.
    is_read: bool,
}

/// One run of the handlers over the undecided commands of a batch.
struct Run {
    /// The commands' indices in the batch.
    indices: Vec<usize>,
    /// For each of them, its entity's index in `bases`.
    entities: Vec<usize>,
    bases: Vec<Base>,
    outcomes: Vec<Outcome>,
    /// The whole state of each entity in `bases` after its last outcome.
    states: Vec<Option<Json>>,
}

/// What a look after a conflict brought.
struct Found {
    /// Some commands were recorded already.
    any_found: bool,
    /// Some entities have moved on.
    any_moved: bool,
}

impl Worker {
    /// One try: every command that gets through it has a verdict afterwards; the others are left for another try.
    pub(super) async fn attempt(&mut self, batch: &mut Batch, handlers: &dyn Handlers) -> Result<(), CommandError> {
        let run = self.run_handlers(batch, handlers).await?;
        let (indices, events) = loop {
            let head = self.read_head().await?;
            let (indices, events) = run.events(batch, handlers, head);
            if events.is_empty() {
                break (indices, events);
            }
            match self.commit(&events, batch.deadline()).await {
                Commit::Done => {
                    self.head = Some(head + events.len() as u64);
                    break (indices, events);
                }
                Commit::Taken { was_unknown } => {
                    self.head = None;
                    let own: &[Event] = if was_unknown { &events } else { &[] };
                    // What took the key may be the append itself, so a look-up that cannot be made leaves its callers in doubt.
                    let change = self.reconcile(batch, &run, own).await.map_err(|error| if was_unknown { CommandError::OutcomeUnknown } else { error })?;
                    if !change.any_found {
                        // Lost a race against another writer: whoever waits longest here loses the next one, so the waits are drawn.
                        self.wait_for_turn().await;
                    }
                    if change.any_found || change.any_moved {
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
        self.accept(batch, &run, indices, events);
        self.confirm_failures(batch, run).await
    }

    async fn read_head(&mut self) -> Result<u64, CommandError> {
        let mut patience = self.patience();
        loop {
            if let Some(head) = self.head {
                return Ok(head);
            }
            match self.shared.store.head(&self.partition).await {
                Ok(head) => self.head = Some(head),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    async fn run_handlers(&self, batch: &Batch, handlers: &dyn Handlers) -> Result<Run, CommandError> {
        let indices = batch.undecided();
        let mut numbers: HashMap<&EntityId, usize> = HashMap::new();
        let mut ids: Vec<EntityId> = Vec::new();
        let mut entities = Vec::with_capacity(indices.len());
        for index in &indices {
            let id = &batch.leaders[*index].command.entity_id;
            entities.push(*numbers.entry(id).or_insert_with(|| {
                ids.push(id.clone());
                ids.len() - 1
            }));
        }
        let bases = self.load(ids).await?;
        let tasks = indices.iter().zip(&entities).map(|(index, entity)| {
            let Envelope { command, now, .. } = &batch.leaders[*index];
            Task {
                entity: *entity,
                command_id: command.command_id.clone(),
                command: command.name.clone(),
                request: command.request.clone(),
                precondition: command.precondition,
                now: *now,
            }
        });
        let options = &self.shared.options;
        let work = Work {
            entities: bases.iter().map(|base| base.loaded.clone()).collect(),
            tasks: tasks.collect(),
            done: 0,
            bytes_left: options.batch_bytes_max,
            row_bytes_max: options.row_bytes_max,
        };
        let Ran { outcomes, states } = handlers.run(work).await.map_err(|error| CommandError::Unavailable(error.to_string()))?;
        if outcomes.len() != indices.len() || states.len() != bases.len() {
            return Err(CommandError::Internal(format!("{} outcomes for {} commands", outcomes.len(), indices.len())));
        }
        Ok(Run { indices, entities, bases, outcomes, states })
    }

    /// The entities from memory, and from the database what is not there.
    async fn load(&self, ids: Vec<EntityId>) -> Result<Vec<Base>, CommandError> {
        let mut bases: Vec<Base> = Vec::with_capacity(ids.len());
        let mut missing = Vec::new();
        for id in ids {
            let cached = self.shared.caches.state(&self.partition, &id);
            let is_read = cached.is_none();
            if is_read {
                missing.push(id.clone());
            }
            let (version, state) = cached.map_or((0, None), |cached| (cached.version, cached.state.map(State::Whole)));
            bases.push(Base { loaded: LoadedEntity { id, version, state }, is_read });
        }
        if missing.is_empty() {
            return Ok(bases);
        }
        let newest = self.read_newest(&missing).await?;
        for (base, stored) in bases.iter_mut().filter(|base| base.is_read).zip(newest) {
            if let Some(stored) = stored {
                base.loaded.version = stored.event.version;
                base.loaded.state = stored.event.state.map(State::Whole);
            }
        }
        Ok(bases)
    }

    async fn read_newest(&self, ids: &[EntityId]) -> Result<Vec<Option<StoredEvent>>, CommandError> {
        let mut patience = self.patience();
        loop {
            match self.shared.store.newest(&self.partition.entity_type, ids).await {
                Ok(newest) => return Ok(newest),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    /// After a commit: answers for the recorded commands, new states for the memory.
    fn accept(&mut self, batch: &mut Batch, run: &Run, indices: Vec<usize>, events: Vec<Event>) {
        let mut newest: HashMap<EntityId, (u64, Option<Json>)> = HashMap::new();
        for (index, event) in indices.into_iter().zip(events) {
            let answer = Arc::new(Answer::of(&self.partition, &event));
            self.shared.caches.keep_answer(&answer);
            newest.insert(event.entity_id, (event.version, event.state));
            batch.verdicts[index] = Some(Verdict::Answer(answer, Replay::First));
        }
        for (id, (version, state)) in newest {
            self.shared.caches.keep_state(&self.partition, &id, CachedState { version, state, is_durable: true });
        }
        for (index, outcome) in run.indices.iter().zip(&run.outcomes) {
            if matches!(outcome, Outcome::NoRoom) {
                batch.verdicts[*index] = Some(Verdict::Later);
            }
        }
    }

    /// After a conflict: answers what is recorded, brings the states up to date. Where neither changed anything, the same outcomes may be
    /// appended again at a new head. `own` are the events that an append of unknown outcome may have left there.
    async fn reconcile(&mut self, batch: &mut Batch, run: &Run, own: &[Event]) -> Result<Found, CommandError> {
        let found = self.find_recorded(batch, &run.indices).await?;
        let any_found = !found.is_empty();
        for (index, stored) in found {
            let command = &batch.leaders[index].command;
            let answer = Arc::new(Answer::of(&self.partition, &stored));
            // Found rows come without their state.
            let is_own = own.iter().any(|event| event.event_id == stored.event_id && *event == Event { state: event.state.clone(), ..stored.clone() });
            let replay = if is_own { Replay::First } else { answer.replay_for(&command.name, &command.request) };
            self.shared.caches.keep_answer(&answer);
            batch.verdicts[index] = Some(Verdict::Answer(answer, replay));
        }
        let ids: Vec<EntityId> = run.bases.iter().map(|base| base.loaded.id.clone()).collect();
        let newest = self.read_newest(&ids).await?;
        let mut any_moved = false;
        for (base, stored) in run.bases.iter().zip(newest) {
            let version = stored.as_ref().map_or(0, |stored| stored.event.version);
            if version == base.loaded.version {
                continue;
            }
            any_moved = true;
            match stored {
                Some(stored) => {
                    let cached = CachedState { version, state: stored.event.state, is_durable: false };
                    self.shared.caches.keep_state(&self.partition, &base.loaded.id, cached);
                }
                None => self.shared.caches.forget_state(&self.partition, &base.loaded.id),
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
            let look = async {
                let found = self.shared.store.find(&self.partition.entity_type, &keys).await?;
                if found.iter().any(Option::is_some) {
                    self.shared.store.barrier().await?;
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
    async fn confirm_failures(&mut self, batch: &mut Batch, run: Run) -> Result<(), CommandError> {
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
            let ids: Vec<EntityId> = doubtful.iter().map(|entity| run.bases[*entity].loaded.id.clone()).collect();
            for (entity, stored) in doubtful.into_iter().zip(self.read_newest(&ids).await?) {
                let base = &run.bases[entity].loaded;
                is_confirmed[entity] = stored.map_or(0, |stored| stored.event.version) == base.version;
                if !is_confirmed[entity] {
                    self.shared.caches.forget_state(&self.partition, &base.id);
                }
            }
        }
        // What the callers hear rests on rows that were only read.
        let mut patience = self.patience();
        while let Err(error) = self.shared.store.barrier().await {
            patience.wait(error).await?;
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

impl Run {
    /// The events that the outcomes make, placed right after `head`, and their commands' indices in the batch.
    fn events(&self, batch: &Batch, handlers: &dyn Handlers, head: u64) -> (Vec<usize>, Vec<Event>) {
        let mut last = vec![0; self.bases.len()];
        for (at, entity) in self.entities.iter().enumerate().filter(|(at, _)| self.outcomes[*at].event_outcome().is_some()) {
            last[*entity] = at;
        }
        let mut rows: Vec<Rows> = self.bases.iter().map(|base| Rows::after(&base.loaded)).collect();
        let mut indices = Vec::with_capacity(self.indices.len());
        let mut events = Vec::with_capacity(self.indices.len());
        for (at, (index, entity)) in self.indices.iter().zip(&self.entities).enumerate() {
            let (outcome, response) = match &self.outcomes[at] {
                Outcome::Accepted { response, .. } => (EventOutcome::Accepted, response),
                Outcome::Rejected { rejection } => (EventOutcome::Rejected, rejection),
                Outcome::Failed(_) | Outcome::NoRoom => continue,
            };
            let (state, patch) = rows[*entity].next(&self.outcomes[at], (at == last[*entity]).then(|| &self.states[*entity]));
            let envelope = &batch.leaders[*index];
            indices.push(*index);
            events.push(Event {
                event_id: head + 1 + events.len() as u64,
                entity_id: self.bases[*entity].loaded.id.clone(),
                version: rows[*entity].version,
                command_id: envelope.command.command_id.clone(),
                command: envelope.command.name.clone(),
                outcome,
                handler_version: handlers.version().clone(),
                request: envelope.command.request.clone(),
                response: response.clone(),
                state,
                patch,
                handled_at: envelope.now,
            });
        }
        (indices, events)
    }
}

/// What the rows of one entity hold, one after another: the newest is whole, those before it may be patches.
struct Rows {
    version: Version,
    /// The newest version whose row is whole.
    base: Version,
    /// The state now; none where it does not exist, or is known only as patches.
    text: Option<Json>,
    exists: bool,
}

impl Rows {
    fn after(loaded: &LoadedEntity) -> Rows {
        let text = loaded.state.as_ref().and_then(State::text).cloned();
        Rows { version: loaded.version, base: loaded.version, exists: text.is_some(), text }
    }

    /// The next row: the whole state or a patch. `whole` is given for the last row, whose state must be whole.
    fn next(&mut self, outcome: &Outcome, whole: Option<&Option<Json>>) -> (Option<Json>, Option<StatePatch>) {
        self.version += 1;
        let patch = match outcome {
            Outcome::Accepted { state: Change::Whole(text), .. } => {
                (self.text, self.exists) = (Some(text.clone()), true);
                None
            }
            Outcome::Accepted { state: Change::Patch { patch, .. }, .. } => {
                (self.text, self.exists) = (None, true);
                Some(patch.clone())
            }
            // A rejection leaves the state as it is.
            _ => self.exists.then(|| Json::trusted("[]")).filter(|_| self.text.as_ref().is_none_or(|text| text.len() >= UNCHANGED_MIN)),
        };
        match (whole, patch) {
            (Some(whole), _) => (whole.clone(), None),
            (None, Some(patch)) => (None, Some(StatePatch { base: self.base, patch })),
            (None, None) => {
                self.base = self.version;
                (self.text.clone(), None)
            }
        }
    }
}
