//! What the server and its handler processes say to each other, over the process's standard input and output.
//!
//! The server sends one [`Message`] at a time: first [`Message::Load`], then batches. The process answers each with frames of
//! items, in order: one [`Report`] per module, or one [`crate::core::Outcome`] per task; the last frame says how it ended.
//! Frames are length-prefixed. Both ends are the same build, so the format needs no versions.

use crate::core::{CommandName, Creates, EntityType, Work};
use crate::handler::random::RandomKey;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// From the server.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message<'a> {
    /// Load modules; the first message, and sent only once.
    Load(Load),
    /// Run a batch.
    Run {
        /// Which module, by its place in [`Load::modules`].
        module: usize,
        /// When to tell of outcomes.
        flush: Flush,
        /// Which states stay in the process.
        keep: Keep,
        /// The batch.
        work: Cow<'a, Work>,
    },
}

/// When a process tells of outcomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flush {
    /// At the end of the batch, and every second.
    AtEnd,
    /// After each command, so that a crash tells which one is guilty.
    EachCommand,
}

/// Which states a process keeps as objects of its engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keep {
    /// None: every command reads its state from a text.
    Nothing,
    /// Large ones, with the names that the server gives them.
    Large(Vec<Named>),
}

/// The state of one entity of a batch, as a process keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// Its index in [`Work::entities`].
    pub entity: usize,
    /// The name of the state before the batch, which is not sent: the process has it, or answers [`End::Missing`].
    pub before: Option<u64>,
    /// The name of the state after the batch.
    pub after: u64,
}

/// All that a process needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Load {
    /// The process id of the server.
    pub parent: u32,
    /// Every source file: its path below the folder, and its text.
    pub files: BTreeMap<String, String>,
    /// The modules to load.
    pub modules: Vec<EntityType>,
    /// The most CPU time of a command.
    pub time_limit: Duration,
    /// The most bytes of JavaScript memory.
    pub memory_limit: usize,
    /// From which commands get random numbers.
    pub random: RandomKey,
    /// From how many bytes of text on a state is kept.
    pub resident_min: usize,
    /// How many calls of a command read their state anew once recording was of no use.
    pub plain_after_useless: u32,
}

/// What a module offers, or what is wrong with it.
pub type Report = Result<Manifest, Vec<Problem>>;

/// What a module offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Its commands.
    pub commands: BTreeMap<CommandName, Creates>,
    /// The longest entity id.
    pub entity_id_max: usize,
    /// The files it imports, directly or not.
    pub imports: BTreeSet<String>,
    /// Why it cannot be evaluated anew in the same realm, so that each command needs one of its own.
    pub slow: Option<Problem>,
}

/// One thing that is wrong in the sources of handlers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Problem {
    /// The file, below the folder; empty for the folder itself.
    pub file: String,
    /// Line and column, counted from 1, where known.
    pub place: Option<(u32, u32)>,
    /// What is wrong, for people.
    pub message: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.file)?;
        if let Some((line, column)) = self.place {
            write!(f, ":{line}:{column}")?;
        }
        if !self.file.is_empty() {
            f.write_str(": ")?;
        }
        f.write_str(&self.message)
    }
}

/// How an answer goes on after a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// More frames follow.
    More,
    /// All is done; the process waits for the next message.
    Done,
    /// The process must be replaced. Items that are missing were not started.
    UsedUp,
    /// The next item took too long and could not be stopped; the process is gone.
    Overran,
    /// The process does not have a state that it should have kept. Nothing was run; the process waits for the next message.
    Missing,
}

/// Bytes before the items of a frame from a process: length of the rest, end, number of items.
pub const HEADER: usize = 9;

impl End {
    /// The header of a frame.
    pub fn header(self, items: u32, bytes: usize) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&(bytes as u32).to_le_bytes());
        header[4] = match self {
            End::More => 0,
            End::Done => 1,
            End::UsedUp => 2,
            End::Overran => 3,
            End::Missing => 4,
        };
        header[5..].copy_from_slice(&items.to_le_bytes());
        header
    }

    /// Reads a header: end, number of items, and bytes that follow; none where it makes no sense.
    pub fn read(header: [u8; HEADER]) -> Option<(End, u32, usize)> {
        let [a, b, c, d, end, e, f, g, h] = header;
        let end = match end {
            0 => End::More,
            1 => End::Done,
            2 => End::UsedUp,
            3 => End::Overran,
            4 => End::Missing,
            _ => return None,
        };
        Some((end, u32::from_le_bytes([e, f, g, h]), u32::from_le_bytes([a, b, c, d]) as usize))
    }
}

/// A message as bytes, with its length in front.
pub fn frame(message: &Message<'_>) -> Result<Vec<u8>, postcard::Error> {
    let mut bytes = postcard::to_extend(message, vec![0; 4])?;
    let length = u32::try_from(bytes.len() - 4).map_err(|_| postcard::Error::SerializeBufferFull)?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    Ok(bytes)
}
