//! A position in a recorded execution.

use serde::{Deserialize, Serialize};

/// A position in a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordingPosition {
    /// The recording's id.
    pub recording: String,
    /// The number of guest instructions executed before this position.
    pub icount: u64,
}
