//! Everything before a protected VM's first instruction; and before a standby's, once it has taken
//! over.

use super::frames::{MachineFrame, ReplicatedDisk};
use super::links::Addresses;
use super::primary::{self, PrimaryEngineEvent};
use super::sending::SharedWire;
use super::settings::{Setup, random};
use super::vm::{self, Gate};
use crate::error::{Error, Result};
use keyframe_net::{GateNic, GateRemote};
use keyframe_qemu::NicSockets;
use keyframe_qemu::{DiskServer, Invocation, LaunchOptions, QemuIdentity, Vm};
use keyframe_replication::{GroupId, NodeId, PrimaryStart, ReplicationConfig};
use keyframe_session::control::server::{SharedStatus, Socket};
use keyframe_session::control::{OnExit, ReplicationRole, ReplicationStatus, Status, VmState};
use keyframe_session::disk_capture::DiskCapture;
use keyframe_session::disk_capture::served::ServedDiskCapture;
use keyframe_session::interrupt;
use keyframe_session::launch as sessions;
use keyframe_session::machine::QemuMachine;
use keyframe_session::machines::{Machines, Member, Peripherals};
use keyframe_session::ram_capture::RamCapture;
use keyframe_session::rights;
use keyframe_session::run_dir::RunDir;
use keyframe_session::{Options, machine_meta, refuse};
use keyframe_store::MachineMeta;
use keyframe_units::{Epoch, PAGE_BYTES};
use keyframe_vm_disks::overlay_directory::OverlayDirectory;
use keyframe_vm_disks::{self as disks, DiskToServe, ServedDisks};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};

/// The socket of the disks' server, in the run directory.
pub const DISKS_SOCKET: &str = "disks.sock";

/// A VM that is there and does not run yet, and what stands beside it.
pub struct Found {
    /// The VM.
    pub vm: Vm,
    /// Its QEMU binary.
    pub identity: QemuIdentity,
    /// The description of the machine, if it was taken over from another host.
    pub machine: Option<MachineMeta>,
    /// The working directory of its command line.
    pub directory: PathBuf,
    /// Its disks; `None` if it has none.
    pub served: Option<ServedDisks>,
    /// The gate before its network.
    pub gate: Gate,
}

/// Where a VM is and who talks to it.
pub struct Home {
    /// The VM's name.
    pub name: String,
    /// The run directory.
    pub run_dir: RunDir,
    /// The status that clients of the control socket see.
    pub status: SharedStatus,
    /// Set when the user wants an end.
    pub interrupted: Arc<AtomicBool>,
    /// The inbox with its control socket, if the standby that took over hands them on.
    pub inbox: Option<(Receiver<PrimaryEngineEvent>, Sender<PrimaryEngineEvent>, Socket)>,
}

/// Starts the gate of a VM's network; none for a VM without.
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

/// Launches the VM of `command`, with its network behind a gate and its disks served, and protects
/// it. `is_last`: this process starts no other program later, and gives up the right to.
pub fn protect(
    command: Vec<OsString>,
    name: Option<String>,
    folder: &Path,
    addresses: Addresses,
    setup: Setup,
    is_last: bool,
) -> Result<primary::Engine> {
    let options = Options::every(None, OnExit::Kill);
    sessions::require_kernel(&options)?;
    // From here on: a QEMU that nobody guards yet is not to be left behind.
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
    let mut served = None;
    if !drives.is_empty() {
        let wanted = drives
            .iter()
            .map(|drive| DiskToServe::of_drive(drive, ""))
            .collect::<Result<_, _>>()?;
        let server = DiskServer { socket: socket.clone(), prefix: String::new() };
        line.serve_drives(&server)?;
        let place = OverlayDirectory::claim_in(&folder.join("overlays"), &name)?;
        served = Some(disks::serve_in(place, &name, None, wanted, &socket)?);
    }
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
    let group = GroupId(u128::from(random()?) << 64 | u128::from(random()?));
    let mut config = ReplicationConfig::new(
        NodeId(random()?),
        random()?,
        group,
        setup.arbitration,
        setup.detection_ns,
    );
    config.paths = if addresses.beat.is_some() { 2 } else { 1 };
    let status = first_status(&name, vm.pid(), ReplicationRole::Primary);
    let found = Found { vm, identity, machine: None, directory, served, gate };
    let place = Home { name, run_dir, status, interrupted, inbox: None };
    engine(found, place, setup, config, (PrimaryStart::First, Epoch(1)), Some(addresses))
}

/// An engine over a VM that does not run yet, and is let run. The VM ends where it cannot be made.
pub fn engine(
    found: Found,
    place: Home,
    setup: Setup,
    config: ReplicationConfig,
    (start, first_epoch): (PrimaryStart, Epoch),
    addresses: Option<Addresses>,
) -> Result<primary::Engine> {
    let qemu = keyframe_kernel::Process::open(found.vm.pid());
    let gate = found.gate.clone();
    made(found, place, setup, config, (start, first_epoch), addresses).inspect_err(|_| {
        if let Ok(qemu) = &qemu {
            let _ = rustix::process::pidfd_send_signal(qemu.pidfd(), rustix::process::Signal::KILL);
        }
        gate.end();
    })
}

fn made(
    found: Found,
    place: Home,
    setup: Setup,
    config: ReplicationConfig,
    (start, first_epoch): (PrimaryStart, Epoch),
    addresses: Option<Addresses>,
) -> Result<primary::Engine> {
    let Found { mut vm, identity, machine, directory, served, gate } = found;
    let Home { name, run_dir, status, interrupted, inbox } = place;
    refuse(&mut vm, &*setup.events)?;
    let options = Options { events: setup.events.clone(), ..Options::every(None, OnExit::Kill) };
    let copying = RamCapture::start(&mut [(&*name, &mut vm)], false, &options)?;
    let machine = match machine {
        Some(machine) => machine,
        None => machine_meta(&mut vm, &identity, &directory)?,
    };
    let exports: Vec<(String, u64)> = served
        .iter()
        .flat_map(|served| &served.metas)
        .map(|disk| (disk.name.clone(), disk.disk_bytes))
        .collect();
    let frame = MachineFrame {
        name: name.clone(),
        group: format!("{:032x}", config.group.0),
        arbiter: setup.arbiter(),
        detection_ns: config.detection_ns,
        paths: config.paths,
        streams: setup.streams,
        user_command: machine.user_command.clone(),
        qemu_path: machine.binary_path.clone(),
        qemu_version: machine.vmm_version.clone(),
        qemu_blake3: machine.binary_blake3.clone(),
        machine_type: machine.machine_type.clone(),
        working_directory: machine.working_directory.clone(),
        cpu_lacks: machine.missing_cpu_features.clone(),
        ram: copying.layout.clone(),
        disks: exports
            .iter()
            .map(|(name, disk_bytes)| ReplicatedDisk {
                name: name.clone(),
                disk_bytes: *disk_bytes,
            })
            .collect(),
    };
    let blocks: Vec<u64> =
        exports.iter().map(|(_, bytes)| bytes.div_ceil(PAGE_BYTES as u64)).collect();
    let wire =
        SharedWire::new(setup.streams, setup.wire_bytes, copying.layout.len_pages(), &blocks);
    let watchdog = sessions::spawn_watchdog(&vm)?;
    let qemu = vm.pid();
    let socket = run_dir.path().join(DISKS_SOCKET);
    let has_disks = served.is_some();
    let storage = served.map(|served| {
        let events = Arc::clone(&options.events);
        DiskCapture::Served(ServedDiskCapture::new(served, options.pause_limit, events))
    });
    let watches = copying.watches_discards.first().copied().unwrap_or(false);
    let machine = QemuMachine::new(vm, watchdog, options.pause_limit, watches);
    let member = Member::new(name.clone(), machine, true);
    let mut machines =
        Machines::new(vec![member], false, Peripherals { lans: None, disks: storage });
    for member in machines.members_mut() {
        member.machine.vm.qmp().cont()?;
    }
    if let Ok(mut status) = status.lock() {
        status.qemu_pid = qemu;
        status.state = VmState::Running;
    }
    let vm = vm::Parts {
        machines,
        copying,
        gate: gate.clone(),
        wire: wire.clone(),
        policy: setup.policy.build(setup.parameters),
        verify: setup.verify,
        disks: has_disks.then_some((socket, exports)),
        first_epoch,
        events: setup.events.clone(),
    };
    let machine = frame;
    primary::Engine::new(primary::Parts {
        name,
        run_dir,
        setup,
        config,
        start,
        machine,
        addresses,
        vm,
        gate,
        wire,
        qemu,
        status,
        interrupted,
        inbox,
    })
}

/// What is shown of a VM or a standby that nothing is known of yet.
pub fn first_status(name: &str, qemu_pid: u32, role: ReplicationRole) -> SharedStatus {
    let replication = ReplicationStatus { role, ..ReplicationStatus::default() };
    Arc::new(Mutex::new(Status {
        vm: name.into(),
        qemu_pid,
        engine_pid: std::process::id(),
        replication: Some(replication),
        ..Status::default()
    }))
}
