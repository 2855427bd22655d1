//! Makes a stream from the last checkpoints of a store's newest run: the whole RAM of the first one,
//! and the changed pages of each further one.
//!
//! The stream has RAM only. Pages that were written but did not change are missing, because a store
//! does not keep them.

use crate::{Error, Options};
use keyframe_bench_feed::{DirtySecond, IMAGE_MIB_MAX, Stream};
use keyframe_store::{LoadedCheckpoint, Sealed, Store};
use keyframe_units::{PageIndex, ZERO_PAGE};
use std::path::{Path, PathBuf};

/// The number of checkpoints, as in the made stream.
const CHECKPOINTS: usize = 10;
const FILE: &str = "stream";

/// A stream in a file.
pub struct RecordedStream {
    /// The path of the file.
    pub path: PathBuf,
    /// A description of the recorded VM and checkpoints.
    pub description: String,
}

/// The checkpoints of a stream.
pub struct SelectedCheckpoints<'a> {
    store: &'a Store,
    sealed: Vec<Sealed>,
    /// The size of their RAM.
    image_bytes: u64,
}

impl<'a> SelectedCheckpoints<'a> {
    /// Selects the last checkpoints of the newest run of `store`.
    pub fn newest(store: &'a Store) -> Result<Self, Error> {
        let failed = |problem: String| Error::failed("take a stream from the store", problem);
        let listing = store.checkpoints().map_err(|e| failed(e.to_string()))?;
        let newest =
            listing.sealed.last().map(|newest| (newest.meta.run.clone(), newest.meta.ram.clone()));
        let Some((run, ram)) = newest else { return Err(failed("it has no checkpoint".into())) };
        let of_run =
            listing.sealed.into_iter().filter(|one| one.meta.run == run && one.meta.ram == ram);
        let mut sealed: Vec<Sealed> = of_run.collect();
        sealed.drain(..sealed.len().saturating_sub(CHECKPOINTS));
        let image_bytes = ram.len_bytes();
        if image_bytes > IMAGE_MIB_MAX << 20 {
            let mib = image_bytes >> 20;
            return Err(failed(format!(
                "its VM has {mib} MiB of RAM; the limit is {IMAGE_MIB_MAX} MiB"
            )));
        }
        if sealed.len() < 2 {
            let problem =
                format!("run {run}, its newest, has one checkpoint, and a stream needs two");
            return Err(failed(problem));
        }
        Ok(Self { store, sealed, image_bytes })
    }

    /// Returns the size of the guest's RAM in MiB.
    pub fn image_mib(&self) -> u64 {
        self.image_bytes.div_ceil(1 << 20)
    }

    /// Writes the stream to a file in `dir`.
    pub fn write(&self, dir: &Path, options: &Options) -> Result<RecordedStream, Error> {
        let path = dir.join(FILE);
        let (first, rest) =
            self.sealed.split_first().ok_or_else(|| Error::failed("read", "nothing"))?;
        options.say(format!("reading {} checkpoints of {}", self.sealed.len(), first.meta.vm));
        let mut before = self.load(first)?;
        let pages = before.meta.ram.len_pages();
        let mut stream = Stream { image: vec![ZERO_PAGE; pages as usize], seconds: Vec::new() };
        before.read_into(PageIndex(0), &mut stream.image).map_err(read(first))?;
        for sealed in rest {
            let next = self.load(sealed)?;
            stream.seconds.push(changed_pages(&before, &next).map_err(read(sealed))?);
            before = next;
        }
        stream.write(&path).map_err(|e| Error::failed("keep the stream", e))?;
        let last = rest.last().unwrap_or(first);
        let took_s = last.meta.taken_at.duration_since(first.meta.taken_at).as_secs_f64();
        let description = format!(
            "RAM of {} at checkpoints {} to {}, {took_s:.1} s, {} pages written",
            first.meta.vm,
            first.id,
            last.id,
            stream.seconds.iter().map(|second| second.pages.len()).sum::<usize>()
        );
        Ok(RecordedStream { path, description })
    }

    fn load(&self, sealed: &Sealed) -> Result<LoadedCheckpoint, Error> {
        self.store.load(sealed.id).map_err(read(sealed))
    }
}

fn read(sealed: &Sealed) -> impl FnOnce(keyframe_store::Error) -> Error {
    let operation = format!("read checkpoint {}", sealed.id);
    move |e| Error::failed(operation, e)
}

/// Returns the pages that differ in `next`.
fn changed_pages(
    before: &LoadedCheckpoint,
    next: &LoadedCheckpoint,
) -> Result<DirtySecond, keyframe_store::Error> {
    let all = (0..next.meta.ram.len_pages()).map(PageIndex);
    let pages: Vec<PageIndex> =
        all.filter(|page| before.page_ref(*page) != next.page_ref(*page)).collect();
    let mut contents = vec![ZERO_PAGE; pages.len()];
    next.read_some(&pages, &mut |page, content| {
        if let Ok(at) = pages.binary_search(&page) {
            contents[at] = *content;
        }
        Ok::<_, keyframe_store::Error>(())
    })?;
    Ok(DirtySecond { pages, contents })
}
