//! A checkpoint as a whole migration stream, main RAM and all.

use super::{MigrationHead, PageSink, StreamBlock, write_migration};
use crate::Result;
use crate::restore::{RamSource, rising};
use keyframe_units::{PAGE_BYTES, PageRange, RamLayout};
use std::io::{self, Write};

/// Writes the checkpoint with RAM blocks `layout`, pages `ram` and `device_state` as a stream that
/// QEMU loads by itself, given the line of a machine of `machine_type`.
///
/// Errors: as [`write_migration`].
pub fn export(
    machine_type: &str,
    layout: &RamLayout,
    ram: &dyn RamSource,
    device_state: &[u8],
    out: &mut dyn Write,
) -> Result<()> {
    let used = layout.blocks().iter().enumerate().filter(|(_, block)| block.used_bytes > 0);
    let mut readers: Vec<_> = used
        .map(|(number, block)| {
            let range =
                PageRange::new(layout.pages_of(number).first, block.used_bytes / PAGE_BYTES as u64);
            let reader = move |sink: PageSink<'_>| -> io::Result<()> { rising(ram, range, sink) };
            (block, reader)
        })
        .collect();
    let mut blocks: Vec<StreamBlock<'_>> = readers
        .iter_mut()
        .map(|(block, reader)| StreamBlock {
            name: &block.name,
            used_bytes: block.used_bytes,
            pages: reader,
        })
        .collect();
    write_migration(&MigrationHead { machine_type }, device_state, &mut blocks, out)
}
