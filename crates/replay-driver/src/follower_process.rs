//! A process that follows a recording with a second QEMU and takes its checkpoints:
//! `keyframe segment --follow`.

use crate::error::{Error, Result};
use keyframe_store_keys as keys;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often the process is checked for its end.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A process that follows a recording and takes its checkpoints. It outlives its recording for a
/// moment only: if the recorder has ended, it follows to the log's end and ends. Dropping this value
/// ends the process.
pub struct FollowerProcess {
    child: Child,
}

impl FollowerProcess {
    /// Starts the process, which follows `recording` and takes a checkpoint into `store` after each
    /// `every` of the recording's time. Error: the process cannot be started.
    pub fn start(recording: &Path, every: Duration, store: &Path) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        let every = humantime::format_duration(every).to_string();
        command
            .arg0("keyframe")
            .arg("segment")
            .arg(recording)
            .args(["--follow", "--quiet", "--every", &every]);
        command.arg("--store").arg(store);
        keys::pass_on(&mut command);
        // Ctrl-C ends the recording; this process follows to the recording's end.
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let started = command.spawn();
        let child =
            started.map_err(|e| Error::io("start a process that follows the recording", e))?;
        Ok(Self { child })
    }

    /// Waits until the process has followed a recording that has ended. Ends the process when
    /// `interrupted` becomes true. Returns true if it has reached the recording's end. Error: the
    /// process has failed.
    pub fn finish(mut self, interrupted: &AtomicBool) -> Result<bool> {
        let mut is_signalled = false;
        loop {
            let status = self.child.try_wait();
            let status = status.map_err(|e| Error::io("wait for the process that follows", e))?;
            if let Some(status) = status {
                return Ok(status.success());
            }
            if interrupted.load(Ordering::Relaxed) && !std::mem::replace(&mut is_signalled, true) {
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

impl Drop for FollowerProcess {
    fn drop(&mut self) {
        // It still runs if the recording has failed, so that `finish` was not called.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal();
            let _ = self.child.wait();
        }
    }
}
