//! The cluster: which node owns which shard, and how requests get there.
//!
//! Ownership is a hint. It lets one node at a time gather the commands of an entity, so that they are run on a state in memory and committed
//! together; two owners, none, or the wrong one cost speed and nothing else, because only the database's keys decide who wins. So nothing here needs
//! a quorum, a fence or a clock: a node without a map handles all it is sent, and so does one that is told so by another node.
//!
//! - [`election`] finds a leader: through etcd, or through a lease in the database. Losing it stops no traffic.
//! - [`leader`] deals the shards out, [`member`] sends heartbeats and follows the map that each answer carries.
//! - [`router`] takes commands; [`link`] passes them on to their owner and takes them back where the owner does not answer.
//!
//! [`Cluster::start`] begins all of that, [`Cluster::leave`] ends it without disturbing anybody.

pub mod election;
pub mod heartbeat;
pub mod leader;
pub mod link;
pub mod member;
pub mod peer;
pub mod router;
#[cfg(test)]
mod router_tests;
mod status;
#[cfg(test)]
mod tests_support;

pub use heartbeat::{Heartbeat, NodeStatus, Refusal, Reply};
pub use router::{Asker, Pending, Router};
pub use status::{NodeEntry, Status};

use crate::core::{Member, NodeId, ShardMap};
use crate::metrics::{ClusterMetrics, ForwardMetrics};
use crate::partition::Partitions;
use arc_swap::ArcSwap;
use bytes::Bytes;
use election::{Election, Leadership};
use hyper::header::HeaderMap;
use leader::Times;
use link::client::Shared;
use member::{Membership, View};
use peer::Peer;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// After how many heartbeats without one a node counts as gone.
pub const HEARTBEATS_MISSED_MAX: u32 = 4;
/// For how many heartbeats a new leader only listens.
const HEARTBEATS_GATHERED: u32 = 1;
/// How long the leader is given to hear that this node leaves.
pub const FAREWELL: Duration = Duration::from_secs(1);

/// How nodes find each other.
pub enum Topology {
    /// There is only this one.
    Single,
    /// These, for ever, each with its URL. This node may or may not be among them.
    Static(BTreeMap<NodeId, String>),
    /// Those that the leader hears.
    Elected(Box<dyn Election>),
}

/// Settings of a node's part in its cluster.
#[derive(Debug, Clone)]
pub struct Options {
    /// This node, and the URL under which others reach it.
    pub own: Member,
    /// How often it says that it is there.
    pub heartbeat: Duration,
    /// How long another node may be silent before its commands are handled here.
    pub forward_timeout: Duration,
}

/// A node's part in its cluster; a clone shares it.
#[derive(Clone)]
pub struct Cluster(Arc<Inner>);

struct Inner {
    membership: Arc<Membership>,
    /// Cancelled to end all tasks.
    stop: CancellationToken,
    tasks: TaskTracker,
    /// Cancelled to end links from other nodes.
    closing: CancellationToken,
    /// Whether there is an election, and so a leader to be heard by.
    is_elected: bool,
}

impl Cluster {
    /// Begins to take part. The node must take requests by now, since others may send some at once.
    pub fn start(options: Options, topology: Topology, partitions: Partitions) -> Cluster {
        let Options { own, heartbeat, forward_timeout } = options;
        let (store, shards) = (partitions.store().clone(), partitions.store().shards());
        let peer = Peer::new(&own.id, store.identity());
        let shared = Arc::new(Shared { partitions, peer: peer.clone(), silence_max: forward_timeout, metrics: ForwardMetrics::new() });
        let is_single = matches!(topology, Topology::Single);
        let router = if is_single { Router::alone(own.id.clone(), shared) } else { Router::among_others(own.id.clone(), shared) };
        let map = match &topology {
            Topology::Single => leader::static_map(&[(own.id.clone(), own.url.clone())].into(), shards),
            Topology::Static(nodes) => leader::static_map(nodes, shards),
            Topology::Elected(_) => ShardMap::unowned(shards),
        };
        let metrics = ClusterMetrics::new();
        metrics.follow(map.epoch.0, map.owned_by(&own.id));
        if !is_single {
            router.follow(&map);
        }
        let membership = Arc::new(Membership {
            own,
            instance: xid::new().to_string(),
            heartbeat,
            times: Times { silence_max: heartbeat * HEARTBEATS_MISSED_MAX, gather: heartbeat * HEARTBEATS_GATHERED },
            router: Arc::new(router),
            peer,
            metrics,
            view: ArcSwap::from_pointee(View { map: Arc::new(map), leadership: Leadership::Unknown, nodes: Vec::new(), confirmed: None }),
            office: Mutex::default(),
            is_storage_ready: watch::Sender::new(true),
            leaving: CancellationToken::new(),
            wake: Notify::new(),
        });
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        if !is_single {
            tasks.spawn(membership.clone().watch_storage(store, stop.clone()));
        }
        let is_elected = matches!(topology, Topology::Elected(_));
        if let Topology::Elected(election) = topology {
            let (told, leadership) = watch::channel(Leadership::Unknown);
            tasks.spawn(membership.clone().keep_telling(leadership, stop.clone()));
            tasks.spawn(membership.clone().keep_office(stop.clone()));
            let stop = stop.clone();
            tasks.spawn(async move { election.take_part(told, stop).await });
        }
        Cluster(Arc::new(Inner { membership, stop, tasks, closing: CancellationToken::new(), is_elected }))
    }

    /// Hands commands on.
    pub fn router(&self) -> &Arc<Router> {
        &self.0.membership.router
    }

    /// Takes a heartbeat.
    pub fn hear(&self, beat: &Heartbeat) -> Result<Reply, Refusal> {
        self.0.membership.hear(beat)
    }

    /// Whether whoever sent these headers is a node on the same database.
    pub fn is_of_this_cluster(&self, headers: &HeaderMap) -> bool {
        self.0.membership.peer.is_of_this_cluster(headers)
    }

    /// Whether this node can take links now; one that cannot reach its database cannot.
    pub fn takes_links(&self) -> bool {
        *self.0.membership.is_storage_ready.borrow() && !self.0.closing.is_cancelled()
    }

    /// Serves a link from another node, until either end closes it.
    pub async fn serve_link(&self, chunks: mpsc::Receiver<Bytes>, answers: mpsc::Sender<Bytes>) {
        let inner = &self.0;
        let ready = inner.membership.is_storage_ready.subscribe();
        link::server::serve(inner.membership.router.partitions().clone(), chunks, answers, ready, inner.closing.clone()).await;
    }

    /// What operators see.
    pub fn status(&self) -> Status {
        let membership = &self.0.membership;
        let view = membership.view.load();
        let age = view.confirmed.map(|confirmed| confirmed.elapsed());
        let leader = match &view.leadership {
            Leadership::Mine(_) => Some(membership.own.id.clone()),
            Leadership::Other(leader) => Some(leader.id.clone()),
            Leadership::Unknown => None,
        };
        let milliseconds = |time: Duration| time.as_millis() as u64;
        // What the leader told has aged since.
        let heard = |status: &NodeStatus| status.last_heartbeat.map(|since| milliseconds(since + age.unwrap_or_default()));
        let mut nodes: Vec<NodeEntry> = view
            .nodes
            .iter()
            .map(|status| NodeEntry { id: status.id.clone(), url: status.url.clone(), shards: view.map.owned_by(&status.id), last_heartbeat_ms: heard(status) })
            .collect();
        for Member { id, url } in &view.map.members {
            if nodes.iter().all(|node| node.id != *id) {
                nodes.push(NodeEntry { id: id.clone(), url: url.clone(), shards: view.map.owned_by(id), last_heartbeat_ms: None });
            }
        }
        nodes.sort_by(|one, other| one.id.cmp(&other.id));
        let shards = (0..view.map.owners.len()).map(|shard| view.map.owner(crate::core::ShardId(shard as u16)).map(|owner| owner.id.clone())).collect();
        let map_age_ms = if self.0.is_elected { age.map(milliseconds) } else { Some(0) };
        Status { node: membership.own.id.clone(), leader, epoch: view.map.epoch.0, map_age_ms, nodes, shards }
    }

    /// Tells the leader that this node leaves, so that others take its shards while it finishes what it has. Takes a second at most.
    pub async fn say_farewell(&self) {
        let membership = &self.0.membership;
        membership.leaving.cancel();
        if !self.0.is_elected {
            return;
        }
        let owned = |view: &View| view.map.owned_by(&membership.own.id);
        membership.wake.notify_one();
        let _ = tokio::time::timeout(FAREWELL, async {
            // Alone there is nobody to take them.
            while owned(&membership.view.load()) > 0 && membership.view.load().map.members.len() > 1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    /// Takes no more commands from other nodes; those that were taken are still answered.
    pub fn close_links(&self) {
        self.0.closing.cancel();
    }

    /// Takes nothing more from other nodes, and lays down the office; what was taken is still answered. The queues must run until this returns.
    pub async fn leave(&self) {
        self.close_links();
        self.0.membership.router.close();
        self.0.stop.cancel();
        self.0.tasks.close();
        let _ = tokio::time::timeout(FAREWELL, self.0.tasks.wait()).await;
    }
}
