//! The embedded store.

use quokka::core::EntityType;
use quokka::store::conformance::{event, options, partition, store};
use quokka::store::{AppendError, OpenError, Options, StoreError, open};
use std::time::Duration;

/// A file in a folder that does not exist yet.
pub struct File {
    url: String,
    folder: tempfile::TempDir,
}

impl File {
    pub fn fresh() -> Option<File> {
        let folder = tempfile::tempdir().unwrap();
        Some(File { url: format!("sqlite:{}/data/deep/quokka.db", folder.path().display()), folder })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn raw(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(self.folder.path().join("data/deep/quokka.db")).unwrap()
    }
}

quokka::store_conformance! { super::sqlite::File::fresh() }

#[tokio::test]
async fn new_folders_are_for_their_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let file = File::fresh().unwrap();
    store(file.url()).await;
    for folder in ["data", "data/deep"] {
        let mode = std::fs::metadata(file.folder.path().join(folder)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{folder}");
    }
}

#[tokio::test]
async fn a_newer_schema_is_refused() {
    let file = File::fresh().unwrap();
    drop(store(file.url()).await);
    file.raw().execute("UPDATE quokka_meta SET schema_version = 99", []).unwrap();
    assert!(matches!(open(&options(file.url())).await.map(|_| ()), Err(OpenError::Newer { stored: 99, known: 2 })));
}

#[tokio::test]
async fn a_strangers_table_is_refused() {
    let file = File::fresh().unwrap();
    let store = open(&options(file.url())).await.unwrap();
    file.raw().execute("CREATE TABLE person (shard, event_id, entity_id, version, command_id, PRIMARY KEY (shard, event_id))", []).unwrap();
    let outcome = store.create_type(&EntityType::new("person").unwrap()).await;
    assert!(matches!(outcome, Err(StoreError::Corrupt(_))), "{outcome:?}");
}

/// Another process may hold the file's only lock for writing; reads go on.
#[tokio::test]
async fn a_locked_file_means_not_done() {
    let file = File::fresh().unwrap();
    drop(store(file.url()).await);
    let store = open(&Options { statement_timeout: Duration::from_secs(1), ..options(file.url()) }).await.unwrap();
    let stranger = file.raw();
    stranger.execute_batch("BEGIN IMMEDIATE").unwrap();
    let outcome = store.append(&partition(7), &[event(1, "a", 1, "k")]).await;
    assert!(matches!(outcome, Err(AppendError::Interrupted(_))), "{outcome:?}");
    assert!(matches!(store.ready().await, Err(StoreError::Unavailable(_))));
    assert_eq!(store.head(&partition(7)).await.unwrap(), 0);
    stranger.execute_batch("ROLLBACK").unwrap();
    store.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
    store.ready().await.unwrap();
}

/// What does not fit a column, or a table that is gone, leaves nothing behind.
#[tokio::test]
async fn what_cannot_be_written_is_refused() {
    let file = File::fresh().unwrap();
    let store = store(file.url()).await;
    let outcome = store.append(&partition(7), &[event(1, "b", 1, "k"), event(u64::MAX, "a", 1, "k")]).await;
    assert!(matches!(outcome, Err(AppendError::Refused(_))), "{outcome:?}");
    assert_eq!(store.head(&partition(7)).await.unwrap(), 0);
    file.raw().execute("DROP TABLE account", []).unwrap();
    let outcome = store.append(&partition(7), &[event(1, "a", 1, "k")]).await;
    assert!(matches!(outcome, Err(AppendError::Unavailable(_))), "{outcome:?}");
}

#[tokio::test]
async fn a_file_that_is_no_database_is_not_opened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.txt");
    std::fs::write(&path, "these are notes, not a database, ".repeat(100)).unwrap();
    assert!(open(&options(&format!("sqlite:{}", path.display()))).await.is_err());
    assert!(std::fs::read_to_string(&path).unwrap().starts_with("these are notes"));
}

#[tokio::test]
async fn commits_survive_the_store() {
    let file = File::fresh().unwrap();
    let first = store(file.url()).await;
    first.append(&partition(7), &[event(1, "a", 1, "k")]).await.unwrap();
    drop(first);
    assert_eq!(store(file.url()).await.head(&partition(7)).await.unwrap(), 1);
    let rows: i64 = file.raw().query_row("SELECT COUNT(*) FROM account", [], |row| row.get(0)).unwrap();
    assert_eq!(rows, 1);
}
