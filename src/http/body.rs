//! Bodies of answers: whole ones, and those that are made while they are sent.

use super::connection::InFlight;
use bytes::Bytes;
use hyper::Response;
use hyper::body::{Frame, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

/// The body of an answer.
pub struct Body {
    content: Content,
    /// Keeps the connection from counting as idle until a body that is still being made has been sent.
    in_flight: Option<InFlight>,
}

enum Content {
    /// Taken when sent.
    Whole(Bytes),
    Made(Made),
}

/// A body that a task makes. Dropping it, as happens when the client goes away, stops the task.
struct Made {
    chunks: mpsc::Receiver<Chunk>,
    _task: AbortOnDropHandle<()>,
}

/// What the task sends.
pub enum Chunk {
    /// More of the body.
    Data(Bytes),
    /// That was all. Without it the client is told that the answer is incomplete.
    End,
}

/// A body whose task stopped early.
#[derive(Debug, thiserror::Error)]
#[error("the answer was cut short")]
pub struct Truncated;

impl Body {
    /// A body made by `task`, which sends to the other end of `chunks`.
    pub fn made(chunks: mpsc::Receiver<Chunk>, task: tokio::task::JoinHandle<()>) -> Body {
        Body { content: Content::Made(Made { chunks, _task: AbortOnDropHandle::new(task) }), in_flight: None }
    }

    /// No bytes.
    pub fn empty() -> Body {
        Body::from(Bytes::new())
    }

    /// Hands the guard over to a body that is still being made; a whole one needs none.
    pub(super) fn hold(&mut self, guard: InFlight) {
        if let Content::Made(_) = self.content {
            self.in_flight = Some(guard);
        }
    }

    /// How long a whole body is.
    pub fn len(&self) -> Option<usize> {
        match &self.content {
            Content::Whole(bytes) => Some(bytes.len()),
            Content::Made(_) => None,
        }
    }

    /// The bytes of a whole body.
    #[cfg(test)]
    pub fn bytes(&self) -> &[u8] {
        match &self.content {
            Content::Whole(bytes) => bytes,
            Content::Made(_) => &[],
        }
    }
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Body {
        Body { content: Content::Whole(bytes), in_flight: None }
    }
}

/// A success with a JSON body.
pub fn response(content: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::from(content.into()));
    response.headers_mut().reserve(8);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Truncated;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Truncated>>> {
        match &mut self.content {
            Content::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Content::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Content::Made(made) => {
                let end = match ready!(made.chunks.poll_recv(cx)) {
                    Some(Chunk::Data(bytes)) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                    Some(Chunk::End) => None,
                    None => Some(Err(Truncated)),
                };
                self.content = Content::Whole(Bytes::new());
                self.in_flight = None;
                Poll::Ready(end)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, Content::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Made(_) => SizeHint::default(),
        }
    }
}
