//! Reading the events of one entity.
//!
//! Found by the entity's versions, so that a quiet entity in a busy partition costs one small read, and none once its cut has moved past what others wrote.

use super::tail::Tail;
use super::{Entry, FeedError, Given, PAGE_BYTES, Page, Rejected, SCAN_MAX, Tokens, log};
use crate::core::feed_token::{Cut, EntityCut};
use crate::core::{EventOutcome, Partition, StoredEvent};
use crate::partition::EntityKey;
use crate::store::{Order, StoreError};
use std::sync::Arc;

/// Stands at a cut of one entity.
pub(super) struct EntityReader {
    partition: Partition,
    cut: EntityCut,
}

impl EntityReader {
    pub async fn new(tail: &Tail, entity: EntityKey, since: Option<Cut>, is_now: bool) -> Result<EntityReader, FeedError> {
        let partition = tail.partition_of(&entity);
        let EntityKey { entity_type, entity_id } = entity;
        let event_id = match since {
            None if is_now => tail.recent().head(&partition),
            None => 0,
            Some(Cut::Entity(cut)) if cut.entity_type == entity_type && cut.entity_id == entity_id => return Ok(EntityReader { partition, cut }),
            Some(Cut::Entity(_)) => return Err(FeedError::Token("the token is of the feed of another entity")),
            Some(Cut::Answer(position)) if position.partition == partition => position.event_id,
            Some(Cut::Answer(_)) => return Err(FeedError::Token("the token is from an answer of another entity")),
            Some(Cut::Types(cut)) => cut.positions.get(&entity_type).and_then(|positions| positions.get(usize::from(partition.shard.0)).copied()).unwrap_or(0),
        };
        let version = match event_id {
            0 => 0,
            event_id => tail.store().version_at(&entity_type, &entity_id, event_id).await?,
        };
        Ok(EntityReader { partition, cut: EntityCut { entity_type, entity_id, version, event_id } })
    }

    pub fn cut(&self) -> &EntityCut {
        &self.cut
    }

    pub fn is_ahead(&self, tail: &Tail) -> bool {
        self.cut.event_id > tail.recent().head(&self.partition)
    }

    pub fn is_at_start(&self) -> bool {
        self.cut.version == 0
    }

    pub async fn next(&mut self, tail: &Tail, rejected: Rejected, limit: usize, tokens: Tokens) -> Result<Page, FeedError> {
        let head = tail.recent().head(&self.partition);
        let mut page = Page::default();
        let (mut scanned, mut bytes) = (0, 0);
        while self.cut.event_id < head && page.events.len() < limit && bytes < PAGE_BYTES && scanned < SCAN_MAX {
            let wanted = limit - page.events.len();
            let (entries, is_all) = self.read(tail, head, wanted, PAGE_BYTES - bytes).await?;
            scanned += entries.len();
            for entry in entries {
                self.pass(&entry)?;
                if rejected == Rejected::Shown || entry.outcome == EventOutcome::Accepted {
                    bytes += entry.weight();
                    let token = (tokens == Tokens::Each).then(|| self.cut.token(tail.store().identity()));
                    page.events.push(Given { entry, token });
                }
            }
            if is_all {
                self.cut.event_id = head;
            }
        }
        if let (Tokens::Each, Some(last)) = (tokens, page.events.last_mut()) {
            last.token = Some(self.cut.token(tail.store().identity()));
        }
        page.has_more = self.cut.event_id < head;
        Ok(page)
    }

    fn pass(&mut self, entry: &Entry) -> Result<(), StoreError> {
        if entry.version != self.cut.version + 1 {
            let EntityCut { entity_type, entity_id, version, .. } = &self.cut;
            tracing::error!(%entity_type, %entity_id, version, found = entry.version, "the entity misses a version; nothing behind it is given out");
            return Err(StoreError::Corrupt(format!("{entity_type}/{entity_id} misses the version after {version}")));
        }
        (self.cut.version, self.cut.event_id) = (entry.version, entry.event_id);
        Ok(())
    }

    /// The entity's next entries up to the head, and whether these are all.
    async fn read(&self, tail: &Tail, head: u64, wanted: usize, bytes_max: usize) -> Result<(Vec<Arc<Entry>>, bool), StoreError> {
        let kept = tail.recent().after(&self.partition, self.cut.event_id, usize::MAX);
        if let Some(kept) = kept {
            let mut own = kept.into_iter().filter(|entry| entry.entity_id == self.cut.entity_id && entry.event_id <= head);
            let mut bytes = 0;
            let mut entries = Vec::new();
            for entry in own.by_ref().take(wanted) {
                bytes += entry.weight();
                entries.push(entry);
                if bytes >= bytes_max {
                    break;
                }
            }
            let is_all = own.next().is_none();
            return Ok((entries, is_all));
        }
        // One more tells whether there is more.
        let mut events = self.history(tail, Order::Ascending, self.cut.version, wanted + 1, bytes_max).await?;
        let may_be_more = events.len() > wanted || events.iter().map(|stored| stored.event.weight()).sum::<usize>() >= bytes_max;
        let count = events.len();
        events.retain(|stored| stored.event.event_id <= head);
        let is_all = events.len() <= wanted && (events.len() < count || !may_be_more);
        events.truncate(wanted);
        Ok((log::entries(&self.partition, &events)?, is_all))
    }

    async fn history(&self, tail: &Tail, order: Order, bound: u64, limit: usize, bytes_max: usize) -> Result<Vec<StoredEvent>, StoreError> {
        log::versions(tail.store(), (&self.cut.entity_type, &self.cut.entity_id), (order, bound), limit, bytes_max).await
    }

    pub async fn back(&mut self, tail: &Tail, rejected: Rejected, limit: usize) -> Result<Vec<Arc<Entry>>, StoreError> {
        let (mut found, mut bytes, mut scanned) = (Vec::new(), 0, 0);
        while self.cut.version > 0 && found.len() < limit && bytes < PAGE_BYTES && scanned < SCAN_MAX {
            let events = self.history(tail, Order::Descending, self.cut.version + 1, limit - found.len(), PAGE_BYTES - bytes).await?;
            let Some(last) = events.last() else {
                let EntityCut { entity_type, entity_id, version, .. } = &self.cut;
                return Err(StoreError::Corrupt(format!("{entity_type}/{entity_id} has no version {version}")));
            };
            scanned += events.len();
            (self.cut.version, self.cut.event_id) = (last.event.version - 1, last.event.event_id - 1);
            for entry in log::entries(&self.partition, &events)? {
                if rejected == Rejected::Shown || entry.outcome == EventOutcome::Accepted {
                    bytes += entry.weight();
                    found.push(entry);
                }
            }
        }
        Ok(found)
    }
}
