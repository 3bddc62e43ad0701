//! Batches: commands of one partition run one after another on the states their predecessors leave.
//!
//! [`Work::run_next`] is the one rule of what a command does to an entity: existence, expected version, handler. The server runs it
//! for handlers written in Rust, a handler process runs it for those in JavaScript. A command that fails changes
//! nothing, so its neighbours never notice it.

use super::event::{EventOutcome, LoadedEntity, ROW_OVERHEAD, State};
use super::ids::{CommandId, CommandName, EntityId, Version};
use super::json::Json;
use serde::{Deserialize, Serialize};

/// Which entities a command is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Creates {
    /// Only entities that exist.
    Never,
    /// Only entities that do not exist; the state starts as `{}`.
    Always,
    /// Both.
    IfMissing,
}

/// What the caller demands of the entity before the command runs (`If-Match`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precondition {
    /// Any version, but it must exist (`*`).
    Exists,
    /// Exactly this version.
    Version(Version),
}

/// One command of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Index of its entity in [`Work::entities`].
    pub entity: usize,
    /// The command's id.
    pub command_id: CommandId,
    /// The command's name, known or not.
    pub command: CommandName,
    /// The request; `null` where there is none.
    pub request: Json,
    /// What the caller demands.
    pub precondition: Option<Precondition>,
    /// The command's time: milliseconds since 1970.
    pub now: i64,
}

/// A batch to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The entities it touches, each once, as they are before the next task runs.
    pub entities: Vec<LoadedEntity>,
    /// The commands, in order.
    pub tasks: Vec<Task>,
    /// How many tasks have run.
    pub done: usize,
    /// How many bytes of rows the batch may still make.
    pub bytes_left: usize,
    /// The most bytes that one row may take.
    pub row_bytes_max: usize,
}

/// One part of a document that breaks a JSON Schema.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchemaError {
    /// JSON pointer to it.
    pub pointer: String,
    /// What is wrong, for people.
    pub message: String,
}

/// In which way a handler failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandlerFaultKind {
    /// It threw something that is no rejection, or a Rust handler panicked.
    Exception,
    /// It used more CPU time than allowed.
    TimeLimit,
    /// It used more memory than allowed.
    MemoryLimit,
    /// It called itself too deeply.
    StackLimit,
    /// Its process died.
    Crash,
}

/// A failed handler: for the log, not for callers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandlerFault {
    /// In which way.
    pub kind: HandlerFaultKind,
    /// The message, with file and line where they are known.
    pub message: String,
}

/// Why a command did not happen. Nothing of it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The entity type has no such command.
    UnknownCommand,
    /// The command is for new entities only.
    EntityExists {
        /// The entity's version.
        version: Version,
    },
    /// The command needs an entity.
    EntityNotFound,
    /// The entity is at another version than the caller demands.
    VersionMismatch {
        /// The entity's version.
        version: Version,
    },
    /// The request breaks its schema.
    InvalidRequest(Vec<SchemaError>),
    /// The handler broke.
    HandlerFailed(HandlerFault),
    /// The new state breaks its schema, or is no JSON.
    StateInvalid(Vec<SchemaError>),
    /// The response breaks its schema, or is no JSON.
    ResponseInvalid(Vec<SchemaError>),
}

/// How a new state is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// All of it.
    Whole(Json),
    /// What changed, where that is much less than the whole.
    Patch {
        /// A JSON Patch (RFC 6902) from the state before.
        patch: Json,
        /// How many bytes the whole text takes afterwards.
        len: usize,
    },
}

impl From<Json> for Change {
    fn from(text: Json) -> Change {
        Change::Whole(text)
    }
}

/// What became of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The handler accepted.
    Accepted {
        /// Its response.
        response: Json,
        /// The new state.
        state: Change,
    },
    /// The handler refused: `{code, message, details}`. The state stays.
    Rejected {
        /// What it said.
        rejection: Json,
    },
    /// Nothing happened.
    Failed(Failure),
    /// The batch had no room for it; it belongs in the next one.
    NoRoom,
}

impl Outcome {
    /// Whether the outcome becomes an event.
    pub fn event_outcome(&self) -> Option<EventOutcome> {
        match self {
            Outcome::Accepted { .. } => Some(EventOutcome::Accepted),
            Outcome::Rejected { .. } => Some(EventOutcome::Rejected),
            Outcome::Failed(_) | Outcome::NoRoom => None,
        }
    }
}

/// One handler call: all that a handler may see.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// The entity.
    pub entity_id: &'a EntityId,
    /// The version of the state; 0 for a new entity.
    pub version: Version,
    /// The command's id.
    pub command_id: &'a CommandId,
    /// The command's name.
    pub command: &'a CommandName,
    /// The request.
    pub request: &'a Json,
    /// The state; `{}` for a new entity.
    pub state: &'a State,
    /// The command's time: milliseconds since 1970.
    pub now: i64,
}

/// What a handler decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Yes.
    Accept {
        /// The response.
        response: Json,
        /// The new state.
        state: Change,
    },
    /// No, by a business rule: `{code, message, details}`.
    Reject {
        /// The rejection.
        rejection: Json,
    },
}

/// The handlers of one entity type.
pub trait Execute {
    /// Which entities a command is for; none where there is no such command.
    fn creates(&self, command: &CommandName) -> Option<Creates>;

    /// Checks the request, runs the handler, checks what it made. Must leave no trace of the call behind, whatever
    /// the outcome.
    fn execute(&mut self, call: Call<'_>) -> Result<Decision, Failure>;
}

impl Work {
    /// Runs the next task; none where all have run.
    pub fn run_next(&mut self, handlers: &mut (impl Execute + ?Sized)) -> Option<Outcome> {
        let task = self.tasks.get(self.done)?;
        if self.bytes_left == 0 {
            self.done += 1;
            return Some(Outcome::NoRoom);
        }
        let entity = &self.entities[task.entity];
        let outcome = match decide(entity, task, handlers) {
            Ok(Decision::Accept { response, state }) => Outcome::Accepted { response, state },
            Ok(Decision::Reject { rejection }) => Outcome::Rejected { rejection },
            Err(failure) => Outcome::Failed(failure),
        };
        Some(self.record(outcome))
    }

    /// Notes the outcome of the next task as [`Work::run_next`] does: for whoever follows a run from outside.
    ///
    /// Answers with the outcome that counts, which is another one where the row would be too large or has no room.
    pub fn record(&mut self, outcome: Outcome) -> Outcome {
        let task = &self.tasks[self.done];
        let entity = &mut self.entities[task.entity];
        self.done += 1;
        let (answer, after) = match &outcome {
            Outcome::Accepted { response, state: Change::Whole(state) } => (response, Some(State::Whole(state.clone()))),
            Outcome::Accepted { response, state: Change::Patch { len, .. } } => (response, Some(State::Held { len: *len })),
            Outcome::Rejected { rejection } => (rejection, entity.state.clone()),
            Outcome::Failed(_) | Outcome::NoRoom => return outcome,
        };
        let row_bytes = ROW_OVERHEAD + task.command_id.as_str().len() + task.request.len() + answer.len() + after.as_ref().map_or(0, State::len);
        if row_bytes > self.row_bytes_max {
            let message = format!("the event would take {row_bytes} bytes; at most {} are allowed", self.row_bytes_max);
            return Outcome::Failed(Failure::StateInvalid(vec![SchemaError { pointer: String::new(), message }]));
        }
        // The row that crosses the line still goes with this batch: the limit is half of what a statement may hold.
        // Of a state that changes by patches, the batch writes the whole only once.
        let spared = match (&outcome, &entity.state) {
            (Outcome::Accepted { state: Change::Patch { patch, len }, .. }, Some(State::Held { .. })) => len.saturating_sub(patch.len()),
            (Outcome::Rejected { .. }, Some(State::Held { len })) => *len,
            _ => 0,
        };
        self.bytes_left = self.bytes_left.saturating_sub(row_bytes - spared);
        entity.version += 1;
        entity.state = after;
        outcome
    }
}

fn decide(entity: &LoadedEntity, task: &Task, handlers: &mut (impl Execute + ?Sized)) -> Result<Decision, Failure> {
    let creates = handlers.creates(&task.command).ok_or(Failure::UnknownCommand)?;
    match (&entity.state, creates) {
        (Some(_), Creates::Always) => return Err(Failure::EntityExists { version: entity.version }),
        (None, Creates::Never) => return Err(Failure::EntityNotFound),
        (Some(_), Creates::Never | Creates::IfMissing) | (None, Creates::Always | Creates::IfMissing) => {}
    }
    let is_met = match task.precondition {
        None => true,
        Some(Precondition::Exists) => entity.state.is_some(),
        Some(Precondition::Version(version)) => entity.version == version,
    };
    if !is_met {
        return Err(Failure::VersionMismatch { version: entity.version });
    }
    let empty = State::Whole(Json::empty_object());
    handlers.execute(Call {
        entity_id: &entity.id,
        version: entity.version,
        command_id: &task.command_id,
        command: &task.command,
        request: &task.request,
        state: entity.state.as_ref().unwrap_or(&empty),
        now: task.now,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds the request to the state, refuses to fall below zero, breaks on `null`.
    struct Counter;

    impl Execute for Counter {
        fn creates(&self, command: &CommandName) -> Option<Creates> {
            match command.as_str() {
                "open" => Some(Creates::Always),
                "add" => Some(Creates::Never),
                "put" => Some(Creates::IfMissing),
                _ => None,
            }
        }

        fn execute(&mut self, call: Call<'_>) -> Result<Decision, Failure> {
            let before: i64 = call.state.text().and_then(|state| state.parse().ok()).unwrap_or(0);
            let Ok(amount) = call.request.parse::<i64>() else {
                return Err(Failure::HandlerFailed(HandlerFault { kind: HandlerFaultKind::Exception, message: "no number".into() }));
            };
            let after = before + amount;
            if after < 0 {
                return Ok(Decision::Reject { rejection: Json::trusted("\"too low\"") });
            }
            let state = Json::trusted(after.to_string());
            Ok(Decision::Accept { response: state.clone(), state: state.into() })
        }
    }

    fn work(lines: &[&str], bytes: usize) -> Work {
        let entities = vec![
            LoadedEntity { id: EntityId::trusted("old"), version: 4, state: Some(Json::trusted("10").into()) },
            LoadedEntity { id: EntityId::trusted("new"), version: 0, state: None },
        ];
        let tasks = lines
            .iter()
            .enumerate()
            .map(|(number, line)| {
                let words: Vec<&str> = line.split(' ').collect();
                let precondition = words.get(3).map(|wanted| wanted.parse().map_or(Precondition::Exists, Precondition::Version));
                Task {
                    entity: usize::from(words[0] == "new"),
                    command_id: CommandId::trusted(&number.to_string()),
                    command: CommandName::trusted(words[1]),
                    request: Json::trusted(words[2].to_owned()),
                    precondition,
                    now: 0,
                }
            })
            .collect();
        Work { entities, tasks, done: 0, bytes_left: bytes, row_bytes_max: 1000 }
    }

    fn run(mut work: Work) -> (Vec<String>, Work) {
        let mut outcomes = Vec::new();
        while let Some(outcome) = work.run_next(&mut Counter) {
            outcomes.push(match outcome {
                Outcome::Accepted { response, .. } => format!("ok {response}"),
                Outcome::Rejected { rejection } => format!("rejected {rejection}"),
                Outcome::Failed(failure) => format!("{failure:?}").split([' ', '(']).next().unwrap_or_default().to_owned(),
                Outcome::NoRoom => "no room".into(),
            });
        }
        (outcomes, work)
    }

    #[test]
    fn each_command_sees_its_predecessors_and_nothing_of_failed_ones() {
        let cases = [
            ("old add 5", "ok 15"),
            ("old add null", "HandlerFailed"),
            ("old add -20", "rejected \"too low\""),
            ("old add -15 6", "ok 0"),
            ("old add 1 6", "VersionMismatch"),
            ("old open 1", "EntityExists"),
            ("old nothing 1", "UnknownCommand"),
            ("new add 1", "EntityNotFound"),
            ("new open -1", "rejected \"too low\""),
            ("new add 1", "EntityNotFound"),
            ("new open 3 *", "VersionMismatch"),
            ("new open 3 1", "ok 3"),
            ("new put 4 *", "ok 7"),
        ];
        let (outcomes, work) = run(work(&cases.map(|case| case.0), 1 << 20));
        assert_eq!(outcomes, cases.map(|case| case.1));
        let left: Vec<_> =
            work.entities.iter().map(|entity| (entity.version, entity.state.as_ref().and_then(State::text).map(|state| state.to_string()))).collect();
        assert_eq!(left, [(7, Some("0".into())), (3, Some("7".into()))]);
    }

    #[test]
    fn a_full_batch_leaves_the_rest_for_the_next_one() {
        let (outcomes, work) = run(work(&["old add 1", "old add 1", "old add 1"], ROW_OVERHEAD + 10));
        assert_eq!(outcomes, ["ok 11", "ok 12", "no room"]);
        assert_eq!(work.entities[0].version, 6);
    }

    #[test]
    fn an_event_over_the_limit_of_a_row_fails_alone() {
        let mut work = work(&["old add 1", "old add 1"], 1 << 20);
        let state = Json::trusted("1".repeat(2000));
        let outcome = work.record(Outcome::Accepted { response: Json::null(), state: state.into() });
        assert!(matches!(outcome, Outcome::Failed(Failure::StateInvalid(_))), "{outcome:?}");
        assert_eq!(work.entities[0].version, 4);
        assert_eq!(run(work).0, ["ok 11"]);
    }
}
