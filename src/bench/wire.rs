//! HTTP/1.1 as a client, by hand: one socket, one buffer, no more work for an answer than its framing asks.

use super::ANSWER_WITHIN;
use super::target::Target;
use bytes::{Buf, BytesMut};
use std::io::{Error, ErrorKind};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const HEADERS_MAX: usize = 64;
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// A keep-alive connection. After an error it must be dropped: what follows on it belongs to nobody.
pub(super) struct Wire {
    pub stream: TcpStream,
    pub input: BytesMut,
}

/// The head of an answer.
#[derive(Debug)]
pub(super) struct Head {
    pub status: u16,
    pub retry_after: Option<Duration>,
    pub keep_alive: bool,
    pub body: Body,
}

/// Where the body of an answer ends, and how much of it was taken.
#[derive(Debug)]
pub(super) enum Body {
    /// So many bytes are left.
    Length(usize),
    /// So many bytes of the chunk are left.
    Chunk(usize),
    /// The line end after a chunk comes next, then a chunk head.
    ChunkEnd,
    /// A chunk head comes next.
    ChunkHead,
    /// Trailers come next.
    Trailers,
    /// It was taken whole.
    Done,
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidData, message.to_string())
}

pub(super) fn timed_out() -> Error {
    Error::new(ErrorKind::TimedOut, format!("no answer within {} s", ANSWER_WITHIN.as_secs()))
}

impl Wire {
    pub async fn connect(target: &Target) -> Result<Wire, Error> {
        let connected = tokio::time::timeout(CONNECT_WITHIN, TcpStream::connect(&target.address)).await;
        let stream = connected.map_err(|_| Error::new(ErrorKind::TimedOut, format!("no connection within {} s", CONNECT_WITHIN.as_secs())))??;
        stream.set_nodelay(true)?;
        Ok(Wire { stream, input: BytesMut::with_capacity(16 << 10) })
    }

    /// Sends a request and reads the head of its answer.
    pub async fn request(&mut self, request: &[u8]) -> Result<Head, Error> {
        let exchange = async {
            self.stream.write_all(request).await?;
            loop {
                if let Some(head) = Head::take(&mut self.input)? {
                    return Ok(head);
                }
                self.read().await?;
            }
        };
        tokio::time::timeout(ANSWER_WITHIN, exchange).await.map_err(|_| timed_out())?
    }

    /// Reads past the body of an answer.
    pub async fn skip(&mut self, head: &mut Head) -> Result<(), Error> {
        // Answers mostly arrive in one piece: no copy, no timer.
        if let Body::Length(left) = &mut head.body
            && self.input.len() >= *left
        {
            self.input.advance(*left);
            head.body = Body::Done;
            return Ok(());
        }
        self.body(head).await.map(drop)
    }

    /// Reads the body of an answer.
    pub async fn body(&mut self, head: &mut Head) -> Result<BytesMut, Error> {
        let mut content = BytesMut::new();
        let whole = async {
            while !head.body.take(&mut self.input, &mut content)? {
                self.read().await?;
            }
            Ok(content)
        };
        tokio::time::timeout(ANSWER_WITHIN, whole).await.map_err(|_| timed_out())?
    }

    async fn read(&mut self) -> Result<(), Error> {
        self.input.reserve(4 << 10);
        match self.stream.read_buf(&mut self.input).await? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

impl Head {
    /// Takes a head from the input; none where it is not all there yet.
    pub fn take(input: &mut BytesMut) -> Result<Option<Head>, Error> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
            let mut answer = httparse::Response::new(&mut headers);
            let length = match answer.parse(input).map_err(|_| invalid("what answers does not speak HTTP/1.1"))? {
                httparse::Status::Complete(length) => length,
                httparse::Status::Partial => return Ok(None),
            };
            let head = Head::of(&answer)?;
            input.advance(length);
            // Interim answers (100 Continue) say nothing yet.
            if head.status >= 200 {
                return Ok(Some(head));
            }
        }
    }

    fn of(answer: &httparse::Response<'_, '_>) -> Result<Head, Error> {
        let status = answer.code.unwrap_or_default();
        let mut head = Head { status, retry_after: None, keep_alive: answer.version == Some(1), body: Body::Length(0) };
        for header in answer.headers.iter() {
            let value = std::str::from_utf8(header.value).unwrap_or_default().trim();
            if header.name.eq_ignore_ascii_case("content-length") {
                head.body = Body::Length(value.parse().map_err(|_| invalid("the answer's Content-Length is no number"))?);
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                head.body = Body::ChunkHead;
            } else if header.name.eq_ignore_ascii_case("connection") {
                head.keep_alive &= !value.eq_ignore_ascii_case("close");
            } else if header.name.eq_ignore_ascii_case("retry-after") {
                head.retry_after = value.parse().ok().map(Duration::from_secs);
            }
        }
        if matches!(status, 204 | 304) {
            head.body = Body::Length(0);
        }
        Ok(head)
    }
}

impl Body {
    /// Moves what is there of the body to `content`; true where that was all of it.
    pub fn take(&mut self, input: &mut BytesMut, content: &mut BytesMut) -> Result<bool, Error> {
        loop {
            match self {
                Body::Length(0) | Body::Done => {
                    *self = Body::Done;
                    return Ok(true);
                }
                Body::Length(left) | Body::Chunk(left) if *left > 0 => {
                    if input.is_empty() {
                        return Ok(false);
                    }
                    let count = input.len().min(*left);
                    content.extend_from_slice(&input[..count]);
                    input.advance(count);
                    *left -= count;
                }
                Body::Length(_) => *self = Body::Done,
                Body::Chunk(_) => *self = Body::ChunkEnd,
                Body::ChunkEnd => {
                    if input.len() < 2 {
                        return Ok(false);
                    }
                    input.advance(2);
                    *self = Body::ChunkHead;
                }
                Body::ChunkHead => match httparse::parse_chunk_size(input).map_err(|_| invalid("the answer's chunks are broken"))? {
                    httparse::Status::Partial => return Ok(false),
                    httparse::Status::Complete((length, size)) => {
                        input.advance(length);
                        *self = match usize::try_from(size).unwrap_or(usize::MAX) {
                            0 => Body::Trailers,
                            size => Body::Chunk(size),
                        };
                    }
                },
                Body::Trailers => {
                    let Some(end) = memchr::memmem::find(input, b"\r\n") else { return Ok(false) };
                    input.advance(end + 2);
                    if end == 0 {
                        *self = Body::Done;
                    }
                }
            }
        }
    }
}
