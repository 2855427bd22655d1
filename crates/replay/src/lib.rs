//! Recordings of a VM's run: what QEMU wrote down of it (`log`), what is kept beside that
//! (`recording`), and the intervals between checkpoints in which it is replayed (`interval`); where
//! one is cut that has none yet (`cutting`), also while it is being written (`growing`); what a
//! replay is to read otherwise than QEMU wrote it (`warps`).
//!
//! ```text
//!   record ──▶ REC/replay.log + recording.json ──▶ intervals [checkpoint i, checkpoint i+1) ──▶ one replay each
//!                    │
//!                    └─ pauses, console output and its end, by instruction
//! ```
//!
//! No QEMU is started here, and no store is read.

mod console;
pub mod cutting;
mod error;
mod growing;
pub mod interval;
pub mod log;
mod progress;
pub mod recording;
mod times;
mod warps;

pub use console::{Console, Written, read_output};
pub use error::{Error, Result};
pub use growing::Growing;
pub use progress::{Progress, Verdict};
pub use recording::{Ending, Recording, RecordingMeta};
pub use times::{Keeper, Times};
