//! What the server knows of states that stay in handler processes, and what it keeps itself to follow their changes.
//!
//! A state is known by its text's very buffer: the server holds the text, so that no other text can ever be there. Neither a version nor
//! equal bytes are asked for. So a batch that is run again on another state, or on one read back, never meets what an earlier
//! run left; it only costs more.

use crate::core::patch::Draft;
use crate::core::{EntityId, Json};

/// The most documents in one memory.
const COUNT_MAX: usize = 32;

/// The states that a process keeps, the one that was used last at the end.
#[derive(Default)]
pub struct Held(Vec<HeldState>);

struct HeldState {
    module: usize,
    entity: EntityId,
    text: Json,
    name: u64,
}

impl Held {
    /// How the process calls this very text of an entity's state; none where it does not keep it.
    pub fn name(&self, module: usize, entity: &EntityId, text: &Json) -> Option<u64> {
        let is_it = |held: &&HeldState| held.module == module && held.entity == *entity && held.text.is_same_buffer(text);
        self.0.iter().find(is_it).map(|held| held.name)
    }

    /// Notes what the process keeps of an entity; at most `bytes_max` bytes of text are kept of a module.
    pub fn keep(&mut self, module: usize, entity: &EntityId, text: Json, name: u64, bytes_max: usize) {
        self.forget(module, entity);
        self.0.push(HeldState { module, entity: entity.clone(), text, name });
        let bytes = |held: &[HeldState]| held.iter().filter(|held| held.module == module).map(|held| held.text.len()).sum::<usize>();
        while self.0.len() > COUNT_MAX || bytes(&self.0) > bytes_max {
            let oldest = self.0.iter().position(|held| held.module == module).unwrap_or_default();
            self.0.remove(oldest);
        }
    }

    /// Notes that nothing is known of an entity.
    pub fn forget(&mut self, module: usize, entity: &EntityId) {
        self.0.retain(|held| held.module != module || held.entity != *entity);
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Documents that were read to apply patches to, with their texts, the one that was used last at the end.
#[derive(Default)]
pub struct Drafts(Vec<(Json, Draft)>);

impl Drafts {
    /// Takes the document of this very text.
    pub fn take(&mut self, text: &Json) -> Option<Draft> {
        let at = self.0.iter().position(|(known, _)| known.is_same_buffer(text))?;
        Some(self.0.remove(at).1)
    }

    /// Keeps a document with its text; at most `bytes_max` bytes of text are kept.
    pub fn keep(&mut self, text: Json, draft: Draft, bytes_max: usize) {
        self.0.push((text, draft));
        while self.0.len() > COUNT_MAX || self.0.iter().map(|(text, _)| text.len()).sum::<usize>() > bytes_max {
            self.0.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(length: usize) -> Json {
        Json::trusted(format!("\"{}\"", "x".repeat(length - 2)))
    }

    #[test]
    fn equal_texts_are_not_the_same_state() {
        let (one, other, alice) = (text(10), text(10), EntityId::trusted("alice"));
        let mut held = Held::default();
        held.keep(0, &alice, one.clone(), 7, 100);
        assert_eq!(held.name(0, &alice, &one.clone()), Some(7));
        assert_eq!([held.name(0, &alice, &other), held.name(1, &alice, &one), held.name(0, &EntityId::trusted("bob"), &one)], [None; 3]);
        let mut drafts = Drafts::default();
        drafts.keep(one.clone(), Draft::new(&one).unwrap(), 100);
        assert!(drafts.take(&other).is_none() && drafts.take(&one).is_some() && drafts.take(&one).is_none());
    }

    #[test]
    fn memories_are_bounded() {
        let texts: Vec<Json> = (0..4).map(|_| text(40)).collect();
        let id = |number: usize| EntityId::trusted(&format!("e-{number}"));
        let (mut held, mut drafts) = (Held::default(), Drafts::default());
        for (number, text) in texts.iter().enumerate() {
            held.keep(0, &id(number), text.clone(), number as u64, 100);
            drafts.keep(text.clone(), Draft::new(text).unwrap(), 100);
        }
        let names: Vec<Option<u64>> = texts.iter().enumerate().map(|(number, text)| held.name(0, &id(number), text)).collect();
        assert_eq!(names, [None, None, Some(2), Some(3)]);
        assert_eq!(texts.iter().map(|text| drafts.take(text).is_some()).collect::<Vec<_>>(), [false, false, true, true]);
        held.keep(0, &id(9), text(101), 9, 100);
        assert!(held.is_empty());
    }
}
