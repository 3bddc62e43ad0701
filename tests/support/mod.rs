//! What tests stand on: real database servers, a proxy that breaks connections to them, and quokka itself as a process.

pub mod cluster;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod place;
pub mod port;
pub mod proxy;
pub mod quokka;
pub mod server;
pub mod wire;
