//! The threads of a QEMU that records or replays, on one core.
//!
//! ```text
//!   guest   runs ──── event ── runs ──── event │waits│ runs ───         guest   runs ── event ── runs ── event ── runs ── event ── runs ─
//!   main              woken ─ waits ───────────┘turn └ sleeps           main                                          at its core's next tick
//! ```
//!
//! Whichever of them runs has the log's lock, so that they never run at once: a second core gains
//! nothing. And QEMU wakes its main loop for each event that a replay passes, and for each tick of
//! the guest's clock in a recording, whether it has anything to do or not. On the left the main
//! loop asks for the lock each time, and the guest waits: two switches between cores, some ten
//! thousand times a second. On the right both are on one core, and the main loop is of the
//! scheduler's `SCHED_BATCH`: it takes the core when the guest halts, or waits for it, or its time
//! is up (4 ms, by the kernel's tick). A replay takes half of the time, and a recording no more
//! than QEMU that only counts. So is the monitor's thread, which is woken as often: all threads
//! with timers are.
//!
//! It is for guests whose clocks go by their own time, and that have no network
//! ([`record::may_be_late`]): a replay that has to pass a reading of the host's clock waits for the
//! main loop without halting, until that tick; and one that sends packets may stand for ever. There
//! all is as QEMU has it.
//!
//! A core is claimed, so that two such QEMUs never share one; where all are, or one cannot be had,
//! the kernel places the threads as it likes.
//!
//! Such a QEMU leads a session of its own, as far as it does not read the terminal. Linux shares a
//! core out to sessions first (its autogroups), then to their threads, and weighs a session anew on
//! a core as it has more or fewer threads to run there and elsewhere. With ours on both cores, some
//! kernels (seen with 6.18) fall into a state in which each thread that is woken ends the running
//! one's turn after all, for seconds (docs/design/record-replay.md). On one core alone there is
//! nothing to weigh. A control group takes a session's place, and two replays of one job share it:
//! so a replay's threads but the guest's are also nice 19, which leaves them what the guest leaves
//! and the little that is theirs. Not a recording's: its disks answer by way of the main loop, and
//! somebody may wait for them.
//!
//! Invariant: what QEMU does is the same; only when its main loop gets to it differs.

use crate::Qmp;
use crate::options::Argument;
use crate::record::{self, Mode};
use keyframe_kernel::cores::{self, Claim};
use keyframe_kernel::{lineage, priority};
use std::io::IsTerminal;
use std::process::Command;

/// Such a QEMU.
#[derive(Debug)]
pub(crate) struct Turns {
    pid: u32,
    /// The thread that runs the guest.
    guest: u32,
    /// Where nobody waits for it but we.
    replays: bool,
    claim: Option<Claim>,
}

impl Turns {
    /// Places the threads of the QEMU at `qmp`, process `pid`, with the line `arguments`, if it is
    /// one for that. What cannot be had of it is left.
    pub fn begin(qmp: &mut Qmp, pid: u32, arguments: &[Argument], mode: Mode) -> Option<Self> {
        if !record::may_be_late(arguments) {
            return None;
        }
        let guest = qmp.cpu_threads().ok()?.first().copied()?;
        let turns = Self { pid, guest, replays: mode == Mode::Replay, claim: bound(pid, guest) };
        turns.may_wait(true);
        Some(turns)
    }

    /// The core that they are on, where it is theirs alone.
    pub fn core(&self) -> Option<u32> {
        u32::try_from(self.claim.as_ref()?.core()).ok()
    }

    /// All but the guest may be late from now on, or are to answer at once.
    pub fn may_wait(&self, may_wait: bool) {
        for thread in cores::threads_of(self.pid).into_iter().filter(|thread| *thread != self.guest)
        {
            let _ = priority::wait_for_core(thread, may_wait);
            if self.replays {
                let _ = priority::take_little(thread, may_wait);
            }
        }
    }
}

/// Prepares the start of a QEMU by `command`, with the line `arguments`, if it is one for that.
pub(crate) fn prepare(command: &mut Command, arguments: &[Argument]) {
    let reads_terminal = arguments.iter().any(is_of_terminal) && std::io::stdin().is_terminal();
    if record::may_be_late(arguments) && !reads_terminal {
        lineage::lead_a_session(command);
    }
}

/// Whether an argument may have QEMU read its standard input.
fn is_of_terminal(argument: &Argument) -> bool {
    ["nographic", "curses"].contains(&argument.name())
        || ["stdio", "curses"].iter().any(|way| argument.value().contains(way))
}

/// A core that nobody has, for all of process `pid`: the one that its guest's thread ran on last,
/// if it can be had.
fn bound(pid: u32, guest: u32) -> Option<Claim> {
    let claim = cores::of_thread(guest).into_iter().find_map(Claim::take)?;
    cores::bind(pid, claim.core()).then_some(claim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options;

    fn line(words: &str) -> Vec<Argument> {
        options::parse(&words.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn those_that_take_turns_lead_a_session() {
        let leads = |words: &str| {
            // Its number and its session's.
            let mut command = Command::new("cut");
            prepare(command.args(["-d ", "-f1,6", "/proc/self/stat"]), &line(words));
            let printed = String::from_utf8(command.output().unwrap().stdout).unwrap();
            let (pid, session) = printed.trim().split_once(' ').unwrap();
            pid == session
        };
        assert!(leads("-m 1G -rtc clock=vm"));
        assert!(!leads("-m 1G -rtc clock=host"));
        assert!(!leads("-m 1G -rtc clock=vm -netdev user,id=n"));
    }

    #[test]
    fn who_reads_the_terminal_is_seen() {
        let reads = |words: &str| line(words).iter().any(is_of_terminal);
        for words in [
            "-nographic",
            "-serial mon:stdio",
            "-monitor stdio",
            "-chardev stdio,id=a",
            "-display curses",
        ] {
            assert!(reads(words), "{words}");
        }
        assert!(!reads("-m 1G -serial file:/log -monitor none -display none"));
    }
}
