//! Parts of a range, one for each mapping that it crosses.
//!
//! ```text
//!   range          ├──────────────────────────────┤
//!   mappings    ├───────────┼────────────┼──────────────┤      a gap: Error::Unmapped
//!   parts          ├────────┼────────────┼────────┤            a cut page: Error::Unaligned
//! ```
//!
//! The trackers decide what they do with the parts.

use crate::maps::covering;
use crate::ranges::intersection;
use crate::{Error, Process, Result};
use keyframe_units::{HostRange, PAGE_BYTES};

/// The largest page that the kernel protects.
const PAGE_BYTES_MAX: u64 = 2 << 20;

/// A part of one mapping, in whole pages of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MappedRange {
    pub range: HostRange,
    /// The size of its pages in bytes.
    pub page_bytes: u64,
    pub shared: bool,
    /// True if a file is mapped. Private huge pages have a nameless file.
    pub has_file: bool,
}

impl MappedRange {
    /// Returns true for private memory without a file: a discarded page loses its protection there.
    pub fn is_anonymous(&self) -> bool {
        !self.shared && !self.has_file
    }

    /// Returns true for private memory with a file: discarding a protected page leaves a marker
    /// there.
    pub fn leaves_markers(&self) -> bool {
        !self.shared && self.has_file
    }
}

/// Returns the part of each mapping under `range`.
///
/// Errors: a part is not mapped, cuts a page, or has pages of 1 GiB.
pub(crate) fn mapped(process: &Process, range: HostRange) -> Result<Vec<MappedRange>> {
    let (pid, operation) = (process.pid(), "register");
    let unaligned = |page_bytes| Error::Unaligned { pid, operation, range, page_bytes };
    if range.len_bytes == 0 || range.start.checked_add(range.len_bytes).is_none() {
        return Err(unaligned(PAGE_BYTES as u64));
    }
    let maps = process.maps()?;
    let found =
        covering(&maps, range).map_err(|hole| Error::Unmapped { pid, operation, range, hole })?;
    let mut stretches = Vec::with_capacity(found.len());
    for mapping in found {
        let Some(part) = intersection(mapping.range, range) else { continue };
        let page_bytes = mapping.page_bytes;
        if page_bytes > PAGE_BYTES_MAX {
            return Err(Error::PageSize { pid, range: part, page_bytes });
        }
        if !is_whole(part, page_bytes) {
            return Err(unaligned(page_bytes));
        }
        let (shared, has_file) = (mapping.shared, mapping.inode != 0);
        stretches.push(MappedRange { range: part, page_bytes, shared, has_file });
    }
    Ok(stretches)
}

/// Returns the parts of `registered`, a rising list, that lie in `range`.
///
/// Errors: a part of `range` is not registered, or cuts a page.
pub(crate) fn registered(
    process: &Process,
    registered: impl Iterator<Item = MappedRange>,
    range: HostRange,
    operation: &'static str,
) -> Result<Vec<MappedRange>> {
    let pid = process.pid();
    let mut at = range.start;
    let mut parts = Vec::new();
    for stretch in registered.skip_while(|stretch| stretch.range.end() <= range.start) {
        let Some(part) = intersection(stretch.range, range).filter(|part| part.start == at) else {
            break;
        };
        if !is_whole(part, stretch.page_bytes) {
            return Err(Error::Unaligned { pid, operation, range, page_bytes: stretch.page_bytes });
        }
        parts.push(MappedRange { range: part, ..stretch });
        at = part.end();
    }
    if at < range.end() {
        return Err(Error::NotRegistered { pid, operation, range, hole: at });
    }
    Ok(parts)
}

fn is_whole(part: HostRange, page_bytes: u64) -> bool {
    part.start.0.is_multiple_of(page_bytes) && part.end().0.is_multiple_of(page_bytes)
}
