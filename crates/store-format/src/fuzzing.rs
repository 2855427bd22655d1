//! Entry points for the fuzzers in `fuzz/`: each gives bytes to one parser, after the checksums
//! that would stop them.
//!
//! Not part of the interface. Each takes any bytes. It must not panic, nor take memory out of
//! proportion to the bytes.

use crate::codec::{Codec, decompress_page, decompress_section};
use crate::disk_map::DiskMap;
use crate::identity::StoreId;
use crate::map_run::MapRun;
use crate::moves::Moves;
use crate::pack::{check_pack_header, decode_trailer, parse_footer};
use crate::page_hash::{HashKey, PageHash};
use crate::page_map::PageMap;
use crate::page_ref::{PACK_HEADER_BYTES, PageRef};
use crate::record::Record;
use crate::{checkpoint as checkpoint_file, envelope, tag, working_set};
use keyframe_bytes::ByteReader;
use keyframe_units::{CheckpointId, ZERO_PAGE};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const STORE: StoreId = StoreId([0; 16]);
const CHECK_BYTES: usize = 8;

/// Parses a record. `data` is its place in 8 bytes, then its bytes after the checksum.
pub fn record(data: &[u8]) {
    let Some((place, rest)) = data.split_first_chunk() else { return };
    let place = PageRef(u64::from_le_bytes(*place));
    let mut bytes = vec![0; CHECK_BYTES];
    bytes.extend_from_slice(rest);
    mend_record(&mut bytes, place);
    let Ok(record) = Record::parse(&bytes, place) else { return };
    let mut page = ZERO_PAGE;
    let _ = record.verify(&HashKey([0; 32]), &page);
    match record.derivation_or_page(&mut page) {
        Ok(Some(derivation)) => {
            for of in derivation.records() {
                assert!(of < place, "a record that refers to itself or a later one");
                let _ = derivation.fill(of, PageHash([0; 2]), &[1; 4096], &mut page);
            }
        }
        Ok(None) => assert!(!record.kind.is_derived()),
        Err(_) => {}
    }
}

/// Writes a valid checksum into the record with which `bytes` begin, and returns the record's
/// length in bytes. Returns `None` if the bytes are too short for a record.
pub fn mend_record(bytes: &mut [u8], place: PageRef) -> Option<usize> {
    let len = u16::from_le_bytes(*bytes.get(10..)?.first_chunk()?);
    let end = 28 + usize::from(len);
    let check = xxh3_64_with_seed(bytes.get(CHECK_BYTES..end)?, place.0);
    bytes.get_mut(..CHECK_BYTES)?.copy_from_slice(&check.to_le_bytes());
    Some(end)
}

/// Parses the content of a map's file: all between magic and version, and the checksum.
pub fn map(content: &[u8]) {
    let Some((id, _)) = content.get(4..).and_then(|rest| rest.split_first_chunk()) else { return };
    let mut bytes = b"KF:MAP\r\n\x01\0\0\0".to_vec();
    bytes.extend_from_slice(content);
    let id = u64::from_le_bytes(*id);
    let Ok(run) = MapRun::decode(&envelope::finish(bytes), STORE, id, "m") else { return };
    let (mut ram, mut disks) = (PageMap::default(), DiskMap::default());
    run.apply(run.header.space_pages / 2, &mut ram, &mut disks);
    let again = MapRun::decode(&run.encode(STORE), STORE, id, "m").ok();
    assert!(
        again.is_some_and(|again| again.refs() == run.refs()),
        "the decoder does not return the map that was encoded"
    );
}

/// Parses the content of a checkpoint's file: all between magic and version, and the checksum.
pub fn checkpoint(content: &[u8]) {
    let Some((id, _)) = content.get(4..).and_then(|rest| rest.split_first_chunk()) else { return };
    let mut bytes = b"KF:CKP\r\n\x01\0\0\0".to_vec();
    bytes.extend_from_slice(content);
    let id = u64::from_le_bytes(*id);
    let Ok(file) = checkpoint_file::decode(&envelope::finish(bytes), id, STORE, "c") else {
        return;
    };
    let meta = file.meta;
    let _ = (meta.members_ram(), meta.space_pages());
    for disk in 0..meta.disks.len().min(4) {
        let _ = meta.blocks_of(disk);
    }
    let _ = (meta.ram.len_pages(), meta.ram.len_bytes());
}

/// Parses a pack's end: header and trailer. The last 32 bytes of the trailer are made here.
pub fn trailer(data: &[u8]) {
    let Some((header, tail)) = data.split_at_checked(PACK_HEADER_BYTES) else { return };
    let _ = check_pack_header(header, STORE, 1, "p");
    let mut tail = tail.to_vec();
    let hash = blake3::Hasher::new().update(header).update(&tail).finalize();
    tail.extend_from_slice(hash.as_bytes());
    let Some(footer) = tail.len().checked_sub(64).and_then(|at| tail.get(at..)) else { return };
    // The records before it are left out, so it may be of a pack of any length.
    let claimed =
        ByteReader::new(footer.get(16..).unwrap_or_default()).u64_le().unwrap_or_default();
    let Some(pack_len) = claimed.checked_add(tail.len() as u64) else { return };
    if let Some(Ok(footer)) = parse_footer(footer, pack_len) {
        let _ = decode_trailer(header, &tail, &footer);
    }
}

/// Parses small files and payloads. The first byte chooses which.
pub fn small(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    let sealed = |magic: envelope::Magic| {
        let mut out = envelope::begin(magic);
        out.extend_from_slice(bytes);
        envelope::finish(out)
    };
    match kind % 6 {
        0 => drop(tag::decode(STORE, "t", bytes)),
        1 => drop(working_set::decode(&sealed(*b"KF:WST\r\n"), STORE, CheckpointId(0), u64::MAX)),
        2 => drop(Moves::decode(&sealed(*b"KF:MOV\r\n"), STORE, "m")),
        3 => drop(envelope::open(bytes, *b"KF:MAP\r\n", "e")),
        4 => {
            let mut reader = ByteReader::new(bytes);
            while let Ok(value) = reader.varint() {
                keyframe_bytes::varint::put_varint(&mut Vec::new(), value);
            }
        }
        _ => {
            let mut page = ZERO_PAGE;
            let _ = decompress_page(Codec::Lz4, bytes, None, &mut page);
            let _ = decompress_page(Codec::Words, bytes, None, &mut page);
            let _ = decompress_section(bytes, bytes.len() as u64 * 300);
            let _ = decompress_section(bytes, bytes.len() as u64 * 20);
        }
    }
}
