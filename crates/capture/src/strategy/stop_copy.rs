//! Stop and copy: every dirty page is copied in the pause. The simplest strategy, and the baseline
//! of the others.

use super::CopyStrategy;
use crate::context::CaptureContext;
use crate::error::CaptureError;

/// Stop-and-copy: copies every page in the pause.
#[derive(Debug, Default)]
pub struct StopCopyStrategy;

impl CopyStrategy for StopCopyStrategy {
    fn name(&self) -> &'static str {
        "stop-copy"
    }

    fn before(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        let expected = context.expected_pages();
        context.open_window()?;
        context.relieve_memory(expected)?;
        let expected = expected.unwrap_or(0);
        // More than expected, since the guest writes on between the count and the pause.
        context.prepare_memory(expected + expected / 4 + 4096).map(drop)
    }

    fn freeze(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        context.copy_remaining()
    }
}
