//! `keyframe unlock`: a lock that a dead writer left.

use super::StoreArg;
use crate::failure::{DONE, Failure, LOCKED, Outcome};
use crate::output;
use keyframe_store::backend::UnlockOutcome;
use serde::Serialize;

/// Remove the lock that a writer left which is dead
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A store in a directory needs no unlock: the system drops the lock when its process ends. Elsewhere a lock has an expiry time,
and the lock of a dead writer expires by itself. Use this command if you cannot wait for that.

Exit code 0: the store is not locked any more. 11: the holder lives, or may live. It is named, and keeps its lock.

Examples:
  keyframe unlock --store S
  keyframe unlock --store S --force    # the holder's host is gone, or is known to be off"
)]
pub struct Unlock {
    #[command(flatten)]
    store: StoreArg,
    /// Remove the lock even if the holder may still live. Two writers at once destroy checkpoints
    /// in progress
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Done {
    /// A lock was removed.
    removed: bool,
    /// The writer that held it.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
}

impl Unlock {
    /// Removes the lock, or names the writer that holds it.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let (removed, holder) =
            match store.unlock(self.force).map_err(|e| self.store.failure(&e))? {
                UnlockOutcome::Nothing => (false, None),
                UnlockOutcome::Removed(holder) => (true, Some(holder)),
                UnlockOutcome::Held(holder) => {
                    let text = format!("{}: locked by {holder}", store.path().display());
                    let failure =
                        Failure::new(text).fix("end it (keyframe stop), or wait until it ends");
                    return Err(Failure { code: LOCKED, ..failure });
                }
            };
        let text = match &holder {
            Some(holder) => format!("unlocked; it was locked by {holder}"),
            None => "nothing to unlock".into(),
        };
        if self.json {
            output::json(&Done { removed, holder })?;
        } else {
            output::print_line(&text)?;
        }
        Ok(DONE)
    }
}
