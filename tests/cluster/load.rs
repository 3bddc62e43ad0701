//! Clients of a cluster: each sends its command to one node, and where that gives no answer, the same command id to the next.

use crate::e2e::load::Deposit;
use crate::support::quokka::post;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// How long a client waits for one node before it tries the next.
const PATIENCE: Duration = Duration::from_secs(5);

/// One try of a command.
#[derive(Debug, Clone)]
pub struct Call {
    /// Which node was asked.
    pub node: usize,
    /// What it answered; none where the connection broke, or nothing came in time.
    pub status: Option<u16>,
    pub has_retry_after: bool,
    pub took: Duration,
    pub body: String,
}

/// Running clients.
pub struct Clients {
    clients: Vec<tokio::task::JoinHandle<(Vec<Deposit>, Vec<Call>)>>,
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
}

impl Clients {
    /// Starts clients that deposit to `entities` entities whose ids start with `name`; each starts at another node.
    pub fn start(name: &str, bases: &[String], clients: usize, entities: usize) -> Clients {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let start = |number: usize| {
            let (name, bases, stop, answered) = (name.to_owned(), bases.to_vec(), stop.clone(), answered.clone());
            tokio::spawn(async move { run(number, &name, &bases, entities, &stop, &answered).await })
        };
        Clients { clients: (0..clients).map(start).collect(), stop, answered }
    }

    /// Waits until so many more commands are answered.
    pub async fn more(&self, count: usize) {
        let (target, deadline) = (self.answered.load(Ordering::Relaxed) + count, Instant::now() + Duration::from_secs(60));
        while self.answered.load(Ordering::Relaxed) < target {
            assert!(Instant::now() < deadline, "{count} commands were not answered within a minute");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Lets every client finish the command it is at.
    pub async fn finish(self) -> (Vec<Deposit>, Vec<Call>) {
        self.stop.store(true, Ordering::Relaxed);
        let (mut deposits, mut calls) = (Vec::new(), Vec::new());
        for client in self.clients {
            let (more_deposits, more_calls) = client.await.unwrap();
            deposits.extend(more_deposits);
            calls.extend(more_calls);
        }
        (deposits, calls)
    }
}

async fn run(number: usize, name: &str, bases: &[String], entities: usize, stop: &AtomicBool, answered: &AtomicUsize) -> (Vec<Deposit>, Vec<Call>) {
    let client = reqwest::Client::builder().timeout(PATIENCE).build().unwrap();
    let (mut deposits, mut calls, mut node) = (Vec::new(), Vec::new(), number % bases.len());
    for step in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let entity = format!("{name}{}", (number + step) % entities);
        let (command_id, amount) = (format!("{number}-{step}"), (step % 7) as i64 + 1);
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let since = Instant::now();
            let reply = post(&client, &bases[node], &format!("account/{entity}/deposit"), &command_id, &format!("{{\"amount\":{amount}}}")).await;
            let took = since.elapsed();
            let (status, has_retry_after, body) = match &reply {
                Ok(reply) => (Some(reply.status), reply.header("retry-after").is_some(), reply.body.clone()),
                Err(_) => (None, false, String::new()),
            };
            calls.push(Call { node, status, has_retry_after, took, body: body.clone() });
            if let Ok(reply) = reply
                && reply.status == 200
            {
                let version = reply.json()["version"].as_u64().unwrap();
                deposits.push(Deposit { entity, command_id, amount, version, body });
                break;
            }
            assert!(Instant::now() < deadline, "{command_id} on {entity} found no answer within a minute: {status:?} {body}");
            node = (node + 1) % bases.len();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        answered.fetch_add(1, Ordering::Relaxed);
        if step % 10 == 9 {
            node = (node + 1) % bases.len();
        }
    }
    (deposits, calls)
}

/// What nodes that are well may tell clients: an answer, or 503 and when to try again; and never after more than three seconds.
pub fn judge(calls: &[Call], faulty: &[usize]) -> Duration {
    let well = || calls.iter().filter(|call| !faulty.contains(&call.node));
    for call in well() {
        let is_fine = matches!((call.status, call.has_retry_after), (Some(200), _) | (Some(503), true));
        assert!(is_fine, "a node that is well answered {call:?}: {}", call.body);
    }
    let slowest = well().map(|call| call.took).max().unwrap_or_default();
    assert!(slowest < Duration::from_secs(3), "a call to a node that is well took {slowest:?}");
    slowest
}
