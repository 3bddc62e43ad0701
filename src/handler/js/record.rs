//! Commands on documents that stay in the engine: what a handler changed, as a JSON Patch, and the document afterwards.
//!
//! The objects are looked after by `record.js`. This side writes what they hold: the new values, and the old ones for their lengths.

use super::value::{Key, WriteError, Written, to_js};
use crate::core::Json;
use crate::core::json::write_string;
use crate::handler::schema::{Edit, Step};
use rquickjs::context::EvalOptions;
use rquickjs::{Array, Ctx, Error, Function, Object, Persistent, Value};

/// What an operation of a patch takes besides its value, about.
const EDIT_OVERHEAD: usize = 48;

const RECORD: &str = include_str!("record.js");

/// The functions of `record.js`, in their realm.
pub struct Recorder<'js> {
    record: Function<'js>,
    count: Function<'js>,
    apply: Function<'js>,
}

/// The same while nothing runs in the realm.
pub struct SavedRecorder {
    record: Persistent<Function<'static>>,
    count: Persistent<Function<'static>>,
    apply: Persistent<Function<'static>>,
}

impl<'js> Recorder<'js> {
    /// Evaluates `record.js` in a realm that is hardened already.
    pub fn new(ctx: &Ctx<'js>) -> Result<Recorder<'js>, Error> {
        let mut options = EvalOptions::default();
        options.filename = Some("record".to_owned());
        let make: Function<'js> = ctx.eval_with_options(RECORD, options)?;
        let made: Object<'js> = make.call(())?;
        Ok(Recorder { record: made.get("record")?, count: made.get("count")?, apply: made.get("apply")? })
    }

    /// Keeps them for later.
    pub fn save(self, ctx: &Ctx<'js>) -> SavedRecorder {
        let save = |function| Persistent::save(ctx, function);
        SavedRecorder { record: save(self.record), count: save(self.count), apply: save(self.apply) }
    }

    /// Begins a command on a document.
    pub fn record(&self, root: Object<'js>) -> Result<Recording<'js>, Error> {
        let session: Object<'js> = self.record.call((root.clone(),))?;
        Ok(Recording { root, state: session.get("state")?, unwrap: session.get("unwrap")?, session })
    }
}

impl SavedRecorder {
    /// Takes them out again.
    pub fn restore<'js>(&self, ctx: &Ctx<'js>) -> Result<Recorder<'js>, Error> {
        Ok(Recorder { record: self.record.clone().restore(ctx)?, count: self.count.clone().restore(ctx)?, apply: self.apply.clone().restore(ctx)? })
    }
}

/// One command on one document.
pub struct Recording<'js> {
    /// The document itself; no handler gets it.
    pub root: Object<'js>,
    /// What the handler gets for it.
    pub state: Value<'js>,
    /// Gives what a proxy of this command stands for.
    pub unwrap: Function<'js>,
    session: Object<'js>,
}

/// What a command did to one container.
struct Container<'js> {
    raw: Object<'js>,
    path: Vec<Step>,
    is_array: bool,
    edits: Vec<Changed<'js>>,
    /// New members that JSON leaves out.
    left_out: Vec<Step>,
    /// Elements before and after, of an array.
    counts: (usize, usize),
}

/// One slot of a container that has another value now.
struct Changed<'js> {
    kind: Kind,
    key: Step,
    /// The text of the new value.
    text: String,
    before: Value<'js>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Replace = 0,
    Add = 1,
    Remove = 2,
}

/// All that a command changed, with the new values as texts.
pub struct Changes<'js>(Vec<Container<'js>>);

/// Changes that are ready to become those of the document, which must be as it was before the command.
pub struct Prepared<'js> {
    /// A JSON Patch (RFC 6902).
    pub patch: String,
    /// How many bytes the document's text takes afterwards.
    pub len: usize,
    edits: Array<'js>,
}

/// Writes a value that stands at a key, some levels deep; false where JSON leaves it out.
pub type Write<'a, 'js> = &'a mut dyn FnMut(&mut String, Value<'js>, Key<'_>, usize) -> Written<bool>;

impl<'js> Recording<'js> {
    /// Whether the handler did something that only a plain document can do.
    pub fn is_exotic(&self) -> Result<bool, Error> {
        self.session.get::<_, Function<'js>>("isExotic")?.call(())
    }

    /// How many changes were noted.
    pub fn changes_made(&self) -> Result<f64, Error> {
        self.session.get::<_, Function<'js>>("changesMade")?.call(())
    }

    /// How many times the handler read something of the document.
    pub fn reads(&self) -> Result<f64, Error> {
        self.session.get::<_, Function<'js>>("reads")?.call(())
    }

    /// Puts the document back to what it was.
    pub fn undo(&self) -> Result<(), Error> {
        self.session.get::<_, Function<'js>>("undo")?.call(())
    }

    /// Puts the new values, read anew from their texts, in place of what the handler made: what it made may show another text when it is
    /// written once more. From here on no script runs when the document is written.
    pub fn settle(&self, ctx: &Ctx<'js>, changes: &Changes<'js>) -> Result<(), Error> {
        let slots = Array::new(ctx.clone())?;
        let mut places = 0;
        let mut push = |raw: &Object<'js>, key: &Step, value: Value<'js>| {
            for part in [raw.clone().into_value(), key_value(ctx, key)?, value] {
                slots.set(places, part)?;
                places += 1;
            }
            Ok::<_, Error>(())
        };
        for Container { raw, is_array, edits, left_out, .. } in &changes.0 {
            for Changed { kind, key, text, .. } in edits {
                match kind {
                    // The elements of an array are where they belong already.
                    Kind::Remove if *is_array => {}
                    Kind::Remove => push(raw, key, Value::new_undefined(ctx.clone()))?,
                    Kind::Replace | Kind::Add => push(raw, key, to_js(ctx, &Json::trusted(text.as_str()))?)?,
                }
            }
            for key in left_out {
                push(raw, key, Value::new_undefined(ctx.clone()))?;
            }
        }
        self.session.get::<_, Function<'js>>("settle")?.call((slots,))
    }

    /// What changed; none where the document is better told as a whole.
    pub fn changes(&self, write: Write<'_, 'js>) -> Written<Option<Changes<'js>>> {
        let found: Value<'js> = self.session.get::<_, Function<'js>>("changes")?.call(())?;
        let Some(found) = found.into_array() else { return Ok(None) };
        let containers = found.iter::<Array<'js>>().map(|container| Container::read(&container?, write));
        containers.collect::<Written<Vec<_>>>().map(|containers| Some(Changes(containers)))
    }
}

impl<'js> Container<'js> {
    fn read(told: &Array<'js>, write: Write<'_, 'js>) -> Written<Container<'js>> {
        let path = told.get::<Array<'js>>(1)?.iter::<Value<'js>>().map(|key| step(&key?)).collect::<Result<Vec<_>, Error>>()?;
        let is_array = told.get(2)?;
        let (mut edits, mut left_out) = (Vec::new(), Vec::new());
        for edit in told.get::<Array<'js>>(3)?.iter::<Array<'js>>() {
            let edit = edit?;
            let key = step(&edit.get::<Value<'js>>(1)?)?;
            let mut kind = match edit.get::<i32>(0)? {
                0 => Kind::Replace,
                1 => Kind::Add,
                _ => Kind::Remove,
            };
            let mut text = String::new();
            if kind != Kind::Remove && !write(&mut text, edit.get(2)?, place(&key), path.len() + 1)? {
                match kind {
                    _ if is_array => text.push_str("null"),
                    Kind::Replace => kind = Kind::Remove,
                    Kind::Add | Kind::Remove => {
                        left_out.push(key);
                        continue;
                    }
                }
            }
            edits.push(Changed { kind, key, text, before: edit.get(3)? });
        }
        Ok(Container { raw: told.get(0)?, path, is_array, edits, left_out, counts: (told.get(4)?, told.get(5)?) })
    }
}

fn place(step: &Step) -> Key<'_> {
    match step {
        Step::Key(name) => Key::Name(name),
        // Arrays of the engine have fewer than 2^32 elements.
        Step::Index(index) => Key::Index(*index as u32),
    }
}

fn key_value<'js>(ctx: &Ctx<'js>, step: &Step) -> Result<Value<'js>, Error> {
    match step {
        Step::Key(name) => rquickjs::String::from_str(ctx.clone(), name).map(rquickjs::String::into_value),
        Step::Index(index) => Ok(Value::new_number(ctx.clone(), *index as f64)),
    }
}

fn step(key: &Value<'_>) -> Result<Step, Error> {
    match key.as_number() {
        // An index, below 2^32.
        Some(index) => Ok(Step::Index(index as usize)),
        None => key.get::<String>().map(Step::Key),
    }
}

impl<'js> Changes<'js> {
    /// Every change with the path of its container.
    pub fn edits(&self) -> impl Iterator<Item = (&[Step], Edit<'_>)> {
        self.0.iter().flat_map(|container| {
            container.edits.iter().map(|edit| {
                let edit = match edit.kind {
                    Kind::Replace | Kind::Add => Edit::Put(&edit.key, &edit.text),
                    Kind::Remove => Edit::Remove(&edit.key),
                };
                (container.path.as_slice(), edit)
            })
        })
    }

    /// About how many bytes the patch takes.
    pub fn patch_bytes(&self) -> usize {
        let bytes = |edit: &Changed<'js>| EDIT_OVERHEAD + edit.text.len();
        self.0.iter().map(|container| container.edits.iter().map(bytes).sum::<usize>()).sum()
    }

    /// Makes ready what was changed on a document that takes `len` bytes and is back to what it was.
    pub fn prepare(self, ctx: &Ctx<'js>, recorder: &Recorder<'js>, mut len: usize, write: Write<'_, 'js>) -> Written<Prepared<'js>> {
        let edits = Array::new(ctx.clone())?;
        let mut places = 0;
        let mut patch = String::from("[");
        let broken = || WriteError::Engine(Error::Unknown);
        for Container { raw, path, is_array, edits: changed, counts, .. } in self.0 {
            let (mut added, mut removed) = (0, 0);
            let mut prefix = String::new();
            path.iter().for_each(|step| step.write_pointer(&mut prefix));
            for Changed { kind, key, text, before } in changed {
                let mut old = String::new();
                if kind != Kind::Add {
                    write(&mut old, before, Key::None, 0)?;
                    if kind == Kind::Replace && old == text {
                        continue;
                    }
                }
                let name = match &key {
                    Step::Key(name) => {
                        let mut literal = String::new();
                        write_string(&mut literal, name);
                        literal.len() + 1
                    }
                    Step::Index(_) => 0,
                };
                let (gained, lost) = match kind {
                    Kind::Replace => (text.len(), old.len()),
                    Kind::Add => (name + text.len(), 0),
                    Kind::Remove => (0, name + old.len()),
                };
                len = (len + gained).checked_sub(lost).ok_or_else(broken)?;
                added += usize::from(kind == Kind::Add);
                removed += usize::from(kind == Kind::Remove);
                patch.push_str(if patch.len() > 1 { ",{\"op\":\"" } else { "{\"op\":\"" });
                patch.push_str(match kind {
                    Kind::Replace => "replace\",\"path\":",
                    Kind::Add => "add\",\"path\":",
                    Kind::Remove => "remove\",\"path\":",
                });
                let mut pointer = prefix.clone();
                key.write_pointer(&mut pointer);
                write_string(&mut patch, &pointer);
                if kind != Kind::Remove {
                    patch.push_str(",\"value\":");
                    patch.push_str(&text);
                }
                patch.push('}');
                let value = if kind == Kind::Remove { Value::new_undefined(ctx.clone()) } else { to_js(ctx, &Json::trusted(text))? };
                let key = key_value(ctx, &key)?;
                let parts = [raw.clone().into_value(), Value::new_bool(ctx.clone(), is_array), Value::new_int(ctx.clone(), kind as i32), key, value];
                for part in parts {
                    edits.set(places, part)?;
                    places += 1;
                }
            }
            if added != removed {
                let before: usize = if is_array { counts.0 } else { recorder.count.call((raw,))? };
                let after = (before + added).checked_sub(removed).ok_or_else(broken)?;
                let commas = |count: usize| count.saturating_sub(1);
                len = (len + commas(after)).checked_sub(commas(before)).ok_or_else(broken)?;
            }
        }
        patch.push(']');
        Ok(Prepared { patch, len, edits })
    }
}

impl<'js> Prepared<'js> {
    /// Changes the document.
    pub fn apply(self, recorder: &Recorder<'js>) -> Result<(), Error> {
        if self.edits.is_empty() { Ok(()) } else { recorder.apply.call((self.edits,)) }
    }
}
