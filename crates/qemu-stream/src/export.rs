//! Writes a checkpoint as a whole migration stream, main RAM included.

use crate::{MigrationHead, PageSink, Result, StreamBlock, write_migration};
use keyframe_machine::{RamSource, read_ascending};
use keyframe_units::{PAGE_BYTES, PageRange, RamLayout};
use std::io::{self, Write};

/// Writes the checkpoint with RAM blocks `layout`, pages `ram` and `device_state` to `out`, as a
/// stream that QEMU loads with `-incoming` if its command line makes a machine of `head`.
///
/// Errors: those of [`write_migration`].
pub fn export(
    head: &MigrationHead<'_>,
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
            let reader =
                move |sink: PageSink<'_>| -> io::Result<()> { read_ascending(ram, range, sink) };
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
    write_migration(head, device_state, &mut blocks, out)
}
