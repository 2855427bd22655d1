//! Hosts of a test's own on this machine: each a network namespace that lives as long as a process in it.

use crate::until;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

/// A host: a network namespace.
pub struct Host {
    holder: Child,
    namespace: u64,
}

impl Host {
    /// One with nothing in it.
    #[expect(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "--", "sleep", "1000"]).stdin(Stdio::null());
        let holder = command.spawn().expect("start unshare");
        let own = namespace_of(std::process::id()).expect("our own namespace");
        let there = || namespace_of(holder.id()).filter(|there| *there != own);
        until("a network namespace", || there().is_some());
        let namespace = there().expect("its namespace");
        Self { holder, namespace }
    }

    /// A command that runs in it.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg("--").arg(program);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a line in it, which has to succeed.
    pub fn ok(&self, line: &str) {
        let mut words = line.split(' ');
        let mut command = self.command(words.next().expect("a program"));
        let output = command.args(words).output().expect("run nsenter");
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The process that keeps it.
    pub fn holder(&self) -> u32 {
        self.holder.id()
    }

    /// Runs `work` in a thread whose sockets are this host's.
    pub fn inside<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        let file = fs::File::open(format!("/proc/{}/ns/net", self.holder.id())).expect("open a namespace");
        std::thread::spawn(move || {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(file.as_fd(), kind).expect("enter a namespace");
            work()
        })
    }

    /// Pids of all that is in it but what holds it.
    pub fn pids(&self) -> Vec<u32> {
        let entries = fs::read_dir("/proc").expect("read /proc").flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| *pid != self.holder.id() && namespace_of(*pid) == Some(self.namespace)).collect()
    }

    /// Kills all that is in it but what holds it.
    pub fn kill_all(&self) {
        until("a host is empty", || {
            let ours = self.pids();
            for pid in ours.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid as i32)) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            ours.is_empty()
        });
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill_all();
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Of a process that has ended, none: nobody has waited for it, maybe.
fn namespace_of(pid: u32) -> Option<u64> {
    fs::metadata(format!("/proc/{pid}/ns/net")).ok().map(|m| m.ino())
}
