//! Changes of documents, as JSON Patches (RFC 6902).
//!
//! A patched document is written canonically, so its text is the one that it would have had if it had been written as a whole.

use super::json::{DEPTH_MAX, Json, write_f64, write_string};
use json_patch::Patch;
use serde_json::{Number, Value};

/// A document that patches are applied to, one after another.
#[derive(Debug)]
pub struct Draft(Value);

/// A patch that does not fit its document, or is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a change does not fit its document: {0}")]
pub struct PatchError(String);

impl Draft {
    /// Starts from a document.
    pub fn new(document: &Json) -> Result<Draft, PatchError> {
        document.parse().map(Draft).map_err(error)
    }

    /// Applies a patch. Where it does not fit, the draft is of no more use.
    pub fn apply(&mut self, patch: &Json) -> Result<(), PatchError> {
        let patch: Patch = patch.parse().map_err(error)?;
        json_patch::patch_unsafe(&mut self.0, &patch).map_err(error)
    }

    /// The document as it is now. Fails where patches nested it deeper than [`DEPTH_MAX`].
    pub fn text(&self) -> Result<Json, PatchError> {
        let mut out = String::new();
        write(&mut out, &self.0, DEPTH_MAX)?;
        Ok(Json::trusted(out))
    }
}

impl PatchError {
    /// Whoever made the patches told another length of the whole text than it has: their documents are not the same.
    pub fn length(told: usize, is: usize) -> PatchError {
        PatchError(format!("the text should take {told} bytes and takes {is}"))
    }
}

/// Writes a value canonically in one pass: large documents are written once for every version that is read. `depth` is how much deeper it may nest.
fn write(out: &mut String, value: &Value, depth: usize) -> Result<(), PatchError> {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(out, number)?,
        Value::String(text) => write_string(out, text),
        Value::Array(elements) => {
            let depth = deeper(depth)?;
            out.push('[');
            for (at, element) in elements.iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                write(out, element, depth)?;
            }
            out.push(']');
        }
        Value::Object(members) => {
            let depth = deeper(depth)?;
            out.push('{');
            if members.keys().is_sorted() {
                write_members(out, members.iter(), depth)?;
            } else {
                // A program that embeds quokka may have chosen that serde_json keeps the order of insertion.
                let mut sorted: Vec<_> = members.iter().collect();
                sorted.sort_unstable_by_key(|(key, _)| *key);
                write_members(out, sorted.into_iter(), depth)?;
            }
            out.push('}');
        }
    }
    Ok(())
}

fn write_members<'a>(out: &mut String, members: impl Iterator<Item = (&'a String, &'a Value)>, depth: usize) -> Result<(), PatchError> {
    for (at, (key, value)) in members.enumerate() {
        if at > 0 {
            out.push(',');
        }
        write_string(out, key);
        out.push(':');
        write(out, value, depth)?;
    }
    Ok(())
}

fn write_number(out: &mut String, number: &Number) -> Result<(), PatchError> {
    if let Some(integer) = number.as_i64() {
        out.push_str(itoa::Buffer::new().format(integer));
    } else if let Some(integer) = number.as_u64() {
        out.push_str(itoa::Buffer::new().format(integer));
    } else if !number.as_f64().is_some_and(|float| write_f64(out, float)) {
        return Err(PatchError(format!("number outside the range of a 64-bit float: {number}")));
    }
    Ok(())
}

fn deeper(depth: usize) -> Result<usize, PatchError> {
    depth.checked_sub(1).ok_or_else(|| PatchError(format!("nested deeper than {DEPTH_MAX} levels")))
}

fn error(error: impl std::fmt::Display) -> PatchError {
    PatchError(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_patched_document_has_the_text_of_one_written_whole() {
        let mut draft = Draft::new(&Json::trusted(r#"{"a":1.5,"b":[1,2,{"c":9007199254740993}],"~/":null}"#)).unwrap();
        for (patch, expected) in [
            (r#"[]"#, r#"{"a":1.5,"b":[1,2,{"c":9007199254740993}],"~/":null}"#),
            (r#"[{"op":"replace","path":"/a","value":1e300}]"#, r#"{"a":1e300,"b":[1,2,{"c":9007199254740993}],"~/":null}"#),
            (r#"[{"op":"add","path":"/b/3","value":{"z":1,"y":-0.5}}]"#, r#"{"a":1e300,"b":[1,2,{"c":9007199254740993},{"y":-0.5,"z":1}],"~/":null}"#),
            (r#"[{"op":"remove","path":"/~0~1"},{"op":"remove","path":"/b/1"}]"#, r#"{"a":1e300,"b":[1,{"c":9007199254740993},{"y":-0.5,"z":1}]}"#),
            (r#"[{"op":"add","path":"/B","value":"ü\u0001"}]"#, r#"{"B":"ü\u0001","a":1e300,"b":[1,{"c":9007199254740993},{"y":-0.5,"z":1}]}"#),
            (r#"[{"op":"replace","path":"","value":[18446744073709551615]}]"#, "[18446744073709551615]"),
        ] {
            draft.apply(&Json::trusted(patch)).unwrap();
            assert_eq!(draft.text().unwrap().as_str(), expected, "{patch}");
        }
    }

    fn documents() -> impl Strategy<Value = Value> {
        let number = prop_oneof![
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            (-1e19..1e19_f64).prop_map(|float| Value::from(float.trunc())),
            Just(Value::from(-0.0)),
        ];
        let text = "[a~/\"\\\\\u{0}-\u{1f}\u{7f}\u{fc}\u{2028}\u{1f363}]{0,6}";
        let leaf = prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::from), number, text.prop_map(Value::from)];
        leaf.prop_recursive(5, 60, 6, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                proptest::collection::vec((text, inner), 0..6).prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// The text of a version may not depend on whether its row held it whole.
        #[test]
        fn any_document_has_its_canonical_text(document in documents()) {
            let canonical = Json::from_serialize(&document).unwrap();
            prop_assert_eq!(Draft(document).text().unwrap(), canonical.clone());
            prop_assert_eq!(Draft::new(&canonical).unwrap().text().unwrap(), canonical);
        }
    }

    #[test]
    fn a_document_nests_as_deep_as_any_other_and_no_deeper() {
        for (depth, fits) in [(DEPTH_MAX - 1, true), (DEPTH_MAX, false)] {
            let mut draft = Draft::new(&Json::trusted(r#"{"a":0}"#)).unwrap();
            let value = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
            draft.apply(&Json::trusted(format!(r#"[{{"op":"replace","path":"/a","value":{value}}}]"#))).unwrap();
            assert_eq!(draft.text().ok().map(|text| text.to_string()), fits.then(|| format!(r#"{{"a":{value}}}"#)), "{depth}");
        }
    }

    #[test]
    fn a_patch_that_does_not_fit_is_an_error() {
        for patch in [r#"[{"op":"replace","path":"/x","value":1}]"#, r#"[{"op":"remove","path":"/a/0"}]"#, r#"{"op":"remove"}"#, "null"] {
            let mut draft = Draft::new(&Json::trusted(r#"{"a":1}"#)).unwrap();
            assert!(draft.apply(&Json::trusted(patch)).is_err(), "{patch}");
        }
    }
}
