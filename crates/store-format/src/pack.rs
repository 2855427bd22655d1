//! The frame of a pack: its header, its dictionary, and the trailer that closes it.
//!
//! ```text
//!   pack    | header 64 | record | record | ... | record | index entries | zeros | footer 64 |
//!                                                         └── only in a closed pack ─────────┘
//!   header    0  8 magic "KF:PCK\r\n"     8  4 version    12  4 flags    16 16 store id
//!            32  8 pack number           40  8 d          48 16 BLAKE3(bytes 0..48)[0..16]
//!             flag 1, a recompressed pack:   64 16 BLAKE3(dictionary)[0..16]   80 d dictionary
//!   entry     0 16 hash       16  7 offset of the record; rising offsets       23  1 kind: 0 'P', 1 'B', 2 'C', 3 'D'
//!   footer    0  8 magic "KF:INDEX"       8  8 entries    16  8 offset of the first entry (= where records end)
//!            24  8 zero                  32 32 BLAKE3(header, entries, zeros, footer bytes 0..32)
//! ```
//!
//! All integers are little-endian. The zeros bring the footer to a multiple of 64 bytes. So it lies
//! in one disk sector and appears whole or not at all.

use crate::dictionary::DICTIONARY_BYTES_MAX;
use crate::error::{FormatError, Result};
use crate::identity::{FORMAT_VERSION, StoreId};
use crate::page_hash::PageHash;
use crate::page_ref::PACK_HEADER_BYTES;
use crate::record::RecordKind;
use keyframe_bytes::ByteReader;
use keyframe_pages::bytes::Problem;

/// The length of the footer of a closed pack, and its alignment, in bytes.
pub const FOOTER_BYTES: usize = 64;
/// The length of an entry of a pack's index, in bytes.
pub const ENTRY_BYTES: usize = 24;
/// The length of the checksum between a pack's header and its dictionary, in bytes.
pub const DICTIONARY_CHECK_BYTES: usize = 16;

const PACK_MAGIC: &[u8; 8] = b"KF:PCK\r\n";
const FOOTER_MAGIC: &[u8; 8] = b"KF:INDEX";
/// The flag of a pack that begins with a dictionary.
const HAS_DICTIONARY: u32 = 1;
/// The kind is above this bit of an entry's last word.
const KIND_SHIFT: u32 = 56;
/// The checksum of a closed pack's trailer, shortened. It identifies the pack as it was closed.
pub type PackSeal = [u8; 16];

/// Encodes the header of pack `number` of store `id`. `dictionary_bytes` is the length of its
/// dictionary; `None` for a pack that was not recompressed.
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

/// Encodes the bytes between the header and the records of a pack with this dictionary.
pub fn encode_dictionary(dictionary: &[u8]) -> Vec<u8> {
    let hash = blake3::hash(dictionary);
    [hash.as_bytes().get(..DICTIONARY_CHECK_BYTES).unwrap_or_default(), dictionary].concat()
}

/// Decodes the bytes that [`encode_dictionary`] made, and returns the dictionary in them. Error:
/// they are malformed.
pub fn decode_dictionary(bytes: &[u8]) -> Result<&[u8], Problem> {
    let (check, dictionary) =
        bytes.split_at_checked(DICTIONARY_CHECK_BYTES).ok_or("has no dictionary")?;
    if blake3::hash(dictionary).as_bytes().get(..DICTIONARY_CHECK_BYTES) != Some(check) {
        return Err("the checksum of its dictionary does not match".into());
    }
    Ok(dictionary)
}

/// Checks the header of pack `number` of store `id`, and returns the offset of the first record in
/// bytes. `object` names the pack in errors. Error: the header is of another pack, or damaged.
pub fn check_pack_header(bytes: &[u8], id: StoreId, number: u32, object: &str) -> Result<u64> {
    if bytes == encode_pack_header(id, number, None) {
        return Ok(PACK_HEADER_BYTES as u64);
    }
    let damaged = |problem: Problem| FormatError::damaged(object, problem);
    let header = decode_pack_header(bytes).map_err(damaged)?;
    if header.version != FORMAT_VERSION {
        return Err(FormatError::OtherVersion { object: object.into(), found: header.version });
    }
    if header.flags & !HAS_DICTIONARY != 0 {
        return Err(damaged(format!("its header has unknown flags ({:#x})", header.flags)));
    }
    let dictionary_bytes = header.dictionary_bytes;
    if dictionary_bytes > DICTIONARY_BYTES_MAX as u64 {
        return Err(damaged(format!("its dictionary of {dictionary_bytes} bytes is too long")));
    }
    if bytes != encode_pack_header(id, number, Some(dictionary_bytes)) {
        return Err(damaged("its header is that of another pack or another store".into()));
    }
    Ok((PACK_HEADER_BYTES + DICTIONARY_CHECK_BYTES) as u64 + dictionary_bytes)
}

/// The fields of a header with a matching checksum that [`check_pack_header`] looks at one by one.
struct PackHeader {
    version: u32,
    flags: u32,
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
    let (version, flags) = (reader.u32_le()?, reader.u32_le()?);
    // Store and number are compared with the expected header.
    reader.take(16 + 8)?;
    Ok(PackHeader { version, flags, dictionary_bytes: reader.u64_le()? })
}

/// An entry of a closed pack's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackEntry {
    /// The hash of the record's content.
    pub hash: PageHash,
    /// The offset of the record, with its kind in the top byte.
    word: u64,
}

impl PackEntry {
    /// Makes the entry of the record at `offset`, which is below 2^40, as in every reference.
    pub fn new(hash: PageHash, offset: u64, kind: RecordKind) -> Self {
        Self { hash, word: offset | u64::from(kind.number()) << KIND_SHIFT }
    }

    /// Returns the offset of the record in its pack, in bytes.
    pub fn offset(&self) -> u64 {
        self.word & ((1 << KIND_SHIFT) - 1)
    }

    /// The kind of the record; `None` if it is unknown.
    fn known_kind(&self) -> Option<RecordKind> {
        RecordKind::of_number((self.word >> KIND_SHIFT) as u8)
    }

    /// Returns the kind of the record.
    pub fn kind(&self) -> RecordKind {
        // The decoder refuses entries of an unknown kind.
        self.known_kind().unwrap_or(RecordKind::Page)
    }
}

/// The trailer of a closed pack: the bytes after its records.
#[derive(Debug)]
pub struct Trailer {
    /// The index, which must be written and synced first.
    pub index: Vec<u8>,
    /// The footer, which makes the trailer valid.
    pub footer: [u8; FOOTER_BYTES],
}

/// Makes the trailer of a pack. `header` is the pack's header, which the checksum covers. `entries`
/// lists all records, by rising offset; they end at the offset `records_end`, in bytes.
pub fn encode_trailer(header: &[u8], entries: &[PackEntry], records_end: u64) -> Trailer {
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

/// The fields of a footer. Its checksum also covers the index and is not checked yet.
#[derive(Debug, PartialEq, Eq)]
pub struct Footer {
    /// The number of entries of the index.
    pub entries: u64,
    /// The offset at which the records end, in bytes.
    pub records_end: u64,
}

/// Parses `bytes`, the last 64 bytes of a pack of `pack_len` bytes. Returns `None` if they are not
/// a footer, because the pack was not closed. Returns an error if they are an impossible footer.
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

/// Returns the checksum by which an index identifies a pack with this footer.
pub fn seal_of(footer: &[u8; FOOTER_BYTES]) -> PackSeal {
    footer[32..].first_chunk().copied().unwrap_or_default()
}

/// Checks the index and the footer of a closed pack and returns the entries, by rising offset.
/// `header` is the pack's header, and `tail` are all bytes after the records. Error: a checksum or
/// a field is wrong.
pub fn decode_trailer(
    header: &[u8],
    tail: &[u8],
    footer: &Footer,
) -> Result<Vec<PackEntry>, Problem> {
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
        let entry =
            PackEntry { hash: PageHash::from_bytes(reader.array()?), word: reader.u64_le()? };
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
    use proptest::prelude::*;

    #[test]
    fn every_flipped_bit_of_header_and_trailer_is_noticed() {
        let id = StoreId([5; 16]);
        let mut later = encode_pack_header(id, 7, None);
        later[8] = 9;
        let hash = blake3::hash(&later[..48]);
        later[48..].copy_from_slice(&hash.as_bytes()[..16]);
        let later = check_pack_header(&later, id, 7, "p");
        assert!(matches!(later, Err(FormatError::OtherVersion { found: 9, .. })));
        let mut flagged = encode_pack_header(id, 7, None);
        flagged[12] = 2;
        let hash = blake3::hash(&flagged[..48]);
        flagged[48..].copy_from_slice(&hash.as_bytes()[..16]);
        let flagged = check_pack_header(&flagged, id, 7, "p").unwrap_err();
        assert!(flagged.to_string().contains("unknown flags (0x2)"), "{flagged}");
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
                matches!(check_pack_header(&flipped, id, 7, "p"), Err(FormatError::Damaged { .. })),
                "bit {bit}"
            );
        }
        let entries = vec![
            PackEntry::new(PageHash([1, 2]), 64, RecordKind::Page),
            PackEntry::new(PageHash([3, 4]), 100, RecordKind::Composed),
            PackEntry::new(PageHash([5, 6]), 900, RecordKind::Block),
            PackEntry::new(PageHash([7, 6]), 990, RecordKind::Delta),
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
            let _ = check_pack_header(&bytes, StoreId([0; 16]), 1, "p");
            let _ = parse_footer(&bytes, len);
            let mut marked = FOOTER_MAGIC.to_vec();
            marked.extend_from_slice(&bytes);
            let _ = parse_footer(&marked, len);
            // With a correct checksum, which the parser checks first.
            let mut tail = bytes.clone();
            let hash = blake3::Hasher::new().update(b"h").update(&bytes).finalize();
            tail.extend_from_slice(hash.as_bytes());
            let _ = decode_trailer(b"h", &tail, &Footer { entries: entries % 20, records_end: len });
            let _ = decode_trailer(b"h", &tail, &Footer { entries, records_end: len });
        }
    }
}
