//! One job: feeds a store, reads it again, compares, and says what that took.
//!
//! ```text
//!   mixed   create ─ image ─ second 1 ... second 9 ─ close     timed; memory and CPU time are of this
//!           open ─ the last image three times                  timed; compared
//!           what the store does when it is idle                CPU time, and what the files take before and after
//!           open ─ the last image three times                  timed, where it did something; compared, as the first one and one between
//!   pure    create ─ the last image ─ pages all known ─ pages all new ─ close ─ open ─ the last image
//! ```
//!
//! Everything on one core, also threads of the store's own; the last image once more by all, for a
//! store that has threads for it. The stream is made, or read, before the clock runs. An image is
//! rebuilt in memory that is there already and zero.

use crate::job::{Fed, Job, Measured, Rebuilt};
use crate::stream::Stream;
use crate::target::{Reading, Store, Writing};
use crate::usage::{Cores, Memory, cpu_ns, end_with_parent, stored_bytes};
use crate::{Error, Result};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use std::path::Path;
use std::time::Instant;

/// How often the last image is rebuilt.
const REBUILDS: usize = 3;
/// Pages that are all new, as a part of the image.
const UNIQUE_PART: usize = 2;

type Dirty<'a> = (PageIndex, &'a Page);

/// Does job `job` with `store`, in a process that does nothing else.
pub fn run(job: &Job, store: &dyn Store) -> Result<Measured> {
    end_with_parent()?;
    let cores = Cores::bind_to(job.cpu)?;
    measure(job, store, &cores)
}

fn measure(job: &Job, store: &dyn Store, cores: &Cores) -> Result<Measured> {
    let mut stream = job.source.stream()?;
    let mixed = job.dir.join("mixed");
    let mut measured = Measured::default();
    feed(store, &mixed, &stream, &mut measured)?;
    // Behind the feeding: memory that it gives back to the allocator would hide what the store
    // takes.
    measured.distinct_bytes = stream.distinct_bytes();
    measured.ingested_bytes = stored_bytes(&mixed)?;
    let first = stream.image.clone();
    (0..stream.seconds.len()).for_each(|second| stream.apply(second));
    measured.rebuilt = rebuild(store, &mixed, &stream, cores)?;
    measured.memcpy_ns = copy(&stream.image);
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

/// All pages of an image.
fn whole(image: &[Page]) -> Vec<Dirty<'_>> {
    (0..).map(PageIndex).zip(image).collect()
}

fn feed(store: &dyn Store, dir: &Path, stream: &Stream, measured: &mut Measured) -> Result<()> {
    let image = whole(&stream.image);
    let seconds: Vec<Vec<Dirty<'_>>> =
        stream.seconds.iter().map(|s| s.pages.iter().copied().zip(&s.contents).collect()).collect();
    let memory = Memory::watch()?;
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
    measured.whole = Fed { bytes: measured.image.bytes + measured.steady.bytes, ns };
    measured.cpu_ns = cpu_ns() - cpu_before;
    measured.peak_bytes = memory.peak_bytes()?;
    if let (Some((before_ns, _)), Some((cpu_ns, peak_bytes))) = (programs_before, store.programs())
    {
        (measured.cpu_ns, measured.peak_bytes) = (cpu_ns - before_ns, peak_bytes);
    }
    Ok(())
}

/// Feeds one checkpoint.
fn checkpoint(writing: &mut dyn Writing, pages: &[Dirty<'_>]) -> Result<Fed> {
    writing.prepare(pages)?;
    let start = Instant::now();
    writing.checkpoint(pages)?;
    Ok(Fed { bytes: (pages.len() * PAGE_BYTES) as u64, ns: ns_since(start) })
}

/// Rebuilds the last image, which is the stream's, and compares it.
fn rebuild(store: &dyn Store, dir: &Path, stream: &Stream, cores: &Cores) -> Result<Rebuilt> {
    let mut reading = store.open(dir)?;
    let mut out = vec![[1; PAGE_BYTES]; stream.image.len()];
    let mut rebuild = |reading: &mut dyn Reading| -> Result<u64> {
        let one = |_| image(reading, stream.seconds.len(), &stream.image, &mut out);
        (0..REBUILDS).map(one).collect::<Result<Vec<_>>>().map(median)
    };
    let ns = rebuild(reading.as_mut())?;
    if !reading.uses_all_cores() {
        return Ok(Rebuilt { ns, all_cores_ns: None });
    }
    cores.use_all()?;
    let all_cores_ns = rebuild(reading.as_mut());
    cores.use_one()?;
    Ok(Rebuilt { ns, all_cores_ns: Some(all_cores_ns?) })
}

/// Compares the first image and one between, as the last one was when it was rebuilt; the stream's
/// image is the last one then.
fn compare(store: &dyn Store, dir: &Path, stream: &mut Stream) -> Result<()> {
    let mut reading = store.open(dir)?;
    let mut out = vec![[1; PAGE_BYTES]; stream.image.len()];
    let last = stream.seconds.len();
    for checkpoint in 0..=last {
        if checkpoint > 0 {
            stream.apply(checkpoint - 1);
        }
        if [0, last / 2].contains(&checkpoint) {
            image(reading.as_mut(), checkpoint, &stream.image, &mut out)?;
        }
    }
    Ok(())
}

/// Rebuilds an image, which must be `expected`; how long that took.
fn image(
    reading: &mut dyn Reading,
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

/// Copies the image, zeros among it, into memory that is there, page by page; how long that took,
/// median.
fn copy(image: &[Page]) -> u64 {
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
    measured: &mut Measured,
) -> Result<()> {
    stream.seconds.clear();
    let unique = Stream::unique(stream.image.len() / UNIQUE_PART);
    let mut writing = store.create(dir, stream.image.len() as u64)?;
    checkpoint(writing.as_mut(), &whole(&stream.image))?;
    let shuffled = stream.shuffled();
    let dup: Vec<Dirty<'_>> =
        shuffled.iter().map(|(page, from)| (*page, &stream.image[*from])).collect();
    measured.dup = Some(checkpoint(writing.as_mut(), &dup)?);
    let new = whole(&unique);
    measured.unique = Some(checkpoint(writing.as_mut(), &new)?);
    writing.close()?;

    let mut expected = vec![ZERO_PAGE; stream.image.len()];
    for (page, content) in dup.iter().chain(&new) {
        expected[page.0 as usize] = **content;
    }
    image(store.open(dir)?.as_mut(), 2, &expected, &mut stream.image.clone()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyed::{Key, KeyValue, KeyedStore};
    use crate::{PageSink, Source, Words, Writing};
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

    /// A store that gives back one page too many, or one byte that it was not given.
    #[derive(Clone, Copy)]
    enum Wrong {
        Byte,
        Page,
    }

    impl Store for Wrong {
        fn create(&self, dir: &Path, pages: u64) -> Result<Box<dyn Writing>> {
            KeyedStore::<Files>::new().create(dir, pages)
        }

        fn open(&self, dir: &Path) -> Result<Box<dyn Reading>> {
            Ok(Box::new(WrongReading(*self, KeyedStore::<Files>::new().open(dir)?)))
        }
    }

    struct WrongReading(Wrong, Box<dyn Reading>);

    impl Reading for WrongReading {
        fn image(&mut self, checkpoint: usize, sink: PageSink<'_>) -> Result<()> {
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
        let (dir, source) =
            (dir.to_path_buf(), Source::Made { image_mib: 4, seconds: 2, words: Words::Few });
        Job { store: String::new(), dir, source, pure: true, cpu: 0 }
    }

    #[test]
    fn a_store_that_gives_back_what_it_got_has_figures_and_another_has_none() {
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
