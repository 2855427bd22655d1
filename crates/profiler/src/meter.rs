//! Measures epochs on an attached VM, one at a time.

use super::counters::Counters;
use super::target::Target;
use crate::error::Result;
use crate::event::{EventSink, ProfilerEvent};
use keyframe_kernel::attach::{inject_userfaultfd, inject_userfaultfd_unfiltered};
use keyframe_kernel::write_tracker::WriteTracker;
use keyframe_profile::MeasuredEpoch;
use keyframe_units::duration_ns;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest time from Ctrl-C to the end of an epoch.
const SLICE: Duration = Duration::from_millis(50);
/// The longest time from the loss of QEMU's memory or monitor to the end of its process.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// The outcome of one measured epoch.
pub enum EpochOutcome {
    /// It was measured.
    Epoch(MeasuredEpoch),
    /// The VM ended in it.
    Ended,
    /// The user pressed Ctrl-C.
    Interrupted,
}

/// Begins to track the RAM of `target`.
fn track(
    target: &Target,
    events: &dyn EventSink<ProfilerEvent>,
) -> Result<WriteTracker, keyframe_kernel::Error> {
    let attached = if target.traps_unknown_calls {
        inject_userfaultfd_unfiltered(&target.process)?
    } else {
        inject_userfaultfd(&target.process)?
    };
    if !attached.guarded {
        events.event(&ProfilerEvent::UnguardedAttach { qemu_pid: target.process.pid() });
    }
    let mut tracker = WriteTracker::new(&target.process, attached.uffd)?;
    tracker.set_watch_discards(target.watch_discards);
    for range in &target.ranges {
        tracker.register(*range)?;
    }
    Ok(tracker)
}

/// The tracking of one VM's RAM, and its counters.
pub struct Meter {
    tracker: WriteTracker,
    counters: Counters,
}

impl Meter {
    /// Begins to track writes to RAM. Until [`Self::detach`] the VM takes a page fault for the
    /// first write to each page in each epoch. Notes about missing counts go to `events`. Error:
    /// the kernel cannot track the VM's RAM.
    pub fn attach(target: &mut Target, events: &dyn EventSink<ProfilerEvent>) -> Result<Self> {
        let tracker = match track(target, events) {
            Err(keyframe_kernel::Error::DiscardsUnseen { .. }) => {
                target.watch_discards = false;
                target.notes.push(
                    "RAM: pages that the VM discards (balloon) are not counted in this kind of memory".into(),
                );
                track(target, events)
            }
            tracked => tracked,
        };
        let tracker = tracker?;
        let counters = Counters::new(target);
        Ok(Self { tracker, counters })
    }

    /// Ends the tracking and removes the counters from QEMU.
    pub fn detach(self, target: &mut Target) {
        self.counters.remove(target);
    }

    /// Measures one epoch of `length`, or until `interrupted` is set. Returns
    /// [`EpochOutcome::Ended`] if the VM has ended. Errors: the tracking failed; the monitor does
    /// not answer.
    pub fn epoch(
        &mut self,
        target: &mut Target,
        length: Duration,
        interrupted: &AtomicBool,
    ) -> Result<EpochOutcome> {
        if target.has_ended()? {
            return Ok(EpochOutcome::Ended);
        }
        match self.try_epoch(target, length, interrupted) {
            Err(_) if target.ends_within(EXIT_TIMEOUT) => Ok(EpochOutcome::Ended),
            other => other,
        }
    }

    /// Measures one epoch. Asks QEMU about disks before the first scan and after the second one,
    /// because an answer takes a millisecond. Counts packets at the scans, without QEMU.
    fn try_epoch(
        &mut self,
        target: &mut Target,
        length: Duration,
        interrupted: &AtomicBool,
    ) -> Result<EpochOutcome> {
        let disks = self.counters.disks(target)?;
        self.scan(target)?;
        let begun = Instant::now();
        let packets = self.counters.packets(target);
        if !sleep_until(begun + length, interrupted) {
            return Ok(EpochOutcome::Interrupted);
        }
        let measured = begun.elapsed();
        let pages = self.scan(target)?;
        let packets_after = self.counters.packets(target);
        let disks_after = self.counters.disks(target)?;
        let grown = |before: Option<u64>, after: Option<u64>| after?.checked_sub(before?);
        Ok(EpochOutcome::Epoch(MeasuredEpoch {
            length,
            measured_ns: duration_ns(measured),
            pages,
            sectors: grown(disks.map(|d| d.sectors), disks_after.map(|d| d.sectors)),
            disk_writes: grown(disks.map(|d| d.writes), disks_after.map(|d| d.writes)),
            packets: grown(packets, packets_after),
        }))
    }

    /// Returns the number of pages written since the last scan, and protects them again.
    fn scan(&mut self, target: &Target) -> Result<u64> {
        let mut pages = 0;
        let mut found = Vec::new();
        for range in &target.ranges {
            found.clear();
            let stats = self.tracker.scan_and_protect(*range, &mut found)?;
            pages += stats.written_pages;
        }
        Ok(pages)
    }
}

/// Sleeps until `deadline`. Returns false if `interrupted` is set before.
fn sleep_until(deadline: Instant, interrupted: &AtomicBool) -> bool {
    while !interrupted.load(Ordering::Relaxed) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(SLICE));
    }
    false
}
