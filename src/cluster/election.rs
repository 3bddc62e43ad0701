//! Elections: which node leads.
//!
//! Leading is a convenience: the leader hands out shard maps, and nothing that a client is promised depends on there being one, or only one.
//! So an election owes speed, not safety: soon after a leader has gone there is another one, and a leader who lost its office learns of it.

mod database;
#[cfg(feature = "etcd")]
pub mod etcd;

pub use database::DatabaseElection;

use crate::core::{Member, Term};
use async_trait::async_trait;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What a node knows of the leadership.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leadership {
    /// Nobody is known to lead: not yet, or whoever keeps the office cannot be reached.
    Unknown,
    /// This node leads.
    Mine(Term),
    /// Another node leads.
    Other(Member),
}

/// A way to elect a leader.
#[async_trait]
pub trait Election: Send + Sync + 'static {
    /// Takes part for as long as `stop` is not cancelled, and tells what it learns.
    ///
    /// Never ends by itself, whatever becomes of the service behind it: it tries again, more slowly the longer it fails, and logs only when
    /// something changes. What it told last must come true again within about twice the time of the office's lease: a node that cannot hold or
    /// confirm its office tells [`Leadership::Unknown`]. Once `stop` is cancelled it lays the office down, where it holds it, so that the next
    /// leader need not wait, and returns; callers give it a moment and then drop it.
    async fn take_part(&self, told: watch::Sender<Leadership>, stop: CancellationToken);
}
