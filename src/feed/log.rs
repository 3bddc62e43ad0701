//! Reading partitions in order, and refusing to pass what is not in order (dense-log).
//!
//! Every reader of the log reads through here. A partition's ids are 1, 2, 3 …, so whatever follows an event has the next id. Anything else can only
//! be the work of somebody who wrote around quokka: that is logged and told as corrupt, each time, and nothing behind it is given out.
//!
//! What is read here may not be durable yet: [`Store::barrier`] comes before it leaves.

use super::entry::Entry;
use crate::core::{EntityId, EntityType, Partition, StoredEvent, Version};
use crate::store::{Content, Order, Store, StoreError};
use std::sync::Arc;

/// How many versions of an entity are read first, when it is not yet known how large they are; and how many times more the next time at most.
const FIRST_READ: usize = 8;

/// The events of a partition right after `after`: at most `limit`, ending with the one that reaches `bytes_max`.
pub async fn after(store: &dyn Store, partition: &Partition, after: u64, limit: usize, bytes_max: usize) -> Result<Vec<StoredEvent>, StoreError> {
    let read = store.read(partition, Order::Ascending, after, limit, bytes_max).await?;
    let expected = (after + 1..).take(read.len());
    check(partition, &read, expected)?;
    Ok(read)
}

/// The events of a partition from `from` downwards, newest first, with the same limits.
pub async fn down_from(store: &dyn Store, partition: &Partition, from: u64, limit: usize, bytes_max: usize) -> Result<Vec<StoredEvent>, StoreError> {
    if from == 0 {
        return Ok(Vec::new());
    }
    let read = store.read(partition, Order::Descending, from + 1, limit, bytes_max).await?;
    if read.is_empty() {
        return Err(broken(partition, from, None));
    }
    check(partition, &read, (1..=from).rev())?;
    Ok(read)
}

fn check(partition: &Partition, read: &[StoredEvent], expected: impl Iterator<Item = u64>) -> Result<(), StoreError> {
    for (stored, expected) in read.iter().zip(expected) {
        if stored.event.event_id != expected {
            return Err(broken(partition, expected, Some(stored.event.event_id)));
        }
    }
    Ok(())
}

fn broken(partition: &Partition, expected: u64, found: Option<u64>) -> StoreError {
    tracing::error!(%partition, expected, found, "the log has a hole; nothing behind it is given out");
    StoreError::Corrupt(format!("partition {partition} has no event {expected}"))
}

/// An entity's versions right after one (or down from one), with the same limits.
pub async fn versions(
    store: &dyn Store,
    (entity_type, id): (&EntityType, &EntityId),
    (order, bound): (Order, Version),
    limit: usize,
    bytes_max: usize,
) -> Result<Vec<StoredEvent>, StoreError> {
    let (mut read, mut bytes, mut bound, mut wanted) = (Vec::new(), 0, bound, FIRST_READ);
    while read.len() < limit && bytes < bytes_max && !(order == Order::Descending && bound == 1) {
        wanted = wanted.min(limit - read.len());
        let page = store.history(entity_type, id, order, bound, wanted, Content::Whole).await?;
        let is_last = page.len() < wanted;
        for stored in page {
            if bytes < bytes_max {
                let is_next = match order {
                    Order::Ascending => stored.event.version == bound + 1,
                    Order::Descending => bound == 0 || stored.event.version + 1 == bound,
                };
                if !is_next {
                    tracing::error!(%entity_type, entity_id = %id, bound, found = stored.event.version, "the entity misses a version; nothing behind it is given out");
                    return Err(StoreError::Corrupt(format!("{entity_type}/{id} misses a version next to {bound}")));
                }
                bound = stored.event.version;
                bytes += stored.event.weight();
                read.push(stored);
            }
        }
        if is_last {
            break;
        }
        wanted = (bytes_max.saturating_sub(bytes) / (bytes / read.len()).max(1)).clamp(1, wanted * FIRST_READ);
    }
    Ok(read)
}

/// Events as entries.
pub fn entries(partition: &Partition, events: &[StoredEvent]) -> Result<Vec<Arc<Entry>>, StoreError> {
    let entry = |stored| Entry::new(partition, stored).map(Arc::new).map_err(|error| StoreError::Corrupt(error.to_string()));
    events.iter().map(entry).collect()
}
