//! Integration tests: one binary, so that its tests share one database server of each kind.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod cluster;
mod e2e;
mod handler;
mod http;
mod store;
mod support;
