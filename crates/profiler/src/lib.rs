//! Measures what a VM writes in epochs of different lengths, while it runs.
//!
//! ```text
//!   launched:  launch (paused) ─▶ find RAM ─▶ cont ─▶ settle, or wait for a line ─┐
//!   attached:  find RAM, by the monitor or by the command line ───────────────────┤
//!                                                                                 ▼
//!         ┌── attach (one userfaultfd), count packets and sectors from here on ───┘
//!         ▼
//!   round of all lengths ─▶ round ─▶ ... ─▶ detach ─▶ end the VM that was launched
//!     │
//!     └ epoch: scan and protect ─▶ sleep ─▶ scan: the pages written meanwhile
//! ```
//!
//! Lengths take turns, so that a workload that changes while it is measured changes all of them
//! alike.
//!
//! Invariants:
//! 1. The VM is never paused for a measurement. Attaching stops QEMU's main thread, not the vCPUs, for some 0.1 ms.
//! 2. When it is over, tracking and packet counters are gone from the QEMU process, also where the measuring failed.
//!    After SIGKILL the kernel ends the tracking, and the next measuring the packet counters.
//! 3. What cannot be counted is absent, with a note that says why.
//!
//! 4. A VM that was launched does not outlive this process, however that ends.
//!
//! Left out: stores, checkpoints, statistics (the profile crate).

pub mod command_line;
pub mod console;
pub mod counters;
mod error;
pub mod event;
pub mod meter;
pub mod outside;
pub mod target;

pub use error::{Error, Result};
pub use event::{Event, EventSink, NoEvents};

use keyframe_kernel::{END_SIGNALS, Interrupt};
use keyframe_profile::{Curve, Epoch, Ladder};
use meter::{Meter, Step};
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use target::Target;

/// How long a whole profile takes, about, unless the number of samples is given.
const BUDGET: Duration = Duration::from_secs(60);
/// How long a guest may take to print the line that is waited for.
const LINE_TIMEOUT: Duration = Duration::from_secs(600);

/// Which VM.
pub enum Subject {
    /// One that runs already.
    Running {
        /// QEMU's pid.
        pid: u32,
        /// Its monitor.
        qmp: Option<PathBuf>,
    },
    /// One that is started for it, once for each number of vCPUs; once as it is where there is
    /// none.
    Launched {
        /// QEMU's command line.
        command: Vec<OsString>,
        /// Numbers of vCPUs.
        vcpus: Vec<u32>,
        /// When to begin.
        start: Start,
    },
}

/// When a VM that was launched is measured.
pub struct Start {
    /// When its console has shown a line with this text.
    pub when: Option<String>,
    /// This long after its start, or after that line.
    pub settle: Duration,
    /// Its standard output goes to standard error.
    pub quiet_stdout: bool,
}

/// What is asked for.
pub struct Options {
    /// Lengths of epochs.
    pub ladder: Ladder,
    /// Epochs of each length.
    pub samples: Option<u32>,
}

/// What was found.
#[derive(Serialize)]
pub struct Profile {
    /// Bytes of guest RAM that were watched.
    pub ram_bytes: u64,
    /// One for each number of vCPUs.
    pub curves: Vec<Curve>,
    /// What could not be counted, or not exactly, and why.
    pub notes: Vec<String>,
    /// False where the VM ended, or Ctrl-C was pressed, before all epochs were measured.
    pub complete: bool,
}

/// Measures `subject`.
pub fn measure(subject: Subject, options: &Options, events: &dyn EventSink) -> Result<Profile> {
    let interrupted =
        Interrupt::on(&END_SIGNALS).map_err(|e| Error::io("catch signals", e))?.into_flag();
    let mut run = Run { options, events, interrupted, profile: Profile::empty() };
    match subject {
        Subject::Running { pid, qmp } => run.target(Target::running(pid, qmp.as_deref())?, 1)?,
        Subject::Launched { command, vcpus, start } => run.launched(&command, &vcpus, &start)?,
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

/// A profile that is being made.
struct Run<'a> {
    options: &'a Options,
    events: &'a dyn EventSink,
    interrupted: Arc<AtomicBool>,
    profile: Profile,
}

impl Run<'_> {
    fn launched(&mut self, command: &[OsString], vcpus: &[u32], start: &Start) -> Result<()> {
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

    /// Waits until a VM that was launched is to be measured; false where it has ended before, or
    /// Ctrl-C was pressed.
    fn settle(
        &self,
        target: &mut Target,
        console: &console::Console,
        start: &Start,
    ) -> Result<bool> {
        self.events.event(&Event::GuestStarted);
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

    /// Sleeps; false where the VM has ended or Ctrl-C was pressed.
    fn pause(&self, time: Duration, target: &mut Target) -> Result<bool> {
        std::thread::sleep(time);
        Ok(!self.interrupted.load(Ordering::Relaxed) && !target.has_ended()?)
    }

    /// Measures one VM, one of `count`, and ends it if it was launched.
    fn target(&mut self, mut target: Target, count: u32) -> Result<()> {
        let samples = self
            .options
            .samples
            .unwrap_or_else(|| self.options.ladder.samples_within(BUDGET / count.max(1)));
        let measured = std::thread::scope(|scope| {
            // A thread of its own, because it raises its priority, and what is launched later must
            // not inherit that.
            let worker = scope.spawn(|| {
                keyframe_kernel::priority::raise_current_thread();
                self.epochs(&mut target, samples)
            });
            worker.join().unwrap_or(Err(Error::Panicked))
        });
        self.profile.notes.append(&mut target.notes);
        self.profile.ram_bytes = target.ram_bytes();
        let vcpus = target.vcpus;
        drop(target);
        let (epochs, complete) = measured?;
        self.profile.complete &= complete;
        self.profile.curves.push(Curve::new(vcpus, &epochs));
        Ok(())
    }

    /// All epochs; false where there would have been more.
    fn epochs(&self, target: &mut Target, samples: u32) -> Result<(Vec<Epoch>, bool)> {
        let lengths = self.options.ladder.lengths();
        let total = self.options.ladder.total() * samples;
        self.events.event(&Event::EpochsBegin { vcpus: target.vcpus, total });
        let mut meter = Meter::attach(target, self.events)?;
        let mut epochs = Vec::new();
        for length in (0..samples).flat_map(|_| lengths) {
            match meter.epoch(target, *length, &self.interrupted) {
                Ok(Step::Epoch(epoch)) => epochs.push(epoch),
                Ok(Step::Ended | Step::Interrupted) => {
                    meter.detach(target);
                    return Ok((epochs, false));
                }
                Err(failure) => {
                    meter.detach(target);
                    return Err(failure);
                }
            }
            self.events.event(&Event::EpochMeasured { length: *length });
        }
        meter.detach(target);
        Ok((epochs, true))
    }
}
