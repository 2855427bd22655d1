//! Which older map each checkpoint builds on. The rule makes writing follow the dirty pages, and
//! keeps reading short.
//!
//! Checkpoint k of a chain (k = 0 is complete) takes the largest power b^j that divides k and
//! stores all pages that changed since checkpoint k - b^j. A merge tree laid out over time, b = 16
//! on disk, here b = 4:
//!
//! ```text
//!   k   0   1   2   3   4   5   6   7   8  ...  15  16  17
//!       ◀───┘◀──┘◀──┘       │◀──┘◀──┘   │               │
//!       ◀───────────────────┘◀──────────┘               │        level 1: since k - 4
//!       ◀───────────────────────────────────────────┘◀──┘        level 2: since k - 16
//! ```
//!
//! Reading k follows the parents: at most b - 1 maps for each digit of k written in base b, and the
//! base. Each change is written once per level, so at most log_b k + 1 times. A map that would be
//! as large as a complete one is written complete, and k begins again at 0.
//!
//! Only the writer needs the rule: a checkpoint lists its chain for the reader.

use keyframe_store_format::disk_map::count_blocks;
use keyframe_units::PageSet;
use rangemap::RangeSet;
use std::borrow::Cow;

/// Sets of pages of RAM and of blocks of disks, such as those that have changed.
#[derive(Clone, Debug)]
pub struct Changes {
    pub pages: PageSet,
    pub blocks: RangeSet<u64>,
}

impl Changes {
    /// Creates empty sets, for RAM of `ram_pages` pages.
    pub fn none(ram_pages: u64) -> Self {
        Self { pages: PageSet::new(ram_pages), blocks: RangeSet::new() }
    }

    /// Removes all pages and blocks.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.blocks.clear();
    }

    fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.blocks.is_empty()
    }

    fn len(&self) -> u64 {
        self.pages.len() + count_blocks(&self.blocks)
    }

    /// Adds the pages and blocks of `other`.
    pub fn union_with(&mut self, other: &Self) {
        self.pages.union_with(&other.pages);
        self.blocks.extend(other.blocks.iter().cloned());
    }
}

/// Changes that gather until the next map of the level.
#[derive(Debug)]
struct Level {
    /// The changes since the checkpoint of `chain`.
    changed: Changes,
    /// The maps of that checkpoint, newest first.
    chain: Vec<u64>,
}

/// The state of the rule that decides how many maps the chain of a checkpoint has, between two
/// checkpoints of a run.
#[derive(Debug)]
pub struct Chain {
    base: u64,
    ram_pages: u64,
    /// The k of the next checkpoint.
    next: u64,
    levels: Vec<Level>,
}

/// The contents of the next map of a run.
#[derive(Debug)]
pub struct ChainPlan<'a> {
    /// The pages and blocks to store. `None` for all pages that are not zero and all written
    /// blocks.
    pub changed: Option<Cow<'a, Changes>>,
    /// The numbers of the maps below it, newest first.
    pub below: Vec<u64>,
}

impl Chain {
    /// Creates the rule for a run without checkpoints and with RAM of `ram_pages` pages. `base` is
    /// the base of the rule (see the module), at least 2.
    pub fn new(base: u64, ram_pages: u64) -> Self {
        Self { base: base.max(2), ram_pages, next: 0, levels: Vec::new() }
    }

    /// Returns the contents of the next map, if `changed` changed since the last checkpoint.
    /// `complete_pages` is the size of a complete map in pages and blocks: the pages that are not
    /// zero, and the written blocks.
    pub fn plan<'a>(&self, changed: &'a Changes, complete_pages: u64) -> ChainPlan<'a> {
        let complete = ChainPlan { changed: None, below: Vec::new() };
        let Some(level) = self.levels.get(self.level()).filter(|_| self.next > 0) else {
            return complete;
        };
        let pages = if level.changed.is_empty() {
            Cow::Borrowed(changed)
        } else {
            let mut pages = level.changed.clone();
            pages.union_with(changed);
            Cow::Owned(pages)
        };
        // Without changes the map is never complete, not even if all memory is zero.
        if !pages.is_empty() && pages.len() >= complete_pages {
            return complete;
        }
        ChainPlan { changed: Some(pages), below: level.chain.clone() }
    }

    /// Records that the plan for `changed` was carried out. `chain` is the chain of the checkpoint,
    /// newest map first.
    pub fn commit(&mut self, chain: &[u64], changed: &Changes) {
        if chain.len() == 1 {
            self.levels = vec![self.settled(chain)];
            self.next = 1;
            return;
        }
        let settled = self.level();
        if settled + 1 == self.levels.len()
            && let Some(top) = self.levels.last()
        {
            let above = Level { changed: top.changed.clone(), chain: top.chain.clone() };
            self.levels.push(above);
        }
        for at in 0..self.levels.len() {
            if at <= settled {
                self.levels[at] = self.settled(chain);
            } else {
                self.levels[at].changed.union_with(changed);
            }
        }
        self.next += 1;
    }

    fn settled(&self, chain: &[u64]) -> Level {
        Level { changed: Changes::none(self.ram_pages), chain: chain.to_vec() }
    }

    /// The exponent of the largest power of the base that divides the next k.
    fn level(&self) -> usize {
        let (mut level, mut rest) = (0, self.next.max(1));
        while rest.is_multiple_of(self.base) {
            rest /= self.base;
            level += 1;
        }
        level
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::PageIndex;
    use std::collections::BTreeMap;

    const SPACE: u64 = 500;

    /// Runs `count` checkpoints, each changing a few pages, and compares what each chain reads with
    /// the truth.
    fn run(base: u64, count: u64, chain_max: impl Fn(u64) -> usize) -> u64 {
        let mut chain = Chain::new(base, SPACE);
        let mut truth: BTreeMap<u64, u64> = (0..SPACE).map(|p| (p, 1)).collect();
        let mut maps: BTreeMap<u64, BTreeMap<u64, u64>> = BTreeMap::new();
        let mut written = 0;
        for k in 0..count {
            let id = k + 1;
            let mut changed = Changes::none(SPACE);
            for page in [k % 100, k * k % 100, 7] {
                changed.pages.insert(PageIndex(page));
                truth.insert(page, 1000 + id);
            }
            let plan = chain.plan(&changed, SPACE);
            let mut ids = vec![id];
            ids.extend(plan.below);
            let pages: Vec<u64> = match plan.changed {
                None => (0..SPACE).collect(),
                Some(set) => set.pages.iter().map(|p| p.0).collect(),
            };
            written += if k > 0 { pages.len() as u64 } else { 0 };
            maps.insert(id, pages.into_iter().map(|p| (p, truth[&p])).collect());
            chain.commit(&ids, &changed);
            assert!(ids.len() <= chain_max(k), "checkpoint {k} reads {} maps", ids.len());
            let mut read = BTreeMap::new();
            for id in ids.iter().rev() {
                read.extend(maps[id].iter().map(|(p, r)| (*p, *r)));
            }
            assert_eq!(read, truth, "checkpoint {k}");
        }
        written
    }

    fn digits(base: u64, k: u64) -> usize {
        let mut sum = 1;
        let mut rest = k;
        while rest > 0 {
            sum += (rest % base) as usize;
            rest /= base;
        }
        sum
    }

    #[test]
    fn chains_read_the_truth_and_stay_as_short_as_the_digits() {
        // Exactly the sum of the digits, so a wrong parent shows.
        run(16, 600, |k| digits(16, k));
        run(2, 200, |k| digits(2, k));
        // Each change is written at most once per level; three distinct pages at most change each
        // time.
        let written = run(3, 300, |k| digits(3, k));
        assert!(written <= 3 * 300 * 6, "{written}");
    }

    #[test]
    fn a_change_of_everything_begins_a_new_chain() {
        let mut chain = Chain::new(16, SPACE);
        let mut all = Changes::none(SPACE);
        (0..SPACE).for_each(|p| {
            all.pages.insert(PageIndex(p));
        });
        chain.commit(&[1], &all);
        let one = {
            let mut set = Changes::none(SPACE);
            set.pages.insert(PageIndex(3));
            set
        };
        assert_eq!(chain.plan(&one, SPACE).below, [1]);
        chain.commit(&[2, 1], &one);
        let plan = chain.plan(&all, SPACE);
        assert!(plan.changed.is_none() && plan.below.is_empty());
        chain.commit(&[3], &all);
        assert_eq!(chain.plan(&one, SPACE).below, [3]);
    }
}
