//! The process that serves the disks, and the engine's handle of it.
//!
//! ```text
//!   engine ── Disks ──socket pair── serve() ── overlays, NBD server ──unix socket── QEMU
//!      └────── SlotFile: reads the content of an epoch by itself
//!
//!   serving ──end──▶ clients are cut off ──▶ synced ──▶ exit
//!      └──engine gone──▶ epochs released, no pause ──last client gone──▶ synced ──▶ exit
//!
//!   rollback:   stage ──▶ others open beside ──exchange──▶ served in place of those before ──dismiss──▶ those are closed
//!                              └──dismiss──▶ closed               └──exchange──▶ back
//! ```
//!
//! It is a process of its own so that the guest keeps its disk when the engine dies.
//!
//! Invariants: what an order says is bounded and checked; each order has one answer, in order. A
//! server without an engine holds no epoch, so that its overlay does not grow, and acknowledges no
//! flush before its sync.
//!
//! Left out: taking hold of a server whose engine died.

mod client;
mod frame;
mod server;

pub use client::Disks;
pub use server::serve;

use crate::overlay::Lasting;
use crate::{DiskBlock, DiskEpoch, Extent, ImageFormat};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A disk to be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The name that QEMU asks for.
    pub export: String,
    /// The image, which is never written.
    pub base: PathBuf,
    /// How it is encoded.
    pub format: ImageFormat,
    /// No image, but so many bytes of zeros: `base` and `format` say nothing.
    #[serde(default)]
    pub blank_bytes: Option<u64>,
    /// The directory of the overlay; made unless it is there.
    pub overlay: PathBuf,
    /// The layer between them, as `open_layer` of [`serve`] understands it.
    pub layer: Option<String>,
    /// What is written is thrown away at the end: no flush waits for the medium.
    #[serde(default)]
    pub temporary: bool,
}

impl Spec {
    fn lasting(&self) -> Lasting {
        if self.temporary { Lasting::Temporary } else { Lasting::Durable }
    }
}

/// How one disk is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The export.
    pub export: String,
    /// Bytes of the disk.
    pub disk_bytes: u64,
    /// Bytes of the overlay's data file.
    pub data_bytes: u64,
    /// Bytes in it that will be used again first.
    pub free_bytes: u64,
    /// Extents held in memory.
    pub extents: u64,
    /// Blocks written since the last cut.
    pub dirty_blocks: u64,
    /// Epochs in flight.
    pub in_flight: u64,
    /// Syncs since the start.
    pub syncs: u64,
}

/// How all of the server is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStats {
    /// Each disk, in the order of the specs.
    pub disks: Vec<Stats>,
    /// NBD clients now.
    pub clients: u64,
    /// Requests answered.
    pub requests: u64,
    /// Bytes read by clients.
    pub read_bytes: u64,
    /// Bytes written by clients.
    pub written_bytes: u64,
    /// Bytes made zero by clients.
    pub zeroed_bytes: u64,
    /// Bytes discarded by clients.
    pub discarded_bytes: u64,
    /// Flushes, FUA included.
    pub flushes: u64,
}

/// What the engine asks for. `disk` is an index into the specs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Order {
    /// The first one: open these, and listen.
    Open {
        socket: PathBuf,
        specs: Vec<Spec>,
    },
    Prepare,
    Pause {
        limit_ms: u64,
    },
    Cut,
    Settled,
    /// The VM runs.
    Resumed,
    /// Requests are answered on this core, in front of what else runs there.
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
    /// Opens others for the same exports, beside those that are served.
    Stage {
        specs: Vec<Spec>,
    },
    /// Serves those, and keeps the ones before.
    Exchange,
    /// Closes those that are not served.
    Dismiss,
    End,
}

/// What the server answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Answer {
    Done,
    /// One of each disk.
    Opened {
        disk_bytes: Vec<u64>,
    },
    /// One of each disk.
    Cut {
        epochs: Vec<DiskEpoch>,
    },
    Pages {
        extents: Vec<Extent>,
        next: Option<DiskBlock>,
    },
    Stats(ServerStats),
    Failed {
        problem: String,
        disk_full: bool,
    },
}

/// How many extents one answer has.
const EXTENTS_MAX: usize = 4096;
/// How many disks a server has.
const DISKS_MAX: usize = 64;

/// Receives one order, for the fuzzers; false at the end of what can be understood.
pub(crate) fn receive_order(control: &std::os::unix::net::UnixStream) -> bool {
    matches!(frame::receive::<Order>(control), Ok(Some(_)))
}
