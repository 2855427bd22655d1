//! `keyframe rollback`: the running VM becomes what it was at a checkpoint, in the same QEMU.
//!
//! ```text
//!   runs ─▶ stands ─▶ checkpoint "before" ─▶ disks, RAM, devices of the target ─▶ RAM compared ─▶ checkpoint "after" ─▶ runs
//!             │ fails: runs on                  │ fails                             │ differs: those pages once more
//!             ▼                                 ▼
//!           as it was ◀── runs on ─── disks, RAM and devices of "before"
//!
//!   killed here: runs on as it was    │ here: the VM is ended, "before" is sealed      │ here: runs as the target
//! ```
//!
//! The target's disks are opened beside those that are served while the VM still runs; then the two
//! change places, in constant time. QEMU keeps its connections, and has nothing of the content
//! itself: its NBD client caches none. What was written before is removed only when the VM runs
//! again.
//!
//! Only pages in which "before" and the target differ are written. QEMU resets the machine on the
//! way, which may write to RAM too, so all of RAM is compared with the target before the VM runs.
//!
//! Invariants: the VM runs only as exactly the target, or as exactly what it was. The run goes on:
//! "after" is one more of its checkpoints, with the target as its parent, and holds what was
//! written back.
//!
//! Left out: groups, libvirt.

use super::super::machine::QemuMachine;
use super::{
    CheckpointReason, Duration, Engine, EngineMessage, Error, Event, Instant, LOOK_EVERY,
    NotCaptured, Response, Result, Taker, channel, with_fix,
};
use crate::control::RolledBack;
use crate::error::{CheckpointError, MachineDifference, RollbackError};
use crate::event::{Step, tell_failed};
use keyframe_capture::BoxError;
use keyframe_inspect::guest_memory::{Guest, StoredPages};
use keyframe_qemu::rollback::Target;
use keyframe_store::{CheckpointId, LoadedCheckpoint};
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, RamLayout, elapsed_ns};
use keyframe_vm_disks::restored::are_same;
use std::sync::mpsc::TryRecvError;

/// How long a checkpoint may take to be sealed.
const SEAL_TIMEOUT: Duration = Duration::from_mins(5);
/// How often the pages that still differ are written again.
const TRIES: u32 = 3;
/// Pages that are compared at once: 16 MiB.
const BATCH_PAGES: u64 = 4096;

/// What failed, and where the VM is.
enum FailedRollback {
    /// As it was.
    Unharmed(RollbackError),
    /// Neither here nor there: it must not run.
    Lost { why: Box<RollbackError>, again: Box<RollbackError> },
}

impl Engine<'_> {
    /// Puts the VM back to the checkpoint that `name` names.
    pub(super) fn answer_rollback(&mut self, name: &str) -> Response {
        match self.roll_back(name) {
            Ok(done) => Response::RolledBack(done),
            Err(error) => Response::Failed(with_fix(&error.into())),
        }
    }

    fn roll_back(&mut self, name: &str) -> Result<RolledBack, RollbackError> {
        let target = self.rollback_target(name)?;
        if let Some(recorder) = &self.recorder {
            recorder.hold(target.id);
            // Not in the moment before.
            self.store.sealed(target.id).map_err(|e| Error::store(self.store.path(), e))?;
        }
        // The VM is not to stand while earlier checkpoints are stored.
        let idle = |engine: &mut Self| (engine.copying.cycle.in_flight() == 0).then_some(());
        self.handle_reports_until(idle)?;
        if let Some(disks) = &mut self.machines.disks {
            disks.stage(self.store, target.id, &target.meta)?;
        }
        let done = self.roll_back_to(&target, name);
        // Of a VM that is neither here nor there both are kept.
        if !self.given_up
            && let Some(disks) = &mut self.machines.disks
        {
            let dismissed = disks.dismiss();
            tell_failed(&*self.options.events, Step::RemoveFormerDisks, dismissed);
        }
        done
    }

    fn roll_back_to(
        &mut self,
        target: &LoadedCheckpoint,
        name: &str,
    ) -> Result<RolledBack, RollbackError> {
        let began = Instant::now();
        let was_running = self.machine()?.stand().map_err(step("pause the VM"))?;
        self.step();
        let gone = self.go_back(target);
        keyframe_kernel::priority::lower_current_thread();
        let gone = match gone {
            Err(FailedRollback::Lost { why, again }) => {
                self.given_up = true;
                return Err(RollbackError::Lost { why, again, checkpoint: name.into() });
            }
            Err(FailedRollback::Unharmed(why)) => Err(RollbackError::Unharmed(Box::new(why))),
            Ok(gone) => Ok(gone),
        };
        self.machine()?.go().map_err(step("resume the VM"))?;
        let stood_ns = elapsed_ns(began);
        self.look();
        let (before, now, pages) = gone?;
        self.tell(&Event::RolledBack { vm: self.name.clone(), checkpoint: target.id });
        Ok(RolledBack {
            vm: self.name.clone(),
            checkpoint: target.id.0,
            before: before.0,
            now: now.map(|id| id.0),
            pages,
            stood_ns,
            runs: was_running,
        })
    }

    fn machine(&mut self) -> Result<&mut QemuMachine> {
        let first = self.machines.members_mut().first_mut();
        first.map(|member| &mut member.machine).ok_or(Error::NoVm)
    }

    /// Where a test kills the engine.
    fn step(&self) {
        if let Some(fault) = &self.options.fault {
            fault.rolling_back();
        }
    }

    /// Serves the disks that were not served. The VM stands.
    fn exchange_disks(&mut self) -> Result<(), RollbackError> {
        let exchanged = self.machines.disks.as_mut().map_or(Ok(()), super::DiskCapture::exchange);
        exchanged.map_err(step("exchange the disks"))
    }

    /// The checkpoint, where this VM can become it.
    fn rollback_target(&mut self, name: &str) -> Result<LoadedCheckpoint, RollbackError> {
        if self.machines.is_group() {
            return Err(RollbackError::Group);
        }
        if self.given_up || self.encoding.is_none() {
            return Err(RollbackError::GivenUp);
        }
        let libvirts = self
            .machines
            .members()
            .iter()
            .any(|m| m.machine.vm.is_attached() && m.machine.monitor.is_none());
        if libvirts {
            return Err(RollbackError::Libvirt);
        }
        let store_failure = |e| Error::store(self.store.path(), e);
        let id = self.store.resolve(name).map_err(store_failure)?;
        let target = self.store.load(id).map_err(store_failure)?;
        let (here, there) = (self.meta.machine(), &target.meta.machine);
        let pairs = [
            ("machine type", here.machine_type.clone(), there.machine_type.clone()),
            ("QEMU", here.vmm_version.clone(), there.vmm_version.clone()),
            ("number of processors", here.vcpus.to_string(), there.vcpus.to_string()),
        ];
        let differs = pairs.into_iter().find(|(_, here, there)| here != there);
        if let Some((property, here, there)) = differs {
            return Err(another(id, MachineDifference::Property { property, here, there }));
        }
        if !target.meta.members.is_empty() || !target.meta.ram.same_space(&self.copying.layout) {
            return Err(another(id, MachineDifference::RamBlocks));
        }
        let disks = self.machines.disks.as_ref().map_or(&[][..], super::DiskCapture::metas);
        if !are_same(disks, &target.meta.disks) {
            return Err(another(id, MachineDifference::Disks));
        }
        Ok(target)
    }

    /// The VM stands. The checkpoints before and after, and how many pages were written.
    fn go_back(
        &mut self,
        target: &LoadedCheckpoint,
    ) -> Result<(CheckpointId, Option<CheckpointId>, u64), FailedRollback> {
        let before = self.capture_and_seal().map_err(FailedRollback::Unharmed)?;
        let load_failed = |e| FailedRollback::Unharmed(Error::store(self.store.path(), e).into());
        let before = self.store.load(before).map_err(load_failed)?;
        let mut pages = differing(&before, target);
        let between = self.machine().map_err(RollbackError::from);
        let between = between.and_then(|m| m.between().map_err(step("tell the watchdog")));
        between.map_err(FailedRollback::Unharmed)?;
        let mut exchanged = false;
        let became = self.exchange_disks().and_then(|()| {
            exchanged = true;
            self.step();
            self.become_checkpoint(target, &mut pages)
        });
        if let Err(why) = became {
            let put_back = if exchanged {
                self.exchange_disks().and_then(|()| self.become_checkpoint(&before, &mut pages))
            } else {
                Ok(())
            };
            if let Err(again) = put_back {
                let (why, again) = (Box::new(why), Box::new(again));
                return Err(FailedRollback::Lost { why, again });
            }
            self.is_whole();
            return Err(FailedRollback::Unharmed(why));
        }
        self.step();
        if let Some(disks) = &mut self.machines.disks {
            let described = disks.came_from(target.id);
            tell_failed(&*self.options.events, Step::DescribeDisks, described);
        }
        self.is_whole();
        self.step();
        self.rollbacks += 1;
        self.came_from = Some((target.id, self.rollbacks));
        // Where this one fails it has been said, and the next one is the first behind the rollback.
        let now = self.capture_and_seal().ok();
        Ok((before.id, now, pages.len() as u64))
    }

    /// What stands there may run, should the engine die. Without its watchdog it is no less whole.
    fn is_whole(&mut self) {
        if let Ok(allowed) = self.machine().map(QemuMachine::is_whole) {
            tell_failed(&*self.options.events, Step::AllowRunning, allowed);
        }
    }

    /// A checkpoint of the standing VM, sealed.
    fn capture_and_seal(&mut self) -> Result<CheckpointId, RollbackError> {
        let seq = self.capture(CheckpointReason::Rollback, None, None)?;
        let (sender, sealed) = channel();
        self.takers.insert(seq, Taker::Engine(sender));
        self.handle_reports_until(|_| match sealed.try_recv() {
            Ok(Ok(id)) => Some(Ok(id)),
            Ok(Err(failure)) => Some(Err(NotCaptured::from(failure).into())),
            Err(TryRecvError::Disconnected) => {
                Some(Err(NotCaptured::from(CheckpointError::Ending).into()))
            }
            Err(TryRecvError::Empty) => None,
        })?
    }

    /// Takes in what the encoder reports, until `done` has an answer. What clients ask meanwhile
    /// waits.
    fn handle_reports_until<T>(
        &mut self,
        mut done: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, RollbackError> {
        let deadline = Instant::now() + SEAL_TIMEOUT;
        let mut requests = Vec::new();
        let result = loop {
            if let Some(answer) = done(self) {
                break Ok(answer);
            }
            if Instant::now() > deadline {
                break Err(RollbackError::SealTimeout);
            }
            match self.inbox.recv_timeout(LOOK_EVERY) {
                Ok(EngineMessage::Report(report)) => self.settle(*report),
                Ok(request @ EngineMessage::Request(_)) => requests.push(request),
                Err(_) => {}
            }
        };
        for request in requests {
            let _ = self.inbox_sender.send(request);
        }
        result
    }

    /// Loads devices and `pages` of `to`, and whatever else turns out to differ, which is added to
    /// `pages`.
    fn become_checkpoint(
        &mut self,
        to: &LoadedCheckpoint,
        pages: &mut Vec<PageIndex>,
    ) -> Result<(), RollbackError> {
        let mut wrong = 0;
        for _ in 0..TRIES {
            let guest = Guest::choose(to, None).map_err(Error::from)?;
            let source = StoredPages::new(to, &guest);
            let target = Target {
                machine_type: &to.meta.machine.machine_type,
                layout: &to.meta.ram,
                ram: &source,
                pages: &in_use(&to.meta.ram, pages),
                device_state: &to.device_state,
            };
            let directory =
                self.store.local_folder().map_err(|e| Error::store(self.store.path(), e))?;
            let file = tempfile::tempfile_in(&directory)
                .map_err(|e| Error::file("make a temporary file in", &directory, e))?;
            self.machine()?.vm.roll_back(&target, file).map_err(Error::from)?;
            let others = self.wrong_pages(to)?;
            if others.is_empty() {
                return Ok(());
            }
            wrong = others.len() as u64;
            pages.extend(others);
            pages.sort_unstable();
            pages.dedup();
        }
        Err(RollbackError::PagesDiffer { pages: wrong, checkpoint: to.id })
    }

    /// The pages of the standing VM that are not those of `to`.
    fn wrong_pages(&self, to: &LoadedCheckpoint) -> Result<Vec<PageIndex>, RollbackError> {
        let reader = self.copying.strategies.ram().ok_or(Error::NoVm)?;
        let layout = &to.meta.ram;
        let mut wrong = Vec::new();
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for number in 0..layout.blocks().len() {
            let mut left = used(layout, number);
            while left.len_pages > 0 {
                let range = PageRange::new(left.first, left.len_pages.min(BATCH_PAGES));
                left = PageRange::new(range.end(), left.len_pages - range.len_pages);
                for image in [&mut here, &mut there] {
                    image.clear();
                    image.resize(usize::try_from(range.len_bytes()).unwrap_or(0), 0);
                }
                reader.read(&[range], &mut here).map_err(step("read the VM's RAM"))?;
                let pages = there.as_chunks_mut::<PAGE_BYTES>().0;
                to.read_into(range.first, pages).map_err(|e| Error::store(self.store.path(), e))?;
                let pairs = here.chunks_exact(PAGE_BYTES).zip(there.chunks_exact(PAGE_BYTES));
                wrong.extend(
                    range.iter().zip(pairs).filter(|(_, (a, b))| a != b).map(|(page, _)| page),
                );
            }
        }
        Ok(wrong)
    }
}

fn another(checkpoint: CheckpointId, difference: MachineDifference) -> RollbackError {
    RollbackError::OtherMachine { checkpoint, difference }
}

/// Makes a [`RollbackError::Step`] of the error of `operation`.
fn step(operation: &'static str) -> impl Fn(BoxError) -> RollbackError {
    move |source| RollbackError::Step { operation, source }
}

/// The pages of a block that are in use.
fn used(layout: &RamLayout, number: usize) -> PageRange {
    let used_bytes = layout.blocks().get(number).map_or(0, |block| block.used_bytes);
    PageRange::new(layout.pages_of(number).first, used_bytes / PAGE_BYTES as u64)
}

/// Those of `pages` that are in use.
fn in_use(layout: &RamLayout, pages: &[PageIndex]) -> Vec<PageIndex> {
    let ranges: Vec<_> = (0..layout.blocks().len()).map(|number| used(layout, number)).collect();
    let is_used = |page: &PageIndex| ranges.iter().any(|r| r.first <= *page && *page < r.end());
    pages.iter().copied().filter(is_used).collect()
}

/// The pages in which two checkpoints of one page space differ, rising.
fn differing(a: &LoadedCheckpoint, b: &LoadedCheckpoint) -> Vec<PageIndex> {
    let pages = (0..a.meta.ram.len_pages()).map(PageIndex);
    pages.filter(|page| a.page_ref(*page) != b.page_ref(*page)).collect()
}
