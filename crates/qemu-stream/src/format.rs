//! The marks of a stream, and the check of a device state from outside.

use crate::{Result, StreamError};
use std::io::{self, Write};

pub(crate) const MAGIC: [u8; 4] = *b"QEVM";
pub(crate) const VERSION: u32 = 3;
/// Length of magic and version in bytes.
pub(crate) const HEADER_BYTES: usize = 8;

pub(crate) const SECTION_EOF: u8 = 0x00;
pub(crate) const SECTION_START: u8 = 0x01;
pub(crate) const SECTION_END: u8 = 0x03;
pub(crate) const SECTION_FULL: u8 = 0x04;
/// An optional part of a section.
pub(crate) const SUBSECTION: u8 = 0x05;
pub(crate) const SECTION_DESCRIPTION: u8 = 0x06;
pub(crate) const SECTION_CONFIGURATION: u8 = 0x07;
pub(crate) const SECTION_FOOTER: u8 = 0x7e;

/// The part of the configuration that tells the size of a page, as a power of two.
pub(crate) const PAGE_BITS: &str = "configuration/target-page-bits";

/// Number of the `ram` section. QEMU numbers its own sections from 0, one for each device.
pub(crate) const RAM_SECTION_ID: u32 = 0x7000;
/// Version of the `ram` section.
pub(crate) const RAM_VERSION: u32 = 4;

/// Flags in the low bits of a page's offset.
pub(crate) const FLAG_ZERO: u64 = 0x02;
pub(crate) const FLAG_MEM_SIZE: u64 = 0x04;
pub(crate) const FLAG_PAGE: u64 = 0x08;
pub(crate) const FLAG_EOS: u64 = 0x10;
pub(crate) const FLAG_CONTINUE: u64 = 0x20;

/// Checks that `state` has the form that `xen-save-devices-state` writes, without reading the
/// devices: header, a first section with a printable name, and the end mark.
///
/// Error: [`StreamError::DeviceState`] with the offset of the first problem.
pub fn check(state: &[u8]) -> Result<()> {
    let fail = |offset: usize, problem: String| StreamError::DeviceState {
        offset: offset as u64,
        problem,
    };
    let short = || fail(state.len(), format!("it ends after {} bytes", state.len()));
    if state.get(..4).ok_or_else(short)? != MAGIC {
        return Err(fail(0, "it does not begin with QEVM".into()));
    }
    let version =
        state.get(4..HEADER_BYTES).and_then(<[u8]>::first_chunk).map(|b| u32::from_be_bytes(*b));
    match version.ok_or_else(short)? {
        VERSION => {}
        other => return Err(fail(4, format!("version {other}; only version {VERSION} is known"))),
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

pub(crate) fn put_u32(out: &mut dyn Write, value: u32) -> io::Result<()> {
    out.write_all(&value.to_be_bytes())
}

pub(crate) fn put_u64(out: &mut dyn Write, value: u64) -> io::Result<()> {
    out.write_all(&value.to_be_bytes())
}

pub(crate) fn put_name(out: &mut dyn Write, name: &str) -> io::Result<()> {
    let len = u8::try_from(name.len()).map_err(io::Error::other)?;
    out.write_all(&[len])?;
    out.write_all(name.as_bytes())
}

pub(crate) fn put_footer(out: &mut dyn Write) -> io::Result<()> {
    out.write_all(&[SECTION_FOOTER])?;
    put_u32(out, RAM_SECTION_ID)
}
