//! What a node remembers: the newest states of entities, and recent answers by command id. Both only spare reads: a
//! state that is out of date is found out by the database's keys, and an answer never changes.

use crate::core::{Answer, CommandId, EntityId, EntityType, Json, Partition, Version};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use std::sync::Arc;

/// What a table entry takes besides its documents, about.
const ENTRY_OVERHEAD: u64 = 160;
/// Entries that the tables are laid out for at first; they grow.
const ENTRIES_EXPECTED: usize = 10_000;

type StateKey = (EntityType, EntityId);
type AnswerKey = (EntityType, EntityId, CommandId);

/// An entity's newest state, as this node last saw it.
#[derive(Debug, Clone)]
pub(super) struct CachedState {
    pub version: Version,
    pub state: Option<Json>,
    /// Whether this node's own commit came after it, so that it is known to be durable.
    pub is_durable: bool,
}

#[derive(Clone)]
struct Weigh;

impl Weighter<StateKey, CachedState> for Weigh {
    fn weight(&self, _: &StateKey, cached: &CachedState) -> u64 {
        ENTRY_OVERHEAD + cached.state.as_ref().map_or(0, Json::len) as u64
    }
}

impl Weighter<AnswerKey, Arc<Answer>> for Weigh {
    fn weight(&self, _: &AnswerKey, answer: &Arc<Answer>) -> u64 {
        ENTRY_OVERHEAD + answer.weight() as u64
    }
}

/// Both memories, bounded by bytes.
pub(super) struct Caches {
    states: Cache<StateKey, CachedState, Weigh>,
    answers: Cache<AnswerKey, Arc<Answer>, Weigh>,
}

impl Caches {
    pub fn new(bytes_max: u64) -> Caches {
        Caches { states: Cache::with_weighter(ENTRIES_EXPECTED, bytes_max, Weigh), answers: Cache::with_weighter(ENTRIES_EXPECTED, bytes_max, Weigh) }
    }

    pub fn state(&self, partition: &Partition, id: &EntityId) -> Option<CachedState> {
        self.states.get(&(partition.entity_type.clone(), id.clone()))
    }

    pub fn keep_state(&self, partition: &Partition, id: &EntityId, cached: CachedState) {
        self.states.insert((partition.entity_type.clone(), id.clone()), cached);
    }

    /// Whether this version of the entity is known to be durable.
    pub fn is_durable(&self, entity_type: &EntityType, id: &EntityId, version: Version) -> bool {
        let cached = self.states.get(&(entity_type.clone(), id.clone()));
        cached.is_some_and(|cached| cached.is_durable && cached.version >= version)
    }

    pub fn forget_state(&self, partition: &Partition, id: &EntityId) {
        self.states.remove(&(partition.entity_type.clone(), id.clone()));
    }

    pub fn answer(&self, partition: &Partition, id: &EntityId, command_id: &CommandId) -> Option<Arc<Answer>> {
        self.answers.get(&(partition.entity_type.clone(), id.clone(), command_id.clone()))
    }

    /// Keeps an answer that is durable.
    pub fn keep_answer(&self, answer: &Arc<Answer>) {
        let key = (answer.position.partition.entity_type.clone(), answer.entity_id.clone(), answer.command_id.clone());
        self.answers.insert(key, answer.clone());
    }

    /// Drops what is remembered of some entities.
    pub fn forget(&self, is_lost: impl Fn(&EntityId) -> bool) {
        self.states.retain(|(_, entity_id), _| !is_lost(entity_id));
        self.answers.retain(|(_, entity_id, _), _| !is_lost(entity_id));
    }
}
