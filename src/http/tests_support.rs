//! What several tests of this module need.

use crate::core::{CommandName, Creates, EntityType, HandlerVersion, Outcome, Work};
use crate::handler::{HandlerSet, Handlers, HandlersUnavailable};
use async_trait::async_trait;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Handlers of the type `account` that know no command.
struct NoCommands {
    entity_type: EntityType,
    version: HandlerVersion,
    commands: BTreeMap<CommandName, Creates>,
}

#[async_trait]
impl Handlers for NoCommands {
    fn entity_type(&self) -> &EntityType {
        &self.entity_type
    }

    fn version(&self) -> &HandlerVersion {
        &self.version
    }

    fn commands(&self) -> &BTreeMap<CommandName, Creates> {
        &self.commands
    }

    fn entity_id_max(&self) -> usize {
        20
    }

    async fn run(&self, _: Work) -> Result<Vec<Outcome>, HandlersUnavailable> {
        Err(HandlersUnavailable("none here".into()))
    }
}

pub fn handlers() -> HandlerSet {
    let entity_type = EntityType::trusted("account");
    let handlers = NoCommands { entity_type: entity_type.clone(), version: HandlerVersion("0".into()), commands: BTreeMap::new() };
    BTreeMap::from([(entity_type, Arc::new(handlers) as Arc<dyn Handlers>)])
}
