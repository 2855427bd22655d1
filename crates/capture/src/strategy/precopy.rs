//! Pre-copy: rounds of scan and copy while the guest runs, until so few pages are left that the
//! pause is short. A policy of `keyframe-scheduling` ends the rounds.

use super::CopyStrategy;
use crate::context::CaptureContext;
use crate::error::CaptureError;
use keyframe_scheduling::{PrecopyPolicy, RoundDecision};

/// How often pre-copy waits for memory before it pauses the VM in any case.
const WAITS_MAX: usize = 3;

/// Pre-copy: copies most pages before the pause, in rounds.
#[derive(Debug, Default)]
pub struct PrecopyStrategy {
    /// The policy that ends the rounds.
    pub policy: PrecopyPolicy,
}

impl CopyStrategy for PrecopyStrategy {
    fn name(&self) -> &'static str {
        "precopy"
    }

    fn before(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        let mut first = 0;
        for _ in 0..WAITS_MAX {
            while self.policy.decide(&context.timeline.rounds[first..]) == RoundDecision::Again {
                context.round()?;
            }
            context.window_round()?;
            if context.timeline.rounds.is_empty() {
                context.relieve_memory(None)?;
            }
            let last = context.timeline.rounds.last().map_or(0, |round| round.pages);
            if !context.prepare_memory(last.saturating_mul(2).saturating_add(4096))? {
                break;
            }
            // The guest wrote while the encoder freed memory, for seconds perhaps. Without more
            // rounds the pause would copy all of that.
            first = context.timeline.rounds.len();
        }
        Ok(())
    }

    fn freeze(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        context.copy_remaining()
    }
}

/// Pre-scan (Schoetterl-Glausch 2018): pre-copy with one round that only finds and protects pages.
/// The pause copies all dirty pages, but its scan finds few: it need not walk the pages that the
/// guest wrote once and not again.
#[derive(Debug, Default)]
pub struct PrescanStrategy;

impl CopyStrategy for PrescanStrategy {
    fn name(&self) -> &'static str {
        "pre-scan"
    }

    fn before(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        // The drained pages are owed, and the pause copies all owed pages.
        if context.log.has_window() {
            context.open_window()?;
        } else {
            context.log.drain().map_err(CaptureError::Scan)?;
        }
        context.relieve_memory(None)?;
        let owed = context.log.owed_pages();
        context.prepare_memory(owed + owed / 4 + 4096).map(drop)
    }

    fn freeze(&mut self, context: &mut CaptureContext<'_>) -> Result<(), CaptureError> {
        context.copy_remaining()
    }
}
