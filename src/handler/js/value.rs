//! Documents between canonical text and JavaScript values, without loss in either direction.
//!
//! Into JavaScript the engine's own parser does the work, unless the text holds an integer that a Number cannot: then
//! the value is built here and that integer is a BigInt. Out of JavaScript the text is written here directly in
//! canonical form. Getters, `toJSON` and proxies run script on the way; whoever calls watches the command's limits.

use crate::core::json::{DEPTH_MAX, SAFE_INTEGER_MAX, write_f64, write_string};
use crate::core::{Json, batch::SchemaError};
use rquickjs::atom::PredefinedAtom;
use rquickjs::object::{Filter, Property};
use rquickjs::{Array, Atom, BigInt, Coerced, Ctx, Error, Function, Object, Type, Value};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// A document as a JavaScript value. Fails only where the engine has no memory left; its exception is then pending.
pub fn to_js<'js>(ctx: &Ctx<'js>, json: &Json) -> Result<Value<'js>, Error> {
    let text = json.as_str();
    if has_long_number(text.as_bytes()) {
        let mut reader = serde_json::Deserializer::from_str(text);
        return Build(ctx).deserialize(&mut reader).map_err(|_| Error::Exception);
    }
    // One byte more than the text, for the terminator that the engine wants.
    let mut bytes = Vec::with_capacity(text.len() + 1);
    bytes.extend_from_slice(text.as_bytes());
    ctx.json_parse(bytes)
}

/// Whether the text may hold an integer beyond 2^53-1: whether 16 digits follow one another anywhere.
///
/// Every run of 16 bytes covers one of the places looked at, so most bytes are not read.
fn has_long_number(text: &[u8]) -> bool {
    const DIGITS: usize = 16;
    (DIGITS - 1..text.len()).step_by(DIGITS).any(|at| {
        let is_digit = |byte: &&u8| byte.is_ascii_digit();
        let before = text[..at].iter().rev().take(DIGITS).take_while(is_digit).count();
        text[at].is_ascii_digit() && before + text[at..].iter().take(DIGITS).take_while(is_digit).count() >= DIGITS
    })
}

/// Builds the value that is read, member by member.
#[derive(Clone, Copy)]
struct Build<'a, 'js>(&'a Ctx<'js>);

impl<'de, 'js> DeserializeSeed<'de> for Build<'_, 'js> {
    type Value = Value<'js>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value<'js>, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de, 'js> Visitor<'de> for Build<'_, 'js> {
    type Value = Value<'js>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Value<'js>, E> {
        Ok(Value::new_null(self.0.clone()))
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Value<'js>, E> {
        Ok(Value::new_bool(self.0.clone(), value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Value<'js>, E> {
        if value.unsigned_abs() <= SAFE_INTEGER_MAX as u64 {
            return self.visit_f64(value as f64);
        }
        BigInt::from_i64(self.0.clone(), value).map(BigInt::into_value).map_err(E::custom)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Value<'js>, E> {
        if value <= SAFE_INTEGER_MAX as u64 {
            return self.visit_f64(value as f64);
        }
        BigInt::from_u64(self.0.clone(), value).map(BigInt::into_value).map_err(E::custom)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value<'js>, E> {
        Ok(Value::new_number(self.0.clone(), value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value<'js>, E> {
        rquickjs::String::from_str(self.0.clone(), value).map(rquickjs::String::into_value).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Value<'js>, A::Error> {
        let array = Array::new(self.0.clone()).map_err(serde::de::Error::custom)?;
        let mut index = 0;
        while let Some(element) = elements.next_element_seed(self)? {
            array.set(index, element).map_err(serde::de::Error::custom)?;
            index += 1;
        }
        Ok(array.into_value())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value<'js>, A::Error> {
        let object = Object::new(self.0.clone()).map_err(serde::de::Error::custom)?;
        while let Some(key) = members.next_key::<std::borrow::Cow<'de, str>>()? {
            let member = members.next_value_seed(self)?;
            let atom = Atom::from_str(self.0.clone(), &key).map_err(serde::de::Error::custom)?;
            // Defined, not set: a key such as "__proto__" or "constructor" is data.
            let property = Property::from(member).writable().enumerable().configurable();
            object.prop(atom, property).map_err(serde::de::Error::custom)?;
        }
        Ok(object.into_value())
    }
}

/// Why a value could not be written.
#[derive(Debug)]
pub enum WriteError {
    /// It is no JSON, and where.
    Invalid(SchemaError),
    /// Script that ran on the way threw, or the engine broke; see the context.
    Engine(Error),
    /// Its text is longer than allowed.
    TooLarge,
    /// The command has used up its time.
    Overrun,
}

impl From<Error> for WriteError {
    fn from(error: Error) -> WriteError {
        WriteError::Engine(error)
    }
}

/// What writing gives.
pub type Written<T> = Result<T, WriteError>;

fn invalid<T>(message: impl Into<String>) -> Written<T> {
    Err(WriteError::Invalid(SchemaError { pointer: String::new(), message: message.into() }))
}

/// Puts one more step in front of the pointer of an error on its way up.
fn under<T>(written: Written<T>, step: impl fmt::Display) -> Written<T> {
    written.map_err(|error| match error {
        WriteError::Invalid(SchemaError { pointer, message }) => {
            let step = step.to_string().replace('~', "~0").replace('/', "~1");
            WriteError::Invalid(SchemaError { pointer: format!("/{step}{pointer}"), message })
        }
        other => other,
    })
}

/// Writes JavaScript values as canonical text.
pub struct Writer<'a, 'js> {
    /// The prelude's function that takes the primitive out of a wrapper.
    pub unbox: &'a Function<'js>,
    /// `Object.prototype`: what a plain object inherits from.
    pub plain: &'a Object<'js>,
    /// The function that gives what a recording proxy stands for, and nothing for any other; none where nothing is recorded.
    pub unwrap: Option<&'a Function<'js>>,
    /// Where the text goes.
    pub out: &'a mut String,
    /// The longest text.
    pub bytes_max: usize,
    /// Whether the command has used up its time.
    pub is_overrun: &'a dyn Fn() -> bool,
}

impl<'js> Writer<'_, 'js> {
    /// Writes one document. `undefined`, functions and symbols are no documents.
    pub fn document(&mut self, value: Value<'js>) -> Written<()> {
        if self.value(value, Key::None, 0)? { Ok(()) } else { invalid("undefined, functions and symbols are no JSON") }
    }

    /// Writes a value that stands at `key` inside a document, `depth` levels below its top. False, and nothing, where JSON leaves it out.
    pub fn member(&mut self, value: Value<'js>, key: Key<'_>, depth: usize) -> Written<bool> {
        self.value(value, key, depth)
    }

    /// Writes a value, or nothing (false) where JSON leaves it out.
    fn value(&mut self, value: Value<'js>, key: Key<'_>, depth: usize) -> Written<bool> {
        if (self.is_overrun)() {
            return Err(WriteError::Overrun);
        }
        if self.out.len() > self.bytes_max {
            return Err(WriteError::TooLarge);
        }
        match value.type_of() {
            Type::Null => self.out.push_str("null"),
            Type::Bool => self.out.push_str(if value.as_bool() == Some(true) { "true" } else { "false" }),
            Type::Int => self.out.push_str(itoa::Buffer::new().format(value.as_int().unwrap_or_default())),
            Type::Float => {
                let number = value.as_float().unwrap_or(f64::NAN);
                if !write_f64(self.out, number) {
                    let name = if number.is_nan() {
                        "NaN"
                    } else if number > 0.0 {
                        "Infinity"
                    } else {
                        "-Infinity"
                    };
                    return invalid(format!("{name} is no JSON"));
                }
            }
            Type::String => write_string(self.out, &text(&value)?),
            Type::BigInt => self.big_int(value)?,
            Type::Array | Type::Object | Type::Exception => return self.nested(value, key, depth),
            // The engine does not tell whether it stands for an array.
            Type::Proxy => {
                if let Some(unwrap) = self.unwrap {
                    let recorded: Value<'js> = unwrap.call((value,))?;
                    if recorded.is_object() {
                        return self.nested(recorded, key, depth);
                    }
                }
                return invalid("a Proxy is no JSON; copy it into a plain object or an array");
            }
            Type::Promise => return invalid("a promise is no JSON; handlers run to their end without waiting"),
            Type::Undefined | Type::Uninitialized | Type::Symbol | Type::Function | Type::Constructor => return Ok(false),
            Type::Module | Type::Unknown => return invalid("an internal value is no JSON"),
        }
        Ok(true)
    }

    fn big_int(&mut self, value: Value<'js>) -> Written<()> {
        let Coerced(digits) = value.get::<Coerced<String>>()?;
        if digits.parse::<i64>().is_err() && digits.parse::<u64>().is_err() {
            return invalid("an integer beyond 64 bits is no JSON here");
        }
        self.out.push_str(&digits);
        Ok(())
    }

    fn nested(&mut self, value: Value<'js>, key: Key<'_>, depth: usize) -> Written<bool> {
        let Some(object) = value.as_object() else { return invalid("an internal value is no JSON") };
        if depth == DEPTH_MAX {
            return invalid(format!("nested deeper than {DEPTH_MAX} levels, or a part of itself"));
        }
        let to_json: Value<'js> = object.get(PredefinedAtom::ToJSON)?;
        if let Some(to_json) = to_json.as_function() {
            let shown: Value<'js> = to_json.call((rquickjs::function::This(object.clone()), key.to_string()))?;
            // What `toJSON` gives is shown as it is: its own `toJSON` is not asked.
            return match shown.type_of() {
                Type::Array | Type::Object | Type::Exception => self.container(shown, depth),
                _ => self.value(shown, key, depth),
            };
        }
        self.container(value, depth)
    }

    fn container(&mut self, value: Value<'js>, depth: usize) -> Written<bool> {
        let Some(object) = value.as_object() else { return invalid("an internal value is no JSON") };
        if value.is_array() {
            self.array(object, depth)?;
            return Ok(true);
        }
        if object.get_prototype().is_some_and(|prototype| prototype != *self.plain) {
            let shown: Value<'js> = self.unbox.call((object.clone(),))?;
            if shown.is_undefined() {
                return invalid("a Map or Set holds nothing that JSON shows; use a plain object or an array");
            }
            if !shown.is_object() {
                return self.value(shown, Key::None, depth);
            }
        }
        self.object(object, depth)?;
        Ok(true)
    }

    fn array(&mut self, array: &Object<'js>, depth: usize) -> Written<()> {
        let length: f64 = array.get(PredefinedAtom::Length)?;
        self.out.push('[');
        let mut index = 0_u32;
        while f64::from(index) < length {
            if index > 0 {
                self.out.push(',');
            }
            let element: Value<'js> = array.get(index)?;
            if !under(self.value(element, Key::Index(index), depth + 1), index)? {
                self.out.push_str("null");
            }
            index += 1;
        }
        self.out.push(']');
        Ok(())
    }

    fn object(&mut self, object: &Object<'js>, depth: usize) -> Written<()> {
        let mut keys = Vec::new();
        let mut is_sorted = true;
        for atom in object.own_keys::<Atom<'js>>(Filter::default()) {
            let atom = atom?;
            let key = match text(&atom.to_value()?) {
                Err(WriteError::Invalid(_)) => return invalid("a key holds half of a surrogate pair"),
                other => other?,
            };
            is_sorted = is_sorted && keys.last().is_none_or(|(last, _)| *last < key);
            keys.push((key, atom));
        }
        if !is_sorted {
            keys.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.out.push('{');
        let mut is_first = true;
        for (key, atom) in keys {
            let member: Value<'js> = object.get(atom)?;
            let start = self.out.len();
            if !is_first {
                self.out.push(',');
            }
            write_string(self.out, &key);
            self.out.push(':');
            if under(self.value(member, Key::Name(&key), depth + 1), &key)? {
                is_first = false;
            } else {
                self.out.truncate(start);
            }
        }
        self.out.push('}');
        Ok(())
    }
}

/// The text of a string value.
fn text(value: &Value<'_>) -> Written<String> {
    let Some(string) = value.as_string() else { return invalid("an internal value is no JSON") };
    match string.to_string() {
        Ok(text) => Ok(text),
        Err(Error::Utf8(_)) => invalid("a string holds half of a surrogate pair"),
        Err(error) => Err(WriteError::Engine(error)),
    }
}

/// Under which key a value stands, as `toJSON` is told.
#[derive(Clone, Copy)]
pub enum Key<'a> {
    /// Under none.
    None,
    /// A place in an array.
    Index(u32),
    /// A key of an object.
    Name(&'a str),
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::None => Ok(()),
            Key::Index(index) => index.fmt(f),
            Key::Name(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests;
