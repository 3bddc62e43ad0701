//! Shard maps: which node owns which shard, and how shards are dealt out.
//!
//! A map makes requests fast and decides nothing: whoever follows an old one, or none, is right all the same, since the database's keys decide.

use super::ids::NodeId;
use super::shard::{ShardCount, ShardId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Orders the maps of a cluster: each new one has a larger number, whoever leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The next one.
    #[must_use]
    pub fn next(self) -> Epoch {
        Epoch(self.0.saturating_add(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Orders leaders: each new one has a larger number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Term(pub u64);

/// A node, and where it takes requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub id: NodeId,
    /// `http://host:port`
    pub url: String,
}

/// Who owns what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardMap {
    /// Its place among all maps.
    pub epoch: Epoch,
    /// The term of the leader who made it: tells two maps of one epoch apart, which a leader who woke up late may have made.
    pub term: Term,
    /// The nodes that own shards, by id.
    pub members: Vec<Member>,
    /// By shard, the index of its owner in `members`; none where nobody owns it, so that every node handles it itself.
    pub owners: Vec<Option<u16>>,
}

impl ShardMap {
    /// Nobody owns anything; older than every other map.
    pub fn unowned(shards: ShardCount) -> ShardMap {
        ShardMap { epoch: Epoch::default(), term: Term::default(), members: Vec::new(), owners: vec![None; usize::from(shards.get())] }
    }

    /// Deals the shards out to these nodes as far as that takes the fewest moves from `before`.
    pub fn dealt(before: &ShardMap, members: &BTreeMap<NodeId, String>, epoch: Epoch, term: Term) -> ShardMap {
        let owners: Vec<Option<NodeId>> = (0..before.owners.len()).map(|shard| before.owner(ShardId(shard as u16)).map(|owner| owner.id.clone())).collect();
        let dealt = deal(&owners, &members.keys().cloned().collect());
        let ids: Vec<&NodeId> = members.keys().collect();
        let index = |id: &NodeId| ids.binary_search(&id).ok().and_then(|index| u16::try_from(index).ok());
        let owners = dealt.iter().map(|owner| owner.as_ref().and_then(index)).collect();
        let members = members.iter().map(|(id, url)| Member { id: id.clone(), url: url.clone() }).collect();
        ShardMap { epoch, term, members, owners }
    }

    /// The owner of a shard.
    pub fn owner(&self, shard: ShardId) -> Option<&Member> {
        let index = (*self.owners.get(usize::from(shard.0))?)?;
        self.members.get(usize::from(index))
    }

    /// How many shards a node owns.
    pub fn owned_by(&self, id: &NodeId) -> usize {
        (0..self.owners.len()).filter(|shard| self.owner(ShardId(*shard as u16)).is_some_and(|owner| owner.id == *id)).count()
    }

    /// Whether it takes the place of the other one.
    pub fn is_newer_than(&self, other: &ShardMap) -> bool {
        (self.epoch, self.term) > (other.epoch, other.term)
    }
}

/// Deals shards out to nodes: no two nodes differ by more than one shard, as many shards as possible stay where they are, and the same
/// question always gets the same answer. Without nodes, nobody owns anything.
fn deal(before: &[Option<NodeId>], nodes: &BTreeSet<NodeId>) -> Vec<Option<NodeId>> {
    if nodes.is_empty() {
        return vec![None; before.len()];
    }
    let mut held: BTreeMap<&NodeId, usize> = nodes.iter().map(|node| (node, 0)).collect();
    for owner in before.iter().flatten() {
        if let Some(count) = held.get_mut(owner) {
            *count += 1;
        }
    }
    // Whoever has most already may keep one more.
    let (share, extra) = (before.len() / nodes.len(), before.len() % nodes.len());
    let mut by_held: Vec<(&NodeId, usize)> = held.into_iter().collect();
    by_held.sort_by(|one, other| other.1.cmp(&one.1).then(one.0.cmp(other.0)));
    let mut left: BTreeMap<&NodeId, usize> = by_held.iter().enumerate().map(|(place, (node, _))| (*node, share + usize::from(place < extra))).collect();
    let mut dealt = vec![None; before.len()];
    for (owner, dealt) in before.iter().zip(&mut dealt) {
        if let Some(owner) = owner
            && let Some(left) = left.get_mut(owner).filter(|left| **left > 0)
        {
            *left -= 1;
            *dealt = Some(owner.clone());
        }
    }
    // In turns, so that neighbouring shards go to different nodes.
    let rounds = left.values().copied().max().unwrap_or(0);
    let mut takers = (0..rounds).flat_map(|round| left.iter().filter(move |(_, left)| **left > round).map(|(node, _)| *node));
    for dealt in dealt.iter_mut().filter(|dealt| dealt.is_none()) {
        *dealt = takers.next().cloned();
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    /// Owners and nodes as letters; `-` is nobody.
    fn check(before: &str, nodes: &str, after: &str) {
        let owners: Vec<Option<NodeId>> = before.chars().map(|owner| (owner != '-').then(|| node(&owner.to_string()))).collect();
        let nodes = nodes.chars().map(|name| node(&name.to_string())).collect();
        let dealt: String = deal(&owners, &nodes).iter().map(|owner| owner.as_ref().map_or("-", |owner| owner.as_str())).collect();
        assert_eq!(dealt, after, "{before} to {nodes:?}");
    }

    #[test]
    fn shards_are_dealt_out_evenly_with_the_fewest_moves() {
        check("------", "", "------");
        check("------", "a", "aaaaaa");
        check("------", "abc", "abcabc");
        check("-------", "abc", "abcabca");
        // One joins: it gets its share, and nothing else moves.
        check("aaaaaa", "ab", "aaabbb");
        check("abcabc", "abcd", "abcabd");
        // One leaves: only its shards move.
        check("abcabc", "ac", "aacacc");
        check("abcabc", "b", "bbbbbb");
        // Whoever has the larger share keeps it.
        check("bbbaa", "ab", "bbbaa");
        check("aabbb", "ab", "aabbb");
        // Already even: nothing moves.
        check("cabbca", "abc", "cabbca");
        check("abx", "ab", "aba");
        // More nodes than shards.
        check("--", "abc", "ab");
    }

    fn counts(owners: &[Option<NodeId>], nodes: &BTreeSet<NodeId>) -> Vec<usize> {
        nodes.iter().map(|node| owners.iter().filter(|owner| owner.as_ref() == Some(node)).count()).collect()
    }

    proptest! {
        #[test]
        fn every_deal_is_even_and_moves_as_little_as_can_be(before in prop::collection::vec(prop::option::of("[a-g]"), 1..70), nodes in prop::collection::btree_set("[a-g]", 1..7)) {
            let before: Vec<Option<NodeId>> = before.iter().map(|owner| owner.as_deref().map(node)).collect();
            let nodes: BTreeSet<NodeId> = nodes.iter().map(|name| node(name)).collect();
            let after = deal(&before, &nodes);
            let counts_after = counts(&after, &nodes);
            prop_assert_eq!(counts_after.iter().sum::<usize>(), before.len(), "every shard has an owner");
            prop_assert!(counts_after.iter().max().unwrap() - counts_after.iter().min().unwrap() <= 1);
            prop_assert_eq!(&deal(&before, &nodes), &after);
            // Nobody can keep more than the larger share, and only so many nodes may have the larger one.
            let (share, extra) = (before.len() / nodes.len(), before.len() % nodes.len());
            let held = counts(&before, &nodes);
            let larger = held.iter().filter(|held| **held > share).count().min(extra);
            let can_stay = held.iter().map(|held| (*held).min(share)).sum::<usize>() + larger;
            let stayed = before.iter().zip(&after).filter(|(before, after)| before.is_some() && before == after).count();
            prop_assert_eq!(stayed, can_stay);
        }
    }

    #[test]
    fn a_map_names_owners_and_knows_its_place() {
        let shards = ShardCount::new(5).unwrap();
        let nodes = [("a", "http://a"), ("b", "http://b")].map(|(id, url)| (node(id), url.to_owned())).into();
        let first = ShardMap::dealt(&ShardMap::unowned(shards), &nodes, Epoch(1), Term(4));
        assert_eq!(first.owner(ShardId(1)), Some(&Member { id: node("b"), url: "http://b".into() }));
        assert_eq!((first.owner(ShardId(5)), first.owned_by(&node("a")), first.owned_by(&node("c"))), (None, 3, 0));
        assert!(first.is_newer_than(&ShardMap::unowned(shards)));
        assert!(!first.is_newer_than(&first));
        let later = ShardMap { term: Term(5), ..first.clone() };
        assert!(later.is_newer_than(&first) && !first.is_newer_than(&later));
        assert!(ShardMap { epoch: Epoch(2), term: Term(1), ..first }.is_newer_than(&later));
    }
}
