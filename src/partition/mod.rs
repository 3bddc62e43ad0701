//! Partitions: the queues in which commands wait, and the workers that run, commit and answer them in batches.
//!
//! [`Partitions`] hands each command to the worker of its partition, which is started when first needed.

use crate::core::{Answer, CommandId, CommandName, EntityId, EntityType, Failure, Json, Precondition, Replay};
use std::time::Duration;

/// One command as a caller sends it, its identifiers checked.
#[derive(Debug, Clone)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// Answer [`CommandError::Overloaded`] at once.
    Refuse,
    /// Wait for a place, up to the command's deadline.
    Wait,
}

/// Why there is no recorded answer.
#[derive(Debug, Clone, thiserror::Error)]
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
pub type CommandResult = Result<(std::sync::Arc<Answer>, Replay), CommandError>;

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
    /// The most bytes of states kept in memory.
    pub cache_bytes_max: u64,
}

/// Hands commands to the workers; a clone shares them.
#[derive(Clone)]
pub struct Partitions {}

/// A command that has its place in the queue.
pub struct Pending {}

impl Pending {
    /// Waits for the answer; never longer than the command's deadline.
    pub async fn answer(self) -> CommandResult {
        Err(CommandError::ShuttingDown)
    }
}

impl Partitions {
    /// Workers are started when they are first needed.
    pub fn new(_options: Options, _store: std::sync::Arc<dyn crate::store::Store>, _handlers: crate::handler::HandlerSet) -> Partitions {
        Partitions {}
    }

    /// Takes a place in the queue of the entity's partition. Commands of one entity are run in the order in which this returns.
    pub async fn submit(&self, _entity_type: &EntityType, _command: Command, _when_full: WhenFull) -> Result<Pending, CommandError> {
        Err(CommandError::ShuttingDown)
    }

    /// What a command was answered, after all that was queued before on this node; none where it never happened.
    pub async fn look_up(&self, _entity: &EntityKey, _command_id: &CommandId) -> Result<Option<std::sync::Arc<Answer>>, CommandError> {
        Err(CommandError::ShuttingDown)
    }

    /// The handlers in force.
    pub fn handlers(&self) -> std::sync::Arc<crate::handler::HandlerSet> {
        std::sync::Arc::default()
    }

    /// Puts other handlers in force, from the next batch on. Makes no tables: create them first.
    pub fn replace_handlers(&self, _handlers: crate::handler::HandlerSet) {}

    /// The store, for reads. What is read from it is durable only after [`crate::store::Store::barrier`].
    pub fn store(&self) -> &std::sync::Arc<dyn crate::store::Store> {
        unimplemented!()
    }

    /// Commands waiting in all queues.
    pub fn queue_depth(&self) -> usize {
        0
    }

    /// Takes no more commands, finishes those taken, returns when all are answered.
    pub async fn shut_down(&self) {}
}
