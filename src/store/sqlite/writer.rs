//! The one thread that writes: appends of several partitions share a transaction, and so its one sync of the disk.
//!
//! Each append has a savepoint of its own, so that one that meets a taken key is undone alone. Nobody is answered before COMMIT. The queue is bounded;
//! whoever finds no place in it in time is told that nothing happened. Once an append is in the queue it may still be written after its caller went
//! away, which is why a caller that stops waiting must count its outcome as unknown.

use crate::core::{Event, EventOutcome, Json, ShardId};
use crate::store::error::{AppendError, OpenError, sqlite_append_error, sqlite_commit_error};
use rusqlite::{Connection, params};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// How many appends may wait.
const QUEUE_MAX: usize = 1024;
/// How many bytes of events one transaction takes before it is committed.
const TRANSACTION_BYTES_MAX: usize = 16 << 20;

/// Hands appends to the thread; the thread ends once it is dropped and all that was queued is done.
pub(super) struct Writer {
    queue: mpsc::Sender<Append>,
}

struct Append {
    /// None at all where only the way to the disk is to be tried.
    parts: Vec<Part>,
    answer: oneshot::Sender<Result<(), AppendError>>,
}

/// Events of one partition.
pub(super) struct Part {
    /// Quoted.
    pub table: String,
    pub shard: ShardId,
    pub events: Vec<Event>,
}

impl Writer {
    pub(super) fn start(connection: Connection) -> Result<Writer, OpenError> {
        let (queue, appends) = mpsc::channel(QUEUE_MAX);
        let thread = std::thread::Builder::new().name("sqlite-writer".into()).spawn(move || run(connection, appends));
        thread.map_err(|error| OpenError::Unavailable(format!("cannot start the writer: {error}")))?;
        Ok(Writer { queue })
    }

    /// Writes all parts or none.
    pub(super) async fn append(&self, parts: Vec<Part>, patience: Duration) -> Result<(), AppendError> {
        let (answer, answered) = oneshot::channel();
        let append = Append { parts, answer };
        match timeout(patience, self.queue.send(append)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(AppendError::Unavailable("the writer has stopped".into())),
            Err(_) => return Err(AppendError::Unavailable("the writer is busy".into())),
        }
        match timeout(patience, answered).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(AppendError::Unknown("the writer has stopped".into())),
            Err(_) => Err(AppendError::Unknown("no answer in time".into())),
        }
    }

    /// Whether the thread lives and a transaction for writing can be had.
    pub(super) async fn probe(&self, patience: Duration) -> Result<(), AppendError> {
        self.append(Vec::new(), patience).await
    }
}

fn run(mut connection: Connection, mut appends: mpsc::Receiver<Append>) {
    while let Some(first) = appends.blocking_recv() {
        let mut batch = vec![first];
        let mut bytes = weight(&batch[0]);
        while bytes < TRANSACTION_BYTES_MAX
            && let Ok(next) = appends.try_recv()
        {
            bytes += weight(&next);
            batch.push(next);
        }
        let outcomes = commit(&mut connection, &batch);
        for (append, outcome) in batch.into_iter().zip(outcomes) {
            // A caller that went away does not need the answer.
            let _ = append.answer.send(outcome);
        }
    }
}

fn weight(append: &Append) -> usize {
    append.parts.iter().flat_map(|part| &part.events).map(Event::weight).sum()
}

/// Writes all appends in one transaction; returns what became of each.
fn commit(connection: &mut Connection, batch: &[Append]) -> Vec<Result<(), AppendError>> {
    if let Err(error) = connection.execute_batch("BEGIN IMMEDIATE") {
        return vec![Err(sqlite_append_error(&error)); batch.len()];
    }
    let mut outcomes: Vec<_> = batch.iter().map(|append| append_one(connection, append)).collect();
    // A grave failure, such as a full disk, ends the transaction by itself: nothing of it is there then.
    let outcome = if connection.is_autocommit() {
        Err(AppendError::Interrupted("the transaction of another append failed".into()))
    } else {
        connection.execute_batch("COMMIT").map_err(|error| sqlite_commit_error(&error))
    };
    if let Err(error) = outcome {
        let is_gone = connection.is_autocommit() || connection.execute_batch("ROLLBACK").is_ok();
        let error = if is_gone { error } else { AppendError::Unknown("the transaction could not be undone".into()) };
        outcomes.iter_mut().filter(|outcome| outcome.is_ok()).for_each(|outcome| *outcome = Err(error.clone()));
    }
    outcomes
}

/// Writes one append inside a savepoint, and undoes it where it fails.
fn append_one(connection: &Connection, append: &Append) -> Result<(), AppendError> {
    if connection.is_autocommit() {
        return Err(AppendError::Interrupted("the transaction of another append failed".into()));
    }
    let failed = |error: rusqlite::Error| sqlite_append_error(&error);
    connection.execute_batch("SAVEPOINT append").map_err(failed)?;
    let inserted = append.parts.iter().try_for_each(|part| insert(connection, part)).map_err(failed);
    if !connection.is_autocommit() {
        let end = if inserted.is_ok() { "RELEASE append" } else { "ROLLBACK TO append; RELEASE append" };
        connection.execute_batch(end).map_err(failed)?;
    }
    inserted
}

fn insert(connection: &Connection, part: &Part) -> Result<(), rusqlite::Error> {
    let sql = format!(
        "INSERT INTO {} (shard, event_id, entity_id, version, command_id, command_name, outcome, handler_version, request, response, state, handled_at, \
         committed_at, state_base) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)",
        part.table
    );
    let mut statement = connection.prepare_cached(&sql)?;
    let committed_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX));
    for event in &part.events {
        let outcome = match event.outcome {
            EventOutcome::Accepted => "accepted",
            EventOutcome::Rejected => "rejected",
        };
        statement.execute(params![
            part.shard.0,
            integer(event.event_id)?,
            event.entity_id.as_str(),
            integer(event.version)?,
            event.command_id.as_str(),
            event.command.as_str(),
            outcome,
            event.handler_version.0.as_str(),
            Some(event.request.as_str()).filter(|request| *request != "null"),
            event.response.as_str(),
            event.state_column().map(Json::as_str),
            event.handled_at,
            committed_at,
            event.patch.as_ref().map(|patch| integer(patch.base)).transpose()?,
        ])?;
    }
    Ok(())
}

/// SQLite's integers have a sign.
fn integer(number: u64) -> Result<i64, rusqlite::Error> {
    i64::try_from(number).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{CommandId, CommandName, EntityId, HandlerVersion};

    fn connection() -> Connection {
        let connection = Connection::open_in_memory().unwrap();
        super::super::connection::create_events(&connection, "\"account\"").unwrap();
        connection
    }

    fn append(shard: u16, event_id: u64, response_bytes: usize) -> Append {
        let id = format!("e{shard}-{event_id}");
        let event = Event {
            event_id,
            entity_id: EntityId::trusted(&id),
            version: 1,
            command_id: CommandId::trusted("k"),
            command: CommandName::trusted("open"),
            outcome: EventOutcome::Accepted,
            handler_version: HandlerVersion("v".into()),
            request: Json::null(),
            response: Json::trusted(format!("\"{}\"", "x".repeat(response_bytes))),
            state: None,
            patch: None,
            handled_at: 0,
        };
        let part = Part { table: "\"account\"".into(), shard: ShardId(shard), events: vec![event] };
        Append { parts: vec![part], answer: oneshot::channel().0 }
    }

    fn rows(connection: &Connection) -> i64 {
        connection.query_row("SELECT COUNT(*) FROM account", [], |row| row.get(0)).unwrap()
    }

    #[test]
    fn one_refused_append_leaves_its_neighbours_alone() {
        let mut connection = connection();
        let outcomes = commit(&mut connection, &[append(1, 1, 1), append(1, 1, 1), append(2, 1, 1)]);
        assert!(matches!(outcomes[..], [Ok(()), Err(AppendError::PositionTaken), Ok(())]), "{outcomes:?}");
        assert_eq!(rows(&connection), 2);
    }

    #[test]
    fn a_full_disk_fails_every_append_of_its_transaction_for_sure() {
        let mut connection = connection();
        connection.pragma_update(None, "max_page_count", 20).unwrap();
        let outcomes = commit(&mut connection, &[append(1, 1, 1), append(1, 2, 1 << 20), append(2, 1, 1)]);
        assert!(matches!(outcomes[..], [Err(AppendError::Interrupted(_)), Err(AppendError::Unavailable(_)), Err(AppendError::Interrupted(_))]), "{outcomes:?}");
        assert_eq!(rows(&connection), 0);
        assert!(matches!(commit(&mut connection, &[append(1, 1, 1)])[..], [Ok(())]));
    }

    #[test]
    fn a_lock_that_another_process_holds_is_no_failure_of_the_append() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q.db");
        let mut connection = Connection::open(&path).unwrap();
        super::super::connection::create_events(&connection, "\"account\"").unwrap();
        connection.busy_timeout(Duration::ZERO).unwrap();
        let stranger = Connection::open(&path).unwrap();
        stranger.execute_batch("BEGIN IMMEDIATE").unwrap();
        assert!(matches!(commit(&mut connection, &[append(1, 1, 1)])[..], [Err(AppendError::Interrupted(_))]));
        stranger.execute_batch("ROLLBACK").unwrap();
        assert!(matches!(commit(&mut connection, &[append(1, 1, 1)])[..], [Ok(())]));
    }
}
