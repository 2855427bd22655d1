//! The engine's side: its handle to the watchdog's process.

use crate::orders::{Lines, plan_line, step_line};
use crate::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, Error, LAST_STOP};
use keyframe_vmm::{PauseWatchdog, RollbackPlan, RollbackStep, VmmError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// How long the watchdog gets to resume a VM whose monitor does not answer the engine.
const RESCUE_TIME: Duration = Duration::from_millis(300);

/// The report of the watchdog whether it has ended the pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Fired(pub bool);

/// The engine's handle to its watchdog process.
pub struct Watchdog {
    pub(crate) child: Child,
    pub(crate) stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    lines: Lines,
    /// Whether it was armed last for a one-command pause.
    is_for_saved_pause: bool,
}

impl Watchdog {
    /// Starts the watchdog as `command`, which inherits no descriptors, and waits until it is
    /// ready. Error: the process cannot be started, or does not answer.
    pub fn spawn(command: &mut Command) -> Result<Self, Error> {
        Self::spawn_by(command, |command| command.spawn().map_err(Error::io("start the watchdog")))
    }

    /// Starts the watchdog as `command` by the function `start`, and waits until it is ready.
    /// Error: that of `start`; the watchdog does not answer.
    pub fn spawn_by<E: From<Error>>(
        command: &mut Command,
        start: impl FnOnce(&mut Command) -> Result<Child, E>,
    ) -> Result<Self, E> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // Ctrl-C must not end it together with the engine.
        command.process_group(0);
        let mut child = start(command)?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => Ok(Self::new(child, stdin, stdout)?),
            _ => Err(Error::Problem { problem: "it was started without pipes".into() }.into()),
        }
    }

    /// Creates a handle of the watchdog process `child` with its pipes. Waits until the watchdog
    /// has its monitor.
    ///
    /// The process must be in a process group of its own, so that Ctrl-C does not end it together
    /// with the engine. Error: [`Error::Problem`] if it ends or does not answer.
    pub fn new(child: Child, stdin: ChildStdin, stdout: ChildStdout) -> Result<Self, Error> {
        let (stdin, lines) = (Some(stdin), Lines::default());
        let mut watchdog = Self { child, stdin, stdout, lines, is_for_saved_pause: false };
        match watchdog.ask("D\n", CONNECT_TIMEOUT + ANSWER_TIMEOUT) {
            Ok(_) => Ok(watchdog),
            Err(e) => {
                watchdog.finish();
                Err(e)
            }
        }
    }

    /// Starts watching: the watchdog resumes the VM unless it is disarmed within `limit`. Call it
    /// before the stop. Error: the watchdog has ended or does not answer.
    pub fn arm(&mut self, limit: Duration) -> Result<(), Error> {
        self.is_for_saved_pause = false;
        self.order(&format!("A{}\n", limit.as_millis()))
    }

    /// Starts watching a one-command pause: unless disarmed within `limit`, the watchdog ends
    /// the VMM's command. Error: the watchdog has ended or does not answer.
    pub fn arm_for_saved_pause(&mut self, limit: Duration) -> Result<(), Error> {
        self.is_for_saved_pause = true;
        self.order(&format!("P{}\n", limit.as_millis()))
    }

    /// Has the watchdog end the pause for which it was armed last. Error: the watchdog has ended or
    /// does not answer.
    fn fire_now(&mut self) -> Result<(), Error> {
        if self.is_for_saved_pause {
            self.arm_for_saved_pause(Duration::ZERO)
        } else {
            self.arm(Duration::ZERO)
        }
    }

    /// Stops watching. Call it after the VM runs. Returns whether the watchdog has resumed the VM
    /// since it was armed. Error: the watchdog has ended or does not answer.
    pub fn disarm(&mut self) -> Result<Fired, Error> {
        self.ask("D\n", ANSWER_TIMEOUT)
    }

    /// Tells the watchdog the plan of a rollback; with `None`, that the rollback has ended. Error:
    /// the watchdog has ended.
    pub fn plan_rollback(&mut self, plan: Option<&RollbackPlan>) -> Result<(), Error> {
        self.order(&plan_line(plan))
    }

    /// Tells the watchdog the next step of the rollback. The watchdog reads it before it sees that
    /// the engine has died, so no answer is needed. Error: the watchdog has ended.
    pub fn note_step(&mut self, step: &RollbackStep) -> Result<(), Error> {
        self.order(&step_line(step))
    }

    /// Forbids the paused VM to run until the watchdog is armed or disarmed: if the engine ends
    /// meanwhile, the watchdog ends the rollback by its plan, or ends the VMM. Returns whether the
    /// watchdog has resumed the VM since it was armed.
    ///
    /// Error: the watchdog has ended or does not answer.
    pub fn between(&mut self) -> Result<Fired, Error> {
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

    fn ask(&mut self, order: &str, timeout: Duration) -> Result<Fired, Error> {
        self.order(order)?;
        let deadline = Instant::now() + timeout;
        let mut fired = false;
        loop {
            for line in self.receive(deadline)? {
                match line.as_str() {
                    "F" => fired = true,
                    "K" => return Ok(Fired(fired)),
                    other => return Err(Error::Problem { problem: format!("it said {other:?}") }),
                }
            }
        }
    }

    fn order(&mut self, line: &str) -> Result<(), Error> {
        let ended =
            || Error::Problem { problem: "it has ended; pauses are no longer watched".into() };
        let stdin = self.stdin.as_mut().ok_or_else(ended)?;
        stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()).map_err(|e| match e.kind() {
            std::io::ErrorKind::BrokenPipe => ended(),
            _ => Error::io("write to the watchdog")(e),
        })
    }

    fn receive(&mut self, deadline: Instant) -> Result<Vec<String>, Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.stdout, PollFlags::IN)], Some(&limit)) {
            Ok(0) => return Err(Error::Problem { problem: "it does not answer".into() }),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("wait for the watchdog")(e)),
        }
        let mut chunk = [0u8; 256];
        match self.stdout.read(&mut chunk) {
            Ok(0) => Err(Error::Problem { problem: "it has ended".into() }),
            Ok(len) => Ok(self.lines.push(chunk.get(..len).unwrap_or_default())),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => Ok(Vec::new()),
            Err(e) => Err(Error::io("read from the watchdog")(e)),
        }
    }
}

impl PauseWatchdog for Watchdog {
    fn arm(&mut self, limit: Duration) -> Result<(), VmmError> {
        Ok(self.arm(limit)?)
    }

    fn arm_for_saved_pause(&mut self, limit: Duration) -> Result<(), VmmError> {
        Ok(self.arm_for_saved_pause(limit)?)
    }

    fn disarm(&mut self) -> Result<bool, VmmError> {
        Ok(self.disarm()?.0)
    }

    fn forbid_running(&mut self) -> Result<bool, VmmError> {
        Ok(self.between()?.0)
    }

    fn plan_rollback(&mut self, plan: Option<&RollbackPlan>) -> Result<(), VmmError> {
        Ok(self.plan_rollback(plan)?)
    }

    fn note_step(&mut self, step: &RollbackStep) -> Result<(), VmmError> {
        Ok(self.note_step(step)?)
    }

    fn resume_now(&mut self) {
        if self.fire_now().is_ok() {
            std::thread::sleep(RESCUE_TIME);
        }
    }

    fn end(self: Box<Self>) {
        (*self).end();
    }
}
