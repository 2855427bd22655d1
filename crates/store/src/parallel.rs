//! Reading many pages on several threads.
//!
//! ```text
//!   wanted, rising   | piece | piece | piece | ...          each idle thread takes the next one
//!                        │       │
//!                     thread   thread     read, decompress, assemble
//!                        └───┬───┘
//!                         batches ──▶ the caller's thread ──▶ sink
//!                            └──────── emptied ─────┘
//! ```
//!
//! A caller with memory for all pages uses [`crate::fill`] instead, where a thread puts each page
//! into its place.
//!
//! Invariants: the sink is called on the caller's thread only. Memory is bounded: a few batches for
//! each thread, and that of [`OpenStore::read_pages`]. If the sink or a thread fails, the other
//! threads end after their batch.

use crate::open_store::OpenStore;
use crate::{Error, Result};
use keyframe_locks::IgnorePoison;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::Page;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock};

/// The smallest number of pages (8 MiB) for which several threads are started.
pub const PAGES_MIN: usize = 2048;
/// The number of records in one piece of work: enough for large reads, and for the bases of deltas
/// to lie next to each other.
pub const PIECE_RECORDS: usize = 2048;
/// The pages in one batch: they stay in the cache of a core.
const BATCH_PAGES: usize = 32;
const THREADS_MAX: usize = 8;
/// The batches of each thread that wait for the caller.
const BATCHES: usize = 2;

/// Returns the number of threads that reading uses on this machine.
pub fn threads() -> usize {
    // Finding it reads the files of the control group: more than the read of a page.
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| {
        std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)
    })
}

type Batch<T> = Vec<(T, Page)>;

/// The reason why a thread ends early.
enum Stop {
    /// The caller takes no more batches.
    Gone,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What the threads of one read share.
struct Shared<'a, T> {
    inner: &'a OpenStore,
    wanted: &'a [(PageRef, T)],
    next: AtomicUsize,
    empty: Mutex<Vec<Batch<T>>>,
}

impl<T: Copy> Shared<'_, T> {
    fn batch(&self) -> Batch<T> {
        let emptied = self.empty.lock().ignore_poison().pop();
        emptied.unwrap_or_else(|| Vec::with_capacity(BATCH_PAGES))
    }

    fn give_back(&self, mut batch: Batch<T>) {
        batch.clear();
        self.empty.lock().ignore_poison().push(batch);
    }

    /// Reads pieces until all are taken.
    fn work(&self, to: &SyncSender<Result<Batch<T>>>) {
        let mut batch = self.batch();
        let mut read = || {
            while let Some(piece) =
                self.wanted.chunks(PIECE_RECORDS).nth(self.next.fetch_add(1, Ordering::Relaxed))
            {
                self.inner.read_pages(piece, &mut |what, page| {
                    batch.push((what, *page));
                    if batch.len() < BATCH_PAGES {
                        return Ok(());
                    }
                    to.send(Ok(std::mem::replace(&mut batch, self.batch()))).map_err(|_| Stop::Gone)
                })?;
            }
            Ok(())
        };
        match read() {
            Ok(()) => drop(to.send(Ok(batch))),
            Err(Stop::Failed(error)) => drop(to.send(Err(error))),
            Err(Stop::Gone) => {}
        }
    }
}

impl OpenStore {
    /// Reads pages as [`OpenStore::read_pages`] does, on several threads if there are many. Then
    /// the pages come only roughly in the order of `wanted`. Errors: those of
    /// [`OpenStore::read_pages`].
    pub fn read_many<T: Copy + Send + Sync, E: From<Error>>(
        &self,
        wanted: &[(PageRef, T)],
        sink: &mut dyn FnMut(T, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        if wanted.len() < PAGES_MIN || threads() < 2 {
            return self.read_pages(wanted, sink);
        }
        self.read_by(threads().min(wanted.len().div_ceil(PIECE_RECORDS).max(2)), wanted, sink)
    }

    /// Reads pages as [`Self::read_many`] does, on `threads` threads. Errors: those of
    /// [`Self::read_many`].
    pub fn read_by<T: Copy + Send + Sync, E: From<Error>>(
        &self,
        threads: usize,
        wanted: &[(PageRef, T)],
        sink: &mut dyn FnMut(T, &Page) -> Result<(), E>,
    ) -> Result<(), E> {
        let (next, empty) = (AtomicUsize::new(0), Mutex::default());
        let shared = Shared { inner: self, wanted, next, empty };
        let (to, batches) = sync_channel(threads * BATCHES);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let (to, shared) = (to.clone(), &shared);
                scope.spawn(move || shared.work(&to));
            }
            drop(to);
            // An error drops `batches`, so no thread waits for the caller.
            for batch in batches {
                let batch = batch?;
                batch.iter().try_for_each(|(what, page)| sink(*what, page))?;
                shared.give_back(batch);
            }
            Ok(())
        })
    }
}

#[cfg(test)]
pub mod tests {
    use crate::tests::{TINY, content, init_on, layout, on, seal};
    use crate::{Error, LoadedCheckpoint, Tuning};
    use keyframe_store_backend::testing::FaultyBackend;
    use keyframe_store_format::testing::noise;
    use keyframe_units::{Page, PageIndex, PageRange, ZERO_PAGE};
    use std::collections::BTreeMap;

    pub const PAGES: u64 = 9000;

    /// Returns the content of a page in an epoch: zeros, noise, compressible text, content of other
    /// pages, or content that changes a little from epoch to epoch.
    pub fn page_of(page: u64, epoch: u64) -> Page {
        match page % 7 {
            0 => ZERO_PAGE,
            1..4 => {
                let mut like = noise(page);
                like[..8].copy_from_slice(&epoch.to_le_bytes());
                like
            }
            4 => content(101 + 2 * (page + epoch)),
            _ => content(102 + 2 * (page / 3)),
        }
    }

    pub fn subject() -> (FaultyBackend, LoadedCheckpoint) {
        let medium = FaultyBackend::default();
        let tuning =
            Tuning { pack_bytes_max: 3 << 20, base_bytes: 64 << 20, buffer_bytes: 1 << 16, ..TINY };
        let mut writer = init_on(&medium).unwrap().lock_writer_tuned("test", tuning).unwrap();
        let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        let mut id = None;
        for epoch in 0..3 {
            for page in (0..PAGES).filter(|page| epoch == 0 || page % 5 == epoch) {
                run.put_page(PageIndex(page), &page_of(page, epoch)).unwrap();
            }
            id = Some(seal(&mut run, PAGES).unwrap().id);
        }
        run.finish().unwrap();
        let loaded = on(&medium).unwrap().load(id.unwrap()).unwrap();
        (medium, loaded)
    }

    pub fn epoch_of(page: u64) -> u64 {
        [0, 1, 2, 0, 0][(page % 5) as usize]
    }

    #[test]
    fn threads_give_each_page_once_and_as_it_was_put() {
        let (_medium, loaded) = subject();
        let all = PageRange::new(PageIndex(0), PAGES);
        let mut wanted: Vec<_> = all
            .iter()
            .map(|page| (keyframe_store_format::page_ref::PageRef(loaded.page_ref(page)), page))
            .collect();
        wanted.retain(|(to, _)| to.0 != 0);
        wanted.sort_unstable();
        for threads in [1, 2, 5] {
            let mut found = BTreeMap::new();
            let caller = std::thread::current().id();
            loaded
                .inner
                .read_by(threads, &wanted, &mut |page, content| {
                    assert!(std::thread::current().id() == caller, "the sink was called elsewhere");
                    assert!(found.insert(page.0, *content).is_none(), "page {} came twice", page.0);
                    Ok::<_, Error>(())
                })
                .unwrap();
            assert_eq!(found.len(), wanted.len());
            assert!(found.iter().all(|(page, held)| *held == page_of(*page, epoch_of(*page))));
        }
        let kinds = crate::tests::kinds_of(&loaded);
        assert!(kinds[&'D'] > 100 && kinds[&'P'] > 1000, "{kinds:?}");
    }

    #[test]
    fn the_first_error_of_the_sink_or_of_a_thread_ends_it() {
        let (medium, loaded) = subject();
        let all = PageRange::new(PageIndex(0), PAGES);
        for limit in [0, 1, 3000] {
            let mut left = limit;
            let read = loaded.read_pages_by_all_cores(all, &mut |_, _| {
                left -= 1;
                if left < 0 { Err(Error::DisksTooLarge) } else { Ok(()) }
            });
            assert!(matches!(read, Err(Error::DisksTooLarge)) && left == -1, "{read:?}, {left}");
        }
        let name = medium.files().into_keys().rfind(|name| name.starts_with("packs/")).unwrap();
        let mut bytes = medium.files()[&name].clone();
        bytes[5000] ^= 1;
        medium.overwrite(&name, Some(bytes));
        let loaded = on(&medium).unwrap().load(loaded.id).unwrap();
        let read = loaded.read_pages_by_all_cores(all, &mut |_, _| Ok::<_, Error>(()));
        assert!(
            matches!(&read, Err(Error::Damaged { object, .. }) if object.contains(&name)),
            "{read:?}"
        );
    }
}
