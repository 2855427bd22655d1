//! The trait of a running VM.

use crate::{
    Ability, AuditFinding, Capabilities, Lineage, Resumer, RollbackTarget, Succession, TellStep,
    Unsupported, VmmError, VmmErrorKind,
};
use keyframe_machine::{HostBlock, MachineSpec, VmmKind};
use keyframe_units::{PageIndex, RamLayout};
use std::any::Any;
use std::fmt;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// The way in which Keyframe came to control a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmOrigin {
    /// Keyframe started it.
    Launched,
    /// Keyframe started it from a checkpoint.
    Restored,
    /// Another program started it, and Keyframe attached to it.
    Attached,
}

/// The run state of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// The virtual CPUs run.
    Running,
    /// The virtual CPUs are stopped, and can run again.
    Paused,
    /// The guest has shut down; the VMM is still there.
    ShutDown,
    /// Another state, by the VMM's own name for it.
    Other(String),
}

/// An event that the engine reacts to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmEvent {
    /// The virtual CPUs were stopped.
    Paused,
    /// The virtual CPUs were resumed.
    Resumed,
    /// The VMM was asked to end.
    ShutDown,
    /// The guest has ended in this way, and so does the VMM, unless it stands still then
    /// ([`Vmm::hold_end`]).
    GuestEnded(GuestEnd),
    /// The virtual CPUs were stopped because there was no space for a write of the guest. The write
    /// is repeated when the VM is resumed.
    DiskFull,
    /// The virtual CPUs were stopped because there was no space for a write to the disk of this
    /// name, which the user left out of checkpoints.
    LeftOutDiskFull(String),
    /// The guest has failed in this way. Later events say whether the VMM ends.
    GuestFailed(GuestEnd),
}

/// How a guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEnd {
    /// It was powered off.
    PoweredOff,
    /// It was reset, and its VMM ends at a reset.
    Reset,
    /// Its kernel panicked and reported it.
    Panicked,
    /// Its watchdog expired.
    WatchdogExpired,
}

/// The VM's state before [`Vmm::stop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopOutcome {
    /// The VM ran, and this call stopped it.
    Stopped,
    /// Another client had paused it. That client must resume it.
    AlreadyPaused,
}

/// An operation on the VM that another client of the VMM has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignOperation {
    /// The VM is migrated to another host.
    Migration,
    /// Its RAM is dumped to a file.
    Dump,
}

/// A VM that one command of its VMM holds, and its device state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPause {
    /// Whether the VM ran before the pause.
    pub stop: StopOutcome,
    /// The state of all devices, in the VMM's own format. Empty if the VMM has saved them and writes
    /// them at the end of the pause; [`Vmm::complete_device_state`] gives them then.
    pub device_state: Vec<u8>,
}

/// The way in which a VMM's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmExit {
    /// The process ended with this status; it was Keyframe's child.
    Status(ExitStatus),
    /// Another program started the process, and only its parent learns the status.
    Unknown,
}

impl VmExit {
    /// Returns false if the process is known to have failed.
    pub fn success(&self) -> bool {
        self.status().success()
    }

    /// Returns the exit status; success if the status is unknown.
    pub fn status(&self) -> ExitStatus {
        match self {
            Self::Status(status) => *status,
            Self::Unknown => ExitStatus::default(),
        }
    }
}

impl fmt::Display for VmExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => status.fmt(f),
            Self::Unknown => f.write_str("a status that only its parent knows"),
        }
    }
}

/// A raw file that a VMM has opened for its guest to write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WritableDrive {
    /// The name of the drive.
    pub name: String,
    /// The absolute path of the file on this host.
    pub path: PathBuf,
    /// Its size in bytes, in whole sectors.
    pub disk_bytes: u64,
    /// Device and inode of the file.
    pub identity: (u64, u64),
    /// True if the VMM names the file by another path, because it has another root directory.
    pub is_in_jail: bool,
}

/// A running VM under the control of its VMM.
///
/// Dropping the value leaves the guest running; only [`Vmm::end`] ends it.
pub trait Vmm: Send {
    /// Returns the process id of the VMM.
    fn pid(&self) -> u32;

    /// Returns the way in which Keyframe came to control the VM.
    fn origin(&self) -> VmOrigin;

    /// Returns the kind of VMM.
    fn kind(&self) -> VmmKind {
        self.capabilities().vmm()
    }

    /// Returns the abilities of this VM.
    fn capabilities(&self) -> Capabilities;

    /// Returns the machine as it is now, with devices and memory that were plugged in since its
    /// start. Error: the VMM refuses or does not answer.
    fn spec(&mut self) -> Result<MachineSpec, VmmError>;

    /// Returns the checkpoint that the VM was restored from; `None` if it was not restored.
    fn lineage(&self) -> Option<Lineage>;

    /// Returns everything about the machine that prevents exact checkpoints, or may do so. Error:
    /// the VMM refuses or does not answer.
    fn audit(&mut self) -> Result<Vec<AuditFinding>, VmmError>;

    /// Returns the files that the guest can only read, which [`Vmm::spec`] does not describe: the
    /// name of each drive, and its path. Error: the VMM refuses or does not answer.
    fn read_only_media(&mut self) -> Result<Vec<(String, PathBuf)>, VmmError> {
        Ok(Vec::new())
    }

    /// Returns the files to which the guest can write and which the VMM itself opens. [`Vmm::spec`]
    /// does not describe them. Error: the VMM refuses or does not answer; a file cannot be looked
    /// at.
    fn writable_drives(&mut self) -> Result<Vec<WritableDrive>, VmmError> {
        Ok(Vec::new())
    }

    /// Makes the VMM open the files of `drives`, which are of [`Vmm::writable_drives`], anew, unseen
    /// by the guest. Error: the VMM has none; it does not open one anew, and has the former file.
    fn reopen_drives(&mut self, drives: &[WritableDrive]) -> Result<(), VmmError> {
        let lacks = || format!("{} opens no drives anew", self.kind());
        if drives.is_empty() {
            Ok(())
        } else {
            Err(VmmError::new(VmmErrorKind::Unsupported, lacks(), None))
        }
    }

    /// Returns the RAM blocks with their addresses in the VMM's process, in page order. Error: the
    /// VMM refuses or does not answer.
    fn ram_blocks(&mut self) -> Result<Vec<HostBlock>, VmmError>;

    /// Returns the RAM blocks with their present sizes, in the order of [`Vmm::ram_blocks`]. Error:
    /// the VMM refuses or does not answer.
    fn ram_layout(&mut self) -> Result<RamLayout, VmmError>;

    /// Returns whether a device can discard guest RAM (balloon, virtio-mem). Discarded pages become
    /// zero without a write. Error: the VMM refuses or does not answer.
    fn discards_ram(&mut self) -> Result<bool, VmmError>;

    /// Returns whether the kernel writes into pinned pages of guest RAM while the VM runs, as it does
    /// for disks with direct I/O. Error: the VMM refuses or does not answer.
    fn pins_ram(&mut self) -> Result<bool, VmmError> {
        Ok(false)
    }

    /// Returns true if the VMM's seccomp filter ends or traps its threads for a system call that
    /// the VMM itself never makes. Keyframe attaches to such a VMM only while the filter is
    /// suspended.
    fn traps_unknown_calls(&self) -> bool {
        false
    }

    /// Returns the results of [`Vmm::ram_layout`] and [`Vmm::discards_ram`], in one request if the
    /// VMM allows that. Error: the VMM refuses or does not answer.
    fn ram_layout_and_discards(&mut self) -> Result<(RamLayout, bool), VmmError> {
        Ok((self.ram_layout()?, self.discards_ram()?))
    }

    /// Returns whether the virtual CPUs run. Error: the VMM refuses or does not answer.
    fn run_state(&mut self) -> Result<RunState, VmmError>;

    /// Returns the events since the last call, oldest first. Does not wait. Error: the VMM refuses
    /// or does not answer.
    fn drain_events(&mut self) -> Result<Vec<VmEvent>, VmmError>;

    /// Stops the virtual CPUs. Returns whether the VM ran before. Error: the VMM refuses or does
    /// not answer; the VM may be stopped or about to stop.
    ///
    /// Use [`WatchedVm::hold`](crate::WatchedVm::hold) instead: it guards the pause.
    fn stop(&mut self) -> Result<StopOutcome, VmmError>;

    /// Notes in the VMM that the engine has paused the VM for a moment, or that this pause has ended.
    /// The note outlives this process: if it and its watchdog die in the pause, the next engine
    /// finds the note and resumes the VM.
    fn note_pause(&mut self, begins: bool) {
        let _ = begins;
    }

    /// Resumes the virtual CPUs. Does nothing if they run. Error: the VMM refuses or does not
    /// answer.
    fn resume(&mut self) -> Result<(), VmmError>;

    /// Resumes the virtual CPUs after [`Vmm::stop`], if the VM is in the state in which that call
    /// left it. Otherwise it leaves the VM alone: another client has migrated it away, for example.
    /// Error: the VMM refuses or does not answer.
    fn resume_after_stop(&mut self) -> Result<(), VmmError> {
        self.resume()
    }

    /// Returns the operation of another client that [`Vmm::stop`] and [`Vmm::resume`] would
    /// disturb; `None` if there is none. Error: the VMM refuses or does not answer.
    fn foreign_operation(&mut self) -> Result<Option<ForeignOperation>, VmmError> {
        Ok(None)
    }

    /// Pauses the VM and saves its devices by one command. At the end of the command the VMM
    /// resumes the VM, if it ran before. Commands of other clients are carried out after the pause.
    /// [`Vmm::end_saved_pause`] ends the command, and so does the end of this process.
    ///
    /// Returns `None` if this is not possible; the VM is then as it was. Error: the VMM refuses or
    /// does not answer; the command may still be under way, and the VMM ends it by itself.
    ///
    /// Use [`WatchedVm::hold`](crate::WatchedVm::hold) instead: it guards the pause.
    fn pause_and_save(&mut self) -> Result<Option<SavedPause>, VmmError> {
        Ok(None)
    }

    /// Ends the pause of [`Vmm::pause_and_save`], and waits until the VMM has resumed the VM.
    /// Error: the VMM refuses or does not answer.
    fn end_saved_pause(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Resumes the virtual CPUs in another way, after [`Vmm::resume`] failed: for example over a
    /// new connection to the monitor. The default does nothing.
    fn resume_by_new_connection(&mut self) {}

    /// Returns true if another client resumed the VM between the last [`Vmm::stop`] and the
    /// [`Vmm::resume`] after it, or until now if there was none. After [`Vmm::pause_and_save`],
    /// returns true if the VM ran before [`Vmm::end_saved_pause`].
    ///
    /// Error: the VMM refuses or does not answer.
    fn ran_meanwhile(&mut self) -> Result<bool, VmmError>;

    /// Returns the state of all devices, in the VMM's own format. The VM must be paused. Error: the
    /// VMM refuses or does not answer.
    fn save_devices(&mut self) -> Result<Vec<u8>, VmmError>;

    /// Adds to `device_state`, which was saved in the last pause, the state that the VMM does not
    /// save itself, or has written at the end of the pause. The caller calls this after the pause.
    /// The length of `device_state` does not change, unless it was empty. Error: a part of this
    /// state is not known; the other parts are added.
    fn complete_device_state(&mut self, device_state: &mut Vec<u8>) -> Result<(), VmmError> {
        let _ = device_state;
        Ok(())
    }

    /// Returns the instructions with which another process can resume the VM. Error: a descriptor
    /// cannot be copied.
    fn resumer(&self) -> Result<Resumer, VmmError>;

    /// Checks that the VM can be rolled back to a checkpoint with `device_state` now: no operation
    /// of the VM's user is in the way. Changes nothing. Error: the reason why it cannot.
    fn check_rollback(&mut self, device_state: &[u8]) -> Result<(), VmmError> {
        let _ = device_state;
        Ok(self.capabilities().require(Ability::Rollback)?)
    }

    /// Returns true if the VM of a checkpoint with `device_state` stood still although no client had
    /// paused it. A VM that is put back to the checkpoint stands still in the same run state.
    fn stands_in(&self, device_state: &[u8]) -> bool {
        let _ = device_state;
        false
    }

    /// Returns the pages of a RAM with the blocks `layout` that [`Vmm::roll_back`] may overwrite before it loads
    /// the devices, because the VMM resets the machine first: for example those of a kernel that the
    /// VMM puts into RAM. They are in ascending order. A device may read its queues as it is loaded, so
    /// [`RollbackTarget::pages`] must hold all of them. The default returns none.
    ///
    /// Error: the VMM does not answer, or its answer is not understood.
    fn reset_pages(&mut self, layout: &RamLayout) -> Result<Vec<PageIndex>, VmmError> {
        let _ = layout;
        Ok(Vec::new())
    }

    /// Puts the paused VM back to `target`; it stays paused. `scratch` is an empty file that may
    /// grow as large as the pages. It calls `tell` before each step that another process must know
    /// of to end the rollback if this one dies.
    ///
    /// Error: the VMM refuses, or RAM cannot be read or written. The VM is then in an unknown
    /// state: it must not run before another rollback succeeds.
    fn roll_back(
        &mut self,
        target: &RollbackTarget<'_>,
        scratch: File,
        tell: TellStep<'_>,
    ) -> Result<(), VmmError> {
        let _ = (target, scratch, tell);
        Err(Unsupported {
            vmm: self.kind(),
            ability: Ability::Rollback,
            reason: "its VMM cannot load a state into a running process".into(),
            fix: "end the VM and restore the checkpoint: keyframe restore".into(),
        }
        .into())
    }

    /// Returns the place of this VM, for a rollback by a successor ([`Succession`]). `None` if the VMM
    /// puts a running VM back in the same process ([`Vmm::roll_back`]). Error: no other process can
    /// take the VM's place.
    fn succession(&mut self) -> Result<Option<Box<dyn Succession>>, VmmError> {
        Ok(None)
    }

    /// Returns how the VMM ended, or `None` if it still runs. Does not wait. Error: the kernel does
    /// not tell.
    fn exit(&mut self) -> Result<Option<VmExit>, VmmError>;

    /// Waits at most `timeout` for the VMM's end. Returns how it ended; `None` if it still runs.
    /// Error: the kernel does not tell.
    fn wait_exit(&mut self, timeout: Duration) -> Result<Option<VmExit>, VmmError>;

    /// Waits for the VMM's end after [`VmEvent::ShutDown`], and ends a VMM that hangs in its own
    /// shutdown. Returns `None` if the VMM stays although the guest has shut down. Error: the VMM
    /// does not end, even by force.
    fn finish_shutdown(&mut self) -> Result<Option<VmExit>, VmmError>;

    /// Makes the VMM stand still when the guest ends, so that a last checkpoint can be taken, until
    /// [`Vmm::end`] or [`Vmm::release_end`]. If this process dies, the watchdog of its pauses
    /// undoes it. Returns false if the VMM does not end with its guest, or cannot stand still.
    /// Error: the VMM does not answer.
    fn hold_end(&mut self) -> Result<bool, VmmError> {
        Ok(false)
    }

    /// Undoes [`Vmm::hold_end`]. If the guest has ended in between, the VMM ends now. Error: the
    /// VMM does not answer.
    fn release_end(&mut self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Ends the VMM: on request, or by force if Keyframe started it. Does nothing if it has ended.
    /// Error: the VMM does not end, even by force.
    fn end(&mut self) -> Result<(), VmmError>;

    /// Leaves the guest running together with everything that it needs from this process. Returns
    /// the VMM's process id.
    fn leave_running(self: Box<Self>) -> u32;

    /// Returns the socket of the monitor that users may connect to; `None` if there is none.
    fn monitor_socket(&self) -> Option<PathBuf> {
        None
    }

    /// Returns a copy of the connection to the VMM's monitor, which tests break; `None` if there is
    /// none.
    fn monitor_connection(&self) -> Option<OwnedFd> {
        None
    }

    /// Returns the VM as its driver's own type, for abilities of one VMM only (recording, for
    /// example).
    fn as_any_mut(&mut self) -> &mut dyn Any;
}
