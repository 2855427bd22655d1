//! Finding the sectors of disk blocks in what the store holds, with an index in memory.
//!
//! ```text
//!   sector ── XXH3-64, secret seed ──▶ bucket of four ──▶ record ── read it ──▶ is one of its eight sectors the same?
//!                                      newest first;                                 no ──▶ forgotten
//!                                      a fifth pushes the oldest out                 yes ─▶ Part::Of(record, number)
//! ```
//!
//! Invariants: the bytes are compared before anything refers to them. So a false match is
//! impossible, whatever a guest writes; a collision costs a read. Memory is bounded: the table
//! doubles up to its limit and then forgets. A forgotten sector only costs space. Nothing of the
//! index is on disk.

use keyframe_store_format::composed::{Composition, PART_BYTES, PARTS, PagePart, Sector, sectors};
use keyframe_store_format::page_hash::HashKey;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::{Page, ZERO_PAGE};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const SLOTS: usize = 4;
/// The first table has 2^12 buckets: 256 KiB.
const BITS_FIRST: u32 = 12;
/// The pages that are kept after a read. A shifted file needs each page for two consecutive blocks
/// or more.
const RECENT_PAGES: usize = 32;

/// The tag of each sector of a page; `None` if the sector is zero.
pub type Tags = [Option<u64>; PARTS];

/// Finds sectors of 512 bytes that the store holds already.
pub struct SectorFinder {
    seed: u64,
    /// The fewest parts of a block that make a composed record.
    parts_min: usize,
    table: Table,
    recent: Vec<(PageRef, Page)>,
    oldest: usize,
}

impl SectorFinder {
    /// Creates a finder with a table of at most `bytes_max` bytes. `parts_min` is the number of
    /// sectors that must be found to compose a block. Returns `None` if the memory is too small for
    /// a table.
    pub fn new(key: &HashKey, bytes_max: usize, parts_min: usize) -> Option<Self> {
        let hash = blake3::keyed_hash(&key.0, b"the sectors of keyframe");
        let seed = hash.as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let table = Table::new(bytes_max)?;
        Some(Self { seed, parts_min: parts_min.max(1), table, recent: Vec::new(), oldest: 0 })
    }

    /// Returns the tags of the sectors of a page.
    pub fn tags(&self, page: &Page) -> Tags {
        sectors(page).each_ref().map(|sector| {
            let zero = *sector == [0; PART_BYTES];
            (!zero).then(|| xxh3_64_with_seed(sector, self.seed))
        })
    }

    /// Adds the sectors with the tags `tags` of a page, which is in the plain record `record`.
    pub fn learn(&mut self, tags: &Tags, record: PageRef) {
        for tag in tags.iter().flatten() {
            self.table.insert(*tag, record);
        }
    }

    /// Forgets all sectors, because some records may be lost.
    pub fn clear(&mut self) {
        self.table.clear();
        self.recent.clear();
    }

    /// Returns the composition of `block` from sectors that the store holds. Returns `None` if too
    /// few are found. `read` reads the page of a record; it returns false if it cannot, or if the
    /// record is derived.
    pub fn compose(
        &mut self,
        block: &Page,
        tags: &Tags,
        read: &mut dyn FnMut(PageRef, &mut Page) -> bool,
    ) -> Option<Composition> {
        let mut records = tags.map(|tag| tag.and_then(|tag| self.table.find(tag)));
        let enough = |found: usize| found >= self.parts_min;
        if !enough(records.iter().flatten().count()) {
            return None;
        }
        let mut parts = [PagePart::Literal; PARTS];
        for (((part, tag), record), sector) in
            parts.iter_mut().zip(tags).zip(&mut records).zip(sectors(block))
        {
            let (Some(tag), Some(record)) = (tag, record) else {
                if tag.is_none() {
                    *part = PagePart::Zero;
                }
                continue;
            };
            match self.number_in(*record, sector, read) {
                Some(number) => *part = PagePart::Of(*record, number),
                None => self.table.remove(*tag),
            }
        }
        let composition = Composition(parts);
        (composition.references() >= self.parts_min).then_some(composition)
    }

    /// The number of the part of `record` that equals this sector.
    fn number_in(
        &mut self,
        record: PageRef,
        sector: &Sector,
        read: &mut dyn FnMut(PageRef, &mut Page) -> bool,
    ) -> Option<u8> {
        let at = match self.recent.iter().position(|(of, _)| *of == record) {
            Some(at) => at,
            None => self.fetch(record, read)?,
        };
        let (_, page) = self.recent.get(at)?;
        sectors(page).iter().position(|is| is == sector).map(|number| number as u8)
    }

    /// Reads the page of a record. Replaces the page that was read longest ago.
    fn fetch(
        &mut self,
        record: PageRef,
        read: &mut dyn FnMut(PageRef, &mut Page) -> bool,
    ) -> Option<usize> {
        if self.recent.len() < RECENT_PAGES {
            self.recent.push((PageRef::ZERO, ZERO_PAGE));
            self.oldest = self.recent.len() - 1;
        } else {
            self.oldest = (self.oldest + 1) % RECENT_PAGES;
        }
        let (of, page) = self.recent.get_mut(self.oldest)?;
        // A failed read leaves the page of no record.
        *of = PageRef::ZERO;
        if !read(record, page) {
            return None;
        }
        *of = record;
        Some(self.oldest)
    }
}

impl std::fmt::Debug for SectorFinder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SectorFinder({} sectors)", self.table.used)
    }
}

/// The tag of a sector, and a record that has it. The slot is empty if the record is zero.
#[derive(Clone, Copy)]
struct Slot {
    tag: u64,
    record: PageRef,
}

const EMPTY: Slot = Slot { tag: 0, record: PageRef::ZERO };

/// Tag to record, in 2^bits buckets of four; a bucket is one cache line.
struct Table {
    buckets: Vec<[Slot; SLOTS]>,
    bits: u32,
    bits_max: u32,
    used: usize,
}

impl Table {
    fn new(bytes_max: usize) -> Option<Self> {
        let buckets_max = bytes_max / size_of::<[Slot; SLOTS]>();
        let bits_max = buckets_max.checked_ilog2().filter(|bits| *bits > 0)?;
        let bits = bits_max.min(BITS_FIRST);
        Some(Self { buckets: vec![[EMPTY; SLOTS]; 1 << bits], bits, bits_max, used: 0 })
    }

    fn clear(&mut self) {
        self.buckets.fill([EMPTY; SLOTS]);
        self.used = 0;
    }

    fn bucket(&self, tag: u64) -> usize {
        (tag >> (u64::BITS - self.bits)) as usize
    }

    fn find(&self, tag: u64) -> Option<PageRef> {
        let bucket = self.buckets.get(self.bucket(tag))?;
        bucket
            .iter()
            .find(|slot| slot.tag == tag && slot.record != PageRef::ZERO)
            .map(|slot| slot.record)
    }

    /// Adds a tag. Keeps an existing entry of the tag.
    fn insert(&mut self, tag: u64, record: PageRef) {
        if self.find(tag).is_some() {
            return;
        }
        // When a quarter is filled, about 4 of 1000 sectors have met a full bucket.
        if self.used * 4 >= self.buckets.len() * SLOTS && self.bits < self.bits_max {
            self.grow();
        }
        let at = self.bucket(tag);
        let Some(bucket) = self.buckets.get_mut(at) else { return };
        self.used += usize::from(bucket[SLOTS - 1].record == PageRef::ZERO);
        bucket.rotate_right(1);
        bucket[0] = Slot { tag, record };
    }

    fn remove(&mut self, tag: u64) {
        let at = self.bucket(tag);
        let Some(bucket) = self.buckets.get_mut(at) else { return };
        if let Some(slot) =
            bucket.iter().position(|slot| slot.tag == tag && slot.record != PageRef::ZERO)
        {
            bucket[slot..].rotate_left(1);
            bucket[SLOTS - 1] = EMPTY;
            self.used -= 1;
        }
    }

    /// Doubles the buckets. Each becomes two neighbours.
    fn grow(&mut self) {
        let old = std::mem::take(&mut self.buckets);
        self.bits += 1;
        let shift = u64::BITS - self.bits;
        self.buckets = Vec::with_capacity(old.len() * 2);
        for bucket in old {
            let mut halves = [[EMPTY; SLOTS]; 2];
            let mut filled = [0; 2];
            for slot in bucket.into_iter().filter(|slot| slot.record != PageRef::ZERO) {
                let half = (slot.tag >> shift & 1) as usize;
                halves[half][filled[half]] = slot;
                filled[half] += 1;
            }
            self.buckets.extend(halves);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store_format::testing::noise;
    use keyframe_units::PAGE_BYTES;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// What is found is what was put last for that tag; nothing else is ever found.
        #[test]
        fn a_table_is_a_map_that_may_forget(
            ops in prop::collection::vec((any::<bool>(), 0u64..400, 1u64..9), 0..2000), small in any::<bool>(),
        ) {
            let spread = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut table = Table::new(if small { 4096 } else { 1 << 20 }).unwrap();
            let mut oracle = BTreeMap::new();
            for (insert, n, record) in ops {
                if insert {
                    if table.find(spread(n)).is_none() {
                        oracle.insert(n, record);
                    }
                    table.insert(spread(n), PageRef(record));
                    prop_assert!(table.find(spread(n)).is_some());
                } else {
                    oracle.remove(&n);
                    table.remove(spread(n));
                    prop_assert_eq!(table.find(spread(n)), None);
                }
            }
            let mut found = 0;
            for n in 0..400 {
                if let Some(record) = table.find(spread(n)) {
                    prop_assert_eq!(Some(&record.0), oracle.get(&n));
                    found += 1;
                }
            }
            prop_assert_eq!(found, table.used);
            let filled = table.buckets.iter().flatten().filter(|s| s.record != PageRef::ZERO).count();
            prop_assert_eq!(filled, table.used);
            let bytes_max = if small { 4096 } else { 1 << 20 };
            prop_assert!(table.buckets.len() * 64 <= bytes_max);
        }
    }

    #[test]
    fn a_table_takes_no_more_than_its_limit_and_keeps_what_is_new() {
        let mut table = Table::new(100_000).unwrap();
        for n in 0..50_000u64 {
            table.insert(n.wrapping_mul(0x9e37_79b9_7f4a_7c15), PageRef(n + 1));
        }
        assert_eq!(table.buckets.len() * size_of::<[Slot; SLOTS]>(), 65_536);
        let kept = |range: std::ops::Range<u64>| {
            range.filter(|n| table.find(n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).is_some()).count()
        };
        let (newest, oldest) = (kept(49_000..50_000), kept(0..10_000));
        assert!(newest > 900 && oldest < 100, "{newest} {oldest}");
        assert!(Table::new(100).is_none());
    }

    fn finder(parts_min: usize) -> SectorFinder {
        SectorFinder::new(&HashKey([3; 32]), 1 << 20, parts_min).unwrap()
    }

    #[test]
    fn shifted_sectors_are_found_and_their_bytes_compared() {
        let pages = [noise(1), noise(2)];
        let refs = [PageRef::new(1, 64), PageRef::new(1, 5000)];
        let mut finder = finder(2);
        for (page, record) in pages.iter().zip(refs) {
            let tags = finder.tags(page);
            finder.learn(&tags, record);
        }
        let mut block = [0; PAGE_BYTES];
        block[..2560].copy_from_slice(&pages[0][1536..]);
        block[2560..3072].copy_from_slice(&pages[1][..512]);
        block[3584..].copy_from_slice(&noise(9)[..512]);
        let tags = finder.tags(&block);
        let mut reads = 0;
        let mut read = |record: PageRef, page: &mut Page| {
            reads += 1;
            *page = pages[usize::from(record == refs[1])];
            true
        };
        let composition = finder.compose(&block, &tags, &mut read).unwrap();
        let of = |n| PagePart::Of(refs[0], n);
        let expected = [
            of(3),
            of(4),
            of(5),
            of(6),
            of(7),
            PagePart::Of(refs[1], 0),
            PagePart::Zero,
            PagePart::Literal,
        ];
        assert_eq!((composition.0, reads), (expected, 2));
        // Records that turn out to hold something else, or cannot be read, are no match, and not
        // asked again.
        finder.recent.clear();
        assert_eq!(
            finder.compose(&block, &tags, &mut |_, page| {
                *page = noise(7);
                true
            }),
            None
        );
        assert_eq!(finder.compose(&block, &tags, &mut |_, _| panic!("asked again")), None);
    }

    #[test]
    fn too_few_parts_are_none() {
        let mut finder = finder(3);
        let page = noise(1);
        let tags = finder.tags(&page);
        finder.learn(&tags, PageRef::new(1, 64));
        let mut read = |_: PageRef, into: &mut Page| {
            *into = page;
            true
        };
        for parts in 1..6 {
            let mut block = noise(5);
            block[..parts * 512].copy_from_slice(&page[512..(parts + 1) * 512]);
            let tags = finder.tags(&block);
            assert_eq!(
                finder.compose(&block, &tags, &mut read).is_some(),
                parts >= 3,
                "{parts} parts"
            );
        }
    }
}
