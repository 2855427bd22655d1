//! How a command with a standby fails.

use crate::failure::{Failure, USAGE, chain};
use keyframe_failover::Error;

/// The failure of a command by `error`, with the exit code.
pub fn failure(error: Error) -> Failure {
    match error {
        Error::Session(error) => error.into(),
        Error::VmDisks(error) => error.into(),
        error => {
            let failure = Failure { fix: error.fix(), ..Failure::new(chain(&error)) };
            if error.is_usage() { Failure { code: USAGE, ..failure } } else { failure }
        }
    }
}
