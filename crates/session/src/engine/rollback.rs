//! `keyframe rollback`: puts the running VM back to a checkpoint, in the same VMM process. A VMM that
//! cannot do so has a successor ([`super::succession`]).
//!
//! ```text
//!   runs ─▶ stands ─▶ checkpoint "before" ─▶ disks, RAM, devices of the target ─▶ RAM compared ─▶ checkpoint "after" ─▶ runs
//!             │ fails: runs on                  │ fails                             │ differs: those pages are written
//!             ▼                                 ▼
//!           as it was ◀── runs on ─── disks, RAM and devices of "before"
//!
//!   killed here: runs on as it was    │ here: the watchdog ends the rollback:          │ here: runs as the target
//!                                     │ it runs as it was, or as the target            │
//! ```
//!
//! The watchdog knows the plan of the rollback ([`plan`]) and each step before it is taken. If this
//! process is killed, the watchdog takes the disks and the machine to the one or the other state
//! ([`crate::rollback_rescue`]). It ends the VM only if that fails, or if this process dies on the
//! way back to "before" and QEMU has not begun to load "before".
//!
//! The target's disks are opened beside those that are served while the VM still runs; then the two
//! change places, in constant time. QEMU keeps its connections, and has nothing of the content
//! itself: its NBD client caches none. What was written before is removed only when the VM runs
//! again.
//!
//! A *fast* rollback takes neither "before" nor "after". If it fails with the disks exchanged, the VM
//! stays paused for good.
//!
//! QEMU loads only pages in which "before" and the target can differ, and those that a reset of the
//! machine overwrites, because QEMU resets it on the way. Most of the comparison is done while the VM
//! still runs. The tracker reports the pages that the load has written. Before the VM runs, the engine
//! compares with the target every page that may differ from it ([`ram`]). Pages that still differ are
//! written into QEMU's memory: a second load while the VM stands still can crash QEMU. What was written
//! is then compared again.
//!
//! "after" is captured while the VM stands, and sealed while it runs. While the VM stands, all threads
//! of the engine have a raised priority, also the encoder's, for which the VM waits.
//!
//! Invariants: the VM runs only as exactly the target, or as exactly what it was. The run goes on:
//! "after" is one more of its checkpoints, with the target as its parent, and holds what was
//! written back.
//!
//! A VM that its user paused stays paused. A VM that stood still by itself (its guest had powered
//! off, a disk had failed) runs after the rollback if the target's VM ran. If the target's VM stood
//! still by itself, the VM stands still in the same run state, or the rollback is refused.
//!
//! Left out: groups, libvirt.

mod plan;
mod ram;

use super::super::session_vm::SessionVm;
use super::succession::Succeeded;
use super::{
    CheckpointReason, Duration, End, Engine, EngineMessage, EngineResponse, Error, Event, Instant,
    LOOK_EVERY, NotCaptured, Result, Taker, channel, with_fix,
};
use crate::control::{RollbackPhases, RolledBack, VmState};
use crate::error::{CheckpointError, CheckpointFailure, MachineDifference, RollbackError};
use crate::event::{Step, tell_failed};
use keyframe_capture::BoxError;
use keyframe_qemu::line_difference;
use keyframe_store::{CheckpointId, LoadedCheckpoint};
use keyframe_units::{PageIndex, elapsed_ns};
use keyframe_vm_disks::restored::are_same;
use keyframe_vm_disks::staged::DiskSet;
use keyframe_vmm::{Ability, RunState, Succession, VmmKind};
use plan::{Goal, VmBefore};
use ram::{Becoming, ResetPages};
use std::sync::mpsc::{Receiver, TryRecvError};

/// The longest time until a checkpoint is sealed.
pub(super) const SEAL_TIMEOUT: Duration = Duration::from_mins(5);

/// Gets the number of a captured checkpoint once it is sealed, or the reason why it is not.
type SealedLater = Receiver<Result<CheckpointId, CheckpointFailure>>;

/// What a rollback has to change.
struct WayBack {
    /// True if no checkpoint of the present state is kept.
    fast: bool,
    /// The pages in which a known state of RAM and the target differ; `None` if no state is known
    /// that can be compared.
    differing: Option<Vec<PageIndex>>,
    /// The known state.
    since: KnownState,
    /// What a reset of the machine overwrites.
    reset: ResetPages,
}

/// A state that RAM had.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KnownState {
    /// That of the newest sealed checkpoint.
    Newest,
    /// That after the last rollback.
    RolledBack,
}

/// A failed rollback, and the state of the VM.
enum FailedRollback {
    /// The VM is as it was.
    Unharmed(RollbackError),
    /// The VM is as it was, but its VMM would let it run, which it did not before.
    CanRun { why: Box<RollbackError>, former: RunState },
    /// The VM's state is neither the former nor the checkpoint's: it must not run.
    Lost { why: Box<RollbackError>, again: Box<RollbackError> },
}

impl Engine<'_> {
    /// Puts the VM back to the checkpoint that `name` names. If `fast` is true, no checkpoint of the
    /// present state is kept. Returns the answer, and the end of the session if a successor has taken
    /// the VM's place.
    pub(super) fn answer_rollback(
        &mut self,
        name: &str,
        fast: bool,
    ) -> (EngineResponse, Option<End>) {
        let Succeeded { told, vm } = match self.succession() {
            Ok(None) => Succeeded { told: self.roll_back(name, fast), vm: None },
            Ok(Some(succession)) => self.succeed(succession, name, fast),
            Err(error) => error.into(),
        };
        let response = match told {
            Ok(done) => EngineResponse::RolledBack(done),
            Err(error) => EngineResponse::Failed(with_fix(&error.into())),
        };
        (response, vm.map(End::Succeeded))
    }

    /// Returns the VM's place, if a rollback is by a successor.
    pub(super) fn succession(&mut self) -> Result<Option<Box<dyn Succession>>, RollbackError> {
        if self.machines.is_group() {
            return Err(RollbackError::Group);
        }
        Ok(self.vm()?.vm_mut().succession().map_err(Error::from)?)
    }

    fn roll_back(&mut self, name: &str, fast: bool) -> Result<RolledBack, RollbackError> {
        let target = self.rollback_target(name)?;
        self.hold_target(target.id)?;
        self.await_idle()?;
        let way = self.way_back(&target, fast)?;
        if let Some(disks) = &mut self.machines.disks {
            disks.stage(self.store, target.id, &target.meta).map_err(Error::from)?;
        }
        let hosts = self.ram_hosts(&target.meta.ram);
        let done = self.roll_back_to(&target, &way, hosts, name);
        // If the VM is lost, both sets of disks are kept.
        if !self.given_up
            && let Some(disks) = &mut self.machines.disks
        {
            let dismissed = disks.dismiss();
            tell_failed(&*self.options.events, Step::RemoveFormerDisks, dismissed);
        }
        self.tell_no_plan();
        done
    }

    /// Has the flight recorder keep checkpoint `target` during the rollback. Error: it is forgotten
    /// already.
    pub(super) fn hold_target(&self, target: CheckpointId) -> Result<(), RollbackError> {
        if let Some(recorder) = &self.recorder {
            recorder.hold(target);
            // Not in the moment before.
            self.store.sealed(target).map_err(|e| Error::store(self.store.path(), e))?;
        }
        Ok(())
    }

    /// Waits until earlier checkpoints are stored: the VM is not to be paused meanwhile.
    pub(super) fn await_idle(&mut self) -> Result<(), RollbackError> {
        let idle = |engine: &mut Self| (engine.copying.cycle.in_flight() == 0).then_some(());
        self.handle_reports_until(idle)
    }

    fn roll_back_to(
        &mut self,
        target: &LoadedCheckpoint,
        way: &WayBack,
        hosts: Option<Vec<u64>>,
        name: &str,
    ) -> Result<RolledBack, RollbackError> {
        self.check_vm(target)?;
        let former = self.run_state()?;
        let raised = keyframe_kernel::priority::RaisedThreads::raise();
        let began = Instant::now();
        let was_running = self.vm()?.begin_standstill().map_err(step("pause the VM"))?;
        self.rollback_phases =
            Some(RollbackPhases { pause_ns: elapsed_ns(began), ..RollbackPhases::default() });
        let vm_before = VmBefore { hosts, ran: was_running, former };
        let gone = self.go_back(target, way, &vm_before);
        let mut phases = self.rollback_phases.take().unwrap_or_default();
        let gone = match gone {
            Err(FailedRollback::Lost { why, again }) => {
                self.given_up = true;
                return Err(RollbackError::Lost { why, again, checkpoint: name.into() });
            }
            Err(FailedRollback::Unharmed(why)) => Err(RollbackError::Unharmed(Box::new(why))),
            Err(FailedRollback::CanRun { why, former }) => {
                let state = VmState::of_standing(&former);
                Err(RollbackError::CanRun { why, state })
            }
            Ok(gone) => Ok(gone),
        };
        let resuming = Instant::now();
        self.vm()?.end_standstill().map_err(step("resume the VM"))?;
        let is_to_run = self.is_to_run(target, &vm_before)?;
        if is_to_run && !was_running && gone.is_ok() {
            self.vm()?.vm_mut().resume().map_err(|e| step("resume the VM")(e.into()))?;
        }
        phases.resume_ns = elapsed_ns(resuming);
        let stood_ns = elapsed_ns(began);
        drop(raised);
        // Newer QEMUs keep a VM asleep that slept.
        let stands = self.run_state().is_ok_and(|now| VmState::stands_by_itself(&now));
        let runs = is_to_run && !stands;
        self.look();
        let (before, after, pages) = gone?;
        let (vm, fast) = (self.name.clone(), way.fast);
        self.tell(&Event::RolledBack { vm, checkpoint: target.id, fast });
        let now = after.and_then(|sealed| self.wait_for_seal(&sealed).ok());
        Ok(RolledBack {
            vm: self.name.clone(),
            checkpoint: target.id.0,
            before: before.map(|id| id.0),
            now: now.map(|id| id.0),
            pages,
            stood_ns,
            phases,
            runs,
            successor_pid: None,
        })
    }

    fn note_phase(&mut self, note: impl FnOnce(&mut RollbackPhases)) {
        if let Some(phases) = &mut self.rollback_phases {
            note(phases);
        }
    }

    pub(super) fn vm(&mut self) -> Result<&mut SessionVm> {
        let first = self.machines.members_mut().first_mut();
        first.map(|member| &mut member.vm).ok_or(Error::NoVm)
    }

    pub(super) fn run_state(&mut self) -> Result<RunState, RollbackError> {
        Ok(self.vm()?.vm_mut().run_state().map_err(Error::from)?)
    }

    /// Fails if the VM runs, or another client has resumed it since its stop.
    fn require_still(&mut self) -> Result<(), RollbackError> {
        let ran = self.vm()?.vm_mut().ran_meanwhile().map_err(Error::from)?;
        if ran || self.run_state()? == RunState::Running {
            return Err(RollbackError::Resumed);
        }
        Ok(())
    }

    /// Stops a VM that another client resumed while its state was exchanged, and fails then: what
    /// it has executed is of no checkpoint.
    fn keep_still(&mut self) -> Result<(), RollbackError> {
        if self.run_state()? == RunState::Running {
            self.vm()?.vm_mut().stop().map_err(Error::from)?;
            return Err(RollbackError::Resumed);
        }
        Ok(())
    }

    /// Fails if an operation of the VM's user is in the way of a rollback.
    fn check_vm(&mut self, target: &LoadedCheckpoint) -> Result<(), RollbackError> {
        let checked = self.vm()?.vm_mut().check_rollback(&target.device_state);
        Ok(checked.map_err(Error::from)?)
    }

    /// Lets a test's fault kill the engine at this step.
    pub(super) fn step(&self) {
        if let Some(fault) = &self.options.fault {
            fault.rolling_back();
        }
    }

    /// Exchanges the served disks and the staged ones. The VM is paused.
    fn exchange_disks(&mut self) -> Result<(), RollbackError> {
        let exchanged = self.machines.disks.as_mut().map_or(Ok(()), |disks| disks.exchange());
        exchanged.map_err(step("exchange the disks"))
    }

    /// The checkpoint, or the reason why it is none of this VM's machine.
    pub(super) fn checkpoint_of_machine(
        &mut self,
        name: &str,
    ) -> Result<LoadedCheckpoint, RollbackError> {
        if self.machines.is_group() {
            return Err(RollbackError::Group);
        }
        if self.given_up || self.encoding.is_none() {
            return Err(RollbackError::GivenUp);
        }
        self.vm()?.vm().capabilities().require(Ability::Rollback)?;
        let store_failure = |e| Error::store(self.store.path(), e);
        let id = self.store.resolve(name).map_err(store_failure)?;
        let target = self.store.load(id).map_err(store_failure)?;
        let (here, there) = (self.meta.machine(), &target.meta.machine);
        let vmm = match here.vmm {
            VmmKind::Qemu => "QEMU",
            VmmKind::Firecracker => "Firecracker",
        };
        let pairs = [
            ("VMM", here.vmm.to_string(), there.vmm.to_string()),
            ("processor", here.processor.to_string(), there.processor.to_string()),
            ("machine type", here.machine_type.clone(), there.machine_type.clone()),
            (vmm, here.vmm_version.clone(), there.vmm_version.clone()),
            ("number of processors", here.vcpus.to_string(), there.vcpus.to_string()),
        ];
        let differs = pairs.into_iter().find(|(_, here, there)| here != there);
        if let Some((property, here, there)) = differs {
            return Err(another(id, MachineDifference::Property { property, here, there }));
        }
        if !target.meta.members.is_empty() || !target.meta.ram.same_space(&self.copying.layout) {
            return Err(another(id, MachineDifference::RamBlocks));
        }
        Ok(target)
    }

    /// The checkpoint, or the reason why this VM cannot be put back to it.
    fn rollback_target(&mut self, name: &str) -> Result<LoadedCheckpoint, RollbackError> {
        let target = self.checkpoint_of_machine(name)?;
        let id = target.id;
        let disks = self.machines.disks.as_ref().map_or(&[][..], |disks| disks.metas());
        if let Some(disk) = disks.iter().find(|disk| disk.left_out) {
            return Err(RollbackError::DiskLeftOut(disk.name.clone()));
        }
        if !are_same(disks, &target.meta.disks) {
            return Err(another(id, MachineDifference::Disks));
        }
        Ok(target)
    }

    /// Finds out while the VM runs what a rollback to `target` has to change.
    fn way_back(
        &mut self,
        target: &LoadedCheckpoint,
        fast: bool,
    ) -> Result<WayBack, RollbackError> {
        let equaled = self.equaled.filter(|_| self.copying.cycle.watched().is_some());
        let (known, since) = match equaled {
            Some(id) => (Some(id), KnownState::RolledBack),
            None => (self.newest, KnownState::Newest),
        };
        let differing = known.and_then(|known| {
            if known == target.id {
                return Some(Vec::new());
            }
            // Another process may forget it meanwhile.
            let known = self.store.load(known).ok()?;
            known.meta.ram.same_space(&target.meta.ram).then(|| known.differing(target))
        });
        if fast && differing.is_none() {
            return Err(RollbackError::NoneSealed);
        }
        Ok(WayBack { fast, differing, since, reset: self.reset_pages(target)? })
    }

    /// Keeps the state of the paused VM, if `way` says so. Returns the checkpoint of it, and the
    /// pages in which RAM can differ from `target`.
    fn keep_before(
        &mut self,
        target: &LoadedCheckpoint,
        way: &WayBack,
    ) -> Result<(Option<CheckpointId>, Vec<PageIndex>), RollbackError> {
        let began = Instant::now();
        let (sealed, drained) = if way.fast {
            self.vm()?.ram_layout().map_err(step("look for changes of the machine"))?;
            (None, Some(self.copying.cycle.written_in_pause()))
        } else {
            (Some(self.capture_for_rollback()?), None)
        };
        let cycle = &self.copying.cycle;
        let written = match way.since {
            KnownState::Newest => drained.or_else(|| cycle.captured_pages().cloned()),
            KnownState::RolledBack => cycle.watched().cloned(),
        };
        let before = sealed.map(|sealed| self.wait_for_seal(&sealed)).transpose()?;
        let pages = match (&way.differing, written, before) {
            (Some(differing), Some(written), _) => joined(differing, written.iter()),
            (_, _, Some(before)) => self.load(before)?.differing(target),
            _ => return Err(RollbackError::NoneSealed),
        };
        self.note_phase(|phases| phases.before_ns = elapsed_ns(began));
        // The newest description has the changes of the machine until now.
        let lines =
            [self.meta.machine(), &target.meta.machine].map(|machine| &machine.user_command);
        if let Some(difference) = line_difference(lines[0], lines[1]) {
            return Err(another(target.id, MachineDifference::Hardware(difference)));
        }
        if !target.meta.ram.same_space(&self.copying.layout) {
            return Err(another(target.id, MachineDifference::RamBlocks));
        }
        Ok((before, pages))
    }

    fn load(&self, checkpoint: CheckpointId) -> Result<LoadedCheckpoint, RollbackError> {
        let loaded = self.store.load(checkpoint);
        Ok(loaded.map_err(|e| Error::store(self.store.path(), e))?)
    }

    /// Puts the paused VM, whose disks and RAM are those of `target` in part, back to `before`.
    fn put_back(
        &mut self,
        before: Option<CheckpointId>,
        vm: &VmBefore,
        way: &WayBack,
        pages: &mut Vec<PageIndex>,
    ) -> Result<(), RollbackError> {
        let before = self.load(before.ok_or(RollbackError::NotKept)?)?;
        let (set, is_intact) = (DiskSet::Former, false);
        let goal = Goal { checkpoint: &before, before: Some(before.id), set, is_intact };
        self.tell_plan(&goal, vm)?;
        self.exchange_disks()?;
        let former = Becoming { checkpoint: &before, reset: &way.reset, is_target: false };
        self.become_checkpoint(&former, pages)
    }

    /// Puts the paused VM back to `target` by `way`; `vm` is what it was. Returns the checkpoint
    /// before, if there is one, the one after, which is not sealed yet, and how many pages were
    /// written.
    fn go_back(
        &mut self,
        target: &LoadedCheckpoint,
        way: &WayBack,
        vm: &VmBefore,
    ) -> Result<(Option<CheckpointId>, Option<SealedLater>, u64), FailedRollback> {
        let goal =
            |before| Goal { checkpoint: target, before, set: DiskSet::Target, is_intact: true };
        self.tell_plan(&goal(None), vm).map_err(FailedRollback::Unharmed)?;
        self.step();
        let (before, mut pages) =
            self.keep_before(target, way).map_err(FailedRollback::Unharmed)?;
        self.tell_plan(&goal(before), vm).map_err(FailedRollback::Unharmed)?;
        // Its user may have begun something since the first look.
        self.check_vm(target).map_err(FailedRollback::Unharmed)?;
        let forbidden = self.vm().map_err(RollbackError::from);
        let forbidden =
            forbidden.and_then(|vm| vm.forbid_running().map_err(step("tell the watchdog")));
        forbidden.map_err(FailedRollback::Unharmed)?;
        if let Err(resumed) = self.require_still() {
            // Nothing of it is exchanged yet.
            self.allow_running();
            return Err(FailedRollback::Unharmed(resumed));
        }
        self.step();
        let mut exchanged = false;
        self.equaled = None;
        let became = self.exchange_disks().and_then(|()| {
            exchanged = true;
            self.step();
            let becoming = Becoming { checkpoint: target, reset: &way.reset, is_target: true };
            self.become_checkpoint(&becoming, &mut pages)?;
            self.stand_if_target_stands(target)
        });
        if let Err(why) = became {
            let put_back =
                if exchanged { self.put_back(before, vm, way, &mut pages) } else { Ok(()) };
            if let Err(again) = put_back {
                let (why, again) = (Box::new(why), Box::new(again));
                return Err(FailedRollback::Lost { why, again });
            }
            self.allow_running();
            return Err(self.back_from(why, &vm.former));
        }
        self.step();
        if let Some(disks) = &mut self.machines.disks {
            let described = disks.came_from(target.id);
            tell_failed(&*self.options.events, Step::DescribeDisks, described);
        }
        self.allow_running();
        self.step();
        self.copying.cycle.watch();
        self.equaled = Some(target.id);
        self.rollbacks += 1;
        self.came_from = Some((target.id, self.rollbacks));
        let began = Instant::now();
        // If this checkpoint fails, an event tells it, and the next one is the first after the
        // rollback.
        let after = before.and_then(|_| self.capture_for_rollback().ok());
        self.note_phase(|phases| phases.after_ns = elapsed_ns(began));
        Ok((before, after, pages.len() as u64))
    }

    /// If the VM of `target` stood still, this one does so from now on. Its firmware ran for a
    /// moment, and must not have written to a disk.
    fn stand_if_target_stands(&mut self, target: &LoadedCheckpoint) -> Result<(), RollbackError> {
        if !self.vm()?.vm().stands_in(&target.device_state) {
            return Ok(());
        }
        let disks = self.machines.disks.as_ref();
        if disks.is_some_and(|disks| disks.written_bytes() != Some(0)) {
            return Err(RollbackError::FirmwareWrote);
        }
        self.vm()?.remain_still();
        Ok(())
    }

    /// The failure `why` of a VM that was put back to what it was.
    fn back_from(&mut self, why: RollbackError, former: &RunState) -> FailedRollback {
        let now = self.run_state();
        let can_run = !now.is_ok_and(|now| VmState::stands_by_itself(&now));
        if can_run && VmState::stands_by_itself(former) {
            return FailedRollback::CanRun { why: Box::new(why), former: former.clone() };
        }
        FailedRollback::Unharmed(why)
    }

    /// Declares that the VM's state is complete: if the engine dies, the watchdog lets the VM run.
    /// A failure of the watchdog becomes an event and does not fail the rollback.
    fn allow_running(&mut self) {
        if let Ok(allowed) = self.vm().map(SessionVm::allow_running) {
            tell_failed(&*self.options.events, Step::AllowRunning, allowed);
        }
    }

    /// Captures a checkpoint of the paused VM.
    pub(super) fn capture_for_rollback(&mut self) -> Result<SealedLater, RollbackError> {
        let seq = self.capture(CheckpointReason::Rollback, None, None)?;
        let (sender, sealed) = channel();
        self.takers.insert(seq, Taker::Engine(sender));
        Ok(sealed)
    }

    /// Waits until a captured checkpoint is sealed.
    pub(super) fn wait_for_seal(
        &mut self,
        sealed: &SealedLater,
    ) -> Result<CheckpointId, RollbackError> {
        self.handle_reports_until(|_| match sealed.try_recv() {
            Ok(Ok(id)) => Some(Ok(id)),
            Ok(Err(failure)) => Some(Err(NotCaptured::from(failure).into())),
            Err(TryRecvError::Disconnected) => {
                Some(Err(NotCaptured::from(CheckpointError::Ending).into()))
            }
            Err(TryRecvError::Empty) => None,
        })?
    }

    /// Handles the encoder's reports until `done` has an answer. Requests of clients wait
    /// meanwhile.
    pub(super) fn handle_reports_until<T>(
        &mut self,
        mut done: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, RollbackError> {
        let deadline = Instant::now() + self.seal_timeout;
        loop {
            if let Some(answer) = done(self) {
                return Ok(answer);
            }
            if Instant::now() > deadline {
                return Err(RollbackError::SealTimeout);
            }
            match self.inbox.recv_timeout(LOOK_EVERY) {
                Ok(EngineMessage::Report(report)) => self.settle(*report),
                Ok(EngineMessage::Request(pending)) => self.postponed.push_back(pending),
                Err(_) => {}
            }
        }
    }
}

/// Returns the pages among either, in ascending order.
fn joined(pages: &[PageIndex], others: impl Iterator<Item = PageIndex>) -> Vec<PageIndex> {
    let mut all: Vec<_> = pages.iter().copied().chain(others).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn another(checkpoint: CheckpointId, difference: MachineDifference) -> RollbackError {
    RollbackError::OtherMachine { checkpoint, difference }
}

/// Makes a [`RollbackError::Step`] of the error of `operation`.
pub(super) fn step(operation: &'static str) -> impl Fn(BoxError) -> RollbackError {
    move |source| RollbackError::Step { operation, source }
}
