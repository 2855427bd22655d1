//! The strategies by which a checkpoint's pages are copied, one per file.
//!
//! ```text
//!               guest runs            paused, devices saved        guest runs again
//!   stop-copy                         drain, copy all
//!   precopy     rounds: drain, copy   drain, copy the rest
//!   pre-scan    drain                 drain, copy all
//!   cow                               drain                        copy all, each page before its first write
//!   paused-scan   a pause: drain; copy   drain, copy the rest
//!   fork                              drain, fork                  copy all from the child process
//! ```
//!
//! Invariants: when [`CopyStrategy::collect`] returns, the staged pages and the pages that were
//! handed over include every page of `held` as it was at the pause; after an error,
//! [`CopyStrategy::release`] leaves nothing in the VM.

mod auto;
mod cow;
mod fork;
mod paused_scan;
mod precopy;
mod stop_copy;

pub use auto::AutoStrategy;
pub use cow::CopyOnWriteStrategy;
pub use fork::ForkStrategy;
pub use paused_scan::PausedScanStrategy;
pub use precopy::{PrecopyStrategy, PrescanStrategy};
pub use stop_copy::StopCopyStrategy;

use crate::checkpoint::CaptureTimeline;
use crate::context::CaptureContext;
use crate::error::CaptureError;

/// A method to copy the pages of a checkpoint.
pub trait CopyStrategy: Send {
    /// Returns the strategy's name on the command line. A strategy that chooses among others names
    /// the one of the last checkpoint.
    fn name(&self) -> &'static str;

    /// Returns true if the strategy scans while the VM is paused, and never while it runs. Then it
    /// copies the first checkpoint too.
    fn scans_in_pauses(&self) -> bool {
        false
    }

    /// Returns true if the VM is to be paused for a scan of its own, after which the found pages are
    /// copied while the guest runs. Called before [`CopyStrategy::before`].
    fn wants_scan_pause(&self, context: &mut CaptureContext<'_>) -> bool {
        let _ = context;
        false
    }

    /// Does the strategy's work before the pause, while the guest runs. An error fails the
    /// checkpoint; its pages stay owed.
    fn before(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError>;

    /// Does the strategy's work in the pause, after the device state was saved. When it returns,
    /// the pages that remain to be copied can no longer change before their copy. An error fails
    /// the checkpoint; its pages stay owed.
    fn freeze(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError>;

    /// Copies the frozen pages after the pause, while the guest runs again. An error fails the
    /// checkpoint; its pages stay owed.
    fn collect(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        let _ = context;
        Ok(())
    }

    /// Releases what the strategy holds in the VM. Called after each checkpoint, whether it was
    /// captured or failed. Does nothing by default.
    fn release(&mut self) {}

    /// Tells the strategy how a captured checkpoint of `dirty_pages` pages went, so that it can
    /// choose better next time. Does nothing by default.
    fn learn(&mut self, timeline: &CaptureTimeline, dirty_pages: u64) {
        let _ = (timeline, dirty_pages);
    }
}
