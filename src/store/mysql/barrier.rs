//! The durability barrier: many callers, few writes.
//!
//! Without a binary log, InnoDB shows a commit before it is durable; its redo log is sequential, so once a later write is durable, all that
//! was seen before it is, too. A caller may share only a write that *started* after it called: an earlier one may have been in the log
//! before the rows that the caller saw.

use crate::store::error::StoreError;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Mutex;

/// Rows that processes draw from. Two that share one wait for each other a little; no more than this many are ever left behind.
const SLOTS: u16 = 1024;

/// Lets callers share writes.
pub(super) struct Barrier {
    slot: u16,
    /// How many writes have started.
    started: AtomicU64,
    /// The last write that ended: its number and how it ended.
    last: Mutex<(u64, Result<(), StoreError>)>,
}

impl Barrier {
    pub(super) fn new() -> Barrier {
        Barrier { slot: rand::random_range(0..SLOTS), started: AtomicU64::new(0), last: Mutex::new((0, Ok(()))) }
    }

    /// Returns once a write that started after the call has ended; makes it where nobody else does.
    pub(super) async fn pass<F: Future<Output = Result<(), StoreError>>>(&self, write: impl FnOnce(u16) -> F) -> Result<(), StoreError> {
        let called = self.started.load(Ordering::Acquire);
        let mut last = self.last.lock().await;
        if last.0 > called {
            return last.1.clone();
        }
        let number = self.started.fetch_add(1, Ordering::AcqRel) + 1;
        let outcome = write(self.slot).await;
        *last = (number, outcome.clone());
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokio::sync::Semaphore;

    #[tokio::test]
    async fn callers_during_a_write_share_the_next_one() {
        let barrier = Arc::new(Barrier::new());
        let (writes, gate) = (Arc::new(AtomicU64::new(0)), Arc::new(Semaphore::new(0)));
        let call = || {
            let (barrier, writes, gate) = (barrier.clone(), writes.clone(), gate.clone());
            async move {
                barrier
                    .pass(|_| async move {
                        writes.fetch_add(1, Ordering::SeqCst);
                        gate.acquire().await.unwrap().forget();
                        Ok(())
                    })
                    .await
            }
        };
        let mut first = Box::pin(call());
        assert!(futures_util::poll!(&mut first).is_pending());
        let mut others: Vec<_> = (0..10).map(|_| Box::pin(call())).collect();
        for other in &mut others {
            assert!(futures_util::poll!(other).is_pending());
        }
        assert_eq!(writes.load(Ordering::SeqCst), 1);
        gate.add_permits(2);
        first.await.unwrap();
        for other in others {
            other.await.unwrap();
        }
        assert_eq!(writes.load(Ordering::SeqCst), 2, "the write in flight does not count for those who came during it; one more does for all");
    }

    #[tokio::test]
    async fn a_failed_or_abandoned_write_counts_for_nobody_else() {
        let barrier = Barrier::new();
        let failed = barrier.pass(|_| async { Err(StoreError::Unavailable("gone".into())) }).await;
        assert!(failed.is_err());
        assert!(futures_util::poll!(Box::pin(barrier.pass(|_| std::future::pending()))).is_pending());
        barrier.pass(|_| async { Ok(()) }).await.unwrap();
    }
}
