//! Reads: entities, their history, listings, and what a command was answered.
//!
//! Everything read from the store is made durable by its barrier before it is answered (unless this node knows that it is),
//! so that no answer tells what a crash of the database could take back. Pages hold at most [`PAGE_BYTES`] of events (and one more), whatever `limit` says.

use super::answers::etag;
use super::body::{self, Body};
use super::problem::{Code, NOT_MODIFIED, Problem};
use super::request;
use crate::core::event_json::{self, TimeError};
use crate::core::json::write_string;
use crate::core::{EntityId, StoredEvent, Version};
use crate::handler::HandlerSet;
use crate::partition::EntityKey;
use crate::store::{Content, Order, Store};
use hyper::Response;
use hyper::header::{ETAG, HeaderMap};
use jiff::SignedDuration;
use jiff::civil::date;
use jiff::fmt::temporal::Pieces;
use std::fmt::Write;

/// How often something is read while connections to the database are lost.
const TRIES_MAX: usize = 5;

/// A page of history ends after this many bytes of events.
const PAGE_BYTES: usize = 8 * 1024 * 1024;
/// How many events are read first, when it is not yet known how large they are.
const FIRST_READ: usize = 4;

/// Finds the entity type and checks the id of a path.
pub fn entity_of(handlers: &HandlerSet, entity_type: &str, entity_id: &str) -> Result<EntityKey, Problem> {
    let (entity_type, handler) = handlers.get_key_value(entity_type).ok_or_else(|| Problem::unknown_entity_type(entity_type))?;
    let entity_id = EntityId::new(entity_id, handler.entity_id_max()).map_err(|error| Problem::invalid_entity_id(&error))?;
    Ok(EntityKey { entity_type: entity_type.clone(), entity_id })
}

/// Which state of an entity is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Now,
    Version(Version),
    /// Microseconds since 1970.
    Time(i64),
}

fn when(query: Option<&str>) -> Result<When, Problem> {
    let [version, at] = request::parameters(query, ["version", "at"])?;
    match (version, at) {
        (None, None) => Ok(When::Now),
        (Some(text), None) => {
            let version = request::version(&text).filter(|version| *version > 0);
            version.map(When::Version).ok_or_else(|| Problem::invalid_query("version", "version must be a whole number from 1"))
        }
        (None, Some(text)) => microseconds(&text)
            .map(When::Time)
            .ok_or_else(|| Problem::invalid_query("at", "at must be a time of RFC 3339 with its offset, such as 2025-10-26T01:00:00Z")),
        (Some(_), Some(_)) => Err(Problem::invalid_query("at", "version and at cannot be given together")),
    }
}

/// A time with its offset, as microseconds since 1970. Covers all four-digit years, as RFC 3339 does.
fn microseconds(text: &str) -> Option<i64> {
    let pieces = Pieces::parse(text).ok()?;
    let offset = pieces.to_numeric_offset()?;
    let local = pieces.date().to_datetime(pieces.time()?);
    let since = local.duration_since(date(1970, 1, 1).at(0, 0, 0, 0));
    i64::try_from((since - SignedDuration::from_secs(offset.seconds().into())).as_micros()).ok()
}

fn entity_not_found(EntityKey { entity_type, entity_id }: &EntityKey) -> Problem {
    Problem::new(Code::EntityNotFound, "there is no entity of that type and id").with_entity(entity_type, entity_id)
}

/// Reads until the connection to the database was not lost meanwhile: what was read before it was lost may have been taken back by a crash, although
/// the barrier after it came through.
async fn durably<F>(store: &dyn Store, read: impl Fn() -> F) -> Result<Response<Body>, Problem>
where
    F: Future<Output = Result<Response<Body>, Problem>>,
{
    for _ in 0..TRIES_MAX {
        let epoch = store.epoch();
        let answered = read().await?;
        if store.epoch() == epoch {
            return Ok(answered);
        }
    }
    Err(Problem::unavailable("the connection was lost again and again"))
}

/// `GET /v1/entities/{type}/{id}`. `is_durable` tells which versions need no barrier.
pub async fn entity(
    store: &dyn Store,
    entity: &EntityKey,
    query: Option<&str>,
    headers: &HeaderMap,
    is_durable: impl Fn(Version) -> bool,
) -> Result<Response<Body>, Problem> {
    durably(store, || entity_once(store, entity, query, headers, &is_durable)).await
}

async fn entity_once(
    store: &dyn Store,
    entity: &EntityKey,
    query: Option<&str>,
    headers: &HeaderMap,
    is_durable: impl Fn(Version) -> bool,
) -> Result<Response<Body>, Problem> {
    let when = when(query)?;
    let found = match when {
        When::Now => newest(store, entity).await?,
        When::Version(version) => store.at_version(&entity.entity_type, &entity.entity_id, version).await.map_err(Problem::store)?,
        When::Time(time) => store.at_time(&entity.entity_type, &entity.entity_id, time).await.map_err(Problem::store)?,
    };
    let Some((stored, state)) = found.and_then(|stored| stored.event.state.clone().map(|state| (stored, state))) else {
        return Err(missing(store, entity, when).await?);
    };
    let version = stored.event.version;
    if !is_durable(version) {
        store.barrier().await.map_err(Problem::store)?;
    }
    let mut response = if request::has_already(headers, version) {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = NOT_MODIFIED;
        response
    } else {
        let mut out = String::with_capacity(160 + state.len());
        out.push_str("{\"entity_type\":");
        write_string(&mut out, entity.entity_type.as_str());
        out.push_str(",\"entity_id\":");
        write_string(&mut out, entity.entity_id.as_str());
        let _ = write!(out, ",\"version\":{version},\"state\":{state},\"committed_at\":\"");
        event_json::write_time(&mut out, stored.committed_at).map_err(time_error)?;
        out.push_str("\"}");
        body::response(out.into_bytes())
    };
    response.headers_mut().insert(ETAG, etag(version));
    Ok(response)
}

async fn newest(store: &dyn Store, entity: &EntityKey) -> Result<Option<StoredEvent>, Problem> {
    let found = store.newest(&entity.entity_type, std::slice::from_ref(&entity.entity_id)).await.map_err(Problem::store)?;
    Ok(found.into_iter().next().flatten())
}

/// Why there is no state to show: no entity, or none at that version or time.
async fn missing(store: &dyn Store, entity: &EntityKey, when: When) -> Result<Problem, Problem> {
    let detail = match when {
        When::Now => return Ok(entity_not_found(entity)),
        When::Version(version) => format!("the entity has no state at version {version}"),
        When::Time(_) => "the entity did not exist at that time".to_owned(),
    };
    match newest(store, entity).await? {
        Some(stored) if stored.event.state.is_some() => {
            Ok(Problem::new(Code::VersionNotFound, detail).with_entity(&entity.entity_type, &entity.entity_id).with_number("version", stored.event.version))
        }
        Some(_) | None => Ok(entity_not_found(entity)),
    }
}

/// What a page of history is asked to hold.
#[derive(Debug, PartialEq, Eq)]
struct Page {
    order: Order,
    after: Option<Version>,
    limit: usize,
    shows_state: bool,
}

fn page(query: Option<&str>) -> Result<Page, Problem> {
    let [after, limit, order, include] = request::parameters(query, ["after", "limit", "order", "include"])?;
    let order = match order.as_deref() {
        None | Some("asc") => Order::Ascending,
        Some("desc") => Order::Descending,
        Some(_) => return Err(Problem::invalid_query("order", "order must be asc or desc")),
    };
    let shows_state = match include.as_deref() {
        None => false,
        Some("state") => true,
        Some(_) => return Err(Problem::invalid_query("include", "include must be state")),
    };
    let after = after.as_deref().map(|after| request::version(after).ok_or_else(|| Problem::invalid_query("after", "after must be a version, a whole number")));
    Ok(Page { order, after: after.transpose()?, limit: request::limit(limit.as_deref())?, shows_state })
}

/// `GET /v1/entities/{type}/{id}/events`.
pub async fn history(store: &dyn Store, entity: &EntityKey, query: Option<&str>) -> Result<Response<Body>, Problem> {
    durably(store, || history_once(store, entity, query)).await
}

async fn history_once(store: &dyn Store, entity: &EntityKey, query: Option<&str>) -> Result<Response<Body>, Problem> {
    let page = page(query)?;
    let content = if page.shows_state { Content::Whole } else { Content::WithoutState };
    let (mut bound, mut count, mut read_bytes, mut read_next) = (page.after.unwrap_or(0), 0, 0, FIRST_READ);
    let mut out = String::from("{\"events\":[");
    let has_more = 'page: loop {
        // One more than is shown tells whether there is another page.
        let wanted = (page.limit + 1 - count).min(read_next);
        if page.order == Order::Descending && page.after == Some(0) {
            // There is nothing below; a bound of 0 would mean none.
            break false;
        }
        let events = store.history(&entity.entity_type, &entity.entity_id, page.order, bound, wanted, content).await.map_err(Problem::store)?;
        let is_last = events.len() < wanted;
        for stored in events {
            if count == page.limit || read_bytes >= PAGE_BYTES {
                break 'page true;
            }
            bound = stored.event.version;
            read_bytes += stored.event.weight();
            count += 1;
            if count > 1 {
                out.push(',');
            }
            write_event(&mut out, &stored, page.shows_state)?;
        }
        if is_last {
            break false;
        }
        read_next = (PAGE_BYTES.saturating_sub(read_bytes) / (read_bytes / count).max(1)).max(1);
    };
    if count == 0 && newest(store, entity).await?.is_none() {
        return Err(entity_not_found(entity));
    }
    store.barrier().await.map_err(Problem::store)?;
    out.push_str("],\"next\":");
    let _ = if has_more { write!(out, "{bound}}}") } else { write!(out, "null}}") };
    Ok(body::response(out.into_bytes()))
}

fn write_event(out: &mut String, stored: &StoredEvent, shows_state: bool) -> Result<(), Problem> {
    out.push('{');
    event_json::write_members(out, stored).map_err(time_error)?;
    if shows_state {
        out.push_str(",\"state\":");
        out.push_str(stored.event.state.as_ref().map_or("null", |state| state.as_str()));
    }
    out.push('}');
    Ok(())
}

/// `GET /v1/entities/{type}`.
pub async fn list(store: &dyn Store, handlers: &HandlerSet, entity_type: &str, query: Option<&str>) -> Result<Response<Body>, Problem> {
    durably(store, || list_once(store, handlers, entity_type, query)).await
}

async fn list_once(store: &dyn Store, handlers: &HandlerSet, entity_type: &str, query: Option<&str>) -> Result<Response<Body>, Problem> {
    let (entity_type, handler) = handlers.get_key_value(entity_type).ok_or_else(|| Problem::unknown_entity_type(entity_type))?;
    let [after, limit] = request::parameters(query, ["after", "limit"])?;
    let after = after.map(|after| EntityId::new(&after, handler.entity_id_max())).transpose();
    let after = after.map_err(|error| Problem::invalid_query("after", error.to_string()))?;
    let limit = request::limit(limit.as_deref())?;
    let mut listed = store.list(entity_type, after.as_ref(), limit + 1).await.map_err(Problem::store)?;
    store.barrier().await.map_err(Problem::store)?;
    let has_more = listed.len() > limit;
    listed.truncate(limit);
    let mut out = String::from("{\"entities\":[");
    for (number, entity) in listed.iter().enumerate() {
        out.push_str(if number > 0 { ",{\"entity_id\":" } else { "{\"entity_id\":" });
        write_string(&mut out, entity.entity_id.as_str());
        let _ = write!(out, ",\"version\":{}}}", entity.version);
    }
    out.push_str("],\"next\":");
    match listed.last().filter(|_| has_more) {
        Some(last) => write_string(&mut out, last.entity_id.as_str()),
        None => out.push_str("null"),
    }
    out.push('}');
    Ok(body::response(out.into_bytes()))
}

fn time_error(error: TimeError) -> Problem {
    Problem::internal(error.to_string())
}
