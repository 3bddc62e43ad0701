//! HTTP: commands in, answers out.
//!
//! [`serve`] owns the connections of one listener. [`routes`] leads requests to what answers them; [`problem`] is the only
//! file that knows status codes; [`connection`] holds the rules of connections: timeouts, limits and the graceful stop.
//!
//! Invariants: every request that was read whole gets an answer, also while the node stops; nothing of a client is held
//! in memory beyond the limits of [`Options`]; internals (SQL, paths, texts of exceptions) go to the log and never into
//! an answer.

mod answers;
mod body;
mod bulk;
mod bundles;
mod cluster;
mod commands;
mod connection;
#[cfg(test)]
mod connection_tests;
mod feed;
mod incoming;
mod limits;
mod operations;
mod problem;
#[cfg(test)]
mod problem_tests;
mod reads;
#[cfg(test)]
mod reads_tests;
mod request;
mod routes;
#[cfg(test)]
mod serve_tests;
#[cfg(test)]
mod tests_support;

pub use limits::raise_open_files;
pub use operations::{HandlerError, Health, Reload, ReloadError};

use crate::cluster::{Cluster, Router};
use crate::core::LogIdentity;
use crate::feed::Feed;
use crate::metrics;
use crate::partition::Partitions;
use hyper::header::HeaderValue;
use metrics_exporter_prometheus::PrometheusHandle;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Settings of the HTTP server.
#[derive(Debug, Clone)]
pub struct Options {
    /// This node's name, for `Quokka-Handled-By`.
    pub node: String,
    /// The most bytes of one body.
    pub body_max: usize,
    /// The most bytes of one line among many commands.
    pub bulk_line_max: usize,
    /// The most commands of one bundle.
    pub bundle_max: usize,
    /// How long a request's head may take from its first byte.
    pub header_timeout: Duration,
    /// The most bytes of a request's head; at least 8 KiB.
    pub header_bytes_max: usize,
    /// How long a body may take.
    pub body_timeout: Duration,
    /// The most connections at once.
    pub connections_max: usize,
    /// How long a connection may be silent between requests.
    pub idle_timeout: Duration,
    /// How long a stop may take.
    pub grace: Duration,
}

/// What requests are answered from.
pub struct App {
    /// The queues and workers.
    pub partitions: Partitions,
    /// The way to them, and to those of other nodes.
    pub cluster: Cluster,
    /// Settings.
    pub options: Options,
    /// The feed.
    pub feed: Feed,
    /// Whether the node should get requests.
    pub health: Health,
    /// Loads handlers again; none where they are part of the program.
    pub reload: Option<Reload>,
    /// Shows all metrics.
    pub metrics: PrometheusHandle,
    /// Makes tokens and entity ids.
    pub identity: LogIdentity,
}

/// [`App`] as all requests share it.
struct Shared {
    partitions: Partitions,
    cluster: Cluster,
    router: Arc<Router>,
    feed: Feed,
    options: Options,
    health: Health,
    reload: Option<Reload>,
    metrics: PrometheusHandle,
    identity: LogIdentity,
    node: HeaderValue,
    /// Cancelled when the node begins to stop.
    stop: CancellationToken,
}

/// Serves until `shutdown` ends, then stops accepting, finishes the requests that are running, and returns within the grace.
///
/// The workers must run until this returns. Fails only where it cannot start.
pub async fn serve(listener: TcpListener, app: App, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    let node = HeaderValue::try_from(&app.options.node).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, format!("the node's name: {error}")))?;
    raise_open_files();
    let stop = CancellationToken::new();
    let App { partitions, cluster, feed, options, health, reload, metrics, identity } = app;
    let _upkeep = AbortOnDropHandle::new(tokio::spawn(metrics::upkeep(metrics.clone())));
    let connection_options = options.clone();
    let router = cluster.router().clone();
    let shared = Arc::new(Shared { partitions, cluster, router, feed, options, health, reload, metrics, identity, node, stop: stop.clone() });
    let service = move |request| {
        let shared = shared.clone();
        async move { routes::answer(&shared, request).await }
    };
    connection::serve(listener, &connection_options, service, stop, shutdown).await;
    Ok(())
}
