//! `keyframe switch`: a network between VMs that checkpoints can hold; and `keyframe __switch`, the
//! same started by an engine for its own VMs.

use crate::failure::{DONE, Failure, Outcome, chain};
use crate::output;
use keyframe_kernel::{END_SIGNALS, signal_socket};
use keyframe_net::{Error, Switch as NetSwitch, serve_until};
use keyframe_session::helper_process;
use std::path::PathBuf;

/// Connect VMs by a network that a checkpoint of several can hold
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Each --listen is one LAN: an Ethernet switch for all VMs that connect there. Start it before the VMs. Start each VM with

  -netdev stream,id=n0,server=off,addr.type=unix,addr.path=/run/lan.sock -device virtio-net-pci,netdev=n0,mac=...

Give each VM a MAC address of its own: QEMU's default is the same for all. Any process that may write to a --listen socket is
on that LAN. The owner of the control socket can hold the network. The switch ends at Ctrl-C or SIGTERM. The VMs then have no
network until they are started again (QEMU 9.2 and later reconnect with reconnect-ms=1000).

Examples:
  keyframe switch --listen /run/lan.sock
  keyframe switch --listen /run/front.sock --listen /run/back.sock --control /run/lan.ctl"
)]
pub struct Switch {
    /// A socket that VMs connect to; may be given several times
    #[arg(long, value_name = "PATH", required = true)]
    listen: Vec<PathBuf>,
    /// A socket by which a checkpoint of several VMs holds the network
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl Switch {
    /// Switches until a signal comes.
    pub fn run(&self) -> Outcome {
        let stop = signal_socket(&END_SIGNALS)
            .map_err(|e| Failure::new(format!("install signal handlers: {e}")))?;
        let mut switch = NetSwitch::new().map_err(|e| failure(&e))?;
        for path in &self.listen {
            switch.listen(path).map_err(|e| failure(&e))?;
        }
        for path in &self.listen {
            output::print_line(&format!("listening at {}", path.display()))?;
        }
        serve_until(switch, self.control.as_deref(), stop.into()).map_err(|e| failure(&e))?;
        Ok(DONE)
    }
}

/// Switch packets for the engine at the other end of standard input
#[derive(clap::Args, Debug)]
pub struct SwitchProcess {}

impl SwitchProcess {
    /// Switches until the engine has ended and no VM is connected.
    #[expect(clippy::unused_self, reason = "as all commands")]
    pub fn run(&self) -> Outcome {
        helper_process::switch()?;
        Ok(DONE)
    }
}

fn failure(error: &Error) -> Failure {
    Failure { fix: error.fix(), ..Failure::new(chain(error)) }
}
