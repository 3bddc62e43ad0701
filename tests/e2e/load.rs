//! Clients that keep a promise to themselves: every command is sent, with the same id, until it is answered. And the check
//! of what the server holds in the end.

use crate::support::quokka::{Reply, get, post};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Where clients send to; a restarted server keeps its address.
pub type Targets = Arc<Vec<String>>;

/// Deposits of random small amounts, each answered.
pub struct Load {
    clients: Vec<tokio::task::JoinHandle<Vec<Deposit>>>,
    stop: Arc<AtomicBool>,
    /// Commands answered so far.
    pub answered: Arc<AtomicUsize>,
}

/// One answered command.
#[derive(Debug, Clone)]
pub struct Deposit {
    pub entity: String,
    pub command_id: String,
    pub amount: i64,
    pub version: u64,
    pub body: String,
}

impl Load {
    /// Starts `clients` clients on `entities` entities whose ids start with `name`.
    pub fn start(name: &str, targets: &Targets, clients: usize, entities: usize) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicUsize::new(0));
        let start = |number: usize| {
            let (name, targets, stop, answered) = (name.to_owned(), targets.clone(), stop.clone(), answered.clone());
            tokio::spawn(async move { run_client(number, &name, &targets, entities, &stop, &answered).await })
        };
        Load { clients: (0..clients).map(start).collect(), stop, answered }
    }

    /// Waits until at least this many commands are answered in all.
    pub async fn until(&self, answered: usize) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while self.answered.load(Ordering::Relaxed) < answered {
            assert!(
                tokio::time::Instant::now() < deadline,
                "only {} of {answered} commands were answered within a minute",
                self.answered.load(Ordering::Relaxed)
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Lets every client finish the command it is at.
    pub async fn finish(self) -> Vec<Deposit> {
        self.stop.store(true, Ordering::Relaxed);
        let mut deposits = Vec::new();
        for client in self.clients {
            deposits.extend(client.await.unwrap());
        }
        deposits
    }
}

async fn run_client(number: usize, name: &str, targets: &[String], entities: usize, stop: &AtomicBool, answered: &AtomicUsize) -> Vec<Deposit> {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(15)).build().unwrap();
    let mut deposits = Vec::new();
    let mut target = number;
    for step in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let entity = format!("{name}{}", (number + step) % entities);
        let command_id = format!("{number}-{step}");
        let amount = (step % 7) as i64 + 1;
        let path = format!("account/{entity}/deposit");
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        let reply = loop {
            let reply = post(&client, &targets[target % targets.len()], &path, &command_id, &format!("{{\"amount\":{amount}}}")).await;
            target += 1;
            match reply {
                Ok(reply) if reply.status == 200 => break reply,
                // What may be tried again, and connections that broke: the server, or its database, is away.
                Ok(Reply { status: 503 | 504, .. }) | Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                Ok(reply) => panic!("{command_id} on {entity}: {reply:?}"),
            }
            assert!(tokio::time::Instant::now() < deadline, "{command_id} on {entity} found no answer within a minute");
        };
        let version = reply.json()["version"].as_u64().unwrap();
        answered.fetch_add(1, Ordering::Relaxed);
        deposits.push(Deposit { entity, command_id, amount, version, body: reply.body });
    }
    deposits
}

/// Every answered command is in the history, once, as it was answered; versions are dense; balances are the sums.
pub async fn check(base: &str, deposits: &[Deposit]) {
    let client = crate::support::quokka::client();
    let mut by_entity: HashMap<&str, Vec<&Deposit>> = HashMap::new();
    for deposit in deposits {
        by_entity.entry(&deposit.entity).or_default().push(deposit);
    }
    for (entity, deposits) in by_entity {
        let events = history(&client, base, &format!("account/{entity}")).await;
        let versions: Vec<u64> = events.iter().map(|event| event["version"].as_u64().unwrap()).collect();
        assert_eq!(versions, (1..=versions.len() as u64).collect::<Vec<_>>(), "versions of {entity} are dense");
        let recorded: HashMap<&str, &Value> = events.iter().map(|event| (event["command_id"].as_str().unwrap(), event)).collect();
        assert_eq!(recorded.len(), events.len(), "every command id of {entity} is there once");
        for deposit in &deposits {
            let event = recorded.get(deposit.command_id.as_str()).unwrap_or_else(|| panic!("{deposit:?} was answered and is not there"));
            assert_eq!(event["version"].as_u64(), Some(deposit.version), "{deposit:?}");
        }
        assert_eq!(events.len(), deposits.len(), "nothing is in {entity} that no client was told");
        let sum: i64 = deposits.iter().map(|deposit| deposit.amount).sum();
        let state = get(&client, base, &format!("/v1/entities/account/{entity}")).await.unwrap().json();
        assert_eq!((state["state"]["balance"].as_i64(), state["version"].as_u64()), (Some(sum), versions.last().copied()), "{entity}");
        let last = deposits.last().unwrap();
        let replay = post(&client, base, &format!("account/{entity}/deposit"), &last.command_id, &format!("{{\"amount\":{}}}", last.amount)).await.unwrap();
        assert_eq!((replay.header("idempotency-replayed"), &replay.body), (Some("true"), &last.body), "{last:?}");
    }
}

/// All events of an entity, oldest first.
pub async fn history(client: &reqwest::Client, base: &str, entity: &str) -> Vec<Value> {
    let mut events = Vec::new();
    let mut after = 0;
    loop {
        let mut page = get(client, base, &format!("/v1/entities/{entity}/events?after={after}&limit=1000")).await.unwrap().json();
        events.append(page["events"].as_array_mut().unwrap());
        match page["next"].as_u64() {
            Some(next) => after = next,
            None => return events,
        }
    }
}
