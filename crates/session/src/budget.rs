//! The budgets of a session: `--max-pause` and `--max-overhead`, kept by what each checkpoint
//! measured.

use super::SessionOptions;
use crate::error::{Error, Result};
use keyframe_inspect::entry::Entry;
use keyframe_scheduling::{Budget, CheckpointCost, Tuned, Tuner, TuningReason};
use keyframe_units::duration_ns;

/// A change of the interval smaller than this, in percent, is not worth a message.
const SAY_PERCENT: u64 = 25;

/// Checks that a session with a budget has an interval, by which the budget is kept. Called before
/// the VM is launched. Error: [`Error::BudgetWithoutInterval`].
pub fn check(options: &SessionOptions) -> Result<()> {
    if options.interval.is_some() || (options.max_pause.is_none() && options.max_overhead.is_none())
    {
        return Ok(());
    }
    Err(Error::BudgetWithoutInterval)
}

/// Adjusts the interval and the pre-copying of a session so that its budgets are kept.
pub struct BudgetKeeper {
    tuner: Tuner,
    said_ns: u64,
    said: TuningReason,
}

impl BudgetKeeper {
    /// Makes the budget of a session; `None` if the options set no limit. Errors: an interval is
    /// missing; the kernel cannot measure the cost of its write protection.
    pub fn new(options: &SessionOptions) -> Result<Option<Self>> {
        let pause_ns = options.max_pause.map(duration_ns);
        let budget = Budget { pause_ns, overhead: options.max_overhead };
        if budget == Budget::default() {
            return Ok(None);
        }
        check(options)?;
        let Some(interval) = options.interval else { return Ok(None) };
        let interval_ns = duration_ns(interval);
        let first_write_ns = keyframe_kernel::protection_cost::first_write_ns()?;
        let tuner = Tuner::new(budget, interval_ns, first_write_ns);
        Ok(Some(Self { tuner, said_ns: interval_ns, said: TuningReason::AsAsked }))
    }

    /// Learns from a sealed checkpoint. Returns the interval and the copying target from now on,
    /// and true if they have changed so much that users should know.
    pub fn learn(&mut self, entry: &Entry) -> (Tuned, bool) {
        // The complete first one says nothing of those that follow.
        if entry.epoch > 0 {
            self.tuner.learn(&CheckpointCost {
                interval_ns: entry.interval_ns,
                pause_ns: entry.pause_ns,
                copy_ns: entry.pause.copy,
                pause_pages: entry.round_pages.last().copied().unwrap_or(0),
                written_pages: entry.round_pages.iter().sum(),
                precopied: entry.strategy == "precopy",
            });
        }
        let tuned = self.tuner.tuned();
        let moved = tuned.interval_ns.abs_diff(self.said_ns) > self.said_ns / 100 * SAY_PERCENT;
        let other = std::mem::discriminant(&tuned.why) != std::mem::discriminant(&self.said);
        if moved || other {
            (self.said_ns, self.said) = (tuned.interval_ns, tuned.why.clone());
        }
        (tuned, moved || other)
    }
}
