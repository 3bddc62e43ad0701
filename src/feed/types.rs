//! Reading the events of entity types: many partitions at once, by one cut through all of them.

use super::tail::Tail;
use super::{Entry, FeedError, Given, PAGE_BYTES, Page, Rejected, SCAN_MAX, Tokens, log};
use crate::core::feed_token::{Cut, TypesCut};
use crate::core::{EntityType, EventOutcome, Partition, ShardId};
use crate::store::StoreError;
use futures_util::future::join_all;
use std::collections::VecDeque;
use std::sync::Arc;

/// How many partitions a page takes from where they hold more than the page.
const VISITS: usize = 8;
/// How many partitions are read at once.
const READS: usize = 4;

/// Stands at a cut through the partitions of some types.
pub(super) struct TypesReader {
    /// Those that are read; the cut may know of others.
    asked: Vec<EntityType>,
    shards: usize,
    cut: TypesCut,
}

/// What was taken for a page.
struct Taken {
    place: usize,
    entry: Arc<Entry>,
}

impl TypesReader {
    /// A type that the cut does not know starts at its oldest event; one that is not asked for keeps its place in the cut.
    pub fn new(tail: &Tail, asked: Vec<EntityType>, since: Option<Cut>, is_now: bool) -> Result<TypesReader, FeedError> {
        let mut cut = match since {
            None => TypesCut::default(),
            Some(Cut::Types(cut)) => cut,
            Some(Cut::Answer(_) | Cut::Entity(_)) => return Err(FeedError::Token("the token is of one entity; give entity=type/id with it")),
        };
        let shards = tail.shards();
        for entity_type in &asked {
            if is_now {
                cut.positions.insert(entity_type.clone(), tail.recent().heads(entity_type, shards));
            }
            cut.positions.entry(entity_type.clone()).or_insert_with(|| vec![0; shards]);
        }
        Ok(TypesReader { asked, shards, cut })
    }

    pub fn cut(&self) -> &TypesCut {
        &self.cut
    }

    /// Partitions are counted through the types asked for.
    fn partition(&self, place: usize) -> Partition {
        Partition { entity_type: self.asked[place / self.shards].clone(), shard: ShardId((place % self.shards) as u16) }
    }

    fn position(&self, place: usize) -> u64 {
        self.cut.positions.get(&self.asked[place / self.shards]).map_or(0, |positions| positions[place % self.shards])
    }

    fn set_position(cut: &mut TypesCut, asked: &[EntityType], place: usize, event_id: u64) {
        let shards = cut.positions.get(&asked[0]).map_or(1, Vec::len);
        if let Some(positions) = cut.positions.get_mut(&asked[place / shards]) {
            positions[place % shards] = event_id;
        }
    }

    /// The heads of all partitions, by place.
    fn heads(&self, tail: &Tail) -> Vec<u64> {
        let recent = tail.recent();
        self.asked.iter().flat_map(|entity_type| recent.heads(entity_type, self.shards)).collect()
    }

    pub fn is_ahead(&self, tail: &Tail) -> bool {
        self.heads(tail).into_iter().enumerate().any(|(place, head)| self.position(place) > head)
    }

    pub fn is_at_start(&self) -> bool {
        (0..self.asked.len() * self.shards).all(|place| self.position(place) == 0)
    }

    pub async fn next(&mut self, tail: &Tail, rejected: Rejected, limit: usize, tokens: Tokens) -> Result<Page, FeedError> {
        let before = self.cut.clone();
        let mut taken: Vec<Taken> = Vec::new();
        let (mut scanned, mut bytes) = (0, 0);
        let has_more = loop {
            let heads = self.heads(tail);
            let mut pending: Vec<(usize, u64)> = heads.into_iter().enumerate().filter(|(place, head)| self.position(*place) < *head).collect();
            if pending.is_empty() {
                break false;
            }
            if taken.len() >= limit || bytes >= PAGE_BYTES || scanned >= SCAN_MAX || (!taken.is_empty() && scanned >= limit) {
                break true;
            }
            let first = pending.partition_point(|(place, _)| *place < self.cut.turn as usize);
            pending.rotate_left(first);
            let room = limit - taken.len();
            let waiting: u64 = pending.iter().map(|(place, head)| head - self.position(*place)).fold(0, u64::saturating_add);
            let share = if waiting <= room as u64 { room } else { room.div_ceil(pending.len().min(VISITS)) };
            let read = self.round(tail, &pending, (room, share), PAGE_BYTES - bytes);
            let read = match read.await {
                Ok(read) => read,
                // Nothing is lost of what was taken, and the next call meets the same again.
                Err(_) if !taken.is_empty() => break true,
                Err(error) => {
                    self.cut = before;
                    return Err(error.into());
                }
            };
            for Taken { place, entry } in read {
                Self::set_position(&mut self.cut, &self.asked, place, entry.event_id);
                self.cut.turn = (place + 1) as u32;
                scanned += 1;
                if rejected == Rejected::Shown || entry.outcome == EventOutcome::Accepted {
                    bytes += entry.weight();
                    taken.push(Taken { place, entry });
                }
            }
        };
        Ok(Page { events: self.given(tail, before, taken, tokens), has_more })
    }

    /// Reads a share of each of the first partitions, until there is no more room. Those that cannot be read do not hold up the others.
    async fn round(&self, tail: &Tail, pending: &[(usize, u64)], (room, share): (usize, usize), bytes_max: usize) -> Result<Vec<Taken>, StoreError> {
        let mut read = Vec::new();
        let (mut bytes, mut failed) = (0, None);
        for places in pending.chunks(READS) {
            if read.len() >= room || bytes >= bytes_max {
                break;
            }
            let left = (bytes_max - bytes).div_ceil(places.len());
            let reads = places.iter().map(|(place, head)| async move {
                let entries = tail.read_after(&self.partition(*place), self.position(*place), *head, share, left).await;
                (*place, entries)
            });
            for (place, entries) in join_all(reads).await {
                match entries {
                    Ok(entries) => {
                        let fits = entries.into_iter().take(room - read.len());
                        let before = read.len();
                        read.extend(fits.map(|entry| Taken { place, entry }));
                        bytes += read[before..].iter().map(|taken| taken.entry.weight()).sum::<usize>();
                    }
                    Err(error) => failed = Some(error),
                }
            }
        }
        match failed {
            Some(error) if read.is_empty() => Err(error),
            Some(_) | None => Ok(read),
        }
    }

    /// In the order of their times, each partition's in its own; with a cut after each where that is asked for.
    fn given(&self, tail: &Tail, mut cut: TypesCut, mut taken: Vec<Taken>, tokens: Tokens) -> Vec<Given> {
        // Clocks may go back; what follows in a partition is never shown as older.
        let mut newest = std::collections::HashMap::new();
        let mut keyed: Vec<(i64, Taken)> = taken
            .drain(..)
            .map(|taken| {
                let time = newest.entry(taken.place).or_insert(i64::MIN);
                *time = taken.entry.committed_at.max(*time);
                (*time, taken)
            })
            .collect();
        keyed.sort_by_key(|(time, taken)| (*time, taken.place, taken.entry.event_id));
        let (log, last) = (tail.store().identity(), keyed.len().saturating_sub(1));
        let give = |(number, (_, Taken { place, entry })): (usize, (i64, Taken))| {
            Self::set_position(&mut cut, &self.asked, place, entry.event_id);
            let token = match tokens {
                Tokens::None => None,
                Tokens::Each if number == last => Some(self.cut.token(log)),
                Tokens::Each => Some(cut.token(log)),
            };
            Given { entry, token }
        };
        keyed.into_iter().enumerate().map(give).collect()
    }

    /// Newest first by their times, each partition's in its own order; moves the cut below them.
    pub async fn back(&mut self, tail: &Tail, rejected: Rejected, limit: usize) -> Result<Vec<Arc<Entry>>, StoreError> {
        let mut ends: Vec<End> = (0..self.asked.len() * self.shards)
            .filter(|place| self.position(*place) > 0)
            .map(|place| End { place, next: self.position(place), oldest: i64::MAX, read: VecDeque::new() })
            .collect();
        let share = (limit * 2).div_ceil(ends.len().max(1)).min(limit);
        let (mut found, mut bytes, mut scanned) = (Vec::new(), 0, 0);
        while found.len() < limit && bytes < PAGE_BYTES && scanned < SCAN_MAX {
            let bytes_max = PAGE_BYTES / ends.len().max(1);
            let mut empty: Vec<&mut End> = ends.iter_mut().filter(|end| end.read.is_empty() && end.next > 0).collect();
            for ends in empty.chunks_mut(READS) {
                let fills = ends.iter_mut().map(|end| end.fill(tail, self.partition(end.place), share, bytes_max));
                join_all(fills).await.into_iter().collect::<Result<Vec<()>, _>>()?;
            }
            let newest = ends.iter_mut().filter(|end| !end.read.is_empty()).max_by_key(|end| (end.time(), std::cmp::Reverse(end.place)));
            let Some(end) = newest else { break };
            end.oldest = end.time();
            let Some(entry) = end.read.pop_front() else { break };
            Self::set_position(&mut self.cut, &self.asked, end.place, entry.event_id - 1);
            scanned += 1;
            if rejected == Rejected::Shown || entry.outcome == EventOutcome::Accepted {
                bytes += entry.weight();
                found.push(entry);
            }
        }
        Ok(found)
    }
}

/// Where a partition stands that is read backwards.
struct End {
    place: usize,
    /// The event to be read next.
    next: u64,
    /// The time of the last one taken: what is before it is never shown as newer.
    oldest: i64,
    read: VecDeque<Arc<Entry>>,
}

impl End {
    fn time(&self) -> i64 {
        self.read.front().map_or(i64::MIN, |entry| entry.committed_at.min(self.oldest))
    }

    async fn fill(&mut self, tail: &Tail, partition: Partition, limit: usize, bytes_max: usize) -> Result<(), StoreError> {
        let events = log::down_from(tail.store(), &partition, self.next, limit, bytes_max.max(1)).await?;
        self.next = events.last().map_or(0, |last| last.event.event_id - 1);
        self.read = log::entries(&partition, &events)?.into();
        Ok(())
    }
}
