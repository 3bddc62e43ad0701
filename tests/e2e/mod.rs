//! The whole server from outside, as services, operators and accidents meet it.

mod bulk;
mod bundles;
mod commands;
mod crash;
mod feed;
mod feed_faults;
mod follow;
mod hang_up;
pub mod load;
mod lost_answers;
mod operations;
mod two_servers;
