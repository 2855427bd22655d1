//! The records of a pack, and how much of it checkpoints need.

use crate::open_store::OpenStore;
use crate::pack_file::PackEnding;
use crate::pack_walk::WalkedRecords;
use crate::{Error, Result};
use keyframe_store_format::pack::{ENTRY_BYTES, FOOTER_BYTES, PackEntry};
use keyframe_store_format::page_ref::PageRef;

/// The list of a pack's records, and the offset at which they end.
#[derive(Debug)]
pub struct PackShape {
    /// The number of the pack.
    pub number: u32,
    /// The length of the pack's file in bytes.
    pub len_bytes: u64,
    /// The entries of the records, in rising order of offset.
    pub entries: Vec<PackEntry>,
    /// True if the pack has its trailer.
    pub closed: bool,
    /// True if the pack was recompressed.
    pub is_dense: bool,
    start: u64,
    records_end: u64,
}

impl PackShape {
    /// Reads the index of pack `number`; a pack without a trailer is read record by record. Returns
    /// `None` if the pack does not exist or its header is damaged. Error: the backend fails.
    pub fn of(inner: &OpenStore, number: u32) -> Result<Option<Self>> {
        let pack = match inner.open_pack(number) {
            Err(Error::Damaged { .. }) => return Ok(None),
            other => other?,
        };
        let len_bytes = pack.file.len_bytes()?;
        let (start, is_dense) = (pack.first, pack.is_dense());
        Ok(Some(match pack.ending(len_bytes)? {
            PackEnding::Closed { entries, records_end } => {
                Self { number, len_bytes, entries, closed: true, start, is_dense, records_end }
            }
            PackEnding::Unfinished | PackEnding::Damaged(_) => {
                let WalkedRecords { entries, stop, .. } =
                    pack.walk_records(inner, start, len_bytes)?;
                let records_end = stop.unwrap_or(len_bytes);
                Self { number, len_bytes, entries, closed: false, start, is_dense, records_end }
            }
        }))
    }

    /// Returns how many bytes of the pack are needed if the records at the offsets `live`, in
    /// rising order, are live.
    pub fn usage(&self, live: &[u64]) -> PackUsage {
        let ends = self.entries.iter().skip(1).map(PackEntry::offset).chain([self.records_end]);
        let (mut live_bytes, mut found) = (0, 0);
        // Entries and offsets both rise.
        let mut rest = live.iter().peekable();
        for (entry, end) in self.entries.iter().zip(ends) {
            while rest.next_if(|at| **at < entry.offset()).is_some() {}
            if rest.next_if_eq(&&entry.offset()).is_some() {
                live_bytes += end.saturating_sub(entry.offset()) + ENTRY_BYTES as u64;
                found += 1;
            }
        }
        PackUsage {
            number: self.number,
            len_bytes: self.len_bytes,
            live_bytes,
            live_records: found,
            head_bytes: self.start,
            is_dense: self.is_dense,
            standing: if found < live.len() {
                PackStanding::Untouchable
            } else {
                PackStanding::Free
            },
            holds_none: self.entries.is_empty() && self.closed,
        }
    }
}

/// The answer whether a prune may remove a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackStanding {
    /// It can.
    Free,
    /// A writer at work writes to it. It stays as it is.
    Open,
    /// It lacks needed records, or cannot be read. It stays as it is.
    Untouchable,
}

/// The part of a pack that checkpoints need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackUsage {
    /// The number of the pack.
    pub number: u32,
    /// The length of the pack's file in bytes.
    pub len_bytes: u64,
    /// The number of bytes of the needed records and of their index entries.
    pub live_bytes: u64,
    /// The number of the needed records.
    pub live_records: usize,
    /// The number of bytes before its records.
    pub head_bytes: u64,
    /// True if the pack was recompressed.
    pub is_dense: bool,
    /// Whether a prune may remove the pack.
    pub standing: PackStanding,
    /// True if the pack has no records and only keeps its number from being used again.
    pub holds_none: bool,
}

impl PackUsage {
    /// Returns true if the pack stays as it is.
    pub fn is_untouchable(&self) -> bool {
        self.standing != PackStanding::Free
    }

    /// Returns the number of bytes that moving its live records would free.
    pub fn unused_bytes(&self) -> u64 {
        // Header, dictionary, footer, and the zeros before it.
        let frame_bytes = self.head_bytes + FOOTER_BYTES as u64 * 2;
        self.len_bytes.saturating_sub(self.live_bytes + frame_bytes)
    }
}

/// Returns references to the records of pack `number` at the offsets `live`.
pub fn places(number: u32, live: &[u64]) -> impl Iterator<Item = PageRef> + '_ {
    live.iter().map(move |at| PageRef::new(number, *at))
}
