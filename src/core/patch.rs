//! Changes of documents, as JSON Patches (RFC 6902).
//!
//! A patched document is written canonically, so its text is the one that it would have had if it had been written as a whole.

use super::json::Json;
use json_patch::Patch;
use serde_json::Value;

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

    /// The document as it is now.
    pub fn text(&self) -> Result<Json, PatchError> {
        Json::from_serialize(&self.0).map_err(PatchError)
    }
}

impl PatchError {
    /// Whoever made the patches told another length of the whole text than it has: their documents are not the same.
    pub fn length(told: usize, is: usize) -> PatchError {
        PatchError(format!("the text should take {told} bytes and takes {is}"))
    }
}

fn error(error: impl std::fmt::Display) -> PatchError {
    PatchError(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_patch_that_does_not_fit_is_an_error() {
        for patch in [r#"[{"op":"replace","path":"/x","value":1}]"#, r#"[{"op":"remove","path":"/a/0"}]"#, r#"{"op":"remove"}"#, "null"] {
            let mut draft = Draft::new(&Json::trusted(r#"{"a":1}"#)).unwrap();
            assert!(draft.apply(&Json::trusted(patch)).is_err(), "{patch}");
        }
    }
}
