//! Chooses between pre-copy and stop-and-copy for each checkpoint, by what the previous ones
//! measured.
//!
//! Copying in the pause costs `dirty pages x time per page`. A pre-copy round shortens the pause
//! and costs the guest a fault for each page that it writes again. So few pages are copied in the
//! pause, and many before it; `keyframe-scheduling` draws the line. Fork and copy-on-write are
//! chosen by the user alone (docs/design/results/capture.md has the measurements).

use super::{CopyStrategy, PrecopyStrategy, StopCopyStrategy};
use crate::checkpoint::CaptureTimeline;
use crate::context::CaptureContext;
use crate::error::CaptureError;
use keyframe_scheduling::{CopyChoice, CopyCost, CopyPolicy};

/// A strategy that chooses pre-copy or stop-and-copy for each checkpoint, whichever costs less.
#[derive(Debug, Default)]
pub struct AutoStrategy {
    /// The policy that chooses.
    pub policy: CopyPolicy,
    /// The pre-copy strategy, whose own policy the caller may set.
    pub precopy: PrecopyStrategy,
    stop_copy: StopCopyStrategy,
    choice: CopyChoice,
    cost: CopyCost,
}

impl AutoStrategy {
    fn chosen(&mut self) -> &mut dyn CopyStrategy {
        match self.choice {
            CopyChoice::Precopy => &mut self.precopy,
            CopyChoice::StopCopy => &mut self.stop_copy,
        }
    }
}

impl CopyStrategy for AutoStrategy {
    fn name(&self) -> &'static str {
        match self.choice {
            CopyChoice::Precopy => self.precopy.name(),
            CopyChoice::StopCopy => self.stop_copy.name(),
        }
    }

    fn before(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        let dirty_pages = context.expected_pages();
        self.choice = if context.is_complete {
            CopyChoice::Precopy
        } else {
            self.policy.choose(dirty_pages, &self.cost)
        };
        self.chosen().before(context)
    }

    fn freeze(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        self.chosen().freeze(context)
    }

    fn learn(&mut self, timeline: &CaptureTimeline, _: u64) {
        self.cost.learn(timeline.rounds.iter().copied(), timeline.pause_pages, timeline.copy_ns);
    }
}
