//! What several tests of this module need: a store in memory, and handlers of one small entity type.

use crate::core::batch::{Call, Decision, Execute, HandlerFault, HandlerFaultKind, SchemaError};
use crate::core::{
    CommandId, CommandName, Creates, EntityId, EntityType, Event, Failure, HandlerVersion, Json, LogIdentity, Partition, ShardCount, ShardId, StoredEvent,
    Version, Work,
};
use crate::handler::{HandlerSet, Handlers, HandlersUnavailable, Ran};
use crate::store::{AppendError, Content, Lease, Listed, Order, Store, StoreError};
use async_trait::async_trait;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Events of one entity type, in the order of their ids; counts barriers.
pub struct Memory {
    identity: LogIdentity,
    pub events: Mutex<Vec<StoredEvent>>,
    pub barriers: AtomicUsize,
    pub largest_page: AtomicUsize,
    /// How many barriers still meet a crash that takes the newest event back.
    pub crashes: AtomicUsize,
    epoch: AtomicU64,
}

impl Memory {
    pub fn holding(events: Vec<StoredEvent>) -> Memory {
        let (barriers, largest_page, crashes, epoch) = Default::default();
        Memory { identity: LogIdentity::new([7; 32]), events: Mutex::new(events), barriers, largest_page, crashes, epoch }
    }

    fn of(&self, id: &EntityId) -> Vec<StoredEvent> {
        self.events.lock().unwrap().iter().filter(|stored| stored.event.entity_id == *id).cloned().collect()
    }
}

#[async_trait]
impl Store for Memory {
    fn identity(&self) -> &LogIdentity {
        &self.identity
    }

    fn shards(&self) -> ShardCount {
        ShardCount::new(1).unwrap()
    }

    fn append_bytes_max(&self) -> usize {
        1 << 20
    }

    async fn create_type(&self, _: &EntityType) -> Result<(), StoreError> {
        Ok(())
    }

    async fn head(&self, _: &Partition) -> Result<u64, StoreError> {
        Ok(self.events.lock().unwrap().len() as u64)
    }

    async fn append(&self, _: &Partition, appended: &[Event]) -> Result<(), AppendError> {
        let mut events = self.events.lock().unwrap();
        let is_taken = |new: &Event| events.iter().any(|stored| stored.event.event_id == new.event_id);
        if appended.iter().any(is_taken) {
            return Err(AppendError::PositionTaken);
        }
        events.extend(appended.iter().map(|event| StoredEvent { event: event.clone(), committed_at: 1_700_000_000_000_000 }));
        Ok(())
    }

    async fn append_all(&self, appends: &[(Partition, Vec<Event>)]) -> Result<(), AppendError> {
        match appends {
            [(partition, events)] => self.append(partition, events).await,
            _ => Err(AppendError::Refused("there is one partition here".into())),
        }
    }

    async fn newest(&self, _: &EntityType, ids: &[EntityId]) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        Ok(ids.iter().map(|id| self.of(id).pop()).collect())
    }

    async fn find(&self, _: &EntityType, commands: &[(EntityId, CommandId)]) -> Result<Vec<Option<StoredEvent>>, StoreError> {
        Ok(commands.iter().map(|(id, command_id)| self.of(id).into_iter().find(|stored| stored.event.command_id == *command_id)).collect())
    }

    async fn at_version(&self, _: &EntityType, id: &EntityId, version: Version) -> Result<Option<StoredEvent>, StoreError> {
        Ok(self.of(id).into_iter().find(|stored| stored.event.version == version))
    }

    async fn at_time(&self, _: &EntityType, id: &EntityId, time: i64) -> Result<Option<StoredEvent>, StoreError> {
        Ok(self.of(id).into_iter().rfind(|stored| stored.committed_at <= time))
    }

    async fn history(
        &self,
        _: &EntityType,
        id: &EntityId,
        order: Order,
        bound: Version,
        limit: usize,
        content: Content,
    ) -> Result<Vec<StoredEvent>, StoreError> {
        self.largest_page.fetch_max(limit, Ordering::Relaxed);
        let mut events = self.of(id);
        if content == Content::WithoutState {
            events.iter_mut().for_each(|stored| stored.event.state = None);
        }
        Ok(match order {
            Order::Ascending => events.into_iter().filter(|stored| stored.event.version > bound).take(limit).collect(),
            Order::Descending => events.into_iter().rev().filter(|stored| bound == 0 || stored.event.version < bound).take(limit).collect(),
        })
    }

    async fn list(&self, _: &EntityType, after: Option<&EntityId>, limit: usize) -> Result<Vec<Listed>, StoreError> {
        let mut ids: Vec<EntityId> = self.events.lock().unwrap().iter().map(|stored| stored.event.entity_id.clone()).collect();
        ids.sort();
        ids.dedup();
        let newest = ids.into_iter().filter(|id| after.is_none_or(|after| id > after)).filter_map(|id| self.of(&id).pop());
        let existing = newest.filter(|stored| stored.event.state.is_some());
        Ok(existing.map(|stored| Listed { entity_id: stored.event.entity_id, version: stored.event.version }).take(limit).collect())
    }

    async fn heads(&self, entity_types: &[EntityType]) -> Result<Vec<(Partition, u64)>, StoreError> {
        let head = self.events.lock().unwrap().len() as u64;
        Ok(entity_types
            .iter()
            .map(|entity_type| (Partition { entity_type: entity_type.clone(), shard: ShardId(0) }, head))
            .filter(|(_, head)| *head > 0)
            .collect())
    }

    async fn read(&self, _: &Partition, order: Order, bound: u64, limit: usize, _: usize) -> Result<Vec<StoredEvent>, StoreError> {
        let events = self.events.lock().unwrap().clone();
        Ok(match order {
            Order::Ascending => events.into_iter().filter(|stored| stored.event.event_id > bound).take(limit).collect(),
            Order::Descending => events.into_iter().rev().filter(|stored| bound == 0 || stored.event.event_id < bound).take(limit).collect(),
        })
    }

    async fn version_at(&self, _: &EntityType, id: &EntityId, event_id: u64) -> Result<Version, StoreError> {
        Ok(self.of(id).into_iter().rfind(|stored| stored.event.event_id <= event_id).map_or(0, |stored| stored.event.version))
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    async fn barrier(&self) -> Result<(), StoreError> {
        self.barriers.fetch_add(1, Ordering::Relaxed);
        if self.crashes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |crashes| crashes.checked_sub(1)).is_ok() {
            self.events.lock().unwrap().pop();
            self.epoch.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn lease(&self) -> Result<Option<Lease>, StoreError> {
        Ok(None)
    }

    async fn swap_lease(&self, _: Option<&Lease>, _: &Lease) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn ready(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn engine(&self) -> String {
        "memory".into()
    }
}

/// `account`: `open N` creates, `add N` adds and refuses to fall below zero, `break` fails.
struct Account {
    entity_type: EntityType,
    version: HandlerVersion,
    commands: BTreeMap<CommandName, Creates>,
}

struct Run<'a>(&'a Account);

impl Execute for Run<'_> {
    fn creates(&self, command: &CommandName) -> Option<Creates> {
        self.0.commands.get(command).copied()
    }

    fn execute(&mut self, call: Call<'_>) -> Result<Decision, Failure> {
        if call.command.as_str() == "break" {
            return Err(Failure::HandlerFailed(HandlerFault { kind: HandlerFaultKind::Exception, message: "SECRET".into() }));
        }
        let Ok(amount) = call.request.parse::<i64>() else {
            return Err(Failure::InvalidRequest(vec![SchemaError { pointer: String::new(), message: "it is not an integer".into() }]));
        };
        let sum = call.state.text().and_then(|state| state.parse::<i64>().ok()).unwrap_or(0) + amount;
        if sum < 0 {
            return Ok(Decision::Reject { rejection: Json::trusted(r#"{"code":"too_low","message":"the sum is too low"}"#) });
        }
        Ok(Decision::Accept { response: Json::trusted(format!("{{\"sum\":{sum}}}")), state: Json::trusted(sum.to_string()).into() })
    }
}

#[async_trait]
impl Handlers for Account {
    fn entity_type(&self) -> &EntityType {
        &self.entity_type
    }

    fn version(&self) -> &HandlerVersion {
        &self.version
    }

    fn commands(&self) -> &BTreeMap<CommandName, Creates> {
        &self.commands
    }

    fn entity_id_max(&self) -> usize {
        20
    }

    async fn run(&self, work: Work) -> Result<Ran, HandlersUnavailable> {
        Ok(Ran::whole(work, &mut Run(self)))
    }
}

pub fn handlers() -> HandlerSet {
    let entity_type = EntityType::trusted("account");
    let commands = [("open", Creates::Always), ("add", Creates::IfMissing), ("break", Creates::IfMissing), ("events", Creates::IfMissing)];
    let commands = commands.into_iter().map(|(name, creates)| (CommandName::trusted(name), creates)).collect();
    let handlers = Account { entity_type: entity_type.clone(), version: HandlerVersion("0".into()), commands };
    BTreeMap::from([(entity_type, Arc::new(handlers) as Arc<dyn Handlers>)])
}
