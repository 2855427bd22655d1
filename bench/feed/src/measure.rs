//! Runs one job: feeds a store, reads it again, compares, and measures.
//!
//! ```text
//!   mixed   create ─ image ─ second 1 ... second 9 ─ close     time, memory, CPU time
//!           open ─ the last image three times                  time; compared
//!           the work that the store does when idle             CPU time, sizes before and after
//!           open ─ the last image three times                  time, if it did work; compared
//!           open ─ the first image and one between             compared
//!   pure    create ─ the last image ─ only known pages ─ only new pages ─ close
//!           open ─ the last image                              compared
//! ```
//!
//! The job runs on one core, with all threads of the store. A store that reads with several threads
//! reads the last image with all cores too. The stream is made, or read, before the measurement. An
//! image is read into zeroed memory that is present.

use crate::job::{FeedTime, Job, RebuildTimes, StoreMeasurement};
use crate::store::{Store, StoreReader, StoreWriter};
use crate::stream::Stream;
use crate::usage::{Cores, MemoryPeak, cpu_ns, end_with_parent, stored_bytes};
use crate::{Error, Result};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use std::path::Path;
use std::time::Instant;

/// How often the last image is read.
const REBUILDS: usize = 3;
/// The number of new pages is the image divided by this.
const UNIQUE_PART: usize = 2;

type DirtyPage<'a> = (PageIndex, &'a Page);

/// Runs `job` with `store`, in a process that does nothing else.
pub fn run(job: &Job, store: &dyn Store) -> Result<StoreMeasurement> {
    end_with_parent()?;
    let cores = Cores::bind_to(job.cpu)?;
    measure(job, store, &cores)
}

fn measure(job: &Job, store: &dyn Store, cores: &Cores) -> Result<StoreMeasurement> {
    let mut stream = job.source.stream()?;
    let mixed = job.dir.join("mixed");
    let mut measured = StoreMeasurement::default();
    feed(store, &mixed, &stream, &mut measured)?;
    // This comes after the feeding: the memory that it frees would hide memory of the store.
    measured.distinct_bytes = stream.distinct_bytes();
    measured.ingested_bytes = stored_bytes(&mixed)?;
    let first = stream.image.clone();
    (0..stream.seconds.len()).for_each(|second| stream.apply(second));
    measured.rebuilt = rebuild(store, &mixed, &stream, cores)?;
    measured.memcpy_ns = copy_image(&stream.image);
    let cpu_before = cpu_ns();
    if store.settle(&mixed)? {
        measured.settle_cpu_ns = Some(cpu_ns() - cpu_before);
        measured.rebuilt_settled = Some(rebuild(store, &mixed, &stream, cores)?);
    }
    measured.stored_bytes = stored_bytes(&mixed)?;
    stream.image = first;
    compare(store, &mixed, &mut stream)?;
    remove(&mixed)?;
    if job.pure {
        let pure = job.dir.join("pure");
        feed_pure(store, &pure, stream, &mut measured)?;
        remove(&pure)?;
    }
    Ok(measured)
}

fn remove(dir: &Path) -> Result<()> {
    std::fs::remove_dir_all(dir).map_err(Error::file("remove", dir))
}

fn ns_since(start: Instant) -> u64 {
    start.elapsed().as_nanos() as u64
}

/// Returns all pages of an image with their numbers.
fn whole(image: &[Page]) -> Vec<DirtyPage<'_>> {
    (0..).map(PageIndex).zip(image).collect()
}

fn feed(
    store: &dyn Store,
    dir: &Path,
    stream: &Stream,
    measured: &mut StoreMeasurement,
) -> Result<()> {
    let image = whole(&stream.image);
    let seconds: Vec<Vec<DirtyPage<'_>>> =
        stream.seconds.iter().map(|s| s.pages.iter().copied().zip(&s.contents).collect()).collect();
    let memory = MemoryPeak::watch()?;
    let programs_before = store.programs();
    let (cpu_before, started) = (cpu_ns(), Instant::now());
    let mut writing = store.create(dir, stream.image.len() as u64)?;
    let created_ns = ns_since(started);
    measured.image = checkpoint(writing.as_mut(), &image)?;
    measured.image_stored_bytes = stored_bytes(dir)?;
    for second in &seconds {
        measured.steady += checkpoint(writing.as_mut(), second)?;
    }
    let start = Instant::now();
    writing.close()?;
    let ns = created_ns + measured.image.ns + measured.steady.ns + ns_since(start);
    measured.whole = FeedTime { bytes: measured.image.bytes + measured.steady.bytes, ns };
    measured.cpu_ns = cpu_ns() - cpu_before;
    measured.peak_bytes = memory.peak_bytes()?;
    if let (Some(before), Some(after)) = (programs_before, store.programs()) {
        measured.cpu_ns = after.cpu_ns - before.cpu_ns;
        measured.peak_bytes = after.peak_bytes;
    }
    Ok(())
}

/// Feeds one checkpoint.
fn checkpoint(writing: &mut dyn StoreWriter, pages: &[DirtyPage<'_>]) -> Result<FeedTime> {
    writing.prepare(pages)?;
    let start = Instant::now();
    writing.checkpoint(pages)?;
    Ok(FeedTime { bytes: (pages.len() * PAGE_BYTES) as u64, ns: ns_since(start) })
}

/// Reads the last image, which is that of the stream, and compares it.
fn rebuild(store: &dyn Store, dir: &Path, stream: &Stream, cores: &Cores) -> Result<RebuildTimes> {
    let mut reading = store.open(dir)?;
    let mut out = vec![[1; PAGE_BYTES]; stream.image.len()];
    let mut rebuild = |reading: &mut dyn StoreReader| -> Result<u64> {
        let one = |_| read_image(reading, stream.seconds.len(), &stream.image, &mut out);
        (0..REBUILDS).map(one).collect::<Result<Vec<_>>>().map(median)
    };
    let ns = rebuild(reading.as_mut())?;
    if !reading.uses_all_cores() {
        return Ok(RebuildTimes { ns, all_cores_ns: None });
    }
    cores.use_all()?;
    let all_cores_ns = rebuild(reading.as_mut());
    cores.use_one()?;
    Ok(RebuildTimes { ns, all_cores_ns: Some(all_cores_ns?) })
}

/// Reads and compares the first image and one between. Afterwards the stream has its last image.
fn compare(store: &dyn Store, dir: &Path, stream: &mut Stream) -> Result<()> {
    let mut reading = store.open(dir)?;
    let mut out = vec![[1; PAGE_BYTES]; stream.image.len()];
    let last = stream.seconds.len();
    for checkpoint in 0..=last {
        if checkpoint > 0 {
            stream.apply(checkpoint - 1);
        }
        if [0, last / 2].contains(&checkpoint) {
            read_image(reading.as_mut(), checkpoint, &stream.image, &mut out)?;
        }
    }
    Ok(())
}

/// Reads an image, which must be `expected`. Returns the time in ns.
fn read_image(
    reading: &mut dyn StoreReader,
    checkpoint: usize,
    expected: &[Page],
    out: &mut [Page],
) -> Result<u64> {
    out.fill(ZERO_PAGE);
    let start = Instant::now();
    reading.fill(checkpoint, out)?;
    let ns = ns_since(start);
    match expected.iter().zip(out).position(|(expected, out)| expected != out) {
        Some(page) => Err(Error::Differs { checkpoint, page: page as u64 }),
        None => Ok(ns),
    }
}

/// Copies the image with its zeros into memory that is present. Returns the median time in ns.
fn copy_image(image: &[Page]) -> u64 {
    let mut out = vec![[1; PAGE_BYTES]; image.len()];
    let once = |_| {
        let start = Instant::now();
        for (from, to) in image.iter().zip(&mut out) {
            *to = *from;
        }
        std::hint::black_box(&out);
        ns_since(start)
    };
    median((0..REBUILDS).map(once).collect())
}

fn median(mut all: Vec<u64>) -> u64 {
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or_default()
}

fn feed_pure(
    store: &dyn Store,
    dir: &Path,
    mut stream: Stream,
    measured: &mut StoreMeasurement,
) -> Result<()> {
    stream.seconds.clear();
    let unique = Stream::unique(stream.image.len() / UNIQUE_PART);
    let mut writing = store.create(dir, stream.image.len() as u64)?;
    checkpoint(writing.as_mut(), &whole(&stream.image))?;
    let shuffled = stream.shuffled();
    let dup: Vec<DirtyPage<'_>> =
        shuffled.iter().map(|(page, from)| (*page, &stream.image[*from])).collect();
    measured.dup = Some(checkpoint(writing.as_mut(), &dup)?);
    let new = whole(&unique);
    measured.unique = Some(checkpoint(writing.as_mut(), &new)?);
    writing.close()?;

    let mut expected = vec![ZERO_PAGE; stream.image.len()];
    for (page, content) in dup.iter().chain(&new) {
        expected[page.0 as usize] = **content;
    }
    read_image(store.open(dir)?.as_mut(), 2, &expected, &mut stream.image.clone()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_value_store::{Key, KeyValue, KeyedStore};
    use crate::{ChangedWords, FeedSink, StoreWriter, StreamSource};
    use std::path::PathBuf;

    /// A database that is a file for each key.
    struct Files(PathBuf);

    impl Files {
        fn path(&self, key: &Key) -> PathBuf {
            self.0.join(key.map(|byte| format!("{byte:02x}")).concat())
        }
    }

    impl KeyValue for Files {
        const NAME: &'static str = "files";

        fn open(dir: &Path) -> Result<Self> {
            Ok(Self(dir.to_path_buf()))
        }

        fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()> {
            for (key, value) in entries {
                std::fs::write(self.path(&key), value).map_err(Error::io("write"))?;
            }
            Ok(())
        }

        fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool> {
            match std::fs::read(self.path(key)) {
                Ok(value) => sink(&value),
                Err(_) => return Ok(false),
            }
            Ok(true)
        }

        fn close(self) -> Result<()> {
            Ok(())
        }
    }

    /// A store that returns one page too many, or one wrong byte.
    #[derive(Clone, Copy)]
    enum Wrong {
        Byte,
        Page,
    }

    impl Store for Wrong {
        fn create(&self, dir: &Path, pages: u64) -> Result<Box<dyn StoreWriter>> {
            KeyedStore::<Files>::new().create(dir, pages)
        }

        fn open(&self, dir: &Path) -> Result<Box<dyn StoreReader>> {
            Ok(Box::new(WrongReading(*self, KeyedStore::<Files>::new().open(dir)?)))
        }
    }

    struct WrongReading(Wrong, Box<dyn StoreReader>);

    impl StoreReader for WrongReading {
        fn image(&mut self, checkpoint: usize, sink: FeedSink<'_>) -> Result<()> {
            let (wrong, mut zero) = (self.0, vec![true; 1024]);
            self.1.image(checkpoint, &mut |page, content| {
                zero[page.0 as usize] = false;
                let mut content = *content;
                content[77] ^= u8::from(matches!(wrong, Wrong::Byte) && page.0 > 500);
                sink(page, &content);
            })?;
            if let (Wrong::Page, Some(page)) = (wrong, zero.iter().rposition(|zero| *zero)) {
                sink(PageIndex(page as u64), &[1; PAGE_BYTES]);
            }
            Ok(())
        }
    }

    fn job(dir: &Path) -> Job {
        let (dir, source) = (
            dir.to_path_buf(),
            StreamSource::Made { image_mib: 4, seconds: 2, words: ChangedWords::Few },
        );
        Job { store: String::new(), dir, source, pure: true, cpu: 0 }
    }

    #[test]
    fn a_store_that_returns_other_images_has_no_figures() {
        let dir = tempfile::tempdir().unwrap();
        let measured =
            measure(&job(dir.path()), &KeyedStore::<Files>::new(), &Cores::default()).unwrap();
        assert_eq!(measured.whole.bytes, (1024 + 2 * 78) * 4096);
        // Files of whole pages, and maps.
        assert!(
            measured.stored_bytes >= measured.distinct_bytes
                && measured.distinct_bytes > 600 * 4096
        );
        assert!(
            measured.dup.unwrap().bytes > 600 * 4096
                && measured.unique.unwrap().bytes == 512 * 4096
        );
        assert!(measured.steady.ns > 0 && measured.whole.ns > measured.steady.ns);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files were left behind");
        for wrong in [Wrong::Byte, Wrong::Page] {
            let dir = tempfile::tempdir().unwrap();
            let error = measure(&job(dir.path()), &wrong, &Cores::default()).unwrap_err();
            assert!(matches!(error, Error::Differs { checkpoint: 2, page: 500.. }), "{error}");
        }
    }
}
