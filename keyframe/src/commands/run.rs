//! `keyframe run`: a VM under continuous checkpoints.

use super::checkpoints::Checkpoints;
use super::exit_code;
use super::vmms;
use super::{ReadyArg, StoreArg};
use crate::failure::paths;
use crate::failure::{FAILED, Failure, Outcome};
use keyframe_event_text::shell_word;
use keyframe_machine::VmmKind;
use keyframe_session::control::OnExit;
use keyframe_session::{CommandLines, LanChoice};
use keyframe_vmm::Ability;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Run a VM with continuous checkpoints
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Keyframe starts QEMU with the command line after --. It adds a monitor socket and a descriptor for the device state,
and it serves the disks. QEMU's standard streams are passed through. The command ends when the VM ends,
after --count checkpoints, at Ctrl-C, or by `keyframe stop`. Keyframe seals the checkpoint in progress first.

Each checkpoint contains the disks that the guest can write to (raw and qcow2 images: -drive, -blockdev, -hda). Keyframe does
not write to their images: the guest's writes go to STORE/disks, and `keyframe commit` writes them to an image. With --disk
bitmap or --disk reflink QEMU writes to the images itself, as it does without Keyframe.

Firecracker (-- firecracker --api-sock SOCKET --config-file FILE) runs as it is. Keyframe pauses it through its API.

Examples:
  keyframe run --store S -- qemu-system-x86_64 -m 1G -nographic -kernel vmlinuz -append console=ttyS0
  keyframe run --store S --interval 500ms --count 20 --name web -- qemu-system-x86_64 ...
  keyframe run --store S --keep-within 10m -- qemu-system-x86_64 ...   # the last ten minutes: a flight recorder
  keyframe run --store S --interval none -- qemu-system-x86_64 ...    # only when asked: keyframe take
  keyframe run --store S --group -- qemu-system-x86_64 -name db ... -- qemu-system-x86_64 -name web ...
  keyframe run --store S --group --lan /run/lan -- qemu-system-x86_64 -name a \\
      -netdev stream,id=n,server=off,addr.type=unix,addr.path=/run/lan -device e1000,netdev=n,mac=52:54:00:00:00:01 ... -- ..."
)]
pub struct Run {
    #[command(flatten)]
    store: StoreArg,
    #[command(flatten)]
    checkpoints: Checkpoints,
    /// What to do with a VM that still runs when this command ends
    #[arg(long, value_enum, default_value = "kill")]
    on_exit: OnExit,
    #[command(flatten)]
    ready: ReadyArg,
    /// Several VMs, their command lines separated by --: each checkpoint is of all of them, at one
    /// instant
    #[arg(long)]
    group: bool,
    /// A network between the VMs of a group: a socket that Keyframe makes, and they connect to by
    /// -netdev stream,server=off,addr.type=unix,addr.path=SOCKET; no packet on it is lost or
    /// repeated at a restore. May be given several times
    #[arg(long, value_name = "SOCKET", requires = "group")]
    lan: Vec<PathBuf>,
    /// The command line of QEMU or Firecracker
    #[arg(last = true, required = true, value_name = "VMM COMMAND")]
    command: Vec<OsString>,
}

impl Run {
    /// Runs the VM to its end.
    pub fn run(self) -> Outcome {
        let ready = self.ready.take()?;
        let store = self.store.open()?;
        let commands =
            if self.group { group(&self.command)? } else { CommandLines::One(self.command) };
        let vmm = first_program(&commands).map_or(VmmKind::Qemu, vmms::of_program);
        if self.group {
            vmms::require(vmm, Ability::Groups)?;
        }
        let quiet = self.checkpoints.is_quiet();
        let mut options = self.checkpoints.options(self.on_exit);
        options.events = ready.telling(options.events);
        if !self.lan.is_empty() {
            let paths =
                self.lan.iter().map(|path| paths::absolute(path)).collect::<Result<_, _>>()?;
            options.lans = LanChoice::Own(paths);
        }
        let report = match (vmm, commands) {
            (VmmKind::Firecracker, CommandLines::One(words)) => {
                vmms::run_firecracker(&store, words, options)?
            }
            (_, commands) => keyframe_session::run(&store, commands, options)?,
        };
        let code = exit_code(report.verdict());
        if !quiet && code != FAILED && report.sealed > 0 {
            let place = shell_word(&self.store.store);
            eprintln!(
                "keyframe: see them: keyframe list --store {place}; bring one back: keyframe restore --store {place} latest"
            );
        }
        Ok(code)
    }
}

/// The program of the first command line.
fn first_program(commands: &CommandLines) -> Option<&OsStr> {
    let words = match commands {
        CommandLines::One(words) => words,
        CommandLines::Group(lines) => lines.first()?,
    };
    words.first().map(OsString::as_os_str)
}

/// The lines between the `--`.
fn group(words: &[OsString]) -> Result<CommandLines, Failure> {
    let lines: Vec<Vec<OsString>> = words.split(|word| word == "--").map(<[_]>::to_vec).collect();
    if lines.len() < 2 || lines.iter().any(Vec::is_empty) {
        return Err(Failure::new("--group needs the command lines of at least two VMs").fix(
            "separate them by --: keyframe run --group -- qemu-system-x86_64 -name a ... -- qemu-system-x86_64 -name b ...",
        ));
    }
    Ok(CommandLines::Group(lines))
}
