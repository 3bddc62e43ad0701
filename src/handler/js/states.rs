//! The whole states of a batch's entities, put together on the server from what handler processes tell.

use super::held::Drafts;
use crate::core::patch::{Draft, PatchError};
use crate::core::{Change, Json, LoadedEntity, Outcome, State};

/// The states as they are after the outcomes that were followed.
pub struct States(Vec<Followed>);

/// One state: none, a text, a document that patches were applied to, or both where they are the same.
#[derive(Default)]
struct Followed {
    text: Option<Json>,
    draft: Option<Draft>,
    /// How many bytes the text takes, as it was told with the last patch.
    len: usize,
}

impl States {
    /// Starts from what the entities are before the batch.
    pub fn new(entities: &[LoadedEntity]) -> States {
        let text = |entity: &LoadedEntity| entity.state.as_ref().and_then(State::text).cloned();
        States(entities.iter().map(|entity| Followed { text: text(entity), ..Followed::default() }).collect())
    }

    /// Follows one outcome; documents are taken from `drafts` where they were read already.
    pub fn follow(&mut self, entity: usize, outcome: &Outcome, drafts: impl FnOnce(&Json) -> Option<Draft>) -> Result<(), PatchError> {
        let Outcome::Accepted { state, .. } = outcome else { return Ok(()) };
        let followed = &mut self.0[entity];
        match state {
            Change::Whole(text) => *followed = Followed { text: Some(text.clone()), ..Followed::default() },
            Change::Patch { patch, len } => {
                let mut draft = match (followed.draft.take(), &followed.text) {
                    (Some(draft), _) => draft,
                    (None, None) => Draft::new(&Json::empty_object())?,
                    (None, Some(text)) => drafts(text).map_or_else(|| Draft::new(text), Ok)?,
                };
                draft.apply(patch)?;
                *followed = Followed { text: None, draft: Some(draft), len: *len };
            }
        }
        Ok(())
    }

    /// The whole texts.
    pub fn texts(&mut self) -> Result<Vec<Option<Json>>, PatchError> {
        self.0.iter_mut().map(Followed::text).collect()
    }

    /// Leaves the documents that it made for who goes on from their texts.
    pub fn leave(self, drafts: &mut Drafts, bytes_max: usize) {
        for Followed { text, draft, .. } in self.0 {
            if let (Some(text), Some(draft)) = (text, draft) {
                drafts.keep(text, draft, bytes_max);
            }
        }
    }
}

impl Followed {
    fn text(&mut self) -> Result<Option<Json>, PatchError> {
        if let (None, Some(draft)) = (&self.text, &self.draft) {
            let text = draft.text()?;
            if text.len() != self.len {
                return Err(PatchError::length(self.len, text.len()));
            }
            self.text = Some(text);
        }
        Ok(self.text.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::EntityId;

    fn accepted(state: Change) -> Outcome {
        Outcome::Accepted { response: Json::null(), state }
    }

    #[test]
    fn changes_are_followed_and_their_documents_left_for_the_next_batch() {
        let start = Json::trusted(r#"{"a":1}"#);
        let mut drafts = Drafts::default();
        let mut states = States::new(&[LoadedEntity { id: EntityId::trusted("e"), version: 1, state: Some(start.into()) }]);
        for (patch, len) in [(r#"[{"op":"add","path":"/b","value":2}]"#, 13), (r#"[{"op":"remove","path":"/a"}]"#, 7)] {
            states.follow(0, &accepted(Change::Patch { patch: Json::trusted(patch), len }), |text| drafts.take(text)).unwrap();
        }
        states.follow(0, &Outcome::Rejected { rejection: Json::null() }, |_| None).unwrap();
        let text = states.texts().unwrap().remove(0).unwrap();
        assert_eq!(text.as_str(), r#"{"b":2}"#);
        states.leave(&mut drafts, 100);

        let mut states = States::new(&[LoadedEntity { id: EntityId::trusted("e"), version: 3, state: Some(text.into()) }]);
        let patch = Json::trusted(r#"[{"op":"replace","path":"/b","value":33}]"#);
        let mut was_kept = false;
        let take = |text: &Json| drafts.take(text).inspect(|_| was_kept = true);
        states.follow(0, &accepted(Change::Patch { patch, len: 8 }), take).unwrap();
        assert_eq!(states.texts().unwrap()[0].as_ref().map(Json::as_str), Some(r#"{"b":33}"#));
        assert!(was_kept);
        states.follow(0, &accepted(Json::trusted("[]").into()), |_| None).unwrap();
        assert_eq!(states.texts().unwrap()[0].as_ref().map(Json::as_str), Some("[]"));
    }

    #[test]
    fn a_wrong_length_is_found_out() {
        let mut states = States::new(&[LoadedEntity { id: EntityId::trusted("e"), version: 1, state: Some(Json::trusted("{}").into()) }]);
        states.follow(0, &accepted(Change::Patch { patch: Json::trusted("[]"), len: 3 }), |_| None).unwrap();
        assert!(states.texts().is_err());
    }
}
