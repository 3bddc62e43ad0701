//! Configuration: every setting, its default, its allowed range, and where it came from.
//!
//! Settings are layered: defaults, then a TOML file, then `QUOKKA_SECTION__KEY` environment variables, then flags; a later
//! layer wins key by key. [`load`] either gives a whole [`Config`] or all that is wrong with it, never one silently
//! repaired. A [`Config`] is passed in where it is needed; nothing here is global.
//!
//! Most settings belong to one node. Those that all nodes on one database must agree on say so (`storage.shards`); they are
//! recorded in the database at first use, and a node that disagrees does not start.
//!
//! `config/quokka.toml` shows every key; a test holds it to the defaults and ranges given here.

mod load;
mod units;

pub use load::{ConfigError, Overrides, Problem, load, load_from};
pub use units::{Secret, Size, StorageUrl};

use crate::logging;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// The whole configuration of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where to listen: `address:port`. Port 0 lets the system choose one.
    pub listen: String,
    /// `[storage]`
    pub storage: Storage,
    /// `[entities]`
    pub entities: Entities,
    /// `[commands]`
    pub commands: Commands,
    /// `[handlers]`
    pub handlers: Handlers,
    /// `[limits]`
    pub limits: Limits,
    /// `[feed]`
    pub feed: Feed,
    /// `[cluster]`
    pub cluster: Cluster,
    /// `[shutdown]`
    pub shutdown: Shutdown,
    /// `[log]`
    pub log: Log,
}

/// `[storage]`: the database that holds the events.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// `mysql://user:password@host:port/database` or `sqlite:PATH`; what stands in `url_file`, where that is set.
    pub url: StorageUrl,
    /// A file that holds the URL, for secrets that are mounted as files.
    pub url_file: Option<PathBuf>,
    /// Number of shards. The whole cluster must agree on it, and it is fixed when the database is first used.
    pub shards: u16,
    /// The most connections that are open to the database at once.
    pub pool: usize,
    /// How long one statement may take before its outcome counts as unknown.
    #[serde(with = "humantime_serde")]
    pub statement_timeout: Duration,
    /// How long a batch that surely did not happen is tried again before its callers are told 503.
    #[serde(with = "humantime_serde")]
    pub retry_for: Duration,
}

/// `[entities]`: the entity types.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entities {
    /// The folder of entity modules; none for the built-in examples.
    pub path: Option<PathBuf>,
}

/// `[commands]`: queues and batches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commands {
    /// How long a caller waits for an answer.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// What a command id that was used for another command or request is answered.
    pub reuse: Reuse,
    /// The most commands that wait in the queue of one partition.
    pub queue_max: usize,
    /// The most commands in one batch.
    pub batch_rows_max: usize,
    /// The most bytes of rows in one batch.
    pub batch_bytes_max: Size,
    /// The most commands in one bundle.
    pub bundle_max: usize,
    /// The most bytes of states and answers kept in memory.
    pub cache_max: Size,
}

/// What a reused command id is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reuse {
    /// The first answer, marked with `Idempotency-Mismatch`.
    Replay,
    /// 422 `command-id-reused`.
    Refuse,
}

/// `[handlers]`: what one handler may use, and the processes that run them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handlers {
    /// CPU time of one command.
    #[serde(with = "humantime_serde")]
    pub time_limit: Duration,
    /// Memory of one handler process's documents and code.
    pub memory_limit: Size,
    /// How many processes run handlers; by default one per CPU core.
    pub processes: usize,
}

/// `[limits]`: what clients may send and hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// The largest request body.
    pub body_max: Size,
    /// The largest event: request, response and state of one command together.
    pub document_max: Size,
    /// The most connections that are open at once.
    pub connections_max: usize,
    /// How long a client may take to send the head of a request.
    #[serde(with = "humantime_serde")]
    pub header_timeout: Duration,
    /// The largest head of a request.
    pub header_bytes_max: Size,
    /// How long a client may pause while it sends a body.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// How long a connection may be idle.
    #[serde(with = "humantime_serde")]
    pub idle_timeout: Duration,
}

/// `[feed]`: those who read and follow the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feed {
    /// The most requests for the feed at once.
    pub followers_max: usize,
    /// The most bytes of newest events that are kept in memory for them.
    pub memory_max: Size,
    /// How long between two looks at the database for what other nodes committed.
    #[serde(with = "humantime_serde")]
    pub poll: Duration,
}

/// `[cluster]`: this node among others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// The node's name; by default the host's.
    pub node: String,
    /// The URL under which other nodes reach this one; by default `http://` and `listen`.
    pub advertise: Option<String>,
    /// How nodes find each other.
    pub topology: Topology,
    /// Who elects the leader, where the topology is [`Topology::Elected`].
    pub election: Election,
    /// The endpoints of etcd.
    pub etcd: Vec<String>,
    /// The user that etcd knows; none where it asks for none.
    pub etcd_user: Option<String>,
    /// The user's password; what stands in `etcd_password_file`, where that is set.
    pub etcd_password: Option<Secret>,
    /// A file that holds the password.
    pub etcd_password_file: Option<PathBuf>,
    /// All nodes, where the topology is [`Topology::Static`].
    pub nodes: Vec<Node>,
    /// How often a node tells the leader that it is there. The whole cluster should agree on it.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// How long the owner of a shard may be silent before this node handles its commands.
    #[serde(with = "humantime_serde")]
    pub forward_timeout: Duration,
}

/// How nodes find each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Topology {
    /// They do not: this node handles all that it is sent.
    Single,
    /// They are written down in `nodes`.
    Static,
    /// They tell an elected leader that they are there.
    Elected,
}

/// Who elects the leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Election {
    /// The nodes among themselves, by a lease in the database.
    Database,
    /// etcd.
    Etcd,
}

/// One of the nodes that are written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Its `cluster.node`.
    pub id: String,
    /// The URL under which others reach it.
    pub url: String,
}

/// `[shutdown]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shutdown {
    /// How long to finish what was accepted.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
}

/// `[log]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// For people or for machines.
    pub format: logging::Format,
    /// A level, or directives such as `info,quokka::store=debug`.
    pub level: String,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: "127.0.0.1:9865".into(),
            storage: Storage {
                url: StorageUrl::new("sqlite:quokka-data/quokka.sqlite"),
                url_file: None,
                shards: 64,
                pool: 16,
                statement_timeout: Duration::from_secs(8),
                retry_for: Duration::from_secs(2),
            },
            entities: Entities { path: None },
            commands: Commands {
                timeout: Duration::from_secs(10),
                reuse: Reuse::Replay,
                queue_max: 10_000,
                batch_rows_max: 1000,
                batch_bytes_max: Size::mebibytes(8),
                bundle_max: 1000,
                cache_max: Size::mebibytes(128),
            },
            handlers: Handlers { time_limit: Duration::from_millis(100), memory_limit: Size::megabytes(64), processes: cores() },
            limits: Limits {
                body_max: Size::mebibytes(1),
                document_max: Size::mebibytes(4),
                connections_max: 20_000,
                header_timeout: Duration::from_secs(5),
                header_bytes_max: Size::kibibytes(16),
                body_timeout: Duration::from_secs(30),
                idle_timeout: Duration::from_secs(60),
            },
            cluster: Cluster {
                node: host_name(),
                advertise: None,
                topology: Topology::Single,
                election: Election::Database,
                etcd: Vec::new(),
                etcd_user: None,
                etcd_password: None,
                etcd_password_file: None,
                nodes: Vec::new(),
                heartbeat: Duration::from_millis(500),
                forward_timeout: Duration::from_millis(500),
            },
            feed: Feed { followers_max: 10_000, memory_max: Size::mebibytes(32), poll: Duration::from_millis(100) },
            shutdown: Shutdown { grace: Duration::from_secs(10) },
            log: Log { format: logging::Format::Human, level: "info".into() },
        }
    }
}

impl Config {
    /// The configuration as TOML that [`load`] reads back, the password in the storage URL left out.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        let mut text = toml::to_string(self)?;
        if self.storage.url_file.is_some() {
            // It came from the file: a configuration must not give both.
            text = text.split_inclusive('\n').filter(|line| !line.starts_with("url = ")).collect();
        }
        // A secret is shown as nothing, which is no value to read back.
        text = text.split_inclusive('\n').filter(|line| !line.starts_with("etcd_password = ")).collect();
        if self.entities.path.is_none() {
            text = text.replace("[entities]\n", "[entities]\n# path is not set: the built-in example entity types\n");
        }
        Ok(text)
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(load::PROCESSES_MAX)
}

/// The host's name, with whatever a node name may not hold replaced.
fn host_name() -> String {
    let system = rustix::system::uname();
    let name: String = system.nodename().to_string_lossy().chars().take(crate::core::ids::NODE_ID_MAX).collect();
    let name = name.replace(|character| !crate::core::NodeId::allows(character), "-");
    if name.is_empty() { "node".into() } else { name }
}

#[cfg(test)]
mod tests;
