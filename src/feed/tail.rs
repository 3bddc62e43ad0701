//! The tail: the one task of a node that watches the end of the log for all who follow it.
//!
//! It looks at the heads of all partitions of the types that are followed every `poll`, and at this node's own commits as soon as they are
//! acknowledged. What is new in partitions that are followed it reads once, and keeps in [`Recent`]. So followers cost the database nothing of
//! their own as long as they keep up.
//!
//! Invariants: a head is set only after a barrier that came after the look at it (this node's own commits need none); where the connection was lost
//! between the two, the whole look is made again, since the database may have taken back what was seen. Heads never pass a hole.
//! A look that fails changes nothing and is made again at the next turn.

use super::log;
use super::recent::Recent;
use crate::core::{EntityType, Partition, ShardId};
use crate::metrics::FeedMetrics;
use crate::partition::Partitions;
use crate::store::StoreError;
use futures_util::future::join_all;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// The most new events of one partition that are kept at once; where more came, its followers read them by themselves.
const ENTRIES_MAX: u64 = 1000;
/// The most bytes of new events of one partition that one look reads.
const READ_BYTES_MAX: usize = 8 << 20;
/// How many partitions are read at once.
const READS: usize = 4;

/// What followers and the task share.
pub(super) struct Tail {
    pub partitions: Partitions,
    pub metrics: FeedMetrics,
    poll: Duration,
    recent: Mutex<Recent>,
    followed: Mutex<Followed>,
    looks: watch::Sender<Looks>,
    asked: Notify,
}

/// Who waits for what; where nobody holds the other end, nobody does.
#[derive(Default)]
struct Followed {
    types: HashMap<EntityType, watch::Sender<()>>,
    partitions: HashMap<Partition, watch::Sender<()>>,
}

impl Followed {
    fn is_empty(&self) -> bool {
        self.types.is_empty() && self.partitions.is_empty()
    }
}

/// Looks at all that is followed, so far: how many began, how many ended, how the last one ended.
#[derive(Clone, Default)]
struct Looks {
    begun: u64,
    ended: u64,
    failed: Option<StoreError>,
}

/// What wakes the task.
enum Wake {
    /// Time for a look at everything.
    All,
    /// Commits of this node.
    Own,
}

/// Something that is new in a partition.
struct Change {
    partition: Partition,
    from: u64,
    to: u64,
    is_followed: bool,
}

/// Tells that something changed in what it was made for.
pub(super) struct Interest(Vec<watch::Receiver<()>>);

impl Interest {
    /// Returns after a change since the last call, or since it was made.
    pub async fn changed(&mut self) {
        if self.0.is_empty() {
            return std::future::pending().await;
        }
        // The other ends live as long as the tail.
        let _ = futures_util::future::select_all(self.0.iter_mut().map(|receiver| Box::pin(receiver.changed()))).await;
    }
}

impl Tail {
    pub fn new(partitions: Partitions, memory_max: usize, poll: Duration) -> Tail {
        Tail {
            partitions,
            metrics: FeedMetrics::new(),
            poll,
            recent: Mutex::new(Recent::new(memory_max)),
            followed: Mutex::default(),
            looks: watch::channel(Looks::default()).0,
            asked: Notify::new(),
        }
    }

    /// What is known of the end of the log; not to be held across an await.
    pub fn recent(&self) -> MutexGuard<'_, Recent> {
        lock(&self.recent)
    }

    /// Follows all partitions of some types.
    pub fn follow_types(&self, entity_types: &[EntityType]) -> Interest {
        let mut followed = lock(&self.followed);
        let is_first = followed.is_empty();
        let interest = entity_types.iter().map(|entity_type| followed.types.entry(entity_type.clone()).or_insert_with(|| watch::channel(()).0).subscribe());
        let interest = Interest(interest.collect());
        drop(followed);
        self.wake(is_first);
        interest
    }

    /// Follows one partition.
    pub fn follow_partition(&self, partition: &Partition) -> Interest {
        let mut followed = lock(&self.followed);
        let is_first = followed.is_empty();
        let interest = Interest(vec![followed.partitions.entry(partition.clone()).or_insert_with(|| watch::channel(()).0).subscribe()]);
        drop(followed);
        self.wake(is_first);
        interest
    }

    /// The first follower starts the looks; those who come later find them going on.
    fn wake(&self, is_first: bool) {
        if is_first {
            self.asked.notify_one();
        }
    }

    /// Returns after a look at all that is followed that began after the call: what was committed there before the call is known then.
    pub async fn refresh(&self) -> Result<(), StoreError> {
        let mut looks = self.looks.subscribe();
        let begun = looks.borrow().begun;
        self.asked.notify_one();
        match looks.wait_for(|looks| looks.ended > begun).await {
            Ok(looks) => looks.failed.clone().map_or(Ok(()), Err),
            Err(_) => Err(StoreError::Unavailable("the node is stopping".into())),
        }
    }

    /// Runs for ever.
    pub async fn run(self: Arc<Tail>) {
        let mut next_look = Instant::now();
        // This node's commits that were not looked at yet: all of them are durable.
        let mut own: HashMap<Partition, u64> = HashMap::new();
        let (mut is_asked, mut is_failing) = (false, false);
        loop {
            let is_followed = self.is_followed();
            let commits = self.partitions.commits();
            let wake = tokio::select! {
                biased;
                () = self.asked.notified(), if !is_asked => {
                    is_asked = true;
                    // Those who begin to follow are served by the next look; those who asked for one wait for it.
                    continue;
                }
                () = tokio::time::sleep_until(next_look), if is_followed && !is_asked => Wake::All,
                () = std::future::ready(()), if is_asked => Wake::All,
                () = commits.published(), if is_followed => Wake::Own,
            };
            for (partition, head) in commits.take() {
                let known = own.entry(partition).or_default();
                *known = head.max(*known);
            }
            let outcome = match wake {
                Wake::All => {
                    is_asked = false;
                    self.looks.send_modify(|looks| looks.begun += 1);
                    let outcome = self.look_at_all(&own).await;
                    next_look = Instant::now() + self.poll;
                    let failed = outcome.as_ref().err().cloned();
                    self.looks.send_modify(|looks| (looks.ended, looks.failed) = (looks.begun, failed));
                    outcome
                }
                Wake::Own => self.look_at_own(&own).await,
            };
            match outcome {
                Ok(()) => {
                    own.clear();
                    if std::mem::take(&mut is_failing) {
                        tracing::info!("the end of the log can be read again");
                    }
                }
                Err(error) => {
                    self.metrics.faults.increment(1);
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(%error, "the end of the log cannot be read; trying on");
                    }
                    tokio::time::sleep(self.poll).await;
                }
            }
            self.metrics.memory.set(self.recent().bytes() as f64);
        }
    }

    /// Whether anybody follows; forgets what nobody follows any more.
    fn is_followed(&self) -> bool {
        let mut followed = lock(&self.followed);
        followed.types.retain(|_, sender| sender.receiver_count() > 0);
        followed.partitions.retain(|_, sender| sender.receiver_count() > 0);
        !followed.is_empty()
    }

    /// The types of all that is followed.
    fn followed_types(&self) -> Vec<EntityType> {
        let followed = lock(&self.followed);
        let types: BTreeSet<&EntityType> = followed.types.keys().chain(followed.partitions.keys().map(|partition| &partition.entity_type)).collect();
        types.into_iter().cloned().collect()
    }

    async fn look_at_own(&self, own: &HashMap<Partition, u64>) -> Result<(), StoreError> {
        let changes = self.changes(own.iter().map(|(partition, head)| (partition.clone(), *head)));
        let read = self.read(&changes).await;
        // What came after this node's own may not be durable.
        self.settle(changes, read, |change, entry_id| entry_id <= change.to);
        Ok(())
    }

    async fn look_at_all(&self, own: &HashMap<Partition, u64>) -> Result<(), StoreError> {
        let store = self.partitions.store();
        let epoch = store.epoch();
        let entity_types = self.followed_types();
        let heads: HashMap<Partition, u64> = store.heads(&entity_types).await?.into_iter().collect();
        self.check_not_shorter(&entity_types, &heads);
        let is_own = heads.iter().all(|(partition, head)| *head <= self.recent().head(partition) || own.get(partition).is_some_and(|own| head <= own));
        let changes = self.changes(heads);
        let read = self.read(&changes).await;
        if !is_own {
            store.barrier().await?;
            if store.epoch() != epoch {
                return Err(StoreError::Unavailable("the connection was lost between a look at the log and its barrier".into()));
            }
        }
        self.settle(changes, read, |change, entry_id| !is_own || entry_id <= change.to);
        self.recent().set_known(&entity_types);
        Ok(())
    }

    /// A log only ever grows. One that is shorter than it was is another one: readers that were further are told so when they ask.
    fn check_not_shorter(&self, entity_types: &[EntityType], heads: &HashMap<Partition, u64>) {
        for entity_type in entity_types {
            let known = self.recent().heads(entity_type, usize::from(self.partitions.store().shards().get()));
            for (shard, known) in known.into_iter().enumerate() {
                let partition = Partition { entity_type: entity_type.clone(), shard: ShardId(shard as u16) };
                let head = heads.get(&partition).copied().unwrap_or(0);
                if head < known {
                    tracing::error!(%partition, head, known, "the log is shorter than it was: the database was restored, or it lost commits");
                    self.metrics.faults.increment(1);
                    self.recent().jump(&partition, head);
                    self.tell(&partition);
                }
            }
        }
    }

    fn changes(&self, heads: impl IntoIterator<Item = (Partition, u64)>) -> Vec<Change> {
        let followed = lock(&self.followed);
        let recent = self.recent();
        let change = |(partition, to): (Partition, u64)| {
            let is_followed = followed.types.get(&partition.entity_type).is_some_and(|sender| sender.receiver_count() > 0)
                || followed.partitions.get(&partition).is_some_and(|sender| sender.receiver_count() > 0);
            let from = recent.head(&partition);
            (to > from).then_some(Change { partition, from, to, is_followed })
        };
        heads.into_iter().filter_map(change).collect()
    }

    /// Reads what is new; none for partitions that are not worth it, or cannot be read.
    async fn read(&self, changes: &[Change]) -> Vec<Option<Vec<Arc<super::Entry>>>> {
        let bytes_max = self.recent().bytes_max().min(READ_BYTES_MAX);
        let mut read = Vec::with_capacity(changes.len());
        for changes in changes.chunks(READS) {
            read.extend(join_all(changes.iter().map(|change| self.read_one(change, bytes_max))).await);
        }
        read
    }

    async fn read_one(&self, Change { partition, from, to, is_followed }: &Change, bytes_max: usize) -> Option<Vec<Arc<super::Entry>>> {
        if !is_followed || to - from > ENTRIES_MAX || bytes_max == 0 {
            return None;
        }
        let store = self.partitions.store();
        let read = log::after(&**store, partition, *from, ENTRIES_MAX as usize, bytes_max).await;
        match read.and_then(|events| log::entries(partition, &events)) {
            Ok(entries) => Some(entries),
            Err(error) => {
                // Its followers read by themselves, and hear of it where it lasts.
                self.metrics.faults.increment(1);
                tracing::warn!(%partition, %error, "newest events could not be read");
                None
            }
        }
    }

    /// Makes heads known, as far as entries may leave, and wakes those who wait for them.
    fn settle(&self, changes: Vec<Change>, read: Vec<Option<Vec<Arc<super::Entry>>>>, may_leave: impl Fn(&Change, u64) -> bool) {
        let mut types = BTreeSet::new();
        for (change, entries) in changes.into_iter().zip(read) {
            let entries = entries.map(|entries| entries.into_iter().filter(|entry| may_leave(&change, entry.event_id)).collect::<Vec<_>>());
            let mut recent = self.recent();
            match entries {
                // Fewer came than there are: they are too large to be kept together.
                Some(entries) if entries.last().is_some_and(|last| last.event_id >= change.to) => recent.extend(&change.partition, entries),
                Some(_) | None => recent.jump(&change.partition, change.to),
            }
            drop(recent);
            if let Some(sender) = lock(&self.followed).partitions.get(&change.partition) {
                sender.send_replace(());
            }
            types.insert(change.partition.entity_type);
        }
        let followed = lock(&self.followed);
        for sender in types.iter().filter_map(|entity_type| followed.types.get(entity_type)) {
            sender.send_replace(());
        }
    }

    fn tell(&self, partition: &Partition) {
        let followed = lock(&self.followed);
        for sender in [followed.types.get(&partition.entity_type), followed.partitions.get(partition)].into_iter().flatten() {
            sender.send_replace(());
        }
    }
}

/// The locks guard plain values that no panic can leave half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
