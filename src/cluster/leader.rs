//! The leader's one duty: to know which nodes are there and to deal the shards out to them.
//!
//! No clock, no network: callers tell what came and what time it is. A new leader knows nothing; it listens for a while, takes over the newest map
//! that a node reports, and only then deals anew, so that a change of leader by itself moves no shard. Nodes that fall silent, are leaving
//! or cannot reach the database lose their shards; where no node is fit, the map stays as it is. To be asked to judge several times in `silence_max`.

use super::heartbeat::{Heartbeat, NodeStatus, Refusal};
use crate::core::{Epoch, NodeId, ShardCount, ShardMap, Term};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How a leader judges.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// After how long a silent node loses its shards.
    pub silence_max: Duration,
    /// For how long a new leader only listens.
    pub gather: Duration,
}

/// What is known of a node.
#[derive(Debug, Clone)]
struct Known {
    url: String,
    instance: String,
    is_fit: bool,
    heard: Instant,
}

/// A node in office.
#[derive(Debug)]
pub struct Leader {
    term: Term,
    times: Times,
    map: Arc<ShardMap>,
    nodes: BTreeMap<NodeId, Known>,
    /// Until when it only listens.
    gathers_until: Option<Instant>,
    /// When it judged last.
    judged: Instant,
}

impl Leader {
    /// Takes office with the map that the node itself follows.
    pub fn new(term: Term, map: Arc<ShardMap>, times: Times, now: Instant) -> Leader {
        Leader { term, times, map, nodes: BTreeMap::new(), gathers_until: Some(now + times.gather), judged: now }
    }

    /// The term of office.
    pub fn term(&self) -> Term {
        self.term
    }

    /// The map in force.
    pub fn map(&self) -> &Arc<ShardMap> {
        &self.map
    }

    /// Takes a node's word. Refuses a second node of the same name, and one with another number of shards.
    pub fn hear(&mut self, beat: &Heartbeat, now: Instant) -> Result<(), Refusal> {
        if beat.map.owners.len() != self.map.owners.len() {
            return Err(Refusal::Shards);
        }
        if let Some(known) = self.nodes.get(&beat.node.id)
            && known.instance != beat.instance
            && known.url != beat.node.url
            && known.is_fit
            && now - known.heard < self.times.silence_max
        {
            return Err(Refusal::NameTaken { url: known.url.clone() });
        }
        if beat.map.is_newer_than(&self.map) {
            self.adopt(&beat.map);
        }
        let known = Known { url: beat.node.url.clone(), instance: beat.instance.clone(), is_fit: beat.is_ready && !beat.is_leaving, heard: now };
        self.nodes.insert(beat.node.id.clone(), known);
        self.judge(now);
        Ok(())
    }

    /// A newer map than its own: what a leader before it, or one that woke up late, has handed out.
    fn adopt(&mut self, reported: &ShardMap) {
        if self.gathers_until.is_some() {
            self.map = Arc::new(reported.clone());
        } else {
            // Its own is in force; it only has to come after the other one.
            let epoch = reported.epoch.next();
            self.map = Arc::new(ShardMap { epoch, term: self.term, ..(*self.map).clone() });
        }
    }

    /// Deals the shards anew where the nodes have changed. To be called now and then, also when nothing came.
    pub fn judge(&mut self, now: Instant) {
        if now - self.judged > self.times.silence_max / 2 {
            // This process stood still: it was deaf, and the others need not have been silent.
            self.nodes.values_mut().for_each(|known| known.heard = now);
        }
        self.judged = now;
        self.nodes.retain(|_, known| now - known.heard < self.times.silence_max);
        if let Some(until) = self.gathers_until {
            let are_all_here = !self.map.members.is_empty() && self.map.members.iter().all(|member| self.nodes.contains_key(&member.id));
            if now < until && !are_all_here {
                return;
            }
            self.gathers_until = None;
        }
        let fit: BTreeMap<NodeId, String> = self.nodes.iter().filter(|(_, known)| known.is_fit).map(|(id, known)| (id.clone(), known.url.clone())).collect();
        if fit.is_empty() {
            return;
        }
        let dealt = ShardMap::dealt(&self.map, &fit, self.map.epoch.next(), self.term);
        if (&dealt.members, &dealt.owners) != (&self.map.members, &self.map.owners) {
            tracing::info!(epoch = dealt.epoch.0, nodes = dealt.members.len(), "shards are dealt out anew");
            self.map = Arc::new(dealt);
        }
    }

    /// All nodes that are heard, and those that own shards, for people.
    pub fn nodes(&self, now: Instant) -> Vec<NodeStatus> {
        let heard = self.nodes.iter().map(|(id, known)| NodeStatus {
            id: id.clone(),
            url: known.url.clone(),
            shards: self.map.owned_by(id),
            last_heartbeat: Some(now - known.heard),
        });
        let silent = self.map.members.iter().filter(|member| !self.nodes.contains_key(&member.id)).map(|member| NodeStatus {
            id: member.id.clone(),
            url: member.url.clone(),
            shards: self.map.owned_by(&member.id),
            last_heartbeat: None,
        });
        let mut nodes: Vec<NodeStatus> = heard.chain(silent).collect();
        nodes.sort_by(|one, other| one.id.cmp(&other.id));
        nodes
    }
}

/// The map of a cluster whose nodes are written down: all nodes that read the same list make the same map.
pub fn static_map(nodes: &BTreeMap<NodeId, String>, shards: ShardCount) -> ShardMap {
    ShardMap::dealt(&ShardMap::unowned(shards), nodes, Epoch(1), Term(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Member;

    const TIMES: Times = Times { silence_max: Duration::from_secs(2), gather: Duration::from_secs(1) };

    fn shards() -> ShardCount {
        ShardCount::new(6).unwrap()
    }

    fn beat(name: &str, map: &ShardMap) -> Heartbeat {
        let node = Member { id: NodeId::new(name).unwrap(), url: format!("http://{name}") };
        Heartbeat { node, instance: format!("{name}1"), is_ready: true, is_leaving: false, map: Arc::new(map.clone()) }
    }

    fn new(term: u64, now: Instant) -> Leader {
        Leader::new(Term(term), Arc::new(ShardMap::unowned(shards())), TIMES, now)
    }

    fn owners(map: &ShardMap) -> String {
        (0..map.owners.len()).map(|shard| map.owner(crate::core::ShardId(shard as u16)).map_or("-", |owner| owner.id.as_str())).collect()
    }

    #[test]
    fn a_new_leader_listens_before_it_deals() {
        let start = Instant::now();
        let mut leader = new(1, start);
        let empty = ShardMap::unowned(shards());
        leader.hear(&beat("a", &empty), start).unwrap();
        leader.hear(&beat("b", &empty), start + Duration::from_millis(500)).unwrap();
        assert_eq!((owners(leader.map()).as_str(), leader.map().epoch), ("------", Epoch(0)));
        leader.judge(start + TIMES.gather);
        assert_eq!((owners(leader.map()).as_str(), leader.map().epoch, leader.map().term), ("ababab", Epoch(1), Term(1)));
    }

    #[test]
    fn a_change_of_leader_alone_moves_nothing() {
        let start = Instant::now();
        let nodes = ["a", "b", "c"].map(|name| (NodeId::new(name).unwrap(), format!("http://{name}"))).into();
        let map = ShardMap { epoch: Epoch(7), ..ShardMap::dealt(&ShardMap::unowned(shards()), &nodes, Epoch(7), Term(1)) };
        let mut leader = new(2, start);
        for (name, reported) in [("a", ShardMap::unowned(shards())), ("b", map.clone()), ("c", ShardMap { epoch: Epoch(6), ..map.clone() })] {
            leader.hear(&beat(name, &reported), start).unwrap();
        }
        // All that the map names are here: nothing to wait for, and nothing to change.
        assert_eq!(**leader.map(), map);
        leader.judge(start + TIMES.gather);
        assert_eq!(**leader.map(), map);
    }

    #[test]
    fn a_leader_that_stood_still_does_not_hold_it_against_the_others() {
        let start = Instant::now();
        let mut leader = new(1, start);
        for name in ["a", "b", "c"] {
            let map = leader.map().clone();
            leader.hear(&beat(name, &map), start).unwrap();
        }
        leader.judge(start + TIMES.gather);
        let map = leader.map().clone();
        leader.judge(start + 10 * TIMES.silence_max);
        assert_eq!(leader.map(), &map);
        // From then on, silence counts again.
        for quarter in 0..=4 {
            leader.hear(&beat("a", &map), start + 10 * TIMES.silence_max + quarter * TIMES.silence_max / 4).unwrap();
        }
        assert_eq!(owners(leader.map()), "aaaaaa");
    }

    #[test]
    fn silent_unready_and_leaving_nodes_lose_their_shards() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut leader = new(1, start);
        for name in ["a", "b", "c"] {
            let map = leader.map().clone();
            leader.hear(&beat(name, &map), start).unwrap();
        }
        leader.judge(at(1000));
        assert_eq!(owners(leader.map()), "abcabc");
        let map = leader.map().clone();
        leader.hear(&beat("a", &map), at(1500)).unwrap();
        leader.hear(&beat("b", &map), at(1500)).unwrap();
        leader.judge(at(1999));
        assert_eq!(owners(leader.map()), "abcabc");
        leader.judge(at(2000));
        assert_eq!((owners(leader.map()).as_str(), leader.map().epoch), ("abaabb", Epoch(2)));
        leader.hear(&Heartbeat { is_ready: false, ..beat("b", &map) }, at(2100)).unwrap();
        assert_eq!(owners(leader.map()), "aaaaaa");
        leader.hear(&beat("b", &map), at(2200)).unwrap();
        leader.hear(&Heartbeat { is_leaving: true, ..beat("a", &map) }, at(2300)).unwrap();
        assert_eq!(owners(leader.map()), "bbbbbb");
        // The last one is not taken its shards: nobody else could do better.
        leader.hear(&Heartbeat { is_leaving: true, ..beat("b", &map) }, at(2400)).unwrap();
        assert_eq!((owners(leader.map()).as_str(), leader.map().epoch), ("bbbbbb", Epoch(5)));
    }

    #[test]
    fn a_map_of_a_leader_that_woke_up_late_is_overtaken() {
        let start = Instant::now();
        let mut leader = new(2, start);
        let empty = ShardMap::unowned(shards());
        leader.hear(&beat("a", &empty), start).unwrap();
        leader.judge(start + TIMES.gather);
        let stale = ShardMap { epoch: Epoch(9), term: Term(1), ..empty };
        leader.hear(&beat("a", &stale), start + TIMES.gather).unwrap();
        assert_eq!((owners(leader.map()).as_str(), leader.map().epoch, leader.map().term), ("aaaaaa", Epoch(10), Term(2)));
    }

    #[test]
    fn a_second_node_of_the_same_name_is_refused_until_the_first_is_gone() {
        let start = Instant::now();
        let mut leader = new(1, start);
        let empty = ShardMap::unowned(shards());
        leader.hear(&beat("a", &empty), start).unwrap();
        let mut other = beat("a", &empty);
        other.instance = "a2".into();
        // At the same address it is the same node, started again.
        leader.hear(&other, start).unwrap();
        other.instance = "a3".into();
        other.node.url = "http://elsewhere".into();
        assert_eq!(leader.hear(&other, start), Err(Refusal::NameTaken { url: "http://a".into() }));
        leader.hear(&other, start + TIMES.silence_max).unwrap();
        let fewer = ShardMap::unowned(ShardCount::new(5).unwrap());
        assert_eq!(leader.hear(&beat("b", &fewer), start), Err(Refusal::Shards));
    }
}
