//! Where a restored VM came from.

use keyframe_units::CheckpointId;

/// The checkpoint that a VM was restored from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lineage {
    /// Id of its store.
    pub store: String,
    /// Its number in that store.
    pub checkpoint: CheckpointId,
}
