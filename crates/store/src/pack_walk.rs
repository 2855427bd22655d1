//! Reading a pack record by record, without its index.

use crate::open_store::OpenStore;
use crate::pack_file::{PackFile, READ_BYTES_MAX};
use keyframe_store_format::pack::PackEntry;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{RECORD_BYTES_MAX, Record};
use keyframe_units::ZERO_PAGE;

impl PackFile {
    /// Reads the records from offset `from` to offset `end` one after the other, and checks each.
    /// Stops at the first record whose bytes are damaged or unreadable, and returns its offset and
    /// the problem. Returns `None` if there is no such record.
    ///
    /// `visit` gets an entry for each correct record. For a record whose bytes are correct, but
    /// whose content does not match its hash, it gets the offset and the problem.
    pub fn walk(
        &self,
        store: &OpenStore,
        from: u64,
        end: u64,
        visit: &mut dyn FnMut(Result<PackEntry, (u64, String)>),
    ) -> Option<(u64, String)> {
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
                        return Some((at, error.to_string()));
                    }
                }
            }
            let bytes = buffer.get((at - buffer_at) as usize..).unwrap_or_default();
            let place = PageRef::new(self.number, at);
            let record = match Record::parse(bytes, place) {
                Ok(record) => record,
                Err(problem) => return Some((at, problem)),
            };
            let restored =
                self.parse(bytes, place).and_then(|whole| store.restore(&whole, place, &mut page));
            visit(match restored {
                Ok(()) => Ok(PackEntry::new(record.hash, at, record.kind)),
                Err(problem) => Err((at, problem)),
            });
            at += record.len_bytes() as u64;
        }
        None
    }
}
