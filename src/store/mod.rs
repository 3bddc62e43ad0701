//! Where events are kept: the trait, its contract, and its implementations.
//!
//! A store keeps one table an entity type and enforces three keys on it, and nothing else in quokka decides who wins:
//! `(shard, event_id)`, `(entity_id, version)` and `(entity_id, command_id)`. [`conformance`] holds the tests that every
//! implementation passes.

pub mod conformance;
mod error;
mod lease;
pub mod mysql;
mod patches;
pub mod sqlite;

pub use error::{AppendError, OpenError, StoreError};
pub use lease::Lease;

use crate::core::{CommandId, EntityId, EntityType, Event, LogIdentity, Partition, ShardCount, StoredEvent, Version};
use async_trait::async_trait;
use std::sync::Arc;
use std::time::Duration;

/// How to open a store.
#[derive(Clone)]
pub struct Options {
    /// `mysql://user:password@host:3306/database` or `sqlite:PATH`.
    pub url: String,
    /// Number of shards; fixed when the database is first used.
    pub shards: ShardCount,
    /// The most connections that are open at once.
    pub pool: usize,
    /// How long one statement may take before its outcome counts as unknown.
    pub statement_timeout: Duration,
}

/// Leaves the URL out: it may hold a password.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Options { url: _, shards, pool, statement_timeout } = self;
        f.debug_struct("Options").field("shards", shards).field("pool", pool).field("statement_timeout", statement_timeout).finish_non_exhaustive()
    }
}

/// Opens the store that the URL names, and makes its own tables; [`Store::create_type`] makes and migrates those of entity types.
pub async fn open(options: &Options) -> Result<Arc<dyn Store>, OpenError> {
    match options.url.split_once(':') {
        Some(("mysql", _)) => Ok(Arc::new(mysql::MysqlStore::open(options).await?)),
        Some(("sqlite", _)) => Ok(Arc::new(sqlite::SqliteStore::open(options).await?)),
        _ => Err(OpenError::Url("it starts with neither mysql: nor sqlite:".into())),
    }
}

/// Whether a URL can be used, as far as that can be told without opening it.
pub fn check_url(url: &str) -> Result<(), OpenError> {
    match url.split_once(':') {
        Some(("mysql", _)) => mysql::check_url(url),
        Some(("sqlite", _)) => Ok(()),
        _ => Err(OpenError::Url("it starts with neither mysql: nor sqlite:".into())),
    }
}

/// Which versions of an entity a page of history holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Versions above the bound, lowest first.
    Ascending,
    /// Versions below the bound, highest first.
    Descending,
}

/// What of events is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// All of it.
    Whole,
    /// All but the state, which is then none: it can be far larger than the rest.
    WithoutState,
}

/// An entity in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its id.
    pub entity_id: EntityId,
    /// Its newest version.
    pub version: Version,
}

/// Returns once everything that was read since the store was at `epoch` is durable. Fails where the connection was lost in between: what was read
/// before it may have been taken back by a crash, and has to be read again.
pub async fn barrier_since(store: &dyn Store, epoch: u64) -> Result<(), StoreError> {
    store.barrier().await?;
    if store.epoch() == epoch {
        return Ok(());
    }
    Err(StoreError::Unavailable("the connection was lost between a read and its barrier".into()))
}

/// Keeps events. Every method may be called from many tasks at once, and from several processes on one database.
///
/// Dropping a returned future may or may not have had its effect, as with [`AppendError::Unknown`].
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// What makes this database's log itself.
    fn identity(&self) -> &LogIdentity;

    /// The number of shards that the database was first used with.
    fn shards(&self) -> ShardCount;

    /// The most bytes of events (by [`Event::weight`]) that one [`Store::append`] may take with certainty, escaping left aside.
    fn append_bytes_max(&self) -> usize;

    /// Makes the entity type's table where it is missing, and brings one of an earlier version of the schema up to date; before that, nothing else
    /// may be asked of the type. Safe to repeat where it was interrupted. Safe to call from several processes at once.
    async fn create_type(&self, entity_type: &EntityType) -> Result<(), StoreError>;

    /// The largest event id of the partition that is committed; 0 where it has none.
    async fn head(&self, partition: &Partition) -> Result<u64, StoreError>;

    /// Writes the events in one atomic statement and returns once they are durable.
    ///
    /// `events` is not empty, its ids are dense and rise by one, and the first follows a head that the caller has seen committed. A
    /// returned error says whether the events are there: see [`AppendError`]. Either all are or none is.
    async fn append(&self, partition: &Partition, events: &[Event]) -> Result<(), AppendError>;

    /// Writes the events of several partitions, of one entity type or several, in one transaction: all are there once it returns, or none is. Each
    /// partition is given once, with events as [`Store::append`] takes them; the partitions are sorted, so that two that write the same ones do not lock
    /// each other out for long. No lock is held across a round trip. Errors are those of [`Store::append`], whichever partition they come from.
    async fn append_all(&self, appends: &[(Partition, Vec<Event>)]) -> Result<(), AppendError>;

    /// The newest event of each entity, in the order asked; none where it has no event. Duplicates in `ids` are fine.
    async fn newest(&self, entity_type: &EntityType, ids: &[EntityId]) -> Result<Vec<Option<StoredEvent>>, StoreError>;

    /// The event that each command made, in the order asked; none where it made none. The `state` of these events is left out.
    async fn find(&self, entity_type: &EntityType, commands: &[(EntityId, CommandId)]) -> Result<Vec<Option<StoredEvent>>, StoreError>;

    /// The event of exactly this version.
    async fn at_version(&self, entity_type: &EntityType, id: &EntityId, version: Version) -> Result<Option<StoredEvent>, StoreError>;

    /// The event of the highest version whose `committed_at` is not later than the time given, in microseconds since 1970.
    async fn at_time(&self, entity_type: &EntityType, id: &EntityId, time: i64) -> Result<Option<StoredEvent>, StoreError>;

    /// A page of an entity's history: versions above `bound` (ascending) or below it (descending; 0 means no bound), at most `limit`.
    async fn history(
        &self,
        entity_type: &EntityType,
        id: &EntityId,
        order: Order,
        bound: Version,
        limit: usize,
        content: Content,
    ) -> Result<Vec<StoredEvent>, StoreError>;

    /// Existing entities (their newest event has a state) with ids above `after` in byte order, at most `limit`. Takes time by `limit`, not by
    /// the number of entities or events.
    async fn list(&self, entity_type: &EntityType, after: Option<&EntityId>, limit: usize) -> Result<Vec<Listed>, StoreError>;

    /// The head of every partition of these entity types that has events. Cheap enough to be asked ten
    /// times a second: its time depends on the number of partitions, not of events.
    async fn heads(&self, entity_types: &[EntityType]) -> Result<Vec<(Partition, u64)>, StoreError>;

    /// Events of a partition with whole states, in the order of their ids: above `bound` (ascending) or below it (descending; 0 means no bound), at
    /// most `limit`. Ends with the event that reaches `bytes_max` (by [`Event::weight`]), so at least one event comes where there is one.
    async fn read(&self, partition: &Partition, order: Order, bound: u64, limit: usize, bytes_max: usize) -> Result<Vec<StoredEvent>, StoreError>;

    /// The entity's highest version whose event id is not above `event_id`; 0 where there is none.
    async fn version_at(&self, entity_type: &EntityType, id: &EntityId, event_id: u64) -> Result<Version, StoreError>;

    /// A number that changes whenever a connection to the database was lost. Where it changed between a read and the [`Store::barrier`] after it, the
    /// database may have crashed in between and taken back what was read, whatever the barrier says.
    fn epoch(&self) -> u64;

    /// Returns once everything that any read saw before the call is durable. At once where the engine shows only durable rows.
    async fn barrier(&self) -> Result<(), StoreError>;

    /// The lease of the cluster's leader; none where nobody ever held it.
    async fn lease(&self) -> Result<Option<Lease>, StoreError>;

    /// Puts `next` in the place of the lease, where it still is as it was `seen`; whether it did. After an error it may have.
    async fn swap_lease(&self, seen: Option<&Lease>, next: &Lease) -> Result<bool, StoreError>;

    /// Whether the database answers and takes writes.
    async fn ready(&self) -> Result<(), StoreError>;

    /// Name and version of the engine, for people.
    fn engine(&self) -> String;
}
