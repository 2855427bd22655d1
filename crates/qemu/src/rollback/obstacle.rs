//! Operations of the VM's user that a rollback would spoil, or that would spoil it.

use crate::{Error, Qmp, Result, RunStatus};
use serde_json::{Value, json};
use std::fmt;

/// States of a migration in which QEMU reads the VM's memory.
const MIGRATING: &[&str] = &[
    "setup",
    "cancelling",
    "active",
    "postcopy-active",
    "postcopy-paused",
    "postcopy-recover-setup",
    "postcopy-recover",
    "colo",
    "pre-switchover",
    "device",
    "wait-unplug",
];

/// The reason why a VM cannot be rolled back now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RollbackObstacle {
    /// A migration is under way.
    Migration,
    /// The VM has moved to another QEMU, or waits for its state from one.
    NotHere {
        /// QEMU's name of the run state.
        state: String,
    },
    /// The checkpoint's VM stood still in this run state, and this VM cannot be brought into it.
    TargetStands {
        /// QEMU's name of the run state.
        state: String,
    },
    /// A dump of the VM's memory is under way.
    Dump,
    /// A job of QEMU is under way: of a disk, or of an internal snapshot.
    Job {
        /// The job's id.
        id: String,
        /// QEMU's name of the kind (`mirror`, `backup`, `snapshot-save`, ...).
        kind: String,
    },
    /// QEMU would crash as the VM goes on: a state was loaded since it ran last, and the checkpoint
    /// has a flash chip in an unusual state, which must not be loaded a second time.
    Flash,
    /// It is not known which page size the machine's state is to tell.
    PageSize {
        /// The type of the machine.
        machine_type: String,
    },
}

impl fmt::Display for RollbackObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Migration => f.write_str("its migration is under way"),
            Self::NotHere { state } => write!(f, "its state is {state}: it is not in this QEMU"),
            Self::TargetStands { state } => {
                write!(f, "the checkpoint's VM stood still: its state was {state}")
            }
            Self::Dump => f.write_str("a dump of its memory is under way"),
            Self::Job { id, kind } => write!(f, "QEMU's job {id} ({kind}) is under way"),
            Self::PageSize { machine_type } => write!(
                f,
                "the state of a machine of type {machine_type} must tell its page size, which \
                 Keyframe does not know"
            ),
            Self::Flash => f.write_str(
                "it has not run since a checkpoint was loaded into it, and QEMU would crash if \
                 this checkpoint's flash chip were loaded too",
            ),
        }
    }
}

impl RollbackObstacle {
    /// What the user can do about it.
    pub(crate) fn fix(&self) -> String {
        match self {
            Self::Migration => "wait for the migration's end, or cancel it (migrate_cancel)".into(),
            Self::NotHere { .. } | Self::TargetStands { .. } | Self::PageSize { .. } => {
                "restore the checkpoint instead: keyframe restore".into()
            }
            Self::Dump => "wait for the dump's end: query-dump".into(),
            Self::Job { id, .. } => {
                format!("wait for the job's end, or cancel it: job-cancel {id}")
            }
            Self::Flash => "let the VM run for a moment (cont), then roll it back; or restore the \
                            checkpoint: keyframe restore"
                .into(),
        }
    }

    /// The obstacle that QEMU tells of, if there is one.
    pub(super) fn find(qmp: &mut Qmp) -> Result<Option<Self>> {
        let [migration, dump, jobs] = qmp.ask_all([
            ("query-migrate", json!({})),
            ("query-dump", json!({})),
            ("query-jobs", json!({})),
        ])?;
        let of_state = match qmp.status()? {
            RunStatus::InMigrate => Some("inmigrate".to_owned()),
            RunStatus::Other(state) if is_elsewhere(&state) => Some(state),
            _ => None,
        };
        let migrates = MIGRATING.contains(&word(&migration, "status"));
        let migrating = migrates.then_some(Self::Migration);
        let not_here = of_state.map(|state| Self::NotHere { state });
        let dumping = (word(&dump, "status") == "active").then_some(Self::Dump);
        let job = jobs
            .as_array()
            .into_iter()
            .flatten()
            .find(|job| !matches!(word(job, "status"), "concluded" | "null" | "undefined"));
        let job =
            job.map(|job| Self::Job { id: word(job, "id").into(), kind: word(job, "type").into() });
        Ok(migrating.or(not_here).or(dumping).or(job))
    }

    pub(super) fn refuse(self) -> Error {
        Error::RollbackObstacle { obstacle: self }
    }
}

/// True for the run states of a VM that moves, or has moved, to another QEMU.
fn is_elsewhere(state: &str) -> bool {
    matches!(state, "finish-migrate" | "postmigrate")
}

/// The text at `key` of `object`; empty if there is none.
fn word<'a>(object: &'a Value, key: &str) -> &'a str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}
