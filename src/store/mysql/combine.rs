//! Appends that wait at the same time share a statement.
//!
//! A statement costs the server about as much as some rows do, and a commit more than that. So only [`TURNS`] statements with appends are under
//! way at once, and whoever gets the next turn takes all appends to its table along that have gathered meanwhile.
//! A single append never waits for others to come.
//!
//! What becomes of one append must not depend on its company: where a shared statement surely did not happen, each append is tried again in a
//! statement of its own, and hears what became of that. A lock that a stranger holds on the rows of one partition would hold up the whole company;
//! so the server is asked to give up a shared statement that takes long, and the partition that was in the way goes alone for a while.

use super::append_error;
use super::pool::Pool;
use super::statement;
use crate::core::{EntityType, Event, Partition};
use crate::store::error::AppendError;
use futures_util::future::join_all;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// How many statements with appends are under way at once: while one waits for the disk, the next one is worked on.
const TURNS: usize = 2;
/// The most rows in a shared statement.
const ROWS_MAX: usize = 1000;
/// The most bytes in a shared statement; small ones are held up less by each other.
const BYTES_MAX: usize = 1 << 20;
/// How long a shared statement may take before the server is asked to give it up.
const PATIENCE: Duration = Duration::from_millis(100);
/// For how long a partition that was in the way goes alone.
const ALONE_FOR: Duration = Duration::from_secs(2);

type Outcome = Result<(), AppendError>;

/// Where appends meet.
pub(super) struct Combiner(Arc<Shared>);

struct Shared {
    pool: Pool,
    turns: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: HashMap<EntityType, VecDeque<Waiting>>,
    /// Until when partitions go alone.
    alone: HashMap<Partition, Instant>,
}

struct Waiting {
    partition: Partition,
    /// As [`statement::rows`] writes them.
    rows: Vec<u8>,
    count: usize,
    reply: oneshot::Sender<Outcome>,
}

impl Combiner {
    pub(super) fn new(pool: Pool) -> Combiner {
        Combiner(Arc::new(Shared { pool, turns: Arc::new(Semaphore::new(TURNS)), state: Mutex::default() }))
    }

    /// Writes the events of one append, alone or in company. `statement_max` is the most bytes that a statement may take.
    pub(super) async fn append(&self, partition: &Partition, events: &[Event], statement_max: usize) -> Outcome {
        let rows = statement::rows(partition, events);
        if statement::insert_len(&partition.entity_type, &rows) > statement_max {
            return Err(AppendError::TooLarge);
        }
        if self.0.goes_alone(partition) {
            return self.0.alone(partition, &rows).await;
        }
        let (reply, mut outcome) = oneshot::channel();
        let waiting = Waiting { partition: partition.clone(), rows, count: events.len(), reply };
        self.0.state().waiting.entry(partition.entity_type.clone()).or_default().push_back(waiting);
        let turn = tokio::select! {
            biased;
            outcome = &mut outcome => return told(outcome),
            turn = self.0.turns.clone().acquire_owned() => turn,
        };
        if let Ok(turn) = turn {
            let company = self.0.company(&partition.entity_type, BYTES_MAX.min(statement_max));
            // In a task of its own: where this caller gives up, the others must not suffer.
            let shared = self.0.clone();
            tokio::spawn(async move { shared.run(company, turn).await });
        }
        told(outcome.await)
    }
}

/// What the caller hears; where whoever had the rows broke down, nobody knows.
fn told(outcome: Result<Outcome, oneshot::error::RecvError>) -> Outcome {
    outcome.unwrap_or_else(|_| Err(AppendError::Unknown("the statement was dropped".into())))
}

impl Shared {
    /// The lock guards plain values that no panic can leave half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn goes_alone(&self, partition: &Partition) -> bool {
        let mut state = self.state();
        if state.alone.is_empty() {
            return false;
        }
        let now = Instant::now();
        state.alone.retain(|_, until| *until > now);
        state.alone.contains_key(partition)
    }

    /// Takes what waits, oldest first, as much as a shared statement may hold.
    fn company(&self, entity_type: &EntityType, bytes_max: usize) -> Vec<Waiting> {
        let mut state = self.state();
        let Some(waiting) = state.waiting.get_mut(entity_type) else { return Vec::new() };
        let (mut bytes, mut count) = (0, 0);
        let fits = waiting.iter().take_while(|next| {
            bytes += next.rows.len();
            count += next.count;
            bytes <= bytes_max && count <= ROWS_MAX
        });
        let fits = fits.count().max(1).min(waiting.len());
        waiting.drain(..fits).collect()
    }

    async fn run(&self, mut company: Vec<Waiting>, turn: OwnedSemaphorePermit) {
        if company.len() < 2 {
            let Some(waiting) = company.pop() else { return };
            return self.one(waiting, Some(turn)).await;
        }
        // In one order on all nodes, so that those that contend for several partitions do not lock each other out.
        company.sort_unstable_by_key(|waiting| waiting.partition.shard);
        let entity_type = company[0].partition.entity_type.clone();
        let rows: Vec<&[u8]> = company.iter().map(|waiting| waiting.rows.as_slice()).collect();
        let statement = statement::insert(&entity_type, &rows);
        let outcome = self.pool.query_within(statement.as_bytes(), PATIENCE).await.map(|_| ()).map_err(append_error);
        drop(turn);
        match outcome {
            Err(AppendError::PositionTaken | AppendError::KeyTaken | AppendError::Interrupted(_) | AppendError::TooLarge | AppendError::Refused(_)) => {
                join_all(company.into_iter().map(|waiting| self.one(waiting, None))).await;
            }
            outcome => {
                for waiting in company {
                    let _ = waiting.reply.send(outcome.clone());
                }
            }
        }
    }

    /// One append by itself. Where it takes long, others get its turn.
    async fn one(&self, waiting: Waiting, turn: Option<OwnedSemaphorePermit>) {
        let Waiting { partition, rows, reply, .. } = waiting;
        let is_slow = async {
            tokio::time::sleep(PATIENCE).await;
            self.set_alone(&partition);
            drop(turn);
            std::future::pending().await
        };
        let outcome = tokio::select! {
            outcome = self.alone(&partition, &rows) => outcome,
            never = is_slow => never,
        };
        if outcome.is_err() {
            // It would spoil the next company as well.
            self.set_alone(&partition);
        }
        let _ = reply.send(outcome);
    }

    fn set_alone(&self, partition: &Partition) {
        self.state().alone.insert(partition.clone(), Instant::now() + ALONE_FOR);
    }

    async fn alone(&self, partition: &Partition, rows: &[u8]) -> Outcome {
        let statement = statement::insert(&partition.entity_type, &[rows]);
        self.pool.query(statement.as_bytes()).await.map(|_| ()).map_err(append_error)
    }
}
