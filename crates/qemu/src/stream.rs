//! The stream that carries a VM's devices and small RAM blocks into a fresh QEMU
//! (docs/formats/device-stream.md).
//!
//! QEMU's `xen-save-devices-state` writes every device but no RAM. In an incoming QEMU, ROMs and
//! video RAM are empty, so a `ram` section made here goes in front of the devices. Main RAM is not
//! in it: the new QEMU is given that as a memory backend which holds its pages already.
//!
//! ```text
//!   QEVM 00000003 | START "ram" v4: sizes | END: pages of small blocks | FULL device | FULL device | ... | EOF
//!   └ from QEMU ┘ └──────────── made here ───────────────────────────┘ └───────────── from QEMU ──────────┘
//! ```
//!
//! Invariant: what comes from QEMU or a store is checked before it is used, and is passed on byte
//! for byte, unless the VM changes its accelerator (`convert`) or comes to count its instructions
//! (`counted`).
//!
//! Left out: the contents of most devices; sections carry no length, only QEMU can read them.

mod convert;
mod counted;
mod display;
mod incoming;
mod outgoing;
mod processors;
mod registers;
mod sections;
mod some;

pub(crate) use convert::{convert, written_by};
pub(crate) use counted::counted;
pub use display::{Display, display};
pub use incoming::{Incoming, IncomingBlock, IncomingSink};
pub use outgoing::export;
pub use processors::{CpuRegisters, Segment, Shadow, cpu_registers, shadowed};
pub(crate) use some::write_some;

use crate::{Error, Result};
use keyframe_units::{PAGE_BYTES, Page, ZERO_PAGE};
use std::io::{self, Write};

const MAGIC: [u8; 4] = *b"QEVM";
const VERSION: u32 = 3;
/// Bytes of magic and version.
const HEADER_BYTES: usize = 8;

const SECTION_EOF: u8 = 0x00;
const SECTION_START: u8 = 0x01;
const SECTION_END: u8 = 0x03;
const SECTION_FULL: u8 = 0x04;
const SECTION_DESCRIPTION: u8 = 0x06;
const SECTION_CONFIGURATION: u8 = 0x07;
const SECTION_FOOTER: u8 = 0x7e;

/// The `ram` section's number. QEMU counts its own from 0, one for each device.
const RAM_SECTION_ID: u32 = 0x7000;
/// The version of the `ram` section.
const RAM_VERSION: u32 = 4;

/// Flags in the low bits of a page's offset.
const FLAG_ZERO: u64 = 0x02;
const FLAG_MEM_SIZE: u64 = 0x04;
const FLAG_PAGE: u64 = 0x08;
const FLAG_EOS: u64 = 0x10;
const FLAG_CONTINUE: u64 = 0x20;

/// Takes a page and its offset in its block, in bytes.
pub type PageSink<'a> = &'a mut dyn FnMut(u64, &Page) -> io::Result<()>;

/// A RAM block for the stream.
pub struct StreamBlock<'a> {
    /// QEMU's name of it, at most 255 bytes.
    pub name: &'a str,
    /// Bytes in use: a multiple of the page size.
    pub used_bytes: u64,
    /// Gives `(offset in bytes, page)` of the pages that are not zero, rising. Pages that are left
    /// out are zero.
    pub pages: &'a mut dyn FnMut(PageSink<'_>) -> io::Result<()>,
}

/// Checks that `state` is what `xen-save-devices-state` writes, as far as can be told from outside:
/// header, a first section with a sane name, and the end mark.
pub fn check(state: &[u8]) -> Result<()> {
    let fail =
        |offset: usize, problem: String| Error::DeviceStream { offset: offset as u64, problem };
    let short = || fail(state.len(), format!("it ends after {} bytes", state.len()));
    if state.get(..4).ok_or_else(short)? != MAGIC {
        return Err(fail(0, "it does not begin with QEVM".into()));
    }
    let version =
        state.get(4..HEADER_BYTES).and_then(<[u8]>::first_chunk).map(|b| u32::from_be_bytes(*b));
    match version.ok_or_else(short)? {
        VERSION => {}
        other => return Err(fail(4, format!("version {other}; known is {VERSION}"))),
    }
    match *state.get(HEADER_BYTES).ok_or_else(short)? {
        SECTION_FULL | SECTION_START => {}
        SECTION_CONFIGURATION => {
            return Err(fail(
                HEADER_BYTES,
                "it has a configuration section, which this QEMU was expected not to write".into(),
            ));
        }
        SECTION_EOF => return Err(fail(HEADER_BYTES, "it holds no device".into())),
        other => return Err(fail(HEADER_BYTES, format!("a section of unknown type {other:#04x}"))),
    }
    // type, id (4), length of the name (1), the name
    let name_at = HEADER_BYTES + 6;
    let name_len = usize::from(*state.get(name_at - 1).ok_or_else(short)?);
    let name = state.get(name_at..name_at + name_len).ok_or_else(short)?;
    if name.is_empty() || !name.iter().all(u8::is_ascii_graphic) {
        return Err(fail(name_at, format!("a section named {:?}", String::from_utf8_lossy(name))));
    }
    // The last section's footer (its mark, then its id), and the end mark.
    match state.last_chunk() {
        Some([SECTION_FOOTER, _, _, _, _, SECTION_EOF]) => Ok(()),
        _ => Err(fail(state.len(), "it lacks its end mark: it is cut short".into())),
    }
}

/// Writes `device_state` to `out` with a `ram` section of `blocks` in front of its devices.
///
/// Errors: [`Error::DeviceStream`] where `device_state` is none or a block cannot be written, and
/// those of `out` and of the blocks' readers.
pub fn splice_ram(
    device_state: &[u8],
    blocks: &mut [StreamBlock<'_>],
    out: &mut dyn Write,
) -> Result<()> {
    write_stream(None, device_state, blocks, out)?;
    out.flush().map_err(Error::io("write the devices to the stream"))
}

/// What a whole migration stream begins with.
#[derive(Clone, Copy, Debug)]
pub struct MigrationHead<'a> {
    /// The machine's type with aliases resolved (`pc-i440fx-7.2`).
    pub machine_type: &'a str,
}

/// Writes a whole migration stream, as QEMU's own `migrate` does: any QEMU of that version with
/// that machine's line loads it by `-incoming`, with nothing else on its line. `blocks` are all RAM
/// blocks, main RAM among them.
///
/// Errors: as [`splice_ram`].
pub fn write_migration(
    head: &MigrationHead<'_>,
    device_state: &[u8],
    blocks: &mut [StreamBlock<'_>],
    out: &mut dyn Write,
) -> Result<()> {
    write_stream(Some(head), device_state, blocks, out)?;
    write_description(out)
        .and_then(|()| out.flush())
        .map_err(Error::io("write the stream's description"))
}

/// QEMU expects a description of the devices, for people to read; it does not look into it.
fn write_description(out: &mut dyn Write) -> io::Result<()> {
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
    out.write_all(header).map_err(Error::io("write the stream's header"))?;
    if let Some(head) = head {
        write_configuration(head, out).map_err(Error::io("write the stream's configuration"))?;
    }
    if !blocks.is_empty() {
        let sizes = blocks.iter().map(|block| (block.name, block.used_bytes));
        write_start(sizes, out).map_err(Error::io("write the list of RAM blocks to the stream"))?;
        write_pages(blocks, out)?;
    }
    out.write_all(devices).map_err(Error::io("write the devices to the stream"))
}

fn write_configuration(head: &MigrationHead<'_>, out: &mut dyn Write) -> io::Result<()> {
    let len = u32::try_from(head.machine_type.len()).map_err(io::Error::other)?;
    out.write_all(&[SECTION_CONFIGURATION])?;
    put_u32(out, len)?;
    out.write_all(head.machine_type.as_bytes())
}

fn check_block(block: &StreamBlock<'_>) -> Result<()> {
    let page = PAGE_BYTES as u64;
    let sane =
        block.used_bytes > 0 && block.used_bytes.is_multiple_of(page) && block.used_bytes < 1 << 50;
    if block.name.is_empty() || block.name.len() > 255 || !sane {
        let problem = format!(
            "RAM block {:?} of {} bytes cannot be written to it",
            block.name, block.used_bytes
        );
        return Err(Error::DeviceStream { offset: HEADER_BYTES as u64, problem });
    }
    Ok(())
}

/// The section's first part: all blocks' names and sizes.
fn write_start<'a>(
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

/// The section's last part: the blocks' pages, each page of each block.
fn write_pages(blocks: &mut [StreamBlock<'_>], out: &mut dyn Write) -> Result<()> {
    out.write_all(&[SECTION_END])
        .and_then(|()| put_u32(out, RAM_SECTION_ID))
        .map_err(Error::io("write RAM pages to the stream"))?;
    for block in blocks {
        let operation = format!("write RAM block {} to the stream", block.name);
        let mut pages = Pages { name: block.name, next: 0, used_bytes: block.used_bytes, out };
        (block.pages)(&mut |offset, page| pages.put(offset, page))
            .and_then(|()| pages.zeros_up_to(block.used_bytes))
            .map_err(Error::io(operation))?;
    }
    put_u64(out, FLAG_EOS)
        .and_then(|()| put_footer(out))
        .map_err(Error::io("write RAM pages to the stream"))
}

/// The pages of one block, gaps filled with zero pages: a fresh QEMU's own block need not be empty.
struct Pages<'a> {
    name: &'a str,
    /// The offset up to which pages were written.
    next: u64,
    used_bytes: u64,
    out: &'a mut dyn Write,
}

impl Pages<'_> {
    fn put(&mut self, offset: u64, page: &Page) -> io::Result<()> {
        let bad = offset < self.next
            || !offset.is_multiple_of(PAGE_BYTES as u64)
            || offset >= self.used_bytes;
        if bad {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a page at {offset:#x} out of place"),
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

    /// The word before a page, and for a block's first page its name.
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

fn put_u32(out: &mut dyn Write, value: u32) -> io::Result<()> {
    out.write_all(&value.to_be_bytes())
}

fn put_u64(out: &mut dyn Write, value: u64) -> io::Result<()> {
    out.write_all(&value.to_be_bytes())
}

fn put_name(out: &mut dyn Write, name: &str) -> io::Result<()> {
    let len = u8::try_from(name.len()).map_err(io::Error::other)?;
    out.write_all(&[len])?;
    out.write_all(name.as_bytes())
}

fn put_footer(out: &mut dyn Write) -> io::Result<()> {
    out.write_all(&[SECTION_FOOTER])?;
    put_u32(out, RAM_SECTION_ID)
}

#[cfg(test)]
mod convert_tests;
#[cfg(test)]
mod tests;
