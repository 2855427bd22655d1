//! The reasons for which a checkpoint fails.

use crate::ports::BoxError;
use crate::staged_pages::StagingError;

/// The reason why no checkpoint was captured. No page is lost: the next checkpoint copies them all.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The VMM failed to carry out an operation.
    #[error("{operation}: {source}")]
    Machine {
        /// The operation, such as "pause the VM".
        operation: &'static str,
        /// The VMM's error.
        source: BoxError,
    },
    /// The scan for dirty pages failed. Every page counts as dirty from now on.
    #[error("scan for dirty pages: {0}")]
    Scan(BoxError),
    /// Dirty pages could not be copied.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// The encoder did not take the pages or the checkpoint.
    #[error("{operation}: {source}")]
    Sink {
        /// The operation, such as "hand pages over".
        operation: &'static str,
        /// The encoder's error.
        source: BoxError,
    },
    /// The VM ran during the pause, so the copied pages are not of one instant.
    #[error("the VM ran during the pause: its watchdog or another monitor client resumed it")]
    Torn,
    /// Pages of a frozen set changed without a notice to copy them first.
    #[error(
        "the guest's balloon, its free page reporting or the host's KSM discarded or merged \
         {pages} pages while the checkpoint was copied"
    )]
    Unannounced {
        /// The number of pages.
        pages: u64,
    },
    /// The VMM resized a RAM block during the checkpoint.
    #[error("the VMM resized a RAM block while the checkpoint was taken")]
    Resized,
    /// The VMM's RAM blocks differ from the tracked ones.
    #[error("the VM's RAM blocks have changed: memory was plugged or unplugged")]
    OtherRam,
    /// The observer found the paused VM and the captured pages to differ.
    #[error("audit: {0}")]
    Audit(BoxError),
}

/// Makes a [`CaptureError::Machine`] of the VMM's error in `operation`.
pub(crate) fn machine_error(operation: &'static str) -> impl Fn(BoxError) -> CaptureError {
    move |source| CaptureError::Machine { operation, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoder::EncodeError;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_the_golden_ones() {
        let source = || BoxError::from("the cause");
        let full = StagingError::Full { needed_pages: 9, free_pages: 2, capacity_pages: 8 };
        let read = StagingError::Read { pages: 3, source: source() };
        let capture = [
            CaptureError::Machine { operation: "pause the VM", source: source() },
            CaptureError::Scan(source()),
            CaptureError::Staging(full),
            CaptureError::Staging(read),
            CaptureError::Sink { operation: "hand pages over", source: source() },
            CaptureError::Torn,
            CaptureError::Unannounced { pages: 7 },
            CaptureError::Resized,
            CaptureError::OtherRam,
            CaptureError::Audit(source()),
        ];
        let encode =
            [EncodeError::Sink { operation: "store pages", source: source() }, EncodeError::Behind];
        let mut texts: Vec<String> = capture.iter().map(|e| error_text(e, None)).collect();
        texts.extend(encode.iter().map(|e| error_text(e, None)));
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
