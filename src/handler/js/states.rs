//! The whole states of a batch's entities, put together on the server from what handler processes tell.

use crate::core::patch::{Draft, PatchError};
use crate::core::{Change, Json, LoadedEntity, Outcome, State};

/// The states as they are after the outcomes that were followed.
pub struct States(Vec<Followed>);

enum Followed {
    Text(Option<Json>),
    Draft { draft: Draft, len: usize },
}

impl States {
    /// Starts from what the entities are before the batch.
    pub fn new(entities: &[LoadedEntity]) -> States {
        States(entities.iter().map(|entity| Followed::Text(entity.state.as_ref().and_then(State::text).cloned())).collect())
    }

    /// Follows one outcome.
    pub fn follow(&mut self, entity: usize, outcome: &Outcome) -> Result<(), PatchError> {
        let Outcome::Accepted { state, .. } = outcome else { return Ok(()) };
        let followed = &mut self.0[entity];
        match (state, followed) {
            (Change::Whole(text), followed) => *followed = Followed::Text(Some(text.clone())),
            (Change::Patch { patch, len: after }, Followed::Draft { draft, len }) => {
                draft.apply(patch)?;
                *len = *after;
            }
            (Change::Patch { patch, len }, followed @ Followed::Text(_)) => {
                let before = if let Followed::Text(Some(text)) = followed { text.clone() } else { Json::empty_object() };
                let mut draft = Draft::new(&before)?;
                draft.apply(patch)?;
                *followed = Followed::Draft { draft, len: *len };
            }
        }
        Ok(())
    }

    /// The whole texts.
    pub fn texts(&mut self) -> Result<Vec<Option<Json>>, PatchError> {
        self.0.iter_mut().map(Followed::text).collect()
    }
}

impl Followed {
    fn text(&mut self) -> Result<Option<Json>, PatchError> {
        if let Followed::Draft { draft, len } = self {
            let text = draft.text()?;
            if text.len() != *len {
                return Err(PatchError::length(*len, text.len()));
            }
            *self = Followed::Text(Some(text));
        }
        match self {
            Followed::Text(text) => Ok(text.clone()),
            Followed::Draft { .. } => Ok(None),
        }
    }
}
