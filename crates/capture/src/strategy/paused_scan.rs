//! Scans in pauses alone: for a VM into whose RAM the kernel writes by direct I/O.
//!
//! ```text
//!               guest runs     paused   guest runs                paused, devices saved
//!   few pages                                                     drain, copy all
//!   many        (nothing)      drain    copy what was drained     drain, copy the rest
//! ```
//!
//! The kernel reports a page when it pins the page for a read from the disk, and the data arrives
//! later. A scan in between would clear the report, and the data would be missed. A paused VM has
//! no read under way. So a page that is pinned after one scan is reported by the next one.

use super::CopyStrategy;
use crate::context::CaptureContext;
use crate::error::CaptureError;

/// More pages than this are copied before the pause: 64 MiB.
const PAGES_MAX: u64 = 16_384;

/// A strategy that looks for dirty pages only in pauses, for a VM into whose RAM the kernel writes
/// by direct I/O. It copies few pages in the pause that found them, and many after it.
#[derive(Debug, Default)]
pub struct PausedScanStrategy;

impl CopyStrategy for PausedScanStrategy {
    fn name(&self) -> &'static str {
        "paused-scan"
    }

    fn scans_in_pauses(&self) -> bool {
        true
    }

    fn wants_scan_pause(&self, context: &mut CaptureContext<'_>) -> bool {
        let expected = context.expected_pages().unwrap_or(0).max(context.log.owed_pages());
        context.is_complete || context.lacked_pages > 0 || expected > PAGES_MAX
    }

    fn before(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        let expected = match context.timeline.rounds.last() {
            // The guest writes while they are copied, and the encoder still holds them.
            Some(round) => round.pages / 2,
            None => context.expected_pages().unwrap_or(0).max(context.log.owed_pages()),
        };
        context.prepare_memory(expected + expected / 4 + 4096).map(drop)
    }

    fn freeze(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        context.copy_remaining()
    }
}
