//! What each command gives up of its rights before it begins, or once QEMU runs.
//!
//! | command | keeps |
//! |---|---|
//! | `run`, `record`, `restore`, `branch`, `protect` that starts nothing later | all, until QEMU has been started as the user wants it; then tracing, files ([`trace_only`]). What reads a store before that has files ([`files_only`]) |
//! | starts QEMU or other programs later, too, as `log` does for a console that was not read yet (`serve` with --allow-start, too), mounts, measures | all: its child needs what the user gave it |
//! | `attach`, `__watchdog` | tracing, files |
//! | `__guard` | signals, files; starts nothing |
//! | all others | files; starts nothing |

use crate::Command;
use crate::words::StderrWords;
use keyframe_confine::{Error, KeptRights, capabilities_but, no_programs};
use keyframe_session::{Event, EventSink};
use std::path::PathBuf;
use std::sync::Arc;

/// Gives up what `command` does not use. Where the kernel refuses that, it says so and goes on: as
/// it would without.
pub fn give_up(command: &Command) {
    tell(confine(command));
}

/// Keeps the rights to trace QEMU and to use files, and gives up all others. To be called before
/// threads are started: a thread keeps the rights that it was started with.
pub fn trace_only() {
    tell(capabilities_but(KeptRights::Tracing));
}

/// Keeps the rights to use files only, in the calling thread: it reads untrusted data, and QEMU is
/// not started yet.
pub fn files_only() {
    tell(capabilities_but(KeptRights::Files).and_then(|()| no_programs()));
}

/// Gives up the right to change files outside of `folders`.
pub fn writes_beneath(folders: &[PathBuf]) {
    tell(keyframe_confine::writes_beneath(folders));
}

fn tell(confined: Result<(), Error>) {
    if let Err(error) = confined {
        StderrWords::default().event(&Event::RightsKept { error: Arc::new(error) });
    }
}

fn confine(command: &Command) -> Result<(), Error> {
    match command {
        Command::Doctor(_)
        | Command::Run(_)
        | Command::Restore(_)
        | Command::Branch(_)
        | Command::Mount(_)
        | Command::Import(_)
        | Command::Protect(_)
        | Command::Standby(_)
        | Command::Profile(_)
        | Command::Record(_)
        | Command::Segment(_)
        | Command::Log(_)
        | Command::Goto(_)
        | Command::Find(_)
        | Command::Analyze(_)
        | Command::Verify(_)
        | Command::Work(_) => Ok(()),
        Command::Serve(serve) if serve.starts() => Ok(()),
        Command::Attach(attach) if attach.is_of_firecracker() => {
            capabilities_but(KeptRights::TracingAndTaps)
        }
        Command::Watchdog(watchdog) if watchdog.is_of_firecracker() => {
            capabilities_but(KeptRights::TracingAndTaps)
        }
        Command::Attach(_) | Command::Watchdog(_) => capabilities_but(KeptRights::Tracing),
        Command::GuardProcess(_) => {
            capabilities_but(KeptRights::FilesAndSignals)?;
            no_programs()
        }
        Command::Init(_)
        | Command::List(_)
        | Command::Show(_)
        | Command::Rollback(_)
        | Command::Console(_)
        | Command::Export(_)
        | Command::Commit(_)
        | Command::Check(_)
        | Command::Forget(_)
        | Command::Prune(_)
        | Command::Diff(_)
        | Command::Unlock(_)
        | Command::Copy(_)
        | Command::Bundle(_)
        | Command::Tag(_)
        | Command::Pin(_)
        | Command::Serve(_)
        | Command::Stats(_)
        | Command::Report(_)
        | Command::Status(_)
        | Command::Top(_)
        | Command::Stop(_)
        | Command::Take(_)
        | Command::Switch(_)
        | Command::Failover(_)
        | Command::Witness(_)
        | Command::Analysis(_)
        | Command::Plan(_)
        | Command::Help(_)
        | Command::Completions(_)
        | Command::Man(_)
        | Command::SwitchProcess(_)
        | Command::GateProcess(_)
        | Command::Disks(_) => {
            capabilities_but(KeptRights::Files)?;
            no_programs()
        }
    }
}
