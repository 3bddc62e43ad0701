//! Commands whose way changes under them, because their owner falls silent, dies or comes back: one connection's commands keep their order, and
//! nobody is held up by somebody else who is slow.

use crate::e2e::load::history;
use crate::support::cluster::Nodes;
use crate::support::place::Place;
use crate::support::quokka::{client, get, post};
use crate::support::server::Engine;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Waits until an entity's version has not changed for a second: whoever sends its commands is stuck.
async fn stuck(base: &str, entity: &str) -> u64 {
    let (client, deadline) = (client(), Instant::now() + Duration::from_secs(60));
    let (mut version, mut since) = (0, Instant::now());
    while version == 0 || since.elapsed() < Duration::from_secs(1) {
        let found = get(&client, base, &format!("/v1/entities/{entity}")).await.unwrap();
        let now = if found.status == 200 { found.json()["version"].as_u64().unwrap() } else { 0 };
        if now != version {
            (version, since) = (now, Instant::now());
        }
        assert!(Instant::now() < deadline, "{entity} does not come to rest");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    version
}

/// A client sends many lines and reads none of their answers; the owner of their entity dies. The commands of others for that entity take their new
/// way at once: they wait for the commands before them, not for a client to read what it was answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_no_answers_holds_up_nobody_when_an_owner_dies() {
    let Some(place) = Place::on(Engine::MariaDb).await else { return };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("pad.js"),
        "export const state = { type: \"object\" };\n\
         export const commands = { pad: { creates: \"if-missing\", handle(state) { state.n = (state.n ?? 0) + 1; return \"x\".repeat(6000); } } };\n",
    )
    .unwrap();
    let setup = || place.setup().entities(folder.path()).set("cluster.topology", "elected").set("commands.timeout", "5s");
    let mut nodes = Nodes::start(vec![setup(), setup()]).await;
    nodes.agree(&nodes.all()).await;
    let owner = nodes.owner("slow", 0).await;
    let here = nodes.bases()[1 - owner].clone();
    let lines = 3000;
    let mut stream = TcpStream::connect(here.trim_start_matches("http://")).await.unwrap();
    let body: String =
        (0..lines).map(|number| format!("{{\"entity_type\":\"pad\",\"entity_id\":\"slow\",\"command\":\"pad\",\"command_id\":\"k{number}\"}}\n")).collect();
    let head = format!("POST /v1/commands HTTP/1.1\r\nHost: quokka\r\nContent-Type: application/x-ndjson\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    let before = stuck(&here, "pad/slow").await;
    assert!(before < lines, "the client's unread answers fit into the buffers of the network");
    nodes.kill(owner);
    let client = client();
    for number in 0..3 {
        let reply = post(&client, &here, "pad/slow/pad", &format!("other-{number}"), "").await.unwrap();
        assert_eq!((reply.status, reply.json()["version"].as_u64()), (200, Some(before + 1 + number)), "{:.300}", reply.body);
    }
    assert_eq!(history(&client, &here, "pad/slow").await.len() as u64, before + 3);
    drop(stream);
}
