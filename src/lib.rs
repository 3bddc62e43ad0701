//! A document database server on top of MySQL.
pub mod core;
pub mod handler;
pub mod http;
pub mod logging;
pub mod metrics;
pub mod partition;
pub mod store;
