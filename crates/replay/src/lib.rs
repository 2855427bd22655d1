//! Recordings of a VM's run: QEMU's record/replay log, the files beside it, and the intervals
//! between checkpoints in which it is replayed.
//!
//! ```text
//!   record ─▶ REC/replay.log, recording.json ─▶ intervals [checkpoint i, checkpoint i+1) ─▶ one replay each
//! ```
//!
//! - [`recording`]: a recording on disk.
//! - [`log`]: QEMU's log, read event by event, and the index of its events.
//! - [`interval`]: the intervals of a recording.
//! - [`cut_points`]: where to cut a recording that has no checkpoints yet; [`GrowingLog`]: the same
//!   while the log is being written.
//! - [`LogTimes`]: when each part of the log was written. [`Console`]: the guest's console output.
//! - [`StallDetector`]: whether a replay still advances.
//!
//! This crate starts no QEMU and reads no store.

mod console;
pub mod cut_points;
mod error;
mod growing_log;
mod icount_warp;
pub mod interval;
pub mod log;
mod log_times;
pub mod recording;
mod stall_detector;

pub use console::{Console, ConsoleLine, read_console_output};
pub use error::{Error, Result};
pub use growing_log::GrowingLog;
pub use log_times::{LogObservations, LogTime, LogTimeRecorder, LogTimes};
pub use recording::{Recording, RecordingEnding, RecordingMeta};
pub use stall_detector::{ReplayProgress, StallDetector};
