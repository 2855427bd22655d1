//! `keyframe attach`: continuous checkpoints of a VM that runs already.

use super::checkpoints::Checkpoints;
use super::exit_code;
use super::vmms;
use super::{ReadyArg, StoreArg};
use crate::failure::{Failure, FailureKind, Outcome};
use keyframe_machine::VmmKind;
use keyframe_qemu::{AttachOptions, Monitor};
use keyframe_session::LanChoice;
use keyframe_session::control::OnExit;
use keyframe_session::run_dir::{self, About};
use keyframe_vmm::Ability;
use std::path::PathBuf;

/// Take continuous checkpoints of a VM that runs already
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Keyframe does not restart the VM, and leaves it as it was when this command ends: after --count checkpoints, at Ctrl-C, or by
`keyframe stop`. QEMU needs a QMP socket that no other program uses (-qmp unix:/run/vm.sock,server=on,wait=off), or libvirt.
Through libvirt a pause is about ten milliseconds longer, because each command goes through libvirtd.

Each checkpoint contains the disks that the guest can write to. Keyframe clones their images if the file system can do that
(btrfs, XFS). Otherwise it uses QEMU's dirty bitmaps, and the first checkpoint reads each disk completely. While it reads,
QEMU keeps the blocks that the guest overwrites in STORE/disks. If that file system is full, the guest's writes fail.
A disk that holds internal snapshots (savevm) is read completely for each checkpoint: QEMU could not load a snapshot of a disk
that has a dirty bitmap.

A Firecracker needs the socket of its API (--api-sock), and no change. Other clients may go on to use the API. The files of
drives to which its guest can write must be on btrfs, XFS, or (with Linux 6.14 or newer) ext4.

A VM that `keyframe branch` or `restore` has started is reached by its name (`keyframe status` lists them). It keeps its name in
the store.

Examples:
  keyframe attach --store S --qmp /run/vm.sock $(pidof qemu-system-x86_64)
  keyframe attach --store S --api /run/fc.sock $(pidof firecracker)
  keyframe attach --store S --libvirt web --interval 5s --count 10 4711
  keyframe attach --store S --qmp a.sock --qmp b.sock 4711 4712    # two VMs, at one instant
  keyframe attach --store S web-1                                   # a clone of `keyframe branch`"
)]
#[group(id = "monitor", multiple = true)]
pub struct Attach {
    #[command(flatten)]
    store: StoreArg,
    /// QEMU's QMP socket; of several VMs, one for each PID in the same order
    #[arg(long, value_name = "SOCKET", group = "monitor")]
    qmp: Vec<PathBuf>,
    /// The libvirt domain that the VM is; of several VMs, one for each PID in the same order
    #[arg(long, value_name = "DOMAIN", group = "monitor", conflicts_with = "qmp")]
    libvirt: Vec<String>,
    /// The socket of Firecracker's API, for a VM of Firecracker
    #[arg(long, value_name = "SOCKET", group = "monitor", conflicts_with_all = ["qmp", "libvirt"])]
    api: Option<PathBuf>,
    /// Which libvirt [default: virsh's own]
    #[arg(long, value_name = "URI", requires = "libvirt")]
    connect: Option<String>,
    /// The control socket of the `keyframe switch` that connects several VMs: packets on their way
    /// are in the checkpoint
    #[arg(long, value_name = "SOCKET")]
    lan_control: Option<PathBuf>,
    #[command(flatten)]
    checkpoints: Checkpoints,
    #[command(flatten)]
    ready: ReadyArg,
    /// The process id of QEMU or Firecracker, or the name of a VM that `keyframe branch` or `restore`
    /// has started. Several VMs are a group: each checkpoint is of all of them, at one instant
    #[arg(value_name = "PID|NAME", required = true)]
    vms: Vec<String>,
}

/// A VM, and the socket of its monitor or API.
struct Reached {
    vmm: VmmKind,
    pid: u32,
    socket: PathBuf,
}

impl Attach {
    /// Returns true if the VM is one of Firecracker.
    pub fn is_of_firecracker(&self) -> bool {
        let is_firecracker = |vm: &Reached| vm.vmm == VmmKind::Firecracker;
        self.api.is_some() || self.named().is_ok_and(|vms| vms.iter().any(is_firecracker))
    }

    /// The VMs, which are all named; none if a monitor is given.
    fn named(&self) -> Result<Vec<Reached>, Failure> {
        if self.api.is_some() || !self.qmp.is_empty() || !self.libvirt.is_empty() {
            return Ok(Vec::new());
        }
        let running = run_dir::without_engine()?;
        self.vms.iter().map(|name| reached(name, &running)).collect()
    }

    /// The process ids, of VMs whose monitors are given.
    fn pids(&self) -> Result<Vec<u32>, Failure> {
        let pid = |word: &String| {
            word.parse().map_err(|_| {
                Failure::usage(format!("{word} is not a process id")).fix(
                    "with --qmp, --libvirt or --api, give process ids; to give names of VMs, leave \
                     these options out",
                )
            })
        };
        self.vms.iter().map(pid).collect()
    }

    /// Takes checkpoints until asked to end.
    pub fn run(self) -> Outcome {
        let ready = self.ready.take()?;
        let store = self.store.open()?;
        let named = self.named()?;
        let pids = if named.is_empty() { self.pids()? } else { Vec::new() };
        if let Some((pid, socket)) = self.firecracker(&named, &pids)? {
            let mut options = self.checkpoints.options(OnExit::Keep);
            options.events = ready.telling(options.events);
            let report = vmms::attach_firecracker(&store, pid, &socket, options)?;
            return Ok(exit_code(report.verdict()));
        }
        let uri = self.connect;
        let libvirt = |domain| Monitor::Libvirt { domain, uri: uri.clone() };
        let qmp = self.qmp.into_iter().map(Monitor::Socket);
        let monitors: Vec<Monitor> = qmp.chain(self.libvirt.into_iter().map(libvirt)).collect();
        if monitors.len() != pids.len() {
            let (monitors, pids) = (monitors.len(), pids.len());
            return Err(Failure::new(format!("{pids} process ids, and monitors for {monitors}"))
                .fix("name one --qmp SOCKET or --libvirt DOMAIN for each PID, in the same order"));
        }
        let given = pids.into_iter().zip(monitors);
        let named = named.into_iter().map(|vm| (vm.pid, Monitor::Socket(vm.socket)));
        let vms: Vec<_> =
            given.chain(named).map(|(pid, monitor)| (pid, AttachOptions { monitor })).collect();
        let mut session = self.checkpoints.options(OnExit::Keep);
        session.events = ready.telling(session.events);
        if let Some(control) = self.lan_control {
            session.lans = LanChoice::Control(control);
        }
        Ok(exit_code(keyframe_session::attach(&store, &vms, session)?.verdict()))
    }

    /// The process and the API socket of the one VM of Firecracker; `None` if the VMs are QEMU's. Errors:
    /// one of several VMs is Firecracker's; a network of several VMs is named.
    fn firecracker(
        &self,
        named: &[Reached],
        pids: &[u32],
    ) -> Result<Option<(u32, PathBuf)>, Failure> {
        let given = self.api.iter().zip(pids).map(|(socket, pid)| (*pid, socket.clone()));
        let named = named.iter().filter(|vm| vm.vmm == VmmKind::Firecracker);
        let found = given.chain(named.map(|vm| (vm.pid, vm.socket.clone()))).next();
        if found.is_some() && (self.vms.len() > 1 || self.lan_control.is_some()) {
            vmms::require(VmmKind::Firecracker, Ability::Groups)?;
            return Err(Failure::new("several process ids, and one --api SOCKET"));
        }
        Ok(found)
    }
}

/// Finds the VM that `name` names among those that `running` lists.
fn reached(name: &str, running: &[(PathBuf, About)]) -> Result<Reached, Failure> {
    let Some((directory, about)) = running.iter().find(|(_, about)| about.vm == name) else {
        let failure = match name.parse::<u32>() {
            Ok(pid) => Failure::usage(format!("no monitor is given for process {pid}")),
            Err(_) => Failure {
                kind: FailureKind::NoVm,
                ..Failure::new(format!(
                    "keyframe branch and keyframe restore have started no VM named {name}"
                ))
            },
        };
        return Err(failure.fix(
            "name the VM's monitor: --qmp SOCKET, --libvirt DOMAIN, or --api SOCKET for Firecracker; \
             `keyframe status` lists the VMs that are found by name",
        ));
    };
    let (socket, pid) = (run_dir::monitor_in(directory, about.vmm), about.qemu_pid);
    if !socket.exists() {
        let option = if about.vmm == VmmKind::Firecracker { "--api" } else { "--qmp" };
        return Err(Failure::new(format!("no monitor of VM {name} is known"))
            .fix(format!("name it: {option} SOCKET {pid}")));
    }
    Ok(Reached { vmm: about.vmm, pid, socket })
}
