//! Batches on JavaScript modules: the inside of a handler process.
//!
//! One engine with one realm per module stays alive between commands. A command gets its state and request freshly made
//! from their texts, runs on a module that is evaluated for it alone, and its outcome leaves as text: no object passes from one
//! command to the next, and what all share is frozen. Where a command does leave something behind (a job, or the variables of a
//! module that cannot be evaluated anew), the realm is made anew.
//!
//! Of a large state, the objects stay; see [`recorded`]. A handler never gets one of them.

mod recorded;

use super::child::Shared;
use super::module::{Command, LoadContext, Module};
use super::protocol::{End, Flush, Keep, Load, Problem, Report};
use super::value::{WriteError, Writer, to_js};
use crate::core::batch::{Call, Decision, Execute, HandlerFaultKind, SchemaError};
use crate::core::json::write_string;
use crate::core::{CommandName, Creates, Failure, HandlerFault, Json, Work};
use crate::handler::schema::Schema;
use rquickjs::function::Args;
use rquickjs::{Array, Ctx, Error, Function, Object, Type, Value};
use std::sync::Arc;
use std::time::Duration;

/// The most CPU time that loading one module may take.
pub const LOAD_TIME_LIMIT: Duration = Duration::from_secs(2);

/// All modules of a handler process.
pub struct Engine {
    shared: Arc<Shared>,
    load: LoadContext,
    modules: Vec<Option<Module>>,
}

/// Why the tasks of a batch stopped running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// All have run.
    Finished,
    /// The last one left something behind in the engine, which must be made anew.
    Stained,
    /// The last one ran out of memory: nothing in this process is to be trusted any more.
    UsedUp,
    /// The last one could not come to its end here, through no fault of its own: it must run in another process.
    Retry,
}

impl Engine {
    /// Loads all modules and tells the server of each.
    pub fn load(load: Load, shared: &Arc<Shared>) -> Result<Engine, String> {
        let mut engine = Engine { shared: shared.clone(), load: LoadContext::new(&load, shared), modules: Vec::new() };
        shared.limit(LOAD_TIME_LIMIT);
        for entity_type in &load.modules {
            shared.begin();
            let loaded = Module::load(entity_type, &engine.load);
            let is_overrun = shared.is_overrun();
            shared.idle();
            let report: Report = match loaded {
                Ok((module, manifest)) => {
                    engine.modules.push(Some(module));
                    Ok(manifest)
                }
                Err(_) if is_overrun => {
                    engine.modules.push(None);
                    Err(vec![too_slow(entity_type.as_str())])
                }
                Err(problems) => {
                    engine.modules.push(None);
                    Err(problems)
                }
            };
            shared.output().push(&report)?;
        }
        shared.limit(load.time_limit);
        shared.output().flush(End::Done);
        Ok(engine)
    }

    /// Runs a batch and tells the server of its outcomes.
    pub fn run(&mut self, module: usize, flush: Flush, keep: Keep, mut work: Work) -> Result<(), String> {
        let limits = recorded::Limits::new(&keep, &self.load);
        if let Some(loaded) = self.modules.get(module).and_then(Option::as_ref)
            && !recorded::begin_batch(loaded, &keep, &mut work)
        {
            self.shared.output().flush(End::Missing);
            return Ok(());
        }
        let end = loop {
            let Some(loaded) = self.modules.get(module).and_then(Option::as_ref) else { return Err("a module is not loaded".into()) };
            match run_tasks(loaded, &self.shared, flush, limits, &mut work)? {
                Stop::Finished => {
                    recorded::end_batch(loaded, &keep, limits, &work);
                    break End::Done;
                }
                Stop::UsedUp | Stop::Retry => break End::UsedUp,
                Stop::Stained => {
                    self.shared.idle();
                    let entity_type = loaded.entity_type().clone();
                    self.modules[module] = None;
                    self.modules[module] = Module::load(&entity_type, &self.load).ok().map(|(module, _)| module);
                    if self.modules[module].is_none() {
                        break End::UsedUp;
                    }
                }
            }
        };
        self.shared.idle();
        self.shared.output().flush(end);
        Ok(())
    }
}

/// What is said of a module that takes too long to load.
pub fn too_slow(entity_type: &str) -> Problem {
    let message = format!("loading the module takes more than {} seconds of CPU time", LOAD_TIME_LIMIT.as_secs());
    Problem { file: format!("{entity_type}.js"), place: None, message }
}

fn run_tasks(module: &Module, shared: &Shared, flush: Flush, limits: recorded::Limits, work: &mut Work) -> Result<Stop, String> {
    module.context().with(|ctx| {
        let globals = module.realm(&ctx).map_err(|error| error.to_string())?;
        let mut session = Session {
            module,
            ctx: &ctx,
            renew: globals.renew,
            invoke: globals.invoke,
            unbox: globals.unbox,
            plain: globals.plain,
            shared,
            bytes_max: work.row_bytes_max,
            limits,
            unwrap: None,
            has_changed_resident: false,
            stop: Stop::Finished,
        };
        while session.stop == Stop::Finished {
            let entity = work.tasks.get(work.done).map(|task| task.entity);
            session.has_changed_resident = false;
            let Some(outcome) = work.run_next(&mut session) else { break };
            if session.stop == Stop::Retry {
                break;
            }
            if let Some(entity) = entity {
                session.settle(&work.entities[entity].id, &outcome)?;
            }
            let mut output = shared.output();
            output.push(&outcome)?;
            if flush == Flush::EachCommand {
                output.flush(End::More);
            }
        }
        if session.stop == Stop::Stained && !session.take_texts(work) {
            session.stop = Stop::UsedUp;
        }
        Ok(session.stop)
    })
}

/// A batch that runs on one module.
struct Session<'a, 'js> {
    module: &'a Module,
    ctx: &'a Ctx<'js>,
    renew: Function<'js>,
    invoke: Function<'js>,
    unbox: Function<'js>,
    plain: Object<'js>,
    shared: &'a Shared,
    bytes_max: usize,
    limits: recorded::Limits,
    /// What tells the proxies of the command that is recorded; none where none is.
    unwrap: Option<Function<'js>>,
    /// Whether the command that ran last has changed a state that stays.
    has_changed_resident: bool,
    stop: Stop,
}

/// What the prelude's `invoke` gives.
type Answer<'js> = (bool, Value<'js>, Value<'js>, Value<'js>);

/// Which document of a command something is said about.
#[derive(Clone, Copy)]
enum Document {
    State,
    Response,
    Details,
}

impl Execute for Session<'_, '_> {
    fn creates(&self, command: &CommandName) -> Option<Creates> {
        self.module.command(command).map(|command| command.creates)
    }

    fn execute(&mut self, call: Call<'_>) -> Result<Decision, Failure> {
        self.shared.begin();
        let decided = self.decide(call);
        // A handler that came to its end after its time was used up is treated as one that was stopped.
        let decided = if self.shared.is_overrun() && !self.has_changed_resident { Err(self.overrun()) } else { decided };
        if self.stop == Stop::Finished && self.module.is_stained() {
            self.stop = Stop::Stained;
        }
        decided
    }
}

impl<'js> Session<'_, 'js> {
    fn decide(&mut self, call: Call<'_>) -> Result<Decision, Failure> {
        let Some(command) = self.module.command(call.command) else { return Err(Failure::UnknownCommand) };
        if let Some(schema) = &command.request {
            schema.check(call.request).map_err(Failure::InvalidRequest)?;
        }
        let plain_next = command.plain_next.get();
        command.plain_next.set(plain_next.saturating_sub(1));
        let may_record = plain_next == 0;
        match self.resident(call, may_record)? {
            None => self.plain(call, command, None),
            Some((root, len)) => {
                let recorded = if may_record { self.recorded(call, command, root.clone(), len)? } else { None };
                recorded.map_or_else(|| self.plain(call, command, Some(root)), Ok)
            }
        }
    }

    /// Runs a command on a state that is read for it alone: from its text, or from that of what stays of it.
    fn plain(&mut self, call: Call<'_>, command: &Command, resident: Option<Object<'js>>) -> Result<Decision, Failure> {
        let text = match (call.state.text(), resident) {
            (Some(text), _) => text.clone(),
            (None, Some(root)) => self.text(root)?,
            (None, None) => return Err(self.retry()),
        };
        let state = to_js(self.ctx, &text).map_err(|error| self.engine_failure(error))?;
        let (is_accepted, first, second, third) = self.invoke(call, state).map_err(|error| self.engine_failure(error))?;
        if !is_accepted {
            return self.rejection(first, second, third);
        }
        if first.is_promise() {
            let message = "the handler gave a promise (is it async?); handlers run to their end without waiting".to_owned();
            return Err(Failure::HandlerFailed(HandlerFault { kind: HandlerFaultKind::Exception, message: self.at_module(&message) }));
        }
        let response = if first.is_undefined() { Json::null() } else { self.write(first, Document::Response)? };
        let state = self.write(second, Document::State)?;
        check(command.response.as_ref(), &response, Failure::ResponseInvalid)?;
        check(self.module.state_schema(), &state, Failure::StateInvalid)?;
        Ok(Decision::Accept { response, state: state.into() })
    }

    /// Runs the handler: whether it accepted, and response and state, or code, message and details.
    fn invoke(&self, call: Call<'_>, state: Value<'js>) -> Result<Answer<'js>, Error> {
        self.module.host().rest();
        let (handle, this) = self.module.handler(self.ctx, &self.renew, call.command)?;
        self.module.host().begin(call.entity_id, call.command_id);
        let request = to_js(self.ctx, call.request)?;
        let mut arguments = Args::new(self.ctx.clone(), 8);
        arguments.push_args([handle, this, state, request])?;
        arguments.push_arg(call.entity_id.as_str())?;
        arguments.push_arg(call.version as f64)?;
        arguments.push_arg(call.command_id.as_str())?;
        arguments.push_arg(call.now as f64)?;
        let answer: Array<'js> = arguments.apply(&self.invoke)?;
        let part = |index| answer.get::<Value<'js>>(index);
        Ok((part(0)?.as_bool() == Some(true), part(1)?, part(2)?, part(3)?))
    }

    fn rejection(&mut self, code: Value<'js>, message: Value<'js>, details: Value<'js>) -> Result<Decision, Failure> {
        let text = |value: Value<'js>| value.get::<String>().unwrap_or_else(|_| "\u{fffd}".to_owned());
        let mut rejection = String::from("{\"code\":");
        write_string(&mut rejection, &text(code));
        if !matches!(details.type_of(), Type::Undefined | Type::Null) {
            rejection.push_str(",\"details\":");
            rejection.push_str(self.write(details, Document::Details)?.as_str());
        }
        rejection.push_str(",\"message\":");
        write_string(&mut rejection, &text(message));
        rejection.push('}');
        Ok(Decision::Reject { rejection: Json::trusted(rejection) })
    }

    /// Writes a document that the handler made.
    fn write(&mut self, value: Value<'js>, document: Document) -> Result<Json, Failure> {
        let mut text = String::new();
        let is_overrun = || self.shared.is_overrun();
        let unwrap = self.unwrap.as_ref();
        let mut writer = Writer { unbox: &self.unbox, plain: &self.plain, unwrap, out: &mut text, bytes_max: self.bytes_max, is_overrun: &is_overrun };
        let error = match writer.document(value) {
            Ok(()) => return Ok(Json::trusted(text)),
            Err(WriteError::Overrun) => return Err(self.overrun()),
            Err(WriteError::Engine(error)) => return Err(self.engine_failure(error)),
            Err(WriteError::Invalid(error)) => error,
            Err(WriteError::TooLarge) => SchemaError { pointer: String::new(), message: format!("the document takes more than {} bytes", self.bytes_max) },
        };
        Err(match document {
            Document::State => Failure::StateInvalid(vec![error]),
            Document::Response => Failure::ResponseInvalid(vec![error]),
            Document::Details => {
                let SchemaError { pointer, message } = error;
                Failure::ResponseInvalid(vec![SchemaError { pointer: format!("/details{pointer}"), message }])
            }
        })
    }

    fn overrun(&self) -> Failure {
        let message = self.at_module("the handler used more CPU time than allowed");
        Failure::HandlerFailed(HandlerFault { kind: HandlerFaultKind::TimeLimit, message })
    }

    fn at_module(&self, message: &str) -> String {
        format!("{}: {message}", self.module.file())
    }

    /// What the engine's error means for the command.
    fn engine_failure(&mut self, error: Error) -> Failure {
        let thrown = self.ctx.catch();
        if self.shared.is_overrun() {
            return self.overrun();
        }
        let (kind, message) = self.module.describe(error, &thrown);
        if kind == HandlerFaultKind::MemoryLimit {
            // What stays of other commands may have taken the memory.
            self.stop = if self.module.residents().is_empty() { Stop::UsedUp } else { Stop::Retry };
        }
        Failure::HandlerFailed(HandlerFault { kind, message })
    }
}

fn check(schema: Option<&Schema>, document: &Json, failure: fn(Vec<SchemaError>) -> Failure) -> Result<(), Failure> {
    schema.map_or(Ok(()), |schema| schema.check(document).map_err(failure))
}
