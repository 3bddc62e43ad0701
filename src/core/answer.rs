//! Answers: what a recorded event tells whoever sent its command, the first time and every later time.

use super::event::{Event, EventOutcome};
use super::ids::{CommandId, CommandName, EntityId, Version};
use super::json::Json;
use super::shard::Partition;
use super::token::Position;

/// Whether an answer is the first one to its command id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Replay {
    /// This try made the event.
    First,
    /// An earlier try, the same in command and request, made it.
    Again,
    /// An earlier try made it, with another command or another request.
    Mismatch,
}

/// A recorded outcome, with all that its answer shows.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Answer {
    /// Where the event stands.
    pub position: Position,
    /// The entity.
    pub entity_id: EntityId,
    /// The entity's version after the event.
    pub version: Version,
    /// The command's id.
    pub command_id: CommandId,
    /// The command that was run.
    pub command: CommandName,
    /// The request it was run with.
    pub request: Json,
    /// Accepted or rejected.
    pub outcome: EventOutcome,
    /// The response, or the rejection `{code, message, details}`.
    pub response: Json,
}

impl Answer {
    /// The answer that an event gives.
    pub fn of(partition: &Partition, event: &Event) -> Answer {
        Answer {
            position: Position { partition: partition.clone(), event_id: event.event_id },
            entity_id: event.entity_id.clone(),
            version: event.version,
            command_id: event.command_id.clone(),
            command: event.command.clone(),
            request: event.request.clone(),
            outcome: event.outcome,
            response: event.response.clone(),
        }
    }

    /// How this answer relates to a later try with the given command and request.
    pub fn replay_for(&self, command: &CommandName, request: &Json) -> Replay {
        if self.command == *command && self.request == *request { Replay::Again } else { Replay::Mismatch }
    }

    /// About how many bytes the answer takes in memory.
    pub fn weight(&self) -> usize {
        size_of::<Answer>() + self.request.len() + self.response.len() + self.command_id.as_str().len()
    }
}
