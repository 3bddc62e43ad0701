//! Bundles: several commands in one request that happen together or not at all.

use super::answers;
use super::body::{self, Body};
use super::bulk::{self, Line};
use super::limits::{self, RequestBody};
use super::problem::{Code, Problem};
use super::request::{self, Media, RequestId};
use super::{Shared, commands};
use crate::core::Json;
use crate::core::feed_token::TypesCut;
use crate::core::json::write_string;
use crate::partition::{BundleError, Bundled, Refusal};
use hyper::Response;
use hyper::http::request::Parts;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::HashSet;

/// The body of a request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Members<'a> {
    #[serde(borrow)]
    commands: Vec<&'a RawValue>,
}

/// `POST /v1/bundles`.
pub(super) async fn run(shared: &Shared, parts: &Parts, body: impl RequestBody, request_id: &RequestId) -> Result<Response<Body>, Problem> {
    request::check_accept(&parts.headers, Media::Json)?;
    request::parameters(parts.uri.query(), [])?;
    request::check_content(&parts.headers, Media::Json)?;
    let text = limits::read_body(body, shared.options.body_max, shared.options.body_timeout).await?;
    let text = Json::canonical(&text).map_err(|error| Problem::malformed_json(&error))?;
    let lines = parse(&text, shared.options.bundle_max)?;
    let mut bundle = Vec::with_capacity(lines.len());
    for (index, line) in lines.into_iter().enumerate() {
        let prepared = line.and_then(|line| line.prepare(shared));
        let (entity_type, command) = prepared.map_err(|problem| problem.in_bundle(index, request_id))?;
        bundle.push(Bundled { entity_type, command });
    }
    let mut seen = HashSet::with_capacity(bundle.len());
    for (index, Bundled { entity_type, command }) in bundle.iter().enumerate() {
        if !seen.insert((entity_type, &command.entity_id, &command.command_id)) {
            let problem = Problem::new(Code::InvalidRequest, "the entity gets this command id twice in the bundle");
            return Err(problem.with_entity(entity_type, &command.entity_id).with_command(&command.command_id).with_number("index", index as u64));
        }
    }
    drop(seen);
    match shared.partitions.run_bundle(bundle.clone()).await {
        Ok((recorded, replay)) => {
            let mut out = String::from("{\"results\":[");
            for (number, answer) in recorded.iter().enumerate() {
                out.push_str(if number > 0 { ",{" } else { "{" });
                answers::write_members(&mut out, answer, &shared.identity);
                out.push('}');
            }
            out.push_str("],\"token\":");
            let shards = usize::from(shared.partitions.store().shards().get());
            write_string(&mut out, &TypesCut::through(recorded.iter().map(|answer| &answer.position), shards).token(&shared.identity));
            out.push('}');
            let mut response = body::response(out.into_bytes());
            answers::mark(&mut response, replay);
            Ok(response)
        }
        Err(error) => Err(failed(error, &bundle, request_id)),
    }
}

/// Takes a body apart; a command that cannot be read is told in its place.
fn parse(text: &Json, commands_max: usize) -> Result<Vec<Result<Line, Problem>>, Problem> {
    let invalid = |detail: String| Problem::new(Code::InvalidRequest, detail);
    if !text.as_str().starts_with('{') {
        return Err(invalid("the body is no JSON object; it should be {\"commands\":[…]}".into()));
    }
    let members: Members<'_> = serde_json::from_str(text.as_str()).map_err(|error| {
        let text = error.to_string();
        invalid(format!("the body is no bundle: {}", text.split(" at line ").next().unwrap_or_default()))
    })?;
    match members.commands.len() {
        0 => Err(invalid("the bundle holds no commands".into())),
        count if count > commands_max => {
            let problem = Problem::new(Code::RequestTooLarge, format!("the bundle holds {count} commands; at most {commands_max} are allowed"));
            Err(problem.with_number("commands_max", commands_max as u64))
        }
        _ => Ok(members.commands.iter().map(|command| bulk::parse_command(command.get())).collect()),
    }
}

fn failed(error: BundleError, bundle: &[Bundled], request_id: &RequestId) -> Problem {
    match error {
        BundleError::Refused { index, reason } => {
            let Bundled { entity_type, command } = &bundle[index];
            let problem = match reason {
                Refusal::Rejected(rejection) => Problem::rejection(&rejection),
                Refusal::Failed(failure) => Problem::command(crate::partition::CommandError::Failed(failure)),
                Refusal::UnknownEntityType => Problem::unknown_entity_type(entity_type.as_str()),
                Refusal::Recorded(answer) => {
                    Problem::new(Code::CommandIdReused, "this command id is recorded already, and not by this bundle").with_number("version", answer.version)
                }
            };
            problem.with_entity(entity_type, &command.entity_id).with_command(&command.command_id).in_bundle(index, request_id)
        }
        BundleError::TooLarge => {
            Problem::new(Code::RequestTooLarge, "the events of the bundle are together more than the database takes at once; nothing happened")
        }
        BundleError::Whole(error) => {
            let first = &bundle[0];
            commands::failed(error, &first.entity_type, &first.command.entity_id, &first.command.command_id)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, expected: &str) {
        let told = match parse(&Json::canonical(body.as_bytes()).unwrap(), 2) {
            Err(problem) => format!("{}: {}", problem.code().as_str(), problem.detail()),
            Ok(lines) => {
                lines.iter().map(|line| line.as_ref().map_or_else(|problem| problem.code().as_str(), |line| &line.command)).collect::<Vec<_>>().join(" ")
            }
        };
        assert_eq!(told, expected, "{body}");
    }

    #[test]
    fn a_bundle_is_taken_apart() {
        let command = r#"{"entity_type":"account","entity_id":"a","command":"open","command_id":"k","request":null}"#;
        check(&format!(r#"{{"commands":[{command}]}}"#), "open");
        check(&format!(r#"{{"commands":[{command},{{"oops":1}}]}}"#), "open invalid-request");
        check(r#"{"commands":[1]}"#, "invalid-request");
        check(r#"{"commands":[]}"#, "invalid-request: the bundle holds no commands");
        check(&format!(r#"{{"commands":[{command},{command},{command}]}}"#), "request-too-large: the bundle holds 3 commands; at most 2 are allowed");
        check("[]", "invalid-request: the body is no JSON object; it should be {\"commands\":[…]}");
        check(r#"{"commands":5}"#, "invalid-request: the body is no bundle: invalid type: integer `5`, expected a sequence");
        check(r#"{"commands":[],"more":1}"#, "invalid-request: the body is no bundle: unknown field `more`, expected `commands`");
        check("{}", "invalid-request: the body is no bundle: missing field `commands`");
    }
}
