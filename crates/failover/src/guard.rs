//! The guard: a process that stops a protected VM if its engine stalls, and ends it if its engine
//! dies.
//!
//! ```text
//!   engine ──▶ F          free: the VM may run alone, and may outlive the engine
//!   engine ──▶ U<ns>      the VM may run until then, by CLOCK_MONOTONIC
//!   engine ──▶ S          the VM may not run
//!   engine ──▶ P          the engine has paused the VM by its monitor; the VM ends with the engine
//!   engine ◀── K<0|1>     the answer to each; 1 if the guard has stopped the VM
//!
//!   S, or the time of U passes             ─▶ SIGSTOP
//!   F, P or a later U, while it is stopped ─▶ SIGCONT
//!   end of input, unless the VM is free    ─▶ SIGKILL
//! ```
//!
//! The first order always sends its signal: a guard before this one may have stopped the VM.
//!
//! Invariant: a VM that is not free runs only while its engine lives, and until the time that the
//! engine named. The guard is a process of its own, so a stalled engine does not delay it. It knows
//! QEMU by a pidfd, which never names another process.

use crate::error::{Error, Result};
use keyframe_replication::RunPermit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const LINE_BYTES_MAX: usize = 64;

/// Returns the time of this host's monotonic clock, in nanoseconds since an arbitrary instant. The
/// guard and the replication protocol use this clock.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec.cast_unsigned())
        .saturating_mul(1_000_000_000)
        .saturating_add(now.tv_nsec.cast_unsigned())
}

/// The engine's handle to a guard.
pub struct GuardRemote {
    stream: BufReader<UnixStream>,
    child: Child,
    /// True if the guard has stopped the VM.
    pub stopped: bool,
    /// True after an order without an answer. A late answer would be taken for the next order's.
    is_lost: bool,
}

impl GuardRemote {
    /// Starts a guard of the QEMU whose process id is `qemu`, with the permit `permit`. If the
    /// permit lets the VM run, QEMU runs when this returns, although another guard had stopped it.
    /// After an error no guard is left, and QEMU may run or be stopped. Errors: [`Error::Io`] if
    /// the process cannot be started or does not answer within 5 s; [`Error::GuardEnded`] if it has
    /// ended.
    pub fn spawn(qemu: u32, permit: RunPermit) -> Result<Self> {
        let failed = |e| Error::io("start the guard", e);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        ours.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(failed)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("keyframe").arg("__guard").arg(qemu.to_string());
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(failed)?;
        // The command holds the other end, whose closing must be seen.
        command.stdin(Stdio::null());
        let mut guard =
            Self { stream: BufReader::new(ours), child, stopped: false, is_lost: false };
        match guard.set(permit) {
            Ok(()) => Ok(guard),
            Err(error) => {
                guard.kill();
                Err(error)
            }
        }
    }

    /// Sends the permit to the guard. If the permit does not let the VM run, the VM is stopped when
    /// this returns. Errors: [`Error::Io`] if the guard does not answer within 5 s;
    /// [`Error::GuardEnded`] or [`Error::Io`] if it has ended.
    pub fn set(&mut self, permit: RunPermit) -> Result<()> {
        match permit {
            RunPermit::Free => self.ask("F"),
            RunPermit::Until(ns) => self.ask(&format!("U{ns}")),
            RunPermit::Stopped => self.ask("S"),
        }
    }

    /// Tells the guard that the VM is paused by a command of its monitor. Then the guard does not
    /// stop QEMU's process, which must go on to answer commands, until the next [`Self::set`].
    /// Errors: those of [`Self::set`].
    pub fn paused(&mut self) -> Result<()> {
        self.ask("P")
    }

    fn ask(&mut self, line: &str) -> Result<()> {
        if self.is_lost {
            return Err(Error::GuardEnded);
        }
        self.is_lost = true;
        self.answered(line)?;
        self.is_lost = false;
        Ok(())
    }

    fn answered(&mut self, line: &str) -> Result<()> {
        let failed = |e| Error::io("the guard of the VM's right to run", e);
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).map_err(failed)?;
        let mut answer = String::new();
        self.stream.read_line(&mut answer).map_err(failed)?;
        self.stopped = match answer.trim() {
            "K0" => false,
            "K1" => true,
            _ => return Err(Error::GuardEnded),
        };
        Ok(())
    }

    /// Kills the guard, which does nothing more to QEMU, and waits for its end.
    pub fn kill(self) {
        let Self { stream, mut child, .. } = self;
        let _ = child.kill();
        let _ = child.wait();
        // Not before: the guard would take that for the end of the engine, and kill QEMU.
        drop(stream);
    }

    /// Ends the guard and waits for its end. If the permit was not [`RunPermit::Free`], the guard
    /// kills QEMU.
    pub fn end(self) {
        let Self { stream, mut child, .. } = self;
        drop(stream);
        let _ = child.wait();
    }
}

/// Runs a guard of the QEMU with the process id `qemu` on the calling thread, until QEMU or the
/// engine has ended. Its orders come from the engine at the other end of `orders`.
///
/// Errors: [`Error::NoProcess`] if no process can have this id; [`Error::Io`] if there is no such
/// process, or if the guard cannot wait for orders.
pub fn guard(qemu: u32, orders: UnixStream) -> Result<()> {
    let pid = i32::try_from(qemu).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(Error::NoProcess(qemu))?;
    let qemu =
        pidfd_open(pid, PidfdFlags::empty()).map_err(|e| Error::io(format!("guard {qemu}"), e))?;
    // On an overloaded host the VM must be stopped in time, too.
    keyframe_kernel::priority::raise_current_thread();
    Guard { qemu, orders: BufReader::new(orders), state: State::Free, stopped: None }.run()
}

enum State {
    Free,
    Until(u64),
    Stopped,
    Paused,
}

struct Guard {
    qemu: OwnedFd,
    orders: BufReader<UnixStream>,
    state: State,
    /// Whether this guard has stopped QEMU. `None` before the first order.
    stopped: Option<bool>,
}

impl Guard {
    fn run(mut self) -> Result<()> {
        loop {
            let left_ns = match self.state {
                State::Until(until) if self.stopped != Some(true) => {
                    Some(until.saturating_sub(now_ns()))
                }
                _ => None,
            };
            if left_ns == Some(0) {
                self.stop_or_continue(true);
                continue;
            }
            let timeout = left_ns.map(|ns| Timespec {
                tv_sec: (ns / 1_000_000_000).cast_signed(),
                tv_nsec: (ns % 1_000_000_000).cast_signed(),
            });
            let (heard, gone) = {
                let mut fds = [
                    PollFd::from_borrowed_fd(self.orders.get_ref().as_fd(), PollFlags::IN),
                    PollFd::new(&self.qemu, PollFlags::IN),
                ];
                match poll(&mut fds, timeout.as_ref()) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(Error::io("wait for orders", e)),
                }
                (!fds[0].revents().is_empty(), !fds[1].revents().is_empty())
            };
            if gone {
                return Ok(());
            }
            if heard && !self.handle_order() {
                if !matches!(self.state, State::Free) {
                    let _ = pidfd_send_signal(&self.qemu, Signal::KILL);
                }
                return Ok(());
            }
        }
    }

    /// Handles an order; false if the engine has ended.
    fn handle_order(&mut self) -> bool {
        let mut line = String::new();
        let read = std::io::Read::take(&mut self.orders, LINE_BYTES_MAX as u64);
        match BufReader::with_capacity(1, read).read_line(&mut line) {
            Ok(len) if len > 0 => {}
            _ => return false,
        }
        self.state = match line.trim().split_at_checked(1) {
            Some(("F", "")) => State::Free,
            Some(("S", "")) => State::Stopped,
            Some(("P", "")) => State::Paused,
            Some(("U", until)) => match until.parse() {
                Ok(until) => State::Until(until),
                Err(_) => return false,
            },
            _ => return false,
        };
        let stand = match self.state {
            State::Free | State::Paused => false,
            State::Until(until) => until <= now_ns(),
            State::Stopped => true,
        };
        self.stop_or_continue(stand);
        let answer = if stand { "K1\n" } else { "K0\n" };
        self.orders.get_mut().write_all(answer.as_bytes()).is_ok()
    }

    fn stop_or_continue(&mut self, stop: bool) {
        if self.stopped != Some(stop) {
            let signal = if stop { Signal::STOP } else { Signal::CONT };
            // If QEMU has ended, its descriptor tells.
            let _ = pidfd_send_signal(&self.qemu, signal);
            self.stopped = Some(stop);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::wait_until;
    use std::os::unix::process::ExitStatusExt;

    /// A process in the place of QEMU.
    fn process() -> (Child, Pid) {
        let child = Command::new("sleep").arg("120").spawn().unwrap();
        let pid = Pid::from_child(&child);
        (child, pid)
    }

    fn is_stopped(pid: Pid) -> bool {
        let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
        let stat = std::fs::read_to_string(stat).unwrap();
        let (_, state) = stat.rsplit_once(") ").unwrap();
        state.starts_with('T')
    }

    /// Sends an order, and returns the guard's answer.
    fn order(engine: &mut BufReader<UnixStream>, line: &str) -> String {
        engine.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        engine.read_line(&mut answer).unwrap();
        answer
    }

    #[test]
    fn a_guard_that_replaces_another_lets_a_stopped_vm_run_and_ends_it_with_the_engine() {
        let (mut qemu, pid) = process();
        rustix::process::kill_process(pid, Signal::STOP).unwrap();
        wait_until("it is stopped", || is_stopped(pid));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let number = qemu.id();
        let guarding = std::thread::spawn(move || guard(number, theirs));
        let mut engine = BufReader::new(ours);
        assert_eq!(order(&mut engine, &format!("U{}", u64::MAX)), "K0\n");
        wait_until("it runs", || !is_stopped(pid));
        assert_eq!(order(&mut engine, "S"), "K1\n");
        wait_until("it is stopped again", || is_stopped(pid));
        drop(engine);
        guarding.join().unwrap().unwrap();
        assert_eq!(qemu.wait().unwrap().signal(), Some(9));
    }
}
