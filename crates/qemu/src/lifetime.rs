//! A QEMU process and its end: a child of this process, or one that another program started.
//!
//! Only a process's parent learns its exit status. Of other processes Keyframe sees that they have
//! ended, by a pidfd, which never refers to another process.

use crate::{Error, Result, spawn};
use keyframe_vmm::VmExit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal};
use std::os::fd::OwnedFd;
use std::process::Child;
use std::time::{Duration, Instant};

/// How long a killed process may take to be gone.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// A QEMU process.
pub(crate) enum Lifetime {
    /// A child of this process.
    Child(Child),
    /// A process that another program started.
    Other(Other),
}

/// A process that is not our child.
pub(crate) struct Other {
    pid: u32,
    pidfd: OwnedFd,
}

impl Other {
    /// Opens the process `pid`. Errors: [`Error::Attach`] if there is no such process, or if it is
    /// a thread; [`Error::Io`] if the kernel refuses.
    pub fn open(pid: u32) -> Result<Self> {
        let fail = |problem: &str, fix: &str| Error::Attach {
            pid,
            problem: problem.into(),
            fix: fix.into(),
        };
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| fail("this is no pid", FIND))?;
        match rustix::process::pidfd_open(number, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { pid, pidfd }),
            Err(rustix::io::Errno::SRCH) => Err(fail("there is no such process", FIND)),
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => Err(fail(
                "this is a thread",
                "name its process: `ps -o pid= -p ...`, or pgrep -a qemu",
            )),
            Err(e) => Err(Error::io(format!("attach to process {pid}"))(e)),
        }
    }

    fn has_ended(&self, timeout: Duration) -> Result<bool> {
        let limit = Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&limit)) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(Error::io(format!("wait for QEMU (pid {})", self.pid))(e)),
        }
    }
}

/// How to find a QEMU's pid.
pub(crate) const FIND: &str = "`pgrep -a qemu` lists the QEMUs that run";

impl Lifetime {
    /// Returns QEMU's process id.
    pub fn pid(&self) -> u32 {
        match self {
            Self::Child(child) => child.id(),
            Self::Other(other) => other.pid,
        }
    }

    /// Returns how QEMU ended; `None` while it runs. Error: [`Error::Io`] if the kernel does not
    /// tell.
    pub fn ended(&mut self) -> Result<Option<VmExit>> {
        self.wait(Duration::ZERO)
    }

    /// Waits for QEMU's end for at most `timeout`, and returns how it ended; `None` if it still
    /// runs then. Error: [`Error::Io`] if the kernel does not tell.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<VmExit>> {
        match self {
            Self::Child(child) => Ok(spawn::wait(child, timeout)?.map(VmExit::Status)),
            Self::Other(other) => {
                let deadline = Instant::now() + timeout;
                loop {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if other.has_ended(left)? {
                        return Ok(Some(VmExit::Unknown));
                    }
                    if Instant::now() >= deadline {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Kills QEMU, waits until it is gone, and returns how it ended. Error: [`Error::Io`] if the
    /// kernel refuses the signal, or if QEMU is still there after 10 s.
    pub fn kill(&mut self) -> Result<VmExit> {
        match self {
            Self::Child(child) => spawn::kill(child).map(VmExit::Status),
            Self::Other(other) => {
                let operation = format!("kill QEMU (pid {})", other.pid);
                match rustix::process::pidfd_send_signal(&other.pidfd, Signal::KILL) {
                    Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                    Err(e) => return Err(Error::io(operation)(e)),
                }
                self.wait(KILL_TIMEOUT)?.ok_or_else(|| {
                    let late = std::io::Error::new(
                        std::io::ErrorKind::TimedOut,
                        "it is still there after 10 s",
                    );
                    Error::io(operation)(late)
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_end_of_a_process_that_is_not_ours_is_seen() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let mut other = Lifetime::Other(Other::open(child.id()).unwrap());
        assert_eq!(other.ended().unwrap(), None);
        assert_eq!(other.wait(Duration::from_millis(20)).unwrap(), None);
        let ended = other.kill().unwrap();
        assert!(ended.success() && ended.status().success(), "the status is not known");
        assert_eq!(other.ended().unwrap(), Some(VmExit::Unknown));
        child.wait().unwrap();
        assert!(other.kill().is_ok(), "gone and waited for");
    }

    #[test]
    fn what_is_no_process_is_named() {
        for pid in [0, u32::MAX, 4_194_305] {
            let error = Other::open(pid).err().unwrap();
            assert!(
                error.to_string().contains(&pid.to_string()) && error.fix().is_some(),
                "{error}"
            );
        }
    }
}
