//! What a connection adds to its requests: bodies that may be left unread without harm, and turns that keep commands in order.

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::{Method, Request, Version};
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How much of an unwanted HTTP/2 body is read, and for how long, so that the client reads its answer and not a reset.
const DRAIN_BYTES_MAX: usize = 64 * 1024 * 1024;
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Turns of finished requests are thrown away when there are more than this many.
const TURNS_KEPT: usize = 256;

/// A request's body. Where it is dropped before its end, HTTP/1 has to close the connection after the answer, and HTTP/2 reads on for a while.
pub struct RequestBody {
    body: Option<Incoming>,
    is_h2: bool,
    was_left: Arc<AtomicBool>,
}

impl RequestBody {
    /// Wraps a body; the flag tells later whether its end was not read.
    pub fn new(body: Incoming, version: Version) -> (RequestBody, Arc<AtomicBool>) {
        let was_left = Arc::new(AtomicBool::new(false));
        (RequestBody { body: Some(body), is_h2: version == Version::HTTP_2, was_left: was_left.clone() }, was_left)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        if let Poll::Ready(None | Some(Err(_))) = polled {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) else { return };
        self.was_left.store(true, Ordering::Relaxed);
        if self.is_h2
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(tokio::time::timeout(DRAIN_TIME_MAX, drain(body)));
        }
    }
}

async fn drain(mut body: Incoming) {
    let mut left = DRAIN_BYTES_MAX;
    while let Some(Ok(frame)) = body.frame().await {
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        if left == 0 {
            return;
        }
    }
}

/// The order of the commands of one HTTP/2 connection, whose requests otherwise run beside each other.
#[derive(Default)]
pub struct Turns(Mutex<HashMap<String, CancellationToken>>);

/// A command's turn among those for the same entity on the same connection. Held as an extension of its request.
#[derive(Clone)]
pub struct Turn(Arc<Place>);

struct Place {
    before: Option<CancellationToken>,
    over: CancellationToken,
}

impl Turns {
    /// Gives a command its turn; requests must be shown here in the order in which they came.
    pub fn take<B>(&self, request: &mut Request<B>) {
        if request.version() != Version::HTTP_2 || request.method() != Method::POST {
            return;
        }
        let Some(entity) = entity_of(request.uri().path()).map(str::to_owned) else { return };
        let over = CancellationToken::new();
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if turns.len() > TURNS_KEPT {
            turns.retain(|_, turn| !turn.is_cancelled());
        }
        let before = turns.insert(entity, over.clone());
        drop(turns);
        request.extensions_mut().insert(Turn(Arc::new(Place { before, over })));
    }
}

/// `type/id` as they stand in the path of a command.
fn entity_of(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/v1/entities/")?;
    let end = rest.match_indices('/').nth(1).map_or(rest.len(), |(at, _)| at);
    Some(&rest[..end])
}

impl Turn {
    /// Waits until the command before is queued, or will never be.
    pub async fn comes(&self) {
        if let Some(before) = &self.0.before {
            before.cancelled().await;
        }
    }

    /// The command is queued: the next may follow.
    pub fn is_over(&self) {
        self.0.over.cancel();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.over.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn turn(turns: &Turns, path: &str) -> Option<Turn> {
        let mut request = Request::builder().method("POST").version(Version::HTTP_2).uri(path).body(()).unwrap();
        turns.take(&mut request);
        request.extensions().get().cloned()
    }

    #[test]
    fn commands_for_one_entity_wait_for_each_other_and_for_no_other() {
        let turns = Turns::default();
        let first = turn(&turns, "/v1/entities/account/a/open").unwrap();
        let second = turn(&turns, "/v1/entities/account/a/charge").unwrap();
        let third = turn(&turns, "/v1/entities/account/a/charge").unwrap();
        let other = turn(&turns, "/v1/entities/account/b/charge").unwrap();
        assert!(first.comes().now_or_never().is_some());
        assert!(other.comes().now_or_never().is_some());
        assert!(second.comes().now_or_never().is_none());
        first.is_over();
        assert!(second.comes().now_or_never().is_some());
        assert!(third.comes().now_or_never().is_none());
        drop(second);
        assert!(third.comes().now_or_never().is_some(), "a request that fails before it is queued holds nobody up");
        assert!(turn(&turns, "/v1/commands").is_none());
    }

    #[test]
    fn finished_turns_are_thrown_away() {
        let turns = Turns::default();
        for number in 0..10 * TURNS_KEPT {
            drop(turn(&turns, &format!("/v1/entities/account/{number}/open")));
        }
        assert!(turns.0.lock().unwrap().len() <= TURNS_KEPT + 1);
    }
}
