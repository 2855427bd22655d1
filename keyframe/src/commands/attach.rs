//! `keyframe attach`: continuous checkpoints of a VM that runs already.

use super::StoreArg;
use super::checkpoints::Checkpoints;
use crate::control::OnExit;
use crate::failure::Outcome;
use crate::session;
use keyframe_qemu::{AttachOptions, Monitor};
use std::path::PathBuf;

/// Take continuous checkpoints of a QEMU that runs already
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The VM is not restarted, and is as it was when this command ends: after --count checkpoints, at Ctrl-C or by
`keyframe stop`. QEMU needs a QMP socket that nobody else uses (-qmp unix:/run/vm.sock,server=on,wait=off), or libvirt.
Through libvirt a pause is some ten milliseconds longer: each command goes through libvirtd.

The guest's disks must be read-only for now.

Examples:
  keyframe attach --store S --qmp /run/vm.sock $(pidof qemu-system-x86_64)
  keyframe attach --store S --libvirt web --interval 5s --count 10 4711"
)]
#[group(id = "monitor", required = true, multiple = false)]
pub struct Attach {
    #[command(flatten)]
    store: StoreArg,
    /// QEMU's QMP socket
    #[arg(long, value_name = "SOCKET", group = "monitor")]
    qmp: Option<PathBuf>,
    /// The libvirt domain that the VM is
    #[arg(long, value_name = "DOMAIN", group = "monitor")]
    libvirt: Option<String>,
    /// Which libvirt [default: virsh's own]
    #[arg(long, value_name = "URI", requires = "libvirt")]
    connect: Option<String>,
    #[command(flatten)]
    checkpoints: Checkpoints,
    /// QEMU's process id
    #[arg(value_name = "PID")]
    pid: u32,
}

impl Attach {
    /// Takes checkpoints until asked to end.
    pub fn run(self) -> Outcome {
        let store = self.store.open()?;
        let monitor = match (self.qmp, self.libvirt) {
            (Some(socket), _) => Monitor::Socket(socket),
            (None, domain) => Monitor::Libvirt { domain: domain.unwrap_or_default(), uri: self.connect },
        };
        session::attach(&store, self.pid, &AttachOptions { monitor }, self.checkpoints.options(OnExit::Keep))
    }
}
