//! JSON Schema 2020-12, compiled once and checked per document.
//!
//! References stay inside the schema: nothing is fetched. `pattern` runs on an engine whose time is linear in the text, so
//! look-around and back-references are refused when the schema is loaded. `format` is an annotation, as the standard has it
//! by default; use `pattern` where a text must be checked.

use crate::core::Json;
use crate::core::batch::SchemaError;
use jsonschema::{Draft, PatternOptions, ValidationError, Validator};

/// The most errors told about one document.
const ERRORS_MAX: usize = 20;
/// The longest text of one error, in characters: it may quote the document.
const MESSAGE_MAX: usize = 300;

/// A compiled schema.
#[derive(Debug)]
pub struct Schema(Validator);

impl Schema {
    /// Compiles a schema; on error, what is wrong at which part of the schema.
    pub fn compile(schema: &Json) -> Result<Schema, SchemaError> {
        let value: serde_json::Value = schema.parse().map_err(|error| SchemaError { pointer: String::new(), message: error.to_string() })?;
        if let Some(draft) = value.get("$schema").filter(|draft| draft.as_str().map(|name| name.trim_end_matches('#')) != Some(DRAFT)) {
            return Err(SchemaError { pointer: "/$schema".into(), message: format!("{draft} is not supported; only {DRAFT} is") });
        }
        jsonschema::options()
            .with_draft(Draft::Draft202012)
            .with_pattern_options(PatternOptions::regex())
            .should_validate_formats(false)
            .offline()
            .build(&value)
            .map(Schema)
            .map_err(|error| schema_error(&error))
    }

    /// Checks a document; on error, the first of its faults, each with a JSON pointer.
    pub fn check(&self, document: &Json) -> Result<(), Vec<SchemaError>> {
        let value: serde_json::Value = document.parse().map_err(|error| vec![SchemaError { pointer: String::new(), message: error.to_string() }])?;
        if self.0.is_valid(&value) {
            return Ok(());
        }
        Err(self.0.iter_errors(&value).take(ERRORS_MAX).map(|error| schema_error(&error)).collect())
    }
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
