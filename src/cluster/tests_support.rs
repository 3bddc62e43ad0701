//! What several tests of this module need: a node's queues on a database of its own, and an owner that does what the test says.

use super::link::MEDIA_TYPE;
use super::link::client::Shared;
use super::link::wire::{Ask, FromOwner, Reader, ToOwner, write};
use super::peer::Peer;
use crate::core::{CommandId, CommandName, EntityId, EntityType, Json, Member, NodeId, Precondition, ShardCount};
use crate::handler::native::{Entity, Rejection};
use crate::handler::{HandlerSet, RandomKey};
use crate::metrics::ForwardMetrics;
use crate::partition::{self, Command, CommandResult, Partitions, WhenFull};
use crate::store::{self, Store};
use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, BoxStream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

/// How long owners may be silent, in tests.
pub const SILENCE_MAX: Duration = Duration::from_millis(300);
/// How long anything may take that has to come.
pub const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Default, Serialize, Deserialize)]
struct Notes {
    texts: Vec<String>,
}

/// The one entity type.
pub fn account() -> EntityType {
    EntityType::trusted("account")
}

/// `note TEXT` makes the entity where it is missing and answers all texts so far; `open` only makes it; `tear` needs it.
fn handlers(store: &dyn Store) -> HandlerSet {
    let note = |text: String, notes: &mut Notes| {
        notes.texts.push(text);
        Ok::<_, Rejection>(notes.texts.concat())
    };
    let entity = Entity::new("account").creates_if_missing("note", note).creates("open", |(): (), _: &mut Notes| Ok::<_, Rejection>(()));
    let entity = entity.command("tear", |(): (), notes: &mut Notes| {
        notes.texts.clear();
        Ok::<_, Rejection>(())
    });
    BTreeMap::from([(account(), entity.build(RandomKey::of(store.identity())).unwrap())])
}

/// A node's queues, on a database in a folder that goes with it.
pub struct Here {
    pub shared: Arc<Shared>,
    _folder: tempfile::TempDir,
}

impl Here {
    pub async fn new(timeout: Duration) -> Here {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("quokka.sqlite").display());
        let options = store::Options { url, shards: ShardCount::new(2).unwrap(), pool: 2, statement_timeout: Duration::from_secs(10) };
        let store = store::open(&options).await.unwrap();
        store.create_type(&account()).await.unwrap();
        let peer = Peer::new(&NodeId::trusted("here"), store.identity());
        let shared = Shared { partitions: node(store, timeout), peer, silence_max: SILENCE_MAX, metrics: ForwardMetrics::new() };
        Here { shared: Arc::new(shared), _folder: folder }
    }

    /// The queues of another node on the same database.
    pub fn another_node(&self) -> Partitions {
        node(self.shared.partitions.store().clone(), Duration::from_secs(10))
    }
}

fn node(store: Arc<dyn Store>, timeout: Duration) -> Partitions {
    let options = partition::Options {
        timeout,
        queue_max: 1000,
        batch_rows_max: 100,
        batch_bytes_max: 1 << 20,
        row_bytes_max: 1 << 20,
        refuse_reuse: false,
        cache_bytes_max: 1 << 20,
        retry_for: Duration::from_secs(1),
    };
    let handlers = handlers(&*store);
    Partitions::new(options, store, handlers)
}

/// `note` with the command's id as its text.
pub fn note(entity: &str, id: &str) -> Command {
    Command { request: Json::trusted(format!("{id:?}")), ..command(entity, id, "note") }
}

pub fn command(entity: &str, id: &str, name: &str) -> Command {
    Command {
        entity_id: EntityId::trusted(entity),
        command_id: CommandId::trusted(id),
        is_fresh_id: false,
        name: CommandName::trusted(name),
        request: Json::null(),
        precondition: None,
    }
}

pub fn at_version(version: u64, command: Command) -> Command {
    Command { precondition: Some(Precondition::Version(version)), ..command }
}

/// An owner's end of links, in the hands of the test. What is not read from a session waits, as it does at a process that stands still.
pub struct Owner {
    pub member: Member,
    sessions: mpsc::Receiver<Session>,
}

/// One connection of the link.
pub struct Session {
    incoming: Incoming,
    reader: Reader,
    /// None where the end is to be a broken one.
    out: mpsc::Sender<Option<Bytes>>,
}

impl Owner {
    /// Takes links on a port of its own.
    pub async fn listen(name: &str) -> Owner {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let member = Member { id: NodeId::trusted(name), url: format!("http://{}", listener.local_addr().unwrap()) };
        let (taken, sessions) = mpsc::channel(16);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let taken = taken.clone();
                let serve = service_fn(move |request: Request<Incoming>| {
                    let taken = taken.clone();
                    async move {
                        let (out, chunks) = mpsc::channel(16);
                        let session = Session { incoming: request.into_body(), reader: Reader::default(), out };
                        taken.send(session).await.map_err(io::Error::other)?;
                        let body = StreamBody::new(chunks_of(chunks));
                        Ok::<_, io::Error>(Response::builder().header(CONTENT_TYPE, MEDIA_TYPE).body(body).unwrap())
                    }
                });
                tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), serve));
            }
        });
        Owner { member, sessions }
    }

    /// The next connection that the link makes.
    pub async fn session(&mut self) -> Session {
        tokio::time::timeout(PATIENCE, self.sessions.recv()).await.expect("the link connects").unwrap()
    }
}

fn chunks_of(chunks: mpsc::Receiver<Option<Bytes>>) -> BoxStream<'static, Result<Frame<Bytes>, io::Error>> {
    Box::pin(stream::unfold(chunks, |mut chunks| async move {
        let frame = chunks.recv().await?.map(Frame::data).ok_or_else(|| io::Error::other("cut"));
        Some((frame, chunks))
    }))
}

impl Session {
    /// The next message; none once the other end is gone.
    pub async fn hear(&mut self) -> Option<ToOwner<'static>> {
        loop {
            if let Some(message) = self.reader.next().unwrap() {
                return Some(message);
            }
            let frame = tokio::time::timeout(PATIENCE, self.incoming.frame()).await.expect("something comes")?.ok()?;
            self.reader.take(&frame.into_data().ok()?);
        }
    }

    /// The next command; says that it is there meanwhile.
    pub async fn command(&mut self) -> Ask {
        loop {
            match self.hear().await.expect("a command comes") {
                ToOwner::Command(ask) => return ask.into_owned(),
                ToOwner::Ping => self.say(&FromOwner::Pong).await,
                ToOwner::LookUp { .. } => panic!("nobody looks anything up"),
            }
        }
    }

    /// The number of the next look-up.
    pub async fn look_up(&mut self) -> u64 {
        loop {
            match self.hear().await.expect("a look-up comes") {
                ToOwner::LookUp { number, .. } => return number,
                ToOwner::Ping => self.say(&FromOwner::Pong).await,
                ToOwner::Command(ask) => panic!("{} is passed on", ask.command.command_id),
            }
        }
    }

    /// Only ever says that it is there, until the other end is gone.
    pub async fn idle(mut self) {
        while let Some(message) = self.hear().await {
            if message == ToOwner::Ping {
                self.say(&FromOwner::Pong).await;
            }
        }
    }

    pub async fn say(&mut self, message: &FromOwner) {
        self.send(&frame(message)).await;
    }

    pub async fn answer(&mut self, ask: &Ask, result: CommandResult) {
        let result = result.map(|(answer, replay)| (Arc::unwrap_or_clone(answer), replay));
        self.say(&FromOwner::Answer { number: ask.number, result }).await;
    }

    /// Sends bytes as they are. The other end may be gone.
    pub async fn send(&mut self, bytes: &[u8]) {
        let _ = self.out.send(Some(Bytes::copy_from_slice(bytes))).await;
    }

    /// Breaks the connection.
    pub async fn cut(self) {
        let _ = self.out.send(None).await;
    }
}

pub fn frame(message: &FromOwner) -> Vec<u8> {
    let mut chunk = BytesMut::new();
    write(&mut chunk, message).unwrap();
    chunk.to_vec()
}

/// Handles what was passed on, as an owner does.
pub async fn handle(node: &Partitions, ask: &Ask) -> CommandResult {
    node.submit(&ask.entity_type, ask.command.clone(), WhenFull::Refuse).await?.answer().await
}

/// An answer for tables: version and response, or the failure.
pub fn told(result: &CommandResult) -> String {
    match result {
        Ok((answer, replay)) => format!("{} {} {replay:?}", answer.version, answer.response.as_str()),
        Err(error) => format!("{error:?}"),
    }
}
