//! One entity type's module, loaded into a realm of its own.

use super::child::Shared;
use super::fresh::Forms;
use super::manifest::{self, Exports};
use super::protocol::{Load, Manifest, Problem};
use super::record::{Recorder, SavedRecorder};
use super::residents::Residents;
use super::sources::{locate, resolve};
use crate::core::batch::HandlerFaultKind;
use crate::core::{CommandId, CommandName, Creates, EntityId, EntityType};
use crate::handler::random::{Dice, RandomKey};
use crate::handler::schema::Schema;
use rquickjs::context::{EvalOptions, intrinsic};
use rquickjs::loader::{ImportAttributes, Loader, Resolver};
use rquickjs::module::Declared;
use rquickjs::object::Filter;
use rquickjs::promise::PromiseState;
use rquickjs::{Array, Context, Ctx, Error, Exception, Function, Object, Persistent, Runtime, Type, Value};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

/// How much of the stack JavaScript may use.
const STACK_MAX: usize = 1 << 20;
/// The longest line that a handler may log, in characters.
const LOG_LINE_MAX: usize = 1000;
/// The most lines that one command may log.
const LOG_LINES_MAX: u32 = 20;
/// What stands before each line that a handler logs.
pub const LOG_PREFIX: &str = "console";

const PRELUDE: &str = include_str!("prelude.js");

/// What a realm offers; `Performance`, `WeakRef` and `DOMException` have no place in handlers.
type Intrinsics = (
    intrinsic::Date,
    intrinsic::Eval,
    intrinsic::RegExpCompiler,
    intrinsic::RegExp,
    intrinsic::Json,
    intrinsic::Proxy,
    intrinsic::MapSet,
    intrinsic::TypedArrays,
    intrinsic::Promise,
);

/// The functions of a module, or why there are none.
type KnownForms = Rc<Result<Forms, Problem>>;

/// What modules are loaded from.
#[derive(Clone)]
pub struct LoadContext {
    files: Rc<BTreeMap<String, String>>,
    memory_limit: usize,
    random: RandomKey,
    shared: Arc<Shared>,
    /// What was found out about each module when it was loaded first.
    forms: Rc<RefCell<BTreeMap<EntityType, KnownForms>>>,
    /// From how many bytes of text on a state is kept.
    pub resident_min: usize,
    /// How many calls of a command read their state anew once recording was of no use.
    pub plain_after_useless: u32,
}

impl LoadContext {
    /// From the server's message.
    pub fn new(load: &Load, shared: &Arc<Shared>) -> LoadContext {
        let files = Rc::new(load.files.clone());
        LoadContext {
            files,
            memory_limit: load.memory_limit,
            random: load.random,
            shared: shared.clone(),
            forms: Rc::default(),
            resident_min: load.resident_min,
            plain_after_useless: load.plain_after_useless,
        }
    }

    /// The most bytes of JavaScript memory of a module.
    pub fn memory_limit(&self) -> usize {
        self.memory_limit
    }
}

/// A command of a module.
pub struct Command {
    /// Which entities it is for.
    pub creates: Creates,
    /// The object that describes it: `this` of the handler.
    pub object: Persistent<Object<'static>>,
    /// The handler.
    pub handle: Persistent<Function<'static>>,
    /// What requests must look like.
    pub request: Option<Schema>,
    /// What responses look like.
    pub response: Option<Schema>,
    /// How many of the next calls go without recording: it was of no use lately.
    pub plain_next: Cell<u32>,
}

/// What all commands of a realm need.
pub struct Realm<'js> {
    /// The prelude's function that evaluates a module anew.
    pub renew: Function<'js>,
    /// The prelude's function that runs a handler.
    pub invoke: Function<'js>,
    /// The prelude's function that takes the primitive out of a wrapper.
    pub unbox: Function<'js>,
    /// `Object.prototype`.
    pub plain: Object<'js>,
}

struct SavedRealm {
    renew: Persistent<Function<'static>>,
    invoke: Persistent<Function<'static>>,
    unbox: Persistent<Function<'static>>,
    plain: Persistent<Object<'static>>,
}

/// A loaded module. The order of the fields is the order in which they must go: values before their engine.
pub struct Module {
    commands: BTreeMap<CommandName, Command>,
    state_schema: Option<Schema>,
    realm: SavedRealm,
    residents: RefCell<Residents>,
    recorder: RefCell<Option<SavedRecorder>>,
    /// The functions that evaluate it anew; none where each command needs a realm of its own.
    functions: Option<Persistent<Array<'static>>>,
    forms: KnownForms,
    context: Context,
    host: Rc<Host>,
    entity_type: EntityType,
    file: String,
    files: Rc<BTreeMap<String, String>>,
    is_stained: Rc<Cell<bool>>,
}

impl Module {
    /// Loads a module: evaluates it and its imports, reads what it exports, and prepares evaluating it anew.
    pub fn load(entity_type: &EntityType, from: &LoadContext) -> Result<(Module, Manifest), Vec<Problem>> {
        let file = format!("{entity_type}.js");
        let broken = |error: Error| vec![Problem { file: file.clone(), place: None, message: error.to_string() }];
        let runtime = Runtime::new().map_err(broken)?;
        runtime.set_memory_limit(from.memory_limit);
        runtime.set_max_stack_size(STACK_MAX);
        let shared = from.shared.clone();
        runtime.set_interrupt_handler(Some(Box::new(move || shared.is_overrun())));
        let is_stained = Rc::new(Cell::new(false));
        let stain = is_stained.clone();
        // Whoever makes a promise has left, or can leave, a job behind. Jobs are never run, and must not pile up.
        runtime.set_promise_hook(Some(Box::new(move |_, _, _, _| stain.set(true))));
        let imports = Imports::new(from.files.clone());
        runtime.set_loader(imports.clone(), imports.clone());
        let context = Context::custom::<Intrinsics>(&runtime).map_err(broken)?;
        let host = Rc::new(Host::new(entity_type, from.random));
        let loaded: Result<_, Vec<Problem>> = context.with(|ctx| {
            let prelude = Prelude::run(&ctx, &host).map_err(broken)?;
            let evaluated = evaluate(&ctx, &file, &imports)?;
            let exports = manifest::read(&evaluated.namespace, &file, &from.files, &prelude)?;
            let (functions, forms) = prepare(&evaluated, entity_type, from, &prelude, &exports.commands, &is_stained);
            let realm = SavedRealm {
                renew: Persistent::save(&ctx, prelude.renew),
                invoke: Persistent::save(&ctx, prelude.invoke),
                unbox: Persistent::save(&ctx, prelude.unbox),
                plain: Persistent::save(&ctx, prelude.plain),
            };
            Ok((exports, realm, functions, forms))
        });
        let (Exports { commands, state_schema, entity_id_max }, realm, functions, forms) = loaded?;
        is_stained.set(false);
        let manifest = Manifest {
            commands: commands.iter().map(|(name, command)| (name.clone(), command.creates)).collect(),
            entity_id_max,
            imports: imports.found.borrow().clone(),
            slow: forms.as_ref().as_ref().err().cloned(),
        };
        let (entity_type, files) = (entity_type.clone(), from.files.clone());
        let (residents, recorder) = Default::default();
        Ok((Module { commands, state_schema, realm, residents, recorder, functions, forms, context, host, entity_type, file, files, is_stained }, manifest))
    }

    /// Whose module.
    pub fn entity_type(&self) -> &EntityType {
        &self.entity_type
    }

    /// The module's file.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Where its code runs.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// What its code may ask of the process.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// A command.
    pub fn command(&self, name: &CommandName) -> Option<&Command> {
        self.commands.get(name)
    }

    /// A command's handler and the object that describes it, of a module that was evaluated for nobody else.
    pub fn handler<'js>(&self, ctx: &Ctx<'js>, renew: &Function<'js>, name: &CommandName) -> Result<(Value<'js>, Value<'js>), Error> {
        if let Some(functions) = &self.functions {
            let made: Array<'js> = renew.call((functions.clone().restore(ctx)?, name.as_str()))?;
            return Ok((made.get(0)?, made.get(1)?));
        }
        // This is the first command of the realm, and the last.
        self.is_stained.set(true);
        let command = self.command(name).ok_or(Error::Unknown)?;
        Ok((command.handle.clone().restore(ctx)?.into_value(), command.object.clone().restore(ctx)?.into_value()))
    }

    /// Whether commands can follow one another in this realm.
    pub fn is_lasting(&self) -> bool {
        self.functions.is_some()
    }

    /// The states that the realm keeps.
    pub fn residents(&self) -> std::cell::RefMut<'_, Residents> {
        self.residents.borrow_mut()
    }

    /// What records changes, made when it is needed first.
    pub fn recorder<'js>(&self, ctx: &Ctx<'js>) -> Result<Recorder<'js>, Error> {
        let mut saved = self.recorder.borrow_mut();
        if saved.is_none() {
            *saved = Some(Recorder::new(ctx)?.save(ctx));
        }
        saved.as_ref().ok_or(Error::Unknown)?.restore(ctx)
    }

    /// What states must look like.
    pub fn state_schema(&self) -> Option<&Schema> {
        self.state_schema.as_ref()
    }

    /// Whether a command has left something in the engine that must not stay.
    pub fn is_stained(&self) -> bool {
        self.is_stained.get()
    }

    /// What all commands of the realm need.
    pub fn realm<'js>(&self, ctx: &Ctx<'js>) -> Result<Realm<'js>, Error> {
        let SavedRealm { renew, invoke, unbox, plain } = &self.realm;
        Ok(Realm {
            renew: renew.clone().restore(ctx)?,
            invoke: invoke.clone().restore(ctx)?,
            unbox: unbox.clone().restore(ctx)?,
            plain: plain.clone().restore(ctx)?,
        })
    }

    /// What an error of the engine is, and its message with file and line.
    pub fn describe(&self, error: Error, thrown: &Value<'_>) -> (HandlerFaultKind, String) {
        let (place, message) = explain(error, thrown, &self.files);
        let shift = |file: &str, line: u32| if let (1, Ok(forms)) = (line, self.forms.as_ref()) { forms.shift(file) } else { 0 };
        let kind = match message.as_str() {
            OUT_OF_MEMORY => HandlerFaultKind::MemoryLimit,
            "RangeError: Maximum call stack size exceeded" => HandlerFaultKind::StackLimit,
            _ => HandlerFaultKind::Exception,
        };
        let message = match place {
            Some((file, line, column)) => format!("{file}:{line}:{}: {message}", column.saturating_sub(shift(&file, line)).max(1)),
            None => format!("{}: {message}", self.file),
        };
        (kind, message)
    }
}

const OUT_OF_MEMORY: &str = "InternalError: out of memory";

/// Where and why something was thrown.
fn explain(error: Error, thrown: &Value<'_>, files: &BTreeMap<String, String>) -> (Option<(String, u32, u32)>, String) {
    match thrown.type_of() {
        // The engine could not even make the error.
        Type::Uninitialized if matches!(error, Error::Exception | Error::Unknown | Error::Allocation) => (None, OUT_OF_MEMORY.to_owned()),
        Type::Uninitialized => (None, error.to_string()),
        Type::Exception => {
            let Some(exception) = thrown.as_exception() else { return (None, error.to_string()) };
            let name = exception.as_object().get::<_, String>("name").unwrap_or_else(|_| "Error".to_owned());
            let message = exception.message().unwrap_or_default();
            let place = exception.stack().and_then(|stack| stack.lines().find_map(|line| frame_place(line, files)));
            forget_exception(thrown.ctx());
            (place, bounded(format!("{name}: {message}")))
        }
        Type::Object => {
            let shown = thrown.ctx().json_stringify(thrown.clone());
            let shown = shown.ok().flatten().and_then(|text| text.to_string().ok()).unwrap_or_else(|| "an object".to_owned());
            forget_exception(thrown.ctx());
            (None, bounded(format!("threw {shown}")))
        }
        Type::String => (None, bounded(format!("threw {:?}", thrown.get::<String>().unwrap_or_default()))),
        other => (None, format!("threw a value of type {other}")),
    }
}

/// Looking at what was thrown may have run script that threw again.
fn forget_exception(ctx: &Ctx<'_>) {
    if ctx.has_exception() {
        ctx.catch();
    }
}

fn bounded(mut message: String) -> String {
    if let Some((end, _)) = message.char_indices().nth(LOG_LINE_MAX) {
        message.truncate(end);
        message.push('…');
    }
    message
}

/// Reads the place out of a line of a stack: `at name (file:line:column)`, or `at file:line:column`.
fn frame_place(line: &str, files: &BTreeMap<String, String>) -> Option<(String, u32, u32)> {
    let place = line.trim().trim_end_matches(')');
    let place = place.rsplit_once('(').map_or_else(|| place.trim_start_matches("at "), |(_, place)| place);
    let (place, column) = place.rsplit_once(':')?;
    let (file, line) = place.rsplit_once(':')?;
    files.contains_key(file).then(|| Some((file.to_owned(), line.parse().ok()?, column.parse().ok()?)))?
}

/// The prelude's functions, in their realm.
pub struct Prelude<'js> {
    pub renew: Function<'js>,
    pub invoke: Function<'js>,
    pub unbox: Function<'js>,
    pub plain: Object<'js>,
}

impl<'js> Prelude<'js> {
    fn run(ctx: &Ctx<'js>, host: &Rc<Host>) -> Result<Prelude<'js>, Error> {
        let prelude: Function<'js> = ctx.eval(PRELUDE)?;
        let dice = host.clone();
        let random = Function::new(ctx.clone(), move |ctx: Ctx<'js>| {
            dice.next_unit().ok_or_else(|| Exception::throw_type(&ctx, "random numbers are known only while a command runs"))
        })?;
        let console = host.clone();
        let log = Function::new(ctx.clone(), move |level: rquickjs::String<'js>, text: rquickjs::String<'js>| {
            console.log(&level.to_string().unwrap_or_default(), &text.to_string().unwrap_or_default());
        })?;
        let made: Object<'js> = prelude.call((random, log))?;
        let plain = ctx.globals().get::<_, Object<'js>>("Object")?.get("prototype")?;
        Ok(Prelude { renew: made.get("renew")?, invoke: made.get("invoke")?, unbox: made.get("unbox")?, plain })
    }
}

/// A module that was evaluated to its end.
struct Evaluated<'js> {
    namespace: Object<'js>,
    /// What it and each of its imports export.
    names: BTreeMap<String, BTreeSet<String>>,
    /// Whether it, or an import, waited at its top level.
    has_waited: bool,
}

impl Evaluated<'_> {
    /// The functions that evaluate it anew, or why there are none.
    fn forms(&self, file: &str, files: &BTreeMap<String, String>) -> Result<Forms, Problem> {
        if self.has_waited {
            return Err(slow(file, "it waits at its top level"));
        }
        Forms::make(files, file, &self.names).map_err(|(file, message)| slow(&file, &message))
    }
}

fn slow(file: &str, message: &str) -> Problem {
    Problem { file: file.to_owned(), place: None, message: message.to_owned() }
}

/// Prepares evaluating a module anew: its functions, or why there are none. What is found out is kept for the next realm.
fn prepare<'js>(
    evaluated: &Evaluated<'js>,
    entity_type: &EntityType,
    from: &LoadContext,
    prelude: &Prelude<'js>,
    commands: &BTreeMap<CommandName, Command>,
    is_stained: &Cell<bool>,
) -> (Option<Persistent<Array<'static>>>, KnownForms) {
    let ctx = evaluated.namespace.ctx();
    let file = format!("{entity_type}.js");
    let known = from.forms.borrow().get(entity_type).cloned();
    let untried = if known.is_none() { Some(commands) } else { None };
    let mut forms = known.unwrap_or_else(|| Rc::new(evaluated.forms(&file, &from.files)));
    let mut functions = None;
    if let Ok(found) = forms.as_ref() {
        is_stained.set(false);
        match compile(ctx, found, prelude, untried) {
            Ok(_) if is_stained.get() => forms = Rc::new(Err(slow(&file, "its top level makes a promise"))),
            Ok(array) => functions = Some(Persistent::save(ctx, array)),
            Err(error) => {
                let (_, message) = explain(error, &ctx.catch(), &from.files);
                forms = Rc::new(Err(slow(&file, &format!("evaluating it once more fails: {message}"))));
            }
        }
    }
    from.forms.borrow_mut().insert(entity_type.clone(), forms.clone());
    (functions, forms)
}

/// Compiles functions, and tries them out on all commands where those are given.
fn compile<'js>(ctx: &Ctx<'js>, forms: &Forms, prelude: &Prelude<'js>, commands: Option<&BTreeMap<CommandName, Command>>) -> Result<Array<'js>, Error> {
    let functions = Array::new(ctx.clone())?;
    for (place, (file, form)) in forms.list.iter().enumerate() {
        // The functions are part of the file, in stacks and for imports at run time.
        let mut options = EvalOptions::default();
        options.filename = Some(file.clone());
        functions.set(place, ctx.eval_with_options::<Function<'js>, _>(form.text.as_str(), options)?)?;
    }
    for name in commands.into_iter().flat_map(BTreeMap::keys) {
        let made: Array<'js> = prelude.renew.call((functions.clone(), name.as_str()))?;
        made.get::<Function<'js>>(0)?;
    }
    Ok(functions)
}

/// Evaluates a module to its end.
fn evaluate<'js>(ctx: &Ctx<'js>, file: &str, imports: &Imports) -> Result<Evaluated<'js>, Vec<Problem>> {
    let thrown = |error: Error| {
        let thrown = ctx.catch();
        // A failed import is better explained by whoever refused it.
        if let Some(problem) = imports.refused.borrow_mut().take() {
            return vec![problem];
        }
        let (place, message) = explain(error, &thrown, &imports.files);
        vec![match place {
            Some((file, line, column)) => Problem { file, place: Some((line, column)), message },
            None => Problem { file: file.to_owned(), place: None, message },
        }]
    };
    let source = imports.files.get(file).map(String::as_str).unwrap_or_default();
    let module = rquickjs::Module::declare(ctx.clone(), file, source).map_err(thrown)?;
    let (module, promise) = module.eval().map_err(thrown)?;
    let has_waited = promise.state() == PromiseState::Pending;
    run_jobs(ctx);
    match promise.state() {
        PromiseState::Resolved => {}
        PromiseState::Rejected => {
            return Err(thrown(promise.result::<Value<'js>>().and_then(Result::err).unwrap_or(Error::Unknown)));
        }
        PromiseState::Pending => {
            let message = "the module waits at its top level for something that never comes".to_owned();
            return Err(vec![Problem { file: file.to_owned(), place: None, message }]);
        }
    }
    let namespace = module.namespace().map_err(thrown)?;
    let mut names = BTreeMap::from([(file.to_owned(), keys(&namespace).map_err(thrown)?)]);
    for import in imports.found.borrow().clone() {
        let promise = rquickjs::Module::import(ctx, import.as_str()).map_err(thrown)?;
        run_jobs(ctx);
        if let Some(Ok(namespace)) = promise.result::<Object<'js>>() {
            names.insert(import, keys(&namespace).map_err(thrown)?);
        }
    }
    Ok(Evaluated { namespace, names, has_waited })
}

/// The names that a module exports.
fn keys(namespace: &Object<'_>) -> Result<BTreeSet<String>, Error> {
    namespace.own_keys::<String>(Filter::new().string()).collect()
}

/// Runs what modules have left to run, within the time limit of loading.
fn run_jobs(ctx: &Ctx<'_>) {
    while ctx.execute_pending_job() {}
}

/// Finds imported modules among the files.
#[derive(Clone)]
struct Imports {
    files: Rc<BTreeMap<String, String>>,
    found: Rc<RefCell<BTreeSet<String>>>,
    refused: Rc<RefCell<Option<Problem>>>,
}

impl Imports {
    fn new(files: Rc<BTreeMap<String, String>>) -> Imports {
        Imports { files, found: Rc::default(), refused: Rc::default() }
    }
}

impl Resolver for Imports {
    fn resolve<'js>(&mut self, _: &Ctx<'js>, base: &str, name: &str, attributes: Option<ImportAttributes<'js>>) -> Result<String, Error> {
        // Nobody's import: the name of a file, from here.
        if !self.files.contains_key(base) && self.files.contains_key(name) {
            return Ok(name.to_owned());
        }
        let resolved = match attributes {
            None => resolve(&self.files, base, name),
            Some(_) => Err("imports take no attributes here".to_owned()),
        };
        resolved.map_err(|message| {
            let place = self.files.get(base).and_then(|source| locate(source, &[name]));
            *self.refused.borrow_mut() = Some(Problem { file: base.to_owned(), place, message: message.clone() });
            Error::new_resolving_message(base, name, message)
        })
    }
}

impl Loader for Imports {
    fn load<'js>(&mut self, ctx: &Ctx<'js>, name: &str, _: Option<ImportAttributes<'js>>) -> Result<rquickjs::Module<'js, Declared>, Error> {
        let source = self.files.get(name).ok_or_else(|| Error::new_loading(name))?;
        self.found.borrow_mut().insert(name.to_owned());
        rquickjs::Module::declare(ctx.clone(), name, source.as_str())
    }
}

/// What handlers may ask of the process: random numbers, and lines in the log.
pub struct Host {
    entity_type: EntityType,
    random: RandomKey,
    command: RefCell<Option<(EntityId, CommandId)>>,
    dice: RefCell<Option<Dice>>,
    lines_left: Cell<u32>,
    /// Lines of a command that may have to run again; none where lines go out at once.
    held: RefCell<Option<Vec<String>>>,
}

impl Host {
    fn new(entity_type: &EntityType, random: RandomKey) -> Host {
        let entity_type = entity_type.clone();
        Host { entity_type, random, command: RefCell::default(), dice: RefCell::default(), lines_left: Cell::new(LOG_LINES_MAX), held: RefCell::default() }
    }

    /// Holds back the lines that are logged from here on.
    pub fn hold_lines(&self) {
        *self.held.borrow_mut() = Some(Vec::new());
    }

    /// Takes the lines that were held back; later ones go out at once.
    pub fn take_lines(&self) -> Vec<String> {
        self.held.borrow_mut().take().unwrap_or_default()
    }

    /// No command runs: there are no random numbers.
    pub fn rest(&self) {
        *self.command.borrow_mut() = None;
        *self.dice.borrow_mut() = None;
        self.lines_left.set(LOG_LINES_MAX);
    }

    /// A command begins.
    pub fn begin(&self, entity_id: &EntityId, command_id: &CommandId) {
        *self.command.borrow_mut() = Some((entity_id.clone(), command_id.clone()));
    }

    fn next_unit(&self) -> Option<f64> {
        let command = self.command.borrow();
        let (entity_id, command_id) = command.as_ref()?;
        let mut dice = self.dice.borrow_mut();
        Some(dice.get_or_insert_with(|| self.random.dice(&self.entity_type, entity_id, command_id)).next_unit())
    }

    fn log(&self, level: &str, text: &str) {
        if let Some(left) = self.lines_left.get().checked_sub(1) {
            self.lines_left.set(left);
            let line: String = text.chars().take(LOG_LINE_MAX).map(|character| if character.is_control() { ' ' } else { character }).collect();
            let line = format!("{LOG_PREFIX} {} {level}: {line}", self.entity_type);
            match self.held.borrow_mut().as_mut() {
                Some(held) => held.push(line),
                None => eprintln!("{line}"),
            }
        }
    }
}
