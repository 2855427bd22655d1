//! The intervals of a run that was not recorded: simulated from each of its checkpoints on, without
//! a log.
//!
//! ```text
//!   run under KVM    ├── 1.0 s ──┼── 1.0 s ──┼── 1.0 s ──┤        checkpoints, and how long the guest ran between them
//!   simulated        [ 1.0 s of the guest's time ]  [ ... ]  [ ... ]   each by itself, under TCG, side by side
//! ```
//!
//! What comes from outside is not repeated: a simulation begins exactly where its checkpoint was,
//! and from there on does what the guest might have done. So it is approximate, and nothing else is
//! said of it. (SimuBoost was evaluated so: it captured under KVM, and simulated without a log.)
//!
//! A guest's second is a thousand million instructions (`-icount shift=0`), less those that it
//! sleeps.

use super::With;
use super::replay::{Alive, StoredRam, serve, server};
use crate::error::{AnalysisError, Error, ReplayError, Result};
use keyframe_inspect::source_of;
use keyframe_kernel::cpu_time;
use keyframe_qemu::restore::{self, Plan, RestoreOptions};
use keyframe_qemu::restore::{CloneOptions, clone_line};
use keyframe_qemu::{Accelerator, Event};
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_store::{Sealed, Store};
use keyframe_units::CheckpointId;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// An instruction takes two to this power nanoseconds of the guest's time.
const SHIFT: u32 = 0;
/// How often it is looked whether a simulation has come to its end.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// One that gets no further is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A run in a store.
pub struct Captured {
    /// The store.
    pub store: Store,
    /// The run's id.
    pub run: String,
    /// The QEMU that ran.
    pub qemu_version: String,
    /// From each checkpoint to the next of the run; their instructions are what the guest's time
    /// comes to.
    pub intervals: Vec<Interval>,
}

impl Captured {
    /// The newest run in `store`, or that of VM `vm`, between checkpoints `from` and `to`.
    pub fn open(
        store: Store,
        vm: Option<&str>,
        from: Option<u64>,
        to: Option<u64>,
    ) -> Result<Self> {
        let listing = store.checkpoints().map_err(|e| Error::store(store.path(), e))?;
        let wanted = |sealed: &&Sealed| {
            vm.is_none_or(|vm| sealed.meta.vm == vm)
                && from.is_none_or(|from| sealed.id.0 >= from)
                && to.is_none_or(|to| sealed.id.0 <= to)
        };
        let all: Vec<&Sealed> = listing.sealed.iter().filter(wanted).collect();
        let place = || store.path().to_owned();
        let Some(newest) = all.last() else {
            return Err(AnalysisError::NoSuchCheckpoint(place()).into());
        };
        if !newest.meta.members.is_empty() {
            return Err(AnalysisError::GroupNotSimulated.into());
        }
        let of_run = |sealed: &&&Sealed| sealed.meta.run == newest.meta.run;
        let run: Vec<&Sealed> = all.iter().filter(of_run).copied().collect();
        let mut intervals = Vec::new();
        let mut icount = 0u64;
        for pair in run.windows(2) {
            let [begin, end] = pair else { continue };
            // One that was forgotten in between makes the stretch longer; one that was gone back to
            // makes it none.
            if end.meta.parent.is_some() {
                continue;
            }
            let ran = end.meta.taken_at.duration_since(begin.meta.taken_at).as_nanos();
            let ran_ns = u64::try_from(ran).unwrap_or(0).saturating_sub(begin.meta.timing.pause_ns);
            let end_icount = icount.saturating_add(ran_ns >> SHIFT);
            if end_icount > icount {
                let index = u32::try_from(intervals.len()).unwrap_or(u32::MAX);
                let place = RecordedCheckpoint { icount, checkpoint: begin.id };
                intervals.push(Interval {
                    index,
                    begin: place,
                    from_icount: icount,
                    end: Some(end.id),
                    end_icount,
                });
                icount = end_icount;
            }
        }
        if intervals.is_empty() {
            return Err(AnalysisError::NoConsecutiveCheckpoints(place()).into());
        }
        let (run, qemu_version) =
            (newest.meta.run.clone(), newest.meta.machine.vmm_version.clone());
        drop(listing);
        Ok(Self { store, run, qemu_version, intervals })
    }

    /// Starts a VM at `checkpoint`, standing.
    pub fn start(&self, checkpoint: CheckpointId, with: With) -> Result<Simulation> {
        // One whose guest shuts down stands, so that its tool gets to the end.
        let mut extra = with.extra;
        extra.push("-no-shutdown".into());
        let loaded = self.store.load(checkpoint).map_err(|e| Error::store(self.store.path(), e))?;
        let loaded = Arc::new(loaded);
        let disks = serve(&self.store, &loaded)?;
        let options = RestoreOptions {
            paused: true,
            icount_shift: Some(SHIFT),
            accelerator: Some(Accelerator::Tcg),
            disks: server(&disks),
            log: with.log,
            ..RestoreOptions::default()
        };
        let mut source = source_of(&loaded.meta.machine, &loaded.meta.ram);
        // Its consoles and networks lead nowhere that anybody else is.
        let place = tempfile::Builder::new().prefix("keyframe-simulated-").tempdir();
        let place = place.map_err(|e| Error::io("make a directory for consoles", e))?;
        let own = CloneOptions { directory: place.path(), exact: true };
        let line = clone_line(&source.machine.user_command, &[], own)
            .map_err(keyframe_qemu::Error::from)?;
        source.machine.user_command = line.words;
        let plan = Plan::new(source, extra, options)?;
        let ram = StoredRam(Arc::clone(&loaded));
        let restored = restore::start(plan, &ram, &loaded.device_state)?;
        Ok(Simulation { alive: Alive { restored, disks }, _place: place })
    }
}

/// A VM that is simulated. Dropping it leaves no QEMU behind.
pub struct Simulation {
    alive: Alive,
    _place: tempfile::TempDir,
}

impl Simulation {
    /// Lets it run until `interval` is over in the guest's time: by its instructions, and by how
    /// long it slept. False where that was interrupted.
    pub fn run(
        &mut self,
        interval: &Interval,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(u64),
    ) -> Result<bool> {
        let (pid, thread) = (self.alive.restored.pid(), self.thread()?);
        let wanted = || {
            cpu_time::thread_cpu_demand(pid, thread).ok_or(Error::Replay(ReplayError::NoCpuTime))
        };
        let (began, before) = (Instant::now(), wanted()?);
        let mut last = (0, Instant::now());
        self.alive.restored.vm().qmp().cont()?;
        loop {
            if self.alive.restored.try_wait()?.is_some() {
                return Err(ReplayError::SimulationEnded.into());
            }
            let events = self.alive.restored.vm().qmp().drain_events()?;
            if events.iter().any(|event| matches!(event, Event::Shutdown { .. })) {
                // It stands then, and its interval is over.
                return Ok(true);
            }
            let icount = self.alive.restored.vm().qmp().icount()?;
            let slept = began.elapsed().saturating_sub(wanted()?.saturating_sub(before));
            let time = (icount << SHIFT).saturating_add(slept.as_nanos() as u64);
            tell(interval.from_icount.saturating_add(icount).min(interval.end_icount));
            if time >= interval.len() << SHIFT {
                self.alive.restored.vm().qmp().stop()?;
                return Ok(true);
            }
            if interrupted.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if icount != last.0 {
                last = (icount, Instant::now());
            } else if last.1.elapsed() > PATIENCE {
                return Err(ReplayError::SimulationStalled { icount }.into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// The thread that its processors run on.
    fn thread(&mut self) -> Result<u32> {
        let threads = self.alive.restored.vm().qmp().cpu_threads()?;
        threads.first().copied().ok_or(Error::Replay(ReplayError::NoCpuThread))
    }

    /// Ends QEMU in good order, so that a plugin writes what it has.
    pub fn end(self) -> Result<()> {
        self.alive.end()
    }
}
