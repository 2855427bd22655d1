//! Records: one page content each, as it lies in a pack.
//!
//! ```text
//!   record    0  8 check = XXH3-64(bytes 8.. of the record, seed = its PageRef)
//!             8  1 kind: 'P' page, 'B' block of a disk, 'C' composed, 'D' delta
//!             9  1 codec: 0 raw, 1 LZ4, 2 zstd with the pack's dictionary, 3 words
//!            10  2 payload length    12 16 hash    28 .. payload
//! ```
//!
//! All integers are little-endian.
//!
//! Invariants: the check of a record covers all its bytes and the place that it was written for.
//! The hash names its content. This holds for derived records too, whose payload is not the content
//! ([`crate::composed`], [`crate::delta`]).

use crate::codec::{Codec, decompress_page};
use crate::composed::Composition;
use crate::delta::Delta;
use crate::derived::Derivation;
use crate::dictionary::Dictionary;
use crate::page_hash::{HashKey, PageHash};
use crate::page_ref::PageRef;
use keyframe_bytes::ByteReader;
use keyframe_pages::bytes::Problem;
use keyframe_units::{PAGE_BYTES, Page};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The length of a record without its payload, in bytes.
pub const RECORD_HEADER_BYTES: usize = 28;
/// The length of the longest record, in bytes.
pub const RECORD_BYTES_MAX: usize = RECORD_HEADER_BYTES + PAGE_BYTES;
/// The offset of the kind in a record, in bytes.
pub const KIND_AT: u64 = 8;
/// The offset of the page hash in a record, in bytes.
pub const HASH_AT: u64 = 12;
const CHECK_BYTES: usize = 8;

/// The kind of a record: how its content is stored, and whether RAM or a disk brought the content
/// into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// A page of RAM.
    Page,
    /// A block of a disk.
    Block,
    /// A block of a disk, made from parts of plain records.
    Composed,
    /// A page of RAM, as its difference from a plain record.
    Delta,
}

impl RecordKind {
    const ALL: [Self; 4] = [Self::Page, Self::Block, Self::Composed, Self::Delta];

    /// Returns true if the content of such a record is made from that of other records.
    pub fn is_derived(self) -> bool {
        matches!(self, Self::Composed | Self::Delta)
    }

    /// Returns true if RAM brought the content into the store.
    pub fn is_of_ram(self) -> bool {
        matches!(self, Self::Page | Self::Delta)
    }

    /// Returns the number that stands for this kind in an index entry.
    pub fn number(self) -> u8 {
        match self {
            Self::Page => 0,
            Self::Block => 1,
            Self::Composed => 2,
            Self::Delta => 3,
        }
    }

    /// Returns the kind for which a number in an index entry stands; `None` for an unknown number.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }

    fn letter(self) -> u8 {
        match self {
            Self::Page => b'P',
            Self::Block => b'B',
            Self::Composed => b'C',
            Self::Delta => b'D',
        }
    }

    /// Returns the kind for which a letter in a record's header stands; `None` for an unknown
    /// letter.
    pub fn of_letter(letter: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.letter() == letter)
    }
}

/// Appends to `out` the record of kind `kind` that will lie at `place`. `hash` is the hash of its
/// content. `payload` is the content, encoded with `codec`.
pub fn append_record(
    out: &mut Vec<u8>,
    place: PageRef,
    hash: PageHash,
    kind: RecordKind,
    (codec, payload): (Codec, &[u8]),
) {
    debug_assert!((1..=PAGE_BYTES).contains(&payload.len()));
    let start = out.len();
    out.extend_from_slice(&[0; CHECK_BYTES]);
    out.extend_from_slice(&[kind.letter(), codec.number()]);
    out.extend_from_slice(&(payload.len() as u16).to_le_bytes());
    out.extend_from_slice(&hash.to_bytes());
    out.extend_from_slice(payload);
    let check = xxh3_64_with_seed(&out[start + CHECK_BYTES..], place.0);
    out[start..start + CHECK_BYTES].copy_from_slice(&check.to_le_bytes());
}

/// A record whose checksum matches.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    /// The hash of its content.
    pub hash: PageHash,
    /// The kind of the record.
    pub kind: RecordKind,
    place: PageRef,
    codec: Codec,
    payload: &'a [u8],
    /// The dictionary of its pack, if its codec needs one.
    dictionary: Option<Arc<Dictionary>>,
}

impl<'a> Record<'a> {
    /// Parses the record at `place`. `bytes` begin with it and may go on after it. Error: the bytes
    /// are not a whole record with a valid checksum.
    pub fn parse(bytes: &'a [u8], place: PageRef) -> Result<Self, Problem> {
        let mut reader = ByteReader::new(bytes);
        let check = reader.u64_le()?;
        let [kind, codec] = reader.array()?;
        let payload_len = usize::from(reader.u16_le()?);
        let hash = PageHash::from_bytes(reader.array()?);
        let Some(kind) = RecordKind::of_letter(kind).filter(|_| payload_len <= PAGE_BYTES) else {
            return Err("not a page record".into());
        };
        let payload = reader.take(payload_len)?;
        let covered = bytes.get(CHECK_BYTES..reader.position()).unwrap_or_default();
        if xxh3_64_with_seed(covered, place.0) != check {
            return Err("the checksum of the record does not match".into());
        }
        let codec = Codec::of_number(codec).ok_or_else(|| format!("unknown codec {codec}"))?;
        Ok(Self { hash, kind, place, codec, payload, dictionary: None })
    }

    /// Returns true if the record cannot be read without the dictionary of its pack.
    pub fn is_dense(&self) -> bool {
        self.codec == Codec::Dense
    }

    /// Adds the dictionary of the record's pack, with which dense records are decompressed.
    #[must_use]
    pub fn with_dictionary(self, dictionary: Arc<Dictionary>) -> Self {
        Self { dictionary: Some(dictionary), ..self }
    }

    /// Returns the length of the whole record, in bytes.
    pub fn len_bytes(&self) -> usize {
        RECORD_HEADER_BYTES + self.payload.len()
    }

    /// Restores the page of a plain record. The checksum has shown that its bytes are those that
    /// were written. Error: the payload is malformed.
    pub fn decompress(&self, page: &mut Page) -> Result<(), Problem> {
        if self.kind.is_derived() {
            return Err("a composed block or a delta where only a plain record can be".into());
        }
        decompress_page(self.codec, self.payload, self.dictionary.as_deref(), page)
    }

    /// Decodes how the content of a derived record is made, and writes the parts that are in this
    /// record itself to `page`. Error: the payload is malformed.
    pub fn derivation(&self, page: &mut Page) -> Result<Derivation, Problem> {
        match self.delta()? {
            Some(delta) => Ok(Derivation::Delta(delta)),
            None => Composition::decode(self.codec, self.payload, self.place, page)
                .map(Derivation::Parts),
        }
    }

    /// Decodes how the content of a delta is made; `None` for any other record. Error: the payload
    /// is malformed.
    pub fn delta(&self) -> Result<Option<Delta>, Problem> {
        let decode = || Delta::decode(self.codec, self.payload, self.place);
        (self.kind == RecordKind::Delta).then(decode).transpose()
    }

    /// Decodes a derived record as [`Self::derivation`]. For a plain record restores `page` and
    /// returns `None`. Error: the payload is malformed.
    pub fn derivation_or_page(&self, page: &mut Page) -> Result<Option<Derivation>, Problem> {
        if self.kind.is_derived() {
            return self.derivation(page).map(Some);
        }
        self.decompress(page).map(|()| None)
    }

    /// Checks the restored page against the record's hash. Error: the hashes differ.
    pub fn verify(&self, key: &HashKey, page: &Page) -> Result<(), Problem> {
        verify(self.hash, key, page)
    }
}

/// Checks a page against `hash`, the hash in its record. Error: the hashes differ.
pub fn verify(hash: PageHash, key: &HashKey, page: &Page) -> Result<(), Problem> {
    if PageHash::of(key, page) == hash {
        Ok(())
    } else {
        Err("the page does not match its hash".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::PageCompressor;
    use crate::testing::noise;
    use proptest::prelude::*;

    const KEY: HashKey = HashKey([9; 32]);

    fn record(page: &Page, place: PageRef) -> Vec<u8> {
        let mut out = Vec::new();
        let mut compressor = PageCompressor::new();
        append_record(
            &mut out,
            place,
            PageHash::of(&KEY, page),
            RecordKind::Page,
            compressor.compress(page),
        );
        out
    }

    #[test]
    fn every_flipped_bit_of_a_record_and_every_other_place_is_noticed() {
        let place = PageRef::new(3, 640);
        let mut page = [0; PAGE_BYTES];
        page[..64].copy_from_slice(&noise(1)[..64]);
        let bytes = record(&page, place);
        let mut back = [1; PAGE_BYTES];
        let parsed = Record::parse(&bytes, place).unwrap();
        parsed.decompress(&mut back).unwrap();
        parsed.verify(&KEY, &back).unwrap();
        assert_eq!((back, parsed.len_bytes(), parsed.kind), (page, bytes.len(), RecordKind::Page));
        assert!(Record::parse(&bytes, PageRef::new(3, 641)).is_err());
        assert!(Record::parse(&bytes, PageRef::new(2, 640)).is_err());
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Record::parse(&flipped, place).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_page_is_checked_against_its_hash_under_the_key() {
        let place = PageRef::new(1, 64);
        let bytes = record(&noise(4), place);
        let mut page = [0; PAGE_BYTES];
        let parsed = Record::parse(&bytes, place).unwrap();
        parsed.decompress(&mut page).unwrap();
        assert!(parsed.verify(&HashKey([8; 32]), &page).is_err());
        assert!(parsed.verify(&KEY, &page).is_ok());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300), len in any::<u64>(), choice in any::<u64>(),
        ) {
            let _ = Record::parse(&bytes, PageRef(len));
            // With a correct check, which the parser checks first.
            let place = PageRef(len);
            let mut record = vec![0; CHECK_BYTES];
            record.extend_from_slice(&[b"PBCD"[(choice % 4) as usize], (choice % 2) as u8]);
            record.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
            record.extend_from_slice(&[0; 16]);
            record.extend_from_slice(&bytes);
            let check = xxh3_64_with_seed(&record[CHECK_BYTES..], place.0);
            record[..CHECK_BYTES].copy_from_slice(&check.to_le_bytes());
            let parsed = Record::parse(&record, place).unwrap();
            let mut page = [0; PAGE_BYTES];
            let _ = (parsed.decompress(&mut page), parsed.derivation(&mut page));
        }
    }
}
