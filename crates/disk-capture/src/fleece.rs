//! Disks that are read through QEMU after each pause, as they were in it.
//!
//! ```text
//!   begin: scratch files below nodes of ours ─▶ stop ─▶ bitmaps swapped, copy-before-write begins ─▶ cont ─▶ exports
//!   encoder: the whole disk, or what the frozen bitmap says, over NBD ─▶ blocks
//!   read: exports, jobs, nodes go     sealed: the frozen bitmap goes     failed: it is merged into the present one
//! ```
//!
//! The first checkpoint has all that is allocated; what it does not have is zero, as its base is
//! blank. Each further one has what was written since. One capture's disks are read at a time, as
//! QEMU has one such job for each disk: the next waits.
//!
//! QEMU goes back to no internal snapshot (`loadvm`) of a disk that has a bitmap, and leaves the VM
//! paused. So a disk with such snapshots has none: each of its checkpoints is complete.
//!
//! After an external snapshot, a mirror, a commit or a change of a disk's size by another client,
//! the next checkpoint is complete. So it is if a disk was unplugged and plugged in again with
//! another node between two checkpoints. After a change of the size, and if a disk was unplugged or
//! plugged in again, it is the first of another run.
//!
//! Invariants: a bitmap is dropped only once the checkpoint that has its blocks is sealed; with no
//! complete checkpoint sealed or under way, the next one is complete.

use crate::error::{DiskError, Result};
use crate::event::{DiskStep, SharedDiskEventSink, tell_failed};
use crate::qemu_disk::{DiskChanges, OtherImages, QemuDisk, QemuDisks, qemu, require_same};
use keyframe_capture::BoxError;
use keyframe_disk::nbd::client::Client;
use keyframe_locks::IgnorePoison;
use keyframe_qemu::fleece::{self, SnapshotPoint};
use keyframe_qemu::{Qmp, Vm};
use keyframe_store::{DiskMeta, Run, Store};
use keyframe_units::PAGE_BYTES;
use keyframe_vm_disks::overlay_directory::SCRATCH_PREFIX;
use keyframe_vmm::Vmm;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The longest time for which the disks of the previous capture may still be read.
const READ_TIMEOUT: Duration = Duration::from_secs(120);
/// The longest time in which QEMU removes Keyframe's nodes at the end of a run.
const DETACH_TIMEOUT: Duration = Duration::from_secs(10);
/// The free bytes that scratch files need at least: a guest's write fails if QEMU cannot save the
/// old content.
const FREE_BYTES_MIN: u64 = 1 << 30;
/// A capture is given up if less than this much space is left while it is read, or less than a
/// quarter of the disks.
const RELIEVED_BYTES: u64 = 256 << 20;

/// The shortest range that QEMU tells apart by allocation: the smallest cluster of an image.
const ALLOCATED_BYTES_MIN: u64 = 512;

/// A disk that can be read as it was.
#[derive(Debug)]
struct Export {
    disk: usize,
    name: String,
    /// Until it is read.
    reader: Mutex<Option<Client>>,
    /// The flags of the metadata context that mark a range to read.
    wanted: fn(u32) -> bool,
    /// True if the other ranges are zero and may have had another content at an earlier checkpoint.
    zeroes_rest: bool,
    disk_bytes: u64,
}

#[derive(Debug, Default)]
struct Reading {
    exports: OnceLock<Vec<Export>>,
    done: AtomicBool,
}

/// The blocks that a capture has cut. They can be read once the VMs run again.
#[derive(Clone, Debug)]
pub struct FleecedCut(Arc<Reading>);

/// A cut whose checkpoint is not sealed.
#[derive(Clone, Copy, Debug)]
struct Pending {
    frozen: Option<u64>,
    complete: bool,
}

/// The nodes and scratch files of a capture that QEMU has open.
struct Open {
    cut: FleecedCut,
    /// Set when it is cut.
    pending: Option<Pending>,
}

/// Captures disks whose images QEMU opens itself, for the engine's thread: dirty bitmaps record the
/// writes, and the encoder reads the blocks through a [`FleecedCut`].
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct FleecedDiskCapture {
    disks: QemuDisks,
    metas: Vec<DiskMeta>,
    /// The folder of the scratch files.
    folder: PathBuf,
    /// The socket of each member's NBD server.
    sockets: Vec<PathBuf>,
    /// The number of the bitmap that records writes now; `None` before the first cut.
    present: Option<u64>,
    next: u64,
    /// A complete checkpoint is sealed or under way.
    based: bool,
    /// True if a disk has internal snapshots, to which its user can go back.
    have_snapshots: bool,
    /// True if a checkpoint was captured in this run.
    has_captured: bool,
    /// What another client has changed of the disks and the present run does not have.
    changes: DiskChanges,
    open: Option<Open>,
    /// Whether the newest capture's scratch files are gone.
    has_closed: bool,
    in_flight: BTreeMap<u64, Pending>,
    events: SharedDiskEventSink,
}

impl FleecedDiskCapture {
    /// Prepares to read `disks` of `vms` from their QEMUs, which listen on sockets in `run_dir`.
    /// Error: QEMU refuses or does not answer, or a file cannot be made.
    pub fn new(
        (store, run_dir): (&Store, &Path),
        disks: Vec<QemuDisk>,
        vms: &mut [&mut Vm],
        events: SharedDiskEventSink,
    ) -> Result<Self> {
        let folder =
            store.local_folder().map_err(|e| DiskError::store(store.path(), e))?.join("disks");
        std::fs::create_dir_all(&folder).map_err(|e| DiskError::Io {
            operation: "make",
            path: folder.clone(),
            source: e,
        })?;
        remove_left_over(&folder);
        let sockets: Vec<PathBuf> =
            (0..vms.len()).map(|n| run_dir.join(fleece::socket_name(n))).collect();
        for (number, socket) in sockets.iter().enumerate() {
            let started = Self::start(vms[number], socket);
            if started.is_err() {
                for vm in &mut vms[..number] {
                    let _ = fleece::stop_server(vm.qmp());
                }
            }
            started?;
        }
        let disks = QemuDisks::new(disks);
        let metas = disks.metas();
        let in_flight = BTreeMap::new();
        Ok(Self {
            disks,
            metas,
            folder,
            sockets,
            present: None,
            next: 1,
            based: false,
            have_snapshots: false,
            has_captured: false,
            changes: DiskChanges::default(),
            open: None,
            has_closed: false,
            in_flight,
            events,
        })
    }

    fn start(vm: &mut Vm, socket: &Path) -> Result<()> {
        let pid = vm.pid();
        fleece::start_server(vm.qmp(), pid, socket).map_err(DiskError::NbdServer)
    }

    /// Returns the descriptions of the disks.
    pub fn metas(&self) -> &[DiskMeta] {
        &self.metas
    }

    /// Returns true while the encoder still reads the disks of the previous capture.
    pub fn is_busy(&self) -> bool {
        self.open.as_ref().is_some_and(|open| !open.cut.is_read())
    }

    /// Begins a capture: makes scratch files, and nodes over them in QEMU. Error: QEMU refuses or
    /// does not answer, or a file cannot be made.
    pub fn begin(&mut self, members: &mut [&mut dyn Vmm]) -> Result<FleecedCut, BoxError> {
        self.close_when_read(members)?;
        self.follow(members)?;
        self.have_snapshots = require_same(&self.disks.present, members)?.have_snapshots;
        self.require_space()?;
        let cut = FleecedCut(Arc::default());
        self.has_closed = false;
        self.open = Some(Open { cut: cut.clone(), pending: None });
        let added = self.add_scratch(members);
        if added.is_err() {
            self.close(members);
        }
        added.map(|()| cut)
    }

    /// Follows disks over other images, of other sizes, or unplugged: the next checkpoint is
    /// complete. Error: another run has to begin; QEMU does not answer.
    fn follow(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        let changes = self.disks.follow(members, OtherImages::Followed)?;
        if changes == DiskChanges::default() {
            return Ok(self.changes.require_same_run()?);
        }
        self.changes = self.changes.and(changes);
        self.metas = self.disks.metas();
        self.in_flight.clear();
        self.start_anew(members);
        Ok(self.changes.require_same_run()?)
    }

    /// Returns true while the disks need another run.
    pub fn takes_new_run(&self) -> bool {
        self.changes.need_new_run()
    }

    /// Records that a run has begun with the present disks.
    pub fn began_run(&mut self) {
        self.changes = DiskChanges::default();
    }

    /// Checks that the file system has room for scratch files: a guest's write fails if QEMU cannot
    /// save the old content.
    fn require_space(&self) -> Result<(), BoxError> {
        let free = self.free_bytes()?;
        if free < self.disk_bytes().min(FREE_BYTES_MIN) {
            let folder = self.folder.clone();
            return Err(DiskError::NoScratchSpace { folder, free_bytes: free }.into());
        }
        Ok(())
    }

    /// Returns the free bytes of the file system of the scratch files.
    fn free_bytes(&self) -> std::io::Result<u64> {
        let stat = rustix::fs::statvfs(&self.folder)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Returns the bytes of all captured disks.
    fn disk_bytes(&self) -> u64 {
        self.captured_disks().map(|(_, disk)| disk.node.disk_bytes).sum()
    }

    /// Gives up the capture that is being read if the file system of its scratch files has hardly
    /// any room left, or if QEMU has stopped a guest for want of room. The encoder's next read
    /// fails then, and with it the checkpoint; its blocks are owed. Returns true, once for each
    /// capture, if a guest is stopped and the capture's scratch files are gone.
    pub fn relieve(&mut self, is_stopped: bool, members: &mut [&mut dyn Vmm]) -> bool {
        let needed = (self.disk_bytes() / 4).min(RELIEVED_BYTES);
        let is_short = || self.free_bytes().is_ok_and(|free| free < needed);
        if self.open.is_some() && (is_stopped || is_short()) {
            self.close(members);
        }
        is_stopped && std::mem::take(&mut self.has_closed)
    }

    fn add_scratch(&self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        for (number, disk) in self.captured_disks() {
            let file = tempfile::Builder::new().prefix(SCRATCH_PREFIX).tempdir_in(&self.folder)?;
            let path = file.path().join("scratch.qcow2");
            keyframe_disk::commit::empty_qcow2(&path, disk.node.disk_bytes)?;
            // QEMU keeps the file open, so it is gone when QEMU closes it or ends.
            fleece::add_scratch(qmp(members, disk)?, number, &path, &disk.node)?;
        }
        Ok(())
    }

    /// Cuts the disks, while all VMs are paused: begins new dirty bitmaps, and has QEMU save old
    /// content before the guests overwrite it. Error: a monitor fails; then the next checkpoint is
    /// complete.
    pub fn cut(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        let begun = (!self.have_snapshots).then_some(self.next);
        let complete = !self.based || self.present.is_none();
        let pending = Pending { frozen: self.present, complete };
        for member in 0..members.len() {
            let points: Vec<SnapshotPoint<'_>> = self
                .captured_disks()
                .filter(|(_, disk)| disk.member == member)
                .map(|(number, disk)| SnapshotPoint {
                    disk: &disk.node,
                    number,
                    frozen: pending.frozen,
                    begun,
                })
                .collect();
            if points.is_empty() {
                continue;
            }
            if let Err(error) = fleece::cut(qemu(members[member])?.qmp(), &points) {
                // Of a group, the members before are a bitmap ahead: what they froze is lost to the
                // count, so all is owed.
                self.start_anew(members);
                return Err(error.into());
            }
        }
        self.next += 1;
        self.present = begun;
        if let Some(open) = &mut self.open {
            open.pending = Some(pending);
        }
        Ok(())
    }

    /// Lets the encoder read the cut blocks, now that the VMs run again. Error: QEMU refuses or
    /// does not answer, or a file cannot be made.
    pub fn resumed(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        let Some(Open { cut, pending: Some(pending) }) = &self.open else { return Ok(()) };
        // A complete checkpoint reads what is allocated, whatever the bitmap says.
        let bitmap = pending.frozen.filter(|_| !pending.complete);
        let mut exports = Vec::new();
        for (number, disk) in self.captured_disks() {
            let socket = &self.sockets[disk.member];
            let export = Export::open(qmp(members, disk)?, socket, (number, disk), bitmap)?;
            let zeroes_rest = bitmap.is_none() && self.has_captured;
            exports.push(Export { zeroes_rest, ..export });
        }
        cut.0.exports.set(exports).map_err(|_| DiskError::CutTwice.into())
    }

    /// Records the end of a capture: it has number `seq`, or failed if `seq` is `None`.
    pub fn captured(&mut self, seq: Option<u64>, members: &mut [&mut dyn Vmm]) {
        let pending = self.open.as_ref().and_then(|open| open.pending);
        match (seq, pending) {
            (Some(seq), Some(pending)) => {
                (self.based, self.has_captured) = (true, true);
                self.in_flight.insert(seq, pending);
            }
            (_, pending) => {
                self.close(members);
                if let Some(pending) = pending {
                    self.give_back(pending, members);
                }
            }
        }
    }

    /// Removes what the sealed checkpoint of capture `seq` no longer needs in QEMU.
    pub fn sealed(&mut self, seq: u64, members: &mut [&mut dyn Vmm]) {
        if !self.is_busy() {
            self.close(members);
        }
        let Some(Pending { frozen: Some(frozen), .. }) = self.in_flight.remove(&seq) else {
            return;
        };
        for (_, disk) in self.captured_disks() {
            let forgot =
                qmp(members, disk).and_then(|qmp| Ok(fleece::forget(qmp, &disk.node, frozen)?));
            tell_failed(&*self.events, DiskStep::DropBitmap, forgot);
        }
    }

    /// Owes the blocks of the captures `lost`, whose checkpoints are lost.
    pub fn failed(&mut self, lost: &[u64], members: &mut [&mut dyn Vmm]) {
        self.close(members);
        for pending in lost.iter().filter_map(|seq| self.in_flight.remove(seq)).collect::<Vec<_>>()
        {
            self.give_back(pending, members);
        }
    }

    fn give_back(&mut self, pending: Pending, members: &mut [&mut dyn Vmm]) {
        if pending.complete {
            self.based = false;
        }
        let Some(frozen) = pending.frozen else { return };
        for disk in self.disks.present.iter().filter(|disk| !disk.left_out) {
            let given = qmp(members, disk).and_then(|qmp| {
                let given = match self.present {
                    Some(present) => fleece::give_back(qmp, &disk.node, frozen, present),
                    None => fleece::forget(qmp, &disk.node, frozen),
                };
                Ok(given?)
            });
            if given.is_err() {
                // Then all of it.
                self.based = false;
            }
            tell_failed(&*self.events, DiskStep::GiveBackBlocks, given);
        }
    }

    /// Drops all that is noted: the next checkpoint is complete.
    fn start_anew(&mut self, members: &mut [&mut dyn Vmm]) {
        self.based = false;
        self.present = None;
        for (number, member) in members.iter_mut().enumerate() {
            let Ok(vm) = qemu(*member) else { continue };
            let pid = vm.pid();
            let qmp = vm.qmp();
            let swept = fleece::sweep(qmp).and_then(|found| {
                if found { fleece::start_server(qmp, pid, &self.sockets[number]) } else { Ok(()) }
            });
            tell_failed(&*self.events, DiskStep::RestartDisks, swept);
        }
    }

    fn close_when_read(&mut self, members: &mut [&mut dyn Vmm]) -> Result<(), BoxError> {
        let began = Instant::now();
        while self.is_busy() {
            if began.elapsed() > READ_TIMEOUT {
                return Err(DiskError::ReadTimeout { seconds: READ_TIMEOUT.as_secs() }.into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.close(members);
        Ok(())
    }

    /// Takes away what QEMU has open for reading.
    fn close(&mut self, members: &mut [&mut dyn Vmm]) {
        if self.open.take().is_none() {
            return;
        }
        self.has_closed = true;
        for member in members {
            let Ok(vm) = qemu(*member) else { continue };
            let taken = fleece::take_away(vm.qmp());
            tell_failed(&*self.events, DiskStep::CloseExports, taken);
        }
    }

    /// Removes everything that Keyframe has added to QEMU's block layer.
    pub fn detach(&mut self, members: &mut [&mut dyn Vmm]) {
        self.open = None;
        for member in members {
            let Ok(vm) = qemu(*member) else { continue };
            let qmp = vm.qmp();
            let before = qmp.set_timeout(DETACH_TIMEOUT);
            let swept = fleece::sweep(qmp).and_then(|_| fleece::stop_server(qmp));
            qmp.set_timeout(before);
            if !matches!(swept, Err(keyframe_qemu::Error::Gone { .. })) {
                tell_failed(&*self.events, DiskStep::DetachDisks, swept);
            }
        }
    }

    /// Removes Keyframe's objects from VMs that were refused before their first checkpoint.
    pub fn undo(vms: &mut [&mut Vm]) {
        for vm in vms {
            let _ = fleece::stop_server(vm.qmp());
        }
    }

    fn captured_disks(&self) -> impl Iterator<Item = (usize, &QemuDisk)> {
        self.disks.present.iter().enumerate().filter(|(_, disk)| !disk.left_out)
    }
}

/// Removes folders of scratch files that a killed engine has left in `folder`. This engine is the
/// only one that has the store's lock, and QEMU keeps the files open that it uses.
fn remove_left_over(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(SCRATCH_PREFIX) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn qmp<'a>(members: &'a mut [&mut dyn Vmm], disk: &QemuDisk) -> Result<&'a mut Qmp, BoxError> {
    let member = members.get_mut(disk.member).ok_or(DiskError::NoVm)?;
    Ok(qemu(*member)?.qmp())
}

impl FleecedCut {
    /// True if the encoder has read the cut, or has dropped it.
    fn is_read(&self) -> bool {
        self.0.done.load(Ordering::Acquire) || Arc::strong_count(&self.0) == 1
    }

    /// Writes the cut blocks into the checkpoint in progress of `run`, and ends the cut. Calls
    /// `fault` during the copy.
    ///
    /// Errors: that of `fault`; the disks were not cut; QEMU's export cannot be read; the run does
    /// not take the blocks.
    pub fn put(
        &self,
        run: &mut Run,
        fault: &mut dyn FnMut() -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let exports = self.0.exports.get().ok_or(DiskError::NotCut)?;
        let put = exports.iter().try_for_each(|export| export.put(run, fault));
        self.0.done.store(true, Ordering::Release);
        put
    }
}

impl Export {
    /// Exports disk `number` as it was cut, with bitmap `bitmap` or its allocation, and connects to
    /// the export at `socket`.
    fn open(
        qmp: &mut Qmp,
        socket: &Path,
        (number, disk): (usize, &QemuDisk),
        bitmap: Option<u64>,
    ) -> Result<Self, BoxError> {
        fleece::export(qmp, number, bitmap)?;
        let (context, wanted, part_bytes): (_, fn(u32) -> bool, _) = match bitmap {
            Some(bitmap) => (
                format!("qemu:dirty-bitmap:{}", fleece::bitmap_name(bitmap)),
                |flags| flags & 1 != 0,
                fleece::granularity_bytes(&disk.node),
            ),
            None => ("base:allocation".into(), |flags| flags & 2 == 0, ALLOCATED_BYTES_MIN),
        };
        let name = fleece::export_name(number);
        let stream = UnixStream::connect(socket)?;
        fleece::hold_connection(qmp, number, stream.as_fd())?;
        let reader = Client::patient(stream, &name, &context, part_bytes)?;
        let disk_bytes = disk.node.disk_bytes;
        let reader = Mutex::new(Some(reader));
        Ok(Self { disk: number, name, reader, wanted, zeroes_rest: false, disk_bytes })
    }

    fn put(
        &self,
        run: &mut Run,
        fault: &mut dyn FnMut() -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let mut reader = self.reader.lock().ignore_poison().take().ok_or(DiskError::NotCut)?;
        if reader.len_bytes() != self.disk_bytes {
            let (now_bytes, then_bytes) = (reader.len_bytes(), self.disk_bytes);
            let name = self.name.clone();
            return Err(DiskError::Resized { name, now_bytes, then_bytes }.into());
        }
        let mut next = 0;
        reader.each_block::<BoxError>(self.wanted, |first, blocks| {
            if self.zeroes_rest && first > next {
                run.put_zero_blocks(self.disk, next, first - next)?;
            }
            for (block, page) in (first..).zip(blocks) {
                fault()?;
                run.put_block(self.disk, block, page)?;
            }
            next = first + blocks.len() as u64;
            Ok(())
        })?;
        let all = self.disk_bytes.div_ceil(PAGE_BYTES as u64);
        if self.zeroes_rest && next < all {
            run.put_zero_blocks(self.disk, next, all - next)?;
        }
        Ok(())
    }
}
