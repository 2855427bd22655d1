//! `keyframe protect`: a VM with a standby on another host; and the processes beside it.

use super::vmms;
use crate::failure::paths;
use crate::failure::{DONE, FAILED, Failure, Outcome, WARNED, chain};
use crate::words::StderrWords;
use crate::words::failover::failure;
use keyframe_event_text::Importance;
use keyframe_failover::links::StandbyAddresses;
use keyframe_failover::primary::ProtectionEnding;
use keyframe_failover::settings::{FailoverSettings, address};
use keyframe_failover::standby::{self, StandbyOptions};
use keyframe_failover::{guard, launch};
use keyframe_vmm::Ability;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// Run a VM with a standby on another host that goes on with it
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Keyframe starts QEMU with the command line after --. A packet that the guest sends leaves the host only when the standby has the
state that sent it (output commit). Packets to the guest are never held. The guest's disks (raw and qcow2) are copied to the
standby with the first epoch, and their changes follow with each epoch. The images on this host are not written: the guest's writes
go to --dir.

When a host falls silent, one of two things decides which host runs the VM. --witness names a third host (keyframe witness) that
permits one of the two to run it. --fence-with names a command that switches the other host off. Without either, the VM continues
here if the standby is lost, and the standby takes over only by command (keyframe failover --force). Give both hosts the same of
these options. All connections are encrypted, and need --key.

The policy decides when an epoch is taken. --latency 20ms asks for the fewest epochs that keep this latency, not for the least latency.
With --hold-output none packets leave at once: the guest answers sooner, and a takeover loses answers that its clients have seen.

Examples:
  (umask 077; head -c 32 /dev/urandom | base64 > KEY)                       # once; copy it to each host
  keyframe witness --key KEY --listen 0.0.0.0:7431 --dir W                   # on host c
  keyframe standby --key KEY --witness c:7431 --listen 0.0.0.0:7430 --dir D    # on host b
  keyframe protect --key KEY --witness c:7431 --standby b:7430 -- qemu-system-x86_64 -m 1G \\
      -netdev tap,id=n0,ifname=tap0,script=no -device virtio-net-pci,netdev=n0 ...          # on host a
  keyframe status
  keyframe failover                                                         # the VM goes over to b, without loss"
)]
pub struct Protect {
    /// Where the standby listens (keyframe standby)
    #[arg(long, value_name = "HOST:PORT")]
    standby: String,
    /// The same standby by a second way, for signs of life: a link that is cut is then no host that
    /// is dead
    #[arg(long, value_name = "HOST:PORT")]
    standby_beat: Option<String>,
    /// Where to listen as the standby, once the VM runs on the other host: the two change roles
    /// from then on
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Where what the guest writes to its disks lies [default: ~/.local/state/keyframe/protect]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The VM's name [default: that of QEMU's -name, else vm]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    settings: FailoverSettings,
    /// QEMU's command line
    #[arg(last = true, required = true, value_name = "QEMU COMMAND")]
    command: Vec<OsString>,
}

impl Protect {
    /// Runs the VM until it ends, or runs elsewhere.
    pub fn run(self) -> Outcome {
        vmms::require_of(&self.command, Ability::Protect)?;
        let words = StderrWords::shared(self.settings.is_quiet(), false);
        let setup = self.settings.resolve(words.clone()).map_err(failure)?;
        let beat = self.standby_beat.as_deref().map(address).transpose().map_err(failure)?;
        let addresses =
            StandbyAddresses { control: address(&self.standby).map_err(failure)?, beat };
        let folder = folder(self.dir, "protect")?;
        // Neither a standby's QEMU nor the fence hook.
        let is_last = self.listen.is_none() && setup.fence_with.is_none();
        let name = self.name.clone();
        let engine =
            launch::protect(self.command, name, &folder, addresses, setup.clone(), is_last)
                .map_err(failure)?;
        let ending = match (engine.run().map_err(failure)?, self.listen) {
            (ProtectionEnding::Elsewhere, Some(listen)) => standby::run(&StandbyOptions {
                listen: address(&listen).map_err(failure)?,
                folder: folder.join("standby"),
                name: self.name.unwrap_or_else(|| "standby".into()),
                extra: Vec::new(),
                peer: Some(addresses),
                setup,
            })
            .map_err(failure)?,
            (ending, _) => {
                if ending == ProtectionEnding::Elsewhere {
                    let text = "to protect it by this host, start: keyframe standby";
                    words.print(Importance::Usual, text);
                }
                ending
            }
        };
        Ok(exit_code(ending))
    }
}

/// The exit code of a host whose part in a protected VM has ended.
pub fn exit_code(ending: ProtectionEnding) -> u8 {
    match ending {
        ProtectionEnding::Done | ProtectionEnding::Elsewhere => DONE,
        ProtectionEnding::QemuFailed => FAILED,
        ProtectionEnding::GivenUp => WARNED,
    }
}

/// The directory that was named, or the usual one.
pub fn folder(named: Option<PathBuf>, usual: &str) -> Result<PathBuf, Failure> {
    match named {
        Some(named) => paths::absolute(&named),
        None => keyframe_store::state_folder().map(|state| state.join(usual)).ok_or_else(|| {
            Failure::new("there is no home directory").fix("name a directory: --dir DIR")
        }),
    }
}

/// Hold packets for the engine at the other end of standard input, and tell it by standard output
#[derive(clap::Args, Debug)]
pub struct GateProcess {}

impl GateProcess {
    /// Holds until the engine has ended, or the VM.
    #[expect(clippy::unused_self, reason = "as all commands")]
    pub fn run(&self) -> Outcome {
        let bell = std::io::stdout().as_fd().try_clone_to_owned();
        let bell = bell.map_err(|e| Failure::new(format!("take standard output: {e}")))?;
        keyframe_net::serve_gate(standard_input()?, bell).map_err(|e| Failure::new(chain(&e)))?;
        Ok(DONE)
    }
}

/// Stop or end a QEMU whose engine, at the other end of standard input, stalls or dies
#[derive(clap::Args, Debug)]
pub struct GuardProcess {
    /// QEMU's pid
    qemu: u32,
}

impl GuardProcess {
    /// Guards until the engine or QEMU has ended.
    pub fn run(&self) -> Outcome {
        guard::guard(self.qemu, standard_input()?).map_err(failure)?;
        Ok(DONE)
    }
}

fn standard_input() -> Result<UnixStream, Failure> {
    let input = std::io::stdin().as_fd().try_clone_to_owned();
    input.map(UnixStream::from).map_err(|e| Failure::new(format!("take standard input: {e}")))
}
