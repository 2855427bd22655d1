//! Reads a VM's RAM out of the process that runs it, and finds the pages that can hold data.
//!
//! ```text
//!   region          one range of RAM, as the caller named it
//!   └─ part         the piece of it in one mapping of the process
//!        ├─ OwnMapping   shared, a memfd sealed against shrinking: mapped here read-only, plain copy
//!        └─ ProcessVm    all else: process_vm_readv, up to 1024 ranges a call
//! ```
//!
//! Invariants: a mapping of ours never faults, because its file is sealed and long enough; a read
//! fills all of the destination or fails.
//!
//! If shared memory was never touched, reading it makes the kernel allocate it: call
//! [`GuestReader::data_extents`] first. Absent: writing; following the process if it maps other
//! memory in place of a region.

mod data_extents;
mod prefaulted_buffer;
mod shared_mapping;

pub use prefaulted_buffer::PrefaultedBuffer;

use crate::maps::{Mapping, covering};
use crate::pagemap::Pagemap;
use crate::ranges::intersection;
use crate::{Error, Process, Result, process_memory};
use data_extents::File;
use keyframe_units::HostRange;
use shared_mapping::SharedMapping;

/// The method that reads a part of a process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMethod {
    /// Through a mapping of the same memory in this process.
    OwnMapping,
    /// By `process_vm_readv`.
    ProcessVm,
}

/// The piece of a region that lies in one mapping.
#[derive(Debug)]
struct Part {
    range: HostRange,
    mapping: Mapping,
    file: Option<File>,
    window: Option<SharedMapping>,
}

/// Reads regions of a process's memory. Several threads may use one reader at once.
#[derive(Debug)]
pub struct GuestReader {
    process: Process,
    pagemap: Pagemap,
    regions: Vec<HostRange>,
    parts: Vec<Part>,
}

impl GuestReader {
    /// Makes a reader of `regions`, in any order and without overlap. A region may cover several
    /// adjacent mappings.
    ///
    /// Errors: a region is not wholly mapped; we may not inspect the process.
    pub fn new(process: &Process, regions: &[HostRange]) -> Result<Self> {
        let mut sorted = regions.to_vec();
        sorted.sort_unstable_by_key(|range| range.start);
        let bad = |range: HostRange| {
            range.len_bytes == 0 || range.start.checked_add(range.len_bytes).is_none()
        };
        if let Some(range) = sorted.iter().find(|range| bad(**range)) {
            return Err(Error::BadRegion { range: *range });
        }
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].end() > pair[1].start) {
            return Err(Error::BadRegion { range: pair[1] });
        }
        let maps = process.maps()?;
        let mut parts = Vec::new();
        for region in &sorted {
            let found = covering(&maps, *region).map_err(|hole| Error::Unmapped {
                pid: process.pid(),
                operation: "read memory",
                range: *region,
                hole,
            })?;
            for mapping in found {
                let Some(range) = intersection(mapping.range, *region) else { continue };
                let file = File::open(process, mapping);
                let window =
                    file.as_ref().and_then(|file| SharedMapping::open(file, mapping, range));
                parts.push(Part { range, mapping: mapping.clone(), file, window });
            }
        }
        let pagemap = Pagemap::open(process)?;
        Ok(Self { process: process.try_clone()?, pagemap, regions: sorted, parts })
    }

    /// Reads `ranges` in order into `dst`, end to end. The length of `dst` must be the sum of the
    /// ranges. If the process writes meanwhile, the result mixes old and new content.
    ///
    /// Errors: a range lies in no region; the lengths differ; the process is gone or the memory
    /// cannot be read. `dst` then holds an unspecified mixture.
    pub fn read(&self, ranges: &[HostRange], dst: &mut [u8]) -> Result<()> {
        let ranges_bytes =
            ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.len_bytes));
        if ranges_bytes != dst.len() as u64 {
            return Err(Error::Length { ranges_bytes, dst_bytes: dst.len() as u64 });
        }
        let mut rest = dst;
        let mut remote: Vec<HostRange> = Vec::new();
        let mut remote_bytes = 0;
        for range in ranges.iter().filter(|range| range.len_bytes > 0) {
            for (part, piece) in self.pieces(*range)? {
                let len = piece.len_bytes as usize;
                let Some(window) = &part.window else {
                    remote.push(piece);
                    remote_bytes += len;
                    continue;
                };
                rest = self.gather(&mut remote, &mut remote_bytes, rest)?;
                let (here, behind) = rest.split_at_mut(len);
                window.copy(piece, here);
                rest = behind;
            }
        }
        self.gather(&mut remote, &mut remote_bytes, rest)?;
        self.process.ensure_alive("read memory")
    }

    /// Reads what `remote` lists into the start of `dst`; gives back the rest of `dst`.
    fn gather<'d>(
        &self,
        remote: &mut Vec<HostRange>,
        remote_bytes: &mut usize,
        dst: &'d mut [u8],
    ) -> Result<&'d mut [u8]> {
        let (here, behind) = dst.split_at_mut(std::mem::take(remote_bytes));
        if !remote.is_empty() {
            process_memory::gather(&self.process, remote, here)?;
            remote.clear();
        }
        Ok(behind)
    }

    /// `range` by parts. Errors: it does not lie in one region.
    fn pieces(&self, range: HostRange) -> Result<impl Iterator<Item = (&Part, HostRange)>> {
        let index = self.regions.partition_point(|region| region.end() <= range.start);
        let inside = self.regions.get(index).is_some_and(|region| region.contains(range));
        if !inside || range.start.checked_add(range.len_bytes).is_none() {
            return Err(Error::OutsideRegions { range });
        }
        let first = self.parts.partition_point(|part| part.range.end() <= range.start);
        let parts = self.parts.get(first..).unwrap_or_default().iter();
        Ok(parts.map_while(move |part| Some((part, intersection(part.range, range)?))))
    }

    /// Returns each part of the regions with the method that reads it, by rising address.
    pub fn methods(&self) -> Vec<(HostRange, ReadMethod)> {
        let method = |part: &Part| {
            if part.window.is_some() { ReadMethod::OwnMapping } else { ReadMethod::ProcessVm }
        };
        self.parts.iter().map(|part| (part.range, method(part))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Several copy threads share one reader.
    #[test]
    fn a_reader_can_be_shared_by_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<GuestReader>();
    }
}
