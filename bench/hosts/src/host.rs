//! One host: a network namespace that a process holds.
//!
//! The namespace exists as long as its holder runs. The holder ends when the process that made it
//! ends, because it reads from a pipe of that process.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest time to make a namespace, or to end the processes in it.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A host: a network namespace. Dropping it kills the processes in it.
pub struct Host {
    holder: Child,
    namespace: u64,
}

impl Host {
    /// Makes a network namespace without links. Fails without root.
    pub fn new() -> io::Result<Self> {
        let mut command = Command::new("unshare");
        // `cat` ends when this process closes its standard input.
        command
            .args(["--net", "--", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0);
        let mut holder = command.spawn()?;
        let own = namespace_of(std::process::id());
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let there = namespace_of(holder.id());
            if let Some(namespace) = there.filter(|_| there != own) {
                return Ok(Self { holder, namespace });
            }
            if holder.try_wait()?.is_some() || Instant::now() > deadline {
                let _ = holder.kill();
                let _ = holder.wait();
                return Err(io::Error::other(
                    "unshare --net made no network namespace (only root can)",
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns a command that runs `program` on this host, with no standard input.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg("--").arg(program);
        command.stdin(Stdio::null());
        command
    }

    /// Runs `line`, split at spaces, on this host. Fails if the command fails.
    pub fn ok(&self, line: &str) -> io::Result<()> {
        let mut words = line.split(' ');
        let mut command = self.command(words.next().unwrap_or_default());
        let output = command.args(words).output()?;
        if output.status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!("{line}: {}", String::from_utf8_lossy(&output.stderr))))
    }

    /// Returns the pid of the process that holds the namespace.
    pub fn holder_pid(&self) -> u32 {
        self.holder.id()
    }

    /// Runs `work` in a new thread whose sockets belong to this host.
    pub fn inside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<io::Result<T>>> {
        let file = fs::File::open(format!("/proc/{}/ns/net", self.holder.id()))?;
        Ok(std::thread::spawn(move || {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(file.as_fd(), kind)?;
            Ok(work())
        }))
    }

    /// Lists the pids of the processes in the namespace, without its holder and this process.
    pub fn pids(&self) -> Vec<u32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let others = pids.filter(|pid| ![self.holder.id(), std::process::id()].contains(pid));
        others.filter(|pid| namespace_of(*pid) == Some(self.namespace)).collect()
    }

    /// Kills every process in the namespace except its holder, as a loss of power does.
    pub fn kill_all(&self) {
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            let pids = self.pids();
            for pid in pids.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid as i32)) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            if pids.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill_all();
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Returns the inode of the network namespace of `pid`; `None` if the process has ended.
fn namespace_of(pid: u32) -> Option<u64> {
    fs::metadata(format!("/proc/{pid}/ns/net")).ok().map(|m| m.ino())
}
