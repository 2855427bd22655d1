//! From place to place in a replay.

use super::idling::Idling;
use crate::error::{ReplayError, Result};
use keyframe_kernel::open_file::OpenFile;
use keyframe_qemu::restore::{Restored, Until};
use keyframe_qemu::{Event, Vm};
use keyframe_replay::{ReplayProgress, StallDetector};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often its instruction is asked for: each asking takes the lock that the virtual CPU runs
/// under.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// How long a replay may stand at one instruction without going on in its log. An idle guest's
/// clock jumps, so that none waits for real time.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Lines of the registers that a divergence is reported with.
const REGISTER_LINES: usize = 6;
/// How long QEMU may take to end behind the last instruction.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// Where a replay has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// The instruction that it was to go to.
    There,
    /// The log's end, where the VM was shut down when it was recorded.
    LogEnd,
    /// Asked to stop by the user.
    Interrupted,
}

/// A VM that replays.
pub trait Replaying {
    /// How it ended, if it has.
    fn ended(&mut self) -> keyframe_qemu::Result<Option<ExitStatus>>;
    /// All the rest.
    fn vm(&mut self) -> &mut Vm;
}

impl Replaying for Restored {
    fn ended(&mut self) -> keyframe_qemu::Result<Option<ExitStatus>> {
        self.try_wait()
    }
    fn vm(&mut self) -> &mut Vm {
        Restored::vm(self)
    }
}

impl Replaying for Vm {
    fn ended(&mut self) -> keyframe_qemu::Result<Option<ExitStatus>> {
        self.try_wait()
    }
    fn vm(&mut self) -> &mut Vm {
        self
    }
}

/// A replay's way.
///
/// ```text
///   from ──▶ hold: stands for a moment, as the recorded VM did ──▶ hold ──▶ ... ──▶ until
/// ```
#[derive(Clone, Debug)]
pub struct Passage {
    /// Where it is, as far as is known.
    pub icount: u64,
    /// Where it runs to.
    pub until: Until,
    /// Where it stands for a moment on its way, rising.
    pub holds: Arc<[u64]>,
    /// The log that QEMU reads.
    pub log: PathBuf,
    /// How long it may stand at one instruction and place in its log before it counts as having
    /// come off its log.
    pub patience: Duration,
}

impl Passage {
    /// Where it stops next: its end, or a hold before that.
    pub fn next_stop(&self) -> Until {
        let next = self.holds.partition_point(|hold| *hold <= self.icount);
        match (self.holds.get(next), self.until) {
            (Some(&hold), Until::Instruction(end)) if hold < end => Until::Instruction(hold),
            (Some(&hold), Until::LogEnd) => Until::Instruction(hold),
            (_, until) => until,
        }
    }

    /// Lets it run on from where it stands to `until`, and waits until it is there, as
    /// [`Passage::arrive`] does.
    pub fn go_on(
        &mut self,
        replay: &mut impl Replaying,
        until: Until,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Reached> {
        self.until = until;
        self.run(replay.vm())?;
        self.arrive(replay, interrupted, tell)
    }

    /// Lets it run on to where it stops next.
    fn run(&self, vm: &mut Vm) -> Result<()> {
        let qmp = vm.qmp();
        qmp.drain_events()?;
        if let Until::Instruction(icount) = self.next_stop() {
            qmp.replay_break(icount)?;
        }
        Ok(qmp.cont()?)
    }

    /// Waits until it is where it runs to. `tell` learns now and then where it is.
    ///
    /// Errors: it stands still (it has come off its log), it stopped elsewhere, or QEMU ended.
    pub fn arrive(
        &mut self,
        replay: &mut impl Replaying,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<Reached> {
        let began = Instant::now();
        let mut progress = StallDetector::new(self.icount, self.patience);
        let mut asked = began;
        let pid = replay.vm().pid();
        let log = OpenFile::of(pid, &self.log);
        let (mut log_offset, mut log_seen) = (log.and_then(OpenFile::offset), began);
        let mut idling = Idling::new(pid);
        loop {
            if let Some(exit) = replay.ended()? {
                return self.ended(exit);
            }
            let Ok(events) = replay.vm().qmp().drain_events() else {
                return self.gone(replay.vm());
            };
            let shut_down = events.iter().any(|event| matches!(event, Event::Shutdown { .. }));
            if shut_down || events.contains(&Event::Stop) {
                if !shut_down && self.is_held(replay.vm())? {
                    self.run(replay.vm())?;
                    continue;
                }
                return self.stopped(replay.vm(), shut_down);
            }
            if interrupted.load(Ordering::Relaxed) {
                return Ok(Reached::Interrupted);
            }
            let (is_idle, wait) = idling.look();
            if is_idle || asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                if log_seen.elapsed() >= ASK_EVERY {
                    (log_offset, log_seen) = (log.and_then(OpenFile::offset), asked);
                }
                match replay.vm().qmp().icount() {
                    Ok(icount) => {
                        tell(icount);
                        if let ReplayProgress::Stalled { icount } =
                            progress.observe(began.elapsed(), icount, log_offset)
                        {
                            return Err(self.diverged(replay.vm(), icount, log_offset).into());
                        }
                    }
                    // It may be on its way out.
                    Err(_) => return self.gone(replay.vm()),
                }
            }
            std::thread::sleep(wait);
        }
    }

    /// Whether it stands at a hold.
    fn is_held(&mut self, vm: &mut Vm) -> Result<bool> {
        let next = self.next_stop();
        if next == self.until {
            return Ok(false);
        }
        let icount = vm.qmp().icount()?;
        let is_held = next == Until::Instruction(icount);
        if is_held {
            self.icount = icount;
        }
        Ok(is_held)
    }

    fn stopped(&mut self, vm: &mut Vm, shut_down: bool) -> Result<Reached> {
        self.icount = vm.qmp().icount()?;
        match self.until {
            Until::Instruction(wanted) if self.icount == wanted => Ok(Reached::There),
            Until::Instruction(target) => {
                Err(ReplayError::StoppedElsewhere { icount: self.icount, target }.into())
            }
            Until::LogEnd if shut_down => Ok(Reached::LogEnd),
            Until::LogEnd => Err(ReplayError::StoppedBeforeLogEnd { icount: self.icount }.into()),
        }
    }

    /// QEMU has closed its monitor.
    fn gone(&self, vm: &mut Vm) -> Result<Reached> {
        let exit = vm.wait(END_TIMEOUT)?;
        match exit {
            Some(exit) => self.ended(exit),
            None => Err(ReplayError::MonitorClosed.into()),
        }
    }

    fn ended(&self, exit: ExitStatus) -> Result<Reached> {
        match self.until {
            Until::LogEnd if exit.success() => Ok(Reached::LogEnd),
            Until::LogEnd => Err(ReplayError::EndedBeforeLogEnd { exit }.into()),
            Until::Instruction(target) => {
                Err(ReplayError::EndedBeforeTarget { exit, target }.into())
            }
        }
    }

    /// The error of a replay that has stopped at `icount` after so many bytes of its log.
    fn diverged(&self, vm: &mut Vm, icount: u64, log_bytes: Option<u64>) -> ReplayError {
        let missing_instructions = match self.until {
            Until::Instruction(target) => Some(target.saturating_sub(icount)),
            Until::LogEnd => None,
        };
        ReplayError::Diverged { icount, missing_instructions, log_bytes, registers: registers(vm) }
    }
}

/// The first lines of the processor's registers, with which a divergence can be examined.
fn registers(vm: &mut Vm) -> Vec<String> {
    let text = vm.qmp().hmp("info registers").unwrap_or_default();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.take(REGISTER_LINES).map(str::to_owned).collect()
}
