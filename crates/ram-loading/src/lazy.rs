//! Loads the RAM of a restored VM while it runs: each page when the VM touches it, and the others
//! in the background.
//!
//! ```text
//!   VMM, empty memory ─────▶ start: RAM is missing ─▶ devices are loaded ─▶ cont ─▶ all is there ─▶ settle: on its own
//!                              │ server: a touched page, at once; then its neighbours ────▶ │
//!                                                                             │ prefetch:   │
//!                                                               pages wanted first, then all that is not zero
//! ```
//!
//! Invariants:
//! 1. The VM sees only pages of the checkpoint and pages that it wrote itself. The kernel refuses
//!    to place a page over a present one. If this process dies or a page cannot be read, the VM
//!    waits for the page and the kernel ends it (`keyframe_kernel::missing_pages`).
//! 2. A page is loaded from the checkpoint once. A page that was present and is missing again was
//!    discarded (balloon), and comes back as zeros.
//! 3. A page that cannot be read ends the VM only when the VM needs it.
//!
//! Left out: zero pages are not placed before they are touched; small blocks (ROMs) come with the
//! device stream.

use crate::{Error, Memory, PageRun, Result, check_within, pieces};
use keyframe_kernel::Process;
use keyframe_kernel::missing_pages::MissingPages;
use keyframe_kernel::priority;
use keyframe_locks::IgnorePoison;
use keyframe_units::elapsed_ns;
use keyframe_units::{HostRange, HostVirt, PAGE_BYTES, Page, PageIndex, PageRange, PageSet};
use keyframe_vmm::{LazyLoading, Residency, SharedRamSource, VmmError};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pages that are fetched at once: 1 MiB.
const PIECE_PAGES: u64 = 256;
/// How often the read of a page that the VM waits for is tried, and the pause after the first try,
/// which doubles each time.
const TRIES: u32 = 5;
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// The time between two attempts to release the VM.
const RELEASE_AGAIN: Duration = Duration::from_secs(1);
/// The size of the aligned window of pages that is loaded with a touched page.
const WINDOW_PAGES: u64 = 16;
/// The largest number of prefetch threads; there is one for each core.
const PREFETCHERS_MAX: usize = 4;
/// The number of touched pages that are remembered.
const TOUCHED_MAX: usize = 1 << 20;
/// The number of unreadable pages that an error names.
const NAMED_MAX: usize = 8;

/// Serves the RAM of a restored VM. If it is dropped before all pages are there, the VM waits for
/// the rest, and the kernel ends it together with the thread that started it.
pub struct Lazy {
    shared: Arc<Shared>,
    stop: OwnedFd,
    server: Option<JoinHandle<()>>,
    prefetchers: Vec<JoinHandle<()>>,
    /// The time of the last attempt to release the VM.
    tried: Option<Instant>,
}

/// A part of the guest's RAM in the VMM's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The name of the RAM block, for errors.
    pub name: String,
    /// Its pages in the layout.
    pub pages: PageRange,
    /// Where it is.
    pub host: HostRange,
}

struct Shared {
    missing: MissingPages,
    places: Vec<Place>,
    source: SharedRamSource,
    started: Instant,
    /// One bit for each page of the layout, set when it was placed.
    there: Vec<AtomicU64>,
    touched: Mutex<Vec<PageIndex>>,
    state: Mutex<State>,
    stopped: AtomicBool,
    /// The prefetch jobs, the next one, and the number of threads that work on them.
    jobs: Mutex<Vec<Job>>,
    next: AtomicUsize,
    busy: AtomicUsize,
}

#[derive(Default)]
struct State {
    residency: Residency,
    failure: Option<Error>,
}

/// A part of the prefetch.
#[derive(Clone)]
enum Job {
    Listed(Vec<PageIndex>),
    Range(PageRange),
}

impl Lazy {
    /// Marks the RAM of a VMM as missing, and starts the server that provides its pages from
    /// `source`. The VMM is process `pid`, a child that this thread started at `started`, with the
    /// empty `memories` as its RAM: memfds, or memory of its own. Error: the kernel does not let
    /// this process serve the VMM's memory.
    pub fn attach(
        pid: u32,
        memories: &[Memory],
        source: SharedRamSource,
        started: Instant,
    ) -> Result<Self> {
        let process = Process::open(pid)?;
        let places = memories.iter().map(|m| m.place(&process)).collect::<Result<Vec<_>>>()?;
        let mut missing = MissingPages::inject(&process)?;
        for place in &places {
            missing.register(place.host)?;
        }
        // The VMM may have touched pages before they were marked as missing.
        memories.iter().filter(|memory| !memory.is_of_process()).try_for_each(Memory::clear)?;
        if memories.iter().any(Memory::is_of_process) {
            missing.discard()?;
        }
        Self::start(missing, places, source, started)
    }

    /// Serves the pages of `places` from `source`. `missing` has these places registered, and no page
    /// of them is present. `started` is the time from which the loading is measured. Error: a thread
    /// cannot be started.
    pub fn start(
        missing: MissingPages,
        places: Vec<Place>,
        source: SharedRamSource,
        started: Instant,
    ) -> Result<Self> {
        let pages = places.iter().map(|p| p.pages.end().0).max().unwrap_or(0);
        let there = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let shared = Arc::new(Shared {
            missing,
            places,
            source,
            started,
            there,
            touched: Mutex::default(),
            state: Mutex::default(),
            stopped: AtomicBool::new(false),
            jobs: Mutex::default(),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
        });
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(Error::io("make an eventfd"))?;
        let told = stop.try_clone().map_err(Error::io("duplicate an eventfd"))?;
        let serving = Arc::clone(&shared);
        let server = spawn("missing-pages", move || {
            // The VM's threads wait for this one. Where it is not permitted, they wait a little
            // longer.
            priority::raise_current_thread();
            if let Err(error) = serving.serve(&told) {
                serving.fail(error);
            }
        })?;
        Ok(Self { shared, stop, server: Some(server), prefetchers: Vec::new(), tried: None })
    }

    /// Begins to load the pages that the VM has not touched yet. Error: a thread cannot be started.
    pub fn prefetch(&mut self) -> Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(PREFETCHERS_MAX);
        self.shared.busy.store(threads, Ordering::SeqCst);
        let planned = Arc::new(std::sync::Once::new());
        for number in 0..threads {
            let (shared, planned) = (Arc::clone(&self.shared), Arc::clone(&planned));
            let worker = spawn("prefetch", move || {
                if number > 0 && number + 1 == cores {
                    // On the core that the others leave to the VM, when the VM does.
                    priority::lower_current_thread();
                }
                planned.call_once(|| shared.plan());
                shared.prefetch();
            });
            match worker {
                Ok(worker) => self.prefetchers.push(worker),
                // Those that did not start count as done; without any, the VM is served page by
                // page only.
                Err(error) if number == 0 => return Err(error),
                Err(_) => drop(self.shared.busy.fetch_sub(1, Ordering::SeqCst)),
            }
        }
        Ok(())
    }

    /// Releases the VM once all of its RAM is there. The thread that waits for the VMM's end calls
    /// this from time to time. Errors: [`Error::PageLost`], and any other error that ended the
    /// serving. The VMM has been ended then.
    pub fn settle(&mut self) -> Result<()> {
        let mut state = self.shared.state();
        if let Some(failure) = state.failure.take() {
            return Err(failure);
        }
        let resident = state.residency.resident_ns.is_some();
        let settled = state.residency.settled;
        drop(state);
        if resident && !settled && self.tried.is_none_or(|at| at.elapsed() >= RELEASE_AGAIN) {
            self.end();
            self.tried = Some(Instant::now());
            // Whole as it is, the VM is not to be lost for that.
            let released = self.shared.missing.release();
            let residency = &mut self.shared.state().residency;
            residency.settled = released.is_ok();
            residency.held_by = released.err().map(|error| error.to_string());
        }
        if !resident
            && self.server.as_ref().is_some_and(JoinHandle::is_finished)
            && self.shared.process_lives()
        {
            self.shared.missing.end_process()?;
            return Err(Error::io("serve the VM's memory")(io::Error::other(
                "the serving thread panicked",
            )));
        }
        Ok(())
    }

    /// Returns how many pages are there, and how many pages the VM has.
    pub fn residency(&self) -> Residency {
        self.shared.state().residency.clone()
    }

    /// Returns the pages that the VM waited for, in the order in which it touched them.
    pub fn touched(&self) -> Vec<PageIndex> {
        self.shared.touched.lock().ignore_poison().clone()
    }

    fn end(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        // Adding to a counter that is far from full; and a thread that has ended needs no word.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        for thread in self.prefetchers.drain(..).chain(self.server.take()) {
            let _ = thread.join();
        }
    }
}

impl LazyLoading for Lazy {
    fn residency(&self) -> Residency {
        self.residency()
    }

    fn settle(&mut self) -> Result<(), VmmError> {
        Ok(self.settle()?)
    }
}

impl Drop for Lazy {
    fn drop(&mut self) {
        self.end();
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(work);
    thread.map_err(Error::io(format!("start the thread {name}")))
}

/// The part of the aligned window around `page` that lies in `within`.
fn window(within: PageRange, page: PageIndex) -> PageRange {
    let first = page.0 - page.0 % WINDOW_PAGES;
    let (from, to) = (first.max(within.first.0), (first + WINDOW_PAGES).min(within.end().0));
    PageRange::new(PageIndex(from), to.saturating_sub(from))
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    fn process_lives(&self) -> bool {
        !self.stopped.load(Ordering::SeqCst) && self.missing.is_alive()
    }

    fn is_there(&self, page: PageIndex) -> bool {
        let word = self.there.get((page.0 / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (page.0 % 64) & 1 == 1)
    }

    fn set_there(&self, page: PageIndex) {
        if let Some(word) = self.there.get((page.0 / 64) as usize) {
            word.fetch_or(1 << (page.0 % 64), Ordering::AcqRel);
        }
    }

    fn page_at(&self, address: HostVirt) -> Option<(&Place, PageIndex)> {
        let place =
            self.places.iter().find(|p| p.host.start <= address && address < p.host.end())?;
        let page = (address.0 - place.host.start.0) / PAGE_BYTES as u64;
        Some((place, PageIndex(place.pages.first.0 + page)))
    }

    fn place_of(&self, page: PageIndex) -> Option<&Place> {
        self.places.iter().find(|p| p.pages.first <= page && page < p.pages.end())
    }

    /// Ends the VM, which must not continue.
    fn fail(&self, error: Error) {
        if !self.missing.is_alive() {
            return;
        }
        let mut state = self.state();
        state.failure.get_or_insert(error);
        // Where not even this works the VM waits for its page, and ends with us.
        let _ = self.missing.end_process();
    }

    fn serve(&self, stop: &OwnedFd) -> Result<()> {
        let (mut touched, mut given) = (Vec::new(), Vec::new());
        while self.missing.wait(stop.as_fd(), &mut touched)? {
            for address in touched.drain(..) {
                given.extend(self.answer(address)?);
            }
            // No thread waits for these pages. The prefetch reports those that cannot be read.
            for (place, page) in given.drain(..) {
                let _ = self.fetch(&Job::Range(window(place.pages, page)));
            }
        }
        Ok(())
    }

    /// Places the page at `address` for the threads that wait for it. Returns the page if it had
    /// not been placed before.
    fn answer(&self, address: HostVirt) -> Result<Option<(&Place, PageIndex)>> {
        let Some((place, page)) = self.page_at(address) else { return Ok(None) };
        let range = HostRange { start: address, len_bytes: PAGE_BYTES as u64 };
        if self.is_there(page) {
            // It came in the meantime, and stays as it is; or it was discarded.
            return was_placed(self.missing.place_zeros(range)).map(|_| None);
        }
        let placed = match self.read_patiently(place, page)? {
            Some(content) => self.missing.place(address, &content[..]),
            None => self.missing.place_zeros(range),
        };
        if !was_placed(placed)? {
            return Ok(None);
        }
        self.set_there(page);
        self.state().residency.served_pages += 1;
        let mut touched = self.touched.lock().ignore_poison();
        if touched.len() < TOUCHED_MAX {
            touched.push(page);
        }
        Ok(Some((place, page)))
    }

    /// A page that the VM waits for; `None` for zeros.
    fn read_patiently(&self, place: &Place, page: PageIndex) -> Result<Option<Box<Page>>> {
        let mut pause = RETRY_PAUSE;
        let mut tries = 1;
        loop {
            match self.read_one(page) {
                Ok(content) => return Ok(content),
                Err(_) if tries < TRIES && !self.stopped.load(Ordering::SeqCst) => {
                    std::thread::sleep(pause);
                    pause *= 2;
                    tries += 1;
                }
                Err(source) => {
                    let offset = (page.0 - place.pages.first.0) * PAGE_BYTES as u64;
                    return Err(Error::PageLost {
                        page,
                        block: place.name.clone(),
                        offset,
                        source,
                    });
                }
            }
        }
    }

    fn read_one(&self, page: PageIndex) -> io::Result<Option<Box<Page>>> {
        let (range, mut found) = (PageRange::new(page, 1), None);
        self.source.read(range, &mut |page, content| {
            check_within(page, range)?;
            found = Some(Box::new(*content));
            Ok(())
        })?;
        Ok(found)
    }

    /// The prefetch jobs in their order.
    fn plan(&self) {
        let mut wanted = self.source.wanted_first();
        wanted.retain(|page| self.place_of(*page).is_some());
        self.state().residency.expected_pages = wanted.len() as u64;
        let wanted = self.with_neighbours(&wanted);
        let listed = wanted.chunks(PIECE_PAGES as usize).map(|pages| Job::Listed(pages.to_vec()));
        let ranges = self.places.iter().flat_map(|p| pieces(p.pages, PIECE_PAGES)).map(Job::Range);
        *self.jobs.lock().ignore_poison() = listed.chain(ranges).collect();
    }

    /// First these pages, then the windows around them, each page once. In the last restore the VM
    /// waited only for the first page of each window.
    fn with_neighbours(&self, pages: &[PageIndex]) -> Vec<PageIndex> {
        let mut seen = PageSet::new(self.there.len() as u64 * 64);
        let around =
            pages.iter().filter_map(|page| Some(window(self.place_of(*page)?.pages, *page)));
        let all = pages.iter().copied().chain(around.flat_map(PageRange::iter));
        all.filter(|page| seen.insert(*page)).collect()
    }

    fn job(&self) -> Option<Job> {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        self.jobs.lock().ignore_poison().get(number).cloned()
    }

    /// Loads pages until all jobs are done. The last thread to finish reports it.
    fn prefetch(&self) {
        while let Some(job) = self.job() {
            if self.stopped.load(Ordering::SeqCst) {
                return;
            }
            if self.fetch(&job).is_err() {
                self.fetch_one_by_one(&job);
            }
        }
        if self.busy.fetch_sub(1, Ordering::SeqCst) != 1 || !self.process_lives() {
            return;
        }
        let mut state = self.state();
        state.residency.prefetched = true;
        if state.residency.unreadable_pages > 0 || state.failure.is_some() {
            return;
        }
        match self.missing.complete() {
            Ok(()) => {
                let resident_ns = elapsed_ns(self.started);
                state.residency.resident_ns = Some(resident_ns);
            }
            Err(error) => {
                drop(state);
                self.fail(error.into());
            }
        }
    }

    fn fetch(&self, job: &Job) -> io::Result<()> {
        let mut place = match job {
            Job::Range(range) => self.place_of(range.first),
            Job::Listed(pages) => pages.first().and_then(|page| self.place_of(*page)),
        };
        let write =
            |offset: u64, bytes: &[u8]| self.put(PageIndex(offset / PAGE_BYTES as u64), bytes);
        let mut run = PageRun::new(&write);
        let mut take = |page: PageIndex, content: &Page| {
            if self.stopped.load(Ordering::Relaxed) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "the restore was given up"));
            }
            if self.is_there(page) {
                return Ok(());
            }
            // Neighbours by number need not be neighbours in memory.
            if place.is_none_or(|p| page < p.pages.first || page >= p.pages.end()) {
                run.flush()?;
                place = self.place_of(page);
            }
            run.put(page.0 * PAGE_BYTES as u64, content)
        };
        match job {
            Job::Range(range) if range.iter().all(|page| self.is_there(page)) => {}
            Job::Range(range) => self.source.read(*range, &mut take)?,
            Job::Listed(pages) => {
                let missing: Vec<_> =
                    pages.iter().copied().filter(|page| !self.is_there(*page)).collect();
                self.source.read_some(&missing, &mut take)?;
            }
        }
        run.flush()
    }

    /// Places neighbouring pages of one block, beginning with page `first`.
    fn put(&self, first: PageIndex, bytes: &[u8]) -> io::Result<()> {
        let place = self.place_of(first).ok_or_else(|| io::Error::other("a page of no block"))?;
        let at = HostVirt(place.host.start.0 + (first.0 - place.pages.first.0) * PAGE_BYTES as u64);
        let len_pages = (bytes.len() / PAGE_BYTES) as u64;
        let placed = self.missing.place(at, bytes).map_err(io::Error::other)?;
        PageRange::new(first, len_pages).iter().for_each(|page| self.set_there(page));
        self.state().residency.prefetched_pages += placed;
        Ok(())
    }

    /// Loads every page that can be read, after a read of the whole job failed.
    fn fetch_one_by_one(&self, job: &Job) {
        let pages: Vec<PageIndex> = match job {
            Job::Range(range) => range.iter().collect(),
            // They come again in their range.
            Job::Listed(_) => return,
        };
        for page in pages {
            if self.is_there(page) || !self.process_lives() {
                continue;
            }
            let fetched = match self.read_one(page) {
                Ok(Some(content)) => self.put(page, &content[..]),
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = fetched {
                let residency = &mut self.state().residency;
                residency.unreadable_pages += 1;
                if residency.unreadable.len() < NAMED_MAX {
                    residency.unreadable.push((page, error.to_string()));
                }
            }
        }
    }
}

/// False if nothing is mapped there any more, as in a VMM that ends in good order. Then no thread
/// waits for the page.
fn was_placed(placed: Result<u64, keyframe_kernel::Error>) -> Result<bool> {
    let gone = Some(rustix::io::Errno::NOENT.raw_os_error());
    match placed {
        Ok(_) => Ok(true),
        Err(keyframe_kernel::Error::TrackRange { source, .. }) if source.raw_os_error() == gone => {
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_its_page_and_stays_in_the_block() {
        for (first, len) in [(0, 100), (5, 100), (32, 16), (40, 1), (47, 2)] {
            let within = PageRange::new(PageIndex(first), len);
            for page in within.iter() {
                let found = window(within, page);
                assert!(
                    found.first <= page && page < found.end(),
                    "{page:?} of {within:?}: {found:?}"
                );
                assert!(
                    within.first <= found.first
                        && found.end() <= within.end()
                        && found.len_pages <= WINDOW_PAGES
                );
            }
        }
        assert_eq!(window(PageRange::new(PageIndex(0), 99), PageIndex(40)).len_pages, WINDOW_PAGES);
    }
}
