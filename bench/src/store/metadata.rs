//! What checkpoints cost beside their pages: bytes of a map and a seal, and the time to open a
//! store with many.

use super::keyframe::{failed, layout, request};
use crate::{Error, Report};
use keyframe_bench_feed::Result as Fed;
use keyframe_store::{Sealed, Store};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use std::path::Path;
use std::time::Instant;

/// A guest of 1 GiB, and what of it is dirty.
const RAM_PAGES: u64 = 1 << 18;
const USED_PAGES: u64 = 180_000;
const DIRTY_PAGES: usize = 20_000;
/// More than a level of the map chain has, so that a map over many seconds is among them.
const CHECKPOINTS: u64 = 18;
/// Checkpoints in the store that is opened.
const MANY: u64 = 10_000;

/// Metadata of a checkpoint.
pub fn sizes(dir: &Path, report: &mut Report) -> Result<(), Error> {
    let (dirty, idle) = measure_sizes(dir).map_err(|e| Error::failed("measure metadata", e))?;
    report.figure("metadata_20k_bytes", dirty);
    report.figure("metadata_idle_bytes", idle);
    Ok(())
}

/// Bytes beside pages and devices: the mean of checkpoints with 20,000 dirty pages scattered over
/// RAM, and of those without.
fn measure_sizes(dir: &Path) -> Fed<(f64, f64)> {
    let ram = layout(RAM_PAGES)?;
    let store = Store::init(dir).map_err(failed("make a store"))?;
    let mut writer = store.lock_writer("keyframe-bench store").map_err(failed("lock the store"))?;
    let mut run = writer.begin_run("bench", &ram).map_err(failed("begin a run"))?;
    for page in 0..USED_PAGES {
        run.put_page(PageIndex(page), &content(page, 0)).map_err(failed("put a page"))?;
    }
    run.seal(request(&ram)).map_err(failed("seal"))?;
    let (mut dirty_bytes, mut idle_bytes) = (0, 0);
    // First: behind others, one of them would list what these have changed.
    for _ in 0..CHECKPOINTS {
        let sealed = run.seal(request(&ram)).map_err(failed("seal"))?;
        idle_bytes += metadata_bytes(dir, &sealed)?;
    }
    for checkpoint in 1..=CHECKPOINTS {
        // All over RAM without any order, and other ones each time.
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

/// The map and the seal.
fn metadata_bytes(dir: &Path, sealed: &Sealed) -> Fed<u64> {
    let seal = dir.join(format!("checkpoints/{:010}.ckpt", sealed.id.0));
    let seal_bytes =
        std::fs::metadata(&seal).map_err(keyframe_bench_feed::Error::file("look at", &seal))?.len();
    Ok(sealed.meta.counts.map_bytes + seal_bytes)
}

/// A page that was not there before, of which compression leaves some 100 to 1000 bytes: records of
/// many lengths, as real ones have.
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

/// A number without an order.
fn mixed(page: u64, version: u64) -> u64 {
    let number = (page << 16 | version).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (number ^ (number >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 8
}

/// The time to open a store of many checkpoints.
pub fn opening(dir: &Path, report: &mut Report) -> Result<(), Error> {
    let [read_ns, write_ns, list_ns] =
        measure_opening(dir).map_err(|e| Error::failed("measure opening", e))?;
    report.figure("open_10k_read_ns", read_ns);
    report.figure("open_10k_write_ns", write_ns);
    report.figure("open_10k_list_ns", list_ns);
    Ok(())
}

/// Until the newest of 10,000 checkpoints is loaded; until a run can begin; until all are listed.
fn measure_opening(dir: &Path) -> Fed<[f64; 3]> {
    let ram = layout(RAM_PAGES)?;
    {
        let store = Store::init(dir).map_err(failed("make a store"))?;
        let mut writer =
            store.lock_writer("keyframe-bench store").map_err(failed("lock the store"))?;
        let mut run = writer.begin_run("bench", &ram).map_err(failed("begin a run"))?;
        for checkpoint in 0..MANY {
            // A few pages each: 40 MB of packs' index would be another matter.
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
    Ok([read_ns, write_ns, list_ns])
}
