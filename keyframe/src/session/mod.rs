//! A VM under continuous checkpoints, from its launch to its end.
//!
//! ```text
//!   launch (paused) ─▶ audit ─▶ attach ─▶ watchdog ─▶ cont ─▶ ┌ due, or asked for ─▶ cycle ┐ ─▶ end: finish the pack,
//!        │ refused: ended before the guest ran                └────────────────────────────┘    kill or keep the VM
//! ```
//!
//! One thread does all of it, at a raised priority while it captures and at a lowered one while it encodes; the control
//! socket's threads only hand requests over. Whatever the engine suffers, the VM outlives it.

mod audit;
mod engine;
mod faults;
mod launch;
mod machine;
mod sink;
mod watch;

pub use faults::Fault;

use crate::control::{OnExit, Strategy};
use crate::failure::Outcome;
use keyframe_store::Store;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// What `run` was asked for.
pub struct Options {
    /// Between checkpoints; none: by command only.
    pub interval: Option<Duration>,
    /// End after so many.
    pub count: Option<u64>,
    /// The VM's name.
    pub name: Option<String>,
    /// What becomes of the VM at the end.
    pub on_exit: OnExit,
    /// How pages are copied.
    pub strategy: Strategy,
    /// Staging memory.
    pub staging_mib: Option<u64>,
    /// The watchdog's patience.
    pub pause_limit: Duration,
    /// A line for each checkpoint.
    pub verbose: bool,
    /// Nothing but errors.
    pub quiet: bool,
    /// Full copies for comparison.
    pub audit: Option<PathBuf>,
    /// A fault to suffer.
    pub fault: Option<Fault>,
}

/// Runs the VM of `command` under checkpoints into `store`, to its end.
pub fn run(store: &Store, command: Vec<OsString>, options: Options) -> Outcome {
    let parts = launch::launch(store, command, &options)?;
    engine::Engine::new(store, parts, options)?.run()
}
