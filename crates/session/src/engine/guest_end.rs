//! The last checkpoint of a guest that has ended or failed.
//!
//! ```text
//!   SHUTDOWN, GUEST_PANICKED, WATCHDOG ─▶ QEMU stands still ─▶ checkpoint, tagged ─▶ sealed ─▶ QEMU ends, or
//!                                                                                     what its user wants
//! ```
//!
//! The VMM is kept until the checkpoint is sealed: its disks may be read until then. A checkpoint
//! that fails, or takes too long, does not keep the VMM from its end.

use super::{CheckpointReason, Engine, Event, Ordering, Taker, channel};
use crate::event::{Step, tell_failed};
use keyframe_vmm::GuestEnd;

/// The tag of a last checkpoint, without the VM's name.
const fn word(end: GuestEnd) -> &'static str {
    match end {
        GuestEnd::PoweredOff => "powered-off",
        GuestEnd::Reset => "reset",
        GuestEnd::Panicked => "panicked",
        GuestEnd::WatchdogExpired => "watchdog",
    }
}

/// The tag of the last checkpoint of `vm`.
fn tag(vm: &str, end: GuestEnd) -> String {
    let tag = format!("{vm}-{}", word(end));
    // A tag has fewer letters than a name.
    if keyframe_store::check_tag(&tag).is_ok() { tag } else { word(end).into() }
}

impl Engine<'_> {
    /// Takes the last checkpoint of a guest that has just ended or failed, and has its VMM end if
    /// it is to. Returns false if there is no such guest.
    pub(super) fn capture_guest_end(&mut self) -> bool {
        let Some((vm, end)) = self.machines.newly_ended() else { return false };
        let tag = tag(&vm, end);
        let sealed = if self.given_up { None } else { self.capture_tagged(&tag) };
        let finished = self.machines.finish_ends();
        tell_failed(&*self.options.events, Step::FinishGuestEnd, finished);
        let last = sealed.map(|id| (id, tag));
        self.tell(&Event::GuestEnded { vm, end, last });
        true
    }

    /// Takes a checkpoint with this tag and waits until it is sealed. An event tells a failure.
    fn capture_tagged(&mut self, tag: &str) -> Option<keyframe_store::CheckpointId> {
        let interrupted = std::sync::Arc::clone(&self.interrupted);
        let is_interrupted = || interrupted.load(Ordering::Relaxed);
        let idle = |engine: &mut Self| {
            (engine.copying.cycle.in_flight() == 0 || is_interrupted()).then_some(())
        };
        self.handle_reports_until(idle).ok()?;
        let seq = self.capture(CheckpointReason::GuestEnd, Some(tag), None).ok()?;
        let (sender, sealed) = channel();
        self.takers.insert(seq, Taker::Engine(sender));
        let outcome = self.handle_reports_until(|_| match sealed.try_recv() {
            Ok(outcome) => Some(outcome.ok()),
            Err(std::sync::mpsc::TryRecvError::Disconnected) => Some(None),
            Err(std::sync::mpsc::TryRecvError::Empty) => is_interrupted().then_some(None),
        });
        outcome.ok().flatten()
    }
}
