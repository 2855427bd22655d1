//! The processes that a session starts beside itself: they are the running program again, with a
//! hidden first argument.
//!
//! | argument | process |
//! |---|---|
//! | `__watchdog WORDS` | resumes a VM whose session dies or stalls in a pause, and ends the rollback of one that dies |
//! | `__disks` | serves the disks of a VM, which may outlive its session |
//! | `__switch` | the network between the VMs of a group |
//!
//! A program that runs sessions calls [`run_if_asked`] first in its `main`, before it starts
//! threads or reads its arguments.

use crate::error::{Error, Result, error_chain};
use crate::rollback_rescue::StoreRescuer;
use crate::succession_rescue::StoreSuccessionRescuer;
use keyframe_confine::{KeptRights, capabilities_but, no_programs};
use keyframe_firecracker::watchdog::WORD as FIRECRACKER;
use keyframe_qemu::watchdog::{self, Watched};
use keyframe_vm_disks::layer::Layers;
use std::ffi::OsString;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, exit};

/// Returns the command of the helper process with this argument. Its environment has the secret
/// that opened the store, because a watchdog reads the store to end a rollback.
pub(crate) fn command(argument: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("keyframe").arg(argument);
    keyframe_store_keys::pass_on(&mut command);
    command
}

/// Runs a helper process and exits, if this program was started as one. Returns otherwise.
pub fn run_if_asked() {
    let mut arguments = std::env::args_os().skip(1);
    let Some(first) = arguments.next() else { return };
    // A kernel that refuses to take rights away leaves the helper with the program's own.
    let ended = match first.to_str() {
        Some("__watchdog") => {
            let words: Vec<_> = arguments.collect();
            let starts_successor = words.first().is_some_and(|word| word == FIRECRACKER);
            let kept =
                if starts_successor { KeptRights::TracingAndTaps } else { KeptRights::Tracing };
            let _ = capabilities_but(kept);
            watch(&words)
        }
        Some("__disks") => {
            let _ = capabilities_but(KeptRights::Files).and_then(|()| no_programs());
            serve_disks()
        }
        Some("__switch") => {
            let _ = capabilities_but(KeptRights::Files).and_then(|()| no_programs());
            switch()
        }
        _ => return,
    };
    match ended {
        Ok(()) => exit(0),
        Err(error) => {
            // The terminal may have gone.
            let _ = writeln!(std::io::stderr(), "{}: {}", first.display(), error_chain(&error));
            exit(1);
        }
    }
}

/// Watches the VM that `words` describe until the session at the other end of standard input ends.
/// If the session dies in a rollback, ends the rollback in its place. One word alone is the path of
/// QEMU's monitor socket. Error: the words are invalid, or the VM cannot be resumed.
pub fn watch(words: &[OsString]) -> Result<()> {
    if words.first().is_some_and(|word| word == FIRECRACKER) {
        let watched = keyframe_firecracker::watchdog::run(
            words,
            std::io::stdin(),
            std::io::stdout(),
            &mut StoreSuccessionRescuer,
        );
        return Ok(watched.map_err(keyframe_vmm::VmmError::from)?);
    }
    let watched = match words {
        [path] => Watched::by_monitor(path.into()),
        words => Watched::parse(words)?,
    };
    Ok(watchdog::run(watched, std::io::stdin(), std::io::stdout(), &mut StoreRescuer)?)
}

/// Serves disks for the session at the other end of standard input, until that orders the end or
/// its VM is gone. Error: the requests cannot be read.
pub fn serve_disks() -> Result<()> {
    let control = UnixStream::from(standard_input()?);
    let layers = Layers::default();
    keyframe_disk::serve(&control, |source| layers.open(source))
        .map_err(|e| Error::VmDisks(keyframe_vm_disks::Error::Disk(e)))
}

/// Switches packets for the session at the other end of standard input, until that has ended and no
/// VM is connected. Error: the requests cannot be read.
pub fn switch() -> Result<()> {
    Ok(keyframe_net::serve(UnixStream::from(standard_input()?))?)
}

fn standard_input() -> Result<std::os::fd::OwnedFd> {
    std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(|e| Error::io("copy the descriptor of standard input", e))
}
