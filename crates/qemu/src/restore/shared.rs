//! RAM that several VMs start from: it is filled once, and each QEMU maps it privately.
//!
//! ```text
//!   checkpoint ──fill once──▶ memfd, sealed ◀── MAP_PRIVATE ── QEMU 1   its own: the pages that it wrote
//!                                           ◀── MAP_PRIVATE ── QEMU 2   its own: the pages that it wrote
//! ```
//!
//! Invariant: the memfd does not change after it was filled. The kernel refuses writes by any
//! process, QEMU included (`F_SEAL_WRITE`).
//!
//! A QEMU that writes RAM as it starts gets the contents of those pages back before the VM runs.
//!
//! Left out: small blocks (ROMs, video memory). Each QEMU gets its own with the device stream.

use super::private_ram;
use super::{Plan, Ram, RamSource, Restored, start_with};
use crate::{Error, Qmp, Result};
use keyframe_machine::read_ascending;
use keyframe_ram_loading::{Memory, fill_sealed};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, RamLayout};
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;

/// The main RAM of a checkpoint, which any number of VMs share.
pub struct SharedRam {
    memories: Vec<Memory>,
    layout: RamLayout,
}

impl SharedRam {
    /// Fills the RAM from `source`, as [`super::start`] does. Ends early if `cancelled` is set.
    /// Errors: the source cannot be read; no memory for the RAM.
    pub fn fill(
        layout: &RamLayout,
        source: &dyn RamSource,
        cancelled: &AtomicBool,
    ) -> Result<Self> {
        let memories = fill_sealed(layout, source, cancelled)?;
        Ok(Self { memories, layout: layout.clone() })
    }

    /// A second descriptor of the memory, for one more VM. Error: `plan` is of another checkpoint.
    pub(super) fn memories(&self, plan: &Plan) -> Result<Vec<Memory>> {
        if plan.source.ram != self.layout {
            let problem = "it is not that of the RAM that is shared".into();
            return Err(Error::Source { what: "RAM layout".into(), problem });
        }
        let copies = self.memories.iter().map(Memory::try_clone).collect::<std::io::Result<_>>();
        copies.map_err(Error::io("duplicate a descriptor of the shared memory"))
    }
}

/// Gives back the checkpoint's contents to the pages that QEMU, process `pid`, has written as it
/// started. Errors: QEMU does not answer; `source` cannot be read; the memory cannot be written.
pub(super) fn undo_writes(
    qmp: &mut Qmp,
    pid: u32,
    plan: &Plan,
    source: &dyn RamSource,
) -> Result<()> {
    for memory in private_ram::memories(qmp, pid, &plan.source.ram)? {
        let failed = || Error::io(format!("write the memory of RAM block {}", memory.name));
        for written in memory.zero_written(pid)? {
            let start = written.start.0;
            let first = memory.pages.first.0 + (start - memory.offset) / PAGE_BYTES as u64;
            let pages = PageRange::new(PageIndex(first), written.len_bytes / PAGE_BYTES as u64);
            let mut write =
                |offset: u64, page: &Page| memory.file.write_all_at(page, start + offset);
            read_ascending(source, pages, &mut write).map_err(failed())?;
        }
    }
    Ok(())
}

/// Restores a VM as [`super::start`] does, with main RAM that the VM shares with others until it
/// writes a page. `ram` provides the small blocks. Returns the handle of the VM. Errors: those of
/// [`super::start`].
pub fn start_shared(
    mut plan: Plan,
    shared: &SharedRam,
    ram: &dyn RamSource,
    device_state: &[u8],
) -> Result<Restored> {
    start_with(&mut plan, &Ram::Shared(shared, ram), device_state)
}
