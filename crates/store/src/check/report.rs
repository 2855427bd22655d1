//! The options, the progress and the result of a check.

use crate::Error;
use crate::open_store::OpenStore;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The options of a check of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckOptions {
    /// True to read and verify every page. Otherwise the verified index of a closed pack is enough.
    pub read_data: bool,
}

/// The progress of a check of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckProgress {
    /// The file being checked.
    pub object: String,
    /// The number of bytes of the store that are checked so far.
    pub done_bytes: u64,
    /// The number of all bytes to check.
    pub total_bytes: u64,
}

/// The result of a check of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// The number of checkpoint files that were checked.
    pub checkpoints: u64,
    /// The number of map files that were checked.
    pub maps: u64,
    /// The number of packs that were checked.
    pub packs: u64,
    /// The number of page records that were verified, or that a verified index lists.
    pub records: u64,
    /// True if every page was read.
    pub read_data: bool,
    /// The damaged objects.
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

/// A damaged object of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The file, with an offset if one applies.
    pub object: String,
    /// What is wrong with it.
    pub problem: String,
    /// The checkpoints that cannot be read correctly because of it, rising; may be empty.
    pub checkpoints: Vec<CheckpointId>,
}

/// Returns the object and the problem of `error`, which occurred while the file `name` was read.
pub fn explain(inner: &OpenStore, name: &str, error: Error) -> (String, String) {
    match error {
        Error::Damaged { object, problem } => (object, problem),
        other => (inner.backend.describe(name), other.to_string()),
    }
}
