//! One run of the handlers over commands of a batch, in one go or in several chunks, and the events that it makes.

use super::batch::Batch;
use super::queue::Envelope;
use super::worker::Core;
use super::{CommandError, HandlersInForce};
use crate::core::event::ROW_OVERHEAD;
use crate::core::{Change, EntityId, Event, EventOutcome, Json, LoadedEntity, Outcome, State, StatePatch, Task, Version, Work};
use crate::handler::Ran;
use std::collections::HashMap;
use std::sync::Arc;

/// From how many bytes on a state that a rejection left as it was is not written again, unless it is the newest.
const UNCHANGED_MIN: usize = 256;

/// An entity as a run found it and as it leaves it.
pub(super) struct Base {
    pub before: LoadedEntity,
    /// Whether it was read from the database for this run.
    pub is_read: bool,
    pub after: LoadedEntity,
}

/// What the handlers made of commands of a batch. Nothing of it has happened yet.
pub(super) struct Run {
    pub handlers: Arc<HandlersInForce>,
    /// The commands' indices in the batch.
    pub indices: Vec<usize>,
    /// For each of them, its entity's index in `bases`.
    pub entities: Vec<usize>,
    pub bases: Vec<Base>,
    pub outcomes: Vec<Outcome>,
    /// The store's epoch before anything was read for it.
    pub epoch: u64,
    numbers: HashMap<EntityId, usize>,
    /// About how many bytes its rows take.
    bytes: usize,
}

/// Commands that are to be run.
pub(super) struct Chunk {
    indices: Vec<usize>,
    /// For each of them, its entity's index in `wanted`.
    entities: Vec<usize>,
    /// The entities, as far as they are known.
    wanted: Vec<(EntityId, Option<LoadedEntity>)>,
    tasks: Vec<Task>,
    bytes_left: usize,
}

/// A chunk that was run.
pub(super) struct Executed {
    indices: Vec<usize>,
    entities: Vec<usize>,
    bases: Vec<Base>,
    outcomes: Vec<Outcome>,
}

impl Chunk {
    /// The commands of the batch at `indices`; `known` gives entities that need not be read.
    pub fn new(batch: &Batch, indices: Vec<usize>, bytes_left: usize, known: impl Fn(&EntityId) -> Option<LoadedEntity>) -> Chunk {
        let mut numbers: HashMap<&EntityId, usize> = HashMap::new();
        let mut wanted = Vec::new();
        let mut entities = Vec::with_capacity(indices.len());
        let mut tasks = Vec::with_capacity(indices.len());
        for index in &indices {
            let Envelope { command, now, .. } = &batch.leaders[*index];
            let entity = *numbers.entry(&command.entity_id).or_insert_with(|| {
                wanted.push((command.entity_id.clone(), known(&command.entity_id)));
                wanted.len() - 1
            });
            entities.push(entity);
            tasks.push(Task {
                entity,
                command_id: command.command_id.clone(),
                command: command.name.clone(),
                request: command.request.clone(),
                precondition: command.precondition,
                now: *now,
            });
        }
        Chunk { indices, entities, wanted, tasks, bytes_left }
    }

    /// Reads what is not known and runs the handlers.
    pub async fn execute(self, core: Arc<Core>, handlers: Arc<HandlersInForce>) -> Result<Executed, CommandError> {
        let missing: Vec<EntityId> = self.wanted.iter().filter(|(_, known)| known.is_none()).map(|(id, _)| id.clone()).collect();
        let mut read = if missing.is_empty() { Vec::new() } else { core.read_newest(&missing).await? }.into_iter();
        let found = self.wanted.into_iter().map(|(id, known)| match known {
            Some(before) => (before, false),
            None => {
                let newest = read.next().flatten().map(|stored| (stored.event.version, stored.event.state.map(State::Whole)));
                let (version, state) = newest.unwrap_or_default();
                (LoadedEntity { id, version, state }, true)
            }
        });
        let found: Vec<(LoadedEntity, bool)> = found.collect();
        let work = Work {
            entities: found.iter().map(|(before, _)| before.clone()).collect(),
            tasks: self.tasks,
            done: 0,
            bytes_left: self.bytes_left,
            row_bytes_max: core.shared.options.row_bytes_max,
        };
        let Ran { outcomes, states } = handlers.handlers.run(work).await.map_err(|error| CommandError::Unavailable(error.to_string()))?;
        if outcomes.len() != self.indices.len() || states.len() != found.len() {
            return Err(CommandError::Internal(format!("{} outcomes for {} commands", outcomes.len(), self.indices.len())));
        }
        let mut events = vec![0; found.len()];
        for (entity, _) in self.entities.iter().zip(&outcomes).filter(|(_, outcome)| outcome.event_outcome().is_some()) {
            events[*entity] += 1;
        }
        let bases = found.into_iter().zip(states).zip(events).map(|(((before, is_read), state), events)| {
            let after = LoadedEntity { id: before.id.clone(), version: before.version + events, state: state.map(State::Whole) };
            Base { before, is_read, after }
        });
        Ok(Executed { indices: self.indices, entities: self.entities, bases: bases.collect(), outcomes })
    }
}

impl Run {
    pub fn new(handlers: Arc<HandlersInForce>, epoch: u64) -> Run {
        let (indices, entities, bases, outcomes) = Default::default();
        Run { handlers, indices, entities, bases, outcomes, epoch, numbers: HashMap::new(), bytes: 0 }
    }

    /// The entity as this run leaves it, where it touches it.
    pub fn after(&self, id: &EntityId) -> Option<&LoadedEntity> {
        self.numbers.get(id).map(|number| &self.bases[*number].after)
    }

    /// Goes on with a chunk that was run on what this run left.
    pub fn take(&mut self, executed: Executed) {
        let mut numbers = Vec::with_capacity(executed.bases.len());
        for base in executed.bases {
            let id = &base.before.id;
            let number = self.numbers.get(id).copied().unwrap_or(self.bases.len());
            if number == self.bases.len() {
                self.numbers.insert(id.clone(), number);
                self.bytes += base.after.state.as_ref().map_or(0, State::len);
                self.bases.push(base);
            } else {
                self.bases[number].after = base.after;
            }
            numbers.push(number);
        }
        self.bytes += executed.outcomes.iter().map(weight).sum::<usize>();
        self.indices.extend(executed.indices);
        self.entities.extend(executed.entities.into_iter().map(|entity| numbers[entity]));
        self.outcomes.extend(executed.outcomes);
    }

    /// How many bytes its rows take for the whole states that it leaves.
    pub fn whole_bytes(&self) -> usize {
        let changed = self.bases.iter().filter(|base| base.after.version > base.before.version);
        changed.filter_map(|base| base.after.state.as_ref()).map(State::len).sum()
    }

    /// How many bytes of rows still go with it.
    pub fn bytes_left(&self, bytes_max: usize) -> usize {
        bytes_max.saturating_sub(self.bytes)
    }

    /// Whether some commands found no room.
    pub fn is_full(&self) -> bool {
        self.outcomes.iter().any(|outcome| matches!(outcome, Outcome::NoRoom))
    }

    /// The events that the outcomes make, placed right after `head`, and their commands' indices in the batch.
    pub fn events(&self, batch: &Batch, head: u64) -> (Vec<usize>, Vec<Event>) {
        let mut last = vec![0; self.bases.len()];
        for (at, entity) in self.entities.iter().enumerate().filter(|(at, _)| self.outcomes[*at].event_outcome().is_some()) {
            last[*entity] = at;
        }
        let mut rows: Vec<Rows> = self.bases.iter().map(|base| Rows::after(&base.before)).collect();
        let mut indices = Vec::with_capacity(self.indices.len());
        let mut events = Vec::with_capacity(self.indices.len());
        for (at, (index, entity)) in self.indices.iter().zip(&self.entities).enumerate() {
            let (outcome, response) = match &self.outcomes[at] {
                Outcome::Accepted { response, .. } => (EventOutcome::Accepted, response),
                Outcome::Rejected { rejection } => (EventOutcome::Rejected, rejection),
                Outcome::Failed(_) | Outcome::NoRoom => continue,
            };
            let (state, patch) = rows[*entity].next(&self.outcomes[at], (at == last[*entity]).then(|| self.bases[*entity].after.state.as_ref()));
            let envelope = &batch.leaders[*index];
            indices.push(*index);
            events.push(Event {
                event_id: head + 1 + events.len() as u64,
                entity_id: self.bases[*entity].before.id.clone(),
                version: rows[*entity].version,
                command_id: envelope.command.command_id.clone(),
                command: envelope.command.name.clone(),
                outcome,
                handler_version: self.handlers.handlers.version().clone(),
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

/// About how many bytes of documents an outcome adds to the rows of its batch.
fn weight(outcome: &Outcome) -> usize {
    ROW_OVERHEAD
        + match outcome {
            Outcome::Accepted { response, state: Change::Whole(state) } => response.len() + state.len(),
            Outcome::Accepted { response, state: Change::Patch { patch, .. } } => response.len() + patch.len(),
            Outcome::Rejected { rejection } => rejection.len(),
            Outcome::Failed(_) | Outcome::NoRoom => 0,
        }
}

/// What the rows of one entity hold, one after another: the newest is whole, those before it may be patches.
pub(super) struct Rows {
    pub version: Version,
    /// The newest version whose row is whole.
    base: Version,
    /// The state now; none where it does not exist, or is known only as patches.
    text: Option<Json>,
    exists: bool,
}

impl Rows {
    pub fn after(loaded: &LoadedEntity) -> Rows {
        let text = loaded.state.as_ref().and_then(State::text).cloned();
        Rows { version: loaded.version, base: loaded.version, exists: text.is_some(), text }
    }

    /// The next row: the whole state or a patch. `whole` is given for the last row, whose state must be whole.
    pub fn next(&mut self, outcome: &Outcome, whole: Option<Option<&State>>) -> (Option<Json>, Option<StatePatch>) {
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
            (Some(whole), _) => (whole.and_then(State::text).cloned(), None),
            (None, Some(patch)) => (None, Some(StatePatch { base: self.base, patch })),
            (None, None) => {
                self.base = self.version;
                (self.text.clone(), None)
            }
        }
    }
}
