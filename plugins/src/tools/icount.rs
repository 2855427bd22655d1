//! `icount`: instructions in each half of the address space. Translated code increments the counters;
//! there are no callbacks.
//!
//! The board's first quantity counts addresses in the lower half (user programs, firmware), the
//! second those in the upper half (the kernel of Linux).

use super::{Setup, Tool};
use crate::api::{Block, BoardCounters};
use crate::board::{Board, LANES};
use std::ffi::c_void;

/// The tool.
pub struct Icount {
    board: &'static Board,
    counters: BoardCounters,
}

impl Icount {
    /// No arguments.
    pub fn new(setup: &mut Setup) -> Self {
        Self { board: setup.board, counters: BoardCounters::new(setup.board) }
    }
}

impl Tool for Icount {
    fn vcpu_is_there(&mut self) {
        if let Err(error) = self.counters.vcpu_is_there(self.board) {
            super::fail(&format!("sharing the counters: {error}"));
        }
    }

    fn translate(&mut self, block: &Block<'_>, _data: *mut c_void) {
        for (index, instruction) in block.instructions().enumerate() {
            let half = usize::from(instruction.pc() >> 63 == 1);
            instruction.count(self.counters.counter(half * LANES + index % LANES));
        }
    }
}
