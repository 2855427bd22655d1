//! The RAM of a QEMU that has memory of its own, which no file holds: this process writes it
//! through `/proc/PID/mem`.
//!
//! A machine with a device that discards RAM (balloon, virtio-mem) gets such RAM, because the
//! kernel does not report a discard of shared memory: the VM could not be checkpointed again.

use crate::{Error, Qmp, Result, find_ram_blocks};
use keyframe_ram_loading::Memory;
use keyframe_units::{BlockKind, RamLayout};
use std::fs::File;

/// Returns the main RAM of the QEMU with process id `pid`, whose machine has the RAM blocks of
/// `layout`. Errors: QEMU does not answer; a block is not in its memory.
pub(super) fn memories(qmp: &mut Qmp, pid: u32, layout: &RamLayout) -> Result<Vec<Memory>> {
    let path = format!("/proc/{pid}/mem");
    let failed = Error::io(format!("open {path}"));
    let memory = File::options().read(true).write(true).open(&path).map_err(failed)?;
    let found = find_ram_blocks(qmp, pid)?;
    let blocks = layout.blocks().iter().enumerate();
    let main = blocks.filter(|(_, block)| block.kind == BlockKind::Backend);
    main.map(|(number, block)| {
        let host = found.iter().find(|known| known.block.name == block.name);
        let host = host.ok_or_else(|| Error::RamAddress {
            block: block.name.clone(),
            pid,
            problem: "the QEMU that waits does not have it".into(),
        })?;
        let file = memory.try_clone().map_err(Error::io(format!("duplicate {path}")))?;
        let (offset, pages) = (host.host.0, layout.pages_of(number));
        Ok(Memory { file, offset, block: number, pages, name: block.name.clone() })
    })
    .collect()
}
