//! Pre-copy or stop-and-copy? Whichever makes the pause no longer than it must be, at the least
//! cost to the guest.
//!
//! `copy in the pause [ns] = dirty pages x ns per page`. Up to a tolerated time no pre-copy is
//! worth its faults: each page that a round protects and the guest writes again costs the guest
//! about 1 us.

use crate::Round;

/// What past checkpoints measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Nanoseconds that copying a page takes; 0 where unknown.
    pub copy_ns_per_page: u64,
}

impl Observed {
    /// Takes in a checkpoint: its rounds, the pages copied in its pause and how long that took.
    pub fn learn(&mut self, rounds: impl Iterator<Item = Round>, pause_pages: u64, copy_ns: u64) {
        let (mut pages, mut took_ns) = (pause_pages, copy_ns);
        for round in rounds {
            pages = pages.saturating_add(round.pages);
            took_ns = took_ns.saturating_add(round.duration_ns);
        }
        // A handful of pages says more about calls than about copying.
        if pages < 64 {
            return;
        }
        let measured = (took_ns / pages).max(1);
        self.copy_ns_per_page = if self.copy_ns_per_page == 0 {
            measured
        } else {
            (3 * self.copy_ns_per_page + measured) / 4
        };
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Most pages before the pause.
    #[default]
    Precopy,
    /// All in the pause.
    StopCopy,
}

/// How long a copy in the pause is tolerated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoPolicy {
    /// In nanoseconds.
    pub tolerated_copy_ns: u64,
}

impl Default for AutoPolicy {
    fn default() -> Self {
        Self { tolerated_copy_ns: 200_000 }
    }
}

impl AutoPolicy {
    /// For a checkpoint that will hold about `dirty_pages` (unknown: as many as may be).
    pub fn choose(&self, dirty_pages: Option<u64>, observed: &Observed) -> Choice {
        match dirty_pages {
            Some(pages)
                if observed.copy_ns_per_page > 0
                    && pages.saturating_mul(observed.copy_ns_per_page)
                        <= self.tolerated_copy_ns =>
            {
                Choice::StopCopy
            }
            _ => Choice::Precopy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_pages_are_copied_in_the_pause_and_many_before_it() {
        let policy = AutoPolicy::default();
        let mut observed = Observed::default();
        assert_eq!(policy.choose(Some(3), &observed), Choice::Precopy, "nothing was measured yet");
        observed.learn([Round { pages: 10_000, duration_ns: 10_000_000 }].into_iter(), 0, 0);
        assert_eq!(observed.copy_ns_per_page, 1000);
        assert_eq!(policy.choose(Some(200), &observed), Choice::StopCopy);
        assert_eq!(policy.choose(Some(201), &observed), Choice::Precopy);
        assert_eq!(policy.choose(None, &observed), Choice::Precopy);
        observed.learn(std::iter::empty(), 3, 9_000_000);
        assert_eq!(observed.copy_ns_per_page, 1000, "three pages measure nothing");
        observed.learn(std::iter::empty(), 1000, 2_000_000);
        assert_eq!(observed.copy_ns_per_page, 1250);
    }
}
