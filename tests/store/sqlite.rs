//! The embedded store.

use quokka::core::EntityType;
use quokka::store::conformance::{event, options, partition, store};
use quokka::store::{OpenError, StoreError, open};

/// A file in a folder that does not exist yet.
struct File {
    url: String,
    folder: tempfile::TempDir,
}

impl File {
    fn fresh() -> Option<File> {
        let folder = tempfile::tempdir().unwrap();
        Some(File { url: format!("sqlite:{}/data/deep/quokka.db", folder.path().display()), folder })
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn raw(&self) -> rusqlite::Connection {
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
    assert!(matches!(open(&options(file.url())).await.map(|_| ()), Err(OpenError::Newer { stored: 99, known: 1 })));
}

#[tokio::test]
async fn a_strangers_table_is_refused() {
    let file = File::fresh().unwrap();
    let store = open(&options(file.url())).await.unwrap();
    file.raw().execute("CREATE TABLE person (shard, event_id, entity_id, version, command_id, PRIMARY KEY (shard, event_id))", []).unwrap();
    let outcome = store.create_type(&EntityType::new("person").unwrap()).await;
    assert!(matches!(outcome, Err(StoreError::Corrupt(_))), "{outcome:?}");
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
