//! JSON Schema 2020-12, compiled once and checked per document.
//!
//! References stay inside the schema: nothing is fetched. `pattern` runs on an engine whose time is linear in the text, so
//! look-around and back-references are refused when the schema is loaded. `format` is an annotation, as the standard has it
//! by default; use `pattern` where a text must be checked.

use crate::core::Json;
use crate::core::batch::SchemaError;
use jsonschema::{Draft, PatternOptions, ValidationError, Validator};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The most errors told about one document.
const ERRORS_MAX: usize = 20;
/// The longest text of one error, in characters: it may quote the document.
const MESSAGE_MAX: usize = 300;

/// A compiled schema.
#[derive(Debug)]
pub struct Schema {
    whole: Validator,
    source: Value,
    /// Whether each part of the schema means the same by itself, with `$defs` beside it.
    is_local: bool,
    /// Validators of parts of the schema, by their place in it; none where a part cannot be compiled by itself.
    parts: Mutex<BTreeMap<String, Option<Arc<Validator>>>>,
}

/// One step of a path into a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// To the member of an object.
    Key(String),
    /// To the element of an array.
    Index(usize),
}

impl Step {
    /// Appends it to a JSON pointer.
    pub fn write_pointer(&self, pointer: &mut String) {
        pointer.push('/');
        match self {
            Step::Key(name) => pointer.push_str(&name.replace('~', "~0").replace('/', "~1")),
            Step::Index(index) => pointer.push_str(&index.to_string()),
        }
    }
}

/// A change of one member or element of a container.
#[derive(Debug, Clone, Copy)]
pub enum Edit<'a> {
    /// It is there now, with the given JSON text.
    Put(&'a Step, &'a str),
    /// It is gone. Elements after it have moved up.
    Remove(&'a Step),
}

impl Schema {
    /// Compiles a schema; on error, what is wrong at which part of the schema.
    pub fn compile(schema: &Json) -> Result<Schema, SchemaError> {
        let value: serde_json::Value = schema.parse().map_err(|error| SchemaError { pointer: String::new(), message: error.to_string() })?;
        if let Some(draft) = value.get("$schema").filter(|draft| draft.as_str().map(|name| name.trim_end_matches('#')) != Some(DRAFT)) {
            return Err(SchemaError { pointer: "/$schema".into(), message: format!("{draft} is not supported; only {DRAFT} is") });
        }
        options().build(&value).map_err(|error| schema_error(&error)).map(|whole| Schema {
            whole,
            is_local: is_local(&value, true),
            source: value,
            parts: Mutex::default(),
        })
    }

    /// Checks a document; on error, the first of its faults, each with a JSON pointer.
    pub fn check(&self, document: &Json) -> Result<(), Vec<SchemaError>> {
        let value: serde_json::Value = document.parse().map_err(|error| vec![SchemaError { pointer: String::new(), message: error.to_string() }])?;
        if self.whole.is_valid(&value) {
            return Ok(());
        }
        Err(self.whole.iter_errors(&value).take(ERRORS_MAX).map(|error| schema_error(&error)).collect())
    }
}

impl Schema {
    /// Whether a document that was valid surely still is, after a change of the container at `path`. False says nothing: [`Schema::check`] does.
    ///
    /// Takes as long as checking the new value. Sure only where everything that the schema says of the containers on the way is said of each
    /// member by itself.
    pub fn stays_valid(&self, path: &[Step], edit: Edit<'_>) -> bool {
        if !self.is_local {
            return false;
        }
        let mut place = String::new();
        let mut here = &self.source;
        for step in path {
            here = match self.descend(here, step, &mut place) {
                Descent::To(part) => part,
                Descent::Anything => return true,
                Descent::Unsure => return false,
            };
        }
        match edit {
            Edit::Remove(step) => {
                let Some(container) = self.container(here, &mut place) else { return *here == Value::Bool(true) };
                let required = container.get("required").and_then(Value::as_array);
                match step {
                    Step::Index(_) => true,
                    Step::Key(name) => !required.is_some_and(|names| names.iter().any(|required| required.as_str() == Some(name))),
                }
            }
            Edit::Put(step, text) => match self.descend(here, step, &mut place) {
                Descent::Anything => true,
                Descent::Unsure => false,
                Descent::To(part) => {
                    let validator = self.part(part, place);
                    validator.is_some_and(|validator| serde_json::from_str(text).is_ok_and(|value| validator.is_valid(&value)))
                }
            },
        }
    }

    /// The part of the schema that says all there is to say of a member of a container of which `here` says all.
    fn descend<'a>(&'a self, here: &'a Value, step: &Step, place: &mut String) -> Descent<'a> {
        if *here == Value::Bool(true) {
            return Descent::Anything;
        }
        let Some(container) = self.container(here, place) else { return Descent::Unsure };
        let part = match step {
            Step::Index(_) => container.get("items").map(|part| ("items", part)),
            Step::Key(name) => match container.get("properties").and_then(|properties| properties.get(name)) {
                Some(part) => {
                    place.push_str("/properties");
                    step.write_pointer(place);
                    return Descent::To(part);
                }
                None => container.get("additionalProperties").map(|part| ("additionalProperties", part)),
            },
        };
        match part {
            None => Descent::Anything,
            Some((keyword, part)) => {
                place.push('/');
                place.push_str(keyword);
                Descent::To(part)
            }
        }
    }

    /// A schema's keywords, where all of them speak of members one by one, or of what no change of a member changes.
    fn container<'a>(&'a self, mut here: &'a Value, place: &mut String) -> Option<&'a Map<String, Value>> {
        // A chain of references that is longer goes round in circles.
        for _ in 0..8 {
            let keywords = here.as_object()?;
            let Some(reference) = keywords.get("$ref") else {
                return keywords.keys().all(|keyword| LOCAL.contains(&keyword.as_str()) || ANNOTATIONS.contains(&keyword.as_str())).then_some(keywords);
            };
            if !keywords.keys().all(|keyword| keyword == "$ref" || ANNOTATIONS.contains(&keyword.as_str())) {
                return None;
            }
            let pointer = reference.as_str()?.strip_prefix('#')?;
            here = self.source.pointer(pointer)?;
            pointer.clone_into(place);
        }
        None
    }

    /// The validator of a part of the schema.
    fn part(&self, part: &Value, place: String) -> Option<Arc<Validator>> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = parts.get(&place) {
            return known.clone();
        }
        let mut alone = Map::from_iter([("allOf".to_owned(), Value::Array(vec![part.clone()]))]);
        if let Some(definitions) = self.source.get("$defs") {
            alone.insert("$defs".to_owned(), definitions.clone());
        }
        let validator = options().build(&Value::Object(alone)).ok().map(Arc::new);
        parts.insert(place, validator.clone());
        validator
    }
}

/// Where a step leads in a schema.
enum Descent<'a> {
    To(&'a Value),
    /// Nothing is said of what is there.
    Anything,
    /// More is said than one place tells.
    Unsure,
}

/// Keywords that say something of the members of a container one by one, or of nothing that changes with them.
const LOCAL: &[&str] = &["type", "properties", "additionalProperties", "items", "required"];
/// Keywords that demand nothing.
const ANNOTATIONS: &[&str] = &["$schema", "$comment", "$defs", "title", "description", "default", "examples", "format", "deprecated", "readOnly", "writeOnly"];

/// Whether all references in a schema lead into the `$defs` of its top, and nothing changes what they mean.
fn is_local(schema: &Value, is_top: bool) -> bool {
    match schema {
        Value::Object(members) => members.iter().all(|(name, member)| {
            let is_harmless = match name.as_str() {
                "$ref" => member.as_str().is_some_and(|target| target.starts_with("#/$defs/") && !target.contains('%')),
                "$schema" => is_top,
                name => !name.starts_with('$') || ["$defs", "$comment"].contains(&name),
            };
            is_harmless && is_local(member, false)
        }),
        Value::Array(elements) => elements.iter().all(|element| is_local(element, false)),
        _ => true,
    }
}

fn options() -> jsonschema::ValidationOptions<'static> {
    jsonschema::options().with_draft(Draft::Draft202012).with_pattern_options(PatternOptions::regex()).should_validate_formats(false).offline()
}

const DRAFT: &str = "https://json-schema.org/draft/2020-12/schema";

fn schema_error(error: &ValidationError<'_>) -> SchemaError {
    let mut message = error.to_string();
    if let Some((end, _)) = message.char_indices().nth(MESSAGE_MAX) {
        message.truncate(end);
        message.push('…');
    }
    SchemaError { pointer: error.instance_path().to_string(), message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Json {
        Json::canonical(text.as_bytes()).unwrap()
    }

    #[test]
    fn documents_are_checked_with_pointers() {
        let schema = Schema::compile(&json(
            r##"{"type":"object","properties":{"a":{"type":"integer"},"b":{"items":{"$ref":"#/$defs/word"}}},
                 "required":["a"],"additionalProperties":false,"$defs":{"word":{"pattern":"^[a-z]+$"}}}"##,
        ))
        .unwrap();
        for (document, pointers) in [
            (r#"{"a":1,"b":["x"]}"#, vec![]),
            (r#"{"a":18446744073709551615}"#, vec![]),
            (r#"{"a":1.5}"#, vec!["/a"]),
            ("{}", vec![""]),
            (r#"{"a":1,"b":["x","Y"]}"#, vec!["/b/1"]),
            (r#"{"a":"x","c":1}"#, vec!["", "/a"]),
        ] {
            let mut found: Vec<String> = schema.check(&json(document)).err().unwrap_or_default().into_iter().map(|error| error.pointer).collect();
            found.sort();
            assert_eq!(found, pointers, "{document}");
        }
    }

    #[test]
    fn errors_are_bounded() {
        let schema = Schema::compile(&json(r#"{"items":{"type":"integer"}}"#)).unwrap();
        let errors = schema.check(&json(&format!("[{}1]", format!("\"{}\",", "x".repeat(1000)).repeat(100)))).unwrap_err();
        assert_eq!(errors.len(), ERRORS_MAX);
        assert!(errors.iter().all(|error| error.message.chars().count() <= MESSAGE_MAX + 1));
    }

    /// A path and a key below it as a pointer.
    fn stays_valid(schema: &Schema, pointer: &str, value: Option<&str>) -> bool {
        let step = |part: &str| part.parse().map_or_else(|_| Step::Key(part.replace("~1", "/").replace("~0", "~")), Step::Index);
        let steps: Vec<Step> = pointer.split('/').skip(1).map(step).collect();
        let (last, path) = steps.split_last().unwrap();
        schema.stays_valid(path, value.map_or(Edit::Remove(last), |text| Edit::Put(last, text)))
    }

    #[test]
    fn changes_are_checked_by_the_part_of_the_schema_that_is_about_them() {
        let schema = Schema::compile(&json(
            r##"{"type":"object","title":"t","properties":{"a":{"type":"integer"},"words":{"type":"array","items":{"$ref":"#/$defs/word"}},
                 "by/name":{"additionalProperties":{"$ref":"#/$defs/person"},"type":"object"},"few":{"maxItems":3,"items":true},"free":true,
                 "either":{"anyOf":[{"required":["x"]},{"required":["y"]}]}},
                 "required":["a"],"additionalProperties":false,"$defs":{"word":{"pattern":"^[a-z]+$"},
                 "person":{"properties":{"age":{"minimum":0},"boss":{"$ref":"#/$defs/person"}},"required":["age"]}}}"##,
        ))
        .unwrap();
        for (pointer, value, expected) in [
            ("/a", Some("1"), true),
            ("/a", Some("1.5"), false),
            ("/a", None, false),
            ("/words", None, true),
            ("/words", Some(r#"["x","Y"]"#), false),
            ("/words/7", Some(r#""x""#), true),
            ("/words/7", Some(r#""X""#), false),
            ("/words/7", None, true),
            ("/by~1name/bob", Some(r#"{"age":1}"#), true),
            ("/by~1name/bob", Some("{}"), false),
            ("/by~1name/bob", None, true),
            ("/by~1name/bob/age", None, false),
            ("/by~1name/bob/boss/boss/age", Some("-1"), false),
            ("/by~1name/bob/boss/boss/age", Some("1"), true),
            ("/by~1name/bob/boss/boss/hat", Some("1"), true),
            ("/few/0", Some("1"), false),
            ("/few", Some("[1,2,3]"), true),
            ("/free/x/y", Some("1"), true),
            ("/free/x", None, true),
            ("/either/x", None, false),
            ("/either/x", Some("1"), false),
            ("/either", Some(r#"{"y":1}"#), true),
            ("/other", Some("1"), false),
        ] {
            assert_eq!(stays_valid(&schema, pointer, value), expected, "{pointer} {value:?}");
        }
        for foreign in
            [r##"{"properties":{"a":{"$ref":"#"}}}"##, r##"{"properties":{"a":{"$ref":"#/properties/b"},"b":true}}"##, r#"{"$id":"https://x.test/"}"#]
        {
            assert!(!stays_valid(&Schema::compile(&json(foreign)).unwrap(), "/c", Some("1")), "{foreign}");
        }
        for (boolean, expected) in [("true", true), ("false", false)] {
            let schema = Schema::compile(&json(boolean)).unwrap();
            assert_eq!((stays_valid(&schema, "/a", Some("1")), stays_valid(&schema, "/a", None)), (expected, expected));
        }
    }

    mod properties {
        use super::*;
        use proptest::prelude::*;
        use serde_json::json;

        fn leaf() -> impl Strategy<Value = Value> {
            prop_oneof![
                Just(json!(null)),
                (0..4).prop_map(|n| json!(n)),
                Just(json!(1.5)),
                "[ab]{0,2}".prop_map(|text| json!(text)),
                any::<bool>().prop_map(|b| json!(b))
            ]
        }

        fn key() -> impl Strategy<Value = String> {
            prop::sample::select(vec!["a", "b", "c", "/~"]).prop_map(str::to_owned)
        }

        fn document() -> impl Strategy<Value = Value> {
            leaf().prop_recursive(4, 24, 4, |inner| {
                prop_oneof![
                    prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                    prop::collection::btree_map(key(), inner, 0..4).prop_map(|members| Value::Object(members.into_iter().collect())),
                ]
            })
        }

        fn schema() -> impl Strategy<Value = Value> {
            let simple = prop_oneof![
                Just(json!(true)),
                Just(json!({})),
                prop::sample::select(vec!["integer", "string", "object", "array", "null"]).prop_map(|name| json!({ "type": name })),
                Just(json!({"minimum": 1})),
                Just(json!({"$ref": "#/$defs/d"})),
                Just(json!({"$ref": "#/$defs/d", "title": "x"})),
            ];
            simple.prop_recursive(4, 24, 4, |inner| {
                let keyword = prop_oneof![
                    6 => prop::collection::btree_map(key(), inner.clone(), 0..3).prop_map(|parts| ("properties", json!(parts))),
                    3 => inner.clone().prop_map(|part| ("additionalProperties", part)),
                    3 => inner.clone().prop_map(|part| ("items", part)),
                    2 => prop::collection::vec(key(), 0..2).prop_map(|mut names| { names.dedup(); ("required", json!(names)) }),
                    1 => inner.clone().prop_map(|part| ("allOf", json!([part]))),
                    1 => inner.clone().prop_map(|part| ("not", part)),
                    1 => inner.clone().prop_map(|part| ("propertyNames", part)),
                    1 => inner.clone().prop_map(|part| ("contains", part)),
                    1 => inner.clone().prop_map(|part| ("patternProperties", json!({"a": part}))),
                    1 => (0..3).prop_map(|n| ("maxProperties", json!(n))),
                    1 => (0..3).prop_map(|n| ("minItems", json!(n))),
                    1 => Just(("uniqueItems", json!(true))),
                    1 => inner.clone().prop_map(|part| ("prefixItems", json!([part]))),
                    1 => inner.prop_map(|part| ("unevaluatedProperties", part)),
                    1 => Just(("dependentRequired", json!({"a": ["b"]}))),
                    2 => Just(("$ref", json!("#/$defs/d"))),
                ];
                prop::collection::vec(keyword, 0..4)
                    .prop_map(|keywords| Value::Object(keywords.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()))
            })
        }

        /// All containers of a document, as paths.
        fn containers(value: &Value, path: &mut Vec<Step>, found: &mut Vec<(Vec<Step>, Value)>) {
            let parts: Vec<(Step, &Value)> = match value {
                Value::Array(elements) => elements.iter().enumerate().map(|(index, part)| (Step::Index(index), part)).collect(),
                Value::Object(members) => members.iter().map(|(name, part)| (Step::Key(name.clone()), part)).collect(),
                _ => return,
            };
            found.push((path.clone(), value.clone()));
            for (step, part) in parts {
                path.push(step);
                containers(part, path, found);
                path.pop();
            }
        }

        proptest! {
            #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, max_global_rejects: 1 << 20, ..ProptestConfig::default() })]
            #[test]
            fn what_surely_stays_valid_is_valid(
                root in schema(), definition in schema(), document in document(), value in document(), name in key(), number in 0..64_usize, removes in any::<bool>(),
            ) {
                let mut root = root;
                if let Some(root) = root.as_object_mut() {
                    root.insert("$defs".into(), json!({ "d": definition }));
                }
                // A definition that is only a reference to itself is refused.
                let Ok(schema) = Schema::compile(&Json::from_serialize(&root).unwrap()) else { return Ok(()) };
                prop_assume!(schema.check(&Json::from_serialize(&document).unwrap()).is_ok());
                let mut found = Vec::new();
                containers(&document, &mut Vec::new(), &mut found);
                prop_assume!(!found.is_empty());
                let (path, container) = &found[number % found.len()];
                let mut pointer = String::new();
                path.iter().for_each(|step| step.write_pointer(&mut pointer));
                let mut after = document.clone();
                let text = value.to_string();
                let step = match (after.pointer_mut(&pointer).unwrap(), container) {
                    (Value::Object(members), _) => {
                        let step = Step::Key(name.clone());
                        if removes { members.remove(&name); } else { members.insert(name, value); }
                        step
                    }
                    (Value::Array(elements), _) => {
                        let index = number % (elements.len() + usize::from(!removes)).max(1);
                        if removes && index < elements.len() { elements.remove(index); } else if !removes { elements.insert(index, value); }
                        Step::Index(index)
                    }
                    _ => unreachable!("containers are arrays and objects"),
                };
                let edit = if removes { Edit::Remove(&step) } else { Edit::Put(&step, &text) };
                if schema.stays_valid(path, edit) {
                    let checked = schema.check(&Json::from_serialize(&after).unwrap());
                    prop_assert!(checked.is_ok(), "{} {:?}", after, checked);
                }
            }
        }
    }

    #[test]
    fn bad_schemas_are_refused_with_their_place() {
        for (schema, pointer) in [
            (r#"{"properties":{"a":{"type":"whole"}}}"#, "/properties/a/type"),
            (r#"{"required":"a"}"#, "/required"),
            (r#"{"properties":{"a":{"pattern":"("}}}"#, "/properties/a/pattern"),
            (r#"{"$schema":"http://json-schema.org/draft-07/schema#"}"#, "/$schema"),
        ] {
            let error = Schema::compile(&json(schema)).unwrap_err();
            assert_eq!(error.pointer, pointer, "{schema}: {}", error.message);
        }
        for schema in [
            r#"{"$ref":"https://example.com/other.json"}"#,
            r##"{"$ref":"#/$defs/missing"}"##,
            r#"{"$ref":"file:///etc/hostname"}"#,
            r#"{"pattern":"(a)\\1"}"#,
            r#"{"pattern":"(?<!a)b"}"#,
        ] {
            assert!(Schema::compile(&json(schema)).is_err(), "{schema}");
        }
    }
}
