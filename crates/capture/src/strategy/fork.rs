//! Fork: in the pause QEMU is forked into a child that never runs. Its memory stays as it was, by
//! the kernel's own copy-on-write, and the dirty pages are copied from there while the guest runs
//! again.
//!
//! The pause grows with the page tables (5 to 15 ms for 1 GiB), not with the dirty pages; and each
//! first write of the guest to any page of RAM costs a copy in the kernel while the child lives.

use super::{Hands, Strategy, ns};
use crate::cycle::CycleError;
use crate::ports::{Freezer, PageReader};
use keyframe_units::PageSet;
use std::time::Instant;

/// Copies from a frozen child.
pub struct Fork {
    freezer: Box<dyn Freezer>,
    frozen: Option<(PageSet, Box<dyn PageReader>)>,
}

impl Fork {
    /// Children come from `freezer`.
    pub fn new(freezer: Box<dyn Freezer>) -> Self {
        Self { freezer, frozen: None }
    }
}

impl Strategy for Fork {
    fn name(&self) -> &'static str {
        "fork"
    }

    fn before(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        hands.prepare_memory(hands.pool.capacity_pages() / 4)
    }

    fn freeze(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        let set = hands.last_scan()?;
        let copy = Instant::now();
        let frozen = self.freezer.freeze().map_err(|source| CycleError::Machine {
            operation: "fork QEMU as a snapshot",
            source,
        })?;
        hands.timeline.copy_ns = ns(copy.elapsed());
        self.frozen = Some((set, frozen));
        Ok(())
    }

    fn collect(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        match self.frozen.take() {
            Some((set, reader)) => hands.stage_waiting(&set, &*reader, false),
            None => Ok(()),
        }
    }

    fn release(&mut self) {
        self.frozen = None;
    }
}
