//! Tables of problems: each cause, its status, and every byte of its answer.

use super::body::Body;
use super::problem::Problem;
use super::request::RequestId;
use crate::core::batch::{HandlerFaultKind, SchemaError};
use crate::core::event::EventOutcome;
use crate::core::{Answer, CommandId, CommandName, EntityId, EntityType, Failure, HandlerFault, Json, Partition, Position, ShardId};
use crate::partition::CommandError;
use crate::store::StoreError;
use hyper::Response;
use hyper::header::HeaderMap;
use std::time::Duration;

fn request_id() -> RequestId {
    let mut headers = HeaderMap::new();
    headers.insert("request-id", "r1".parse().unwrap());
    RequestId::of(&headers)
}

fn answered(problem: Problem) -> (u16, String, Response<Body>) {
    let response = problem.respond(&request_id());
    let body = String::from_utf8(response.body().bytes().to_vec()).unwrap();
    (response.status().as_u16(), body, response)
}

fn fault(kind: HandlerFaultKind) -> CommandError {
    CommandError::Failed(Failure::HandlerFailed(HandlerFault { kind, message: "SECRET at account.js:3".into() }))
}

fn schema_errors() -> Vec<SchemaError> {
    vec![SchemaError { pointer: "/amount".into(), message: "\"x\" is not an integer".into() }, SchemaError { pointer: String::new(), message: "SECRET".into() }]
}

fn earlier() -> Box<Answer> {
    let partition = Partition { entity_type: EntityType::trusted("account"), shard: ShardId(1) };
    Box::new(Answer {
        position: Position { partition, event_id: 1 },
        entity_id: EntityId::trusted("a1"),
        version: 4,
        command_id: CommandId::trusted("k"),
        command: CommandName::trusted("open"),
        request: Json::null(),
        outcome: EventOutcome::Accepted,
        response: Json::trusted("\"SECRET\""),
    })
}

#[test]
fn every_failure_of_a_command_has_its_status_and_code() {
    let seconds = Duration::from_millis;
    let cases: Vec<(CommandError, u16, &str, Option<&str>)> = vec![
        (CommandError::Failed(Failure::UnknownCommand), 404, "unknown-command", None),
        (CommandError::Failed(Failure::EntityExists { version: 3 }), 409, "entity-exists", None),
        (CommandError::Failed(Failure::EntityNotFound), 404, "entity-not-found", None),
        (CommandError::Failed(Failure::VersionMismatch { version: 3 }), 412, "version-mismatch", None),
        (CommandError::Failed(Failure::InvalidRequest(Vec::new())), 400, "invalid-request", None),
        (fault(HandlerFaultKind::Exception), 500, "handler-failed", None),
        (fault(HandlerFaultKind::TimeLimit), 500, "handler-failed", None),
        (fault(HandlerFaultKind::MemoryLimit), 500, "handler-failed", None),
        (fault(HandlerFaultKind::StackLimit), 500, "handler-failed", None),
        (fault(HandlerFaultKind::Crash), 500, "handler-failed", None),
        (CommandError::Failed(Failure::StateInvalid(schema_errors())), 500, "state-invalid", None),
        (CommandError::Failed(Failure::ResponseInvalid(schema_errors())), 500, "response-invalid", None),
        (CommandError::Reused(earlier()), 422, "command-id-reused", None),
        (CommandError::UnknownEntityType, 404, "unknown-entity-type", None),
        (CommandError::Overloaded { retry_after: seconds(1200) }, 503, "overloaded", Some("2")),
        (CommandError::Overloaded { retry_after: Duration::ZERO }, 503, "overloaded", Some("1")),
        (CommandError::ShuttingDown, 503, "shutting-down", Some("1")),
        (CommandError::Unavailable("SECRET".into()), 503, "storage-unavailable", Some("1")),
        (CommandError::OutcomeUnknown, 504, "outcome-unknown", None),
        (CommandError::Internal("SECRET".into()), 500, "internal", None),
    ];
    for (error, status, code, retry_after) in cases {
        let case = format!("{error:?}");
        let (found, body, response) = answered(Problem::command(error));
        let value: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!((found, value["status"].as_u64(), value["code"].as_str()), (status, Some(status.into()), Some(code)), "{case}");
        assert_eq!(value["type"], format!("/problems/{code}"), "{case}");
        assert!(value["title"].is_string() && value["detail"].is_string(), "{case}");
        assert_eq!(value.get("request_id").is_some(), status >= 500, "{case}");
        let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap());
        assert_eq!((header("content-type"), header("retry-after")), (Some("application/problem+json"), retry_after), "{case}");
        assert!(!body.contains("SECRET") && !body.contains("account.js"), "{body}");
    }
}

#[test]
fn members_stand_in_the_order_of_the_contract() {
    let named = Problem::command(CommandError::OutcomeUnknown)
        .with_entity(&EntityType::trusted("account"), &EntityId::trusted("a1"))
        .with_command(&CommandId::trusted("pay\"31"));
    let expected = concat!(
        r#"{"type":"/problems/outcome-unknown","title":"It is not known whether the command happened","status":504,"code":"outcome-unknown","#,
        r#""detail":"the command may or may not have happened; send it again with the same Idempotency-Key to learn its outcome","#,
        r#""entity_type":"account","entity_id":"a1","command_id":"pay\"31","request_id":"r1"}"#
    );
    let mut line = String::new();
    named.write_line(&mut line, &request_id());
    assert_eq!(answered(named).1, expected);
    assert_eq!(line, expected.replace("\"status\":504,", "").replacen('{', "{\"status\":504,", 1).trim_end_matches('}'));
}

#[test]
fn what_breaks_a_request_schema_is_listed_with_pointers() {
    let errors = vec![
        SchemaError { pointer: "/amount".into(), message: "\"x\" is not an integer".into() },
        SchemaError { pointer: String::new(), message: "\"to\" is required".into() },
    ];
    let (_, body, _) = answered(Problem::command(CommandError::Failed(Failure::InvalidRequest(errors))));
    let expected = r#""errors":[{"pointer":"/amount","message":"\"x\" is not an integer"},{"pointer":"","message":"\"to\" is required"}]}"#;
    assert!(body.ends_with(expected), "{body}");
    assert!(body.contains(r#""detail":"\"x\" is not an integer at /amount (and 1 more)""#), "{body}");
}

#[test]
fn a_version_that_is_wrong_comes_with_the_right_one() {
    for (version, detail) in [(3, "the entity is at version 3"), (0, "the entity does not exist yet")] {
        let (_, body, _) = answered(Problem::command(CommandError::Failed(Failure::VersionMismatch { version })));
        assert!(body.ends_with(&format!("\"detail\":\"{detail}\",\"version\":{version}}}")), "{body}");
    }
}

#[test]
fn reads_fail_without_telling_why() {
    for (error, status) in [(StoreError::Unavailable("SECRET".into()), 503), (StoreError::Corrupt("SECRET".into()), 500)] {
        let (found, body, _) = answered(Problem::store(error));
        assert_eq!(found, status);
        assert!(!body.contains("SECRET") && body.contains("\"request_id\":\"r1\""), "{body}");
    }
}

#[test]
fn a_wrong_method_is_told_the_right_ones() {
    let (status, _, response) = answered(Problem::method_not_allowed("GET, HEAD"));
    assert_eq!((status, response.headers()["allow"].to_str().unwrap()), (405, "GET, HEAD"));
}

#[test]
fn bad_json_is_told_where() {
    let (status, body, _) = answered(Problem::malformed_json(&Json::canonical(b"{\"a\":}").unwrap_err()));
    assert_eq!(status, 400);
    assert!(body.ends_with(r#""detail":"unexpected character at byte 5","offset":5}"#), "{body}");
}
