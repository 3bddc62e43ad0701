//! What operators rely on: memory, a clean stop, readiness, and servers that refuse to start.

use crate::support::place::{Place, on_each_engine};
use crate::support::quokka::{client, get, post};
use crate::support::server::Engine;

/// 60 MB for an idle server and its handler processes together, as users are told.
const IDLE_MEMORY_MAX: u64 = 60_000_000;

async fn idle_memory(place: Place) {
    let server = place.setup().start();
    let client = client();
    assert_eq!(post(&client, &server.base, "account/a/open", "o", "").await.unwrap().status, 200);
    let memory = server.memory();
    assert!(memory < IDLE_MEMORY_MAX, "{memory} bytes");
}

on_each_engine!(bounded_an_idle_server_is_small, idle_memory);

async fn another_shard_count(place: Place) {
    drop(place.setup().start());
    let log = place.setup().set("storage.shards", "32").try_start().err().unwrap();
    assert!(log.contains("storage.shards is 32") && log.contains("64"), "{log}");
}

on_each_engine!(a_server_that_disagrees_on_the_shards_refuses_to_start, another_shard_count);

/// Fifty clients in a loop while the server is told to stop: each answered command is there, and the server exits 0.
async fn stop_under_load(place: Place) {
    let server = place.setup().start();
    let base = server.base.clone();
    let targets = std::sync::Arc::new(vec![base.clone()]);
    let load = super::load::Load::start("busy", &targets, 50, 2);
    load.until(500).await;
    let port = server.port();
    let status = tokio::task::spawn_blocking(move || server.stop()).await.unwrap();
    assert!(status.success(), "{status}");
    let mut setup = place.setup();
    setup.listen = format!("127.0.0.1:{port}");
    let server = setup.start();
    load.until(1000).await;
    let deposits = load.finish().await;
    super::load::check(&server.base, &deposits).await;
}

on_each_engine!(durable_before_answer_when_the_server_is_told_to_stop, stop_under_load);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_follows_the_database() {
    let Some(database) = Engine::MariaDb.database_alone().await else { return };
    let server = crate::support::quokka::Setup::on(database.url()).set("storage.retry_for", "100ms").set("commands.timeout", "2s").start();
    let client = client();
    assert_eq!(get(&client, &server.base, "/health/ready").await.unwrap().status, 200);
    database.server().kill();
    let away = post(&client, &server.base, "account/a/open", "o", "").await.unwrap();
    assert_eq!(away.told(), "503 storage-unavailable");
    assert!(away.header("retry-after").is_some());
    wait_for(&client, &server.base, 503).await;
    assert_eq!(get(&client, &server.base, "/health/live").await.unwrap().status, 200);
    database.server().start().await;
    wait_for(&client, &server.base, 200).await;
    assert_eq!(post(&client, &server.base, "account/a/open", "o", "").await.unwrap().status, 200);
}

async fn wait_for(client: &reqwest::Client, base: &str, status: u16) {
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let ready = get(client, base, "/health/ready").await.unwrap();
        if ready.status == status {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{ready:?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// A database that somebody else holds surely did nothing: callers hear that while they still listen, not that nobody knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_database_is_unavailable_and_not_a_mystery() {
    let place = Place::sqlite().unwrap();
    let Place::Sqlite(folder) = &place else { unreachable!() };
    let server = place.setup().set("commands.timeout", "3s").set("storage.statement_timeout", "2s").set("storage.retry_for", "1s").start();
    let client = client();
    assert_eq!(post(&client, &server.base, "account/a/open", "o", "").await.unwrap().status, 200);
    let stranger = rusqlite::Connection::open(folder.path().join("quokka.sqlite")).unwrap();
    stranger.execute_batch("BEGIN IMMEDIATE").unwrap();
    let locked = post(&client, &server.base, "account/a/deposit", "d", r#"{"amount":1}"#).await.unwrap();
    assert_eq!(locked.told(), "503 storage-unavailable", "{}", locked.body);
    stranger.execute_batch("ROLLBACK").unwrap();
    let free = post(&client, &server.base, "account/a/deposit", "d", r#"{"amount":1}"#).await.unwrap();
    assert_eq!((free.status, free.json()["version"].as_u64()), (200, Some(2)), "{}", free.body);
}
