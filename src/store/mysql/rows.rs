//! Rows as the text protocol brings them, read into events.

use crate::core::{CommandId, CommandName, EntityId, Event, EventOutcome, HandlerVersion, Json, StoredEvent, Version};
use crate::store::error::StoreError;
use crate::store::patches::StoredState;
use bytestring::ByteString;
use mysql_async::{Row, Value};
use std::str::FromStr;

/// The cells of a row, taken from left to right.
pub(super) struct Cells(std::vec::IntoIter<Value>);

impl Cells {
    pub(super) fn new(row: Row) -> Cells {
        Cells(row.unwrap().into_iter())
    }

    /// The next cell, as a text; none where it is NULL.
    pub(super) fn text_or_null(&mut self, column: &str) -> Result<Option<ByteString>, StoreError> {
        match self.0.next() {
            Some(Value::NULL) => Ok(None),
            Some(Value::Bytes(bytes)) => ByteString::try_from(bytes).map(Some).map_err(|_| StoreError::unreadable(column)),
            _ => Err(StoreError::unreadable(column)),
        }
    }

    /// The next cell, as a text.
    pub(super) fn text(&mut self, column: &str) -> Result<ByteString, StoreError> {
        self.text_or_null(column)?.ok_or_else(|| StoreError::unreadable(column))
    }

    /// The next cell, as an integer.
    pub(super) fn number<T: FromStr>(&mut self, column: &str) -> Result<T, StoreError> {
        self.text(column)?.parse().map_err(|_| StoreError::unreadable(column))
    }

    /// The next cell, as bytes.
    pub(super) fn bytes(&mut self, column: &str) -> Result<Vec<u8>, StoreError> {
        match self.0.next() {
            Some(Value::Bytes(bytes)) => Ok(bytes),
            _ => Err(StoreError::unreadable(column)),
        }
    }

    fn state_of(&mut self, version: Version) -> Result<StoredState, StoreError> {
        let state = self.text_or_null("state")?.map(Json::trusted);
        let base = self.text_or_null("state_base")?.map(|base| base.parse().map_err(|_| StoreError::unreadable("state_base"))).transpose()?;
        StoredState::new(version, state, base)
    }

    /// What a row says of its state: a row of `statement::states`.
    pub(super) fn state(mut self) -> Result<StoredState, StoreError> {
        let version = self.number("version")?;
        self.state_of(version)
    }

    /// A whole event.
    pub(super) fn event(mut self) -> Result<StoredEvent, StoreError> {
        let event_id = self.number("event_id")?;
        let entity_id = EntityId::trusted(&self.text("entity_id")?);
        let version = self.number("version")?;
        let command_id = CommandId::trusted(&self.text("command_id")?);
        let command = CommandName::trusted(&self.text("command_name")?);
        let outcome = match &*self.text("outcome")? {
            "accepted" => EventOutcome::Accepted,
            "rejected" => EventOutcome::Rejected,
            _ => return Err(StoreError::unreadable("outcome")),
        };
        let handler_version = HandlerVersion((&*self.text("handler_version")?).into());
        let request = self.text_or_null("request")?.map_or_else(Json::null, Json::trusted);
        let response = Json::trusted(self.text("response")?);
        let handled_at = self.number("handled_at")?;
        let committed_at = self.number("committed_at")?;
        let StoredState { state, patch, .. } = self.state_of(version)?;
        let event = Event { event_id, entity_id, version, command_id, command, outcome, handler_version, request, response, state, patch, handled_at };
        Ok(StoredEvent { event, committed_at })
    }
}
