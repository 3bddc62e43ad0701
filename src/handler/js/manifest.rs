//! Reads what a module exports, and says precisely what is wrong with it.

use super::module::{Command, Prelude};
use super::protocol::Problem;
use super::sources::locate;
use super::value::{WriteError, Writer};
use crate::core::ids::{ENTITY_ID_DEFAULT_MAX, ENTITY_ID_LIMIT};
use crate::core::{CommandName, Creates, Json};
use crate::handler::schema::Schema;
use rquickjs::object::Filter;
use rquickjs::{Atom, Ctx, Object, Persistent, Value};
use std::cell::Cell;
use std::collections::BTreeMap;

/// The longest schema, in bytes of text.
const SCHEMA_MAX: usize = 1 << 20;

/// What a module exports.
pub struct Exports {
    pub commands: BTreeMap<CommandName, Command>,
    pub state_schema: Option<Schema>,
    pub entity_id_max: usize,
}

/// Reads the exports of a module; all that is wrong, where anything is.
pub fn read<'js>(namespace: &Object<'js>, file: &str, files: &BTreeMap<String, String>, prelude: &Prelude<'js>) -> Result<Exports, Vec<Problem>> {
    let source = files.get(file).map(String::as_str).unwrap_or_default();
    let mut reader = Reader { ctx: namespace.ctx(), file, source, prelude, problems: Vec::new() };
    let mut exports = Exports { commands: BTreeMap::new(), state_schema: None, entity_id_max: ENTITY_ID_DEFAULT_MAX };
    let members = reader.members(namespace, &[]);
    if members.is_empty() {
        reader.problem(&[], "the module exports nothing; a module exports `commands`, and helpers belong in a folder below");
    }
    let has_commands = members.iter().any(|(name, _)| name == "commands");
    for (name, value) in &members {
        match name.as_str() {
            "commands" => exports.commands = reader.commands(value),
            "state" => exports.state_schema = reader.schema(value, &["state"]),
            "id" => exports.entity_id_max = reader.entity_id_max(value).unwrap_or(ENTITY_ID_DEFAULT_MAX),
            other => reader.unknown(&[other], "export", &["commands", "state", "id"]),
        }
    }
    if !has_commands && !members.is_empty() {
        reader.problem(&[], "the module exports no `commands`");
    }
    let mut problems = reader.problems;
    if problems.is_empty() {
        return Ok(exports);
    }
    problems.sort();
    Err(problems)
}

struct Reader<'a, 'js> {
    ctx: &'a Ctx<'js>,
    file: &'a str,
    source: &'a str,
    prelude: &'a Prelude<'js>,
    problems: Vec<Problem>,
}

impl<'js> Reader<'_, 'js> {
    fn problem(&mut self, path: &[&str], message: impl std::fmt::Display) {
        let message = if path.is_empty() { message.to_string() } else { format!("{}: {message}", path.join(".")) };
        self.problems.push(Problem { file: self.file.to_owned(), place: locate(self.source, path), message });
    }

    fn unknown(&mut self, path: &[&str], what: &str, known: &[&str]) {
        let known = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        self.problem(path, format!("unknown {what}; there are {known}"));
    }

    /// The members of an object; a problem for each that cannot be read.
    fn members(&mut self, object: &Object<'js>, path: &[&str]) -> Vec<(String, Value<'js>)> {
        let mut members = Vec::new();
        for atom in object.own_keys::<Atom<'js>>(Filter::default()) {
            let member = atom.and_then(|atom| {
                let name = atom.to_js_string()?.to_string()?;
                Ok((name, object.get::<_, Value<'js>>(atom)?))
            });
            match member {
                Ok(member) => members.push(member),
                Err(error) => {
                    self.ctx.catch();
                    self.problem(path, format!("cannot be read: {error}"));
                }
            }
        }
        members
    }

    fn commands(&mut self, value: &Value<'js>) -> BTreeMap<CommandName, Command> {
        let mut commands = BTreeMap::new();
        let Some(object) = value.as_object().filter(|_| !value.is_array() && !value.is_function()) else {
            self.problem(&["commands"], "must be an object of commands");
            return commands;
        };
        let members = self.members(object, &["commands"]);
        if members.is_empty() {
            self.problem(&["commands"], "there is no command");
        }
        for (name, value) in members {
            match CommandName::new(&name) {
                Err(error) => self.problem(&["commands", &name], error),
                Ok(command_name) => {
                    if let Some(command) = self.command(&name, &value) {
                        commands.insert(command_name, command);
                    }
                }
            }
        }
        commands
    }

    fn command(&mut self, name: &str, value: &Value<'js>) -> Option<Command> {
        let path = ["commands", name];
        let Some(object) = value.as_object().filter(|_| !value.is_array() && !value.is_function()) else {
            self.problem(&path, "must be an object with `handle(state, request, context)`");
            return None;
        };
        let before = self.problems.len();
        let (mut creates, mut handle, mut request, mut response) = (Creates::Never, None, None, None);
        for (key, value) in self.members(object, &path) {
            let path = ["commands", name, key.as_str()];
            match key.as_str() {
                "creates" => creates = self.creates(&value, &path).unwrap_or(creates),
                "request" => request = self.schema(&value, &path),
                "response" => response = self.schema(&value, &path),
                "handle" => match value.as_function() {
                    Some(function) => handle = Some(function.clone()),
                    None => self.problem(&path, "must be a function"),
                },
                _ => self.unknown(&path, "key", &["handle", "creates", "request", "response"]),
            }
        }
        if self.problems.len() > before {
            return None;
        }
        let Some(handle) = handle else {
            self.problem(&path, "has no `handle(state, request, context)`");
            return None;
        };
        let object = Persistent::save(self.ctx, object.clone());
        let handle = Persistent::save(self.ctx, handle);
        Some(Command { creates, object, handle, request, response, plain_next: Cell::new(0) })
    }

    fn creates(&mut self, value: &Value<'js>, path: &[&str]) -> Option<Creates> {
        let word = value.as_string().and_then(|text| text.to_string().ok());
        match (value.as_bool(), word.as_deref()) {
            (Some(true), _) => Some(Creates::Always),
            (Some(false), _) => Some(Creates::Never),
            (None, Some("if-missing")) => Some(Creates::IfMissing),
            (None, _) if value.is_undefined() => Some(Creates::Never),
            (None, _) => {
                self.problem(path, "must be true, false or \"if-missing\"");
                None
            }
        }
    }

    fn schema(&mut self, value: &Value<'js>, path: &[&str]) -> Option<Schema> {
        if value.is_undefined() {
            return None;
        }
        if !value.is_bool() && (!value.is_object() || value.is_array() || value.is_function()) {
            self.problem(path, "must be a JSON Schema: an object, true or false");
            return None;
        }
        let mut text = String::new();
        let never = || false;
        let Prelude { unbox, plain, .. } = self.prelude;
        let mut writer = Writer { unbox, plain, unwrap: None, out: &mut text, bytes_max: SCHEMA_MAX, is_overrun: &never };
        let compiled = match writer.document(value.clone()) {
            Ok(()) => Schema::compile(&Json::trusted(text)).map_err(|error| (error.pointer, error.message)),
            Err(WriteError::Invalid(error)) => Err((error.pointer, error.message)),
            Err(WriteError::Engine(error)) => {
                self.ctx.catch();
                Err((String::new(), error.to_string()))
            }
            Err(WriteError::TooLarge | WriteError::Overrun) => Err((String::new(), format!("it takes more than {SCHEMA_MAX} bytes"))),
        };
        match compiled {
            Ok(schema) => Some(schema),
            Err((pointer, message)) => {
                let steps: Vec<String> = pointer.split('/').skip(1).map(|step| step.replace("~1", "/").replace("~0", "~")).collect();
                let words: Vec<&str> = path.iter().copied().chain(steps.iter().map(String::as_str)).collect();
                let at = if pointer.is_empty() { String::new() } else { format!(" at {pointer}") };
                let message = format!("{}: the JSON Schema is wrong{at}: {message}", path.join("."));
                self.problems.push(Problem { file: self.file.to_owned(), place: locate(self.source, &words), message });
                None
            }
        }
    }

    fn entity_id_max(&mut self, value: &Value<'js>) -> Option<usize> {
        let Some(object) = value.as_object() else {
            self.problem(&["id"], "must be an object such as { maxLength: 64 }");
            return None;
        };
        let mut found = None;
        for (key, value) in self.members(object, &["id"]) {
            if key != "maxLength" {
                self.unknown(&["id", &key], "key", &["maxLength"]);
                continue;
            }
            match value.as_number().filter(|number| number.fract() == 0.0 && (1.0..=ENTITY_ID_LIMIT as f64).contains(number)) {
                Some(number) => found = Some(number as usize),
                None => self.problem(&["id", "maxLength"], format!("must be a whole number from 1 to {ENTITY_ID_LIMIT}")),
            }
        }
        found
    }
}
