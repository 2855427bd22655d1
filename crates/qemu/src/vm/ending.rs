//! The end of a QEMU: after its guest has shut down, or when Keyframe ends it.
//!
//! QEMU does not answer its monitor while it closes its disks: it drains and flushes them, cancels
//! jobs and stores bitmaps. A kill would interrupt that, so a QEMU is killed only if it has no disk
//! open for writing any more, or after a minute. A QEMU that another program started is never
//! killed.

use super::Vm;
use crate::{Error, Result};
use std::os::unix::fs::FileTypeExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// How long QEMU may take to end when asked to.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);
/// A QEMU whose guest has shut down and that neither ends nor answers within this time is stuck.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
/// How long QEMU may take to close its disks.
const CLOSE_TIMEOUT: Duration = Duration::from_mins(1);

impl Vm {
    /// Waits for QEMU's end after the guest has shut down ([`crate::QmpEvent::Shutdown`]), and
    /// returns the status as [`Vm::try_wait`] does; `None` if QEMU stays (`-no-shutdown`), or if
    /// another program started it and it is still closing its disks after a minute.
    ///
    /// QEMU 7.2 can hang in `monitor_cleanup` if a command is in progress while the guest shuts
    /// down. Its disks are flushed and closed by then. This function kills such a QEMU and returns
    /// success.
    ///
    /// Error: the kernel does not tell whether QEMU has ended, or does not end it.
    pub fn finish_shutdown(&mut self) -> Result<Option<ExitStatus>> {
        let before = self.qmp.set_timeout(Duration::from_millis(500));
        let began = Instant::now();
        let ended = loop {
            if let Some(ended) = self.lifetime.wait(Duration::from_millis(20))? {
                break Some(ended.status());
            }
            if self.qmp.status().is_ok() {
                break None;
            }
            let closes = self.is_attached() || writes_disks(self.pid());
            if began.elapsed() < if closes { CLOSE_TIMEOUT } else { SHUTDOWN_TIMEOUT } {
                continue;
            }
            if self.is_attached() {
                break None;
            }
            self.lifetime.kill()?;
            break Some(ExitStatus::default());
        };
        self.qmp.set_timeout(before);
        Ok(ended)
    }

    /// Ends QEMU. It first asks QEMU to quit, so that QEMU resets the terminal. If that fails, it
    /// kills a QEMU that Keyframe started. Error: QEMU does not end.
    pub fn kill(&mut self) -> Result<()> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        self.qmp.set_timeout(QUIT_TIMEOUT);
        let asked = self.qmp.quit();
        let began = Instant::now();
        if asked.is_ok() && self.lifetime.wait(QUIT_TIMEOUT)?.is_some() {
            return Ok(());
        }
        if self.is_attached() {
            asked?;
            return Err(Error::Timeout {
                monitor: format!("of pid {}", self.pid()),
                operation: "quit".into(),
                waited_ms: u64::try_from(QUIT_TIMEOUT.as_millis()).unwrap_or(u64::MAX),
            });
        }
        while asked.is_ok() && began.elapsed() < CLOSE_TIMEOUT && writes_disks(self.pid()) {
            if self.lifetime.wait(Duration::from_millis(200))?.is_some() {
                return Ok(());
            }
        }
        self.lifetime.kill().map(drop)
    }
}

/// Returns whether process `pid` has a disk open for writing: a block device, or an image, which
/// QEMU locks. Logs and files of memory are not locked.
fn writes_disks(pid: u32) -> bool {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.into_iter().any(|fd| {
        let info = format!("/proc/{pid}/fdinfo/{}", fd.file_name().to_string_lossy());
        let Ok(info) = std::fs::read_to_string(info) else { return false };
        let is_device =
            std::fs::metadata(fd.path()).is_ok_and(|found| found.file_type().is_block_device());
        let is_locked = info.lines().any(|line| line.starts_with("lock:"));
        is_writable(&info) && (is_device || is_locked)
    })
}

/// Returns whether `text`, of `/proc/PID/fdinfo`, is of a file that is open for writing.
fn is_writable(text: &str) -> bool {
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok());
    // O_WRONLY is 1, O_RDWR is 2.
    flags.is_some_and(|flags| flags & 3 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_open_for_writing_is_seen() {
        assert!(is_writable("pos:\t0\nflags:\t0100002\nmnt_id:\t1\n"));
        assert!(is_writable("flags:\t01\n"));
        assert!(!is_writable("flags:\t0100000\n") && !is_writable("pos:\t0\n"));
        let mut other = std::process::Command::new("sleep").arg("20").spawn().unwrap();
        assert!(!writes_disks(other.id()));
        other.kill().unwrap();
        other.wait().unwrap();
        // A lock that shows in the kernel's description of the open file, as QEMU's do.
        let image = tempfile::tempfile().unwrap();
        rustix::fs::flock(&image, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert!(writes_disks(std::process::id()));
    }
}
