//! Election by a lease in the database: no further service is needed.
//!
//! The lease is one row that its holder changes again and again (`beat`). Everybody else watches it, and takes it by compare-and-set once it
//! has not changed for as long as a lease lasts. Time is measured by each node's own monotonic clock, from the moment at which it saw the row
//! change, so no clock that can be set, neither a node's nor the database's, decides anything.

use super::{Election, Leadership};
use crate::core::{Member, Term};
use crate::store::{Lease, Store, StoreError};
use async_trait::async_trait;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How often in the time of a lease its holder changes it, and how often the others look.
const BEATS: u32 = 3;
const LOOKS: u32 = 5;

/// Elects by a lease in the store.
pub struct DatabaseElection {
    store: Arc<dyn Store>,
    /// This node, as the lease shows it.
    own: Member,
    /// Tells this process from an earlier one of the same name.
    instance: String,
    /// For how long a lease counts that nobody changes.
    ttl: Duration,
}

/// A row, and since when it has been seen unchanged.
struct Seen {
    lease: Option<Lease>,
    since: Instant,
}

impl DatabaseElection {
    /// Takes no part yet.
    pub fn new(store: Arc<dyn Store>, own: Member, ttl: Duration) -> DatabaseElection {
        DatabaseElection { store, own, instance: xid::new().to_string(), ttl }
    }

    /// One look at the lease, and one change where it is due. Its holder knows how it stands, and only changes it.
    async fn step(&self, seen: &mut Option<Seen>) -> Result<Leadership, StoreError> {
        let now = Instant::now();
        if let Some(Seen { lease: Some(held), .. }) = seen.take_if(|seen| seen.lease.as_ref().is_some_and(|lease| self.is_mine(lease))) {
            let next = Lease { beat: held.beat.wrapping_add(1), ..held.clone() };
            if self.store.swap_lease(Some(&held), &next).await? {
                let told = Leadership::Mine(next.term);
                *seen = Some(Seen { lease: Some(next), since: now });
                return Ok(told);
            }
            // Somebody thought that this process was gone.
        }
        let found = self.store.lease().await?;
        let since = match seen.as_ref() {
            Some(seen) if seen.lease == found => seen.since,
            Some(_) | None => now,
        };
        *seen = Some(Seen { lease: found.clone(), since });
        let next = match &found {
            // What became of the last change was not known.
            Some(lease) if self.is_mine(lease) => Lease { beat: lease.beat.wrapping_add(1), ..lease.clone() },
            Some(lease) if lease.holder.is_some() && now - since < self.ttl => return Ok(Leadership::Other(lease.member.clone())),
            Some(lease) => self.claim(Term(lease.term.0.saturating_add(1))),
            None => self.claim(Term(1)),
        };
        // Counted from before the change: others may have seen it at once.
        if self.store.swap_lease(found.as_ref(), &next).await? {
            let told = Leadership::Mine(next.term);
            *seen = Some(Seen { lease: Some(next), since: now });
            return Ok(told);
        }
        // Somebody else was faster; the next look tells who.
        Ok(Leadership::Unknown)
    }

    fn is_mine(&self, lease: &Lease) -> bool {
        lease.holder.as_deref() == Some(&self.instance)
    }

    fn claim(&self, term: Term) -> Lease {
        Lease { holder: Some(self.instance.clone()), member: self.own.clone(), term, beat: 0 }
    }

    async fn lay_down(&self) {
        let Ok(Some(lease)) = self.store.lease().await else { return };
        if self.is_mine(&lease) {
            // Where this fails the lease runs out by itself.
            let _ = self.store.swap_lease(Some(&lease), &Lease { holder: None, ..lease.clone() }).await;
        }
    }
}

#[async_trait]
impl Election for DatabaseElection {
    async fn take_part(&self, told: watch::Sender<Leadership>, stop: CancellationToken) {
        let mut seen: Option<Seen> = None;
        let mut is_away = false;
        // When the office was last confirmed; a holder who cannot confirm it in time has to assume that it is lost.
        let mut confirmed = Instant::now();
        loop {
            let step = tokio::time::timeout(self.ttl, self.step(&mut seen));
            let Some(step) = stop.run_until_cancelled(step).await else { break };
            match step.unwrap_or_else(|_| Err(StoreError::Unavailable("no answer in time".into()))) {
                Ok(leadership) => {
                    confirmed = Instant::now();
                    if is_away {
                        tracing::info!("the database can be asked for the leader again");
                    }
                    is_away = false;
                    told.send_if_modified(|told| std::mem::replace(told, leadership.clone()) != leadership);
                }
                Err(error) => {
                    if !is_away {
                        tracing::warn!(%error, "the database cannot be asked for the leader; traffic goes on");
                    }
                    is_away = true;
                    if confirmed.elapsed() >= self.ttl {
                        told.send_if_modified(|told| std::mem::replace(told, Leadership::Unknown) != Leadership::Unknown);
                    }
                }
            }
            let pause = if matches!(*told.borrow(), Leadership::Mine(_)) { self.ttl / BEATS } else { self.ttl / LOOKS };
            if stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                break;
            }
        }
        self.lay_down().await;
    }
}
