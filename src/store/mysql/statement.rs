//! The statements, as text: values get into them by [`Statement::text`] and by numbers only, names by [`table`] only.
//!
//! All statements go through the text protocol: one round trip each, without a prepared statement on every connection to keep alive. The session's
//! `sql_mode` lets a backslash escape (see `pool`).

use crate::core::{CommandId, EntityId, EntityType, Event, EventOutcome, Partition, Version};
use crate::store::{Content, Lease, Order};
use std::io::Write;

/// Columns of a whole event in the order in which rows are read; `state` and `state_base` follow.
const COLUMNS: &str = "event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, handled_at, \
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', committed_at)";

/// The last microsecond that a DATETIME holds.
const TIME_MAX: i64 = 253_402_300_799_999_999;

/// A statement being written.
#[derive(Clone)]
pub(super) struct Statement(Vec<u8>);

/// The table of an entity type, quoted: its name may be a word of SQL.
pub(super) fn table(entity_type: &EntityType) -> String {
    format!("`{entity_type}`")
}

impl Statement {
    fn new(sql: &str) -> Statement {
        Statement(sql.as_bytes().to_vec())
    }

    /// The bytes to send.
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn sql(&mut self, sql: &str) -> &mut Statement {
        self.0.extend_from_slice(sql.as_bytes());
        self
    }

    fn number(&mut self, number: u64) -> &mut Statement {
        self.sql(itoa::Buffer::new().format(number))
    }

    /// Writes a text as a literal. Quotes are the only thing that ends one, and a backslash the only thing that changes what follows; the zero byte
    /// and the end-of-file mark are escaped for whoever reads statements line by line.
    fn text(&mut self, text: &str) -> &mut Statement {
        self.0.push(b'\'');
        let bytes = text.as_bytes();
        let mut from = 0;
        for (at, byte) in bytes.iter().enumerate() {
            let escape = match byte {
                b'\'' | b'\\' => *byte,
                0 => b'0',
                0x1a => b'Z',
                _ => continue,
            };
            self.0.extend_from_slice(&bytes[from..at]);
            self.0.extend_from_slice(&[b'\\', escape]);
            from = at + 1;
        }
        self.0.extend_from_slice(&bytes[from..]);
        self.0.push(b'\'');
        self
    }

    fn text_or_null(&mut self, text: Option<&str>) -> &mut Statement {
        match text {
            Some(text) => self.text(text),
            None => self.sql("NULL"),
        }
    }

    /// Writes what `one` writes for each item, with commas between.
    fn list<T>(&mut self, items: &[T], one: impl Fn(&mut Statement, &T)) -> &mut Statement {
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.sql(",");
            }
            one(self, item);
        }
        self
    }
}

/// Columns of a row as it is written.
const WRITTEN: &str = " (shard, event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, state, state_base, handled_at, committed_at) VALUES ";

/// The rows of events, as one part of an INSERT.
pub(super) fn rows(partition: &Partition, events: &[Event]) -> Vec<u8> {
    let mut rows = Statement(Vec::with_capacity(events.iter().map(|event| event.weight() + event.weight() / 8).sum()));
    rows.list(events, |statement, event| row(statement, partition, event));
    rows.0
}

/// How many bytes an INSERT of these rows takes.
pub(super) fn insert_len(entity_type: &EntityType, rows: &[u8]) -> usize {
    "INSERT INTO ".len() + table(entity_type).len() + WRITTEN.len() + rows.len()
}

/// All rows in one INSERT. It is one statement in autocommit, so that it holds no lock across a round trip.
pub(super) fn insert(entity_type: &EntityType, rows: &[&[u8]]) -> Statement {
    let length = rows.iter().map(|rows| rows.len() + 1).sum::<usize>();
    let mut statement = Statement(Vec::with_capacity(insert_len(entity_type, &[]) + length));
    statement.sql("INSERT INTO ").sql(&table(entity_type)).sql(WRITTEN);
    statement.list(rows, |statement, rows| statement.0.extend_from_slice(rows));
    statement
}

/// Runs several statements in one transaction; none where one of them is no text.
pub(super) fn call_append_all(statements: &[Statement]) -> Option<Statement> {
    let mut texts = Vec::with_capacity(statements.len());
    for statement in statements {
        texts.push(std::str::from_utf8(statement.as_bytes()).ok()?);
    }
    let lengths: Vec<String> = texts.iter().map(|text| text.chars().count().to_string()).collect();
    let mut call = Statement::new("CALL quokka_append_all(");
    call.text(&texts.concat()).sql(", ").text(&lengths.join(",")).sql(")");
    Some(call)
}

fn row(statement: &mut Statement, partition: &Partition, event: &Event) {
    let request = Some(event.request.as_str()).filter(|request| *request != "null");
    statement.sql("(").number(partition.shard.0.into()).sql(",").number(event.event_id).sql(",");
    statement.text(event.entity_id.as_str()).sql(",").number(event.version).sql(",");
    statement.text(event.command_id.as_str()).sql(",").text(event.command.as_str()).sql(",");
    statement.text(outcome(event.outcome)).sql(",").text(&event.handler_version.0).sql(",");
    statement.text_or_null(request).sql(",").text(event.response.as_str()).sql(",");
    statement.text_or_null(event.state_column().map(crate::core::Json::as_str)).sql(",");
    match &event.patch {
        Some(patch) => statement.number(patch.base).sql(","),
        None => statement.sql("NULL,"),
    };
    statement.sql(itoa::Buffer::new().format(event.handled_at)).sql(",UTC_TIMESTAMP(6))");
}

/// How an outcome is stored.
pub(super) fn outcome(outcome: EventOutcome) -> &'static str {
    match outcome {
        EventOutcome::Accepted => "accepted",
        EventOutcome::Rejected => "rejected",
    }
}

/// The largest event id of a partition.
pub(super) fn head(partition: &Partition) -> Statement {
    let mut statement = Statement::new("SELECT COALESCE(MAX(event_id), 0) FROM ");
    statement.sql(&table(&partition.entity_type)).sql(" WHERE shard = ").number(partition.shard.0.into());
    statement
}

/// The heads of partitions, each with its place in `partitions`; 0 where one has no events. Each MAX is one dive into the index before anything is run;
/// a GROUP BY would be as good only where the server's statistics are, since one of the servers then reads the whole table instead of jumping.
pub(super) fn heads(partitions: &[Partition]) -> Statement {
    let mut statement = Statement(Vec::new());
    for (place, partition) in partitions.iter().enumerate() {
        statement.sql(if place == 0 { "SELECT " } else { " UNION ALL SELECT " }).number(place as u64);
        statement.sql(", COALESCE(MAX(event_id), 0) FROM ").sql(&table(&partition.entity_type)).sql(" WHERE shard = ").number(partition.shard.0.into());
    }
    statement
}

/// Events of a partition in the order of their ids.
pub(super) fn read(partition: &Partition, order: Order, bound: u64, limit: usize) -> Statement {
    let mut statement = Statement::new("SELECT ");
    statement.sql(COLUMNS).sql(", state, state_base FROM ").sql(&table(&partition.entity_type));
    statement.sql(" FORCE INDEX (PRIMARY) WHERE shard = ").number(partition.shard.0.into());
    match order {
        Order::Ascending => statement.sql(" AND event_id > ").number(bound).sql(" ORDER BY event_id"),
        Order::Descending if bound == 0 => statement.sql(" ORDER BY event_id DESC"),
        Order::Descending => statement.sql(" AND event_id < ").number(bound).sql(" ORDER BY event_id DESC"),
    };
    statement.sql(" LIMIT ").number(limit as u64);
    statement
}

/// The highest version of an entity up to an event id. Read from the newest down in an index that holds all three columns.
pub(super) fn version_at(entity_type: &EntityType, id: &EntityId, event_id: u64) -> Statement {
    let mut statement = Statement::new("SELECT version FROM ");
    statement.sql(&table(entity_type)).sql(" FORCE INDEX (unique_version) WHERE entity_id = ").text(id.as_str());
    statement.sql(" AND event_id <= ").number(event_id).sql(" ORDER BY version DESC LIMIT 1");
    statement
}

fn select_whole(entity_type: &EntityType) -> Statement {
    select(entity_type, Content::Whole)
}

fn select(entity_type: &EntityType, content: Content) -> Statement {
    let state = match content {
        Content::Whole => ", state, state_base FROM ",
        Content::WithoutState => ", NULL, NULL FROM ",
    };
    let mut statement = Statement::new("SELECT ");
    statement.sql(COLUMNS).sql(state).sql(&table(entity_type)).sql(" FORCE INDEX (unique_version) WHERE ");
    statement
}

/// `(entity_id, version)` is the newest one of each id. Each MAX is one dive into the index, done before the rows are read, which
/// are then a few ranges of the same index: the fastest way on both servers that never walks an entity's versions.
fn are_newest(statement: &mut Statement, entity_type: &EntityType, ids: &[EntityId]) {
    let table = table(entity_type);
    statement.sql("(entity_id, version) IN (").list(ids, |statement, id| {
        statement.sql("(").text(id.as_str()).sql(",(SELECT MAX(version) FROM ").sql(&table);
        statement.sql(" WHERE entity_id = ").text(id.as_str()).sql("))");
    });
    statement.sql(")");
}

/// The newest event of each id.
pub(super) fn newest(entity_type: &EntityType, ids: &[EntityId]) -> Statement {
    let mut statement = select_whole(entity_type);
    are_newest(&mut statement, entity_type, ids);
    statement
}

/// The events of commands, without their states.
pub(super) fn find(entity_type: &EntityType, commands: &[(EntityId, CommandId)]) -> Statement {
    let mut statement = Statement::new("SELECT ");
    statement.sql(COLUMNS).sql(", NULL, NULL FROM ").sql(&table(entity_type));
    statement.sql(" FORCE INDEX (unique_command) WHERE (entity_id, command_id) IN (").list(commands, |statement, (id, command_id)| {
        statement.sql("(").text(id.as_str()).sql(",").text(command_id.as_str()).sql(")");
    });
    statement.sql(")");
    statement
}

/// One version of an entity.
pub(super) fn at_version(entity_type: &EntityType, id: &EntityId, version: Version) -> Statement {
    let mut statement = select_whole(entity_type);
    statement.sql("entity_id = ").text(id.as_str()).sql(" AND version = ").number(version);
    statement
}

/// What the rows of some versions of an entity, both ends included, say of its state.
pub(super) fn states(entity_type: &EntityType, id: &EntityId, from: Version, to: Version) -> Statement {
    let mut statement = Statement::new("SELECT version, state, state_base FROM ");
    statement.sql(&table(entity_type)).sql(" FORCE INDEX (unique_version) WHERE entity_id = ").text(id.as_str());
    statement.sql(" AND version BETWEEN ").number(from).sql(" AND ").number(to).sql(" ORDER BY version");
    statement
}

/// What the file of the table says of the column, too.
const STATE_BASE: &str = "NULL: state is whole; else state is a JSON Patch from the version before, and this the closest version below with a whole one";

/// Adds what version 2 of the schema has to a table of version 1.
pub(super) fn add_state_base(entity_type: &EntityType) -> Statement {
    let mut statement = Statement::new("ALTER TABLE ");
    statement.sql(&table(entity_type)).sql(" ADD COLUMN state_base BIGINT UNSIGNED NULL COMMENT ").text(STATE_BASE);
    statement
}

/// One row where the table has the column `state_base`.
pub(super) fn has_state_base(entity_type: &EntityType) -> Statement {
    let mut statement =
        Statement::new("SELECT 1 FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE() AND COLUMN_NAME = 'state_base' AND TABLE_NAME = ");
    statement.text(entity_type.as_str());
    statement
}

/// The highest version that was there at a time.
pub(super) fn at_time(entity_type: &EntityType, id: &EntityId, time: i64) -> Statement {
    let mut statement = select_whole(entity_type);
    statement.sql("entity_id = ").text(id.as_str()).sql(" AND committed_at <= TIMESTAMP'1970-01-01 00:00:00' + INTERVAL ");
    statement.sql(itoa::Buffer::new().format(time.clamp(0, TIME_MAX))).sql(" MICROSECOND ORDER BY version DESC LIMIT 1");
    statement
}

/// A page of an entity's versions.
pub(super) fn history(entity_type: &EntityType, id: &EntityId, order: Order, bound: Version, limit: usize, content: Content) -> Statement {
    let mut statement = select(entity_type, content);
    statement.sql("entity_id = ").text(id.as_str());
    match order {
        Order::Ascending => statement.sql(" AND version > ").number(bound).sql(" ORDER BY version"),
        Order::Descending if bound == 0 => statement.sql(" ORDER BY version DESC"),
        Order::Descending => statement.sql(" AND version < ").number(bound).sql(" ORDER BY version DESC"),
    };
    statement.sql(" LIMIT ").number(limit as u64);
    statement
}

/// The ids that come next after one, existing or not: at most `limit`, of the first `entries` entries of the index.
///
/// The servers can jump from id to id in this index, but only one of them does so whatever its statistics say; so the reading is bounded here. An
/// id with more entries than that is passed in one step, since the next statement starts after it.
pub(super) fn ids_after(entity_type: &EntityType, after: &str, entries: usize, limit: usize) -> Statement {
    let mut statement = Statement::new("SELECT DISTINCT entity_id FROM (SELECT entity_id FROM ");
    statement.sql(&table(entity_type)).sql(" FORCE INDEX (unique_version) WHERE entity_id > ").text(after);
    statement.sql(" ORDER BY entity_id LIMIT ").number(entries as u64);
    statement.sql(") AS entries ORDER BY entity_id LIMIT ").number(limit as u64);
    statement
}

/// Those of the ids that exist, with their newest versions.
pub(super) fn existing(entity_type: &EntityType, ids: &[EntityId]) -> Statement {
    let mut statement = Statement::new("SELECT entity_id, version FROM ");
    statement.sql(&table(entity_type)).sql(" FORCE INDEX (unique_version) WHERE ");
    are_newest(&mut statement, entity_type, ids);
    statement.sql(" AND state IS NOT NULL ORDER BY entity_id");
    statement
}

/// A tiny write; what was committed before it is durable once it is.
pub(super) fn barrier(slot: u16) -> Statement {
    let slot = u64::from(slot);
    let mut statement = Statement::new("INSERT INTO quokka_barrier (slot, writes) VALUES (");
    statement.number(slot).sql(", 1) ON DUPLICATE KEY UPDATE writes = writes + 1");
    statement
}

/// Puts a lease in the place of one that was seen; where none was, enters it.
pub(super) fn swap_lease(seen: Option<&Lease>, next: &Lease, member: &str) -> Statement {
    let mut statement = Statement::new(if seen.is_some() { "UPDATE quokka_lease SET id = 1" } else { "INSERT INTO quokka_lease SET id = 1" });
    statement.sql(", holder = ").text_or_null(next.holder.as_deref()).sql(", member = ").text(member);
    statement.sql(", term = ").number(next.term.0).sql(", beat = ").number(next.beat);
    if let Some(seen) = seen {
        statement.sql(" WHERE id = 1 AND holder <=> ").text_or_null(seen.holder.as_deref());
        statement.sql(" AND term = ").number(seen.term.0).sql(" AND beat = ").number(seen.beat);
    }
    statement
}

/// Enters the database's one row; a duplicate key where it has one.
pub(super) fn insert_meta(schema_version: u32, shards: u16, secret: &[u8; 32]) -> Statement {
    let mut statement = Statement::new("INSERT INTO quokka_meta (id, schema_version, shards, log_secret) VALUES (1, ");
    statement.number(schema_version.into()).sql(", ").number(shards.into()).sql(", x'");
    for byte in secret {
        // Writing into a vector cannot fail.
        let _ = write!(statement.0, "{byte:02x}");
    }
    statement.sql("')");
    statement
}

/// Makes a table from its file; `{table}` in it is the table's name. The semicolon-free text is one statement.
pub(super) fn create(file: &str, table: &str) -> Statement {
    Statement::new(&file.replace("{table}", table))
}

/// The unique keys of a table, each with its columns in order.
pub(super) fn keys(entity_type: &EntityType) -> Statement {
    let mut statement = Statement::new(
        "SELECT GROUP_CONCAT(COLUMN_NAME ORDER BY SEQ_IN_INDEX) FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = DATABASE() AND NON_UNIQUE = 0 AND TABLE_NAME = ",
    );
    statement.text(entity_type.as_str()).sql(" GROUP BY INDEX_NAME");
    statement
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_escape_what_would_end_or_change_them() {
        for (text, literal) in [
            ("", "''"),
            ("plain \u{1f363} \"quoted\" %_", "'plain \u{1f363} \"quoted\" %_'"),
            ("it's", r"'it\'s'"),
            (r#"{"a":"\u0000\\"}"#, r#"'{"a":"\\u0000\\\\"}'"#),
            ("\0\u{1a}\n", "'\\0\\Z\n'"),
            ("\\", r"'\\'"),
            ("');DROP TABLE x;--", r"'\');DROP TABLE x;--'"),
        ] {
            assert_eq!(Statement(Vec::new()).text(text).as_bytes(), literal.as_bytes(), "{text:?}");
        }
    }
}
