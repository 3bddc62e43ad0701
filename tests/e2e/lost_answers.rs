//! A proxy between server and database cuts connections at chosen points: nothing happens twice, nothing that was answered is lost, and
//! callers hear "unknown" only where nobody can know.

use crate::support::proxy::{Fault, Proxy};
use crate::support::quokka::{Setup, client, get, post};
use crate::support::server::{Database, Engine};

/// Commands sent under each fault.
const COMMANDS: usize = 30;

async fn cut(database: Database) {
    let proxy = Proxy::start(database.server().port()).await;
    let server = Setup::on(&database.url_through(proxy.port())).start();
    let client = client();
    assert_eq!(post(&client, &server.base, "account/a/open", "o", "").await.unwrap().status, 200);
    let mut number = 0;
    for fault in [Fault::CutBeforeRequest("INSERT INTO"), Fault::CutInsideRequest("INSERT INTO"), Fault::CutReply("INSERT INTO")] {
        for _ in 0..COMMANDS {
            number += 1;
            proxy.set(fault);
            let id = format!("d-{number}");
            let sent = tokio::spawn({
                let (client, base, id) = (client.clone(), server.base.clone(), id.clone());
                async move { post(&client, &base, "account/a/deposit", &id, r#"{"amount":1}"#).await.unwrap() }
            });
            let cuts = proxy.cuts();
            while proxy.cuts() == cuts && !sent.is_finished() {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            proxy.set(Fault::PassThrough);
            let reply = sent.await.unwrap();
            assert_eq!(reply.status, 200, "{fault:?} {id}: {}", reply.body);
            assert_eq!(reply.json()["response"]["balance"], number, "{fault:?} {id}");
            // The first try is no replay, also where its own row was found again.
            assert_eq!(reply.header("idempotency-replayed"), None, "{fault:?} {id}");
            let again = post(&client, &server.base, "account/a/deposit", &id, r#"{"amount":1}"#).await.unwrap();
            assert_eq!(again.body, reply.body, "{fault:?} {id}");
        }
    }
    let state = get(&client, &server.base, "/v1/entities/account/a").await.unwrap().json();
    assert_eq!((state["state"]["balance"].as_u64(), state["version"].as_u64()), (Some(number), Some(number + 1)));
}

/// The database takes the statement and falls silent: the caller hears that nobody knows, and later the truth.
async fn silent(database: Database) {
    let proxy = Proxy::start(database.server().port()).await;
    let server = Setup::on(&database.url_through(proxy.port()))
        .set("commands.timeout", "1s")
        .set("storage.retry_for", "500ms")
        .set("storage.statement_timeout", "2s")
        .start();
    let client = client();
    assert_eq!(post(&client, &server.base, "account/a/open", "o", "").await.unwrap().status, 200);
    proxy.set(Fault::BlackHole);
    let unknown = post(&client, &server.base, "account/a/deposit", "d", r#"{"amount":1}"#).await.unwrap();
    assert_eq!(unknown.told(), "504 outcome-unknown", "{}", unknown.body);
    assert_eq!(unknown.json()["command_id"], "d");
    proxy.set(Fault::PassThrough);
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(20);
    let answer = loop {
        let answer = post(&client, &server.base, "account/a/deposit", "d", r#"{"amount":1}"#).await.unwrap();
        if answer.status == 200 {
            break answer;
        }
        assert!(matches!(answer.status, 503 | 504), "{answer:?}");
        assert!(tokio::time::Instant::now() < deadline, "{answer:?}");
    };
    assert_eq!(answer.json()["response"]["balance"], 1);
    let state = get(&client, &server.base, "/v1/entities/account/a").await.unwrap().json();
    assert_eq!((state["state"]["balance"].as_u64(), state["version"].as_u64()), (Some(1), Some(2)));
}

macro_rules! on_each_server {
    ($name:ident, $test:path) => {
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn mariadb() {
                if let Some(database) = Engine::MariaDb.database().await {
                    $test(database).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn mysql() {
                if let Some(database) = Engine::MySql.database().await {
                    $test(database).await;
                }
            }
        }
    };
}

on_each_server!(durable_before_answer_whatever_is_cut, cut);
on_each_server!(an_unknown_outcome_is_told_as_such, silent);
