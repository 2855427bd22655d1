//! A captured checkpoint and the record of how it was captured: its phases and its timeline.

use crate::ports::PausedFind;
use keyframe_scheduling::Round;
use keyframe_units::RamLayout;
use std::time::{Instant, SystemTime};

/// The phases that one checkpoint goes through, from the first scan until it is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CapturePhase {
    /// Pages are copied while the guest runs.
    Precopy,
    /// The VM is about to be paused.
    Stopping,
    /// The VM is paused.
    Paused,
    /// The device state is saved.
    DeviceState,
    /// The last dirty pages are found, and copied or frozen.
    Copied,
    /// The VM runs again.
    Resumed,
    /// The encoder hands pages to the sink.
    Encoding,
    /// The sink makes the checkpoint durable.
    Sealing,
    /// The checkpoint is sealed.
    Sealed,
}

impl CapturePhase {
    /// All phases, in the order in which a checkpoint goes through them.
    pub const ALL: [Self; 9] = [
        Self::Precopy,
        Self::Stopping,
        Self::Paused,
        Self::DeviceState,
        Self::Copied,
        Self::Resumed,
        Self::Encoding,
        Self::Sealing,
        Self::Sealed,
    ];

    /// Returns the phase's name in status output and in `--fault` options, such as `device-state`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Stopping => "stopping",
            Self::Paused => "paused",
            Self::Copied => "copied",
            Self::DeviceState => "device-state",
            Self::Resumed => "resumed",
            Self::Encoding => "encoding",
            Self::Sealing => "sealing",
            Self::Sealed => "sealed",
        }
    }
}

/// The durations of the steps of one checkpoint, in nanoseconds.
///
/// The pause begins just before the VMM is asked to stop the VM, and ends when the VMM has
/// confirmed that the VM runs. Its five steps (`stop_ns`, `device_state_ns`, `scan_ns`, `copy_ns`,
/// `resume_ns`) follow one another; their sum is `pause_ns` less the time between clock readings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptureTimeline {
    /// The pre-copy rounds, oldest first.
    pub rounds: Vec<Round>,
    /// The duration of the whole pause; 0 if the VM was paused before the checkpoint.
    pub pause_ns: u64,
    /// The time from the request to stop until the VMM confirmed it.
    pub stop_ns: u64,
    /// The time of the scan for the last dirty pages, in the pause.
    pub scan_ns: u64,
    /// How the last dirty pages were found, in the pause.
    pub found_by: PausedFind,
    /// The time of copying or freezing the last dirty pages, in the pause.
    pub copy_ns: u64,
    /// The time of saving the device state, in the pause.
    pub device_state_ns: u64,
    /// The time from the request to resume until the VMM confirmed it.
    pub resume_ns: u64,
    /// The time of handing the pages to the sink, after the pause.
    pub encode_ns: u64,
    /// The number of pages copied in the pause.
    pub pause_pages: u64,
    /// The time of copying the pages that the pause only froze, after the guest was resumed.
    pub collect_ns: u64,
    /// The name of the strategy that copied the pages.
    pub strategy: &'static str,
    /// The time from the previous checkpoint's pause to this one's; 0 for the first checkpoint.
    pub interval_ns: u64,
}

/// A checkpoint in memory that the sink has not sealed yet.
#[derive(Clone, Debug)]
pub struct CapturedCheckpoint {
    /// The RAM blocks at the instant of the pause.
    pub ram: RamLayout,
    /// The VMM's device state.
    pub device_state: Vec<u8>,
    /// The wall clock at the pause.
    pub taken_at: SystemTime,
    /// The monotonic clock at the pause.
    pub paused_at: Instant,
    /// The number of distinct pages that the checkpoint holds.
    pub dirty_pages: u64,
    /// The durations of the steps of the capture.
    pub timeline: CaptureTimeline,
}
