//! A VM whose disks no process serves, or whose guest's writes have no space.
//!
//! ```text
//!   served ──server ends──▶ started again at once: QEMU held the guest's requests for a moment
//!                └─ not started ──▶ the VM is paused ──▶ started later ──▶ the VM runs on
//! ```
//!
//! QEMU holds the requests for as long as it takes. A guest that ran meanwhile would give them up
//! after some seconds, and see errors. While QEMU waits for its disks it answers no monitor; the
//! processors stand still nevertheless. If the server ends while the engine pauses the VM, QEMU waits
//! within that pause, and ends it by itself once the disks are served.
//!
//! The writes to served disks go to the store. If its file system is full, QEMU stops the VM
//! (`io-error`) and keeps the write. The engine resumes the VM when there is space again. If a disk
//! that the user left out has no space, the user is to resume the VM, and the engine says so once.

use super::{Arc, Engine, Event, Instant};
use crate::control::{FailingCause, VmState};
use crate::event::{Step, tell_failed};
use keyframe_disk_capture::DiskError;
use std::time::Duration;

/// The time between two looks whether there is space again.
const LOOK_FOR_SPACE: Duration = Duration::from_secs(1);
/// The time after which a stop for want of space is another one.
const FORGET_STOP: Duration = Duration::from_secs(10);
/// The space with which a stopped VM is resumed, in bytes.
const SPACE_BYTES_MIN: u64 = 4 << 20;

impl Engine<'_> {
    /// Pauses the VMs while no process serves their disks, and lets them run on afterwards.
    pub(super) fn look_at_disks(&mut self) {
        let outage = self.machines.disks.as_ref().and_then(|disks| disks.outage());
        match outage {
            Some(why)
                if !self.waits_for_disks && (self.machines.run() || self.machines.stand_mute()) =>
            {
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

    /// Resumes VMs that QEMU has stopped for want of space, once the store has some again.
    pub(super) fn look_for_space(&mut self) {
        if let Some(disk) = self.machines.take_full_disk() {
            let error = Arc::new(DiskError::LeftOutFull(disk));
            self.update(|status| status.last_error = Some(error.to_string()));
            self.tell(&Event::StoppedByLeftOutDisk { error });
        }
        let is_stopped = self.machines.wait_for_space();
        let relieved =
            self.machines.storage().map(|(disks, mut vms)| disks.relieve(is_stopped, &mut vms));
        if relieved == Some(true) {
            // Once only: the image's own file system may be the full one.
            let resumed = self.machines.repeat_writes();
            tell_failed(&*self.options.events, Step::RepeatWrites, resumed);
        }
        let are_served = self.machines.disks.as_ref().is_some_and(|disks| disks.are_in_store());
        if !are_served || !self.machines.wait_for_space() {
            // A VM that stops again at once is resumed only after some time.
            self.space_looked_at = self.space_looked_at.filter(|at| at.elapsed() < FORGET_STOP);
            return;
        }
        if self.space_looked_at.is_none() {
            let text =
                "the store has no space for the guest's writes; the VM is stopped until it has";
            self.update(|status| {
                status.last_error = Some(text.into());
                status.failing = Some(FailingCause::StoreFull);
            });
            self.tell(&Event::StoppedForSpace { store: self.store.path().to_owned() });
        } else if self.space_looked_at.is_some_and(|at| at.elapsed() < LOOK_FOR_SPACE) {
            return;
        }
        self.space_looked_at = Some(Instant::now());
        if !self.has_space() {
            return;
        }
        let resumed = self.machines.repeat_writes();
        if resumed.is_ok() {
            self.tell(&Event::ResumedWithSpace);
            self.update(|status| {
                status.last_error = None;
                status.failing = None;
            });
        }
        tell_failed(&*self.options.events, Step::RepeatWrites, resumed);
    }

    /// Whether the store's file system has space for some writes.
    fn has_space(&self) -> bool {
        let Ok(folder) = self.store.local_folder() else { return false };
        rustix::fs::statvfs(&folder)
            .is_ok_and(|place| place.f_bavail.saturating_mul(place.f_frsize) >= SPACE_BYTES_MIN)
    }
}
