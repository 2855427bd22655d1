//! Entry points for the fuzzers in `fuzz/`. Those of the formats are in `keyframe-store-format`.
//!
//! Not part of the interface. Each takes any bytes. It must not panic, nor take memory out of
//! proportion to the bytes.

use crate::config::Config;
use crate::{CheckOptions, Error, Store};
use keyframe_store_backend::fuzzing::MemoryBackend;
use keyframe_store_backend::layout;
use keyframe_store_format::envelope;
pub use keyframe_store_format::fuzzing::{checkpoint, map, record, trailer};
use keyframe_store_format::fuzzing::{mend_record, small as small_file};
use keyframe_store_format::page_ref::{PACK_HEADER_BYTES, PageRef};
use keyframe_units::{PageIndex, PageRange};
use std::path::Path;
use std::sync::Arc;

/// The name and the bytes of each file of the golden store.
pub type Files = Vec<(String, Vec<u8>)>;

/// Parses small files and names of files. The first byte chooses which.
pub fn small(data: &[u8]) {
    small_file(data);
    if let Some(text) = data.get(1..).and_then(|bytes| std::str::from_utf8(bytes).ok()) {
        let _ = (layout::is_tag(text), layout::parse_pack(text), layout::parse_checkpoint(text));
    }
}

/// Parses `store.json` up to its checksum.
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

/// Replaces the bytes of one golden file, chosen by the first byte of `data`, and mends its
/// checksums. Then checks, reads and repairs the store; a repaired store must be whole.
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

/// `bytes` with the right checksums for a file of that name.
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
