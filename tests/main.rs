//! Integration tests: one binary, so that its tests share one database server of each kind.

#![allow(clippy::unwrap_used, reason = "tests")]

mod store;
mod support;
