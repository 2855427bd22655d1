//! A handle of a process that never stands for another process with the same pid.
//!
//! The handle is a pidfd, which tells whether the process lives, and an open `/proc/PID`, whose
//! files give `ESRCH` once the process is gone. Calls that take a pid (`process_vm_readv`) check
//! the pidfd afterwards: if the process still lives then, the pid was its own during the call.

use crate::maps::{self, Mapping};
use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, openat};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The most bytes read of a file of `/proc/PID`. A process with more mappings is refused.
const PROC_FILE_BYTES_MAX: u64 = 256 << 20;

/// A handle to a running process, which stays valid when its process id is used again.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
    directory: OwnedFd,
}

impl Process {
    /// Opens process `pid`.
    ///
    /// Errors: there is no such process, or `pid` is a thread other than the first of its process.
    pub fn open(pid: u32) -> Result<Self> {
        let failed = |source: rustix::io::Errno| Error::Open { pid, source: source.into() };
        let raw = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(failed(rustix::io::Errno::SRCH))?;
        let pidfd = pidfd_open(raw, PidfdFlags::empty()).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(rustix::fs::CWD, format!("/proc/{pid}"), flags, Mode::empty())
            .map_err(failed)?;
        let process = Self { pid, pidfd, directory };
        process.ensure_alive("open")?;
        Ok(process)
    }

    /// Returns a second handle to the same process. Error: this process has no free descriptor.
    pub fn try_clone(&self) -> Result<Self> {
        let failed = |source| Error::Open { pid: self.pid, source };
        let pidfd = self.pidfd.try_clone().map_err(failed)?;
        Ok(Self { pid: self.pid, pidfd, directory: self.directory.try_clone().map_err(failed)? })
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The process id as the system calls take it.
    pub(crate) fn raw_pid(&self) -> libc::pid_t {
        self.pid.cast_signed()
    }

    /// Returns true until the process exits. A zombie is not alive.
    pub fn is_alive(&self) -> bool {
        !self.exits_within(0)
    }

    /// Waits up to `wait_ms` milliseconds for it to exit. Returns true if it has.
    pub fn exits_within(&self, wait_ms: u32) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let wait = Timespec {
            tv_sec: i64::from(wait_ms / 1000),
            tv_nsec: i64::from(wait_ms % 1000) * 1_000_000,
        };
        // An interrupted poll knows nothing; ask again. Any other failure cannot be told from
        // death, so say dead: what follows then fails with a clear error instead of trusting a pid.
        loop {
            match poll(&mut fds, Some(&wait)) {
                Ok(ready) => return ready > 0,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return true,
            }
        }
    }

    /// Fails with an error that names `operation` if the process has ended.
    pub(crate) fn ensure_alive(&self, operation: &'static str) -> Result<()> {
        if self.is_alive() { Ok(()) } else { Err(Error::Gone { pid: self.pid, operation }) }
    }

    /// Returns the pidfd. It polls readable once the process has exited.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Opens `/proc/PID/<name>` with `flags`.
    pub(crate) fn open_file(&self, name: &str, flags: OFlags) -> Result<OwnedFd> {
        openat(&self.directory, name, flags | OFlags::CLOEXEC, Mode::empty())
            .map_err(|source| self.file_error(name, "open", source.into()))
    }

    /// The bytes of `/proc/PID/<name>`.
    pub(crate) fn read_file(&self, name: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::from(self.open_file(name, OFlags::RDONLY)?)
            .take(PROC_FILE_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(|source| self.file_error(name, "read", source))?;
        if bytes.len() as u64 > PROC_FILE_BYTES_MAX {
            let source = std::io::Error::other(format!("more than {PROC_FILE_BYTES_MAX} bytes"));
            return Err(self.file_error(name, "read", source));
        }
        Ok(bytes)
    }

    pub(crate) fn file_error(
        &self,
        name: &str,
        operation: &'static str,
        source: std::io::Error,
    ) -> Error {
        if source.raw_os_error() == Some(libc::ESRCH) || (!self.is_alive()) {
            return Error::Gone { pid: self.pid, operation };
        }
        Error::ProcFile { pid: self.pid, file: name.to_owned(), operation, source }
    }

    /// The value of field `name` of `/proc/PID/status`, without spaces around it.
    pub(crate) fn status_field(&self, name: &str) -> Result<Option<String>> {
        let bytes = self.read_file("status")?;
        let text = String::from_utf8_lossy(&bytes);
        let field = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        Ok(field.map(|value| value.trim().to_owned()))
    }

    /// Returns the mappings of the process by rising address.
    ///
    /// Errors: the process is gone, or we may not inspect it.
    pub fn maps(&self) -> Result<Vec<Mapping>> {
        maps::read(self)
    }
}
