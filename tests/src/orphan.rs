//! A QEMU that outlives its engine. Dropping [`Orphan`] kills it, so that no test leaves it running.

use crate::{Process, TestEnv, children, wait_until};
use rustix::process::{Pid, PidfdFlags, Signal};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// A QEMU that may outlive its engine. Dropping this kills it.
pub struct Orphan {
    pid: u32,
    pidfd: OwnedFd,
    /// The monitor's socket that its engine used.
    pub qmp: PathBuf,
}

impl Orphan {
    /// The QEMU of VM `name`, whose engine `run` has printed its pid. The engine may have ended.
    pub fn of(env: &TestEnv, run: &mut Process, name: &str) -> Self {
        run.wait_for_error("(QEMU ");
        let errors = run.errors();
        let pid =
            errors.split("(QEMU ").nth(1).and_then(|rest| rest.split(')').next()?.parse().ok());
        let pid: i32 = pid.expect("QEMU's pid");
        let raw = Pid::from_raw(pid).expect("a pid");
        let pidfd = rustix::process::pidfd_open(raw, PidfdFlags::empty()).expect("open QEMU");
        let qmp = env.path().join("keyframe").join(name).join("qmp.sock");
        Self { pid: pid.cast_unsigned(), pidfd, qmp }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True until QEMU has ended.
    pub fn is_running(&self) -> bool {
        rustix::process::pidfd_send_signal(&self.pidfd, Signal::CONT).is_ok()
    }

    /// Kills QEMU.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Asserts that the console of `run`, whose engine has ended, gets `more` further lines that
    /// contain `text`.
    pub fn assert_runs_on(&self, run: &Process, text: &str, more: usize) {
        let count = || run.lines().iter().filter(|l| l.contains(text)).count();
        let before = count();
        wait_until(&format!("the guest runs on without its engine; {}", run.report()), || {
            count() >= before + more
        });
    }

    /// The state of each child that QEMU has not waited for: `Z` is a zombie, `t` is traced.
    pub fn children(&self) -> Vec<char> {
        let state = |pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            stat.rsplit_once(") ")?.1.chars().next()
        };
        children(self.pid).iter().filter_map(state).collect()
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        self.kill();
    }
}

/// True if the process has ended. A zombie, which waits for its parent, has ended.
pub fn is_gone(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}
