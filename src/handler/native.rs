//! Handlers written in Rust: functions from a request and a state to a response or a rejection.
//!
//! They run in the server, a whole batch at a time on a thread of the runtime's blocking pool: a slow handler then delays
//! nothing but its own partition, and the hop to that thread is paid once per batch. A panic is a failure of that command
//! alone. There is no limit on time and memory: a Rust handler is trusted like the rest of the program.
//!
//! The state is read into the handler's own type and written back from it. Members that the type does not know are kept
//! as they were, so an older program does not drop what a newer one has stored.

mod merge;

use super::random::{Dice, RandomKey};
use super::schema::Schema;
use super::{Handlers, HandlersUnavailable, Ran};
use crate::core::batch::{Call, Decision, Execute, HandlerFaultKind, SchemaError};
use crate::core::ids::{ENTITY_ID_DEFAULT_MAX, ENTITY_ID_LIMIT};
use crate::core::{Change, CommandId, CommandName, Creates, EntityId, EntityType, Failure, HandlerFault, HandlerVersion, Json, Version, Work};
use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A business rule's "no": recorded, and answered to every retry.
#[derive(Debug, Clone)]
pub struct Rejection {
    code: String,
    message: String,
    details: Result<Json, String>,
}

impl Rejection {
    /// A rejection. The code is a letter followed by at most 63 letters, digits and `_ . : -`.
    pub fn new(code: impl Into<String>, message: impl Into<String>) -> Rejection {
        Rejection { code: code.into(), message: message.into(), details: Ok(Json::null()) }
    }

    /// The rejection with details for programs.
    #[must_use]
    pub fn details(self, details: impl Serialize) -> Rejection {
        Rejection { details: Json::from_serialize(&details), ..self }
    }

    fn document(&self) -> Result<Json, Failure> {
        let rest = self.code.strip_prefix(|first: char| first.is_ascii_alphabetic());
        let is_part = |character: char| character.is_ascii_alphanumeric() || "_.:-".contains(character);
        if !rest.is_some_and(|rest| rest.len() < 64 && rest.chars().all(is_part)) {
            return Err(exception(format!("{:?} is no code of a rejection", self.code)));
        }
        let details = self.details.as_ref().map_err(|error| invalid(Failure::ResponseInvalid, "/details", error))?;
        let details = if details.is_null() { String::new() } else { format!(",\"details\":{details}") };
        let text = |text: &str| Json::from_serialize(text).map_err(exception);
        Ok(Json::trusted(format!("{{\"code\":{}{details},\"message\":{}}}", text(&self.code)?, text(&self.message)?)))
    }
}

/// What a handler may know besides request and state.
pub struct Context<'a> {
    call: Call<'a>,
    random: &'a dyn Fn() -> Dice,
    dice: RefCell<Option<Dice>>,
}

impl Context<'_> {
    /// The entity.
    pub fn entity_id(&self) -> &EntityId {
        self.call.entity_id
    }

    /// The version of the state; 0 for a new entity.
    pub fn version(&self) -> Version {
        self.call.version
    }

    /// The command's id.
    pub fn command_id(&self) -> &CommandId {
        self.call.command_id
    }

    /// The command's time: milliseconds since 1970. A handler that is to be repeatable asks no other clock.
    pub fn now(&self) -> i64 {
        self.call.now
    }

    /// A random number of at least 0 and below 1; the same ones when the command is run again.
    pub fn random(&self) -> f64 {
        self.dice.borrow_mut().get_or_insert_with(self.random).next_unit()
    }
}

/// A function that can handle a command: `Fn(Request, &mut State) -> Result<Response, Rejection>`, or the same with a
/// [`&Context`](Context) as third argument.
pub trait Handle<Signature>: Send + Sync + 'static {
    /// What it takes.
    type Request: DeserializeOwned;
    /// What it works on.
    type State: DeserializeOwned + Serialize + 'static;
    /// What it answers.
    type Response: Serialize;

    /// Calls it.
    fn handle(&self, request: Self::Request, state: &mut Self::State, context: &Context<'_>) -> Result<Self::Response, Rejection>;
}

impl<F, R, S, T> Handle<fn(R, S) -> T> for F
where
    F: Fn(R, &mut S) -> Result<T, Rejection> + Send + Sync + 'static,
    R: DeserializeOwned,
    S: DeserializeOwned + Serialize + 'static,
    T: Serialize,
{
    type Request = R;
    type State = S;
    type Response = T;

    fn handle(&self, request: R, state: &mut S, _: &Context<'_>) -> Result<T, Rejection> {
        self(request, state)
    }
}

impl<F, R, S, T> Handle<fn(R, S, &Context<'static>) -> T> for F
where
    F: Fn(R, &mut S, &Context<'_>) -> Result<T, Rejection> + Send + Sync + 'static,
    R: DeserializeOwned,
    S: DeserializeOwned + Serialize + 'static,
    T: Serialize,
{
    type Request = R;
    type State = S;
    type Response = T;

    fn handle(&self, request: R, state: &mut S, context: &Context<'_>) -> Result<T, Rejection> {
        self(request, state, context)
    }
}

type Run = Box<dyn Fn(&Context<'_>) -> Result<Decision, Failure> + Send + Sync>;

struct Command {
    creates: Creates,
    run: Run,
    request: Option<Schema>,
}

/// An entity type whose commands are Rust functions.
///
/// ```
/// use quokka::handler::native::{Entity, Rejection};
/// #[derive(Default, serde::Serialize, serde::Deserialize)]
/// struct Account { balance: u64 }
///
/// fn open(amount: u64, account: &mut Account) -> Result<(), Rejection> {
///     account.balance = amount;
///     Ok(())
/// }
/// fn charge(amount: u64, account: &mut Account) -> Result<u64, Rejection> {
///     let too_low = || Rejection::new("insufficient_funds", "balance too low").details(account.balance);
///     account.balance = account.balance.checked_sub(amount).ok_or_else(too_low)?;
///     Ok(account.balance)
/// }
/// let account = Entity::new("account").creates("open", open).command("charge", charge);
/// ```
pub struct Entity {
    name: String,
    version: Option<String>,
    entity_id_max: usize,
    commands: BTreeMap<CommandName, Command>,
    state: Option<Schema>,
    errors: Vec<String>,
}

/// What is wrong with an [`Entity`].
#[derive(Debug, Clone, thiserror::Error)]
#[error("entity type {entity_type}: {}", .errors.join("; "))]
pub struct EntityError {
    /// Its name.
    pub entity_type: String,
    /// All that is wrong.
    pub errors: Vec<String>,
}

impl Entity {
    /// An entity type without commands. What is wrong with it is told by [`Entity::build`].
    pub fn new(entity_type: impl Into<String>) -> Entity {
        let entity_id_max = ENTITY_ID_DEFAULT_MAX;
        Entity { name: entity_type.into(), version: None, entity_id_max, commands: BTreeMap::new(), state: None, errors: Vec::new() }
    }

    /// Adds a command for entities that exist.
    #[must_use]
    pub fn command<Signature, H: Handle<Signature>>(self, name: &str, handler: H) -> Entity {
        self.add(name, Creates::Never, handler, || None)
    }

    /// Adds a command that makes an entity; its state starts as the default one.
    #[must_use]
    pub fn creates<Signature, H: Handle<Signature>>(self, name: &str, handler: H) -> Entity
    where
        H::State: Default,
    {
        self.add(name, Creates::Always, handler, || Some(H::State::default()))
    }

    /// Adds a command for both: entities that exist, and new ones.
    #[must_use]
    pub fn creates_if_missing<Signature, H: Handle<Signature>>(self, name: &str, handler: H) -> Entity
    where
        H::State: Default,
    {
        self.add(name, Creates::IfMissing, handler, || Some(H::State::default()))
    }

    /// Names the code, to be stored with each event: up to 16 characters. Without it, the name is made from quokka's version and the commands.
    #[must_use]
    pub fn version(mut self, version: impl Into<String>) -> Entity {
        let version = version.into();
        if version.is_empty() || version.len() > 16 || !version.bytes().all(|byte| byte.is_ascii_graphic()) {
            self.errors.push(format!("the version {version:?} is not 1 to 16 printable characters"));
        }
        self.version = Some(version);
        self
    }

    /// Allows entity ids of up to `length` characters; at most 64.
    #[must_use]
    pub fn entity_id_max(mut self, length: usize) -> Entity {
        if !(1..=ENTITY_ID_LIMIT).contains(&length) {
            self.errors.push(format!("the longest entity id must be from 1 to {ENTITY_ID_LIMIT} characters"));
        }
        self.entity_id_max = length;
        self
    }

    /// Demands of every new state that it keeps a JSON Schema.
    #[must_use]
    pub fn state_schema(mut self, schema: &serde_json::Value) -> Entity {
        self.state = self.schema("the state", schema);
        self
    }

    /// Demands of every request of a command, added before, that it keeps a JSON Schema.
    #[must_use]
    pub fn request_schema(mut self, command: &str, schema: &serde_json::Value) -> Entity {
        let schema = self.schema(&format!("requests of {command}"), schema);
        match self.commands.get_mut(command) {
            Some(command) => command.request = schema,
            None => self.errors.push(format!("there is no command {command} to have a schema")),
        }
        self
    }

    fn schema(&mut self, what: &str, schema: &serde_json::Value) -> Option<Schema> {
        let compiled =
            Json::from_serialize(schema).and_then(|schema| Schema::compile(&schema).map_err(|error| format!("{} at {:?}", error.message, error.pointer)));
        compiled.map_err(|error| self.errors.push(format!("the JSON Schema of {what} is wrong: {error}"))).ok()
    }

    fn add<Signature, H: Handle<Signature>>(mut self, name: &str, creates: Creates, handler: H, new: fn() -> Option<H::State>) -> Entity {
        let run: Run = Box::new(move |context| call(&handler, new, context));
        match CommandName::new(name) {
            Err(error) => self.errors.push(format!("{name:?}: {error}")),
            Ok(name) => {
                if let Some(twice) = self.commands.insert(name.clone(), Command { creates, run, request: None }) {
                    drop(twice);
                    self.errors.push(format!("the command {name} is there twice"));
                }
            }
        }
        self
    }

    /// The handlers, ready to serve.
    pub fn build(self, random: RandomKey) -> Result<Arc<dyn Handlers>, EntityError> {
        let Entity { name, version, entity_id_max, commands, state, mut errors } = self;
        if commands.is_empty() && errors.is_empty() {
            errors.push("there is no command".into());
        }
        let entity_type = EntityType::new(&name).map_err(|error| errors.push(error.to_string()));
        let (Ok(entity_type), true) = (entity_type, errors.is_empty()) else { return Err(EntityError { entity_type: name, errors }) };
        let version = HandlerVersion(version.unwrap_or_else(|| default_version(&entity_type, &commands)).into());
        let creates = commands.iter().map(|(name, command)| (name.clone(), command.creates)).collect();
        let code = Arc::new(Code { entity_type, commands, state, random });
        Ok(Arc::new(NativeHandlers { version, creates, entity_id_max, code }))
    }
}

fn default_version(entity_type: &EntityType, commands: &BTreeMap<CommandName, Command>) -> String {
    let mut hash = Sha256::new();
    for part in [env!("CARGO_PKG_VERSION"), entity_type.as_str()].into_iter().chain(commands.keys().map(CommandName::as_str)) {
        hash.update(part);
        hash.update([0]);
    }
    let mut version = data_encoding::HEXLOWER.encode(&hash.finalize());
    version.truncate(16);
    version
}

/// Calls a handler: texts in, texts out.
fn call<Signature, H: Handle<Signature>>(handler: &H, new: fn() -> Option<H::State>, context: &Context<'_>) -> Result<Decision, Failure> {
    let request = read(context.call.request, Failure::InvalidRequest)?;
    // A state without any member is that of a new entity, or as good as that.
    let before = context.call.state.text().ok_or_else(|| exception("the state is held elsewhere".into()))?;
    let (mut state, stored) = match new().filter(|_| *before == Json::empty_object()) {
        Some(state) => (state, None),
        None => (read(before, Failure::StateInvalid)?, Some(before)),
    };
    // What the type makes of the stored state, to tell what it does not know from what the handler removes.
    let known = stored.map(|_| write(&state, Failure::StateInvalid)).transpose()?;
    let response = match handler.handle(request, &mut state, context) {
        Ok(response) => write(&response, Failure::ResponseInvalid)?,
        Err(rejection) => return Ok(Decision::Reject { rejection: rejection.document()? }),
    };
    let mut after = write(&state, Failure::StateInvalid)?;
    if let (Some(stored), Some(known)) = (stored, known) {
        after = merge::keep_unknown(stored, &known, after, |merged| merged.parse::<H::State>().is_ok())
            .map_err(|error| invalid(Failure::StateInvalid, "", error))?;
    }
    Ok(Decision::Accept { response, state: after.into() })
}

fn read<T: DeserializeOwned>(document: &Json, failure: fn(Vec<SchemaError>) -> Failure) -> Result<T, Failure> {
    let mut reader = serde_json::Deserializer::from_str(document.as_str());
    serde_path_to_error::deserialize(&mut reader).map_err(|error| invalid(failure, &pointer(error.path()), error.inner()))
}

fn write<T: Serialize>(value: &T, failure: fn(Vec<SchemaError>) -> Failure) -> Result<Json, Failure> {
    Json::from_serialize(value).map_err(|error| invalid(failure, "", error))
}

/// A path into a document as a JSON pointer.
fn pointer(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let mut pointer = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => pointer.push_str(&format!("/{index}")),
            Segment::Map { key } => pointer.push_str(&format!("/{}", key.replace('~', "~0").replace('/', "~1"))),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    pointer
}

fn invalid(failure: fn(Vec<SchemaError>) -> Failure, pointer: &str, message: impl std::fmt::Display) -> Failure {
    failure(vec![SchemaError { pointer: pointer.to_owned(), message: message.to_string() }])
}

fn exception(message: String) -> Failure {
    Failure::HandlerFailed(HandlerFault { kind: HandlerFaultKind::Exception, message })
}

struct Code {
    entity_type: EntityType,
    commands: BTreeMap<CommandName, Command>,
    state: Option<Schema>,
    random: RandomKey,
}

impl Code {
    fn call(&self, command: &Command, call: Call<'_>) -> Result<Decision, Failure> {
        if let Some(schema) = &command.request {
            schema.check(call.request).map_err(Failure::InvalidRequest)?;
        }
        let random = || self.random.dice(&self.entity_type, call.entity_id, call.command_id);
        let context = Context { call, random: &random, dice: RefCell::default() };
        let decision = catch_unwind(AssertUnwindSafe(|| (command.run)(&context))).map_err(|panic| {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
            exception(format!("the handler panicked: {}", text.unwrap_or_else(|| "no message".into())))
        })??;
        if let (Decision::Accept { state: Change::Whole(state), .. }, Some(schema)) = (&decision, &self.state) {
            schema.check(state).map_err(Failure::StateInvalid)?;
        }
        Ok(decision)
    }
}

impl Execute for &Code {
    fn creates(&self, command: &CommandName) -> Option<Creates> {
        self.commands.get(command).map(|command| command.creates)
    }

    fn execute(&mut self, call: Call<'_>) -> Result<Decision, Failure> {
        let command = self.commands.get(call.command).ok_or(Failure::UnknownCommand)?;
        self.call(command, call)
    }
}

struct NativeHandlers {
    version: HandlerVersion,
    creates: BTreeMap<CommandName, Creates>,
    entity_id_max: usize,
    code: Arc<Code>,
}

#[async_trait]
impl Handlers for NativeHandlers {
    fn entity_type(&self) -> &EntityType {
        &self.code.entity_type
    }

    fn version(&self) -> &HandlerVersion {
        &self.version
    }

    fn commands(&self) -> &BTreeMap<CommandName, Creates> {
        &self.creates
    }

    fn entity_id_max(&self) -> usize {
        self.entity_id_max
    }

    async fn run(&self, work: Work) -> Result<Ran, HandlersUnavailable> {
        let code = self.code.clone();
        let running = tokio::task::spawn_blocking(move || Ran::whole(work, &mut &*code));
        running.await.map_err(|error| HandlersUnavailable(error.to_string()))
    }
}

#[cfg(test)]
mod tests;
