//! Marks the RAM of a restored QEMU as missing, and has it loaded while the VM runs.

use super::fill::Memory;
use crate::{Error, Result};
use keyframe_kernel::Process;
use keyframe_kernel::missing_pages::MissingPages;
use keyframe_ram_loading::Place;
use keyframe_units::{HostRange, HostVirt};
use rustix::fs::fstat;
use std::time::Instant;

pub use keyframe_ram_loading::Lazy;
pub use keyframe_vmm::{Residency, SharedRamSource as SharedSource};

impl From<keyframe_ram_loading::Error> for Error {
    fn from(error: keyframe_ram_loading::Error) -> Self {
        use keyframe_ram_loading::Error as Loading;
        match error {
            Loading::Io { operation, source } => Self::io(operation)(source),
            Loading::PageLost { page, block, offset, source } => {
                Self::PageLost { page, block, offset, source }
            }
            Loading::Kernel(error) => error.into(),
        }
    }
}

/// Marks the RAM of QEMU as missing, and returns the server that provides its pages. QEMU is
/// process `pid`, a child that this thread started, with the empty `memories` as its memory
/// backends: memfds, or memory of QEMU's own. Error: the kernel does not let this process serve
/// QEMU's memory.
pub(super) fn attach(
    pid: u32,
    memories: &[Memory],
    source: SharedSource,
    started: Instant,
) -> Result<Lazy> {
    let process = Process::open(pid)?;
    let places = memories.iter().map(|m| place(&process, m)).collect::<Result<Vec<_>>>()?;
    let mut missing = MissingPages::inject(&process)?;
    for place in &places {
        missing.register(place.host)?;
    }
    // QEMU may have touched pages before they were marked as missing.
    memories.iter().filter(|memory| !memory.is_of_process()).try_for_each(Memory::clear)?;
    if memories.iter().any(Memory::is_of_process) {
        missing.discard()?;
    }
    Ok(Lazy::start(missing, places, source, started)?)
}

/// Returns the address at which QEMU has mapped `memory`: the only mapping of that file.
fn place(process: &Process, memory: &Memory) -> Result<Place> {
    if memory.is_of_process() {
        let start = HostVirt(memory.offset);
        let host = HostRange { start, len_bytes: memory.pages.len_bytes() };
        return Ok(Place { name: memory.name.clone(), pages: memory.pages, host });
    }
    let stat = fstat(&memory.file).map_err(Error::io("look at the VM's memory"))?;
    let maps = process.maps()?;
    let found: Vec<_> =
        maps.iter().filter(|m| m.inode == stat.st_ino && m.dev == stat.st_dev).collect();
    let name = memory.name.clone();
    let len_bytes = memory.pages.len_bytes();
    match found[..] {
        [mapping]
            if mapping.offset == 0 && mapping.shared && mapping.range.len_bytes >= len_bytes =>
        {
            Ok(Place {
                name,
                pages: memory.pages,
                host: HostRange { start: mapping.range.start, len_bytes },
            })
        }
        _ => Err(Error::RamAddress {
            block: name,
            pid: process.pid(),
            problem: format!("its memory is mapped {} times, not once as a whole", found.len()),
        }),
    }
}
