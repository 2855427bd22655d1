//! Doors for the fuzzers in `fuzz/`: each gives bytes to one parser, behind the checksums that
//! would stop them.
//!
//! Not part of the interface. Each takes any bytes, and must neither panic nor take memory out of
//! proportion to them.

use crate::codec::{decompress_page, decompress_section};
use crate::config::{Config, StoreId};
use crate::disk_map::DiskMap;
use crate::identity::{HashKey, PageHash, PageRef};
use crate::map_run::MapRun;
use crate::page_map::PageMap;
use crate::prune::Moves;
use crate::record::{PACK_HEADER_BYTES, Record, check_pack_header, decode_trailer, parse_footer};
use crate::{CheckOptions, Error, Store, checkpoint, envelope, tags, worksets};
use keyframe_bytes::ByteReader;
use keyframe_bytes::varint::put_varint;
use keyframe_store_backend::fuzzing::MemoryBackend;
use keyframe_store_backend::layout;
use keyframe_units::{CheckpointId, PageIndex, PageRange, ZERO_PAGE};
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const STORE: StoreId = StoreId([0; 16]);
const CHECK_BYTES: usize = 8;

/// The store of the golden files: a name and the bytes of each.
pub type Files = Vec<(String, Vec<u8>)>;

/// A record: its place in 8 bytes, then its bytes behind the check.
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
                assert!(of < place, "a record that stands on itself, or on a later one");
                let _ = derivation.fill(of, PageHash([0; 2]), &[1; 4096], &mut page);
            }
        }
        Ok(None) => assert!(!record.kind.is_derived()),
        Err(_) => {}
    }
}

/// Writes the check that a record's bytes should have, where these hold one.
fn mend_record(bytes: &mut [u8], place: PageRef) -> Option<usize> {
    let len = u16::from_le_bytes(*bytes.get(10..)?.first_chunk()?);
    let end = 28 + usize::from(len);
    let check = xxh3_64_with_seed(bytes.get(CHECK_BYTES..end)?, place.0);
    bytes.get_mut(..CHECK_BYTES)?.copy_from_slice(&check.to_le_bytes());
    Some(end)
}

/// The content of a map's file, behind magic and version, before the checksum.
pub fn map(content: &[u8]) {
    let Some((id, _)) = content.get(4..).and_then(|rest| rest.split_first_chunk()) else { return };
    let mut bytes = b"KF:MAP\r\n\x01\0\0\0".to_vec();
    bytes.extend_from_slice(content);
    let id = u64::from_le_bytes(*id);
    let Ok(run) = MapRun::decode(&envelope::finish(bytes), STORE, id, "m") else { return };
    // What says nothing of a page takes no room: only pages that have records do.
    let (mut ram, mut disks) = (PageMap::default(), DiskMap::default());
    run.apply(run.header.space_pages / 2, &mut ram, &mut disks);
    let again = MapRun::decode(&run.encode(STORE), STORE, id, "m").ok();
    assert!(again.is_some_and(|again| again.refs() == run.refs()), "a map that does not come back");
}

/// The content of a checkpoint's file, behind magic and version, before the checksum.
pub fn checkpoint(content: &[u8]) {
    let Some((id, _)) = content.get(4..).and_then(|rest| rest.split_first_chunk()) else { return };
    let mut bytes = b"KF:CKP\r\n\x01\0\0\0".to_vec();
    bytes.extend_from_slice(content);
    let id = u64::from_le_bytes(*id);
    let Ok(file) = checkpoint::decode(&envelope::finish(bytes), id, STORE, "c") else { return };
    let meta = file.meta;
    let _ = (meta.members_ram(), meta.space_pages());
    for disk in 0..meta.disks.len().min(4) {
        let _ = meta.blocks_of(disk);
    }
    let _ = (meta.ram.len_pages(), meta.ram.len_bytes());
}

/// `store.json` up to its checksum.
pub fn identity(text: &[u8]) {
    let _ = Config::decode(text, "x");
    let Ok(text) = std::str::from_utf8(text) else { return };
    let field = ",\n  \"checksum\": \"";
    let hash = blake3::hash(text.as_bytes()).to_hex();
    let Ok(stored) = Config::decode(format!("{text}{field}{hash}\"\n}}\n").as_bytes(), "x") else {
        return;
    };
    // Without a secret: deriving a key takes a second.
    let _ = stored.unlock(&|_| Ok(None), "x");
}

/// A pack's end: header and trailer, the last 32 bytes of which are made here.
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

/// Small files: the first byte says which.
pub fn small(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    let sealed = |magic: envelope::Magic| {
        let mut out = envelope::begin(magic);
        out.extend_from_slice(bytes);
        envelope::finish(out)
    };
    match kind % 6 {
        0 => drop(tags::decode(STORE, "t", bytes)),
        1 => drop(worksets::decode(&sealed(*b"KF:WST\r\n"), STORE, CheckpointId(0), u64::MAX)),
        2 => drop(Moves::decode(&sealed(*b"KF:MOV\r\n"), STORE, "m")),
        3 => drop(envelope::open(bytes, *b"KF:MAP\r\n", "e")),
        4 => {
            let mut reader = ByteReader::new(bytes);
            while let Ok(value) = reader.varint() {
                let mut again = Vec::new();
                put_varint(&mut again, value);
            }
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = (
                    layout::is_tag(text),
                    layout::parse_pack(text),
                    layout::parse_checkpoint(text),
                );
            }
        }
        _ => {
            let mut page = ZERO_PAGE;
            let _ = decompress_page(crate::codec::Codec::Lz4, bytes, None, &mut page);
            let _ = decompress_page(crate::codec::Codec::Words, bytes, None, &mut page);
            let _ = decompress_section(bytes, bytes.len() as u64 * 300);
            let _ = decompress_section(bytes, bytes.len() as u64 * 20);
        }
    }
}

/// A store of the golden files, one of which has other bytes, behind true checksums: the first byte
/// of `data` says which one. It is checked, read, and repaired; and what was repaired is whole.
pub fn store(files: &Files, data: &[u8]) {
    let Some((which, bytes)) = data.split_first() else { return };
    let Some((name, _)) = files.get(usize::from(*which) % files.len().max(1)) else { return };
    let memory = Arc::new(MemoryBackend::default());
    for (name, bytes) in files {
        memory.overwrite(name, bytes.clone());
    }
    memory.overwrite(name, mended(name, bytes));
    let Ok(store) = Store::open_on(memory.clone(), Path::new("memory")) else { return };
    let options = CheckOptions { read_data: true };
    let _ = store.check(&options, &mut |_| {});
    let (_, _) = (store.checkpoints().map(drop), store.stats().map(drop));
    for id in store.ids().unwrap_or_default() {
        let Ok(loaded) = store.load(id) else { continue };
        let all = PageRange::new(PageIndex(0), loaded.meta.ram.len_pages());
        let _ = loaded.read_pages(all, &mut |_, _| Ok::<_, Error>(()));
        let _ = (loaded.expected_first(), store.load_disks(id).map(drop));
    }
    let repaired = store.repair(&mut |_| {});
    if let Ok(Some(after)) = repaired.map(|report| report.after) {
        assert!(after.is_clean(), "{name}: {after:#?}");
    }
}

/// `bytes` with the checksums that a file of that name has.
fn mended(name: &str, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if name.starts_with("maps/") || name.starts_with("checkpoints/") {
        bytes.truncate(bytes.len().saturating_sub(32));
        return envelope::finish(bytes);
    }
    if let Some(number) = name.strip_prefix("packs/").and_then(layout::parse_pack) {
        let mut at = PACK_HEADER_BYTES;
        while let Some(rest) = bytes.get_mut(at..) {
            let Some(len) = mend_record(rest, PageRef::new(number, at as u64)) else { break };
            at += len;
        }
    }
    bytes
}
