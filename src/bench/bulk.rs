//! One connection that streams commands to `POST /v1/commands` and reads the answers while it sends, with a bounded
//! number of commands on the way.

use super::report::Tally;
use super::target::{ID_LENGTH, Template, fresh_id};
use super::wire::{Head, Wire, timed_out};
use super::{ANSWER_WITHIN, Load, PAUSE_MAX, PAUSE_MIN, Settled, single};
use bytes::{Buf, BytesMut};
use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Write};
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The most commands on the way.
const WINDOW_LINES: usize = 100;
/// The most bytes of them.
const WINDOW_BYTES: usize = 256 << 10;

/// A command that is not settled.
struct Line {
    entity: usize,
    id: [u8; ID_LENGTH],
    started: Instant,
    may_have_happened: bool,
    /// What the last try came to.
    last: String,
}

/// The state of one connection's commands, across the requests that carry them.
struct Stream<'a> {
    load: &'a Load,
    tally: Tally,
    template: Template,
    connection: usize,
    step: usize,
    window: usize,
    /// On the way, in order.
    sent: VecDeque<Line>,
    /// To be sent again, with the same ids.
    again: VecDeque<Line>,
    /// Nothing is sent before this: a server said that it has too much to do.
    resume: Instant,
}

/// Streams until the run ends and all of the connection's commands are settled.
pub(super) async fn connection(load: &Load, connection: usize) -> Tally {
    let template = load.target.line_template();
    let window = (WINDOW_BYTES / template.len()).clamp(1, WINDOW_LINES);
    let (sent, again) = (VecDeque::with_capacity(window), VecDeque::new());
    let mut stream = Stream { load, tally: Tally::default(), template, connection, step: 0, window, sent, again, resume: Instant::now() };
    let mut pause = PAUSE_MIN;
    while !stream.is_finished() {
        let recorded = stream.step;
        let Err(error) = stream.request().await else { continue };
        // A request that moved on starts the pauses from the beginning.
        pause = if stream.step > recorded { PAUSE_MIN } else { (pause * 2).min(PAUSE_MAX) };
        stream.lose(&error);
        tokio::time::sleep(pause).await;
    }
    stream.tally
}

impl Stream<'_> {
    fn is_over(&self) -> bool {
        Instant::now() >= self.load.stop
    }

    fn is_finished(&self) -> bool {
        self.is_over() && self.sent.is_empty() && self.again.is_empty()
    }

    /// One request, for as long as it lasts. After an error, what was on the way is still in `sent`.
    async fn request(&mut self) -> Result<(), Error> {
        let target = &self.load.target;
        let mut wire = Wire::connect(target).await?;
        let mut output = Vec::new();
        write!(
            output,
            "POST {}/v1/commands HTTP/1.1\r\nHost: {}\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n",
            target.base, target.authority
        )?;
        let (mut reader, mut writer) = wire.stream.split();
        let (mut head, mut answers, mut written) = (None::<Head>, BytesMut::new(), 0);
        let mut is_ended = false;
        let mut heard = Instant::now();
        loop {
            if head.is_none() {
                head = Head::take(&mut wire.input)?;
            }
            let is_whole = match &mut head {
                Some(head) => head.body.take(&mut wire.input, &mut answers)?,
                None => false,
            };
            match &head {
                Some(head) if head.status != 200 && is_whole => return self.refused(head, &answers),
                Some(head) if head.status == 200 => self.take_answers(&mut answers)?,
                _ => {}
            }
            if is_whole {
                return if self.sent.is_empty() { Ok(()) } else { Err(ErrorKind::UnexpectedEof.into()) };
            }
            if written == output.len() {
                output.clear();
                written = 0;
            }
            if !is_ended {
                self.fill(&mut output)?;
                if self.is_finished() {
                    output.extend_from_slice(b"0\r\n\r\n");
                    is_ended = true;
                }
            }
            let wake = if self.sent.len() < self.window && self.resume > Instant::now() { self.resume } else { heard + ANSWER_WITHIN };
            wire.input.reserve(4 << 10);
            tokio::select! {
                count = reader.read_buf(&mut wire.input) => match count? {
                    0 => return Err(ErrorKind::UnexpectedEof.into()),
                    _ => heard = Instant::now(),
                },
                count = writer.write(&output[written..]), if written < output.len() => written += count?,
                () = tokio::time::sleep_until(wake.into()) => if heard.elapsed() >= ANSWER_WITHIN {
                    return Err(timed_out());
                },
            }
        }
    }

    /// Fills the window: one chunk with as many lines as there is room for.
    fn fill(&mut self, output: &mut Vec<u8>) -> Result<(), Error> {
        let now = Instant::now();
        if now < self.resume {
            return Ok(());
        }
        let room = self.window - self.sent.len();
        let fresh = if now < self.load.stop { room.saturating_sub(self.again.len()) } else { 0 };
        let count = self.again.len().min(room) + fresh;
        if count == 0 {
            return Ok(());
        }
        write!(output, "{:x}\r\n", count * self.template.len())?;
        for _ in 0..count {
            let line = self.again.pop_front().unwrap_or_else(|| {
                let entity = self.load.entity(self.connection, self.step);
                self.step += 1;
                let mut id = [0; ID_LENGTH];
                fresh_id(&mut id);
                Line { entity, id, started: now, may_have_happened: false, last: String::new() }
            });
            output.extend_from_slice(self.template.fill(&self.load.target.entities[line.entity], &line.id));
            self.sent.push_back(line);
        }
        output.extend_from_slice(b"\r\n");
        Ok(())
    }

    /// Settles the commands whose answers are there.
    fn take_answers(&mut self, answers: &mut BytesMut) -> Result<(), Error> {
        while let Some(end) = memchr::memchr(b'\n', answers) {
            let answer = answers.split_to(end);
            answers.advance(1);
            if answer.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let line = self.sent.pop_front().ok_or_else(|| Error::new(ErrorKind::InvalidData, "more answers than commands"))?;
            self.answered(line, &answer)?;
        }
        Ok(())
    }

    fn answered(&mut self, mut line: Line, answer: &[u8]) -> Result<(), Error> {
        if answer.starts_with(b"{\"status\":200,") {
            self.load.settle(&mut self.tally, line.entity, line.started, Settled::Accepted);
            return Ok(());
        }
        let status = status(answer)?;
        let code = single::code(answer);
        let kind = single::kind(status, &code);
        match status {
            200 => self.load.settle(&mut self.tally, line.entity, line.started, Settled::Accepted),
            422 if code == "rejected" => self.load.settle(&mut self.tally, line.entity, line.started, Settled::Rejected),
            429 | 503 | 504 => {
                line.may_have_happened |= status == 504;
                line.last = kind;
                self.retry(line);
                self.resume = Instant::now() + PAUSE_MIN * 4;
            }
            _ if line.may_have_happened => self.load.settle(&mut self.tally, line.entity, line.started, Settled::Unresolved(kind)),
            _ => self.load.settle(&mut self.tally, line.entity, line.started, Settled::Failed(kind)),
        }
        Ok(())
    }

    /// Keeps the command for another try, unless its time is up.
    fn retry(&mut self, line: Line) {
        if Instant::now() < self.load.give_up(line.may_have_happened) {
            return self.again.push_back(line);
        }
        let settled = if line.may_have_happened { Settled::Unresolved(line.last) } else { Settled::Failed(line.last) };
        self.load.settle(&mut self.tally, line.entity, line.started, settled);
    }

    /// The whole request was refused: none of its commands happened.
    fn refused(&mut self, head: &Head, body: &[u8]) -> Result<(), Error> {
        let kind = single::kind(head.status, &single::code(body));
        let is_temporary = matches!(head.status, 429 | 503);
        for mut line in std::mem::take(&mut self.sent) {
            line.last.clone_from(&kind);
            match is_temporary {
                true => self.retry(line),
                false => self.load.settle(&mut self.tally, line.entity, line.started, Settled::Failed(kind.clone())),
            }
        }
        self.resume = Instant::now() + head.retry_after.unwrap_or(PAUSE_MIN * 4).min(PAUSE_MAX);
        Err(Error::other(kind))
    }

    /// The request broke off: what was on the way may have happened.
    fn lose(&mut self, error: &Error) {
        // The order stays: first what was on the way, then what waited.
        let waiting = std::mem::take(&mut self.again);
        for mut line in std::mem::take(&mut self.sent) {
            line.may_have_happened = true;
            line.last = format!("connection lost: {error}");
            self.retry(line);
        }
        waiting.into_iter().for_each(|line| self.retry(line));
    }
}

fn status(answer: &[u8]) -> Result<u16, Error> {
    #[derive(serde::Deserialize)]
    struct Answer {
        status: u16,
    }
    serde_json::from_slice(answer)
        .map(|answer: Answer| answer.status)
        .map_err(|error| Error::new(ErrorKind::InvalidData, format!("an answer line has no status: {error}")))
}
