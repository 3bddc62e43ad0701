//! What quokka adds to a single durable insert: one connection POSTs one command after another, in turn with single-row appends
//! of the same kind of row on the same database, by the same driver, in the same run.
//!
//! ```text
//! cargo bench --bench one_connection -- [STORAGE_URL ...]
//! ```
//!
//! Without a URL it measures SQLite in a temporary folder. It starts the server itself, on a free port, and makes its own entities.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use quokka::core::{CommandId, CommandName, EntityId, EntityType, Event, EventOutcome, HandlerVersion, Json, Partition, ShardCount, ShardId};
use quokka::store::{self, Store};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pairs that are measured, after as many as are not as stand in [`WARM_UP`].
const ROUNDS: usize = 1000;
const WARM_UP: usize = 100;

fn main() {
    let urls: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let folder = tempfile::tempdir().unwrap();
    let own = format!("sqlite:{}", folder.path().join("bench.sqlite").display());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    println!("{:<28} {:>14} {:>14} {:>14} {:>14}", "engine", "insert p50 ms", "command p50 ms", "added p50 ms", "command p99 ms");
    for url in if urls.is_empty() { vec![own] } else { urls } {
        let (engine, mut inserts, mut commands) = measure(&url, &runtime);
        inserts.sort();
        commands.sort();
        let ms = |times: &[Duration], percent: usize| times[times.len() * percent / 100].as_secs_f64() * 1000.0;
        let (insert, command) = (ms(&inserts, 50), ms(&commands, 50));
        println!("{engine:<28} {insert:>14.3} {command:>14.3} {:>14.3} {:>14.3}", command - insert, ms(&commands, 99));
    }
}

fn measure(url: &str, runtime: &tokio::runtime::Runtime) -> (String, Vec<Duration>, Vec<Duration>) {
    let server = Server::start(url);
    let options = store::Options { url: url.into(), shards: ShardCount::new(64).unwrap(), pool: 1, statement_timeout: Duration::from_secs(8) };
    let store = runtime.block_on(store::open(&options)).unwrap();
    let entity_type = EntityType::new("bench_insert").unwrap();
    runtime.block_on(store.create_type(&entity_type)).unwrap();
    let partition = Partition { entity_type, shard: ShardId(0) };
    let mut head = runtime.block_on(store.head(&partition)).unwrap();
    let mut client = Client::connect(&server.address);
    let entity = xid::new().to_string();
    let (mut inserts, mut commands) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + ROUNDS {
        head += 1;
        let inserted = insert(&store, runtime, &partition, head, &entity, round as u64 + 1);
        let commanded = client.deposit(&entity, round);
        if round >= WARM_UP {
            inserts.push(inserted);
            commands.push(commanded);
        }
    }
    (store.engine(), inserts, commands)
}

fn insert(store: &Arc<dyn Store>, runtime: &tokio::runtime::Runtime, partition: &Partition, event_id: u64, entity: &str, version: u64) -> Duration {
    let balance = Json::trusted(format!("{{\"balance\":{version}}}"));
    let event = Event {
        event_id,
        entity_id: EntityId::trusted(entity),
        version,
        command_id: CommandId::trusted(&format!("bench-{version}")),
        command: CommandName::trusted("deposit"),
        outcome: EventOutcome::Accepted,
        handler_version: HandlerVersion("0123456789abcdef".into()),
        request: Json::trusted("{\"amount\":1}"),
        response: balance.clone(),
        state: Some(balance),
        patch: None,
        handled_at: 0,
    };
    let started = Instant::now();
    runtime.block_on(store.append(partition, &[event])).unwrap();
    started.elapsed()
}

/// One kept-alive connection.
struct Client(BufReader<TcpStream>);

impl Client {
    fn connect(address: &str) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        Client(BufReader::new(stream))
    }

    fn deposit(&mut self, entity: &str, number: usize) -> Duration {
        let body = "{\"amount\":1}";
        let request = format!(
            "POST /v1/entities/account/{entity}/deposit HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nidempotency-key: bench-{number}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let started = Instant::now();
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
        let mut length = 0;
        let mut line = String::new();
        loop {
            line.clear();
            self.0.read_line(&mut line).unwrap();
            if length == 0 && line.starts_with("HTTP/") {
                assert!(line.contains(" 200 "), "{line}");
            }
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut answer = vec![0; length];
        self.0.read_exact(&mut answer).unwrap();
        started.elapsed()
    }
}

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(url: &str) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quokka"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--storage", url]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit_once("http://").unwrap().1.to_owned();
        Server { child, address }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
