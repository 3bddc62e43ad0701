//! The router: hands each command to the worker of its partition, here or on the node that owns it.
//!
//! Which way a command goes is a matter of speed; every way leads to the same keys. What a way has to keep is the order of what one client sends: so
//! the way of a shard changes only when all that went the old way is answered, and what comes meanwhile waits for that. It waits for the answers, not for
//! those who asked to read them: a client that reads nothing holds up nobody else.

use super::link::client::{Handled, Shared, Waiting};
use super::link::{Link, Sent};
use crate::core::{Answer, CommandId, EntityType, Member, NodeId, ShardId, ShardMap};
use crate::metrics::Fallback;
use crate::partition::{self, Command, CommandError, EntityKey, Kept, Partitions, WhenFull};
use arc_swap::ArcSwap;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::Instant;

/// Where the commands of a shard go.
type Way = Option<NodeId>;

/// Who asked for a command, as far as its way depends on that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker<'a> {
    /// A client.
    Client {
        /// The W3C trace of its request.
        trace_id: Option<&'a str>,
    },
    /// Another node, which passed it on: it is handled here, whatever the map says.
    Node,
}

/// Hands commands on; shared by all requests of a node.
pub struct Router {
    own: NodeId,
    shared: Arc<Shared>,
    /// By shard. None where there are no other nodes.
    ways: Option<Box<[Arc<RwLock<Way>>]>>,
    /// By shard, the link to its owner; none where this node handles it.
    routes: ArcSwap<Vec<Option<Arc<Link>>>>,
    links: Mutex<BTreeMap<NodeId, Arc<Link>>>,
}

/// A command that has its place in a queue, here or at its owner. Its shard's way stays as it is until it is answered.
pub struct Pending(Place);

enum Place {
    Here(partition::Pending),
    There(Waiting),
}

impl Pending {
    /// Waits for the answer.
    pub async fn answer(self) -> Handled {
        match self.0 {
            Place::Here(pending) => Handled { result: pending.answer().await, by: None },
            Place::There(waiting) => waiting.answer().await,
        }
    }
}

impl Router {
    /// A node that handles everything itself.
    pub fn alone(own: NodeId, shared: Arc<Shared>) -> Router {
        Router { own, shared, ways: None, routes: ArcSwap::default(), links: Mutex::default() }
    }

    /// A node among others; nobody owns anything yet.
    pub fn among_others(own: NodeId, shared: Arc<Shared>) -> Router {
        let shards = shared.partitions.store().shards().get();
        let ways = (0..shards).map(|_| Arc::new(RwLock::new(None))).collect();
        Router { ways: Some(ways), ..Router::alone(own, shared) }
    }

    /// Follows a map from now on.
    pub fn follow(&self, map: &ShardMap) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let others: BTreeMap<&NodeId, &Member> = map.members.iter().filter(|member| member.id != self.own).map(|member| (&member.id, member)).collect();
        links.retain(|id, link| others.get(id).is_some_and(|member| *member == link.owner()));
        for (id, member) in others {
            links.entry(id.clone()).or_insert_with(|| Arc::new(Link::start(member.clone(), self.shared.clone())));
        }
        let link = |shard: usize| map.owner(ShardId(shard as u16)).and_then(|owner| links.get(&owner.id)).cloned();
        let routes: Vec<Option<Arc<Link>>> = (0..map.owners.len()).map(link).collect();
        let before = self.routes.swap(Arc::new(routes.clone()));
        drop(links);
        let is_lost = |shard: ShardId| {
            let route = |routes: &[Option<Arc<Link>>]| routes.get(usize::from(shard.0)).is_some_and(Option::is_some);
            route(&routes) && !route(&before)
        };
        self.shared.partitions.forget(is_lost);
    }

    /// The queues of this node.
    pub fn partitions(&self) -> &Partitions {
        &self.shared.partitions
    }

    /// Takes a place in the queue of the entity's partition, here or at its owner. Commands of one entity are run in the order in which this returns.
    pub async fn submit(&self, entity_type: &EntityType, command: Command, when_full: WhenFull, asker: Asker<'_>) -> Result<Pending, CommandError> {
        let partitions = &self.shared.partitions;
        let timeout = partitions.timeout();
        let (Some(ways), Asker::Client { trace_id }) = (&self.ways, asker) else {
            let pending = partitions.submit(entity_type, command, when_full).await?;
            return Ok(Pending(Place::Here(pending)));
        };
        let shard = usize::from(partitions.store().shards().shard_of(&command.entity_id).0);
        let deadline = Instant::now() + timeout;
        let left = || deadline.saturating_duration_since(Instant::now());
        let (link, way) = self.way(&ways[shard], shard, deadline).await?;
        let kept: Kept = Some(Box::new(way));
        let Some(link) = link else {
            let pending = partitions.submit_within(entity_type, command, when_full, left(), kept).await?;
            return Ok(Pending(Place::Here(pending)));
        };
        Ok(Pending(match link.send(entity_type, command, when_full, left(), trace_id, kept).await? {
            Sent::Passed(waiting) => Place::There(waiting),
            Sent::Back { command, kept } => {
                self.shared.metrics.fell_back(Fallback::Unreachable);
                Place::Here(partitions.submit_within(entity_type, command, when_full, left(), kept).await?)
            }
        }))
    }

    /// The way that a command of the shard takes now; none for here.
    async fn way(&self, lock: &Arc<RwLock<Way>>, shard: usize, deadline: Instant) -> Result<(Option<Arc<Link>>, OwnedRwLockReadGuard<Way>), CommandError> {
        let find = async {
            let link = match self.routes.load().get(shard).cloned().flatten() {
                Some(link) if link.is_usable().await => Some(link),
                Some(_) => {
                    self.shared.metrics.fell_back(Fallback::Unreachable);
                    None
                }
                None => None,
            };
            let wanted = link.as_ref().map(|link| &link.owner().id);
            let way = lock.clone().read_owned().await;
            if way.as_ref() == wanted {
                return (link, way);
            }
            drop(way);
            // Comes after all that went the old way, and before all that comes later.
            let mut way = lock.clone().write_owned().await;
            *way = wanted.cloned();
            (link, OwnedRwLockWriteGuard::downgrade(way))
        };
        tokio::time::timeout_at(deadline, find).await.map_err(|_| CommandError::Overloaded { retry_after: Duration::from_secs(1) })
    }

    /// What a command was answered, after all that was queued before on the node that owns the entity; none where it never happened.
    pub async fn look_up(&self, entity: &EntityKey, command_id: &CommandId, asker: Asker<'_>) -> Result<Option<Arc<Answer>>, CommandError> {
        let partitions = &self.shared.partitions;
        let shard = usize::from(partitions.store().shards().shard_of(&entity.entity_id).0);
        let route = match asker {
            Asker::Client { .. } => self.routes.load().get(shard).cloned().flatten(),
            Asker::Node => None,
        };
        if let Some(link) = route
            && let Some(Ok(found)) = link.look_up(entity, command_id, partitions.timeout()).await
        {
            return Ok(found);
        }
        // The owner cannot say; the database can.
        partitions.look_up(entity, command_id).await
    }

    /// Closes the links; what is on its way is still answered.
    pub fn close(&self) {
        self.routes.store(Arc::default());
        self.links.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
