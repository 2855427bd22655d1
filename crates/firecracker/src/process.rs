//! A Firecracker process: its credentials, its start and its end.

use crate::{Error, Result};
use keyframe_kernel::Process;
use keyframe_vmm::VmExit;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use rustix::io::{FdFlags, fcntl_setfd};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a killed process may take to be gone. On a busy host the kernel takes seconds to end a VM.
const KILL_MS: u32 = 60_000;
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The environment variables with secrets of Keyframe. Firecracker does not get them, because a
/// guest may break into it.
const SECRETS: [&str; 4] =
    ["KEYFRAME_PASSPHRASE", "KEYFRAME_KEY_FILE", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];

/// Held while descriptors are inheritable, so that no other Firecracker inherits them.
static STARTING: Mutex<()> = Mutex::new(());

fn inheriting(
    descriptors: &[&File],
    spawn: impl FnOnce() -> io::Result<Child>,
) -> io::Result<Child> {
    let set = |flags: FdFlags| {
        descriptors.iter().try_for_each(|file| fcntl_setfd(file, flags).map_err(io::Error::from))
    };
    let child = set(FdFlags::empty()).and_then(|()| spawn());
    set(FdFlags::CLOEXEC).and(child)
}

/// What decides whether one process may open the files of another through `/proc`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Its effective user and its permitted capabilities.
    user: u32,
    capabilities: u64,
    /// The identities of its mount and pid namespaces, and of its root directory.
    namespaces: [u64; 2],
    root: (u64, u64),
}

impl Credentials {
    /// Reads the credentials of process `pid`. Error: it has ended, or may not be inspected.
    pub fn of(pid: u32) -> Result<Self> {
        let operation = || format!("look at the credentials of process {pid}");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
            .map_err(Error::io(operation()))?;
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
        };
        let user = field("Uid:").split_whitespace().nth(1).and_then(|uid| uid.parse().ok());
        let inode = |path: &str| {
            let found = std::fs::metadata(format!("/proc/{pid}/{path}"));
            found.map(|found| (found.dev(), found.ino())).map_err(Error::io(operation()))
        };
        Ok(Self {
            user: user.unwrap_or(u32::MAX),
            capabilities: u64::from_str_radix(field("CapPrm:"), 16).unwrap_or(0),
            namespaces: [inode("ns/mnt")?.1, inode("ns/pid")?.1],
            root: inode("root")?,
        })
    }

    /// Returns true if this process reaches and may open the files that `other` has open.
    pub fn may_open_files_of(&self, other: &Self) -> bool {
        self.user == other.user
            && self.namespaces == other.namespaces
            && self.root == other.root
            && other.capabilities & !self.capabilities == 0
    }

    /// Returns true if a child of a process with the credentials `us` may take the place of a process
    /// with these: user, root and namespaces are the same, and `us` has no right that these lack.
    pub fn may_be_taken_over_by(&self, us: &Self) -> bool {
        self.user == us.user
            && self.namespaces == us.namespaces
            && self.root == us.root
            && us.capabilities & !self.capabilities == 0
    }
}

/// Returns the user and group of process `pid`. Error: it has ended.
pub fn owner(pid: u32) -> Result<(u32, u32)> {
    let found = std::fs::metadata(format!("/proc/{pid}"))
        .map_err(Error::io(format!("look whose process {pid} is")))?;
    Ok((found.uid(), found.gid()))
}

/// A Firecracker process: a child of this process, or one that another program started.
#[derive(Debug)]
pub struct Lifetime {
    process: Process,
    child: Option<Child>,
}

impl Lifetime {
    /// Opens process `pid`, which another program started. Error: there is none.
    pub fn of(pid: u32) -> Result<Self> {
        let process = Process::open(pid).map_err(|error| Error::Attach {
            pid,
            problem: error.to_string(),
            fix: "`pgrep -a firecracker` lists those that run".into(),
        })?;
        Ok(Self { process, child: None })
    }

    /// Starts `command`, which inherits `descriptors` under their own numbers, with Ctrl-C and
    /// Ctrl-\ blocked: the terminal sends them to Firecracker too, and the run is brought to an
    /// orderly end before. Error: it cannot be started.
    pub fn start(command: &mut Command, descriptors: &[&File]) -> Result<Self> {
        for secret in SECRETS {
            command.env_remove(secret);
        }
        let operation = format!("start {}", command.get_program().display());
        let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut blocked = SigSet::empty();
        blocked.extend([Signal::SIGINT, Signal::SIGQUIT]);
        let before = blocked
            .thread_swap_mask(SigmaskHow::SIG_BLOCK)
            .map_err(|e| Error::io(operation.clone())(io::Error::from(e)))?;
        let child = inheriting(descriptors, || command.spawn());
        let restored = before.thread_set_mask();
        let mut child = child.map_err(Error::io(operation.clone()))?;
        let process = Process::open(child.id()).map_err(Error::from);
        let process = restored
            .map_err(|e| Error::io(operation)(io::Error::from(e)))
            .and(process)
            .map_err(|error| {
            let ended = child.try_wait().ok().flatten();
            let _ = child.kill();
            let _ = child.wait();
            ended.map_or(error, |status| Error::Exited { status, when: "as it started" })
        })?;
        Ok(Self { process, child: Some(child) })
    }

    /// Returns the same process once more. Only this value, not the returned one, learns the exit status
    /// of a child. Error: no descriptor is free.
    pub fn try_clone(&self) -> Result<Self> {
        Ok(Self { process: self.process.try_clone()?, child: None })
    }

    /// Returns the process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Waits for the process's end for at most `timeout`. Returns how it ended; `None` if it still
    /// runs then. Error: the kernel does not tell.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<VmExit>> {
        let deadline = Instant::now() + timeout;
        loop {
            match &mut self.child {
                Some(child) => {
                    let ended = child.try_wait().map_err(Error::io("wait for Firecracker"))?;
                    if let Some(status) = ended {
                        return Ok(Some(VmExit::Status(status)));
                    }
                }
                None if !self.process.is_alive() => return Ok(Some(VmExit::Unknown)),
                None => {}
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Kills the process and waits until it is gone. Error: the kernel refuses, or it is still
    /// there after a minute.
    pub fn kill(&mut self) -> Result<VmExit> {
        let operation = || format!("end Firecracker (process {})", self.process.pid());
        match rustix::process::pidfd_send_signal(
            self.process.pidfd(),
            rustix::process::Signal::KILL,
        ) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(e) => return Err(Error::io(operation())(e)),
        }
        let late = Error::io(operation())(io::Error::from(io::ErrorKind::TimedOut));
        self.wait(Duration::from_millis(KILL_MS.into()))?.ok_or(late)
    }

    /// Leaves the process to itself.
    pub fn leave(self) -> u32 {
        self.process.pid()
    }
}
