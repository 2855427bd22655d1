//! A copy of a checkpoint that holds all blocks of its disks, and so lies over no image.
//!
//! ```text
//!   RAM, device state ──────────────────────────▶ the same
//!   checkpoint's blocks ─┐
//!   image beneath ───────┴─▶ all blocks ────────▶ blocks over a blank base; zeros are not stored
//! ```

use crate::error::{Error, Result};
use crate::write::{BundleRequest, Progress, Step};
use keyframe_disk::Readable;
use keyframe_store::{BaseMeta, DiskMeta, DiskState, Run, SealRequest, Store, Writer};
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, ZERO_PAGE};
use keyframe_vm_disks::restored;
use keyframe_vm_disks::stored::StoredDisk;
use std::sync::Arc;

const CHUNK_BYTES: u64 = 1 << 20;
/// The number of ranges that one query returns.
const RANGES_MAX: usize = 1024;
const BLOCK_BYTES: u64 = PAGE_BYTES as u64;

/// Refuses a checkpoint with disks that were left out and whose present content is not wanted, or
/// that Keyframe cannot read.
pub fn require_readable(request: &BundleRequest<'_>) -> Result<()> {
    let (checkpoint, meta) = (request.checkpoint, request.meta);
    let by_qemu = restored::opened_by_qemu(meta)?;
    if !by_qemu.is_empty() {
        let disks: Vec<_> =
            by_qemu.iter().map(|disk| format!("{} ({})", disk.name, disk.base.path)).collect();
        return Err(Error::OpenedByQemu { checkpoint, disks: disks.join(", ") });
    }
    if !request.left_out_as_now {
        restored::require_all(checkpoint, meta)?;
    }
    Ok(())
}

/// Writes the checkpoint of `request` to `target`, of which `writer` is the writer, and seals it.
///
/// Errors: the checkpoint or an image cannot be read, or the image has changed; `target` cannot be
/// written.
pub fn copy(
    request: &BundleRequest<'_>,
    target: &Store,
    writer: &mut Writer,
    progress: &mut dyn FnMut(&Progress),
) -> Result<()> {
    let of_source = |e| Error::store(request.store, e);
    let of_target = |e| Error::store(target, e);
    let ram = request.store.load(request.checkpoint).map_err(of_source)?;
    let mut disks = request.store.load_disks(request.checkpoint).map_err(of_source)?;
    disks.meta.clone_from(request.meta);
    let meta = request.meta;
    let whole = |disk: &DiskMeta| DiskMeta {
        base: BaseMeta::of_whole_image(disk.base.path.clone()),
        left_out: false,
        ..disk.clone()
    };
    // A disk without an image shows the guest what it shows it now.
    let base_of = |disk: &DiskMeta| if disk.base.is_cut() { disk.clone() } else { whole(disk) };
    let copies = meta.disks.iter().map(base_of).collect();
    let mut run = writer
        .begin_run_with(&meta.vm, &meta.ram, copies, DiskState::default())
        .map_err(of_target)?;
    let all = PageRange::new(PageIndex(0), meta.ram.len_pages());
    let total_bytes = ram.nonzero_pages() * BLOCK_BYTES;
    let mut done_bytes = 0;
    let mut target_failed = false;
    ram.read_pages(all, &mut |page, content| {
        done_bytes += BLOCK_BYTES;
        progress(&Progress { step: Step::Ram, done_bytes, total_bytes });
        run.put_page(page, content).map(drop).inspect_err(|_| target_failed = true)
    })
    .map_err(|e| if target_failed { of_target(e) } else { of_source(e) })?;
    let disks = Arc::new(disks);
    for number in 0..meta.disks.len() {
        let Some(disk) = StoredDisk::of(Arc::clone(&disks), number) else { continue };
        let name = disk.meta().name.clone();
        let content = if disk.meta().left_out { disk.open_as_now()? } else { disk.open()? };
        let mut watch = |done_bytes| {
            let (step, total_bytes) = (Step::Disk(name.clone()), content.disk_bytes());
            progress(&Progress { step, done_bytes, total_bytes });
        };
        put_disk(&mut run, number, &content, &mut watch, &of_target)?;
        if !disk.meta().left_out {
            disk.require_unchanged()?;
        }
    }
    run.seal(SealRequest::of_description(request.meta.clone(), &ram.device_state))
        .map_err(of_target)?;
    run.finish().map_err(of_target)
}

/// Puts the blocks of `disk` that are not zero as those of disk `number`.
fn put_disk(
    run: &mut Run,
    number: usize,
    disk: &dyn Readable,
    watch: &mut dyn FnMut(u64),
    of_target: &dyn Fn(keyframe_store::Error) -> Error,
) -> Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    let mut at = 0;
    // Two ranges of data can meet in one block.
    let mut next_block = 0;
    while at < disk.disk_bytes() {
        for range in disk.ranges(at, disk.disk_bytes() - at, RANGES_MAX)? {
            at = range.offset + range.len_bytes;
            let mut from = (range.offset / BLOCK_BYTES).max(next_block) * BLOCK_BYTES;
            while !range.is_zero && from < at {
                let end = at.next_multiple_of(BLOCK_BYTES).min(disk.disk_bytes());
                let len = (end - from).min(CHUNK_BYTES) as usize;
                disk.read(from, &mut chunk[..len])?;
                for part in chunk[..len].chunks(PAGE_BYTES) {
                    let mut block = ZERO_PAGE;
                    block[..part.len()].copy_from_slice(part);
                    if block != ZERO_PAGE {
                        run.put_block(number, from / BLOCK_BYTES, &block).map_err(of_target)?;
                    }
                    from += BLOCK_BYTES;
                }
                next_block = from / BLOCK_BYTES;
                watch(from.min(at));
            }
        }
        watch(at);
    }
    Ok(())
}
