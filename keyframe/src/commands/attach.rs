//! `keyframe attach`: continuous checkpoints of a VM that runs already.

use super::checkpoints::Checkpoints;
use super::exit_code;
use super::vmms;
use super::{ReadyArg, StoreArg};
use crate::failure::{Failure, Outcome};
use keyframe_machine::VmmKind;
use keyframe_qemu::{AttachOptions, Monitor};
use keyframe_session::LanChoice;
use keyframe_session::control::OnExit;
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

Examples:
  keyframe attach --store S --qmp /run/vm.sock $(pidof qemu-system-x86_64)
  keyframe attach --store S --api /run/fc.sock $(pidof firecracker)
  keyframe attach --store S --libvirt web --interval 5s --count 10 4711
  keyframe attach --store S --qmp a.sock --qmp b.sock 4711 4712    # two VMs, at one instant"
)]
#[group(id = "monitor", required = true, multiple = true)]
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
    /// The process id of QEMU or Firecracker. Several VMs are a group: each checkpoint is of all of
    /// them, at one instant
    #[arg(value_name = "PID", required = true)]
    pids: Vec<u32>,
}

impl Attach {
    /// Returns true if the VM is one of Firecracker.
    pub fn is_of_firecracker(&self) -> bool {
        self.api.is_some()
    }

    /// Takes checkpoints until asked to end.
    pub fn run(self) -> Outcome {
        let ready = self.ready.take()?;
        let store = self.store.open()?;
        if let Some(socket) = &self.api {
            let [pid] = self.pids[..] else {
                vmms::require(VmmKind::Firecracker, Ability::Groups)?;
                return Err(Failure::new("several process ids, and one --api SOCKET"));
            };
            if self.lan_control.is_some() {
                vmms::require(VmmKind::Firecracker, Ability::Groups)?;
            }
            let mut options = self.checkpoints.options(OnExit::Keep);
            options.events = ready.telling(options.events);
            let report = vmms::attach_firecracker(&store, pid, socket, options)?;
            return Ok(exit_code(report.verdict()));
        }
        let uri = self.connect;
        let libvirt = |domain| Monitor::Libvirt { domain, uri: uri.clone() };
        let monitors: Vec<Monitor> = self
            .qmp
            .into_iter()
            .map(Monitor::Socket)
            .chain(self.libvirt.into_iter().map(libvirt))
            .collect();
        if monitors.len() != self.pids.len() {
            let (monitors, pids) = (monitors.len(), self.pids.len());
            return Err(Failure::new(format!("{pids} process ids, and monitors for {monitors}"))
                .fix("name one --qmp SOCKET or --libvirt DOMAIN for each PID, in the same order"));
        }
        let options = monitors.into_iter().map(|monitor| AttachOptions { monitor });
        let vms: Vec<_> = self.pids.into_iter().zip(options).collect();
        let mut session = self.checkpoints.options(OnExit::Keep);
        session.events = ready.telling(session.events);
        if let Some(control) = self.lan_control {
            session.lans = LanChoice::Control(control);
        }
        Ok(exit_code(keyframe_session::attach(&store, &vms, session)?.verdict()))
    }
}
