//! `kill -9` of the server and of the database under load: what was answered is there, once.

use super::load::{Load, check};
use crate::support::place::{Place, on_each_engine};
use crate::support::quokka::Setup;
use crate::support::server::{Database, Engine};
use std::sync::Arc;

/// How often something is killed in one test.
const KILLS: usize = 5;

async fn kill_the_server(place: Place) {
    let mut server = place.setup().start();
    let setup = Setup { listen: format!("127.0.0.1:{}", server.port()), ..place.setup() };
    let targets = Arc::new(vec![server.base.clone()]);
    let load = Load::start("hot", &targets, 16, 3);
    for kill in 1..=KILLS {
        load.until(kill * 200).await;
        server.kill();
        server = setup.start();
    }
    load.until((KILLS + 1) * 200).await;
    let deposits = load.finish().await;
    check(&server.base, &deposits).await;
}

on_each_engine!(durable_before_answer_whenever_the_server_is_killed, kill_the_server);

/// The database is killed, comes back on its data, and the server finds it again by itself.
async fn kill_the_database(database: Database) {
    let server = Setup::on(database.url()).start();
    let targets = Arc::new(vec![server.base.clone()]);
    let load = Load::start("hot", &targets, 16, 3);
    for kill in 1..=KILLS {
        load.until(kill * 200).await;
        database.server().kill();
        database.server().start().await;
    }
    load.until((KILLS + 1) * 200).await;
    let deposits = load.finish().await;
    check(&server.base, &deposits).await;
}

mod durable_before_answer_whenever_the_database_is_killed {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mariadb() {
        if let Some(database) = Engine::MariaDb.database_alone().await {
            kill_the_database(database).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mysql() {
        if let Some(database) = Engine::MySql.database_alone().await {
            kill_the_database(database).await;
        }
    }
}

/// Its state is large from the first command on and grows with each, so that rows hold changes and the state stays in the handler process.
const LARGE: &str = r#"
export const state = { type: "object", properties: { balance: { type: "integer" }, entries: { type: "object", additionalProperties: { type: "integer" } } } };
export const commands = {
  deposit: {
    creates: "if-missing",
    handle(state, { amount }, { commandId }) {
      if (state.balance === undefined) {
        state.balance = 0;
        state.entries = {};
        for (let number = 0; number < 1000; number += 1) state.entries[`before-${number}`] = 0;
      }
      state.balance += amount;
      state.entries[commandId] = amount;
      return { balance: state.balance };
    },
  },
};
"#;

/// As above, with states of which only changes are told: every version is still there, whole, and follows from the one before.
async fn kill_the_server_with_large_states(place: Place) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("account.js"), LARGE).unwrap();
    let mut server = place.setup().entities(folder.path()).start();
    let setup = Setup { listen: format!("127.0.0.1:{}", server.port()), ..place.setup().entities(folder.path()) };
    let targets = Arc::new(vec![server.base.clone()]);
    let load = Load::start("large", &targets, 16, 2);
    for kill in 1..=3 {
        load.until(kill * 150).await;
        server.kill();
        server = setup.start();
    }
    load.until(600).await;
    let deposits = load.finish().await;
    check(&server.base, &deposits).await;
    let client = crate::support::quokka::client();
    for entity in ["large0", "large1"] {
        let (mut after, mut balance, mut entries) = (0, 0, 1000);
        loop {
            let path = format!("/v1/entities/account/{entity}/events?after={after}&limit=100&include=state");
            let page = crate::support::quokka::get(&client, &server.base, &path).await.unwrap().json();
            for event in page["events"].as_array().unwrap() {
                balance += event["request"]["amount"].as_i64().unwrap();
                entries += 1;
                assert_eq!(event["state"]["balance"].as_i64(), Some(balance), "{entity} v{}", event["version"]);
                assert_eq!(event["state"]["entries"].as_object().unwrap().len(), entries, "{entity} v{}", event["version"]);
                assert_eq!(event["state"]["entries"][event["command_id"].as_str().unwrap()], event["request"]["amount"]);
            }
            match page["next"].as_u64() {
                Some(next) => after = next,
                None => break,
            }
        }
    }
}

on_each_engine!(large_states_survive_whenever_the_server_is_killed, kill_the_server_with_large_states);
