//! Several quokka processes on one database, each on a port of its own that it keeps when it is started again.

use super::place::Place;
use super::port;
use super::quokka::{Server, Setup, get};
use super::wire::Wire;
use quokka::cluster::Status;
use quokka::core::{EntityId, ShardCount};
use std::time::Duration;
use tokio::time::Instant;

/// Cluster tests are heavy: one at a time, beside whatever else runs.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// How often nodes say that they are there, in tests.
pub const HEARTBEAT: Duration = Duration::from_millis(200);
/// After this a silent node counts as gone.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(800);

/// Nodes of one cluster, called `n0`, `n1` …
pub struct Nodes {
    pub nodes: Vec<Node>,
    client: reqwest::Client,
    _turn: tokio::sync::MutexGuard<'static, ()>,
}

/// One of them.
pub struct Node {
    pub setup: Setup,
    /// None while it is down.
    pub server: Option<Server>,
    /// What leads from the other nodes to it.
    pub wire: Wire,
    /// `http://127.0.0.1:PORT`, past the wire: for clients.
    pub base: String,
}

impl Nodes {
    /// Starts nodes that elect a leader by the database.
    pub async fn elected(place: &Place, count: usize) -> Nodes {
        Nodes::start((0..count).map(|_| place.setup().set("cluster.topology", "elected")).collect()).await
    }

    /// Starts a node of each setup; of its cluster settings, the names, addresses and times are set here.
    pub async fn start(setups: Vec<Setup>) -> Nodes {
        Nodes::start_knowing(setups, |_, setup, _| setup).await
    }

    /// As [`Nodes::start`], where the nodes' settings depend on the URLs of all: by number, setup and URLs.
    pub async fn start_knowing(setups: Vec<Setup>, complete: impl Fn(usize, Setup, &[String]) -> Setup) -> Nodes {
        let turn = TURN.lock().await;
        let ports: Vec<u16> = setups.iter().map(|_| port::free()).collect();
        let mut wires = Vec::new();
        for port in &ports {
            wires.push(Wire::to(*port).await);
        }
        let urls: Vec<String> = wires.iter().map(|wire| format!("http://127.0.0.1:{}", wire.port())).collect();
        let mut nodes = Vec::new();
        for (number, ((setup, port), wire)) in setups.into_iter().zip(ports).zip(wires).enumerate() {
            let heartbeat = format!("{}ms", HEARTBEAT.as_millis());
            let setup = Setup { listen: format!("127.0.0.1:{port}"), ..setup }
                .set("cluster.node", &format!("n{number}"))
                .set("cluster.advertise", &urls[number])
                .set("cluster.heartbeat", &heartbeat)
                .set("cluster.forward_timeout", "300ms");
            let setup = complete(number, setup, &urls);
            nodes.push(Node { server: Some(setup.start()), setup, wire, base: format!("http://127.0.0.1:{port}") });
        }
        Nodes { nodes, client: super::quokka::client(), _turn: turn }
    }

    /// Where clients send to.
    pub fn bases(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.base.clone()).collect()
    }

    pub fn server(&self, number: usize) -> &Server {
        self.nodes[number].server.as_ref().unwrap()
    }

    pub fn signal(&self, number: usize, signal: rustix::process::Signal) {
        self.server(number).signal(signal);
    }

    /// SIGKILL.
    pub fn kill(&mut self, number: usize) {
        self.nodes[number].server.take().unwrap().kill();
    }

    /// SIGTERM; how it ended, and how long that took.
    pub async fn stop(&mut self, number: usize) -> (std::process::ExitStatus, Duration) {
        let server = self.nodes[number].server.take().unwrap();
        let since = Instant::now();
        let status = tokio::task::spawn_blocking(move || server.stop()).await.unwrap();
        (status, since.elapsed())
    }

    /// Starts it again, on its port.
    pub async fn restart(&mut self, number: usize) {
        let setup = self.nodes[number].setup.clone();
        self.nodes[number].server = Some(tokio::task::spawn_blocking(move || setup.start()).await.unwrap());
    }

    /// What a node says of the cluster; none where it does not answer.
    pub async fn status(&self, number: usize) -> Option<Status> {
        let asked = tokio::time::timeout(Duration::from_secs(2), get(&self.client, &self.nodes[number].base, "/v1/cluster")).await;
        serde_json::from_str(&asked.ok()?.ok()?.body).ok()
    }

    /// Waits until these nodes agree on a map in which exactly they own shards, and on a leader; how long that took.
    pub async fn agree(&self, numbers: &[usize]) -> Duration {
        let since = Instant::now();
        let mut names: Vec<String> = numbers.iter().map(|number| format!("n{number}")).collect();
        names.sort();
        loop {
            let mut told = Vec::new();
            for number in numbers {
                told.push(self.status(*number).await);
            }
            let owners = |status: &Status| {
                let mut owners: Vec<String> = status.shards.iter().map(|owner| owner.as_ref().map_or_else(String::new, ToString::to_string)).collect();
                owners.sort();
                owners.dedup();
                owners
            };
            let is_settled = |status: &Option<Status>| {
                status.as_ref().is_some_and(|status| {
                    let is_led = status.leader.as_ref().is_some_and(|leader| names.iter().any(|name| name == leader.as_str()));
                    owners(status) == names && is_led
                })
            };
            if told.iter().all(is_settled) && told.windows(2).all(|pair| pair[0].as_ref().unwrap().shards == pair[1].as_ref().unwrap().shards) {
                return since.elapsed();
            }
            assert!(since.elapsed() < Duration::from_secs(60), "{names:?} do not agree: {told:?}\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// All of them.
    pub fn all(&self) -> Vec<usize> {
        (0..self.nodes.len()).collect()
    }

    /// All but one.
    pub fn others(&self, number: usize) -> Vec<usize> {
        self.all().into_iter().filter(|other| *other != number).collect()
    }

    /// The node that owns an entity, as one of them sees it.
    pub async fn owner(&self, entity: &str, seen_by: usize) -> usize {
        let shard = ShardCount::new(64).unwrap().shard_of(&EntityId::new(entity, 64).unwrap());
        let status = self.status(seen_by).await.unwrap();
        number(status.shards[usize::from(shard.0)].as_ref().unwrap().as_str())
    }

    /// The leader, as one of them sees it.
    pub async fn leader(&self, seen_by: usize) -> usize {
        number(self.status(seen_by).await.unwrap().leader.unwrap().as_str())
    }

    /// One counter of a node, summed over its labels.
    pub async fn metric(&self, number: usize, name: &str) -> f64 {
        let text = get(&self.client, &self.nodes[number].base, "/metrics").await.unwrap().body;
        let is_it = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        text.lines().filter(is_it).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    pub fn logs(&self) -> String {
        let log = |node: &Node| node.server.as_ref().map_or_else(|| "(down)\n".to_owned(), Server::log);
        self.nodes.iter().enumerate().map(|(number, node)| format!("--- n{number}\n{}", log(node))).collect()
    }
}

fn number(name: &str) -> usize {
    name.trim_start_matches('n').parse().unwrap()
}
