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

pub use states::{CaptureState, EncoderState, ReplicationRole, ReplicationState, VmState};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The longest line either side accepts, in bytes.
pub const LINE_BYTES_MAX: u64 = 256 * 1024;

/// What becomes of a VM that still runs when `run` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum OnExit {
    /// End QEMU.
    Kill,
    /// Leave QEMU running, without checkpoints.
    Keep,
}

/// How pages are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Chosen for each checkpoint by what the ones before it measured: pre-copy, or stop-and-copy
    /// where little is dirty.
    Auto,
    /// Most pages are copied while the guest runs, the rest in the pause.
    Precopy,
    /// Dirty pages are found before the pause and copied in it.
    PreScan,
    /// All dirty pages are found and copied in the pause.
    StopCopy,
    /// Dirty pages are protected in the pause and copied behind it, each before the guest's first
    /// write (needs --tracker sync).
    Cow,
    /// QEMU is forked in the pause and dirty pages are copied from the child (private RAM, no
    /// `-sandbox spawn=deny`).
    Fork,
}

/// How dirty pages are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum TrackerKind {
    /// What fits the strategy: sync for cow, write-protect for all others.
    Auto,
    /// Asynchronous write protection: the kernel notes first writes, PAGEMAP_SCAN asks for them.
    WriteProtect,
    /// Synchronous userfaultfd: each first write waits until this process has answered it.
    Sync,
    /// Every page is read and hashed: needs no kernel feature, and takes as long as reading all of
    /// RAM, in the pause too.
    Compare,
}

/// What may be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// How it goes.
    Status,
    /// End after what is in progress is sealed.
    Stop {
        /// Instead of what `run` was started with.
        on_exit: Option<OnExit>,
    },
    /// Take a checkpoint now.
    Take {
        /// A name for it.
        tag: Option<String>,
        /// Instead of what `run` was started with.
        strategy: Option<Strategy>,
    },
    /// Put the VM back to a checkpoint.
    Rollback {
        /// A number, a tag or `latest`.
        checkpoint: String,
    },
    /// The VM is to run on the other host.
    FailOver {
        /// The user vouches that the other host is off.
        force: bool,
    },
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// To `Status`.
    Status(Box<Status>),
    /// To `Stop`: it is ending.
    Stopping,
    /// To `Take`: sealed.
    Taken(Box<keyframe_inspect::entry::Entry>),
    /// To `Rollback`: the VM is there.
    RolledBack(RolledBack),
    /// It is being done, as told.
    Done(String),
    /// It could not be done.
    Failed(String),
}

/// What became of a rollback.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RolledBack {
    /// The VM's name.
    pub vm: String,
    /// The checkpoint that it was put back to.
    pub checkpoint: u64,
    /// The checkpoint that holds what it was before.
    pub before: u64,
    /// The first checkpoint behind; absent where it failed.
    pub now: Option<u64>,
    /// Pages that were written back.
    pub pages: u64,
    /// How long the VM stood.
    pub stood_ns: u64,
    /// Whether it runs.
    pub runs: bool,
}

/// How a run goes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// The VM's name.
    pub vm: String,
    /// Whether it runs.
    pub state: VmState,
    /// QEMU's process; of a group, the first member's.
    pub qemu_pid: u32,
    /// The engine's process.
    pub engine_pid: u32,
    /// The store.
    pub store: String,
    /// The interval: as asked, or as a budget has it; absent where checkpoints are taken by command
    /// only.
    pub interval_ns: Option<u64>,
    /// With a budget: why the interval is what it is.
    pub tuned: Option<String>,
    /// Checkpoints sealed in this run.
    pub sealed: u64,
    /// Checkpoints that failed in this run.
    pub failed: u64,
    /// Why the newest failed one failed, until one is sealed again.
    pub last_error: Option<String>,
    /// How late the newest checkpoint began, because the one before was still being encoded.
    pub backlog_ns: u64,
    /// The phase of the capture in progress.
    pub phase: CaptureState,
    /// The phase of the checkpoint that is being encoded; [`EncoderState::Sealed`] between two.
    pub encoder: EncoderState,
    /// Checkpoints captured that are not sealed yet.
    pub queued: u64,
    /// The newest sealed checkpoint.
    pub last: Option<keyframe_inspect::entry::Entry>,
    /// Its age.
    pub last_age_ns: Option<u64>,
    /// QEMU's monitor socket that the engine uses, empty where that is libvirt's; free again once
    /// the engine has ended.
    pub qmp: String,
    /// The VMs of a group; empty for one VM alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberStatus>,
    /// The flight recorder; absent without `--keep-within`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recorder: Option<RecorderStatus>,
    /// What recompresses packs; absent without `--recompress idle`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompressor: Option<RecompressorStatus>,
    /// The replication; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replication: Option<ReplicationStatus>,
}

/// How a replication goes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplicationStatus {
    /// The role of this host.
    pub role: ReplicationRole,
    /// Its state in that role.
    pub state: ReplicationState,
    /// The VM that a standby holds, or has taken over.
    pub protects: Option<String>,
    /// Takeovers, from 1.
    pub term: u64,
    /// The other host is connected.
    pub connected: bool,
    /// The newest epoch.
    pub epoch: Option<u64>,
    /// The newest epoch that the standby holds.
    pub acknowledged: Option<u64>,
    /// Epochs that have come about in this process.
    pub epochs: u64,
    /// Why the newest epoch was taken.
    pub reason: String,
    /// What was said last.
    pub note: String,
    /// Pages of the newest epoch.
    pub pages: u64,
    /// Its bytes on the wire.
    pub wire_bytes: u64,
    /// Bytes of all epochs on the wire.
    pub all_wire_bytes: u64,
    /// Bytes of the pages of all epochs.
    pub all_raw_bytes: u64,
    /// How long the VM stood for the newest epoch.
    pub pause_ns: u64,
    /// From its pause to the standby's acknowledgement.
    pub transfer_ns: u64,
    /// From the pause before to its own.
    pub epoch_ns: u64,
    /// Packets that wait for an epoch to be on the standby.
    pub held_packets: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// Packets that have passed.
    pub passed_packets: u64,
    /// Packets that were dropped since they did not fit.
    pub dropped_packets: u64,
    /// Of a VM that was taken over: how long that took, from the decision until it ran.
    pub took_over_ns: Option<u64>,
    /// What the policy takes the link and the VM to be, by names with their units.
    pub estimates: Vec<(String, f64)>,
    /// Why epochs were taken, and how many for each reason.
    #[serde(default)]
    pub reasons: BTreeMap<String, u64>,
    /// How long the VM stood for all epochs.
    #[serde(default)]
    pub all_pause_ns: u64,
    /// From the pauses of all epochs to their acknowledgements.
    #[serde(default)]
    pub all_transfer_ns: u64,
    /// Pages of all epochs.
    #[serde(default)]
    pub all_pages: u64,
    /// How long the VM stood besides, suspended early as it wrote faster than the link sends.
    #[serde(default)]
    pub all_suspended_ns: u64,
}

/// How a flight recorder goes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecorderStatus {
    /// Checkpoints of the run are kept for so long.
    pub keep_within_ns: u64,
    /// Checkpoints of the run that there are, as of its last look.
    pub kept: u64,
    /// Checkpoints that it has forgotten.
    pub forgotten: u64,
    /// Packs whose space it has given back.
    pub freed_packs: u64,
    /// Why its last look failed; it looks again.
    pub last_error: Option<String>,
}

/// How the recompression beside a run goes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecompressorStatus {
    /// Why there is none, although it was asked for.
    pub off: Option<String>,
    /// It is at work; else it rests, or there is too little to do.
    pub at_work: bool,
    /// Packs that it has recompressed.
    pub recompressed_packs: u64,
    /// Bytes in packs that are still to be, as of its last look.
    pub cold_bytes: u64,
    /// Why its last look failed; it looks again.
    pub last_error: Option<String>,
}

/// One VM of a group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Its name.
    pub name: String,
    /// Its QEMU's process.
    pub qemu_pid: u32,
    /// The monitor socket of that QEMU that the engine uses, empty where that is libvirt's.
    pub qmp: String,
}
