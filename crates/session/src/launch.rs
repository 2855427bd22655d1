//! Everything before the guest's first instruction: launch, audit, attach, watchdog, run directory.

pub(crate) mod line_disks;

use super::flight_recorder;
use super::machines::{Machines, Member, Peripherals};
use super::memory_guard::{self, GuestMemory};
use super::ram_capture::RamCapture;
use super::session_vm::SessionVm;
use super::store_sink::{MachineDescriptions, StoreSink};
use super::{LanChoice, SessionOptions};
use crate::control::TrackerKind;
use crate::error::{Error, Result};
use crate::event::{Event, EventSink, SharedEventSink, Step, disk_events, tell_failed};
use crate::helper_process;
use crate::instruction_count::{CountObstacle, InstructionCount};
use crate::lans::{self, Lans};
use crate::rehearsal::{Rehearsal, Rehearser};
use crate::rights;
use crate::run_dir::{self, RunDir};
use crate::teardown::Teardown;
use crate::watchdog_keeper::{StartWatchdog, WatchdogKeeper};
use keyframe_disk_capture::served::ServedDiskCapture;
use keyframe_disk_capture::{self as disk_capture, DiskCapture, DiskMethod};
use keyframe_qemu::watchdog;
use keyframe_qemu::{
    AuditFinding, Invocation, LaunchOptions, MachineShape, QemuIdentity, Severity, Vm,
};
use keyframe_store::{DiskState, MachineMeta, MemberMeta, Store, Tuning, Writer};
use keyframe_vm_disks as disks;
use keyframe_vm_disks::media::Media;
use keyframe_vmm::Vmm;
use line_disks::{LineDisks, disk_owners};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// VMs that are ready to run: tracked, and with a run in the store.
pub struct PreparedSession {
    /// The VM's name, or the group's.
    pub name: String,
    /// The run directory.
    pub run_dir: RunDir,
    /// The VMs with their watchdogs, networks and disks.
    pub machines: Machines,
    /// The capture of their RAM.
    pub copying: RamCapture,
    /// The sink that stores their checkpoints.
    pub sink: StoreSink,
    /// The writer of the store, which begins further runs.
    pub writer: Writer,
    /// The descriptions of the machines, for further runs.
    pub meta: MachineDescriptions,
}

/// The command lines of the VMs to launch.
pub enum CommandLines {
    /// One VM's command line.
    One(Vec<OsString>),
    /// The command lines of a group's members.
    Group(Vec<Vec<OsString>>),
}

/// A VM that has been started and not been prepared.
pub struct StartedVm {
    /// Its name, unique among a group's members.
    pub name: String,
    /// Its QEMU.
    pub vm: Vm,
    /// The QEMU binary.
    pub identity: QemuIdentity,
    /// The working directory of its QEMU.
    pub directory: PathBuf,
    /// The socket of its monitor, if Keyframe attached to the VM through one.
    pub monitor: Option<PathBuf>,
    /// True if the guest is to run, or runs already.
    pub runs: bool,
}

/// Starts the VMs of `commands` and brings them up to just before their first instruction, with
/// everything that their checkpoints in `store` need. Errors: a refused machine or option; QEMU
/// does not start; the store is in use. VMs that were started are ended.
pub fn launch(
    store: &Store,
    commands: CommandLines,
    options: &SessionOptions,
) -> Result<PreparedSession> {
    require_kernel(options)?;
    let directory =
        std::env::current_dir().map_err(|e| Error::io("find the working directory", e))?;
    let (commands, is_group) = match commands {
        CommandLines::One(command) => (vec![command], false),
        CommandLines::Group(commands) => (commands, true),
    };
    let mut starting = Vec::with_capacity(commands.len());
    for command in commands {
        let invocation = Invocation::parse(command)?;
        let identity = invocation.identity()?;
        starting.push((invocation, identity));
    }
    let wanted: Vec<_> =
        starting.iter().map(|(line, _)| line.vm_name().map(str::to_owned)).collect();
    let (name, members) = names(&wanted, is_group, options)?;
    let run_dir = RunDir::claim(&name)?;
    let guests: Vec<_> = starting
        .iter()
        .map(|(line, _)| GuestMemory { pid: None, ram_bytes: line.ram_bytes() })
        .collect();
    let writer = lock(store, "run", (&name, &guests), options)?;
    let mut launching = Launching {
        store,
        name: &name,
        run_dir: run_dir.path(),
        directory,
        is_group,
        options,
        found: Vec::with_capacity(starting.len()),
        // The networks come before the VMs, which connect to them when they start.
        peripherals: Peripherals { lans: open_lans(options)?, disks: None },
    };
    let started = launching.start_all(starting, members);
    let Launching { found, peripherals, .. } = launching;
    // The guests have not run, so nothing is lost if they end.
    if let Err(error) = started {
        return Err(end(found, peripherals, error));
    }
    // This comes before the threads that copy and encode, which inherit the rights.
    rights::trace_only(&*options.events);
    prepare(store, writer, run_dir, (name, is_group), (found, peripherals), options).map_err(
        |refused| {
            let RefusedVms { error, found, peripherals } = *refused;
            end(found, peripherals, error)
        },
    )
}

/// VMs that are being launched, and their peripherals. After an error [`end`] ends both.
struct Launching<'a> {
    store: &'a Store,
    /// The VM's name, or the group's.
    name: &'a str,
    run_dir: &'a Path,
    /// The working directory of the VMs.
    directory: PathBuf,
    is_group: bool,
    options: &'a SessionOptions,
    found: Vec<StartedVm>,
    peripherals: Peripherals,
}

impl Launching<'_> {
    /// Starts the VMs with these command lines and names, and sets up the capture of their disks.
    fn start_all(
        &mut self,
        mut starting: Vec<(Invocation, QemuIdentity)>,
        members: Vec<String>,
    ) -> Result<()> {
        let options = self.options;
        let of_group = self.is_group.then_some(&members[..]);
        let lines = LineDisks { members: of_group, leave_out: &options.leave_out };
        let drives = lines.captured(&starting, &self.directory)?;
        let method = disk_capture::method::for_launch(options.disk, &drives)?;
        if method == DiskMethod::Served {
            let place = (self.store, self.name, self.run_dir);
            let served = lines.serve(place, &mut starting, &self.directory, &*options.events)?;
            self.peripherals.disks = served.map(|served| {
                let events = disk_events(&options.events);
                Box::new(ServedDiskCapture::new(served, options.pause_limit, events))
                    as Box<dyn DiskCapture>
            });
        }
        let mut media = None;
        if let Some(recorded) = &options.recorded {
            let places = (&*self.directory, self.run_dir);
            media = recorded.prepare(&mut starting, places, &*options.events)?;
        }
        for (number, (line, name)) in starting.into_iter().zip(members).enumerate() {
            // A number, not the name: the paths of sockets have to be short.
            let run_dir = if self.is_group {
                self.run_dir.join(number.to_string())
            } else {
                self.run_dir.into()
            };
            self.start(name, line, run_dir, &mut media)?;
        }
        if method == DiskMethod::Served {
            let served = self.peripherals.disks.take();
            let vms = (&mut *disk_owners(&mut self.found), self.is_group);
            let place = (self.store, self.name);
            let (leave_out, events) = (&options.leave_out, &disk_events(&options.events));
            self.peripherals.disks =
                disk_capture::method::beside_served(place, vms, served, leave_out, events)?;
        } else {
            self.peripherals.disks = disk_capture::method::own(
                (self.store, self.name, self.run_dir),
                (&mut disk_owners(&mut self.found), self.is_group),
                method,
                &options.leave_out,
                &disk_events(&options.events),
            )?;
        }
        Ok(())
    }

    /// Starts one VM. It takes the server of recorded media if there is one.
    fn start(
        &mut self,
        name: String,
        (line, identity): (Invocation, QemuIdentity),
        run_dir: PathBuf,
        media: &mut Option<Media>,
    ) -> Result<()> {
        let runs = !line.starts_paused();
        let mut vm = Vm::launch(&line, &LaunchOptions { run_dir })?;
        let whole = vm.require_whole_line();
        let answered = answer_on(vm.core(), self.peripherals.disks.as_deref(), media.as_mut());
        if let Some(media) = media.take() {
            vm.accompany(media);
        }
        let directory = self.directory.clone();
        self.found.push(StartedVm { name, vm, identity, directory, monitor: None, runs });
        answered?;
        match whole {
            Err(hidden) if self.options.recorded.is_some() => Err(Error::from(hidden)),
            Err(hidden) => {
                self.options.events.event(&Event::HiddenOptions { error: Arc::new(hidden) });
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

/// Has the servers of a recorded guest's disks and media answer on the guest's processor core, if
/// the guest has a core of its own.
fn answer_on(
    core: Option<u32>,
    disks: Option<&dyn DiskCapture>,
    media: Option<&mut Media>,
) -> Result<()> {
    let Some(core) = core else { return Ok(()) };
    disks.map_or(Ok(()), |disks| disks.answer_on(core)).map_err(Error::AnswerOnCore)?;
    Ok(media.map_or(Ok(()), |media| media.answer_on(core))?)
}

/// Ends the VMs `found` and their peripherals after `error`. Returns `error` together with the
/// errors of the teardown.
pub fn end(found: Vec<StartedVm>, peripherals: Peripherals, error: Error) -> Error {
    let mut teardown = Teardown::after(error);
    for mut one in found {
        teardown.step(one.vm.kill());
    }
    teardown.step(peripherals.release(false));
    teardown.into_error()
}

/// Returns the name of the VM, or with `is_group` of the group, and those of the members. `wanted`
/// has the name on each VM's line; `None` for none. Error: two members have one name.
pub fn names(
    wanted: &[Option<String>],
    is_group: bool,
    options: &SessionOptions,
) -> Result<(String, Vec<String>)> {
    if !is_group {
        let own = wanted.iter().flatten().next().map_or("vm", |name| name);
        let name = options.name.clone().unwrap_or_else(|| run_dir::name_from(own));
        return Ok((name.clone(), vec![name]));
    }
    let members: Vec<_> = wanted
        .iter()
        .enumerate()
        .map(|(i, name)| name.as_deref().map_or_else(|| format!("vm{}", i + 1), run_dir::name_from))
        .collect();
    if let Some((_, twice)) =
        members.iter().enumerate().find(|(i, name)| members[..*i].contains(name))
    {
        return Err(Error::MemberNamedTwice(twice.clone()));
    }
    Ok((options.name.clone().unwrap_or_else(|| "group".into()), members))
}

/// Becomes a writer of `store` for the VM or group of that name. `command` and the name describe it
/// to other processes. Returns the writer. Errors: the store is being repaired, or is in object
/// storage and has a writer; it cannot be written.
pub fn lock(
    store: &Store,
    command: &str,
    (name, guests): (&str, &[GuestMemory]),
    options: &SessionOptions,
) -> Result<Writer> {
    let (encode_bytes, index_bytes) = memory_guard::cache_bytes(options, guests);
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut tuning = Tuning {
        encode_threads: options.encode_threads.unwrap_or((cores / 4).clamp(1, 8)),
        base_bytes: encode_bytes as usize,
        index_bytes: index_bytes as usize,
        durability: options.durability,
        ..Tuning::default()
    };
    if options.keep_within.is_some() {
        store.require_prunable().map_err(|e| Error::store(store.path(), e))?;
        tuning.pack_bytes_max = flight_recorder::PACK_BYTES_MAX;
    }
    let owner = format!("keyframe {command}, VM {name}");
    let writer =
        store.lock_writer_tuned(&owner, tuning).map_err(|e| Error::store(store.path(), e))?;
    for torn in writer.torn() {
        options.events.event(&Event::TornCheckpoint {
            torn: torn.clone(),
            quarantine: store.path().join("quarantine"),
        });
    }
    if let Some(from) = writer.in_doubt() {
        options.events.event(&Event::SyncFailed { from });
    }
    if writer.durability() != options.durability {
        options.events.event(&Event::DurabilityIgnored {
            asked: options.durability,
            is_remote: store.is_remote(),
        });
    }
    Ok(writer)
}

/// Opens the networks that `options` name; `None` if they name none. Error: the switch cannot be
/// started or reached.
pub fn open_lans(options: &SessionOptions) -> Result<Option<Lans>> {
    match &options.lans {
        LanChoice::None => Ok(None),
        LanChoice::Own(paths) => Lans::start(paths).map(Some),
        LanChoice::Control(path) => Lans::connect(path).map(Some),
    }
}

/// Started VMs that were refused, with the reason.
pub struct RefusedVms {
    /// The reason.
    pub error: Error,
    /// The VMs.
    pub found: Vec<StartedVm>,
    /// The networks and disks of the VMs.
    pub peripherals: Peripherals,
}

/// Takes every step that may refuse a started VM: audit, attach, the run in the store, the
/// watchdogs. Returns the prepared VMs. An error returns the refused VMs with the reason.
pub fn prepare(
    store: &Store,
    mut writer: Writer,
    run_dir: RunDir,
    (name, is_group): (String, bool),
    (mut found, mut peripherals): (Vec<StartedVm>, Peripherals),
    options: &SessionOptions,
) -> Result<PreparedSession, Box<RefusedVms>> {
    if is_group && let Err(error) = audit_links(&mut found, peripherals.lans.as_mut(), options) {
        return Err(Box::new(RefusedVms { error, found, peripherals }));
    }
    let disks = peripherals.disks.as_deref();
    match prepare_parts(store, &mut writer, (&name, is_group), (&mut found, disks), options) {
        Ok(PreparedParts { copying, sink, meta, watchdogs, shapes, mut counted }) => {
            let guarded = found.into_iter().zip(watchdogs).zip(shapes);
            let guarded = guarded.zip(&copying.watches_discards);
            let member = |(((found, watchdog), shape), watches): (
                ((StartedVm, WatchdogKeeper), Option<MachineShape>),
                &bool,
            )| {
                let limit = options.pause_limit;
                let health = watchdog.health();
                let vm = SessionVm::new(Box::new(found.vm), Box::new(watchdog), limit, *watches)
                    .with_monitor(found.monitor)
                    .telling(Arc::clone(&options.events))
                    .counting(counted.take())
                    .expecting(shape);
                let vm =
                    if options.recorded.is_some() { vm.recorded() } else { vm.held_at_its_end() };
                Member::new(found.name, vm, found.runs).watched_by(health)
            };
            let machines = Machines::new(guarded.map(member).collect(), is_group, peripherals);
            Ok(PreparedSession { name, run_dir, machines, copying, sink, writer, meta })
        }
        Err(error) => Err(Box::new(RefusedVms { error, found, peripherals })),
    }
}

/// Warns of links between the members of a group that cannot be held.
fn audit_links(
    found: &mut [StartedVm],
    lans: Option<&mut Lans>,
    options: &SessionOptions,
) -> Result<()> {
    let held = match (&options.lans, lans) {
        (LanChoice::Own(paths), _) => paths.clone(),
        (_, Some(lans)) => lans.connected()?,
        (_, None) => Vec::new(),
    };
    for one in found {
        let words = one.vm.user_command().get(1..).unwrap_or_default();
        lans::report_loose_links(&one.name, words, &one.directory, &held, &*options.events);
    }
    Ok(())
}

/// The parts of a session besides its VMs.
struct PreparedParts {
    copying: RamCapture,
    sink: StoreSink,
    meta: MachineDescriptions,
    watchdogs: Vec<WatchdogKeeper>,
    /// The machines that the descriptions describe; `None` if they are not compared.
    shapes: Vec<Option<MachineShape>>,
    /// The counters of the first VM's instructions; `None` if they are not counted.
    counted: Option<InstructionCount>,
}

/// Makes the device states of `vm` hold the SSE flags of its CPUs. If that fails, `events` gets the
/// reason and the session goes on without the flags.
pub fn follow_sse_flags(vm: &mut Vm, events: &dyn EventSink<Event>) {
    let cache = keyframe_store::backend::cache_root(&|name| std::env::var(name).ok());
    tell_failed(events, Step::SaveSseFlags, vm.follow_sse_flags(cache.as_deref()));
}

fn prepare_parts(
    store: &Store,
    writer: &mut Writer,
    (name, is_group): (&str, bool),
    (found, disks): (&mut [StartedVm], Option<&dyn DiskCapture>),
    options: &SessionOptions,
) -> Result<PreparedParts> {
    for one in found.iter_mut() {
        let audited = if options.recorded.is_some() {
            refuse_running_scans(&mut one.vm, &*options.events)
        } else {
            refuse(&mut one.vm, &*options.events)
        };
        audited.map_err(|error| if is_group { error.of_member(&one.name) } else { error })?;
        follow_sse_flags(&mut one.vm, &*options.events);
    }
    let counted = match found {
        _ if !options.count_instructions => None,
        [one] => Some(InstructionCount::begin(&mut one.vm)?),
        _ => return Err(Error::NotCounted(CountObstacle::Group)),
    };
    let mut vms: Vec<(&str, &mut dyn Vmm)> = Vec::with_capacity(found.len());
    vms.extend(found.iter_mut().map(|one| (&*one.name, &mut one.vm as &mut dyn Vmm)));
    let copying = RamCapture::start(&mut vms, is_group, options)?;
    let mut members = Vec::with_capacity(found.len());
    let mut shapes = Vec::with_capacity(found.len());
    for one in found.iter_mut() {
        // Nothing may be plugged into a recorded machine: a replay has the line alone.
        let is_compared = options.recorded.is_none();
        shapes.push(is_compared.then(|| one.vm.shape()).transpose()?);
        let ram_blocks = one.vm.ram_layout()?.blocks().len();
        let replayed = options.recorded.as_ref().and_then(|recorded| recorded.machine.clone());
        let machine = match replayed {
            Some(machine) => machine,
            None => machine_meta(&mut one.vm, &one.identity, &one.directory)?,
        };
        let pid = one.vm.pid();
        members.push(MemberMeta { name: one.name.clone(), pid, ram_blocks, machine });
    }
    let meta = MachineDescriptions::new(members, is_group);
    let disk_metas = disks.map_or_else(Vec::new, |disks| disks.metas().to_vec());
    let has_disks = !disk_metas.is_empty();
    let run = writer.begin_run_with(name, &copying.layout, disk_metas, DiskState::default());
    let mut run = run.map_err(|e| Error::store(store.path(), e))?;
    if let Some(begin) =
        options.recorded.as_ref().and_then(|recorded| recorded.begin).filter(|_| has_disks)
    {
        run.put_disks_of(begin).map_err(|e| Error::store(store.path(), e))?;
    }
    // A group's members come from one checkpoint.
    let lineage = found.first().and_then(|one| one.vm.lineage()).filter(|l| l.store == store.id());
    let origin = lineage.map(|l| l.checkpoint);
    let mut sink = StoreSink::new(run, meta.clone(), options.fault.clone(), origin);
    if options.rehearsal && options.recorded.is_none() {
        let events = Arc::clone(&options.events);
        let rehearser = Rehearser::Qemu;
        sink.rehearsal = Some(Rehearsal { store: store.clone(), events, rehearser });
    }
    sink.recording = options.recorded.as_ref().map(|recorded| recorded.recording.clone());
    if let (Some(fault), Some(first)) = (&options.fault, found.first_mut()) {
        let monitor = first.vm.qmp().as_fd().try_clone_to_owned();
        fault.bind(
            first.vm.pid(),
            Some(monitor.map_err(|e| Error::io("copy the descriptor of QEMU's monitor", e))?),
        );
    }
    let holds_ends = options.recorded.is_none();
    let watchdogs = found.iter().map(|one| spawn_watchdog(&one.vm, holds_ends, &options.events));
    let watchdogs = watchdogs.collect::<Result<_, _>>()?;
    Ok(PreparedParts { copying, sink, meta, watchdogs, shapes, counted })
}

/// Checks before a start that the kernel and this user's rights suffice for the options. Errors:
/// [`Error::MissingFeatures`] if something is missing; the options contradict each other.
pub fn require_kernel(options: &SessionOptions) -> Result<()> {
    if options.tracker_kind()? == TrackerKind::Compare {
        // That one needs nothing but the right to read.
        return Ok(());
    }
    let features = keyframe_kernel::host_features::probe();
    let missing: Vec<_> = features.items.iter().filter(|f| f.required && !f.available).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let fix = first.fix.clone();
    let missing = missing.iter().map(|f| (f.name.to_string(), f.detail.clone())).collect();
    Err(Error::MissingFeatures { missing, fix })
}

/// Checks that the VM can be checkpointed exactly if its RAM is scanned in pauses alone. Warnings
/// go to `events`. Errors: [`Error::NotCheckpointable`] with all reasons; the VMM does not answer.
pub fn refuse(vm: &mut dyn Vmm, events: &dyn EventSink<Event>) -> Result<()> {
    refuse_by(vm, events, |severity| severity == Severity::Refused)
}

/// Checks as [`refuse`] does, for RAM that is scanned while the VM runs. It refuses more machines.
pub fn refuse_running_scans(vm: &mut dyn Vmm, events: &dyn EventSink<Event>) -> Result<()> {
    refuse_by(vm, events, |severity| severity != Severity::Warning)
}

fn refuse_by(
    vm: &mut dyn Vmm,
    events: &dyn EventSink<Event>,
    is_refused: impl Fn(Severity) -> bool,
) -> Result<()> {
    let mut found = vm.audit()?;
    let is_open = |finding: &AuditFinding| {
        is_refused(finding.severity) || finding.severity == Severity::Warning
    };
    found.retain(is_open);
    let (refusals, warnings): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|finding| is_refused(finding.severity));
    for warning in warnings {
        events.event(&Event::AuditWarning(warning));
    }
    if refusals.is_empty() { Ok(()) } else { Err(Error::NotCheckpointable(refusals)) }
}

/// Returns the description of the machine as it is now, with devices that were plugged in after its
/// start. Error: QEMU does not answer.
pub fn machine_meta(vm: &mut Vm, identity: &QemuIdentity, directory: &Path) -> Result<MachineMeta> {
    let (user_command, full_command) = lines_now(vm)?;
    Ok(MachineMeta {
        binary_path: identity.path.to_string_lossy().into_owned(),
        vmm_version: identity.version.clone(),
        binary_blake3: identity.blake3.clone(),
        processor: vm.processor()?,
        machine_type: vm.machine_type()?,
        vcpus: vm.cpus()?,
        working_directory: directory.to_string_lossy().into_owned(),
        user_command,
        full_command,
        missing_cpu_features: Some(vm.cpu_lacks()?),
        guest_map: Some(vm.guest_map()?),
        read_files: Some(disks::read_files::describe(vm.user_command(), directory)),
        ..MachineMeta::default()
    })
}

/// Returns the command line of the user and the full command line, with the changes of the machine
/// since its start. Error: the monitor fails, or no line can make a change.
pub fn lines_now(vm: &mut Vm) -> Result<(Vec<String>, Vec<String>)> {
    match vm.lines_now()? {
        Ok(lines) => Ok((lines.user_command, lines.full_command)),
        Err(findings) => Err(Error::NotCheckpointable(findings)),
    }
}

/// Starts the watchdog of a VM: a process of its own, which outlives a crash of this one. If it
/// ends, another one is started. With `holds_ends`, the watchdog undoes what
/// [`SessionVm::hold_end`] did. Error: the process cannot be started.
pub fn spawn_watchdog(
    vm: &Vm,
    holds_ends: bool,
    events: &SharedEventSink,
) -> Result<WatchdogKeeper> {
    Ok(WatchdogKeeper::start(watchdog_starter(vm, holds_ends)?, Arc::clone(events))?)
}

/// Makes the watchdog of a VM that runs already, as [`spawn_watchdog`] does, but starts its process
/// just before the first pause. So a host without room for one more process does not end the VM.
/// With `holds_ends`, the watchdog undoes what [`SessionVm::hold_end`] did. Error: the VM's monitor
/// cannot be handed on.
pub fn late_watchdog(
    vm: &Vm,
    holds_ends: bool,
    events: &SharedEventSink,
) -> Result<WatchdogKeeper> {
    Ok(WatchdogKeeper::later(watchdog_starter(vm, holds_ends)?, Arc::clone(events)))
}

fn watchdog_starter(vm: &Vm, holds_ends: bool) -> Result<StartWatchdog> {
    let mut watched = vm.watched()?;
    watched.hold = holds_ends.then(|| vm.end_hold()).flatten();
    Ok(Box::new(move || Ok(watchdog::spawn(&mut helper_process::command("__watchdog"), &watched)?)))
}
