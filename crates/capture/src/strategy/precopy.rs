//! Pre-copy: rounds of scan and copy while the guest runs, until so few pages are left that the
//! pause is cheap. When rounds end is `keyframe-scheduling`'s policy.

use super::{Hands, Strategy};
use crate::cycle::CycleError;
use keyframe_scheduling::{Decision, PrecopyPolicy};

/// Copies most pages before the pause.
#[derive(Debug, Default)]
pub struct Precopy {
    /// When rounds end.
    pub policy: PrecopyPolicy,
}

impl Strategy for Precopy {
    fn name(&self) -> &'static str {
        "precopy"
    }

    fn before(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        while self.policy.decide(&hands.timeline.rounds) == Decision::Again {
            hands.round()?;
        }
        if hands.timeline.rounds.is_empty() {
            hands.relieve(None)?;
        }
        let last = hands.timeline.rounds.last().map_or(0, |round| round.pages);
        hands.prepare_memory(last.saturating_mul(2).saturating_add(4096))
    }

    fn freeze(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        hands.take_the_rest()
    }
}

/// Pre-scan (Schoetterl-Glausch 2018): pre-copy whose one round only finds and protects. The pause
/// copies all dirty pages, and its scan finds few of them: what it saves is the walk over pages
/// that were written once and not again.
#[derive(Debug, Default)]
pub struct Prescan;

impl Strategy for Prescan {
    fn name(&self) -> &'static str {
        "pre-scan"
    }

    fn before(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        // What it drains is owed, and the pause takes all that is owed.
        hands.log.drain().map_err(CycleError::Scan)?;
        hands.relieve(None)?;
        let owed = hands.log.owed_pages();
        hands.prepare_memory(owed + owed / 4 + 4096)
    }

    fn freeze(&mut self, hands: &mut Hands<'_>) -> Result<(), CycleError> {
        hands.take_the_rest()
    }
}
