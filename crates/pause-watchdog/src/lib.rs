//! Keeps a VM from staying paused when the engine that paused it dies or stalls.
//!
//! The watchdog is a process of its own. How it reaches the VMM is the driver's: a [`Rescuer`].
//! Engine and watchdog exchange lines over the watchdog's standard streams:
//!
//! ```text
//!   engine ──▶ A<ms>   armed: a pause begins, and ends within <ms> milliseconds
//!   engine ──▶ P<ms>   armed for a one-command pause, at whose end the VMM resumes the VM itself
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
//!               exit ◀─────────┘ without E: the watchdog removes what the engine left in the VMM
//!
//!   any ──B──▶ between ──A or D──▶ as above
//!              between ──end of input──▶ the watchdog ends the rollback: VM runs, exit
//!                                           └ fails ─▶ it ends the VMM, exit with an error
//! ```
//!
//! To fire means to resume the VM if it is paused. In a one-command pause it means to end the VMM's
//! command; a resumption would undo the pause of another client. The stop of an engine that
//! stalls or died may still be on its way to the VMM when the deadline passes, so the
//! watchdog keeps checking for two minutes. Later it would undo the pauses of a user. The engine
//! arms the watchdog only to pause a running VM. The watchdog resumes no VM that a user paused.
//!
//! Invariants:
//! 1. Each pause that the engine began ends: by the engine, or by the watchdog.
//! 2. A VM that an engine left between two states never runs. The watchdog ends the rollback in the
//!    engine's place ([`Rescuer::end_rollback`]), or ends the VM.
//! 3. If the watchdog has ended the engine's pause, the engine learns it when it disarms.
//!
//! Left out: restarting the engine; pauses by other clients; an engine that stalls between two
//! states.

mod engine;
mod error;
mod orders;

pub use engine::{Fired, Watchdog};
pub use error::Error;
pub use orders::{plan_line, step_line};

use keyframe_vmm::{RollbackPlan, RollbackStep};
use orders::{Lines, Order, parse};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long the VMM may take to answer the watchdog's first request.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the stop of a dead engine may be on its way to the VMM.
pub const LAST_STOP: Duration = Duration::from_secs(3);
/// How long the watchdog retries after its engine has ended, if the VMM does not answer.
pub const RESCUE_MAX: Duration = Duration::from_mins(2);
/// The time between two checks of the VM's state meanwhile.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The largest pipe that an unprivileged process may make by default.
const PIPE_BYTES: usize = 1 << 20;
/// How long the watchdog may take to answer the engine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The watchdog's state machine. The caller passes the time.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dog {
    deadline: Option<Instant>,
    /// When the deadline first passed, if it has.
    overdue_since: Option<Instant>,
    /// Whether the deadline is that of a one-command pause.
    is_saved_pause: bool,
    between: bool,
}

impl Dog {
    /// Handles an order. Returns true if the engine waits for an answer.
    fn obey(&mut self, order: &Order, now: Instant) -> bool {
        match order {
            // A deadline beyond the clock's end never comes.
            Order::Arm(limit) | Order::ArmSaved(limit) => self.deadline = now.checked_add(*limit),
            Order::Disarm | Order::Between => self.deadline = None,
            Order::Plan(_) | Order::Step(_) | Order::End => return false,
        }
        self.overdue_since = None;
        self.between = *order == Order::Between;
        self.is_saved_pause = matches!(order, Order::ArmSaved(_));
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

/// How the watchdog has ended the rollback of an engine that has died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RollbackEnd {
    /// The VM is exactly the checkpoint, or exactly what it was, and runs if it is to.
    Ended,
    /// The VM must not run.
    NotEnded {
        /// The reason.
        problem: String,
    },
}

/// How a watchdog's process reaches the VMM that it watches. Each driver has its own.
pub trait Rescuer {
    /// The driver's error.
    type Error: From<Error>;

    /// Returns true if `error` says that the VMM has ended or closed its monitor.
    fn is_gone(error: &Self::Error) -> bool;

    /// Returns true if `error` says that the VMM did not answer in time.
    fn is_timeout(error: &Self::Error) -> bool;

    /// Returns what to poll for: events of the VMM, or only its end.
    fn poll_fd(&self) -> PollFd<'_>;

    /// Drains events after [`Rescuer::poll_fd`] became ready. Error: the VMM has ended.
    fn drain(&mut self) -> Result<(), Self::Error>;

    /// Begins a new series of attempts to resume the VM, after a new order.
    fn begin_anew(&mut self) {}

    /// Resumes the VM if it is paused. Returns true if it resumed the VM, or may have. Error: the
    /// VMM has ended, or does not answer.
    fn resume(&mut self, now: Instant) -> Result<bool, Self::Error>;

    /// Ends the VMM's command of a one-command pause. Returns true if there was one to end. Error:
    /// the VMM cannot be reached.
    fn end_saved_pause(&mut self) -> Result<bool, Self::Error> {
        Ok(false)
    }

    /// Gives up the means of [`Rescuer::end_saved_pause`], after the engine has ended.
    fn close_saved_pause(&mut self) {}

    /// Takes the engine's connection for itself, after the engine has ended. Error: this process
    /// has no free descriptor.
    fn take_over(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Notes the plan of a rollback that begins; with `None`, the rollback has ended. Error: the
    /// watchdog could not end this rollback. It ends then, and the engine learns that.
    fn plan_rollback(&mut self, _: Option<RollbackPlan>) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Notes the step that the rollback takes next.
    fn note_step(&mut self, _: RollbackStep) {}

    /// Ends the rollback of an engine that has died while the VM was between two states. Error: the
    /// VMM has ended.
    fn end_rollback(&mut self) -> Result<RollbackEnd, Self::Error> {
        Ok(RollbackEnd::NotEnded { problem: "this VMM has no rollbacks".into() })
    }

    /// Removes what a rollback left outside of the VMM, if the engine died before it began to
    /// change the VM, or after the VM was whole. Does nothing if no rollback was under way.
    fn tidy_rollback(&mut self) {}

    /// Ends the VMM. It is called again until it says that the VMM is gone. Error: the VMM has
    /// ended, or does not answer.
    fn quit(&mut self) -> Result<(), Self::Error>;

    /// Removes what the engine left in the VMM, after the engine has ended without saying so.
    /// Error: the VMM refuses or does not answer.
    fn forget_engine(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Empties the pipe for which a VMM waits in a one-command pause. The read end `pipe` does not block.
/// Returns true if something was in the pipe. Error: it cannot be read.
pub fn empty_pipe(pipe: impl AsFd) -> Result<bool, Error> {
    // The VMM may wait with a long state and a small pipe. The kernel may refuse a larger one.
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_BYTES);
    let mut chunk = [0; 16 << 10];
    let mut was_filled = false;
    loop {
        match rustix::io::read(&pipe, &mut chunk[..]) {
            Ok(0) | Err(rustix::io::Errno::AGAIN) => return Ok(was_filled),
            Ok(_) => was_filled = true,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("empty the pipe for device state")(e)),
        }
    }
}

/// Runs the watchdog process: watches the VM that `reach` reaches until `commands`, the orders of
/// the engine, or the VMM end. Writes answers to `reports`.
///
/// Errors: the VMM does not answer; an order cannot be parsed. An armed watchdog fires before it
/// returns an error.
pub fn run<V: Rescuer>(
    reach: V,
    commands: impl Read + AsFd,
    reports: impl Write,
) -> Result<(), V::Error> {
    let mut runner = Runner {
        reach,
        commands,
        reports,
        dog: Dog::default(),
        lines: Lines::default(),
        left: false,
    };
    match runner.watch() {
        Err(error) if V::is_gone(&error) => Ok(()),
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

struct Runner<V, R, W> {
    reach: V,
    commands: R,
    reports: W,
    dog: Dog,
    lines: Lines,
    /// True if the engine has announced its end.
    left: bool,
}

impl<V: Rescuer, R: Read + AsFd, W: Write> Runner<V, R, W> {
    fn watch(&mut self) -> Result<(), V::Error> {
        loop {
            let (commands, events) = self.wait()?;
            if self.dog.is_due(Instant::now()) && self.resume()? {
                self.report("F\n")?;
            }
            if events {
                // The VMM keeps events until they are read.
                self.reach.drain()?;
            }
            if commands && !self.take_orders()? {
                return self.finish();
            }
        }
    }

    /// Handles the end of input.
    fn finish(&mut self) -> Result<(), V::Error> {
        if self.dog.between {
            return self.end_rollback();
        }
        let ended = if self.dog.deadline.is_some() || self.dog.overdue_since.is_some() {
            self.rescue()
        } else if self.left {
            Ok(())
        } else {
            self.reach.take_over().and_then(|()| self.reach.forget_engine())
        };
        self.reach.tidy_rollback();
        ended
    }

    /// Ends the rollback of an engine that has died. If that fails, ends the VMM.
    fn end_rollback(&mut self) -> Result<(), V::Error> {
        self.reach.take_over()?;
        match self.reach.end_rollback() {
            Ok(RollbackEnd::Ended) => self.reach.forget_engine(),
            Ok(RollbackEnd::NotEnded { problem }) => self.put_down(&problem),
            Err(error) if V::is_gone(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Waits for orders, for the VMM or for the deadline. Returns whether orders and whether events
    /// have arrived.
    fn wait(&self) -> Result<(bool, bool), V::Error> {
        let limit = self.dog.patience(Instant::now());
        let limit = limit.map(|d| Timespec {
            tv_sec: d.as_secs().cast_signed(),
            tv_nsec: d.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.commands, PollFlags::IN), self.reach.poll_fd()];
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("wait for the engine")(e).into()),
        }
        let [commands, events] = fds.map(|fd| !fd.revents().is_empty());
        Ok((commands, events))
    }

    /// False at the end of input.
    fn take_orders(&mut self) -> Result<bool, V::Error> {
        // At least as large as the buffer of a standard input, which thus never holds lines that
        // `poll` cannot see.
        let mut chunk = [0u8; 16 << 10];
        let len = match self.commands.read(&mut chunk) {
            Ok(len) => len,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => return Ok(true),
            Err(e) => return Err(Error::io("read the engine's orders")(e).into()),
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
                Order::Plan(plan) => self.reach.plan_rollback(plan)?,
                Order::Step(step) => self.reach.note_step(step),
                _ => {}
            }
        }
        Ok(len > 0)
    }

    /// Resumes the VM if it is paused. Returns true if it resumed the VM.
    fn resume(&mut self) -> Result<bool, V::Error> {
        if self.dog.is_saved_pause {
            return self.reach.end_saved_pause();
        }
        match self.reach.resume(Instant::now()) {
            // The VMM is busy, perhaps with the stop itself, which flushes disks: check again
            // later.
            Err(error) if V::is_timeout(&error) => Ok(false),
            other => other,
        }
    }

    /// Ends the pause of an engine that has ended, also one whose command is still on its way.
    fn rescue(&mut self) -> Result<(), V::Error> {
        if self.dog.is_saved_pause {
            // The VMM serves no client before its command has ended.
            let until = Instant::now() + LAST_STOP;
            while Instant::now() < until {
                self.reach.end_saved_pause()?;
                std::thread::sleep(LOOK_EVERY);
            }
            self.reach.close_saved_pause();
            self.reach.take_over()?;
            return self.reach.forget_engine();
        }
        self.reach.take_over()?;
        let began = Instant::now();
        let mut until = began + LAST_STOP;
        while Instant::now() < until {
            match self.reach.resume(Instant::now()) {
                Err(error) if V::is_gone(&error) => return Ok(()),
                // The VMM is too busy to answer: the VM is still paused.
                Err(error) if V::is_timeout(&error) => {
                    until = (Instant::now() + LAST_STOP).min(began + RESCUE_MAX);
                }
                resumed => {
                    resumed?;
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.reach.forget_engine()
    }

    /// Ends the VMM after the engine has ended between two states. It may not answer while it loads
    /// a state, so this may take some time.
    fn put_down(&mut self, problem: &str) -> Result<(), V::Error> {
        let until = Instant::now() + RESCUE_MAX;
        while Instant::now() < until {
            match self.reach.quit() {
                Err(error) if V::is_gone(&error) => {
                    return Err(Error::PutDown { problem: problem.to_owned() }.into());
                }
                Err(error) if !V::is_timeout(&error) => return Err(error),
                _ => {}
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let problem =
            "the VM was left in the middle of a rollback, and does not answer; end its VMM";
        Err(Error::Problem { problem: problem.into() }.into())
    }

    fn report(&mut self, text: &str) -> Result<(), V::Error> {
        let written = self.reports.write_all(text.as_bytes()).and_then(|()| self.reports.flush());
        match written {
            // The pipe is closed, so the engine is gone. The end of input reports that, too.
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            other => Ok(other.map_err(Error::io("report to the engine"))?),
        }
    }
}

#[cfg(test)]
mod tests;
