//! As what a command's end is counted.

use super::{CommandError, CommandResult};
use crate::core::{EventOutcome, Failure, Replay};
use crate::metrics::CommandOutcome;

pub(super) fn outcome(result: &CommandResult) -> CommandOutcome {
    match result {
        Ok((_, Replay::Again | Replay::Mismatch)) => CommandOutcome::Replayed,
        Ok((answer, Replay::First)) => match answer.outcome {
            EventOutcome::Accepted => CommandOutcome::Accepted,
            EventOutcome::Rejected => CommandOutcome::Rejected,
        },
        Err(CommandError::Failed(failure)) => match failure {
            Failure::HandlerFailed(_) | Failure::StateInvalid(_) | Failure::ResponseInvalid(_) => CommandOutcome::HandlerFailed,
            Failure::UnknownCommand | Failure::EntityExists { .. } | Failure::EntityNotFound | Failure::VersionMismatch { .. } | Failure::InvalidRequest(_) => {
                CommandOutcome::Refused
            }
        },
        Err(CommandError::Reused(_) | CommandError::UnknownEntityType | CommandError::Overloaded { .. }) => CommandOutcome::Refused,
        Err(CommandError::ShuttingDown | CommandError::Unavailable(_) | CommandError::Internal(_)) => CommandOutcome::Unavailable,
        Err(CommandError::OutcomeUnknown) => CommandOutcome::Unknown,
    }
}
