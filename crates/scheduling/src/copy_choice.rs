//! Chooses between pre-copy and stop-and-copy for one checkpoint.
//!
//! `copy in the pause [ns] = dirty pages x ns per page`. Up to a tolerated time, pre-copy costs
//! more than it saves: each page that a round protects and the guest writes again costs the guest a
//! fault of about 1 us.

use crate::Round;

/// The time to copy a page, as past checkpoints measured it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyCost {
    /// The time in nanoseconds per page; 0 if it is unknown.
    pub ns_per_page: u64,
}

impl CopyCost {
    /// Learns from a checkpoint: `rounds` are its rounds, `pause_pages` the pages copied in its
    /// pause, and `copy_ns` the time of that copy in nanoseconds. Ignores a checkpoint of fewer
    /// than 64 pages.
    pub fn learn(&mut self, rounds: impl Iterator<Item = Round>, pause_pages: u64, copy_ns: u64) {
        let (mut pages, mut took_ns) = (pause_pages, copy_ns);
        for round in rounds {
            pages = pages.saturating_add(round.pages);
            took_ns = took_ns.saturating_add(round.duration_ns);
        }
        // A few pages measure the calls, not the copying.
        if pages < 64 {
            return;
        }
        let measured = (took_ns / pages).max(1);
        self.ns_per_page =
            if self.ns_per_page == 0 { measured } else { (3 * self.ns_per_page + measured) / 4 };
    }
}

/// The chosen method to copy the pages of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyChoice {
    /// Most pages are copied before the pause.
    #[default]
    Precopy,
    /// All pages are copied in the pause.
    StopCopy,
}

/// The rule that chooses between pre-copy and copying in the pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPolicy {
    /// The longest copy in the pause, in nanoseconds.
    pub tolerated_copy_ns: u64,
}

impl Default for CopyPolicy {
    fn default() -> Self {
        Self { tolerated_copy_ns: 200_000 }
    }
}

impl CopyPolicy {
    /// Returns the method for a checkpoint of about `dirty_pages` pages (`None` if their number is
    /// unknown), whose copy costs `cost`.
    pub fn choose(&self, dirty_pages: Option<u64>, cost: &CopyCost) -> CopyChoice {
        match dirty_pages {
            Some(pages)
                if cost.ns_per_page > 0
                    && pages.saturating_mul(cost.ns_per_page) <= self.tolerated_copy_ns =>
            {
                CopyChoice::StopCopy
            }
            _ => CopyChoice::Precopy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_pages_are_copied_in_the_pause_and_many_before_it() {
        let policy = CopyPolicy::default();
        let mut cost = CopyCost::default();
        assert_eq!(policy.choose(Some(3), &cost), CopyChoice::Precopy, "nothing was measured yet");
        cost.learn([Round { pages: 10_000, duration_ns: 10_000_000 }].into_iter(), 0, 0);
        assert_eq!(cost.ns_per_page, 1000);
        assert_eq!(policy.choose(Some(200), &cost), CopyChoice::StopCopy);
        assert_eq!(policy.choose(Some(201), &cost), CopyChoice::Precopy);
        assert_eq!(policy.choose(None, &cost), CopyChoice::Precopy);
        cost.learn(std::iter::empty(), 3, 9_000_000);
        assert_eq!(cost.ns_per_page, 1000, "three pages measure nothing");
        cost.learn(std::iter::empty(), 1000, 2_000_000);
        assert_eq!(cost.ns_per_page, 1250);
    }
}
