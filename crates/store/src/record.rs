//! The bytes of a pack: its header, its page records, and the trailer that closes it.
//!
//! ```text
//!   pack    | header 64 | record | record | ... | record | index entries | zeros | footer 64 |
//!                                                         └── only in a closed pack ─────────┘
//!   header    0  8 magic "KF:PCK\r\n"     8  4 version    12  4 flags    16 16 store id
//!            32  8 pack number           40  8 d          48 16 BLAKE3(bytes 0..48)[0..16]
//!             flag 1, a recompressed pack:   64 16 BLAKE3(dictionary)[0..16]   80 d dictionary
//!   record    0  8 check = XXH3-64(bytes 8.. of the record, seed = its PageRef)
//!             8  1 kind: 'P' page, 'B' block of a disk, 'C' composed, 'D' delta
//!             9  1 codec: 0 raw, 1 LZ4, 2 zstd with the pack's dictionary, 3 words
//!            10  2 payload length    12 16 hash    28 .. payload
//!   entry     0 16 hash       16  7 offset of the record; rising offsets       23  1 kind: 0 'P', 1 'B', 2 'C', 3 'D'
//!   footer    0  8 magic "KF:INDEX"       8  8 entries    16  8 offset of the first entry (= where records end)
//!            24  8 zero                  32 32 BLAKE3(header, entries, zeros, footer bytes 0..32)
//! ```
//!
//! All integers are little-endian. The zeros bring the footer to a multiple of 64 bytes, so that it
//! lies in one disk sector and appears whole or not at all.
//!
//! Invariants: the check of a record covers all its bytes and the place it was written for; the
//! hash names its content, also that of a composed block or a delta, whose payload is not the
//! content ([`crate::composed`], [`crate::delta`]).

use crate::codec::{Codec, decompress_page};
use crate::composed::Composition;
use crate::config::{FORMAT_VERSION, StoreId};
use crate::delta::Delta;
use crate::derived::Derivation;
use crate::dictionary::{DICTIONARY_BYTES_MAX, Dictionary};
use crate::identity::{HashKey, PageHash, PageRef};
use crate::{Error, Result};
use keyframe_bytes::ByteReader;
use keyframe_pages::bytes::Problem;
use keyframe_units::{PAGE_BYTES, Page};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Length of a pack's header; the first record follows it.
pub const PACK_HEADER_BYTES: usize = 64;
/// Length of a record without its payload.
pub const RECORD_HEADER_BYTES: usize = 28;
/// No record is longer.
pub const RECORD_BYTES_MAX: usize = RECORD_HEADER_BYTES + PAGE_BYTES;
/// Length of the footer of a closed pack, and its alignment.
pub const FOOTER_BYTES: usize = 64;
/// Length of an index entry.
pub const ENTRY_BYTES: usize = 24;

const PACK_MAGIC: &[u8; 8] = b"KF:PCK\r\n";
const FOOTER_MAGIC: &[u8; 8] = b"KF:INDEX";
const CHECK_BYTES: usize = 8;
/// Where the kind is in a record.
pub const KIND_AT: u64 = 8;
/// Where the kind is in an entry's last word.
const KIND_SHIFT: u32 = 56;

/// Length of the check of a dictionary, between the pack's header and the dictionary.
pub const DICTIONARY_CHECK_BYTES: usize = 16;
/// The flag of a pack that begins with a dictionary.
const HAS_DICTIONARY: u32 = 1;

/// What a record is; and whether RAM or a disk brought its content into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A page of RAM.
    Page,
    /// A block of a disk.
    Block,
    /// A block of a disk, put together from parts of records of the other two kinds.
    Composed,
    /// A page of RAM, as what differs from a record of one of the first two kinds.
    Delta,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Page, Self::Block, Self::Composed, Self::Delta];

    /// Its content is made from that of other records.
    pub fn is_derived(self) -> bool {
        matches!(self, Self::Composed | Self::Delta)
    }

    /// RAM brought the content into the store.
    pub fn is_of_ram(self) -> bool {
        matches!(self, Self::Page | Self::Delta)
    }

    /// What stands for it in an index.
    pub fn number(self) -> u8 {
        match self {
            Self::Page => 0,
            Self::Block => 1,
            Self::Composed => 2,
            Self::Delta => 3,
        }
    }

    /// What such a number stands for; `None`: no kind that there is.
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

    /// What it is of which a record's header says `letter`.
    pub fn of_letter(letter: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.letter() == letter)
    }
}

/// The header of pack `number`. `dictionary_bytes` is the length of its dictionary; none for a pack
/// that was not recompressed.
pub fn encode_pack_header(
    id: StoreId,
    number: u32,
    dictionary_bytes: Option<u64>,
) -> [u8; PACK_HEADER_BYTES] {
    let flags = if dictionary_bytes.is_some() { HAS_DICTIONARY } else { 0 };
    let mut bytes = Vec::with_capacity(PACK_HEADER_BYTES);
    bytes.extend_from_slice(PACK_MAGIC);
    bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(&id.0);
    bytes.extend_from_slice(&u64::from(number).to_le_bytes());
    bytes.extend_from_slice(&dictionary_bytes.unwrap_or(0).to_le_bytes());
    let mut out = [0; PACK_HEADER_BYTES];
    out[..48].copy_from_slice(&bytes);
    out[48..].copy_from_slice(&blake3::hash(&bytes).as_bytes()[..16]);
    out
}

/// What stands before the records of a pack with that dictionary, but for the header.
pub fn encode_dictionary(dictionary: &[u8]) -> Vec<u8> {
    let hash = blake3::hash(dictionary);
    [hash.as_bytes().get(..DICTIONARY_CHECK_BYTES).unwrap_or_default(), dictionary].concat()
}

/// The dictionary in what [`encode_dictionary`] made.
pub fn decode_dictionary(bytes: &[u8]) -> Result<&[u8], Problem> {
    let (check, dictionary) =
        bytes.split_at_checked(DICTIONARY_CHECK_BYTES).ok_or("has no dictionary")?;
    if blake3::hash(dictionary).as_bytes().get(..DICTIONARY_CHECK_BYTES) != Some(check) {
        return Err("the checksum of its dictionary does not match".into());
    }
    Ok(dictionary)
}

/// Checks the header of pack `number` of store `id`, and returns the offset of the first record.
/// `object` names the pack in errors.
pub fn check_pack_header(bytes: &[u8], id: StoreId, number: u32, object: &str) -> Result<u64> {
    if bytes == encode_pack_header(id, number, None) {
        return Ok(PACK_HEADER_BYTES as u64);
    }
    let header = decode_pack_header(bytes).map_err(|problem| Error::damaged(object, problem))?;
    if header.version != FORMAT_VERSION {
        return Err(Error::OtherVersion { object: object.into(), found: header.version });
    }
    let dictionary_bytes = header.dictionary_bytes;
    if dictionary_bytes > DICTIONARY_BYTES_MAX as u64
        || bytes != encode_pack_header(id, number, Some(dictionary_bytes))
    {
        return Err(Error::damaged(object, "its header is that of another pack or another store"));
    }
    Ok((PACK_HEADER_BYTES + DICTIONARY_CHECK_BYTES) as u64 + dictionary_bytes)
}

/// The fields of a header whose checksum holds, as far as [`check_pack_header`] needs them.
struct PackHeader {
    version: u32,
    dictionary_bytes: u64,
}

fn decode_pack_header(bytes: &[u8]) -> Result<PackHeader, Problem> {
    let mut reader = ByteReader::new(bytes);
    let (covered, check) = (reader.take(48)?, reader.array::<16>()?);
    if blake3::hash(covered).as_bytes()[..16] != check {
        return Err("the checksum of its header does not match".into());
    }
    let mut reader = ByteReader::new(covered);
    if reader.array::<8>()? != *PACK_MAGIC {
        return Err("its header is not that of a pack".into());
    }
    let version = reader.u32_le()?;
    // Flags, store and number are compared with the expected header.
    reader.take(4 + 16 + 8)?;
    Ok(PackHeader { version, dictionary_bytes: reader.u64_le()? })
}

/// Appends the record that will lie at `place`.
pub fn append_record(
    out: &mut Vec<u8>,
    place: PageRef,
    hash: PageHash,
    kind: Kind,
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

/// A record whose check held.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    pub hash: PageHash,
    pub kind: Kind,
    place: PageRef,
    codec: Codec,
    payload: &'a [u8],
    /// Of its pack, where it needs that.
    dictionary: Option<Arc<Dictionary>>,
}

impl<'a> Record<'a> {
    /// Parses the record at `place`, with which `bytes` begin; they may go on behind it.
    pub fn parse(bytes: &'a [u8], place: PageRef) -> Result<Self, Problem> {
        let mut reader = ByteReader::new(bytes);
        let check = reader.u64_le()?;
        let [kind, codec] = reader.array()?;
        let payload_len = usize::from(reader.u16_le()?);
        let hash = PageHash::from_bytes(reader.array()?);
        let Some(kind) = Kind::of_letter(kind).filter(|_| payload_len <= PAGE_BYTES) else {
            return Err("no page record".into());
        };
        let payload = reader.take(payload_len)?;
        let covered = bytes.get(CHECK_BYTES..reader.position()).unwrap_or_default();
        if xxh3_64_with_seed(covered, place.0) != check {
            return Err("the checksum of the record does not match".into());
        }
        let codec = Codec::of_number(codec).ok_or_else(|| format!("unknown codec {codec}"))?;
        Ok(Self { hash, kind, place, codec, payload, dictionary: None })
    }

    /// It cannot be read without the dictionary of its pack.
    pub fn is_dense(&self) -> bool {
        self.codec == Codec::Dense
    }

    /// With the dictionary of its pack.
    pub fn with(self, dictionary: Arc<Dictionary>) -> Self {
        Self { dictionary: Some(dictionary), ..self }
    }

    /// The length of the whole record.
    pub fn len_bytes(&self) -> usize {
        RECORD_HEADER_BYTES + self.payload.len()
    }

    /// Restores the page of a record that is not derived. Its bytes are those that were written:
    /// the record's check held.
    pub fn decompress(&self, page: &mut Page) -> Result<(), Problem> {
        if self.kind.is_derived() {
            return Err("a composed block or a delta where only a plain record can be".into());
        }
        decompress_page(self.codec, self.payload, self.dictionary.as_deref(), page)
    }

    /// How the content of a derived record is made. `page` gets what is in this record.
    pub fn derivation(&self, page: &mut Page) -> Result<Derivation, Problem> {
        match self.delta()? {
            Some(delta) => Ok(Derivation::Delta(delta)),
            None => Composition::decode(self.codec, self.payload, self.place, page)
                .map(Derivation::Parts),
        }
    }

    /// The same, where it is a delta.
    pub fn delta(&self) -> Result<Option<Delta>, Problem> {
        let decode = || Delta::decode(self.codec, self.payload, self.place);
        (self.kind == Kind::Delta).then(decode).transpose()
    }

    /// Either of the two, as its kind is.
    pub fn derivation_or_page(&self, page: &mut Page) -> Result<Option<Derivation>, Problem> {
        if self.kind.is_derived() {
            return self.derivation(page).map(Some);
        }
        self.decompress(page).map(|()| None)
    }

    /// Checks the page that was restored against its hash.
    pub fn verify(&self, key: &HashKey, page: &Page) -> Result<(), Problem> {
        verify(self.hash, key, page)
    }
}

/// Checks a page against the hash that its record has.
pub fn verify(hash: PageHash, key: &HashKey, page: &Page) -> Result<(), Problem> {
    if PageHash::of(key, page) == hash {
        Ok(())
    } else {
        Err("the page does not match its hash".into())
    }
}

/// One line of a closed pack's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Of the page.
    pub hash: PageHash,
    /// Offset of the record, and its kind above it.
    word: u64,
}

impl Entry {
    /// The line of a record. The offset is below 2^40, as in every reference.
    pub fn new(hash: PageHash, offset: u64, kind: Kind) -> Self {
        Self { hash, word: offset | u64::from(kind.number()) << KIND_SHIFT }
    }

    /// Where the record begins in its pack.
    pub fn offset(&self) -> u64 {
        self.word & ((1 << KIND_SHIFT) - 1)
    }

    /// What it is; `None`: no kind that there is.
    fn known_kind(&self) -> Option<Kind> {
        Kind::of_number((self.word >> KIND_SHIFT) as u8)
    }

    /// What it is.
    pub fn kind(&self) -> Kind {
        // An entry that is read has a kind, or is refused.
        self.known_kind().unwrap_or(Kind::Page)
    }
}

/// What comes behind the records of a closed pack: first the part to write and sync, then the
/// footer that makes it valid.
pub struct Trailer {
    pub index: Vec<u8>,
    pub footer: [u8; FOOTER_BYTES],
}

/// The trailer of a pack with header `header` whose records end at `records_end`.
pub fn encode_trailer(header: &[u8], entries: &[Entry], records_end: u64) -> Trailer {
    let mut index = Vec::with_capacity(entries.len() * ENTRY_BYTES + FOOTER_BYTES);
    for entry in entries {
        index.extend_from_slice(&entry.hash.to_bytes());
        index.extend_from_slice(&entry.word.to_le_bytes());
    }
    let end = records_end + index.len() as u64;
    let padded = end.next_multiple_of(FOOTER_BYTES as u64);
    index.resize(index.len() + (padded - end) as usize, 0);
    let mut footer = [0; FOOTER_BYTES];
    footer[..8].copy_from_slice(FOOTER_MAGIC);
    footer[8..16].copy_from_slice(&(entries.len() as u64).to_le_bytes());
    footer[16..24].copy_from_slice(&records_end.to_le_bytes());
    let hash = blake3::Hasher::new().update(header).update(&index).update(&footer[..32]).finalize();
    footer[32..].copy_from_slice(hash.as_bytes());
    Trailer { index, footer }
}

/// What a footer says, as far as it can be told without the index.
#[derive(Debug, PartialEq, Eq)]
pub struct Footer {
    pub entries: u64,
    pub records_end: u64,
}

/// Parses the last 64 bytes of a pack of `pack_len` bytes: `None` where they are no footer (the
/// pack was not closed), a problem where they are one that cannot be right.
pub fn parse_footer(bytes: &[u8], pack_len: u64) -> Option<Result<Footer, Problem>> {
    let mut reader = ByteReader::new(bytes);
    if reader.array::<8>().ok()? != *FOOTER_MAGIC {
        return None;
    }
    let (entries, records_end) = (reader.u64_le().ok()?, reader.u64_le().ok()?);
    let plausible = entries
        .checked_mul(ENTRY_BYTES as u64)
        .and_then(|len| len.checked_add(records_end))
        .and_then(|end| end.checked_next_multiple_of(FOOTER_BYTES as u64))
        .is_some_and(|end| {
            end.checked_add(FOOTER_BYTES as u64) == Some(pack_len)
                && records_end >= PACK_HEADER_BYTES as u64
        });
    Some(if plausible {
        Ok(Footer { entries, records_end })
    } else {
        Err("the lengths in its trailer contradict its size".into())
    })
}

/// Checks the index and the footer of a closed pack and returns the entries. `tail` is everything
/// from the end of the records on.
pub fn decode_trailer(header: &[u8], tail: &[u8], footer: &Footer) -> Result<Vec<Entry>, Problem> {
    let split = tail.len().checked_sub(32).ok_or("its trailer is too short")?;
    let (covered, hash) = tail.split_at(split);
    if blake3::Hasher::new().update(header).update(covered).finalize().as_bytes() != hash {
        return Err("the checksum of its trailer does not match".into());
    }
    let mut reader = ByteReader::new(covered);
    let mut entries =
        Vec::with_capacity((footer.entries as usize).min(covered.len() / ENTRY_BYTES));
    let mut least = PACK_HEADER_BYTES as u64;
    for _ in 0..footer.entries {
        let entry = Entry { hash: PageHash::from_bytes(reader.array()?), word: reader.u64_le()? };
        let offset = entry.offset();
        if offset < least || offset >= footer.records_end || entry.known_kind().is_none() {
            return Err(format!("its trailer lists an impossible record at offset {offset}"));
        }
        least = offset + 1;
        entries.push(entry);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::PageCompressor;
    use crate::codec::tests::noise;
    use proptest::prelude::*;

    const KEY: HashKey = HashKey([9; 32]);

    fn record(page: &Page, place: PageRef) -> Vec<u8> {
        let mut out = Vec::new();
        let mut compressor = PageCompressor::new();
        append_record(
            &mut out,
            place,
            PageHash::of(&KEY, page),
            Kind::Page,
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
        assert_eq!((back, parsed.len_bytes(), parsed.kind), (page, bytes.len(), Kind::Page));
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

    #[test]
    fn every_flipped_bit_of_header_and_trailer_is_noticed() {
        let id = StoreId([5; 16]);
        let mut later = encode_pack_header(id, 7, None);
        later[8] = 9;
        let hash = blake3::hash(&later[..48]);
        later[48..].copy_from_slice(&hash.as_bytes()[..16]);
        let later = check_pack_header(&later, id, 7, "p");
        assert!(matches!(later, Err(Error::OtherVersion { found: 9, .. })));
        let header = encode_pack_header(id, 7, Some(9));
        assert_eq!(check_pack_header(&header, id, 7, "p").unwrap(), 64 + 16 + 9);
        let too_long = encode_pack_header(id, 7, Some(DICTIONARY_BYTES_MAX as u64 + 1));
        assert!(check_pack_header(&too_long, id, 7, "p").is_err());
        let header = encode_pack_header(id, 7, None);
        assert_eq!(check_pack_header(&header, id, 7, "p").unwrap(), 64);
        assert!(check_pack_header(&header, id, 8, "p").is_err());
        assert!(check_pack_header(&header, StoreId([6; 16]), 7, "p").is_err());
        for bit in 0..header.len() * 8 {
            let mut flipped = header;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(
                matches!(check_pack_header(&flipped, id, 7, "p"), Err(Error::Damaged { .. })),
                "bit {bit}"
            );
        }
        let entries = vec![
            Entry::new(PageHash([1, 2]), 64, Kind::Page),
            Entry::new(PageHash([3, 4]), 100, Kind::Composed),
            Entry::new(PageHash([5, 6]), 900, Kind::Block),
            Entry::new(PageHash([7, 6]), 990, Kind::Delta),
        ];
        let Trailer { index, footer } = encode_trailer(&header, &entries, 1000);
        let tail = [&index[..], &footer].concat();
        let len = 1000 + tail.len() as u64;
        assert_eq!(len % 64, 0);
        let parsed = parse_footer(&footer, len).unwrap().unwrap();
        assert_eq!(decode_trailer(&header, &tail, &parsed).unwrap(), entries);
        for bit in 0..tail.len() * 8 {
            let mut flipped = tail.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let noticed = match parse_footer(&flipped[index.len()..], len) {
                None | Some(Err(_)) => true,
                Some(Ok(f)) => decode_trailer(&header, &flipped, &f).is_err(),
            };
            assert!(noticed, "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300), len in any::<u64>(), entries in any::<u64>(),
        ) {
            let _ = Record::parse(&bytes, PageRef(len));
            // With a true check before it.
            let place = PageRef(len);
            let mut record = vec![0; CHECK_BYTES];
            record.extend_from_slice(&[b"PBCD"[(entries % 4) as usize], (entries % 2) as u8]);
            record.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
            record.extend_from_slice(&[0; 16]);
            record.extend_from_slice(&bytes);
            let check = xxh3_64_with_seed(&record[CHECK_BYTES..], place.0);
            record[..CHECK_BYTES].copy_from_slice(&check.to_le_bytes());
            let parsed = Record::parse(&record, place).unwrap();
            let mut page = [0; PAGE_BYTES];
            let _ = (parsed.decompress(&mut page), parsed.derivation(&mut page));
            let _ = check_pack_header(&bytes, StoreId([0; 16]), 1, "p");
            let _ = parse_footer(&bytes, len);
            let mut marked = FOOTER_MAGIC.to_vec();
            marked.extend_from_slice(&bytes);
            let _ = parse_footer(&marked, len);
            // With a true checksum behind it, so that the parser gets past it.
            let mut tail = bytes.clone();
            let hash = blake3::Hasher::new().update(b"h").update(&bytes).finalize();
            tail.extend_from_slice(hash.as_bytes());
            let _ = decode_trailer(b"h", &tail, &Footer { entries: entries % 20, records_end: len });
            let _ = decode_trailer(b"h", &tail, &Footer { entries, records_end: len });
        }
    }
}
