//! Tokens: opaque positions in the log, given to callers and taken back.
//!
//! A token names the log it belongs to by a keyed check over its content, so that a forged one, and one from another
//! database, are told apart from a good one. Answers carry tokens and are kept for ever, byte for byte: a format that
//! was once given out must never change; a new one takes a new first byte.

use super::ids::EntityType;
use super::shard::{Partition, ShardId};
use data_encoding::BASE64URL_NOPAD;
use sha2::{Digest, Sha256};

const PREFIX: &str = "s_";
const FORMAT_POSITION: u8 = 1;
const CHECK_LENGTH: usize = 6;

/// What makes a database's log itself: drawn at random when the database is first used, and kept secret.
#[derive(Clone, PartialEq, Eq)]
pub struct LogIdentity([u8; 32]);

impl LogIdentity {
    /// From the bytes that the database holds.
    pub fn new(secret: [u8; 32]) -> LogIdentity {
        LogIdentity(secret)
    }

    /// A value that only this log can make of these parts; `purpose` keeps the uses apart.
    pub fn derive(&self, purpose: &str, parts: &[&[u8]]) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for part in std::iter::once(&purpose.as_bytes()).chain(parts) {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        hash.finalize().into()
    }
}

/// Shows nothing of the secret.
impl std::fmt::Debug for LogIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LogIdentity(..)")
    }
}

/// Right after one event of one partition: what the token in a command's answer stands for.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Position {
    /// The event's partition.
    pub partition: Partition,
    /// The event's id in it.
    pub event_id: u64,
}

/// Why a token is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the token was not made by this database")]
pub struct TokenError;

impl Position {
    /// The position as a token.
    pub fn token(&self, log: &LogIdentity) -> String {
        let mut content = vec![FORMAT_POSITION];
        content.extend_from_slice(&self.partition.shard.0.to_be_bytes());
        let event_id = self.event_id.to_be_bytes();
        content.extend(event_id.iter().skip_while(|byte| **byte == 0));
        content.push(0);
        // The separator above is found from the right: names hold no zero byte.
        content.extend_from_slice(self.partition.entity_type.as_str().as_bytes());
        seal(log, content)
    }

    /// Reads a token that this log gave out.
    pub fn read(token: &str, log: &LogIdentity) -> Result<Position, TokenError> {
        Position::parse(token, log).ok_or(TokenError)
    }

    fn parse(token: &str, log: &LogIdentity) -> Option<Position> {
        let content = unseal(token, log)?;
        let (&[format, high, low], rest) = content.split_first_chunk::<3>()?;
        let name_at = rest.iter().rposition(|byte| *byte == 0)?;
        if format != FORMAT_POSITION || name_at > 8 {
            return None;
        }
        let event_id = rest[..name_at].iter().fold(0_u64, |id, byte| id << 8 | u64::from(*byte));
        let name = std::str::from_utf8(&rest[name_at + 1..]).ok()?;
        let partition = Partition { entity_type: EntityType::new(name).ok()?, shard: ShardId(u16::from_be_bytes([high, low])) };
        Some(Position { partition, event_id })
    }
}

/// The content as a token of this log. Its first byte is the format.
pub(super) fn seal(log: &LogIdentity, mut content: Vec<u8>) -> String {
    let check = check(log, &content);
    content.extend_from_slice(&check);
    let mut token = String::with_capacity(PREFIX.len() + BASE64URL_NOPAD.encode_len(content.len()));
    token.push_str(PREFIX);
    BASE64URL_NOPAD.encode_append(&content, &mut token);
    token
}

/// The content of a token that this log sealed.
pub(super) fn unseal(token: &str, log: &LogIdentity) -> Option<Vec<u8>> {
    let mut content = BASE64URL_NOPAD.decode(token.strip_prefix(PREFIX)?.as_bytes()).ok()?;
    let given = content.split_off(content.len().checked_sub(CHECK_LENGTH)?);
    (check(log, &content) == *given).then_some(content)
}

fn check(log: &LogIdentity, content: &[u8]) -> [u8; CHECK_LENGTH] {
    let mut check = [0; CHECK_LENGTH];
    check.copy_from_slice(&log.derive("token", &[content])[..CHECK_LENGTH]);
    check
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn position(name: &str, shard: u16, event_id: u64) -> Position {
        Position { partition: Partition { entity_type: EntityType::new(name).unwrap(), shard: ShardId(shard) }, event_id }
    }

    #[test]
    fn the_format_is_the_one_that_answers_hold() {
        let log = LogIdentity::new([7; 32]);
        let token = position("account", 12, 7).token(&log);
        assert_eq!(Position::read(&token, &log), Ok(position("account", 12, 7)));
        assert!(token.starts_with("s_AQAMBwBhY2NvdW50"), "{token}");
    }

    proptest! {
        #[test]
        fn tokens_read_back(name in "[a-p][a-z0-9_]{0,47}", shard in 0..4096_u16, event_id in any::<u64>()) {
            let log = LogIdentity::new([1; 32]);
            let position = position(&name, shard, event_id);
            prop_assert_eq!(Position::read(&position.token(&log), &log), Ok(position));
        }

        #[test]
        fn a_changed_or_foreign_token_is_refused(event_id in any::<u64>(), at in 2..20_usize, letter in "[a-z]") {
            let log = LogIdentity::new([1; 32]);
            let token = position("account", 3, event_id).token(&log);
            prop_assert_eq!(Position::read(&token, &LogIdentity::new([2; 32])), Err(TokenError));
            let mut forged = token.clone();
            forged.replace_range(at..at + 1, &letter);
            prop_assume!(forged != token);
            prop_assert_eq!(Position::read(&forged, &log), Err(TokenError));
        }
    }
}
