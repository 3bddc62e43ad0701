//! Stores on real engines: the conformance suite, and what only one kind of engine can be made to do.

mod faults;
mod first_schema;
mod literals;
mod servers;
mod sqlite;

use crate::support::server::{Database, Engine};

/// Makes a test for each server of a function that takes a database; `alone` ones have the whole server.
macro_rules! on_both_servers {
    ($make:ident: $($case:ident)*) => {
        mod mariadb {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    if let Some(database) = $crate::support::server::Engine::MariaDb.$make().await {
                        super::$case(database).await;
                    }
                }
            )*
        }
        mod mysql {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    if let Some(database) = $crate::support::server::Engine::MySql.$make().await {
                        super::$case(database).await;
                    }
                }
            )*
        }
    };
}
pub(crate) use on_both_servers;

mod mariadb {
    quokka::store_conformance! { super::Engine::MariaDb.database().await }
}

mod mysql {
    quokka::store_conformance! { super::Engine::MySql.database().await }
}

/// Waits until a condition holds.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let give_up = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !holds().await {
        assert!(std::time::Instant::now() < give_up, "never: {what}");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

/// The sessions that wait inside an INSERT into the table `account` of the database.
async fn waiting_inserts(database: &Database, admin: &mut mysql_async::Conn) -> Vec<u64> {
    use mysql_async::prelude::Queryable;
    let sql = format!("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = '{}' AND INFO LIKE 'INSERT INTO `account`%'", database.name());
    admin.query(sql).await.unwrap()
}
