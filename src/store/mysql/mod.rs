//! The store on MySQL (8.4 or newer) and MariaDB (10.11 or newer).
//!
//! An append is one multi-row INSERT in autocommit: one round trip, and no lock is ever held across one. What its failure means is decided in
//! `error`, by a short list of numbers; everything else, a lost connection and a timeout included, is unknown. Nothing is retried here.
//!
//! Works on a database that other programs use too: its own tables start with `quokka_`, those of entity types have the type's name.

mod barrier;
mod combine;
mod open;
mod pool;
mod rows;
mod server;
mod statement;
mod together;

use super::error::{AppendError, OpenError, StoreError, mysql_append_error, mysql_is_duplicate_key, mysql_read_error};
use super::lease::{read_member, write_member};
use super::{Content, Lease, Listed, Options, Order, Store, patches};
use crate::core::{CommandId, EntityId, EntityType, Event, LogIdentity, Partition, ShardCount, ShardId, StoredEvent, Term, Version};
use async_trait::async_trait;
use barrier::Barrier;
use combine::Combiner;
use mysql_async::Row;
use pool::{Failure, Pool};
use rows::Cells;
use statement::Statement;
use std::collections::HashMap;

/// How many entities or commands one statement names.
const CHUNK: usize = 500;
/// How many entries of the index a listing looks at for each entity wanted, before it goes on with another statement.
const ENTRIES_PER_ID: usize = 8;
/// The fewest ids a listing looks at in one statement, so that entities that do not exist are passed quickly.
const LIST_MIN: usize = 100;
/// How many partitions one statement asks for their heads.
const HEADS_CHUNK: usize = 512;
/// How many events of a partition are read first, when it is not yet known how large they are; and how many times more the next time at most.
const FIRST_READ: usize = 8;
/// The most bytes of events that one append may take, however much the server would take.
const APPEND_BYTES_MAX: usize = 8 << 20;
/// What the server's limit for statements counts besides the statement.
const PACKET_OVERHEAD: usize = 1024;

/// Whether a URL can be used, as far as that can be told without a server.
pub fn check_url(url: &str) -> Result<(), OpenError> {
    open::parse(url).map(|_| ())
}

const EVENTS: &str = include_str!("../../../schema/mysql/events.sql");

/// A store on a MySQL or MariaDB server.
pub struct MysqlStore {
    pool: Pool,
    shards: ShardCount,
    identity: LogIdentity,
    barrier: Barrier,
    combiner: Combiner,
}

impl MysqlStore {
    /// Connects, makes the database and quokka's own tables where they are missing, and checks that they fit this program and its options.
    pub async fn open(options: &Options) -> Result<MysqlStore, OpenError> {
        let (pool, identity) = open::open(options).await?;
        let combiner = Combiner::new(pool.clone());
        Ok(MysqlStore { pool, shards: options.shards, identity, barrier: Barrier::new(), combiner })
    }

    async fn rows(&self, statement: Statement) -> Result<Vec<Row>, StoreError> {
        self.pool.query(statement.as_bytes()).await.map_err(read_error)
    }

    /// Events as their rows hold them.
    async fn events(&self, statement: Statement) -> Result<Vec<StoredEvent>, StoreError> {
        self.rows(statement).await?.into_iter().map(|row| Cells::new(row).event()).collect()
    }

    /// Events of one entity, whose versions follow one another, with whole states.
    async fn whole_events(&self, entity_type: &EntityType, statement: Statement) -> Result<Vec<StoredEvent>, StoreError> {
        let mut events = self.events(statement).await?;
        self.resolve(entity_type, &mut events).await?;
        Ok(events)
    }

    async fn resolve(&self, entity_type: &EntityType, events: &mut [StoredEvent]) -> Result<(), StoreError> {
        let mut before = Vec::new();
        if let (Some((from, to)), Some(first)) = (patches::missing(events), events.first()) {
            let states = self.rows(statement::states(entity_type, &first.event.entity_id, from, to)).await?;
            before = states.into_iter().map(|row| Cells::new(row).state()).collect::<Result<_, _>>()?;
        }
        patches::resolve(events, before)
    }

    /// Brings a table of an earlier version of the schema up to date.
    async fn migrate(&self, entity_type: &EntityType) -> Result<(), StoreError> {
        if !self.rows(statement::has_state_base(entity_type)).await?.is_empty() {
            return Ok(());
        }
        let added = self.rows(statement::add_state_base(entity_type)).await;
        // Another process may have been faster.
        if self.rows(statement::has_state_base(entity_type)).await?.is_empty() {
            added?;
        }
        Ok(())
    }

    fn max_allowed_packet(&self) -> usize {
        self.pool.server().map_or(0, |server| server.max_allowed_packet())
    }
}

fn read_error(failure: Failure) -> StoreError {
    match failure {
        Failure::NotSent(reason) => StoreError::Unavailable(reason.to_string()),
        Failure::Sent(error) => mysql_read_error(&error),
        Failure::TimedOut => StoreError::Unavailable("no answer in time".into()),
    }
}

fn append_error(failure: Failure) -> AppendError {
    match failure {
        Failure::NotSent(reason) => AppendError::Unavailable(reason.to_string()),
        Failure::Sent(error) => mysql_append_error(&error),
        Failure::TimedOut => AppendError::Unknown("no answer in time".into()),
    }
}

#[async_trait]
impl Store for MysqlStore {
    fn identity(&self) -> &LogIdentity {
        &self.identity
    }

    fn shards(&self) -> ShardCount {
        self.shards
    }

    fn append_bytes_max(&self) -> usize {
        APPEND_BYTES_MAX.min(self.max_allowed_packet() / 2)
    }

    async fn create_type(&self, entity_type: &EntityType) -> Result<(), StoreError> {
        self.rows(statement::create(EVENTS, &statement::table(entity_type))).await?;
        // A table of this name may have been there before, made by somebody else: without the three keys nothing that quokka promises holds.
        let mut keys = Vec::new();
        for row in self.rows(statement::keys(entity_type)).await? {
            keys.push(Cells::new(row).text("key")?.to_string());
        }
        for key in ["shard,event_id", "entity_id,version", "entity_id,command_id"] {
            if !keys.iter().any(|found| found == key) {
                return Err(StoreError::Corrupt(format!("table {entity_type} has no unique key ({key})")));
            }
        }
        self.migrate(entity_type).await
    }

    async fn head(&self, partition: &Partition) -> Result<u64, StoreError> {
        let rows = self.rows(statement::head(partition)).await?;
        let row = rows.into_iter().next().ok_or_else(|| StoreError::unreadable("event_id"))?;
        Cells::new(row).number("event_id")
    }

    async fn append(&self, partition: &Partition, events: &[Event]) -> Result<(), AppendError> {
        self.combiner.append(partition, events, self.max_allowed_packet().saturating_sub(PACKET_OVERHEAD)).await
    }

    async fn append_all(&self, appends: &[(Partition, Vec<Event>)]) -> Result<(), AppendError> {
        together::append_all(&self.pool, appends, self.max_allowed_packet().saturating_sub(PACKET_OVERHEAD)).await
    }

    async fn newest(&self, entity_type: &EntityType, ids: &[EntityId]) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        let mut wanted: Vec<EntityId> = ids.to_vec();
        wanted.sort();
        wanted.dedup();
        let mut found = HashMap::with_capacity(wanted.len());
        for chunk in wanted.chunks(CHUNK) {
            for mut stored in self.events(statement::newest(entity_type, chunk)).await? {
                self.resolve(entity_type, std::slice::from_mut(&mut stored)).await?;
                found.insert(stored.event.entity_id.clone(), stored);
            }
        }
        Ok(ids.iter().map(|id| found.get(id).cloned()).collect())
    }

    async fn find(&self, entity_type: &EntityType, commands: &[(EntityId, CommandId)]) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        let mut found = HashMap::with_capacity(commands.len());
        for chunk in commands.chunks(CHUNK) {
            for stored in self.events(statement::find(entity_type, chunk)).await? {
                found.insert((stored.event.entity_id.clone(), stored.event.command_id.clone()), stored);
            }
        }
        Ok(commands.iter().map(|command| found.get(command).cloned()).collect())
    }

    async fn at_version(&self, entity_type: &EntityType, id: &EntityId, version: Version) -> Result<Option<StoredEvent>, StoreError> {
        Ok(self.whole_events(entity_type, statement::at_version(entity_type, id, version)).await?.pop())
    }

    async fn at_time(&self, entity_type: &EntityType, id: &EntityId, time: i64) -> Result<Option<StoredEvent>, StoreError> {
        Ok(self.whole_events(entity_type, statement::at_time(entity_type, id, time)).await?.pop())
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
        self.whole_events(entity_type, statement::history(entity_type, id, order, bound, limit, content)).await
    }

    async fn list(&self, entity_type: &EntityType, after: Option<&EntityId>, limit: usize) -> Result<Vec<Listed>, StoreError> {
        let mut listed = Vec::new();
        let mut after = after.cloned();
        while listed.len() < limit {
            let wanted = (limit - listed.len()).clamp(LIST_MIN, CHUNK);
            let from = after.as_ref().map_or("", EntityId::as_str);
            let mut ids = Vec::with_capacity(wanted);
            for row in self.rows(statement::ids_after(entity_type, from, wanted * ENTRIES_PER_ID, wanted)).await? {
                ids.push(EntityId::trusted(&Cells::new(row).text("entity_id")?));
            }
            let Some(last) = ids.last().cloned() else { break };
            after = Some(last);
            for row in self.rows(statement::existing(entity_type, &ids)).await? {
                let mut cells = Cells::new(row);
                listed.push(Listed { entity_id: EntityId::trusted(&cells.text("entity_id")?), version: cells.number("version")? });
            }
        }
        listed.truncate(limit);
        Ok(listed)
    }

    async fn heads(&self, entity_types: &[EntityType]) -> Result<Vec<(Partition, u64)>, StoreError> {
        let partition = |entity_type: &EntityType, shard| Partition { entity_type: entity_type.clone(), shard: ShardId(shard) };
        let partitions: Vec<Partition> = entity_types.iter().flat_map(|name| (0..self.shards.get()).map(|shard| partition(name, shard))).collect();
        let mut heads = Vec::new();
        for partitions in partitions.chunks(HEADS_CHUNK) {
            for row in self.rows(statement::heads(partitions)).await? {
                let mut cells = Cells::new(row);
                let (place, head): (usize, u64) = (cells.number("place")?, cells.number("event_id")?);
                let partition = partitions.get(place).ok_or_else(|| StoreError::unreadable("place"))?;
                if head > 0 {
                    heads.push((partition.clone(), head));
                }
            }
        }
        Ok(heads)
    }

    async fn read(&self, partition: &Partition, order: Order, bound: u64, limit: usize, bytes_max: usize) -> Result<Vec<StoredEvent>, StoreError> {
        let (mut read, mut bytes, mut bound, mut wanted) = (Vec::new(), 0, bound, FIRST_READ);
        while read.len() < limit && bytes < bytes_max {
            wanted = wanted.min(limit - read.len());
            let events = self.events(statement::read(partition, order, bound, wanted)).await?;
            let is_last = events.len() < wanted;
            for stored in events.into_iter() {
                if bytes < bytes_max {
                    bound = stored.event.event_id;
                    bytes += stored.event.weight();
                    read.push(stored);
                }
            }
            if is_last || (order == Order::Descending && bound == 1) {
                break;
            }
            wanted = (bytes_max.saturating_sub(bytes) / (bytes / read.len()).max(1)).clamp(1, wanted * FIRST_READ);
        }
        let mut groups = patches::by_entity(read);
        for (_, events) in &mut groups {
            self.resolve(&partition.entity_type, events).await?;
        }
        Ok(patches::in_place(groups))
    }

    async fn version_at(&self, entity_type: &EntityType, id: &EntityId, event_id: u64) -> Result<Version, StoreError> {
        match self.rows(statement::version_at(entity_type, id, event_id)).await?.pop() {
            Some(row) => Cells::new(row).number("version"),
            None => Ok(0),
        }
    }

    fn epoch(&self) -> u64 {
        self.pool.generation()
    }

    async fn barrier(&self) -> Result<(), StoreError> {
        if self.pool.server().is_some_and(|server| server.shows_only_durable_rows()) {
            return Ok(());
        }
        self.barrier.pass(|slot| async move { self.rows(statement::barrier(slot)).await.map(|_| ()) }).await
    }

    async fn lease(&self) -> Result<Option<Lease>, StoreError> {
        let rows = self.pool.query(b"SELECT holder, member, term, beat FROM quokka_lease WHERE id = 1").await.map_err(read_error)?;
        let Some(row) = rows.into_iter().next() else { return Ok(None) };
        let mut cells = Cells::new(row);
        let holder = cells.text_or_null("holder")?.map(|holder| holder.to_string());
        let member = read_member(&cells.text("member")?)?;
        Ok(Some(Lease { holder, member, term: Term(cells.number("term")?), beat: cells.number("beat")? }))
    }

    async fn swap_lease(&self, seen: Option<&Lease>, next: &Lease) -> Result<bool, StoreError> {
        match self.pool.query(statement::swap_lease(seen, next, &write_member(&next.member)?).as_bytes()).await {
            Ok(_) => {}
            Err(Failure::Sent(error)) if mysql_is_duplicate_key(&error) => return Ok(false),
            Err(failure) => return Err(read_error(failure)),
        }
        // Nobody else writes this holder, so what stands there now tells whether the row was still as it was seen.
        Ok(self.lease().await?.as_ref() == Some(next))
    }

    async fn ready(&self) -> Result<(), StoreError> {
        let rows = self.pool.query(b"SELECT @@global.read_only, @@innodb_read_only").await.map_err(read_error)?;
        let row = rows.into_iter().next().ok_or_else(|| StoreError::unreadable("read_only"))?;
        let mut cells = Cells::new(row);
        let (read_only, innodb_read_only) = (cells.text("read_only")?, cells.text("innodb_read_only")?);
        if server::is_on(&read_only) || server::is_on(&innodb_read_only) {
            return Err(StoreError::Unavailable("the server is read-only".into()));
        }
        Ok(())
    }

    fn engine(&self) -> String {
        self.pool.server().map_or_else(String::new, |server| server.name())
    }
}
