//! Copying records of packs that a prune removes.

use crate::pack_writer::encode::compress_patch;
use crate::pack_writer::open_pack::OpenPack;
use crate::pack_writer::writer::PackWriter;
use crate::{Error, Result};
use keyframe_store_format::codec::{Codec, SAVING_BYTES_MIN};
use keyframe_store_format::derived::Derivation;
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{RecordKind, verify};
use keyframe_units::{PAGE_BYTES, Page};

/// The words of a page may take this many bytes more than zstd, because reading them is several
/// times as fast.
const WORDS_MORE_BYTES_MAX: usize = PAGE_BYTES / 12;

impl PackWriter {
    /// Writes a page, unless the writer knows its content. Returns its record, and the record's
    /// length in bytes, or 0 if the content was known. Errors: [`Error::Damaged`] if the page does
    /// not match `hash`; the pack cannot be written.
    pub fn keep(
        &mut self,
        page: &Page,
        hash: PageHash,
        kind: RecordKind,
    ) -> Result<(PageRef, u64)> {
        verify(hash, &self.inner.config.key, page)
            .map_err(|problem| Error::damaged("a page", problem))?;
        match self.index.get(hash) {
            // Not a derived one: other records may refer to this one.
            Some(known) if !known.kind.is_derived() => return Ok((known.place, 0)),
            _ => {}
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        let payload = match self.dense.as_mut().and_then(|dense| dense.compress(page)) {
            None => self.compressors[0].compress(page),
            Some(dense) => {
                let words = self.compressors[0].compress_words(page);
                match words.filter(|words| words.len() <= dense.len() + WORDS_MORE_BYTES_MAX) {
                    Some(words) => (Codec::Words, words),
                    None if dense.len() + SAVING_BYTES_MIN <= page.len() => (Codec::Dense, dense),
                    None => (Codec::Raw, page.as_slice()),
                }
            }
        };
        let len_bytes = pack.append(hash, kind, payload);
        self.index_record(pack, hash, place, kind)?;
        Ok((place, len_bytes))
    }

    /// Writes a page as the derived record `derivation`. Returns the same as [`Self::keep`]. Error:
    /// the pack cannot be written.
    pub fn keep_derived(&mut self, derivation: &Derivation, page: &Page) -> Result<(PageRef, u64)> {
        let hash = PageHash::of(&self.inner.config.key, page);
        if let Some(known) = self.index.get(hash) {
            return Ok((known.place, 0));
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        self.composed.clear();
        let (kind, codec) = match derivation {
            Derivation::Parts(composition) => {
                let codec = composition.encode(page, &mut self.compressors[0], &mut self.composed);
                (RecordKind::Composed, codec)
            }
            Derivation::Delta(delta) => {
                delta.encode(&mut self.composed);
                (RecordKind::Delta, compress_patch(&mut self.composed, &mut self.compressors[0]))
            }
        };
        let len_bytes = pack.append(hash, kind, (codec, &self.composed));
        self.index_record(pack, hash, place, kind)?;
        Ok((place, len_bytes))
    }

    fn index_record(
        &mut self,
        pack: OpenPack,
        hash: PageHash,
        place: PageRef,
        kind: RecordKind,
    ) -> Result<()> {
        self.index.insert(hash, place, kind);
        self.give_back(pack)
    }

    /// Gives the next pack a higher number than all existing ones. Forgets derived records. Error:
    /// the pack cannot be written.
    pub fn raise(&mut self) -> Result<()> {
        self.close()?;
        self.next_pack = self.next_pack.max(self.inner.newest_pack()? + 1);
        // The records that a derived one refers to may go meanwhile.
        self.index.forget_derived();
        Ok(())
    }

    /// Creates a pack without records, with a higher number than all existing ones, and returns its
    /// number. Error: the pack cannot be written.
    pub fn reserve(&mut self) -> Result<u32> {
        self.raise()?;
        let pack = self.create()?;
        let number = pack.number;
        self.open = Some(pack);
        self.close().map(|()| number)
    }
}
