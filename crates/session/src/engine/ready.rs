//! When the session is ready, and what it tells then.

use super::{Engine, Event, Instant};
use crate::control::VmState;
use keyframe_locks::IgnorePoison;

impl Engine<'_> {
    /// Tells once that the session is ready.
    pub(super) fn tell_ready(&mut self) {
        let is_early = self.sealed == 0 && self.awaits_first_checkpoint();
        if self.ready_since.is_some() || is_early {
            return;
        }
        self.ready_since = Some(Instant::now());
        self.update_state();
        let status = self.status.lock().ignore_poison().clone();
        self.tell(&Event::Ready(Box::new(status)));
    }

    /// Whether the session takes a first checkpoint without being asked. If the user keeps the VM
    /// paused, the session takes none before the VM runs. A VM that waits for its disks will run.
    fn awaits_first_checkpoint(&self) -> bool {
        let is_to_run = self.machines.run() || self.machines.are_halted();
        self.options.recorded.is_some() || (self.cadence.is_some() && is_to_run)
    }

    /// Writes into the status whether the VM runs.
    pub(super) fn update_state(&self) {
        let state = match (self.is_blind, self.machines.run()) {
            (true, _) => VmState::Unknown,
            (_, true) => VmState::Running,
            (_, false) => VmState::of_standing(self.machines.standing()),
        };
        self.update(|status| status.state = state);
    }
}
