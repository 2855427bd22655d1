//! The events of a running session. They have typed fields; the program that runs the session turns
//! them into text for its user.

use crate::control::EngineStatus;
use crate::error::CheckpointFailure;
use crate::memory_guard::MemoryShortage;
use keyframe_capture::BoxError;
use keyframe_disk_capture::{DiskEvent, DiskStep, SharedDiskEventSink};
use keyframe_inspect::entry::Entry;
use keyframe_qemu::{AuditFinding, MachineChange};
use keyframe_scheduling::TuningReason;
use keyframe_store::{CheckpointId, Durability, TornCheckpoint};
use keyframe_units::PageIndex;
pub use keyframe_units::{EventSink, NoEvents};
use keyframe_vm_disks::overlay_directory::LeftOverlay;
use keyframe_vmm::{GuestEnd, VmmKind};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

/// An error in an event, which can be kept and sent to other threads.
pub type SharedError = Arc<dyn std::error::Error + Send + Sync>;

/// The sink of a session's events, which its threads share.
pub type SharedEventSink = keyframe_units::SharedEventSink<Event>;

/// An event of a session.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// Checkpoints begin.
    Started(SessionStart),
    /// The session is ready: its VMs run, or their user keeps them paused; the control socket
    /// answers; and the first checkpoint is sealed, unless none is due before a user asks for one.
    /// The event occurs once, with the status of the engine.
    Ready(Box<EngineStatus>),
    /// How far the store may grow.
    StoreGrows {
        /// The store.
        store: PathBuf,
        /// The number of bytes that its medium has free; `None` if the medium does not tell.
        free_bytes: Option<u64>,
        /// The time for which the run's checkpoints are kept; `None` if they are kept for good.
        keep_within: Option<Duration>,
    },
    /// The store's medium will be full before long, if its space goes on to shrink as fast.
    SpaceShrinks {
        /// The store.
        store: PathBuf,
        /// The number of bytes that its medium has free.
        free_bytes: u64,
        /// The time for which they last.
        lasts: Duration,
    },
    /// A checkpoint was sealed.
    Sealed(Box<Entry>),
    /// A checkpoint began late, because the one before was still being encoded.
    Late {
        /// The checkpoint.
        id: u64,
        /// The delay with which it began, in nanoseconds.
        backlog_ns: u64,
    },
    /// A second VMM has loaded the first checkpoint, so it accepts its machine and its devices.
    Rehearsed {
        /// The VMM.
        vmm: VmmKind,
        /// The time that it took, in nanoseconds.
        took_ns: u64,
    },
    /// The restore of the first checkpoint was not rehearsed.
    NotRehearsed {
        /// The reason.
        reason: String,
    },
    /// The rehearsal failed, but perhaps for a reason of this host. Checkpoints go on.
    RehearsalFailed {
        /// The reason.
        error: SharedError,
    },
    /// Checkpoints failed. The event is not repeated while the failure stays the same.
    Failed {
        /// The reason, and the number of checkpoints.
        failure: CheckpointFailure,
        /// The number of pages that the next checkpoint has to copy.
        owed_pages: u64,
    },
    /// A budget changed the interval.
    IntervalTuned {
        /// The new interval in nanoseconds.
        interval_ns: u64,
        /// The reason why it changed.
        why: TuningReason,
    },
    /// Memory is short, so checkpoints use less of it, and may take longer. The event occurs once.
    MemoryShort(MemoryShortage),
    /// RAM was plugged or unplugged, or a disk was given another size: a new run has begun.
    NewRun,
    /// The checkpoint server had given the run's place away; the run has another one, and begins
    /// anew.
    PlaceRegained,
    /// The machine was changed, and the next checkpoint's command line makes the changed one.
    MachineFollowed {
        /// The changes.
        changes: Vec<MachineChange>,
    },
    /// A helper process has ended without an order, and was started again.
    HelperRestarted {
        /// The kind of the helper process.
        helper: Helper,
        /// The process id of the new process.
        pid: u32,
    },
    /// A helper process has ended without an order, and could not be started again. It is tried
    /// again. The event is not repeated while the failure stays the same.
    HelperNotRestarted {
        /// The kind of the helper process.
        helper: Helper,
        /// The reason.
        error: SharedError,
    },
    /// The VM stood in a pause of an engine that had died together with its watchdog. The VM runs
    /// again.
    LeftPauseEnded,
    /// No process serves the disks, so the VM was paused: its requests would wait for so long that
    /// the guest gives them up.
    PausedForDisks,
    /// The disks are served again, and the VM runs on.
    ResumedWithDisks,
    /// QEMU has stopped the VM: the store, to which its guest's writes go, has no space.
    StoppedForSpace {
        /// The store.
        store: PathBuf,
    },
    /// There is space again, and the VM runs on.
    ResumedWithSpace,
    /// QEMU has stopped the VM: a disk that its user left out has no space.
    StoppedByLeftOutDisk {
        /// The disk, and what to do.
        error: SharedError,
    },
    /// A member of a group has ended, so no more checkpoints of the group are taken.
    MemberLost {
        /// The member.
        vm: String,
    },
    /// A guest has ended or failed.
    GuestEnded {
        /// Its VM.
        vm: String,
        /// How.
        end: GuestEnd,
        /// The last checkpoint and its tag; `None` if it failed.
        last: Option<(CheckpointId, String)>,
    },
    /// QEMU has lost parts of a recording's log: the recording ends there, and the VM runs on.
    LogLost,
    /// A recording ends without a checkpoint at its end.
    NoFinalCheckpoint {
        /// The reason.
        error: SharedError,
    },
    /// A checkpoint differs from the copy of RAM that `--audit` made in its pause.
    AuditDiffers {
        /// The checkpoint.
        id: u64,
        /// The number of pages that differ.
        pages: u64,
        /// The first page that differs.
        first: PageIndex,
    },
    /// A checkpoint could not be compared with its copy.
    AuditFailed {
        /// The checkpoint.
        id: u64,
        /// The reason.
        error: SharedError,
    },
    /// The VM was rolled back to a checkpoint.
    RolledBack {
        /// The VM.
        vm: String,
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// True if no checkpoint of the former state was kept.
        fast: bool,
    },
    /// A step failed without which the session goes on.
    StepFailed {
        /// The step.
        step: Step,
        /// The reason.
        error: SharedError,
    },
    /// The audit of the VM has a finding that does not prevent checkpoints.
    AuditWarning(AuditFinding),
    /// QEMU is started by a script that adds options.
    HiddenOptions {
        /// The script and its options.
        error: Arc<keyframe_qemu::Error>,
    },
    /// An earlier VM's writes to an image lie in an overlay that this run does not use.
    LeftoverOverlay(LeftOverlay),
    /// Power loss destroyed a checkpoint that was not durable; it was moved to quarantine.
    TornCheckpoint {
        /// The checkpoint and its damage.
        torn: TornCheckpoint,
        /// The directory that it was moved to.
        quarantine: PathBuf,
    },
    /// A sync has failed: the next power loss may destroy checkpoints.
    SyncFailed {
        /// The first checkpoint in doubt.
        from: CheckpointId,
    },
    /// The store cannot give the durability that was asked for, and gives a stronger one.
    DurabilityIgnored {
        /// The requested durability.
        asked: Durability,
        /// True if the store is on another host, or in object storage.
        is_remote: bool,
    },
    /// The VMM would not have survived this process's death while its memory was attached to.
    UnguardedAttach {
        /// QEMU's process.
        qemu_pid: u32,
    },
    /// A network link of a group's member leads outside the group, so checkpoints do not hold its
    /// packets.
    LooseLink {
        /// The member.
        vm: String,
        /// The option of QEMU's command line.
        option: String,
    },
    /// An option of a group's member keeps packets that no checkpoint holds.
    PacketBuffer {
        /// The member.
        vm: String,
        /// The option of QEMU's command line.
        option: String,
    },
    /// QEMU reads the media of a recorded guest itself.
    MediaNotServed {
        /// The reason why Keyframe does not serve them.
        error: SharedError,
    },
    /// A recording changes QEMU's command line.
    RecordingNote(String),
    /// The process keeps more rights than it needs.
    RightsKept {
        /// The reason why they could not be given up.
        error: SharedError,
    },
    /// The flight recorder could not remove a clone of a forgotten checkpoint.
    CloneKept {
        /// The clone.
        clone: PathBuf,
        /// The reason.
        error: SharedError,
    },
    /// The flight recorder could not check its store; it tries again. The event is not repeated
    /// while the failure stays the same.
    FlightRecorderFailed {
        /// The store.
        store: PathBuf,
        /// The reason.
        error: SharedError,
    },
    /// A recompression failed; it is tried again. The event is not repeated while the failure stays
    /// the same.
    RecompressionFailed {
        /// The store.
        store: PathBuf,
        /// The reason.
        error: SharedError,
    },
    /// The run ends with packs that are not recompressed.
    NotRecompressed {
        /// The number of bytes of these packs.
        bytes: u64,
    },
    /// The checkpoints of `--count` cannot be reached.
    CountNotReached {
        /// The count.
        count: u64,
        /// The number of checkpoints that were sealed.
        sealed: u64,
    },
    /// A VM that was attached to has ended.
    VmEnded {
        /// The VM.
        vm: String,
    },
    /// QEMU ended with a failure.
    QemuFailed {
        /// The VMM.
        vmm: VmmKind,
        /// The exit status.
        exit: ExitStatus,
    },
    /// The session left a VM that it had attached to.
    Detached {
        /// The VM.
        vm: String,
        /// The VMM.
        vmm: VmmKind,
        /// The process id of its VMM.
        qemu_pid: u32,
    },
    /// The session left a VM that it had launched.
    Kept {
        /// The VM.
        vm: String,
        /// The VMM.
        vmm: VmmKind,
        /// The process id of its VMM.
        qemu_pid: u32,
        /// The socket of its monitor.
        monitor: PathBuf,
    },
    /// The guest's writes to its disks are kept in a directory.
    WritesKept {
        /// The directory.
        directory: PathBuf,
    },
    /// The session has ended.
    Finished {
        /// The number of checkpoints that were sealed.
        sealed: u64,
        /// The number of checkpoints that failed.
        failed: u64,
        /// How the guest ended or failed, if it did.
        guest_end: Option<GuestEnd>,
        /// True if QEMU ended with a failure.
        has_qemu_failed: bool,
    },
}

/// The first event of a session: its VM, store and options.
#[derive(Clone, Debug)]
pub struct SessionStart {
    /// The VM's name, or the group's.
    pub name: String,
    /// True for a group.
    pub is_group: bool,
    /// True if the VM replays a recording.
    pub is_replay: bool,
    /// The interval between checkpoints; `None` if they are taken by command only.
    pub interval: Option<Duration>,
    /// The store.
    pub store: PathBuf,
    /// The VMM.
    pub vmm: VmmKind,
    /// The name and the process id of the VMM for each VM.
    pub vms: Vec<(String, u32)>,
    /// The time for which an attach stopped QEMU's main thread, in nanoseconds. `None` if no attach
    /// did so, or if Keyframe started the VM itself.
    pub attach_stopped_ns: Option<u64>,
}

/// A kind of helper process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Helper {
    /// The process that resumes the VM if the session dies in a pause.
    Watchdog,
    /// The process that serves the disks.
    DiskServer,
}

/// A step without which a session goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Resume a VM that was stopped for want of space.
    RepeatWrites,
    /// Have the VMM of a guest that has ended do what its user wants then.
    FinishGuestEnd,
    /// A step of the capture of the VM's disks.
    Disks(DiskStep),
    /// Remove the disks' contents of before a rollback.
    RemoveFormerDisks,
    /// Describe which checkpoint the disks come from.
    DescribeDisks,
    /// Tell the watchdog that the VM may run.
    AllowRunning,
    /// Add the SSE exception flags of the virtual CPUs to a checkpoint.
    SaveSseFlags,
    /// Count the guest's instructions.
    CountInstructions,
    /// Tell the program that started the session that it is ready.
    TellReady,
    /// Have the kernel end this process first if memory runs out.
    VolunteerAsVictim,
    /// Have the kernel treat this process as any other again if memory runs out.
    WithdrawAsVictim,
}

/// Passes the events of a capture of disks on to the sink of a session.
struct DiskEvents(SharedEventSink);

impl EventSink<DiskEvent> for DiskEvents {
    fn event(&self, event: &DiskEvent) {
        let helper = Helper::DiskServer;
        let event = match event.clone() {
            DiskEvent::ServerRestarted { pid } => Event::HelperRestarted { helper, pid },
            DiskEvent::ServerNotRestarted { error } => Event::HelperNotRestarted { helper, error },
            DiskEvent::StepFailed { step, error } => {
                Event::StepFailed { step: Step::Disks(step), error }
            }
            DiskEvent::AuditWarning(finding) => Event::AuditWarning(finding),
            _ => return,
        };
        self.0.event(&event);
    }
}

/// Returns the sink for a capture of disks, which passes the events on to the session's sink
/// `events`.
pub fn disk_events(events: &SharedEventSink) -> SharedDiskEventSink {
    Arc::new(DiskEvents(Arc::clone(events)))
}

/// Makes an error that events can hold.
pub(crate) fn shared(error: BoxError) -> SharedError {
    Arc::from(error)
}

/// Tells `events` that `step` failed, if it did.
pub(crate) fn tell_failed<E: Into<BoxError>>(
    events: &dyn EventSink<Event>,
    step: Step,
    result: Result<(), E>,
) {
    if let Err(error) = result {
        events.event(&Event::StepFailed { step, error: shared(error.into()) });
    }
}
