//! Events: the rows of the log, as they are written and as they are read.

use super::ids::{CommandId, CommandName, EntityId, Version};
use super::json::Json;
use std::fmt;

/// Whether the handler accepted or rejected the command. Both are events and take the next version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum EventOutcome {
    /// The response is the handler's; the state may have changed.
    Accepted,
    /// The response is the rejection `{code, message, details}`; the state is the one before.
    Rejected,
}

/// Names the handler code that made an event: the first 16 hexadecimal digits of a hash over its source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct HandlerVersion(pub compact_str::CompactString);

impl fmt::Display for HandlerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One event of a partition, to be written. Its partition goes beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Place in the partition: 1, 2, 3 …
    pub event_id: u64,
    /// The entity it belongs to.
    pub entity_id: EntityId,
    /// The entity's version after it: 1, 2, 3 …
    pub version: Version,
    /// The command that made it.
    pub command_id: CommandId,
    /// The command's name.
    pub command: CommandName,
    /// Accepted or rejected.
    pub outcome: EventOutcome,
    /// The code that decided.
    pub handler_version: HandlerVersion,
    /// The command's request; `null` where there was none.
    pub request: Json,
    /// The handler's response, or the rejection.
    pub response: Json,
    /// The whole state after the event; none where the entity does not exist yet (a rejected creation), or where `patch` stands for it.
    pub state: Option<Json>,
    /// Where given, the row holds this instead of the whole state. Only in events to be written, and never in the newest one of an entity
    /// in its append; events that are read have their whole state.
    pub patch: Option<StatePatch>,
    /// The time that the handler saw: milliseconds since 1970 by the clock of the node that took the command.
    pub handled_at: i64,
}

impl Event {
    /// What its row holds of the state: all of it, or the patch.
    pub fn state_column(&self) -> Option<&Json> {
        self.patch.as_ref().map(|patch| &patch.patch).or(self.state.as_ref())
    }

    /// About how many bytes the event takes in a statement, before escaping.
    pub fn weight(&self) -> usize {
        let state = self.state.as_ref().map_or(0, Json::len) + self.patch.as_ref().map_or(0, |patch| patch.patch.len());
        ROW_OVERHEAD + self.command_id.as_str().len() + self.request.len() + self.response.len() + state
    }
}

/// A state told as the change from the version before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatePatch {
    /// The closest version below whose row holds the whole state; all rows between hold patches.
    pub base: Version,
    /// A JSON Patch (RFC 6902).
    pub patch: Json,
}

/// What a row takes besides its documents and command id, generously.
pub const ROW_OVERHEAD: usize = 256;

/// An event that was read back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEvent {
    /// The event.
    pub event: Event,
    /// When the database stored it: microseconds since 1970, UTC, by the database's clock. For people, never for order.
    pub committed_at: i64,
}

/// An entity as commands find it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LoadedEntity {
    /// Its id.
    pub id: EntityId,
    /// Its newest version; 0 where it has no event.
    pub version: Version,
    /// Its state; none where it does not exist.
    pub state: Option<State>,
}

/// A state while a batch runs on it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum State {
    /// Its text.
    Whole(Json),
    /// Whoever runs the handlers holds it in a form of its own.
    Held {
        /// How many bytes its text takes.
        len: usize,
    },
}

impl State {
    /// How many bytes its text takes.
    pub fn len(&self) -> usize {
        match self {
            State::Whole(text) => text.len(),
            State::Held { len } => *len,
        }
    }

    /// Never true: the shortest document has one character. Here because `len` is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its text, where it is here.
    pub fn text(&self) -> Option<&Json> {
        match self {
            State::Whole(text) => Some(text),
            State::Held { .. } => None,
        }
    }
}

impl From<Json> for State {
    fn from(text: Json) -> State {
        State::Whole(text)
    }
}
