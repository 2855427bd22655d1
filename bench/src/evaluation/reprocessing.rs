//! The phases of processing after the pause, measured by putting the same pages into a fresh store.
//!
//! A checkpoint records the time of the whole processing (`encode_ns`). This module repeats its
//! phases one after the other: hashing alone, then putting the pages (hashing, looking up,
//! compressing, appending), then the seal (the map, syncing, the rename).

use crate::Error;
use keyframe_store::{LoadedCheckpoint, SealRequest, Store};
use keyframe_units::{Page, PageIndex, PageRange};
use std::path::Path;
use std::time::Instant;

/// Pages that are read at once.
const READ_PAGES: u64 = 4096;
/// Pages that are put at once.
const PUT_PAGES: usize = 8192;
/// The largest number of checkpoints that are processed again; these are the last ones.
const CHECKPOINTS_MAX: usize = 6;

/// The mean times of the phases, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct PhaseTimes {
    /// BLAKE3 over the pages.
    pub hash_s: f64,
    /// Looking up, compressing, appending.
    pub store_s: f64,
    /// The page map, syncing, sealing.
    pub seal_s: f64,
    /// Pages of a checkpoint.
    pub pages: f64,
    /// The number of checkpoints.
    pub count: usize,
}

/// Processes the last checkpoints of the store `from` again, into a fresh store in `dir`.
pub fn measure(from: &Path, dir: &Path) -> Result<PhaseTimes, Error> {
    let failed =
        |operation: &'static str| move |e: keyframe_store::Error| Error::failed(operation, e);
    let source = Store::open(from).map_err(failed("open the store"))?;
    let listing = source.checkpoints().map_err(failed("list the checkpoints"))?;
    let ids: Vec<_> = listing.sealed.iter().map(|sealed| sealed.id).collect();
    let from = ids.len().saturating_sub(CHECKPOINTS_MAX + 1);
    let path = dir.join("again");
    let Some(first) = ids.get(from) else { return Ok(PhaseTimes::default()) };
    let ram = source.load(*first).map_err(failed("load a checkpoint"))?.meta.ram;
    let store = Store::init(&path).map_err(failed("make a store"))?;
    let mut writer =
        store.lock_writer("keyframe-bench evaluation").map_err(failed("lock a store"))?;
    let mut run = writer.begin_run("again", &ram).map_err(failed("begin a run"))?;
    let mut sum = PhaseTimes::default();
    let mut before: Option<LoadedCheckpoint> = None;
    for id in &ids[from..] {
        let image = source.load(*id).map_err(failed("load a checkpoint"))?;
        let changed = changed_pages(&image, before.as_ref())?;
        let pages: Vec<(PageIndex, &Page)> =
            changed.iter().map(|(index, page)| (*index, &**page)).collect();
        let hashing = Instant::now();
        for (_, page) in &pages {
            std::hint::black_box(blake3::hash(&page[..]));
        }
        let hash_s = hashing.elapsed().as_secs_f64();
        let putting = Instant::now();
        for batch in pages.chunks(PUT_PAGES) {
            run.put_pages(batch, &mut |_, _| ()).map_err(failed("put pages"))?;
        }
        let put_s = putting.elapsed().as_secs_f64();
        let sealing = Instant::now();
        run.seal(SealRequest::of_pages(&ram, "interval")).map_err(failed("seal a checkpoint"))?;
        let seal_s = sealing.elapsed().as_secs_f64();
        // The first checkpoint is complete, and no measure for the others.
        if before.is_some() {
            sum.hash_s += hash_s;
            sum.store_s += (put_s - hash_s).max(0.0);
            sum.seal_s += seal_s;
            sum.pages += pages.len() as f64;
            sum.count += 1;
        }
        before = Some(image);
    }
    run.finish().map_err(failed("close a store"))?;
    let count = sum.count.max(1) as f64;
    Ok(PhaseTimes {
        hash_s: sum.hash_s / count,
        store_s: sum.store_s / count,
        seal_s: sum.seal_s / count,
        pages: sum.pages / count,
        count: sum.count,
    })
}

type ChangedPages = Vec<(PageIndex, Box<Page>)>;

/// Returns the pages of `image` that differ from `before`; without `before`, all pages that are not
/// zero.
fn changed_pages(
    image: &LoadedCheckpoint,
    before: Option<&LoadedCheckpoint>,
) -> Result<ChangedPages, Error> {
    let zero: Page = [0; keyframe_units::PAGE_BYTES];
    let all = image.meta.ram.len_pages();
    let mut found = ChangedPages::new();
    let mut now = vec![zero; READ_PAGES as usize];
    let mut then = now.clone();
    let mut first = 0;
    while first < all {
        let len = READ_PAGES.min(all - first) as usize;
        let read = |from: &LoadedCheckpoint, into: &mut [Page]| {
            from.read_into(PageIndex(first), into)
                .map_err(|e| Error::failed("read a checkpoint", e))
        };
        read(image, &mut now[..len])?;
        match before {
            Some(before) => read(before, &mut then[..len])?,
            None => then.fill(zero),
        }
        let range = PageRange::new(PageIndex(first), len as u64);
        let pairs = now.iter().zip(&then).zip(range.first.0..);
        found.extend(
            pairs
                .take(len)
                .filter(|((now, then), _)| now != then)
                .map(|((now, _), at)| (PageIndex(at), Box::new(*now))),
        );
        first += len as u64;
    }
    Ok(found)
}
