//! A session of one VM that is driven by the traits of `keyframe_vmm` alone, whatever its VMM is.
//!
//! ```text
//!   options fit the VMM? ─▶ run directory, place among the store's writers ─▶ start or attach
//!     ─▶ audit ─▶ attach to RAM ─▶ run in the store ─▶ watchdog ─▶ engine
//! ```
//!
//! [`launch`](crate::launch) and [`attach`](crate::attach()) are for QEMU, which can do more:
//! groups, recordings, disks that Keyframe serves. [`run_vm`] refuses what the VMM cannot do, by its
//! [`Capabilities`](keyframe_vmm::Capabilities), before it starts or touches the VM.

use super::launch::{lock, names, refuse, require_kernel};
use super::machines::{Machines, Member, Peripherals};
use super::memory_guard::GuestMemory;
use super::ram_capture::RamCapture;
use super::session_vm::SessionVm;
use super::store_sink::{MachineDescriptions, StoreSink};
use super::{LanChoice, RunReport, SessionOptions, budget, memory_limits, rights};
use crate::control::{OnExit, Strategy};
use crate::engine::{Engine, RunEnd, Successor};
use crate::error::{Error, Result};
use crate::event::disk_events;
use crate::event::{Step, tell_failed};
use crate::helper_process;
use crate::launch::PreparedSession;
use crate::rehearsal::{Rehearsal, Rehearser};
use crate::run_dir::{self, RunDir};
use crate::teardown::Teardown;
use crate::watchdog_keeper::WatchdogKeeper;
use keyframe_capture::BoxError;
use keyframe_disk_capture::{DiskCapture, DiskMethod, DrivePlan};
use keyframe_pause_watchdog::Watchdog;
use keyframe_store::{DiskState, MemberMeta, Store, Writer};
use keyframe_vm_disks::read_files;
use keyframe_vmm::{
    Ability, Capabilities, Restorer, Resumer, RunState, VmOrigin, Vmm, VmmError, WritableDrive,
};
use std::sync::Arc;

/// A VM that a session is to take checkpoints of, and how to get it.
pub struct VmSource<'a> {
    /// What its VMM is able to do.
    pub capabilities: Capabilities,
    /// The process id of the VMM; `None` if it is still to be started.
    pub pid: Option<u32>,
    /// The size of its RAM in bytes.
    pub ram_bytes: u64,
    /// The drives to which the guest of a VM that is still to be started will be able to write;
    /// those of another VM are asked of its VMM.
    pub drives: Vec<WritableDrive>,
    /// Starts the VM, or attaches to it.
    pub start: Box<dyn FnOnce() -> Result<Box<dyn Vmm>, VmmError> + 'a>,
    /// Restores its checkpoints, for a rehearsal. `None` for a session without one.
    pub restorer: Option<Box<dyn Restorer + Send>>,
}

/// Takes checkpoints of the VM of `source` into `store`, until it ends or the session is asked to
/// end. Returns the result of the run.
///
/// Errors: the VMM cannot do what `options` ask for; those of the start; the VM cannot be
/// checkpointed exactly; the failure that ended the run; a failed teardown. A VM that this function
/// started is ended after an error before its first checkpoint; any other VM runs on, also one that has
/// taken the place of another in a rollback.
pub fn run_vm(store: &Store, source: VmSource<'_>, options: SessionOptions) -> Result<RunReport> {
    budget::check(&options)?;
    require_kernel(&options)?;
    require_abilities(&source.capabilities, &options)?;
    let mut totals = Totals::default();
    let mut options = options;
    let mut report = run_one(store, source, false, options.clone())?;
    // Each rollback has ended the session, because another process is the VM.
    while let Some(Successor { vm, stop }) = report.successor.take() {
        let is_enough = options.count.is_some_and(|count| count <= report.sealed);
        if let Some(on_exit) = stop.or_else(|| is_enough.then_some(options.on_exit)) {
            report.end = end_successor(vm, on_exit)?;
            break;
        }
        totals.add(&report);
        if let Some(count) = &mut options.count {
            *count = count.saturating_sub(report.sealed);
        }
        // The next watchdog is not to be a victim with this process.
        let withdrawn = memory_limits::withdraw_as_victim();
        tell_failed(&*options.events, Step::WithdrawAsVictim, withdrawn);
        // The successor has been loaded: nothing is left to be rehearsed.
        options.rehearsal = false;
        options.fault = None;
        report = run_one(store, VmSource::of_successor(vm)?, true, options.clone())?;
    }
    totals.add_to(&mut report);
    Ok(report)
}

/// Ends the VM `vm`, or leaves it running. Error: it does not end.
fn end_successor(mut vm: Box<dyn Vmm>, on_exit: OnExit) -> Result<RunEnd> {
    if vm.origin() == VmOrigin::Attached {
        vm.leave_running();
        return Ok(RunEnd::Detached);
    }
    if on_exit == OnExit::Keep {
        vm.leave_running();
        return Ok(RunEnd::Kept);
    }
    vm.end()?;
    Ok(RunEnd::Killed)
}

/// The counts of the sessions before the last one.
#[derive(Default)]
struct Totals {
    sealed: u64,
    failed: u64,
    audited_wrong: u64,
}

impl Totals {
    fn add(&mut self, report: &RunReport) {
        self.sealed += report.sealed;
        self.failed += report.failed;
        self.audited_wrong += report.audited_wrong;
    }

    fn add_to(self, report: &mut RunReport) {
        report.sealed += self.sealed;
        report.failed += self.failed;
        report.audited_wrong += self.audited_wrong;
    }
}

impl VmSource<'_> {
    /// The source of a VM that has taken the place of another one. Error: its VMM does not answer.
    fn of_successor(mut vm: Box<dyn Vmm>) -> Result<Self> {
        let ram_bytes = vm.ram_layout()?.len_bytes();
        Ok(Self {
            capabilities: vm.capabilities(),
            pid: Some(vm.pid()),
            ram_bytes,
            drives: Vec::new(),
            start: Box::new(move || Ok(vm)),
            restorer: None,
        })
    }
}

/// Runs one session, to its end or to the successor of its VM. A VM that `is_successor` runs on if the
/// session cannot begin.
fn run_one(
    store: &Store,
    source: VmSource<'_>,
    is_successor: bool,
    options: SessionOptions,
) -> Result<RunReport> {
    // Before the VMM is started: it must open the files after this.
    let planned = DrivePlan::of(&source.drives, options.disk)?;
    let (name, _) = names(&[source.pid.and_then(run_dir::name_of_process)], false, &options)?;
    let run_dir = RunDir::claim(&name)?;
    let guests = [GuestMemory { pid: source.pid, ram_bytes: source.ram_bytes }];
    let command = if source.pid.is_some() { "attach" } else { "run" };
    let writer = lock(store, command, (&name, &guests), &options)?;
    let mut vm = (source.start)()?;
    let ends_with_session = vm.origin() != VmOrigin::Attached;
    if ends_with_session {
        // This comes before the threads that copy and encode, which inherit the rights.
        rights::trace_and_open_taps(&*options.events);
    }
    let place = (store, writer, run_dir, name);
    let prepared =
        match prepare(place, &mut *vm, (source.restorer, &source.drives, planned), &options) {
            Ok(prepared) => prepared,
            Err(error) if is_successor => return Err(error),
            Err(error) => return Err(give_up(vm, error)),
        };
    let process = keyframe_kernel::Process::open(vm.pid());
    let engine = Engine::new(store, prepared.with(vm, &options), options);
    let engine = engine.inspect_err(|_| {
        if let Ok(process) = process
            && ends_with_session
            && !is_successor
        {
            let kill = rustix::process::Signal::KILL;
            let _ = rustix::process::pidfd_send_signal(process.pidfd(), kill);
        }
    });
    engine?.run()
}

/// Ends `vm` after `error`, if this process started it.
fn give_up(mut vm: Box<dyn Vmm>, error: Error) -> Error {
    let mut teardown = Teardown::after(error);
    if vm.origin() != VmOrigin::Attached {
        teardown.step(vm.end().map_err(Error::from));
    }
    teardown.into_error()
}

/// Checks that a VM of `capabilities` can do what `options` ask for. Error: [`Error::Unsupported`]
/// for the first ability that it lacks.
fn require_abilities(capabilities: &Capabilities, options: &SessionOptions) -> Result<()> {
    let needs = [
        (options.recorded.is_some(), Ability::Record),
        (!matches!(options.lans, LanChoice::None), Ability::Groups),
        (options.disk == DiskMethod::Served, Ability::ServedDisks),
        (options.disk == DiskMethod::Bitmap, Ability::DirtyBitmaps),
        (!options.leave_out.0.is_empty(), Ability::LeftOutDisks),
        (options.strategy == Strategy::Fork, Ability::Fork),
        (options.count_instructions, Ability::InstructionCount),
    ];
    for (_, ability) in needs.into_iter().filter(|(is_needed, _)| *is_needed) {
        capabilities.require(ability)?;
    }
    Ok(())
}

/// All of a session but the VM itself.
struct Prepared {
    name: String,
    run_dir: RunDir,
    copying: RamCapture,
    sink: StoreSink,
    writer: Writer,
    meta: MachineDescriptions,
    watchdog: WatchdogKeeper,
    disks: Option<Box<dyn DiskCapture>>,
    runs: bool,
}

/// Takes every step that may refuse the VM. Error: the reason why it is refused.
fn prepare(
    (store, mut writer, run_dir, name): (&Store, Writer, RunDir, String),
    vm: &mut dyn Vmm,
    (restorer, known_drives, planned): (
        Option<Box<dyn Restorer + Send>>,
        &[WritableDrive],
        DrivePlan,
    ),
    options: &SessionOptions,
) -> Result<Prepared> {
    refuse(vm, &*options.events)?;
    let drives = vm.writable_drives()?;
    // A plan makes a clone of each file.
    let (plan, were_open) = if drives == known_drives {
        (planned, false)
    } else {
        (DrivePlan::of(&drives, options.disk)?, true)
    };
    let events = disk_events(&options.events);
    let disks = plan.capture((store, &name), (&mut *vm, were_open), drives, events)?;
    if let Some(socket) = vm.monitor_socket()
        && vm.origin() == VmOrigin::Launched
    {
        run_dir.link_api(&socket)?;
    }
    // Before the attach: it is the last step that costs the VM nothing.
    let watchdog = watchdog(vm, options)?;
    let runs = vm.run_state()? == RunState::Running;
    let copying = RamCapture::start(&mut [(&name, &mut *vm)], false, options)?;
    let ram_blocks = copying.layout.blocks().len();
    let mut machine = vm.spec()?;
    let media = vm.read_only_media()?;
    let media = read_files::describe_media(&media, &machine.directory());
    machine.read_files =
        Some(media.map_err(|e| Error::io("look at the VM's read-only drives", e))?);
    let member = MemberMeta { name: name.clone(), pid: vm.pid(), ram_blocks, machine };
    let meta = MachineDescriptions::new(vec![member], false);
    let metas = disks.as_ref().map_or_else(Vec::new, |disks| disks.metas().to_vec());
    let run = writer.begin_run_with(&name, &copying.layout, metas, DiskState::default());
    let run = run.map_err(|e| Error::store(store.path(), e))?;
    let lineage = vm.lineage().filter(|lineage| lineage.store == store.id());
    let origin = lineage.map(|lineage| lineage.checkpoint);
    let mut sink = StoreSink::new(run, meta.clone(), options.fault.clone(), origin);
    if let Some(restorer) = restorer.filter(|_| options.rehearsal) {
        let events = Arc::clone(&options.events);
        let rehearser = Rehearser::Restorer(restorer);
        sink.rehearsal = Some(Rehearsal { store: store.clone(), events, rehearser });
    }
    if let Some(fault) = &options.fault {
        fault.bind(vm.pid(), vm.monitor_connection());
    }
    Ok(Prepared { name, run_dir, copying, sink, writer, meta, watchdog, disks, runs })
}

impl Prepared {
    /// Makes the session of `vm`, for which all this was prepared.
    fn with(self, vm: Box<dyn Vmm>, options: &SessionOptions) -> PreparedSession {
        let Self { name, run_dir, copying, sink, writer, meta, watchdog, disks, runs } = self;
        let health = watchdog.health();
        let watches = copying.watches_discards.first().copied().unwrap_or(false);
        let vm = SessionVm::new(vm, Box::new(watchdog), options.pause_limit, watches)
            .telling(Arc::clone(&options.events))
            .held_at_its_end();
        let member = Member::new(name.clone(), vm, runs).watched_by(health);
        let machines = Machines::new(vec![member], false, Peripherals { lans: None, disks });
        PreparedSession { name, run_dir, machines, copying, sink, writer, meta }
    }
}

/// Starts the watchdog of `vm`: a process of its own, which outlives a crash of this one. Error:
/// the process cannot be started.
fn watchdog(vm: &dyn Vmm, options: &SessionOptions) -> Result<WatchdogKeeper> {
    let Resumer { words, descriptors } = vm.resumer()?;
    if !descriptors.is_empty() {
        return Err(Error::WatchdogDescriptors);
    }
    let start = move || {
        let mut command = helper_process::command("__watchdog");
        command.args(&words);
        Watchdog::spawn(&mut command).map_err(BoxError::from)
    };
    Ok(WatchdogKeeper::start(Box::new(start), Arc::clone(&options.events))?)
}
