//! The overlay: the blocks written to a disk since its start, cut into epochs.
//!
//! ```text
//!   DIR/data       slots of 4 KiB
//!   DIR/journal    block -> slot or zero, appended by each sync
//!   DIR/recent.*   the same since the last sync, appended by each write, never synced
//!
//!   write ──▶ same block, same epoch? ──yes──▶ overwrite its slot
//!                    │no
//!                    ▼
//!              a free slot ──data written──▶ map, and a waiting record
//!                    in DIR/recent.* before      ──sync──▶ data synced, then the journal
//! ```
//!
//! Invariants:
//! 1. Data that was written before a sync began is durable after the sync succeeded. So a record
//!    reaches the journal only after its data is durable, and a slot is reused only after no
//!    journal can name it.
//! 2. A block's content at the cut of an epoch in flight is not overwritten until that epoch is
//!    released or given back.
//! 3. After a sync of the data file or the journal failed, the overlay accepts no write: the kernel
//!    may have dropped written data. A failed write to the journal alone can be repeated.
//! 4. A write that was acknowledged survives the process, because its data and its record are in
//!    the page cache; whatever the journal does not hold is read back from `recent`.
//! 5. A slot that is being read is not reused for another block: a reader that need not wait for a
//!    device holds the map's lock, and any other reader has entered a generation of slots.
//!
//! Memory: at most 50 bytes for each extent (consecutive blocks are one), in each epoch in flight
//! and in the settled map, and 32 bytes for each record that waits for a sync. At most
//! [`WAITING_MAX`] records wait.

mod chain;
pub(crate) mod fuzzing;
mod journal;
pub(crate) mod medium;
mod recent;
mod recovery;
mod slot_file;
mod slots;
#[cfg(test)]
mod tests;

pub use chain::{EPOCHS_MAX, Extent};

use crate::{BLOCK, BLOCK_BYTES, DiskBlock, DiskEpoch, Error, Result, Slot};
use chain::{BlockPlace, EpochChain};
use journal::{Journal, JournalRecord};
use keyframe_locks::IgnorePoison;
pub use medium::Lasting;
use medium::{OverlayFile, OverlayFolder, RealFolder};
use recent::RecentLog;
use recovery::recover;
pub use slot_file::SlotFile;
use slots::SlotAllocator;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

const DATA: &str = "data";
/// The largest number of journal records that wait for a sync. The write that reaches it syncs.
pub const WAITING_MAX: usize = 1 << 17;
/// The number of extents that are folded while the map is locked: some 100 µs.
const FOLD_STEP: usize = 512;

/// The overlay of one disk. One process at a time has it open.
pub struct Overlay {
    name: String,
    data: Arc<dyn OverlayFile>,
    disk_bytes: u64,
    state: RwLock<State>,
    /// Held by writers, so that a cut never happens during a write.
    writing: Mutex<()>,
    syncing: Mutex<Syncing>,
    /// The number of successful syncs. Outside of `syncing`, which a sync holds for long.
    syncs: AtomicU64,
    /// The number of the last requested sync.
    asked: AtomicU64,
    data_dirty: AtomicBool,
    broken: AtomicBool,
}

struct State {
    chain: EpochChain,
    slots: SlotAllocator,
    /// Records for the next sync.
    records: Vec<JournalRecord>,
    recent: RecentLog,
}

struct Syncing {
    journal: Journal,
    /// The newest requested sync that is done.
    done: u64,
}

/// Sizes and counters of an overlay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// The number of bytes of the data file.
    pub data_bytes: u64,
    /// The number of bytes in it that are free.
    pub free_bytes: u64,
    /// The number of ranges of blocks in all maps.
    pub entries: usize,
    /// The number of blocks that the next cut covers: those written since the last cut, and those
    /// of epochs that were given back. A block that is both counts twice.
    pub dirty_blocks: u64,
    /// The number of epochs in flight.
    pub in_flight: usize,
    /// The number of successful syncs since the overlay was opened.
    pub syncs: u64,
}

/// The parts of a buffer that the overlay does not hold: first byte in the buffer, and length in
/// bytes.
pub type Missing = Vec<(usize, usize)>;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

impl Overlay {
    /// Opens the overlay in the directory `dir`, or creates it, for a disk of `disk_bytes` bytes.
    /// All its blocks count as written since the last cut.
    ///
    /// Errors: [`Error::Locked`] if another process has it open; [`Error::Damaged`];
    /// [`Error::Broken`] if a sync of its last process failed; [`Error::Refused`] if it is of a
    /// disk of another size or in a newer format; [`Error::Io`] if a file cannot be used.
    pub fn create(dir: &Path, disk_bytes: u64, lasting: Lasting) -> Result<Self> {
        Self::on(Arc::new(RealFolder::create(dir, lasting)?), Some(disk_bytes))
    }

    /// Opens an existing overlay in the directory `dir`, to commit it. If a sync of its last
    /// process failed, it holds only what the journal holds. Errors: those of [`Self::create`]
    /// without [`Error::Broken`]; [`Error::Refused`] if there is no overlay.
    pub fn open(dir: &Path) -> Result<Self> {
        if !dir.join("journal").exists() {
            return Err(Error::refused(
                dir.display().to_string(),
                "there is no overlay here",
                "name the directory of an overlay",
            ));
        }
        Self::on(Arc::new(RealFolder::open(dir, Lasting::Durable)?), None)
    }

    #[expect(clippy::needless_pass_by_value, reason = "the journal keeps it")]
    pub(crate) fn on(folder: Arc<dyn OverlayFolder>, disk_bytes: Option<u64>) -> Result<Self> {
        let name = folder.name();
        let data = folder.open(DATA)?;
        let (journal, recovered) = Journal::open(Arc::clone(&folder), disk_bytes)?;
        let (recent, left) = RecentLog::open(&*folder, recovered.covered)?;
        // Who opens an overlay to commit it needs only what is certain.
        let is_served = disk_bytes.is_some();
        let state = recover(&name, recovered.map, left, recent, recovered.disk_bytes, is_served)?;
        let tail = state.slots.tail();
        if data.len_bytes()? < u64::from(tail) * BLOCK {
            return Err(Error::damaged(
                format!("{name}/{DATA}"),
                format!("the journal names slots up to {tail}, but the file is shorter"),
            ));
        }
        Ok(Self {
            name,
            data,
            disk_bytes: recovered.disk_bytes,
            state: RwLock::new(state),
            writing: Mutex::new(()),
            syncing: Mutex::new(Syncing { journal, done: 0 }),
            syncs: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            // Data that was read back may be in memory alone.
            data_dirty: AtomicBool::new(true),
            broken: AtomicBool::new(false),
        })
    }

    /// Returns the size of the disk in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    fn map(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().ignore_poison()
    }

    fn map_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().ignore_poison()
    }

    fn require_sound(&self) -> Result<()> {
        if self.broken.load(Ordering::Acquire) {
            return Err(Error::Broken { object: self.name.clone() });
        }
        Ok(())
    }

    /// Fills the parts of `buf` that the overlay holds, from byte `offset` of the disk on. Returns
    /// the other parts of `buf`, which are unchanged. Error: [`Error::Io`].
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<Missing> {
        let mut missing = Missing::new();
        let (mut zero, mut slots) = (Missing::new(), Vec::new());
        let entered = {
            let mut state = self.map_mut();
            state.chain.parts(offset, buf.len(), &mut |start, len, place| match place {
                None => missing.push((start, len)),
                Some((BlockPlace::Zero, _)) => zero.push((start, len)),
                Some((BlockPlace::Slot(slot), within)) => {
                    slots.push((start, len, u64::from(slot) * BLOCK + within));
                }
            });
            state.slots.enter()
        };
        for (start, len) in zero {
            buf[start..start + len].fill(0);
        }
        // Reads without the map's lock, because this may wait for a device.
        let mut parts = slots.into_iter();
        let result =
            parts.try_for_each(|(start, len, at)| self.data.read(at, &mut buf[start..start + len]));
        self.map_mut().slots.leave(entered);
        result.map(|()| missing)
    }

    /// Reads as [`Self::read`] does, but returns `None` if that would wait for a device. Then the
    /// content of `buf` is undefined. Errors: those of [`Self::read`].
    pub fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<Option<Missing>> {
        let (mut missing, mut result) = (Missing::new(), Ok(true));
        let state = self.map();
        state.chain.parts(offset, buf.len(), &mut |start, len, place| match place {
            None => missing.push((start, len)),
            Some((BlockPlace::Zero, _)) => buf[start..start + len].fill(0),
            Some((BlockPlace::Slot(slot), within)) if matches!(result, Ok(true)) => {
                let at = u64::from(slot) * BLOCK + within;
                result = self.data.read_now(at, &mut buf[start..start + len]);
            }
            Some((BlockPlace::Slot(_), _)) => {}
        });
        Ok(result?.then_some(missing))
    }

    /// Calls `show` with each part of the range of `blocks` blocks from `block` on: its first
    /// block, its number of blocks, and `Some(true)` if it is zero, `Some(false)` if it has data,
    /// `None` if the overlay does not hold it.
    pub fn status(
        &self,
        block: DiskBlock,
        blocks: u64,
        show: &mut dyn FnMut(DiskBlock, u64, Option<bool>),
    ) {
        let state = self.map();
        state.chain.each(block.0, blocks, &mut |s, n, place| {
            show(DiskBlock(s), n, place.map(|place| place == BlockPlace::Zero));
        });
    }

    /// Writes `data` from byte `offset` of the disk on, within the disk. If a block is written in
    /// part and is not in the overlay, `read_below` provides its other bytes.
    ///
    /// Errors: [`Error::Io`] if no space is left or the file system fails; [`Error::Broken`] if a
    /// sync failed earlier; [`Error::Limit`] if the data file is full; that of `read_below`.
    pub fn write(&self, offset: u64, data: &[u8], read_below: ReadBelow<'_>) -> Result<()> {
        let alone = locked(&self.writing);
        self.require_sound()?;
        let (mut at, mut rest) = (offset, data);
        while !rest.is_empty() {
            let within = (at % BLOCK) as usize;
            let part = if within > 0 || rest.len() < BLOCK_BYTES {
                let part = rest.len().min(BLOCK_BYTES - within);
                self.write_part(at / BLOCK, within, &rest[..part], read_below)?;
                part
            } else {
                let part = rest.len() / BLOCK_BYTES * BLOCK_BYTES;
                self.write_whole(at / BLOCK, &rest[..part])?;
                part
            };
            at += part as u64;
            rest = &rest[part..];
        }
        drop(alone);
        self.relieve()
    }

    fn write_part(
        &self,
        block: u64,
        within: usize,
        part: &[u8],
        read_below: ReadBelow<'_>,
    ) -> Result<()> {
        let mut here = None;
        self.map().chain.each_current(block, 1, &mut |_, _, place| here = place);
        if let Some(BlockPlace::Slot(slot)) = here {
            return self.put(slot, within, part);
        }
        let mut whole = [0u8; BLOCK_BYTES];
        for (start, len) in self.read(block * BLOCK, &mut whole)? {
            read_below(block * BLOCK + start as u64, &mut whole[start..start + len])?;
        }
        whole[within..within + part.len()].copy_from_slice(part);
        self.write_whole(block, &whole)
    }

    /// Writes whole blocks. After an error some of them may be written, as on any disk.
    fn write_whole(&self, block: u64, data: &[u8]) -> Result<()> {
        let mut pieces = Vec::new();
        self.map().chain.each_current(
            block,
            (data.len() / BLOCK_BYTES) as u64,
            &mut |s, n, place| {
                pieces.push((s, n, place));
            },
        );
        for (s, n, place) in pieces {
            let start = ((s - block) * BLOCK) as usize;
            let part = &data[start..start + (n * BLOCK) as usize];
            match place {
                Some(BlockPlace::Slot(slot)) => self.put(slot, 0, part)?,
                Some(BlockPlace::Zero) | None => self.write_fresh(s, part)?,
            }
        }
        Ok(())
    }

    fn write_fresh(&self, block: u64, data: &[u8]) -> Result<()> {
        let (mut block, mut rest) = (block, data);
        while !rest.is_empty() {
            let taken = self.map_mut().slots.take((rest.len() / BLOCK_BYTES) as u64);
            let Some((slot, count)) = taken else {
                let problem =
                    "its data file has reached 16 TiB; commit the disk and use an empty overlay"
                        .into();
                return Err(Error::Limit { object: self.name.clone(), problem });
            };
            let (part, after) = rest.split_at(count as usize * BLOCK_BYTES);
            if let Err(error) = self.put(slot, 0, part) {
                self.map_mut().slots.put_back(slot, count);
                return Err(error);
            }
            if let Err(error) = self.publish(block, count.into(), BlockPlace::Slot(slot)) {
                self.map_mut().slots.put_back(slot, count);
                return Err(error);
            }
            block += u64::from(count);
            rest = after;
        }
        Ok(())
    }

    fn put(&self, slot: u32, within: usize, bytes: &[u8]) -> Result<()> {
        let written = self.data.write(u64::from(slot) * BLOCK + within as u64, bytes);
        // A failed write may have written a part.
        self.data_dirty.store(true, Ordering::Release);
        written
    }

    fn publish(&self, block: u64, blocks: u64, place: BlockPlace) -> Result<()> {
        let mut state = self.map_mut();
        let State { chain, slots, records, recent } = &mut *state;
        recent.append(JournalRecord { block, blocks, place })?;
        chain.write(block, blocks, place, &mut |slot, n| slots.supersede(slot, n));
        match records.last_mut() {
            Some(last)
                if last.block + last.blocks == block
                    && extents_continue(last.place, last.blocks, place) =>
            {
                last.blocks += blocks;
            }
            _ => records.push(JournalRecord { block, blocks, place }),
        }
        Ok(())
    }

    /// Makes `len` bytes from byte `offset` of the disk on zero, within the disk. `read_below` is
    /// used as in [`Self::write`]. Errors: those of [`Self::write`].
    pub fn zero(&self, offset: u64, len: u64, read_below: ReadBelow<'_>) -> Result<()> {
        let alone = locked(&self.writing);
        self.require_sound()?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let within = at % BLOCK;
            let part = if within > 0 || end - at < BLOCK {
                let part = (end - at).min(BLOCK - within);
                self.write_part(
                    at / BLOCK,
                    within as usize,
                    &[0; BLOCK_BYTES][..part as usize],
                    read_below,
                )?;
                part
            } else {
                let blocks = (end - at) / BLOCK;
                self.publish(at / BLOCK, blocks, BlockPlace::Zero)?;
                blocks * BLOCK
            };
            at += part;
        }
        drop(alone);
        self.relieve()
    }

    /// Discards `len` bytes from byte `offset` of the disk on, within the disk: the whole blocks in
    /// this range become zero, also a last block that the disk's end cuts. Blocks that lie only in
    /// part in the range are unchanged. Errors: those of [`Self::write`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let alone = locked(&self.writing);
        self.require_sound()?;
        let last = offset + len;
        // The last block of the disk may be partial.
        let end = if last == self.disk_bytes { last.div_ceil(BLOCK) } else { last / BLOCK };
        let first = offset.div_ceil(BLOCK);
        if first < end {
            self.publish(first, end - first, BlockPlace::Zero)?;
        }
        drop(alone);
        self.relieve()
    }

    /// Syncs if many records wait.
    fn relieve(&self) -> Result<()> {
        if self.map().records.len() >= WAITING_MAX { self.sync() } else { Ok(()) }
    }

    /// Makes all written data durable: the data file, then the journal. Errors: [`Error::Broken`]
    /// if a sync failed earlier; [`Error::Io`] if this one fails.
    pub fn sync(&self) -> Result<()> {
        let asked = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let mut syncing = locked(&self.syncing);
        if syncing.done >= asked {
            // A sync that began after this request covers it.
            return Ok(());
        }
        self.require_sound()?;
        let covered = self.asked.load(Ordering::Acquire);
        let (last, records, waiting) = {
            let mut state = self.map_mut();
            let last = state.recent.begin_sync();
            (last, std::mem::take(&mut state.records), state.slots.take_waiting())
        };
        if self.data_dirty.swap(false, Ordering::AcqRel)
            && let Err(error) = self.data.sync()
        {
            return Err(self.break_down(error));
        }
        if !records.is_empty()
            && let Err(failed) = syncing.journal.append(&records, last)
        {
            if !failed.retry {
                return Err(self.break_down(failed.error));
            }
            let mut state = self.map_mut();
            state.records.splice(0..0, records);
            state.slots.wait_again(waiting);
            return Err(failed.error);
        }
        {
            let mut state = self.map_mut();
            state.slots.set_free(waiting);
            if !records.is_empty() {
                state.recent.set_covered(last);
            }
        }
        syncing.done = covered;
        self.syncs.fetch_add(1, Ordering::Relaxed);
        if syncing.journal.is_long()
            && let Err(failed) = syncing.journal.rewrite()
            && !failed.retry
        {
            return Err(self.break_down(failed.error));
        }
        Ok(())
    }

    fn break_down(&self, error: Error) -> Error {
        if !self.broken.swap(true, Ordering::AcqRel) {
            self.map_mut().recent.mark_broken();
        }
        error
    }

    /// Numbers the epochs from `after` on, so that they differ from those of an earlier process.
    pub(crate) fn number_epochs_after(&self, after: DiskEpoch) {
        self.map_mut().chain.number_epochs_after(after);
    }

    /// Ends the current epoch in constant time, and returns its number. [`Self::pages`] then lists
    /// the blocks written in it. Errors: [`Error::Limit`] if the maps of [`EPOCHS_MAX`] epochs are
    /// kept (those in flight, and later ones that wait for them); [`Error::Broken`].
    pub fn cut(&self) -> Result<DiskEpoch> {
        let _alone = locked(&self.writing);
        self.require_sound()?;
        self.map_mut().chain.cut().ok_or_else(|| {
            let problem =
                format!("{EPOCHS_MAX} epochs are in flight; release or give back the oldest first");
            Error::Limit { object: self.name.clone(), problem }
        })
    }

    /// Returns about `max` extents of the epoch in flight `epoch` from block `from` on, in rising
    /// order, and the block at which to continue: `None` after the last one. Error:
    /// [`Error::NoEpoch`] if it is not in flight.
    pub fn pages(
        &self,
        epoch: DiskEpoch,
        from: DiskBlock,
        max: usize,
    ) -> Result<(Vec<Extent>, Option<DiskBlock>)> {
        let pages = self.map().chain.pages(epoch, from.0, max);
        let (extents, next) = pages.ok_or_else(|| self.no_epoch(epoch))?;
        Ok((extents, next.map(DiskBlock)))
    }

    /// Releases an epoch whose checkpoint is sealed: slots that only it needs become free. Error:
    /// [`Error::NoEpoch`] if it is not in flight.
    pub fn release(&self, epoch: DiskEpoch) -> Result<()> {
        if !self.map_mut().chain.release(epoch) {
            return Err(self.no_epoch(epoch));
        }
        self.fold();
        Ok(())
    }

    /// Gives back an epoch whose checkpoint failed: the next cut covers its blocks too, with their
    /// content at the next cut. Error: [`Error::NoEpoch`] if it is not in flight.
    pub fn give_back(&self, epoch: DiskEpoch) -> Result<()> {
        if !self.map_mut().chain.give_back(epoch) {
            return Err(self.no_epoch(epoch));
        }
        self.fold();
        Ok(())
    }

    /// Releases all epochs in flight.
    pub fn release_all(&self) {
        let mut state = self.map_mut();
        for epoch in state.chain.in_flight() {
            state.chain.release(epoch);
        }
        drop(state);
        self.fold();
    }

    fn fold(&self) {
        loop {
            let mut state = self.map_mut();
            let State { chain, slots, .. } = &mut *state;
            if !chain.fold(FOLD_STEP, &mut |slot, n| slots.supersede(slot, n)) {
                return;
            }
        }
    }

    fn no_epoch(&self, epoch: DiskEpoch) -> Error {
        Error::NoEpoch { object: self.name.clone(), epoch }
    }

    /// Fills `buf` with the content of consecutive slots from `slot` on. The length of `buf` is a
    /// multiple of 4096 bytes. Error: [`Error::Io`] if the data file cannot be read.
    pub fn read_slot(&self, slot: Slot, buf: &mut [u8]) -> Result<()> {
        self.data.read(u64::from(slot.0) * BLOCK, buf)
    }

    /// Returns the first block at or after `from` that the overlay holds, and the number of
    /// consecutive blocks from it on that the overlay holds. Returns `None` if there is none.
    pub fn next(&self, from: DiskBlock) -> Option<(DiskBlock, u64)> {
        self.map().chain.next(from.0).map(|(block, blocks)| (DiskBlock(block), blocks))
    }

    /// Empties the overlay, after the caller has written its content elsewhere, and closes it.
    /// Errors: [`Error::Broken`]; [`Error::Io`] if its files cannot be written.
    pub fn clear(self) -> Result<()> {
        self.require_sound()?;
        let last = self.map().recent.last();
        locked(&self.syncing).journal.clear(last)?;
        self.data.set_len(0)
    }

    /// Returns the sizes and counters of the overlay. Does not wait for a sync that is under way.
    pub fn size(&self) -> Size {
        let syncs = self.syncs.load(Ordering::Relaxed);
        let state = self.map();
        Size {
            data_bytes: u64::from(state.slots.tail()) * BLOCK,
            free_bytes: state.slots.free() * BLOCK,
            entries: state.chain.entries(),
            dirty_blocks: state.chain.dirty_blocks(),
            in_flight: state.chain.in_flight().len(),
            syncs,
        }
    }
}

/// The caller's function that reads the content below the overlay: it fills the buffer from this
/// byte offset of the disk on. Its error fails the write.
pub type ReadBelow<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<()>;

fn extents_continue(place: BlockPlace, blocks: u64, next: BlockPlace) -> bool {
    crate::extents::ExtentValue::continues(place, blocks, next)
}
