//! Routes: which path and method lead where, and what every answer carries.
//!
//! Paths are few and fixed, so they are matched by hand, segment by segment; segments are decoded after they are split.

use super::body::Body;
use super::commands::{self, Target};
use super::limits::RequestBody;
use super::problem::{Code, Problem};
use super::request::{self, Media, RequestId};
use super::{Shared, answers, bulk, bundles, cluster, feed, operations, reads};
use crate::cluster::peer::FORWARDED;
use crate::cluster::{heartbeat, link};
use crate::core::{CommandId, Replay};
use hyper::header::{CONTENT_LENGTH, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response};
use percent_encoding::percent_decode_str;
use std::borrow::Cow;
use std::sync::Arc;
use tracing::Instrument;

/// Where a path leads. What stands in its segments is not checked yet.
#[derive(Debug, PartialEq, Eq)]
enum Route<'p> {
    Index,
    Live,
    Ready,
    Metrics,
    Reload,
    /// Who is in the cluster.
    Cluster,
    /// From another node: that it is there.
    Heartbeat,
    /// From another node: commands, for as long as both live.
    Link,
    /// Many commands.
    Commands,
    /// Several commands that happen together.
    Bundles,
    /// The events of some entity types, or of one entity.
    Feed,
    /// The entities of a type.
    Entities(Cow<'p, str>),
    /// With GET an entity of a type; with POST a command for a new one.
    Entity(Cow<'p, str>, Cow<'p, str>),
    /// A command for an entity; with GET, where the name is `events`, its history.
    Command(Cow<'p, str>, Cow<'p, str>, Cow<'p, str>),
    /// What a command was answered.
    Answer(Cow<'p, str>, Cow<'p, str>, Cow<'p, str>),
}

impl<'p> Route<'p> {
    fn find(path: &'p str) -> Option<Route<'p>> {
        let Some(rest) = path.strip_prefix("/v1/entities/") else {
            return match path {
                "/" => Some(Route::Index),
                "/health/live" => Some(Route::Live),
                "/health/ready" => Some(Route::Ready),
                "/metrics" => Some(Route::Metrics),
                "/v1/admin/handlers/reload" => Some(Route::Reload),
                "/v1/commands" => Some(Route::Commands),
                "/v1/bundles" => Some(Route::Bundles),
                "/v1/cluster" => Some(Route::Cluster),
                heartbeat::PATH => Some(Route::Heartbeat),
                link::PATH => Some(Route::Link),
                "/v1/feed" => Some(Route::Feed),
                _ => None,
            };
        };
        // Bytes that are no UTF-8 become a character that no identifier may hold, and fail as such.
        let mut segments = rest.split('/').map(|segment| percent_decode_str(segment).decode_utf8_lossy());
        let entity_type = segments.next()?;
        let Some(second) = segments.next() else { return Some(Route::Entities(entity_type)) };
        let Some(third) = segments.next() else { return Some(Route::Entity(entity_type, second)) };
        match (segments.next(), segments.next()) {
            (None, _) => Some(Route::Command(entity_type, second, third)),
            (Some(command_id), None) if third == "commands" => Some(Route::Answer(entity_type, second, command_id)),
            (Some(_), _) => None,
        }
    }

    /// The methods that the path knows.
    fn allow(&self) -> &'static str {
        match self {
            Route::Index | Route::Live | Route::Ready | Route::Metrics | Route::Cluster | Route::Feed | Route::Entities(_) | Route::Answer(..) => "GET, HEAD",
            Route::Reload | Route::Commands | Route::Bundles | Route::Heartbeat | Route::Link => "POST",
            Route::Entity(..) => "GET, HEAD, POST",
            Route::Command(_, _, name) if name == "events" => "GET, HEAD, POST",
            Route::Command(..) => "POST",
        }
    }
}

/// Answers one request.
pub(super) async fn answer(shared: &Arc<Shared>, request: Request<impl RequestBody>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let request_id = RequestId::of(&parts.headers);
    let (id, trace_id) = (request_id.as_str(), request_id.trace_id());
    // A span costs something at every request; where nobody traces the request and nobody debugs, there is none.
    let span = match trace_id {
        Some(_) => tracing::error_span!("request", request_id = id, trace_id),
        None => tracing::debug_span!("request", request_id = id),
    };
    let dispatched = dispatch(shared, &parts, body, &request_id);
    let dispatched = if span.is_disabled() { dispatched.await } else { dispatched.instrument(span).await };
    let mut response = dispatched.unwrap_or_else(|problem| problem.respond(&request_id));
    if parts.method == Method::HEAD {
        if let Some(length) = response.body().len() {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        *response.body_mut() = Body::empty();
    }
    tracing::debug!(method = %parts.method, path = parts.uri.path(), status = response.status().as_u16(), request_id = id, trace_id, "request");
    let headers = response.headers_mut();
    headers.entry(answers::HANDLED_BY).or_insert_with(|| shared.node.clone());
    if let Some(by) = parts.headers.get(FORWARDED) {
        headers.insert(FORWARDED, by.clone());
    }
    headers.insert(request::REQUEST_ID, request_id.header());
    response
}

async fn dispatch(shared: &Arc<Shared>, parts: &Parts, body: impl RequestBody, request_id: &RequestId) -> Result<Response<Body>, Problem> {
    let route = Route::find(parts.uri.path()).ok_or_else(Problem::not_found)?;
    match (&route, &parts.method) {
        (Route::Entity(entity_type, command), &Method::POST) => {
            let target = Target { entity_type, entity_id: None, command };
            commands::run(shared, target, parts, body, request_id).await
        }
        (Route::Command(entity_type, entity_id, command), &Method::POST) => {
            let target = Target { entity_type, entity_id: Some(entity_id), command };
            commands::run(shared, target, parts, body, request_id).await
        }
        (Route::Commands, &Method::POST) => {
            request::check_accept(&parts.headers, Media::Lines)?;
            if !body.is_end_stream() {
                request::check_content(&parts.headers, Media::Lines)?;
            }
            request::parameters(parts.uri.query(), [])?;
            Ok(bulk::run(shared.clone(), body, request_id.clone(), &parts.headers))
        }
        (Route::Reload, &Method::POST) => {
            request::parameters(parts.uri.query(), [])?;
            operations::reload(shared).await
        }
        (Route::Bundles, &Method::POST) => bundles::run(shared, parts, body, request_id).await,
        (Route::Heartbeat, &Method::POST) => cluster::heartbeat(shared, &parts.headers, body).await,
        (Route::Link, &Method::POST) => cluster::link(shared, &parts.headers, body),
        (Route::Feed, &Method::GET | &Method::HEAD) => feed::run(shared, parts, request_id).await,
        (_, &Method::GET | &Method::HEAD) => read(shared, &route, parts, request_id).await,
        _ => Err(Problem::method_not_allowed(route.allow())),
    }
}

async fn read(shared: &Shared, route: &Route<'_>, parts: &Parts, request_id: &RequestId) -> Result<Response<Body>, Problem> {
    let query = parts.uri.query();
    let handlers = || request::check_accept(&parts.headers, Media::Json).map(|()| shared.partitions.handlers());
    let store = || &**shared.partitions.store();
    match route {
        Route::Index => Ok(operations::index()),
        Route::Live => Ok(operations::live()),
        Route::Ready => Ok(operations::ready(shared).await),
        Route::Metrics => Ok(operations::metrics(shared)),
        Route::Cluster => {
            request::check_accept(&parts.headers, Media::Json)?;
            request::parameters(query, [])?;
            cluster::status(shared)
        }
        Route::Entities(entity_type) => reads::list(store(), &*handlers()?, entity_type, query).await,
        Route::Entity(entity_type, entity_id) => {
            let entity = reads::entity_of(&*handlers()?, entity_type, entity_id)?;
            reads::entity(store(), &entity, query, &parts.headers, |version| shared.partitions.is_durable(&entity, version)).await
        }
        Route::Command(entity_type, entity_id, name) if name == "events" => {
            let entity = reads::entity_of(&*handlers()?, entity_type, entity_id)?;
            reads::history(store(), &entity, query).await
        }
        Route::Answer(entity_type, entity_id, command_id) => {
            let entity = reads::entity_of(&*handlers()?, entity_type, entity_id)?;
            let command_id = CommandId::new(command_id).map_err(|error| Problem::invalid_command_id(&error))?;
            request::parameters(query, [])?;
            match shared.router.look_up(&entity, &command_id, cluster::asker(&parts.headers, request_id.trace_id())).await {
                Ok(Some(answer)) => Ok(answers::respond(&answer, Replay::Again, &shared.identity, request_id)),
                Ok(None) => Err(Problem::new(Code::CommandNotFound, "the entity never handled a command with this id")
                    .with_entity(&entity.entity_type, &entity.entity_id)
                    .with_command(&command_id)),
                Err(error) => Err(commands::failed(error, &entity.entity_type, &entity.entity_id, &command_id)),
            }
        }
        Route::Command(..) | Route::Reload | Route::Commands | Route::Bundles | Route::Feed | Route::Heartbeat | Route::Link => {
            Err(Problem::method_not_allowed(route.allow()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lead_where_the_contract_says() {
        for (path, expected, allow) in [
            ("/", "Index", "GET, HEAD"),
            ("/health/live", "Live", "GET, HEAD"),
            ("/health/ready", "Ready", "GET, HEAD"),
            ("/metrics", "Metrics", "GET, HEAD"),
            ("/v1/admin/handlers/reload", "Reload", "POST"),
            ("/v1/commands", "Commands", "POST"),
            ("/v1/bundles", "Bundles", "POST"),
            ("/v1/cluster", "Cluster", "GET, HEAD"),
            ("/v1/cluster/heartbeat", "Heartbeat", "POST"),
            ("/v1/cluster/link", "Link", "POST"),
            ("/v1/feed", "Feed", "GET, HEAD"),
            ("/v1/entities/account", r#"Entities("account")"#, "GET, HEAD"),
            ("/v1/entities/", r#"Entities("")"#, "GET, HEAD"),
            ("/v1/entities/account/a1", r#"Entity("account", "a1")"#, "GET, HEAD, POST"),
            ("/v1/entities/account/", r#"Entity("account", "")"#, "GET, HEAD, POST"),
            ("/v1/entities/account/a1/charge", r#"Command("account", "a1", "charge")"#, "POST"),
            ("/v1/entities/account/a1/events", r#"Command("account", "a1", "events")"#, "GET, HEAD, POST"),
            ("/v1/entities/account//charge", r#"Command("account", "", "charge")"#, "POST"),
            ("/v1/entities/account/a%2F1/ch%61rge", r#"Command("account", "a/1", "charge")"#, "POST"),
            ("/v1/entities/account/a%001/charge", "Command(\"account\", \"a\\01\", \"charge\")", "POST"),
            ("/v1/entities/account/%ff/charge", "Command(\"account\", \"\u{fffd}\", \"charge\")", "POST"),
            ("/v1/entities/account/%/charge", r#"Command("account", "%", "charge")"#, "POST"),
            ("/v1/entities/account/a1/commands/pay-31", r#"Answer("account", "a1", "pay-31")"#, "GET, HEAD"),
            ("/v1/entities/account/a1/commands/a%2Fb", r#"Answer("account", "a1", "a/b")"#, "GET, HEAD"),
        ] {
            let route = Route::find(path).unwrap_or_else(|| panic!("{path} leads nowhere"));
            assert_eq!((format!("{route:?}"), route.allow()), (expected.to_owned(), allow), "{path}");
        }
    }

    #[test]
    fn other_paths_lead_nowhere() {
        for path in [
            "",
            "*",
            "//",
            "/v1",
            "/v1/",
            "/v1/entities",
            "/v1/commands/",
            "/health",
            "/metrics/",
            "/V1/commands",
            "/v1/feed/",
            "/v1/bundles/",
            "/v1/views",
            "/v1/cluster/",
            "/v1/cluster/nodes",
        ] {
            assert_eq!(Route::find(path), None, "{path}");
        }
        for path in
            ["/v1/entities/account/a1/charge/more", "/v1/entities/account/a1/charge/", "/v1/entities/account/a1/commands/k/more", "/v1/entities/a/b/c/d/e/f"]
        {
            assert_eq!(Route::find(path), None, "{path}");
        }
    }
}
