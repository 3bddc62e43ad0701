//! Appends of several partitions that happen together or not at all.
//!
//! Of one entity type they are one INSERT, as always. Several tables need a transaction, and one that is sent statement by statement would hold its
//! locks for as long as a frozen sender sleeps; so the statements are sent as one call of a procedure, which begins the transaction and ends it
//! whatever happens. The procedure is made when it is first missed.

use super::append_error;
use super::pool::{Failure, Pool};
use super::statement;
use crate::core::{EntityType, Event, Partition};
use crate::store::error::{AppendError, mysql_call_error, mysql_connect_text, mysql_is_unknown_procedure};
use std::collections::BTreeMap;
use std::time::Duration;

const PROCEDURE: &str = include_str!("../../../schema/mysql/quokka_append_all.sql");

/// How long the statement may take before the server is asked to give it up, and how much longer for its size: a lock that a stranger holds on one
/// partition must not hold up the others through the rows that were written there before.
const PATIENCE: Duration = Duration::from_millis(250);
const PATIENCE_PER_MIB: Duration = Duration::from_millis(250);

/// Writes all or nothing. `statement_max` is the most bytes that a statement may take.
pub(super) async fn append_all(pool: &Pool, appends: &[(Partition, Vec<Event>)], statement_max: usize) -> Result<(), AppendError> {
    let mut tables: BTreeMap<&EntityType, Vec<Vec<u8>>> = BTreeMap::new();
    for (partition, events) in appends {
        tables.entry(&partition.entity_type).or_default().push(statement::rows(partition, events));
    }
    let inserts = tables.into_iter().map(|(entity_type, rows)| {
        let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
        statement::insert(entity_type, &rows)
    });
    let inserts: Vec<statement::Statement> = inserts.collect();
    let together = match &inserts[..] {
        [] => return Ok(()),
        [insert] => insert.clone(),
        inserts => statement::call_append_all(inserts).ok_or_else(|| AppendError::Refused("a statement is no text".into()))?,
    };
    if together.as_bytes().len() > statement_max {
        return Err(AppendError::TooLarge);
    }
    let patience = PATIENCE + PATIENCE_PER_MIB * u32::try_from(together.as_bytes().len() >> 20).unwrap_or(u32::MAX);
    if inserts.len() == 1 {
        return pool.query_within(together.as_bytes(), patience).await.map(|_| ()).map_err(append_error);
    }
    match pool.query_within(together.as_bytes(), patience).await {
        Err(Failure::Sent(error)) if mysql_is_unknown_procedure(&error) => {
            pool.query(PROCEDURE.as_bytes()).await.map_err(|failure| match failure {
                // Nothing of the events was sent again, so nothing of them is unknown.
                Failure::NotSent(reason) => AppendError::Unavailable(reason.to_string()),
                Failure::Sent(error) => AppendError::Refused(mysql_connect_text(&error)),
                Failure::TimedOut => AppendError::Unavailable("no answer in time".into()),
            })?;
            pool.query_within(together.as_bytes(), patience).await.map(|_| ()).map_err(call_error)
        }
        outcome => outcome.map(|_| ()).map_err(call_error),
    }
}

fn call_error(failure: Failure) -> AppendError {
    match failure {
        Failure::Sent(error) => mysql_call_error(&error),
        failure @ (Failure::NotSent(_) | Failure::TimedOut) => append_error(failure),
    }
}
