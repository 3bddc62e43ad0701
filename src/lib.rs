//! quokka: a document database server on top of MySQL, MariaDB or SQLite.
//!
//! Services POST JSON commands; a handler turns a command and the state of an entity into a response and a new state, or refuses. Every handled
//! command is one event, guarded by the database's unique keys, so a command id is handled once and always answered the same.
//!
//! As a program, quokka runs handlers written in JavaScript. As a library, it serves handlers written in Rust:
//!
//! ```no_run
//! use quokka::{Config, Entity, Quokka, Rejection};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Default, Serialize, Deserialize)]
//! struct Account { balance: u64 }
//!
//! #[derive(Deserialize)]
//! struct Amount { amount: u64 }
//!
//! fn deposit(request: Amount, account: &mut Account) -> Result<u64, Rejection> {
//!     account.balance += request.amount;
//!     Ok(account.balance)
//! }
//!
//! fn charge(request: Amount, account: &mut Account) -> Result<u64, Rejection> {
//!     account.balance = account.balance.checked_sub(request.amount).ok_or_else(|| Rejection::new("insufficient_funds", "balance too low"))?;
//!     Ok(account.balance)
//! }
//!
//! # async fn run() -> Result<(), quokka::server::ServeError> {
//! Quokka::builder()
//!     .entity(Entity::new("account").creates_if_missing("deposit", deposit).command("charge", charge))
//!     .serve(Config::default())
//!     .await
//! # }
//! ```
//!
//! The tour: [`core`] holds the rules, [`store`] keeps events, [`handler`] runs the code that decides, [`partition`] queues, batches and commits,
//! [`cluster`] brings commands to the node that owns them, [`feed`] reads and follows the log, [`http`] speaks to clients, [`server`] puts them
//! together. ARCHITECTURE.md follows one command through all of them.

pub mod bench;
pub mod cli;
pub mod cluster;
pub mod config;
pub mod core;
pub mod examples;
pub mod feed;
pub mod handler;
pub mod http;
pub mod logging;
pub mod metrics;
pub mod partition;
pub mod server;
pub mod store;

pub use config::Config;
pub use handler::native::{Context, Entity, Rejection};

/// Where a server with handlers in Rust begins.
pub struct Quokka;

impl Quokka {
    /// A server without entity types; add them, then serve.
    pub fn builder() -> server::Builder {
        server::Builder::default()
    }
}
