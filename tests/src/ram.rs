//! The RAM of a paused VM, read without the code that takes checkpoints.

use keyframe_kernel::{Process, read_memory};
use keyframe_qemu::{HostBlock, find_ram_blocks};
use keyframe_units::PAGE_BYTES;
use std::path::Path;

/// Reads the RAM blocks `names` of the QEMU `pid`, whose monitor is at `qmp`. Returns their bytes,
/// concatenated in this order.
pub fn live_ram(pid: u32, qmp: &Path, names: &[String]) -> Vec<u8> {
    let mut qmp =
        keyframe_qemu::Qmp::connect(qmp, crate::PATIENCE).expect("connect to the monitor");
    let blocks: Vec<HostBlock> = find_ram_blocks(&mut qmp, pid).expect("find RAM blocks");
    let process = Process::open(pid).expect("open QEMU");
    let mut image = Vec::new();
    for name in names {
        let found = blocks
            .iter()
            .find(|b| b.block.name == *name)
            .unwrap_or_else(|| panic!("no block {name}"));
        let mut bytes = vec![0; found.block.total_bytes as usize];
        read_memory(&process, found.host, &mut bytes).expect("read RAM");
        image.append(&mut bytes);
    }
    image
}

/// The names of the RAM blocks of checkpoint `id` in the store at `path`, and their bytes,
/// concatenated in this order.
pub fn stored_ram(path: &Path, id: u64) -> (Vec<String>, Vec<u8>) {
    let store = keyframe_store::Store::open(path).expect("open the store");
    let loaded = store.load(keyframe_units::CheckpointId(id)).expect("load the checkpoint");
    let mut image = vec![0; loaded.meta.ram.len_bytes() as usize];
    let all =
        keyframe_units::PageRange::new(keyframe_units::PageIndex(0), loaded.meta.ram.len_pages());
    let read = loaded.read_pages(all, &mut |page, content| {
        let at = page.0 as usize * PAGE_BYTES;
        image[at..at + PAGE_BYTES].copy_from_slice(content);
        Ok::<_, keyframe_store::Error>(())
    });
    assert!(read.is_ok(), "read checkpoint {id}");
    (loaded.meta.ram.blocks().iter().map(|block| block.name.clone()).collect(), image)
}

/// The numbers of the 4 KiB pages in which two images differ.
pub fn differing_pages(a: &[u8], b: &[u8]) -> Vec<usize> {
    assert_eq!(a.len(), b.len(), "images of different size");
    let pairs = a.chunks(PAGE_BYTES).zip(b.chunks(PAGE_BYTES));
    pairs.enumerate().filter(|(_, (a, b))| a != b).map(|(page, _)| page).collect()
}
