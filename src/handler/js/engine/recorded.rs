//! Commands on large states, whose objects stay in the engine from one command to the next, and from one batch to the next.
//!
//! A command that runs recorded costs what it changes. Whenever there is any doubt of its outcome (it fails in any way, takes too long,
//! or does what a recorded state cannot), it is as if it had not run, and it runs on a freshly read state: handlers are repeatable.
//! So what commands are answered never depends on whether their state stayed here.

use super::{Answer, Document, Session, Stop, check};
use crate::core::batch::{Call, Decision, HandlerFaultKind};
use crate::core::event::ROW_OVERHEAD;
use crate::core::{Change, EntityId, Failure, HandlerFault, Json, Outcome, State, Work};
use crate::handler::js::module::{Command, LoadContext, Module};
use crate::handler::js::protocol::Keep;
use crate::handler::js::record::{Changes, Recorder, Recording};
use crate::handler::js::residents::{self, Resident};
use crate::handler::js::value::{Key, Writer, Written, to_js};
use rquickjs::{Error, Object, Persistent, Value};

/// From how many reads of a handler on, in times of the bytes of its state's text, reading the state anew is cheaper.
const READS_PER_BYTE: f64 = 1.0 / 40.0;

/// Which states stay.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The fewest bytes of text; more than there can be where none stays.
    resident_min: usize,
    /// The most bytes of text of all together.
    bytes_max: usize,
    /// How many calls of a command go without recording once it was of no use.
    plain_next: u32,
}

impl Limits {
    /// Those of a batch.
    pub fn new(keep: &Keep, load: &LoadContext) -> Limits {
        let resident_min = if *keep == Keep::Nothing { usize::MAX } else { load.resident_min };
        Limits { resident_min, bytes_max: residents::bytes_max(load.memory_limit()), plain_next: load.plain_after_useless }
    }
}

/// Takes the states that are said to be here for the batch. False where one is not, and nothing has happened.
pub fn begin_batch(module: &Module, keep: &Keep, work: &mut Work) -> bool {
    let named = if let Keep::Large(named) = keep { named.as_slice() } else { &[] };
    let mut residents = module.residents();
    for name in named.iter().filter(|name| name.before.is_some()) {
        let Some(entity) = work.entities.get(name.entity) else { return false };
        let is_here = residents.get(&entity.id).is_some_and(|resident| {
            let is_its_length = matches!(entity.state, Some(State::Held { len }) if len == resident.len);
            resident.token == name.before && is_its_length
        });
        if !is_here {
            return false;
        }
    }
    if *keep == Keep::Nothing {
        residents.clear();
    }
    for entity in &work.entities {
        let Some(State::Held { len }) = entity.state else {
            residents.forget(&entity.id);
            continue;
        };
        let Some(resident) = residents.get(&entity.id) else { return false };
        (resident.token, resident.is_only_copy) = (None, true);
        // The batch writes the whole state once; one row goes with it in any case.
        work.bytes_left = work.bytes_left.saturating_sub(len).max(work.bytes_left.min(1));
    }
    true
}

/// Gives the states the names that the server knows them by from here on.
pub fn end_batch(module: &Module, keep: &Keep, limits: Limits, work: &Work) {
    let mut residents = module.residents();
    if let Keep::Large(named) = keep {
        for name in named {
            if let Some(resident) = work.entities.get(name.entity).and_then(|entity| residents.get(&entity.id)) {
                (resident.token, resident.is_only_copy) = (Some(name.after), false);
            }
        }
    }
    residents.forget_unnamed();
    residents.make_room(0, limits.bytes_max);
}

/// A command that was recorded, before anything of it counts.
enum Decided<'js> {
    Reject(Json),
    Whole { response: Json, state: Json },
    Changes { response: Json, changes: Changes<'js> },
}

/// Why a recorded command runs again on a freshly read state.
enum Again {
    /// It failed: how, is found out on the way that tells it best.
    Failed,
    /// Recording is not for what it does.
    Useless,
}

impl From<Failure> for Again {
    fn from(_: Failure) -> Again {
        Again::Failed
    }
}

impl<'js> Session<'_, 'js> {
    /// What stays of the state of a command, and the length of its text; none where it is to be read from its text. Where nothing stays
    /// of it yet, something does from here on if it is large and `may_begin` says so.
    pub(super) fn resident(&mut self, call: Call<'_>, may_begin: bool) -> Result<Option<(Object<'js>, usize)>, Failure> {
        let found = self.module.residents().get(call.entity_id).map(|resident| (resident.root.clone(), resident.len));
        if let Some((root, len)) = found {
            let root = root.restore(self.ctx).map_err(|error| self.engine_failure(error))?;
            return Ok(Some((root, len)));
        }
        let State::Whole(text) = call.state else { return Err(self.retry()) };
        if !may_begin
            || text.len() < self.limits.resident_min
            || !self.module.is_lasting()
            || !self.module.residents().make_room(text.len(), self.limits.bytes_max)
        {
            return Ok(None);
        }
        let root = to_js(self.ctx, text).map_err(|error| self.engine_failure(error))?;
        let Some(root) = root.into_object() else { return Ok(None) };
        let resident = Resident {
            entity: call.entity_id.clone(),
            token: None,
            len: text.len(),
            is_valid: false,
            is_only_copy: false,
            root: Persistent::save(self.ctx, root.clone()),
        };
        self.module.residents().keep(resident);
        Ok(Some((root, text.len())))
    }

    /// Runs a command on a state that stays; none where it must run on a freshly read one. The state is then as it was before.
    pub(super) fn recorded(&mut self, call: Call<'_>, command: &Command, root: Object<'js>, len: usize) -> Result<Option<Decision>, Failure> {
        let begun = self.module.recorder(self.ctx).and_then(|recorder| Ok((recorder.record(root)?, recorder)));
        let (recording, recorder) = begun.map_err(|error| self.engine_failure(error))?;
        self.module.host().hold_lines();
        self.unwrap = Some(recording.unwrap.clone());
        let mut decided = self.decide_recorded(call, command, &recording, len);
        self.unwrap = None;
        let lines = self.module.host().take_lines();
        if self.stop == Stop::Retry {
            return Err(self.retry());
        }
        if self.shared.is_overrun() {
            decided = Err(Again::Useless);
        }
        // Cleaning up takes as long as the changes are many; it must not be stopped half way.
        self.shared.begin();
        if recording.reads().map_err(|error| self.lost(error))? > len as f64 * READS_PER_BYTE {
            command.plain_next.set(self.limits.plain_next);
        }
        recording.undo().map_err(|error| self.lost(error))?;
        let decision = match decided {
            Err(again) => {
                if matches!(again, Again::Useless) {
                    command.plain_next.set(self.limits.plain_next);
                }
                return Ok(None);
            }
            Ok(Decided::Reject(rejection)) => Decision::Reject { rejection },
            Ok(Decided::Whole { response, state }) => {
                command.plain_next.set(self.limits.plain_next);
                Decision::Accept { response, state: state.into() }
            }
            Ok(Decided::Changes { response, changes }) => match self.commit(call, &recorder, changes, response, len)? {
                Some(decision) => decision,
                None => return Ok(None),
            },
        };
        for line in lines {
            eprintln!("{line}");
        }
        Ok(Some(decision))
    }

    /// Runs the handler and reads what it did. The changes are still in the state.
    fn decide_recorded(&mut self, call: Call<'_>, command: &Command, recording: &Recording<'js>, len: usize) -> Result<Decided<'js>, Again> {
        let answer = self.invoke(call, recording.state.clone());
        if recording.is_exotic().map_err(|error| self.engine_failure(error))? {
            self.ctx.catch();
            return Err(Again::Useless);
        }
        let (is_accepted, first, second, third): Answer<'js> = answer.map_err(|error| self.engine_failure(error))?;
        if !is_accepted {
            let Decision::Reject { rejection } = self.rejection(first, second, third)? else { return Err(Again::Failed) };
            return Ok(Decided::Reject(rejection));
        }
        if first.is_promise() {
            return Err(Again::Failed);
        }
        let response = if first.is_undefined() { Json::null() } else { self.write(first, Document::Response)? };
        let made = recording.changes_made().map_err(|error| self.engine_failure(error))?;
        let is_same = second == recording.state;
        let changes = if is_same {
            let mut write = self.member_writer();
            let changes = recording.changes(&mut write);
            drop(write);
            changes.map_err(|_| {
                self.ctx.catch();
                Again::Failed
            })?
        } else {
            None
        };
        // Without changes told, this is where the state is written.
        let whole = if changes.is_none() { Some(self.write(second, Document::State)?) } else { None };
        // Script that ran while the state was written may have changed what was written already.
        let is_final = recording.changes_made().map_err(|error| self.engine_failure(error))? == made;
        if !is_final || recording.is_exotic().map_err(|error| self.engine_failure(error))? {
            return Err(Again::Useless);
        }
        check(command.response.as_ref(), &response, Failure::ResponseInvalid)?;
        let (changes, state) = match changes {
            Some(changes) => {
                let is_small = changes.patch_bytes() <= len / 2;
                if is_small && self.stays_valid(call.entity_id, &changes) {
                    return Ok(Decided::Changes { response, changes });
                }
                // What is checked has to be what is kept.
                recording.settle(self.ctx, &changes).map_err(|error| self.engine_failure(error))?;
                let state = self.write(recording.root.clone().into_value(), Document::State)?;
                (is_small.then_some(changes), Some(state))
            }
            None => (None, whole),
        };
        if let Some(state) = &state {
            check(self.module.state_schema(), state, Failure::StateInvalid)?;
        }
        match (changes, state) {
            (Some(changes), _) => Ok(Decided::Changes { response, changes }),
            (None, Some(state)) => Ok(Decided::Whole { response, state }),
            (None, None) => Err(Again::Failed),
        }
    }

    /// Makes the changes those of the state, unless the event turns out to be too large. None where not even the state could be written.
    fn commit(&mut self, call: Call<'_>, recorder: &Recorder<'js>, changes: Changes<'js>, response: Json, len: usize) -> Result<Option<Decision>, Failure> {
        let mut write = self.member_writer();
        let prepared = changes.prepare(self.ctx, recorder, len, &mut write);
        drop(write);
        let prepared = prepared.map_err(|_| self.lost(Error::Exception))?;
        let (patch, len) = (Json::trusted(prepared.patch.as_str()), prepared.len);
        if len > self.bytes_max {
            return Ok(None);
        }
        let row_bytes = ROW_OVERHEAD + call.command_id.as_str().len() + call.request.len() + response.len() + len;
        if row_bytes <= self.bytes_max {
            prepared.apply(recorder).map_err(|error| self.lost(error))?;
            self.has_changed_resident = true;
            if let Some(resident) = self.module.residents().get(call.entity_id) {
                (resident.len, resident.is_valid, resident.is_only_copy) = (len, true, true);
            }
        }
        Ok(Some(Decision::Accept { response, state: Change::Patch { patch, len } }))
    }

    /// Whether a state surely keeps its schema after the changes.
    fn stays_valid(&self, entity: &EntityId, changes: &Changes<'js>) -> bool {
        let Some(schema) = self.module.state_schema() else { return true };
        let was_valid = self.module.residents().get(entity).is_some_and(|resident| resident.is_valid);
        was_valid && changes.edits().all(|(path, edit)| schema.stays_valid(path, edit))
    }

    /// Writes single values of a state.
    fn member_writer(&self) -> impl FnMut(&mut String, Value<'js>, Key<'_>, usize) -> Written<bool> + use<'_, 'js> {
        let is_overrun = || self.shared.is_overrun();
        move |out, value, key, depth| {
            let unwrap = self.unwrap.as_ref();
            Writer { unbox: &self.unbox, plain: &self.plain, unwrap, out, bytes_max: self.bytes_max, is_overrun: &is_overrun }.member(value, key, depth)
        }
    }

    /// The text of a state that stays.
    pub(super) fn text(&mut self, root: Object<'js>) -> Result<Json, Failure> {
        self.write(root.into_value(), Document::State).map_err(|_| self.retry())
    }

    /// After a command: what stays of its entity's state is its state.
    pub(super) fn settle(&mut self, entity: &EntityId, outcome: &Outcome) -> Result<(), String> {
        let is_patched = matches!(outcome, Outcome::Accepted { state: Change::Patch { .. }, .. });
        if is_patched != self.has_changed_resident {
            return Err("a command that counts is not in the state that stays, or the other way round".into());
        }
        if matches!(outcome, Outcome::Accepted { state: Change::Whole(_), .. }) {
            self.module.residents().forget(entity);
        }
        Ok(())
    }

    /// Turns the states that are only here into texts, before the realm goes. False where that fails.
    pub(super) fn take_texts(&mut self, work: &mut Work) -> bool {
        self.shared.begin();
        for entity in work.entities.iter_mut().filter(|entity| matches!(entity.state, Some(State::Held { .. }))) {
            let root = self.module.residents().get(&entity.id).map(|resident| resident.root.clone());
            let text = root.and_then(|root| root.restore(self.ctx).ok()).and_then(|root| self.text(root).ok());
            let Some(text) = text else { return false };
            entity.state = Some(State::Whole(text));
        }
        true
    }

    /// The process can go no further, and nothing of the command counts.
    pub(super) fn retry(&mut self) -> Failure {
        self.stop = Stop::Retry;
        let message = self.at_module("the command must run in another process");
        Failure::HandlerFailed(HandlerFault { kind: HandlerFaultKind::Crash, message })
    }

    /// A state that stays is no longer what it should be.
    fn lost(&mut self, _: Error) -> Failure {
        self.ctx.catch();
        self.retry()
    }
}
