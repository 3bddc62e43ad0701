//! Identifiers as newtypes: whoever holds one knows that it keeps the rules. Nothing is ever cut, trimmed or folded.

use compact_str::CompactString;
use std::fmt;

/// An entity's version: 1 for its first event. 0 stands for "no event yet".
pub type Version = u64;

/// The longest entity id unless its type declares more.
pub const ENTITY_ID_DEFAULT_MAX: usize = 20;
/// The longest entity id that a type may declare.
pub const ENTITY_ID_LIMIT: usize = 64;
/// The longest command id.
pub const COMMAND_ID_MAX: usize = 256;
/// The longest name of an entity type, command or view.
pub const NAME_MAX: usize = 48;

/// Which rule an identifier breaks; the text is written for the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// Nothing given.
    #[error("{0} is empty")]
    Empty(&'static str),
    /// Longer than allowed.
    #[error("{what} is {length} characters long; at most {max} are allowed")]
    TooLong {
        /// Which identifier.
        what: &'static str,
        /// How long it is, in bytes.
        length: usize,
        /// How long it may be.
        max: usize,
    },
    /// A character outside the allowed set.
    #[error("{what} may hold only {allowed}; character {position} is something else")]
    Character {
        /// Which identifier.
        what: &'static str,
        /// The allowed characters, in words.
        allowed: &'static str,
        /// Which character, counted from 1.
        position: usize,
    },
    /// A name that quokka keeps for itself.
    #[error("{0} starts with \"quokka\", which is reserved")]
    Reserved(&'static str),
}

/// Checks length and characters; the position counts characters, so that it fits what the caller sees.
fn check(what: &'static str, text: &str, max: usize, allowed: &'static str, is_allowed: impl Fn(usize, char) -> bool) -> Result<(), IdError> {
    if text.is_empty() {
        return Err(IdError::Empty(what));
    }
    if let Some(position) = text.chars().enumerate().position(|(at, character)| !is_allowed(at, character)) {
        return Err(IdError::Character { what, allowed, position: position + 1 });
    }
    if text.len() > max {
        return Err(IdError::TooLong { what, length: text.len(), max });
    }
    Ok(())
}

fn check_name(what: &'static str, text: &str) -> Result<(), IdError> {
    check(what, text, NAME_MAX, "a lower-case letter followed by lower-case letters, digits and _", |at, character| match character {
        'a'..='z' => true,
        '0'..='9' | '_' => at > 0,
        _ => false,
    })?;
    if text.starts_with("quokka") {
        return Err(IdError::Reserved(what));
    }
    Ok(())
}

macro_rules! text_newtype {
    ($name:ident) => {
        impl $name {
            /// The identifier's text.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Takes a text that was checked before, such as a stored column; nothing is checked.
            pub fn trusted(text: &str) -> Self {
                Self(CompactString::new(text))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.0.as_str(), f)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

/// Name of an entity type: `[a-z][a-z0-9_]{0,47}`, not starting with `quokka`. Also its table's name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct EntityType(CompactString);
text_newtype!(EntityType);

impl EntityType {
    /// Checks a name.
    pub fn new(text: &str) -> Result<EntityType, IdError> {
        check_name("the entity type", text).map(|()| EntityType(CompactString::new(text)))
    }
}

/// Name of a command, by the same rule as an entity type.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct CommandName(CompactString);
text_newtype!(CommandName);

impl CommandName {
    /// Checks a name.
    pub fn new(text: &str) -> Result<CommandName, IdError> {
        check_name("the command name", text).map(|()| CommandName(CompactString::new(text)))
    }
}

/// An entity's id: `[0-9A-Za-z_-]`, compared byte for byte.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct EntityId(CompactString);
text_newtype!(EntityId);

impl EntityId {
    /// Checks an id against the longest one its type allows.
    pub fn new(text: &str, max: usize) -> Result<EntityId, IdError> {
        let allowed = "digits, letters without accents, _ and -";
        check("the entity id", text, max, allowed, |_, character| character.is_ascii_alphanumeric() || character == '_' || character == '-')?;
        Ok(EntityId(CompactString::new(text)))
    }
}

/// A command's id: 1 to 256 printable ASCII characters without spaces, compared byte for byte, scoped to one entity.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct CommandId(CompactString);
text_newtype!(CommandId);

impl CommandId {
    /// Checks an id.
    pub fn new(text: &str) -> Result<CommandId, IdError> {
        check("the command id", text, COMMAND_ID_MAX, "printable ASCII characters without spaces", |_, character| character.is_ascii_graphic())?;
        Ok(CommandId(CompactString::new(text)))
    }
}

/// The longest name of a node.
pub const NODE_ID_MAX: usize = 64;

/// A node's name: 1 to 64 letters, digits, `.`, `_` and `-`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct NodeId(CompactString);
text_newtype!(NodeId);

impl NodeId {
    /// Checks a name.
    pub fn new(text: &str) -> Result<NodeId, IdError> {
        check("the node's name", text, NODE_ID_MAX, "letters, digits, '.', '_' and '-'", |_, character| NodeId::allows(character))?;
        Ok(NodeId(CompactString::new(text)))
    }

    /// Whether a name may hold the character.
    pub fn allows(character: char) -> bool {
        character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_their_rule() {
        for (text, fine) in [
            ("account", true),
            ("a", true),
            ("a1_b", true),
            (&"a".repeat(48), true),
            (&"a".repeat(49), false),
            ("", false),
            ("1a", false),
            ("_a", false),
            ("Account", false),
            ("a-b", false),
            ("é", false),
            ("quokka", false),
            ("quokka_meta", false),
            ("my_quokka", true),
        ] {
            assert_eq!(EntityType::new(text).is_ok(), fine, "{text}");
            assert_eq!(CommandName::new(text).is_ok(), fine, "{text}");
        }
    }

    #[test]
    fn entity_ids_keep_their_rule_and_their_case() {
        for (text, max, error) in [
            ("c9v3", 20, None),
            (&*"a".repeat(20), 20, None),
            ("-_-", 20, None),
            ("", 20, Some("the entity id is empty")),
            (&*"a".repeat(21), 20, Some("the entity id is 21 characters long; at most 20 are allowed")),
            (&*"a".repeat(64), 64, None),
            (" a", 20, Some("the entity id may hold only digits, letters without accents, _ and -; character 1 is something else")),
            ("a\0", 20, Some("the entity id may hold only digits, letters without accents, _ and -; character 2 is something else")),
            ("é🍣", 20, Some("the entity id may hold only digits, letters without accents, _ and -; character 1 is something else")),
        ] {
            assert_eq!(EntityId::new(text, max).err().map(|error| error.to_string()).as_deref(), error, "{text}");
        }
        assert_ne!(EntityId::new("abc", 20), EntityId::new("ABC", 20));
    }

    #[test]
    fn command_ids_are_printable_ascii() {
        for (text, fine) in [
            ("pay-31", true),
            ("!~", true),
            ("a b", false),
            ("a ", false),
            ("", false),
            ("🍣", false),
            ("a\tb", false),
            (&"k".repeat(256), true),
            (&"k".repeat(257), false),
        ] {
            assert_eq!(CommandId::new(text).is_ok(), fine, "{text}");
        }
        assert_ne!(CommandId::new("k"), CommandId::new("K"));
    }
}
