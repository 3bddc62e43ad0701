//! Handlers in JavaScript, in real handler processes.

mod large;
mod limits;
mod loading;
mod memory;
mod processes;
mod semantics;

use quokka::core::batch::HandlerFaultKind;
use quokka::core::patch::Draft;
use quokka::core::{Change, CommandId, CommandName, EntityId, EntityType, Failure, Json, LoadedEntity, LogIdentity, Outcome, State, Task, Work};
use quokka::handler::js::{LoadError, Options, load};
use quokka::handler::{HandlerSet, Handlers, Ran, RandomKey};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A folder of modules.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new(files: &[(&str, &str)]) -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        for (name, text) in files {
            folder.write(name, text);
        }
        folder
    }

    pub fn write(&self, name: &str, text: &str) {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub async fn load(&self) -> Result<HandlerSet, LoadError> {
        load(self.path(), &options()).await
    }

    /// What is wrong with the folder, one problem a line.
    pub async fn problems(&self) -> String {
        match self.load().await {
            Ok(_) => panic!("the folder loads"),
            Err(error) => error.to_string(),
        }
    }
}

pub fn options() -> Options {
    Options {
        program: env!("CARGO_BIN_EXE_quokka").into(),
        processes: NonZeroUsize::new(2).unwrap(),
        time_limit: Duration::from_millis(100),
        memory_limit: 64 << 20,
        ..Options::new(RandomKey::of(&LogIdentity::new([7; 32])))
    }
}

/// States are read anew for every command, or stay in the process however small they are.
pub fn small_and_large() -> [Options; 2] {
    [usize::MAX, 1].map(|resident_min| Options { resident_min, plain_after_useless: 0, ..options() })
}

/// The handlers of one module.
pub struct Module {
    pub folder: Folder,
    pub handlers: Arc<dyn Handlers>,
}

impl Module {
    pub async fn new(source: &str) -> Module {
        Module::with(source, &options()).await
    }

    pub async fn with(source: &str, options: &Options) -> Module {
        let folder = Folder::new(&[("thing.js", source)]);
        let set = load(folder.path(), options).await.unwrap_or_else(|error| panic!("{error}"));
        Module { handlers: set[&EntityType::new("thing").unwrap()].clone(), folder }
    }

    /// A module whose command `run` has the given body.
    pub async fn of_body(body: &str) -> Module {
        Module::new(&format!("export const commands = {{ run: {{ creates: \"if-missing\", handle(state, request, context) {{\n{body}\n}} }} }};")).await
    }

    /// Runs commands on one entity that does not exist yet.
    pub async fn run(&self, commands: &[(&str, &str)]) -> Vec<Outcome> {
        self.run_on(None, commands).await
    }

    /// Runs commands on one entity with the given state.
    pub async fn run_on(&self, state: Option<&str>, commands: &[(&str, &str)]) -> Vec<Outcome> {
        run_whole(&self.handlers, work(state, commands)).await.outcomes
    }

    /// Runs `run` once.
    pub async fn one(&self, state: &str, request: &str) -> Outcome {
        self.run_on(Some(state), &[("run", request)]).await.remove(0)
    }
}

/// Runs a batch on one entity and tells every state as a whole.
pub async fn run_whole(handlers: &Arc<dyn Handlers>, work: Work) -> Ran {
    let ran = handlers.run(work.clone()).await.unwrap();
    whole(&work, ran)
}

/// The same run with every state as a whole.
pub fn whole(work: &Work, mut ran: Ran) -> Ran {
    let mut text = work.entities[0].state.as_ref().and_then(State::text).cloned();
    for outcome in &mut ran.outcomes {
        let Outcome::Accepted { state, .. } = outcome else { continue };
        let whole = match state {
            Change::Whole(whole) => whole.clone(),
            Change::Patch { patch, len } => {
                let mut draft = Draft::new(&text.unwrap_or_else(Json::empty_object)).unwrap();
                draft.apply(patch).unwrap();
                let whole = draft.text().unwrap();
                assert_eq!(whole.len(), *len, "{patch}");
                whole
            }
        };
        *state = whole.clone().into();
        text = Some(whole);
    }
    assert_eq!(ran.states, [text]);
    ran
}

/// Runs a body once on a state: shows the outcome.
pub async fn run_body(body: &str, state: &str, request: &str) -> String {
    show(&Module::of_body(body).await.one(state, request).await)
}

pub fn work(state: Option<&str>, commands: &[(&str, &str)]) -> Work {
    let state = state.map(|state| Json::canonical(state.as_bytes()).unwrap());
    let entities = vec![LoadedEntity { id: EntityId::new("e-1", 20).unwrap(), version: if state.is_some() { 3 } else { 0 }, state: state.map(State::Whole) }];
    let tasks = commands.iter().enumerate().map(|(number, (command, request))| Task {
        entity: 0,
        command_id: CommandId::new(&format!("c-{number}")).unwrap(),
        command: CommandName::new(command).unwrap(),
        request: Json::canonical(request.as_bytes()).unwrap(),
        precondition: None,
        now: 1_700_000_000_123,
    });
    Work { entities, tasks: tasks.collect(), done: 0, bytes_left: 64 << 20, row_bytes_max: 1 << 20 }
}

/// An outcome in one line.
pub fn show(outcome: &Outcome) -> String {
    let errors = |name: &str, errors: &[quokka::core::batch::SchemaError]| {
        let errors: Vec<String> = errors.iter().map(|error| format!("{}: {}", error.pointer, error.message)).collect();
        format!("{name} {}", errors.join("; "))
    };
    match outcome {
        Outcome::Accepted { response, state: Change::Whole(state) } => format!("{response} {state}"),
        Outcome::Accepted { response, state: Change::Patch { patch, .. } } => format!("{response} {patch}"),
        Outcome::Rejected { rejection } => format!("rejected {rejection}"),
        Outcome::NoRoom => "no room".into(),
        Outcome::Failed(Failure::InvalidRequest(found)) => errors("request", found),
        Outcome::Failed(Failure::StateInvalid(found)) => errors("state", found),
        Outcome::Failed(Failure::ResponseInvalid(found)) => errors("response", found),
        Outcome::Failed(Failure::HandlerFailed(fault)) => format!("{:?} {}", fault.kind, fault.message),
        Outcome::Failed(other) => format!("{other:?}"),
    }
}

pub fn fault_kind(outcome: &Outcome) -> Option<HandlerFaultKind> {
    match outcome {
        Outcome::Failed(Failure::HandlerFailed(fault)) => Some(fault.kind),
        _ => None,
    }
}
