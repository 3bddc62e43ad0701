//! Handlers in JavaScript: a folder of modules, run in processes of their own.
//!
//! This side reads the sources, starts processes and hands them batches; no JavaScript runs in the server. The other side
//! is [`child_main`].
//!
//! What holds whatever a handler does:
//! - A command that fails changes nothing, and its neighbours in the batch run as if it had never been there.
//! - A command ends within its limits of CPU time, memory and stack, also inside the engine's native loops: where the engine
//!   does not stop, its process is ended.
//! - A handler sees its command and the state, and no clock, file, network or memory of other commands: a module and all that it
//!   imports are evaluated anew for every command, without a clock and dice of their own.
//!
//! Loading a folder again makes an independent set with processes of its own; those of the old one end with its last batch.

mod child;
mod engine;
mod fresh;
mod held;
mod manifest;
mod module;
mod pool;
mod protocol;
mod record;
mod residents;
mod sandbox;
mod sources;
mod states;
mod value;

pub use child::{SUBCOMMAND, child_main};
pub use protocol::Problem;
pub use sources::Sources;

use super::random::RandomKey;
use super::{HandlerSet, Handlers, HandlersUnavailable, Ran};
use crate::core::{CommandName, Creates, EntityType, HandlerVersion, Work};
use async_trait::async_trait;
use pool::{Pool, Start, Worker};
use protocol::{End, Load, Manifest, Message};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// How handlers are run.
#[derive(Debug, Clone)]
pub struct Options {
    /// The program that is started as handler process. It must call [`child_main`] first where its first argument is [`SUBCOMMAND`].
    pub program: PathBuf,
    /// The most processes, and so the most batches at a time.
    pub processes: NonZeroUsize,
    /// The most CPU time of a command.
    pub time_limit: Duration,
    /// The most bytes of memory that the JavaScript of an entity type may take in a process.
    pub memory_limit: usize,
    /// How long a process may be silent before it is taken for dead. It speaks every second while it works, however slow the machine.
    pub stall_limit: Duration,
    /// From which commands get random numbers.
    pub random: RandomKey,
    /// From how many bytes of text on a state stays in the engine, and only its changes are read and written. For tests; results are the same.
    #[doc(hidden)]
    pub resident_min: usize,
    /// How many calls of a command read their state anew once recording was of no use. For tests; results are the same.
    #[doc(hidden)]
    pub plain_after_useless: u32,
}

/// Below this, reading and writing a whole state costs no more than recording what changes.
const RESIDENT_MIN: usize = 4 << 10;
/// A handler that cannot be recorded, or reads all of its state, mostly does so again.
const PLAIN_AFTER_USELESS: u32 = 100;

impl Options {
    /// The usual options: this program, a process per core, 100 ms, 64 MiB.
    pub fn new(random: RandomKey) -> Options {
        // On Linux, this very program, even where its file has been replaced by a newer one.
        let linux = PathBuf::from("/proc/self/exe");
        let program = if linux.exists() { linux } else { std::env::current_exe().unwrap_or_else(|_| PathBuf::from("quokka")) };
        Options {
            program,
            processes: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            time_limit: Duration::from_millis(100),
            memory_limit: 64 << 20,
            stall_limit: Duration::from_secs(10),
            random,
            resident_min: RESIDENT_MIN,
            plain_after_useless: PLAIN_AFTER_USELESS,
        }
    }
}

/// Why a folder of modules cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LoadError {
    /// The sources are wrong; all that was found, one a line.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Sources(Vec<Problem>),
    /// No handler process could be started.
    #[error("handlers cannot be run: {0}")]
    Process(String),
}

/// Loads a folder of modules. On any error nothing is left running.
pub async fn load(folder: &Path, options: &Options) -> Result<HandlerSet, LoadError> {
    let path = folder.to_owned();
    let read = tokio::task::spawn_blocking(move || Sources::read(&path)).await;
    let sources = read.map_err(|error| LoadError::Process(error.to_string()))?.map_err(LoadError::Sources)?;
    load_sources(&sources, &folder.display().to_string(), options).await
}

/// Loads modules that were read before; `label` names the processes in a list of processes.
pub async fn load_sources(sources: &Sources, label: &str, options: &Options) -> Result<HandlerSet, LoadError> {
    let message = Message::Load(Load {
        parent: std::process::id(),
        files: sources.files.clone(),
        modules: sources.modules.clone(),
        time_limit: options.time_limit,
        memory_limit: options.memory_limit,
        random: options.random,
        resident_min: options.resident_min,
        plain_after_useless: options.plain_after_useless,
    });
    // The processes start elsewhere; a program found by name alone stays one.
    let is_path = options.program.components().nth(1).is_some();
    let program = if is_path { std::path::absolute(&options.program) } else { Ok(options.program.clone()) };
    let start = Start {
        program: program.map_err(|error| LoadError::Process(error.to_string()))?,
        label: label.to_owned(),
        load: protocol::frame(&message).map_err(|error| LoadError::Process(error.to_string()))?,
        modules: sources.modules.len(),
        stall_limit: options.stall_limit,
        resident_min: options.resident_min,
        resident_bytes_max: residents::bytes_max(options.memory_limit),
    };
    let (worker, reports, end) = Worker::start(&start).await.map_err(LoadError::Process)?;
    let mut manifests = Vec::new();
    let mut problems = Vec::new();
    let told = reports.len();
    for report in reports {
        match report {
            Ok(manifest) => manifests.push(manifest),
            Err(found) => problems.extend(found),
        }
    }
    if end != End::Done {
        let name = sources.modules.get(told).map_or("", EntityType::as_str);
        problems.push(engine::too_slow(name));
    }
    if !problems.is_empty() {
        // Modules that share a broken import tell of the same problem.
        problems.sort();
        problems.dedup();
        return Err(LoadError::Sources(problems));
    }
    for Problem { file, message, .. } in manifests.iter().filter_map(|manifest| manifest.slow.as_ref()) {
        warn!(file, reason = message, "every command of this module gets an engine of its own, which is slow");
    }
    let pool = Pool::new(start, options.processes.get(), worker);
    let modules = sources.modules.iter().zip(manifests).enumerate().map(|(place, (entity_type, manifest))| {
        let version = HandlerVersion(sources.version(entity_type, &manifest.imports).into());
        let handlers = JsHandlers { entity_type: entity_type.clone(), version, manifest, place, pool: pool.clone() };
        (entity_type.clone(), Arc::new(handlers) as Arc<dyn Handlers>)
    });
    Ok(modules.collect())
}

/// The handlers of one entity type.
struct JsHandlers {
    entity_type: EntityType,
    version: HandlerVersion,
    manifest: Manifest,
    place: usize,
    pool: Arc<Pool>,
}

#[async_trait]
impl Handlers for JsHandlers {
    fn entity_type(&self) -> &EntityType {
        &self.entity_type
    }

    fn version(&self) -> &HandlerVersion {
        &self.version
    }

    fn commands(&self) -> &BTreeMap<CommandName, Creates> {
        &self.manifest.commands
    }

    fn entity_id_max(&self) -> usize {
        self.manifest.entity_id_max
    }

    async fn run(&self, work: Work) -> Result<Ran, HandlersUnavailable> {
        self.pool.run(self.place, work).await
    }
}
