//! Rows read into events, and the columns that this takes.

use crate::core::{CommandId, CommandName, EntityId, Event, EventOutcome, HandlerVersion, Json, StoredEvent};
use crate::store::error::{StoreError, sqlite_read_error};
use rusqlite::Row;
use rusqlite::types::FromSql;

/// All columns of an event; the table follows.
pub(super) const SELECT_WHOLE: &str = "SELECT event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, \
    handled_at, committed_at, state";
/// The same with no state.
pub(super) const SELECT_WITHOUT_STATE: &str = "SELECT event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, \
    handled_at, committed_at, NULL";

/// A number that can only be positive.
pub(super) fn integer(value: i64, column: &str) -> Result<u64, StoreError> {
    u64::try_from(value).map_err(|_| StoreError::unreadable(column))
}

/// Reads a row of [`SELECT_WHOLE`] or [`SELECT_WITHOUT_STATE`].
pub(super) fn event(row: &Row) -> Result<StoredEvent, StoreError> {
    fn get<T: FromSql>(row: &Row, at: usize) -> Result<T, StoreError> {
        row.get(at).map_err(|error| match error {
            rusqlite::Error::InvalidColumnType(_, column, _) => StoreError::unreadable(&column),
            error => sqlite_read_error(&error),
        })
    }
    let text = |at| get::<String>(row, at);
    let outcome = match text(5)?.as_str() {
        "accepted" => EventOutcome::Accepted,
        "rejected" => EventOutcome::Rejected,
        _ => return Err(StoreError::unreadable("outcome")),
    };
    let event = Event {
        event_id: integer(get(row, 0)?, "event_id")?,
        entity_id: EntityId::trusted(&text(1)?),
        version: integer(get(row, 2)?, "version")?,
        command_id: CommandId::trusted(&text(3)?),
        command: CommandName::trusted(&text(4)?),
        outcome,
        handler_version: HandlerVersion(text(6)?.into()),
        request: get::<Option<String>>(row, 7)?.map_or_else(Json::null, Json::trusted),
        response: Json::trusted(text(8)?),
        patch: None,
        handled_at: get(row, 9)?,
        state: get::<Option<String>>(row, 11)?.map(Json::trusted),
    };
    Ok(StoredEvent { event, committed_at: get(row, 10)? })
}
