//! The embedded store: one SQLite file.
//!
//! One thread writes (see `writer`), a few connections read; the write-ahead log keeps the two apart. Several processes may use one file:
//! whoever finds it locked for too long is told that nothing happened.
//!
//! What can be read is durable: with `synchronous = FULL` a commit is synced before it becomes visible, to this process and to others. So the
//! barrier has nothing to do.

mod connection;
mod readers;
mod rows;
mod writer;

use super::error::{AppendError, OpenError, StoreError, sqlite_read_error};
use super::lease::{read_member, write_member};
use super::{Content, Lease, Listed, Options, Order, Store, patches};
use crate::core::{CommandId, EntityId, EntityType, Event, LogIdentity, Partition, ShardCount, ShardId, StoredEvent, Term, Version};
use async_trait::async_trait;
use readers::Readers;
use rows::{SELECT_STATE, SELECT_WHOLE, SELECT_WITHOUT_STATE, event, integer};
use rusqlite::{Connection, OptionalExtension, params};
use std::path::PathBuf;
use std::time::Duration;
use writer::{Part, Writer};

/// The most bytes of events that one append may hold.
const APPEND_BYTES_MAX: usize = 8 << 20;
/// Reads that run at once; more would only wait for the disk.
const READERS_MAX: usize = 4;

/// A store in one file.
pub struct SqliteStore {
    path: PathBuf,
    writer: Writer,
    readers: Readers,
    shards: ShardCount,
    identity: LogIdentity,
    statement_timeout: Duration,
}

impl SqliteStore {
    /// Opens the file, makes it and its folder where they are missing, and checks that it fits this program and its options.
    pub async fn open(options: &Options) -> Result<SqliteStore, OpenError> {
        let path = connection::path_of(&options.url)?;
        let (shards, statement_timeout, readers) = (options.shards, options.statement_timeout, options.pool.clamp(1, READERS_MAX));
        let opening = tokio::task::spawn_blocking(move || {
            // Shorter than the patience of callers, so that they hear of a locked file for sure instead of guessing.
            let busy_timeout = statement_timeout / 2;
            let identity = connection::prepare(&path, shards, busy_timeout)?;
            let unavailable = |error: rusqlite::Error| OpenError::Unavailable(error.to_string());
            let writer = Writer::start(connection::open(&path, busy_timeout).map_err(unavailable)?)?;
            let readers = Readers::new(path.clone(), readers, statement_timeout);
            Ok(SqliteStore { path, writer, readers, shards, identity, statement_timeout })
        });
        opening.await.unwrap_or_else(|error| Err(OpenError::Unavailable(error.to_string())))
    }
}

/// The quoted name of an entity type's table. SQLite keeps names that start with `sqlite_` to itself; those get an underscore in front,
/// with which no entity type starts.
fn table(entity_type: &EntityType) -> String {
    if entity_type.as_str().starts_with("sqlite_") { format!("\"_{entity_type}\"") } else { format!("\"{entity_type}\"") }
}

/// Reads one event, or none.
fn one(connection: &Connection, sql: &str, parameters: impl rusqlite::Params) -> Result<Option<StoredEvent>, StoreError> {
    let mut statement = connection.prepare_cached(sql).map_err(|error| sqlite_read_error(&error))?;
    let found = statement.query_row(parameters, |row| Ok(event(row))).optional();
    found.map_err(|error| sqlite_read_error(&error))?.transpose()
}

/// Puts whole states in the place of patches; the events are of one entity, and their versions follow one another.
fn resolve(connection: &Connection, table: &str, events: &mut [StoredEvent]) -> Result<(), StoreError> {
    let mut before = Vec::new();
    if let (Some((from, to)), Some(first)) = (patches::missing(events), events.first()) {
        let sql = format!("{SELECT_STATE} FROM {table} WHERE entity_id = ?1 AND version BETWEEN ?2 AND ?3 ORDER BY version");
        let mut statement = connection.prepare_cached(&sql).map_err(|error| sqlite_read_error(&error))?;
        let bounds = (i64::try_from(from).unwrap_or(i64::MAX), i64::try_from(to).unwrap_or(i64::MAX));
        let mut rows = statement.query(params![first.event.entity_id.as_str(), bounds.0, bounds.1]).map_err(|error| sqlite_read_error(&error))?;
        while let Some(row) = rows.next().map_err(|error| sqlite_read_error(&error))? {
            before.push(rows::state(row)?);
        }
    }
    patches::resolve(events, before)
}

/// Reads one event with its whole state, or none.
fn one_whole(connection: &Connection, table: &str, condition: &str, parameters: impl rusqlite::Params) -> Result<Option<StoredEvent>, StoreError> {
    let mut found = one(connection, &format!("{SELECT_WHOLE} FROM {table} WHERE {condition}"), parameters)?;
    resolve(connection, table, found.as_mut_slice())?;
    Ok(found)
}

#[async_trait]
impl Store for SqliteStore {
    fn identity(&self) -> &LogIdentity {
        &self.identity
    }

    fn shards(&self) -> ShardCount {
        self.shards
    }

    fn append_bytes_max(&self) -> usize {
        APPEND_BYTES_MAX
    }

    async fn create_type(&self, entity_type: &EntityType) -> Result<(), StoreError> {
        let table = table(entity_type);
        let (path, busy_timeout) = (self.path.clone(), self.statement_timeout / 2);
        let creating = tokio::task::spawn_blocking(move || {
            let connection = connection::open(&path, busy_timeout).map_err(|error| sqlite_read_error(&error))?;
            connection::create_events(&connection, &table)
        });
        creating.await.unwrap_or_else(|error| Err(StoreError::Unavailable(error.to_string())))
    }

    async fn head(&self, partition: &Partition) -> Result<u64, StoreError> {
        let sql = format!("SELECT COALESCE(MAX(event_id), 0) FROM {} WHERE shard = ?1", table(&partition.entity_type));
        let shard = partition.shard.0;
        let read = move |connection: &Connection| {
            let mut statement = connection.prepare_cached(&sql).map_err(|error| sqlite_read_error(&error))?;
            let head: i64 = statement.query_row([shard], |row| row.get(0)).map_err(|error| sqlite_read_error(&error))?;
            integer(head, "event_id")
        };
        self.readers.read(read).await
    }

    async fn append(&self, partition: &Partition, events: &[Event]) -> Result<(), AppendError> {
        self.append_all(&[(partition.clone(), events.to_vec())]).await
    }

    async fn append_all(&self, appends: &[(Partition, Vec<Event>)]) -> Result<(), AppendError> {
        if appends.iter().flat_map(|(_, events)| events).map(Event::weight).sum::<usize>() > APPEND_BYTES_MAX {
            return Err(AppendError::TooLarge);
        }
        let part =
            |(partition, events): &(Partition, Vec<Event>)| Part { table: table(&partition.entity_type), shard: partition.shard, events: events.clone() };
        self.writer.append(appends.iter().map(part).collect(), self.statement_timeout).await
    }

    async fn newest(&self, entity_type: &EntityType, ids: &[EntityId]) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        let (table, ids) = (table(entity_type), ids.to_vec());
        let newest = "entity_id = ?1 ORDER BY version DESC LIMIT 1";
        let read = move |connection: &Connection| ids.iter().map(|id| one_whole(connection, &table, newest, [id.as_str()])).collect();
        self.readers.read(read).await
    }

    async fn find(&self, entity_type: &EntityType, commands: &[(EntityId, CommandId)]) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        let sql = format!("{} FROM {} WHERE entity_id = ?1 AND command_id = ?2", rows::SELECT_WITHOUT_STATE, table(entity_type));
        let commands = commands.to_vec();
        let read = move |connection: &Connection| commands.iter().map(|(id, command)| one(connection, &sql, [id.as_str(), command.as_str()])).collect();
        self.readers.read(read).await
    }

    async fn at_version(&self, entity_type: &EntityType, id: &EntityId, version: Version) -> Result<Option<StoredEvent>, StoreError> {
        let Ok(version) = i64::try_from(version) else { return Ok(None) };
        let (table, id) = (table(entity_type), id.clone());
        self.readers.read(move |connection| one_whole(connection, &table, "entity_id = ?1 AND version = ?2", params![id.as_str(), version])).await
    }

    async fn at_time(&self, entity_type: &EntityType, id: &EntityId, time: i64) -> Result<Option<StoredEvent>, StoreError> {
        let (table, id) = (table(entity_type), id.clone());
        let newest = "entity_id = ?1 AND committed_at <= ?2 ORDER BY version DESC LIMIT 1";
        self.readers.read(move |connection| one_whole(connection, &table, newest, params![id.as_str(), time])).await
    }

    async fn history(
        &self,
        entity_type: &EntityType,
        id: &EntityId,
        order: Order,
        bound: Version,
        limit: usize,
        content: Content,
    ) -> Result<Vec<StoredEvent>, StoreError> {
        let order = match order {
            Order::Ascending => "version > ?2 ORDER BY version",
            Order::Descending if bound == 0 => "version > ?2 ORDER BY version DESC",
            Order::Descending => "version < ?2 ORDER BY version DESC",
        };
        let select = match content {
            Content::Whole => SELECT_WHOLE,
            Content::WithoutState => SELECT_WITHOUT_STATE,
        };
        let table = table(entity_type);
        let sql = format!("{select} FROM {table} WHERE entity_id = ?1 AND {order} LIMIT ?3");
        let (bound, limit) = (i64::try_from(bound).unwrap_or(i64::MAX), i64::try_from(limit).unwrap_or(i64::MAX));
        let id = id.clone();
        let read = move |connection: &Connection| {
            let mut statement = connection.prepare_cached(&sql).map_err(|error| sqlite_read_error(&error))?;
            let mut rows = statement.query(params![id.as_str(), bound, limit]).map_err(|error| sqlite_read_error(&error))?;
            let mut events = Vec::new();
            while let Some(row) = rows.next().map_err(|error| sqlite_read_error(&error))? {
                events.push(event(row)?);
            }
            resolve(connection, &table, &mut events)?;
            Ok(events)
        };
        self.readers.read(read).await
    }

    async fn list(&self, entity_type: &EntityType, after: Option<&EntityId>, limit: usize) -> Result<Vec<Listed>, StoreError> {
        let table = table(entity_type);
        // One step from an id to the next, however many versions it has.
        let next = format!("SELECT entity_id FROM {table} WHERE entity_id > ?1 ORDER BY entity_id LIMIT 1");
        let newest = format!("SELECT version, state IS NOT NULL FROM {table} WHERE entity_id = ?1 ORDER BY version DESC LIMIT 1");
        let mut after = after.map_or_else(String::new, |id| id.as_str().to_owned());
        let read = move |connection: &Connection| {
            let mut next = connection.prepare_cached(&next).map_err(|error| sqlite_read_error(&error))?;
            let mut newest = connection.prepare_cached(&newest).map_err(|error| sqlite_read_error(&error))?;
            let mut listed = Vec::new();
            while listed.len() < limit {
                let id: Option<String> = next.query_row([&after], |row| row.get(0)).optional().map_err(|error| sqlite_read_error(&error))?;
                let Some(id) = id else { break };
                let (version, exists): (i64, bool) =
                    newest.query_row([&id], |row| Ok((row.get(0)?, row.get(1)?))).map_err(|error| sqlite_read_error(&error))?;
                if exists {
                    listed.push(Listed { entity_id: EntityId::trusted(&id), version: integer(version, "version")? });
                }
                after = id;
            }
            Ok(listed)
        };
        self.readers.read(read).await
    }

    async fn heads(&self, entity_types: &[EntityType]) -> Result<Vec<(Partition, u64)>, StoreError> {
        let (entity_types, shards) = (entity_types.to_vec(), self.shards.get());
        let read = move |connection: &Connection| {
            let mut heads = Vec::new();
            for entity_type in entity_types {
                let sql = format!("SELECT COALESCE(MAX(event_id), 0) FROM {} WHERE shard = ?1", table(&entity_type));
                let mut statement = connection.prepare_cached(&sql).map_err(|error| sqlite_read_error(&error))?;
                for shard in 0..shards {
                    let head: i64 = statement.query_row([shard], |row| row.get(0)).map_err(|error| sqlite_read_error(&error))?;
                    if head > 0 {
                        heads.push((Partition { entity_type: entity_type.clone(), shard: ShardId(shard) }, integer(head, "event_id")?));
                    }
                }
            }
            Ok(heads)
        };
        self.readers.read(read).await
    }

    async fn read(&self, partition: &Partition, order: Order, bound: u64, limit: usize, bytes_max: usize) -> Result<Vec<StoredEvent>, StoreError> {
        let order = match order {
            Order::Ascending => "event_id > ?2 ORDER BY event_id",
            Order::Descending if bound == 0 => "event_id > ?2 ORDER BY event_id DESC",
            Order::Descending => "event_id < ?2 ORDER BY event_id DESC",
        };
        let table = table(&partition.entity_type);
        let sql = format!("{SELECT_WHOLE} FROM {table} WHERE shard = ?1 AND {order} LIMIT ?3");
        let (shard, bound, limit) = (partition.shard.0, i64::try_from(bound).unwrap_or(i64::MAX), i64::try_from(limit).unwrap_or(i64::MAX));
        let read = move |connection: &Connection| {
            let mut statement = connection.prepare_cached(&sql).map_err(|error| sqlite_read_error(&error))?;
            let mut rows = statement.query(params![shard, bound, limit]).map_err(|error| sqlite_read_error(&error))?;
            let (mut events, mut bytes) = (Vec::new(), 0);
            while bytes < bytes_max {
                let Some(row) = rows.next().map_err(|error| sqlite_read_error(&error))? else { break };
                let stored = event(row)?;
                bytes += stored.event.weight();
                events.push(stored);
            }
            let mut groups = patches::by_entity(events);
            for (_, events) in &mut groups {
                resolve(connection, &table, events)?;
            }
            Ok(patches::in_place(groups))
        };
        self.readers.read(read).await
    }

    async fn version_at(&self, entity_type: &EntityType, id: &EntityId, event_id: u64) -> Result<Version, StoreError> {
        let sql = format!("SELECT version FROM {} WHERE entity_id = ?1 AND event_id <= ?2 ORDER BY version DESC LIMIT 1", table(entity_type));
        let (id, event_id) = (id.clone(), i64::try_from(event_id).unwrap_or(i64::MAX));
        let read = move |connection: &Connection| {
            let mut statement = connection.prepare_cached(&sql).map_err(|error| sqlite_read_error(&error))?;
            let found: Option<i64> =
                statement.query_row(params![id.as_str(), event_id], |row| row.get(0)).optional().map_err(|error| sqlite_read_error(&error))?;
            found.map_or(Ok(0), |version| integer(version, "version"))
        };
        self.readers.read(read).await
    }

    fn epoch(&self) -> u64 {
        // What can be read is durable, so nothing is ever taken back.
        0
    }

    async fn barrier(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn lease(&self) -> Result<Option<Lease>, StoreError> {
        let read = |connection: &Connection| {
            let mut statement =
                connection.prepare_cached("SELECT holder, member, term, beat FROM quokka_lease WHERE id = 1").map_err(|error| sqlite_read_error(&error))?;
            let row = statement.query_row([], |row| Ok((row.get(0)?, row.get::<_, String>(1)?, row.get(2)?, row.get(3)?))).optional();
            let Some((holder, member, term, beat)) = row.map_err(|error| sqlite_read_error(&error))? else { return Ok(None) };
            Ok(Some(Lease { holder, member: read_member(&member)?, term: Term(integer(term, "term")?), beat: integer(beat, "beat")? }))
        };
        self.readers.read(read).await
    }

    async fn swap_lease(&self, seen: Option<&Lease>, next: &Lease) -> Result<bool, StoreError> {
        const ENTER: &str = "INSERT INTO quokka_lease (id, holder, member, term, beat) VALUES (1, ?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING";
        const CHANGE: &str = "UPDATE quokka_lease SET holder = ?1, member = ?2, term = ?3, beat = ?4 WHERE id = 1 AND holder IS ?5 AND term = ?6 AND beat = ?7";
        let (path, busy_timeout) = (self.path.clone(), self.statement_timeout / 2);
        let (seen, next, member) = (seen.cloned(), next.clone(), write_member(&next.member)?);
        let swapping = tokio::task::spawn_blocking(move || {
            let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
            let connection = connection::open(&path, busy_timeout)?;
            let (term, beat) = (signed(next.term.0), signed(next.beat));
            match seen {
                None => connection.execute(ENTER, params![next.holder, member, term, beat]),
                Some(seen) => connection.execute(CHANGE, params![next.holder, member, term, beat, seen.holder, signed(seen.term.0), signed(seen.beat)]),
            }
        });
        let changed = swapping.await.map_err(|error| StoreError::Unavailable(error.to_string()))?;
        Ok(changed.map_err(|error| sqlite_read_error(&error))? == 1)
    }

    async fn ready(&self) -> Result<(), StoreError> {
        match self.writer.probe(self.statement_timeout).await {
            Ok(()) => Ok(()),
            Err(error) => Err(StoreError::Unavailable(error.to_string())),
        }
    }

    fn engine(&self) -> String {
        format!("SQLite {}", rusqlite::version())
    }
}
