//! Connections to the file, and what is in it besides events.

use crate::core::{LogIdentity, ShardCount};
use crate::store::error::{OpenError, StoreError, sqlite_is_busy, sqlite_read_error};
use rusqlite::{Connection, OpenFlags, TransactionBehavior, params};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Version 2 has the column `state_base`; [`create_events`] adds it to tables of version 1.
const SCHEMA_VERSION: u32 = 2;
const META: &str = include_str!("../../../schema/sqlite/quokka_meta.sql");
const LEASE: &str = include_str!("../../../schema/sqlite/quokka_lease.sql");
const EVENTS: &str = include_str!("../../../schema/sqlite/events.sql");

/// The file that a URL names.
pub(super) fn path_of(url: &str) -> Result<PathBuf, OpenError> {
    let path = url.strip_prefix("sqlite:").unwrap_or(url);
    let path = path.strip_prefix("//").unwrap_or(path);
    if path.is_empty() {
        return Err(OpenError::Url("it names no file: sqlite:PATH".into()));
    }
    if path.starts_with(":memory:") {
        return Err(OpenError::Url("a database in memory cannot be shared between connections: name a file".into()));
    }
    Ok(PathBuf::from(path))
}

/// Opens the file with the settings that every connection needs.
pub(super) fn open(path: &Path, busy_timeout: Duration) -> Result<Connection, rusqlite::Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(busy_timeout)?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

/// Makes the folder, the file and quokka's own table where they are missing, and compares what they hold with this program.
pub(super) fn prepare(path: &Path, shards: ShardCount, busy_timeout: Duration) -> Result<LogIdentity, OpenError> {
    let unavailable = |error: rusqlite::Error| OpenError::Unavailable(error.to_string());
    make_folder(path).map_err(|error| OpenError::Unavailable(format!("cannot make the folder of the database: {error}")))?;
    let mut connection = open(path, busy_timeout).map_err(unavailable)?;
    let mode = write_ahead(&connection, busy_timeout).map_err(unavailable)?;
    if mode != "wal" {
        return Err(OpenError::Unsuitable(format!("the file system allows no write-ahead log (journal mode {mode})")));
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(unavailable)?;
    transaction.execute(META, []).map_err(unavailable)?;
    transaction.execute(LEASE, []).map_err(unavailable)?;
    let enter = "INSERT INTO quokka_meta (id, schema_version, shards, log_secret) VALUES (1, ?1, ?2, ?3) ON CONFLICT DO NOTHING";
    let secret: [u8; 32] = rand::random();
    transaction.execute(enter, params![SCHEMA_VERSION, shards.get(), secret]).map_err(unavailable)?;
    let read = "SELECT schema_version, shards, log_secret FROM quokka_meta WHERE id = 1";
    let (stored, stored_shards, secret): (u32, u16, [u8; 32]) =
        transaction.query_row(read, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).map_err(unavailable)?;
    if stored > SCHEMA_VERSION {
        return Err(OpenError::Newer { stored, known: SCHEMA_VERSION });
    }
    if stored_shards != shards.get() {
        return Err(OpenError::Shards { configured: shards.get(), stored: stored_shards });
    }
    // Last of the checks: a node that is refused must not shut out those of the earlier version.
    transaction.execute("UPDATE quokka_meta SET schema_version = ?1 WHERE schema_version < ?1", [SCHEMA_VERSION]).map_err(unavailable)?;
    transaction.commit().map_err(unavailable)?;
    Ok(LogIdentity::new(secret))
}

/// A new folder is for its owner only: it will hold everybody's documents.
fn make_folder(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder),
        _ => Ok(()),
    }
}

/// Turns the write-ahead log on. SQLite answers "busy" here without waiting where another process does the same at that moment.
fn write_ahead(connection: &Connection, patience: Duration) -> Result<String, rusqlite::Error> {
    let give_up = Instant::now() + patience;
    loop {
        match connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0)) {
            Err(error) if sqlite_is_busy(&error) && Instant::now() < give_up => std::thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    }
}

/// Makes the table of an entity type; `table` is its quoted name.
pub(super) fn create_events(connection: &Connection, table: &str) -> Result<(), StoreError> {
    let failed = |error: rusqlite::Error| sqlite_read_error(&error);
    connection.execute(&EVENTS.replace("{table}", table), []).map_err(failed)?;
    // A table of this name may have been there before, made by somebody else: without the three keys nothing that quokka promises holds.
    let keys = "SELECT (SELECT group_concat(name) FROM (SELECT name FROM pragma_index_info(list.name) ORDER BY seqno)) \
        FROM pragma_index_list(?1) AS list WHERE list.\"unique\" AND NOT list.partial";
    let mut statement = connection.prepare(keys).map_err(failed)?;
    let found: Vec<String> = statement.query_map([table.trim_matches('"')], |row| row.get(0)).map_err(failed)?.collect::<Result<_, _>>().map_err(failed)?;
    for key in ["shard,event_id", "entity_id,version", "entity_id,command_id"] {
        if !found.iter().any(|columns| columns == key) {
            return Err(StoreError::Corrupt(format!("table {table} has no unique key ({key})")));
        }
    }
    let has_base = "SELECT COUNT(*) FROM pragma_table_info(?1) WHERE name = 'state_base'";
    let count = |connection: &Connection| connection.query_row(has_base, [table.trim_matches('"')], |row| row.get::<_, i64>(0)).map_err(failed);
    if count(connection)? == 0 {
        let added = connection.execute(&format!("ALTER TABLE {table} ADD COLUMN state_base INTEGER NULL"), []).map_err(failed);
        // Another process may have been faster.
        if count(connection)? == 0 {
            added?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_files() {
        for (url, path) in [
            ("sqlite:quokka-data/quokka.db", Some("quokka-data/quokka.db")),
            ("sqlite:/var/lib/q.db", Some("/var/lib/q.db")),
            ("sqlite:///var/lib/q.db", Some("/var/lib/q.db")),
            ("sqlite:a?b=c", Some("a?b=c")),
            ("sqlite:", None),
            ("sqlite::memory:", None),
        ] {
            assert_eq!(path_of(url).ok(), path.map(PathBuf::from), "{url}");
        }
    }
}
