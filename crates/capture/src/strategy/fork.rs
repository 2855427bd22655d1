//! Fork: in the pause the VMM process is forked into a child that never runs. The kernel's own
//! copy-on-write keeps the child's memory as it was, and the dirty pages are copied from the child
//! while the guest runs again.
//!
//! The pause grows with the size of the page tables, not with the number of dirty pages. While the
//! child lives, each first write of the guest to any page costs the kernel a copy.

use super::CopyStrategy;
use crate::context::CaptureContext;
use crate::error::{CaptureError, machine_error};
use crate::ports::{PageReader, RamFreezer};
use keyframe_units::{PageSet, elapsed_ns};
use std::time::Instant;

/// Forks the VMM in the pause, and copies the pages from the forked child after it.
pub struct ForkStrategy {
    freezer: Box<dyn RamFreezer>,
    frozen: Option<FrozenPages>,
}

/// The dirty pages of a checkpoint and the frozen RAM that holds them.
struct FrozenPages {
    pages: PageSet,
    reader: Box<dyn PageReader>,
}

impl ForkStrategy {
    /// Creates the strategy with `freezer`, which forks the VMM.
    pub fn new(freezer: Box<dyn RamFreezer>) -> Self {
        Self { freezer, frozen: None }
    }
}

impl CopyStrategy for ForkStrategy {
    fn name(&self) -> &'static str {
        "fork"
    }

    fn before(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        context.open_window()?;
        context.prepare_memory(context.pool.capacity_pages() / 4).map(drop)
    }

    fn freeze(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        let pages = context.last_scan()?;
        let started = Instant::now();
        let reader = self.freezer.freeze().map_err(machine_error("fork QEMU as a snapshot"))?;
        context.timeline.copy_ns = elapsed_ns(started);
        self.frozen = Some(FrozenPages { pages, reader });
        Ok(())
    }

    fn collect(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        match self.frozen.take() {
            Some(frozen) => context.copy_running(&frozen.pages, &*frozen.reader, false),
            None => Ok(()),
        }
    }

    fn release(&mut self) {
        self.frozen = None;
    }
}
