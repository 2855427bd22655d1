//! A VM whose disks no process serves.
//!
//! ```text
//!   served ──server ends──▶ started again at once: QEMU held the guest's requests for a moment
//!                └─ not started ──▶ the VM is paused ──▶ started later ──▶ the VM runs on
//! ```
//!
//! QEMU holds the requests for as long as it takes. A guest that ran meanwhile would give them up
//! after some seconds, and see errors. While QEMU waits for its disks it answers no monitor; the
//! processors stand still nevertheless.

use super::{Engine, Event, VmState};

impl Engine<'_> {
    /// Pauses the VMs while no process serves their disks, and lets them run on afterwards.
    pub(super) fn look_at_disks(&mut self) {
        let outage = self.machines.disks.as_ref().and_then(|disks| disks.outage());
        match outage {
            Some(why) if !self.waits_for_disks && self.machines.run() => {
                self.waits_for_disks = true;
                let text = format!("{why}; the VM is paused until its disks are served again");
                // First: QEMU may answer late.
                self.update(|status| {
                    status.state = VmState::Paused;
                    status.last_error = Some(text);
                });
                self.tell(&Event::PausedForDisks);
                self.machines.suspend();
            }
            None if self.waits_for_disks => {
                self.waits_for_disks = false;
                self.machines.go_on();
                self.tell(&Event::ResumedWithDisks);
            }
            _ => {}
        }
    }
}
