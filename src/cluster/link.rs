//! Links: how commands reach the node that owns their shard.
//!
//! Two nodes keep one connection a direction between them: a request whose body and answer never end. Commands go one way as frames, their answers
//! come back the other way in any order, many in one write where many wait. So a command that is passed on costs a few microseconds and one round
//! trip, and the node that a client talks to writes the answer itself, byte for byte as if it had handled the command.
//!
//! A command that cannot be answered by the owner (link broken or silent, owner stopping, owner without its database) is handled by the node that has it,
//! under the same command id: whatever the owner made of it meanwhile, the database's keys let it happen once. Commands of one entity keep
//! their order through all of that: those that are handed back go before any that come later.

pub mod client;
pub mod server;
#[cfg(test)]
mod tests;
pub(super) mod wire;

pub use client::{Handled, Link, Sent};

/// Where links are asked for.
pub const PATH: &str = "/v1/cluster/link";
/// The media type of their frames. A change of the frames takes another one, so that nodes of two versions know that they do not understand each
/// other, and handle everything themselves.
pub const MEDIA_TYPE: &str = "application/x-quokka-link-1";
