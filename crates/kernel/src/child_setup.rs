//! Settings of a child process before it executes its program: it dies with its parent, starts a new
//! session, or starts where another process is.
//!
//! The kernel sends the death signal when the thread that started the child ends. Start such a
//! child on a thread that lives as long as the process, as the main thread does.

use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{
    Signal, getpid, getppid, set_parent_process_death_signal, setpriority_process, setsid,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the kernel kill the child of `command` when the thread that starts it ends. If the parent
/// has ended already, the child does not start.
pub fn kill_with_parent(command: &mut Command) {
    let us = getpid();
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() == Some(us) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    };
    // SAFETY: between fork and exec only what is async-signal-safe may be done: `ask` makes two
    // system calls and neither allocates nor locks; an error from a system call's number allocates
    // nothing either. It captures a number alone.
    unsafe { command.pre_exec(ask) };
}

/// Makes the child of `command` lead a new session without a terminal. It receives neither Ctrl-C
/// nor a hangup. If the kernel shares cores by sessions (`kernel.sched_autogroup_enabled`,
/// `sched(7)`), the child counts as one session.
///
/// The child does not start if `command` makes it a process group leader.
pub fn start_new_session(command: &mut Command) {
    let ask = || Ok(setsid().map(drop)?);
    // SAFETY: as above: one system call, which neither allocates nor locks.
    unsafe { command.pre_exec(ask) };
}

/// Makes the child of `command` start in the network namespace `network`. Without `CAP_SYS_ADMIN` the
/// child does not start.
pub fn start_in_network(command: &mut Command, network: OwnedFd) {
    let enter =
        move || Ok(move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?);
    // SAFETY: as above: one system call, which neither allocates nor locks.
    unsafe { command.pre_exec(enter) };
}

/// Makes the child of `command` start in the control group whose file `cgroup.procs` is `processes`,
/// which is open for writing. The child does not start if the kernel refuses.
pub fn start_in_cgroup(command: &mut Command, processes: OwnedFd) {
    let enter = move || Ok(rustix::io::write(&processes, b"0").map(drop)?);
    // SAFETY: as above: one system call, which neither allocates nor locks.
    unsafe { command.pre_exec(enter) };
}

/// Makes the child of `command` start with the nice value `nice`. If that is smaller than the value of
/// the thread that starts the child, the kernel asks for `CAP_SYS_NICE`. Without it the child keeps the
/// value of that thread.
pub fn start_with_nice(command: &mut Command, nice: i32) {
    let set = move || {
        let _ = setpriority_process(None, nice);
        Ok(())
    };
    // SAFETY: as above: one system call, which neither allocates nor locks.
    unsafe { command.pre_exec(set) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_leads_a_session_if_it_is_to() {
        let leads = |prepare: fn(&mut Command)| {
            // The child's pid and its session id, which is 0 if the leader of the session is
            // outside our pid namespace.
            let mut command = Command::new("cut");
            prepare(command.args(["-d ", "-f1,6", "/proc/self/stat"]));
            let printed = String::from_utf8(command.output().unwrap().stdout).unwrap();
            let (pid, session) = printed.trim().split_once(' ').unwrap();
            pid == session
        };
        assert!(!leads(|_| ()));
        assert!(leads(start_new_session));
    }
}
