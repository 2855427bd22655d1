//! The intervals of a run that was not recorded. Each is simulated from its checkpoint, without a
//! log.
//!
//! ```text
//!   run under KVM    ├── 1.0 s ──┼── 1.0 s ──┼── 1.0 s ──┤        checkpoints, and how long the guest ran between them
//!   simulated        [ 1.0 s of the guest's time ]  [ ... ]  [ ... ]   each by itself, under TCG, in parallel
//! ```
//!
//! Events from outside are not repeated. A simulation begins with the exact state of its
//! checkpoint, and then does what the guest might have done. So its results are approximate, and
//! are marked as such. SimuBoost was evaluated in this way: checkpoints under KVM, simulations
//! without a log.
//!
//! A run that goes on can be followed: its intervals appear with its checkpoints. It has ended when
//! no process holds the store's lock, or when the store has a newer run.
//!
//! A second of the guest's time is a thousand million instructions (`-icount shift=0`), less the
//! time in which it sleeps. An interval whose instructions were counted (`--count-instructions`) is
//! over after as many instructions as the guest executed under KVM, or when the simulated guest has
//! slept for as long as the interval took, because it then waits for an input that nothing repeats.

use crate::error::{AnalysisError, Error, ReplayError, Result};
use crate::replay::{ReplayDisks, RunningVm, serve_disks};
use crate::{KnownIntervals, ReplayOptions, RunSelection};
use keyframe_inspect::guest_memory::CheckpointRam;
use keyframe_inspect::source_of;
use keyframe_kernel::cpu_time;
use keyframe_qemu::restore::{self, Plan, RestoreOptions};
use keyframe_qemu::restore::{CloneOptions, clone_line};
use keyframe_qemu::{Accelerator, QemuIdentity, QmpEvent};
use keyframe_replay::interval::{Interval, RecordedCheckpoint};
use keyframe_scratch_directory::ScratchDirectory;
use keyframe_store::{CheckpointId, Meta, RunsAtWork, Sealed, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The binary logarithm of an instruction's length, in nanoseconds of the guest's time.
const SHIFT: u32 = 0;
/// How often a simulation is checked for its end.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How long a simulation may stay at one instruction.
const PATIENCE: Duration = Duration::from_secs(60);

/// A run in a store that was not recorded, whose intervals can be simulated.
pub struct UnrecordedRun {
    /// The store.
    pub store: Store,
    /// The run's id.
    pub run: String,
    /// The QEMU that ran the VM.
    pub qemu: QemuIdentity,
    selection: RunSelection,
    /// The intervals of a run that is not followed.
    fixed: Option<KnownIntervals>,
}

impl UnrecordedRun {
    /// Opens the newest run in `store` that has checkpoints in `selection`. If `follow` is true,
    /// the run may go on.
    ///
    /// # Errors
    ///
    /// There is no such checkpoint, the run is of a group, or no two of its checkpoints are
    /// consecutive although it is not followed.
    pub fn open(store: Store, selection: RunSelection, follow: bool) -> Result<Self> {
        let all = checkpoints(&store)?;
        let Some(newest) = all.iter().rev().find(|sealed| selection.has(sealed)) else {
            return Err(AnalysisError::NoSuchCheckpoint(store.path().to_owned()).into());
        };
        if !newest.meta.members.is_empty() {
            return Err(AnalysisError::GroupNotSimulated.into());
        }
        let machine = &newest.meta.machine;
        let qemu = QemuIdentity {
            path: machine.binary().to_owned(),
            version: machine.vmm_version.clone(),
            blake3: machine.binary_blake3.clone(),
        };
        let run = newest.meta.run.clone();
        let mut opened = Self { store, run, qemu, selection, fixed: None };
        if !follow {
            opened.fixed = Some(opened.intervals_in(&all, &RunsAtWork::default())?);
        }
        Ok(opened)
    }

    /// Returns the intervals between consecutive checkpoints of the run. An interval's length is
    /// the number of instructions that the host's processor counted in it. If they were not
    /// counted, it is the time for which the guest ran, by the clock that the simulation uses.
    ///
    /// # Errors
    ///
    /// The store cannot be read. A run that has ended has no two consecutive checkpoints.
    pub fn intervals(&self) -> Result<KnownIntervals> {
        if let Some(fixed) = &self.fixed {
            return Ok(fixed.clone());
        }
        // Look at the writers first: a checkpoint that is sealed after that is in the list.
        let runs = self.store.runs_at_work();
        let runs = runs.map_err(|e| Error::store(self.store.path(), e))?;
        self.intervals_in(&checkpoints(&self.store)?, &runs)
    }

    /// Returns the intervals between those of `all` checkpoints that are the run's and selected. The
    /// run may go on if it is one of `runs`.
    fn intervals_in(&self, all: &[Sealed], runs: &RunsAtWork) -> Result<KnownIntervals> {
        let newest = all.iter().rev().find(|sealed| sealed.meta.run == self.run);
        // One that is not in the list is being sealed, perhaps by this run.
        let may_be_ours = |id: &CheckpointId| {
            all.iter().find(|s| s.id == *id).is_none_or(|s| s.meta.run == self.run)
        };
        let is_last = all.last().is_none_or(|last| last.meta.run == self.run);
        let is_at_work = runs.built_upon.iter().any(may_be_ours)
            || runs.unknown > 1
            || runs.unknown == 1 && is_last;
        let may_go_on = is_at_work
            && newest.is_none_or(|newest| self.selection.to.is_none_or(|to| newest.id.0 <= to));
        let is_ours = |sealed: &&Sealed| sealed.meta.run == self.run && self.selection.has(sealed);
        let intervals = intervals_of(&all.iter().filter(is_ours).collect::<Vec<_>>());
        let is_complete = !may_go_on;
        if is_complete && intervals.is_empty() {
            let place = self.store.path().to_owned();
            return Err(AnalysisError::NoConsecutiveCheckpoints(place).into());
        }
        Ok(KnownIntervals { intervals, is_complete })
    }

    /// Starts a paused VM at the begin of `interval`. Errors: its checkpoints cannot be read; QEMU
    /// cannot be started, or refuses the state.
    pub fn start(&self, interval: &Interval, options: ReplayOptions) -> Result<SimulatedVm> {
        let checkpoint = interval.begin.checkpoint;
        // A guest that shuts down leaves QEMU paused, so that the tool can write its results.
        let mut extra = options.extra;
        extra.push("-no-shutdown".into());
        let loaded = self.store.load(checkpoint).map_err(|e| Error::store(self.store.path(), e))?;
        let loaded = Arc::new(loaded);
        let disks = serve_disks(&self.store, &loaded)?;
        let restore_options = RestoreOptions {
            paused: true,
            icount_shift: Some(SHIFT),
            accelerator: Some(Accelerator::Tcg),
            disks: disks.as_ref().map(ReplayDisks::server),
            log: options.log,
            ..RestoreOptions::default()
        };
        let mut source = source_of(&loaded.meta.machine, &loaded.meta.ram);
        // Its consoles and networks are cut off from other programs.
        let folder = ScratchDirectory::new("simulated");
        let folder = folder.map_err(|e| Error::io("make a directory for consoles", e))?;
        let own = CloneOptions { directory: folder.path(), exact: true };
        let line = clone_line(&source.machine.user_command, &[], own)
            .map_err(keyframe_qemu::Error::from)?;
        source.machine.user_command = line.words;
        let plan = Plan::new(source, extra, restore_options)?;
        let ram = CheckpointRam(Arc::clone(&loaded));
        let sleep_max = self.counted_time(&loaded.meta, interval.end)?;
        let restored = restore::start(plan, &ram, &loaded.device_state)?;
        Ok(SimulatedVm { vm: RunningVm { restored, disks }, sleep_max, _folder: folder })
    }

    /// Returns the time for which the guest ran from checkpoint `begin` to `end`, if its
    /// instructions were counted meanwhile. Error: the store cannot be read.
    fn counted_time(&self, begin: &Meta, end: Option<CheckpointId>) -> Result<Option<Duration>> {
        let Some(end) = end else { return Ok(None) };
        let end = self.store.sealed(end).map_err(|e| Error::store(self.store.path(), e))?.meta;
        let is_counted = counted_between(begin, &end).is_some();
        Ok(is_counted.then(|| Duration::from_nanos(ran_between_ns(begin, &end))))
    }
}

/// A VM that is simulated. Dropping it ends its QEMU.
pub struct SimulatedVm {
    vm: RunningVm,
    /// How long the guest may sleep before its interval is over, if the interval's length is a
    /// counted number of instructions. `None` if the length is the guest's time.
    sleep_max: Option<Duration>,
    /// The directory of its consoles.
    _folder: ScratchDirectory,
}

impl SimulatedVm {
    /// Lets the VM run until `interval` is over: after its counted instructions, or by the guest's
    /// time, which is its instructions and the time in which it slept. `on_progress` is called with
    /// the instruction that it has reached. Returns false if `interrupted` became true before.
    ///
    /// # Errors
    ///
    /// QEMU ends, or executes no instruction for a minute.
    pub fn run(
        &mut self,
        interval: &Interval,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<bool> {
        let (pid, thread) = (self.vm.restored.pid(), self.thread()?);
        let wanted = || {
            cpu_time::thread_cpu_demand(pid, thread).ok_or(Error::Replay(ReplayError::NoCpuTime))
        };
        let (began, before) = (Instant::now(), wanted()?);
        let mut last = (0, Instant::now());
        self.vm.restored.vm().qmp().cont()?;
        loop {
            if self.vm.restored.try_wait()?.is_some() {
                return Err(ReplayError::SimulationEnded.into());
            }
            let events = self.vm.restored.vm().qmp().drain_events()?;
            if events.iter().any(|event| matches!(event, QmpEvent::Shutdown { .. })) {
                // QEMU is paused then, and the interval is over.
                return Ok(true);
            }
            let icount = self.vm.restored.vm().qmp().icount()?;
            let slept = began.elapsed().saturating_sub(wanted()?.saturating_sub(before));
            let is_over = if let Some(max) = self.sleep_max {
                icount >= interval.len() || slept >= max
            } else {
                let time = (icount << SHIFT).saturating_add(slept.as_nanos() as u64);
                time >= interval.len() << SHIFT
            };
            on_progress(interval.from_icount.saturating_add(icount).min(interval.end_icount));
            if is_over {
                self.vm.restored.vm().qmp().stop()?;
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

    /// Returns the thread of its virtual processors.
    fn thread(&mut self) -> Result<u32> {
        let threads = self.vm.restored.vm().qmp().cpu_threads()?;
        threads.first().copied().ok_or(Error::Replay(ReplayError::NoCpuThread))
    }

    /// Ends QEMU in good order, so that a plugin writes what it has. Error: QEMU does not end in
    /// good order.
    pub fn end(self) -> Result<()> {
        self.vm.end()
    }
}

/// Returns the checkpoints in `store`, in their order.
fn checkpoints(store: &Store) -> Result<Vec<Sealed>> {
    let listing = store.checkpoints().map_err(|e| Error::store(store.path(), e))?;
    Ok(listing.sealed)
}

impl RunSelection {
    /// Returns whether a checkpoint is selected.
    fn has(&self, sealed: &Sealed) -> bool {
        self.vm.as_ref().is_none_or(|vm| sealed.meta.vm == *vm)
            && self.from.is_none_or(|from| sealed.id.0 >= from)
            && self.to.is_none_or(|to| sealed.id.0 <= to)
    }
}

/// Returns the time for which the guest ran between two checkpoints of a run, in nanoseconds.
fn ran_between_ns(begin: &Meta, end: &Meta) -> u64 {
    let ran = end.taken_at.duration_since(begin.taken_at).as_nanos();
    u64::try_from(ran).unwrap_or(0).saturating_sub(begin.timing.pause_ns)
}

/// Returns the number of instructions that the host's processor counted between two checkpoints of
/// a run; `None` if it did not count them.
fn counted_between(begin: &Meta, end: &Meta) -> Option<u64> {
    let (begin, end) = (begin.machine.counted_instructions?, end.machine.counted_instructions?);
    end.checked_sub(begin)
}

/// Returns the intervals between the checkpoints of a run.
fn intervals_of(run: &[&Sealed]) -> Vec<Interval> {
    let mut intervals = Vec::new();
    let mut icount = 0u64;
    for pair in run.windows(2) {
        let [begin, end] = pair else { continue };
        // A forgotten checkpoint makes its interval longer. A checkpoint after a rollback ends no
        // interval.
        if end.meta.parent.is_some() {
            continue;
        }
        let counted = counted_between(&begin.meta, &end.meta);
        let len = counted.unwrap_or_else(|| ran_between_ns(&begin.meta, &end.meta) >> SHIFT);
        let end_icount = icount.saturating_add(len);
        if end_icount > icount {
            intervals.push(Interval {
                index: u32::try_from(intervals.len()).unwrap_or(u32::MAX),
                begin: RecordedCheckpoint { icount, checkpoint: begin.id },
                from_icount: icount,
                end: Some(end.id),
                end_icount,
            });
            icount = end_icount;
        }
    }
    intervals
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_store::{MachineMeta, SealRequest};
    use keyframe_units::{BlockKind, RamBlock, RamLayout};

    #[test]
    fn an_interval_is_as_long_as_its_count_or_its_time() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::init(&dir.path().join("S")).unwrap();
        let ram = RamBlock {
            name: "ram".into(),
            kind: BlockKind::Backend,
            used_bytes: 4096,
            total_bytes: 4096,
        };
        let ram = RamLayout::new(vec![ram]).unwrap();
        let mut writer = store.lock_writer("test").unwrap();
        let mut run = writer.begin_run("vm", &ram).unwrap();
        // The third checkpoint was not counted, and the fifth shows fewer than the fourth.
        let counts = [Some(1_000), Some(5_500), None, Some(9_000), Some(8_000)];
        for (second, counted_instructions) in counts.into_iter().enumerate() {
            let taken_at = jiff::Timestamp::from_second(second as i64).unwrap();
            let machine = MachineMeta { counted_instructions, ..MachineMeta::default() };
            let request = SealRequest::of_pages(&ram, "interval");
            run.seal(SealRequest { taken_at, machine, ..request }).unwrap();
        }
        run.finish().unwrap();
        let selection = RunSelection::default();
        let opened = UnrecordedRun::open(store, selection, false).unwrap();
        let intervals = opened.intervals().unwrap().intervals;
        let lengths: Vec<u64> = intervals.iter().map(Interval::len).collect();
        assert_eq!(lengths, [4_500, 1_000_000_000, 1_000_000_000, 1_000_000_000]);

        let slept = |interval: &Interval| {
            let begin = opened.store.sealed(interval.begin.checkpoint).unwrap().meta;
            opened.counted_time(&begin, interval.end).unwrap()
        };
        assert_eq!(slept(&intervals[0]), Some(Duration::from_secs(1)));
        assert_eq!(slept(&intervals[1]), None);
    }
}
