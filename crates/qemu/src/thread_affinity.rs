//! Puts all threads of a QEMU that records or replays on one core.
//!
//! ```text
//!   two cores:  guest  runs ──── event ── runs ──── event │waits│ runs ───
//!               main             woken ─ waits ───────────┘turn └ sleeps
//!
//!   one core:   guest  runs ── event ── runs ── event ── runs ── event ── runs ─
//!               main                                           at the core's next tick
//! ```
//!
//! The running thread holds the lock of the log, so the threads never run at the same time and a
//! second core gains nothing. QEMU wakes its main loop for each event that a replay passes, and for
//! each tick of the guest's clock in a recording. On two cores, the main loop asks for the lock
//! each time and the guest waits. On one core, the main loop runs as `SCHED_BATCH`: it runs when
//! the guest halts or waits for it, or at the kernel's tick (4 ms). All threads with timers, the
//! monitor's among them, are scheduled the same way.
//!
//! Only a guest whose clock follows its own time is treated so ([`may_run_late`]): a replay that
//! reads the host's clock waits for the main loop without halting. The main loop of a recording
//! with a network must run at once, because its packets come through it. A replay with a network
//! takes turns on one core, except on its way to a hold (`keyframe_replay`'s `LogIndex::holds`),
//! where it might wait for ever.
//!
//! A core is claimed, so two such QEMUs never share one. If all cores are claimed, the kernel
//! places the threads.
//!
//! Such a QEMU leads its own session, unless it reads the terminal, because Linux divides a core
//! between sessions first (autogroups) and some kernels schedule badly if one session's threads
//! move between cores. Inside a control group that does not help, so a replay's threads other than
//! the guest's are also nice 19. A recording's are not: its disks answer through the main loop.
//! Measurements: docs/design/record-replay.md.
//!
//! Invariant: QEMU does the same work; only the time at which its main loop runs differs.

use crate::Qmp;
use keyframe_kernel::cpu_affinity::{self, CoreClaim};
use keyframe_kernel::{child_setup, priority};
use keyframe_qemu_cmdline::Argument;
use keyframe_qemu_cmdline::recording::may_run_late;
use std::io::IsTerminal;
use std::process::Command;

/// What a QEMU does with a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogRole {
    Records,
    /// It replays. If `network_may_be_late`, no network waits for the main loop on the way to its
    /// first stop.
    Replays {
        network_may_be_late: bool,
    },
}

impl LogRole {
    fn may_run_late(self, arguments: &[Argument]) -> bool {
        may_run_late(arguments, self == Self::Replays { network_may_be_late: true })
    }
}

/// A recording or replaying QEMU whose threads are on one core.
#[derive(Debug)]
pub(crate) struct SingleCore {
    pid: u32,
    /// The thread that runs the guest.
    guest: u32,
    /// It replays, so that no client waits for its disks, and takes turns to its end: a thread that
    /// was made nice can be raised again only with a privilege.
    has_lowest_share: bool,
    claim: Option<CoreClaim>,
    takes_turns: bool,
}

impl SingleCore {
    /// Places the threads of the QEMU with the monitor `qmp`, the process id `pid` and the command
    /// line `arguments` on one core, now or by a later [`Self::take_turns`]. Returns `None` if the
    /// main loop must never run late, or if QEMU does not tell its threads.
    pub fn begin(qmp: &mut Qmp, pid: u32, arguments: &[Argument], role: LogRole) -> Option<Self> {
        let replays = role != LogRole::Records;
        if !may_run_late(arguments, replays) {
            return None;
        }
        let guest = qmp.cpu_threads().ok()?.first().copied()?;
        let claim = cpu_affinity::cores_of_thread(guest).into_iter().find_map(CoreClaim::take);
        let has_lowest_share = replays && may_run_late(arguments, false);
        let mut placed = Self { pid, guest, has_lowest_share, claim, takes_turns: false };
        if role.may_run_late(arguments) {
            placed.take_turns(true);
        }
        Some(placed)
    }

    /// Places the threads on one core, where all but the guest's run late, if `takes_turns` is
    /// true; otherwise lets the kernel place them, and has them run at once.
    pub fn take_turns(&mut self, takes_turns: bool) {
        if self.takes_turns == takes_turns {
            return;
        }
        self.takes_turns = takes_turns;
        if takes_turns {
            let bind = |claim: &CoreClaim| cpu_affinity::bind_process(self.pid, claim.core());
            self.claim.take_if(|claim| !bind(claim));
        } else if self.claim.is_some() {
            cpu_affinity::unbind_process(self.pid);
        }
        self.let_run_late(takes_turns);
    }

    /// Returns the core of all threads, if it was claimed.
    pub fn core(&self) -> Option<u32> {
        u32::try_from(self.claim.as_ref()?.core()).ok()
    }

    /// Lets all threads but the guest's run late if `may_run_late` is true and they take turns;
    /// otherwise has them run at once.
    pub fn let_run_late(&self, may_run_late: bool) {
        let may_run_late = may_run_late && self.takes_turns;
        for thread in
            cpu_affinity::threads_of(self.pid).into_iter().filter(|thread| *thread != self.guest)
        {
            let _ = priority::set_batch_policy(thread, may_run_late);
            if self.has_lowest_share {
                let _ = priority::set_lowest_share(thread, may_run_late);
            }
        }
    }
}

/// Prepares `command`, which starts a QEMU with the command line `arguments`: it leads a session if
/// its threads will be on one core, at least for a time.
pub(crate) fn prepare(command: &mut Command, arguments: &[Argument], role: LogRole) {
    let reads_terminal = arguments.iter().any(reads_terminal) && std::io::stdin().is_terminal();
    if may_run_late(arguments, role != LogRole::Records) && !reads_terminal {
        child_setup::start_new_session(command);
    }
}

/// True if an argument may have QEMU read its standard input.
fn reads_terminal(argument: &Argument) -> bool {
    ["nographic", "curses"].contains(&argument.name())
        || ["stdio", "curses"].iter().any(|way| argument.value().contains(way))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_qemu_cmdline::options;

    fn line(words: &str) -> Vec<Argument> {
        options::parse(&words.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn those_that_take_turns_lead_a_session() {
        let leads_as = |role, words: &str| {
            // Its number and its session's.
            let mut command = Command::new("cut");
            prepare(command.args(["-d ", "-f1,6", "/proc/self/stat"]), &line(words), role);
            let printed = String::from_utf8(command.output().unwrap().stdout).unwrap();
            let (pid, session) = printed.trim().split_once(' ').unwrap();
            pid == session
        };
        let leads = |words: &str| leads_as(LogRole::Records, words);
        assert!(leads("-m 1G -rtc clock=vm"));
        assert!(!leads("-m 1G -rtc clock=host"));
        let with_network = "-m 1G -rtc clock=vm -netdev user,id=n";
        assert!(!leads(with_network));
        for late in [false, true] {
            let role = LogRole::Replays { network_may_be_late: late };
            assert!(leads_as(role, with_network));
        }
    }

    #[test]
    fn who_reads_the_terminal_is_seen() {
        let reads = |words: &str| line(words).iter().any(reads_terminal);
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
