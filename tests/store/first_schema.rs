//! Databases made with version 1 of the schema, as its own statements made them: what they hold stays, and what is new works on them.

use super::sqlite::File;
use crate::support::server::Database;
use mysql_async::prelude::Queryable;
use quokka::core::{Event, Json, ShardCount, StatePatch};
use quokka::store::conformance::{account, event, id, options, partition, store};
use quokka::store::{Content, OpenError, Options, Order, StoreError, open};

/// The table as version 1 made it; only its comments are left out.
const MYSQL: &str = "CREATE TABLE `account` (
  shard           SMALLINT UNSIGNED NOT NULL,
  event_id        BIGINT UNSIGNED NOT NULL,
  entity_id       VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  version         BIGINT UNSIGNED NOT NULL,
  command_id      VARCHAR(256) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  command_name    VARCHAR(48) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  outcome         ENUM('accepted', 'rejected') CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  handler_version VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  request         LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL,
  response        LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  state           LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL,
  handled_at      BIGINT NOT NULL,
  committed_at    DATETIME(6) NOT NULL,
  CONSTRAINT primary_position PRIMARY KEY (shard, event_id),
  UNIQUE KEY unique_version (entity_id, version),
  UNIQUE KEY unique_command (entity_id, command_id)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC";

const SQLITE: &str = r#"CREATE TABLE "account" (
  shard           INTEGER NOT NULL,
  event_id        INTEGER NOT NULL,
  entity_id       TEXT    NOT NULL COLLATE BINARY,
  version         INTEGER NOT NULL,
  command_id      TEXT    NOT NULL COLLATE BINARY,
  command_name    TEXT    NOT NULL COLLATE BINARY,
  outcome         TEXT    NOT NULL,
  handler_version TEXT    NOT NULL,
  request         TEXT    NULL,
  response        TEXT    NOT NULL,
  state           TEXT    NULL,
  handled_at      INTEGER NOT NULL,
  committed_at    INTEGER NOT NULL,
  CONSTRAINT known_outcome CHECK (outcome IN ('accepted', 'rejected')),
  CONSTRAINT unique_command UNIQUE (entity_id, command_id),
  CONSTRAINT unique_version UNIQUE (entity_id, version),
  CONSTRAINT primary_position PRIMARY KEY (shard, event_id)
) STRICT"#;

/// Version 1 of the entity `a`; `{time}` is when.
const ROW: &str = r#"INSERT INTO account (shard, event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, state,
  handled_at, committed_at) VALUES (7, 1, 'a', 1, 'k1', 'charge', 'accepted', '0123456789abcdef', '{"amount":10}', '{"balance":90}', '{"version":1}',
  1700000000123, {time})"#;

super::on_both_servers! { database:
    tables_of_the_first_schema_are_brought_up_to_date
    a_base_with_no_change_is_corrupt
}

/// What the row of `quokka_meta` says: version 1, or 2 where an earlier start was interrupted before it came to the table.
const META: [u32; 2] = [1, 2];

async fn tables_of_the_first_schema_are_brought_up_to_date(database: Database) {
    let mut admin = database.admin().await;
    drop(open(&options(database.url())).await.unwrap());
    for meta in META {
        admin.query_drop("DROP TABLE IF EXISTS account").await.unwrap();
        admin.query_drop(MYSQL).await.unwrap();
        admin.query_drop(ROW.replace("{time}", "'2024-01-02 03:04:05.678901'")).await.unwrap();
        admin.query_drop(format!("UPDATE quokka_meta SET schema_version = {meta}")).await.unwrap();
        a_refused_node_is(database.url()).await;
        let version: Option<u32> = admin.query_first("SELECT schema_version FROM quokka_meta").await.unwrap();
        assert_eq!(version, Some(meta), "a node that was refused changed the version");
        is_brought_up_to_date(database.url()).await;
        let version: Option<u32> = admin.query_first("SELECT schema_version FROM quokka_meta").await.unwrap();
        assert_eq!(version, Some(2));
        let columns = "SELECT COLUMN_NAME, COLUMN_TYPE, IS_NULLABLE, COLUMN_COMMENT FROM information_schema.COLUMNS \
            WHERE TABLE_SCHEMA = DATABASE() AND COLUMN_NAME = 'state_base' AND TABLE_NAME = 'account'";
        let migrated: Vec<(String, String, String, String)> = admin.query(columns).await.unwrap();
        admin.query_drop("DROP TABLE account").await.unwrap();
        drop(store(database.url()).await);
        let made: Vec<(String, String, String, String)> = admin.query(columns).await.unwrap();
        assert_eq!(migrated, made);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_the_first_schema_are_brought_up_to_date() {
    let file = File::fresh().unwrap();
    drop(open(&options(file.url())).await.unwrap());
    for meta in META {
        let raw = file.raw();
        let set =
            format!("DROP TABLE IF EXISTS account; {SQLITE}; {}; UPDATE quokka_meta SET schema_version = {meta}", ROW.replace("{time}", "1704164645678901"));
        raw.execute_batch(&set).unwrap();
        let version = || raw.query_row("SELECT schema_version FROM quokka_meta", [], |row| row.get::<_, u32>(0)).unwrap();
        a_refused_node_is(file.url()).await;
        assert_eq!(version(), meta, "a node that was refused changed the version");
        is_brought_up_to_date(file.url()).await;
        assert_eq!(version(), 2);
    }
}

async fn a_refused_node_is(url: &str) {
    let other = Options { shards: ShardCount::new(32).unwrap(), ..options(url) };
    assert!(matches!(open(&other).await.map(|_| ()), Err(OpenError::Shards { configured: 32, stored: 64 })));
}

/// Four nodes start at once, on a table that holds version 1 of the entity `a`.
async fn is_brought_up_to_date(url: &str) {
    let starts: Vec<_> = (0..4)
        .map(|_| {
            tokio::spawn({
                let url = url.to_owned();
                async move { store(&url).await }
            })
        })
        .collect();
    let mut nodes = Vec::new();
    for start in starts {
        nodes.push(start.await.unwrap());
    }
    let old = nodes[0].newest(&account(), &[id("a")]).await.unwrap().remove(0).unwrap();
    assert_eq!((old.event, old.committed_at), (event(1, "a", 1, "k1"), 1_704_164_645_678_901));
    let replace = Json::trusted(r#"[{"op":"replace","path":"/version","value":2}]"#);
    let changed = Event { state: None, patch: Some(StatePatch { base: 1, patch: replace }), ..event(2, "a", 2, "k2") };
    nodes[0].append(&partition(7), &[changed, event(3, "a", 3, "k3")]).await.unwrap();
    for node in &nodes {
        let rows = node.history(&account(), &id("a"), Order::Ascending, 0, 9, Content::Whole).await.unwrap();
        let events: Vec<Event> = rows.into_iter().map(|stored| stored.event).collect();
        assert_eq!(events, [event(1, "a", 1, "k1"), event(2, "a", 2, "k2"), event(3, "a", 3, "k3")]);
    }
}

/// No append writes such a row. Read as whole, it would say that the entity does not exist.
const BASE_WITH_NO_CHANGE: &str = "UPDATE account SET state = NULL, state_base = 1 WHERE version = 2";

async fn a_base_with_no_change_is_corrupt(database: Database) {
    let store = store(database.url()).await;
    store.append(&partition(7), &[event(1, "a", 1, "k1"), event(2, "a", 2, "k2")]).await.unwrap();
    database.admin().await.query_drop(BASE_WITH_NO_CHANGE).await.unwrap();
    assert!(matches!(store.newest(&account(), &[id("a")]).await, Err(StoreError::Corrupt(_))));
}

#[tokio::test]
async fn a_base_with_no_change_in_a_file_is_corrupt() {
    let file = File::fresh().unwrap();
    let store = store(file.url()).await;
    store.append(&partition(7), &[event(1, "a", 1, "k1"), event(2, "a", 2, "k2")]).await.unwrap();
    file.raw().execute_batch(BASE_WITH_NO_CHANGE).unwrap();
    assert!(matches!(store.newest(&account(), &[id("a")]).await, Err(StoreError::Corrupt(_))));
}
