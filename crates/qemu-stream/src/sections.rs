//! Finds each device's section in a device state.
//!
//! ```text
//!   04 id name instance version │ body: no length is given │ 7e id │ 04 id' ... │ 00
//!                               └ ends where `7e id` is followed by a section or by the end mark
//! ```
//!
//! A guest can put anything into a body, also a forged end. If the end of a section could lie in
//! two places, the state is refused.
//!
//! Not handled here: the meaning of the bodies (`section_bodies`).

use crate::format::{HEADER_BYTES, SECTION_EOF, SECTION_FOOTER, SECTION_FULL};
use crate::{Result, StreamError};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Length of mark and number after a body.
const FOOTER_BYTES: usize = 5;
/// Upper bound of the number of devices.
const SECTIONS_MAX: usize = 4096;

/// One device's section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    /// The device's name, in printable ASCII.
    pub name: String,
    /// Number among the devices of that name; for a processor, its index.
    pub instance: u32,
    /// Version of the body's format.
    pub version: u32,
    /// From the section's first byte to the end of its footer.
    pub whole: Range<usize>,
    /// The device's own bytes.
    pub body: Range<usize>,
}

struct Header {
    id: u32,
    name: String,
    instance: u32,
    version: u32,
    body: usize,
}

/// All sections of `state`, in order. [`crate::check`] must have accepted `state`.
///
/// Errors: [`StreamError::DeviceState`] if it is malformed or ambiguous.
pub(crate) fn sections(state: &[u8]) -> Result<Vec<Section>> {
    let ends = possible_ends(state);
    let (mut all, mut seen) = (Vec::new(), HashSet::new());
    let mut at = HEADER_BYTES;
    while state.get(at) != Some(&SECTION_EOF) {
        let fail = |problem: String| StreamError::DeviceState { offset: at as u64, problem };
        let header = header(state, at).ok_or_else(|| fail("no section begins there".into()))?;
        if all.len() == SECTIONS_MAX || !seen.insert(header.id) {
            return Err(fail(format!(
                "section {} ({}) is repeated, or one of too many",
                header.id, header.name
            )));
        }
        let mut candidates =
            ends.get(&header.id).into_iter().flatten().filter(|end| **end >= header.body);
        let body = match (candidates.next(), candidates.next()) {
            (Some(end), None) => header.body..*end,
            (None, _) => return Err(fail(format!("section {} has no end", header.name))),
            (Some(a), Some(b)) => {
                return Err(fail(format!(
                    "section {} could end at byte {a} and at {b}",
                    header.name
                )));
            }
        };
        let whole = at..body.end + FOOTER_BYTES;
        at = whole.end;
        let Header { name, instance, version, .. } = header;
        all.push(Section { name, instance, version, whole, body });
    }
    if at + 1 == state.len() {
        return Ok(all);
    }
    Err(StreamError::DeviceState { offset: at as u64, problem: "bytes follow the end mark".into() })
}

/// For each section number, the offsets at which its body could end.
fn possible_ends(state: &[u8]) -> HashMap<u32, Vec<usize>> {
    let mut ends: HashMap<u32, Vec<usize>> = HashMap::new();
    for (at, _) in state.iter().enumerate().filter(|(_, byte)| **byte == SECTION_FOOTER) {
        let next = at + FOOTER_BYTES;
        let is_last = next + 1 == state.len() && state.get(next) == Some(&SECTION_EOF);
        if let Some(id) = u32_at(state, at + 1)
            && (is_last || header(state, next).is_some_and(|h| h.id != id))
        {
            ends.entry(id).or_default().push(at);
        }
    }
    ends
}

/// The header of a FULL section at offset `at`, if the bytes there can be one.
fn header(state: &[u8], at: usize) -> Option<Header> {
    let is_full = *state.get(at)? == SECTION_FULL;
    let len = usize::from(*state.get(at + 5)?);
    let name = state.get(at + 6..at + 6 + len)?;
    let sane = is_full && !name.is_empty() && name.iter().all(u8::is_ascii_graphic);
    let fields = at + 6 + len;
    sane.then_some(())?;
    Some(Header {
        id: u32_at(state, at + 1)?,
        name: String::from_utf8_lossy(name).into_owned(),
        instance: u32_at(state, fields)?,
        version: u32_at(state, fields + 4)?,
        body: fields + 8,
    })
}

/// The big-endian `u32` at offset `at`.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|b| u32::from_be_bytes(*b))
}

/// The big-endian `u64` at offset `at`.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|b| u64::from_be_bytes(*b))
}
