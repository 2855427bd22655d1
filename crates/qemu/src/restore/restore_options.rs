//! What the caller of a restore chooses.

use super::Lineage;
use crate::DiskServer;
use keyframe_machine::Accelerator;
use std::path::PathBuf;

/// The options of a restore.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    /// A binary other than the checkpoint's; `None` for the checkpoint's.
    pub qemu: Option<PathBuf>,
    /// True to accept a binary of a later series than the checkpoint's, if it knows the machine
    /// type. A replay never accepts it.
    pub accepts_later: bool,
    /// True to leave the VM paused at the instant of the checkpoint.
    pub paused: bool,
    /// The restored QEMU replays a recording, first up to this stop. `None` for no replay. QEMU
    /// learns the stop before it loads its devices, because a replay that waits at its
    /// checkpoint could already consume events of the log that come after it.
    pub replays: Option<ReplayStart>,
    /// Makes QEMU count instructions, each of which takes two to this power nanoseconds of guest
    /// time (`-icount shift=N`). Under TCG only. `None` adds no such option.
    pub icount_shift: Option<u32>,
    /// An accelerator other than the command line's, for which the device state is converted.
    /// `None` for that of the command line.
    pub accelerator: Option<Accelerator>,
    /// The server of the disks that the guest can write to; `None` if there is none.
    pub disks: Option<DiskServer>,
    /// The checkpoint's identity, for the VM's next engine ([`crate::Vm::lineage`]). `None` leaves
    /// it out.
    pub lineage: Option<Lineage>,
    /// The path at which QEMU makes the socket of one more monitor. `None` for no further monitor.
    pub monitor: Option<PathBuf>,
    /// The file to which QEMU's standard error is appended. `None` for this process's standard
    /// error.
    pub log: Option<PathBuf>,
    /// Arguments that come after all others and do not change the machine, such as those of a
    /// packet gate.
    pub added: Vec<String>,
    /// A function that is called in the calling thread as soon as QEMU is started. A caller that
    /// needs its rights only for the start gives them up there. `None` for no call.
    pub spawned: Option<fn()>,
    /// True for a restore by [`super::start_lazy`].
    pub lazy: bool,
    /// The purpose of the restore.
    pub purpose: RestorePurpose,
}

/// The purpose of a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestorePurpose {
    /// The VM runs here.
    #[default]
    Run,
    /// The plan only shows that another host could restore the VM: this host's files, ports and
    /// interfaces do not count.
    OtherHost,
    /// The VM never runs. RAM is loaded only as far as the devices need it while they are loaded,
    /// and this host's files, ports and interfaces do not count.
    Rehearsal,
}

/// The beginning of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayStart {
    /// Its first stop.
    pub until: Until,
    /// True if the main loop may run late for a network up to there.
    pub network_may_be_late: bool,
}

/// A stop of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The replay pauses before this instruction.
    Instruction(u64),
    /// The replay ends with its log.
    LogEnd,
}
