//! Several nodes on one database, and what may happen to them.

mod faults;
mod forwarding;
mod load;
mod owners;
