//! `kill -9` of the server and of the database under load: what was answered is there, once.

use super::load::{Load, check};
use crate::support::quokka::Setup;
use crate::support::{Database, DatabaseServer, Engine, on_each_engine, on_each_server};
use std::sync::Arc;
use std::time::Duration;

/// How often something is killed in one test.
const KILLS: usize = 5;

async fn kill_the_server(database: Database) {
    let mut server = database.setup().start();
    let setup = Setup { listen: format!("127.0.0.1:{}", server.port()), ..database.setup() };
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

#[test]
fn durable_before_answer_whenever_the_server_is_killed() {
    on_each_engine(kill_the_server);
}

async fn kill_the_database(engine: Engine) {
    let mut database = DatabaseServer::start(engine);
    let setup = database.database("killed").setup();
    let server = setup.start();
    let targets = Arc::new(vec![server.base.clone()]);
    let load = Load::start("hot", &targets, 16, 3);
    for kill in 1..=KILLS {
        load.until(kill * 200).await;
        database.kill();
        tokio::time::sleep(Duration::from_millis(100)).await;
        database.restart();
    }
    load.until((KILLS + 1) * 200).await;
    let deposits = load.finish().await;
    check(&server.base, &deposits).await;
}

#[test]
fn durable_before_answer_whenever_the_database_is_killed() {
    on_each_server(kill_the_database);
}
