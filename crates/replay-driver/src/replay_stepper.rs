//! Takes a replay from instruction to instruction, and detects that it hangs.

use crate::error::{ReplayError, Result};
use crate::idle_watch::{IdleWatch, Idleness};
use keyframe_kernel::open_file::OpenFile;
use keyframe_qemu::restore::{Restored, Until};
use keyframe_qemu::{QmpEvent, Vm};
use keyframe_replay::{ReplayProgress, StallDetector};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often QEMU is asked for its instruction. Each question takes the lock under which the
/// virtual processor runs.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// The default time for which a replay may stay at one instruction and one place in its log. An
/// idle guest's clock jumps, so that no replay waits for real time.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The patience at a hold, where a replay hangs if its stop came too late.
const PATIENCE_AT_HOLD: Duration = Duration::from_secs(5);
/// Lines of the registers that a divergence is reported with.
const REGISTER_LINES: usize = 6;
/// How long QEMU may take to end after the last instruction.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// The reason why a replay has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The replay has reached the instruction that was its target.
    Target,
    /// The replay has reached the log's end, at which the recorded VM was shut down.
    LogEnd,
    /// The user asked for an end.
    Interrupted,
}

/// A QEMU that replays.
pub trait ReplayingVm {
    /// Returns the exit status of the QEMU; `None` while it runs. Error: the kernel does not tell.
    fn ended(&mut self) -> keyframe_qemu::Result<Option<ExitStatus>>;
    /// Returns the handle of the VM.
    fn vm(&mut self) -> &mut Vm;
}

impl ReplayingVm for Restored {
    fn ended(&mut self) -> keyframe_qemu::Result<Option<ExitStatus>> {
        self.try_wait()
    }
    fn vm(&mut self) -> &mut Vm {
        Restored::vm(self)
    }
}

impl ReplayingVm for Vm {
    fn ended(&mut self) -> keyframe_qemu::Result<Option<ExitStatus>> {
        self.try_wait()
    }
    fn vm(&mut self) -> &mut Vm {
        self
    }
}

/// The position and the target of a replay.
///
/// ```text
///   icount ──▶ hold: stops for a moment, as the recorded VM did ──▶ hold ──▶ ... ──▶ until
/// ```
#[derive(Clone, Debug)]
pub struct ReplayStepper {
    /// The instruction at which it last stopped.
    pub icount: u64,
    /// The target of the replay.
    pub until: Until,
    /// The instructions at which it stops for a moment on its way, in rising order.
    pub holds: Arc<[u64]>,
    /// True if the replay may be stopped at any instruction, not only between intervals.
    pub stops_anywhere: bool,
    /// The path of the log that QEMU reads.
    pub log: PathBuf,
    /// The time for which it may stay at one instruction and one place in its log before it counts
    /// as diverged.
    pub patience: Duration,
}

impl ReplayStepper {
    /// Returns where the replay stops next: at its target, or at a hold before that.
    pub fn next_stop(&self) -> Until {
        let next = self.holds.partition_point(|hold| *hold <= self.icount);
        match (self.holds.get(next), self.until) {
            (Some(&hold), Until::Instruction(end)) if hold < end => Until::Instruction(hold),
            (Some(&hold), Until::LogEnd) => Until::Instruction(hold),
            (_, until) => until,
        }
    }

    /// Returns whether a network allows the main loop to run late on the way to the next stop: not if
    /// that is a hold, and not if the replay may be stopped anywhere.
    pub fn may_be_late(&self) -> bool {
        let is_hold = match self.next_stop() {
            Until::Instruction(icount) => self.is_hold(icount),
            Until::LogEnd => false,
        };
        !self.stops_anywhere && !is_hold
    }

    /// Returns whether a replay that stands still at `icount` has come to a hold there, before or
    /// after the stop.
    fn hangs_at_hold(&self, icount: u64) -> bool {
        let is_here = icount == self.icount || self.next_stop() == Until::Instruction(icount);
        is_here && self.is_hold(icount)
    }

    fn is_hold(&self, icount: u64) -> bool {
        self.holds.binary_search(&icount).is_ok()
    }

    /// Lets a paused replay run on to `until`, and waits until it is there, as
    /// [`ReplayStepper::arrive`] does. Errors: those of [`ReplayStepper::arrive`].
    pub fn go_on(
        &mut self,
        replay: &mut impl ReplayingVm,
        until: Until,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<StopReason> {
        self.until = until;
        self.resume(replay.vm())?;
        self.arrive(replay, interrupted, on_progress)
    }

    /// Lets it run on to its next stop.
    fn resume(&self, vm: &mut Vm) -> Result<()> {
        if !self.stops_anywhere {
            vm.take_turns(self.may_be_late());
        }
        let qmp = vm.qmp();
        qmp.drain_events()?;
        if let Until::Instruction(icount) = self.next_stop() {
            qmp.replay_break(icount)?;
        }
        Ok(qmp.cont()?)
    }

    /// Waits until the replay has reached its target. `on_progress` is called now and then with the
    /// instruction that QEMU has reached.
    ///
    /// # Errors
    ///
    /// [`ReplayError::Diverged`] if it hangs; other errors if it stopped elsewhere, or QEMU ended.
    pub fn arrive(
        &mut self,
        replay: &mut impl ReplayingVm,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<StopReason> {
        let pid = replay.vm().pid();
        let mut progress = ProgressWatch::new(self, pid);
        let mut idle_watch = IdleWatch::new(pid);
        loop {
            if let Some(exit) = replay.ended()? {
                return self.ended(exit);
            }
            let Ok(events) = replay.vm().qmp().drain_events() else {
                return self.monitor_closed(replay.vm());
            };
            let shut_down = events.iter().any(|event| matches!(event, QmpEvent::Shutdown { .. }));
            if shut_down || events.contains(&QmpEvent::Stop) {
                if !shut_down && self.is_held(replay.vm())? {
                    self.resume(replay.vm())?;
                    continue;
                }
                return self.stopped(replay.vm(), shut_down);
            }
            if interrupted.load(Ordering::Relaxed) {
                return Ok(StopReason::Interrupted);
            }
            let Idleness { is_idle, wait } = idle_watch.look();
            if is_idle || progress.is_due() {
                // QEMU may be ending, so that it does not answer.
                let Ok(icount) = replay.vm().qmp().icount() else {
                    return self.monitor_closed(replay.vm());
                };
                on_progress(icount);
                if let Some(stalled) = progress.stalled(icount, self.hangs_at_hold(icount)) {
                    return Err(self.diverged(replay.vm(), &stalled).into());
                }
            }
            std::thread::sleep(wait);
        }
    }

    /// Returns true if it has stopped at a hold, which is its new position then.
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

    /// Compares where it has stopped with its target.
    fn stopped(&mut self, vm: &mut Vm, shut_down: bool) -> Result<StopReason> {
        self.icount = vm.qmp().icount()?;
        match self.until {
            Until::Instruction(wanted) if self.icount == wanted => Ok(StopReason::Target),
            Until::Instruction(target) => {
                Err(ReplayError::StoppedElsewhere { icount: self.icount, target }.into())
            }
            Until::LogEnd if shut_down => Ok(StopReason::LogEnd),
            Until::LogEnd => Err(ReplayError::StoppedBeforeLogEnd { icount: self.icount }.into()),
        }
    }

    /// Waits for the end of a QEMU that has closed its monitor.
    fn monitor_closed(&self, vm: &mut Vm) -> Result<StopReason> {
        let exit = vm.wait(END_TIMEOUT)?;
        match exit {
            Some(exit) => self.ended(exit),
            None => Err(ReplayError::MonitorClosed.into()),
        }
    }

    /// Judges the end of QEMU.
    fn ended(&self, exit: ExitStatus) -> Result<StopReason> {
        match self.until {
            Until::LogEnd if exit.success() => Ok(StopReason::LogEnd),
            Until::LogEnd => Err(ReplayError::EndedBeforeLogEnd { exit }.into()),
            Until::Instruction(target) => {
                Err(ReplayError::EndedBeforeTarget { exit, target }.into())
            }
        }
    }

    /// Returns the error of a replay that hangs.
    fn diverged(&self, vm: &mut Vm, stalled: &Stalled) -> ReplayError {
        let &Stalled { icount, log_bytes } = stalled;
        if self.hangs_at_hold(icount) {
            return ReplayError::MissedHold { icount };
        }
        let missing_instructions = match self.until {
            Until::Instruction(target) => Some(target.saturating_sub(icount)),
            Until::LogEnd => None,
        };
        ReplayError::Diverged { icount, missing_instructions, log_bytes, registers: registers(vm) }
    }
}

/// Where a replay hangs.
struct Stalled {
    icount: u64,
    /// Bytes of the log that QEMU has read, if known.
    log_bytes: Option<u64>,
}

/// Watches the instruction and the log position of a replay.
struct ProgressWatch {
    began: Instant,
    detector: StallDetector,
    patience: Duration,
    asked: Instant,
    log: Option<OpenFile>,
    log_bytes: Option<u64>,
    log_looked: Instant,
}

impl ProgressWatch {
    /// Watches the QEMU with process id `pid`, which `stepper` steps.
    fn new(stepper: &ReplayStepper, pid: u32) -> Self {
        let began = Instant::now();
        let log = OpenFile::of(pid, &stepper.log);
        Self {
            began,
            detector: StallDetector::new(stepper.icount),
            patience: stepper.patience,
            asked: began,
            log,
            log_bytes: log.and_then(OpenFile::offset),
            log_looked: began,
        }
    }

    /// Returns true if a busy QEMU is to be asked for its instruction.
    fn is_due(&self) -> bool {
        self.asked.elapsed() >= ASK_EVERY
    }

    /// Notes that QEMU is at `icount`, which may be a hold. Returns where it hangs if the patience is
    /// over.
    fn stalled(&mut self, icount: u64, is_hold: bool) -> Option<Stalled> {
        self.asked = Instant::now();
        if self.log_looked.elapsed() >= ASK_EVERY {
            (self.log_bytes, self.log_looked) = (self.log.and_then(OpenFile::offset), self.asked);
        }
        let patience = if is_hold { PATIENCE_AT_HOLD.min(self.patience) } else { self.patience };
        match self.detector.observe(self.began.elapsed(), icount, self.log_bytes, patience) {
            ReplayProgress::Stalled { icount } => {
                Some(Stalled { icount, log_bytes: self.log_bytes })
            }
            ReplayProgress::Advancing => None,
        }
    }
}

/// Returns the first lines of the processor's registers, with which a divergence can be examined.
fn registers(vm: &mut Vm) -> Vec<String> {
    let text = vm.qmp().hmp("info registers").unwrap_or_default();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.take(REGISTER_LINES).map(str::to_owned).collect()
}
