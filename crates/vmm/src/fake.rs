//! A VM in memory that tests script: it fails at a step, ends during a pause, loses its monitor.
//!
//! ```
//! use keyframe_vmm::fake::{FakeVm, Incident, Step};
//! use keyframe_vmm::{PauseVerdict, WatchedVm};
//! use std::time::Duration;
//!
//! let (vm, watchdog, control) = FakeVm::new(16);
//! let mut vm = WatchedVm::new(Box::new(vm), Box::new(watchdog), Duration::from_millis(500));
//! control.at(Step::SaveDevices, Incident::ResumedByOther);
//! let mut pause = vm.pause().unwrap();
//! assert!(pause.save_devices().is_ok());
//! assert_eq!(pause.release().unwrap(), PauseVerdict::RanMeanwhile);
//! assert!(control.runs());
//! ```

mod control;
mod succession;
mod watchdog;

use crate::{
    AuditFinding, Capabilities, GuestEnd, Lineage, Resumer, RollbackPlan, RollbackStep,
    RollbackTarget, RunState, SavedPause, StopOutcome, Succession, TellStep, VmEvent, VmExit,
    VmOrigin, Vmm, VmmError, VmmErrorKind,
};
use keyframe_machine::{HostBlock, MachineSpec, VmmKind};
use keyframe_units::{
    BlockKind, HostVirt, PAGE_BYTES, Page, PageIndex, PageSet, RamBlock, RamLayout, ZERO_PAGE,
};
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use control::FakeControl;

/// Process id of every fake.
const PID: u32 = 4_000_001;
/// Address of the RAM block in the imagined process.
const HOST: HostVirt = HostVirt(0x7f00_0000_0000);

/// An operation of the fake VM or of its watchdog, which tests observe and disturb.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// [`Vmm::spec`].
    Spec,
    /// [`Vmm::audit`].
    Audit,
    /// [`Vmm::ram_blocks`] and [`Vmm::ram_layout`].
    Ram,
    /// [`Vmm::run_state`].
    RunState,
    /// [`Vmm::drain_events`].
    DrainEvents,
    /// [`Vmm::stop`].
    Stop,
    /// [`Vmm::pause_and_save`].
    PauseAndSave,
    /// [`Vmm::end_saved_pause`].
    EndSavedPause,
    /// [`Vmm::save_devices`].
    SaveDevices,
    /// [`Vmm::resume`].
    Resume,
    /// [`Vmm::resume_by_new_connection`].
    ResumeByNewConnection,
    /// [`Vmm::ran_meanwhile`].
    RanMeanwhile,
    /// [`Vmm::check_rollback`].
    CheckRollback,
    /// [`Vmm::roll_back`].
    RollBack,
    /// [`Succession::prepare`].
    PrepareSuccessor,
    /// [`Succession::end_predecessor`].
    EndPredecessor,
    /// [`Succession::start`].
    StartSuccessor,
    /// [`Vmm::exit`], [`Vmm::wait_exit`] and [`Vmm::finish_shutdown`].
    Exit,
    /// [`Vmm::end`].
    End,
    /// [`PauseWatchdog::arm`](crate::PauseWatchdog::arm).
    Arm,
    /// [`PauseWatchdog::disarm`](crate::PauseWatchdog::disarm).
    Disarm,
    /// [`PauseWatchdog::forbid_running`](crate::PauseWatchdog::forbid_running).
    ForbidRunning,
    /// [`PauseWatchdog::resume_now`](crate::PauseWatchdog::resume_now).
    ResumeNow,
    /// [`PauseWatchdog::end`](crate::PauseWatchdog::end).
    EndWatchdog,
}

/// A disturbance that a test plans for a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incident {
    /// The operation fails with this text and has no effect.
    Fail(String),
    /// The operation takes effect, and its answer is lost: it fails with a timeout.
    LoseAnswer,
    /// Another client resumes the VM just before the operation.
    ResumedByOther,
    /// Another client pauses the VM just before the operation.
    PausedByOther,
    /// The watchdog resumes the VM just before the operation.
    WatchdogFires,
    /// The guest shuts down just before the operation; the VMM ends with this exit code.
    End(i32),
    /// The VMM is killed just before the operation: it ends without an event.
    Kill,
    /// The monitor is lost just before the operation: it and all later ones fail.
    LoseMonitor,
}

/// Code of a test that runs just before a step.
type Hook = Box<dyn FnOnce() + Send>;

/// The state of the watchdog.
#[derive(Default)]
struct WatchdogState {
    is_armed: bool,
    has_fired: bool,
    running_forbidden: bool,
    plan: Option<RollbackPlan>,
    /// The steps since the plan.
    steps: Vec<RollbackStep>,
}

/// The command that is a whole pause ([`Vmm::pause_and_save`]).
#[derive(Clone, Copy, PartialEq, Eq)]
enum OneCommand {
    /// The VMM does not have it.
    Missing,
    /// It can be given.
    Ready,
    /// It holds the VM, which ran before or did not.
    Holds { ran: bool },
}

/// What happens when the guest ends.
#[derive(Clone, Copy, Default)]
struct AtGuestEnd {
    /// The VMM stands still then.
    is_held: bool,
    /// It has ended.
    has_ended: bool,
}

/// The state that the VM, its watchdog and the test share.
#[expect(clippy::struct_excessive_bools, reason = "each is set by a test of its own")]
struct FakeState {
    runs: bool,
    /// The run state of a VM that stands still by itself.
    standing: Option<RunState>,
    exit: Option<ExitStatus>,
    monitor_lost: bool,
    ran_meanwhile: bool,
    is_pause_noted: bool,
    /// The pages at the end of RAM that its block does not use.
    unused_pages: usize,
    pins_ram: bool,
    /// A rollback is by a successor.
    is_succeeded: bool,
    /// What each reset of the machine writes.
    reset_writes: BTreeMap<PageIndex, Page>,
    /// RAM as it was when the devices were last loaded.
    ram_at_load: Vec<Page>,
    at_end: AtGuestEnd,
    one_command: OneCommand,
    watchdog: WatchdogState,
    events: VecDeque<VmEvent>,
    script: BTreeMap<Step, VecDeque<Incident>>,
    hooks: BTreeMap<Step, VecDeque<Hook>>,
    origin: VmOrigin,
    steps: Vec<Step>,
    ram: Vec<Page>,
    dirty: PageSet,
    device_state: Vec<u8>,
    findings: Vec<AuditFinding>,
    spec: MachineSpec,
    capabilities: Capabilities,
}

impl FakeState {
    fn resume(&mut self) {
        if !self.runs && self.exit.is_none() {
            (self.runs, self.standing) = (true, None);
            self.events.push_back(VmEvent::Resumed);
        }
    }

    /// Ends the command that holds the VM, as the VMM does by itself.
    fn end_saved_pause(&mut self) {
        if let OneCommand::Holds { ran } = self.one_command {
            self.one_command = OneCommand::Ready;
            if ran {
                self.resume();
            }
        }
    }

    fn pause(&mut self) {
        if self.runs {
            self.runs = false;
            self.events.push_back(VmEvent::Paused);
        }
    }

    fn end(&mut self, code: i32) {
        if self.exit.is_none() {
            (self.runs, self.monitor_lost) = (false, true);
            self.exit = Some(ExitStatus::from_raw(code << 8));
            self.events.push_back(VmEvent::ShutDown);
        }
    }

    /// The guest ends. The VMM ends with it, unless it is held.
    fn end_guest(&mut self, end: GuestEnd) {
        self.at_end.has_ended = true;
        self.events.push_back(VmEvent::GuestEnded(end));
        self.pause();
        if !self.at_end.is_held {
            self.end(0);
        }
    }

    fn kill(&mut self) {
        if self.exit.is_none() {
            (self.runs, self.monitor_lost) = (false, true);
            self.exit = Some(ExitStatus::from_raw(9));
        }
    }

    /// Notes `step` and lets the scripted incident happen; true if the answer is to be lost.
    fn enter(&mut self, step: Step) -> Result<bool, VmmError> {
        self.steps.push(step);
        match self.script.get_mut(&step).and_then(VecDeque::pop_front) {
            Some(Incident::Fail(text)) => {
                return Err(VmmError::new(VmmErrorKind::Other, text, None));
            }
            Some(Incident::LoseAnswer) => return Ok(true),
            Some(Incident::ResumedByOther) => {
                self.ran_meanwhile |= !self.runs;
                self.resume();
            }
            Some(Incident::PausedByOther) => self.pause(),
            Some(Incident::WatchdogFires) => {
                self.watchdog.has_fired |= !self.runs;
                self.resume();
            }
            Some(Incident::End(code)) => self.end(code),
            Some(Incident::Kill) => self.kill(),
            Some(Incident::LoseMonitor) => self.monitor_lost = true,
            None => {}
        }
        Ok(false)
    }
}

/// A VM without a VMM, which tests control. It has one RAM block.
pub struct FakeVm {
    shared: Arc<Mutex<FakeState>>,
}

/// The watchdog of a [`FakeVm`]. It resumes the VM only when the test or the engine says so: it has
/// no clock.
pub struct FakeWatchdog {
    shared: Arc<Mutex<FakeState>>,
}

/// Runs the hook of `step`, then gives the state to the step.
fn enter(shared: &Mutex<FakeState>, step: Step) -> MutexGuard<'_, FakeState> {
    let hook = lock(shared).hooks.get_mut(&step).and_then(VecDeque::pop_front);
    if let Some(hook) = hook {
        hook();
    }
    lock(shared)
}

fn lock(shared: &Mutex<FakeState>) -> MutexGuard<'_, FakeState> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeVm {
    /// Returns a running VM with `len_pages` pages of zeros, its watchdog, and the test's view of
    /// both.
    pub fn new(len_pages: usize) -> (Self, FakeWatchdog, FakeControl) {
        let state = FakeState {
            runs: true,
            standing: None,
            exit: None,
            monitor_lost: false,
            ran_meanwhile: false,
            is_pause_noted: false,
            unused_pages: 0,
            pins_ram: false,
            is_succeeded: false,
            reset_writes: BTreeMap::new(),
            ram_at_load: Vec::new(),
            at_end: AtGuestEnd::default(),
            one_command: OneCommand::Missing,
            watchdog: WatchdogState::default(),
            events: VecDeque::new(),
            script: BTreeMap::new(),
            hooks: BTreeMap::new(),
            origin: VmOrigin::Launched,
            steps: Vec::new(),
            ram: vec![ZERO_PAGE; len_pages],
            dirty: PageSet::new(len_pages as u64),
            device_state: b"devices".to_vec(),
            findings: Vec::new(),
            spec: MachineSpec { machine_type: "fake-1".into(), vcpus: 1, ..MachineSpec::default() },
            capabilities: Capabilities::all(VmmKind::Qemu),
        };
        let shared = Arc::new(Mutex::new(state));
        let watchdog = FakeWatchdog { shared: Arc::clone(&shared) };
        (Self { shared: Arc::clone(&shared) }, watchdog, FakeControl { shared })
    }

    /// Returns the test's view of this VM.
    pub fn control(&self) -> FakeControl {
        FakeControl { shared: Arc::clone(&self.shared) }
    }

    /// Enters `step` and has `operation` act on the state, if the monitor answers.
    fn run<T>(
        &self,
        step: Step,
        operation: impl FnOnce(&mut FakeState) -> Result<T, VmmError>,
    ) -> Result<T, VmmError> {
        let mut state = enter(&self.shared, step);
        let is_lost = state.enter(step)?;
        if state.monitor_lost {
            return Err(VmmError::new(
                VmmErrorKind::MonitorLost,
                "the VM has closed its monitor",
                None,
            ));
        }
        let result = operation(&mut state)?;
        if is_lost {
            return Err(VmmError::new(VmmErrorKind::Timeout, "the answer was lost", None));
        }
        Ok(result)
    }

    fn look_for_exit(&self) -> Result<Option<VmExit>, VmmError> {
        let mut state = enter(&self.shared, Step::Exit);
        state.enter(Step::Exit)?;
        Ok(state.exit.map(VmExit::Status))
    }
}

impl Vmm for FakeVm {
    fn pid(&self) -> u32 {
        PID
    }

    fn origin(&self) -> VmOrigin {
        lock(&self.shared).origin
    }

    fn capabilities(&self) -> Capabilities {
        lock(&self.shared).capabilities.clone()
    }

    fn spec(&mut self) -> Result<MachineSpec, VmmError> {
        self.run(Step::Spec, |state| Ok(state.spec.clone()))
    }

    fn lineage(&self) -> Option<Lineage> {
        None
    }

    fn audit(&mut self) -> Result<Vec<AuditFinding>, VmmError> {
        self.run(Step::Audit, |state| Ok(state.findings.clone()))
    }

    fn ram_blocks(&mut self) -> Result<Vec<HostBlock>, VmmError> {
        self.run(Step::Ram, |state| Ok(vec![HostBlock { block: block(state), host: HOST }]))
    }

    fn ram_layout(&mut self) -> Result<RamLayout, VmmError> {
        self.run(Step::Ram, |state| {
            RamLayout::new(vec![block(state)])
                .map_err(|e| VmmError::new(VmmErrorKind::Other, e, None))
        })
    }

    fn discards_ram(&mut self) -> Result<bool, VmmError> {
        Ok(false)
    }

    fn pins_ram(&mut self) -> Result<bool, VmmError> {
        Ok(lock(&self.shared).pins_ram)
    }

    fn run_state(&mut self) -> Result<RunState, VmmError> {
        self.run(Step::RunState, |state| {
            let paused = || state.standing.clone().unwrap_or(RunState::Paused);
            Ok(if state.runs { RunState::Running } else { paused() })
        })
    }

    fn drain_events(&mut self) -> Result<Vec<VmEvent>, VmmError> {
        let mut state = enter(&self.shared, Step::DrainEvents);
        state.enter(Step::DrainEvents)?;
        Ok(state.events.drain(..).collect())
    }

    fn stop(&mut self) -> Result<StopOutcome, VmmError> {
        self.run(Step::Stop, |state| {
            let outcome =
                if state.runs { StopOutcome::Stopped } else { StopOutcome::AlreadyPaused };
            state.pause();
            state.ran_meanwhile = false;
            Ok(outcome)
        })
    }

    fn note_pause(&mut self, begins: bool) {
        lock(&self.shared).is_pause_noted = begins;
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        self.run(Step::Resume, |state| {
            state.resume();
            Ok(())
        })
    }

    fn pause_and_save(&mut self) -> Result<Option<SavedPause>, VmmError> {
        if lock(&self.shared).one_command == OneCommand::Missing {
            return Ok(None);
        }
        self.run(Step::PauseAndSave, |state| {
            let stop = if state.runs { StopOutcome::Stopped } else { StopOutcome::AlreadyPaused };
            state.one_command = OneCommand::Holds { ran: state.runs };
            state.pause();
            state.ran_meanwhile = false;
            Ok(Some(SavedPause { stop, device_state: state.device_state.clone() }))
        })
    }

    fn end_saved_pause(&mut self) -> Result<(), VmmError> {
        self.run(Step::EndSavedPause, |state| {
            state.end_saved_pause();
            Ok(())
        })
    }

    fn resume_by_new_connection(&mut self) {
        let mut state = enter(&self.shared, Step::ResumeByNewConnection);
        if state.enter(Step::ResumeByNewConnection).is_ok() {
            state.resume();
        }
    }

    fn ran_meanwhile(&mut self) -> Result<bool, VmmError> {
        self.run(Step::RanMeanwhile, |state| Ok(state.ran_meanwhile))
    }

    fn save_devices(&mut self) -> Result<Vec<u8>, VmmError> {
        self.run(Step::SaveDevices, |state| Ok(state.device_state.clone()))
    }

    fn resumer(&self) -> Result<Resumer, VmmError> {
        Ok(Resumer::default())
    }

    fn check_rollback(&mut self, _: &[u8]) -> Result<(), VmmError> {
        self.run(Step::CheckRollback, |_| Ok(()))
    }

    fn reset_pages(&mut self, _: &RamLayout) -> Result<Vec<PageIndex>, VmmError> {
        Ok(lock(&self.shared).reset_writes.keys().copied().collect())
    }

    fn roll_back(
        &mut self,
        target: &RollbackTarget<'_>,
        _: File,
        tell: TellStep<'_>,
    ) -> Result<(), VmmError> {
        tell(RollbackStep::Loads)?;
        self.run(Step::RollBack, |state| {
            for (page, content) in state.reset_writes.clone() {
                set_page(state, page, &content);
            }
            for page in target.pages {
                set_page(state, *page, &ZERO_PAGE);
            }
            let mut place = |page: PageIndex, content: &Page| {
                set_page(state, page, content);
                Ok(())
            };
            let read = target.ram.read_some(target.pages, &mut place);
            read.map_err(|e| VmmError::new(VmmErrorKind::Other, e, None))?;
            state.ram_at_load.clone_from(&state.ram);
            state.device_state = target.device_state.to_vec();
            // As QEMU's reset before the load.
            state.standing = state.standing.take().filter(|state| *state != RunState::ShutDown);
            Ok(())
        })?;
        tell(RollbackStep::Loaded)
    }

    fn succession(&mut self) -> Result<Option<Box<dyn Succession>>, VmmError> {
        let predecessor = Arc::clone(&self.shared);
        let is_succeeded = lock(&predecessor).is_succeeded;
        let place = || Box::new(succession::FakeSuccession { predecessor }) as Box<dyn Succession>;
        Ok(is_succeeded.then(place))
    }

    fn exit(&mut self) -> Result<Option<VmExit>, VmmError> {
        self.look_for_exit()
    }

    fn wait_exit(&mut self, _: Duration) -> Result<Option<VmExit>, VmmError> {
        self.look_for_exit()
    }

    fn finish_shutdown(&mut self) -> Result<Option<VmExit>, VmmError> {
        self.look_for_exit()
    }

    fn hold_end(&mut self) -> Result<bool, VmmError> {
        lock(&self.shared).at_end.is_held = true;
        Ok(true)
    }

    fn release_end(&mut self) -> Result<(), VmmError> {
        let mut state = lock(&self.shared);
        state.at_end.is_held = false;
        if state.at_end.has_ended {
            state.end(0);
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), VmmError> {
        let mut state = enter(&self.shared, Step::End);
        state.enter(Step::End)?;
        state.end(0);
        Ok(())
    }

    fn leave_running(self: Box<Self>) -> u32 {
        PID
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

fn set_page(state: &mut FakeState, page: PageIndex, content: &Page) {
    if let Some(slot) = state.ram.get_mut(page.0 as usize) {
        *slot = *content;
        state.dirty.insert(page);
    }
}

fn block(state: &FakeState) -> RamBlock {
    let bytes = |pages: usize| (pages * PAGE_BYTES) as u64;
    RamBlock {
        name: "ram".into(),
        kind: BlockKind::Backend,
        used_bytes: bytes(state.ram.len().saturating_sub(state.unused_pages)),
        total_bytes: bytes(state.ram.len()),
    }
}
