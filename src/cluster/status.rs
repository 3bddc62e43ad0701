//! What operators see of a cluster, as JSON and as a table.

use crate::core::NodeId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// `GET /v1/cluster`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The node that answers.
    pub node: NodeId,
    /// Who leads, as far as the node knows.
    pub leader: Option<NodeId>,
    /// The number of the map that the node follows.
    pub epoch: u64,
    /// Milliseconds since a leader last confirmed the map; none where none ever did, 0 where there is nothing to confirm.
    pub map_age_ms: Option<u64>,
    /// All nodes.
    pub nodes: Vec<NodeEntry>,
    /// The owner of each shard; none where every node handles it itself.
    pub shards: Vec<Option<NodeId>>,
}

/// A node in [`Status`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeEntry {
    /// Its name.
    pub id: NodeId,
    /// Where it takes requests.
    pub url: String,
    /// How many shards it owns.
    pub shards: usize,
    /// Milliseconds since the leader heard it; none where nobody listens, or where it was never heard.
    pub last_heartbeat_ms: Option<u64>,
}

/// A table for people.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leader = self.leader.as_ref().map_or("nobody", NodeId::as_str);
        let age = self.map_age_ms.map_or("never confirmed".to_owned(), |age| format!("confirmed {} ago", seconds(age)));
        writeln!(f, "as {} sees it: {leader} leads, map {} ({age})\n", self.node, self.epoch)?;
        let widest = |length: fn(&NodeEntry) -> usize, title: usize| self.nodes.iter().map(length).max().unwrap_or(0).max(title);
        let (id_width, url_width) = (widest(|node| node.id.as_str().len(), 4), widest(|node| node.url.len(), 3));
        writeln!(f, "{:id_width$}  {:url_width$}  {:>6}  {:>9}", "NODE", "URL", "SHARDS", "HEARTBEAT")?;
        for node in &self.nodes {
            let heard = node.last_heartbeat_ms.map_or("-".to_owned(), |age| format!("{} ago", seconds(age)));
            writeln!(f, "{:id_width$}  {:url_width$}  {:>6}  {heard:>9}", node.id.as_str(), node.url, node.shards)?;
        }
        match self.shards.iter().filter(|owner| owner.is_none()).count() {
            0 => Ok(()),
            1 => writeln!(f, "\none shard has no owner: every node handles its commands itself"),
            unowned => writeln!(f, "\n{unowned} shards have no owner: every node handles their commands itself"),
        }
    }
}

fn seconds(milliseconds: u64) -> String {
    format!("{}.{} s", milliseconds / 1000, milliseconds % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_nodes_and_what_is_missing() {
        let node = |id: &str, shards, last_heartbeat_ms| NodeEntry { id: NodeId::trusted(id), url: format!("http://{id}:9865"), shards, last_heartbeat_ms };
        let status = Status {
            node: NodeId::trusted("b"),
            leader: Some(NodeId::trusted("a")),
            epoch: 12,
            map_age_ms: Some(1250),
            nodes: vec![node("a", 2, Some(90)), node("long-name", 1, None)],
            shards: vec![Some(NodeId::trusted("a")), Some(NodeId::trusted("a")), Some(NodeId::trusted("long-name")), None],
        };
        let expected = "\
as b sees it: a leads, map 12 (confirmed 1.2 s ago)

NODE       URL                    SHARDS  HEARTBEAT
a          http://a:9865               2  0.0 s ago
long-name  http://long-name:9865       1          -

one shard has no owner: every node handles its commands itself
";
        assert_eq!(status.to_string(), expected);
    }
}
