//! What a node knows of the end of the log: the heads of partitions, and the newest events of those that are followed.
//!
//! Plain data behind one lock that is held for moments. A head that stands here was passed by a barrier, so all up to it may leave. The events kept of
//! a partition end at its head and have no holes; all of them together take at most `bytes_max`, and the oldest that came go first.

use super::entry::Entry;
use crate::core::{EntityType, Partition};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// The end of the log.
pub(super) struct Recent {
    /// By shard.
    types: HashMap<EntityType, Vec<End>>,
    /// Entity types whose partitions were all looked at.
    known: HashSet<EntityType>,
    /// Partitions of the entries kept, one item for each, in the order in which they came.
    order: VecDeque<Partition>,
    bytes: usize,
    bytes_max: usize,
}

/// The end of one partition.
#[derive(Default)]
struct End {
    head: u64,
    entries: VecDeque<Arc<Entry>>,
}

impl Recent {
    pub fn new(bytes_max: usize) -> Recent {
        Recent { types: HashMap::new(), known: HashSet::new(), order: VecDeque::new(), bytes: 0, bytes_max }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    /// Whether the heads of the type are known, be they 0.
    pub fn knows(&self, entity_type: &EntityType) -> bool {
        self.known.contains(entity_type)
    }

    pub fn set_known(&mut self, entity_types: &[EntityType]) {
        self.known.extend(entity_types.iter().cloned());
    }

    fn end(&self, partition: &Partition) -> Option<&End> {
        self.types.get(&partition.entity_type)?.get(usize::from(partition.shard.0))
    }

    fn end_mut(&mut self, partition: &Partition) -> &mut End {
        let (ends, shard) = (self.types.entry(partition.entity_type.clone()).or_default(), usize::from(partition.shard.0));
        if ends.len() <= shard {
            ends.resize_with(shard + 1, End::default);
        }
        &mut ends[shard]
    }

    /// Where a partition may be read up to; 0 where it is empty.
    pub fn head(&self, partition: &Partition) -> u64 {
        self.end(partition).map_or(0, |end| end.head)
    }

    /// The heads of a type's shards.
    pub fn heads(&self, entity_type: &EntityType, shards: usize) -> Vec<u64> {
        let mut heads: Vec<u64> = self.types.get(entity_type).into_iter().flatten().map(|end| end.head).collect();
        heads.resize(shards, 0);
        heads
    }

    /// The entries right after an event, at most `limit`; none where they are not here, or not any more.
    pub fn after(&self, partition: &Partition, after: u64, limit: usize) -> Option<Vec<Arc<Entry>>> {
        let entries = &self.end(partition)?.entries;
        let first = entries.front()?.event_id;
        let skipped = usize::try_from((after + 1).checked_sub(first)?).ok()?;
        Some(entries.iter().skip(skipped).take(limit).cloned().collect())
    }

    /// Moves the head on by entries that start right after it.
    pub fn extend(&mut self, partition: &Partition, entries: Vec<Arc<Entry>>) {
        self.bytes += entries.iter().map(|entry| entry.weight()).sum::<usize>();
        self.order.extend(entries.iter().map(|_| partition.clone()));
        let end = self.end_mut(partition);
        debug_assert!(entries.iter().zip(end.head + 1..).all(|(entry, event_id)| entry.event_id == event_id), "{partition}");
        end.head = entries.last().map_or(end.head, |last| last.event_id);
        end.entries.extend(entries);
        while self.bytes > self.bytes_max {
            let Some(oldest) = self.order.pop_front() else { break };
            if let Some(entry) = self.end_mut(&oldest).entries.pop_front() {
                self.bytes -= entry.weight();
            }
        }
    }

    /// Sets the head, without entries: those before it are not next to it any more.
    pub fn jump(&mut self, partition: &Partition, head: u64) {
        let end = self.end_mut(partition);
        end.head = head;
        if !end.entries.is_empty() {
            let bytes = end.entries.drain(..).map(|entry| entry.weight()).sum::<usize>();
            self.bytes -= bytes;
            self.order.retain(|of| of != partition);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{EntityId, EventOutcome, ShardId};

    fn partition(shard: u16) -> Partition {
        Partition { entity_type: EntityType::trusted("account"), shard: ShardId(shard) }
    }

    fn entries(ids: std::ops::RangeInclusive<u64>) -> Vec<Arc<Entry>> {
        let entry = |event_id| Entry {
            event_id,
            entity_id: EntityId::trusted("a"),
            version: 1,
            outcome: EventOutcome::Accepted,
            committed_at: 0,
            json: "x".repeat(100),
        };
        ids.map(|event_id| Arc::new(entry(event_id))).collect()
    }

    fn ids(recent: &Recent, shard: u16, after: u64) -> Option<Vec<u64>> {
        recent.after(&partition(shard), after, 3).map(|entries| entries.iter().map(|entry| entry.event_id).collect())
    }

    #[test]
    fn only_what_follows_without_a_hole_is_given() {
        let mut recent = Recent::new(10_000);
        recent.jump(&partition(1), 6);
        assert_eq!((recent.head(&partition(1)), ids(&recent, 1, 5), ids(&recent, 1, 6)), (6, None, None));
        recent.extend(&partition(1), entries(7..=11));
        assert_eq!(recent.head(&partition(1)), 11);
        for (after, expected) in [(5, None), (6, Some(vec![7, 8, 9])), (9, Some(vec![10, 11])), (11, Some(vec![]))] {
            assert_eq!(ids(&recent, 1, after), expected, "{after}");
        }
        recent.jump(&partition(1), 20);
        assert_eq!((recent.bytes(), ids(&recent, 1, 10), ids(&recent, 1, 20)), (0, None, None));
        assert_eq!(recent.heads(&EntityType::trusted("account"), 3), [0, 20, 0]);
    }

    #[test]
    fn the_oldest_that_came_go_first_and_memory_is_bounded() {
        let mut recent = Recent::new(1500);
        recent.extend(&partition(1), entries(1..=3));
        recent.extend(&partition(2), entries(1..=2));
        recent.extend(&partition(1), entries(4..=4));
        assert_eq!((recent.bytes(), ids(&recent, 1, 0), ids(&recent, 1, 1), ids(&recent, 2, 0)), (1500, None, Some(vec![2, 3, 4]), Some(vec![1, 2])));
        recent.extend(&partition(3), entries(1..=4));
        assert_eq!((recent.bytes(), ids(&recent, 1, 3), ids(&recent, 2, 1), ids(&recent, 3, 0)), (1500, Some(vec![4]), None, Some(vec![1, 2, 3])));
        let mut none = Recent::new(0);
        none.extend(&partition(1), entries(1..=3));
        assert_eq!((none.bytes(), none.head(&partition(1)), ids(&none, 1, 0)), (0, 3, None));
    }
}
