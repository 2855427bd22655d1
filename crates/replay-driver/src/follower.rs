//! A second QEMU that follows a recording while it is made, in a process of its own:
//! `keyframe segment --follow`.

use crate::error::{Error, Result};
use keyframe_store_keys as keys;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often it is looked whether it has come to its end.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// That process. It outlives nobody: where the recording's maker is gone, it goes to the log's end
/// and ends.
pub struct Follower {
    child: Child,
}

impl Follower {
    /// Starts it; a checkpoint `every` so often, into `store`.
    pub fn start(recording: &Path, every: Duration, store: &Path) -> Result<Self> {
        let failed = |e| Error::io("start a process that follows the recording", e);
        let mut command = Command::new("/proc/self/exe");
        let every = humantime::format_duration(every).to_string();
        command
            .arg0("keyframe")
            .arg("segment")
            .arg(recording)
            .args(["--follow", "--quiet", "--every", &every]);
        command.arg("--store").arg(store);
        keys::pass_on(&mut command);
        // Ctrl-C ends the recording, and it follows that to its end.
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        Ok(Self { child: command.spawn().map_err(failed)? })
    }

    /// Waits until it has followed a recording that has ended; ends it where the user does not want
    /// to wait. True where it has come to the recording's end.
    pub fn finish(mut self, interrupted: &AtomicBool) -> Result<bool> {
        let failed = |e| Error::io("wait for the process that follows", e);
        let mut told = false;
        loop {
            if let Some(status) = self.child.try_wait().map_err(failed)? {
                return Ok(status.success());
            }
            if interrupted.load(Ordering::Relaxed) && !std::mem::replace(&mut told, true) {
                self.signal();
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn signal(&self) {
        if let Some(pid) =
            i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // One that nobody has waited for: the recording has failed.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal();
            let _ = self.child.wait();
        }
    }
}
