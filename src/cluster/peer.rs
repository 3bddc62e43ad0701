//! Requests to other nodes: plain HTTP/1.1, one connection each, every wait bounded by the caller.
//!
//! What only nodes may ask carries a proof that the asker knows the database: a value that derives from the secret that the database drew
//! when it was first used. So a node of another cluster, and whoever can merely reach the port, is refused.

use crate::core::{LogIdentity, NodeId};
use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, Either, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use url::Url;

/// The header that carries the proof.
const PROOF: HeaderName = HeaderName::from_static("quokka-cluster");
/// The header that says that a request was passed on, and by which node.
pub const FORWARDED: HeaderName = HeaderName::from_static("quokka-forwarded");

/// The most bytes of an answer that is read whole.
const ANSWER_MAX: usize = 4 << 20;
/// How many chunks wait to be sent.
const CHUNKS: usize = 4;

/// Why another node gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Its address cannot be used.
    #[error("{0:?} is no http URL of a node")]
    Url(String),
    /// It cannot be connected to.
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    /// The connection broke, or what came is no HTTP.
    #[error("the connection broke: {0}")]
    Http(#[from] hyper::Error),
    /// It refused.
    #[error("answered {status}: {body}")]
    Refused {
        /// With this status.
        status: StatusCode,
        /// And this body.
        body: String,
    },
    /// The answer is not of the expected form.
    #[error("the answer cannot be read: {0}")]
    Unreadable(String),
}

type Body = Either<Full<Bytes>, StreamBody<stream::BoxStream<'static, Result<Frame<Bytes>, Infallible>>>>;

/// Asks other nodes.
#[derive(Debug, Clone)]
pub struct Peer {
    proof: HeaderValue,
    node: HeaderValue,
    log: LogIdentity,
}

impl Peer {
    /// Asks in the name of a node.
    pub fn new(node: &NodeId, log: &LogIdentity) -> Peer {
        let proof = data_encoding::BASE64URL_NOPAD.encode(&log.derive("cluster", &[]));
        let header = |text: &str| HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("-"));
        Peer { proof: header(&proof), node: header(node.as_str()), log: log.clone() }
    }

    /// Whether whoever sent these headers is a node on the same database.
    pub fn is_of_this_cluster(&self, headers: &HeaderMap) -> bool {
        // Hashes are compared, so that the time it takes tells nothing of the proof itself.
        let hash = |value: &[u8]| self.log.derive("cluster proof", &[value]);
        headers.get(PROOF).is_some_and(|given| hash(given.as_bytes()) == hash(self.proof.as_bytes()))
    }

    /// Opens an endless request: chunks go out through the sender, the answer's come in through the body.
    pub async fn open(&self, url: &str, path: &str, media_type: &'static str) -> Result<(mpsc::Sender<Bytes>, Incoming), PeerError> {
        let (sender, chunks) = mpsc::channel(CHUNKS);
        let chunks =
            stream::unfold(chunks, |mut chunks: mpsc::Receiver<Bytes>| async move { chunks.recv().await.map(|chunk| (Ok(Frame::data(chunk)), chunks)) });
        let body = Either::Right(StreamBody::new(Box::pin(chunks) as stream::BoxStream<'static, _>));
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        let response = self.send(url, path, request).await?;
        if response.status() != StatusCode::OK {
            return Err(refused(response).await);
        }
        Ok((sender, response.into_body()))
    }

    /// Posts a document and reads the one that is answered.
    pub async fn post<T: Serialize, R: DeserializeOwned>(&self, url: &str, path: &str, document: &T) -> Result<R, PeerError> {
        let text = serde_json::to_vec(document).map_err(|error| PeerError::Unreadable(error.to_string()))?;
        let mut request = Request::new(Either::Left(Full::new(Bytes::from(text))));
        *request.method_mut() = Method::POST;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        read(self.send(url, path, request).await?).await
    }

    async fn send(&self, url: &str, path: &str, mut request: Request<Body>) -> Result<Response<Incoming>, PeerError> {
        request.headers_mut().insert(PROOF, self.proof.clone());
        request.headers_mut().insert(FORWARDED, self.node.clone());
        send(url, path, request).await
    }
}

/// Asks a server for a document, as any client may.
pub async fn get<R: DeserializeOwned>(url: &str, path: &str) -> Result<R, PeerError> {
    read(send(url, path, Request::new(Either::Left(Full::default()))).await?).await
}

async fn send(url: &str, path: &str, mut request: Request<Body>) -> Result<Response<Incoming>, PeerError> {
    let (address, authority, path) = target(url, path).ok_or_else(|| PeerError::Url(url.to_owned()))?;
    request.headers_mut().insert(HOST, HeaderValue::from_str(&authority).map_err(|_| PeerError::Url(url.to_owned()))?);
    *request.uri_mut() = path.parse().map_err(|_| PeerError::Url(url.to_owned()))?;
    let stream = TcpStream::connect(address).await.map_err(PeerError::Connect)?;
    let _ = stream.set_nodelay(true);
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends with the last of its bodies.
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}

/// Where to connect to, what stands in `Host`, and the path.
fn target(url: &str, path: &str) -> Option<(String, String, String)> {
    let url = Url::parse(url).ok().filter(|url| url.scheme() == "http")?;
    let (host, port) = (url.host_str()?, url.port_or_known_default()?);
    let authority = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
    Some((format!("{host}:{port}"), authority, format!("{}{path}", url.path().trim_end_matches('/'))))
}

async fn read<R: DeserializeOwned>(response: Response<Incoming>) -> Result<R, PeerError> {
    if response.status() != StatusCode::OK {
        return Err(refused(response).await);
    }
    let body = Limited::new(response.into_body(), ANSWER_MAX).collect().await.map_err(|error| PeerError::Unreadable(error.to_string()))?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| PeerError::Unreadable(error.to_string()))
}

async fn refused(response: Response<Incoming>) -> PeerError {
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_MAX).collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    PeerError::Refused { status, body: String::from_utf8_lossy(&body).into_owned() }
}

/// Whether a text can be the address of a node: an `http` URL without user, query or fragment.
pub fn is_node_url(text: &str) -> bool {
    Url::parse(text).is_ok_and(|url| {
        url.scheme() == "http"
            && url.host_str().is_some()
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_port_and_path() {
        for (url, expected) in [
            ("http://a:1", Some(("a:1", "a:1", "/p"))),
            ("http://a", Some(("a:80", "a", "/p"))),
            ("http://[::1]:2/x/", Some(("[::1]:2", "[::1]:2", "/x/p"))),
            ("https://a:1", None),
            ("a:1", None),
        ] {
            let expected = expected.map(|(address, authority, path)| (address.to_owned(), authority.to_owned(), path.to_owned()));
            assert_eq!(target(url, "/p"), expected, "{url}");
        }
        assert!(is_node_url("http://10.0.0.1:9865") && !is_node_url("http://user@a") && !is_node_url("http://a?b") && !is_node_url("tcp://a"));
    }

    #[test]
    fn only_nodes_on_the_same_database_have_the_proof() {
        let node = NodeId::new("a").unwrap();
        let (own, other) = (LogIdentity::new([1; 32]), LogIdentity::new([2; 32]));
        let headers = |peer: &Peer| HeaderMap::from_iter([(PROOF, peer.proof.clone())]);
        let peer = Peer::new(&node, &own);
        assert!(peer.is_of_this_cluster(&headers(&Peer::new(&NodeId::new("b").unwrap(), &own))));
        assert!(!peer.is_of_this_cluster(&headers(&Peer::new(&node, &other))));
        assert!(!peer.is_of_this_cluster(&HeaderMap::new()));
    }
}
