//! Writes streams: the devices with small RAM blocks before them, or a whole migration stream.

use crate::format::{
    FLAG_CONTINUE, FLAG_EOS, FLAG_MEM_SIZE, FLAG_PAGE, FLAG_ZERO, HEADER_BYTES, PAGE_BITS,
    RAM_SECTION_ID, RAM_VERSION, SECTION_CONFIGURATION, SECTION_DESCRIPTION, SECTION_END,
    SECTION_START, SUBSECTION, check, put_footer, put_name, put_u32, put_u64,
};
use crate::{Result, StreamError};
use keyframe_machine::Processor;
use keyframe_units::{PAGE_BYTES, Page, ZERO_PAGE};
use std::io::{self, Write};

/// The function that takes a page and its offset in its block, in bytes. Its error ends the
/// writing.
pub type PageSink<'a> = &'a mut dyn FnMut(u64, &Page) -> io::Result<()>;

/// A RAM block to write into a stream.
pub struct StreamBlock<'a> {
    /// QEMU's name of the block, 1 to 255 bytes.
    pub name: &'a str,
    /// Bytes in use: a multiple of 4096, not 0.
    pub used_bytes: u64,
    /// Gives its argument the offset in bytes and the content of each page that is not zero, in
    /// ascending order. Pages that it leaves out are written as zeros.
    pub pages: &'a mut dyn FnMut(PageSink<'_>) -> io::Result<()>,
}

/// Writes `device_state` to `out` with a `ram` section of `blocks` before its devices.
///
/// Errors: [`StreamError::DeviceState`] if `device_state` is malformed or a block cannot be
/// written, and those of `out` and of the blocks' readers.
pub fn splice_ram(
    device_state: &[u8],
    blocks: &mut [StreamBlock<'_>],
    out: &mut dyn Write,
) -> Result<()> {
    write_stream(None, device_state, blocks, out)?;
    out.flush().map_err(StreamError::io("write the devices to the stream"))
}

/// The beginning of a whole migration stream.
#[derive(Clone, Copy, Debug)]
pub struct MigrationHead<'a> {
    /// Machine type with aliases resolved (`pc-i440fx-7.2`).
    pub machine_type: &'a str,
    /// The guest's processor.
    pub processor: Processor,
}

/// Writes a whole migration stream, as QEMU's `migrate` does. A QEMU of the same version and with
/// the machine's command line loads it with `-incoming` and no further option. `blocks` are all RAM
/// blocks, main RAM included.
///
/// Errors: those of [`splice_ram`].
pub fn write_migration(
    head: &MigrationHead<'_>,
    device_state: &[u8],
    blocks: &mut [StreamBlock<'_>],
    out: &mut dyn Write,
) -> Result<()> {
    write_stream(Some(head), device_state, blocks, out)?;
    write_description(out)
        .and_then(|()| out.flush())
        .map_err(StreamError::io("write the stream's description"))
}

/// Writes the description of the devices that QEMU expects and does not read.
pub(crate) fn write_description(out: &mut dyn Write) -> io::Result<()> {
    let description = b"{\"page_size\": 4096, \"devices\": []}";
    out.write_all(&[SECTION_DESCRIPTION])?;
    put_u32(out, description.len() as u32)?;
    out.write_all(description)
}

fn write_stream(
    head: Option<&MigrationHead<'_>>,
    device_state: &[u8],
    blocks: &mut [StreamBlock<'_>],
    out: &mut dyn Write,
) -> Result<()> {
    check(device_state)?;
    for block in blocks.iter() {
        check_block(block)?;
    }
    let (header, devices) =
        device_state.split_at_checked(HEADER_BYTES).unwrap_or((device_state, &[]));
    out.write_all(header).map_err(StreamError::io("write the stream's header"))?;
    if let Some(head) = head {
        write_configuration(head, out)
            .map_err(StreamError::io("write the stream's configuration"))?;
    }
    if !blocks.is_empty() {
        let sizes = blocks.iter().map(|block| (block.name, block.used_bytes));
        write_start(sizes, out)
            .map_err(StreamError::io("write the list of RAM blocks to the stream"))?;
        write_pages(blocks, out)?;
    }
    out.write_all(devices).map_err(StreamError::io("write the devices to the stream"))
}

pub(crate) fn write_configuration(head: &MigrationHead<'_>, out: &mut dyn Write) -> io::Result<()> {
    let len = u32::try_from(head.machine_type.len()).map_err(io::Error::other)?;
    out.write_all(&[SECTION_CONFIGURATION])?;
    put_u32(out, len)?;
    out.write_all(head.machine_type.as_bytes())?;
    let Some(bits) = head.processor.told_page_bits() else { return Ok(()) };
    // An optional part of the section: mark, name, version, value.
    out.write_all(&[SUBSECTION, PAGE_BITS.len() as u8])?;
    out.write_all(PAGE_BITS.as_bytes())?;
    put_u32(out, 1)?;
    put_u32(out, bits)
}

pub(crate) fn check_block(block: &StreamBlock<'_>) -> Result<()> {
    let page = PAGE_BYTES as u64;
    let sane =
        block.used_bytes > 0 && block.used_bytes.is_multiple_of(page) && block.used_bytes < 1 << 50;
    if block.name.is_empty() || block.name.len() > 255 || !sane {
        let problem = format!(
            "RAM block {:?} of {} bytes cannot be written to it",
            block.name, block.used_bytes
        );
        return Err(StreamError::DeviceState { offset: HEADER_BYTES as u64, problem });
    }
    Ok(())
}

/// Writes the first part of the `ram` section: names and sizes of all blocks.
pub(crate) fn write_start<'a>(
    blocks: impl Iterator<Item = (&'a str, u64)> + Clone,
    out: &mut dyn Write,
) -> io::Result<()> {
    let total_bytes: u64 = blocks.clone().map(|(_, used_bytes)| used_bytes).sum();
    out.write_all(&[SECTION_START])?;
    put_u32(out, RAM_SECTION_ID)?;
    put_name(out, "ram")?;
    // The instance, of which there is one.
    put_u32(out, 0)?;
    put_u32(out, RAM_VERSION)?;
    put_u64(out, total_bytes | FLAG_MEM_SIZE)?;
    for (name, used_bytes) in blocks {
        put_name(out, name)?;
        put_u64(out, used_bytes)?;
    }
    put_u64(out, FLAG_EOS)?;
    put_footer(out)
}

/// Writes the last part of the `ram` section: each page of each block.
fn write_pages(blocks: &mut [StreamBlock<'_>], out: &mut dyn Write) -> Result<()> {
    out.write_all(&[SECTION_END])
        .and_then(|()| put_u32(out, RAM_SECTION_ID))
        .map_err(StreamError::io("write RAM pages to the stream"))?;
    for block in blocks {
        let operation = format!("write RAM block {} to the stream", block.name);
        let mut pages = PageWriter { name: block.name, next: 0, used_bytes: block.used_bytes, out };
        (block.pages)(&mut |offset, page| pages.put(offset, page))
            .and_then(|()| pages.zeros_up_to(block.used_bytes))
            .map_err(StreamError::io(operation))?;
    }
    put_u64(out, FLAG_EOS)
        .and_then(|()| put_footer(out))
        .map_err(StreamError::io("write RAM pages to the stream"))
}

/// Writes the pages of one block. Gaps become zero pages, because the block of a fresh QEMU need
/// not be empty.
struct PageWriter<'a> {
    name: &'a str,
    /// Offset of the next page to write, in bytes.
    next: u64,
    used_bytes: u64,
    out: &'a mut dyn Write,
}

impl PageWriter<'_> {
    fn put(&mut self, offset: u64, page: &Page) -> io::Result<()> {
        let bad = offset < self.next
            || !offset.is_multiple_of(PAGE_BYTES as u64)
            || offset >= self.used_bytes;
        if bad {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a page at {offset:#x}, which is out of order or outside the block"),
            ));
        }
        self.zeros_up_to(offset)?;
        if *page == ZERO_PAGE {
            return self.zeros_up_to(offset + PAGE_BYTES as u64);
        }
        self.begin_page(FLAG_PAGE)?;
        self.out.write_all(page)
    }

    fn zeros_up_to(&mut self, end: u64) -> io::Result<()> {
        while self.next < end {
            self.begin_page(FLAG_ZERO)?;
            self.out.write_all(&[0])?;
        }
        Ok(())
    }

    /// Writes the word before a page, and the block's name before its first page.
    fn begin_page(&mut self, flag: u64) -> io::Result<()> {
        if self.next == 0 {
            put_u64(self.out, flag)?;
            put_name(self.out, self.name)?;
        } else {
            put_u64(self.out, self.next | flag | FLAG_CONTINUE)?;
        }
        self.next += PAGE_BYTES as u64;
        Ok(())
    }
}
