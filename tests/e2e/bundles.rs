//! Bundles: all or nothing across entities, types and shards, once, whatever dies on the way.

use super::load::history;
use crate::support::place::{Place, on_each_engine};
use crate::support::proxy::{Fault, Proxy};
use crate::support::quokka::{Reply, Server, Setup, client, get, send};
use crate::support::server::{Database, Engine};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

fn command(entity_type: &str, entity_id: &str, command: &str, command_id: &str, request: Value) -> Value {
    json!({ "entity_type": entity_type, "entity_id": entity_id, "command": command, "command_id": command_id, "request": request })
}

fn account(id: &str, name: &str, command_id: &str, amount: i64) -> Value {
    command("account", id, name, command_id, json!({ "amount": amount }))
}

async fn bundle(client: &reqwest::Client, base: &str, commands: &[Value]) -> Result<Reply, reqwest::Error> {
    let body = json!({ "commands": commands }).to_string();
    send(client.post(format!("{base}/v1/bundles")).header("content-type", "application/json").body(body)).await
}

async fn balance(client: &reqwest::Client, base: &str, id: &str) -> Option<i64> {
    get(client, base, &format!("/v1/entities/account/{id}")).await.unwrap().json()["state"]["balance"].as_i64()
}

async fn all_or_nothing(place: Place) {
    let server = place.setup().start();
    let other = place.setup().start();
    let (client, base) = (client(), server.base.as_str());
    // Two types, several shards, and commands that see what those before them did.
    let opening = [
        account("alice", "open", "o", 100),
        account("bob", "open", "o", 0),
        command("red_packet", "gift", "create", "c", json!({ "amount": 10, "count": 2 })),
        account("alice", "charge", "t-1", 30),
        account("bob", "deposit", "t-1", 30),
    ];
    let first = bundle(&client, base, &opening).await.unwrap();
    assert_eq!((first.status, first.header("idempotency-replayed")), (200, None), "{}", first.body);
    let results = first.json()["results"].as_array().unwrap().clone();
    let told: Vec<_> = results.iter().map(|result| (result["entity_id"].as_str().unwrap(), result["version"].as_u64().unwrap(), &result["response"])).collect();
    assert_eq!(told[3], ("alice", 2, &json!({ "balance": 70 })));
    assert_eq!(told[4], ("bob", 2, &json!({ "balance": 30 })));
    assert!(first.json()["token"].as_str().unwrap().starts_with("s_"));
    // Each command is recorded as if it had been sent alone.
    let alone = get(&client, base, "/v1/entities/account/alice/commands/t-1").await.unwrap().json();
    assert_eq!(alone, results[3]);
    // Sent again, here and elsewhere: the same bytes.
    for server in [&server, &other] {
        let again = bundle(&client, &server.base, &opening).await.unwrap();
        assert_eq!((again.status, again.header("idempotency-replayed"), &again.body), (200, Some("true"), &first.body));
    }
    // One that is refused takes the others along, and its ids stay free.
    let too_much = [account("alice", "charge", "t-2", 500), account("bob", "deposit", "t-2", 500)];
    let last_fails = [account("bob", "deposit", "t-3", 5), account("alice", "charge", "t-3", 500)];
    for (commands, index) in [(&too_much, 0), (&last_fails, 1)] {
        let refused = bundle(&client, base, commands).await.unwrap();
        let body = refused.json();
        assert_eq!((refused.told().as_str(), body["index"].as_u64()), ("422 bundle-rejected", Some(index)), "{body}");
        assert_eq!((body["problem"]["code"].as_str(), body["problem"]["rejection"]["code"].as_str()), (Some("rejected"), Some("insufficient_funds")));
    }
    assert_eq!((balance(&client, base, "alice").await, balance(&client, base, "bob").await), (Some(70), Some(30)));
    assert_eq!(get(&client, base, "/v1/entities/account/alice/commands/t-3").await.unwrap().told(), "404 command-not-found");
    let smaller = [account("bob", "deposit", "t-3", 5), account("alice", "charge", "t-3", 5)];
    assert_eq!(bundle(&client, base, &smaller).await.unwrap().status, 200);
    // Every kind of failure names its command.
    for (commands, index, code) in [
        (vec![account("alice", "deposit", "x", 1), account("nobody", "charge", "x", 1)], 1, "entity-not-found"),
        (vec![account("alice", "open", "x", 1)], 0, "entity-exists"),
        (vec![account("alice", "deposit", "x", 1), account("alice", "deposit", "x2", -1)], 1, "invalid-request"),
        (vec![account("alice", "vanish", "x", 1)], 0, "unknown-command"),
        (vec![account("alice", "deposit", "x", 1), command("nothing", "a", "open", "x", Value::Null)], 1, "unknown-entity-type"),
        (vec![account("a b", "deposit", "x", 1)], 0, "invalid-entity-id"),
        (vec![account("alice", "deposit", "x y", 1)], 0, "invalid-command-id"),
        (
            vec![
                json!({ "entity_type": "account", "entity_id": "alice", "command": "deposit", "command_id": "x", "request": { "amount": 1 }, "if_version": 1 }),
            ],
            0,
            "version-mismatch",
        ),
        (vec![account("bob", "deposit", "x", 1), account("alice", "charge", "t-1", 30)], 1, "command-id-reused"),
    ] {
        let body = bundle(&client, base, &commands).await.unwrap().json();
        let told = (body["code"].as_str(), body["index"].as_u64(), body["problem"]["code"].as_str());
        assert_eq!(told, (Some("bundle-rejected"), Some(index), Some(code)), "{body}");
    }
    assert_eq!(balance(&client, base, "alice").await, Some(65));
    // What is no bundle at all.
    let twice = [account("alice", "deposit", "x", 1), account("alice", "deposit", "x", 1)];
    assert_eq!(bundle(&client, base, &twice).await.unwrap().told(), "400 invalid-request");
    assert_eq!(bundle(&client, base, &[]).await.unwrap().told(), "400 invalid-request");
    let many: Vec<Value> = (0..1001).map(|number| account("alice", "deposit", &format!("m{number}"), 1)).collect();
    assert_eq!(bundle(&client, base, &many).await.unwrap().told(), "413 request-too-large");
    // A thousand commands are one bundle, on one entity and on many.
    assert_eq!(bundle(&client, base, &many[..1000]).await.unwrap().status, 200);
    let spread: Vec<Value> = (0..1000).map(|number| account(&format!("s{number}"), "open", "o", 1)).collect();
    let answered = bundle(&client, base, &spread).await.unwrap();
    assert_eq!((answered.status, answered.json()["results"].as_array().map(Vec::len)), (200, Some(1000)));
    assert_eq!((balance(&client, base, "alice").await, balance(&client, base, "s999").await), (Some(1065), Some(1)));
    // An id may be left out; the server makes one, and none of it can be told from a new bundle.
    let mut fresh = account("alice", "deposit", "", 1);
    fresh.as_object_mut().unwrap().remove("command_id");
    assert_eq!(bundle(&client, base, &[fresh]).await.unwrap().status, 200);
}

on_each_engine!(bundles_happen_as_a_whole_or_not_at_all, all_or_nothing);

/// Money that moves in bundles between a few accounts, beside single commands on the same ones, through two servers: nobody hears an error, and none is
/// lost or made.
async fn transfers(place: Place) {
    let servers = [place.setup().start(), place.setup().start()];
    let client = client();
    let names = ["a", "b", "c", "d", "e"];
    let opening: Vec<Value> = names.iter().map(|name| account(name, "open", "o", 1000)).collect();
    assert_eq!(bundle(&client, &servers[0].base, &opening).await.unwrap().status, 200);
    let deposited = Arc::new(AtomicUsize::new(0));
    let workers: Vec<_> = (0..10)
        .map(|worker| {
            let (client, base, deposited) = (client.clone(), servers[worker % 2].base.clone(), deposited.clone());
            tokio::spawn(async move {
                for round in 0..20 {
                    let (from, to) = (names[(worker + round) % 5], names[(worker * 3 + round * 2 + 1) % 5]);
                    let id = format!("{worker}-{round}");
                    let reply = if worker < 8 {
                        let commands = [account(from, "charge", &format!("f{id}"), 1), account(to, "deposit", &format!("t{id}"), 1)];
                        bundle(&client, &base, &commands).await.unwrap()
                    } else {
                        deposited.fetch_add(1, Ordering::Relaxed);
                        crate::support::quokka::post(&client, &base, &format!("account/{from}/deposit"), &id, "{\"amount\":1}").await.unwrap()
                    };
                    assert_eq!(reply.status, 200, "{id}: {}", reply.body);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    let mut sum = 0;
    for name in names {
        sum += balance(&client, &servers[0].base, name).await.unwrap();
        let events = history(&client, &servers[1].base, &format!("account/{name}")).await;
        assert!(events.iter().zip(1..).all(|(event, version)| event["version"].as_u64() == Some(version)));
    }
    assert_eq!(sum, 5000 + deposited.load(Ordering::Relaxed) as i64);
}

on_each_engine!(bundles_and_single_commands_share_entities_without_an_error, transfers);

/// Clients that move money in bundles and send each again until it is answered.
struct Movers {
    clients: Vec<tokio::task::JoinHandle<Vec<(String, String)>>>,
    stop: Arc<AtomicBool>,
    moved: Arc<AtomicUsize>,
}

impl Movers {
    fn start(base: &str, clients: usize) -> Movers {
        let (stop, moved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let start = |number: usize| {
            let (base, stop, moved) = (base.to_owned(), stop.clone(), moved.clone());
            tokio::spawn(async move {
                let client = reqwest::Client::builder().timeout(Duration::from_secs(15)).build().unwrap();
                let mut answered = Vec::new();
                for step in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let id = format!("{number}-{step}");
                    let commands = [
                        account(&format!("m{}", number % 3), "deposit", &id, 1),
                        command("red_packet", &format!("p{id}"), "create", &id, json!({ "amount": 2, "count": 2 })),
                        account(&format!("m{}", (number + 1) % 3), "deposit", &format!("{id}x"), 1),
                    ];
                    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
                    let body = loop {
                        match bundle(&client, &base, &commands).await {
                            Ok(reply) if reply.status == 200 => break reply.body,
                            Ok(Reply { status: 503 | 504, .. }) | Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                            Ok(reply) => panic!("{id}: {reply:?}"),
                        }
                        assert!(tokio::time::Instant::now() < deadline, "{id} found no answer within a minute");
                    };
                    moved.fetch_add(1, Ordering::Relaxed);
                    answered.push((id, body));
                }
                answered
            })
        };
        Movers { clients: (0..clients).map(start).collect(), stop, moved }
    }

    async fn until(&self, moved: usize) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(90);
        while self.moved.load(Ordering::Relaxed) < moved {
            assert!(tokio::time::Instant::now() < deadline, "only {} of {moved} bundles were answered", self.moved.load(Ordering::Relaxed));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Lets every client finish; then each bundle is there once and whole, and its answer is still the same.
    async fn finish(self, base: &str) {
        self.stop.store(true, Ordering::Relaxed);
        let client = client();
        let mut answered = Vec::new();
        for mover in self.clients {
            answered.extend(mover.await.unwrap());
        }
        let mut recorded: HashMap<String, usize> = HashMap::new();
        for name in ["m0", "m1", "m2"] {
            let events = history(&client, base, &format!("account/{name}")).await;
            assert!(events.iter().zip(1..).all(|(event, version)| event["version"].as_u64() == Some(version)), "{name}");
            for event in events {
                *recorded.entry(event["command_id"].as_str().unwrap().trim_end_matches('x').to_owned()).or_default() += 1;
            }
        }
        for (id, body) in &answered {
            assert_eq!(recorded.get(id), Some(&2), "both deposits of {id}");
            let packet: Value = serde_json::from_str(body).unwrap();
            assert_eq!(packet["results"][1]["entity_id"], format!("p{id}"));
        }
        assert_eq!(recorded.len(), answered.len(), "nothing is there that no client was told");
        for (id, body) in answered.iter().rev().take(5) {
            let number: usize = id.split('-').next().unwrap().parse().unwrap();
            let commands = [
                account(&format!("m{}", number % 3), "deposit", id, 1),
                command("red_packet", &format!("p{id}"), "create", id, json!({ "amount": 2, "count": 2 })),
                account(&format!("m{}", (number + 1) % 3), "deposit", &format!("{id}x"), 1),
            ];
            assert_eq!(&bundle(&client, base, &commands).await.unwrap().body, body);
        }
    }
}

async fn kill_the_server(place: Place) {
    let mut server = place.setup().start();
    let setup = Setup { listen: format!("127.0.0.1:{}", server.port()), ..place.setup() };
    let base = server.base.clone();
    let movers = Movers::start(&base, 8);
    for kill in 1..=3 {
        movers.until(kill * 40).await;
        server.kill();
        server = setup.start();
    }
    movers.until(160).await;
    movers.finish(&server.base).await;
}

on_each_engine!(a_killed_server_leaves_bundles_whole, kill_the_server);

async fn kill_the_database(database: Database) {
    let server = Setup::on(database.url()).start();
    let movers = Movers::start(&server.base, 8);
    for kill in 1..=3 {
        movers.until(kill * 40).await;
        database.server().kill();
        database.server().start().await;
    }
    movers.until(160).await;
    movers.finish(&server.base).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_mariadb_leaves_bundles_whole() {
    if let Some(database) = Engine::MariaDb.database_alone().await {
        kill_the_database(database).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_mysql_leaves_bundles_whole() {
    if let Some(database) = Engine::MySql.database_alone().await {
        kill_the_database(database).await;
    }
}

/// The connection breaks before, inside and after the call: each bundle happens once.
async fn lose_answers(engine: Engine) {
    let Some(database) = engine.database().await else { return };
    let proxy = Proxy::start(database.server().port()).await;
    let server = Setup::on(&database.url_through(proxy.port())).set("storage.statement_timeout", "3s").start();
    let movers = Movers::start(&server.base, 6);
    movers.until(20).await;
    for (round, fault) in [Fault::CutBeforeRequest("quokka_append_all"), Fault::CutInsideRequest("quokka_append_all"), Fault::CutReply("quokka_append_all")]
        .into_iter()
        .cycle()
        .take(6)
        .enumerate()
    {
        let cuts = proxy.cuts();
        proxy.set(fault);
        while proxy.cuts() < cuts + 3 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        proxy.set(Fault::PassThrough);
        movers.until(20 + (round + 1) * 15).await;
    }
    movers.finish(&server.base).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answers_of_mariadb_leave_bundles_whole() {
    lose_answers(Engine::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answers_of_mysql_leave_bundles_whole() {
    lose_answers(Engine::MySql).await;
}

/// A server that is frozen in the middle of its bundles holds no lock: another one goes on at once on the same entities.
async fn freeze(engine: Engine) {
    let Some(database) = engine.database().await else { return };
    let (frozen, other) = (Setup::on(database.url()).start(), Setup::on(database.url()).start());
    let client = client();
    let movers = Movers::start(&frozen.base, 8);
    let mut slowest = Duration::ZERO;
    for round in 0..15 {
        movers.until((round + 1) * 10).await;
        frozen.signal(Signal::STOP);
        for step in 0..4 {
            let id = format!("o{round}-{step}");
            let commands = [
                account("m0", "deposit", &format!("{id}y"), 1),
                command("red_packet", &format!("q{id}"), "create", &id, json!({ "amount": 2, "count": 2 })),
                account("m1", "deposit", &format!("{id}yx"), 1),
            ];
            let since = std::time::Instant::now();
            assert_eq!(bundle(&client, &other.base, &commands).await.unwrap().status, 200);
            slowest = slowest.max(since.elapsed());
        }
        frozen.signal(Signal::CONT);
    }
    println!("slowest bundle beside a frozen writer: {slowest:?}");
    // A held lock would last until the session's time-out of a minute, or the lock wait's of five seconds.
    assert!(slowest < Duration::from_secs(4), "{slowest:?}");
    drop(other);
    movers.stop.store(true, Ordering::Relaxed);
    for mover in movers.clients {
        mover.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_writer_of_bundles_delays_nobody_on_mariadb() {
    freeze(Engine::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_writer_of_bundles_delays_nobody_on_mysql() {
    freeze(Engine::MySql).await;
}

/// A bundle with an entity that many clients aim at gets through.
async fn beside_a_hot_entity(place: Place) {
    let server: Server = place.setup().start();
    let targets = Arc::new(vec![server.base.clone()]);
    let load = super::load::Load::start("hot", &targets, 32, 1);
    load.until(200).await;
    let client = client();
    for number in 0..10 {
        let commands = [account("hot0", "deposit", &format!("b{number}"), 1), account("cold", "deposit", &format!("b{number}"), 1)];
        let reply = bundle(&client, &server.base, &commands).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    let deposits = load.finish().await;
    let events = history(&client, &server.base, "account/hot0").await;
    assert_eq!(events.len(), deposits.len() + 10);
    assert!(events.iter().zip(1..).all(|(event, version)| event["version"].as_u64() == Some(version)));
}

on_each_engine!(a_bundle_with_a_hot_entity_gets_through, beside_a_hot_entity);

/// A stranger's transaction that holds one partition makes a bundle wait that needs it; the other partitions of that bundle hardly notice.
async fn beside_a_stranger(engine: Engine) {
    let Some(database) = engine.database().await else { return };
    let server = Setup::on(database.url()).start();
    let client = client();
    // Of shards 10 and 36, so that the free one comes first and is written before the held one is met.
    let opening = [account("a", "open", "o", 0), account("c9v3", "open", "o", 0)];
    assert_eq!(bundle(&client, &server.base, &opening).await.unwrap().status, 200);
    let mut stranger = database.admin().await;
    mysql_async::prelude::Queryable::query_drop(&mut stranger, "BEGIN").await.unwrap();
    let held = "INSERT INTO account (shard, event_id, entity_id, version, command_id, command_name, outcome, handler_version, response, handled_at, committed_at) \
        VALUES (36, 2, 'stranger', 1, 'k', 'open', 'accepted', 'v', '{}', 0, UTC_TIMESTAMP(6))";
    mysql_async::prelude::Queryable::query_drop(&mut stranger, held).await.unwrap();
    let waiting = {
        let (client, base) = (client.clone(), server.base.clone());
        tokio::spawn(async move { bundle(&client, &base, &[account("a", "deposit", "b", 1), account("c9v3", "deposit", "b", 1)]).await.unwrap() })
    };
    let mut slowest = Duration::ZERO;
    for number in 0..40 {
        let since = std::time::Instant::now();
        let reply = crate::support::quokka::post(&client, &server.base, "account/a/deposit", &format!("s{number}"), "{\"amount\":1}").await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        slowest = slowest.max(since.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("{engine:?}: slowest command beside a bundle that waits for a stranger: {slowest:?}");
    assert!(!waiting.is_finished(), "it needs the partition that is held");
    assert!(slowest < Duration::from_secs(3), "{slowest:?}");
    mysql_async::prelude::Queryable::query_drop(&mut stranger, "ROLLBACK").await.unwrap();
    let reply = waiting.await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!((balance(&client, &server.base, "a").await, balance(&client, &server.base, "c9v3").await), (Some(41), Some(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bundle_that_waits_for_a_stranger_holds_up_nobody_on_mariadb() {
    beside_a_stranger(Engine::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bundle_that_waits_for_a_stranger_holds_up_nobody_on_mysql() {
    beside_a_stranger(Engine::MySql).await;
}
