//! The served disks of a session: cut in each pause, their blocks handed to the store after it.
//!
//! ```text
//!   engine     begin: sync ─▶ before_stop: sync, pause ─▶ stop ─▶ cut ─▶ ... ─▶ settled ─▶ cont ─▶ resumed
//!   encoder                                        the label's epochs ◀─────────┘  ─▶ blocks ─▶ seal
//!   engine     captured ─▶ in flight ─▶ sealed: released      failed: it and all after it given back
//! ```
//!
//! Invariants: an epoch that was cut is in flight until its checkpoint is sealed or has failed;
//! between `before_stop` and `resumed` the encoder asks the server nothing, so that
//! the pause does not wait for it.

use crate::error::{DiskError, Result};
use crate::event::{DiskEvent, DiskStep, SharedDiskEventSink, tell_failed};
use keyframe_capture::BoxError;
use keyframe_disk::{DiskBlock, DiskEpoch, Extent, ServerEvent, ServerObserver};
use keyframe_locks::IgnorePoison;
use keyframe_store::{DiskMeta, Meta, Run, Store};
use keyframe_units::{CheckpointId, PAGE_BYTES, Page, error_chain};
use keyframe_vm_disks::ServedDisks;
use keyframe_vm_disks::base_image::require_unchanged;
use keyframe_vm_disks::staged::StagedDisks;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// The number of slots that one read returns: 1 MiB.
const SLOTS: u64 = 256;
/// The longest time for which the encoder waits until a pause ends. It then asks the server in the
/// pause.
const PAUSE_WAIT: Duration = Duration::from_secs(10);

/// The epochs that a capture has cut, of each disk: known once its pause has begun.
pub type ServedCut = Arc<OnceLock<Vec<DiskEpoch>>>;

struct Shared {
    state: Mutex<State>,
    idle: Condvar,
    /// The reason why no process serves the disks.
    outage: Mutex<Option<String>>,
}

struct State {
    served: Option<ServedDisks>,
    pausing: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    fn ask<T>(
        &self,
        ask: impl FnOnce(&mut keyframe_disk::Disks) -> keyframe_disk::Result<T>,
    ) -> Result<T, BoxError> {
        let mut state = self.lock();
        let served = state.served.as_mut().ok_or(DiskError::NotServed)?;
        Ok(ask(&mut served.disks)?)
    }

    /// The same, for one who can wait until no pause is under way.
    fn ask_idle<T>(
        &self,
        ask: impl FnOnce(&mut keyframe_disk::Disks) -> keyframe_disk::Result<T>,
    ) -> Result<T, BoxError> {
        let waited = self.idle.wait_timeout_while(self.lock(), PAUSE_WAIT, |state| state.pausing);
        let (mut state, _) = waited.ignore_poison();
        let served = state.served.as_mut().ok_or(DiskError::NotServed)?;
        Ok(ask(&mut served.disks)?)
    }
}

/// Captures the disks that Keyframe's server serves, for the engine's thread. It sends the server
/// the requests of each checkpoint.
pub struct ServedDiskCapture {
    shared: Arc<Shared>,
    metas: Vec<DiskMeta>,
    pause_limit: Duration,
    events: SharedDiskEventSink,
    current: Option<ServedCut>,
    in_flight: BTreeMap<u64, Vec<DiskEpoch>>,
    /// True once the user was told that another program has changed an image beneath a disk.
    has_told_of_image: bool,
}

/// Reads the captured blocks of served disks, for the encoder's thread.
#[derive(Clone)]
pub struct ServedDiskReader(Arc<Shared>);

impl ServedDiskCapture {
    /// Makes the capture of served disks. The disks' server ends a pause after `pause_limit`.
    /// `events` learns when the server was started again, and when that failed.
    pub fn new(served: ServedDisks, pause_limit: Duration, events: SharedDiskEventSink) -> Self {
        let metas = served.metas.clone();
        let state = Mutex::new(State { served: Some(served), pausing: false });
        let shared = Arc::new(Shared { state, idle: Condvar::new(), outage: Mutex::default() });
        if let Some(served) = &shared.lock().served {
            served.disks.observe(observer(&shared, &events));
        }
        let (current, in_flight) = (None, BTreeMap::new());
        let has_told_of_image = false;
        Self { shared, metas, pause_limit, events, current, in_flight, has_told_of_image }
    }

    /// Returns the descriptions of the disks.
    pub fn metas(&self) -> &[DiskMeta] {
        &self.metas
    }

    /// Adds `disks`, which QEMU has opened and no checkpoint holds, after the served ones.
    pub fn leave_out(&mut self, disks: Vec<DiskMeta>) {
        self.metas.extend(disks);
    }

    /// Returns the reader of the captured blocks, for the encoder.
    pub fn for_sink(&self) -> ServedDiskReader {
        ServedDiskReader(Arc::clone(&self.shared))
    }

    /// Drops the record of what was written until now, while the guest runs: the next cut holds the
    /// writes from here on. Error: the server of the disks has ended or does not answer.
    pub fn begin_anew(&mut self) -> Result<(), BoxError> {
        self.shared.ask(|disks| {
            let epochs = disks.cut()?;
            disks.release(&epochs)
        })
    }

    /// Returns the number of bytes written since the last cut. Error: the server of the disks has
    /// ended or does not answer.
    pub fn written_bytes(&self) -> Result<u64, BoxError> {
        let stats = self.shared.ask(keyframe_disk::Disks::stats)?;
        Ok(stats.disks.iter().map(|disk| disk.dirty_blocks * PAGE_BYTES as u64).sum())
    }

    /// Has the server answer requests on `core`, on which the only guest runs, so that an answer
    /// comes before the guest runs on. Error: the server of the disks has ended or does not answer.
    pub fn answer_on(&self, core: u32) -> Result<(), BoxError> {
        self.shared.ask(|disks| disks.answer_on(core))
    }

    /// Returns the reason why no process serves the disks, if one could not be started at once;
    /// `None` if the disks are served.
    pub fn outage(&self) -> Option<String> {
        self.shared.outage.lock().ignore_poison().clone()
    }

    /// Begins a capture: the server syncs dirty blocks while the guest runs. Error: the server of
    /// the disks has ended or does not answer.
    pub fn begin(&mut self) -> Result<ServedCut, BoxError> {
        self.shared.ask(keyframe_disk::Disks::prepare)?;
        let cut = ServedCut::default();
        self.current = Some(Arc::clone(&cut));
        Ok(cut)
    }

    /// Prepares the disks just before the VM is stopped: copies what is still dirty, and has the
    /// server acknowledge flushes at once. Error: the server of the disks has ended or does not
    /// answer.
    pub fn before_stop(&mut self) -> Result<(), BoxError> {
        let limit = self.pause_limit;
        self.shared.lock().pausing = true;
        // What the last rounds of copying left dirty.
        let ready = self.shared.ask(|disks| disks.prepare().and_then(|()| disks.pause(limit)));
        if ready.is_err() {
            self.resumed();
        }
        ready
    }

    /// Has the server cut the disks, while the VM is paused. Returns without waiting for the
    /// server, which cuts while the engine saves the device state. Error: the server has ended.
    pub fn cut(&mut self) -> Result<(), BoxError> {
        if self.current.is_none() {
            return Ok(());
        }
        self.shared.ask(keyframe_disk::Disks::begin_cut)
    }

    /// Ends the disks' part of a pause, before the VM runs: checks that the disks are cut and that
    /// all flushes that the guest was told are complete are durable. Error: the server of the disks
    /// has ended or does not answer.
    pub fn settled(&mut self) -> Result<(), BoxError> {
        let mut epochs = None;
        let settled = self.shared.ask(|disks| {
            let settled = match disks.finish_cut() {
                Some((cut, settled)) => {
                    epochs = Some(cut);
                    settled
                }
                None => disks.settled(),
            };
            // Once more: space may have come free.
            settled.or_else(|_| disks.settled())
        });
        if let (Some(epochs), Some(current)) = (epochs, &self.current)
            && let Err(second) = current.set(epochs?)
        {
            // No checkpoint would hold the blocks of the second cut.
            self.shared.ask(|disks| disks.give_back(&second))?;
            return Err(DiskError::CutTwice.into());
        }
        settled
    }

    /// Tells the server that the VM runs again, or was never stopped.
    pub fn resumed(&mut self) {
        // If the server does not answer, the next step that needs it fails.
        let _ = self.shared.ask(keyframe_disk::Disks::resumed);
        self.shared.lock().pausing = false;
        self.shared.idle.notify_all();
    }

    /// Records the end of a capture: it has number `seq`, or failed if `seq` is `None`.
    pub fn captured(&mut self, seq: Option<u64>) {
        let Some(epochs) = self.current.take().and_then(|cut| cut.get().cloned()) else { return };
        match seq {
            Some(seq) => {
                self.in_flight.insert(seq, epochs);
            }
            None => self.give_back(&epochs),
        }
    }

    /// Tells the server that the checkpoint of capture `seq` is sealed.
    pub fn sealed(&mut self, seq: u64) {
        if let Some(epochs) = self.in_flight.remove(&seq) {
            let released = self.shared.ask_idle(|disks| disks.release(&epochs));
            tell_failed(&*self.events, DiskStep::ReleaseBlocks, released);
        }
        self.look_at_images();
    }

    /// Tells once that another program has changed an image beneath the disks: no checkpoint of the
    /// run can be restored over it.
    fn look_at_images(&mut self) {
        if self.has_told_of_image {
            return;
        }
        let mut ours = self.metas.iter().filter(|disk| !disk.left_out);
        let unchanged = ours.try_for_each(|disk| require_unchanged(&disk.base));
        self.has_told_of_image = unchanged.is_err();
        tell_failed(&*self.events, DiskStep::KeepImages, unchanged);
    }

    /// Tells the server that the checkpoints of the captures `lost` are lost: the next cut covers
    /// their blocks again.
    pub fn failed(&mut self, lost: &[u64]) {
        for seq in lost {
            if let Some(epochs) = self.in_flight.remove(seq) {
                self.give_back(&epochs);
            }
        }
    }

    /// Opens the disks of checkpoint `id` beside those that are served, which the VM is to go back
    /// to. Error: the server of the disks has ended or does not answer.
    pub fn stage(&mut self, store: &Store, id: CheckpointId, meta: &Meta) -> Result<()> {
        self.served(|served| served.stage(store, id, meta))
    }

    /// Returns what another process needs to end a rollback to checkpoint `id`; `None` if no disks
    /// are staged.
    pub fn staged(&self, id: CheckpointId) -> Option<StagedDisks> {
        self.shared.lock().served.as_ref().and_then(|served| served.staged(id))
    }

    /// Exchanges the served disks with the staged ones. The VM is paused, and no request is in
    /// flight. Error: the server of the disks has ended or does not answer.
    pub fn exchange(&mut self) -> Result<(), BoxError> {
        self.shared.ask(keyframe_disk::Disks::exchange)
    }

    /// Records that the disks' content comes from checkpoint `id` from now on. Error: the server of
    /// the disks has ended or does not answer.
    pub fn came_from(&mut self, id: CheckpointId) -> Result<()> {
        self.served(|served| served.describe(id))
    }

    /// Removes the disks that are not served. Error: the server of the disks has ended or does not
    /// answer.
    pub fn dismiss(&mut self) -> Result<()> {
        self.served(ServedDisks::dismiss)
    }

    fn served<T>(
        &mut self,
        ask: impl FnOnce(&mut ServedDisks) -> Result<T, keyframe_vm_disks::Error>,
    ) -> Result<T> {
        let mut state = self.shared.lock();
        Ok(ask(state.served.as_mut().ok_or(DiskError::NotServed)?)?)
    }

    fn give_back(&self, epochs: &[DiskEpoch]) {
        let given = self.shared.ask_idle(|disks| disks.give_back(epochs));
        tell_failed(&*self.events, DiskStep::GiveBackBlocks, given);
    }

    /// Ends the server after the VMs have ended. Returns the directory of the guests' writes, if
    /// there are any. Error: the server of the disks has ended or does not answer.
    pub fn end(self) -> Result<Option<PathBuf>> {
        let served = self.shared.lock().served.take();
        Ok(served.map_or(Ok(None), |served| served.end(true))?)
    }

    /// Leaves the server running with the VMs, until they end. Returns the directory of the guests'
    /// writes; `None` if the server has ended.
    pub fn keep(self) -> Option<PathBuf> {
        let served = self.shared.lock().served.take();
        served.map(|served| served.directory.path().to_owned())
    }
}

/// Notes and tells what happens to the process that serves the disks.
fn observer(shared: &Arc<Shared>, events: &SharedDiskEventSink) -> ServerObserver {
    let (shared, events) = (Arc::downgrade(shared), Arc::clone(events));
    Arc::new(move |event| {
        let Some(shared) = shared.upgrade() else { return };
        match event {
            ServerEvent::Restarted { pid, .. } => {
                *shared.outage.lock().ignore_poison() = None;
                events.event(&DiskEvent::ServerRestarted { pid });
            }
            ServerEvent::NotRestarted { error, .. } => {
                let text = error_chain(&error);
                let before = shared.outage.lock().ignore_poison().replace(text.clone());
                if before.is_none_or(|before| before != text) {
                    let error = Arc::new(error);
                    events.event(&DiskEvent::ServerNotRestarted { error });
                }
            }
        }
    })
}

/// Receives the blocks of disks: a checkpoint in a store, or the connection to a standby.
pub trait BlockSink {
    /// Puts the content of block number `block` of disk number `disk`. Error: the store or the
    /// connection cannot be written.
    fn put_block(&mut self, disk: usize, block: u64, content: &Page) -> Result<(), BoxError>;
    /// Puts `blocks` blocks of zeros of disk number `disk`, from block number `block` on. Error:
    /// the store or the connection cannot be written.
    fn put_zero_blocks(&mut self, disk: usize, block: u64, blocks: u64) -> Result<(), BoxError>;
}

impl BlockSink for Run {
    fn put_block(&mut self, disk: usize, block: u64, content: &Page) -> Result<(), BoxError> {
        Ok(Self::put_block(self, disk, block, content).map(drop)?)
    }

    fn put_zero_blocks(&mut self, disk: usize, block: u64, blocks: u64) -> Result<(), BoxError> {
        Ok(Self::put_zero_blocks(self, disk, block, blocks).map(drop)?)
    }
}

impl ServedDiskReader {
    /// Puts the blocks that `cut` covers into the checkpoint in progress of `run`. Calls `fault`
    /// before each batch, for tests; its error fails the write. Error: the server of the disks has
    /// ended or does not answer.
    pub fn put(
        &self,
        cut: &ServedCut,
        run: &mut impl BlockSink,
        fault: &mut dyn FnMut() -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let epochs = cut.get().ok_or(DiskError::NotCut)?;
        let mut buffer = vec![0; SLOTS as usize * PAGE_BYTES];
        for (index, epoch) in epochs.iter().enumerate() {
            let slots = self.0.ask_idle(|disks| disks.slot_file(index))?;
            let mut from = Some(DiskBlock(0));
            while let Some(at) = from {
                let (extents, next) =
                    self.0.ask_idle(|disks| disks.pages_from(index, *epoch, at))?;
                for extent in extents {
                    put_extent(index, extent, &slots, run, &mut buffer, fault)?;
                }
                from = next;
            }
        }
        // A server that was started meanwhile may have written other blocks to these slots.
        self.0.ask_idle(|disks| disks.require_current(epochs))
    }
}

fn put_extent(
    disk: usize,
    extent: Extent,
    slots: &keyframe_disk::SlotFile,
    run: &mut impl BlockSink,
    buffer: &mut [u8],
    fault: &mut dyn FnMut() -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let Extent { block, blocks, slot } = extent;
    let Some(slot) = slot else {
        run.put_zero_blocks(disk, block.0, blocks)?;
        return Ok(());
    };
    let mut done = 0;
    while done < blocks {
        let part = (blocks - done).min(SLOTS);
        let bytes = &mut buffer[..part as usize * PAGE_BYTES];
        let from =
            u32::try_from(u64::from(slot.0) + done).map_err(|_| DiskError::SlotBeyondOverlay)?;
        slots.read(keyframe_disk::Slot(from), bytes)?;
        let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
        for (at, page) in (block.0 + done..).zip(pages) {
            fault()?;
            run.put_block(disk, at, page)?;
        }
        done += part;
    }
    Ok(())
}
