//! A QEMU as the checkpoint cycle's machine: QMP, with the watchdog armed around each pause.
//!
//! ```text
//!   arm ─▶ stop ─▶ ... ─▶ cont ─▶ disarm
//!                          └─ fails ─▶ the watchdog's cont, at once; of a VM that was attached to also one by a new
//!                                      connection, since its watchdog shares ours
//! ```
//!
//! Invariant: whatever fails in a pause of ours, the VM runs again before the next look at it.

use keyframe_capture::{BoxError, Machine, Resumed, Stopped};
use keyframe_qemu::watchdog::Watchdog;
use keyframe_qemu::{Qmp, Vm};
use keyframe_units::RamLayout;
use std::path::PathBuf;
use std::time::Duration;

/// How long the watchdog gets to resume a VM that we could not.
const RESCUE: Duration = Duration::from_millis(300);
/// How long a new connection to the monitor may take.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The VM and its watchdog.
pub struct QemuMachine {
    /// The VM.
    pub vm: Vm,
    /// The socket of its monitor, where it was attached to by one.
    pub monitor: Option<PathBuf>,
    watchdog: Watchdog,
    pause_limit: Duration,
    watches_discards: bool,
}

impl QemuMachine {
    /// A VM whose pauses `watchdog` ends after `pause_limit`. `watches_discards`: its tracker sees discarded RAM.
    pub fn new(vm: Vm, watchdog: Watchdog, pause_limit: Duration, watches_discards: bool) -> Self {
        Self { vm, monitor: None, watchdog, pause_limit, watches_discards }
    }
}

impl Machine for QemuMachine {
    fn ram(&mut self) -> Result<RamLayout, BoxError> {
        // Looking for discarded pages is half of a scan's time, so it is done only for machines that can discard. The
        // cycle asks before and after each pause, so a device plugged in meanwhile cannot slip through.
        if !self.watches_discards && self.vm.discards_ram()? {
            return Err("a balloon or virtio-mem device was plugged in, which discards RAM unseen by this run; unplug it, \
                        or start the VM with it"
                .into());
        }
        Ok(self.vm.ram_layout()?)
    }

    fn stop(&mut self) -> Result<Stopped, BoxError> {
        self.watchdog.arm(self.pause_limit)?;
        match self.vm.qmp().stop() {
            Ok(stopped) if stopped.was_running => Ok(Stopped::ByUs),
            Ok(_) => {
                // Paused by somebody else, who will resume it: the watchdog must not.
                let _ = self.watchdog.disarm()?;
                Ok(Stopped::Already)
            }
            Err(e) => {
                // The request may have arrived although its answer did not: let the VM run, whichever it is.
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

    fn save_devices(&mut self) -> Result<Vec<u8>, BoxError> {
        Ok(self.vm.save_devices()?)
    }

    fn resume(&mut self, stopped: Stopped) -> Result<(), BoxError> {
        match stopped {
            Stopped::ByUs => self.vm.qmp().cont().map_err(|error| {
                self.rescue();
                error.into()
            }),
            Stopped::Already => Ok(()),
        }
    }

    fn resumed(&mut self, stopped: Stopped) -> Result<Resumed, BoxError> {
        // The watchdog is disarmed whatever the monitor says.
        let fired = match stopped {
            Stopped::ByUs => self.watchdog.disarm()?.0,
            Stopped::Already => false,
        };
        let other = self.vm.qmp().resumed_by_other()?;
        Ok(if other || fired { Resumed::ByOther } else { Resumed::ByUs })
    }
}

impl QemuMachine {
    /// Lets the VM run although our monitor does not.
    fn rescue(&mut self) {
        if self.watchdog.arm(Duration::ZERO).is_ok() {
            std::thread::sleep(RESCUE);
        }
        if let Some(path) = &self.monitor {
            // QEMU takes a new client once ours is gone. Where it does not answer either, nobody can reach it.
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
