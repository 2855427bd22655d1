//! A map: the records of the pages that changed between two checkpoints of a run.
//!
//! ```text
//!   file   magic "KF:MAP\r\n", version, then (see [`crate::envelope`])
//!           12  4 flags: 1 = body is LZ4      16  8 id          24  8 parent's id, 0 = none: all other pages are zero
//!           32 16 run id                      48 16 store id    64  8 pages of the space
//!           (pages of the space: of RAM, then blocks of disks, see [`crate::disk_map`])
//!           72  8 extents                     80  8 references  88  8 body length before LZ4
//!           96 .. body                        end-32 32 BLAKE3
//!   body   per extent: varint gap (pages since the end of the extent before), varint pages * 2 + (0 zero | 1 references)
//!          then per page of the extents with references: varint zigzag(reference - reference before)
//! ```
//!
//! A run appends pages to a pack in mostly rising order. So the step from one reference to the next
//! is mostly the length of one record, which takes two bytes.
//!
//! Invariants: extents rise, do not overlap and lie inside the space. The decoder allocates memory
//! in proportion to the file.

use crate::codec::{compress_section, decompress_section};
use crate::disk_map::{DiskMap, SPACE_PAGES_MAX};
use crate::envelope;
use crate::error::{FormatError, Result};
use crate::identity::StoreId;
use crate::page_map::PageMap;
use crate::page_ref::PageRef;
use keyframe_bytes::ByteReader;
use keyframe_bytes::varint::{apply_zigzag, put_varint, zigzag_delta};
use keyframe_pages::bytes::Problem;
use keyframe_units::{PageIndex, PageRange};

const MAGIC: envelope::Magic = *b"KF:MAP\r\n";
const FLAG_LZ4: u32 = 1;
/// The longest map that is read, in bytes: more than the largest map of 16 TiB of RAM.
pub const MAP_BYTES_MAX: u64 = 64 << 30;

/// The fields that identify a map and tie it to its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapHeader {
    /// The number of the map: that of the checkpoint that it was written for.
    pub id: u64,
    /// The map that holds all pages that are not in this one; `None` for a complete map.
    pub parent: Option<u64>,
    /// The id of the run that it belongs to.
    pub run: [u8; 16],
    /// The number of pages of the run's RAM and blocks of its disks together.
    pub space_pages: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    range: PageRange,
    zero: bool,
}

/// A map: the pages that changed, with their records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapRun {
    /// The fields that identify the map.
    pub header: MapHeader,
    extents: Vec<Extent>,
    refs: Vec<PageRef>,
}

impl MapRun {
    /// Makes a map from pages and their records, in rising order.
    pub fn new(header: MapHeader, pages: impl Iterator<Item = (PageIndex, PageRef)>) -> Self {
        let (mut extents, mut refs) = (Vec::<Extent>::new(), Vec::new());
        for (page, to) in pages {
            let zero = to == PageRef::ZERO;
            match extents.last_mut() {
                Some(last) if last.range.end() == page && last.zero == zero => {
                    last.range.len_pages += 1;
                }
                _ => extents.push(Extent { range: PageRange::new(page, 1), zero }),
            }
            if !zero {
                refs.push(to);
            }
        }
        Self { header, extents, refs }
    }

    /// Appends the pages or blocks of `range`, all with the record `to`, which may be zero.
    pub fn extend(&mut self, range: PageRange, to: PageRef) {
        let zero = to == PageRef::ZERO;
        match self.extents.last_mut() {
            Some(last) if last.range.end() == range.first && last.zero == zero => {
                last.range.len_pages += range.len_pages;
            }
            _ => self.extents.push(Extent { range, zero }),
        }
        if !zero {
            self.refs.extend(std::iter::repeat_n(to, range.len_pages as usize));
        }
    }

    /// Returns the references to records.
    pub fn refs(&self) -> &[PageRef] {
        &self.refs
    }

    /// Returns the ranges of pages that are in the map, in rising order.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> + '_ {
        self.extents.iter().map(|extent| extent.range)
    }

    /// Returns the pages that have records, in rising order, with these records.
    pub fn records(&self) -> impl Iterator<Item = (PageIndex, PageRef)> + '_ {
        let pages = self
            .extents
            .iter()
            .filter(|extent| !extent.zero)
            .flat_map(|extent| extent.range.iter());
        pages.zip(self.refs.iter().copied())
    }

    /// Returns the same map with records moved: `place` returns the new place of each. A page for
    /// which it returns `None` is not in the new map.
    #[must_use]
    pub fn moved(&self, place: &mut dyn FnMut(PageIndex, PageRef) -> Option<PageRef>) -> Self {
        let mut moved = Self { header: self.header, extents: Vec::new(), refs: Vec::new() };
        let mut refs = self.refs.iter();
        for extent in &self.extents {
            if extent.zero {
                moved.extend(extent.range, PageRef::ZERO);
                continue;
            }
            for (page, to) in extent.range.iter().zip(refs.by_ref()) {
                if let Some(to) = place(page, *to) {
                    moved.extend(PageRange::new(page, 1), to);
                }
            }
        }
        moved
    }

    /// Returns the pages that are in the map, in rising order.
    pub fn pages(&self) -> impl Iterator<Item = PageIndex> + '_ {
        self.extents.iter().flat_map(|extent| extent.range.iter())
    }

    /// Applies the map to the result of the older maps: pages below `ram_pages` to `ram`, the
    /// blocks after them to `disks`.
    pub fn apply(&self, ram_pages: u64, ram: &mut PageMap, disks: &mut DiskMap) {
        let mut refs = &self.refs[..];
        let ranges = self.extents.iter().map(|extent| {
            let own = if extent.zero { 0 } else { refs.len().min(extent.range.len_pages as usize) };
            let (here, rest) = refs.split_at(own);
            refs = rest;
            (extent.range, (!extent.zero).then_some(here))
        });
        let of_ram = ranges.filter_map(|(range, to)| {
            // One extent may reach from RAM into a disk.
            let border = ram_pages.clamp(range.first.0, range.end().0);
            let (in_ram, in_disks) = (border - range.first.0, range.end().0 - border);
            let (to_ram, to_disks) = match to {
                Some(to) => {
                    let (to_ram, to_disks) = to.split_at(to.len().min(in_ram as usize));
                    (Some(to_ram), Some(to_disks))
                }
                None => (None, None),
            };
            match to_disks {
                Some(to) => {
                    (border..).zip(to).for_each(|(page, to)| disks.set(PageIndex(page), *to));
                }
                None => disks.set_zero(PageRange::new(PageIndex(border), in_disks)),
            }
            (in_ram > 0).then_some((PageRange::new(range.first, in_ram), to_ram))
        });
        ram.set_ranges(of_ram);
    }

    /// Encodes the map's file.
    pub fn encode(&self, store: StoreId) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.extents.len() * 3 + self.refs.len() * 2);
        let mut end = 0;
        for extent in &self.extents {
            put_varint(&mut body, extent.range.first.0 - end);
            put_varint(&mut body, extent.range.len_pages << 1 | u64::from(!extent.zero));
            end = extent.range.end().0;
        }
        let mut previous = 0;
        for to in &self.refs {
            put_varint(&mut body, zigzag_delta(previous, to.0));
            previous = to.0;
        }
        let coded = compress_section(&body);
        let mut out = envelope::begin(MAGIC);
        out.extend_from_slice(&(if coded.is_some() { FLAG_LZ4 } else { 0 }).to_le_bytes());
        out.extend_from_slice(&self.header.id.to_le_bytes());
        out.extend_from_slice(&self.header.parent.unwrap_or(0).to_le_bytes());
        out.extend_from_slice(&self.header.run);
        out.extend_from_slice(&store.0);
        for number in [self.header.space_pages, self.extents.len() as u64, self.refs.len() as u64] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&(body.len() as u64).to_le_bytes());
        out.extend_from_slice(coded.as_ref().unwrap_or(&body));
        envelope::finish(out)
    }

    /// Parses the file of map `id`. `object` names the file in errors.
    ///
    /// Errors: [`FormatError::Damaged`](crate::FormatError::Damaged) if the bytes are not those of
    /// this map of this store, [`FormatError::OtherVersion`](crate::FormatError::OtherVersion) for
    /// another version of the format.
    pub fn decode(bytes: &[u8], store: StoreId, id: u64, object: &str) -> Result<Self> {
        let content = envelope::open(bytes, MAGIC, object)?;
        let this =
            Self::decode_content(content, store).map_err(|p| FormatError::damaged(object, p))?;
        if this.header.id != id {
            return Err(FormatError::damaged(
                object,
                format!("holds map {} instead", this.header.id),
            ));
        }
        Ok(this)
    }

    fn decode_content(content: &[u8], store: StoreId) -> Result<Self, Problem> {
        let mut reader = ByteReader::new(content);
        let flags = reader.u32_le()?;
        let (id, parent, run) = (reader.u64_le()?, reader.u64_le()?, reader.array()?);
        if reader.array()? != store.0 {
            return Err("belongs to another store".into());
        }
        let (space_pages, extents, refs) = (reader.u64_le()?, reader.u64_le()?, reader.u64_le()?);
        let body_len = reader.u64_le()?;
        let stored = reader.take(content.len() - reader.position())?;
        let body = match flags {
            0 if body_len == stored.len() as u64 => stored.to_vec(),
            FLAG_LZ4 => decompress_section(stored, body_len)?,
            _ => return Err("flags or lengths contradict each other".into()),
        };
        if space_pages > SPACE_PAGES_MAX || id == 0 {
            return Err("impossible numbers in its header".into());
        }
        let header = MapHeader { id, parent: (parent != 0).then_some(parent), run, space_pages };
        let mut reader = ByteReader::new(&body);
        let extents = decode_extents(&mut reader, extents, space_pages)?;
        let refs = decode_refs(&mut reader, refs)?;
        let described: u64 = extents.iter().filter(|e| !e.zero).map(|e| e.range.len_pages).sum();
        if described != refs.len() as u64 || !reader.is_empty() {
            return Err("its extents and references do not match".into());
        }
        Ok(Self { header, extents, refs })
    }
}

fn decode_extents(
    reader: &mut ByteReader<'_>,
    count: u64,
    space_pages: u64,
) -> Result<Vec<Extent>, Problem> {
    let mut extents = Vec::new();
    let mut end = 0u64;
    for _ in 0..count {
        let (gap, word) = (reader.varint()?, reader.varint()?);
        let (len_pages, zero) = (word >> 1, word & 1 == 0);
        let bounds =
            end.checked_add(gap).and_then(|first| Some((first, first.checked_add(len_pages)?)));
        let (first, next) = bounds
            .filter(|(_, next)| len_pages > 0 && *next <= space_pages)
            .ok_or("an extent lies outside its page space")?;
        extents.push(Extent { range: PageRange::new(PageIndex(first), len_pages), zero });
        end = next;
    }
    Ok(extents)
}

fn decode_refs(reader: &mut ByteReader<'_>, count: u64) -> Result<Vec<PageRef>, Problem> {
    let mut refs = Vec::new();
    let mut previous = 0;
    for _ in 0..count {
        previous = apply_zigzag(previous, reader.varint()?);
        if previous == 0 {
            return Err("a reference to nothing".into());
        }
        refs.push(PageRef(previous));
    }
    Ok(refs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const STORE: StoreId = StoreId([3; 16]);

    fn header(space_pages: u64) -> MapHeader {
        MapHeader { id: 12, parent: Some(11), run: [1; 16], space_pages }
    }

    /// A 64-bit mixer.
    fn mix(seed: u64) -> u64 {
        let z = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (seed >> 30))
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    }

    #[test]
    fn the_length_of_a_map_follows_the_changed_pages() {
        let none = MapRun::new(header(262_144), std::iter::empty()).encode(STORE);
        assert!(none.len() < 200, "nothing changed: {} bytes", none.len());
        let mut pages = BTreeMap::new();
        let mut offset = 1 << 40 | 64;
        for seed in 0.. {
            pages.insert(PageIndex(mix(seed) % 262_144), PageRef(0));
            if pages.len() == 20_000 {
                break;
            }
        }
        for (i, to) in pages.values_mut().enumerate() {
            *to = PageRef(offset);
            offset += 28 + 200 + mix(i as u64) % 3896;
        }
        let run = MapRun::new(header(262_144), pages.into_iter());
        let bytes = run.encode(STORE);
        assert!(bytes.len() < 100_000, "20k random pages of 1 GiB: {} bytes", bytes.len());
        assert_eq!(MapRun::decode(&bytes, STORE, 12, "m").unwrap(), run);
    }

    proptest! {
        #[test]
        fn runs_come_back_and_apply_like_a_list(
            pages in prop::collection::btree_map(0u64..500, prop_oneof![Just(0u64), 1u64..9999, any::<u64>()], 0..200),
            old in prop::collection::btree_map(0u64..500, 1u64..99, 0..100), border in 0u64..501,
        ) {
            let run = MapRun::new(header(500), pages.iter().map(|(p, r)| (PageIndex(*p), PageRef(*r))));
            let back = MapRun::decode(&run.encode(STORE), STORE, 12, "m").unwrap();
            prop_assert_eq!(&back, &run);
            let mut map = PageMap::default();
            for (page, to) in &old {
                map.set(PageIndex(*page), PageRef(*to));
            }
            let mut disks = DiskMap::default();
            back.apply(border, &mut map, &mut disks);
            for page in border..500 {
                let expected = pages.get(&page).copied();
                prop_assert_eq!(disks.get(PageIndex(page)).map(|to| to.0), expected, "block {}", page);
            }
            for page in 0..border {
                let expected = pages.get(&page).or(old.get(&page)).copied().unwrap_or(0);
                prop_assert_eq!(map.get(PageIndex(page)).0, expected, "page {}", page);
            }
        }

        /// The parser of the content, after a checksum that matches.
        #[test]
        fn arbitrary_content_never_panics(
            body in prop::collection::vec(any::<u8>(), 0..200), flags in 0u32..3, space in any::<u64>(),
            extents in any::<u64>(), refs in any::<u64>(), len in prop_oneof![any::<u64>(), 0u64..300], small in any::<bool>(),
        ) {
            let mut content = flags.to_le_bytes().to_vec();
            content.extend_from_slice(&[1; 32]);
            content.extend_from_slice(&STORE.0);
            let cap = |n: u64| if small { n % 64 } else { n };
            let len = if flags == 0 { body.len() as u64 } else { len };
            for number in [space, cap(extents), cap(refs), len] {
                content.extend_from_slice(&number.to_le_bytes());
            }
            content.extend_from_slice(&body);
            if let Ok(run) = MapRun::decode_content(&content, STORE) {
                run.apply(space / 2, &mut PageMap::default(), &mut DiskMap::default());
            }
            let _ = MapRun::decode_content(&body, STORE);
            let _ = MapRun::decode(&body, STORE, 1, "m");
        }
    }
}
