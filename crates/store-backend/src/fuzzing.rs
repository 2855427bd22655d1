//! Entry points of the fuzz targets in `fuzz/`. Each passes bytes to one parser.
//!
//! Not part of the interface. Each takes any bytes. It must neither panic nor allocate memory out
//! of proportion to them.

mod memory;

use crate::layout::{FILES, READ_FOLDERS};
use crate::served::wire::{self, Answer, Request};
use crate::{ArchiveBackend, Backend, DataKey, EncryptedBackend};
pub use memory::MemoryBackend;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use zeroize::Zeroizing;

const PACK: &str = "packs/00000001.pack";

fn encrypted(memory: &Arc<MemoryBackend>) -> EncryptedBackend {
    EncryptedBackend::new(memory.clone(), &DataKey(Zeroizing::new([9; 32])))
}

/// Reads `data` as an encrypted file under a fixed key.
pub fn encrypted_file(data: &[u8]) {
    let memory = Arc::new(MemoryBackend::default());
    memory.overwrite(PACK, data.to_vec());
    let backend = encrypted(&memory);
    let Ok(file) = backend.open(PACK) else { return };
    // The claimed length may be greater than the file: reading the missing frames fails.
    let len = file.len_bytes().unwrap_or(1 << 20).min(1 << 20);
    for (from, len) in [(0, len), (len / 2, 100), (len, 1), (u64::MAX, 2), (70_000, 70_000)] {
        let mut buffer = vec![0; len as usize];
        let _ = file.read_at(from, &mut buffer);
    }
    let _ = backend.read(PACK, 1 << 20);
}

/// Returns seeds for [`encrypted_file`]: `plain` encrypted as a whole file, and as a file of
/// appends.
pub fn encrypted_seeds(plain: &[u8]) -> [Vec<u8>; 2] {
    let memory = Arc::new(MemoryBackend::default());
    let backend = encrypted(&memory);
    let _ = backend.put("maps/1", plain);
    if let Ok(mut file) = backend.create(PACK) {
        let _ = plain.chunks(300).try_for_each(|some| file.append(some));
    }
    ["maps/1", PACK].map(|name| memory.read(name, u64::MAX).unwrap_or_default())
}

/// Opens `data` as the archive of a store, and reads its files.
pub fn archive(data: &[u8]) {
    let Ok(mut file) = tempfile::tempfile() else { return };
    if file.write_all(data).is_err() {
        return;
    }
    let Ok(backend) = ArchiveBackend::of_file(file, Path::new("fuzzed")) else { return };
    for folder in READ_FOLDERS.iter().chain(&[FILES]) {
        for name in backend.list(folder).unwrap_or_default() {
            let read = backend.read(&format!("{folder}/{name}"), data.len() as u64);
            assert!(read.is_ok(), "a member lies outside of its archive");
        }
    }
}

/// Decodes a request to a checkpoint server, without its length field. A request has one encoding.
pub fn served_request(bytes: &[u8]) {
    let Ok(request) = Request::decode(bytes) else { return };
    let mut again = Vec::new();
    request.encode(&mut again);
    assert!(again.get(4..) == Some(bytes), "the request was encoded otherwise");
}

/// Reads an answer of a checkpoint server. The first byte is the logarithm of the longest answer
/// that the client accepts.
pub fn served_answer(bytes: &[u8]) {
    let Some((asked, mut bytes)) = bytes.split_first() else { return };
    let len_bytes_max = 1 << (asked & 31);
    let Ok((answer, _)) = Answer::read(&mut bytes, len_bytes_max) else { return };
    let Answer::Data(bytes) = answer else { return };
    assert!(bytes.len() as u64 <= len_bytes_max, "longer than the client accepts");
    let _ = (
        wire::decode_names(&bytes),
        wire::decode_stats(&bytes, usize::from(*asked)),
        wire::decode_welcome(&bytes),
        wire::decode_space(&bytes),
        serde_json::from_slice::<Vec<crate::served::ToldWriter>>(&bytes),
        serde_json::from_slice::<crate::served::GrantedPlace>(&bytes),
    );
}
