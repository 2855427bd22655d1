//! The cost of checkpoints besides their pages: the size of maps and seals, and the time to open a
//! store with many checkpoints.

use super::keyframe_store::{failed, layout, request};
use crate::{Error, Report};
use keyframe_bench_feed::Result as FeedResult;
use keyframe_store::{Sealed, Store};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use std::path::Path;
use std::time::Instant;

/// The RAM of a guest with 1 GiB.
const RAM_PAGES: u64 = 1 << 18;
/// The pages that it uses.
const USED_PAGES: u64 = 180_000;
/// The pages that are dirty in a checkpoint.
const DIRTY_PAGES: usize = 20_000;
/// The number of checkpoints: more than a level of the map chain has, so that a map over many seconds
/// is among them.
const CHECKPOINTS: u64 = 18;
/// The number of checkpoints in the store that is opened.
const MANY: u64 = 10_000;

/// Measures the metadata of a checkpoint.
pub fn sizes(dir: &Path, report: &mut Report) -> Result<(), Error> {
    let (dirty, idle) = measure_sizes(dir).map_err(|e| Error::failed("measure metadata", e))?;
    report.figure("metadata_20k_bytes", dirty);
    report.figure("metadata_idle_bytes", idle);
    Ok(())
}

/// Returns the mean bytes besides pages and devices: of checkpoints with 20,000 dirty pages that are
/// scattered over RAM, and of checkpoints without dirty pages.
fn measure_sizes(dir: &Path) -> FeedResult<(f64, f64)> {
    let ram = layout(RAM_PAGES)?;
    let store = Store::init(dir).map_err(failed("make a store"))?;
    let mut writer = store.lock_writer("keyframe-bench store").map_err(failed("lock the store"))?;
    let mut run = writer.begin_run("bench", &ram).map_err(failed("begin a run"))?;
    for page in 0..USED_PAGES {
        run.put_page(PageIndex(page), &content(page, 0)).map_err(failed("put a page"))?;
    }
    run.seal(request(&ram)).map_err(failed("seal"))?;
    let (mut dirty_bytes, mut idle_bytes) = (0, 0);
    // The idle checkpoints come first: after others, one of them would list their changes.
    for _ in 0..CHECKPOINTS {
        let sealed = run.seal(request(&ram)).map_err(failed("seal"))?;
        idle_bytes += metadata_bytes(dir, &sealed)?;
    }
    for checkpoint in 1..=CHECKPOINTS {
        // Scattered over RAM, and other pages each time.
        let scattered = (0..USED_PAGES).filter(|page| mixed(*page, checkpoint).is_multiple_of(8));
        for page in scattered.take(DIRTY_PAGES) {
            run.put_page(PageIndex(page), &content(page, checkpoint))
                .map_err(failed("put a page"))?;
        }
        let sealed = run.seal(request(&ram)).map_err(failed("seal"))?;
        dirty_bytes += metadata_bytes(dir, &sealed)?;
    }
    run.finish().map_err(failed("close"))?;
    let mean = |bytes: u64| bytes as f64 / CHECKPOINTS as f64;
    Ok((mean(dirty_bytes), mean(idle_bytes)))
}

/// Returns the bytes of a checkpoint's map and seal.
fn metadata_bytes(dir: &Path, sealed: &Sealed) -> FeedResult<u64> {
    let seal = dir.join(format!("checkpoints/{:010}.ckpt", sealed.id.0));
    let seal_bytes =
        std::fs::metadata(&seal).map_err(keyframe_bench_feed::Error::file("look at", &seal))?.len();
    Ok(sealed.meta.counts.map_bytes + seal_bytes)
}

/// Returns a new page, of which compression leaves 100 to 1000 bytes, so that records have many
/// lengths.
fn content(page: u64, version: u64) -> Page {
    let mut out = ZERO_PAGE;
    let mut number = mixed(page, version) | 1;
    let words = 8 + (number >> 49) as usize % 120;
    for word in out.chunks_exact_mut(8).take(words.min(PAGE_BYTES / 8)) {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        word.copy_from_slice(&number.to_le_bytes());
    }
    out
}

/// Returns a pseudo-random number.
fn mixed(page: u64, version: u64) -> u64 {
    let number = (page << 16 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (number ^ (number >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 8
}

/// The times to open a store, in ns.
struct OpenTimes {
    /// Until the newest checkpoint is loaded.
    read: f64,
    /// Until a run has begun.
    write: f64,
    /// Until all checkpoints are listed.
    list: f64,
}

/// Measures the time to open a store of many checkpoints.
pub fn opening(dir: &Path, report: &mut Report) -> Result<(), Error> {
    let OpenTimes { read, write, list } =
        measure_opening(dir).map_err(|e| Error::failed("measure opening", e))?;
    report.figure("open_10k_read_ns", read);
    report.figure("open_10k_write_ns", write);
    report.figure("open_10k_list_ns", list);
    Ok(())
}

/// Returns the times in a store of 10,000 checkpoints.
fn measure_opening(dir: &Path) -> FeedResult<OpenTimes> {
    let ram = layout(RAM_PAGES)?;
    {
        let store = Store::init(dir).map_err(failed("make a store"))?;
        let mut writer =
            store.lock_writer("keyframe-bench store").map_err(failed("lock the store"))?;
        let mut run = writer.begin_run("bench", &ram).map_err(failed("begin a run"))?;
        for checkpoint in 0..MANY {
            // A few pages each, so that the index of the packs stays small.
            for number in 0..8 {
                let page = (checkpoint * 8 + number) % RAM_PAGES;
                run.put_page(PageIndex(page), &content(page, checkpoint + 1))
                    .map_err(failed("put a page"))?;
            }
            run.seal(request(&ram)).map_err(failed("seal"))?;
        }
        run.finish().map_err(failed("close"))?;
    }
    let ns = |start: Instant| start.elapsed().as_nanos() as f64;
    let start = Instant::now();
    let store = Store::open(dir).map_err(failed("open the store"))?;
    let newest = store.resolve("latest").map_err(failed("find the newest checkpoint"))?;
    store.load(newest).map_err(failed("load a checkpoint"))?;
    let read_ns = ns(start);
    let start = Instant::now();
    let store = Store::open(dir).map_err(failed("open the store"))?;
    let mut writer = store.lock_writer("keyframe-bench store").map_err(failed("lock the store"))?;
    let run = writer.begin_run("bench", &ram).map_err(failed("begin a run"))?;
    let write_ns = ns(start);
    drop((run, writer));
    let start = Instant::now();
    let listed = store.checkpoints().map_err(failed("list checkpoints"))?.sealed.len();
    let list_ns = ns(start);
    if listed as u64 != MANY {
        return Err(keyframe_bench_feed::Error::failed(
            "list checkpoints",
            format!("{listed} of {MANY}"),
        ));
    }
    Ok(OpenTimes { read: read_ns, write: write_ns, list: list_ns })
}
