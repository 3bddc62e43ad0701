//! What clients see of a request that is passed on: the owner's answer, and who gave it.

use crate::e2e::load::history;
use crate::support::cluster::Nodes;
use crate::support::place::Place;
use crate::support::quokka::{Reply, client, get, post, send};
use crate::support::server::Engine;
use serde_json::Value;
use std::collections::HashMap;
use std::process::Command;

/// Answers that differ only in who is named are the same.
fn without_names(reply: &Reply) -> (u16, Vec<(String, String)>, String) {
    let named = ["quokka-handled-by", "quokka-forwarded", "request-id", "date", "content-length"];
    let mut headers: Vec<(String, String)> = reply
        .headers
        .iter()
        .filter(|(name, _)| !named.contains(&name.as_str()))
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
        .collect();
    headers.sort();
    (reply.status, headers, reply.body.replace(reply.header("request-id").unwrap_or("-"), "REQUEST"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_was_passed_on_is_the_owners_own() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let nodes = Nodes::elected(&place, 2).await;
    nodes.agree(&nodes.all()).await;
    let client = client();
    let owner = nodes.owner("passed", 0).await;
    let (here, there) = (nodes.bases()[1 - owner].clone(), nodes.bases()[owner].clone());
    let call = |base: &str, command: &str, id: &str, request: &str| {
        let request = client.post(format!("{base}/v1/entities/account/passed/{command}")).header("idempotency-key", id).body(request.to_owned());
        send(request.header("content-type", "application/json").header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    };
    // Who owns the entity handles it, and says so.
    let opened = call(&here, "open", "o", "{\"amount\":5}").await.unwrap();
    assert_eq!((opened.status, opened.header("quokka-handled-by")), (200, Some(format!("n{owner}").as_str())), "{}", opened.body);
    assert_eq!(opened.header("quokka-forwarded"), Some(format!("n{}", 1 - owner).as_str()));
    assert_eq!((opened.header("etag"), opened.header("idempotency-key"), opened.header("idempotency-replayed")), (Some("\"1\""), Some("o"), None));
    // Replays, rejections and failures of every kind are told as the owner tells them.
    for (command, id, request) in [
        ("open", "o", "{\"amount\":5}"),
        ("open", "o2", ""),
        ("charge", "c", "{\"amount\":500}"),
        ("charge", "c", "{\"amount\":500}"),
        ("charge", "c", "{\"amount\":1}"),
        ("charge", "bad", "{\"amount\":-1}"),
        ("charge", "bad", "{\"amount\":"),
        ("vanish", "v", ""),
    ] {
        let (passed, own) = (call(&here, command, id, request).await.unwrap(), call(&there, command, id, request).await.unwrap());
        let (mut passed_on, own_words) = (without_names(&passed), without_names(&own));
        if (command, id, request) == ("charge", "c", "{\"amount\":500}") {
            // The first of the two made the event, the other one is a replay of it.
            passed_on.1.retain(|(name, _)| name != "idempotency-replayed");
            assert_eq!((passed_on.0, &passed_on.2), (own_words.0, &own_words.2));
            continue;
        }
        assert_eq!(passed_on, own_words, "{command} {id} {request}");
    }
    let stale = client.post(format!("{here}/v1/entities/account/passed/deposit")).header("if-match", "\"77\"").header("content-type", "application/json");
    assert_eq!(send(stale.body("{\"amount\":1}")).await.unwrap().told(), "412 version-mismatch");
    // What a command was answered is asked of the owner, too; reads come from the database.
    let looked_up = get(&client, &here, "/v1/entities/account/passed/commands/o").await.unwrap();
    assert_eq!((looked_up.status, &looked_up.body), (200, &opened.body));
    assert_eq!(get(&client, &here, "/v1/entities/account/passed/commands/none").await.unwrap().told(), "404 command-not-found");
    assert_eq!(get(&client, &here, "/v1/entities/account/passed").await.unwrap().header("etag"), Some("\"2\""));
    // An entity whose id the server makes goes to its owner, and its retry to the same entity.
    let (first, again) = (post(&client, &here, "account/open", "new-1", "").await.unwrap(), post(&client, &there, "account/open", "new-1", "").await.unwrap());
    assert_eq!((first.status, first.header("location"), &first.body), (200, again.header("location"), &again.body));
    assert!(nodes.metric(1 - owner, "quokka_forwarded_total").await > 0.0);
    assert_eq!(nodes.metric(owner, "quokka_shards_owned").await, 32.0);
}

/// Whoever says that a request was passed on already has it handled where it lands; what only nodes may ask needs a proof.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forward_once_a_request_that_was_passed_on_stays() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let nodes = Nodes::elected(&place, 2).await;
    nodes.agree(&nodes.all()).await;
    let client = client();
    let other = 1 - nodes.owner("stays", 0).await;
    let base = &nodes.bases()[other];
    let request = client.post(format!("{base}/v1/entities/account/stays/deposit")).header("content-type", "application/json").body("{\"amount\":1}");
    let reply = send(request.header("quokka-forwarded", "somebody")).await.unwrap();
    assert_eq!((reply.status, reply.header("quokka-handled-by")), (200, Some(format!("n{other}").as_str())));
    assert_eq!(reply.header("quokka-forwarded"), Some("somebody"));
    for path in ["/v1/cluster/heartbeat", "/v1/cluster/link"] {
        assert_eq!(send(client.post(format!("{base}{path}")).body("{}")).await.unwrap().told(), "403 forbidden", "{path}");
        let forged = client.post(format!("{base}{path}")).header("quokka-cluster", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA").body("{}");
        assert_eq!(send(forged).await.unwrap().told(), "403 forbidden", "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_see_who_owns_what() {
    let Some(place) = Place::on(Engine::MySql).await else { return };
    let nodes = Nodes::elected(&place, 3).await;
    nodes.agree(&nodes.all()).await;
    let client = client();
    let status = get(&client, &nodes.bases()[1], "/v1/cluster").await.unwrap().json();
    assert_eq!(status["node"], "n1");
    assert!(["n0", "n1", "n2"].contains(&status["leader"].as_str().unwrap()));
    assert!(status["epoch"].as_u64().unwrap() > 0 && status["map_age_ms"].as_u64().is_some());
    let shards: Vec<&str> = status["shards"].as_array().unwrap().iter().map(|owner| owner.as_str().unwrap()).collect();
    assert_eq!(shards.len(), 64);
    for node in status["nodes"].as_array().unwrap() {
        let owned = shards.iter().filter(|owner| Some(**owner) == node["id"].as_str()).count();
        assert_eq!(node["shards"].as_u64(), Some(owned as u64));
        assert!((21..=22).contains(&owned) && node["url"].as_str().unwrap().starts_with("http://") && node["last_heartbeat_ms"].as_u64().is_some(), "{node}");
    }
    let mut leaders = 0.0;
    for node in nodes.all() {
        leaders += nodes.metric(node, "quokka_is_leader").await;
        assert_eq!(nodes.metric(node, "quokka_map_epoch").await, status["epoch"].as_f64().unwrap());
    }
    assert_eq!(leaders, 1.0);
    let shown = Command::new(env!("CARGO_BIN_EXE_quokka")).args(["cluster", "--url", &nodes.bases()[0]]).output().unwrap();
    let table = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.status.success() && table.contains("leads, map ") && (0..3).all(|node| table.contains(&format!("n{node} "))), "{table}");
    let nobody = Command::new(env!("CARGO_BIN_EXE_quokka")).args(["cluster", "--url", "http://127.0.0.1:1"]).output().unwrap();
    assert!(!nobody.status.success() && String::from_utf8_lossy(&nobody.stderr).contains("cannot ask http://127.0.0.1:1"), "{nobody:?}");
}

/// A second node of the same name is told so, owns nothing, and still serves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_node_of_the_same_name_is_told_so() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let nodes = Nodes::elected(&place, 2).await;
    nodes.agree(&nodes.all()).await;
    let twin = place.setup().set("cluster.topology", "elected").set("cluster.node", "n1").set("cluster.heartbeat", "200ms").start();
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(30);
    while !twin.log().contains("another node of the same name is alive") {
        assert!(tokio::time::Instant::now() < deadline, "{}", twin.log());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let reply = post(&client(), &twin.base, "account/twin/deposit", "d", "{\"amount\":1}").await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    nodes.agree(&nodes.all()).await;
}

/// Lines of many entities through one node of three, whose neighbour dies on the way: every line is answered, in order, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_are_split_by_owner_and_answered_in_order() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let mut nodes = Nodes::elected(&place, 3).await;
    nodes.agree(&nodes.all()).await;
    let (entities, lines) = (20, 6000);
    let line = |number: usize| {
        format!(
            "{{\"entity_type\":\"account\",\"entity_id\":\"l{}\",\"command\":\"deposit\",\"command_id\":\"k{number}\",\"request\":{{\"amount\":1}}}}\n",
            number % entities
        )
    };
    let (chunks, body) = tokio::sync::mpsc::channel::<Result<String, std::io::Error>>(4);
    let body = futures_util::stream::unfold(body, |mut body| async move { body.recv().await.map(|chunk| (chunk, body)) });
    let request =
        client().post(format!("{}/v1/commands", nodes.bases()[0])).header("content-type", "application/x-ndjson").body(reqwest::Body::wrap_stream(body));
    let answered = tokio::spawn(send(request));
    for number in 0..lines {
        chunks.send(Ok(line(number))).await.unwrap();
        if number == lines / 2 {
            nodes.kill(2);
        }
    }
    drop(chunks);
    let reply = answered.await.unwrap().unwrap();
    assert_eq!(reply.status, 200);
    let answers: Vec<Value> = reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), lines);
    let mut versions: HashMap<String, u64> = HashMap::new();
    for (number, answer) in answers.iter().enumerate() {
        assert_eq!((answer["status"].as_u64(), answer["command_id"].as_str()), (Some(200), Some(format!("k{number}").as_str())), "{answer}");
        let version = versions.entry(format!("l{}", number % entities)).or_default();
        *version += 1;
        assert_eq!(answer["version"].as_u64(), Some(*version), "the lines of one entity are handled in their order: {answer}");
    }
    let client = client();
    for entity in versions.keys() {
        assert_eq!(history(&client, &nodes.bases()[1], &format!("account/{entity}")).await.len(), lines / entities, "{entity}");
    }
}
