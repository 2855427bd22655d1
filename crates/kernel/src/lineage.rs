//! A child that does not outlive its parent, however that ends.
//!
//! The kernel sends the signal when the thread that started the child ends: start it on one that lives as long as the
//! process, as its main thread does.

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The child of `command` is killed by the kernel as soon as the thread that starts it has ended. One whose parent has ended
/// before it could ask for that does not start.
pub fn die_with_us(command: &mut Command) {
    let us = getpid();
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() == Some(us) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    };
    // SAFETY: between fork and exec only what is async-signal-safe may be done: `ask` makes two system calls and neither
    // allocates nor locks; an error from a system call's number allocates nothing either. It captures a number alone.
    unsafe { command.pre_exec(ask) };
}
