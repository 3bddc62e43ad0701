//! Two nodes that both own an entity, or each believe that the other does: only the keys decide.

use super::load::{Clients, judge};
use crate::e2e::load::{check, history};
use crate::support::cluster::Nodes;
use crate::support::place::{Place, on_each_engine};
use crate::support::quokka::{client, get, post};
use crate::support::server::Engine;
use rustix::process::Signal;
use serde_json::Value;
use std::time::Duration;

/// A list of nodes as an environment variable takes it.
fn list(nodes: &[(usize, &String)]) -> String {
    let entries: Vec<String> = nodes.iter().map(|(number, url)| format!("{{ id = \"n{number}\", url = \"{url}\" }}")).collect();
    format!("[{}]", entries.join(", "))
}

/// Two nodes whose maps contradict each other.
async fn contradicting(place: &Place, whose: fn(usize) -> usize) -> Nodes {
    let setups = vec![place.setup().set("cluster.topology", "static"), place.setup().set("cluster.topology", "static")];
    Nodes::start_knowing(setups, |number, setup, urls| {
        let owner = whose(number);
        setup.set("cluster.nodes", &list(&[(owner, &urls[owner])]))
    })
    .await
}

/// 64 clients on one entity, through both nodes: every command takes one version, and no client sees an error.
async fn one_entity(nodes: &Nodes) {
    let each = if std::env::var_os("TEST_LONG").is_some() { 1000 } else { 60 };
    let client = client();
    let clients: Vec<_> = (0..64)
        .map(|number| {
            let (client, bases) = (client.clone(), nodes.bases());
            tokio::spawn(async move {
                for step in 0..each {
                    let base = &bases[(number + step) % 2];
                    let reply = post(&client, base, "account/contested/deposit", &format!("{number}-{step}"), "{\"amount\":1}").await.unwrap();
                    assert_eq!(reply.status, 200, "{number}-{step}: {}", reply.body);
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    for base in nodes.bases() {
        let entity = get(&client, &base, "/v1/entities/account/contested").await.unwrap().json();
        assert_eq!((entity["version"].as_u64(), entity["state"]["balance"].as_u64()), (Some(64 * each as u64), Some(64 * each as u64)));
    }
    let events = history(&client, &nodes.bases()[0], "account/contested").await;
    assert!(events.iter().zip(1..).all(|(event, version)| event["version"].as_u64() == Some(version)));
}

async fn each_says_the_other(place: Place) {
    let nodes = contradicting(&place, |number| 1 - number).await;
    one_entity(&nodes).await;
    assert!(nodes.metric(0, "quokka_forwarded_total").await > 0.0 && nodes.metric(1, "quokka_forwarded_total").await > 0.0);
}

on_each_engine!(forward_once_two_nodes_that_each_say_the_other_owns_it, each_says_the_other);

async fn each_says_mine(place: Place) {
    let nodes = contradicting(&place, |number| number).await;
    one_entity(&nodes).await;
    assert_eq!(nodes.metric(0, "quokka_forwarded_total").await, 0.0);
}

on_each_engine!(unique_truth_two_nodes_that_both_say_mine, each_says_mine);

/// Two requests in a row through a balancer that alternates: no conflict is ever visible.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quick_requests_through_a_balancer_see_no_conflict() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let nodes = contradicting(&place, |number| number).await;
    let client = client();
    for pair in 0..200_u64 {
        for half in 0..2 {
            let base = &nodes.bases()[half as usize];
            let reply = post(&client, base, "account/pair/deposit", &format!("{pair}-{half}"), "{\"amount\":1}").await.unwrap();
            assert_eq!((reply.status, reply.json()["version"].as_u64()), (200, Some(2 * pair + half + 1)), "{}", reply.body);
        }
    }
}

/// An owner that was paused while others wrote on wakes up: it answers no old state, and its commands run on the true one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_wakes_up_reads_and_writes_the_truth() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let nodes = Nodes::elected(&place, 2).await;
    nodes.agree(&nodes.all()).await;
    let client = client();
    let owner = nodes.owner("sleepy", 0).await;
    let (sleeper, other) = (&nodes.bases()[owner], &nodes.bases()[1 - owner]);
    let deposit = |base: String, id: String| {
        let client = client.clone();
        async move { post(&client, &base, "account/sleepy/deposit", &id, "{\"amount\":1}").await.unwrap() }
    };
    for number in 0..5 {
        assert_eq!(deposit(sleeper.clone(), format!("before-{number}")).await.status, 200);
    }
    nodes.signal(owner, Signal::STOP);
    for number in 0..5 {
        assert_eq!(deposit(other.clone(), format!("meanwhile-{number}")).await.status, 200);
    }
    nodes.signal(owner, Signal::CONT);
    let read = get(&client, sleeper, "/v1/entities/account/sleepy").await.unwrap();
    assert_eq!((read.status, read.json()["version"].as_u64()), (200, Some(10)), "{}", read.body);
    let written = deposit(sleeper.clone(), "after".into()).await;
    assert_eq!((written.status, written.json()["version"].as_u64(), written.json()["response"]["balance"].as_u64()), (200, Some(11), Some(11)));
    let replayed = deposit(sleeper.clone(), "meanwhile-2".into()).await;
    assert_eq!((replayed.header("idempotency-replayed"), replayed.json()["version"].as_u64()), (Some("true"), Some(8)));
}

/// Ownership moves back and forth under clients that send many commands of few entities: nothing is lost, doubled or out of order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shards_that_move_under_load_lose_nothing() {
    let Some(place) = Place::on(Engine::MySql).await else { return };
    let mut nodes = Nodes::elected(&place, 2).await;
    nodes.agree(&nodes.all()).await;
    let clients = Clients::start("move", &nodes.bases()[..1], 12, 4);
    for _ in 0..3 {
        clients.more(60).await;
        assert!(nodes.stop(1).await.0.success());
        nodes.agree(&[0]).await;
        clients.more(60).await;
        nodes.restart(1).await;
        nodes.agree(&[0, 1]).await;
    }
    let (deposits, calls) = clients.finish().await;
    judge(&calls, &[]);
    check(&nodes.nodes[1].base, &deposits).await;
}

/// A node with newer handlers writes a member that the older handlers' closed schema does not know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handlers_of_two_versions_name_what_does_not_fit() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let handlers = |state: &str, assign: &str| {
        let folder = tempfile::tempdir().unwrap();
        let module = format!(
            "export const state = {{ type: \"object\", properties: {{ n: {{ type: \"integer\" }}{state} }}, additionalProperties: false }};\n\
             export const commands = {{ add: {{ creates: \"if-missing\", handle(state) {{ state.n = (state.n ?? 0) + 1; {assign} return {{ n: state.n }}; }} }} }};\n"
        );
        std::fs::write(folder.path().join("counter.js"), module).unwrap();
        folder
    };
    let (older, newer) = (handlers("", ""), handlers(", extra: { type: \"string\" }", "state.extra = \"new\";"));
    let setup = |folder: &tempfile::TempDir| place.setup().entities(folder.path()).set("cluster.topology", "static");
    let mut nodes =
        Nodes::start_knowing(vec![setup(&older), setup(&newer)], |number, setup, urls| setup.set("cluster.nodes", &list(&[(number, &urls[number])]))).await;
    let client = client();
    let add = |node: usize, entity: &str, id: &str| {
        let (client, base, path, id) = (client.clone(), nodes.nodes[node].base.clone(), format!("counter/{entity}/add"), id.to_owned());
        async move { post(&client, &base, &path, &id, "").await.unwrap() }
    };
    assert_eq!(add(1, "shared", "1").await.status, 200);
    let clash = add(0, "shared", "2").await;
    assert_eq!(clash.told(), "500 state-invalid", "{}", clash.body);
    assert_eq!((clash.json()["entity_id"].as_str(), clash.json()["entity_type"].as_str()), (Some("shared"), Some("counter")));
    assert_eq!(add(0, "other", "1").await.status, 200);
    assert_eq!(add(1, "shared", "2").await.json()["version"], Value::from(2));
    // Back to the older version alone: the entity still says why, the others work, and the newer one finds it whole.
    nodes.kill(1);
    assert_eq!(add_again(&client, &nodes.bases()[0], "shared", "3").await, "500 state-invalid");
    assert_eq!(add_again(&client, &nodes.bases()[0], "other", "2").await, "200");
    nodes.restart(1).await;
    let entity = get(&client, &nodes.bases()[1], "/v1/entities/counter/shared").await.unwrap().json();
    assert_eq!((entity["state"]["extra"].as_str(), entity["state"]["n"].as_u64()), (Some("new"), Some(2)));
    tokio::time::timeout(Duration::from_secs(10), async { assert_eq!(add_again(&client, &nodes.bases()[1], "shared", "3").await, "200") }).await.unwrap();
}

async fn add_again(client: &reqwest::Client, base: &str, entity: &str, id: &str) -> String {
    post(client, base, &format!("counter/{entity}/add"), id, "").await.unwrap().told()
}
