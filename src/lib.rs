//! A document database server on top of MySQL.
pub mod config;
pub mod core;
pub mod handler;
pub mod http;
pub mod partition;
pub mod store;
