//! The overlay: the blocks written to a disk since its start, cut into epochs.
//!
//! ```text
//!   DIR/data       slots of 4 KiB
//!   DIR/journal    block -> slot or zero, appended by each sync
//!
//!   write ──▶ same block, same epoch? ──yes──▶ in place
//!                    │no
//!                    ▼
//!              a free slot ──data written──▶ map, and a record that waits ──sync──▶ data synced, then the journal
//! ```
//!
//! Invariants:
//! 1. What was written before a sync began is there after it succeeded, whatever happens. So a record reaches the journal
//!    only after the data that it names is durable, and a slot is used again only once no journal can
//!    name it.
//! 2. A block's content at the cut of an epoch in flight is not touched until that epoch is released or given back.
//! 3. After a sync that failed for another reason than want of space nothing more is accepted: the kernel may have
//!    dropped what was written.
//! 4. A slot that somebody reads is not taken for another block: readers hold the map, which is for what needs no
//!    waiting, or have entered a generation of slots.
//!
//! Memory: 50 bytes at most for each extent (blocks written side by side are one), in each epoch in
//! flight and in the settled map, and 32 bytes for each record that waits for a sync, of which
//! there are at most [`WAITING_MAX`].

mod chain;
pub(crate) mod fuzzing;
mod journal;
pub(crate) mod medium;
mod slots;
#[cfg(test)]
mod tests;

pub use chain::{EPOCHS_MAX, Extent};

use crate::extents::ExtentMap;
use crate::{BLOCK, BLOCK_BYTES, DiskBlock, DiskEpoch, Error, Result, Slot};
use chain::{Chain, Place};
use journal::{Journal, Record};
use keyframe_locks::IgnorePoison;
pub use medium::Lasting;
use medium::{Folder, Medium, RealFolder, read_or_zero};
use slots::Slots;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

const DATA: &str = "data";
/// How many records may wait for a sync; the write that reaches it syncs.
pub const WAITING_MAX: usize = 1 << 17;
/// How many extents are folded while the map is held: some 100 µs.
const FOLD_STEP: usize = 512;

/// An overlay, open in this process alone.
pub struct Overlay {
    name: String,
    data: Arc<dyn Medium>,
    disk_bytes: u64,
    state: RwLock<State>,
    /// Held by who writes, so that a cut never falls into a write.
    writing: Mutex<()>,
    syncing: Mutex<Syncing>,
    /// The number of the last sync asked for.
    asked: AtomicU64,
    data_dirty: AtomicBool,
    broken: AtomicBool,
}

struct State {
    chain: Chain,
    slots: Slots,
    /// For the next sync.
    records: Vec<Record>,
}

struct Syncing {
    journal: Journal,
    /// The newest sync asked for that has been covered.
    done: u64,
    count: u64,
}

/// How large an overlay is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Bytes of the data file.
    pub data_bytes: u64,
    /// Bytes in it that will be used again first.
    pub free_bytes: u64,
    /// Entries of all maps.
    pub entries: usize,
    /// Blocks written since the last cut.
    pub dirty_blocks: u64,
    /// Epochs in flight.
    pub in_flight: usize,
    /// Syncs since it was opened.
    pub syncs: u64,
}

/// Parts of a buffer that the overlay does not hold: start and length in bytes.
pub type Missing = Vec<(usize, usize)>;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

impl Overlay {
    /// Opens the overlay in `dir`, or begins one, for a disk of `disk_bytes`. Everything in it
    /// counts as written since the last cut.
    pub fn create(dir: &Path, disk_bytes: u64, lasting: Lasting) -> Result<Self> {
        Self::on(Arc::new(RealFolder::create(dir, lasting)?), Some(disk_bytes))
    }

    /// Opens an overlay that is there.
    pub fn open(dir: &Path) -> Result<Self> {
        if !dir.join("journal").exists() {
            return Err(Error::refused(
                dir.display().to_string(),
                "there is no overlay here",
                "name the directory of one",
            ));
        }
        Self::on(Arc::new(RealFolder::open(dir, Lasting::Durable)?), None)
    }

    #[expect(clippy::needless_pass_by_value, reason = "the journal keeps it")]
    pub(crate) fn on(folder: Arc<dyn Folder>, disk_bytes: Option<u64>) -> Result<Self> {
        let name = folder.name();
        let data = folder.open(DATA)?;
        let (journal, recovered) = Journal::open(Arc::clone(&folder), disk_bytes)?;
        let used: Vec<(u32, u32)> = recovered
            .map
            .iter()
            .filter_map(|(_, n, place)| match place {
                Place::Slot(slot) => Some((slot, n as u32)),
                Place::Zero => None,
            })
            .collect();
        disjoint(&name, &used)?;
        let tail = used.iter().map(|(slot, n)| slot + n).max().unwrap_or(0);
        if data.len_bytes()? < u64::from(tail) * BLOCK {
            return Err(Error::damaged(
                format!("{name}/{DATA}"),
                format!("its journal names slots up to {tail}, it is shorter"),
            ));
        }
        let state = State {
            chain: Chain::recovered(recovered.map),
            slots: Slots::recovered(tail, used.into_iter()),
            records: Vec::new(),
        };
        Ok(Self {
            name,
            data,
            disk_bytes: recovered.disk_bytes,
            state: RwLock::new(state),
            writing: Mutex::new(()),
            syncing: Mutex::new(Syncing { journal, done: 0, count: 0 }),
            asked: AtomicU64::new(0),
            // What was read back may be in memory alone.
            data_dirty: AtomicBool::new(true),
            broken: AtomicBool::new(false),
        })
    }

    /// Bytes of the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    fn map(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().ignore_poison()
    }

    fn map_alone(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().ignore_poison()
    }

    fn sound(&self) -> Result<()> {
        if self.broken.load(Ordering::Acquire) {
            return Err(Error::Broken { object: self.name.clone() });
        }
        Ok(())
    }

    /// Fills `buf` with what the overlay holds from byte `offset` on; the other parts are returned,
    /// unchanged.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<Missing> {
        let mut missing = Missing::new();
        let (mut zero, mut slots) = (Missing::new(), Vec::new());
        let entered = {
            let mut state = self.map_alone();
            state.chain.parts(offset, buf.len(), &mut |start, len, place| match place {
                None => missing.push((start, len)),
                Some((Place::Zero, _)) => zero.push((start, len)),
                Some((Place::Slot(slot), within)) => {
                    slots.push((start, len, u64::from(slot) * BLOCK + within));
                }
            });
            state.slots.enter()
        };
        for (start, len) in zero {
            buf[start..start + len].fill(0);
        }
        // Without the map: it may take waiting for a device.
        let mut parts = slots.into_iter();
        let result =
            parts.try_for_each(|(start, len, at)| self.data.read(at, &mut buf[start..start + len]));
        self.map_alone().slots.leave(entered);
        result.map(|()| missing)
    }

    /// The same, unless it would take waiting for a device: then `None`, and `buf` holds anything.
    pub fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<Option<Missing>> {
        let (mut missing, mut result) = (Missing::new(), Ok(true));
        let state = self.map();
        state.chain.parts(offset, buf.len(), &mut |start, len, place| match place {
            None => missing.push((start, len)),
            Some((Place::Zero, _)) => buf[start..start + len].fill(0),
            Some((Place::Slot(slot), within)) if matches!(result, Ok(true)) => {
                let at = u64::from(slot) * BLOCK + within;
                result = self.data.read_now(at, &mut buf[start..start + len]);
            }
            Some((Place::Slot(_), _)) => {}
        });
        Ok(result?.then_some(missing))
    }

    /// Shows, of the blocks of a range, what the overlay knows: `Some(true)` zero, `Some(false)`
    /// data, `None` not here.
    pub fn status(
        &self,
        block: DiskBlock,
        blocks: u64,
        show: &mut dyn FnMut(DiskBlock, u64, Option<bool>),
    ) {
        let state = self.map();
        state.chain.each(block.0, blocks, &mut |s, n, place| {
            show(DiskBlock(s), n, place.map(|place| place == Place::Zero));
        });
    }

    /// Writes `data` from byte `offset` on. Of a block that is written in part the rest comes from
    /// `beneath`, unless the overlay holds it.
    pub fn write(&self, offset: u64, data: &[u8], beneath: Beneath<'_>) -> Result<()> {
        let alone = locked(&self.writing);
        self.sound()?;
        let (mut at, mut rest) = (offset, data);
        while !rest.is_empty() {
            let within = (at % BLOCK) as usize;
            let part = if within > 0 || rest.len() < BLOCK_BYTES {
                let part = rest.len().min(BLOCK_BYTES - within);
                self.write_part(at / BLOCK, within, &rest[..part], beneath)?;
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
        beneath: Beneath<'_>,
    ) -> Result<()> {
        let mut here = None;
        self.map().chain.each_current(block, 1, &mut |_, _, place| here = place);
        if let Some(Place::Slot(slot)) = here {
            return self.put(slot, within, part);
        }
        let mut whole = [0u8; BLOCK_BYTES];
        for (start, len) in self.read(block * BLOCK, &mut whole)? {
            beneath(block * BLOCK + start as u64, &mut whole[start..start + len])?;
        }
        whole[within..within + part.len()].copy_from_slice(part);
        self.write_whole(block, &whole)
    }

    /// Whole blocks. Where it fails half way some of them are written, as on any disk.
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
                Some(Place::Slot(slot)) => self.put(slot, 0, part)?,
                Some(Place::Zero) | None => self.write_fresh(s, part)?,
            }
        }
        Ok(())
    }

    fn write_fresh(&self, block: u64, data: &[u8]) -> Result<()> {
        let (mut block, mut rest) = (block, data);
        while !rest.is_empty() {
            let taken = self.map_alone().slots.take((rest.len() / BLOCK_BYTES) as u64);
            let Some((slot, count)) = taken else {
                let problem =
                    "its data file has reached 16 TiB; commit the disk, and begin anew".into();
                return Err(Error::Limit { object: self.name.clone(), problem });
            };
            let (part, behind) = rest.split_at(count as usize * BLOCK_BYTES);
            if let Err(error) = self.put(slot, 0, part) {
                self.map_alone().slots.untake(slot, count);
                return Err(error);
            }
            self.publish(block, count.into(), Place::Slot(slot));
            block += u64::from(count);
            rest = behind;
        }
        Ok(())
    }

    fn put(&self, slot: u32, within: usize, bytes: &[u8]) -> Result<()> {
        let written = self.data.write(u64::from(slot) * BLOCK + within as u64, bytes);
        // Also of a write that failed a part may be there.
        self.data_dirty.store(true, Ordering::Release);
        written
    }

    fn publish(&self, block: u64, blocks: u64, place: Place) {
        let mut state = self.map_alone();
        let State { chain, slots, records } = &mut *state;
        chain.write(block, blocks, place, &mut |slot, n| slots.supersede(slot, n));
        match records.last_mut() {
            Some(last)
                if last.block + last.blocks == block
                    && extents_continue(last.place, last.blocks, place) =>
            {
                last.blocks += blocks;
            }
            _ => records.push(Record { block, blocks, place }),
        }
    }

    /// Makes `len` bytes from `offset` on zero.
    pub fn zero(&self, offset: u64, len: u64, beneath: Beneath<'_>) -> Result<()> {
        let alone = locked(&self.writing);
        self.sound()?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let within = at % BLOCK;
            let part = if within > 0 || end - at < BLOCK {
                let part = (end - at).min(BLOCK - within);
                self.write_part(
                    at / BLOCK,
                    within as usize,
                    &[0; BLOCK_BYTES][..part as usize],
                    beneath,
                )?;
                part
            } else {
                let blocks = (end - at) / BLOCK;
                self.publish(at / BLOCK, blocks, Place::Zero);
                blocks * BLOCK
            };
            at += part;
        }
        drop(alone);
        self.relieve()
    }

    /// Whole blocks in the range are no longer needed: they become zero. The ends of a range are
    /// left alone.
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let alone = locked(&self.writing);
        self.sound()?;
        let last = offset + len;
        // The disk's last block may be a part of one.
        let end = if last == self.disk_bytes { last.div_ceil(BLOCK) } else { last / BLOCK };
        let first = offset.div_ceil(BLOCK);
        if first < end {
            self.publish(first, end - first, Place::Zero);
        }
        drop(alone);
        self.relieve()
    }

    /// Keeps the records that wait few.
    fn relieve(&self) -> Result<()> {
        if self.map().records.len() >= WAITING_MAX { self.sync() } else { Ok(()) }
    }

    /// Makes everything written durable: the data, then the journal.
    pub fn sync(&self) -> Result<()> {
        let asked = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let mut syncing = locked(&self.syncing);
        if syncing.done >= asked {
            // One that began after this was asked for has covered it.
            return Ok(());
        }
        self.sound()?;
        let covered = self.asked.load(Ordering::Acquire);
        let (records, waiting) = {
            let mut state = self.map_alone();
            (std::mem::take(&mut state.records), state.slots.take_waiting())
        };
        if self.data_dirty.swap(false, Ordering::AcqRel)
            && let Err(error) = self.data.sync()
        {
            return Err(self.break_down(error));
        }
        if !records.is_empty()
            && let Err(failed) = syncing.journal.append(&records)
        {
            if !failed.retry {
                return Err(self.break_down(failed.error));
            }
            let mut state = self.map_alone();
            state.records.splice(0..0, records);
            state.slots.wait_again(waiting);
            return Err(failed.error);
        }
        self.map_alone().slots.set_free(waiting);
        syncing.done = covered;
        syncing.count += 1;
        if syncing.journal.is_long()
            && let Err(failed) = syncing.journal.rewrite()
            && !failed.retry
        {
            return Err(self.break_down(failed.error));
        }
        Ok(())
    }

    fn break_down(&self, error: Error) -> Error {
        self.broken.store(true, Ordering::Release);
        error
    }

    /// Ends the current epoch, in constant time: what was written since the cut before is what
    /// [`Self::pages`] gives.
    pub fn cut(&self) -> Result<DiskEpoch> {
        let _alone = locked(&self.writing);
        self.sound()?;
        self.map_alone().chain.cut().ok_or_else(|| {
            let problem =
                format!("{EPOCHS_MAX} epochs are in flight; release or give back the oldest first");
            Error::Limit { object: self.name.clone(), problem }
        })
    }

    /// What an epoch in flight covers, from `from` on: rising extents, some `max` of them, and the
    /// block to go on from.
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

    /// The epoch's checkpoint is sealed: slots that only it needs are used again.
    pub fn release(&self, epoch: DiskEpoch) -> Result<()> {
        if !self.map_alone().chain.release(epoch) {
            return Err(self.no_epoch(epoch));
        }
        self.fold();
        Ok(())
    }

    /// The epoch's checkpoint failed: the next cut covers its blocks too, with what they hold by
    /// then.
    pub fn give_back(&self, epoch: DiskEpoch) -> Result<()> {
        if !self.map_alone().chain.give_back(epoch) {
            return Err(self.no_epoch(epoch));
        }
        self.fold();
        Ok(())
    }

    /// Nobody reads the epochs in flight any more.
    pub fn release_all(&self) {
        let mut state = self.map_alone();
        for epoch in state.chain.in_flight() {
            state.chain.release(epoch);
        }
        drop(state);
        self.fold();
    }

    fn fold(&self) {
        loop {
            let mut state = self.map_alone();
            let State { chain, slots, .. } = &mut *state;
            if !chain.fold(FOLD_STEP, &mut |slot, n| slots.supersede(slot, n)) {
                return;
            }
        }
    }

    fn no_epoch(&self, epoch: DiskEpoch) -> Error {
        Error::NoEpoch { object: self.name.clone(), epoch }
    }

    /// The content of `buf.len() / 4096` slots from `slot` on.
    pub fn read_slot(&self, slot: Slot, buf: &mut [u8]) -> Result<()> {
        self.data.read(u64::from(slot.0) * BLOCK, buf)
    }

    /// The first range of blocks, at or behind `from`, that the overlay holds.
    pub fn next(&self, from: DiskBlock) -> Option<(DiskBlock, u64)> {
        self.map().chain.next(from.0).map(|(block, blocks)| (DiskBlock(block), blocks))
    }

    /// Empties it, for who has written all of it elsewhere.
    pub fn clear(self) -> Result<()> {
        self.sound()?;
        locked(&self.syncing).journal.clear()?;
        self.data.set_len(0)
    }

    /// How large it is.
    pub fn size(&self) -> Size {
        let syncs = locked(&self.syncing).count;
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

/// Reads what lies beneath the overlay, from this byte on.
pub type Beneath<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<()>;

fn extents_continue(place: Place, blocks: u64, next: Place) -> bool {
    crate::extents::Piece::continues(place, blocks, next)
}

/// No slot belongs to two blocks.
fn disjoint(name: &str, used: &[(u32, u32)]) -> Result<()> {
    let mut seen = ExtentMap::default();
    let mut twice = None;
    for &(slot, n) in used {
        seen.insert(slot.into(), n.into(), (), &mut |slot, _, ()| twice = Some(slot));
    }
    match twice {
        Some(slot) => Err(Error::damaged(
            format!("{name}/journal"),
            format!("slot {slot} belongs to two blocks"),
        )),
        None => Ok(()),
    }
}

/// The data file of an overlay that another process serves, to read the slots of an epoch in
/// flight.
#[derive(Debug)]
pub struct SlotFile {
    file: File,
    name: String,
}

impl SlotFile {
    /// Opens the data file of the overlay in `dir`.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(DATA);
        let name = path.display().to_string();
        Ok(Self { file: File::open(path).map_err(Error::io(&name, "open"))?, name })
    }

    /// Fills `buf`, a multiple of 4096 bytes, with slots from `slot` on.
    pub fn read(&self, slot: Slot, buf: &mut [u8]) -> Result<()> {
        let at = u64::from(slot.0) * BLOCK;
        read_or_zero(&self.file, at, buf)
            .map_err(Error::io(format!("{} at {at}", self.name), "read"))
    }
}
