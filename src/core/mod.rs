//! The rules of quokka, pure and synchronous: no clock, no random numbers, no driver, no runtime.
//!
//! Everything that decides what a command does or how a document is written lives here, so that it can be tested with
//! tables and so that the server and its handler processes follow one and the same rule.

pub mod answer;
pub mod batch;
pub mod event;
pub mod event_json;
pub mod feed_token;
pub mod ids;
pub mod json;
pub mod patch;
pub mod shard;
pub mod shard_map;
pub mod token;

pub use answer::{Answer, Replay};
pub use batch::{Change, Creates, Failure, HandlerFault, Outcome, Precondition, Task, Work};
pub use event::{Event, EventOutcome, HandlerVersion, LoadedEntity, State, StatePatch, StoredEvent};
pub use ids::{CommandId, CommandName, EntityId, EntityType, IdError, NodeId, Version};
pub use json::{Json, JsonError};
pub use shard::{Partition, ShardCount, ShardId};
pub use shard_map::{Epoch, Member, ShardMap, Term};
pub use token::{LogIdentity, Position};
