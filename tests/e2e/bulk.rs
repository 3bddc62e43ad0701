//! Many commands in one request: streamed both ways, in order, one bad line alone.

use crate::support::place::{Place, on_each_engine};
use crate::support::quokka::{Server, client, get};
use futures_util::StreamExt;
use serde_json::{Value, json};

/// POSTs lines as a stream and hands every answer on as it comes.
async fn stream(server: &Server, lines: impl futures_util::Stream<Item = String> + Send + 'static, mut each: impl FnMut(Value)) {
    let body = reqwest::Body::wrap_stream(lines.map(Ok::<_, std::io::Error>));
    // However slow the machine: the stream ends when it ends.
    let client = reqwest::Client::new();
    let request = client.post(format!("{}/v1/commands", server.base)).header("content-type", "application/x-ndjson");
    let response = request.body(body).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers()["content-type"].to_str().unwrap()), (200, "application/x-ndjson"));
    let mut bytes = response.bytes_stream();
    let mut rest = Vec::new();
    while let Some(chunk) = bytes.next().await {
        rest.extend_from_slice(&chunk.unwrap());
        let whole = rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        for line in rest.drain(..whole).collect::<Vec<u8>>().split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            each(serde_json::from_slice(line).unwrap());
        }
    }
    assert!(rest.is_empty(), "the last answer ends with a newline");
}

fn deposit(entity: &str, id: usize) -> String {
    json!({ "entity_type": "account", "entity_id": entity, "command": "deposit", "command_id": id.to_string(), "request": { "amount": 1 } }).to_string() + "\n"
}

async fn lines(place: Place) {
    let server = place.setup().start();
    let sent = [
        deposit("a", 1),
        "{\"entity_type\":\"account\"\n".into(),
        "\n".into(),
        json!({ "entity_type": "account", "entity_id": "a", "command": "charge", "command_id": "2", "request": { "amount": 9 } }).to_string() + "\r\n",
        deposit("a", 1),
        json!({ "entity_type": "account", "entity_id": "a", "command": "deposit", "command_id": "3", "request": { "amount": 1 }, "if_version": 7 }).to_string()
            + "\n",
        json!({ "entity_type": "account", "entity_id": "a", "command": "deposit", "command_id": "3", "request": { "amount": 1 }, "if_version": 2 }).to_string()
            + "\n",
        json!({ "entity_type": "nothing", "entity_id": "a", "command": "deposit", "command_id": "3" }).to_string() + "\n",
        json!({ "entity_type": "account", "entity_id": "a b", "command": "deposit", "command_id": "3" }).to_string() + "\n",
        json!({ "entity_type": "account", "command": "open", "command_id": "fresh" }).to_string(),
    ];
    let mut told = Vec::new();
    stream(&server, futures_util::stream::iter(sent), |answer| {
        let what = answer["code"].as_str().map_or_else(|| format!("v{}", answer["version"]), str::to_owned);
        let replayed = if answer["replayed"] == true { " again" } else { "" };
        told.push(format!("{} {what}{replayed}", answer["status"]));
    })
    .await;
    let expected = [
        "200 v1",
        "400 malformed-json",
        "422 rejected",
        "200 v1 again",
        "412 version-mismatch",
        "200 v3",
        "404 unknown-entity-type",
        "400 invalid-entity-id",
        "200 v1",
    ];
    assert_eq!(told, expected);
}

on_each_engine!(one_bad_line_fails_alone, lines);

/// Far more lines than are under way at once, and more answers than any buffer should hold.
const LINES: usize = 60_000;
/// What the server may grow by while they pass.
const GROWTH_MAX: u64 = 150_000_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounded_a_long_stream_passes_in_constant_memory() {
    // Memory for states and answers is bounded by a setting of its own; here it must not hide growth.
    let place = Place::sqlite().unwrap();
    let server = place.setup().set("commands.cache_max", "4 MiB").start();
    let before = server.memory();
    let pad = "x".repeat(4000);
    let sent = futures_util::stream::iter(0..LINES).map(move |number| {
        let request = json!({ "amount": 1 });
        // Spaces between the members are sent and read, and are no part of the command.
        let line = json!({ "entity_type": "account", "entity_id": format!("s{}", number % 7), "command": "deposit", "command_id": number.to_string(), "request": request });
        line.to_string().replacen('{', &format!("{{{}", " ".repeat(pad.len())), 1) + "\n"
    });
    let mut next = 0;
    let mut largest = before;
    stream(&server, sent, |answer| {
        assert_eq!((answer["status"].as_u64(), answer["command_id"].as_str()), (Some(200), Some(next.to_string().as_str())), "{answer}");
        next += 1;
        if next % 5000 == 0 {
            largest = largest.max(server.memory());
        }
    })
    .await;
    assert_eq!(next, LINES);
    assert!(largest < before + GROWTH_MAX, "{before} bytes before, {largest} in between");
    let mut versions = 0;
    for entity in 0..7 {
        versions += get(&client(), &server.base, &format!("/v1/entities/account/s{entity}")).await.unwrap().json()["version"].as_u64().unwrap();
    }
    assert_eq!(versions, LINES as u64);
}
