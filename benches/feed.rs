//! How fast the feed is, and what those who only wait cost:
//!
//! - catching up in pages of 1,000, against a plain `SELECT` of the same rows by the driver, in turn, in one run;
//! - from a command's answer to a follower of the event stream, on the same node and on another one;
//! - statements a second that 5,000 idle followers cost, half of them long polls and half event streams (not on SQLite).
//!
//! ```text
//! cargo bench --bench feed -- [--events N] [--followers N] STORAGE_URL ...
//! ```
//!
//! It starts two nodes on each database, as processes of their own, and writes to it: name one that is empty.

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use clap::Parser;
use futures_util::StreamExt;
use mysql_async::prelude::Queryable;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    /// The databases.
    urls: Vec<String>,
    /// How many events are caught up with.
    #[arg(long, default_value_t = 100_000)]
    events: usize,
    /// How many followers wait.
    #[arg(long, default_value_t = 5000)]
    followers: usize,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A node; killed when dropped.
struct Node {
    child: Child,
    base: String,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(url: &str) -> Node {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quokka"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--storage", url]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let base = lines.find_map(|line| line.split_once("http://").map(|(_, address)| format!("http://{}", address.trim()))).unwrap();
    Node { child, base }
}

fn main() {
    let args = Args::parse();
    quokka::http::raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    for url in &args.urls {
        runtime.block_on(run(&args, url));
    }
}

async fn run(args: &Args, url: &str) {
    let (node, other) = (start(url), start(url));
    let client = reqwest::Client::new();
    println!("{}", url.split(':').next().unwrap());
    let lines: String = (0..args.events)
        .map(|number| {
            format!(
                "{{\"entity_type\":\"account\",\"entity_id\":\"f{}\",\"command\":\"deposit\",\"command_id\":\"{number}\",\"request\":{{\"amount\":1}}}}\n",
                number % 500
            )
        })
        .collect();
    let request = client.post(format!("{}/v1/commands", node.base)).header("content-type", "application/x-ndjson").body(lines);
    let answers = request.send().await.unwrap().text().await.unwrap();
    assert_eq!(answers.matches("{\"status\":200,").count(), args.events);

    let mut rates = Vec::new();
    for _ in 0..3 {
        rates.push((catch_up(&client, &other.base, args.events).await, plain(url, args.events).await));
    }
    rates.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (feed, select) = rates[1];
    match select {
        Some(select) => {
            println!("  catching up      {feed:.0} events/s in pages of 1,000; a plain SELECT reads {select:.0} rows/s ({:.2} of it)", feed / select)
        }
        None => println!("  catching up      {feed:.0} events/s in pages of 1,000"),
    }
    for (name, base) in [("the same node", &node.base), ("another node", &other.base)] {
        let mut times = latencies(&client, &node.base, base).await;
        times.sort();
        let at = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1000.0;
        println!("  to a follower    {name}: p50 {:.1} ms, p99 {:.1} ms after the answer", at(50), at(99));
    }
    // A stream that was left is noticed when something is sent there, and followed until then.
    drop(other);
    if url.starts_with("mysql:") {
        println!("  {} waiting    {:.1} statements/s", args.followers, idle(&client, &node.base, url, args.followers).await);
    }
}

/// Events a second.
async fn catch_up(client: &reqwest::Client, base: &str, events: usize) -> f64 {
    let (started, mut count, mut since) = (Instant::now(), 0, String::new());
    loop {
        let page = client.get(format!("{base}/v1/feed?types=account&limit=1000{since}")).send().await.unwrap().text().await.unwrap();
        let found = page.matches("\"event_id\":").count();
        if found == 0 {
            break;
        }
        count += found;
        let at = page.rfind("\"next_batch\":\"").unwrap() + "\"next_batch\":\"".len();
        since = format!("&since={}", page[at..].split('"').next().unwrap());
    }
    assert!(count >= events, "{count} of {events}");
    count as f64 / started.elapsed().as_secs_f64()
}

/// Rows a second that a plain range scan reads, in chunks of 1,000; none on SQLite.
async fn plain(url: &str, events: usize) -> Option<f64> {
    if !url.starts_with("mysql:") {
        return None;
    }
    let mut conn = mysql_async::Conn::new(mysql_async::Opts::from_url(url).unwrap()).await.unwrap();
    let (started, mut count) = (Instant::now(), 0);
    for shard in 0..64 {
        let mut last = 0_u64;
        loop {
            let sql = format!(
                "SELECT event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, handled_at, committed_at, state, \
                 state_base FROM account WHERE shard = {shard} AND event_id > {last} ORDER BY event_id LIMIT 1000"
            );
            let rows: Vec<mysql_async::Row> = conn.query(sql).await.unwrap();
            let Some(row) = rows.last() else { break };
            last = row.get(0).unwrap();
            count += rows.len();
        }
    }
    assert!(count >= events);
    Some(count as f64 / started.elapsed().as_secs_f64())
}

/// From the answers of single commands at one node to their events in a stream of another.
async fn latencies(client: &reqwest::Client, base: &str, follower: &str) -> Vec<Duration> {
    let seen: Arc<Mutex<HashMap<String, Instant>>> = Arc::default();
    let response = client.get(format!("{follower}/v1/feed?types=account&since=now")).header("accept", "text/event-stream").send().await.unwrap();
    let noted = seen.clone();
    let reader = tokio::spawn(async move {
        let (mut stream, mut text) = (response.bytes_stream(), String::new());
        while let Some(Ok(chunk)) = stream.next().await {
            let now = Instant::now();
            text.push_str(&String::from_utf8_lossy(&chunk));
            while let Some(end) = text.find('\n') {
                let line: String = text.drain(..=end).collect();
                if let Some(event) = line.strip_prefix("data:").and_then(|data| serde_json::from_str::<Value>(data).ok()) {
                    noted.lock().unwrap().insert(event["command_id"].as_str().unwrap().to_owned(), now);
                }
            }
        }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut answered = Vec::new();
    let run = xid::new();
    for number in 0..300 {
        let id = format!("{run}-{number}");
        let request = client.post(format!("{base}/v1/entities/account/l{}/deposit", number % 50)).header("content-type", "application/json");
        let reply = request.header("idempotency-key", &id).body("{\"amount\":1}").send().await.unwrap();
        assert_eq!(reply.status(), 200);
        answered.push((id, Instant::now()));
        tokio::time::sleep(Duration::from_millis(7)).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    reader.abort();
    let seen = seen.lock().unwrap();
    // An event may be seen before the answer is.
    answered.iter().map(|(id, at)| seen[id].saturating_duration_since(*at)).collect()
}

/// Statements that the server counts in ten seconds, a second.
async fn idle(client: &reqwest::Client, base: &str, url: &str, followers: usize) -> f64 {
    let mut waiting = Vec::new();
    for number in 0..followers {
        let request = client.get(format!("{base}/v1/feed?types=account&since=now&timeout=60s"));
        let request = if number % 2 == 0 { request } else { request.header("accept", "text/event-stream") };
        waiting.push(tokio::spawn(async move {
            let mut stream = request.send().await.unwrap().bytes_stream();
            while stream.next().await.is_some() {}
        }));
        if number % 200 == 199 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut conn = mysql_async::Conn::new(mysql_async::Opts::from_url(url).unwrap()).await.unwrap();
    let (_, before): (String, u64) = conn.query_first("SHOW GLOBAL STATUS LIKE 'Questions'").await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let (_, after): (String, u64) = conn.query_first("SHOW GLOBAL STATUS LIKE 'Questions'").await.unwrap().unwrap();
    waiting.iter().for_each(|waiting| waiting.abort());
    // The question itself counts once.
    (after - before - 1) as f64 / 10.0
}
