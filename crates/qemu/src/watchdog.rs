//! Keeps a VM from staying paused when the engine that paused it dies or stalls.
//!
//! The watchdog is a process of its own. It uses its own monitor if the VM has a second one,
//! otherwise the engine's connection ([`Watched`]). Engine and watchdog exchange lines over the
//! watchdog's standard streams:
//!
//! ```text
//!   engine ──▶ A<ms>   armed: a pause begins, and ends within <ms> milliseconds
//!   engine ──▶ P<ms>   armed for a one-command pause: QEMU waits for the pipe, and resumes the VM itself
//!   engine ──▶ D       disarmed: the pause has ended
//!   engine ──▶ T<plan> a rollback begins: what is needed to end it
//!   engine ──▶ B       between: a rollback replaces the VM's state; the VM must not run
//!   engine ──▶ S<step> the rollback takes this step next
//!   engine ──▶ C       the rollback has ended, and the disks that it replaced are removed
//!   engine ──▶ E       the engine ends in good order
//!   engine ◀── F       fired: the watchdog has ended the pause; its capture is torn
//!   engine ◀── K       the answer to each D and B, after any F
//!
//!            ┌──────────── D ─────────────┐
//!            ▼                            │
//!        disarmed ──A<ms>──▶ armed ──▶ overdue ⟲ fires if the VM is paused, and checks again
//!            │                 │          │
//!            └── end of input ─┼──────────┘
//!                 ▼            ▼ fires for a while
//!               exit ◀─────────┘ without E: the watchdog removes what the engine left in QEMU, and
//!                                 QEMU ends with its guest again
//!
//!   any ──B──▶ between ──A or D──▶ as above           between ──end of input──▶ the rollback is ended: VM runs, exit
//!                                                                                  └ fails ─▶ QEMU is ended, exit with an error
//! ```
//!
//! To fire means to send `cont` if the VM is paused. In a one-command pause it means to empty the
//! pipe for which QEMU waits; `cont` would undo the pause of another client. The `stop` of an
//! engine that stalls or died may still be on its way to QEMU when the deadline passes, so the
//! watchdog keeps checking for two minutes. Later it would undo the pauses of a user. The engine
//! arms the watchdog only to pause a running VM. A VM that a user paused is not resumed.
//!
//! Invariants:
//! 1. Each pause that the engine began ends: by the engine, or by the watchdog.
//! 2. A VM that an engine left between two states never runs. The watchdog ends the rollback in the
//!    engine's place (module `rollback::rescue`), or ends the VM.
//! 3. An engine whose pause was ended by the watchdog learns it when it disarms.
//!
//! Left out: restarting the engine; pauses by other clients; an engine that stalls between two
//! states.

mod orders;
mod watched;

pub use watched::{Watched, WatchedMonitor};

use crate::rollback::rescue::ToldRollback;
use crate::{EndHold, Error, Result};
use keyframe_vmm::{Resumer, RollbackPlan, RollbackRescuer, RollbackStep};
use orders::{Lines, Order, parse, plan_line, step_line};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use watched::Reach;

/// How long QEMU's monitor may take to answer the watchdog.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the `stop` of a dead engine may be on its way to QEMU.
const LAST_STOP: Duration = Duration::from_secs(3);
/// How long the watchdog retries after its engine has ended, if QEMU does not answer.
const RESCUE_MAX: Duration = Duration::from_mins(2);
/// The time between two checks of the VM's state meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long the watchdog may take to answer the engine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The watchdog's state machine. The caller passes the time.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dog {
    deadline: Option<Instant>,
    /// When the deadline first passed, if it has.
    overdue_since: Option<Instant>,
    /// Whether the deadline is that of a one-command pause.
    by_pipe: bool,
    between: bool,
}

impl Dog {
    /// Handles an order. Returns true if the engine waits for an answer.
    fn obey(&mut self, order: &Order, now: Instant) -> bool {
        match order {
            // A deadline beyond the clock's end never comes.
            Order::Arm(limit) | Order::ArmPipe(limit) => self.deadline = now.checked_add(*limit),
            Order::Disarm | Order::Between => self.deadline = None,
            Order::Plan(_) | Order::Step(_) | Order::End => return false,
        }
        self.overdue_since = None;
        self.between = *order == Order::Between;
        self.by_pipe = matches!(order, Order::ArmPipe(_));
        matches!(order, Order::Disarm | Order::Between)
    }

    /// The time until the next action; `None` if only an order can cause one.
    fn patience(&self, now: Instant) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(now))
    }

    /// Returns true if the deadline has passed. While it stays armed, the next deadline follows
    /// one check interval later.
    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.deadline.is_some_and(|deadline| now >= deadline);
        if due {
            let since = *self.overdue_since.get_or_insert(now);
            let gives_up = now.saturating_duration_since(since) > RESCUE_MAX;
            self.deadline = now.checked_add(LOOK_EVERY).filter(|_| !gives_up);
        }
        due
    }
}

/// Runs the watchdog process: watches the VM until `commands`, the orders of the engine, or QEMU
/// end. Writes answers to `reports`. `rescuer` ends the rollback of an engine that has died.
///
/// Errors: the monitor cannot be reached; an order cannot be parsed. An armed watchdog fires before
/// it returns an error.
pub fn run(
    watched: Watched,
    commands: impl Read + AsFd,
    reports: impl Write,
    rescuer: &mut dyn RollbackRescuer,
) -> Result<()> {
    let reach = Reach::to(watched.monitor)?;
    let mut runner = Runner {
        reach,
        pipe: watched.pipe,
        hold: watched.hold,
        commands,
        reports,
        dog: Dog::default(),
        lines: Lines::default(),
        left: false,
        rollback: None,
        rescuer,
    };
    match runner.watch() {
        Err(Error::Gone { .. }) => Ok(()),
        Err(error) => {
            if runner.dog.between {
                runner.end_rollback()?;
            } else if runner.dog.deadline.is_some() {
                runner.rescue()?;
            }
            Err(error)
        }
        done => done,
    }
}

struct Runner<'a, R, W> {
    reach: Reach,
    /// The pipe for which QEMU waits in a one-command pause.
    pipe: Option<OwnedFd>,
    /// The ends of the guest at which the engine holds QEMU.
    hold: Option<EndHold>,
    commands: R,
    reports: W,
    dog: Dog,
    lines: Lines,
    /// True if the engine has announced its end.
    left: bool,
    /// The rollback that is under way.
    rollback: Option<ToldRollback>,
    rescuer: &'a mut dyn RollbackRescuer,
}

impl<R: Read + AsFd, W: Write> Runner<'_, R, W> {
    fn watch(&mut self) -> Result<()> {
        loop {
            let (commands, events) = self.wait()?;
            if self.dog.is_due(Instant::now()) && self.resume()? {
                self.report("F\n")?;
            }
            if events {
                // QEMU keeps events until they are read.
                self.reach.drain()?;
            }
            if commands && !self.take_orders()? {
                return self.finish();
            }
        }
    }

    /// Handles the end of input.
    fn finish(&mut self) -> Result<()> {
        if self.dog.between {
            return self.end_rollback();
        }
        let ended = if self.dog.deadline.is_some() || self.dog.overdue_since.is_some() {
            self.rescue()
        } else if self.left {
            Ok(())
        } else {
            self.reach.take_over().and_then(|()| self.forget_engine())
        };
        // The engine died before its rollback began to change the VM, or after it had.
        if let Some(rollback) = self.rollback.take() {
            self.rescuer.tidy(&rollback.plan.words);
        }
        ended
    }

    /// Ends the rollback of an engine that has died. If that fails, ends the VM.
    fn end_rollback(&mut self) -> Result<()> {
        self.reach.take_over()?;
        let Some(rollback) = self.rollback.take() else {
            return self.put_down("it had failed, or was not planned".into());
        };
        let rescued = self.reach.on_monitor(|qmp| rollback.end(qmp, self.rescuer));
        let words = &rollback.plan.words;
        match rescued {
            Ok(rescued) => {
                self.rescuer.tidy(words);
                self.rescuer.tell(words, Ok(rescued));
                self.forget_engine()
            }
            Err(Error::Gone { .. }) => Ok(()),
            Err(error) => {
                let problem = error.to_string();
                self.rescuer.tell(words, Err(&error.into()));
                self.put_down(problem)
            }
        }
    }

    /// Waits for orders, for QEMU or for the deadline. Returns whether orders and whether events
    /// have arrived.
    fn wait(&self) -> Result<(bool, bool)> {
        let limit = self.dog.patience(Instant::now());
        let limit = limit.map(|d| Timespec {
            tv_sec: d.as_secs().cast_signed(),
            tv_nsec: d.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.commands, PollFlags::IN), self.reach.poll_fd()];
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("wait for the engine")(e)),
        }
        let [commands, qmp] = fds.map(|fd| !fd.revents().is_empty());
        Ok((commands, qmp))
    }

    /// False at the end of input.
    fn take_orders(&mut self) -> Result<bool> {
        // At least as large as the buffer of a standard input, which thus never holds lines that
        // `poll` cannot see.
        let mut chunk = [0u8; 16 << 10];
        let len = match self.commands.read(&mut chunk) {
            Ok(len) => len,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => return Ok(true),
            Err(e) => return Err(Error::io("read the engine's orders")(e)),
        };
        for line in self.lines.push(chunk.get(..len).unwrap_or_default()) {
            let order = parse(&line)?;
            self.left = order == Order::End;
            // A new pause has its own series of attempts.
            self.reach.begin_anew();
            if self.dog.obey(&order, Instant::now()) {
                self.report("K\n")?;
            }
            match order {
                Order::Plan(plan) => self.rollback = plan.map(ToldRollback::new),
                Order::Step(step) => {
                    if let Some(rollback) = &mut self.rollback {
                        rollback.note(step);
                    }
                }
                _ => {}
            }
        }
        Ok(len > 0)
    }

    /// Resumes the VM if it is paused. Returns true if it resumed the VM.
    fn resume(&mut self) -> Result<bool> {
        if self.dog.by_pipe {
            return self.empty_pipe();
        }
        match self.reach.resume(Instant::now()) {
            // QEMU is busy, perhaps with the `stop` itself, which flushes disks: check again later.
            Err(Error::Timeout { .. }) => Ok(false),
            other => other,
        }
    }

    /// Empties the pipe for which QEMU waits; true if something was in it.
    fn empty_pipe(&self) -> Result<bool> {
        let Some(pipe) = &self.pipe else { return Ok(false) };
        let mut chunk = [0; 16 << 10];
        let mut was_filled = false;
        loop {
            match rustix::io::read(pipe, &mut chunk[..]) {
                Ok(0) | Err(rustix::io::Errno::AGAIN) => return Ok(was_filled),
                Ok(_) => was_filled = true,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::io("empty the pipe for device state")(e)),
            }
        }
    }

    /// Ends the pause of an engine that has ended, also one whose command is still on its way.
    fn rescue(&mut self) -> Result<()> {
        if self.dog.by_pipe {
            // QEMU serves no monitor before it can write. Without a reader it could not write.
            let until = Instant::now() + LAST_STOP;
            while Instant::now() < until {
                self.empty_pipe()?;
                std::thread::sleep(LOOK_EVERY);
            }
            self.pipe = None;
            self.reach.take_over()?;
            return self.forget_engine();
        }
        self.reach.take_over()?;
        let began = Instant::now();
        let mut until = began + LAST_STOP;
        while Instant::now() < until {
            match self.reach.resume(Instant::now()) {
                Err(Error::Gone { .. }) => return Ok(()),
                // QEMU is too busy to answer: the VM is still paused.
                Err(Error::Timeout { .. }) => {
                    until = (Instant::now() + LAST_STOP).min(began + RESCUE_MAX);
                }
                resumed => {
                    resumed?;
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.forget_engine()
    }

    /// Ends QEMU after the engine has ended between two states. QEMU does not answer while it loads
    /// a state, so this may take some time.
    fn put_down(&mut self, problem: String) -> Result<()> {
        let until = Instant::now() + RESCUE_MAX;
        while Instant::now() < until {
            match self.reach.quit() {
                Ok(()) | Err(Error::Timeout { .. }) => {}
                Err(Error::Gone { .. }) => return Err(Error::PutDown { problem }),
                Err(error) => return Err(error),
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Err(Error::Watchdog {
            problem:
                "the VM was left in the middle of a rollback, and does not answer; end its QEMU"
                    .into(),
        })
    }

    /// Removes what the engine left in QEMU, after it has ended: first of all, that QEMU stands
    /// still when its guest ends.
    fn forget_engine(&mut self) -> Result<()> {
        let began = Instant::now();
        let released = loop {
            let Some(hold) = self.hold else { break Ok(()) };
            match self.reach.release_end(hold) {
                Err(Error::Gone { .. }) => return Ok(()),
                Err(Error::Timeout { .. }) if began.elapsed() < RESCUE_MAX => {
                    std::thread::sleep(LOOK_EVERY);
                }
                other => break other,
            }
        };
        self.reach.forget_engine().and(released)
    }

    fn report(&mut self, text: &str) -> Result<()> {
        let written = self.reports.write_all(text.as_bytes()).and_then(|()| self.reports.flush());
        match written {
            // The pipe is closed, so the engine is gone. The end of input reports that, too.
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            other => other.map_err(Error::io("report to the engine")),
        }
    }
}

/// The report of the watchdog whether it has ended the pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Fired(pub bool);

/// The engine's handle to its watchdog process.
pub struct Watchdog {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    lines: Lines,
    /// Whether it was armed last for a one-command pause.
    is_for_pipe: bool,
}

impl Watchdog {
    /// Starts the watchdog as `command`, followed by the arguments that [`Watched::parse`] reads,
    /// and waits until it is ready. Error: the process cannot be started, or does not answer.
    pub fn spawn(command: &mut Command, watched: &Watched) -> Result<Self> {
        Self::spawn_by(command, &watched.words(), &watched.inherited())
    }

    /// Starts the watchdog as [`Watchdog::spawn`], with the arguments and descriptors of `resumer`.
    /// Error: the process cannot be started, or does not answer.
    pub fn spawn_resumer(command: &mut Command, resumer: &Resumer) -> Result<Self> {
        Self::spawn_by(command, &resumer.words, &resumer.descriptors.iter().collect::<Vec<_>>())
    }

    fn spawn_by(
        command: &mut Command,
        words: &[OsString],
        descriptors: &[&OwnedFd],
    ) -> Result<Self> {
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        // Ctrl-C must not end it together with the engine.
        command.process_group(0);
        // To end a rollback, it reads the store.
        let mut child = crate::spawn::start_with_secrets(command, descriptors)?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => Self::new(child, stdin, stdout),
            _ => Err(Error::Watchdog { problem: "it was started without pipes".into() }),
        }
    }

    /// Creates a handle of the watchdog process `child` with its pipes. Waits until the watchdog
    /// has its monitor.
    ///
    /// The process must be in a process group of its own, so that Ctrl-C does not end it together
    /// with the engine. Error: [`Error::Watchdog`] if it ends or does not answer.
    pub fn new(child: Child, stdin: ChildStdin, stdout: ChildStdout) -> Result<Self> {
        let (stdin, lines) = (Some(stdin), Lines::default());
        let mut watchdog = Self { child, stdin, stdout, lines, is_for_pipe: false };
        match watchdog.ask("D\n", CONNECT_TIMEOUT + ANSWER_TIMEOUT) {
            Ok(_) => Ok(watchdog),
            Err(e) => {
                watchdog.finish();
                Err(e)
            }
        }
    }

    /// Starts watching: the watchdog resumes the VM unless it is disarmed within `limit`. Call it
    /// before `stop`. Error: the watchdog has ended or does not answer.
    pub fn arm(&mut self, limit: Duration) -> Result<()> {
        self.is_for_pipe = false;
        self.order(&format!("A{}\n", limit.as_millis()))
    }

    /// Starts watching a one-command pause: unless disarmed within `limit`, the watchdog empties
    /// the pipe for which QEMU waits. Error: the watchdog has ended or does not answer.
    pub fn arm_for_pipe(&mut self, limit: Duration) -> Result<()> {
        self.is_for_pipe = true;
        self.order(&format!("P{}\n", limit.as_millis()))
    }

    /// Has the watchdog end the pause for which it was armed last. Error: the watchdog has ended or
    /// does not answer.
    pub fn fire_now(&mut self) -> Result<()> {
        if self.is_for_pipe { self.arm_for_pipe(Duration::ZERO) } else { self.arm(Duration::ZERO) }
    }

    /// Stops watching. Call it after `cont`. Returns whether the watchdog has resumed the VM since
    /// it was armed. Error: the watchdog has ended or does not answer.
    pub fn disarm(&mut self) -> Result<Fired> {
        self.ask("D\n", ANSWER_TIMEOUT)
    }

    /// Tells the plan of a rollback; with `None`, the rollback has ended. Error: the watchdog has
    /// ended.
    pub fn plan_rollback(&mut self, plan: Option<&RollbackPlan>) -> Result<()> {
        self.order(&plan_line(plan))
    }

    /// Tells the next step of the rollback. The watchdog reads it before it sees that the engine has
    /// died, so no answer is needed. Error: the watchdog has ended.
    pub fn note_step(&mut self, step: &RollbackStep) -> Result<()> {
        self.order(&step_line(step))
    }

    /// Forbids the paused VM to run until the watchdog is armed or disarmed: if the engine ends
    /// meanwhile, the watchdog ends the rollback by its plan, or QEMU. Returns whether the watchdog has resumed the VM since it
    /// was armed.
    ///
    /// Error: the watchdog has ended or does not answer.
    pub fn between(&mut self) -> Result<Fired> {
        self.ask("B\n", ANSWER_TIMEOUT)
    }

    /// Returns the process id of the watchdog.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends the watchdog's process at once. It resumes no VM any more.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Disarms the watchdog and ends its process.
    pub fn end(mut self) {
        // If it does not answer, the end of its input disarms it after one more check of the VM.
        let _ = self.disarm();
        let _ = self.order("E\n");
        self.finish();
    }

    fn finish(&mut self) {
        self.stdin = None;
        let deadline = Instant::now() + LAST_STOP + ANSWER_TIMEOUT;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn ask(&mut self, order: &str, timeout: Duration) -> Result<Fired> {
        self.order(order)?;
        let deadline = Instant::now() + timeout;
        let mut fired = false;
        loop {
            for line in self.receive(deadline)? {
                match line.as_str() {
                    "F" => fired = true,
                    "K" => return Ok(Fired(fired)),
                    other => return Err(Error::Watchdog { problem: format!("it said {other:?}") }),
                }
            }
        }
    }

    fn order(&mut self, line: &str) -> Result<()> {
        let ended =
            || Error::Watchdog { problem: "it has ended; pauses are no longer watched".into() };
        let stdin = self.stdin.as_mut().ok_or_else(ended)?;
        stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()).map_err(|e| match e.kind() {
            std::io::ErrorKind::BrokenPipe => ended(),
            _ => Error::io("write to the watchdog")(e),
        })
    }

    fn receive(&mut self, deadline: Instant) -> Result<Vec<String>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.stdout, PollFlags::IN)], Some(&limit)) {
            Ok(0) => return Err(Error::Watchdog { problem: "it does not answer".into() }),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("wait for the watchdog")(e)),
        }
        let mut chunk = [0u8; 256];
        match self.stdout.read(&mut chunk) {
            Ok(0) => Err(Error::Watchdog { problem: "it has ended".into() }),
            Ok(len) => Ok(self.lines.push(chunk.get(..len).unwrap_or_default())),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => Ok(Vec::new()),
            Err(e) => Err(Error::io("read from the watchdog")(e)),
        }
    }
}

#[cfg(test)]
mod tests;
