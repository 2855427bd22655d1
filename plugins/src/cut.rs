//! Table tools: tools that keep a table and write it when an interval ends.
//!
//! ```text
//!   interval 0          │ interval 1          │              │
//!   block block block   │ block block ...     │ ...          │ exit
//!                       cut 1                 cut 2          cut 3
//!                         └ the next block writes 0.KIND.part and empties the table         └ writes 2.KIND.part
//! ```
//!
//! The tool notices a cut at the start of the next block, before it counts anything of the block. If
//! there is only one interval, nothing runs after its cut, and blocks need not look (`cuts=one`).
//!
//! Invariant: no part contains what is executed after the last cut.

use crate::api::Block;
use crate::board::Board;
use crate::part;
use crate::state::State;
use std::ffi::{c_uint, c_void};
use std::path::PathBuf;

/// A table that callbacks fill.
pub trait PartTable: 'static {
    /// Its name in part files, at most 8 bytes.
    const KIND: &'static str;
    /// The number of words in a row.
    const COLUMNS: usize;

    /// Returns the rows, sorted and concatenated, and empties the table, except for the parts that
    /// describe the machine's state.
    fn take(&mut self) -> Vec<u64>;
}

/// A table and the cuts that it has seen.
pub struct TableTool<R> {
    /// The table.
    pub table: R,
    board: &'static Board,
    dir: PathBuf,
    written: u64,
    many: bool,
}

impl<R: PartTable> TableTool<R> {
    /// Writes parts into `dir`; `many` says that there are several intervals.
    pub fn new(table: R, board: &'static Board, dir: PathBuf, many: bool) -> Self {
        Self { table, board, dir, written: 0, many }
    }

    /// Lets the block notice cuts.
    pub fn watch_cuts(&self, block: &Block<'_>, data: *mut c_void) {
        if self.many {
            block.on_executed(on_block::<R>, data);
        }
    }

    /// Writes the parts of all intervals that have ended since the last call.
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

extern "C" fn on_block<R: PartTable>(_vcpu: c_uint, data: *mut c_void) {
    // SAFETY: registered with this type's data; runs on the vCPU's thread and holds the reference
    // only here.
    let reduced = unsafe { State::<TableTool<R>>::of(data) };
    if reduced.board.cuts() != reduced.written {
        reduced.write_ended();
    }
}
