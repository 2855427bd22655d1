//! Reads files as they were at one instant, while a VMM writes to them.
//!
//! ```text
//!   the VMM:    write(file) ── the kernel holds it ───────────────────────────────────────────▶ goes on
//!   own thread:      └─▶ its blocks are written ─▶ are they of the cut, and unread? save them ─┘
//!   engine:     cut, while the VM is paused: the written blocks become those of the cut
//!   encoder:    the saved blocks, and the unread ones from the files ─▶ checkpoint
//! ```
//!
//! In the pause nothing is read and nothing is copied. At first all blocks are written.
//!
//! A cut is given up, and its checkpoint fails, if the VMM overwrites blocks much faster than the
//! encoder takes them ([`SAVED_BLOCKS_MAX`], [`WAIT_MAX`]), or if a block cannot be read. The VMM's
//! write goes on in each case.
//!
//! Invariants:
//! 1. A block of a cut is read before the VMM may write to it.
//! 2. A block is removed from the written ones only by a cut. The user of this module gives it back
//!    ([`CopyBeforeWrite::owe`]) if the checkpoint of the cut is lost.
//! 3. If a file has changed without a report of the kernel, the next cut fails
//!    ([`DiskError::UnseenWrite`]).
//!
//! The kernel lets all writes go on if this process dies. While this process is stopped (SIGSTOP),
//! they wait.

use crate::error::DiskError;
use crate::served::BlockSink;
use keyframe_capture::BoxError;
use keyframe_kernel::access_gate::AccessGate;
use keyframe_locks::IgnorePoison;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, PageSet};
use rustix::fs::{SeekFrom, fstat, seek};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most saved blocks that wait for the encoder: 64 MiB.
const SAVED_BLOCKS_MAX: usize = 16 << 10;
/// How long the VMM's writes may wait for the encoder in all, for each cut.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// The blocks that the encoder reads at once: 1 MiB. A write of the VMM waits for such a read.
const PART_BLOCKS: u64 = 256;

/// Records writes to some files, and saves the blocks of a cut before they are overwritten.
pub struct CopyBeforeWrite {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The blocks of a cut, for each file.
#[derive(Debug)]
pub(crate) struct CutBlocks(Vec<PageSet>);

/// A cut that has been begun, for the engine: it gets its number in the pause.
pub(crate) type CutNumber = Arc<OnceLock<u64>>;

/// A cut, for the encoder. Dropping all copies ends the cut.
#[derive(Clone)]
pub struct CopiedCut(Arc<Cut>);

struct Cut {
    shared: Arc<Shared>,
    number: CutNumber,
    /// True if blocks that are zero may have had another content at an earlier checkpoint.
    puts_zeroes: bool,
}

struct Shared {
    gate: AccessGate,
    files: Vec<Watched>,
    state: Mutex<State>,
    /// Told when the encoder has taken saved blocks, and when a cut has ended.
    taken: Condvar,
}

struct Watched {
    path: PathBuf,
    disk_bytes: u64,
}

struct State {
    files: Vec<Blocks>,
    saved: Vec<Saved>,
    /// The number of the newest cut.
    newest: u64,
    /// True until the newest cut is read, given up or dropped.
    is_open: bool,
    /// From which file and block on the encoder looks for unread blocks.
    next: (usize, PageIndex),
    /// How long the VMM's writes have waited for the encoder in this cut.
    waited: Duration,
    /// Why the newest cut cannot be read.
    given_up: Option<DiskError>,
    /// True if writes are reported no longer.
    is_broken: bool,
    /// Why, if the kernel has said it.
    broken_by: Option<keyframe_kernel::Error>,
}

struct Blocks {
    written: PageSet,
    /// Those of the cut that are neither read nor saved.
    unread: PageSet,
    /// When the file was written last, by its file system, at the newest cut.
    stamp: (i64, i64),
    /// True if a write was reported since.
    has_writes: bool,
}

struct Saved {
    file: usize,
    block: PageIndex,
    content: Box<Page>,
}

/// What the encoder takes at once.
enum Part {
    Saved(Vec<Saved>),
    Read(usize, PageIndex, Vec<u8>),
    Zeroes(usize, PageRange),
}

impl CopyBeforeWrite {
    /// Records the writes to the files `paths`, of so many bytes, through descriptors that are
    /// opened from now on. Errors: a file cannot be opened; the kernel does not report writes to it.
    pub fn over(paths: &[(&Path, u64)]) -> Result<Self, DiskError> {
        let mut files = Vec::new();
        for (path, _) in paths {
            files.push(File::open(path).map_err(|e| io_error("open", path, e))?);
        }
        let gate = AccessGate::over(&files)
            .map_err(|source| DiskError::WritesNotReported { path: first_of(paths), source })?;
        let mut blocks = Vec::new();
        for (number, (path, disk_bytes)) in paths.iter().enumerate() {
            let space = disk_bytes.div_ceil(PAGE_BYTES as u64);
            let mut written = PageSet::new(space);
            written.insert_range(PageRange::new(PageIndex(0), space));
            let stamp = stamp_of(&gate, number).map_err(|e| io_error("look at", path, e))?;
            let unread = PageSet::new(space);
            blocks.push(Blocks { written, unread, stamp, has_writes: true });
        }
        let watched = |(path, disk_bytes): &(&Path, u64)| Watched {
            path: (*path).to_owned(),
            disk_bytes: *disk_bytes,
        };
        let state = State {
            files: blocks,
            saved: Vec::new(),
            newest: 0,
            is_open: false,
            next: (0, PageIndex(0)),
            waited: Duration::ZERO,
            given_up: None,
            is_broken: false,
            broken_by: None,
        };
        let shared = Arc::new(Shared {
            gate,
            files: paths.iter().map(watched).collect(),
            state: Mutex::new(state),
            taken: Condvar::new(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("drive-writes".into()).spawn(move || {
            // It is started before the VMM, and does not need its rights after that.
            let _ = keyframe_confine::capabilities_but(keyframe_confine::KeptRights::Tracing);
            of_thread.let_through();
        });
        let thread = thread.map_err(|e| io_error("start a thread for", &first_of(paths), e))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Returns true if writes are reported no longer.
    pub(crate) fn is_broken(&self) -> bool {
        self.shared.state.lock().ignore_poison().is_broken
    }

    /// Returns true until the newest cut is read or has ended.
    pub(crate) fn is_read(&self) -> bool {
        !self.shared.state.lock().ignore_poison().is_open
    }

    /// Returns a cut to come, for the encoder, and its number to be, for [`Self::cut`]. With
    /// `puts_zeroes` blocks without content are put as zeros; without, they are left out.
    pub(crate) fn begin(&self, puts_zeroes: bool) -> (CopiedCut, CutNumber) {
        let number = CutNumber::default();
        let shared = Arc::clone(&self.shared);
        (CopiedCut(Arc::new(Cut { shared, number: Arc::clone(&number), puts_zeroes })), number)
    }

    /// Flushes the files. Error: a file cannot be flushed.
    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        for (number, watched) in self.shared.files.iter().enumerate() {
            let reader = self.shared.gate.reader(number).ok_or(DiskError::NotCut)?;
            reader.sync_data().map_err(|e| io_error("sync", &watched.path, e))?;
        }
        Ok(())
    }

    /// Cuts the files, while no write to them is under way. Returns the blocks of the cut. Errors:
    /// writes are not reported; the cut before this one is still open; a file cannot be looked at.
    pub(crate) fn cut(&self, number: &CutNumber) -> Result<CutBlocks, BoxError> {
        let mut state = self.shared.state.lock().ignore_poison();
        let state = &mut *state;
        if let Some(why) = state.broken_by.take() {
            return Err(DiskError::WritesLost(why).into());
        }
        if state.is_open {
            return Err(DiskError::CutTwice.into());
        }
        for (at, (blocks, watched)) in state.files.iter_mut().zip(&self.shared.files).enumerate() {
            let path = &watched.path;
            let stamp =
                stamp_of(&self.shared.gate, at).map_err(|e| io_error("look at", path, e))?;
            if stamp != blocks.stamp && !blocks.has_writes {
                state.is_broken = true;
                return Err(DiskError::UnseenWrite(path.clone()).into());
            }
            blocks.stamp = stamp;
        }
        state.newest += 1;
        number.set(state.newest).map_err(|_| DiskError::CutTwice)?;
        for blocks in &mut state.files {
            let empty = PageSet::new(blocks.written.space_pages());
            blocks.unread = std::mem::replace(&mut blocks.written, empty);
            blocks.has_writes = false;
        }
        (state.is_open, state.given_up) = (true, None);
        (state.next, state.waited) = ((0, PageIndex(0)), Duration::ZERO);
        Ok(CutBlocks(state.files.iter().map(|blocks| blocks.unread.clone()).collect()))
    }

    /// Ends the newest cut, if it is open.
    pub(crate) fn end_cut(&self) {
        let newest = self.shared.state.lock().ignore_poison().newest;
        self.shared.end(newest);
    }

    /// Adds the blocks of a lost cut to the next one.
    pub(crate) fn owe(&self, blocks: &CutBlocks) {
        let mut state = self.shared.state.lock().ignore_poison();
        for (file, lost) in state.files.iter_mut().zip(&blocks.0) {
            file.written.union_with(lost);
        }
    }
}

impl Drop for CopyBeforeWrite {
    fn drop(&mut self) {
        self.end_cut();
        self.shared.gate.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // An encoder may still hold the gate.
        self.shared.gate.let_go();
    }
}

impl Shared {
    /// Lets accesses through until the gate is stopped.
    fn let_through(&self) {
        loop {
            match self.gate.next() {
                Ok(accesses) if accesses.is_empty() => {
                    if self.gate.is_stopped() {
                        return;
                    }
                }
                Ok(accesses) => {
                    // Each goes on as it is dropped.
                    for (file, access) in accesses {
                        if !access.is_read() {
                            self.save(file, &access.bytes);
                        }
                    }
                }
                Err(error) => {
                    let mut state = self.state.lock().ignore_poison();
                    (state.is_broken, state.broken_by) = (true, Some(error));
                    state.give_up(DiskError::NotCut);
                    self.taken.notify_all();
                    return;
                }
            }
        }
    }

    /// Notes the blocks of a write to `bytes` of file number `file`, and saves those of them that
    /// are of the cut and unread.
    fn save(&self, file: usize, bytes: &Range<u64>) {
        let mut state = self.state.lock().ignore_poison();
        let Some(blocks) = state.files.get_mut(file) else { return };
        blocks.has_writes = true;
        let page_bytes = PAGE_BYTES as u64;
        let end = bytes.end.div_ceil(page_bytes).min(blocks.written.space_pages());
        let first = (bytes.start / page_bytes).min(end);
        blocks.written.insert_range(PageRange::new(PageIndex(first), end - first));
        let mut from = PageIndex(first);
        while let Some(block) = state.unread_block(file, from).filter(|block| block.0 < end) {
            if state.saved.len() >= SAVED_BLOCKS_MAX {
                let began = Instant::now();
                let left = WAIT_MAX.saturating_sub(state.waited);
                let is_full = |state: &mut State| state.saved.len() >= SAVED_BLOCKS_MAX;
                state = self.taken.wait_timeout_while(state, left, is_full).ignore_poison().0;
                state.waited += began.elapsed();
                if state.saved.len() >= SAVED_BLOCKS_MAX {
                    return state.give_up(DiskError::OverwrittenTooFast);
                }
                // The encoder may have read the block meanwhile.
                continue;
            }
            let mut content = Box::new([0; PAGE_BYTES]);
            if let Err(error) = self.read(file, block, &mut content[..]) {
                return state.give_up(error);
            }
            state.saved.push(Saved { file, block, content });
            if let Some(blocks) = state.files.get_mut(file) {
                blocks.unread.remove(block);
            }
            from = PageIndex(block.0 + 1);
        }
    }

    /// Reads blocks of file number `file` from block `first` on. What is beyond the disk is zero.
    fn read(&self, file: usize, first: PageIndex, into: &mut [u8]) -> Result<(), DiskError> {
        let watched = self.files.get(file).ok_or(DiskError::NotCut)?;
        let reader = self.gate.reader(file).ok_or(DiskError::NotCut)?;
        let offset = first.0 * PAGE_BYTES as u64;
        let len = watched.disk_bytes.saturating_sub(offset).min(into.len() as u64) as usize;
        let (content, beyond) = into.split_at_mut(len);
        beyond.fill(0);
        reader.read_exact_at(content, offset).map_err(|e| io_error("read", &watched.path, e))
    }

    /// Takes the next part of cut `number`. `None` if all of it is read. Errors: the cut was given
    /// up, or has ended; a file cannot be read.
    fn take(&self, number: u64) -> Result<Option<Part>, DiskError> {
        let mut state = self.state.lock().ignore_poison();
        if !state.is_open || state.newest != number {
            return Err(DiskError::NotCut);
        }
        if let Some(why) = state.given_up.take() {
            state.is_open = false;
            return Err(why);
        }
        if !state.saved.is_empty() {
            let saved = std::mem::take(&mut state.saved);
            self.taken.notify_all();
            return Ok(Some(Part::Saved(saved)));
        }
        let (mut file, mut from) = state.next;
        while file < self.files.len() {
            if let Some(block) = state.unread_block(file, from) {
                let part = self.part(&mut state, file, block)?;
                return Ok(Some(part));
            }
            (file, from) = (file + 1, PageIndex(0));
        }
        state.is_open = false;
        Ok(None)
    }

    /// Reads unread blocks of file number `file` from `first` on, or says that they are zero.
    fn part(&self, state: &mut State, file: usize, first: PageIndex) -> Result<Part, DiskError> {
        let data_begins = self.data_from(file, first)?;
        let Some(blocks) = state.files.get_mut(file) else { return Err(DiskError::NotCut) };
        let is_hole = data_begins > first;
        let most = if is_hole { data_begins.0 - first.0 } else { PART_BLOCKS };
        let mut len = 0;
        while len < most && blocks.unread.contains(PageIndex(first.0 + len)) {
            len += 1;
        }
        let range = PageRange::new(first, len);
        let part = if is_hole {
            Part::Zeroes(file, range)
        } else {
            let mut bytes = vec![0; len as usize * PAGE_BYTES];
            self.read(file, first, &mut bytes)?;
            Part::Read(file, first, bytes)
        };
        for block in range.iter() {
            blocks.unread.remove(block);
        }
        state.next = (file, range.end());
        Ok(part)
    }

    /// Returns the first block from `from` on that is not in a hole of the file.
    fn data_from(&self, file: usize, from: PageIndex) -> Result<PageIndex, DiskError> {
        let reader = self.gate.reader(file).ok_or(DiskError::NotCut)?;
        match seek(reader, SeekFrom::Data(from.0 * PAGE_BYTES as u64)) {
            Ok(offset) => Ok(PageIndex(offset / PAGE_BYTES as u64)),
            // A hole until the end.
            Err(rustix::io::Errno::NXIO) => Ok(PageIndex(u64::MAX)),
            // A file system without holes.
            Err(_) => Ok(from),
        }
    }

    /// Ends cut `number`, if it is the newest one.
    fn end(&self, number: u64) {
        let mut state = self.state.lock().ignore_poison();
        if state.newest == number {
            state.is_open = false;
            state.forget_cut();
            self.taken.notify_all();
        }
    }
}

impl State {
    fn unread_block(&self, file: usize, from: PageIndex) -> Option<PageIndex> {
        self.files.get(file)?.unread.next_from(from)
    }

    /// Gives the open cut up: the VMM's writes need not wait for it.
    fn give_up(&mut self, why: DiskError) {
        if self.is_open && self.given_up.is_none() {
            self.given_up = Some(why);
        }
        self.forget_cut();
    }

    fn forget_cut(&mut self) {
        self.saved = Vec::new();
        self.files.iter_mut().for_each(|blocks| blocks.unread.clear());
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        if let Some(number) = self.number.get() {
            self.shared.end(*number);
        }
    }
}

impl std::fmt::Debug for CopiedCut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CopiedCut").field(&self.0.number).finish()
    }
}

impl CopiedCut {
    /// Writes the blocks of the cut to `sink`. File number n is disk number n. Calls `fault` before
    /// each part. Errors: that of `fault` and of `sink`; the disks were not cut; the cut was given
    /// up.
    pub(crate) fn put(
        &self,
        sink: &mut impl BlockSink,
        fault: &mut dyn FnMut() -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let number = *self.0.number.get().ok_or(DiskError::NotCut)?;
        while let Some(part) = self.0.shared.take(number)? {
            fault()?;
            match part {
                Part::Saved(saved) => {
                    for Saved { file, block, content } in saved {
                        sink.put_block(file, block.0, &content)?;
                    }
                }
                Part::Read(file, first, bytes) => {
                    let (blocks, _) = bytes.as_chunks::<PAGE_BYTES>();
                    for (block, content) in (first.0..).zip(blocks) {
                        sink.put_block(file, block, content)?;
                    }
                }
                Part::Zeroes(file, range) if self.0.puts_zeroes => {
                    sink.put_zero_blocks(file, range.first.0, range.len_pages)?;
                }
                Part::Zeroes(..) => {}
            }
        }
        Ok(())
    }
}

/// Returns when the file system has written the file last.
fn stamp_of(gate: &AccessGate, file: usize) -> io::Result<(i64, i64)> {
    let reader = gate.reader(file).ok_or(io::ErrorKind::NotFound)?;
    let stat = fstat(reader)?;
    Ok((stat.st_mtime, stat.st_mtime_nsec as i64))
}

fn first_of(paths: &[(&Path, u64)]) -> PathBuf {
    paths.first().map_or_else(PathBuf::new, |(path, _)| (*path).to_owned())
}

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> DiskError {
    DiskError::Io { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
