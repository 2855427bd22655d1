//! Reducers: tools that keep a table and write it out where an interval ends.
//!
//! ```text
//!   interval 0          │ interval 1          │              │
//!   block block block   │ block block ...     │ ...          │ exit
//!                       cut 1                 cut 2          cut 3
//!                         └ first block behind it writes 0.KIND.part, empties the table     └ writes 2.KIND.part
//! ```
//!
//! A cut is noticed at the start of the next block, before anything of it is counted. Where only
//! one interval is asked for, nothing runs behind its cut, and blocks need not look (`cuts=one`).
//!
//! Invariant: what is executed behind the last cut is in no part.

use crate::api::Block;
use crate::board::Board;
use crate::part;
use crate::state::State;
use std::ffi::{c_uint, c_void};
use std::path::PathBuf;

/// A table that is filled by callbacks.
pub trait Reducer: 'static {
    /// Its name in part files, 8 bytes at most.
    const KIND: &'static str;
    /// Words in a row.
    const COLUMNS: usize;

    /// Its rows, sorted, end to end; it is empty afterwards, except for what describes the
    /// machine's state.
    fn take(&mut self) -> Vec<u64>;
}

/// A reducer and the cuts that it has seen.
pub struct Reduced<R> {
    /// The table.
    pub table: R,
    board: &'static Board,
    dir: PathBuf,
    written: u64,
    many: bool,
}

impl<R: Reducer> Reduced<R> {
    /// Writes its parts into `dir`.
    pub fn new(table: R, board: &'static Board, dir: PathBuf, many: bool) -> Self {
        Self { table, board, dir, written: 0, many }
    }

    /// Has a block notice cuts.
    pub fn watch_cuts(&self, block: &Block<'_>, data: *mut c_void) {
        if self.many {
            block.on_executed(on_block::<R>, data);
        }
    }

    /// Writes the parts of all intervals that have ended.
    pub fn write_ended(&mut self) {
        while self.written < self.board.cuts() {
            let path = self.dir.join(format!("{}.{}.part", self.written, R::KIND));
            if let Err(error) = part::write(&path, R::KIND, R::COLUMNS, &self.table.take()) {
                self.board.refuse();
                crate::tools::fail(&format!("writing {}: {error}", path.display()));
            }
            self.written += 1;
        }
    }
}

extern "C" fn on_block<R: Reducer>(_vcpu: c_uint, data: *mut c_void) {
    // SAFETY: registered with this type's data; runs on the vCPU's thread and holds the reference
    // only here.
    let reduced = unsafe { State::<Reduced<R>>::of(data) };
    if reduced.board.cuts() != reduced.written {
        reduced.write_ended();
    }
}
