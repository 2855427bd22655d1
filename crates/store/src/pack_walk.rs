//! Reading a pack record by record, without its index.

use crate::open_store::OpenStore;
use crate::pack_file::{PackFile, READ_BYTES_MAX};
use crate::{Error, Result};
use keyframe_store_format::pack::PackEntry;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{RECORD_BYTES_MAX, Record};
use keyframe_units::ZERO_PAGE;

/// The correct records of a part of a pack.
#[derive(Debug, Default)]
pub struct WalkedRecords {
    /// Their entries, in rising order of offset.
    pub entries: Vec<PackEntry>,
    /// The number of records whose bytes are correct, but whose content does not match their hash.
    pub wrong: usize,
    /// The offset of the first record whose bytes are damaged; `None` if there is none. Nothing
    /// after it was read.
    pub stop: Option<u64>,
}

impl PackFile {
    /// Reads the records from offset `from` to offset `end` one after the other, and checks each.
    /// Stops at the first record whose bytes are damaged or unreadable, and returns its offset and
    /// the error. Returns `None` if there is no such record.
    ///
    /// `visit` gets an entry for each correct record. For a record whose bytes are correct, but
    /// whose content cannot be read or does not match its hash, it gets the offset and the error.
    pub fn walk(
        &self,
        store: &OpenStore,
        from: u64,
        end: u64,
        visit: &mut dyn FnMut(Result<PackEntry, (u64, Error)>),
    ) -> Option<(u64, Error)> {
        let mut page = ZERO_PAGE;
        let mut buffer = Vec::new();
        let (mut at, mut buffer_at) = (from, from);
        while at < end {
            let have = (buffer_at + buffer.len() as u64).saturating_sub(at);
            let want = (end - at).min(RECORD_BYTES_MAX as u64);
            if have < want {
                buffer_at = at;
                buffer.resize((end - at).min(READ_BYTES_MAX) as usize, 0);
                if self.file.read_at(at, &mut buffer).is_err() {
                    // The unreadable bytes may lie further on: read one record at most.
                    buffer.resize(want as usize, 0);
                    if let Err(error) = self.file.read_at(at, &mut buffer) {
                        return Some((at, error));
                    }
                }
            }
            let bytes = buffer.get((at - buffer_at) as usize..).unwrap_or_default();
            let place = PageRef::new(self.number, at);
            let record = match Record::parse(bytes, place) {
                Ok(record) => record,
                Err(problem) => return Some((at, self.damaged_at(place, problem))),
            };
            let restored =
                self.parse(bytes, place).and_then(|whole| store.restore(&whole, place, &mut page));
            let entry = PackEntry::new(record.hash, at, record.kind);
            visit(restored.map(|()| entry).map_err(|error| (at, error)));
            at += record.len_bytes() as u64;
        }
        None
    }

    /// Returns the entries of the records from offset `from` to offset `end`, at most `records_max`,
    /// and the offset after the last of them. Does not read contents: their writer vouches for them.
    /// Stops at a record whose bytes are damaged. Error: the backend fails.
    pub fn entries_between(
        &self,
        from: u64,
        end: u64,
        records_max: usize,
    ) -> Result<(Vec<PackEntry>, u64)> {
        let (mut entries, mut at) = (Vec::new(), from);
        let (mut buffer, mut buffer_at) = (Vec::new(), from);
        while at < end && entries.len() < records_max {
            let have = (buffer_at + buffer.len() as u64).saturating_sub(at);
            if have < (end - at).min(RECORD_BYTES_MAX as u64) {
                buffer_at = at;
                buffer.resize((end - at).min(READ_BYTES_MAX) as usize, 0);
                match self.file.read_at(at, &mut buffer) {
                    Err(error) if error.is_damage() || error.is_not_found() => break,
                    other => other?,
                }
            }
            let bytes = buffer.get((at - buffer_at) as usize..).unwrap_or_default();
            let Ok(record) = Record::parse(bytes, PageRef::new(self.number, at)) else { break };
            entries.push(PackEntry::new(record.hash, at, record.kind));
            at += record.len_bytes() as u64;
        }
        Ok((entries, at))
    }

    /// Reads the records as [`Self::walk`] does, and returns the correct ones. A pack that was
    /// removed meanwhile counts as damaged. Error: the backend fails, so that a record which was
    /// not read may be correct.
    pub fn walk_records(&self, store: &OpenStore, from: u64, end: u64) -> Result<WalkedRecords> {
        let lasts = |error: &Error| error.is_damage() || error.is_not_found();
        let mut walked = WalkedRecords::default();
        let mut failed = None;
        let stop = self.walk(store, from, end, &mut |held| match held {
            Ok(entry) => walked.entries.push(entry),
            Err((_, error)) if lasts(&error) => walked.wrong += 1,
            Err((_, error)) => {
                failed.get_or_insert(error);
            }
        });
        if let Some((at, error)) = stop {
            if !lasts(&error) {
                return Err(error);
            }
            walked.stop = Some(at);
        }
        failed.map_or(Ok(walked), Err)
    }
}
