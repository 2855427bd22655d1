//! One VM of a session: a VMM behind its traits, and the watchdog of its pauses.
//!
//! ```text
//!   pause:      prepare_pause ─▶ hold ─▶ save_device_state ─▶ release ─▶ finish_pause
//!   rollback:   begin_standstill ─▶ (checkpoint) ─▶ forbid_running ─▶ ... ─▶ allow_running ─▶ (checkpoint) ─▶ end_standstill
//!               engine dies: VM runs                watchdog ends rollback    engine dies: VM runs
//! ```
//!
//! [`WatchedVm`] guards pauses and standstills. This module adds the checks that a checkpoint
//! needs, and what only QEMU can do: recording, and disks that QEMU opens itself
//! ([`SessionVm::qemu`]).
//!
//! Invariant: if a step of a pause fails, the VM runs again, unless another client had paused it.

use super::launch::lines_now;
use super::recording::{Position, RequestQueues};
use crate::error::Result;
use crate::event::{SharedEventSink, Step, tell_failed};
use crate::instruction_count::{CpusChanged, InstructionCount};
use keyframe_capture::{BoxError, PauseSteps, PauseVerdict, StopOutcome};
use keyframe_qemu::{AuditFinding, MachineChange, MachineShape, Severity, Vm};
use keyframe_store::MachineMeta;
use keyframe_units::RamLayout;
use keyframe_vm_disks::read_files;
use keyframe_vmm::{
    ForeignOperation, PauseForm, PauseWatchdog, RollbackPlan, RollbackStep, RollbackTarget,
    VmOrigin, Vmm, WatchedVm,
};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The reason why the engine cannot capture or use a VM, although its VMM answers.
#[derive(Debug, thiserror::Error)]
pub enum SessionVmError {
    /// A device that discards RAM was plugged in, and this run's tracker cannot see that.
    #[error(
        "a balloon or virtio-mem device was plugged in, which discards RAM unseen by this run; \
         unplug it, or start the VM with it"
    )]
    DiscardsRam,
    /// The machine is not the one of the checkpoints' command line any more.
    #[error("{}", changes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Changed {
        /// The changes; empty if a device was unplugged and plugged in again.
        changes: Vec<MachineChange>,
    },
    /// Another client migrates or dumps the VM, which must be paused by separate commands.
    #[error(
        "{}, and the commands of a pause would disturb that; checkpoints go on when it is over",
        match operation {
            ForeignOperation::Migration => "another client migrates the VM",
            ForeignOperation::Dump => "another client dumps the VM's memory",
        }
    )]
    Busy {
        /// The operation that the other client has begun.
        operation: ForeignOperation,
    },
    /// The operation exists in QEMU alone.
    #[error("only QEMU can do this, and another VMM runs this VM")]
    NotQemu,
}

/// The further state of a recorded VM.
#[derive(Default)]
struct RecordedState {
    /// The queues of its disks and network cards: no checkpoint falls between a request and its
    /// answer.
    queues: RequestQueues,
    /// Receives the instruction of the next checkpoint.
    position: Option<Position>,
}

/// A VM and the watchdog of its pauses.
pub struct SessionVm {
    watched: WatchedVm,
    monitor: Option<PathBuf>,
    recorded: Option<RecordedState>,
    /// Present if the guest's instructions are counted by the host's processor.
    counted: Option<InstructionCount>,
    watches_discards: bool,
    /// The machine that the checkpoints' command line makes. `None` if that is not compared.
    shape: Option<MachineShape>,
    /// The changes from it that the newest look has found.
    changes: Option<Vec<MachineChange>>,
    /// Whether the newest look has found a memory device that was unplugged and plugged in again.
    has_other_memory: bool,
    end_hold: EndHold,
    events: Option<SharedEventSink>,
    /// False if a part of the last device state was not known.
    has_whole_states: bool,
}

/// Whether the VMM stands still when the guest ends, so that a last checkpoint can be taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EndHold {
    /// It does not, and no checkpoint is wanted then.
    #[default]
    Unwanted,
    /// It does not yet.
    Wanted,
    /// It does.
    Held,
}

impl SessionVm {
    /// Joins a VM and its watchdog, which ends each pause after `pause_limit`. `watches_discards`
    /// is true if the VM's tracker sees discarded RAM.
    pub fn new(
        vm: Box<dyn Vmm>,
        watchdog: Box<dyn PauseWatchdog>,
        pause_limit: Duration,
        watches_discards: bool,
    ) -> Self {
        let watched = WatchedVm::new(vm, watchdog, pause_limit).with_form(PauseForm::OneCommand);
        Self {
            watched,
            monitor: None,
            recorded: None,
            counted: None,
            watches_discards,
            shape: None,
            changes: None,
            has_other_memory: false,
            end_hold: EndHold::default(),
            events: None,
            has_whole_states: true,
        }
    }

    /// Returns the same VM, whose VMM is to stand still when the guest ends
    /// ([`SessionVm::hold_end`]).
    #[must_use]
    pub fn held_at_its_end(self) -> Self {
        Self { end_hold: EndHold::Wanted, ..self }
    }

    /// Returns the same VM, which tells `events` of device states that lack a part.
    #[must_use]
    pub fn telling(self, events: SharedEventSink) -> Self {
        Self { events: Some(events), ..self }
    }

    /// Returns the same VM, with the socket `monitor` at which the user has its monitor, if there
    /// is one.
    #[must_use]
    pub fn with_monitor(self, monitor: Option<PathBuf>) -> Self {
        Self { monitor, ..self }
    }

    /// Returns the same VM, marked as one that is recorded or replays a recording.
    #[must_use]
    pub fn recorded(mut self) -> Self {
        // In the pause, QEMU is asked for the instruction and for requests under way.
        self.watched.set_form(PauseForm::Separate);
        Self { recorded: Some(RecordedState::default()), ..self }
    }

    /// Returns the same VM, whose checkpoints hold the number of instructions of `counted`; `None`
    /// for checkpoints without that number.
    #[must_use]
    pub fn counting(self, counted: Option<InstructionCount>) -> Self {
        Self { counted, ..self }
    }

    /// Returns the same VM, whose checkpoints hold the command line of a machine of shape `shape`.
    /// A checkpoint of a machine of another shape then fails. With `None` the shape is not checked.
    #[must_use]
    pub fn expecting(self, shape: Option<MachineShape>) -> Self {
        Self { shape, ..self }
    }

    /// Has the VM paused by separate commands, because its disks need others in the pause.
    pub fn pause_by_separate_commands(&mut self) {
        self.watched.set_form(PauseForm::Separate);
    }

    /// Returns the VM without its watchdog.
    pub fn vm(&self) -> &dyn Vmm {
        self.watched.vm()
    }

    /// Returns the VM without its watchdog.
    pub fn vm_mut(&mut self) -> &mut dyn Vmm {
        self.watched.vm_mut()
    }

    /// Returns the VM as QEMU's own type, for what QEMU alone can do. Error: the VMM is not QEMU.
    pub fn qemu(&mut self) -> Result<&mut Vm, SessionVmError> {
        let vm = self.watched.vm_mut().as_any_mut();
        vm.downcast_mut().ok_or(SessionVmError::NotQemu)
    }

    /// Returns the process id of the VMM.
    pub fn pid(&self) -> u32 {
        self.vm().pid()
    }

    /// Returns true if another program started the VM.
    pub fn is_attached(&self) -> bool {
        self.vm().origin() == VmOrigin::Attached
    }

    /// Returns the socket of the VM's monitor; `None` unless Keyframe attached to the VM through
    /// one.
    pub fn monitor(&self) -> Option<&PathBuf> {
        self.monitor.as_ref()
    }

    /// Returns the VM's RAM blocks. Errors: [`SessionVmError::DiscardsRam`] if a device that
    /// discards RAM was plugged in, and this run's tracker does not see discarded pages;
    /// [`SessionVmError::Changed`] if the machine is no longer the expected one; the VMM does not
    /// answer.
    pub fn ram_layout(&mut self) -> Result<RamLayout, BoxError> {
        // Looking for discarded pages is half of a scan's time, so it is done only for machines
        // that can discard. The cycle asks after each pause, before it is sealed, so a device
        // plugged in meanwhile cannot slip through.
        let (layout, discards) = match self.shape.take() {
            Some(expected) => {
                let looked = self.qemu().map_err(BoxError::from);
                let looked = looked.and_then(|vm| Ok(vm.ram_layout_and_shape()?));
                let compared = looked.map(|(layout, now)| {
                    let changes =
                        now.may_differ_from(&expected).then(|| now.changes_since(&expected));
                    (layout, now.discards_ram(), changes, now.has_other_memory(&expected))
                });
                self.shape = Some(expected);
                let (layout, discards, changes, has_other_memory) = compared?;
                self.changes.clone_from(&changes);
                self.has_other_memory = has_other_memory;
                if let Some(changes) = changes {
                    return Err(SessionVmError::Changed { changes }.into());
                }
                (layout, discards)
            }
            None if self.watches_discards => return Ok(self.vm_mut().ram_layout()?),
            None => self.vm_mut().ram_layout_and_discards()?,
        };
        if discards && !self.watches_discards {
            return Err(SessionVmError::DiscardsRam.into());
        }
        Ok(layout)
    }

    /// Returns the changes of the machine that the newest look has found. Returns `None` if there
    /// are none.
    pub fn changes(&self) -> Option<&[MachineChange]> {
        self.changes.as_deref()
    }

    /// Returns true if the newest look has found a memory device that was unplugged and plugged in
    /// again: the tracker of the RAM before does not see its writes.
    pub fn has_other_memory(&self) -> bool {
        self.has_other_memory
    }

    /// Makes `machine` describe the machine as it is now, and expects this machine from now on. The
    /// inner `Err` has the changes that no command line can make; then nothing has changed. Error:
    /// the VMM does not describe the machine.
    pub fn follow(
        &mut self,
        machine: &mut MachineMeta,
    ) -> Result<Result<(), Vec<AuditFinding>>, BoxError> {
        let vm = self.qemu()?;
        let shape = vm.shape()?;
        if let [reason, ..] = shape.blockers() {
            let change = MachineChange::Blocked { reason: reason.clone() };
            return Ok(Err(vec![AuditFinding {
                subject: "the VM".into(),
                reason: change.to_string(),
                fix: change.fix().into(),
                severity: Severity::Refused,
            }]));
        }
        let lines = match vm.lines_now()? {
            Ok(lines) => lines,
            Err(findings) => return Ok(Err(findings)),
        };
        let (vcpus, guest_map) = (vm.cpus()?, vm.guest_map()?);
        let threads = vm.qmp().cpu_threads()?;
        machine.user_command = lines.user_command;
        machine.full_command = lines.full_command;
        renew_read_files(machine);
        if self.counted.take_if(|counted| !counted.counts(&threads)).is_some() {
            self.tell_uncounted(CpusChanged);
        }
        (machine.vcpus, machine.guest_map) = (vcpus, Some(guest_map));
        (self.shape, self.changes, self.has_other_memory) = (Some(shape), None, false);
        Ok(Ok(()))
    }

    /// Records whether the VM's tracker reports discarded RAM from now on: `watches_discards`.
    pub fn set_watches_discards(&mut self, watches_discards: bool) {
        self.watches_discards = watches_discards;
    }

    /// Brings the command lines and the guest map of `machine` up to date with the hardware that
    /// was plugged in. Error: the VMM or the watchdog does not answer.
    pub fn refresh(&mut self, machine: &mut MachineMeta) -> Result<()> {
        if let Ok(vm) = self.qemu() {
            (machine.user_command, machine.full_command) = lines_now(vm)?;
            machine.guest_map = Some(vm.guest_map()?);
            renew_read_files(machine);
        } else {
            let now = self.vm_mut().spec()?;
            (machine.user_command, machine.full_command) = (now.user_command, now.full_command);
            machine.guest_map = now.guest_map;
        }
        Ok(())
    }

    /// Returns a place that the next pause fills with the VM's instruction count; `None` if the VM
    /// is neither recorded nor counted.
    pub fn mark(&mut self) -> Option<Position> {
        if let Some(counted) = &mut self.counted {
            return Some(counted.mark());
        }
        let recorded = self.recorded.as_mut()?;
        let position = Position::default();
        recorded.position = Some(Arc::clone(&position));
        Some(position)
    }

    /// Returns true if the VM is recorded and a request of a disk or network card is under way.
    /// Error: the VMM or the watchdog does not answer.
    pub fn has_requests_under_way(&mut self) -> Result<bool, BoxError> {
        self.on_queues(|queues, vm| queues.are_busy(vm.qmp())).unwrap_or(Ok(false))
    }

    /// Returns true during a standstill.
    pub fn is_in_standstill(&self) -> bool {
        self.watched.is_in_standstill()
    }

    /// Pauses the VM until [`SessionVm::end_standstill`], so that several checkpoints can be taken
    /// of one instant. Returns true if the VM ran. If the engine dies, the watchdog resumes the VM.
    /// Error: the VMM or the watchdog does not answer.
    pub fn begin_standstill(&mut self) -> Result<bool, BoxError> {
        let ran = self.watched.begin_standstill()?;
        if ran && let Err(error) = self.settle_queues() {
            let _ = self.watched.end_standstill();
            return Err(error);
        }
        Ok(ran)
    }

    /// Pauses the VM for a scan, until [`SessionVm::end_scan`]. Errors: another client migrates or
    /// dumps the VM; the VMM or the watchdog does not answer. The VM runs on then.
    pub fn begin_scan(&mut self) -> Result<(), BoxError> {
        if let Some(operation) = self.vm_mut().foreign_operation()? {
            return Err(SessionVmError::Busy { operation }.into());
        }
        Ok(self.watched.begin_look()?)
    }

    /// Ends the pause of a scan: the VM runs if it ran before. Returns whether the watchdog resumed
    /// it meanwhile. Error: the VMM or the watchdog does not answer.
    pub fn end_scan(&mut self) -> Result<PauseVerdict, BoxError> {
        Ok(self.watched.end_look()?)
    }

    /// Tells the watchdog the plan of a rollback; with `None`, that the rollback has ended. Error:
    /// the watchdog has ended.
    pub fn plan_rollback(&mut self, plan: Option<&RollbackPlan>) -> Result<(), BoxError> {
        Ok(self.watched.plan_rollback(plan)?)
    }

    /// Waits until the watchdog has carried out what it was told. This disarms it, so it must not be
    /// called in a pause. Error: the watchdog has ended or does not answer.
    pub fn await_watchdog(&mut self) -> Result<(), BoxError> {
        Ok(self.watched.await_watchdog()?)
    }

    /// Tells the watchdog the step that a rollback takes next. Error: the watchdog has ended.
    pub fn note_step(&mut self, step: &RollbackStep) -> Result<(), BoxError> {
        Ok(self.watched.note_step(step)?)
    }

    /// Declares that the VM has ended and its successor is complete.
    pub fn is_succeeded(&mut self) {
        self.watched.is_succeeded();
    }

    /// Puts the paused VM back to `target`. Tells the watchdog each step before the VMM takes it,
    /// and then calls `told`. Errors: the VMM refuses; the watchdog has ended.
    pub fn roll_back(
        &mut self,
        target: &RollbackTarget<'_>,
        scratch: File,
        told: &mut dyn FnMut(),
    ) -> Result<()> {
        Ok(self.watched.roll_back(target, scratch, told)?)
    }

    /// Declares that the VM's state is about to be replaced: until [`SessionVm::allow_running`] the
    /// watchdog ends the rollback, or the VM, if the engine dies. Error: the VMM or the watchdog
    /// does not answer.
    pub fn forbid_running(&mut self) -> Result<(), BoxError> {
        Ok(self.watched.forbid_running()?)
    }

    /// Declares that the VM's state is complete again and may run. Error: the VMM or the watchdog
    /// does not answer.
    pub fn allow_running(&mut self) -> Result<(), BoxError> {
        Ok(self.watched.allow_running()?)
    }

    /// Declares that the VM stands still by itself: the end of the standstill does not resume it.
    pub fn remain_still(&mut self) {
        self.watched.remain_still();
    }

    /// Ends the standstill: the VM runs if it ran before. Returns whether the watchdog resumed it
    /// meanwhile. Error: the VMM or the watchdog does not answer.
    pub fn end_standstill(&mut self) -> Result<PauseVerdict, BoxError> {
        let ended = self.watched.end_standstill();
        self.may_answer_late(true);
        Ok(ended?)
    }

    /// Makes the VMM stand still when the guest ends, if that is wanted and not done yet. If the
    /// VMM cannot, it ends with its guest.
    pub fn hold_end(&mut self) {
        if self.end_hold == EndHold::Wanted {
            let is_held = self.watched.hold_end();
            self.end_hold =
                if is_held.unwrap_or(false) { EndHold::Held } else { EndHold::Unwanted };
        }
    }

    /// Returns true if the VMM stands still when the guest ends.
    pub fn is_held_at_its_end(&self) -> bool {
        self.end_hold == EndHold::Held
    }

    /// Undoes [`SessionVm::hold_end`]. If the guest has ended in between, the VMM ends now. Error:
    /// the VMM does not answer.
    pub fn release_end(&mut self) -> Result<()> {
        if std::mem::take(&mut self.end_hold) == EndHold::Held {
            self.vm_mut().release_end()?;
        }
        Ok(())
    }

    /// Lets the VMM of a guest that has ended or failed do what the VM's user wants then. The
    /// caller has taken the last checkpoint before. `is_final` is true if the guest has ended in a
    /// way at which its VMM ends. Error: the VMM does not answer.
    pub fn finish_end(&mut self, is_final: bool) -> Result<()> {
        if self.end_hold != EndHold::Held {
            return Ok(());
        }
        if is_final {
            self.end_hold = EndHold::Unwanted;
            return Ok(self.vm_mut().end()?);
        }
        // The VMM ends if it stands at an end. If it runs on, it is held again later.
        self.release_end()?;
        self.end_hold = EndHold::Wanted;
        Ok(())
    }

    /// Ends the watchdog and returns the VM.
    pub fn into_vm(self) -> Box<dyn Vmm> {
        self.watched.into_vm()
    }

    /// Lets a recorded VM that was just stopped run on until no request is under way.
    fn settle_queues(&mut self) -> Result<(), BoxError> {
        self.on_queues(|queues, vm| queues.settle(vm.qmp())).unwrap_or(Ok(()))
    }

    /// Calls `operation` with the queues of a recorded VM. `None` for any other VM.
    fn on_queues<T>(
        &mut self,
        operation: impl FnOnce(&mut RequestQueues, &mut Vm) -> Result<T, BoxError>,
    ) -> Option<Result<T, BoxError>> {
        let recorded = self.recorded.as_mut()?;
        let Some(vm) = self.watched.vm_mut().as_any_mut().downcast_mut() else {
            return Some(Err(SessionVmError::NotQemu.into()));
        };
        Some(operation(&mut recorded.queues, vm))
    }

    /// Tells that the guest's instructions are counted no more.
    fn tell_uncounted(&self, error: impl Into<BoxError>) {
        if let Some(events) = &self.events {
            tell_failed(&**events, Step::CountInstructions, Err(error));
        }
    }

    /// Whether the disks of a recorded VM may answer on another core while it runs.
    fn may_answer_late(&mut self, late: bool) {
        if self.recorded.is_some()
            && let Ok(vm) = self.qemu()
        {
            vm.may_answer_late(late);
        }
    }
}

/// Describes the files that the changed command line of `machine` names.
fn renew_read_files(machine: &mut MachineMeta) {
    if let Some(known) = &machine.read_files {
        let files = read_files::renewed(known, &machine.user_command, &machine.directory());
        machine.read_files = Some(files);
    }
}

impl PauseSteps for SessionVm {
    fn prepare_pause(&mut self) -> Result<(), BoxError> {
        if let Ok(vm) = self.qemu() {
            vm.require_savable()?;
        }
        if self.watched.form() == PauseForm::Separate
            && self.recorded.is_none()
            && let Some(operation) = self.vm_mut().foreign_operation()?
        {
            return Err(SessionVmError::Busy { operation }.into());
        }
        self.may_answer_late(false);
        self.on_queues(|queues, vm| queues.await_rest(vm.qmp())).unwrap_or(Ok(()))
    }

    fn hold(&mut self) -> Result<StopOutcome, BoxError> {
        let outcome = self.watched.hold()?;
        if outcome == StopOutcome::Stopped
            && let Err(error) = self.settle_queues()
        {
            self.watched.abandon_hold();
            return Err(error);
        }
        Ok(outcome)
    }

    fn save_device_state(&mut self) -> Result<Vec<u8>, BoxError> {
        let position = self.recorded.as_mut().and_then(|recorded| recorded.position.take());
        if let Some(position) = position {
            let _ = position.set(self.qemu()?.qmp().icount()?);
        }
        if let Some(Err(error)) = self.counted.as_mut().map(InstructionCount::note) {
            self.counted = None;
            self.tell_uncounted(error);
        }
        Ok(self.watched.save_devices()?)
    }

    fn complete_device_state(&mut self, device_state: &mut Vec<u8>) {
        let completed = self.vm_mut().complete_device_state(device_state);
        // Not repeated while it goes on.
        let was_complete = std::mem::replace(&mut self.has_whole_states, completed.is_ok());
        if was_complete && let Some(events) = &self.events {
            tell_failed(&**events, Step::SaveSseFlags, completed);
        }
    }

    fn release(&mut self, _: StopOutcome) -> Result<(), BoxError> {
        let resumed = self.watched.release();
        self.may_answer_late(true);
        Ok(resumed?)
    }

    fn finish_pause(&mut self, _: StopOutcome) -> Result<PauseVerdict, BoxError> {
        Ok(self.watched.settle()?)
    }
}
