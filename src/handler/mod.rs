//! Handlers: the code that decides what commands do, in JavaScript or in Rust.

pub mod js;
pub mod native;
pub mod random;
mod schema;

pub use random::RandomKey;

use crate::core::batch::Execute;
use crate::core::{CommandName, Creates, EntityType, HandlerVersion, Json, Outcome, State, Work};
use async_trait::async_trait;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The handlers of one entity type, at one version of their code.
#[async_trait]
pub trait Handlers: Send + Sync + 'static {
    /// Whose handlers.
    fn entity_type(&self) -> &EntityType;

    /// The version of the code.
    fn version(&self) -> &HandlerVersion;

    /// The commands it knows.
    fn commands(&self) -> &BTreeMap<CommandName, Creates>;

    /// The longest entity id of this type.
    fn entity_id_max(&self) -> usize;

    /// Runs all tasks of the batch, in order, by the rule of [`Work::run_next`].
    ///
    /// Ends within the limits given for handlers, whatever a handler does. Fails as a whole only where no handler could be
    /// run at all (no process can be started); nothing has happened then.
    async fn run(&self, work: Work) -> Result<Ran, HandlersUnavailable>;
}

/// What a run of a batch made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// One for each task.
    pub outcomes: Vec<Outcome>,
    /// Each entity's whole state after the last task; none where it does not exist.
    pub states: Vec<Option<Json>>,
}

impl Ran {
    /// Runs all tasks of a batch by handlers that tell every state as a whole.
    pub fn whole(mut work: Work, handlers: &mut (impl Execute + ?Sized)) -> Ran {
        let outcomes = std::iter::from_fn(|| work.run_next(handlers)).collect();
        let states = work.entities.into_iter().map(|entity| entity.state.as_ref().and_then(State::text).cloned()).collect();
        Ran { outcomes, states }
    }
}

/// No handler can be run now; trying again later may help.
#[derive(Debug, Clone, thiserror::Error)]
#[error("handlers cannot be run: {0}")]
pub struct HandlersUnavailable(pub String);

/// The handlers of all entity types: what a reload replaces as a whole.
pub type HandlerSet = BTreeMap<EntityType, Arc<dyn Handlers>>;
