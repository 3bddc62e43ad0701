//! Rows read into events, and the columns that this takes.

use crate::core::{CommandId, CommandName, EntityId, Event, EventOutcome, HandlerVersion, Json, StoredEvent, Version};
use crate::store::error::{StoreError, sqlite_read_error};
use crate::store::patches::StoredState;
use rusqlite::Row;
use rusqlite::types::FromSql;

/// All columns of an event; the table follows.
pub(super) const SELECT_WHOLE: &str = "SELECT event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, \
    handled_at, committed_at, state, state_base";
/// The columns that [`state`] reads; the table follows.
pub(super) const SELECT_STATE: &str = "SELECT version, state, state_base";
/// The same as [`SELECT_WHOLE`] with no state.
pub(super) const SELECT_WITHOUT_STATE: &str = "SELECT event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, \
    handled_at, committed_at, NULL, NULL";

/// A number that can only be positive.
pub(super) fn integer(value: i64, column: &str) -> Result<u64, StoreError> {
    u64::try_from(value).map_err(|_| StoreError::unreadable(column))
}

fn get<T: FromSql>(row: &Row, at: usize) -> Result<T, StoreError> {
    row.get(at).map_err(|error| match error {
        rusqlite::Error::InvalidColumnType(_, column, _) => StoreError::unreadable(&column),
        error => sqlite_read_error(&error),
    })
}

fn state_of(version: Version, state: Option<String>, base: Option<i64>) -> Result<StoredState, StoreError> {
    let base = base.map(|base| integer(base, "state_base")).transpose()?;
    StoredState::new(version, state.map(Json::trusted), base)
}

/// Reads a row of [`SELECT_STATE`].
pub(super) fn state(row: &Row) -> Result<StoredState, StoreError> {
    state_of(integer(get(row, 0)?, "version")?, get(row, 1)?, get(row, 2)?)
}

/// Reads a row of [`SELECT_WHOLE`] or [`SELECT_WITHOUT_STATE`].
pub(super) fn event(row: &Row) -> Result<StoredEvent, StoreError> {
    let text = |at| get::<String>(row, at);
    let outcome = match text(5)?.as_str() {
        "accepted" => EventOutcome::Accepted,
        "rejected" => EventOutcome::Rejected,
        _ => return Err(StoreError::unreadable("outcome")),
    };
    let version = integer(get(row, 2)?, "version")?;
    let StoredState { state, patch, .. } = state_of(version, get(row, 11)?, get(row, 12)?)?;
    let event = Event {
        event_id: integer(get(row, 0)?, "event_id")?,
        entity_id: EntityId::trusted(&text(1)?),
        version,
        command_id: CommandId::trusted(&text(3)?),
        command: CommandName::trusted(&text(4)?),
        outcome,
        handler_version: HandlerVersion(text(6)?.into()),
        request: get::<Option<String>>(row, 7)?.map_or_else(Json::null, Json::trusted),
        response: Json::trusted(text(8)?),
        patch,
        handled_at: get(row, 9)?,
        state,
    };
    Ok(StoredEvent { event, committed_at: get(row, 10)? })
}
