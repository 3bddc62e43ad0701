//! The two ends of a queued request: [`Envelope`] at the worker, [`Pending`] at the caller.
//!
//! Who gives up first is settled by one atomic: a command that its caller abandons while it is queued is never run, so
//! the caller may be told that it did not happen; once the worker has claimed it, nobody can know.
//!
//! What a caller wants kept while its command is under way ([`Kept`]) is let go by whichever end is done first, whether or not the other one has noticed.

use super::{Command, CommandError, CommandResult};
use crate::core::{Answer, CommandId, EntityId};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::sync::oneshot;
use tokio::time::Instant;

/// When a caller who met a full queue should try again.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What is kept until a command is answered, or given up by its caller, and then dropped. An answer that nobody has read yet keeps nothing.
pub type Kept = Option<Box<dyn Send + Sync>>;

const QUEUED: u8 = 0;
const CLAIMED: u8 = 1;
const ABANDONED: u8 = 2;

/// What waits in a queue.
pub(super) enum Request {
    Command(Envelope),
    LookUp(LookUp),
}

/// A question what a command was answered; asked in turn, so that all before it is settled.
pub(super) struct LookUp {
    pub entity_id: EntityId,
    pub command_id: CommandId,
    pub reply: oneshot::Sender<Found>,
}

/// What a look-up hears.
pub(super) type Found = Result<Option<Arc<Answer>>, CommandError>;

/// What both ends of a command share.
struct Ticket {
    place: AtomicU8,
    kept: Mutex<Kept>,
}

impl Ticket {
    fn let_go(&self) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(kept);
    }
}

/// A queued command.
pub(super) struct Envelope {
    pub command: Command,
    /// Milliseconds since 1970: the time that the handler sees, however often it runs.
    pub now: i64,
    pub queued_at: Instant,
    pub deadline: Instant,
    ticket: Arc<Ticket>,
    reply: oneshot::Sender<CommandResult>,
}

impl Envelope {
    /// Takes the command for running. False where its caller has gone: drop it then.
    pub fn claim(&self) -> bool {
        self.ticket.place.compare_exchange(QUEUED, CLAIMED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether its caller has gone before it was claimed.
    pub fn is_abandoned(&self) -> bool {
        self.ticket.place.load(Ordering::Acquire) == ABANDONED
    }

    /// Puts a claimed command, of which nothing was sent to the database, back among the queued ones.
    pub fn release(&self) {
        self.ticket.place.store(QUEUED, Ordering::Release);
    }

    pub fn answer(self, result: CommandResult) {
        self.ticket.let_go();
        // A caller who has gone needs no answer.
        let _ = self.reply.send(result);
    }
}

/// Why a queue does not move, seen from both ends.
#[derive(Debug, Default)]
pub(super) struct Holdup(AtomicBool);

impl Holdup {
    /// Notes whether the worker is waiting for the database to come back.
    pub fn set(&self, waits_for_storage: bool) {
        self.0.store(waits_for_storage, Ordering::Relaxed);
    }

    fn reason(&self) -> CommandError {
        if self.0.load(Ordering::Relaxed) {
            CommandError::Unavailable("the commands before it wait for the database".into())
        } else {
            CommandError::Overloaded { retry_after: RETRY_AFTER }
        }
    }
}

/// A command that has its place in the queue. Dropping it gives up the place where the command has not started.
pub struct Pending {
    deadline: Instant,
    ticket: Arc<Ticket>,
    holdup: Arc<Holdup>,
    answer: oneshot::Receiver<CommandResult>,
}

impl Pending {
    /// Waits for the answer; never longer than the command's deadline.
    pub async fn answer(mut self) -> CommandResult {
        match tokio::time::timeout_at(self.deadline, &mut self.answer).await {
            Ok(Ok(result)) => result,
            // The worker broke down with the command in its hands, or the process is ending.
            Ok(Err(_)) => Err(CommandError::OutcomeUnknown),
            Err(_) if self.abandon() => Err(self.holdup.reason()),
            Err(_) => self.answer.try_recv().unwrap_or(Err(CommandError::OutcomeUnknown)),
        }
    }

    fn abandon(&self) -> bool {
        self.ticket.place.compare_exchange(QUEUED, ABANDONED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.abandon();
        self.ticket.let_go();
    }
}

/// A command's two ends.
pub(super) fn command(command: Command, deadline: Instant, holdup: Arc<Holdup>, kept: Kept) -> (Request, Pending) {
    let (reply, answer) = oneshot::channel();
    let ticket = Arc::new(Ticket { place: AtomicU8::new(QUEUED), kept: Mutex::new(kept) });
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
    let pending = Pending { deadline, ticket: ticket.clone(), holdup, answer };
    (Request::Command(Envelope { command, now, queued_at: Instant::now(), deadline, ticket, reply }), pending)
}

/// A look-up's two ends.
pub(super) fn look_up(entity_id: EntityId, command_id: CommandId) -> (Request, oneshot::Receiver<Found>) {
    let (reply, found) = oneshot::channel();
    (Request::LookUp(LookUp { entity_id, command_id, reply }), found)
}
