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
