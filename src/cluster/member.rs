//! A node's part in its cluster: it tells the leader that it is there, follows the map that it hears, and leads where it is elected.

use super::election::Leadership;
use super::heartbeat::{self, Heartbeat, NodeStatus, Refusal, Reply};
use super::leader::{Leader, Times};
use super::peer::Peer;
use super::router::Router;
use crate::core::{Member, ShardMap};
use crate::metrics::ClusterMetrics;
use crate::store::Store;
use arc_swap::ArcSwap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// How many times in a row the database must fail to answer before the node counts as being without it.
const FAILURES_MAX: u32 = 2;

/// What a node knows of its cluster.
#[derive(Debug, Clone)]
pub struct View {
    /// The map that it follows.
    pub map: Arc<ShardMap>,
    /// Who leads.
    pub leadership: Leadership,
    /// All nodes, as the leader saw them at `confirmed`.
    pub nodes: Vec<NodeStatus>,
    /// When a leader last confirmed the map; none where there is no leader to ask.
    pub confirmed: Option<Instant>,
}

/// What the parts of a node's membership share.
pub struct Membership {
    /// This node.
    pub own: Member,
    pub(super) instance: String,
    pub(super) heartbeat: Duration,
    pub(super) times: Times,
    pub(super) router: Arc<Router>,
    pub(super) peer: Peer,
    pub(super) metrics: ClusterMetrics,
    pub(super) view: ArcSwap<View>,
    /// This node's office, while it leads.
    pub(super) office: Mutex<Option<Leader>>,
    pub(super) is_storage_ready: watch::Sender<bool>,
    /// Cancelled once the node begins to leave.
    pub(super) leaving: CancellationToken,
    /// Wakes the one that sends heartbeats.
    pub(super) wake: Notify,
}

impl Membership {
    /// Follows a map where it is newer than the one before.
    fn follow(&self, map: &Arc<ShardMap>) {
        if !map.is_newer_than(&self.view.load().map) {
            return;
        }
        self.metrics.follow(map.epoch.0, map.owned_by(&self.own.id));
        self.router.follow(map);
        self.change(|view| view.map = map.clone());
    }

    pub(super) fn change(&self, change: impl Fn(&mut View)) {
        self.view.rcu(|view| {
            let mut view = View::clone(view);
            change(&mut view);
            view
        });
    }

    fn beat(&self) -> Heartbeat {
        Heartbeat {
            node: self.own.clone(),
            instance: self.instance.clone(),
            is_ready: *self.is_storage_ready.borrow(),
            is_leaving: self.leaving.is_cancelled(),
            map: self.view.load().map.clone(),
        }
    }

    /// Takes a heartbeat, where this node leads.
    pub fn hear(&self, beat: &Heartbeat) -> Result<Reply, Refusal> {
        let now = Instant::now();
        let mut office = self.office.lock().unwrap_or_else(PoisonError::into_inner);
        let leader = office.as_mut().ok_or(Refusal::NotLeading)?;
        leader.hear(beat, now)?;
        Ok(Reply { map: leader.map().clone(), nodes: leader.nodes(now) })
    }

    /// Takes or lays down the office as the election says.
    fn hold_office(&self, leadership: &Leadership) {
        let mut office = self.office.lock().unwrap_or_else(PoisonError::into_inner);
        match leadership {
            Leadership::Mine(term) if office.as_ref().is_some_and(|leader| leader.term() == *term) => {}
            Leadership::Mine(term) => {
                tracing::info!(term = term.0, "this node leads the cluster");
                *office = Some(Leader::new(*term, self.view.load().map.clone(), self.times, Instant::now()));
            }
            Leadership::Other(_) | Leadership::Unknown => {
                if office.take().is_some() {
                    tracing::info!("this node no longer leads the cluster");
                }
            }
        }
        self.metrics.lead(office.is_some());
    }

    /// One heartbeat, to whoever leads.
    async fn tell(&self, leadership: &Leadership) -> Result<(), String> {
        let reply = match leadership {
            Leadership::Unknown => return Ok(()),
            Leadership::Mine(_) => self.hear(&self.beat()).map_err(|refusal| refusal.to_string())?,
            Leadership::Other(leader) => {
                let beat = self.beat();
                let asked = self.peer.post(&leader.url, heartbeat::PATH, &beat);
                let patience = self.times.silence_max / 2;
                tokio::time::timeout(patience, asked).await.map_err(|_| "no answer in time".to_owned())?.map_err(|error| error.to_string())?
            }
        };
        if reply.map.owners.len() == self.view.load().map.owners.len() {
            self.follow(&reply.map);
        }
        self.change(|view| {
            view.nodes.clone_from(&reply.nodes);
            view.confirmed = Some(Instant::now());
        });
        Ok(())
    }

    /// Sends heartbeats until `stop`.
    pub(super) async fn keep_telling(self: Arc<Self>, mut leadership: watch::Receiver<Leadership>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(self.heartbeat);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut was_refused: Option<String> = None;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.wake.notified() => {}
                changed = leadership.changed() => if changed.is_err() { return },
                () = stop.cancelled() => return,
            }
            let now = leadership.borrow_and_update().clone();
            self.hold_office(&now);
            self.change(|view| view.leadership = now.clone());
            let told = tokio::select! {
                told = self.tell(&now) => told,
                () = stop.cancelled() => return,
            };
            match told {
                Ok(()) if was_refused.take().is_some() => tracing::info!("the leader takes this node's heartbeats again"),
                Ok(()) => {}
                // Once, however long it lasts; another reason is told, too.
                Err(reason) if was_refused.as_ref() == Some(&reason) => {}
                Err(reason) => {
                    tracing::warn!(reason, "a heartbeat was not taken; traffic goes on by the last map");
                    was_refused = Some(reason);
                }
            }
            let age = self.view.load().confirmed.map(|confirmed| confirmed.elapsed());
            self.metrics.age(age.unwrap_or_default());
        }
    }

    /// Watches whether the database answers, until `stop`.
    pub(super) async fn watch_storage(self: Arc<Self>, store: Arc<dyn Store>, stop: CancellationToken) {
        let mut failures = 0;
        let patience = self.heartbeat.max(Duration::from_millis(500));
        while stop.run_until_cancelled(tokio::time::sleep(self.heartbeat)).await.is_some() {
            let answered = tokio::time::timeout(patience, store.ready()).await.is_ok_and(|answer| answer.is_ok());
            failures = if answered { 0 } else { failures + 1 };
            let is_ready = failures < FAILURES_MAX;
            if self.is_storage_ready.send_if_modified(|was_ready| std::mem::replace(was_ready, is_ready) != is_ready) {
                self.wake.notify_one();
            }
        }
    }

    /// Looks after the office, also when no heartbeat comes.
    pub(super) async fn keep_office(self: Arc<Self>, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(self.heartbeat / 4)).await.is_some() {
            let mut office = self.office.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(leader) = office.as_mut() {
                leader.judge(Instant::now());
            }
        }
    }
}
