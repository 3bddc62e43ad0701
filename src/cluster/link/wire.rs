//! Frames: a length, then a message by postcard. Several may share a chunk, and one may be spread over several.

use crate::core::{Answer, CommandId, EntityId, EntityType, Replay};
use crate::partition::{Command, CommandError, WhenFull};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::time::Duration;

/// The longest message: more than any request or answer that the limits of the configuration allow.
const MESSAGE_MAX: usize = 32 << 20;
const LENGTH: usize = size_of::<u32>();

/// To the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub enum ToOwner<'a> {
    /// Run this.
    Command(Cow<'a, Ask>),
    /// What was this command answered?
    LookUp {
        /// Names the question.
        number: u64,
        /// How long the answer is waited for.
        timeout: Duration,
        /// The entity's type.
        entity_type: EntityType,
        /// The entity.
        entity_id: EntityId,
        /// The command.
        command_id: CommandId,
    },
    /// Are you there?
    Ping,
}

/// A command that is passed on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Ask {
    /// Names the question.
    pub number: u64,
    /// How long the answer is waited for.
    pub timeout: Duration,
    /// What to do where the queue is full.
    pub when_full: WhenFull,
    /// The W3C trace that the command belongs to.
    pub trace_id: Option<String>,
    /// The entity's type.
    pub entity_type: EntityType,
    /// The command.
    pub command: Command,
}

/// From the owner.
#[derive(Debug, Serialize, serde::Deserialize)]
pub enum FromOwner {
    /// What a command was answered.
    Answer {
        /// Which question.
        number: u64,
        /// The answer.
        result: Result<(Answer, Replay), CommandError>,
    },
    /// What a look-up found.
    Found {
        /// Which question.
        number: u64,
        /// The answer.
        result: Result<Option<Answer>, CommandError>,
    },
    /// The owner is there.
    Pong,
    /// The owner takes no more; what it has taken it still answers.
    Leaving,
    /// The owner cannot reach the database: whatever it has taken is better handled elsewhere.
    NoStorage,
}

/// Appends a message to a chunk.
pub fn write<T: Serialize>(chunk: &mut BytesMut, message: &T) -> Result<(), postcard::Error> {
    let start = chunk.len();
    chunk.put_u32(0);
    let writer = postcard::to_io(message, chunk.writer())?;
    let chunk = writer.into_inner();
    let length = u32::try_from(chunk.len() - start - LENGTH).map_err(|_| postcard::Error::SerializeBufferFull)?;
    chunk[start..start + LENGTH].copy_from_slice(&length.to_be_bytes());
    Ok(())
}

/// Puts messages together from chunks.
#[derive(Default)]
pub struct Reader(BytesMut);

/// What came is no message of this version of quokka.
#[derive(Debug, thiserror::Error)]
#[error("a message cannot be read")]
pub struct Unreadable;

impl Reader {
    /// Takes a chunk.
    pub fn take(&mut self, chunk: &Bytes) {
        self.0.extend_from_slice(chunk);
    }

    /// The next message that is whole.
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Unreadable> {
        let Some(length) = self.0.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MESSAGE_MAX {
            return Err(Unreadable);
        }
        if self.0.len() < LENGTH + length {
            self.0.reserve(LENGTH + length - self.0.len());
            return Ok(None);
        }
        self.0.advance(LENGTH);
        let message = self.0.split_to(length);
        postcard::from_bytes(&message).map(Some).map_err(|_| Unreadable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_wherever_the_chunks_end() {
        let look_up = |number| ToOwner::LookUp {
            number,
            timeout: Duration::from_millis(1500),
            entity_type: EntityType::trusted("account"),
            entity_id: EntityId::trusted("a"),
            command_id: CommandId::trusted("k"),
        };
        let mut sent = BytesMut::new();
        for message in [look_up(1), ToOwner::Ping, look_up(u64::MAX)] {
            write(&mut sent, &message).unwrap();
        }
        for size in [1, 2, 3, 5, 7, sent.len()] {
            let mut reader = Reader::default();
            let mut found = Vec::new();
            for chunk in sent.chunks(size) {
                reader.take(&Bytes::copy_from_slice(chunk));
                while let Some(message) = reader.next::<ToOwner<'_>>().unwrap() {
                    found.push(message);
                }
            }
            assert_eq!(found, [look_up(1), ToOwner::Ping, look_up(u64::MAX)], "chunks of {size}");
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let mut reader = Reader::default();
        reader.take(&Bytes::from_static(b"GET / HTTP/1.1\r\n"));
        assert!(reader.next::<ToOwner<'_>>().is_err());
        let mut reader = Reader::default();
        reader.take(&Bytes::from_static(&[0, 0, 0, 1, 99]));
        assert!(reader.next::<ToOwner<'_>>().is_err());
    }
}
