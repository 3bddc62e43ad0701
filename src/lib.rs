//! A document database server on top of MySQL.
pub mod bench;
pub mod cli;
pub mod config;
pub mod core;
pub mod examples;
pub mod handler;
pub mod http;
pub mod logging;
pub mod metrics;
pub mod partition;
pub mod server;
pub mod store;
