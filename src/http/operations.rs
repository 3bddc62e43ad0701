//! What operators ask for: health, metrics, and loading handlers again.

use super::Shared;
use super::body::{self, Body};
use super::problem::{Code, NOT_READY, Problem};
use crate::core::json::write_string;
use crate::core::{EntityType, HandlerVersion};
use crate::metrics;
use crate::store::Store;
use futures_util::future::BoxFuture;
use hyper::Response;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long the database is given to show that it is there.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);
/// For how long what it showed is believed.
const CHECK_AGE_MAX: Duration = Duration::from_secs(1);

/// Whether the node should get requests. A clone shares the last check.
#[derive(Clone)]
pub struct Health {
    store: Arc<dyn Store>,
    last: Arc<Mutex<Option<Check>>>,
}

struct Check {
    at: Instant,
    is_ready: bool,
}

impl Health {
    /// Asks the store.
    pub fn new(store: Arc<dyn Store>) -> Health {
        Health { store, last: Arc::default() }
    }

    /// Whether the database answered and took writes, at most a second ago. Ends within a second; only one check runs at a time.
    pub async fn is_storage_ready(&self) -> bool {
        let mut last = self.last.lock().await;
        if let Some(check) = last.as_ref().filter(|check| check.at.elapsed() < CHECK_AGE_MAX) {
            return check.is_ready;
        }
        let found = match tokio::time::timeout(CHECK_TIMEOUT, self.store.ready()).await {
            Ok(answered) => answered.map_err(|error| error.to_string()),
            Err(_) => Err("no answer in time".to_owned()),
        };
        let was_ready = last.as_ref().is_none_or(|check| check.is_ready);
        match &found {
            Err(error) if was_ready => tracing::warn!(%error, "storage is not ready"),
            Ok(()) if !was_ready => tracing::info!("storage is ready again"),
            Ok(()) | Err(_) => {}
        }
        let is_ready = found.is_ok();
        *last = Some(Check { at: Instant::now(), is_ready });
        is_ready
    }
}

/// One reason why handlers cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandlerError {
    /// The file, relative to the folder of handlers; none where no single file is at fault.
    pub file: Option<String>,
    /// The line in it, from 1.
    pub line: Option<u32>,
    /// What is wrong, for people.
    pub message: String,
}

/// Why a reload did not happen; the handlers before it keep serving.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReloadError {
    /// The handlers have faults.
    Invalid(Vec<HandlerError>),
    /// They may be fine, but could not be put in force now: the database is away.
    Unavailable(String),
}

/// Loads all handlers again and puts them in force; answers with what is in force then.
pub type Reload = Arc<dyn Fn() -> BoxFuture<'static, Result<Vec<(EntityType, HandlerVersion)>, ReloadError>> + Send + Sync>;

/// `GET /`.
pub fn index() -> Response<Body> {
    body::response(concat!(
        r#"{"name":"quokka","version":""#,
        env!("CARGO_PKG_VERSION"),
        r#"","links":{"entities":"/v1/entities/{type}","commands":"/v1/commands","bundles":"/v1/bundles","feed":"/v1/feed","cluster":"/v1/cluster","ready":"/health/ready","metrics":"/metrics"}}"#
    ))
}

/// `GET /health/live`.
pub fn live() -> Response<Body> {
    body::response(r#"{"status":"live"}"#)
}

/// `GET /health/ready`.
pub(super) async fn ready(shared: &Shared) -> Response<Body> {
    let mut reasons = Vec::new();
    if shared.stop.is_cancelled() {
        reasons.push((Code::ShuttingDown, "the node is stopping"));
    }
    if !shared.health.is_storage_ready().await {
        reasons.push((Code::StorageUnavailable, "the database does not answer, or takes no writes"));
    }
    readiness(&reasons)
}

fn readiness(reasons: &[(Code, &str)]) -> Response<Body> {
    if reasons.is_empty() {
        return body::response(r#"{"status":"ready"}"#);
    }
    let mut out = String::from(r#"{"status":"not ready","reasons":["#);
    for (number, (code, detail)) in reasons.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        let _ = write!(out, "{comma}{{\"code\":\"{}\",\"detail\":\"{detail}\"}}", code.as_str());
    }
    out.push_str("]}");
    let mut response = body::response(out.into_bytes());
    *response.status_mut() = NOT_READY;
    response
}

/// `GET /metrics`.
pub(super) fn metrics(shared: &Shared) -> Response<Body> {
    metrics::queue_depth().set(shared.partitions.queue_depth() as f64);
    metrics::oldest_append().set(shared.partitions.commits().oldest_append().as_secs_f64());
    let mut response = body::response(shared.metrics.render().into_bytes());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"));
    response
}

/// `POST /v1/admin/handlers/reload`.
pub(super) async fn reload(shared: &Shared) -> Result<Response<Body>, Problem> {
    let Some(reload) = &shared.reload else {
        return Err(Problem::new(Code::NotFound, "this server has no folder of handlers to load again"));
    };
    match reload().await {
        Ok(loaded) => Ok(body::response(loaded_json(&loaded).into_bytes())),
        Err(ReloadError::Unavailable(cause)) => Err(Problem::unavailable(cause)),
        Err(ReloadError::Invalid(errors)) => {
            let detail = "the handlers were not loaded, those before them keep serving";
            Err(Problem::new(Code::InvalidHandlers, detail).with_json("errors", &errors_json(&errors)))
        }
    }
}

fn loaded_json(loaded: &[(EntityType, HandlerVersion)]) -> String {
    let mut out = String::from("{\"entity_types\":[");
    for (number, (name, version)) in loaded.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        let _ = write!(out, "{comma}{{\"name\":\"{name}\",\"handler_version\":");
        write_string(&mut out, &version.0);
        out.push('}');
    }
    out.push_str("]}");
    out
}

fn errors_json(errors: &[HandlerError]) -> String {
    let mut out = String::from("[");
    for (number, error) in errors.iter().enumerate() {
        out.push_str(if number > 0 { ",{\"file\":" } else { "{\"file\":" });
        match &error.file {
            Some(file) => write_string(&mut out, file),
            None => out.push_str("null"),
        }
        let _ = match error.line {
            Some(line) => write!(out, ",\"line\":{line},\"message\":"),
            None => write!(out, ",\"line\":null,\"message\":"),
        };
        write_string(&mut out, &error.message);
        out.push('}');
    }
    out.push(']');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handlers_with_faults_are_listed_with_file_and_line() {
        let errors = [
            HandlerError { file: Some("account.js".into()), line: Some(3), message: "unexpected \"}\"".into() },
            HandlerError { file: None, line: None, message: "no modules".into() },
        ];
        let expected = r#"[{"file":"account.js","line":3,"message":"unexpected \"}\""},{"file":null,"line":null,"message":"no modules"}]"#;
        assert_eq!(errors_json(&errors), expected);
    }

    #[test]
    fn loaded_handlers_are_listed_with_their_versions() {
        let loaded = [(EntityType::trusted("account"), HandlerVersion("0123".into())), (EntityType::trusted("room"), HandlerVersion("ab".into()))];
        let expected = r#"{"entity_types":[{"name":"account","handler_version":"0123"},{"name":"room","handler_version":"ab"}]}"#;
        assert_eq!(loaded_json(&loaded), expected);
    }

    #[test]
    fn a_node_that_is_not_ready_gives_all_its_reasons() {
        let ready = readiness(&[]);
        assert_eq!((ready.status().as_u16(), ready.body().bytes()), (200, &br#"{"status":"ready"}"#[..]));
        let not_ready = readiness(&[(Code::ShuttingDown, "a"), (Code::StorageUnavailable, "b")]);
        let expected = br#"{"status":"not ready","reasons":[{"code":"shutting-down","detail":"a"},{"code":"storage-unavailable","detail":"b"}]}"#;
        assert_eq!((not_ready.status().as_u16(), not_ready.body().bytes()), (503, &expected[..]));
    }

    #[test]
    fn the_index_is_json() {
        let index = index();
        let value: serde_json::Value = serde_json::from_slice(index.body().bytes()).unwrap();
        assert_eq!(value["name"], "quokka");
    }
}
