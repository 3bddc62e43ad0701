//! The leader's lease, as a store keeps it.

use super::StoreError;
use crate::core::{Member, Term};

/// The one row that says who leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The process that holds it; none where the last one has laid it down.
    pub holder: Option<String>,
    /// Its node.
    pub member: Member,
    /// Grows with every change of holder.
    pub term: Term,
    /// Changes as long as the holder lives.
    pub beat: u64,
}

/// A node as a column holds it.
pub(super) fn write_member(member: &Member) -> Result<String, StoreError> {
    serde_json::to_string(member).map_err(|error| StoreError::Corrupt(error.to_string()))
}

/// The node that a column holds.
pub(super) fn read_member(text: &str) -> Result<Member, StoreError> {
    serde_json::from_str(text).map_err(|_| StoreError::unreadable("member"))
}
