//! A QEMU that outlives its engine, held so that no test leaves it behind.

use crate::{Bench, Process, number};
use rustix::process::{Pid, PidfdFlags, Signal};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// That QEMU. Dropped, it is killed.
pub struct Orphan {
    pid: u32,
    pidfd: OwnedFd,
    /// The monitor that its engine used.
    pub qmp: PathBuf,
}

impl Orphan {
    /// The QEMU of the running engine of VM `name`, as `status` tells.
    pub fn of(bench: &Bench, name: &str) -> Self {
        let status = bench.json(&["status", "--json", "--name", name]);
        let pid = number(&status[0], "qemu_pid") as u32;
        let qmp = status[0]["qmp"].as_str().expect("a monitor").into();
        let raw = Pid::from_raw(pid.cast_signed()).expect("a pid");
        let pidfd = rustix::process::pidfd_open(raw, PidfdFlags::empty()).expect("open QEMU");
        Self { pid, pidfd, qmp }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Kills it.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Waits until the console of `run`, whose engine is gone, has `more` further lines that contain `text`.
    pub fn assert_runs_on(&self, run: &Process, text: &str, more: usize) {
        let count = || run.lines().iter().filter(|l| l.contains(text)).count();
        let before = count();
        until(&format!("the guest runs on without its engine; {}", run.report()), || count() >= before + more);
    }

    /// The state of each of its children that it has not waited for: `Z` of a zombie, `t` of one that is traced.
    pub fn children(&self) -> Vec<char> {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else { return Vec::new() };
        let lists = tasks.flatten().filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
        let children: Vec<String> = lists.flat_map(|l| l.split(' ').map(str::to_owned).collect::<Vec<_>>()).collect();
        let state = |pid: &String| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).ok()?;
            stat.rsplit_once(") ")?.1.chars().next()
        };
        children.iter().filter_map(state).collect()
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until `done`, half a minute at most.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "{what}: never");
        std::thread::sleep(Duration::from_millis(20));
    }
}
