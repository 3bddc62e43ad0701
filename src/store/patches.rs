//! Rows whose state is told as a change: reading them back as whole states.
//!
//! The rows of an entity between two whole ones hold patches, each from the version before. A state is put together from the closest whole one
//! below, so reading one version reads at most the rows of one batch.

use super::StoreError;
use crate::core::patch::Draft;
use crate::core::{EntityId, Json, StatePatch, StoredEvent, Version};

/// What a row says of the state after it.
pub(super) struct StoredState {
    pub version: Version,
    pub state: Option<Json>,
    pub patch: Option<StatePatch>,
}

impl StoredState {
    /// From the columns `version`, `state` and `state_base`. A base with no patch is corrupt: it would pass for an entity that does not exist.
    pub fn new(version: Version, state: Option<Json>, base: Option<Version>) -> Result<StoredState, StoreError> {
        match (base, state) {
            (Some(base), Some(patch)) => Ok(StoredState { version, state: None, patch: Some(StatePatch { base, patch }) }),
            (Some(_), None) => Err(StoreError::unreadable("state")),
            (None, state) => Ok(StoredState { version, state, patch: None }),
        }
    }
}

/// Which versions must be read besides, so that the states of these events of one entity, whose versions follow one another, can be put together:
/// from the first to the last, both included; none where all is there.
pub(super) fn missing(events: &[StoredEvent]) -> Option<(Version, Version)> {
    let lowest = events.iter().map(|stored| &stored.event).min_by_key(|event| event.version)?;
    lowest.patch.as_ref().map(|patch| (patch.base, lowest.version.saturating_sub(1)))
}

/// Puts whole states in the place of patches. `before` are the rows that [`missing`] asked for, in ascending order.
pub(super) fn resolve(events: &mut [StoredEvent], before: Vec<StoredState>) -> Result<(), StoreError> {
    if events.iter().all(|stored| stored.event.patch.is_none()) {
        return Ok(());
    }
    let mut folded = Folded::default();
    for row in before {
        folded.follow(row.version, row.state.as_ref(), row.patch.as_ref()).map_err(|reason| corrupt(events, row.version, &reason))?;
    }
    let mut order: Vec<usize> = (0..events.len()).collect();
    order.sort_unstable_by_key(|at| events[*at].event.version);
    for at in order {
        let event = &events[at].event;
        let version = event.version;
        folded.follow(version, event.state.as_ref(), event.patch.as_ref()).map_err(|reason| corrupt(events, version, &reason))?;
        if events[at].event.patch.is_some() {
            let text = folded.text().map_err(|reason| corrupt(events, version, &reason))?;
            let event = &mut events[at].event;
            (event.state, event.patch) = (Some(text), None);
        }
    }
    Ok(())
}

/// Splits a page of a partition into the events of each entity, in the order of their versions, together with the places they had. A page holds
/// what is next to each other in the log, so the versions of each entity follow one another.
pub(super) fn by_entity(events: Vec<StoredEvent>) -> Vec<(Vec<usize>, Vec<StoredEvent>)> {
    let mut groups: Vec<(Vec<usize>, Vec<StoredEvent>)> = Vec::new();
    let mut known = std::collections::HashMap::new();
    for (place, stored) in events.into_iter().enumerate() {
        let group = *known.entry(stored.event.entity_id.clone()).or_insert_with(|| {
            groups.push(Default::default());
            groups.len() - 1
        });
        groups[group].0.push(place);
        groups[group].1.push(stored);
    }
    groups
}

/// Undoes [`by_entity`].
pub(super) fn in_place(groups: Vec<(Vec<usize>, Vec<StoredEvent>)>) -> Vec<StoredEvent> {
    let mut placed: Vec<(usize, StoredEvent)> = groups.into_iter().flat_map(|(places, events)| places.into_iter().zip(events)).collect();
    placed.sort_unstable_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, stored)| stored).collect()
}

fn corrupt(events: &[StoredEvent], version: Version, reason: &str) -> StoreError {
    let id = events.first().map_or("", |stored: &StoredEvent| EntityId::as_str(&stored.event.entity_id));
    StoreError::Corrupt(format!("the state of {id} at version {version}: {reason}"))
}

/// The state as it is after the rows that were followed.
#[derive(Default)]
struct Folded {
    version: Version,
    whole: Option<Json>,
    /// Made from `whole` where the first patch comes.
    draft: Option<Draft>,
}

impl Folded {
    fn follow(&mut self, version: Version, state: Option<&Json>, patch: Option<&StatePatch>) -> Result<(), String> {
        let follows = version == self.version + 1;
        self.version = version;
        let Some(StatePatch { patch, .. }) = patch else {
            (self.whole, self.draft) = (state.cloned(), None);
            return Ok(());
        };
        if !follows {
            return Err("a row before it is missing".into());
        }
        let draft = match self.draft.take() {
            Some(draft) => draft,
            None => Draft::new(self.whole.as_ref().ok_or("no row before it holds a whole state")?).map_err(|error| error.to_string())?,
        };
        self.draft.insert(draft).apply(patch).map_err(|error| error.to_string())
    }

    fn text(&self) -> Result<Json, String> {
        match (&self.draft, &self.whole) {
            (Some(draft), _) => draft.text().map_err(|error| error.to_string()),
            (None, Some(whole)) => Ok(whole.clone()),
            (None, None) => Err("no row before it holds a whole state".into()),
        }
    }
}
