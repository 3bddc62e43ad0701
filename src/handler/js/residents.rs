//! The large states that a realm keeps between commands, and between batches, as objects of its engine.

use crate::core::EntityId;
use rquickjs::{Object, Persistent};

/// The most states in a realm.
pub const COUNT_MAX: usize = 32;
/// How much memory the objects of a state take at most, in times of its text, with what else a command needs.
const OBJECTS_PER_TEXT: usize = 24;

/// The most bytes of text that the states in a realm take together.
pub fn bytes_max(memory_limit: usize) -> usize {
    memory_limit / OBJECTS_PER_TEXT
}

/// A state, as objects.
pub struct Resident {
    /// Whose.
    pub entity: EntityId,
    /// What the server calls this very state; none while a batch changes it.
    pub token: Option<u64>,
    /// How many bytes its text takes.
    pub len: usize,
    /// Whether it is known to keep the state schema: a stored one may be older than the schema.
    pub is_valid: bool,
    /// Whether it is the only place in the process that knows the state.
    pub is_only_copy: bool,
    /// The state.
    pub root: Persistent<Object<'static>>,
}

/// The states in a realm, the one that was used last at the end.
#[derive(Default)]
pub struct Residents(Vec<Resident>);

impl Residents {
    /// An entity's state, which counts as used.
    pub fn get(&mut self, entity: &EntityId) -> Option<&mut Resident> {
        let at = self.0.iter().position(|resident| resident.entity == *entity)?;
        let resident = self.0.remove(at);
        self.0.push(resident);
        self.0.last_mut()
    }

    /// Keeps a state in place of what was known of the entity.
    pub fn keep(&mut self, resident: Resident) {
        self.forget(&resident.entity);
        self.0.push(resident);
    }

    /// Forgets an entity.
    pub fn forget(&mut self, entity: &EntityId) {
        self.0.retain(|resident| resident.entity != *entity);
    }

    /// Makes room for a text of so many bytes; false where there is none, since what is there is needed.
    pub fn make_room(&mut self, len: usize, bytes_max: usize) -> bool {
        while self.0.len() >= COUNT_MAX || self.bytes() + len > bytes_max {
            let Some(at) = self.0.iter().position(|resident| !resident.is_only_copy) else { return false };
            self.0.remove(at);
        }
        true
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Forgets what has no name, so that the server could not ask for it.
    pub fn forget_unnamed(&mut self) {
        self.0.retain(|resident| resident.token.is_some());
    }

    /// Whether there is any.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|resident| resident.len).sum()
    }
}
