//! Events as the feed gives them out: written once, however many read them.

use crate::core::event_json::{self, TimeError};
use crate::core::json::write_string;
use crate::core::{EntityId, EventOutcome, Partition, StoredEvent, Version};

/// One event of a partition, ready to be sent.
#[derive(Debug)]
pub struct Entry {
    /// Its id in the partition.
    pub event_id: u64,
    /// Whose it is.
    pub entity_id: EntityId,
    /// The entity's version after it.
    pub version: Version,
    /// Whether the command was accepted.
    pub outcome: EventOutcome,
    /// When the database stored it, in microseconds since 1970.
    pub committed_at: i64,
    /// The event as JSON: the members of a history's, and `entity_type`, `entity_id`, `shard`, `state`.
    pub json: String,
}

/// What an entry takes besides its text.
const OVERHEAD: usize = 200;

impl Entry {
    /// Writes an event of the partition.
    pub fn new(partition: &Partition, stored: &StoredEvent) -> Result<Entry, TimeError> {
        let event = &stored.event;
        let mut json = String::with_capacity(event.weight() + 160);
        json.push_str("{\"entity_type\":");
        write_string(&mut json, partition.entity_type.as_str());
        json.push_str(",\"entity_id\":");
        write_string(&mut json, event.entity_id.as_str());
        json.push_str(",\"shard\":");
        json.push_str(itoa::Buffer::new().format(partition.shard.0));
        json.push(',');
        event_json::write_members(&mut json, stored)?;
        json.push_str(",\"state\":");
        json.push_str(event.state.as_ref().map_or("null", |state| state.as_str()));
        json.push('}');
        Ok(Entry {
            event_id: event.event_id,
            entity_id: event.entity_id.clone(),
            version: event.version,
            outcome: event.outcome,
            committed_at: stored.committed_at,
            json,
        })
    }

    /// About how many bytes it takes in memory.
    pub fn weight(&self) -> usize {
        OVERHEAD + self.json.len()
    }
}
