//! What workers count. Labels are bounded: only commands that a handler set knows are named.

use super::queue::Envelope;
use super::{CommandError, CommandResult};
use crate::core::{CommandName, EntityType, EventOutcome, Failure, Replay};
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Counters of one worker, looked up once.
pub(super) struct WorkerMetrics {
    entity_type: EntityType,
    command_seconds: Histogram,
    commit_seconds: Histogram,
    batch_rows: Histogram,
    queue_depth: Gauge,
    commands: Mutex<HashMap<(CommandName, &'static str), Counter>>,
}

impl WorkerMetrics {
    pub fn new(entity_type: &EntityType) -> WorkerMetrics {
        WorkerMetrics {
            entity_type: entity_type.clone(),
            command_seconds: histogram!("quokka_command_seconds"),
            commit_seconds: histogram!("quokka_commit_seconds"),
            batch_rows: histogram!("quokka_batch_rows"),
            queue_depth: gauge!("quokka_queue_depth"),
            commands: Mutex::default(),
        }
    }

    pub fn queue_depth(&self, depth: usize) {
        self.queue_depth.set(depth as f64);
    }

    pub fn committed(&self, rows: usize, took: Duration) {
        self.batch_rows.record(rows as f64);
        self.commit_seconds.record(took);
    }

    pub fn answered(&self, envelope: &Envelope, result: &CommandResult) {
        self.command_seconds.record(envelope.queued_at.elapsed());
        let is_known = !matches!(result, Err(CommandError::Failed(Failure::UnknownCommand) | CommandError::UnknownEntityType));
        let command = if is_known { envelope.command.name.clone() } else { CommandName::trusted("unknown") };
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands
            .entry((command, outcome(result)))
            .or_insert_with_key(|(command, outcome)| {
                counter!("quokka_commands_total", "type" => self.entity_type.to_string(), "command" => command.to_string(), "outcome" => *outcome)
            })
            .increment(1);
    }
}

/// Counts a conflict with another writer, or an append that had to be sent again.
pub(super) fn conflict(reason: &'static str) {
    counter!("quokka_conflicts_total", "reason" => reason).increment(1);
}

fn outcome(result: &CommandResult) -> &'static str {
    match result {
        Ok((_, Replay::Again | Replay::Mismatch)) => "replayed",
        Ok((answer, Replay::First)) => match answer.outcome {
            EventOutcome::Accepted => "accepted",
            EventOutcome::Rejected => "rejected",
        },
        Err(CommandError::Failed(failure)) => match failure {
            Failure::UnknownCommand => "unknown_command",
            Failure::EntityExists { .. } => "entity_exists",
            Failure::EntityNotFound => "entity_not_found",
            Failure::VersionMismatch { .. } => "version_mismatch",
            Failure::InvalidRequest(_) => "invalid_request",
            Failure::HandlerFailed(_) => "handler_failed",
            Failure::StateInvalid(_) => "state_invalid",
            Failure::ResponseInvalid(_) => "response_invalid",
        },
        Err(CommandError::Reused(_)) => "command_id_reused",
        Err(CommandError::UnknownEntityType) => "unknown_entity_type",
        Err(CommandError::Overloaded { .. }) => "overloaded",
        Err(CommandError::ShuttingDown) => "shutting_down",
        Err(CommandError::Unavailable(_)) => "unavailable",
        Err(CommandError::OutcomeUnknown) => "outcome_unknown",
        Err(CommandError::Internal(_)) => "internal",
    }
}
