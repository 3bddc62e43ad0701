//! The integration tests: one binary.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod handler;
