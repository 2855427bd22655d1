//! Composed records: a block of a disk made from parts of pages that the store holds.
//!
//! ```text
//!   page of RAM    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     | 0 | 1 | 2 | ...       eight parts of 512 bytes each
//!                                ▲   ▲   ▲   ▲   ▲         ▲
//!   block of a disk            | 0 | 1 | 2 | 3 | 4 | zero | 6 | literal |        a file, shifted against its page cache
//!
//!   payload   0  1 zeros: bit i: part i is zero            1  1 references: bit i: part i is a reference
//!             2  1 number n of records that are referred to, 1 to 8
//!             3  8n their references, rising
//!             .  1 for each part that is a reference: the record's place in that list * 8 + its part there
//!             .. all other parts in order, coded with the record's codec
//! ```
//!
//! Invariants: a reference points to a record that lies before this one; the decoder checks that.
//! The record is plain; the reader of that record checks that. So no chain is longer than one step,
//! and there is no circle. There is at least one reference, and every listed record is used. A
//! reader compares the whole block with its hash.

use crate::codec::{Codec, PageCompressor, decompress_exactly};
use crate::page_ref::PageRef;
use keyframe_bytes::ByteReader;
use keyframe_pages::bytes::Problem;
use keyframe_units::{PAGE_BYTES, Page};

/// The number of parts of a page.
pub const PARTS: usize = 8;
/// The length of a part, which is a sector, in bytes.
pub const PART_BYTES: usize = PAGE_BYTES / PARTS;

/// The content of a sector.
pub type Sector = [u8; PART_BYTES];

/// The origin of the content of one part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagePart {
    /// The part is zero.
    Zero,
    /// The part is in the composed record itself.
    Literal,
    /// The part is the one with this number in the page of another record.
    Of(PageRef, u8),
}

/// The origins of the eight parts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Composition(pub [PagePart; PARTS]);

/// Returns the parts of a page, in order.
pub fn sectors(page: &Page) -> &[Sector; PARTS] {
    let (sectors, _) = page.as_chunks::<PART_BYTES>();
    // A page is exactly eight sectors, so there is always a first chunk of eight.
    sectors.first_chunk().unwrap_or(&[[0; PART_BYTES]; PARTS])
}

fn sectors_mut(page: &mut Page) -> std::slice::IterMut<'_, Sector> {
    page.as_chunks_mut::<PART_BYTES>().0.iter_mut()
}

impl Composition {
    /// Returns the records to which the parts refer, sorted, each once.
    pub fn records(&self) -> Vec<PageRef> {
        let of =
            |part: &PagePart| if let PagePart::Of(record, _) = part { Some(*record) } else { None };
        let mut records: Vec<PageRef> = self.0.iter().filter_map(of).collect();
        records.sort_unstable();
        records.dedup();
        records
    }

    /// Returns the number of parts that are references.
    pub fn references(&self) -> usize {
        self.0.iter().filter(|part| matches!(part, PagePart::Of(..))).count()
    }

    /// Copies the parts of this composition that come from `record`, whose page is `content`, into
    /// `page`.
    pub fn fill(&self, record: PageRef, content: &Page, page: &mut Page) {
        for (part, sector) in self.0.iter().zip(sectors_mut(page)) {
            if let PagePart::Of(of, number) = part
                && *of == record
                && let Some(found) = sectors(content).get(usize::from(*number))
            {
                *sector = *found;
            }
        }
    }

    /// Appends to `out` the payload of the record of `page`, whose parts have the origins of this
    /// composition. Returns the codec of the payload.
    pub fn encode(&self, page: &Page, compressor: &mut PageCompressor, out: &mut Vec<u8>) -> Codec {
        let (mut zeros, mut references) = (0u8, 0u8);
        let records = self.records();
        let mut places = Vec::with_capacity(PARTS);
        let mut literals = Vec::with_capacity(PAGE_BYTES);
        for (at, (part, sector)) in self.0.iter().zip(sectors(page)).enumerate() {
            match part {
                PagePart::Zero => zeros |= 1 << at,
                PagePart::Literal => literals.extend_from_slice(sector),
                PagePart::Of(record, number) => {
                    references |= 1 << at;
                    let place = records.iter().position(|r| r == record).unwrap_or_default();
                    places.push((place as u8) << 3 | number);
                }
            }
        }
        out.extend_from_slice(&[zeros, references, records.len() as u8]);
        out.extend(records.iter().flat_map(|record| record.0.to_le_bytes()));
        out.extend_from_slice(&places);
        let (codec, stored) = compressor.compress_part(&literals);
        out.extend_from_slice(stored);
        codec
    }

    /// Parses the payload of the record at `place`. Writes the literal parts and the zeros to
    /// `page`. Error: the payload is malformed, or refers to a record that does not precede it.
    pub fn decode(
        codec: Codec,
        payload: &[u8],
        place: PageRef,
        page: &mut Page,
    ) -> Result<Self, Problem> {
        let mut reader = ByteReader::new(payload);
        let [zeros, references, listed] = reader.array()?;
        if zeros & references != 0 || references == 0 {
            return Err("a composed block whose parts contradict each other".into());
        }
        let records = decode_records(&mut reader, listed, place)?;
        let mut used = vec![false; records.len()];
        let mut parts = [PagePart::Literal; PARTS];
        for (at, part) in parts.iter_mut().enumerate() {
            if zeros & 1 << at != 0 {
                *part = PagePart::Zero;
            } else if references & 1 << at != 0 {
                let [word] = reader.array()?;
                let index = usize::from(word >> 3);
                let record = records
                    .get(index)
                    .ok_or("a composed block refers to a record that it does not list")?;
                used[index] = true;
                *part = PagePart::Of(*record, word & 7);
            }
        }
        if used.contains(&false) {
            return Err("a composed block lists a record that it does not use".into());
        }
        let composition = Self(parts);
        composition.decode_literals(codec, reader.remaining(), page)?;
        Ok(composition)
    }

    fn decode_literals(&self, codec: Codec, stored: &[u8], page: &mut Page) -> Result<(), Problem> {
        let count = self.0.iter().filter(|part| **part == PagePart::Literal).count();
        let mut literals = [0; PAGE_BYTES];
        let space = literals.get_mut(..count * PART_BYTES).unwrap_or_default();
        decompress_exactly(codec, stored, space)?;
        let mut literals = literals.as_chunks::<PART_BYTES>().0.iter();
        for (part, sector) in self.0.iter().zip(sectors_mut(page)) {
            match part {
                PagePart::Zero => *sector = [0; PART_BYTES],
                PagePart::Literal => *sector = literals.next().copied().unwrap_or([0; PART_BYTES]),
                PagePart::Of(..) => {}
            }
        }
        Ok(())
    }
}

fn decode_records(
    reader: &mut ByteReader<'_>,
    listed: u8,
    place: PageRef,
) -> Result<Vec<PageRef>, Problem> {
    if !(1..=PARTS).contains(&usize::from(listed)) {
        return Err(format!("a composed block of {listed} records"));
    }
    let mut records = Vec::with_capacity(PARTS);
    let mut before = PageRef::ZERO;
    for _ in 0..listed {
        let record = PageRef(reader.u64_le()?);
        if !record.may_be_base_of(place) || record <= before {
            return Err(format!("a composed block cannot refer to {record:?}"));
        }
        before = record;
        records.push(record);
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::noise;
    use proptest::prelude::*;

    const PLACE: PageRef = PageRef((3 << 40) + 10_000);

    fn part() -> impl Strategy<Value = PagePart> {
        let record = (1u64..4, 64u64..9000).prop_map(|(pack, offset)| PageRef(pack << 40 | offset));
        prop_oneof![
            Just(PagePart::Zero),
            Just(PagePart::Literal),
            (record, 0u8..8).prop_map(|(record, number)| PagePart::Of(record, number)),
            // One record that several parts refer to.
            (0u8..8).prop_map(|number| PagePart::Of(PageRef(1 << 40 | 64), number)),
        ]
    }

    fn encode(composition: &Composition, page: &Page) -> (Codec, Vec<u8>) {
        let mut out = Vec::new();
        let codec = composition.encode(page, &mut PageCompressor::new(), &mut out);
        (codec, out)
    }

    proptest! {
        #[test]
        fn compositions_come_back(parts in prop::array::uniform8(part()), seed in 0u64..9, flat in any::<bool>()) {
            let composition = Composition(parts);
            let mut page = noise(seed);
            for (part, sector) in parts.iter().zip(sectors_mut(&mut page)) {
                if *part == PagePart::Zero { sector.fill(0) }
                if *part == PagePart::Literal && flat { sector.fill(seed as u8) }
            }
            let (codec, payload) = encode(&composition, &page);
            let mut back = [0xee; PAGE_BYTES];
            let decoded = Composition::decode(codec, &payload, PLACE, &mut back);
            if composition.references() == 0 {
                prop_assert!(decoded.is_err());
                return Ok(());
            }
            prop_assert_eq!(decoded.unwrap(), composition);
            prop_assert!(payload.len() < PAGE_BYTES);
            // The parts that are references are still missing. Pages with these parts fill them in.
            for record in composition.records() {
                let mut content = [0x55; PAGE_BYTES];
                for (at, part) in parts.iter().enumerate() {
                    if let PagePart::Of(of, number) = part && *of == record {
                        let (from, to) = (usize::from(*number) * PART_BYTES, at * PART_BYTES);
                        content[from..from + PART_BYTES].copy_from_slice(&page[to..to + PART_BYTES]);
                    }
                }
                // Two parts of the block may refer to the same part. Then only one of the two comes
                // back.
                composition.fill(record, &content, &mut back);
            }
            for (at, part) in parts.iter().enumerate() {
                let range = at * PART_BYTES..(at + 1) * PART_BYTES;
                let alone = parts.iter().filter(|p| *p == part).count() == 1;
                if !matches!(part, PagePart::Of(..)) || alone {
                    prop_assert!(back[range.clone()] == page[range]);
                }
            }
        }

        /// A payload that parses is the one that the encoder writes, apart from LZ4, and refers
        /// only to records before its own.
        #[test]
        fn a_payload_that_parses_encodes_to_itself(
            head in prop::array::uniform3(any::<u8>()), sane in any::<bool>(),
            refs in prop::collection::vec(prop_oneof![any::<u64>(), (1u64..5, 0u64..20_000).prop_map(|(p, o)| p << 40 | o)], 0..4),
            tail in prop::collection::vec(any::<u8>(), 0..3000), parts in 0usize..8,
        ) {
            let mut payload = head.to_vec();
            if sane {
                // A head that passes the first checks: no zeros, `parts` references, then literals.
                payload = vec![0, ((1u16 << parts) - 1) as u8, refs.len() as u8];
            }
            payload.extend(refs.iter().flat_map(|r| r.to_le_bytes()));
            payload.extend_from_slice(&tail);
            for codec in [Codec::Raw, Codec::Lz4] {
                let mut page = [0; PAGE_BYTES];
                let Ok(composition) = Composition::decode(codec, &payload, PLACE, &mut page) else { continue };
                prop_assert!(composition.records().iter().all(|r| r.0 < PLACE.0 && r.pack() > 0));
                prop_assert!(composition.references() > 0);
                if codec == Codec::Raw {
                    let (again_codec, again) = encode(&composition, &page);
                    prop_assert!(again_codec == Codec::Lz4 || again == payload);
                }
            }
        }
    }

    #[test]
    fn references_to_the_record_itself_later_ones_and_impossible_places_are_refused() {
        let with = |record: PageRef| {
            let mut parts = [PagePart::Zero; PARTS];
            parts[2] = PagePart::Of(record, 5);
            let (codec, payload) = encode(&Composition(parts), &[0; PAGE_BYTES]);
            Composition::decode(codec, &payload, PLACE, &mut [0; PAGE_BYTES]).map(|_| ())
        };
        assert_eq!(with(PageRef(PLACE.0 - 1)), Ok(()));
        assert_eq!(with(PageRef::new(1, 64)), Ok(()));
        for bad in [
            PLACE,
            PageRef(PLACE.0 + 1),
            PageRef::new(4, 64),
            PageRef::new(1, 63),
            PageRef(64),
            PageRef::ZERO,
        ] {
            assert!(with(bad).unwrap_err().contains("cannot refer"), "{bad:?}");
        }
    }

    #[test]
    fn a_shifted_block_takes_less_than_a_hundred_bytes() {
        let (a, b) = (PageRef::new(1, 64), PageRef::new(1, 4200));
        let parts: Vec<PagePart> =
            (3..8).map(|n| PagePart::Of(a, n)).chain((0..3).map(|n| PagePart::Of(b, n))).collect();
        let (codec, payload) = encode(&Composition(parts.try_into().unwrap()), &noise(1));
        assert_eq!((codec, payload.len()), (Codec::Raw, 3 + 16 + 8));
    }
}
