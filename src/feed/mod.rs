//! The feed: the events of entity types, or of one entity, read in order from any place, and followed as they come.
//!
//! [`Feed`] is shared by all who read; a [`Follower`] is one of them and stands at a cut of the log. It reads what comes next from what the node
//! keeps of the log's end ([`recent`]), or from the database where it is further behind, and waits for more without asking anybody. One task
//! ([`tail`]) looks for what is new, for all of them.
//!
//! Invariants: nothing leaves that a barrier has not passed; along a chain of cuts no event of a partition is left out or given twice; versions of an
//! entity come in order. Between partitions there is no order to keep: a page takes from all that have something in turn, and shows what it took in the order
//! of its times. A partition that cannot be written, or read, holds up itself alone.
//!
//! On failure a follower's call fails and its cut stays where it was.

mod entity;
mod entry;
pub mod log;
mod recent;
mod tail;
mod types;

pub use entry::Entry;

use crate::core::feed_token::Cut;
use crate::core::{EntityType, Partition};
use crate::partition::{EntityKey, Partitions};
use crate::store::{Store, StoreError};
use entity::EntityReader;
use std::sync::Arc;
use std::time::Duration;
use tail::{Interest, Tail};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;
use types::TypesReader;

/// A page ends with the event that reaches this many bytes.
pub const PAGE_BYTES: usize = 8 << 20;
/// A call that finds nothing to give out, since all is filtered, returns after this many events.
const SCAN_MAX: usize = 5000;

/// Settings of the feed.
#[derive(Debug, Clone)]
pub struct Options {
    /// The most followers at once.
    pub followers_max: usize,
    /// The most bytes of newest events that are kept for them.
    pub memory_max: usize,
    /// How long between two looks at the database, while somebody follows.
    pub poll: Duration,
}

/// Why the feed cannot be read.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FeedError {
    /// The token is of no use here; the text is for the caller.
    #[error("{0}")]
    Token(&'static str),
    /// The token is ahead of the log.
    #[error("the token is ahead of the log")]
    Ahead,
    /// As many follow already as may.
    #[error("too many followers")]
    TooMany,
    /// The database is away, or holds what it cannot.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whose events are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Those of some entity types.
    Types(Vec<EntityType>),
    /// Those of one entity.
    Entity(EntityKey),
}

/// Where reading starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Since {
    /// Before the first event; read backwards, after the last.
    Start,
    /// After the last.
    Now,
    /// At a cut.
    Token(String),
}

/// Whether rejected commands are given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejected {
    /// They are.
    Shown,
    /// They are passed.
    LeftOut,
}

/// What the reader knows of the log's end to begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fresh {
    /// All that was committed before the call. Costs a look at the database, shared by all who ask at the same time.
    Now,
    /// What the node knows; what is newer comes within a poll.
    Soon,
}

/// For which events tokens are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tokens {
    /// For each.
    Each,
    /// None: [`Follower::token`] stands after all of them.
    None,
}

/// One event of a page.
#[derive(Debug, Clone)]
pub struct Given {
    /// The event.
    pub entry: Arc<Entry>,
    /// The cut right after it, where that was asked for.
    pub token: Option<String>,
}

/// What one call gives.
#[derive(Debug, Default)]
pub struct Page {
    /// In order; none where there is nothing new, or all of it is filtered.
    pub events: Vec<Given>,
    /// Whether there is more to be read at once.
    pub has_more: bool,
}

/// A page read backwards.
#[derive(Debug)]
pub struct PageBack {
    /// Newest first.
    pub events: Vec<Given>,
    /// The cut below it; none where there is nothing below.
    pub next: Option<String>,
    /// The cut above it: where to go on forwards.
    pub start: String,
}

/// What followers share.
struct Inner {
    tail: Arc<Tail>,
    places: Arc<Semaphore>,
    _task: AbortOnDropHandle<()>,
}

/// The feed of a node; a clone shares it.
#[derive(Clone)]
pub struct Feed(Arc<Inner>);

/// Counts a follower until it goes.
struct Place {
    tail: Arc<Tail>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.tail.metrics.followers.decrement(1.0);
    }
}

/// One reader. Dropping it ends it.
pub struct Follower {
    tail: Arc<Tail>,
    reader: Reader,
    interest: Interest,
    rejected: Rejected,
    _place: Place,
}

enum Reader {
    Types(TypesReader),
    Entity(EntityReader),
}

impl Feed {
    /// Starts the task that watches the log; it ends with the last clone.
    pub fn start(options: &Options, partitions: Partitions) -> Feed {
        let tail = Arc::new(Tail::new(partitions, options.memory_max, options.poll));
        let task = AbortOnDropHandle::new(tokio::spawn(tail.clone().run()));
        Feed(Arc::new(Inner { tail, places: Arc::new(Semaphore::new(options.followers_max)), _task: task }))
    }

    fn place(&self) -> Result<Place, FeedError> {
        let permit = self.0.places.clone().try_acquire_owned().map_err(|_| FeedError::TooMany)?;
        self.0.tail.metrics.followers.increment(1.0);
        Ok(Place { tail: self.0.tail.clone(), _permit: permit })
    }

    /// Begins to read forwards.
    pub async fn follow(&self, scope: Scope, since: &Since, rejected: Rejected, fresh: Fresh) -> Result<Follower, FeedError> {
        let (place, tail) = (self.place()?, self.0.tail.clone());
        let cut = tail.read_token(since)?;
        // First of all, so that nothing that comes from now on goes unnoticed.
        let interest = match &scope {
            Scope::Types(entity_types) => tail.follow_types(entity_types),
            Scope::Entity(entity) => tail.follow_partition(&tail.partition_of(entity)),
        };
        let is_known = scope.types().iter().all(|entity_type| tail.recent().knows(entity_type));
        if !is_known || fresh == Fresh::Now || *since == Since::Now {
            tail.refresh().await?;
        }
        let is_now = *since == Since::Now;
        let reader = match scope {
            Scope::Types(entity_types) => Reader::Types(TypesReader::new(&tail, entity_types, cut, is_now)?),
            Scope::Entity(entity) => Reader::Entity(EntityReader::new(&tail, entity, cut, is_now).await?),
        };
        let follower = Follower { tail, reader, interest, rejected, _place: place };
        if follower.is_ahead() {
            // Another node may have given the token out a moment ago.
            follower.tail.refresh().await?;
            if follower.is_ahead() {
                return Err(FeedError::Ahead);
            }
        }
        Ok(follower)
    }

    /// Reads a page backwards: what is not above the cut, newest first.
    pub async fn back(&self, scope: Scope, since: &Since, rejected: Rejected, limit: usize) -> Result<PageBack, FeedError> {
        // Without a token it starts at the end.
        let since = if *since == Since::Start { &Since::Now } else { since };
        let mut follower = self.follow(scope, since, rejected, Fresh::Now).await?;
        let start = follower.token();
        let entries = match &mut follower.reader {
            Reader::Types(reader) => reader.back(&follower.tail, rejected, limit).await?,
            Reader::Entity(reader) => reader.back(&follower.tail, rejected, limit).await?,
        };
        let is_end = match &follower.reader {
            Reader::Types(reader) => reader.is_at_start(),
            Reader::Entity(reader) => reader.is_at_start(),
        };
        follower.tail.metrics.events.increment(entries.len() as u64);
        let events = entries.into_iter().map(|entry| Given { entry, token: None }).collect();
        Ok(PageBack { events, next: (!is_end).then(|| follower.token()), start })
    }
}

impl Scope {
    fn types(&self) -> &[EntityType] {
        match self {
            Scope::Types(entity_types) => entity_types,
            Scope::Entity(entity) => std::slice::from_ref(&entity.entity_type),
        }
    }
}

impl Follower {
    /// What comes next, as far as it is known: at most `limit` events. Moves the cut past them, and past what is filtered.
    pub async fn next(&mut self, limit: usize, tokens: Tokens) -> Result<Page, FeedError> {
        if self.is_ahead() {
            return Err(FeedError::Ahead);
        }
        let page = match &mut self.reader {
            Reader::Types(reader) => reader.next(&self.tail, self.rejected, limit, tokens).await?,
            Reader::Entity(reader) => reader.next(&self.tail, self.rejected, limit, tokens).await?,
        };
        self.tail.metrics.events.increment(page.events.len() as u64);
        Ok(page)
    }

    /// Returns when there may be more than the last call of [`Follower::next`] saw. May be dropped and called again.
    pub async fn changed(&mut self) {
        self.interest.changed().await;
    }

    /// The cut that the follower stands at.
    pub fn token(&self) -> String {
        let log = self.tail.partitions.store().identity();
        match &self.reader {
            Reader::Types(reader) => reader.cut().token(log),
            Reader::Entity(reader) => reader.cut().token(log),
        }
    }

    fn is_ahead(&self) -> bool {
        match &self.reader {
            Reader::Types(reader) => reader.is_ahead(&self.tail),
            Reader::Entity(reader) => reader.is_ahead(&self.tail),
        }
    }
}

impl Tail {
    fn store(&self) -> &dyn Store {
        &**self.partitions.store()
    }

    fn shards(&self) -> usize {
        usize::from(self.store().shards().get())
    }

    fn partition_of(&self, entity: &EntityKey) -> Partition {
        Partition { entity_type: entity.entity_type.clone(), shard: self.store().shards().shard_of(&entity.entity_id) }
    }

    fn read_token(&self, since: &Since) -> Result<Option<Cut>, FeedError> {
        match since {
            Since::Start | Since::Now => Ok(None),
            Since::Token(token) => match Cut::read(token, self.store().identity(), self.shards()) {
                Ok(cut) => Ok(Some(cut)),
                Err(_) => Err(FeedError::Token("the token was not made by this database, or it was changed on its way")),
            },
        }
    }

    /// The entries of a partition right after one and up to its head: from memory, or else from the database.
    async fn read_after(&self, partition: &Partition, after: u64, head: u64, limit: usize, bytes_max: usize) -> Result<Vec<Arc<Entry>>, StoreError> {
        let limit = limit.min(usize::try_from(head.saturating_sub(after)).unwrap_or(usize::MAX));
        let kept = self.recent().after(partition, after, limit);
        let mut entries = match kept {
            Some(entries) => entries,
            None => {
                let events = log::after(self.store(), partition, after, limit, bytes_max).await?;
                if events.is_empty() && limit > 0 {
                    return Err(StoreError::Unavailable(format!("partition {partition} ends before what was seen of it")));
                }
                log::entries(partition, &events)?
            }
        };
        let mut bytes = 0;
        let fits = entries.iter().take_while(|entry| {
            let fits = bytes < bytes_max;
            bytes += entry.weight();
            fits
        });
        let fits = fits.count();
        entries.truncate(fits);
        Ok(entries)
    }
}
