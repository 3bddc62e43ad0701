//! What tests stand on: real database servers, and a proxy that breaks connections to them.

pub mod proxy;
pub mod server;
