//! Changes of the machine since the run's begin: the command line of the next checkpoint follows
//! them, or the checkpoint is refused and the VM runs on.
//!
//! ```text
//!   pause ─▶ look: as expected ─▶ sealed
//!                 └ changed ─▶ line that makes it ─▶ captured once more, with that line
//!                            └ no such line ──────▶ refused; looked at again before the next pause
//! ```
//!
//! If RAM was plugged in or out, a disk was given another size or was unplugged, or a disk or medium has
//! direct I/O for the first time, a new run begins with a complete checkpoint, at once.
//!
//! The engine looks after the pause, so it also sees a device that was plugged in just before the
//! pause. QEMU's events tell the engine of a device that was unplugged and plugged in again.
//!
//! Limit: the engine does not see a change without an event that its user undoes between the pause
//! and the look, some milliseconds later. Such changes are another medium and a mounted shared
//! directory.

use super::{Arc, CaptureError, CheckpointError, Engine, Event, NotCaptured};
use keyframe_capture::BoxError;

impl Engine<'_> {
    /// Follows the changes of the machines. Begins a new run if one of them has direct I/O for the
    /// first time: then RAM has to be scanned in pauses. Also begins one if memory was unplugged and
    /// plugged in again, since the tracker does not see writes to the new RAM. Fails if that is not
    /// possible.
    pub(super) fn follow_machine(&mut self) -> Result<(), NotCaptured> {
        // Before anything is followed: if a VM does not answer, it is asked again.
        let has_new_direct_io = match self.has_new_direct_io() {
            Ok(has) => has,
            Err(error) => {
                return Err(self.failed(CheckpointError::LookAtMachine(error), 1, false).into());
            }
        };
        let has_other_memory = self.machines.members().iter().any(|m| m.vm.has_other_memory());
        self.follow_changes()?;
        if !has_new_direct_io && !has_other_memory {
            return Ok(());
        }
        self.begin_anew(false).map_err(|restart| {
            self.given_up = true;
            self.failed(CheckpointError::Disks(Box::new(restart)), 1, true).into()
        })
    }

    fn has_new_direct_io(&mut self) -> Result<bool, BoxError> {
        if !self.copying.strategies.miss_pinned_writes(&self.options)? {
            return Ok(false);
        }
        for member in self.machines.members_mut() {
            if member.vm.vm_mut().pins_ram()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes the description of the machines follow their changes. Fails if that is not possible.
    pub(super) fn follow_changes(&mut self) -> Result<(), NotCaptured> {
        let changes: Vec<_> = self.machines.changes();
        let vms = self.machines.members_mut().iter_mut().map(|member| &mut member.vm);
        match self.meta.follow(vms) {
            Ok(Ok(())) => {
                self.followed = Some(Arc::new(self.meta.clone()));
                if !changes.is_empty() {
                    self.tell(&Event::MachineFollowed { changes });
                }
                Ok(())
            }
            Ok(Err(findings)) => {
                Err(self.failed(CheckpointError::MachineChanged(findings), 1, false).into())
            }
            Err(error) => Err(self.failed(CheckpointError::LookAtMachine(error), 1, false).into()),
        }
    }

    /// Begins a new run if the preparation of the disks has failed with `error` because they have
    /// other sizes, or one was unplugged. Fails with `error` if it was not for that.
    pub(super) fn follow_disks(&mut self, error: BoxError) -> Result<(), NotCaptured> {
        let has_other_disks =
            self.machines.storage().is_some_and(|(disks, _)| disks.takes_new_run());
        if !has_other_disks {
            return Err(self.failed(CheckpointError::Disks(error), 1, false).into());
        }
        // A restore has to make the machine without the disk.
        self.follow_changes()?;
        self.begin_anew(true).map_err(|restart| {
            self.given_up = true;
            self.failed(CheckpointError::Disks(Box::new(restart)), 1, true).into()
        })
    }

    /// Begins a new run because RAM was plugged in or out.
    pub(super) fn follow_ram(&mut self) -> Result<(), NotCaptured> {
        self.begin_anew(false).map_err(|restart| {
            self.given_up = true;
            let (capture, restart) = (CaptureError::OtherRam, Box::new(restart));
            self.failed(CheckpointError::NoNewRun { capture, restart }, 1, true).into()
        })
    }
}
