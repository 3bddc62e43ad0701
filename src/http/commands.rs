//! One command a request: from its path, headers and body to a place in a queue, and back to an answer.

use super::answers;
use super::body::Body;
use super::incoming::Turn;
use super::limits::{self, RequestBody};
use super::problem::Problem;
use super::request::{self, Media, RequestId};
use super::{Shared, cluster};
use crate::cluster::link::Handled;
use crate::core::{CommandId, CommandName, EntityId, EntityType, Json, LogIdentity, Precondition};
use crate::handler::HandlerSet;
use crate::partition::{Command, CommandError, WhenFull};
use hyper::Response;
use hyper::header::{HeaderValue, LOCATION};
use hyper::http::request::Parts;

/// What a command is for, as the caller wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target<'a> {
    /// The entity type.
    pub entity_type: &'a str,
    /// The entity's id; none where the server is to make one.
    pub entity_id: Option<&'a str>,
    /// The command's name.
    pub command: &'a str,
}

/// Checks a target against the handlers in force, and makes the ids that the caller left out. The request is `null`.
pub fn prepare(
    handlers: &HandlerSet,
    identity: &LogIdentity,
    target: Target<'_>,
    command_id: Option<CommandId>,
    precondition: Option<Precondition>,
) -> Result<(EntityType, Command), Problem> {
    let known = handlers.get_key_value(target.entity_type);
    let (entity_type, handler) = known.ok_or_else(|| Problem::unknown_entity_type(target.entity_type))?;
    let given_id = target.entity_id.map(|id| EntityId::new(id, handler.entity_id_max())).transpose().map_err(|error| Problem::invalid_entity_id(&error))?;
    // A name that no command can have goes the way of every unknown one: the command id may have been answered before.
    let name = CommandName::new(target.command).unwrap_or_else(|_| CommandName::trusted(target.command));
    let entity_id = given_id.unwrap_or_else(|| new_entity_id(identity, entity_type, command_id.as_ref()));
    let is_fresh_id = command_id.is_none();
    let command_id = command_id.unwrap_or_else(|| CommandId::trusted(&xid::new().to_string()));
    Ok((entity_type.clone(), Command { entity_id, command_id, is_fresh_id, name, request: Json::null(), precondition }))
}

/// The id of an entity for which the caller gave none: made from the command id, so that a retry meets the same entity.
///
/// Without a command id there is no retry, and the id is a new one. Written into databases: the rule must never change.
fn new_entity_id(identity: &LogIdentity, entity_type: &EntityType, command_id: Option<&CommandId>) -> EntityId {
    let id = match command_id {
        None => xid::new(),
        Some(command_id) => {
            let derived = identity.derive("entity id", &[entity_type.as_str().as_bytes(), command_id.as_str().as_bytes()]);
            let mut bytes = [0; 12];
            bytes.copy_from_slice(&derived[..12]);
            xid::Id(bytes)
        }
    };
    EntityId::trusted(&id.to_string())
}

/// Runs the command of one request.
pub async fn run(shared: &Shared, target: Target<'_>, parts: &Parts, body: impl RequestBody, request_id: &RequestId) -> Result<Response<Body>, Problem> {
    request::check_accept(&parts.headers, Media::Json)?;
    request::parameters(parts.uri.query(), [])?;
    let command_id = request::command_id(&parts.headers)?;
    let precondition = request::precondition(&parts.headers)?;
    let (entity_type, mut command) = prepare(&shared.partitions.handlers(), &shared.identity, target, command_id, precondition)?;
    if !body.is_end_stream() {
        // A body that only turns out to be empty is no request, and needs no type.
        if body.size_hint().lower() > 0 {
            request::check_content(&parts.headers, Media::Json)?;
        }
        let text = limits::read_body(body, shared.options.body_max, shared.options.body_timeout).await?;
        if !text.is_empty() {
            request::check_content(&parts.headers, Media::Json)?;
            command.request = Json::canonical(&text).map_err(|error| Problem::malformed_json(&error))?;
        }
    }
    let (entity_id, command_id) = (command.entity_id.clone(), command.command_id.clone());
    let turn = parts.extensions.get::<Turn>();
    if let Some(turn) = turn {
        turn.comes().await;
    }
    let asker = cluster::asker(&parts.headers, request_id.trace_id());
    let queued = shared.router.submit(&entity_type, command, WhenFull::Refuse, asker).await;
    turn.inspect(|turn| turn.is_over());
    let handled = match queued {
        Ok(pending) => pending.answer().await,
        Err(error) => Handled { result: Err(error), by: None },
    };
    let mut response = match handled.result {
        Ok((answer, replay)) => answers::respond(&answer, replay, &shared.identity, request_id),
        Err(error) => {
            let mut response = failed(error, &entity_type, &entity_id, &command_id).respond(request_id);
            let (name, value) = answers::idempotency_key(&command_id);
            response.headers_mut().insert(name, value);
            response
        }
    };
    if let Some(owner) = &handled.by {
        answers::passed_on(&mut response, &shared.node, owner);
    }
    if target.entity_id.is_none()
        && let Ok(location) = HeaderValue::try_from(format!("/v1/entities/{entity_type}/{entity_id}"))
    {
        response.headers_mut().insert(LOCATION, location);
    }
    Ok(response)
}

/// The problem of a command that has no recorded answer.
pub fn failed(error: CommandError, entity_type: &EntityType, entity_id: &EntityId, command_id: &CommandId) -> Problem {
    Problem::command(error).with_entity(entity_type, entity_id).with_command(command_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_entity_id_depends_on_type_and_command_id_and_is_an_xid() {
        let identity = LogIdentity::new([7; 32]);
        let id = |name: &str, key: &str| new_entity_id(&identity, &EntityType::trusted(name), Some(&CommandId::trusted(key)));
        assert_eq!(id("account", "k").as_str(), "0vn4gv9pq00n3rvagu60");
        assert_eq!(id("account", "k"), id("account", "k"));
        assert_ne!(id("account", "k"), id("account", "K"));
        assert_ne!(id("account", "k"), id("transfer", "k"));
        assert!(id("account", "k").as_str().parse::<xid::Id>().is_ok());
    }

    #[test]
    fn without_a_command_id_every_entity_id_is_new() {
        let identity = LogIdentity::new([7; 32]);
        let id = || new_entity_id(&identity, &EntityType::trusted("account"), None);
        assert_ne!(id(), id());
    }
}
