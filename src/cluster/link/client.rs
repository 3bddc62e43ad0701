//! This node's end of a link to an owner: keeps it open, passes commands on, and hands back what the owner does not answer.
//!
//! [`Link`] is kept by one task for as long as the owner is in the shard map. While the link is open, commands go into its session; where it is not,
//! callers handle them themselves, at once: nobody waits for a node that could not be reached a moment ago. Only while the very first connection is
//! being made, callers wait for it.
//!
//! An owner is given up when its connection breaks, when nothing is heard from it for `silence_max` (it answers pings, however busy its
//! database is), when it says that it stops, or when it says that it cannot reach the database. Then the session takes no more commands; all that it
//! still holds is handled here, in the order in which it came; and only after that do later commands go their own way.
//!
//! What was written to the link and is handled here after all may still be handled by the owner, too, whenever it wakes up. The command id keeps it from
//! happening twice; but that it did *not* happen, nobody can say then, so an answer of that kind becomes [`CommandError::OutcomeUnknown`].

use super::super::peer::Peer;
use super::wire::{Ask, FromOwner, Reader, ToOwner, write};
use super::{MEDIA_TYPE, PATH};
use crate::core::{Answer, CommandId, EntityType, Failure, Member, NodeId, Precondition, Replay};
use crate::metrics::{Fallback, ForwardMetrics};
use crate::partition::{Command, CommandError, CommandResult, EntityKey, Kept, Partitions, WhenFull};
use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// How many commands wait to be written to a link.
const QUEUE_MAX: usize = 4096;
/// How many commands may wait for the owner's answers, and how many bytes they may hold.
const WINDOW: usize = 16 * 1024;
const WINDOW_BYTES: usize = 64 << 20;
/// How many commands are written at once.
const WRITE_MAX: usize = 512;
/// How long to wait before the owner is tried again: the first time, and at most.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How much longer than the command's own time the owner's word is waited for.
const PATIENCE: Duration = Duration::from_millis(500);

/// What all links of a node share.
pub struct Shared {
    /// Handles what the owners do not.
    pub partitions: Partitions,
    /// Reaches other nodes.
    pub peer: Peer,
    /// How long an owner may be silent.
    pub silence_max: Duration,
    /// Counts.
    pub metrics: ForwardMetrics,
}

/// The way to one owner. Once it is dropped nothing more is passed on, and the link closes when all that is on its way is answered.
pub struct Link {
    owner: Member,
    state: Arc<ArcSwap<State>>,
    stop: CancellationToken,
}

enum State {
    /// The first connection is being made; cancelled once it is there or has failed.
    Connecting(CancellationToken),
    Open(Session),
    Down,
}

#[derive(Clone)]
struct Session {
    commands: mpsc::Sender<Passed>,
    /// Cancelled once the session has handed back all it held.
    drained: CancellationToken,
}

/// What became of an attempt to pass something on.
pub enum Sent<T> {
    /// It is on its way.
    Passed(T),
    /// The owner cannot be reached: to be handled here.
    Back {
        /// It.
        command: Command,
        /// What was to be kept until it is answered.
        kept: Kept,
    },
}

/// What goes through a session.
enum Passed {
    Command { ask: Box<Ask>, deadline: Instant, reply: oneshot::Sender<Handled>, kept: Kept },
    LookUp { entity: EntityKey, command_id: CommandId, deadline: Instant, reply: oneshot::Sender<Found> },
}

type Found = Result<Option<Arc<Answer>>, CommandError>;

/// An answer, and which other node handled the command; none where this one did.
pub struct Handled {
    /// The answer.
    pub result: CommandResult,
    /// The owner.
    pub by: Option<NodeId>,
}

/// A command that was passed on.
pub struct Waiting {
    deadline: Instant,
    reply: oneshot::Receiver<Handled>,
}

impl Waiting {
    /// Waits for the answer; hardly longer than the command's time.
    pub async fn answer(self) -> Handled {
        match tokio::time::timeout_at(self.deadline + PATIENCE, self.reply).await {
            Ok(Ok(handled)) => handled,
            Ok(Err(_)) | Err(_) => Handled { result: Err(CommandError::OutcomeUnknown), by: None },
        }
    }
}

impl Link {
    /// Starts to keep a link.
    pub fn start(owner: Member, shared: Arc<Shared>) -> Link {
        let first = CancellationToken::new();
        let state = Arc::new(ArcSwap::from_pointee(State::Connecting(first.clone())));
        let stop = CancellationToken::new();
        let keeper = Keeper { owner: owner.clone(), shared, state: state.clone(), stop: stop.clone() };
        // Not bound to the link's life: it ends by itself, after what is on its way.
        tokio::spawn(keeper.run(first));
        Link { owner, state, stop }
    }

    /// The node at the other end.
    pub fn owner(&self) -> &Member {
        &self.owner
    }

    /// Passes a command on. Returns once the command has its place in the order of all that go this way. `kept` is dropped once it is answered.
    pub async fn send(
        &self,
        entity_type: &EntityType,
        command: Command,
        when_full: WhenFull,
        timeout: Duration,
        trace_id: Option<&str>,
        kept: Kept,
    ) -> Result<Sent<Waiting>, CommandError> {
        let Some(session) = self.session().await else { return Ok(Sent::Back { command, kept }) };
        let deadline = Instant::now() + timeout;
        let (reply, waiting) = oneshot::channel();
        let ask = Ask { number: 0, timeout, when_full, trace_id: trace_id.map(str::to_owned), entity_type: entity_type.clone(), command };
        let passed = Passed::Command { ask: Box::new(ask), deadline, reply, kept };
        let closed = match when_full {
            WhenFull::Refuse => match session.commands.try_send(passed) {
                Ok(()) => None,
                Err(mpsc::error::TrySendError::Full(_)) => return Err(CommandError::Overloaded { retry_after: Duration::from_secs(1) }),
                Err(mpsc::error::TrySendError::Closed(passed)) => Some(passed),
            },
            WhenFull::Wait => match session.commands.send_timeout(passed, timeout).await {
                Ok(()) => None,
                Err(mpsc::error::SendTimeoutError::Timeout(_)) => return Err(CommandError::Overloaded { retry_after: Duration::from_secs(1) }),
                Err(mpsc::error::SendTimeoutError::Closed(passed)) => Some(passed),
            },
        };
        match closed {
            Some(Passed::Command { ask, kept, .. }) => {
                // Those before it are handed back first.
                session.drained.cancelled().await;
                Ok(Sent::Back { command: ask.command, kept })
            }
            Some(Passed::LookUp { .. }) | None => Ok(Sent::Passed(Waiting { deadline, reply: waiting })),
        }
    }

    /// Asks the owner what a command was answered; none where it cannot be reached.
    pub async fn look_up(&self, entity: &EntityKey, command_id: &CommandId, timeout: Duration) -> Option<Found> {
        let session = self.session().await?;
        let (reply, found) = oneshot::channel();
        let deadline = Instant::now() + timeout;
        session.commands.send(Passed::LookUp { entity: entity.clone(), command_id: command_id.clone(), deadline, reply }).await.ok()?;
        tokio::time::timeout_at(deadline + PATIENCE, found).await.ok()?.ok()
    }

    /// Whether commands can be passed on now. Waits for the first connection while it is being made.
    pub async fn is_usable(&self) -> bool {
        self.session().await.is_some()
    }

    async fn session(&self) -> Option<Session> {
        loop {
            let first = match &**self.state.load() {
                State::Open(session) => return Some(session.clone()),
                State::Down => return None,
                State::Connecting(first) => first.clone(),
            };
            first.cancelled().await;
        }
    }
}

/// Keeps the link: connects, talks, tries again.
struct Keeper {
    owner: Member,
    shared: Arc<Shared>,
    state: Arc<ArcSwap<State>>,
    stop: CancellationToken,
}

impl Keeper {
    async fn run(self, first: CancellationToken) {
        let (mut pause, mut was_told) = (PAUSE_MIN, false);
        while !self.stop.is_cancelled() {
            let connecting = tokio::time::timeout(self.shared.silence_max, self.shared.peer.open(&self.owner.url, PATH, MEDIA_TYPE));
            let Some(connected) = self.stop.run_until_cancelled(connecting).await else { break };
            let reason = match connected {
                Ok(Ok((out, incoming))) => {
                    if was_told {
                        tracing::info!(node = %self.owner.id, "a node can be reached again");
                        was_told = false;
                    }
                    let since = Instant::now();
                    let ended = self.talk(out, incoming, &first).await;
                    if since.elapsed() > PAUSE_MAX {
                        pause = PAUSE_MIN;
                    }
                    ended
                }
                Ok(Err(error)) => Ended::Broken(error.to_string()),
                Err(_) => Ended::Broken("no answer in time".into()),
            };
            self.state.store(Arc::new(State::Down));
            first.cancel();
            if let (Ended::Broken(reason), false) = (reason, was_told) {
                tracing::warn!(node = %self.owner.id, url = self.owner.url, reason, "a node cannot be reached; its commands are handled here");
                was_told = true;
            }
            let drawn = pause.mul_f64(rand::random_range(0.5..1.0));
            let _ = self.stop.run_until_cancelled(tokio::time::sleep(drawn)).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        self.state.store(Arc::new(State::Down));
        first.cancel();
    }

    /// One session, from the first command that it takes to the last that it hands back.
    async fn talk(&self, out: mpsc::Sender<Bytes>, incoming: Incoming, first: &CancellationToken) -> Ended {
        let (sender, commands) = mpsc::channel(QUEUE_MAX);
        let drained = CancellationToken::new();
        self.state.store(Arc::new(State::Open(Session { commands: sender, drained: drained.clone() })));
        first.cancel();
        let mut talk = Talk {
            owner: &self.owner.id,
            shared: &self.shared,
            commands,
            out,
            incoming,
            reader: Reader::default(),
            outgoing: BytesMut::new(),
            pending: BTreeMap::new(),
            pending_bytes: 0,
            last_number: 0,
            heard: Instant::now(),
        };
        let ended = talk.run(&self.stop).await;
        talk.hand_back_all().await;
        self.state.store(Arc::new(State::Down));
        drained.cancel();
        ended
    }
}

/// How a session ended.
enum Ended {
    /// As it should: this node needs the link no more, or the owner stops.
    Orderly,
    /// The owner has no database.
    NoStorage,
    /// The connection broke, or nothing came.
    Broken(String),
}

/// A session.
struct Talk<'a> {
    owner: &'a NodeId,
    shared: &'a Arc<Shared>,
    commands: mpsc::Receiver<Passed>,
    out: mpsc::Sender<Bytes>,
    incoming: Incoming,
    reader: Reader,
    /// Written next.
    outgoing: BytesMut,
    /// What waits for the owner's answers, by number.
    pending: BTreeMap<u64, Passed>,
    pending_bytes: usize,
    last_number: u64,
    /// When the owner was heard last.
    heard: Instant,
}

impl Talk<'_> {
    async fn run(&mut self, stop: &CancellationToken) -> Ended {
        let (silence_max, out) = (self.shared.silence_max, self.out.clone());
        let mut ticks = tokio::time::interval(silence_max / 4);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut taken = Vec::with_capacity(WRITE_MAX);
        let mut is_closing = false;
        while !(is_closing && self.commands.is_empty() && self.pending.is_empty()) {
            let has_room = self.pending.len() < WINDOW && self.pending_bytes < WINDOW_BYTES && self.outgoing.is_empty();
            let may_take = has_room && !(is_closing && self.commands.is_empty());
            tokio::select! {
                _ = self.commands.recv_many(&mut taken, WRITE_MAX), if may_take => {
                    for passed in taken.drain(..) {
                        self.write(passed).await;
                    }
                }
                // Never waited for alone: the owner may be unable to read more before its answers are read here.
                permit = out.reserve(), if !self.outgoing.is_empty() => match permit {
                    Ok(permit) => permit.send(self.outgoing.split().freeze()),
                    Err(_) => return Ended::Broken("the connection is closed".into()),
                },
                frame = self.incoming.frame() => match frame {
                    Some(Ok(frame)) => {
                        self.heard = Instant::now();
                        if let Ok(chunk) = frame.into_data() {
                            self.reader.take(&chunk);
                            match self.hear().await {
                                Ok(()) => {}
                                Err(Ended::Orderly) => {
                                    is_closing = true;
                                    self.commands.close();
                                }
                                Err(ended) => return ended,
                            }
                        }
                    }
                    Some(Err(error)) => return Ended::Broken(error.to_string()),
                    None => return Ended::Broken("the connection is closed".into()),
                },
                _ = ticks.tick() => {
                    self.give_up();
                    let silent = self.heard.elapsed();
                    if silent >= silence_max {
                        return Ended::Broken("nothing is heard from it".into());
                    }
                    if silent >= silence_max / 4 && self.outgoing.is_empty() {
                        let _ = write(&mut self.outgoing, &ToOwner::Ping);
                    }
                }
                () = stop.cancelled(), if !is_closing => {
                    is_closing = true;
                    self.commands.close();
                }
            }
        }
        Ended::Orderly
    }

    /// Writes a command; one that cannot be written is handled here.
    async fn write(&mut self, mut passed: Passed) {
        self.last_number += 1;
        let number = self.last_number;
        let written = match &mut passed {
            Passed::Command { ask, .. } => {
                ask.number = number;
                write(&mut self.outgoing, &ToOwner::Command(Cow::Borrowed(ask)))
            }
            Passed::LookUp { entity, command_id, deadline, .. } => {
                let EntityKey { entity_type, entity_id } = entity.clone();
                let timeout = deadline.saturating_duration_since(Instant::now());
                write(&mut self.outgoing, &ToOwner::LookUp { number, timeout, entity_type, entity_id, command_id: command_id.clone() })
            }
        };
        match written {
            Ok(()) => {
                self.pending_bytes += passed.weight();
                self.pending.insert(number, passed);
            }
            Err(error) => {
                tracing::error!(%error, "a command cannot be written to a link");
                hand_back(self.shared, passed, WasSent::No).await;
            }
        }
    }

    /// Forgets what an owner that is there never answered, well after its callers have: else it would hold its place for as long as the link lasts.
    fn give_up(&mut self) {
        while let Some((number, passed)) = self.pending.first_key_value()
            && passed.deadline() + 2 * PATIENCE < Instant::now()
        {
            let number = *number;
            self.settle(number);
        }
    }

    /// Takes the messages that are whole.
    async fn hear(&mut self) -> Result<(), Ended> {
        let mut is_leaving = false;
        loop {
            let message = self.reader.next().map_err(|error| Ended::Broken(error.to_string()))?;
            match message {
                None if is_leaving => return Err(Ended::Orderly),
                None => return Ok(()),
                Some(FromOwner::Pong) => {}
                Some(FromOwner::Leaving) => is_leaving = true,
                Some(FromOwner::NoStorage) => return Err(Ended::NoStorage),
                Some(FromOwner::Answer { number, result }) => self.answer(number, result).await?,
                Some(FromOwner::Found { number, result }) => {
                    if let Some(Passed::LookUp { reply, .. }) = self.settle(number) {
                        let _ = reply.send(result.map(|found| found.map(Arc::new)));
                    }
                }
            }
        }
    }

    fn settle(&mut self, number: u64) -> Option<Passed> {
        let passed = self.pending.remove(&number)?;
        self.pending_bytes = self.pending_bytes.saturating_sub(passed.weight());
        Some(passed)
    }

    async fn answer(&mut self, number: u64, result: Result<(Answer, Replay), CommandError>) -> Result<(), Ended> {
        match result {
            // It did not happen there, and may well happen here.
            Err(CommandError::ShuttingDown | CommandError::UnknownEntityType) => {
                if let Some(passed) = self.settle(number) {
                    hand_back(self.shared, passed, WasSent::No).await;
                }
            }
            // It stays among those that are handled here, in their order.
            Err(CommandError::Unavailable(_) | CommandError::OutcomeUnknown) => return Err(Ended::NoStorage),
            Ok(_) | Err(CommandError::Failed(_) | CommandError::Reused(_) | CommandError::Overloaded { .. } | CommandError::Internal(_)) => {
                if let Some(Passed::Command { reply, .. }) = self.settle(number) {
                    self.shared.metrics.forwarded();
                    let result = result.map(|(answer, replay)| (Arc::new(answer), replay));
                    let _ = reply.send(Handled { result, by: Some(self.owner.clone()) });
                }
            }
        }
        Ok(())
    }

    /// Handles all that is left here, in the order in which it came.
    async fn hand_back_all(&mut self) {
        self.commands.close();
        for (_, passed) in std::mem::take(&mut self.pending) {
            hand_back(self.shared, passed, WasSent::Yes).await;
        }
        while let Some(passed) = self.commands.recv().await {
            hand_back(self.shared, passed, WasSent::No).await;
        }
    }
}

/// Whether the owner may handle it, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WasSent {
    Yes,
    No,
}

impl Passed {
    fn deadline(&self) -> Instant {
        match self {
            Passed::Command { deadline, .. } | Passed::LookUp { deadline, .. } => *deadline,
        }
    }

    fn weight(&self) -> usize {
        match self {
            Passed::Command { ask, .. } => ask.command.request.len() + ask.command.command_id.as_str().len() + size_of::<Ask>(),
            Passed::LookUp { .. } => size_of::<Passed>(),
        }
    }
}

/// Handles here what was to be passed on. Returns once it has its place in the queue.
async fn hand_back(shared: &Arc<Shared>, passed: Passed, was_sent: WasSent) {
    match passed {
        Passed::Command { ask, deadline, reply, kept } => {
            shared.metrics.fell_back(Fallback::HandedBack);
            let Ask { entity_type, when_full, mut command, .. } = *ask;
            // An earlier try may exist now.
            command.is_fresh_id &= was_sent == WasSent::No;
            let timeout = deadline.saturating_duration_since(Instant::now());
            let precondition = command.precondition;
            let told = move |result| Handled { result: if was_sent == WasSent::Yes { doubted(result, precondition) } else { result }, by: None };
            match shared.partitions.submit_within(&entity_type, command, when_full, timeout, kept).await {
                Ok(pending) => {
                    tokio::spawn(async move { reply.send(told(pending.answer().await)) });
                }
                Err(error) => {
                    let _ = reply.send(told(Err(error)));
                }
            }
        }
        Passed::LookUp { entity, command_id, deadline, reply } => {
            let partitions = shared.partitions.clone();
            tokio::spawn(async move {
                let found = tokio::time::timeout_at(deadline, partitions.look_up(&entity, &command_id)).await;
                reply.send(found.unwrap_or(Err(CommandError::OutcomeUnknown)))
            });
        }
    }
}

/// What can be said of a command that another node may handle later, too: what is recorded, and what can never change. An entity that is past the
/// version that the caller demands never returns to it; one that is not there yet may still come to it before the other node wakes up.
fn doubted(result: CommandResult, precondition: Option<Precondition>) -> CommandResult {
    let is_past = |version| matches!(precondition, Some(Precondition::Version(demanded)) if demanded < version);
    match result {
        Ok(answered) => Ok(answered),
        Err(error @ (CommandError::Reused(_) | CommandError::Failed(Failure::EntityExists { .. }))) => Err(error),
        Err(error @ CommandError::Failed(Failure::VersionMismatch { version })) if is_past(version) => Err(error),
        Err(
            CommandError::Failed(_)
            | CommandError::UnknownEntityType
            | CommandError::Overloaded { .. }
            | CommandError::ShuttingDown
            | CommandError::Unavailable(_)
            | CommandError::OutcomeUnknown
            | CommandError::Internal(_),
        ) => Err(CommandError::OutcomeUnknown),
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
