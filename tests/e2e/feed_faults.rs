//! Readers of the feed while nodes and databases are killed, while many wait, and while the log is not what it should be.
//!
//! `TEST_LONG=1` makes the tests with kills last minutes instead of seconds.

use super::follow::{Chain, Stream};
use super::load::{Load, check};
use crate::support::place::{Place, on_each_engine};
use crate::support::quokka::{Server, Setup, client, get, post};
use crate::support::server::{Database, Engine};
use mysql_async::prelude::Queryable;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often something is killed in one test.
fn kills() -> usize {
    if is_long() { 300 } else { 4 }
}

fn is_long() -> bool {
    std::env::var_os("TEST_LONG").is_some_and(|value| value == "1")
}

/// Readers with pages of several sizes, each at one of the servers, who go on until they are stopped and have read all.
struct Readers {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<Chain>>,
}

impl Readers {
    fn start(targets: &[String]) -> Readers {
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = [1, 7, 1000, 100].into_iter().enumerate().map(|(number, limit)| {
            let (base, stop) = (targets[number % targets.len()].clone(), stop.clone());
            tokio::spawn(async move {
                let mut chain = Chain::new(&base, &format!("types=account&limit={limit}&rejected=true&timeout=1s"));
                while !stop.load(Ordering::Relaxed) {
                    if chain.try_step().await.is_none() {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
                chain.query = "types=account&limit=1000&rejected=true".into();
                let give_up = Instant::now() + Duration::from_secs(60);
                while chain.try_step().await != Some(0) {
                    assert!(Instant::now() < give_up, "the end is never reached");
                }
                chain
            })
        });
        Readers { tasks: tasks.collect(), stop }
    }

    /// What all of them were given, which is the same, and what the tables hold.
    async fn finish(self, base: &str, entities: &[String]) {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for entity in entities {
            let mut after = 0;
            loop {
                let path = format!("/v1/entities/account/{entity}/events?after={after}&limit=1000&include=state");
                let page = get(&client(), base, &path).await.unwrap().json();
                all.extend(page["events"].as_array().unwrap().iter().map(|event| (entity.clone(), event["version"].as_u64().unwrap(), event.clone())));
                let Some(next) = page["next"].as_u64() else { break };
                after = next;
            }
        }
        all.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
        for task in self.tasks {
            let chain = task.await.unwrap();
            let mut given: Vec<_> = chain.seen.into_values().collect();
            given.sort_by_key(|event| (event["entity_id"].as_str().unwrap().to_owned(), event["version"].as_u64()));
            assert_eq!(given.len(), all.len());
            for (mut event, (_, _, held)) in given.into_iter().zip(&all) {
                for member in ["entity_type", "entity_id", "shard"] {
                    event.as_object_mut().unwrap().remove(member);
                }
                assert_eq!(event, *held);
            }
        }
    }
}

fn entities() -> Vec<String> {
    (0..6).map(|number| format!("hot{number}")).collect()
}

/// Eight writers, two nodes that both own everything, one of them killed again and again.
async fn kill_a_node(place: Place) {
    let mut killed = place.setup().start();
    let other = place.setup().start();
    let setup = Setup { listen: format!("127.0.0.1:{}", killed.port()), ..place.setup() };
    let targets = Arc::new(vec![killed.base.clone(), other.base.clone()]);
    let readers = Readers::start(&targets);
    let load = Load::start("hot", &targets, 8, entities().len());
    for kill in 1..=kills() {
        load.until(kill * 100).await;
        killed.kill();
        killed = setup.start();
    }
    load.until((kills() + 1) * 100).await;
    let deposits = load.finish().await;
    check(&other.base, &deposits).await;
    readers.finish(&other.base, &entities()).await;
}

on_each_engine!(dense_log_no_event_is_skipped_or_doubled_whatever_is_killed, kill_a_node);

/// What was given out is there after the database was killed; on MariaDB without a binary log, commits are visible before they are durable.
async fn kill_the_database(database: Database) {
    let servers = [Setup::on(database.url()).start(), Setup::on(database.url()).start()];
    let targets = Arc::new(servers.iter().map(|server| server.base.clone()).collect::<Vec<_>>());
    let readers = Readers::start(&targets);
    let load = Load::start("hot", &targets, 8, entities().len());
    for kill in 1..=kills() {
        load.until(kill * 100).await;
        database.server().kill();
        database.server().start().await;
    }
    load.until((kills() + 1) * 100).await;
    let deposits = load.finish().await;
    check(&targets[0], &deposits).await;
    readers.finish(&targets[0], &entities()).await;
}

/// Connections are killed at random moments, and strangers write the next event of some partition, wait, and roll back or vanish.
async fn disturb(database: Database) {
    let servers = [Setup::on(database.url()).start(), Setup::on(database.url()).start()];
    let targets = Arc::new(servers.iter().map(|server| server.base.clone()).collect::<Vec<_>>());
    let readers = Readers::start(&targets);
    let load = Load::start("hot", &targets, 8, entities().len());
    let until = Instant::now() + if is_long() { Duration::from_secs(300) } else { Duration::from_secs(8) };
    let mut random = StdRng::seed_from_u64(7);
    let (mut kills, mut strangers) = (0, 0);
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(random.random_range(5..60))).await;
        let mut admin = database.admin().await;
        if random.random_bool(0.5) {
            let connections: Vec<u64> = admin.query(format!("SELECT id FROM information_schema.processlist WHERE user = '{}'", database.name())).await.unwrap();
            if let Some(id) = connections.get(random.random_range(0..connections.len().max(1))) {
                // It may have gone by itself.
                kills += u32::from(admin.query_drop(format!("KILL {id}")).await.is_ok());
            }
            continue;
        }
        let entity = format!("hot{}", random.random_range(0..6));
        admin.query_drop("SET SESSION innodb_lock_wait_timeout = 1").await.unwrap();
        admin.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await.unwrap();
        admin.query_drop("BEGIN").await.unwrap();
        let next = format!(
            "INSERT INTO account (shard, event_id, entity_id, version, command_id, command_name, outcome, handler_version, response, handled_at, committed_at) \
             SELECT shard, 1 + (SELECT MAX(event_id) FROM account AS others WHERE others.shard = newest.shard), 'stranger', 1, 'x', 'open', 'accepted', 'v', '{{}}', 0, \
             UTC_TIMESTAMP(6) FROM account AS newest WHERE entity_id = '{entity}' AND version = 1"
        );
        if admin.query_drop(next).await.is_ok() {
            strangers += 1;
            tokio::time::sleep(Duration::from_millis(random.random_range(0..150))).await;
        }
        if random.random_bool(0.7) {
            let _ = admin.query_drop("ROLLBACK").await;
        }
    }
    let deposits = load.finish().await;
    println!("{} commands beside {kills} killed connections and {strangers} transactions of strangers", deposits.len());
    assert!(kills > 10 && strangers > 5);
    check(&targets[0], &deposits).await;
    readers.finish(&targets[0], &entities()).await;
}

/// A thousand who wait cost the database less than ten statements a second.
async fn an_idle_crowd(database: Database) {
    let server = Setup::on(database.url()).start();
    post(&client(), &server.base, "account/a/deposit", "d-1", r#"{"amount":1}"#).await.unwrap();
    let since = get(&client(), &server.base, "/v1/feed?types=account").await.unwrap().json()["next_batch"].as_str().unwrap().to_owned();
    let mut streams = Vec::new();
    for _ in 0..500 {
        streams.push(Stream::open(&server.base, "types=account&since=now", None).await);
    }
    let poll = |number: usize| {
        let scope = if number.is_multiple_of(2) { format!("types=account&since={since}") } else { format!("entity=account/a{number}&since={since}") };
        let url = format!("{}/v1/feed?{scope}&timeout=4m", server.base);
        tokio::spawn(async move { reqwest::Client::builder().build().unwrap().get(url).send().await.unwrap().text().await.unwrap() })
    };
    let polls: Vec<_> = (0..500).map(poll).collect();
    followers(&server, 1000.0).await;
    let mut admin = database.admin().await;
    let before = reads(&mut admin).await;
    let began = Instant::now();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let asked = reads(&mut admin).await - before;
    let seconds = began.elapsed().as_secs_f64();
    assert!((asked as f64) < 10.0 * seconds, "{asked} reads in {seconds} s");
    // All of them hear of the next commit.
    post(&client(), &server.base, "account/a/deposit", "d-2", r#"{"amount":1}"#).await.unwrap();
    for stream in &mut streams {
        assert_eq!(stream.event().await.unwrap().1["command_id"], "d-2");
    }
    for (number, poll) in polls.into_iter().enumerate().filter(|(number, _)| number.is_multiple_of(2)) {
        assert!(poll.await.unwrap().contains("d-2"), "{number}");
    }
}

/// Reads that the server was asked for. Opening a connection, as one that idled for too long is, asks for none.
async fn reads(admin: &mut mysql_async::Conn) -> u64 {
    let row: (String, u64) = admin.query_first("SHOW GLOBAL STATUS LIKE 'Com_select'").await.unwrap().unwrap();
    row.1
}

async fn followers(server: &Server, count: f64) {
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let metrics = get(&client(), &server.base, "/metrics").await.unwrap().body;
        let found: f64 = metrics.lines().find_map(|line| line.strip_prefix("quokka_feed_followers ")?.parse().ok()).unwrap_or(0.0);
        if found == count {
            return;
        }
        assert!(Instant::now() < give_up, "{found} followers, never {count}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A transaction of somebody else that holds an event id open delays that partition alone, and shows with its age; whoever waits there hears of the
/// commit when it goes.
async fn a_stranger_holds_a_partition(database: Database) {
    let server = Setup::on(database.url()).start();
    let base = &server.base;
    for entity in ["a", "A"] {
        post(&client(), base, &format!("account/{entity}/deposit"), "d-1", r#"{"amount":1}"#).await.unwrap();
    }
    let since = get(&client(), base, "/v1/feed?types=account").await.unwrap().json()["next_batch"].as_str().unwrap().to_owned();
    let mut stranger = database.admin().await;
    // It locks what it writes and nothing that it reads.
    stranger.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await.unwrap();
    stranger.query_drop("BEGIN").await.unwrap();
    let columns = "entity_id, version, command_id, command_name, outcome, handler_version, request, response, state, handled_at, committed_at, state_base";
    let insert = format!(
        "INSERT INTO account (shard, event_id, {columns}) SELECT shard, event_id + 1, 'stranger', 1, 'x', command_name, outcome, handler_version, request, response, state, handled_at, \
         committed_at, state_base FROM account WHERE entity_id = 'a'"
    );
    stranger.query_drop(insert).await.unwrap();
    let (url, waiting) = (base.clone(), client());
    let held = tokio::spawn(async move { post(&waiting, &url, "account/a/deposit", "d-2", r#"{"amount":1}"#).await.unwrap() });
    let free = post(&client(), base, "account/A/deposit", "d-2", r#"{"amount":1}"#).await.unwrap();
    assert_eq!(free.status, 200, "{}", free.body);
    let page = get(&client(), base, &format!("/v1/feed?types=account&since={since}&timeout=20s")).await.unwrap().json();
    assert_eq!((page["events"].as_array().unwrap().len(), &page["events"][0]["entity_id"]), (1, &"A".into()));
    let give_up = Instant::now() + Duration::from_secs(30);
    loop {
        let metrics = get(&client(), base, "/metrics").await.unwrap().body;
        let age: f64 = metrics.lines().find_map(|line| line.strip_prefix("quokka_oldest_append_seconds ")?.parse().ok()).unwrap_or(0.0);
        if age > 0.0 {
            break;
        }
        assert!(Instant::now() < give_up, "the append that waits shows nowhere");
    }
    let next = page["next_batch"].as_str().unwrap().to_owned();
    let (url, waiting) = (format!("/v1/feed?types=account&since={next}&timeout=4m"), client());
    let at = base.clone();
    let poll = tokio::spawn(async move { get(&waiting, &at, &url).await.unwrap().json() });
    stranger.query_drop("ROLLBACK").await.unwrap();
    assert_eq!(held.await.unwrap().status, 200);
    let page = poll.await.unwrap();
    assert_eq!((page["events"].as_array().unwrap().len(), &page["events"][0]["command_id"]), (1, &"d-2".into()));
}

/// A hole is never passed: readers of that partition are told of a fault each time, the others go on.
async fn a_hole_is_never_passed(database: Database) {
    let server = Setup::on(database.url()).start();
    let base = &server.base;
    for number in 0..5 {
        post(&client(), base, "account/a/deposit", &format!("d-{number}"), r#"{"amount":1}"#).await.unwrap();
    }
    let since = get(&client(), base, "/v1/feed?types=account&limit=2").await.unwrap().json()["next_batch"].as_str().unwrap().to_owned();
    let mut admin = database.admin().await;
    admin.query_drop("DELETE FROM account WHERE version = 3").await.unwrap();
    let server = {
        drop(server);
        Setup::on(database.url()).start()
    };
    let reply = get(&client(), &server.base, &format!("/v1/feed?types=account&since={since}")).await.unwrap();
    assert_eq!(reply.told(), "500 internal");
    let reply = get(&client(), &server.base, "/v1/feed?entity=account/a").await.unwrap();
    assert_eq!(reply.told(), "500 internal");
    assert!(server.log().contains("the log has a hole"), "{}", server.log());
    // A log that is shorter than a token is another one.
    admin.query_drop("DELETE FROM account WHERE version > 1").await.unwrap();
    let reply = get(&client(), &server.base, &format!("/v1/feed?types=account&since={since}")).await.unwrap();
    assert!(reply.told() == "400 invalid-token" && reply.body.contains("ahead of the log"), "{}", reply.body);
}

/// Makes a test for each server of a function that takes a database of a server that it has alone.
macro_rules! alone_on_both {
    ($($name:ident: $test:path;)*) => {
        $(
            mod $name {
                use super::*;

                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn mariadb() {
                    if let Some(database) = Engine::MariaDb.database_alone().await {
                        $test(database).await;
                    }
                }

                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn mysql() {
                    if let Some(database) = Engine::MySql.database_alone().await {
                        $test(database).await;
                    }
                }
            }
        )*
    };
}

alone_on_both! {
    durable_before_answer_in_the_feed_whenever_the_database_is_killed: kill_the_database;
    dense_log_no_event_is_skipped_or_doubled_however_writers_are_disturbed: disturb;
    a_thousand_who_wait_cost_few_statements: an_idle_crowd;
    a_transaction_of_somebody_else_holds_up_one_partition: a_stranger_holds_a_partition;
    dense_log_a_hole_is_never_passed: a_hole_is_never_passed;
}
