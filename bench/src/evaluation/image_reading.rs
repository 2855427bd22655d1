//! The time to read a checkpoint's image: cold, after the kernel has dropped the store's files from
//! its cache, and warm, right after that.
//!
//! Warm stands for the paper's immediate use, which reads data that was just written; cold stands
//! for the deferred use.

use crate::Error;
use keyframe_store::Store;
use keyframe_units::{CheckpointId, PageIndex, PageRange};
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::time::Instant;

/// The times to read one image.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ImageReadTimes {
    /// The number of the checkpoint.
    pub checkpoint: u64,
    pub warm_s: f64,
    pub cold_s: f64,
    /// The size of the image.
    pub image_bytes: f64,
}

/// Reads about `count` images of `store`, evenly spread, the last one among them.
pub fn measure(store: &Path, count: usize) -> Result<Vec<ImageReadTimes>, Error> {
    let ids: Vec<CheckpointId> = {
        let listing = open(store)?.checkpoints().map_err(failed("list the checkpoints"))?;
        listing.sealed.iter().map(|sealed| sealed.id).collect()
    };
    let step = ids.len().div_ceil(count.max(1)).max(1);
    let some: Vec<CheckpointId> = ids.iter().rev().step_by(step).rev().copied().collect();
    some.into_iter()
        .map(|id| {
            drop_from_cache(store)?;
            let (cold_s, image_bytes) = read(store, id)?;
            let (warm_s, _) = read(store, id)?;
            Ok(ImageReadTimes { checkpoint: id.0, warm_s, cold_s, image_bytes })
        })
        .collect()
}

/// Opens the store, as a new node does, and reads an image. Returns the time in seconds and the
/// size of the image in bytes.
fn read(store: &Path, id: CheckpointId) -> Result<(f64, f64), Error> {
    let began = Instant::now();
    let loaded = open(store)?.load(id).map_err(failed("load a checkpoint"))?;
    let pages = loaded.meta.ram.len_pages();
    let mut sum = 0_u64;
    loaded
        .read_pages_by_all_cores(PageRange::new(PageIndex(0), pages), &mut |_, content| {
            // The compiler must not remove the read.
            sum = sum.wrapping_add(u64::from(content[0]));
            Ok::<_, keyframe_store::Error>(())
        })
        .map_err(failed("read a checkpoint"))?;
    std::hint::black_box(sum);
    Ok((began.elapsed().as_secs_f64(), loaded.meta.ram.len_bytes() as f64))
}

fn open(store: &Path) -> Result<Store, Error> {
    Store::open(store).map_err(failed("open the store"))
}

fn failed(operation: &str) -> impl FnOnce(keyframe_store::Error) -> Error {
    move |e| Error::failed(operation.to_owned(), e)
}

/// Has the kernel drop all files in `dir` from its cache.
fn drop_from_cache(dir: &Path) -> Result<(), Error> {
    let entries = std::fs::read_dir(dir).map_err(Error::io(format!("list {}", dir.display())))?;
    for entry in entries.flatten() {
        let path = entry.path();
        let kind = entry.file_type().map_err(Error::io(format!("look at {}", path.display())))?;
        if kind.is_dir() {
            drop_from_cache(&path)?;
        } else if kind.is_file() {
            let drop_file = || {
                let file = File::open(&path)?;
                // The kernel keeps pages that are not on disk.
                file.sync_all()?;
                Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
            };
            drop_file().map_err(Error::io(format!("drop {} from the cache", path.display())))?;
        }
    }
    Ok(())
}
