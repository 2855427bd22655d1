//! The process that serves the disks, and the engine's handle to it.
//!
//! ```text
//!   engine ── Disks ──socket pair── serve() ── overlays, NBD server ──unix socket── QEMU
//!      └────── SlotFile: reads the content of an epoch directly
//!
//!   serving ──end──▶ clients are disconnected ──▶ synced ──▶ exit
//!      └──engine gone──▶ epochs released, no pause ──last client gone──▶ synced ──▶ exit
//!
//!   rollback:   stage ──▶ staged disks ──exchange──▶ these are served ──dismiss──▶ the old ones
//!                              └──dismiss──▶ closed      └──exchange──▶ back       are closed
//!               engine gone before dismiss ──▶ its heir ([`DiskHeir`]) exchanges and dismisses
//! ```
//!
//! It is a process of its own, so that the guest keeps its disk if the engine dies.
//!
//! ```text
//!   server dies ──▶ supervisor: a new one over the same overlays, on the same listening socket
//!                     └─ QEMU holds the guest's requests meanwhile, and sends them again
//! ```
//!
//! Each acknowledged write is in the page cache, so the new server goes on exactly. The cuts of the
//! old one are lost: all blocks of the overlays count as written since the last cut.
//!
//! Invariants: the content of a request is bounded and checked. Each request has one response, in
//! order. A server without an engine holds no epoch, so that its overlay does not grow, and
//! acknowledges no flush before its sync.
//!
//! Left out: a new engine cannot take over a server whose engine died ([`DiskHeir`] only ends a
//! rollback), and nothing starts a server again whose engine has gone.

mod client;
mod connection;
mod frame;
mod heir;
mod server;
mod supervisor;

pub use client::Disks;
pub use heir::{DiskHeir, Staging};
pub use server::serve;
pub use supervisor::{ServerEvent, ServerObserver};

use crate::overlay::Lasting;
use crate::{DiskBlock, DiskEpoch, Extent, ImageFormat};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The description of a disk that the server serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// The name of the NBD export by which QEMU asks for the disk.
    pub export: String,
    /// The path of the image, which is never written.
    pub base: PathBuf,
    /// The image's format.
    pub format: ImageFormat,
    /// The size in bytes of a disk without an image, which is zero at first; then `base` and
    /// `format` are ignored. `None` for a disk with an image.
    #[serde(default)]
    pub blank_bytes: Option<u64>,
    /// The directory of the overlay. It is created if it does not exist.
    pub overlay: PathBuf,
    /// The layer between the image and the overlay, as a text that `open_layer` of [`serve`]
    /// understands. `None` if there is none.
    pub layer: Option<String>,
    /// True if written data is discarded at the end of the VM. Then no flush waits for the medium.
    #[serde(default)]
    pub temporary: bool,
}

impl DiskSpec {
    fn lasting(&self) -> Lasting {
        if self.temporary { Lasting::Temporary } else { Lasting::Durable }
    }
}

/// Sizes and counters of one disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStats {
    /// The name of its NBD export.
    pub export: String,
    /// The size of the disk in bytes.
    pub disk_bytes: u64,
    /// The number of bytes of the overlay's data file.
    pub data_bytes: u64,
    /// The number of bytes in it that are free.
    pub free_bytes: u64,
    /// The number of ranges of blocks in the overlay's maps in memory.
    pub extents: u64,
    /// The number of blocks that the next cut covers: those written since the last cut, and those
    /// of epochs that were given back. A block that is both counts twice.
    pub dirty_blocks: u64,
    /// The number of epochs in flight.
    pub in_flight: u64,
    /// The number of successful syncs of the overlay since the server opened it.
    pub syncs: u64,
}

/// Counters of the server since its process was started, and those of its disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStats {
    /// The state of each disk, in the order of the specs.
    pub disks: Vec<DiskStats>,
    /// The number of NBD clients that are connected now.
    pub clients: u64,
    /// The number of requests that were received, except disconnects. Failed ones count too.
    pub requests: u64,
    /// The number of bytes that clients have requested to read.
    pub read_bytes: u64,
    /// The number of bytes that clients have requested to write.
    pub written_bytes: u64,
    /// The number of bytes that clients have requested to make zero.
    pub zeroed_bytes: u64,
    /// The number of bytes that clients have requested to discard.
    pub discarded_bytes: u64,
    /// The number of flushes that clients have requested, including requests with FUA (force unit
    /// access).
    pub flushes: u64,
}

/// A request of the engine. `disk` is an index into the specs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum DiskRequest {
    /// The first request: open these disks, and serve them on the listening socket that follows.
    Open {
        socket: PathBuf,
        specs: Vec<DiskSpec>,
        /// The epochs have higher numbers than this one.
        epochs_after: DiskEpoch,
    },
    Prepare,
    Pause {
        limit_ms: u64,
    },
    Cut,
    Settled,
    /// The VM runs.
    Resumed,
    /// Answer NBD requests on this core, before other threads run there.
    AnswerOn {
        core: u32,
    },
    Pages {
        disk: usize,
        epoch: DiskEpoch,
        from: DiskBlock,
    },
    Release {
        epochs: Vec<DiskEpoch>,
    },
    GiveBack {
        epochs: Vec<DiskEpoch>,
    },
    Stats,
    /// Open other disks for the same exports, without serving them.
    Stage {
        specs: Vec<DiskSpec>,
    },
    /// Serve the staged disks, and stage those that were served.
    Exchange,
    /// Close the staged disks.
    Dismiss,
    /// Say which disks are served.
    Staging,
    End,
}

/// The server's response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum DiskResponse {
    Done,
    /// The size of each disk.
    Opened {
        disk_bytes: Vec<u64>,
    },
    /// The epoch of each disk.
    Cut {
        epochs: Vec<DiskEpoch>,
    },
    Pages {
        extents: Vec<Extent>,
        next: Option<DiskBlock>,
    },
    Stats(ServerStats),
    Staging {
        is_staged: bool,
        served: Vec<PathBuf>,
        written_bytes: u64,
    },
    Failed {
        problem: String,
        fix: Option<String>,
        disk_full: bool,
    },
}

/// The largest number of extents in one response.
const EXTENTS_MAX: usize = 4096;
/// The largest number of disks of a server.
const DISKS_MAX: usize = 64;

/// Receives one request, for the fuzzers. False if no valid request follows.
pub(crate) fn receive_request(control: &std::os::unix::net::UnixStream) -> bool {
    matches!(frame::receive::<DiskRequest>(control), Ok(Some(_)))
}
