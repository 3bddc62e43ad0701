//! Events as JSON: the one form in which histories, feeds and views' maps meet them.

use super::event::{EventOutcome, StoredEvent};
use super::json::write_string;
use jiff::Timestamp;
use std::fmt::Write;

/// A stored time that no calendar holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a stored time is out of range")]
pub struct TimeError;

/// Appends the members of an event that do not depend on where it is shown: `version` to `committed_at`, without braces and without the state.
pub fn write_members(out: &mut String, stored: &StoredEvent) -> Result<(), TimeError> {
    let event = &stored.event;
    let _ = write!(out, "\"version\":{},\"event_id\":{},\"command_id\":", event.version, event.event_id);
    write_string(out, event.command_id.as_str());
    out.push_str(",\"command\":");
    write_string(out, event.command.as_str());
    let rejected = event.outcome == EventOutcome::Rejected;
    let _ = write!(out, ",\"request\":{},\"response\":{},\"rejected\":{rejected},\"handler_version\":", event.request, event.response);
    write_string(out, &event.handler_version.0);
    out.push_str(",\"committed_at\":\"");
    write_time(out, stored.committed_at)?;
    out.push('"');
    Ok(())
}

/// Appends a time given in microseconds since 1970: RFC 3339, UTC, with microseconds.
pub fn write_time(out: &mut String, microseconds: i64) -> Result<(), TimeError> {
    let time = Timestamp::from_microsecond(microseconds).map_err(|_| TimeError)?;
    let _ = write!(out, "{time:.6}");
    Ok(())
}
