//! Heartbeats: what nodes and their leader tell each other, as JSON over HTTP.

use crate::core::{Member, NodeId, ShardMap};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Where heartbeats go.
pub const PATH: &str = "/v1/cluster/heartbeat";

/// A node's word that it is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The node.
    pub node: Member,
    /// Its process: drawn when it starts.
    pub instance: String,
    /// Whether it can reach the database.
    pub is_ready: bool,
    /// Whether it is stopping.
    pub is_leaving: bool,
    /// The map that it follows.
    pub map: Arc<ShardMap>,
}

/// The leader's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The map in force.
    pub map: Arc<ShardMap>,
    /// All nodes that the leader knows.
    pub nodes: Vec<NodeStatus>,
}

/// A node as the leader sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its name.
    pub id: NodeId,
    /// Where it takes requests.
    pub url: String,
    /// How many shards it owns.
    pub shards: usize,
    /// How long ago it was heard; none where it never was.
    pub last_heartbeat: Option<Duration>,
}

/// Why a heartbeat is not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The node that was asked does not lead.
    #[error("this node does not lead")]
    NotLeading,
    /// Another node has the same name.
    #[error("another node of the same name is alive at {url}; cluster.node must be different on every node")]
    NameTaken {
        /// Where it is.
        url: String,
    },
    /// The node counts another number of shards.
    #[error("the node has another number of shards")]
    Shards,
}
