//! How close one hot entity comes to what the database can take, and how far it is from a transaction by hand. In one run, in turn:
//!
//! - (a) the engine's own limit: appends of 500 rows, one after another on one connection, by the same driver;
//! - (b) one entity, single commands over 1, 16, 64, 256 and 512 connections;
//! - (c) the same as NDJSON streams;
//! - (d) 1,000 entities over 256 connections;
//! - (e) by hand: `SELECT … FOR UPDATE`, `UPDATE`, `INSERT`, `COMMIT` on one row, 64 connections (not on SQLite).
//!
//! ```text
//! cargo bench --bench hot_entity -- [--seconds N] [--rounds N] [--database-pid PID] STORAGE_URL ...
//! ```
//!
//! It starts the server and the load generator itself, as processes of their own, so that their CPU time can be told apart, and writes to the databases
//! that the URLs name. Medians of the rounds are printed. The database's CPU time is known only where its process id is given; the client's is not
//! measured in (a) and (e). Transactions by hand send each statement as a text of its own, `BEGIN` among them, and connect within the time.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use clap::Parser;
use mysql_async::prelude::Queryable;
use quokka::core::{CommandId, CommandName, EntityId, EntityType, Event, EventOutcome, HandlerVersion, Json, Partition, ShardCount, ShardId};
use quokka::store;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Rows of one append that measures the engine.
const BATCH: usize = 500;
/// Connections of the transactions by hand.
const BY_HAND: usize = 64;

#[derive(Parser)]
struct Args {
    /// The databases.
    urls: Vec<String>,
    /// For how long each figure is measured.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// How often each figure is measured.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The process of the database, for its CPU time.
    #[arg(long)]
    database_pid: Option<u32>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One line of the table.
struct Case {
    name: &'static str,
    run: fn(&Bench) -> Figures,
}

/// What one run of a case told.
#[derive(Clone, Copy, Default)]
struct Figures {
    per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    /// Microseconds of CPU a row: server, handler processes, database, client.
    cpu: [f64; 4],
}

const CASES: &[Case] = &[
    Case { name: "(a) appends of 500 rows", run: |bench| bench.appends() },
    Case { name: "(b) 1 connection", run: |bench| bench.load(&["--entities", "1", "--connections", "1"]) },
    Case { name: "(b) 16 connections", run: |bench| bench.load(&["--entities", "1", "--connections", "16"]) },
    Case { name: "(b) 64 connections", run: |bench| bench.load(&["--entities", "1", "--connections", "64"]) },
    Case { name: "(b) 256 connections", run: |bench| bench.load(&["--entities", "1", "--connections", "256"]) },
    Case { name: "(b) 512 connections", run: |bench| bench.load(&["--entities", "1", "--connections", "512"]) },
    Case { name: "(c) NDJSON, 4 streams", run: |bench| bench.load(&["--entities", "1", "--connections", "4", "--bulk"]) },
    Case { name: "(d) 1,000 entities, 256", run: |bench| bench.load(&["--entities", "1000", "--connections", "256"]) },
    Case { name: "(e) by hand, 64", run: |bench| bench.by_hand() },
];

fn main() {
    let args = Args::parse();
    for url in &args.urls {
        let bench = Bench::new(&args, url);
        let mut measured = vec![Vec::new(); CASES.len()];
        for _ in 0..args.rounds {
            for (case, measured) in CASES.iter().zip(&mut measured) {
                measured.push((case.run)(&bench));
            }
        }
        let medians: Vec<Figures> = measured.into_iter().map(|mut rounds| median(&mut rounds)).collect();
        let (limit, by_hand) = (medians[0].per_second, medians[CASES.len() - 1].per_second);
        println!("\n{}, {} cores, medians of {}\n", bench.engine, std::thread::available_parallelism().unwrap(), args.rounds);
        println!("| what | rows/s | p50 ms | p99 ms | of (a) | of (e) | µs a row: server | handlers | database | client |");
        println!("|---|---|---|---|---|---|---|---|---|---|");
        for (case, figures) in CASES.iter().zip(&medians).filter(|(_, figures)| figures.per_second > 0.0) {
            let Figures { per_second, p50_ms, p99_ms, cpu: [server, handlers, database, client] } = figures;
            let to_hand = if by_hand > 0.0 { format!("{:.1}", per_second / by_hand) } else { "-".into() };
            println!(
                "| {} | {per_second:.0} | {p50_ms:.1} | {p99_ms:.1} | {:.2} | {to_hand} | {server:.0} | {handlers:.0} | {database:.0} | {client:.0} |",
                case.name,
                per_second / limit
            );
        }
    }
}

/// The round in the middle, by rows a second; of an even number, the slower one of the two in the middle.
fn median(rounds: &mut [Figures]) -> Figures {
    rounds.sort_by(|a, b| a.per_second.total_cmp(&b.per_second));
    rounds[(rounds.len() - 1) / 2]
}

struct Bench {
    runtime: tokio::runtime::Runtime,
    url: String,
    engine: String,
    duration: Duration,
    database_pid: Option<u32>,
    server: Child,
    address: String,
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Bench {
    fn new(args: &Args, url: &str) -> Bench {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let engine = runtime.block_on(async { store::open(&options(url)).await.unwrap().engine() });
        let mut server = Command::new(env!("CARGO_BIN_EXE_quokka"));
        server.args(["serve", "--listen", "127.0.0.1:0", "--storage", url]);
        let mut server = server.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = format!("http://{}", line.trim().rsplit_once("http://").unwrap().1);
        Bench { runtime, url: url.into(), engine, duration: Duration::from_secs(args.seconds), database_pid: args.database_pid, server, address }
    }

    /// Runs the load generator.
    fn load(&self, arguments: &[&str]) -> Figures {
        let seconds = format!("{}s", self.duration.as_secs());
        let before = (cpu(self.server.id()), handlers_cpu(self.server.id()), self.database_pid.map_or(0.0, cpu), children_cpu());
        let output = Command::new(env!("CARGO_BIN_EXE_quokka"))
            .args(["bench", "--url", &self.address, "--duration", &seconds, "--json"])
            .args(arguments)
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |name: &str| report[name].as_f64().unwrap();
        let rows = number("committed");
        let after = (cpu(self.server.id()), handlers_cpu(self.server.id()), self.database_pid.map_or(0.0, cpu), children_cpu());
        let cpu = [after.0 - before.0, after.1 - before.1, after.2 - before.2, after.3 - before.3].map(|seconds| seconds * 1e6 / rows);
        Figures { per_second: number("tps"), p50_ms: number("p50_ms"), p99_ms: number("p99_ms"), cpu }
    }

    /// Appends of the rows that a deposit makes, one after another.
    fn appends(&self) -> Figures {
        self.runtime.block_on(async {
            let store = store::open(&options(&self.url)).await.unwrap();
            let entity_type = EntityType::new("bench_insert").unwrap();
            store.create_type(&entity_type).await.unwrap();
            let partition = Partition { entity_type, shard: ShardId(0) };
            let (entity, mut version) = (xid::new().to_string(), 0);
            let mut head = store.head(&partition).await.unwrap();
            let (start, cpu_before) = (Instant::now(), self.database_pid.map_or(0.0, cpu));
            let mut times = Vec::new();
            while start.elapsed() < self.duration {
                let events: Vec<Event> = (1..=BATCH as u64).map(|row| deposit(&entity, head + row, version + row)).collect();
                (head, version) = (head + BATCH as u64, version + BATCH as u64);
                let sent = Instant::now();
                store.append(&partition, &events).await.unwrap();
                times.push(sent.elapsed());
            }
            let database = (self.database_pid.map_or(0.0, cpu) - cpu_before) * 1e6 / version as f64;
            figures(times, version as usize, start.elapsed(), [0.0, 0.0, database, 0.0])
        })
    }

    /// What a service would do without quokka: a row for the balance, one for each deposit, and a transaction around both.
    fn by_hand(&self) -> Figures {
        if !self.url.starts_with("mysql:") {
            return Figures::default();
        }
        self.runtime.block_on(async {
            let pool = mysql_async::Pool::new(self.url.as_str());
            let mut conn = pool.get_conn().await.unwrap();
            for sql in [
                "DROP TABLE IF EXISTS bench_balance, bench_deposit",
                "CREATE TABLE bench_balance (id INT PRIMARY KEY, balance BIGINT NOT NULL) ENGINE=InnoDB",
                "CREATE TABLE bench_deposit (id VARCHAR(64) PRIMARY KEY, amount BIGINT NOT NULL, balance BIGINT NOT NULL) ENGINE=InnoDB",
                "INSERT INTO bench_balance VALUES (1, 0)",
            ] {
                conn.query_drop(sql).await.unwrap();
            }
            let (start, cpu_before) = (Instant::now(), self.database_pid.map_or(0.0, cpu));
            let clients: Vec<_> = (0..BY_HAND).map(|_| tokio::spawn(hand(pool.clone(), start + self.duration))).collect();
            let mut times = Vec::new();
            for client in clients {
                times.extend(client.await.unwrap());
            }
            let (rows, database) = (times.len(), (self.database_pid.map_or(0.0, cpu) - cpu_before) * 1e6 / times.len() as f64);
            figures(times, rows, start.elapsed(), [0.0, 0.0, database, 0.0])
        })
    }
}

/// One client's transactions.
async fn hand(pool: mysql_async::Pool, until: Instant) -> Vec<Duration> {
    let mut conn = pool.get_conn().await.unwrap();
    let mut times = Vec::new();
    while Instant::now() < until {
        let start = Instant::now();
        conn.query_drop("BEGIN").await.unwrap();
        let balance: Option<i64> = conn.query_first("SELECT balance FROM bench_balance WHERE id = 1 FOR UPDATE").await.unwrap();
        let balance = balance.unwrap() + 1;
        conn.query_drop(format!("UPDATE bench_balance SET balance = {balance} WHERE id = 1")).await.unwrap();
        conn.query_drop(format!("INSERT INTO bench_deposit VALUES ('{}', 1, {balance})", xid::new())).await.unwrap();
        conn.query_drop("COMMIT").await.unwrap();
        times.push(start.elapsed());
    }
    times
}

fn figures(mut times: Vec<Duration>, rows: usize, took: Duration, cpu: [f64; 4]) -> Figures {
    times.sort_unstable();
    let ms = |percent: usize| times[times.len() * percent / 100].as_secs_f64() * 1000.0;
    Figures { per_second: rows as f64 / took.as_secs_f64(), p50_ms: ms(50), p99_ms: ms(99), cpu }
}

fn options(url: &str) -> store::Options {
    store::Options { url: url.into(), shards: ShardCount::new(64).unwrap(), pool: 1, statement_timeout: Duration::from_secs(8) }
}

fn deposit(entity: &str, event_id: u64, version: u64) -> Event {
    Event {
        event_id,
        entity_id: EntityId::new(entity, 20).unwrap(),
        version,
        command_id: CommandId::new(&xid::new().to_string()).unwrap(),
        command: CommandName::new("deposit").unwrap(),
        outcome: EventOutcome::Accepted,
        handler_version: HandlerVersion("0123456789abcdef".into()),
        request: Json::canonical(br#"{"amount":1}"#).unwrap(),
        response: Json::canonical(format!(r#"{{"balance":{version}}}"#).as_bytes()).unwrap(),
        state: Some(Json::canonical(format!(r#"{{"balance":{version}}}"#).as_bytes()).unwrap()),
        patch: None,
        handled_at: 1_700_000_000_000,
    }
}

/// Seconds of CPU that a process has used.
fn cpu(pid: u32) -> f64 {
    ticks(pid, 13)
}

/// Seconds of CPU that the children of a process have used.
fn handlers_cpu(pid: u32) -> f64 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
    let of_tasks = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok()).collect::<String>();
    let all = if of_tasks.is_empty() { children } else { of_tasks };
    all.split_whitespace().filter_map(|pid| pid.parse().ok()).map(cpu).sum()
}

/// Seconds of CPU that ended children of this process have used.
fn children_cpu() -> f64 {
    ticks(std::process::id(), 15)
}

/// The sum of two neighbouring fields of a process's `stat`, counted from 0; ticks are hundredths of a second on Linux.
fn ticks(pid: u32, field: usize) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The program's name stands in parentheses and may hold spaces.
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let number = |at: usize| fields.get(at - 2).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
    (number(field) + number(field + 1)) / 100.0
}
