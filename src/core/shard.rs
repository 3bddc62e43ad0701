//! Shards: which hash slot an entity id falls into, and partitions: one shard of one entity type.

use super::ids::{EntityId, EntityType};
use sha2::{Digest, Sha256};
use std::fmt;

/// One hash slot of entity ids: 0 up to the number of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ShardId(pub u16);

/// How many shards a database has; fixed when it is first used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShardCount(u16);

impl ShardCount {
    /// The most shards a database may have.
    pub const MAX: u16 = 4096;

    /// A count from 1 to [`ShardCount::MAX`].
    pub fn new(count: u16) -> Option<ShardCount> {
        (1..=ShardCount::MAX).contains(&count).then_some(ShardCount(count))
    }

    /// The number.
    pub fn get(self) -> u16 {
        self.0
    }

    /// The shard of an entity id: the first eight bytes of its SHA-256, big-endian, modulo the count.
    ///
    /// Written into databases: this must never change.
    pub fn shard_of(self, id: &EntityId) -> ShardId {
        let digest = Sha256::digest(id.as_str().as_bytes());
        let hash = digest.iter().take(8).fold(0_u64, |hash, byte| hash << 8 | u64::from(*byte));
        ShardId((hash % u64::from(self.0)) as u16)
    }
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One shard of one entity type: an ordered queue of events with dense ids.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Partition {
    /// Whose events.
    pub entity_type: EntityType,
    /// Which of its shards.
    pub shard: ShardId,
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.entity_type, self.shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_one_that_databases_hold() {
        for (id, shard) in [("a", 10), ("A", 57), ("c9v3", 36), ("account-1", 30)] {
            assert_eq!(ShardCount::new(64).map(|count| count.shard_of(&EntityId::trusted(id)).0), Some(shard), "{id}");
        }
    }

    #[test]
    fn ten_thousand_ids_spread_evenly() {
        let count = ShardCount::new(64).unwrap();
        let mut held = [0_u32; 64];
        for number in 0..10_000 {
            held[usize::from(count.shard_of(&EntityId::trusted(&format!("id-{number}"))).0)] += 1;
        }
        assert!(held.iter().all(|ids| (100..=220).contains(ids)), "{held:?}");
    }

    #[test]
    fn a_count_is_at_least_one() {
        assert_eq!(ShardCount::new(0), None);
        assert_eq!(ShardCount::new(4097), None);
        assert!(ShardCount::new(1).is_some());
    }
}
