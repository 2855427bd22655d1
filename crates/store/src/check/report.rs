//! The options, the progress and the result of a check.

use crate::Error;
use crate::open_store::OpenStore;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// How thorough a check is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckOptions {
    /// Read and verify every page. Without this, the verified index of a closed pack is enough.
    pub read_data: bool,
}

/// How far a check is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckProgress {
    /// The file being checked.
    pub object: String,
    /// Bytes of the store checked so far.
    pub done_bytes: u64,
    /// Bytes to check in all.
    pub total_bytes: u64,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Checkpoint files looked at.
    pub checkpoints: u64,
    /// Map files looked at.
    pub maps: u64,
    /// Packs looked at.
    pub packs: u64,
    /// Page records verified, or listed by a verified index.
    pub records: u64,
    /// True if every page was read.
    pub read_data: bool,
    /// What is damaged.
    pub damages: Vec<Damage>,
    /// Observations that are not damage.
    pub notes: Vec<String>,
}

impl CheckReport {
    /// Returns true if nothing is damaged.
    pub fn is_clean(&self) -> bool {
        self.damages.is_empty()
    }

    /// Returns the checkpoints that some damage affects.
    pub fn hurt_checkpoints(&self) -> BTreeSet<CheckpointId> {
        self.damages.iter().flat_map(|d| d.checkpoints.iter().copied()).collect()
    }
}

/// One damaged object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The file, with an offset if one applies.
    pub object: String,
    /// What is wrong with it.
    pub problem: String,
    /// The checkpoints that cannot be read correctly because of it, rising; may be empty.
    pub checkpoints: Vec<CheckpointId>,
}

/// Returns the object and the problem of an error that occurred while reading `name`.
pub fn explain(inner: &OpenStore, name: &str, error: Error) -> (String, String) {
    match error {
        Error::Damaged { object, problem } => (object, problem),
        other => (inner.backend.describe(name), other.to_string()),
    }
}
