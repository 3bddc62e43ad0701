//! The whole server from outside, as services, operators and accidents meet it.

mod commands;
mod crash;
mod load;
mod lost_answers;
mod operations;
mod two_servers;
