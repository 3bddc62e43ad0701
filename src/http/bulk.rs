//! Many commands in one request: lines in, lines out, in order, in constant memory.
//!
//! One half reads lines and submits them one after another, so that the commands of one entity keep their order; the
//! other half writes the answers in the order of the lines. Between them stand at most [`WINDOW`] commands of together
//! [`WINDOW_BYTES`]: when it is full, reading stops, and TCP tells the client. Answers that are ready together leave in one chunk; when the next one
//! is not ready, those before it are sent at once, so that a client may wait for an answer before it sends more.
//!
//! A bad line fails alone. When the client goes away the body of the answer is dropped, and both halves with it;
//! commands that were submitted still run.

use super::body::{Body, Chunk};
use super::commands::{self, Target};
use super::limits::RequestBody;
use super::problem::{Code, Problem};
use super::request::RequestId;
use super::{Shared, answers, cluster};
use crate::cluster::{Asker, Pending};
use crate::core::{CommandId, EntityId, EntityType, Json, Precondition, Version};
use crate::partition::{Command, WhenFull};
use bytes::{Buf, Bytes};
use futures_util::future::poll_immediate;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// The most commands of one request that wait for their answers.
const WINDOW: usize = 4096;
/// The most bytes of lines that wait for their answers; one line may be longer.
const WINDOW_BYTES: usize = 16 * 1024 * 1024;
/// Answers are sent when they are this many bytes, even where more are ready.
const CHUNK_BYTES: usize = 32 * 1024;
/// The most chunks that wait for the client to read them.
const CHUNKS: usize = 4;

/// Answers all lines of the body.
pub fn run(shared: Arc<Shared>, body: impl RequestBody, request_id: RequestId, headers: &HeaderMap) -> Response<Body> {
    let (chunks, sent) = mpsc::channel(CHUNKS);
    let headers = headers.clone();
    let task = tokio::spawn(async move {
        let asker = cluster::asker(&headers, request_id.trace_id());
        let (slots, waiting) = mpsc::channel(WINDOW);
        let bytes_left = Arc::new(Semaphore::new(WINDOW_BYTES));
        let reader = Reader { shared: &shared, request_id: &request_id, asker, slots, bytes_left };
        let writer = Writer { shared: &shared, request_id: &request_id, chunks, buffer: String::new() };
        tokio::join!(reader.run(body), writer.run(waiting));
    });
    let mut response = Response::new(Body::made(sent, task));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    response
}

/// The place of one line's answer.
enum Slot {
    /// Answered already.
    Failed(Problem),
    /// Submitted.
    Waiting(Box<Waiting>),
}

struct Waiting {
    pending: Pending,
    entity_type: EntityType,
    entity_id: EntityId,
    command_id: CommandId,
    /// The line's share of [`WINDOW_BYTES`].
    _bytes: OwnedSemaphorePermit,
}

/// The other half is gone: the client reads no more, or takes too long.
struct Gone;

struct Reader<'a> {
    shared: &'a Shared,
    request_id: &'a RequestId,
    asker: Asker<'a>,
    slots: mpsc::Sender<Slot>,
    bytes_left: Arc<Semaphore>,
}

impl Reader<'_> {
    /// Ends at the end of the body, when the client is silent for too long, or when nobody takes answers any more.
    async fn run(self, mut body: impl RequestBody) {
        let mut lines = Lines::new(self.shared.options.bulk_line_max);
        let idle_timeout = self.shared.options.idle_timeout;
        loop {
            let last = match tokio::time::timeout(idle_timeout, body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    let Ok(mut chunk) = frame.into_data() else { continue };
                    while let Some(line) = lines.next(&mut chunk) {
                        if self.take(line).await.is_err() {
                            return;
                        }
                    }
                    continue;
                }
                Ok(None) => lines.finish(),
                Ok(Some(Err(error))) => {
                    tracing::debug!(%error, request_id = self.request_id.as_str(), "the body of many commands broke off");
                    Some(Err(Problem::new(Code::MalformedJson, "the body broke off; what came after the line before was not run")))
                }
                Err(_) if lines.is_inside_line() => Some(Err(Problem::new(Code::RequestTimeout, "the line was not completed in time; it was not run"))),
                Err(_) => None,
            };
            if let Some(last) = last {
                let _ = self.take(last).await;
            }
            return;
        }
    }

    async fn take(&self, line: Result<Bytes, Problem>) -> Result<(), Gone> {
        let slot = match line {
            Ok(line) => {
                let share = u32::try_from(line.len().min(WINDOW_BYTES)).map_err(|_| Gone)?;
                // It is never closed; what waits here goes on when the other half has answered, or is dropped with it.
                let bytes = self.bytes_left.clone().acquire_many_owned(share).await.map_err(|_| Gone)?;
                self.submit(&line, bytes).await
            }
            Err(problem) => Slot::Failed(problem),
        };
        self.slots.send(slot).await.map_err(|_| Gone)
    }

    async fn submit(&self, line: &[u8], bytes: OwnedSemaphorePermit) -> Slot {
        if self.shared.stop.is_cancelled() {
            return Slot::Failed(Problem::shutting_down());
        }
        let (entity_type, command) = match parse_line(line).and_then(|line| line.prepare(self.shared)) {
            Ok(prepared) => prepared,
            Err(problem) => return Slot::Failed(problem),
        };
        let (entity_id, command_id) = (command.entity_id.clone(), command.command_id.clone());
        match self.shared.router.submit(&entity_type, command, WhenFull::Wait, self.asker).await {
            Ok(pending) => Slot::Waiting(Box::new(Waiting { pending, entity_type, entity_id, command_id, _bytes: bytes })),
            Err(error) => Slot::Failed(commands::failed(error, &entity_type, &entity_id, &command_id)),
        }
    }
}

struct Writer<'a> {
    shared: &'a Shared,
    request_id: &'a RequestId,
    chunks: mpsc::Sender<Chunk>,
    buffer: String,
}

impl Writer<'_> {
    /// Ends when all slots are answered. Without [`Chunk::End`], which tells the client so, where it stopped reading.
    async fn run(mut self, mut slots: mpsc::Receiver<Slot>) {
        if self.answer_all(&mut slots).await.is_ok() {
            let _ = self.chunks.send(Chunk::End).await;
        }
    }

    async fn answer_all(&mut self, slots: &mut mpsc::Receiver<Slot>) -> Result<(), Gone> {
        loop {
            let slot = match slots.try_recv() {
                Ok(slot) => slot,
                Err(TryRecvError::Disconnected) => return self.flush().await,
                Err(TryRecvError::Empty) => {
                    self.flush().await?;
                    let Some(slot) = slots.recv().await else { return Ok(()) };
                    slot
                }
            };
            match slot {
                Slot::Failed(problem) => self.write_problem(&problem),
                Slot::Waiting(waiting) => self.answer(*waiting).await?,
            }
            if self.buffer.len() >= CHUNK_BYTES {
                self.flush().await?;
            }
        }
    }

    async fn answer(&mut self, waiting: Waiting) -> Result<(), Gone> {
        let Waiting { pending, entity_type, entity_id, command_id, _bytes } = waiting;
        let mut answer = pin!(pending.answer());
        let answered = match poll_immediate(answer.as_mut()).await {
            Some(answered) => answered,
            None => {
                self.flush().await?;
                answer.await
            }
        };
        match answered.result {
            Ok((answer, replay)) => answers::write_line(&mut self.buffer, &answer, replay, &self.shared.identity, self.request_id),
            Err(error) => self.write_problem(&commands::failed(error, &entity_type, &entity_id, &command_id)),
        }
        Ok(())
    }

    fn write_problem(&mut self, problem: &Problem) {
        problem.write_line(&mut self.buffer, self.request_id);
        self.buffer.push_str("}\n");
    }

    async fn flush(&mut self) -> Result<(), Gone> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let chunk = Chunk::Data(std::mem::take(&mut self.buffer).into_bytes().into());
        send(&self.chunks, chunk, self.shared.options.idle_timeout).await
    }
}

/// Fails where the client does not read for the given time.
async fn send(chunks: &mpsc::Sender<Chunk>, chunk: Chunk, time: Duration) -> Result<(), Gone> {
    match tokio::time::timeout(time, chunks.send(chunk)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(Gone),
    }
}

/// Splits chunks of bytes into lines of at most `max` bytes; blank ones are left out, longer ones are skipped and refused.
struct Lines {
    /// The start of a line whose end has not come yet.
    partial: Vec<u8>,
    /// Whether the line that is being read is too long already.
    is_skipping: bool,
    max: usize,
}

impl Lines {
    fn new(max: usize) -> Lines {
        Lines { partial: Vec::new(), is_skipping: false, max }
    }

    fn is_inside_line(&self) -> bool {
        self.is_skipping || !self.partial.trim_ascii().is_empty()
    }

    /// The next line that ends in the chunk, which is left behind it; none once the chunk is used up.
    fn next(&mut self, chunk: &mut Bytes) -> Option<Result<Bytes, Problem>> {
        while let Some(end) = memchr::memchr(b'\n', chunk) {
            let rest = chunk.split_to(end);
            chunk.advance(1);
            if let Some(line) = self.complete(rest) {
                return Some(line);
            }
        }
        if self.is_skipping || self.partial.len() + chunk.len() > self.max {
            self.is_skipping = true;
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(chunk);
        }
        chunk.clear();
        None
    }

    /// The last line, where it does not end in a newline.
    fn finish(&mut self) -> Option<Result<Bytes, Problem>> {
        self.complete(Bytes::new())
    }

    fn complete(&mut self, rest: Bytes) -> Option<Result<Bytes, Problem>> {
        let is_too_long = std::mem::take(&mut self.is_skipping) || self.partial.len() + rest.len() > self.max;
        let start = std::mem::take(&mut self.partial);
        if is_too_long {
            let problem = Problem::new(Code::RequestTooLarge, format!("the line is longer than {} bytes; it was not run", self.max));
            return Some(Err(problem.with_number("bytes_max", self.max as u64)));
        }
        let line = if start.is_empty() { rest } else { [&start, &*rest].concat().into() };
        (!line.trim_ascii().is_empty()).then_some(Ok(line))
    }
}

/// One command among several, taken apart.
#[derive(Debug, PartialEq)]
pub struct Line {
    /// The entity's type.
    pub entity_type: String,
    /// The entity; none where the server is to make an id.
    pub entity_id: Option<String>,
    /// The command's name.
    pub command: String,
    /// Its id; none where the server is to make one.
    pub command_id: Option<CommandId>,
    /// The request.
    pub request: Json,
    /// The version that the entity must have.
    pub if_version: Option<Version>,
}

impl Line {
    /// Checks the command against the handlers in force, and makes the ids that were left out.
    pub fn prepare(self, shared: &Shared) -> Result<(EntityType, Command), Problem> {
        let target = Target { entity_type: &self.entity_type, entity_id: self.entity_id.as_deref(), command: &self.command };
        let precondition = self.if_version.map(Precondition::Version);
        let (entity_type, command) = commands::prepare(&shared.partitions.handlers(), &shared.identity, target, self.command_id, precondition)?;
        Ok((entity_type, Command { request: self.request, ..command }))
    }
}

/// The members of a line.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Members<'a> {
    entity_type: String,
    entity_id: Option<String>,
    command: String,
    command_id: Option<String>,
    #[serde(borrow)]
    request: Option<&'a RawValue>,
    if_version: Option<Version>,
}

fn parse_line(line: &[u8]) -> Result<Line, Problem> {
    let line = Json::canonical(line).map_err(|error| Problem::malformed_json(&error))?;
    parse_command(line.as_str())
}

/// A command among several, from its canonical text.
pub fn parse_command(text: &str) -> Result<Line, Problem> {
    // An array would pass for the members in their order.
    if !text.starts_with('{') {
        return Err(Problem::new(Code::InvalidRequest, "the command is no JSON object"));
    }
    let members: Members<'_> = serde_json::from_str(text).map_err(|error| {
        // The position is one in the canonical text, which the caller never saw.
        let text = error.to_string();
        let reason = text.split(" at line ").next().unwrap_or_default();
        Problem::new(Code::InvalidRequest, format!("this is no command: {reason}"))
    })?;
    Ok(Line {
        entity_type: members.entity_type,
        entity_id: members.entity_id,
        command: members.command,
        command_id: members.command_id.map(|id| CommandId::new(&id)).transpose().map_err(|error| Problem::invalid_command_id(&error))?,
        // Part of a canonical text is canonical.
        request: members.request.map_or_else(Json::null, |request| Json::trusted(request.get().to_owned())),
        if_version: members.if_version,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&str], max: usize) -> Vec<String> {
        let mut lines = Lines::new(max);
        let mut found = Vec::new();
        let show = |line: Result<Bytes, Problem>| {
            line.map_or_else(|problem| problem.code().as_str().to_owned(), |line| format!("{:?}", line.as_ref().escape_ascii().to_string()))
        };
        for chunk in chunks {
            let mut chunk = Bytes::from(chunk.to_string());
            while let Some(line) = lines.next(&mut chunk) {
                found.push(show(line));
            }
            assert!(chunk.is_empty());
        }
        found.extend(lines.finish().map(show));
        found
    }

    #[test]
    fn lines_are_found_wherever_the_chunks_end() {
        for (chunks, expected) in [
            (&[][..], &[][..]),
            (&["a\nb\n"], &["a", "b"]),
            (&["a\nb"], &["a", "b"]),
            (&["a", "b\nc", "\n", "d"], &["ab", "c", "d"]),
            (&["\n \n\r\n", "a\r\n", "\n"], &["a\r"]),
            (&["  "], &[]),
            (&["12345678\n", "1"], &["12345678", "1"]),
            (&["123456789\nb\n"], &["TOO LONG", "b"]),
            (&["1234", "56789", "0", "12\nb", "\n"], &["TOO LONG", "b"]),
            (&["1234", "56789"], &["TOO LONG"]),
            (&["1234567", "89\nb"], &["TOO LONG", "b"]),
        ] {
            let expected: Vec<String> = expected
                .iter()
                .map(|line| if *line == "TOO LONG" { "request-too-large".to_owned() } else { format!("{:?}", line.as_bytes().escape_ascii().to_string()) })
                .collect();
            assert_eq!(split(chunks, 8), expected, "{chunks:?}");
        }
    }

    #[test]
    fn a_line_is_taken_apart_and_its_request_is_canonical() {
        let line = parse_line(
            br#" {"request": {"b": 1e0, "a": "\u0041"}, "if_version": 3, "command_id": "k", "command": "c", "entity_id": "e", "entity_type": "t"} "#,
        )
        .unwrap();
        let expected = Line {
            entity_type: "t".into(),
            entity_id: Some("e".into()),
            command: "c".into(),
            command_id: Some(CommandId::trusted("k")),
            request: Json::canonical(br#"{"a":"A","b":1}"#).unwrap(),
            if_version: Some(3),
        };
        assert_eq!(line, expected);
    }

    #[test]
    fn what_a_line_leaves_out_is_made_or_null() {
        let line = parse_line(br#"{"entity_type":"t","command":"c"}"#).unwrap();
        assert_eq!((line.entity_id, line.command_id, line.request, line.if_version), (None, None, Json::null(), None));
    }

    #[test]
    fn a_bad_line_says_what_is_wrong() {
        for (line, code, detail) in [
            (r#"{"entity_type":"t","command":"c""#, Code::MalformedJson, "the text ends inside a value at byte 32"),
            (r#"{"command":"c","command":"c"}"#, Code::MalformedJson, "duplicate key in an object at byte 15"),
            (r#"{"entity_type":"t","command":"c"} {}"#, Code::MalformedJson, "more text follows the value at byte 34"),
            (r#"{"command":"c"}"#, Code::InvalidRequest, "this is no command: missing field `entity_type`"),
            (r#"["t",null,"c",null,null,null]"#, Code::InvalidRequest, "the command is no JSON object"),
            ("7", Code::InvalidRequest, "the command is no JSON object"),
            (r#"{"entity_type":7,"command":"c"}"#, Code::InvalidRequest, "this is no command: invalid type: integer `7`, expected a string"),
            (
                r#"{"entity_type":"t","command":"c","comand_id":"k"}"#,
                Code::InvalidRequest,
                "this is no command: unknown field `comand_id`, expected one of `entity_type`, `entity_id`, `command`, `command_id`, `request`, `if_version`",
            ),
            (r#"{"entity_type":"t","command":"c","if_version":-1}"#, Code::InvalidRequest, "this is no command: invalid value: integer `-1`, expected u64"),
            (r#"{"entity_type":"t","command":"c","command_id":""}"#, Code::InvalidCommandId, "the command id is empty"),
        ] {
            let problem = parse_line(line.as_bytes()).unwrap_err();
            assert_eq!((problem.code(), problem.detail()), (code, detail), "{line}");
        }
    }
}
