//! Limits on what a client may send, and on what the operating system lets this process open.

use super::problem::{Code, Problem};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fmt::Display;
use std::time::Duration;

/// The body of a request, as its connection gives it.
pub trait RequestBody: hyper::body::Body<Data = Bytes, Error: Display + Send> + Unpin + Send + 'static {}

impl<B: hyper::body::Body<Data = Bytes, Error: Display + Send> + Unpin + Send + 'static> RequestBody for B {}

/// Reads a whole body of at most `max` bytes within `time`.
///
/// A body that announces more is refused before any of it is read; one that announces nothing, as soon as it is more.
pub async fn read_body(body: impl RequestBody, max: usize, time: Duration) -> Result<Bytes, Problem> {
    if body.is_end_stream() {
        return Ok(Bytes::new());
    }
    if body.size_hint().lower() > max as u64 {
        return Err(too_large(max));
    }
    match tokio::time::timeout(time, collect(body, max)).await {
        Ok(read) => read,
        Err(_) => Err(Problem::new(Code::RequestTimeout, format!("the body was not complete after {} seconds; nothing happened", time.as_secs_f32()))),
    }
}

fn too_large(max: usize) -> Problem {
    Problem::new(Code::RequestTooLarge, format!("the body is larger than {max} bytes")).with_number("bytes_max", max as u64)
}

async fn collect(mut body: impl RequestBody, max: usize) -> Result<Bytes, Problem> {
    let mut first = Bytes::new();
    let mut more = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Problem::new(Code::MalformedJson, format!("the body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if first.len() + more.len() + data.len() > max {
            return Err(too_large(max));
        }
        if first.is_empty() {
            first = data;
        } else {
            more.extend_from_slice(&data);
        }
    }
    if more.is_empty() {
        return Ok(first);
    }
    let mut whole = BytesMut::with_capacity(first.len() + more.len());
    whole.extend_from_slice(&first);
    whole.extend_from_slice(&more);
    Ok(whole.freeze())
}

/// Lets this process open as many files and sockets as its hard limit allows; answers with how many that is.
pub fn raise_open_files() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return limit.current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::warn!(%error, limit = limit.current, "cannot raise the limit of open files");
            limit.current
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{Full, StreamBody};
    use hyper::body::Frame;
    use std::convert::Infallible;

    fn chunks(chunks: &[&'static str]) -> impl hyper::body::Body<Data = Bytes, Error = Infallible> + Unpin + use<> {
        let frames: Vec<_> = chunks.iter().map(|chunk| Ok(Frame::data(Bytes::from_static(chunk.as_bytes())))).collect();
        StreamBody::new(futures_util::stream::iter(frames))
    }

    #[tokio::test]
    async fn bodies_up_to_the_limit_are_read_whole() {
        let time = Duration::from_secs(60);
        for (body, expected) in [
            (&[][..], Ok("")),
            (&["{}"], Ok("{}")),
            (&["ab", "", "cd", "efgh"], Ok("abcdefgh")),
            (&["abcdefgh", "i"], Err(Code::RequestTooLarge)),
            (&["abcdefghi"], Err(Code::RequestTooLarge)),
        ] {
            let read = read_body(chunks(body), 8, time).await.map_err(|problem| problem.code());
            assert_eq!(read, expected.map(|text| Bytes::from_static(text.as_bytes())), "{body:?}");
        }
        let announced = read_body(Full::new(Bytes::from_static(b"123456789")), 8, time).await.map_err(|problem| problem.code());
        assert_eq!(announced, Err(Code::RequestTooLarge));
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_not_waited_for() {
        let body = StreamBody::new(futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let read = read_body(body, 8, Duration::from_millis(5)).await.map_err(|problem| problem.code());
        assert_eq!(read, Err(Code::RequestTimeout));
    }
}
