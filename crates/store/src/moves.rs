//! How a prune tells the writers at work which packs it removes, and where their records are now.
//!
//! ```text
//!   prune    puts moves ────────────▶ waits for all ─────▶ maps rewritten ─▶ packs removed ─▶ moves removed
//!   writer             at its next seal: follows, says so ──▲       it refers to nothing in those packs
//!
//!   a writer says in its slot which generation it has followed; the only writer of object storage in the file moves.seen
//! ```
//!
//! Invariant: a process that becomes the writer while `moves` exists uses none of those packs. A
//! crash may leave the files. That is harmless: the next prune removes them, and a writer that has
//! followed needs none of the packs.

use crate::Result;
use crate::open_store::OpenStore;
use keyframe_bytes::hex::to_hex;
use keyframe_store_backend::layout::MOVES;
use keyframe_store_format::moves::{GENERATION_AT, Generation, MOVES_BYTES_MAX, Moves};
use std::io::ErrorKind;
use std::time::Duration;

const SEEN: &str = "moves.seen";

/// The tries to write on a full disk, and the time between two.
const FULL_TRIES: u32 = 50;
const FULL_WAIT: Duration = Duration::from_millis(100);

impl OpenStore {
    /// Announces moves to the writers. If the disk is full, tries again for some seconds, because a
    /// writer at work frees the space of a failed checkpoint for a moment. Error: the backend
    /// fails.
    pub fn put_moves(&self, moves: &Moves) -> Result<()> {
        let bytes = moves.encode(self.config.id);
        for _ in 1..FULL_TRIES {
            match self.backend.put(MOVES, &bytes) {
                Err(error) if error.io_kind() == Some(ErrorKind::StorageFull) => {
                    std::thread::sleep(FULL_WAIT);
                }
                other => return other,
            }
        }
        self.backend.put(MOVES, &bytes)
    }

    /// Removes the announcement of moves. Error: the backend fails.
    pub fn remove_moves(&self) -> Result<()> {
        self.backend.remove(MOVES)?;
        self.backend.remove(SEEN)
    }

    /// Returns the announced moves. Returns `None` if none are announced, or if their generation is
    /// `seen`. Errors: the file is damaged; the backend fails.
    pub fn moves(&self, seen: Option<Generation>) -> Result<Option<Moves>> {
        let file = match self.backend.open(MOVES) {
            Err(e) if e.is_not_found() => return Ok(None),
            other => other?,
        };
        let mut generation = Generation::default();
        file.read_at(GENERATION_AT, &mut generation)?;
        if seen == Some(generation) {
            return Ok(None);
        }
        match self.backend.read(MOVES, MOVES_BYTES_MAX) {
            Err(e) if e.is_not_found() => Ok(None),
            other => {
                Ok(Some(Moves::decode(&other?, self.config.id, &self.backend.describe(MOVES))?))
            }
        }
    }

    /// Returns true if moves are announced. Error: the backend fails.
    pub fn has_moves(&self) -> Result<bool> {
        match self.backend.open(MOVES) {
            Err(e) if e.is_not_found() => Ok(false),
            other => other.map(|_| true),
        }
    }

    /// Confirms that this writer has followed the moves of `generation`: it refers to no record of
    /// the victims any more. Error: the backend fails.
    pub fn put_seen(&self, generation: Generation) -> Result<()> {
        if self.is_shared() {
            return self.tell(|said| said.seen = Some(to_hex(&generation)));
        }
        self.backend.put(SEEN, to_hex(&generation).as_bytes())
    }

    /// Returns true if all writers at work have confirmed the moves of `generation`. A process that
    /// becomes a writer later reads the moves first. Error: the backend fails.
    pub fn is_seen(&self, generation: Generation) -> Result<bool> {
        let writers = self.other_writers()?;
        Ok(!writers.are_at_work() || writers.have_seen(generation, self.is_seen_alone(generation)?))
    }

    fn is_seen_alone(&self, generation: Generation) -> Result<bool> {
        match self.backend.read(SEEN, 64) {
            Err(e) if e.is_not_found() => Ok(false),
            other => Ok(other? == to_hex(&generation).as_bytes()),
        }
    }
}
