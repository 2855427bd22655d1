//! Encodes pages into batches, for one stream.

use crate::batch::PageEncoding;
use keyframe_bytes::varint::put_varint;
use keyframe_pages::patch::{PATCH_BYTES_MAX, diff};
use keyframe_pages::words::WordCoder;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

/// A patch of up to this length is not compressed.
const PATCH_BYTES_SMALL: usize = 256;
/// The smallest saving for which a page or patch is compressed.
const SAVING_BYTES_MIN: usize = 64;

/// The numbers of pages that were encoded, by their encoding, and the bytes that they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentPages {
    /// The number of pages.
    pub pages: u64,
    /// The number of pages of zeros.
    pub zero: u64,
    /// The number of pages sent as a copy of another page at the standby.
    pub like: u64,
    /// The number of pages sent as a difference from the standby's version.
    pub patched: u64,
    /// The number of pages sent compressed.
    pub compressed: u64,
    /// The number of pages sent as they are.
    pub raw: u64,
    /// The number of pages that equal the standby's version and were not sent.
    pub same: u64,
    /// The size of the batches in bytes.
    pub bytes: u64,
}

impl SentPages {
    /// Returns the sum of both, field by field.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            pages: self.pages + other.pages,
            zero: self.zero + other.zero,
            like: self.like + other.like,
            patched: self.patched + other.patched,
            compressed: self.compressed + other.compressed,
            raw: self.raw + other.raw,
            same: self.same + other.same,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// The standby's version of a page.
struct Base {
    page: PageIndex,
    hash: u64,
    /// True if the slot was used since the clock hand passed it.
    used: bool,
    content: Box<Page>,
}

/// Encodes the pages of one stream. It keeps the standby's versions of the pages sent last as
/// bases.
pub struct EpochEncoder {
    bases: Vec<Base>,
    of_page: FxHashMap<PageIndex, u32>,
    of_content: FxHashMap<u64, u32>,
    bases_max: usize,
    hand: usize,
    /// Pages whose base belongs to the epoch in progress.
    touched: Vec<PageIndex>,
    words: WordCoder,
    table: CompressTable,
    buffer: Vec<u8>,
    patch: Vec<u8>,
}

impl EpochEncoder {
    /// Creates an encoder that keeps up to `memory_bytes` of the standby's pages as bases.
    #[must_use]
    pub fn new(memory_bytes: usize) -> Self {
        Self {
            bases: Vec::new(),
            of_page: FxHashMap::default(),
            of_content: FxHashMap::default(),
            bases_max: (memory_bytes / PAGE_BYTES).min(u32::MAX as usize),
            hand: 0,
            touched: Vec::new(),
            words: WordCoder::new(),
            table: CompressTable::small(),
            buffer: vec![0; get_maximum_output_size(PAGE_BYTES)],
            patch: Vec::new(),
        }
    }

    /// Appends a batch of `pages`, in rising order, to `out`. Returns its statistics.
    pub fn encode(&mut self, pages: &[(PageIndex, &Page)], out: &mut Vec<u8>) -> SentPages {
        let (mut sent, before) = (SentPages::default(), out.len());
        let mut last = 0;
        for (page, content) in pages {
            self.entry(*page, content, &mut last, out, &mut sent);
        }
        sent.bytes = (out.len() - before) as u64;
        sent
    }

    /// Ends the epoch in progress: the standby has its pages from now on.
    pub fn finish(&mut self) {
        self.touched.clear();
    }

    /// Gives up the epoch in progress: the standby keeps its previous pages.
    pub fn abandon(&mut self) {
        for page in std::mem::take(&mut self.touched) {
            if let Some(slot) = self.of_page.remove(&page) {
                self.vacate(slot);
            }
        }
    }

    /// Forgets all pages of the standby.
    pub fn forget(&mut self) {
        self.bases.clear();
        self.of_page.clear();
        self.of_content.clear();
        self.touched.clear();
        self.hand = 0;
    }

    fn entry(
        &mut self,
        page: PageIndex,
        content: &Page,
        last: &mut u64,
        out: &mut Vec<u8>,
        sent: &mut SentPages,
    ) {
        sent.pages += 1;
        let hash = xxh3_64(content);
        let slot = self.of_page.get(&page).copied();
        if slot
            .and_then(|slot| self.bases.get(slot as usize))
            .is_some_and(|base| *base.content == *content)
        {
            sent.same += 1;
            return;
        }
        let mut head = |kind: PageEncoding, out: &mut Vec<u8>| {
            put_varint(out, (page.0 - *last) << 3 | kind as u64);
            *last = page.0;
        };
        if *content == ZERO_PAGE {
            head(PageEncoding::Zero, out);
            sent.zero += 1;
        } else if let Some(like) = self.like(hash, content) {
            head(PageEncoding::Like, out);
            put_varint(out, like.0);
            sent.like += 1;
        } else if self.patch_of(slot, content) {
            sent.patched += 1;
            let packed = (self.patch.len() > PATCH_BYTES_SMALL)
                .then(|| {
                    compress_into_with_table(&self.patch, &mut self.buffer, &mut self.table).ok()
                })
                .flatten()
                .filter(|len| len + SAVING_BYTES_MIN <= self.patch.len());
            if let Some(bytes) = packed.and_then(|len| self.buffer.get(..len)) {
                head(PageEncoding::PackedPatch, out);
                put_varint(out, self.patch.len() as u64);
                put_varint(out, bytes.len() as u64);
                out.extend_from_slice(bytes);
            } else {
                head(PageEncoding::Patch, out);
                put_varint(out, self.patch.len() as u64);
                out.extend_from_slice(&self.patch);
            }
        } else if let Some(words) = self.words.encode(content) {
            head(PageEncoding::Words, out);
            put_varint(out, words.len() as u64);
            out.extend_from_slice(words);
            sent.compressed += 1;
        } else {
            let packed = compress_into_with_table(content, &mut self.buffer, &mut self.table);
            let packed = packed.ok().filter(|len| len + SAVING_BYTES_MIN <= PAGE_BYTES);
            if let Some(bytes) = packed.and_then(|len| self.buffer.get(..len)) {
                head(PageEncoding::Lz4, out);
                put_varint(out, bytes.len() as u64);
                out.extend_from_slice(bytes);
                sent.compressed += 1;
            } else {
                head(PageEncoding::Raw, out);
                out.extend_from_slice(content);
                sent.raw += 1;
            }
        }
        self.keep(page, hash, content, slot);
    }

    /// Returns another page that has this content at the standby.
    fn like(&mut self, hash: u64, content: &Page) -> Option<PageIndex> {
        let slot = *self.of_content.get(&hash)?;
        let base = self.bases.get_mut(slot as usize).filter(|base| *base.content == *content)?;
        base.used = true;
        Some(base.page)
    }

    /// Writes the difference from the base in `slot` to `patch`. False if the difference is too
    /// large, or if there is no base.
    fn patch_of(&mut self, slot: Option<u32>, content: &Page) -> bool {
        self.patch.clear();
        let base = slot.and_then(|slot| self.bases.get(slot as usize));
        base.is_some_and(|base| diff(&base.content, content, PATCH_BYTES_MAX, &mut self.patch))
    }

    fn keep(&mut self, page: PageIndex, hash: u64, content: &Page, slot: Option<u32>) {
        self.touched.push(page);
        if let Some(slot) = slot {
            self.unlist(slot);
            if let Some(base) = self.bases.get_mut(slot as usize) {
                base.content.copy_from_slice(content);
                (base.hash, base.used) = (hash, true);
            }
            self.of_content.insert(hash, slot);
            return;
        }
        let slot = if self.bases.len() < self.bases_max {
            self.bases.push(Base { page, hash, used: false, content: Box::new(*content) });
            self.bases.len() as u32 - 1
        } else {
            let Some(slot) = self.evicted() else { return };
            if let Some(base) = self.bases.get_mut(slot as usize) {
                base.content.copy_from_slice(content);
                (base.page, base.hash, base.used) = (page, hash, false);
            }
            slot
        };
        self.of_page.insert(page, slot);
        self.of_content.insert(hash, slot);
    }

    /// Takes the slot of a base that has not been used for a while from its page.
    fn evicted(&mut self) -> Option<u32> {
        for _ in 0..2 * self.bases.len() {
            self.hand = (self.hand + 1) % self.bases.len();
            let base = self.bases.get_mut(self.hand)?;
            if !std::mem::take(&mut base.used) {
                let page = base.page;
                if self.of_page.get(&page) == Some(&(self.hand as u32)) {
                    self.of_page.remove(&page);
                }
                self.unlist(self.hand as u32);
                return Some(self.hand as u32);
            }
        }
        None
    }

    /// Marks `slot` as unused.
    fn unlist(&mut self, slot: u32) {
        let Some(base) = self.bases.get(slot as usize) else { return };
        if self.of_content.get(&base.hash) == Some(&slot) {
            self.of_content.remove(&base.hash);
        }
    }

    fn vacate(&mut self, slot: u32) {
        self.unlist(slot);
        if let Some(base) = self.bases.get_mut(slot as usize) {
            // No page has this number, so the clock hand takes the slot again.
            (base.page, base.used) = (PageIndex(u64::MAX), false);
        }
    }
}
