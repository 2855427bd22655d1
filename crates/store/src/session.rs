//! The session of a writer: what its runs share.

use crate::durability::Syncs;
use crate::pack_writer::PackWriter;
use keyframe_store_format::moves::Moves;
use std::sync::{Arc, Mutex};

/// The place in which the session lies while no run is open.
pub type Slot = Arc<Mutex<Option<Box<Session>>>>;

/// The state that the runs of one writer share. It passes from each run to the next.
#[derive(Debug)]
pub struct Session {
    pub packs: PackWriter,
    /// The number that the next seal tries.
    pub next_checkpoint: u64,
    /// The moves that the writer followed last. `None` if it has followed none.
    pub moves: Option<Moves>,
    /// The times of syncs. `None` if the writer syncs each checkpoint.
    pub syncs: Option<Syncs>,
}
