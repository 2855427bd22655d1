//! The session of a writer: what its runs share.

use crate::durability::Syncs;
use crate::pack_writer::PackWriter;
use keyframe_store_format::moves::Moves;
use std::sync::{Arc, Mutex};

/// The place of the session while no run is open.
pub type Slot = Arc<Mutex<Option<Box<Session>>>>;

/// What the runs of a writer share.
#[derive(Debug)]
pub struct Session {
    pub packs: PackWriter,
    /// The number that the next seal tries.
    pub next_checkpoint: u64,
    /// The moves that the writer followed last.
    pub moves: Option<Moves>,
    /// Present if not every seal syncs.
    pub syncs: Option<Syncs>,
}
