//! A QEMU as the checkpoint cycle's machine: QMP, with the watchdog armed around each pause.
//!
//! ```text
//!   arm ─▶ stop ─▶ ... ─▶ cont ─▶ disarm
//!                          └─ fails ─▶ the watchdog's cont, at once; of a VM that was attached to also one by a new
//!                                      connection, since its watchdog shares ours
//! ```
//!
//! ```text
//!   rollback:   stand ─▶ (checkpoint) ─▶ between ─▶ ... ─▶ is_whole ─▶ (checkpoint) ─▶ go
//!                  the engine dies: runs    dies: is ended     dies: runs
//! ```
//!
//! Invariant: whatever fails in a pause of ours, the VM runs again before the next look at it.

use super::recording::{Position, RequestQueues};
use keyframe_capture::{BoxError, PauseSteps, PauseVerdict, StopOutcome};
use keyframe_qemu::watchdog::Watchdog;
use keyframe_qemu::{Qmp, Vm};
use keyframe_units::RamLayout;
use std::path::PathBuf;
use std::time::Duration;

/// How long the watchdog gets to resume a VM that we could not.
const RESCUE: Duration = Duration::from_millis(300);
/// How long a new connection to the monitor may take.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a VM may stand for a rollback without a sign of the engine: longer than a checkpoint
/// may take to be sealed.
const STAND_MAX: Duration = Duration::from_mins(10);

/// Why a VM could not be captured or rolled back, although its QEMU answered.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A device that discards RAM was plugged in, and this run's tracker cannot see that.
    #[error(
        "a balloon or virtio-mem device was plugged in, which discards RAM unseen by this run; \
         unplug it, or start the VM with it"
    )]
    DiscardsRam,
    /// The watchdog resumed a VM that was to stand still.
    #[error("the watchdog has let the VM run, since the rollback took too long")]
    RollbackTooLong,
}

/// The VM and its watchdog.
pub struct QemuMachine {
    /// The VM.
    pub vm: Vm,
    /// The socket of its monitor, where it was attached to by one.
    pub monitor: Option<PathBuf>,
    /// It is recorded: a checkpoint of it does not fall between a disk's request and its answer.
    pub is_recorded: bool,
    /// Where the next checkpoint's instruction is to be told.
    pub position: Option<Position>,
    /// Of a VM that is recorded or replays: its disks.
    pub disks: RequestQueues,
    watchdog: Watchdog,
    pause_limit: Duration,
    watches_discards: bool,
    /// It stands for a rollback: whether it ran before.
    stands: Option<bool>,
}

impl QemuMachine {
    /// A VM whose pauses `watchdog` ends after `pause_limit`. `watches_discards`: its tracker sees
    /// discarded RAM.
    pub fn new(vm: Vm, watchdog: Watchdog, pause_limit: Duration, watches_discards: bool) -> Self {
        Self {
            vm,
            monitor: None,
            is_recorded: false,
            position: None,
            disks: RequestQueues::default(),
            watchdog,
            pause_limit,
            watches_discards,
            stands: None,
        }
    }
}

impl QemuMachine {
    /// Returns the VM's RAM blocks. Fails if a device that discards RAM was plugged in and this
    /// run's tracker does not see discarded pages.
    pub fn ram_layout(&mut self) -> Result<RamLayout, BoxError> {
        // Looking for discarded pages is half of a scan's time, so it is done only for machines
        // that can discard. The cycle asks after each pause, before it is sealed, so a device
        // plugged in meanwhile cannot slip through.
        if self.watches_discards {
            return Ok(self.vm.ram_layout()?);
        }
        let (layout, discards) = self.vm.ram_layout_and_discards()?;
        if discards {
            return Err(MachineError::DiscardsRam.into());
        }
        Ok(layout)
    }
}

impl PauseSteps for QemuMachine {
    fn prepare_pause(&mut self) -> Result<(), BoxError> {
        if !self.is_recorded {
            return Ok(());
        }
        self.vm.may_answer_late(false);
        self.disks.await_rest(self.vm.qmp())
    }

    fn hold(&mut self) -> Result<StopOutcome, BoxError> {
        if self.stands.is_some() {
            // The watchdog stays as it is.
            return Ok(StopOutcome::AlreadyPaused);
        }
        self.watchdog.arm(self.pause_limit)?;
        match self.vm.qmp().stop() {
            Ok(stopped) if stopped.was_running => self.settle().map(|()| StopOutcome::Stopped),
            Ok(_) => {
                // Paused by somebody else, who will resume it: the watchdog must not.
                let _ = self.watchdog.disarm()?;
                Ok(StopOutcome::AlreadyPaused)
            }
            Err(e) => {
                // The request may have arrived although its answer did not: let the VM run,
                // whichever it is.
                let resumed = self.vm.qmp().cont();
                if resumed.is_ok() {
                    let _ = self.watchdog.disarm()?;
                } else {
                    // The watchdog stays armed: the request may still be on its way.
                    self.rescue();
                }
                Err(e.into())
            }
        }
    }

    fn save_device_state(&mut self) -> Result<Vec<u8>, BoxError> {
        if let Some(position) = self.position.take() {
            let _ = position.set(self.vm.qmp().icount()?);
        }
        Ok(self.vm.save_devices()?)
    }

    fn release(&mut self, stopped: StopOutcome) -> Result<(), BoxError> {
        let resumed = match stopped {
            StopOutcome::Stopped => self.vm.qmp().cont().map_err(|error| {
                self.rescue();
                error.into()
            }),
            StopOutcome::AlreadyPaused => Ok(()),
        };
        self.vm.may_answer_late(true);
        resumed
    }

    fn finish_pause(&mut self, stopped: StopOutcome) -> Result<PauseVerdict, BoxError> {
        // The watchdog is disarmed whatever the monitor says.
        let fired = match stopped {
            StopOutcome::Stopped => self.watchdog.disarm()?.0,
            StopOutcome::AlreadyPaused => false,
        };
        let other = self.vm.qmp().resumed_by_other()?;
        Ok(if other || fired { PauseVerdict::RanMeanwhile } else { PauseVerdict::Undisturbed })
    }
}

impl QemuMachine {
    /// It has just been stopped. Where it cannot stay so, it runs.
    fn settle(&mut self) -> Result<(), BoxError> {
        if !self.is_recorded {
            return Ok(());
        }
        let settled = self.disks.settle(self.vm.qmp());
        if settled.is_err() {
            let resumed = self.vm.qmp().cont();
            if resumed.is_ok() {
                let _ = self.watchdog.disarm()?;
            } else {
                self.rescue();
            }
        }
        settled
    }

    /// Stops the VM until [`Self::go`]; checkpoints taken meanwhile are of one instant. Whether it
    /// ran. Where the engine dies, it runs again.
    pub fn stand(&mut self) -> Result<bool, BoxError> {
        let stopped = self.hold()?;
        let ran = stopped == StopOutcome::Stopped;
        self.stands = Some(ran);
        if ran { Ok(self.watchdog.arm(STAND_MAX).map(|()| ran)?) } else { Ok(ran) }
    }

    /// The VM that stands is about to be neither what it was nor what it is to be. Where the engine
    /// dies, so does the VM.
    pub fn between(&mut self) -> Result<(), BoxError> {
        if self.watchdog.between()?.0 {
            let _ = self.watchdog.disarm()?;
            return Err(MachineError::RollbackTooLong.into());
        }
        Ok(())
    }

    /// What stands there may run again.
    pub fn is_whole(&mut self) -> Result<(), BoxError> {
        match self.stands {
            Some(true) => self.watchdog.arm(STAND_MAX)?,
            _ => {
                let _ = self.watchdog.disarm()?;
            }
        }
        Ok(())
    }

    /// The VM runs again, where it did.
    pub fn go(&mut self) -> Result<(), BoxError> {
        let Some(true) = self.stands.take() else { return Ok(()) };
        self.release(StopOutcome::Stopped)?;
        // One that has ended is found at the next checkpoint; the VM runs.
        let _ = self.watchdog.disarm();
        Ok(())
    }

    /// Lets the VM run although our monitor does not.
    fn rescue(&mut self) {
        if self.watchdog.arm(Duration::ZERO).is_ok() {
            std::thread::sleep(RESCUE);
        }
        if let Some(path) = &self.monitor {
            // QEMU takes a new client once ours is gone. Where it does not answer either, nobody
            // can reach it.
            let _ = Qmp::connect(path, RECONNECT_TIMEOUT).and_then(|mut qmp| qmp.cont());
        }
    }

    /// The VM's tracker sees discarded RAM from here on, or does not.
    pub fn set_watches_discards(&mut self, watches_discards: bool) {
        self.watches_discards = watches_discards;
    }

    /// Ends the watchdog and returns the VM.
    pub fn into_vm(self) -> Vm {
        self.watchdog.end();
        self.vm
    }
}
