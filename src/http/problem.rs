//! Problems: every answer that is not a success, as RFC 9457 `application/problem+json`.
//!
//! This is the only file that knows status codes. [`Code`] is the table of the contract; [`Problem`] is one case of it.
//! What a server error was caused by goes to the log under the request's id and never into the answer.

use super::body::{self, Body};
use super::request::RequestId;
use crate::core::batch::{HandlerFaultKind, SchemaError};
use crate::core::json::write_string;
use crate::core::{Answer, CommandId, EntityId, EntityType, Failure, IdError, Json, JsonError, LogIdentity, Version};
use crate::feed::FeedError;
use crate::partition::CommandError;
use crate::store::StoreError;
use hyper::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use std::borrow::Cow;
use std::fmt::Write;
use std::time::Duration;

/// The status of an answer to a conditional read whose document has not changed.
pub const NOT_MODIFIED: StatusCode = StatusCode::NOT_MODIFIED;
/// The status of a node that should get no requests now.
pub const NOT_READY: StatusCode = StatusCode::SERVICE_UNAVAILABLE;

/// When to try again where nothing better is known.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// All kinds of problems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// The body is no JSON that quokka accepts.
    MalformedJson,
    /// The request breaks its schema, or a line of many commands has the wrong members.
    InvalidRequest,
    /// The entity id breaks its rule.
    InvalidEntityId,
    /// The command id breaks its rule.
    InvalidCommandId,
    /// The token is of another log, ahead of this one, or of no use here.
    InvalidToken,
    /// A query parameter or a condition in a header cannot be used.
    InvalidQuery,
    /// The caller may not ask this.
    Forbidden,
    /// No such entity type.
    UnknownEntityType,
    /// The entity type has no such command.
    UnknownCommand,
    /// No such entity.
    EntityNotFound,
    /// The entity exists but not at that version or time.
    VersionNotFound,
    /// The entity never got that command.
    CommandNotFound,
    /// No such path.
    NotFound,
    /// The path knows other methods.
    MethodNotAllowed,
    /// The caller takes no answer of the kind there is.
    NotAcceptable,
    /// The body did not arrive in time.
    RequestTimeout,
    /// The body is not of a kind that is read here.
    UnsupportedMediaType,
    /// The command is for new entities only.
    EntityExists,
    /// The entity is at another version.
    VersionMismatch,
    /// The body is too large.
    RequestTooLarge,
    /// The handler refused; recorded.
    Rejected,
    /// The command id was used for something else.
    CommandIdReused,
    /// A command of a bundle is refused, and so all of it.
    BundleRejected,
    /// Handlers that were to be loaded have faults.
    InvalidHandlers,
    /// The handler broke.
    HandlerFailed,
    /// The new state is not what its schema allows.
    StateInvalid,
    /// The response is not what its schema allows.
    ResponseInvalid,
    /// A fault of quokka.
    Internal,
    /// More work than there is room for.
    Overloaded,
    /// The node is stopping.
    ShuttingDown,
    /// The database, or what runs handlers, is away.
    StorageUnavailable,
    /// The command may have happened.
    OutcomeUnknown,
}

impl Code {
    /// The status, the code as text, and the title.
    fn entry(self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Code::MalformedJson => (StatusCode::BAD_REQUEST, "malformed-json", "The body is not acceptable JSON"),
            Code::InvalidRequest => (StatusCode::BAD_REQUEST, "invalid-request", "The request is not valid"),
            Code::InvalidEntityId => (StatusCode::BAD_REQUEST, "invalid-entity-id", "The entity id is not valid"),
            Code::InvalidCommandId => (StatusCode::BAD_REQUEST, "invalid-command-id", "The command id is not valid"),
            Code::InvalidToken => (StatusCode::BAD_REQUEST, "invalid-token", "The token is not valid"),
            Code::InvalidQuery => (StatusCode::BAD_REQUEST, "invalid-query", "A parameter is not valid"),
            Code::Forbidden => (StatusCode::FORBIDDEN, "forbidden", "This is not allowed"),
            Code::UnknownEntityType => (StatusCode::NOT_FOUND, "unknown-entity-type", "There is no such entity type"),
            Code::UnknownCommand => (StatusCode::NOT_FOUND, "unknown-command", "There is no such command"),
            Code::EntityNotFound => (StatusCode::NOT_FOUND, "entity-not-found", "There is no such entity"),
            Code::VersionNotFound => (StatusCode::NOT_FOUND, "version-not-found", "The entity has no such version"),
            Code::CommandNotFound => (StatusCode::NOT_FOUND, "command-not-found", "The entity never handled that command"),
            Code::NotFound => (StatusCode::NOT_FOUND, "not-found", "There is nothing here"),
            Code::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "The method is not allowed here"),
            Code::NotAcceptable => (StatusCode::NOT_ACCEPTABLE, "not-acceptable", "The answer would be of another media type"),
            Code::RequestTimeout => (StatusCode::REQUEST_TIMEOUT, "request-timeout", "The body did not arrive in time"),
            Code::UnsupportedMediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", "The body is of the wrong media type"),
            Code::EntityExists => (StatusCode::CONFLICT, "entity-exists", "The entity exists already"),
            Code::VersionMismatch => (StatusCode::PRECONDITION_FAILED, "version-mismatch", "The entity is at another version"),
            Code::RequestTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "request-too-large", "The request is too large"),
            Code::Rejected => (StatusCode::UNPROCESSABLE_ENTITY, "rejected", "The command was rejected"),
            Code::CommandIdReused => (StatusCode::UNPROCESSABLE_ENTITY, "command-id-reused", "The command id was used for something else"),
            Code::BundleRejected => (StatusCode::UNPROCESSABLE_ENTITY, "bundle-rejected", "A command of the bundle was refused"),
            Code::InvalidHandlers => (StatusCode::UNPROCESSABLE_ENTITY, "invalid-handlers", "The handlers have faults"),
            Code::HandlerFailed => (StatusCode::INTERNAL_SERVER_ERROR, "handler-failed", "The handler failed"),
            Code::StateInvalid => (StatusCode::INTERNAL_SERVER_ERROR, "state-invalid", "The new state is not valid"),
            Code::ResponseInvalid => (StatusCode::INTERNAL_SERVER_ERROR, "response-invalid", "The response is not valid"),
            Code::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "internal", "Something is wrong with the server"),
            Code::Overloaded => (StatusCode::SERVICE_UNAVAILABLE, "overloaded", "The server has more work than it takes"),
            Code::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting-down", "The server is stopping"),
            Code::StorageUnavailable => (StatusCode::SERVICE_UNAVAILABLE, "storage-unavailable", "The server cannot do its work now"),
            Code::OutcomeUnknown => (StatusCode::GATEWAY_TIMEOUT, "outcome-unknown", "It is not known whether the command happened"),
        }
    }

    /// The code as text.
    pub fn as_str(self) -> &'static str {
        self.entry().1
    }

    /// The HTTP status.
    pub fn status(self) -> StatusCode {
        self.entry().0
    }
}

/// One problem, ready to be answered.
#[derive(Debug)]
pub struct Problem(Box<Content>);

#[derive(Debug)]
struct Content {
    code: Code,
    detail: Cow<'static, str>,
    /// Further members as JSON text, each with a comma before it.
    members: String,
    allow: Option<&'static str>,
    retry_after: Option<Duration>,
    /// For the log only.
    cause: Option<String>,
    /// `type/id`, and the command id, where the problem is about them: for the log.
    entity: Option<String>,
    command_id: Option<String>,
}

impl Problem {
    /// A problem; the detail is for the caller.
    pub fn new(code: Code, detail: impl Into<Cow<'static, str>>) -> Problem {
        Problem(Box::new(Content {
            code,
            detail: detail.into(),
            members: String::new(),
            allow: None,
            retry_after: None,
            cause: None,
            entity: None,
            command_id: None,
        }))
    }

    /// Which problem.
    #[cfg(test)]
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// What the caller is told.
    #[cfg(test)]
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// Adds a member holding a text.
    pub fn with_text(mut self, key: &str, text: &str) -> Problem {
        self.key(key);
        write_string(&mut self.0.members, text);
        self
    }

    /// Adds a member holding a number.
    pub fn with_number(mut self, key: &str, number: u64) -> Problem {
        self.key(key);
        self.0.members.push_str(itoa::Buffer::new().format(number));
        self
    }

    /// Adds a member holding a document.
    pub fn with_json(mut self, key: &str, text: &str) -> Problem {
        self.key(key);
        self.0.members.push_str(text);
        self
    }

    fn key(&mut self, key: &str) {
        self.0.members.push(',');
        write_string(&mut self.0.members, key);
        self.0.members.push(':');
    }

    /// Says when to try again.
    pub fn with_retry_after(mut self, time: Duration) -> Problem {
        self.0.retry_after = Some(time);
        self
    }

    /// Keeps the cause, for the log.
    pub fn with_cause(mut self, cause: impl Into<String>) -> Problem {
        self.0.cause = Some(cause.into());
        self
    }

    /// Names the entity.
    pub fn with_entity(mut self, entity_type: &EntityType, entity_id: &EntityId) -> Problem {
        if self.is_server_error() {
            self.0.entity = Some(format!("{entity_type}/{entity_id}"));
        }
        self.with_text("entity_type", entity_type.as_str()).with_text("entity_id", entity_id.as_str())
    }

    /// Names the command.
    pub fn with_command(mut self, command_id: &CommandId) -> Problem {
        if self.is_server_error() {
            self.0.command_id = Some(command_id.to_string());
        }
        self.with_text("command_id", command_id.as_str())
    }

    /// The path knows only the methods in `allow`.
    pub fn method_not_allowed(allow: &'static str) -> Problem {
        let mut problem = Problem::new(Code::MethodNotAllowed, format!("allowed here: {allow}"));
        problem.0.allow = Some(allow);
        problem
    }

    /// No such path.
    pub fn not_found() -> Problem {
        Problem::new(Code::NotFound, "no resource has this path")
    }

    /// A query parameter that cannot be used.
    pub fn invalid_query(parameter: &str, detail: impl Into<Cow<'static, str>>) -> Problem {
        Problem::new(Code::InvalidQuery, detail).with_text("parameter", parameter)
    }

    /// No such entity type.
    pub fn unknown_entity_type(name: &str) -> Problem {
        Problem::new(Code::UnknownEntityType, "this server has no entity type of that name").with_text("entity_type", name)
    }

    /// An entity id that breaks its rule.
    pub fn invalid_entity_id(error: &IdError) -> Problem {
        Problem::new(Code::InvalidEntityId, error.to_string())
    }

    /// A command id that breaks its rule.
    pub fn invalid_command_id(error: &IdError) -> Problem {
        Problem::new(Code::InvalidCommandId, error.to_string())
    }

    /// A body that is no acceptable JSON.
    pub fn malformed_json(error: &JsonError) -> Problem {
        Problem::new(Code::MalformedJson, error.to_string()).with_number("offset", error.offset as u64)
    }

    /// The node is stopping.
    pub fn shutting_down() -> Problem {
        Problem::new(Code::ShuttingDown, "the command did not happen; send it again, to another node or in a moment").with_retry_after(RETRY_SOON)
    }

    /// A recorded rejection: the same bytes at every replay.
    pub fn rejected(answer: &Answer, identity: &LogIdentity) -> Problem {
        Problem::new(Code::Rejected, rejection_message(&answer.response))
            .with_entity(&answer.position.partition.entity_type, &answer.entity_id)
            .with_number("version", answer.version)
            .with_command(&answer.command_id)
            .with_json("rejection", answer.response.as_str())
            .with_text("token", &answer.position.token(identity))
    }

    /// A rejection that is not recorded.
    pub fn rejection(rejection: &Json) -> Problem {
        Problem::new(Code::Rejected, rejection_message(rejection)).with_json("rejection", rejection.as_str())
    }

    /// The problem of a bundle, where this one is the problem of one of its commands. A server error is logged here.
    pub fn in_bundle(self, index: usize, request_id: &RequestId) -> Problem {
        self.log(request_id);
        let mut inner = String::from("{");
        self.write_members(&mut inner, request_id, StatusPlace::AfterTitle);
        inner.push('}');
        let detail = format!("command {index} was refused, so nothing of the bundle happened");
        Problem::new(Code::BundleRejected, detail).with_number("index", index as u64).with_json("problem", &inner)
    }

    /// A command without a recorded answer. The caller adds entity and command.
    pub fn command(error: CommandError) -> Problem {
        match error {
            CommandError::Failed(failure) => Problem::failure(failure),
            CommandError::Reused(answer) => {
                Problem::new(Code::CommandIdReused, "this command id was used before, with another command or another request; nothing happened now")
                    .with_number("version", answer.version)
            }
            CommandError::UnknownEntityType => Problem::new(Code::UnknownEntityType, "this server has no entity type of that name"),
            CommandError::Overloaded { retry_after } => {
                Problem::new(Code::Overloaded, "too much is queued before the command, and it did not happen; send it again later")
                    .with_retry_after(retry_after)
            }
            CommandError::ShuttingDown => Problem::shutting_down(),
            CommandError::Unavailable(cause) => Problem::unavailable(cause),
            CommandError::OutcomeUnknown => {
                Problem::new(Code::OutcomeUnknown, "the command may or may not have happened; send it again with the same Idempotency-Key to learn its outcome")
            }
            CommandError::Internal(cause) => Problem::internal(cause),
        }
    }

    fn failure(failure: Failure) -> Problem {
        match failure {
            Failure::UnknownCommand => Problem::new(Code::UnknownCommand, "the entity type has no command of that name"),
            Failure::EntityExists { version } => {
                Problem::new(Code::EntityExists, "the command is for new entities, and this one exists").with_number("version", version)
            }
            Failure::EntityNotFound => Problem::new(Code::EntityNotFound, "the command is for entities that exist, and this one does not"),
            Failure::VersionMismatch { version } => Problem::version_mismatch(version),
            Failure::InvalidRequest(errors) => Problem::new(Code::InvalidRequest, summary(&errors)).with_json("errors", &errors_json(&errors)),
            Failure::HandlerFailed(fault) => {
                let detail = match fault.kind {
                    HandlerFaultKind::Exception => "the handler threw an exception; nothing happened",
                    HandlerFaultKind::TimeLimit => "the handler took more time than it is allowed; nothing happened",
                    HandlerFaultKind::MemoryLimit => "the handler took more memory than it is allowed; nothing happened",
                    HandlerFaultKind::StackLimit => "the handler nested its calls too deeply; nothing happened",
                    HandlerFaultKind::Crash => "the handler's process died; nothing happened",
                };
                Problem::new(Code::HandlerFailed, detail).with_cause(fault.message)
            }
            Failure::StateInvalid(errors) => {
                Problem::new(Code::StateInvalid, "the handler made a state that is not allowed; nothing happened").with_cause(summary(&errors))
            }
            Failure::ResponseInvalid(errors) => {
                Problem::new(Code::ResponseInvalid, "the handler made a response that is not allowed; nothing happened").with_cause(summary(&errors))
            }
        }
    }

    fn version_mismatch(version: Version) -> Problem {
        let detail = match version {
            0 => "the entity does not exist yet".to_owned(),
            version => format!("the entity is at version {version}"),
        };
        Problem::new(Code::VersionMismatch, detail).with_number("version", version)
    }

    /// The database, or what runs handlers, is away.
    pub fn unavailable(cause: impl Into<String>) -> Problem {
        Problem::new(Code::StorageUnavailable, "the database does not answer now, nothing happened; try again later")
            .with_retry_after(RETRY_SOON)
            .with_cause(cause)
    }

    /// A fault of quokka.
    pub fn internal(cause: impl Into<String>) -> Problem {
        Problem::new(Code::Internal, "the server met a fault of its own; nothing happened. Its log tells more under the request id").with_cause(cause)
    }

    /// A read that failed.
    pub fn store(error: StoreError) -> Problem {
        match error {
            StoreError::Unavailable(cause) => Problem::unavailable(cause),
            StoreError::Corrupt(cause) => Problem::internal(cause),
        }
    }

    /// A feed that cannot be read.
    pub fn feed(error: FeedError) -> Problem {
        match error {
            FeedError::Token(detail) => Problem::new(Code::InvalidToken, detail),
            FeedError::Ahead => {
                let detail = "the token is ahead of the log: it was given out before the database was restored, or by a database that lost commits; start anew";
                Problem::new(Code::InvalidToken, detail)
            }
            FeedError::TooMany => {
                Problem::new(Code::Overloaded, "as many follow the feed of this server as it takes; try again later").with_retry_after(RETRY_SOON)
            }
            FeedError::Store(error) => Problem::store(error),
        }
    }

    fn is_server_error(&self) -> bool {
        self.0.code.status().is_server_error()
    }

    /// Writes the cause of a server error to the log, once, where the problem is about to be answered.
    fn log(&self, request_id: &RequestId) {
        let content = &*self.0;
        let (code, cause) = (content.code.as_str(), content.cause.as_deref().unwrap_or_default());
        let (trace_id, request_id) = (request_id.trace_id(), request_id.as_str());
        let (entity, command_id) = (content.entity.as_deref(), content.command_id.as_deref());
        match content.code {
            Code::Internal => tracing::error!(code, cause, entity, command_id, request_id, trace_id, "request failed"),
            // Many at once, and expected: every caller is told, the log need not be.
            Code::Overloaded | Code::ShuttingDown => tracing::debug!(code, request_id, trace_id, "request refused"),
            _ if self.is_server_error() => tracing::warn!(code, cause, entity, command_id, request_id, trace_id, "request failed"),
            _ => {}
        }
    }

    /// The answer; server errors are logged here.
    pub fn respond(self, request_id: &RequestId) -> Response<Body> {
        self.log(request_id);
        let mut out = String::with_capacity(192 + self.0.members.len() + self.0.detail.len());
        out.push('{');
        self.write_members(&mut out, request_id, StatusPlace::AfterTitle);
        out.push('}');
        let mut response = body::response(out.into_bytes());
        *response.status_mut() = self.0.code.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(allow) = self.0.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        if let Some(time) = self.0.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(time)));
        }
        if self.0.code == Code::ShuttingDown {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// Appends the problem as one line of an answer to many commands, without its closing brace and newline.
    pub fn write_line(&self, out: &mut String, request_id: &RequestId) {
        self.log(request_id);
        let _ = write!(out, "{{\"status\":{},", self.0.code.status().as_u16());
        self.write_members(out, request_id, StatusPlace::Before);
    }

    fn write_members(&self, out: &mut String, request_id: &RequestId, status: StatusPlace) {
        let (code, name, title) = self.0.code.entry();
        let _ = write!(out, "\"type\":\"/problems/{name}\",\"title\":\"{title}\",");
        if status == StatusPlace::AfterTitle {
            let _ = write!(out, "\"status\":{},", code.as_u16());
        }
        let _ = write!(out, "\"code\":\"{name}\",\"detail\":");
        write_string(out, &self.0.detail);
        out.push_str(&self.0.members);
        if self.is_server_error() {
            out.push_str(",\"request_id\":");
            write_string(out, request_id.as_str());
        }
    }
}

/// Where the status stands among the members.
#[derive(PartialEq, Eq)]
enum StatusPlace {
    /// Written by the caller, before all else.
    Before,
    AfterTitle,
}

/// The whole answer, as bytes of HTTP/1.1, to a connection that is one too many.
pub fn too_many_connections() -> String {
    let problem = Problem::new(Code::Overloaded, "the server has as many connections as it takes; try again later");
    let mut content = String::from("{");
    problem.write_members(&mut content, &RequestId::fresh(), StatusPlace::AfterTitle);
    content.push('}');
    let status = Code::Overloaded.status();
    format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/problem+json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{content}",
        status.as_u16(),
        status.canonical_reason().unwrap_or_default(),
        content.len()
    )
}

/// What a rejection says.
fn rejection_message(rejection: &Json) -> Cow<'static, str> {
    #[derive(serde::Deserialize)]
    struct Rejection {
        message: String,
    }
    rejection.parse::<Rejection>().map_or(Cow::Borrowed("the handler refused the command"), |rejection| Cow::Owned(rejection.message))
}

/// Rounded up, and never 0.
fn whole_seconds(time: Duration) -> u64 {
    (time.as_secs() + u64::from(time.subsec_nanos() > 0)).max(1)
}

/// The first error, and how many more there are.
fn summary(errors: &[SchemaError]) -> String {
    let Some(first) = errors.first() else { return "it breaks its schema".into() };
    let place = if first.pointer.is_empty() { "" } else { " at " };
    match errors.len() - 1 {
        0 => format!("{}{place}{}", first.message, first.pointer),
        more => format!("{}{place}{} (and {more} more)", first.message, first.pointer),
    }
}

fn errors_json(errors: &[SchemaError]) -> String {
    let mut out = String::from("[");
    for (number, error) in errors.iter().enumerate() {
        out.push_str(if number > 0 { ",{\"pointer\":" } else { "{\"pointer\":" });
        write_string(&mut out, &error.pointer);
        out.push_str(",\"message\":");
        write_string(&mut out, &error.message);
        out.push('}');
    }
    out.push(']');
    out
}
