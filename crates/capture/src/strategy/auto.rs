//! Chooses for each checkpoint by what the ones before it measured.
//!
//! Copying in the pause costs `dirty pages x time per page`; a pre-copy round saves that and costs
//! the guest a fault for each page that it writes again. So few pages are copied in the pause, many
//! before it; which is few, `keyframe-scheduling` says. Fork and copy-on-write lose to pre-copy at
//! every dirty rate that was measured (`bench pause`), so they are chosen by hand alone.

use super::{Hands, Precopy, StopCopy, Strategy};
use crate::cycle::{CycleError, Timeline};
use keyframe_scheduling::{AutoPolicy, Choice, Observed};

/// Pre-copy or stop-and-copy, whichever fits.
#[derive(Debug, Default)]
pub struct Auto {
    /// The policy.
    pub policy: AutoPolicy,
    /// The one of the two that has a policy of its own.
    pub precopy: Precopy,
    stop_copy: StopCopy,
    choice: Choice,
    observed: Observed,
}

impl Auto {
    fn chosen(&mut self) -> &mut dyn Strategy {
        match self.choice {
            Choice::Precopy => &mut self.precopy,
            Choice::StopCopy => &mut self.stop_copy,
        }
    }
}

impl Strategy for Auto {
    fn name(&self) -> &'static str {
        match self.choice {
            Choice::Precopy => self.precopy.name(),
            Choice::StopCopy => self.stop_copy.name(),
        }
    }

    fn before(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        let dirty_pages = hands.expected_pages();
        self.choice = if hands.complete {
            Choice::Precopy
        } else {
            self.policy.choose(dirty_pages, &self.observed)
        };
        self.chosen().before(hands)
    }

    fn freeze(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        self.chosen().freeze(hands)
    }

    fn learn(&mut self, timeline: &Timeline, _: u64) {
        self.observed.learn(
            timeline.rounds.iter().copied(),
            timeline.pause_pages,
            timeline.copy_ns,
        );
    }
}
