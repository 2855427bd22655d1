//! The control socket of a running `keyframe run`: one JSON line asked, one JSON line answered.
//!
//! ```text
//!   keyframe take ──{"take":{"tag":"boot"}}──▶ RUN_DIR/control.sock ──▶ engine
//!                 ◀──{"taken":{"id":12,...}}──
//! ```
//!
//! The socket lies in a directory that only its owner may enter. A process that can connect can
//! stop the VM.

pub mod client;
pub mod server;
mod states;
pub mod status_history;

pub use states::{
    CaptureState, EncoderState, FailingCause, ReplicationRole, ReplicationState, VmState,
};

use crate::run_dir::is_qemu;
use keyframe_vmm::VmmKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The longest line that either end of a control socket accepts, in bytes.
pub const LINE_BYTES_MAX: u64 = 256 * 1024;

/// What happens to a VM that still runs when `keyframe run` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum OnExit {
    /// End QEMU.
    Kill,
    /// Leave QEMU running, without checkpoints.
    Keep,
}

/// The strategy that copies a checkpoint's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// The engine chooses for each checkpoint from its measurements: pre-copy, or stop-and-copy if
    /// few pages are dirty.
    Auto,
    /// Most pages are copied while the guest runs, the rest in the pause.
    Precopy,
    /// Dirty pages are found before the pause and copied in it.
    PreScan,
    /// All dirty pages are found and copied in the pause.
    StopCopy,
    /// Dirty pages are protected in the pause and copied after it, each before the guest's first
    /// write (needs --tracker sync).
    Cow,
    /// QEMU is forked in the pause and dirty pages are copied from the child (private RAM, no
    /// `-sandbox spawn=deny`).
    Fork,
}

/// The method that finds dirty pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum TrackerKind {
    /// The tracker that fits the strategy and the VM: sync for cow; for all others window where it
    /// is exact and saves time, and else write-protect.
    Auto,
    /// Asynchronous write protection as write-protect, and in the pause no scan: page faults of the
    /// last milliseconds name the pages (not under KVM; needs CAP_PERFMON and tracefs).
    Window,
    /// Asynchronous write protection: the kernel notes first writes, PAGEMAP_SCAN asks for them.
    WriteProtect,
    /// Synchronous userfaultfd: each first write waits until this process has answered it.
    Sync,
    /// Every page is read and hashed: needs no kernel feature, and takes as long as reading all of
    /// RAM, in the pause too.
    Compare,
}

/// A request of a command to a running engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineRequest {
    /// Send the status.
    Status,
    /// End after the checkpoints in progress are sealed.
    Stop {
        /// Overrides the option with which `run` was started. `None` to keep that option.
        on_exit: Option<OnExit>,
    },
    /// Take a checkpoint now.
    Take {
        /// A tag for the checkpoint. `None` for no tag.
        tag: Option<String>,
        /// Overrides the option with which `run` was started. `None` to keep that option.
        strategy: Option<Strategy>,
    },
    /// Put the VM back to a checkpoint.
    Rollback {
        /// A number, a tag or `latest`.
        checkpoint: String,
        /// True to keep no checkpoint of the present state.
        #[serde(default)]
        fast: bool,
    },
    /// Move the VM to the other host.
    FailOver {
        /// True if the user states that the other host is off.
        force: bool,
    },
}

/// The response of a running engine to a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineResponse {
    /// Answers `Status`.
    Status(Box<EngineStatus>),
    /// Answers `Stop`: the engine is ending.
    Stopping,
    /// Answers `Take`: the checkpoint is sealed.
    Taken(Box<keyframe_inspect::entry::Entry>),
    /// Answers `Rollback`: the VM has been rolled back.
    RolledBack(RolledBack),
    /// The request is being carried out; the text says how.
    Done(String),
    /// The request failed; the text is the error and its fix.
    Failed(String),
}

/// The result of a rollback of a running VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RolledBack {
    /// The VM's name.
    pub vm: String,
    /// The number of the checkpoint to which the VM was put back.
    pub checkpoint: u64,
    /// The number of the checkpoint with the VM's state before the rollback; absent if the state was
    /// not kept.
    pub before: Option<u64>,
    /// The number of the first checkpoint after the rollback; absent if it failed, or if the state
    /// before was not kept.
    pub now: Option<u64>,
    /// The number of pages that were written, without those that a reset of the machine overwrites.
    pub pages: u64,
    /// The time for which the VM was paused, in nanoseconds.
    pub stood_ns: u64,
    /// Its parts.
    pub phases: RollbackPhases,
    /// True if the VM runs.
    pub runs: bool,
    /// The process id of the VMM that has taken the former one's place; absent if the VM is in the same
    /// process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub successor_pid: Option<u32>,
}

/// The parts of the time for which a rollback pauses a VM, in nanoseconds. What is between them
/// (disks, checks) is in none.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RollbackPhases {
    /// The pause of the VM.
    pub pause_ns: u64,
    /// The checkpoint of the state before, until it is sealed.
    pub before_ns: u64,
    /// QEMU's load of devices and pages.
    pub load_ns: u64,
    /// The comparison of RAM with the checkpoint.
    pub compare_ns: u64,
    /// The capture of the state after.
    pub after_ns: u64,
    /// The resume of the VM.
    pub resume_ns: u64,
}

/// The status of an engine. Times are in nanoseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct EngineStatus {
    /// The VM's name.
    pub vm: String,
    /// The state of the VM.
    pub state: VmState,
    /// The VMM. The JSON leaves QEMU out.
    #[serde(default, skip_serializing_if = "is_qemu")]
    pub vmm: VmmKind,
    /// The process id of the VMM; for a group, that of the first member.
    pub qemu_pid: u32,
    /// The process id of the engine.
    pub engine_pid: u32,
    /// The path or address of the store.
    pub store: String,
    /// The interval, as given or as chosen by a budget. Absent if checkpoints are taken by command
    /// only.
    pub interval_ns: Option<u64>,
    /// The reason for the interval, if the run has a budget.
    pub tuned: Option<String>,
    /// The number of checkpoints sealed in this run.
    pub sealed: u64,
    /// The number of checkpoints that failed in this run.
    pub failed: u64,
    /// The error of the newest failed checkpoint, until one is sealed again.
    pub last_error: Option<String>,
    /// The reason why no checkpoint is sealed at present; absent if the newest one is sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<FailingCause>,
    /// The number of bytes that could still be written to the store's medium as the newest
    /// checkpoint was sealed or failed; absent if the medium does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store_free_bytes: Option<u64>,
    /// The delay of the newest checkpoint, which waited for the encoder.
    pub backlog_ns: u64,
    /// The phase of the capture in progress.
    pub phase: CaptureState,
    /// The phase of the checkpoint that is being encoded; [`EncoderState::Sealed`] between two.
    pub encoder: EncoderState,
    /// The number of captured checkpoints that are not sealed yet.
    pub queued: u64,
    /// The newest sealed checkpoint. Absent if there is none.
    pub last: Option<keyframe_inspect::entry::Entry>,
    /// The age of the newest sealed checkpoint; absent if there is none.
    pub last_age_ns: Option<u64>,
    /// The monitor socket of QEMU that the engine uses; empty with libvirt. It is free again once
    /// the engine has ended.
    pub qmp: String,
    /// The VMs of a group; empty for one VM alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberStatus>,
    /// The flight recorder; absent without `--keep-within`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorder: Option<RecorderStatus>,
    /// The recompressor of packs; absent without `--recompress idle`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompressor: Option<RecompressorStatus>,
    /// The replication; absent if the VM has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replication: Option<ReplicationStatus>,
}

/// The status of a replication. Times are in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplicationStatus {
    /// The role of this host.
    pub role: ReplicationRole,
    /// The state in that role.
    pub state: ReplicationState,
    /// The VM that a standby holds, or has taken over.
    pub protects: Option<String>,
    /// The number of the term: 1 at first, and one more after each takeover.
    pub term: u64,
    /// True if the other host is connected.
    pub connected: bool,
    /// The newest epoch; absent if there is none.
    pub epoch: Option<u64>,
    /// The newest epoch that the standby holds; absent if it holds none.
    pub acknowledged: Option<u64>,
    /// The number of epochs that this process has taken or received.
    pub epochs: u64,
    /// The reason for which the newest epoch was taken.
    pub reason: String,
    /// The last message to the user.
    pub note: String,
    /// The number of pages of the newest epoch.
    pub pages: u64,
    /// The number of bytes of the newest epoch on the wire.
    pub wire_bytes: u64,
    /// The number of bytes of all epochs on the wire.
    pub all_wire_bytes: u64,
    /// The number of uncompressed bytes of the pages of all epochs.
    pub all_raw_bytes: u64,
    /// The pause of the newest epoch.
    pub pause_ns: u64,
    /// The time from that pause to the standby's acknowledgement.
    pub transfer_ns: u64,
    /// The time from the previous pause to that pause.
    pub epoch_ns: u64,
    /// The number of packets that wait for their epoch to reach the standby.
    pub held_packets: u64,
    /// The number of bytes of these packets.
    pub held_bytes: u64,
    /// The number of packets that have left.
    pub passed_packets: u64,
    /// The number of packets that were dropped because the gate was full.
    pub dropped_packets: u64,
    /// The time of a takeover, from the decision until the VM ran. Absent if this process has not
    /// taken over.
    pub took_over_ns: Option<u64>,
    /// The policy's estimates of the link and the VM, by names with their units.
    pub estimates: Vec<(String, f64)>,
    /// The number of epochs for each reason.
    #[serde(default)]
    pub reasons: BTreeMap<String, u64>,
    /// The sum of the pauses of all epochs.
    #[serde(default)]
    pub all_pause_ns: u64,
    /// The sum of the times from pause to acknowledgement.
    #[serde(default)]
    pub all_transfer_ns: u64,
    /// The number of pages of all epochs.
    #[serde(default)]
    pub all_pages: u64,
    /// The additional time for which the VM was suspended early, because it wrote faster than the
    /// link sends.
    #[serde(default)]
    pub all_suspended_ns: u64,
}

/// The status of a flight recorder, for users.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecorderStatus {
    /// The time for which checkpoints of the run are kept, in nanoseconds.
    pub keep_within_ns: u64,
    /// The number of checkpoints of the run at the recorder's last look.
    pub kept: u64,
    /// The number of checkpoints that the recorder has forgotten.
    pub forgotten: u64,
    /// The number of packs that the recorder has removed.
    pub freed_packs: u64,
    /// The error of its last look. It looks again later.
    pub last_error: Option<String>,
}

/// The status of the recompression beside a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecompressorStatus {
    /// The reason why there is none although the user asked for it. Absent if there is one.
    pub off: Option<String>,
    /// True if it is at work. False if it rests, or if there is too little to do.
    pub at_work: bool,
    /// The number of packs that it has recompressed.
    pub recompressed_packs: u64,
    /// The number of bytes in packs that were still to recompress at its last look.
    pub cold_bytes: u64,
    /// The error of its last look. It looks again later.
    pub last_error: Option<String>,
}

/// The status of one VM of a group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemberStatus {
    /// The VM's name.
    pub name: String,
    /// The process id of QEMU.
    pub qemu_pid: u32,
    /// The monitor socket of QEMU that the engine uses; empty with libvirt.
    pub qmp: String,
}
