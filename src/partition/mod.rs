//! Partitions: the queues in which commands wait, and the workers that run, commit and answer them in batches.
//!
//! [`Partitions`] hands each command to the worker of its partition, which is started when first needed. One worker has one
//! batch at the database at a time, and runs the next one meanwhile. It trusts its cached states and the head it remembers only as far as the database's keys
//! confirm them, so a second worker for the same partition, on another node, costs both of them speed and nothing else.
//!
//! What a caller is told: an answer that is durable, a failure that surely left nothing behind, or
//! [`CommandError::OutcomeUnknown`]. A caller who goes away changes nothing for anybody else.

mod batch;
mod bundle;
mod cache;
mod commit;
mod commits;
mod metrics;
mod queue;
mod run;
#[cfg(test)]
mod simulation;
mod worker;

pub use bundle::{BundleError, BundleResult, Bundled, Refusal};
pub use commits::Commits;
pub use queue::{Kept, Pending};

use crate::core::{Answer, CommandId, CommandName, EntityId, EntityType, Failure, Json, Partition, Precondition, Replay, ShardId, Version};
use crate::handler::{HandlerSet, Handlers};
use crate::metrics::{BatchMetrics, CommandCounters};
use crate::store::Store;
use arc_swap::{ArcSwap, ArcSwapOption};
use cache::Caches;
use queue::{Holdup, Request};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Mutex, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use worker::Worker;

/// One command as a caller sends it, its identifiers checked.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Command {
    /// Its entity.
    pub entity_id: EntityId,
    /// Its id.
    pub command_id: CommandId,
    /// Whether the server made the id just now, so that no earlier try can exist.
    pub is_fresh_id: bool,
    /// Its name, known or not.
    pub name: CommandName,
    /// Its request.
    pub request: Json,
    /// What the caller demands of the entity.
    pub precondition: Option<Precondition>,
}

/// What to do where the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum WhenFull {
    /// Answer [`CommandError::Overloaded`] at once.
    Refuse,
    /// Wait for a place, up to the command's deadline.
    Wait,
}

/// Why there is no recorded answer.
#[derive(Debug, Clone, thiserror::Error, serde::Serialize, serde::Deserialize)]
pub enum CommandError {
    /// The command did not happen, and why.
    #[error("the command failed")]
    Failed(Failure),
    /// The command id was used for another command or request, and the operator wants that refused.
    #[error("the command id was used before")]
    Reused(Box<Answer>),
    /// No such entity type. It did not happen.
    #[error("unknown entity type")]
    UnknownEntityType,
    /// The queue is full, or the command waited in it until its deadline. It did not happen.
    #[error("overloaded")]
    Overloaded {
        /// When to try again.
        retry_after: Duration,
    },
    /// The server is stopping. It did not happen.
    #[error("shutting down")]
    ShuttingDown,
    /// The database, or what runs handlers, is away. It did not happen.
    #[error("unavailable: {0}")]
    Unavailable(String),
    /// It may have happened.
    #[error("outcome unknown")]
    OutcomeUnknown,
    /// A fault of quokka. It did not happen.
    #[error("internal: {0}")]
    Internal(String),
}

/// A recorded answer, first or again.
pub type CommandResult = Result<(Arc<Answer>, Replay), CommandError>;

/// Names an entity.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EntityKey {
    /// Its type.
    pub entity_type: EntityType,
    /// Its id.
    pub entity_id: EntityId,
}

/// Settings of all workers.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a caller waits for an answer.
    pub timeout: Duration,
    /// The most commands that wait in one partition's queue.
    pub queue_max: usize,
    /// The most commands in one batch.
    pub batch_rows_max: usize,
    /// The most bytes of rows in one batch.
    pub batch_bytes_max: usize,
    /// The most bytes that one row may take.
    pub row_bytes_max: usize,
    /// Whether a command id that was used for something else is refused instead of answered.
    pub refuse_reuse: bool,
    /// The most bytes of states and of answers kept in memory, each.
    pub cache_bytes_max: u64,
    /// How long a batch that surely did not happen is tried again before its callers are told.
    pub retry_for: Duration,
}

/// What all workers share.
struct Shared {
    options: Options,
    store: Arc<dyn Store>,
    caches: Caches,
    metrics: BatchMetrics,
    commits: Commits,
    queued: AtomicUsize,
    closing: CancellationToken,
    workers: TaskTracker,
}

/// One entity type's queues and the handlers in force for it.
struct TypeQueues {
    entity_type: EntityType,
    handlers: ArcSwapOption<HandlersInForce>,
    queues: Box<[OnceLock<Queue>]>,
}

/// The callers' end of a queue.
#[derive(Clone)]
struct Queue {
    requests: mpsc::Sender<Request>,
    holdup: Arc<Holdup>,
    turn: Arc<Mutex<Turn>>,
}

/// Held by whoever of this node appends to a partition: its worker, or a bundle.
#[derive(Debug, Default)]
struct Turn {
    /// How many bundles have appended; a worker that sees another number than before has to read the head again.
    strangers: u64,
}

/// The handlers of one entity type, and what counts their commands.
struct HandlersInForce {
    handlers: Arc<dyn Handlers>,
    counters: CommandCounters,
}

impl HandlersInForce {
    fn new(handlers: &Arc<dyn Handlers>) -> HandlersInForce {
        let counters = CommandCounters::new(handlers.entity_type(), handlers.commands().keys());
        HandlersInForce { handlers: handlers.clone(), counters }
    }
}

struct Inner {
    shared: Arc<Shared>,
    handlers: ArcSwap<HandlerSet>,
    types: ArcSwap<BTreeMap<EntityType, Arc<TypeQueues>>>,
}

/// Hands commands to the workers; a clone shares them.
#[derive(Clone)]
pub struct Partitions(Arc<Inner>);

impl Partitions {
    /// Workers are started when they are first needed. The tables of the entity types must exist.
    pub fn new(options: Options, store: Arc<dyn Store>, handlers: HandlerSet) -> Partitions {
        let caches = Caches::new(options.cache_bytes_max);
        let shared = Shared {
            options,
            store,
            caches,
            metrics: BatchMetrics::new(),
            commits: Commits::default(),
            queued: AtomicUsize::new(0),
            closing: CancellationToken::new(),
            workers: TaskTracker::new(),
        };
        let partitions = Partitions(Arc::new(Inner { shared: Arc::new(shared), handlers: ArcSwap::default(), types: ArcSwap::default() }));
        partitions.replace_handlers(handlers);
        partitions
    }

    /// Takes a place in the queue of the entity's partition. Commands of one entity are run in the order in which this returns.
    pub async fn submit(&self, entity_type: &EntityType, command: Command, when_full: WhenFull) -> Result<Pending, CommandError> {
        self.submit_within(entity_type, command, when_full, self.timeout(), None).await
    }

    /// As [`Partitions::submit`], for a caller who waits no longer than `timeout` and wants something kept meanwhile.
    pub async fn submit_within(
        &self,
        entity_type: &EntityType,
        command: Command,
        when_full: WhenFull,
        timeout: Duration,
        kept: Kept,
    ) -> Result<Pending, CommandError> {
        if when_full == WhenFull::Refuse {
            return self.try_submit(entity_type, command, timeout, kept);
        }
        let queue = self.queue(entity_type, &command.entity_id)?;
        let (request, pending) = queue::command(command, Instant::now() + timeout, queue.holdup, kept);
        queue.requests.send_timeout(request, timeout).await.map_err(|error| match error {
            mpsc::error::SendTimeoutError::Timeout(_) => CommandError::Overloaded { retry_after: queue::RETRY_AFTER },
            mpsc::error::SendTimeoutError::Closed(_) => CommandError::ShuttingDown,
        })?;
        self.0.shared.queued.fetch_add(1, Ordering::Relaxed);
        Ok(pending)
    }

    /// As [`Partitions::submit_within`] with [`WhenFull::Refuse`].
    pub fn try_submit(&self, entity_type: &EntityType, command: Command, timeout: Duration, kept: Kept) -> Result<Pending, CommandError> {
        let queue = self.queue(entity_type, &command.entity_id)?;
        let (request, pending) = queue::command(command, Instant::now() + timeout, queue.holdup, kept);
        queue.requests.try_send(request).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => CommandError::Overloaded { retry_after: queue::RETRY_AFTER },
            mpsc::error::TrySendError::Closed(_) => CommandError::ShuttingDown,
        })?;
        self.0.shared.queued.fetch_add(1, Ordering::Relaxed);
        Ok(pending)
    }

    /// What a command was answered, after all that was queued before on this node; none where it never happened.
    pub async fn look_up(&self, entity: &EntityKey, command_id: &CommandId) -> Result<Option<Arc<Answer>>, CommandError> {
        let timeout = self.0.shared.options.timeout;
        let queue = self.queue(&entity.entity_type, &entity.entity_id)?;
        let (request, found) = queue::look_up(entity.entity_id.clone(), command_id.clone());
        let ask = async {
            queue.requests.send(request).await.map_err(|_| CommandError::ShuttingDown)?;
            self.0.shared.queued.fetch_add(1, Ordering::Relaxed);
            found.await.map_err(|_| CommandError::ShuttingDown)?
        };
        tokio::time::timeout(timeout, ask).await.unwrap_or(Err(CommandError::OutcomeUnknown))
    }

    /// The handlers in force.
    pub fn handlers(&self) -> Arc<HandlerSet> {
        self.0.handlers.load_full()
    }

    /// Puts other handlers in force, from the next batch on. Makes no tables: create them first.
    pub fn replace_handlers(&self, handlers: HandlerSet) {
        let shards = usize::from(self.0.shared.store.shards().get());
        let mut types = BTreeMap::clone(&self.0.types.load());
        for (entity_type, queues) in &types {
            // A type that is gone keeps its queues, so that a later return of it meets the same workers.
            queues.handlers.store(handlers.get(entity_type).map(|found| Arc::new(HandlersInForce::new(found))));
        }
        for (entity_type, found) in &handlers {
            types.entry(entity_type.clone()).or_insert_with(|| {
                Arc::new(TypeQueues {
                    entity_type: entity_type.clone(),
                    handlers: ArcSwapOption::from_pointee(HandlersInForce::new(found)),
                    queues: (0..shards).map(|_| OnceLock::new()).collect(),
                })
            });
        }
        self.0.types.store(Arc::new(types));
        self.0.handlers.store(Arc::new(handlers));
    }

    /// The store, for reads. What is read from it is durable only after [`Store::barrier`].
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.shared.store
    }

    /// Whether this version of the entity is known to be durable, so that a read of it needs no barrier.
    pub fn is_durable(&self, entity: &EntityKey, version: Version) -> bool {
        self.0.shared.caches.is_durable(&entity.entity_type, &entity.entity_id, version)
    }

    /// How long callers wait for an answer.
    pub fn timeout(&self) -> Duration {
        self.0.shared.options.timeout
    }

    /// Drops what is remembered of the entities in these shards, which others handle from now on. Nothing depends on it; it only frees memory.
    pub fn forget(&self, is_lost: impl Fn(ShardId) -> bool) {
        let shards = self.0.shared.store.shards();
        self.0.shared.caches.forget(|entity_id| is_lost(shards.shard_of(entity_id)));
    }

    /// What this node commits, and what it waits for.
    pub fn commits(&self) -> &Commits {
        &self.0.shared.commits
    }

    /// Commands waiting in all queues.
    pub fn queue_depth(&self) -> usize {
        self.0.shared.queued.load(Ordering::Relaxed)
    }

    /// Takes no more commands, finishes those taken, returns when all are answered.
    pub async fn shut_down(&self) {
        self.0.shared.closing.cancel();
        self.0.shared.workers.close();
        self.0.shared.workers.wait().await;
    }

    /// The queue of an entity's partition; starts its worker where there is none.
    fn queue(&self, entity_type: &EntityType, entity_id: &EntityId) -> Result<Queue, CommandError> {
        let shard = self.0.shared.store.shards().shard_of(entity_id);
        self.0.queue(entity_type, shard)
    }
}

impl Inner {
    fn queue(self: &Arc<Self>, entity_type: &EntityType, shard: ShardId) -> Result<Queue, CommandError> {
        if self.shared.closing.is_cancelled() {
            return Err(CommandError::ShuttingDown);
        }
        let types = self.types.load();
        let queues = types.get(entity_type).filter(|queues| queues.handlers.load().is_some()).ok_or(CommandError::UnknownEntityType)?;
        let queue = queues.queues[usize::from(shard.0)].get_or_init(|| self.start(queues.clone(), shard));
        Ok(queue.clone())
    }

    fn queue_of(self: &Arc<Self>, partition: &Partition) -> Result<Queue, CommandError> {
        self.queue(&partition.entity_type, partition.shard)
    }

    /// The handlers in force for an entity type.
    fn handlers_of(&self, entity_type: &EntityType) -> Option<Arc<HandlersInForce>> {
        self.types.load().get(entity_type)?.handlers.load_full()
    }

    fn start(&self, queues: Arc<TypeQueues>, shard: ShardId) -> Queue {
        let shared = self.shared.clone();
        let (sender, requests) = mpsc::channel(shared.options.queue_max);
        let (holdup, turn) = (Arc::new(Holdup::default()), Arc::new(Mutex::default()));
        let partition = Partition { entity_type: queues.entity_type.clone(), shard };
        let worker = Worker::new(shared.clone(), queues, partition, requests, holdup.clone(), turn.clone());
        shared.workers.spawn(worker.run());
        Queue { requests: sender, holdup, turn }
    }
}
