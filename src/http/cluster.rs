//! What nodes ask each other, and what operators ask about all of them.
//!
//! Heartbeats and links are taken only from nodes on the same database, which prove that they know its secret.

use super::Shared;
use super::body::{self, Body, Chunk};
use super::limits::{self, RequestBody};
use super::problem::{Code, Problem};
use crate::cluster::link::MEDIA_TYPE;
use crate::cluster::peer::FORWARDED;
use crate::cluster::{Asker, Heartbeat, Refusal};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use serde::Serialize;
use std::sync::Arc;
use tokio::sync::mpsc;

/// The most bytes of a heartbeat: the largest map has 4096 shards.
const HEARTBEAT_MAX: usize = 1 << 20;
/// How many chunks wait between a link and its connection.
const CHUNKS: usize = 4;

/// Who asks: a request that another node passed on is handled here, whatever the map says.
pub fn asker<'a>(headers: &HeaderMap, trace_id: Option<&'a str>) -> Asker<'a> {
    if headers.contains_key(FORWARDED) { Asker::Node } else { Asker::Client { trace_id } }
}

/// `GET /v1/cluster`.
pub(super) fn status(shared: &Shared) -> Result<Response<Body>, Problem> {
    respond(&shared.cluster.status())
}

fn respond(document: &impl Serialize) -> Result<Response<Body>, Problem> {
    serde_json::to_vec(document).map(body::response).map_err(|error| Problem::internal(error.to_string()))
}

fn check_peer(shared: &Shared, headers: &HeaderMap) -> Result<(), Problem> {
    if shared.cluster.is_of_this_cluster(headers) {
        return Ok(());
    }
    Err(Problem::new(Code::Forbidden, "only the nodes of a cluster ask this of each other, and only those on the same database"))
}

/// `POST /v1/cluster/heartbeat`.
pub(super) async fn heartbeat(shared: &Shared, headers: &HeaderMap, body: impl RequestBody) -> Result<Response<Body>, Problem> {
    check_peer(shared, headers)?;
    let text = limits::read_body(body, HEARTBEAT_MAX, shared.options.body_timeout).await?;
    let beat: Heartbeat = serde_json::from_slice(&text).map_err(|error| Problem::new(Code::InvalidRequest, format!("this is no heartbeat: {error}")))?;
    match shared.cluster.hear(&beat) {
        Ok(reply) => respond(&reply),
        Err(refusal @ Refusal::NotLeading) => Err(Problem::new(Code::NotFound, refusal.to_string())),
        Err(refusal @ (Refusal::NameTaken { .. } | Refusal::Shards)) => Err(Problem::new(Code::Forbidden, refusal.to_string())),
    }
}

/// `POST /v1/cluster/link`: frames come in the body and go out in the answer, until either end closes it.
pub(super) fn link(shared: &Arc<Shared>, headers: &HeaderMap, body: impl RequestBody) -> Result<Response<Body>, Problem> {
    check_peer(shared, headers)?;
    if headers.get(CONTENT_TYPE).is_none_or(|given| given.as_bytes() != MEDIA_TYPE.as_bytes()) {
        return Err(Problem::new(Code::UnsupportedMediaType, format!("links are {MEDIA_TYPE} here: the other node is of another version")));
    }
    if !shared.cluster.takes_links() {
        return Err(Problem::unavailable("this node cannot reach the database, or is stopping"));
    }
    let cluster = shared.cluster.clone();
    let (chunks, sent) = mpsc::channel(CHUNKS);
    let task = tokio::spawn(async move {
        let (frames, taken) = mpsc::channel(CHUNKS);
        let (answers, given) = mpsc::channel(CHUNKS);
        let talk = async { tokio::join!(cluster.serve_link(taken, answers), write(given, chunks)) };
        let read = async {
            read(body, frames).await;
            // The other half ends when it has noticed.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = talk => {}
            () = read => {}
        }
    });
    let mut response = Response::new(Body::made(sent, task));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    Ok(response)
}

async fn read(mut body: impl RequestBody, frames: mpsc::Sender<Bytes>) {
    while let Some(Ok(frame)) = body.frame().await {
        let Ok(chunk) = frame.into_data() else { continue };
        if frames.send(chunk).await.is_err() {
            return;
        }
    }
}

async fn write(mut given: mpsc::Receiver<Bytes>, chunks: mpsc::Sender<Chunk>) {
    while let Some(chunk) = given.recv().await {
        if chunks.send(Chunk::Data(chunk)).await.is_err() {
            return;
        }
    }
    let _ = chunks.send(Chunk::End).await;
}
