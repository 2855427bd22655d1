//! The data that the dashboard shows, and the trait of its source.

use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// A running VM under checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmState {
    /// Its name.
    pub name: String,
    /// The id of the store that it writes to; `None` if that store could not be opened.
    pub store: Option<String>,
    /// The reason why its engine did not answer, if it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The VM's object of `keyframe status --json`; null if its engine did not answer.
    pub status: Value,
}

/// A store in the list of stores.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StoreHead {
    /// The store's id: 32 hexadecimal digits, or another unique text if it could not be opened.
    pub id: String,
    /// Its path or address.
    pub place: String,
    /// The number of readable checkpoints.
    pub checkpoints: usize,
    /// The number of the newest checkpoint; `None` if there is none.
    pub newest: Option<u64>,
    /// The VMs with checkpoints in it.
    pub vms: Vec<String>,
    /// A number that rises with each change of its checkpoints or their tags.
    pub generation: u64,
    /// The reason why the store, or a part of it, cannot be read. `None` if it can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// The phases of a pause, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PauseBreakdown {
    /// The time until QEMU confirmed the stop.
    pub stop: u64,
    /// The time of saving the device state.
    pub device_state: u64,
    /// The time of the last scan for dirty pages.
    pub scan: u64,
    /// The time of copying dirty pages.
    pub copy: u64,
    /// The time until QEMU confirmed that the VM runs again.
    pub resume: u64,
}

impl PauseBreakdown {
    /// Returns the name and the duration in nanoseconds of each phase, in their order.
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

/// A checkpoint in a listing. Times in nanoseconds, sizes in bytes, pages of 4 KiB.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CheckpointRow {
    /// Its number in the store.
    pub id: u64,
    /// The VM's name.
    pub vm: String,
    /// The id of the run that took it.
    pub run: String,
    /// Its number within the run, from 0.
    pub epoch: u64,
    /// The number of the checkpoint that it is based on, which may be forgotten by now; `None` for
    /// none.
    pub parent: Option<u64>,
    /// The time at which its pause began, in RFC 3339.
    pub taken_at: String,
    /// The same time in milliseconds since 1970.
    pub taken_ms: i64,
    /// The reason why it was taken.
    pub reason: String,
    /// Its tags.
    pub tags: Vec<String>,
    /// True if it is pinned: retention rules keep it.
    pub pinned: bool,
    /// The name of the strategy that copied its pages.
    pub strategy: String,
    /// The duration of the whole pause.
    pub pause_ns: u64,
    /// The durations of the steps of the pause.
    pub pause: PauseBreakdown,
    /// The number of distinct pages that it contains.
    pub dirty_pages: u64,
    /// The number of these pages that are zero.
    pub zero_pages: u64,
    /// The number of these pages whose content was already in the store.
    pub dedup_pages: u64,
    /// The number of these pages that the guest wrote without a change.
    pub unchanged_pages: u64,
    /// The number of these pages whose content was new.
    pub stored_pages: u64,
    /// The growth of the store by it: pages, map, device state, disks.
    pub added_bytes: u64,
    /// The part of this growth that is pages of RAM.
    pub stored_bytes: u64,
    /// The number of bytes written to disks since the previous checkpoint.
    pub disk_written_bytes: u64,
    /// The time since the pause of the previous checkpoint.
    pub interval_ns: u64,
    /// The delay with which it began, because the previous one was still being encoded.
    pub backlog_ns: u64,
    /// The time of hashing, compressing and storing its pages.
    pub encode_ns: u64,
    /// The size of the RAM of the VM.
    pub ram_bytes: u64,
}

/// The list of a store's checkpoints at one moment.
#[derive(Clone, Debug, Default)]
pub struct CheckpointListing {
    /// The generation of the store's checkpoints: see [`StoreHead::generation`].
    pub generation: u64,
    /// The checkpoints, rising by number.
    pub checkpoints: Vec<Arc<CheckpointRow>>,
}

impl CheckpointListing {
    /// Returns the checkpoint with the number `id`; `None` if the listing has none.
    pub fn get(&self, id: u64) -> Option<&Arc<CheckpointRow>> {
        let at = self.checkpoints.binary_search_by_key(&id, |one| one.id).ok()?;
        self.checkpoints.get(at)
    }
}

/// The sizes of a store and of its checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StoreSizes {
    /// The size of packs, maps, checkpoints and tags on disk, in bytes.
    pub total_bytes: u64,
    /// The sum of the RAM sizes of all checkpoints, in bytes: the size of full images.
    pub raw_bytes: u64,
    /// The size of all dirty pages, in bytes.
    pub dirty_bytes: u64,
    /// The number of dirty pages that are zero.
    pub zero_pages: u64,
    /// The number of dirty pages whose content was already in the store.
    pub dedup_pages: u64,
    /// The number of dirty pages that the guest wrote without a change.
    pub unchanged_pages: u64,
    /// The number of dirty pages whose content was new.
    pub stored_pages: u64,
    /// The number of bytes appended to packs for pages of RAM.
    pub stored_bytes: u64,
    /// The number of dirty pages that are not zero, divided by the number of stored pages; absent
    /// if none was stored.
    pub dedup_ratio: Option<f64>,
    /// The size of the stored pages, divided by the bytes that they take; absent if none was
    /// stored.
    pub compression_ratio: Option<f64>,
    /// `raw_bytes` divided by `total_bytes`; absent if the store is empty.
    pub reduction_ratio: Option<f64>,
}

/// The places in memory where a checkpoint differs from its parent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HeatMap {
    /// The checkpoint's number.
    pub id: u64,
    /// The checkpoint that it is compared with. `None` if it has no parent, or the parent is gone;
    /// then all pages that are not zero count as changed.
    pub parent: Option<u64>,
    /// The number of pages of a piece. The last piece of a region may be shorter.
    pub piece_pages: u64,
    /// The regions, one for each RAM block.
    pub regions: Vec<HeatRegion>,
}

/// One RAM block of a [`HeatMap`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HeatRegion {
    /// The name of the RAM block.
    pub name: String,
    /// The number of its pages.
    pub pages: u64,
    /// The number of pages that are not zero.
    pub nonzero_pages: u64,
    /// The number of pages that differ from the parent's.
    pub changed_pages: u64,
    /// The number of changed pages in each piece.
    pub changed: Vec<u64>,
    /// The number of pages that are not zero, in each piece.
    pub nonzero: Vec<u64>,
}

/// A change that a client asks for, with the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DashboardAction {
    /// Pin a checkpoint.
    Pin(u64),
    /// Unpin a checkpoint.
    Unpin(u64),
    /// Point a tag to a checkpoint.
    Tag(u64, String),
    /// Remove a tag.
    Untag(String),
    /// Roll the running VM of a checkpoint back to it.
    Rollback(u64),
    /// Start a clone from a checkpoint.
    Branch(u64),
    /// Restore a checkpoint as a running VM.
    Restore(u64),
}

/// The reason why a request cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The requested object does not exist.
    #[error("{0}")]
    Unknown(String),
    /// The request is invalid.
    #[error("{0}")]
    Bad(String),
    /// The object exists, but cannot be shown.
    #[error("{0}")]
    NotShown(String),
    /// The operation failed.
    #[error("{0}")]
    Failed(String),
    /// The server is busy. The client should try again.
    #[error("{0}")]
    Busy(String),
}

/// The source of the dashboard's data. Several threads call it at once, and its functions may
/// block. It should keep results for as long as they are valid.
pub trait DashboardSource: Send + Sync + 'static {
    /// Returns the running VMs, in the order of their names.
    fn vms(&self) -> Vec<VmState>;
    /// Returns the stores on the command line, and those to which VMs write.
    fn stores(&self) -> Vec<StoreHead>;
    /// Returns the checkpoints of a store. Error: the store is unknown or cannot be read.
    fn listing(&self, store: &str) -> Result<Arc<CheckpointListing>, ApiError>;
    /// Returns all data of a checkpoint, with the commands for it, as a JSON object. Errors: the
    /// store or the checkpoint is unknown; the store cannot be read.
    fn checkpoint(&self, store: &str, id: u64) -> Result<Value, ApiError>;
    /// Returns the places in memory where a checkpoint differs from its parent, in about `pieces`
    /// pieces. Errors: the store or the checkpoint is unknown; the store cannot be read.
    fn heat(&self, store: &str, id: u64, pieces: u64) -> Result<HeatMap, ApiError>;
    /// Returns the differences between a checkpoint and its parent (pages, sectors, bytes) as a
    /// JSON object. Errors: the store or the checkpoint is unknown; the store cannot be read.
    fn diff(&self, store: &str, id: u64) -> Result<Value, ApiError>;
    /// Returns the display of a checkpoint's VM, or of the group's member `member`, as PNG. Errors:
    /// the store or the checkpoint is unknown; the store cannot be read.
    fn screen(&self, store: &str, id: u64, member: Option<&str>) -> Result<Arc<[u8]>, ApiError>;
    /// Returns the sizes of a store. Errors: the store is unknown or cannot be read.
    fn sizes(&self, store: &str) -> Result<StoreSizes, ApiError>;
    /// Returns the recordings with their intervals, and the progress of analyses, as a JSON object.
    fn recordings(&self) -> Value;
    /// Performs an action and returns a message for the user. Errors: the action is not allowed, or
    /// has failed; the error has a text for the user.
    fn act(&self, store: &str, action: &DashboardAction) -> Result<String, ApiError>;
}
