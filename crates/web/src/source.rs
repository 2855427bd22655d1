//! What the dashboard needs to know, as who serves it says it.
//!
//! A source is asked often and by several threads at once: it keeps what it has found for as long
//! as that is true.

use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// A VM that runs under checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmState {
    /// Its name.
    pub name: String,
    /// The id of the store that it writes to, where that could be opened.
    pub store: Option<String>,
    /// Why its engine did not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What `keyframe status --json` says of it; null where its engine did not answer.
    pub status: Value,
}

/// A store, as far as a list shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StoreHead {
    /// Its id: 32 hexadecimal digits; where it could not be opened, something else that is its own.
    pub id: String,
    /// Where it is.
    pub place: String,
    /// Checkpoints that can be read.
    pub checkpoints: usize,
    /// The newest one.
    pub newest: Option<u64>,
    /// The VMs that have checkpoints in it.
    pub vms: Vec<String>,
    /// Grows whenever its checkpoints or their tags change.
    pub generation: u64,
    /// Why it, or a part of it, cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// The parts of a pause, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Phases {
    /// Until QEMU confirmed the stop.
    pub stop: u64,
    /// Saving the device state.
    pub device_state: u64,
    /// The last scan for dirty pages.
    pub scan: u64,
    /// Copying them.
    pub copy: u64,
    /// Until QEMU confirmed that the VM runs.
    pub resume: u64,
}

impl Phases {
    /// Names and values, in the order in which they happen.
    pub fn named(&self) -> [(&'static str, u64); 5] {
        [
            ("stop", self.stop),
            ("device_state", self.device_state),
            ("scan", self.scan),
            ("copy", self.copy),
            ("resume", self.resume),
        ]
    }
}

/// One checkpoint in a listing. Times in nanoseconds, sizes in bytes, pages of 4 KiB.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checkpoint {
    /// Its number in the store.
    pub id: u64,
    /// The VM's name.
    pub vm: String,
    /// The run that took it.
    pub run: String,
    /// Its place in the run.
    pub epoch: u64,
    /// The checkpoint that it grew from, which may have been forgotten.
    pub parent: Option<u64>,
    /// When its pause began.
    pub taken_at: String,
    /// The same, in milliseconds since 1970.
    pub taken_ms: i64,
    /// Why it was taken.
    pub reason: String,
    /// Names given to it.
    pub tags: Vec<String>,
    /// No rule forgets it.
    pub pinned: bool,
    /// How its pages were copied.
    pub strategy: String,
    /// The whole pause.
    pub pause_ns: u64,
    /// Its parts.
    pub pause: Phases,
    /// Distinct pages that it holds.
    pub dirty_pages: u64,
    /// Of these: zeros.
    pub zero_pages: u64,
    /// Of these: found in the store already.
    pub dedup_pages: u64,
    /// Of these: written with what they held before.
    pub unchanged_pages: u64,
    /// Of these: new.
    pub stored_pages: u64,
    /// Bytes that the store grew by: records, map, device state, disks.
    pub added_bytes: u64,
    /// Of these: pages of RAM.
    pub stored_bytes: u64,
    /// Written to disks since the one before.
    pub disk_written_bytes: u64,
    /// Since the pause of the one before.
    pub interval_ns: u64,
    /// How late it began because the one before was still being encoded.
    pub backlog_ns: u64,
    /// Hashing, compressing and storing.
    pub encode_ns: u64,
    /// The RAM of the VM.
    pub ram_bytes: u64,
}

/// The checkpoints of a store at one moment.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// As in [`StoreHead`].
    pub generation: u64,
    /// Rising by number.
    pub checkpoints: Vec<Arc<Checkpoint>>,
}

impl Listing {
    /// The one with that number.
    pub fn get(&self, id: u64) -> Option<&Arc<Checkpoint>> {
        let at = self.checkpoints.binary_search_by_key(&id, |one| one.id).ok()?;
        self.checkpoints.get(at)
    }
}

/// What a store takes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sizes {
    /// Packs, maps, checkpoints and tags on disk.
    pub total_bytes: u64,
    /// RAM sizes of all checkpoints: what full images would take.
    pub raw_bytes: u64,
    /// Pages put into checkpoints.
    pub dirty_bytes: u64,
    /// Of these pages: zeros.
    pub zero_pages: u64,
    /// Of these: found in the store already.
    pub dedup_pages: u64,
    /// Of these: written with what they held before.
    pub unchanged_pages: u64,
    /// Of these: new.
    pub stored_pages: u64,
    /// Bytes appended to packs for pages of RAM.
    pub stored_bytes: u64,
    /// Pages that are not zero, for each one stored.
    pub dedup_ratio: Option<f64>,
    /// Bytes of the pages stored, for each byte they take.
    pub compression_ratio: Option<f64>,
    /// `raw_bytes` for each byte of `total_bytes`.
    pub reduction_ratio: Option<f64>,
}

/// Where in memory a checkpoint differs from its parent, piece by piece.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Heat {
    /// The checkpoint.
    pub id: u64,
    /// What it is compared with; none where it is the first, or that one is gone: then all pages
    /// count that are not zero.
    pub parent: Option<u64>,
    /// Pages in a piece; the last of a region may have fewer.
    pub piece_pages: u64,
    /// RAM blocks.
    pub regions: Vec<HeatRegion>,
}

/// One RAM block of a [`Heat`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HeatRegion {
    /// Its name.
    pub name: String,
    /// Its pages.
    pub pages: u64,
    /// Pages that are not zero.
    pub nonzero_pages: u64,
    /// Pages that differ.
    pub changed_pages: u64,
    /// Pages that differ, in each piece.
    pub changed: Vec<u64>,
    /// Pages that are not zero, in each piece.
    pub nonzero: Vec<u64>,
}

/// What may be done from the page, with the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Keep a checkpoint whatever rules say.
    Pin(u64),
    /// Leave it to the rules again.
    Unpin(u64),
    /// Point a tag to a checkpoint.
    Tag(u64, String),
    /// Remove a tag.
    Untag(String),
    /// Put the running VM that it is of back to a checkpoint.
    Rollback(u64),
    /// Start a clone of a checkpoint.
    Branch(u64),
    /// Bring a checkpoint to life as it was.
    Restore(u64),
}

/// Why a question has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// There is no such thing.
    #[error("{0}")]
    Unknown(String),
    /// It was asked for wrongly.
    #[error("{0}")]
    Bad(String),
    /// There is such a thing, and it cannot be shown.
    #[error("{0}")]
    NotShown(String),
    /// It could not be found out or done.
    #[error("{0}")]
    Failed(String),
    /// It takes long, or others ask as well: ask again.
    #[error("{0}")]
    Busy(String),
}

/// What the dashboard shows. All of it may block.
pub trait Source: Send + Sync + 'static {
    /// The VMs that run, by name.
    fn vms(&self) -> Vec<VmState>;
    /// The stores: those that were named, and those that VMs write to.
    fn stores(&self) -> Vec<StoreHead>;
    /// The checkpoints of a store.
    fn listing(&self, store: &str) -> Result<Arc<Listing>, Problem>;
    /// All that is known of a checkpoint, and the commands to do something with it.
    fn checkpoint(&self, store: &str, id: u64) -> Result<Value, Problem>;
    /// Where in memory it differs from its parent. In about so many pieces.
    fn heat(&self, store: &str, id: u64, pieces: u64) -> Result<Heat, Problem>;
    /// What differs between it and its parent: pages, sectors and bytes.
    fn diff(&self, store: &str, id: u64) -> Result<Value, Problem>;
    /// What the display of its VM showed, or that of the member of its group: a PNG.
    fn screen(&self, store: &str, id: u64, member: Option<&str>) -> Result<Arc<[u8]>, Problem>;
    /// What a store takes.
    fn sizes(&self, store: &str) -> Result<Sizes, Problem>;
    /// Recordings with their intervals, and how analyses of them get on. An array.
    fn recordings(&self) -> Value;
    /// Does something; what it says is shown.
    fn act(&self, store: &str, action: &Action) -> Result<String, Problem>;
}
