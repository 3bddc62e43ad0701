//! `GET /v1/feed`: pages, long polls and server-sent events.
//!
//! A long poll is answered when there is something, at its timeout, or when the node stops; a stream goes on until the client or the node goes. A client that
//! reads a stream slowly holds up its own task only: what it has not taken is read again from where it stands, so nothing is left out. What goes
//! wrong inside a stream ends it, without a last event, and the client comes back with the id of the last one it has.

use super::Shared;
use super::body::{self, Body, Chunk};
use super::problem::Problem;
use super::reads;
use super::request::{self, Media, RequestId};
use crate::core::EntityType;
use crate::core::json::write_string;
use crate::feed::{FeedError, Follower, Fresh, Given, Rejected, Scope, Since, Tokens};
use crate::handler::HandlerSet;
use crate::store::Order;
use bytes::Bytes;
use humantime_serde::re::humantime::parse_duration;
use hyper::Response;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

/// The longest that a long poll waits.
const TIMEOUT_MAX: Duration = Duration::from_secs(300);
/// How often a stream without events says that it is there.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// How many events a stream reads at once, and the bytes of one chunk of it.
const STREAM_READ: usize = 100;
const CHUNK_BYTES: usize = 64 * 1024;
/// The most chunks that wait for the client to read them.
const CHUNKS: usize = 2;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
struct Query {
    scope: Scope,
    since: Since,
    limit: usize,
    timeout: Duration,
    rejected: Rejected,
    order: Order,
}

/// Answers a request for the feed.
pub(super) async fn run(shared: &Arc<Shared>, parts: &Parts, request_id: &RequestId) -> Result<Response<Body>, Problem> {
    let mut query = query(&shared.partitions.handlers(), parts.uri.query())?;
    if request::wants_events(&parts.headers) {
        if query.order == Order::Descending {
            return Err(Problem::invalid_query("order", "events are streamed in ascending order only"));
        }
        if let Some(last) = parts.headers.get(LAST_EVENT_ID).filter(|last| !last.is_empty()) {
            query.since = Since::Token(last.to_str().unwrap_or_default().to_owned());
        }
        let follower = shared.feed.follow(query.scope, &query.since, query.rejected, Fresh::Soon).await.map_err(Problem::feed)?;
        return Ok(stream(shared.clone(), follower, request_id.clone()));
    }
    request::check_accept(&parts.headers, Media::Json)?;
    match query.order {
        Order::Ascending => page(shared, query).await,
        Order::Descending => page_back(shared, query).await,
    }
}

fn query(handlers: &HandlerSet, text: Option<&str>) -> Result<Query, Problem> {
    let known = ["types", "since", "limit", "timeout", "entity", "rejected", "order"];
    let [types, since, limit, timeout, entity, rejected, order] = request::parameters(text, known)?;
    let scope = match (types.as_deref(), entity.as_deref()) {
        (Some(_), Some(_)) => return Err(Problem::invalid_query("types", "types and entity cannot be given together")),
        (None, Some(entity)) => {
            let (entity_type, entity_id) =
                entity.split_once('/').ok_or_else(|| Problem::invalid_query("entity", "entity must be type/id, such as account/alice"))?;
            Scope::Entity(reads::entity_of(handlers, entity_type, entity_id)?)
        }
        (Some(types), None) => Scope::Types(entity_types(handlers, types)?),
        (None, None) => Scope::Types(handlers.keys().cloned().collect()),
    };
    let since = match since.as_deref() {
        None => Since::Start,
        Some("now") => Since::Now,
        Some(token) => Since::Token(token.to_owned()),
    };
    let rejected = match rejected.as_deref() {
        None | Some("false") => Rejected::LeftOut,
        Some("true") => Rejected::Shown,
        Some(_) => return Err(Problem::invalid_query("rejected", "rejected must be true or false")),
    };
    let order = match order.as_deref() {
        None | Some("asc") => Order::Ascending,
        Some("desc") if timeout.is_some() => return Err(Problem::invalid_query("timeout", "with order=desc there is nothing to wait for")),
        Some("desc") => Order::Descending,
        Some(_) => return Err(Problem::invalid_query("order", "order must be asc or desc")),
    };
    let timeout = match timeout.as_deref().map(parse_duration) {
        None => Duration::ZERO,
        Some(Ok(time)) if time <= TIMEOUT_MAX => time,
        Some(_) => return Err(Problem::invalid_query("timeout", "timeout must be a time from 0s to 5m, such as 30s")),
    };
    Ok(Query { scope, since, limit: request::limit(limit.as_deref())?, timeout, rejected, order })
}

/// Known ones, each once.
fn entity_types(handlers: &HandlerSet, names: &str) -> Result<Vec<EntityType>, Problem> {
    let mut found = BTreeSet::new();
    for name in names.split(',') {
        let (entity_type, _) = handlers.get_key_value(name).ok_or_else(|| Problem::unknown_entity_type(name))?;
        found.insert(entity_type.clone());
    }
    Ok(found.into_iter().collect())
}

/// One page forwards, waited for where there is nothing yet.
async fn page(shared: &Shared, query: Query) -> Result<Response<Body>, Problem> {
    let deadline = Instant::now() + query.timeout;
    let fresh = if query.timeout.is_zero() { Fresh::Now } else { Fresh::Soon };
    let mut follower = shared.feed.follow(query.scope, &query.since, query.rejected, fresh).await.map_err(Problem::feed)?;
    let events = loop {
        let page = follower.next(query.limit, Tokens::None).await.map_err(Problem::feed)?;
        if !page.events.is_empty() || Instant::now() >= deadline || shared.stop.is_cancelled() {
            break page.events;
        }
        if !page.has_more {
            tokio::select! {
                () = follower.changed() => {}
                () = sleep_until(deadline) => {}
                () = shared.stop.cancelled() => {}
            }
        }
    };
    let mut out = events_json(&events);
    out.push_str(",\"next_batch\":");
    write_string(&mut out, &follower.token());
    out.push('}');
    Ok(answer(out))
}

/// One page backwards.
async fn page_back(shared: &Shared, query: Query) -> Result<Response<Body>, Problem> {
    let page = shared.feed.back(query.scope, &query.since, query.rejected, query.limit).await.map_err(Problem::feed)?;
    let mut out = events_json(&page.events);
    out.push_str(",\"next_batch\":");
    match &page.next {
        Some(token) => write_string(&mut out, token),
        None => out.push_str("null"),
    }
    out.push_str(",\"start\":");
    write_string(&mut out, &page.start);
    out.push('}');
    Ok(answer(out))
}

/// The same request is answered otherwise a moment later.
fn answer(content: String) -> Response<Body> {
    let mut response = body::response(content.into_bytes());
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// The first member of an answer, its object left open.
fn events_json(events: &[Given]) -> String {
    let mut out = String::with_capacity(64 + events.iter().map(|given| given.entry.json.len() + 1).sum::<usize>());
    out.push_str("{\"events\":[");
    for (number, given) in events.iter().enumerate() {
        if number > 0 {
            out.push(',');
        }
        out.push_str(&given.entry.json);
    }
    out.push(']');
    out
}

/// Server-sent events, until the client or the node goes.
fn stream(shared: Arc<Shared>, follower: Follower, request_id: RequestId) -> Response<Body> {
    let (chunks, sent) = mpsc::channel(CHUNKS);
    let task = tokio::spawn(async move {
        match send_all(&shared, follower, &chunks).await {
            Ok(()) => drop(chunks.send(Chunk::End).await),
            Err(Ended::Gone) => {}
            Err(Ended::Failed(error)) => tracing::warn!(%error, request_id = request_id.as_str(), "a stream of the feed broke off"),
        }
    });
    let mut response = Response::new(Body::made(sent, task));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Why a stream ends.
enum Ended {
    /// The client reads no more, or takes too long.
    Gone,
    Failed(FeedError),
}

async fn send_all(shared: &Shared, mut follower: Follower, chunks: &mpsc::Sender<Chunk>) -> Result<(), Ended> {
    // So that the client knows at once that it is connected, and where it stands.
    let mut told = follower.token();
    let mut out = format!("id: {told}\n: connected\n\n");
    loop {
        if !out.is_empty() {
            send(shared, chunks, &mut out).await?;
        }
        if shared.stop.is_cancelled() {
            return Ok(());
        }
        let page = follower.next(STREAM_READ, Tokens::Each).await.map_err(Ended::Failed)?;
        for Given { entry, token } in &page.events {
            out.push_str("id: ");
            out.push_str(token.as_deref().unwrap_or_default());
            out.push_str("\nevent: message\ndata: ");
            // One line: the canonical form has no line breaks outside of escapes.
            out.push_str(&entry.json);
            out.push_str("\n\n");
            if out.len() >= CHUNK_BYTES {
                send(shared, chunks, &mut out).await?;
            }
        }
        if !page.events.is_empty() {
            told = follower.token();
        }
        if page.has_more || !page.events.is_empty() {
            continue;
        }
        tokio::select! {
            () = follower.changed() => {}
            () = shared.stop.cancelled() => {}
            () = tokio::time::sleep(HEARTBEAT) => {
                out.push_str(": still here\n");
                // An id alone moves the client past what was filtered.
                if follower.token() != told {
                    told = follower.token();
                    out = format!("id: {told}\n{out}");
                }
                out.push('\n');
            }
        }
    }
}

async fn send(shared: &Shared, chunks: &mpsc::Sender<Chunk>, out: &mut String) -> Result<(), Ended> {
    let chunk = Chunk::Data(Bytes::from(std::mem::take(out)));
    match timeout(shared.options.idle_timeout, chunks.send(chunk)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(Ended::Gone),
    }
}

#[cfg(test)]
mod tests {
    use super::super::problem::Code;
    use super::super::tests_support::handlers;
    use super::*;
    use crate::core::EntityId;
    use crate::partition::EntityKey;

    #[test]
    fn queries_are_read_by_fixed_rules() {
        let account = EntityType::trusted("account");
        let types = |types: &[&EntityType]| Scope::Types(types.iter().map(|name| (*name).clone()).collect());
        let entity = Scope::Entity(EntityKey { entity_type: account.clone(), entity_id: EntityId::trusted("a1") });
        let plain = |scope| Query { scope, since: Since::Start, limit: 100, timeout: Duration::ZERO, rejected: Rejected::LeftOut, order: Order::Ascending };
        let seconds = Duration::from_secs(30);
        for (text, expected) in [
            ("", plain(types(&[&account]))),
            ("types=account,account&since=now", Query { since: Since::Now, ..plain(types(&[&account])) }),
            ("entity=account%2Fa1&limit=7&rejected=true", Query { limit: 7, rejected: Rejected::Shown, ..plain(entity.clone()) }),
            ("since=s_x&timeout=30s&order=asc", Query { since: Since::Token("s_x".into()), timeout: seconds, ..plain(types(&[&account])) }),
            ("entity=account/a1&order=desc&rejected=false", Query { order: Order::Descending, ..plain(entity) }),
        ] {
            assert_eq!(query(&handlers(), Some(text)).ok(), Some(expected), "{text}");
        }
        for (text, code) in [
            ("types=", Code::UnknownEntityType),
            ("types=account,other", Code::UnknownEntityType),
            ("entity=other/a1", Code::UnknownEntityType),
            ("entity=account/a%20b", Code::InvalidEntityId),
            ("entity=account", Code::InvalidQuery),
            ("types=account&entity=account/a1", Code::InvalidQuery),
            ("timeout=301s", Code::InvalidQuery),
            ("timeout=5", Code::InvalidQuery),
            ("order=desc&timeout=1s", Code::InvalidQuery),
            ("order=up", Code::InvalidQuery),
            ("limit=0", Code::InvalidQuery),
            ("rejected=1", Code::InvalidQuery),
            ("type=account", Code::InvalidQuery),
        ] {
            assert_eq!(query(&handlers(), Some(text)).map_err(|problem| problem.code()).err(), Some(code), "{text}");
        }
    }
}
