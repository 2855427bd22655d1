//! `cache-bounds`: the caches of `cache`, but counted in each interval alone, approximated by
//! warm-up, with bounds.
//!
//! ```text
//!   access ──▶ level 1 ── miss ──▶ level 2 ── miss ──▶ level 3 ── miss ──▶ memory       a miss fills all levels on its way
//!   set of level 1  │ most recent │ ... │ least recent │                               as many lines as ways
//!                    known lines ──┘   below: unknown earlier contents
//!
//!   cuts            │ interval 0 │ interval 1 │ interval 2 │ interval 3 │
//!   hierarchy a     [ counted    ┼ counted    ]                              warmup=1: each interval is counted in the
//!   hierarchy b                  [ fills      ┼ counted    ]                 hierarchy that has seen exactly one interval
//!   hierarchy c                               [ fills      ┼ counted    ]    before it
//! ```
//!
//! An interval's counts depend only on the interval and on its warm-up, not on the begin of the run:
//! a longer past is ignored, even if one run through all intervals knows it.
//!
//! The contents of a hierarchy before its begin are unknown. LRU is a stack algorithm (Mattson et
//! al., 1970): the lines of a set that were used since then are its most recent ones, in the same
//! order as in a cache with earlier contents. An access to one of them is a certain hit. Once they
//! fill the set (it is "primed": Laha, Patel, Iyer, 1988; Wood, Hill, Kessler, 1991), any other
//! access is a certain miss; before that it is open. An open access may or may not reach the next
//! level, whose set is then unknown again. It counts as a miss unless the line is present; the
//! numbers of certain and open misses bound the error.
//!
//! Row: level │ reads │ writes │ read misses │ write misses │ certain misses │ open misses.
//! Instruction fetches, prefetching and devices are not modelled.

use super::cache::line_bytes;
use super::{Setup, Tool};
use crate::api::{self, Block, MemoryInfo};
use crate::cut::{PartTable, TableTool};
use crate::exact_cache::{EMPTY, LruSets};
use crate::physical::DEVICE;
use crate::state::State;
use crate::translations::AccessResolver;
use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};

/// The most warm-up intervals: as many hierarchies are filled at a time.
const WARM_UP_MAX: u64 = 16;

/// The counts of a level in an interval.
#[derive(Clone, Copy, Default)]
struct Counts {
    /// Reads and writes, then those that missed.
    seen: [u64; 4],
    /// Misses for any earlier contents.
    certain: u64,
    /// Accesses that hit or miss depending on the earlier contents.
    open: u64,
}

/// A level of the hierarchy.
#[derive(Clone)]
struct Level {
    /// Line numbers, set by set, the most recent first.
    lines: Vec<u64>,
    /// For each set the number of its first lines that do not depend on the earlier contents.
    known: Vec<u8>,
    ways: usize,
    sets: u64,
    counts: Counts,
}

/// Whether an access reaches a level.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reaches {
    /// It does.
    Certainly,
    /// It does here, but perhaps not with other earlier contents of the level above.
    Perhaps,
    /// It does not here, but perhaps with other earlier contents.
    PerhapsUnseen,
    /// It does not.
    Not,
}

impl Level {
    /// A level of the size of `sets`, whose contents are unknown.
    fn new(sets: &LruSets) -> Self {
        let (sets, ways) = sets.size();
        Self {
            lines: vec![EMPTY; sets as usize * ways],
            known: vec![0; sets as usize],
            ways,
            sets,
            counts: Counts::default(),
        }
    }

    /// Performs an access, after which the line is present. Returns whether it reaches the next
    /// level.
    #[inline]
    fn access(&mut self, line: u64, write: usize, reaches: Reaches) -> Reaches {
        let number = (line % self.sets) as usize;
        if reaches == Reaches::PerhapsUnseen {
            self.known[number] = 0;
            self.counts.open += 1;
            return reaches;
        }
        let set = number * self.ways;
        let set = &mut self.lines[set..set + self.ways];
        self.counts.seen[write] += 1;
        let found = set.iter().position(|held| *held == line);
        if found.is_none() {
            self.counts.seen[2 + write] += 1;
        }
        set[..=found.unwrap_or(self.ways - 1)].rotate_right(1);
        set[0] = line;
        let known = &mut self.known[number];
        if reaches == Reaches::Certainly {
            if found.is_some_and(|at| at < usize::from(*known)) {
                return Reaches::Not;
            }
            if usize::from(*known) == self.ways {
                self.counts.certain += 1;
                return Reaches::Certainly;
            }
            *known += 1;
        } else {
            *known = 0;
        }
        self.counts.open += 1;
        if found.is_some() { Reaches::PerhapsUnseen } else { Reaches::Perhaps }
    }
}

/// The levels of a hierarchy, the first one first.
#[derive(Clone)]
struct Hierarchy(Vec<Level>);

impl Hierarchy {
    /// Parses the levels `BYTES:WAYS/BYTES:WAYS...`.
    fn parse(levels: &str, line_bytes: u64) -> Result<Self, String> {
        let levels = LruSets::of_levels(levels, line_bytes)?;
        Ok(Self(levels.iter().map(Level::new).collect()))
    }

    #[inline]
    fn access(&mut self, line: u64, write: usize) {
        let mut reaches = Reaches::Certainly;
        for level in &mut self.0 {
            reaches = level.access(line, write, reaches);
            if reaches == Reaches::Not {
                break;
            }
        }
    }
}

/// The hierarchies that are filled in this interval.
pub struct Table {
    places: AccessResolver,
    line_shift: u32,
    empty: Hierarchy,
    /// The hierarchy that counts for this interval, then those that warm up for later ones.
    filled: VecDeque<Hierarchy>,
    /// The number of warm-up intervals.
    warm_up: u64,
    /// The running interval, and the last one.
    running: u64,
    last: u64,
}

impl Table {
    fn new(
        places: AccessResolver,
        line_shift: u32,
        empty: Hierarchy,
        warm_up: u64,
        intervals: u64,
    ) -> Self {
        let filled = VecDeque::from([empty.clone()]);
        let last = intervals.saturating_sub(1);
        Self { places, line_shift, empty, filled, warm_up, running: 0, last }
    }

    fn access(&mut self, at: u64, size: u64, write: usize) {
        let (first, last) = (at >> self.line_shift, (at + size.max(1) - 1) >> self.line_shift);
        for line in first..=last {
            for hierarchy in &mut self.filled {
                hierarchy.access(line, write);
            }
        }
    }
}

impl PartTable for Table {
    const KIND: &'static str = "cachebnd";
    const COLUMNS: usize = 7;

    fn take(&mut self) -> Vec<u64> {
        let mut rows = Vec::new();
        for (number, level) in self.filled.front().into_iter().flat_map(|one| &one.0).enumerate() {
            let Counts { seen, certain, open } = level.counts;
            rows.push(number as u64 + 1);
            rows.extend(seen);
            rows.extend([certain, open]);
        }
        for level in self.filled.iter_mut().flat_map(|one| &mut one.0) {
            level.counts = Counts::default();
        }
        self.running += 1;
        if self.running > self.warm_up {
            self.filled.pop_front();
        }
        // A hierarchy that would never be counted is not filled.
        if self.running + self.warm_up <= self.last {
            self.filled.push_back(self.empty.clone());
        }
        rows
    }
}

/// The tool.
pub type CacheBounds = TableTool<Table>;

impl CacheBounds {
    /// Arguments: `ram`, `parts`, `cuts`, `line` (bytes), `levels` (`BYTES:WAYS/BYTES:WAYS...`),
    /// `intervals` (their number) and `warmup` (the number of warm-up intervals).
    pub fn of(setup: &mut Setup) -> Result<Self, String> {
        let line = line_bytes(setup)?;
        let empty = Hierarchy::parse(&setup.arguments.text("levels")?, line)?;
        let (warm_up, intervals) =
            (setup.arguments.number("warmup")?, setup.arguments.number("intervals")?);
        if warm_up > WARM_UP_MAX {
            return Err(format!("argument warmup={warm_up} is more than {WARM_UP_MAX}"));
        }
        let places = AccessResolver::new(setup.physical(false)?, setup.board);
        setup.reduced(Table::new(places, line.trailing_zeros(), empty, warm_up, intervals))
    }
}

/// `REMAPS`: for an instruction that may remap ([`AccessResolver::on_memory`]).
extern "C" fn on_access<const REMAPS: bool>(
    _vcpu: c_uint,
    info: MemoryInfo,
    vaddr: u64,
    data: *mut c_void,
) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let table = &mut unsafe { State::<CacheBounds>::of(data) }.table;
    let store = api::is_store(info);
    let at = table.places.of_access::<REMAPS>(info, vaddr, store);
    if at & DEVICE == 0 {
        table.access(at, api::size_bytes(info).into(), usize::from(store));
    }
}

impl Tool for CacheBounds {
    fn translate(&mut self, block: &Block<'_>, data: *mut c_void) {
        self.watch_cuts(block, data);
        for instruction in block.instructions() {
            self.table.places.on_memory(
                &instruction,
                [on_access::<false>, on_access::<true>],
                data,
            );
        }
    }

    fn exit(&mut self) {
        self.write_ended();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::physical::Physical;
    use crate::translations::tests::board;

    fn hierarchy(levels: &[&str]) -> Hierarchy {
        Hierarchy::parse(&levels.join("/"), 64).unwrap()
    }

    fn table(levels: &[&str], warm_up: u64, intervals: u64) -> Table {
        let places = AccessResolver::new(Physical::new("", &[]).unwrap(), board());
        Table::new(places, 6, hierarchy(levels), warm_up, intervals)
    }

    #[test]
    fn the_least_recently_used_line_is_replaced() {
        // One set of two lines.
        let mut table = table(&["128:2"], 1, 2);
        for line in [0, 1, 0, 2, 0, 1] {
            table.access(line * 64, 8, 0);
        }
        // 0 and 1 miss; 0 hits; 2 replaces 1; 0 hits; 1 misses. Once the set is full, every access
        // is certain.
        assert_eq!(table.take(), [1, 6, 0, 4, 0, 2, 2]);
        table.access(0, 1, 1);
        assert_eq!(table.take(), [1, 0, 1, 0, 0, 0, 0], "counts begin again, lines stay");
    }

    #[test]
    fn a_miss_reaches_the_next_level_and_a_wide_access_takes_two_lines() {
        let mut table = table(&["64:1", "256:4"], 0, 1);
        table.access(60, 8, 1);
        table.access(0, 1, 0);
        table.access(0, 1, 0);
        // The first miss is open, and so is whether it reached level 2, of whose four lines at most
        // two are known.
        assert_eq!(table.take(), [1, 2, 2, 1, 2, 2, 1, 2, 1, 2, 0, 2, 0, 3]);
    }

    /// Pseudo-random numbers, the same in each run.
    fn numbers(seed: u64) -> impl Iterator<Item = u64> {
        let mut state = seed;
        std::iter::repeat_with(move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        })
    }

    #[test]
    fn caches_with_earlier_contents_miss_within_the_bounds() {
        let mut met = [false; 3];
        for seed in 0..400 {
            let mut random = numbers(seed);
            let mut next = |below: u64| random.next().unwrap() % below;
            let levels = ["512:2", "1024:4", "4096:8"];
            let (mut truth, mut late) = (hierarchy(&levels), hierarchy(&levels));
            let (lines, before, behind) = (8 + next(150), next(500), next(600));
            for _ in 0..before {
                truth.0.iter_mut().for_each(|level| level.counts = Counts::default());
                truth.access(next(lines), 0);
            }
            truth.0.iter_mut().for_each(|level| level.counts = Counts::default());
            for _ in 0..behind {
                let line = next(lines);
                truth.access(line, 0);
                late.access(line, 0);
            }
            for (truth, late) in truth.0.iter().zip(&late.0) {
                let (true_misses, Counts { seen, certain, open }) =
                    (truth.counts.seen[2], late.counts);
                assert!(certain <= true_misses && true_misses <= certain + open, "seed {seed}");
                assert!(certain <= seen[2] && seen[2] <= certain + open, "seed {seed}");
                met[0] |= open > 0 && certain > 0;
                met[1] |= true_misses < seen[2];
                met[2] |= true_misses > certain;
            }
        }
        assert_eq!(met, [true; 3], "each bound is reached");
    }

    #[test]
    fn an_intervals_counts_do_not_depend_on_the_begin_of_the_run() {
        const INTERVALS: u64 = 6;
        let stream = |interval: u64| numbers(interval).take(300).map(|number| number % 90 * 64);
        let run = |warm_up: u64, from: u64| {
            let mut table = table(&["512:2", "4096:8"], warm_up, INTERVALS - from);
            let mut take = |interval| {
                stream(interval).for_each(|at| table.access(at, 8, 0));
                table.take()
            };
            (from..INTERVALS).map(&mut take).collect::<Vec<_>>()
        };
        for warm_up in 0..3 {
            let all = run(warm_up, 0);
            for from in 1..INTERVALS {
                let (short, warm) = (run(warm_up, from), warm_up as usize);
                let same = all.iter().skip(from as usize + warm).eq(short.iter().skip(warm));
                assert!(same, "warm-up {warm_up}, from {from}");
            }
        }
        assert_ne!(run(0, 0)[3], run(1, 0)[3]);
        assert_eq!(
            run(1, 0)[0][5] + run(1, 0)[0][6],
            run(1, 0)[0][3],
            "each miss of level 1 is certain or open"
        );
    }

    #[test]
    fn impossible_levels_are_refused() {
        for level in ["", "64", "0:1", "100:1", "64:0", "64:65", "0x100000000000:1", "64:1:1"] {
            assert!(Hierarchy::parse(level, 64).is_err(), "{level}");
        }
    }
}
