//! What a service sees, on every engine: commands, replays, reads, history; also after a restart and from another server.

use crate::support::place::{Place, on_each_engine};
use crate::support::quokka::{Reply, Server, client, get, post};
use reqwest::Client;
use serde_json::{Value, json};

async fn told(client: &Client, server: &Server, path: &str, command_id: &str, request: &str) -> String {
    post(client, &server.base, path, command_id, request).await.unwrap().told()
}

/// The examples' account, from opening to an empty purse.
async fn journey(place: Place) {
    let server = place.setup().start();
    let client = client();
    let opened = post(&client, &server.base, "account/alice/open", "o-1", r#"{"amount":100}"#).await.unwrap();
    assert_eq!(opened.status, 200, "{opened:?}");
    assert_eq!((opened.header("etag"), opened.header("idempotency-key"), opened.header("idempotency-replayed")), (Some("\"1\""), Some("o-1"), None));
    assert!(opened.header("quokka-handled-by").is_some());
    let charged = post(&client, &server.base, "account/alice/charge", "c-1", r#"{"amount":30}"#).await.unwrap();
    let body = charged.json();
    assert_eq!((&body["version"], &body["response"]["balance"]), (&json!(2), &json!(70)));
    assert!(charged.body.starts_with(r#"{"entity_type":"account","entity_id":"alice","version":2,"command_id":"c-1","response":"#), "{}", charged.body);
    assert!(body["token"].as_str().unwrap().starts_with("s_"));

    let refused = post(&client, &server.base, "account/alice/charge", "c-2", r#"{"amount":71}"#).await.unwrap();
    assert_eq!((refused.told().as_str(), refused.header("content-type")), ("422 rejected", Some("application/problem+json")));
    assert_eq!((&refused.json()["rejection"]["code"], &refused.json()["version"]), (&json!("insufficient_funds"), &json!(3)));

    // A refusal stays a refusal, whatever happens to the balance; a new id is a new question.
    assert_eq!(told(&client, &server, "account/alice/deposit", "d-1", r#"{"amount":500}"#).await, "200");
    let again = post(&client, &server.base, "account/alice/charge", "c-2", r#"{"amount":71}"#).await.unwrap();
    assert_eq!((&again.body, again.status, again.header("idempotency-replayed")), (&refused.body, 422, Some("true")));
    assert_eq!(told(&client, &server, "account/alice/charge", "c-3", r#"{"amount":71}"#).await, "200");

    for (path, id, request, expected) in [
        ("account/alice/open", "o-2", r#"{"amount":1}"#, "409 entity-exists"),
        ("account/nobody/charge", "c-1", r#"{"amount":1}"#, "404 entity-not-found"),
        ("account/alice/charge", "c-9", r#"{"amount":"ten"}"#, "400 invalid-request"),
        ("account/alice/steal", "c-9", r#"{"amount":1}"#, "404 unknown-command"),
        ("nothing/alice/charge", "c-9", r#"{"amount":1}"#, "404 unknown-entity-type"),
        // The first answer holds whatever a later try asks for.
        ("account/alice/open", "o-1", r#"{"amount":100}"#, "200"),
        ("account/alice/steal", "c-1", r#"{"amount":1}"#, "200"),
        ("account/alice/No-Name", "c-1", r#"{"amount":1}"#, "200"),
        ("account/alice/No-Name", "c-9", r#"{"amount":1}"#, "404 unknown-command"),
        ("account/alice/charge", "c-1", r#"{"amount":"ten"}"#, "200"),
    ] {
        assert_eq!(told(&client, &server, path, id, request).await, expected, "{path} {id} {request}");
    }
    let mismatch = post(&client, &server.base, "account/alice/charge", "c-1", r#"{"amount":31}"#).await.unwrap();
    assert_eq!((&mismatch.body, mismatch.header("idempotency-mismatch")), (&charged.body, Some("true")));
    let spaced = post(&client, &server.base, "account/alice/charge", "c-1", " { \"amount\" : 30.0 } ").await.unwrap();
    assert_eq!((&spaced.body, spaced.header("idempotency-mismatch"), spaced.header("idempotency-replayed")), (&charged.body, None, Some("true")));

    let before = reads(&client, &server).await;
    assert!(server.stop().success());
    let server = place.setup().start();
    assert_eq!(reads(&client, &server).await, before, "a restart changes nothing");
    let again = post(&client, &server.base, "account/alice/charge", "c-1", r#"{"amount":30}"#).await.unwrap();
    assert_eq!((&again.body, again.header("idempotency-replayed")), (&charged.body, Some("true")));
    let other = place.setup().start();
    assert_eq!(reads(&client, &other).await, before, "another server reads the same");
    let again = post(&client, &other.base, "account/alice/charge", "c-2", r#"{"amount":71}"#).await.unwrap();
    assert_eq!((&again.body, again.header("idempotency-replayed")), (&refused.body, Some("true")));
}

/// Every kind of read, as texts to compare.
async fn reads(client: &Client, server: &Server) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for path in [
        "account/alice",
        "account/alice?version=1",
        "account/alice?version=3",
        "account/alice?version=99",
        "account/alice?at=2020-01-01T00:00:00Z",
        "account/alice?at=2100-01-01T00:00:00Z",
        "account/nobody",
        "account/alice/events",
        "account/alice/events?order=desc&limit=2&include=state",
        "account/alice/events?after=2&limit=1",
        "account/alice/commands/c-1",
        "account/alice/commands/c-2",
        "account/alice/commands/never",
        "account",
        "account?limit=1",
    ] {
        let reply = get(client, &server.base, &format!("/v1/entities/{path}")).await.unwrap();
        all.push((format!("{path} {}", reply.told()), reply.body));
    }
    let statuses: Vec<&str> = all.iter().map(|(told, _)| told.rsplit_once("alice").map_or(told.as_str(), |(_, rest)| rest)).collect();
    assert_eq!(statuses[0], " 200", "{all:?}");
    assert_eq!((statuses[3], statuses[4]), ("?version=99 404 version-not-found", "?at=2020-01-01T00:00:00Z 404 version-not-found"));
    assert_eq!((statuses[11], statuses[12]), ("/commands/c-2 422 rejected", "/commands/never 404 command-not-found"));
    all
}

on_each_engine!(first_answer_a_journey_reads_the_same_everywhere_and_for_ever, journey);

/// Ids, keys, numbers and texts that stores are known to confuse.
async fn odd_data(place: Place) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("box.js"),
        "export const commands = { put: { creates: 'if-missing', handle(state, request) { state.kept = request; return request; } },\n\
         touch: { handle(state) { state.touched = (state.touched ?? 0) + 1; return state.kept; } } };",
    )
    .unwrap();
    std::fs::write(
        folder.path().join("order.js"),
        "export const commands = { put: { creates: 'if-missing', handle(state, request) { state.n = request; return request; } } };",
    )
    .unwrap();
    let server = place.setup().entities(folder.path()).start();
    let client = client();
    for (number, text) in [
        r#"{"m":18446744073709551615,"n":9007199254740993}"#,
        r#"{"n":-9223372036854775808}"#,
        "[1.5777777777770001,117.63331139400017,9007199254740991]",
        "[1e308,5e-324,1e20,0.1]",
        r#"{"__proto__":{"x":1},"constructor":2,"toString":3}"#,
        r#""\u0000 a \u001f 🍣 é \\ ' \" % _""#,
        r#"{"":0,"\u0000":1,"a\"b":2,"é":3,"🍣":4}"#,
        &("[".repeat(98) + &"]".repeat(98)),
        "null",
        "\"\"",
    ]
    .iter()
    .enumerate()
    {
        let path = format!("box/b{number}");
        let put = post(&client, &server.base, &format!("{path}/put"), "p", text).await.unwrap();
        assert_eq!(put.status, 200, "{text}: {}", put.body);
        let response = format!(",\"response\":{text},\"token\"");
        assert!(put.body.contains(&response), "{} for {text}", put.body);
        for touch in 0..20 {
            let touched = post(&client, &server.base, &format!("{path}/touch"), &format!("t{touch}"), "").await.unwrap();
            assert!(touched.body.contains(&response), "{} for {text}", touched.body);
        }
        let state = get(&client, &server.base, &format!("/v1/entities/{path}")).await.unwrap().body;
        assert!(state.contains(&format!("\"state\":{{\"kept\":{text},\"touched\":20}}")), "{state}");
        let replay = post(&client, &server.base, &format!("{path}/put"), "p", text).await.unwrap();
        assert_eq!((&replay.body, replay.header("idempotency-mismatch")), (&put.body, None));
    }
    // Case and type keep entities and commands apart; a command id belongs to one entity.
    for (path, id) in [("box/abc", "k"), ("box/ABC", "k"), ("box/abc", "K"), ("order/abc", "k"), ("order/-_-", "~!@#$%^&*()[]{}\\'\"`,.<>/?")] {
        let put = post(&client, &server.base, &format!("{path}/put"), id, "1").await.unwrap();
        assert_eq!((put.status, put.header("idempotency-replayed")), (200, None), "{path} {id}");
    }
}

on_each_engine!(odd_data_comes_back_to_the_byte, odd_data);

/// Fifty tries of one id at once, through two servers that both think the entity is theirs.
async fn duplicates(place: Place) {
    let servers = [place.setup().start(), place.setup().start()];
    let client = client();
    let tries = (0..50).map(|number| post(&client, &servers[number % 2].base, "account/twin/deposit", "same", r#"{"amount":5}"#));
    let replies: Vec<Reply> = futures_util::future::join_all(tries).await.into_iter().map(Result::unwrap).collect();
    assert!(replies.iter().all(|reply| reply.status == 200 && reply.body == replies[0].body), "{replies:?}");
    assert_eq!(replies.iter().filter(|reply| reply.header("idempotency-replayed").is_none()).count(), 1, "one try made the event");
    let state: Value = get(&client, &servers[0].base, "/v1/entities/account/twin").await.unwrap().json();
    assert_eq!((&state["version"], &state["state"]["balance"]), (&json!(1), &json!(5)));
}

on_each_engine!(duplicates_at_once_are_one_command, duplicates);

/// One bad command of each kind among a hundred good ones, all sent at once.
async fn neighbours(place: Place) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("tally.js"),
        "export const state = { type: 'object', properties: { n: { type: 'integer' } }, additionalProperties: false };\n\
         const n = { type: 'integer' };\n\
         export const commands = {\n\
           add: { creates: 'if-missing', request: n, handle(state, request) { state.n = (state.n ?? 0) + request; return state.n; } },\n\
           refuse: { creates: 'if-missing', handle(state) { state.n = 1e9; throw reject('no', 'never'); } },\n\
           crash: { creates: 'if-missing', handle(state) { state.n = 1e9; state.missing.field = 1; } },\n\
           spin: { creates: 'if-missing', handle(state) { state.n = 1e9; for (;;) {} } },\n\
           dirty: { creates: 'if-missing', handle(state) { state.n = 'text'; } },\n\
           answer: { creates: 'if-missing', response: n, handle(state) { state.n = 1e9; return 'text'; } },\n\
           huge: { creates: 'if-missing', handle(state) { state.n = 1e9; return 'x'.repeat(1e5); } },\n\
         };",
    )
    .unwrap();
    let server = place.setup().entities(folder.path()).set("limits.body_max", "16 KiB").set("limits.document_max", "64 KiB").start();
    let client = client();
    let bad = [
        ("refuse", "null"),
        ("crash", "null"),
        ("spin", "null"),
        ("dirty", "null"),
        ("answer", "null"),
        ("huge", "null"),
        ("add", "\"one\""),
        ("nothing", "null"),
    ];
    let sends = (0..100).map(|number| {
        let (name, request) = if number % 12 == 5 { bad[number / 12] } else { ("add", "1") };
        let path = format!("tally/t/{name}");
        let (client, base) = (&client, &server.base);
        async move { (name, post(client, base, &path, &number.to_string(), request).await.unwrap()) }
    });
    let replies = futures_util::future::join_all(sends).await;
    let mut bad_told: Vec<String> = replies.iter().filter(|(_, reply)| reply.status != 200).map(|(name, reply)| format!("{name} {}", reply.told())).collect();
    bad_told.sort();
    assert_eq!(
        bad_told,
        [
            "add 400 invalid-request",
            "answer 500 response-invalid",
            "crash 500 handler-failed",
            "dirty 500 state-invalid",
            "huge 500 state-invalid",
            "nothing 404 unknown-command",
            "refuse 422 rejected",
            "spin 500 handler-failed"
        ]
    );
    let state = get(&client, &server.base, "/v1/entities/tally/t").await.unwrap().json();
    assert_eq!((&state["state"]["n"], &state["version"]), (&json!(92), &json!(93)), "92 additions and one refusal");
    // Failures are not remembered: the same id may succeed once the reason is gone.
    // What the server writes reaches the test by a pipe of its own, which may be behind the answer.
    for _ in 0..500 {
        if server.log().contains("tally.js:6") {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let log = server.log();
    assert!(log.contains("tally.js:6"), "the log names file and line:\n{log}");
    let (_, crashed) = replies.iter().find(|(name, _)| *name == "crash").unwrap();
    assert!(!crashed.body.contains("missing") && !crashed.body.contains("tally.js"), "{}", crashed.body);
    assert!(log.contains(crashed.json()["request_id"].as_str().unwrap()), "the request id is in the log:\n{log}");
    std::fs::write(folder.path().join("tally.js"), "export const commands = { crash: { handle(state) { state.n += 1; return state.n; } } };").unwrap();
    let reloaded = crate::support::quokka::send(client.post(format!("{}/v1/admin/handlers/reload", server.base))).await.unwrap();
    assert_eq!(reloaded.status, 200, "{}", reloaded.body);
    let id = crashed.json()["command_id"].as_str().unwrap().to_owned();
    let repaired = post(&client, &server.base, "tally/t/crash", &id, "").await.unwrap();
    assert_eq!((repaired.status, repaired.json()["response"].clone()), (200, json!(93)), "{}", repaired.body);
}

on_each_engine!(no_trace_a_bad_command_costs_its_neighbours_nothing, neighbours);
