//! Where a test's events are kept: a database of its own on one engine. And a macro that makes one test an engine.

use super::quokka::Setup;
use super::server::{Database, Engine};

/// A fresh database, gone when the test ends.
pub enum Place {
    Sqlite(tempfile::TempDir),
    Server(Database),
}

impl Place {
    pub fn sqlite() -> Option<Place> {
        Some(Place::Sqlite(tempfile::tempdir().unwrap()))
    }

    /// None where there is no such server.
    pub async fn on(engine: Engine) -> Option<Place> {
        engine.database().await.map(Place::Server)
    }

    /// How to start quokka on it.
    pub fn setup(&self) -> Setup {
        match self {
            Place::Sqlite(folder) => Setup::on(&format!("sqlite:{}", folder.path().join("quokka.sqlite").display())),
            Place::Server(database) => Setup::on(database.url()),
        }
    }
}

/// Makes one test an engine of an `async fn(Place)`.
macro_rules! on_each_engine {
    ($name:ident, $test:path) => {
        mod $name {
            use super::*;
            use crate::support::place::Place;
            use crate::support::server::Engine;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sqlite() {
                if let Some(place) = Place::sqlite() {
                    $test(place).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn mariadb() {
                if let Some(place) = Place::on(Engine::MariaDb).await {
                    $test(place).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn mysql() {
                if let Some(place) = Place::on(Engine::MySql).await {
                    $test(place).await;
                }
            }
        }
    };
}
pub(crate) use on_each_engine;
