//! Writes a stream for a machine that has most of its RAM already: only the pages that change.

use crate::format::{
    FLAG_CONTINUE, FLAG_EOS, FLAG_PAGE, FLAG_ZERO, HEADER_BYTES, RAM_SECTION_ID, SECTION_END,
    check, put_footer, put_name, put_u32, put_u64,
};
use crate::writer::{check_block, write_configuration, write_description, write_start};
use crate::{MigrationHead, PageSink, Result, StreamBlock, StreamError};
use keyframe_machine::RamSource;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, RamLayout, ZERO_PAGE};
use std::io::{self, Write};

/// Pages that are held in memory at once: 4 MiB.
const BATCH_PAGES: usize = 1024;

/// The pages of a delta stream, which loads only some pages into a running VM.
#[derive(Clone, Copy)]
pub struct DeltaPages<'a> {
    /// The RAM blocks that the pages belong to.
    pub layout: &'a RamLayout,
    /// The pages to write, in ascending order.
    pub pages: &'a [PageIndex],
    /// The source of their contents.
    pub ram: &'a dyn RamSource,
}

/// Writes a stream with the given pages and `device_state` to `out`. With `head` it begins like a
/// whole migration stream; without, like a device state.
///
/// Errors: those of [`crate::write_migration`]; [`StreamError::DeviceState`] if a page lies in no
/// block.
pub fn write_delta(
    head: Option<&MigrationHead<'_>>,
    device_state: &[u8],
    delta: DeltaPages<'_>,
    out: &mut dyn Write,
) -> Result<()> {
    let layout = delta.layout;
    check(device_state)?;
    let (header, devices) =
        device_state.split_at_checked(HEADER_BYTES).unwrap_or((device_state, &[]));
    out.write_all(header).map_err(StreamError::io("write the stream's header"))?;
    if let Some(head) = head {
        write_configuration(head, out)
            .map_err(StreamError::io("write the stream's configuration"))?;
    }
    let mut nothing = |_: PageSink<'_>| Ok(());
    let used: Vec<_> = layout.blocks().iter().filter(|block| block.used_bytes > 0).collect();
    for block in &used {
        let block =
            StreamBlock { name: &block.name, used_bytes: block.used_bytes, pages: &mut nothing };
        check_block(&block)?;
    }
    let sizes = used.iter().map(|block| (&*block.name, block.used_bytes));
    write_start(sizes, out)
        .map_err(StreamError::io("write the list of RAM blocks to the stream"))?;
    write_pages(delta, out).map_err(StreamError::io("write RAM pages to the stream"))?;
    out.write_all(devices).map_err(StreamError::io("write the devices to the stream"))?;
    if head.is_some() {
        write_description(out).map_err(StreamError::io("write the stream's description"))?;
    }
    Ok(())
}

fn write_pages(delta: DeltaPages<'_>, out: &mut dyn Write) -> io::Result<()> {
    let DeltaPages { layout, pages, ram } = delta;
    out.write_all(&[SECTION_END])?;
    put_u32(out, RAM_SECTION_ID)?;
    let mut last_block = None;
    for batch in pages.chunks(BATCH_PAGES) {
        let contents = read(ram, batch)?;
        for (page, content) in batch.iter().zip(&contents) {
            let (number, offset) = locate(layout, *page)
                .ok_or_else(|| io::Error::other(format!("page {} is in no RAM block", page.0)))?;
            let is_zero = *content == ZERO_PAGE;
            let flag = if is_zero { FLAG_ZERO } else { FLAG_PAGE };
            if last_block == Some(number) {
                put_u64(out, offset | flag | FLAG_CONTINUE)?;
            } else {
                put_u64(out, offset | flag)?;
                put_name(out, layout.blocks().get(number).map_or("", |block| &block.name))?;
                last_block = Some(number);
            }
            if is_zero { out.write_all(&[0])? } else { out.write_all(content)? }
        }
    }
    put_u64(out, FLAG_EOS)?;
    put_footer(out)
}

/// Reads the contents of `wanted`, in that order.
fn read(ram: &dyn RamSource, wanted: &[PageIndex]) -> io::Result<Vec<Page>> {
    let mut contents = vec![ZERO_PAGE; wanted.len()];
    ram.read_some(wanted, &mut |page, content| {
        let at = wanted.binary_search(&page).map_err(|_| {
            io::Error::other(format!("the source gave page {}, which was not asked for", page.0))
        })?;
        if let Some(slot) = contents.get_mut(at) {
            *slot = *content;
        }
        Ok(())
    })?;
    Ok(contents)
}

/// Number of the block that `page` lies in, and the page's offset there in bytes. `None` for a page
/// after the bytes that its block uses.
fn locate(layout: &RamLayout, page: PageIndex) -> Option<(usize, u64)> {
    layout.blocks().iter().enumerate().find_map(|(number, block)| {
        let range = layout.pages_of(number);
        let offset = page.0.checked_sub(range.first.0)? * PAGE_BYTES as u64;
        (offset < block.used_bytes).then_some((number, offset))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MigrationReader;
    use keyframe_machine::Processor;
    use keyframe_units::{BlockKind, PageRange, RamBlock};

    struct Numbered;

    impl RamSource for Numbered {
        fn read(
            &self,
            range: PageRange,
            sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
        ) -> io::Result<()> {
            // Each third page is zero.
            range
                .iter()
                .filter(|p| p.0 % 3 != 0)
                .try_for_each(|p| sink(p, &[p.0 as u8; PAGE_BYTES]))
        }
    }

    /// Against the reader of QEMU's own streams.
    #[test]
    fn only_the_given_pages_are_written() {
        let block = |name: &str, pages: u64| RamBlock {
            name: name.into(),
            kind: BlockKind::Backend,
            used_bytes: pages * 4096,
            total_bytes: pages * 4096,
        };
        let layout = RamLayout::new(vec![block("a", 10), block("b", 2000)]).unwrap();
        let pages: Vec<_> =
            [0, 1, 3, 9, 10, 11].into_iter().chain((20..1900).step_by(2)).map(PageIndex).collect();
        let state = crate::tests::state();
        let head = |processor| MigrationHead { machine_type: "pc-i440fx-7.2", processor };
        let (x86, arm) = (head(Processor::X86_64), head(Processor::Aarch64));
        for head in [None, Some(&x86), Some(&arm)] {
            let mut out = Vec::new();
            let delta = DeltaPages { layout: &layout, pages: &pages, ram: &Numbered };
            write_delta(head, &state, delta, &mut out).unwrap();
            if head.is_none() {
                out.extend_from_slice(b"\x06\0\0\0\x02{}");
            }
            let incoming = MigrationReader::begin(&out[..]).unwrap();
            assert_eq!(incoming.machine_type(), head.map(|h| h.machine_type));
            let mut seen = Vec::new();
            let devices = incoming
                .finish(&mut |block, offset, page| {
                    let number = offset / 4096 + [0, 10][block];
                    let expected = if number % 3 == 0 { 0 } else { number as u8 };
                    assert!(page.iter().all(|b| *b == expected), "page {number}");
                    seen.push(PageIndex(number));
                    Ok(())
                })
                .unwrap();
            assert_eq!(seen, pages);
            assert_eq!(devices, state);
        }
    }
}
