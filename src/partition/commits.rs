//! What this node commits, told to whoever reads the log; and which appends have not come back.
//!
//! Owns two small tables. A head that is published here is of an append that was acknowledged, so it is durable. Nothing is lost by not
//! listening: readers look at the database as well. Neither table grows beyond the number of partitions that this node writes.

use crate::core::Partition;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Where workers tell of their appends.
#[derive(Default)]
pub struct Commits {
    heads: Mutex<HashMap<Partition, u64>>,
    published: Notify,
    under_way: Mutex<UnderWay>,
}

#[derive(Default)]
struct UnderWay {
    next: u64,
    since: HashMap<u64, Instant>,
}

impl Commits {
    /// Tells that events up to this id are committed and durable.
    pub fn publish(&self, partition: &Partition, head: u64) {
        let mut heads = lock(&self.heads);
        match heads.get_mut(partition) {
            Some(known) => *known = head.max(*known),
            None => drop(heads.insert(partition.clone(), head)),
        }
        drop(heads);
        self.published.notify_one();
    }

    /// Returns once something was published since the last [`Commits::take`]. For one listener.
    pub async fn published(&self) {
        self.published.notified().await;
    }

    /// The heads that were published since the last call.
    pub fn take(&self) -> HashMap<Partition, u64> {
        std::mem::take(&mut lock(&self.heads))
    }

    /// How long the oldest append has been under way, from its first try on; zero where there is none. A transaction of somebody else that holds locks
    /// on a partition shows here.
    pub fn oldest_append(&self) -> Duration {
        lock(&self.under_way).since.values().min().map_or(Duration::ZERO, Instant::elapsed)
    }

    /// Counts an append as under way until the guard is dropped.
    pub(super) fn begin(&self) -> Append<'_> {
        let mut under_way = lock(&self.under_way);
        let number = under_way.next;
        under_way.next += 1;
        under_way.since.insert(number, Instant::now());
        Append { commits: self, number }
    }
}

/// An append under way.
pub(super) struct Append<'c> {
    commits: &'c Commits,
    number: u64,
}

impl Drop for Append<'_> {
    fn drop(&mut self) {
        lock(&self.commits.under_way).since.remove(&self.number);
    }
}

/// The locks guard plain values that no panic can leave half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{EntityType, ShardId};

    fn partition(shard: u16) -> Partition {
        Partition { entity_type: EntityType::trusted("account"), shard: ShardId(shard) }
    }

    #[tokio::test(start_paused = true)]
    async fn the_highest_head_of_each_partition_is_told_once() {
        let commits = Commits::default();
        for (shard, head) in [(1, 5), (2, 1), (1, 9), (1, 7)] {
            commits.publish(&partition(shard), head);
        }
        commits.published().await;
        assert_eq!(commits.take(), HashMap::from([(partition(1), 9), (partition(2), 1)]));
        assert_eq!(commits.take(), HashMap::new());
        assert!(futures_util::poll!(Box::pin(commits.published())).is_pending());
    }

    #[tokio::test(start_paused = true)]
    async fn the_age_is_that_of_the_oldest_append_that_has_not_come_back() {
        let commits = Commits::default();
        let first = commits.begin();
        tokio::time::advance(Duration::from_secs(3)).await;
        let second = commits.begin();
        assert_eq!(commits.oldest_append(), Duration::from_secs(3));
        drop(first);
        assert_eq!(commits.oldest_append(), Duration::ZERO);
        drop(second);
        assert_eq!(commits.oldest_append(), Duration::ZERO);
    }
}
