//! The server: puts the parts together, starts them in order, and stops them in the other.
//!
//! Start: storage, handlers, tables, workers, listener; nothing is accepted before all of it is there. Stop (SIGTERM, SIGINT): the
//! listener first, then requests under way, then the queues, all within `shutdown.grace`. SIGHUP loads the handlers again.

use crate::cluster::election::{DatabaseElection, Election};
use crate::cluster::{self, Cluster};
use crate::config::{self, Config, Reuse};
use crate::core::{EntityType, HandlerVersion, Member, NodeId, ShardCount};
use crate::feed::{self, Feed};
use crate::handler::js::{self, LoadError, Sources};
use crate::handler::native::{Entity, EntityError};
use crate::handler::{HandlerSet, Handlers, RandomKey};
use crate::http::{self, App, HandlerError, Health, Reload, ReloadError};
use crate::partition::{self, Partitions};
use crate::store::{self, Store};
use crate::{examples, metrics};
use metrics_exporter_prometheus::BuildError;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

/// Why the server does not start, or had to give up.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The database cannot be used.
    #[error(transparent)]
    Storage(#[from] store::OpenError),
    /// A table cannot be made.
    #[error("the tables cannot be made: {0}")]
    Tables(store::StoreError),
    /// The JavaScript handlers cannot be loaded.
    #[error(transparent)]
    Handlers(#[from] LoadError),
    /// An entity type written in Rust is not valid.
    #[error(transparent)]
    Entity(#[from] EntityError),
    /// Two entity types of the program have the same name.
    #[error("the entity type {0} is given twice")]
    EntityTwice(EntityType),
    /// The address cannot be listened on.
    #[error("listen: {address} cannot be used")]
    Listen {
        /// What the configuration says.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// The system refuses what every server needs.
    #[error(transparent)]
    System(#[from] io::Error),
    /// Something else in this process takes the metrics already.
    #[error(transparent)]
    Metrics(#[from] BuildError),
}

/// Builds a server whose entity types are written in Rust.
#[derive(Default)]
pub struct Builder {
    entities: Vec<Entity>,
}

impl Builder {
    /// Adds an entity type.
    #[must_use]
    pub fn entity(mut self, entity: Entity) -> Builder {
        self.entities.push(entity);
        self
    }

    /// Serves until the process is told to stop. `entities.path` of the configuration is not used.
    pub async fn serve(self, config: Config) -> Result<(), ServeError> {
        let store = open_store(&config).await?;
        let random = RandomKey::of(store.identity());
        let mut handlers = HandlerSet::new();
        for entity in self.entities {
            let built = entity.build(random)?;
            if let Some(other) = handlers.insert(built.entity_type().clone(), built) {
                return Err(ServeError::EntityTwice(other.entity_type().clone()));
            }
        }
        run(config, store, Origin::Rust(handlers)).await
    }
}

/// Where the handlers come from.
enum Origin {
    /// A folder of JavaScript, or the examples; can be loaded again.
    JavaScript(js::Options),
    /// This program.
    Rust(HandlerSet),
}

/// Serves the entity types of the configuration until the process is told to stop.
pub async fn serve(config: Config) -> Result<(), ServeError> {
    let store = open_store(&config).await?;
    let options = js_options(&config, RandomKey::of(store.identity()));
    run(config, store, Origin::JavaScript(options)).await
}

/// Loads and validates everything that [`serve`] would, except the database, and gives it back as text for people.
pub async fn check(config: Config) -> Result<String, ServeError> {
    store::check_url(config.storage.url.expose())?;
    // No handler is run, so no secret of a database is needed.
    let options = js_options(&config, RandomKey::of(&crate::core::LogIdentity::new([0; 32])));
    let handlers = load(&config, &options).await?;
    let mut found = String::from("the configuration and all handlers are valid");
    for handlers in handlers.values() {
        let commands: Vec<&str> = handlers.commands().keys().map(crate::core::CommandName::as_str).collect();
        found.push_str(&format!("\n  {} ({}): {}", handlers.entity_type(), handlers.version(), commands.join(", ")));
    }
    Ok(found)
}

async fn open_store(config: &Config) -> Result<Arc<dyn Store>, ServeError> {
    let options = store::Options {
        url: config.storage.url.expose().to_owned(),
        shards: ShardCount::new(config.storage.shards).ok_or_else(|| store::OpenError::Unsuitable("storage.shards is out of range".into()))?,
        pool: config.storage.pool,
        statement_timeout: config.storage.statement_timeout,
    };
    Ok(store::open(&options).await?)
}

fn js_options(config: &Config, random: RandomKey) -> js::Options {
    js::Options {
        processes: NonZeroUsize::new(config.handlers.processes).unwrap_or(NonZeroUsize::MIN),
        time_limit: config.handlers.time_limit,
        memory_limit: config.handlers.memory_limit.as_usize(),
        ..js::Options::new(random)
    }
}

async fn load(config: &Config, options: &js::Options) -> Result<HandlerSet, LoadError> {
    match &config.entities.path {
        Some(folder) => js::load(folder, options).await,
        None => js::load_sources(&built_in(), "examples", options).await,
    }
}

fn built_in() -> Sources {
    let files = examples::ENTITIES.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
    let modules = examples::ENTITIES.iter().map(|(name, _)| EntityType::trusted(name.trim_end_matches(".js"))).collect();
    Sources { files, modules }
}

async fn create_tables(store: &dyn Store, handlers: &HandlerSet) -> Result<(), store::StoreError> {
    for entity_type in handlers.keys() {
        store.create_type(entity_type).await?;
    }
    Ok(())
}

async fn run(config: Config, store: Arc<dyn Store>, origin: Origin) -> Result<(), ServeError> {
    let metrics = metrics::install()?;
    let (handlers, js_options) = match origin {
        Origin::Rust(handlers) => (handlers, None),
        Origin::JavaScript(options) => (load(&config, &options).await?, Some(options)),
    };
    create_tables(&*store, &handlers).await.map_err(ServeError::Tables)?;
    let partitions = Partitions::new(partition_options(&config, &*store), store.clone(), handlers);
    let listener = TcpListener::bind(&config.listen).await.map_err(|source| ServeError::Listen { address: config.listen.clone(), source })?;
    let address = listener.local_addr()?;
    let cluster = join_cluster(&config, address, &partitions);
    let reload = js_options.map(|options| reload(Arc::new(config.clone()), options, partitions.clone()));
    let app = App {
        partitions: partitions.clone(),
        cluster: cluster.clone(),
        feed: Feed::start(&feed_options(&config), partitions.clone()),
        options: http_options(&config),
        health: Health::new(store.clone()),
        reload: reload.clone(),
        metrics,
        identity: store.identity().clone(),
    };
    let types: Vec<String> = partitions.handlers().keys().map(ToString::to_string).collect();
    tracing::info!(node = config.cluster.node, %address, storage = store.engine(), entity_types = types.join(","), "quokka is ready");
    // For people, and for programs that start a server on a port of the system's choice. Nobody may be reading.
    let _ = writeln!(std::io::stdout(), "quokka listens on http://{address}");

    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let grace = config.shutdown.grace;
    let (stopping, stopped) = tokio::sync::oneshot::channel();
    let leaving = cluster.clone();
    let shutdown = async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = tokio::signal::ctrl_c() => break,
                _ = hang_up.recv() => reload_on_signal(reload.as_ref()).await,
            }
        }
        tracing::info!("stopping");
        let _ = stopping.send(Instant::now());
        leaving.say_farewell().await;
        leaving.close_links();
    };
    http::serve(listener, app, shutdown).await?;
    let since = stopped.await.unwrap_or_else(|_| Instant::now());
    cluster.leave().await;
    if tokio::time::timeout_at(since + grace, partitions.shut_down()).await.is_err() {
        tracing::warn!(
            grace_seconds = grace.as_secs_f64(),
            "some commands did not come to an end within the grace; their callers were told that the outcome is unknown"
        );
    }
    tracing::info!("stopped");
    Ok(())
}

/// Begins to take part in the cluster that the configuration describes.
fn join_cluster(config: &Config, address: SocketAddr, partitions: &Partitions) -> Cluster {
    let settings = &config.cluster;
    let url = settings.advertise.clone().unwrap_or_else(|| format!("http://{address}"));
    let own = Member { id: NodeId::trusted(&settings.node), url: url.trim_end_matches('/').to_owned() };
    let topology = match settings.topology {
        config::Topology::Single => cluster::Topology::Single,
        config::Topology::Static => {
            let nodes: BTreeMap<NodeId, String> =
                settings.nodes.iter().map(|node| (NodeId::trusted(&node.id), node.url.trim_end_matches('/').to_owned())).collect();
            if !nodes.contains_key(&own.id) {
                tracing::warn!(node = %own.id, "cluster.nodes does not name this node, so it owns no shards");
            }
            cluster::Topology::Static(nodes)
        }
        config::Topology::Elected => cluster::Topology::Elected(election(config, &own, partitions.store())),
    };
    let options = cluster::Options { own, heartbeat: settings.heartbeat, forward_timeout: settings.forward_timeout };
    Cluster::start(options, topology, partitions.clone())
}

/// Whoever elects the leader.
fn election(config: &Config, own: &Member, store: &Arc<dyn Store>) -> Box<dyn Election> {
    // One heartbeat less than a node may miss: a leader who is gone should be replaced by the time at which its shards are.
    let ttl = config.cluster.heartbeat * (cluster::HEARTBEATS_MISSED_MAX - 1);
    match config.cluster.election {
        config::Election::Database => Box::new(DatabaseElection::new(store.clone(), own.clone(), ttl)),
        config::Election::Etcd => etcd_election(config, own, store, ttl),
    }
}

#[cfg(feature = "etcd")]
fn etcd_election(config: &Config, own: &Member, store: &Arc<dyn Store>, ttl: Duration) -> Box<dyn Election> {
    use crate::cluster::election::etcd::{EtcdElection, Options};
    let settings = &config.cluster;
    let user = settings.etcd_user.clone().zip(settings.etcd_password.as_ref().map(|password| password.expose().to_owned()));
    Box::new(EtcdElection::new(Options { endpoints: settings.etcd.clone(), user, own: own.clone(), ttl, log: store.identity().clone() }))
}

/// The configuration is refused before this where the program was built without etcd.
#[cfg(not(feature = "etcd"))]
fn etcd_election(_: &Config, own: &Member, store: &Arc<dyn Store>, ttl: Duration) -> Box<dyn Election> {
    Box::new(DatabaseElection::new(store.clone(), own.clone(), ttl))
}

fn partition_options(config: &Config, store: &dyn Store) -> partition::Options {
    // A batch ends with the event that crosses its limit, so limit and largest event together must fit one statement.
    let row_bytes_max = config.limits.document_max.as_usize().min(store.append_bytes_max());
    let batch_bytes_max = config.commands.batch_bytes_max.as_usize().min((store.append_bytes_max() - row_bytes_max).max(1));
    partition::Options {
        timeout: config.commands.timeout,
        queue_max: config.commands.queue_max,
        batch_rows_max: config.commands.batch_rows_max,
        batch_bytes_max,
        row_bytes_max,
        refuse_reuse: config.commands.reuse == Reuse::Refuse,
        cache_bytes_max: config.commands.cache_max.bytes() / 2,
        retry_for: config.storage.retry_for,
    }
}

fn feed_options(config: &Config) -> feed::Options {
    let config::Feed { followers_max, memory_max, poll } = &config.feed;
    feed::Options { followers_max: *followers_max, memory_max: memory_max.as_usize(), poll: *poll }
}

fn http_options(config: &Config) -> http::Options {
    let limits = &config.limits;
    http::Options {
        node: config.cluster.node.clone(),
        body_max: limits.body_max.as_usize(),
        bulk_line_max: limits.body_max.as_usize(),
        bundle_max: config.commands.bundle_max,
        header_timeout: limits.header_timeout,
        header_bytes_max: limits.header_bytes_max.as_usize(),
        body_timeout: limits.body_timeout,
        connections_max: limits.connections_max,
        idle_timeout: limits.idle_timeout,
        grace: config.shutdown.grace.saturating_sub(farewell(config)),
    }
}

/// What of the grace the farewell to the cluster may take.
fn farewell(config: &Config) -> Duration {
    match config.cluster.topology {
        config::Topology::Elected => cluster::FAREWELL.min(config.shutdown.grace / 2),
        config::Topology::Single | config::Topology::Static => Duration::ZERO,
    }
}

/// Loads the handlers again; one at a time, and on any fault those in force stay.
fn reload(config: Arc<Config>, options: js::Options, partitions: Partitions) -> Reload {
    let turn = Arc::new(tokio::sync::Mutex::new(()));
    Arc::new(move || {
        let (config, options, partitions, turn) = (config.clone(), options.clone(), partitions.clone(), turn.clone());
        Box::pin(async move {
            let _turn = turn.lock().await;
            let handlers = load(&config, &options).await.map_err(|error| match error {
                LoadError::Sources(problems) => ReloadError::Invalid(problems.into_iter().map(handler_error).collect()),
                LoadError::Process(reason) => ReloadError::Unavailable(reason),
            })?;
            create_tables(&**partitions.store(), &handlers).await.map_err(|error| ReloadError::Unavailable(error.to_string()))?;
            let loaded = versions(&handlers);
            partitions.replace_handlers(handlers);
            tracing::info!(entity_types = loaded.len(), "handlers loaded again");
            Ok(loaded)
        })
    })
}

fn versions(handlers: &HandlerSet) -> Vec<(EntityType, HandlerVersion)> {
    handlers.values().map(|handlers: &Arc<dyn Handlers>| (handlers.entity_type().clone(), handlers.version().clone())).collect()
}

fn handler_error(problem: js::Problem) -> HandlerError {
    let file = Some(problem.file).filter(|file| !file.is_empty());
    HandlerError { file, line: problem.place.map(|(line, _)| line), message: problem.message }
}

async fn reload_on_signal(reload: Option<&Reload>) {
    let Some(reload) = reload else { return };
    match reload().await {
        Ok(_) => {}
        Err(ReloadError::Unavailable(reason)) => tracing::error!(reason, "handlers could not be loaded again; those before them keep serving"),
        Err(ReloadError::Invalid(errors)) => {
            for HandlerError { file, line, message } in errors {
                tracing::error!(file, line, message, "handlers were not loaded again; those before them keep serving");
            }
        }
    }
}
