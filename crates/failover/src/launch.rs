//! Launches a protected VM, and makes its engine. A standby that takes over makes its engine here,
//! too.

use super::frames::{MachineFrame, ReplicatedDisk};
use super::links::StandbyAddresses;
use super::primary;
use super::sending::SharedWire;
use super::settings::{FailoverSetup, random};
use super::vm::{self, DiskExport, DiskExports, Gate, MachineDescription};
use crate::error::{Error, Result};
use keyframe_disk_capture::DiskCapture;
use keyframe_disk_capture::served::ServedDiskCapture;
use keyframe_inspect::source_of;
use keyframe_net::{GateNic, GateRemote};
use keyframe_qemu::restore::{Plan, RestoreOptions, RestorePurpose};
use keyframe_qemu::{DiskServer, Drive, Invocation, LaunchOptions, QemuIdentity, Vm};
use keyframe_qemu::{MachineShape, NicSockets};
use keyframe_replication::{GroupId, NodeId, PrimaryStart, ReplicationConfig};
use keyframe_session::control::server::SharedStatus;
use keyframe_session::control::{
    EngineStatus, OnExit, ReplicationRole, ReplicationStatus, VmState,
};
use keyframe_session::event::disk_events;
use keyframe_session::interrupt;
use keyframe_session::launch as sessions;
use keyframe_session::machines::{Machines, Member, Peripherals};
use keyframe_session::ram_capture::RamCapture;
use keyframe_session::rights;
use keyframe_session::run_dir::RunDir;
use keyframe_session::session_vm::SessionVm;
use keyframe_session::{SessionOptions, machine_meta, refuse_running_scans};
use keyframe_units::{Epoch, PAGE_BYTES};
use keyframe_vm_disks::overlay_directory::OverlayDirectory;
use keyframe_vm_disks::{self as disks, DiskToServe, ServedDisks};
use keyframe_vmm::PauseWatchdog;
use rustix::process::{Signal, pidfd_send_signal};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// The name of the disk server's socket in the run directory.
pub const DISKS_SOCKET: &str = "disks.sock";

/// A VM that was just launched or taken over, with the processes that serve it.
pub struct LaunchedVm {
    /// The VM.
    pub vm: Vm,
    /// The identity of its QEMU binary.
    pub identity: QemuIdentity,
    /// The description of the machine if the VM was taken over from another host. `None` otherwise.
    pub machine: Option<MachineDescription>,
    /// The working directory of QEMU's command line.
    pub directory: PathBuf,
    /// Its disks. `None` if it has none.
    pub served: Option<ServedDisks>,
    /// The gate before its network.
    pub gate: Gate,
}

/// A VM's run directory and status, and the inbox of its engine.
pub struct EngineContext {
    /// The VM's name.
    pub name: String,
    /// The run directory.
    pub run_dir: RunDir,
    /// The status that clients of the control socket can read.
    pub status: SharedStatus,
    /// Set when the user interrupts the command.
    pub interrupted: Arc<AtomicBool>,
    /// The engine's inbox with its control socket. A standby that takes the VM over passes it on to
    /// the VM's new engine. `None` if the engine creates its own.
    pub inbox: Option<primary::EngineInbox>,
}

/// Starts the gate of a VM's network, and removes sockets that an earlier gate left at its paths.
/// For a VM without NICs it starts none, and returns a gate that does nothing. Errors:
/// [`Error::Io`] if such a socket cannot be removed; [`Error::Network`] if the gate's process
/// cannot be started.
pub fn start_gate(nics: &[NicSockets]) -> Result<Gate> {
    if nics.is_empty() {
        return Ok(Gate::new(None));
    }
    for nic in nics {
        for socket in [&nic.out, &nic.back] {
            match std::fs::remove_file(socket) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::file("remove", socket, e));
                }
                _ => {}
            }
        }
    }
    let nics: Vec<GateNic> = nics
        .iter()
        .map(|nic| GateNic { from_guest: nic.out.clone(), to_network: nic.back.clone() })
        .collect();
    let mut command = Command::new("/proc/self/exe");
    command.arg0("keyframe").arg("__gate");
    Ok(Gate::new(Some(GateRemote::spawn(&mut command, &nics)?)))
}

/// Launches the VM of the command line `command`, with its network behind a gate and its disks
/// served. Returns the engine that protects it. `name` is the VM's name, by default that of the
/// command line. The guest's writes to disks go to a directory in `folder`. `addresses` are those
/// of the standby. If `is_last` is true, this process starts no other program later, and gives up
/// the right to do so.
///
/// Errors: the kernel lacks a feature; the command line or the VM cannot be protected; another VM
/// has the name; a process or a thread cannot be started.
pub fn protect(
    command: Vec<OsString>,
    name: Option<String>,
    folder: &Path,
    addresses: StandbyAddresses,
    setup: FailoverSetup,
    is_last: bool,
) -> Result<primary::PrimaryEngine> {
    let options = SessionOptions::every(None, OnExit::Kill);
    sessions::require_kernel(&options)?;
    // From here on: a signal must not leave a QEMU behind that has no guard yet.
    let interrupted = interrupt::interruption_or_hangup()?;
    let directory =
        std::env::current_dir().map_err(|e| Error::io("find the working directory", e))?;
    let mut line = Invocation::parse(command)?;
    let identity = line.identity()?;
    let name = name
        .unwrap_or_else(|| keyframe_session::run_dir::name_from(line.vm_name().unwrap_or("vm")));
    let run_dir = RunDir::claim(&name)?;
    let nics = line.gate(run_dir.path())?;
    let drives = line.drives()?;
    let socket = run_dir.path().join(DISKS_SOCKET);
    let served = match &drives[..] {
        [] => None,
        drives => Some(serve_drives(&mut line, drives, folder, &name, &socket)?),
    };
    let gate = start_gate(&nics)?;
    let vm = Vm::launch(&line, &LaunchOptions { run_dir: run_dir.path().into() });
    let vm = vm.and_then(|mut vm| match vm.require_whole_line() {
        Ok(()) => Ok(vm),
        Err(hidden) => {
            let _ = vm.qmp().quit();
            Err(hidden)
        }
    });
    let vm = match vm {
        Ok(vm) => vm,
        Err(error) => {
            gate.end();
            if let Some(served) = served {
                let _ = served.end(false);
            }
            return Err(error.into());
        }
    };
    if is_last {
        rights::trace_only(&*setup.events);
    }
    let config = new_group(&setup, &addresses)?;
    let status = first_status(&name, vm.pid(), ReplicationRole::Primary);
    let launched = LaunchedVm { vm, identity, machine: None, directory, served, gate };
    let context = EngineContext { name, run_dir, status, interrupted, inbox: None };
    start_first(launched, context, setup, config, addresses)
}

/// Serves the images of `drives`, with what the guest writes in an overlay beneath `folder`, and
/// has the command line name the server. Errors: a drive cannot be served; the overlays cannot be
/// created; the server cannot be started.
fn serve_drives(
    line: &mut Invocation,
    drives: &[Drive],
    folder: &Path,
    name: &str,
    socket: &Path,
) -> Result<ServedDisks> {
    let wanted =
        drives.iter().map(|drive| DiskToServe::of_drive(drive, "")).collect::<Result<_, _>>()?;
    line.serve_drives(&DiskServer::at(socket.to_owned()))?;
    let overlays = OverlayDirectory::claim_in(&folder.join("overlays"), name)?;
    Ok(disks::serve_in(overlays, name, None, wanted, socket)?)
}

/// The configuration of a VM that is protected for the first time. Error: [`Error::Random`].
fn new_group(setup: &FailoverSetup, addresses: &StandbyAddresses) -> Result<ReplicationConfig> {
    let group = GroupId(u128::from(random()?) << 64 | u128::from(random()?));
    let node = NodeId(random()?);
    let mut config =
        ReplicationConfig::new(node, random()?, group, setup.arbitration, setup.detection_ns);
    config.paths = if addresses.beat.is_some() { 2 } else { 1 };
    Ok(config)
}

/// Ends QEMU and its gate when it is dropped, unless it is disarmed: a protected VM does not
/// outlive an engine that could not be made.
struct EndOnError {
    qemu: Option<keyframe_kernel::Process>,
    gate: Gate,
    is_armed: bool,
}

impl EndOnError {
    fn new(launched: &LaunchedVm) -> Self {
        let qemu = keyframe_kernel::Process::open(launched.vm.pid()).ok();
        Self { qemu, gate: launched.gate.clone(), is_armed: true }
    }

    fn disarm(mut self) {
        self.is_armed = false;
    }
}

impl Drop for EndOnError {
    fn drop(&mut self) {
        if !self.is_armed {
            return;
        }
        if let Some(qemu) = &self.qemu {
            let _ = pidfd_send_signal(qemu.pidfd(), Signal::KILL);
        }
        self.gate.end();
    }
}

/// Makes the engine of a VM that does not run yet, and lets the VM run. After an error the VM ends.
/// Errors: the VM cannot be captured or could not be restored on another host; QEMU does not
/// answer; a process or a thread cannot be started.
fn start_first(
    launched: LaunchedVm,
    context: EngineContext,
    setup: FailoverSetup,
    config: ReplicationConfig,
    addresses: StandbyAddresses,
) -> Result<primary::PrimaryEngine> {
    let end_on_error = EndOnError::new(&launched);
    let LaunchedVm { mut vm, identity, directory, served, gate, .. } = launched;
    refuse_running_scans(&mut vm, &*setup.events)?;
    let options = session_options(&setup);
    sessions::follow_sse_flags(&mut vm, &*options.events);
    let ram = RamCapture::start(&mut [(&*context.name, &mut vm)], false, &options)?;
    let spec = machine_meta(&mut vm, &identity, &directory)?;
    let description = MachineDescription { spec, ram: ram.layout.clone() };
    refuse_unrestorable(&description, served.is_some())?;
    let shape = Some(vm.shape()?);
    let watchdog = Box::new(sessions::spawn_watchdog(&vm, false, &options.events)?);
    vm.qmp().cont()?;
    let parts = ProtectedParts {
        vm,
        watchdog,
        served,
        gate,
        description,
        shape,
        ram: Some(ram),
        start: FirstTerm { start: PrimaryStart::First, first_epoch: Epoch(1) },
    };
    let engine = make_engine(parts, options, context, setup, config, Some(addresses))?;
    end_on_error.disarm();
    Ok(engine)
}

/// The beginning of the time in which a host protects its VM.
#[derive(Clone, Copy, Debug)]
pub struct FirstTerm {
    /// How the host became the primary.
    pub start: PrimaryStart,
    /// The number of the first epoch.
    pub first_epoch: Epoch,
}

/// Creates the engine of a VM that this host has taken over and that runs. `addresses` are those of
/// its next standby: `None` for a VM without a standby. The capture of the VM begins in the engine,
/// which repeats it after a failure.
///
/// Errors, after which the VM runs on: [`Error::NothingHeld`] if `launched` has no machine; a
/// process or a thread cannot be started.
pub fn start_taken_over(
    launched: LaunchedVm,
    context: EngineContext,
    setup: FailoverSetup,
    config: ReplicationConfig,
    start: FirstTerm,
    addresses: Option<StandbyAddresses>,
) -> Result<primary::PrimaryEngine> {
    let LaunchedVm { mut vm, machine, served, gate, .. } = launched;
    let description = machine.ok_or(Error::NothingHeld)?;
    let options = session_options(&setup);
    sessions::follow_sse_flags(&mut vm, &*options.events);
    let watchdog = Box::new(sessions::late_watchdog(&vm, false, &options.events)?);
    // The engine takes it if this look fails.
    let shape = vm.shape().ok();
    let parts = ProtectedParts { vm, watchdog, served, gate, description, shape, ram: None, start };
    make_engine(parts, options, context, setup, config, addresses)
}

fn session_options(setup: &FailoverSetup) -> SessionOptions {
    SessionOptions { events: setup.events.clone(), ..SessionOptions::every(None, OnExit::Kill) }
}

/// Refuses a machine that a standby on a host like this one could not make. Error: that of QEMU's
/// restore plan, with the reason.
fn refuse_unrestorable(machine: &MachineDescription, has_disks: bool) -> Result<()> {
    let server = DiskServer::at(DISKS_SOCKET.into());
    let disks = has_disks.then_some(server);
    let options =
        RestoreOptions { disks, purpose: RestorePurpose::OtherHost, ..RestoreOptions::default() };
    Ok(Plan::new(source_of(&machine.spec, &machine.ram), Vec::new(), options).map(drop)?)
}

/// A VM that runs, and all that an engine needs of it.
struct ProtectedParts {
    vm: Vm,
    watchdog: Box<dyn PauseWatchdog>,
    served: Option<ServedDisks>,
    gate: Gate,
    description: MachineDescription,
    /// The devices and media that its command line makes, if that is known.
    shape: Option<MachineShape>,
    /// The capture of its RAM, if it has begun.
    ram: Option<RamCapture>,
    start: FirstTerm,
}

fn make_engine(
    parts: ProtectedParts,
    options: SessionOptions,
    context: EngineContext,
    setup: FailoverSetup,
    config: ReplicationConfig,
    addresses: Option<StandbyAddresses>,
) -> Result<primary::PrimaryEngine> {
    let ProtectedParts { vm, watchdog, served, gate, description, shape, ram, start } = parts;
    let exports: Vec<DiskExport> = served
        .iter()
        .flat_map(|served| &served.metas)
        .map(|disk| DiskExport { name: disk.name.clone(), disk_bytes: disk.disk_bytes })
        .collect();
    let machine = machine_frame(&context.name, &setup, &config, description.clone(), &exports);
    let blocks: Vec<u64> =
        exports.iter().map(|disk| disk.disk_bytes.div_ceil(PAGE_BYTES as u64)).collect();
    let pages = description.ram.len_pages();
    let wire = SharedWire::new(setup.streams, setup.wire_bytes, pages, &blocks);
    let qemu = vm.pid();
    let socket = context.run_dir.path().join(DISKS_SOCKET);
    let disks = served.is_some().then_some(DiskExports { socket, exports });
    let watches_discards = ram.as_ref().and_then(|ram| ram.watches_discards.first().copied());
    let vm = SessionVm::new(
        Box::new(vm),
        watchdog,
        options.pause_limit,
        watches_discards.unwrap_or(false),
    )
    .telling(Arc::clone(&options.events));
    let machines = machines_of(&context.name, vm, served, &options);
    if let Ok(mut status) = context.status.lock() {
        status.qemu_pid = qemu;
        status.state = VmState::Running;
    }
    let captured = vm::CapturedParts {
        machines,
        ram,
        description,
        shape,
        options,
        gate: gate.clone(),
        wire: wire.clone(),
        verify: setup.verify,
        disks,
        events: setup.events.clone(),
    };
    let FirstTerm { start, first_epoch } = start;
    let vm = vm::VmParts {
        captured,
        wire: wire.clone(),
        policy: setup.policy.build(setup.parameters),
        first_epoch,
        events: setup.events.clone(),
    };
    primary::PrimaryEngine::new(primary::PrimaryEngineParts {
        context,
        setup,
        config,
        start,
        machine,
        addresses,
        vm,
        gate,
        wire,
        qemu,
    })
}

/// The description of the machine that a standby gets.
fn machine_frame(
    name: &str,
    setup: &FailoverSetup,
    config: &ReplicationConfig,
    description: MachineDescription,
    exports: &[DiskExport],
) -> MachineFrame {
    let disk =
        |disk: &DiskExport| ReplicatedDisk { name: disk.name.clone(), disk_bytes: disk.disk_bytes };
    MachineFrame {
        name: name.to_owned(),
        group: format!("{:032x}", config.group.0),
        arbiter: setup.arbiter(),
        detection_ns: config.detection_ns,
        paths: config.paths,
        streams: setup.streams,
        spec: description.spec,
        ram: description.ram,
        disks: exports.iter().map(disk).collect(),
    }
}

/// The VM with its disks, as the machine that is captured.
fn machines_of(
    name: &str,
    vm: SessionVm,
    served: Option<ServedDisks>,
    options: &SessionOptions,
) -> Machines {
    let disks = served.map(|served| {
        let events = disk_events(&options.events);
        Box::new(ServedDiskCapture::new(served, options.pause_limit, events))
            as Box<dyn DiskCapture>
    });
    let member = Member::new(name.to_owned(), vm, true);
    Machines::new(vec![member], false, Peripherals { lans: None, disks })
}

/// Creates the first status of the VM `name` on a host in the role `role`. Fields that are not
/// known yet have their default values.
pub fn first_status(name: &str, qemu_pid: u32, role: ReplicationRole) -> SharedStatus {
    let replication = ReplicationStatus { role, ..ReplicationStatus::default() };
    Arc::new(Mutex::new(EngineStatus {
        vm: name.into(),
        qemu_pid,
        engine_pid: std::process::id(),
        replication: Some(replication),
        ..EngineStatus::default()
    }))
}
