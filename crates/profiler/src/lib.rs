//! Measures what a VM writes in epochs of different lengths, while it runs.
//!
//! ```text
//!   launched:  launch (paused) ─▶ find RAM ─▶ cont ─▶ settle, or wait for a line ─┐
//!   attached:  find RAM, by the monitor, the VMM's driver or the command line ────┤
//!                                                                                 ▼
//!         ┌── attach (one userfaultfd), count packets and sectors from here on ───┘
//!         ▼
//!   round of all lengths ─▶ round ─▶ ... ─▶ detach ─▶ end the VM that was launched
//!     │
//!     └ epoch: scan and protect ─▶ sleep ─▶ scan: the pages written meanwhile
//! ```
//!
//! The lengths take turns, so that a change of the workload affects all of them alike.
//!
//! Invariants:
//! 1. The VM is never paused for a measurement. An attach stops QEMU's main thread, not the vCPUs,
//!    for about 0.1 ms.
//! 2. After a measurement, tracking and packet counters are gone from the QEMU process, also if it
//!    failed. After SIGKILL the kernel ends the tracking, and the next measurement the counters.
//! 3. What cannot be counted is absent, with a note that says why.
//! 4. A VM that was launched does not outlive this process, however that ends.
//!
//! Left out: stores, checkpoints, statistics (the profile crate).

mod command_line;
mod console;
mod counters;
mod error;
pub mod event;
mod meter;
mod ram_discovery;
mod target;

pub use error::{Error, Result};
pub use event::{EventSink, NoEvents, ProfilerEvent};

use keyframe_kernel::{END_SIGNALS, Interrupt};
use keyframe_profile::{Curve, Ladder, MeasuredEpoch};
use keyframe_vmm::Vmm;
use meter::{EpochOutcome, Meter};
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use target::Target;

/// The time for which a profile measures, if the number of samples is not given.
const BUDGET: Duration = Duration::from_secs(60);
/// How long a guest may take to print the awaited line.
const LINE_TIMEOUT: Duration = Duration::from_secs(600);

/// The VM to measure.
pub enum MeasuredVm {
    /// A VM that runs already. It runs on after the measurement.
    Running {
        /// QEMU's process id.
        pid: u32,
        /// The socket of its QMP monitor. Without one, RAM alone is measured.
        qmp: Option<PathBuf>,
    },
    /// A VM of another VMM, which runs already. It runs on after the measurement.
    Attached(Box<dyn Vmm>),
    /// A VM that the measurement starts and ends: once for each number in `vcpus`. If `vcpus` is
    /// empty, the VM runs once, with the number of vCPUs that its command line gives.
    Launched {
        /// QEMU's command line.
        command: Vec<OsString>,
        /// The numbers of vCPUs to measure the VM with, one after the other.
        vcpus: Vec<u32>,
        /// The condition on which the measurement begins.
        start: StartCondition,
    },
}

/// The condition on which the measurement of a launched VM begins.
pub struct StartCondition {
    /// A text: the measurement begins after the guest's console has shown a line with it. `None` to
    /// begin at the VM's start.
    pub when: Option<String>,
    /// The time to wait after that line, or after the VM's start.
    pub settle: Duration,
    /// True if QEMU's standard output goes to standard error.
    pub quiet_stdout: bool,
}

/// The options of a measurement of a VM's writes.
pub struct MeasurementOptions {
    /// The lengths of epochs.
    pub ladder: Ladder,
    /// The number of epochs of each length; `None` for as many as fit into a minute.
    pub samples: Option<u32>,
}

/// The result of a measurement of a VM's writes.
#[derive(Serialize)]
pub struct Profile {
    /// The number of bytes of guest RAM that were watched.
    pub ram_bytes: u64,
    /// A curve for each number of vCPUs.
    pub curves: Vec<Curve>,
    /// What could not be counted, or not exactly, and why.
    pub notes: Vec<String>,
    /// False if the VM ended, or Ctrl-C was pressed, before all epochs were measured.
    pub complete: bool,
}

/// Measures how much a VM writes, and returns the profile. A VM that was launched has ended when
/// this returns. Events go to `events`.
///
/// # Errors
///
/// The VM cannot be started, found or tracked; or no epoch was complete ([`Error::NoEpoch`]).
pub fn measure(
    vm: MeasuredVm,
    options: &MeasurementOptions,
    events: &dyn EventSink<ProfilerEvent>,
) -> Result<Profile> {
    let interrupted =
        Interrupt::on(&END_SIGNALS).map_err(|e| Error::io("catch signals", e))?.into_flag();
    let mut run = Run { options, events, interrupted, profile: Profile::empty() };
    match vm {
        MeasuredVm::Running { pid, qmp } => run.target(Target::running(pid, qmp.as_deref())?, 1)?,
        MeasuredVm::Attached(vm) => run.target(Target::of_vm(vm)?, 1)?,
        MeasuredVm::Launched { command, vcpus, start } => run.launched(&command, &vcpus, &start)?,
    }
    let mut profile = run.profile;
    if profile.curves.iter().all(|c| c.rows.is_empty()) {
        return Err(Error::NoEpoch);
    }
    profile.notes.sort();
    profile.notes.dedup();
    Ok(profile)
}

impl Profile {
    fn empty() -> Self {
        Self { ram_bytes: 0, curves: Vec::new(), notes: Vec::new(), complete: true }
    }
}

/// A measurement in progress.
struct Run<'a> {
    options: &'a MeasurementOptions,
    events: &'a dyn EventSink<ProfilerEvent>,
    interrupted: Arc<AtomicBool>,
    profile: Profile,
}

impl Run<'_> {
    fn launched(
        &mut self,
        command: &[OsString],
        vcpus: &[u32],
        start: &StartCondition,
    ) -> Result<()> {
        let numbers: Vec<Option<u32>> =
            if vcpus.is_empty() { vec![None] } else { vcpus.iter().copied().map(Some).collect() };
        for number in &numbers {
            let line =
                number.map_or_else(|| command.to_vec(), |n| command_line::with_vcpus(command, n));
            let (mut target, console) = Target::launch(line, *number, start)?;
            if self.settle(&mut target, &console, start)? {
                self.target(target, numbers.len() as u32)?;
            } else {
                drop(target);
                self.profile.complete = false;
            }
            console.finish();
            if self.interrupted.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok(())
    }

    /// Waits for the condition on which the measurement of a launched VM begins. Returns false if
    /// the VM ends before, or if Ctrl-C is pressed.
    fn settle(
        &self,
        target: &mut Target,
        console: &console::WatchedOutput,
        start: &StartCondition,
    ) -> Result<bool> {
        self.events.event(&ProfilerEvent::GuestStarted);
        let deadline = Instant::now() + LINE_TIMEOUT;
        while start.when.is_some() && !console.has_shown() {
            if Instant::now() > deadline {
                let text = start.when.as_deref().unwrap_or_default();
                return Err(Error::TextNotShown {
                    text: text.to_owned(),
                    seconds: LINE_TIMEOUT.as_secs(),
                });
            }
            if !self.pause(Duration::from_millis(20), target)? {
                return Ok(false);
            }
        }
        let until = Instant::now() + start.settle;
        while Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            if !self.pause(left.min(Duration::from_millis(100)), target)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sleeps for `time`. Returns false if the VM ends meanwhile, or if Ctrl-C is pressed.
    fn pause(&self, time: Duration, target: &mut Target) -> Result<bool> {
        std::thread::sleep(time);
        Ok(!self.interrupted.load(Ordering::Relaxed) && !target.has_ended()?)
    }

    /// Measures one VM of `count`, and ends it if it was launched.
    fn target(&mut self, mut target: Target, count: u32) -> Result<()> {
        let samples = self
            .options
            .samples
            .unwrap_or_else(|| self.options.ladder.samples_within(BUDGET / count.max(1)));
        let measured = std::thread::scope(|scope| {
            // The thread raises its own priority, which programs that are launched later must not
            // inherit.
            let worker = scope.spawn(|| {
                keyframe_kernel::priority::raise_current_thread();
                self.epochs(&mut target, samples)
            });
            worker.join().unwrap_or(Err(Error::Panicked))
        });
        self.profile.notes.append(&mut target.notes);
        self.profile.ram_bytes = target.ram_bytes();
        let vcpus = target.vcpus;
        if let Err(error) = target.end() {
            self.events.event(&ProfilerEvent::NotEnded { error });
        }
        let (epochs, complete) = measured?;
        self.profile.complete &= complete;
        self.profile.curves.push(Curve::new(vcpus, &epochs));
        Ok(())
    }

    /// Measures all epochs. Returns false with them if the VM ended, or Ctrl-C was pressed, before.
    fn epochs(&self, target: &mut Target, samples: u32) -> Result<(Vec<MeasuredEpoch>, bool)> {
        let lengths = self.options.ladder.lengths();
        let total = self.options.ladder.total() * samples;
        self.events.event(&ProfilerEvent::EpochsBegin { vcpus: target.vcpus, total });
        let mut meter = Meter::attach(target, self.events)?;
        let mut epochs = Vec::new();
        for length in (0..samples).flat_map(|_| lengths) {
            match meter.epoch(target, *length, &self.interrupted) {
                Ok(EpochOutcome::Epoch(epoch)) => epochs.push(epoch),
                Ok(EpochOutcome::Ended | EpochOutcome::Interrupted) => {
                    meter.detach(target);
                    return Ok((epochs, false));
                }
                Err(failure) => {
                    meter.detach(target);
                    return Err(failure);
                }
            }
            self.events.event(&ProfilerEvent::EpochMeasured { length: *length });
        }
        meter.detach(target);
        Ok((epochs, true))
    }
}
