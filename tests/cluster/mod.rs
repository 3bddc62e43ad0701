//! Several nodes on one database, and what may happen to them.

#[cfg(feature = "etcd")]
mod etcd;
mod faults;
mod forwarding;
mod load;
mod owners;
mod ways;
