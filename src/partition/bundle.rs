//! Bundles: commands of several entities, entity types and shards that happen together or not at all.
//!
//! A bundle is run on states that were just read and appended in one transaction, under the same three keys as everything else; where one is
//! taken, all command ids are looked up and the bundle is run again on what is there now. So it needs no lock, and whoever owns the shards notices it as
//! it notices any other writer. Still it takes its turn with the workers of this node, so that it neither starves behind a hot entity nor costs
//! them a conflict.
//!
//! What is there of a bundle's command ids tells whether it happened: all or none. Where only some are recorded, they were used outside of it.

use super::cache::CachedState;
use super::run::Rows;
use super::worker::Backoff;
use super::{Command, CommandError, HandlersInForce, Inner, Partitions, Turn, metrics};
use crate::core::{Answer, EntityId, EntityType, Event, EventOutcome, Failure, Json, LoadedEntity, Outcome, Partition, Replay, State, StoredEvent, Task, Work};
use crate::handler::Ran;
use crate::store::{AppendError, StoreError, barrier_since};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

/// How long a bundle waits for its turn at one partition while it has its turn at others.
const TURN_WAIT_MAX: Duration = Duration::from_millis(300);

/// One command of a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundled {
    /// Its entity's type.
    pub entity_type: EntityType,
    /// The command.
    pub command: Command,
}

/// Why a bundle did not happen.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BundleError {
    /// One of its commands is refused. Nothing is recorded.
    #[error("command {index} is refused")]
    Refused {
        /// Which one, from 0.
        index: usize,
        /// Why.
        reason: Refusal,
    },
    /// Its events together are more than the database takes at once. Nothing is recorded.
    #[error("the bundle is too large")]
    TooLarge,
    /// The bundle as a whole: overloaded, no database, outcome unknown.
    #[error(transparent)]
    Whole(CommandError),
}

/// Why one command of a bundle is refused.
#[derive(Debug, Clone)]
pub enum Refusal {
    /// The handler rejected it: `{code, message, details}`.
    Rejected(Json),
    /// It fails.
    Failed(Failure),
    /// There is no such entity type.
    UnknownEntityType,
    /// Its command id is recorded, and not by this bundle.
    Recorded(Box<Answer>),
}

/// The answers of a bundle's commands, in order, and whether it happened now or before.
pub type BundleResult = Result<(Vec<Arc<Answer>>, Replay), BundleError>;

/// The commands of one entity type, run.
struct TypeRun {
    handlers: Arc<HandlersInForce>,
    before: Vec<LoadedEntity>,
    after: Vec<Option<Json>>,
    /// For each command its place in the bundle and its entity's in `before`.
    places: Vec<(usize, usize)>,
    outcomes: Vec<Outcome>,
}

/// Commands of one entity type, as they stand in the bundle.
struct OfType {
    entity_type: EntityType,
    indices: Vec<usize>,
}

/// What a look for the command ids brought.
enum Recorded {
    Nothing,
    All(Vec<StoredEvent>),
    Some { index: usize, event: Box<StoredEvent> },
}

/// What one try came to.
enum Attempt {
    Done(BundleResult),
    Again,
}

impl Partitions {
    /// Runs a bundle, here, whoever owns its entities. No command id may be given twice for one entity. Goes on where the caller stops waiting.
    pub async fn run_bundle(&self, commands: Vec<Bundled>) -> BundleResult {
        let started = Instant::now();
        let bundle = Bundle::new(self.0.clone(), commands, started + self.timeout());
        if self.0.shared.closing.is_cancelled() {
            return Err(BundleError::Whole(CommandError::ShuttingDown));
        }
        let running = self.0.shared.workers.spawn(async move {
            let mut bundle = bundle;
            let result = bundle.run().await;
            bundle.count(&result, started.elapsed());
            result
        });
        running.await.unwrap_or_else(|_| Err(BundleError::Whole(CommandError::OutcomeUnknown)))
    }
}

struct Bundle {
    inner: Arc<Inner>,
    commands: Vec<Bundled>,
    by_type: Vec<OfType>,
    /// The time that the handlers see, however often they run.
    now: i64,
    deadline: Instant,
    /// Whether an append of it may have landed without a word.
    is_unknown: bool,
    /// The events that were sent then.
    own: Vec<(Partition, Vec<Event>)>,
}

impl Bundle {
    fn new(inner: Arc<Inner>, commands: Vec<Bundled>, deadline: Instant) -> Bundle {
        let mut by_type: BTreeMap<&EntityType, Vec<usize>> = BTreeMap::new();
        for (index, bundled) in commands.iter().enumerate() {
            by_type.entry(&bundled.entity_type).or_default().push(index);
        }
        let by_type = by_type.into_iter().map(|(entity_type, indices)| OfType { entity_type: entity_type.clone(), indices }).collect();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
        Bundle { inner, commands, by_type, now, deadline, is_unknown: false, own: Vec::new() }
    }

    fn partition_of(&self, index: usize) -> Partition {
        let Bundled { entity_type, command } = &self.commands[index];
        Partition { entity_type: entity_type.clone(), shard: self.inner.shared.store.shards().shard_of(&command.entity_id) }
    }

    async fn run(&mut self) -> BundleResult {
        let mut backoff = Backoff::new();
        loop {
            let tried = match tokio::time::timeout_at(self.deadline, self.attempt()).await {
                Ok(Ok(Attempt::Done(result))) => return result,
                Ok(Ok(Attempt::Again)) => None,
                Ok(Err(StoreError::Corrupt(reason))) => return Err(BundleError::Whole(CommandError::Internal(reason))),
                Ok(Err(StoreError::Unavailable(reason))) => Some(reason),
                Err(_) => return Err(BundleError::Whole(self.given_up(None))),
            };
            if Instant::now() >= self.deadline {
                return Err(BundleError::Whole(self.given_up(tried)));
            }
            backoff.wait().await;
        }
    }

    /// What is told of a bundle that found no end in time.
    fn given_up(&self, reason: Option<String>) -> CommandError {
        match reason {
            _ if self.is_unknown => CommandError::OutcomeUnknown,
            Some(reason) => CommandError::Unavailable(reason),
            None => CommandError::Overloaded { retry_after: super::queue::RETRY_AFTER },
        }
    }

    async fn attempt(&mut self) -> Result<Attempt, StoreError> {
        let epoch = self.inner.shared.store.epoch();
        let partitions: BTreeSet<Partition> = (0..self.commands.len()).map(|index| self.partition_of(index)).collect();
        // In one order, as all do; let go again before anything is waited for.
        let mut turns: Vec<OwnedMutexGuard<Turn>> = Vec::with_capacity(partitions.len());
        for partition in &partitions {
            let Ok(queue) = self.inner.queue_of(partition) else { return Ok(Attempt::Done(self.unknown_type(partition))) };
            match tokio::time::timeout(TURN_WAIT_MAX, queue.turn.lock_owned()).await {
                Ok(turn) => turns.push(turn),
                // Whatever holds that partition up must not hold up the others through this bundle.
                Err(_) => return Ok(Attempt::Again),
            }
        }
        match self.look_up().await? {
            Recorded::Nothing => {}
            Recorded::All(events) => return self.replay(events).map(Attempt::Done),
            Recorded::Some { index, event } => {
                let answer = Answer::of(&self.partition_of(index), &event.event);
                return Ok(Attempt::Done(Err(BundleError::Refused { index, reason: Refusal::Recorded(Box::new(answer)) })));
            }
        }
        let mut runs = Vec::with_capacity(self.by_type.len());
        for of_type in &self.by_type {
            match self.run_type(of_type).await? {
                Ok(run) => runs.push(run),
                Err(error) => return Ok(Attempt::Done(Err(error))),
            }
        }
        if let Some(refused) = refused(&runs) {
            // An earlier try may have come in between; and what was read is told, so it has to be durable.
            if !matches!(self.look_up().await?, Recorded::Nothing) {
                return Ok(Attempt::Again);
            }
            barrier_since(&*self.inner.shared.store, epoch).await?;
            return Ok(Attempt::Done(Err(refused)));
        }
        let appends = self.events(&runs, &partitions).await?;
        let outcome = self.append(&appends).await?;
        if let Attempt::Done(Ok(_)) = &outcome {
            self.remember(&runs);
            turns.iter_mut().for_each(|turn| turn.strangers += 1);
        }
        Ok(outcome)
    }

    fn unknown_type(&self, partition: &Partition) -> BundleResult {
        if self.inner.shared.closing.is_cancelled() {
            return Err(BundleError::Whole(CommandError::ShuttingDown));
        }
        let index = self.commands.iter().position(|bundled| bundled.entity_type == partition.entity_type).unwrap_or(0);
        Err(BundleError::Refused { index, reason: Refusal::UnknownEntityType })
    }

    /// What is recorded of the command ids; durable where it is anything.
    async fn look_up(&self) -> Result<Recorded, StoreError> {
        let epoch = self.inner.shared.store.epoch();
        let mut found = self.find().await?;
        let count = |found: &[Option<StoredEvent>]| found.iter().flatten().count();
        if count(&found) > 0 && count(&found) < found.len() {
            // It may have been committed between two looks; what was seen of it then is all to be seen now.
            found = self.find().await?;
        }
        if count(&found) == 0 {
            return Ok(Recorded::Nothing);
        }
        barrier_since(&*self.inner.shared.store, epoch).await?;
        if count(&found) == found.len() {
            return Ok(Recorded::All(found.into_iter().flatten().collect()));
        }
        let first = found.into_iter().enumerate().find_map(|(index, event)| event.map(|event| (index, event)));
        Ok(first.map_or(Recorded::Nothing, |(index, event)| Recorded::Some { index, event: Box::new(event) }))
    }

    async fn find(&self) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        let mut found = vec![None; self.commands.len()];
        for OfType { entity_type, indices } in &self.by_type {
            // An id that the server has just made is not there, unless this bundle brought it there.
            let known = |index: &&usize| self.is_unknown || !self.commands[**index].command.is_fresh_id;
            let indices: Vec<usize> = indices.iter().filter(known).copied().collect();
            let keys: Vec<_> =
                indices.iter().map(|index| &self.commands[*index].command).map(|command| (command.entity_id.clone(), command.command_id.clone())).collect();
            if keys.is_empty() {
                continue;
            }
            for (index, event) in indices.into_iter().zip(self.inner.shared.store.find(entity_type, &keys).await?) {
                found[index] = event;
            }
        }
        Ok(found)
    }

    /// The answer to a bundle whose commands are all recorded.
    fn replay(&self, events: Vec<StoredEvent>) -> Result<BundleResult, StoreError> {
        if let Some(index) = events.iter().position(|event| event.event.outcome == EventOutcome::Rejected) {
            let answer = Answer::of(&self.partition_of(index), &events[index].event);
            return Ok(Err(BundleError::Refused { index, reason: Refusal::Recorded(Box::new(answer)) }));
        }
        let is_own = |event: &Event| {
            let same = |own: &Event| own.command_id == event.command_id && own.entity_id == event.entity_id && own.event_id == event.event_id;
            self.own.iter().flat_map(|(_, events)| events).any(|own| same(own) && own.handled_at == event.handled_at && own.response == event.response)
        };
        let mut replay = if events.iter().all(|event| is_own(&event.event)) { Replay::First } else { Replay::Again };
        let answers: Vec<Arc<Answer>> = events.iter().enumerate().map(|(index, event)| Arc::new(Answer::of(&self.partition_of(index), &event.event))).collect();
        for (answer, Bundled { command, .. }) in answers.iter().zip(&self.commands) {
            if answer.replay_for(&command.name, &command.request) == Replay::Mismatch {
                replay = Replay::Mismatch;
            }
            self.inner.shared.caches.keep_answer(answer);
        }
        Ok(Ok((answers, replay)))
    }

    /// Reads the entities of one type and runs its commands.
    async fn run_type(&self, OfType { entity_type, indices }: &OfType) -> Result<Result<TypeRun, BundleError>, StoreError> {
        let Some(handlers) = self.inner.handlers_of(entity_type) else {
            return Ok(Err(BundleError::Refused { index: indices[0], reason: Refusal::UnknownEntityType }));
        };
        let mut numbers: HashMap<&EntityId, usize> = HashMap::new();
        let mut ids: Vec<EntityId> = Vec::new();
        let mut places = Vec::with_capacity(indices.len());
        for index in indices {
            let id = &self.commands[*index].command.entity_id;
            let entity = *numbers.entry(id).or_insert_with(|| {
                ids.push(id.clone());
                ids.len() - 1
            });
            places.push((*index, entity));
        }
        let newest = self.inner.shared.store.newest(entity_type, &ids).await?;
        let loaded = |(id, stored): (EntityId, Option<StoredEvent>)| {
            let (version, state) = stored.map(|stored| (stored.event.version, stored.event.state.map(State::Whole))).unwrap_or_default();
            LoadedEntity { id, version, state }
        };
        let before: Vec<LoadedEntity> = ids.into_iter().zip(newest).map(loaded).collect();
        let task = |(index, entity): &(usize, usize)| {
            let command = &self.commands[*index].command;
            Task {
                entity: *entity,
                command_id: command.command_id.clone(),
                command: command.name.clone(),
                request: command.request.clone(),
                precondition: command.precondition,
                now: self.now,
            }
        };
        let work = Work {
            entities: before.clone(),
            tasks: places.iter().map(task).collect(),
            done: 0,
            // All of it has to go at once, however much a batch may hold.
            bytes_left: self.inner.shared.store.append_bytes_max(),
            row_bytes_max: self.inner.shared.options.row_bytes_max,
        };
        let unavailable = |reason: String| StoreError::Unavailable(reason);
        let Ran { outcomes, states } = handlers.handlers.run(work).await.map_err(|error| unavailable(error.to_string()))?;
        if outcomes.len() != places.len() || states.len() != before.len() {
            return Err(StoreError::Corrupt(format!("{} outcomes for {} commands", outcomes.len(), places.len())));
        }
        Ok(Ok(TypeRun { handlers, before, after: states, places, outcomes }))
    }

    /// The events of the bundle, each partition's right after its head, partitions in their order.
    async fn events(&self, runs: &[TypeRun], partitions: &BTreeSet<Partition>) -> Result<Vec<(Partition, Vec<Event>)>, StoreError> {
        let store = &self.inner.shared.store;
        let heads = futures_util::future::try_join_all(partitions.iter().map(|partition| store.head(partition))).await?;
        let mut appends: BTreeMap<&Partition, (u64, Vec<Event>)> =
            partitions.iter().zip(heads).map(|(partition, head)| (partition, (head, Vec::new()))).collect();
        for run in runs {
            let mut last = vec![0; run.before.len()];
            run.places.iter().enumerate().for_each(|(at, (_, entity))| last[*entity] = at);
            let mut rows: Vec<Rows> = run.before.iter().map(Rows::after).collect();
            for (at, (index, entity)) in run.places.iter().enumerate() {
                let Outcome::Accepted { response, .. } = &run.outcomes[at] else { continue };
                let whole = run.after[*entity].clone().map(State::Whole);
                let (state, patch) = rows[*entity].next(&run.outcomes[at], (at == last[*entity]).then_some(whole.as_ref()));
                let command = &self.commands[*index].command;
                let Some((head, events)) = appends.get_mut(&self.partition_of(*index)) else { continue };
                events.push(Event {
                    event_id: *head + 1 + events.len() as u64,
                    entity_id: command.entity_id.clone(),
                    version: rows[*entity].version,
                    command_id: command.command_id.clone(),
                    command: command.name.clone(),
                    outcome: EventOutcome::Accepted,
                    handler_version: run.handlers.handlers.version().clone(),
                    request: command.request.clone(),
                    response: response.clone(),
                    state,
                    patch,
                    handled_at: self.now,
                });
            }
        }
        Ok(appends.into_iter().map(|(partition, (_, events))| (partition.clone(), events)).collect())
    }

    /// Sends the events until it is known what became of them.
    async fn append(&mut self, appends: &[(Partition, Vec<Event>)]) -> Result<Attempt, StoreError> {
        let weight: usize = appends.iter().flat_map(|(_, events)| events).map(Event::weight).sum();
        if weight > self.inner.shared.store.append_bytes_max() {
            return Ok(Attempt::Done(Err(BundleError::TooLarge)));
        }
        let mut backoff = Backoff::new();
        let mut was_unknown = false;
        let inner = self.inner.clone();
        let _under_way = inner.shared.commits.begin();
        loop {
            let Err(error) = self.inner.shared.store.append_all(appends).await else {
                for (partition, events) in appends {
                    let last = events.last().map_or(0, |event| event.event_id);
                    self.inner.shared.commits.publish(partition, last);
                }
                return Ok(Attempt::Done(Ok((self.answers(appends), Replay::First))));
            };
            match error {
                // Whether it was another writer or this very bundle, the next look tells.
                AppendError::PositionTaken | AppendError::KeyTaken => return Ok(Attempt::Again),
                AppendError::Unknown(reason) => {
                    if !was_unknown {
                        tracing::warn!(reason, "outcome of a bundle unknown; sending it again until it is decided");
                    }
                    (was_unknown, self.is_unknown) = (true, true);
                    self.own = appends.to_vec();
                    backoff.wait().await;
                }
                AppendError::Interrupted(_) | AppendError::Unavailable(_) if was_unknown => backoff.wait().await,
                AppendError::Interrupted(_) => return Ok(Attempt::Again),
                AppendError::Unavailable(reason) => return Err(StoreError::Unavailable(reason)),
                AppendError::TooLarge | AppendError::Refused(_) if self.is_unknown => {
                    return Ok(Attempt::Done(Err(BundleError::Whole(CommandError::OutcomeUnknown))));
                }
                AppendError::TooLarge => return Ok(Attempt::Done(Err(BundleError::TooLarge))),
                AppendError::Refused(reason) => return Ok(Attempt::Done(Err(BundleError::Whole(CommandError::Internal(reason))))),
            }
        }
    }

    /// The answers that the events give, in the order of the bundle.
    fn answers(&self, appends: &[(Partition, Vec<Event>)]) -> Vec<Arc<Answer>> {
        let mut by_command: HashMap<(&EntityType, &EntityId, &crate::core::CommandId), Arc<Answer>> = HashMap::new();
        for (partition, events) in appends {
            for event in events {
                by_command.insert((&partition.entity_type, &event.entity_id, &event.command_id), Arc::new(Answer::of(partition, event)));
            }
        }
        let key = |bundled: &Bundled| by_command.get(&(&bundled.entity_type, &bundled.command.entity_id, &bundled.command.command_id)).cloned();
        self.commands.iter().filter_map(key).inspect(|answer| self.inner.shared.caches.keep_answer(answer)).collect()
    }

    /// The states that the bundle leaves, for those who come next.
    fn remember(&self, runs: &[TypeRun]) {
        for (run, OfType { entity_type, .. }) in runs.iter().zip(&self.by_type) {
            let mut versions: Vec<u64> = run.before.iter().map(|entity| entity.version).collect();
            run.places.iter().for_each(|(_, entity)| versions[*entity] += 1);
            for ((before, state), version) in run.before.iter().zip(&run.after).zip(versions) {
                let partition = Partition { entity_type: entity_type.clone(), shard: self.inner.shared.store.shards().shard_of(&before.id) };
                self.inner.shared.caches.keep_state(&partition, &before.id, CachedState { version, state: state.clone(), is_durable: true });
            }
        }
    }

    /// Counts each command as what became of it.
    fn count(&self, result: &BundleResult, took: Duration) {
        for (index, Bundled { entity_type, command }) in self.commands.iter().enumerate() {
            let told = match result {
                Ok((answers, replay)) => answers.get(index).cloned().map(|answer| (answer, *replay)).ok_or(CommandError::OutcomeUnknown),
                Err(BundleError::Whole(error)) => Err(error.clone()),
                // Those beside the refused one did not happen either.
                Err(BundleError::Refused { reason: Refusal::Failed(failure), index: refused }) if *refused == index => {
                    Err(CommandError::Failed(failure.clone()))
                }
                Err(BundleError::Refused { .. } | BundleError::TooLarge) => Err(CommandError::Overloaded { retry_after: super::queue::RETRY_AFTER }),
            };
            if let Some(handlers) = self.inner.handlers_of(entity_type) {
                handlers.counters.count(&command.name, metrics::outcome(&told), took);
            }
        }
    }
}

/// The first command in the bundle that is refused, if any.
fn refused(runs: &[TypeRun]) -> Option<BundleError> {
    let all = runs.iter().flat_map(|run| run.places.iter().zip(&run.outcomes));
    let refused = all.filter_map(|((index, _), outcome)| match outcome {
        Outcome::Accepted { .. } => None,
        Outcome::Rejected { rejection } => Some((*index, Some(Refusal::Rejected(rejection.clone())))),
        Outcome::Failed(failure) => Some((*index, Some(Refusal::Failed(failure.clone())))),
        Outcome::NoRoom => Some((*index, None)),
    });
    let (index, reason) = refused.min_by_key(|(index, _)| *index)?;
    Some(reason.map_or(BundleError::TooLarge, |reason| BundleError::Refused { index, reason }))
}
