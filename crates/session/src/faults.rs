//! Faults on purpose: what a run can be told to suffer, so that tests prove that nothing is lost.
//!
//! One enum of all of them ([`FaultKind`]); each has an end-to-end test of the same name in
//! `tests/tests/faults.rs` or `crash.rs` (`slow-copy`: `budgets.rs`). Those with a phase strike
//! where the checkpoint reaches it for the Nth time, the others at the Nth call, and slow ones
//! always.
//!
//! ```text
//!   kill|stall|pause|qmp-lost|qemu-killed : PHASE [:N]
//!   disk-full|scan-error|short-read|slow-encoder|slow-copy|kill-rollback|kill-rollback-soon [:N]
//! ```

use keyframe_capture::{BoxError, CapturePhase, DirtyTracker, PageReader, PausedFind};
use keyframe_units::{PAGE_BYTES, PageRange, PageSet};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The kind of a fault that a test injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The engine dies, as by `kill -9`.
    Kill,
    /// The engine hangs for ten minutes: the watchdog must step in.
    Stall,
    /// The engine is late by six seconds, once, and goes on as if nothing had been.
    Pause,
    /// The monitor's socket breaks.
    QmpLost,
    /// QEMU is killed.
    QemuKilled,
    /// The store has no room, once.
    DiskFull,
    /// A scan for dirty pages fails after it has protected some, once.
    ScanError,
    /// Guest RAM cannot be read, once.
    ShortRead,
    /// The encoder takes half a second longer for each batch of pages.
    SlowEncoder,
    /// Copying takes 20 us more for each page, as on a machine with slow memory.
    SlowCopy,
    /// The engine dies at the Nth step of a rollback: 1, the VM is paused; 2, the present state is
    /// kept; 3, the disks are exchanged; 4, the load is prepared; 5, QEMU is about to load; 6, it
    /// has loaded; 7, RAM is compared; 8, the VM is complete. If the machine is reset before the
    /// load, the reset is step 5, and the later steps are one higher.
    KillRollback,
    /// The engine dies a moment after the Nth step of a rollback.
    KillRollbackSoon,
}

impl FaultKind {
    const ALL: [(Self, &str); 12] = [
        (Self::Kill, "kill"),
        (Self::Stall, "stall"),
        (Self::Pause, "pause"),
        (Self::QmpLost, "qmp-lost"),
        (Self::QemuKilled, "qemu-killed"),
        (Self::DiskFull, "disk-full"),
        (Self::ScanError, "scan-error"),
        (Self::ShortRead, "short-read"),
        (Self::SlowEncoder, "slow-encoder"),
        (Self::SlowCopy, "slow-copy"),
        (Self::KillRollback, "kill-rollback"),
        (Self::KillRollbackSoon, "kill-rollback-soon"),
    ];

    fn has_phase(self) -> bool {
        matches!(self, Self::Kill | Self::Stall | Self::Pause | Self::QmpLost | Self::QemuKilled)
    }
}

/// A fault and the place at which it is injected. Clones share one count, so the fault is injected
/// once.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: FaultKind,
    phase: Option<CapturePhase>,
    /// The number of times that the place is passed before the fault is injected.
    left: Arc<AtomicU32>,
    victim: Arc<OnceLock<(u32, Option<OwnedFd>)>>,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let kind =
            FaultKind::ALL.into_iter().find(|(_, known)| *known == name).map(|(kind, _)| kind);
        let kind = kind.ok_or_else(|| {
            format!("faults: {}", FaultKind::ALL.map(|(_, known)| known).join(", "))
        })?;
        let phase = if kind.has_phase() {
            let name = parts.next().unwrap_or_default();
            let phase = CapturePhase::ALL.into_iter().find(|p| p.name() == name);
            Some(phase.ok_or_else(|| {
                format!("phases: {}", CapturePhase::ALL.map(CapturePhase::name).join(", "))
            })?)
        } else {
            None
        };
        let nth: u32 = match parts.next() {
            Some(n) => n.parse().ok().filter(|n| *n > 0).ok_or("N counts from 1")?,
            None => 1,
        };
        let left = Arc::new(AtomicU32::new(nth));
        Ok(Self { kind, phase, left, victim: Arc::default() })
    }
}

impl Fault {
    /// Sets the VM that the fault hits: the process id of its VMM, and the connection to its
    /// monitor.
    pub fn bind(&self, vmm_pid: u32, monitor: Option<OwnedFd>) {
        let _ = self.victim.set((vmm_pid, monitor));
    }

    /// Injects the fault if it belongs to `phase` and is due.
    pub fn reached(&self, phase: CapturePhase) {
        if self.kind == FaultKind::SlowEncoder && phase == CapturePhase::Encoding {
            std::thread::sleep(Duration::from_millis(500));
        }
        if self.phase != Some(phase) || !self.is_due() {
            return;
        }
        match self.kind {
            FaultKind::Kill => die(),
            FaultKind::Stall => std::thread::sleep(Duration::from_mins(10)),
            FaultKind::Pause => std::thread::sleep(Duration::from_secs(6)),
            FaultKind::QmpLost => {
                if let Some((_, Some(monitor))) = self.victim.get() {
                    let _ = rustix::net::shutdown(monitor, rustix::net::Shutdown::Both);
                }
            }
            FaultKind::QemuKilled => {
                let pid = self.victim.get().and_then(|(pid, _)| Pid::from_raw(pid.cast_signed()));
                if let Some(pid) = pid {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            _ => {}
        }
    }

    /// Kills this process at this step of a rollback, or soon after it, if the fault is of that
    /// kind and due.
    pub fn rolling_back(&self) {
        match self.kind {
            FaultKind::KillRollback if self.is_due() => die(),
            FaultKind::KillRollbackSoon if self.is_due() => {
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_millis(3));
                    die();
                });
            }
            _ => {}
        }
    }

    /// Returns the error of a call that must fail, if the fault is of `kind` and due; `None`
    /// otherwise.
    pub fn strike(&self, kind: FaultKind) -> Option<BoxError> {
        if self.kind != kind || !self.is_due() {
            return None;
        }
        let error = match kind {
            FaultKind::DiskFull => std::io::Error::from(std::io::ErrorKind::StorageFull),
            FaultKind::ShortRead => std::io::Error::from(std::io::ErrorKind::UnexpectedEof),
            _ => std::io::Error::other("injected"),
        };
        Some(error.into())
    }

    fn is_due(&self) -> bool {
        let count = |left: u32| left.checked_sub(1);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count) == Ok(1)
    }
}

fn die() {
    let _ = kill_process(getpid(), Signal::KILL);
    // SIGKILL takes effect before this thread runs on; the sleep is for the compiler's peace.
    std::thread::sleep(Duration::from_secs(60));
}

/// A tracker whose scans fail on purpose. The pages that a failed scan found are lost, as if the
/// kernel had failed half way.
pub struct FaultyTracker(pub Box<dyn DirtyTracker>, pub Fault);

impl DirtyTracker for FaultyTracker {
    fn drain(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        if let Some(error) = self.1.strike(FaultKind::ScanError) {
            self.0.drain(&mut PageSet::new(written.space_pages()))?;
            return Err(error);
        }
        self.0.drain(written)
    }

    fn drain_paused(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        if let Some(error) = self.1.strike(FaultKind::ScanError) {
            self.0.drain_paused(&mut PageSet::new(written.space_pages()))?;
            return Err(error);
        }
        self.0.drain_paused(written)
    }

    fn has_window(&self) -> bool {
        self.0.has_window()
    }

    fn open_window(&mut self, written: &mut PageSet) -> Result<(), BoxError> {
        if let Some(error) = self.1.strike(FaultKind::ScanError) {
            self.0.open_window(&mut PageSet::new(written.space_pages()))?;
            return Err(error);
        }
        self.0.open_window(written)
    }

    fn close_window(&mut self) {
        self.0.close_window();
    }

    fn paused_find(&self) -> PausedFind {
        self.0.paused_find()
    }

    fn mark_unfrozen_copies(&mut self, pages: &PageSet) {
        self.0.mark_unfrozen_copies(pages);
    }

    fn estimate_pages(&mut self) -> Option<u64> {
        self.0.estimate_pages()
    }
}

/// A reader that fails on purpose.
pub struct FaultyReader(pub Arc<dyn PageReader>, pub Fault);

impl PageReader for FaultyReader {
    fn read(&self, ranges: &[PageRange], dst: &mut [u8]) -> Result<(), BoxError> {
        if let Some(error) = self.1.strike(FaultKind::ShortRead) {
            return Err(error);
        }
        if self.1.kind == FaultKind::SlowCopy {
            let pages = (dst.len() / PAGE_BYTES) as u32;
            std::thread::sleep(Duration::from_micros(20) * pages);
        }
        self.0.read(ranges, dst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_and_refused() {
        let fault: Fault = "kill:device-state:3".parse().unwrap();
        assert_eq!((fault.kind, fault.phase), (FaultKind::Kill, Some(CapturePhase::DeviceState)));
        assert!("kill:nowhere".parse::<Fault>().unwrap_err().contains("precopy"));
        assert!("hug".parse::<Fault>().unwrap_err().contains("scan-error"));
        assert!("kill:paused:0".parse::<Fault>().is_err());
    }

    #[test]
    fn a_fault_strikes_once_at_its_turn() {
        let fault: Fault = "disk-full:3".parse().unwrap();
        let struck: Vec<bool> =
            (0..6).map(|_| fault.clone().strike(FaultKind::DiskFull).is_some()).collect();
        assert_eq!(struck, [false, false, true, false, false, false]);
        assert!(fault.strike(FaultKind::ShortRead).is_none());
    }
}
