//! `cache`: a hierarchy of data caches, each set-associative with LRU, filled by physical address.
//!
//! ```text
//!   access ──▶ level 1 ── miss ──▶ level 2 ── miss ──▶ level 3 ── miss ──▶ memory          a miss fills all levels on its way
//!   set of level 1  │ used last │ ... │ used longest ago │                                number of ways lines
//!                     known lines ──┘   below: whatever was there before
//!
//!   cuts            │ interval 0 │ interval 1 │ interval 2 │ interval 3 │
//!   hierarchy a     [ counted    ┼ counted    ]                              warmup=1: each interval is counted in the hierarchy
//!   hierarchy b                  [ fills      ┼ counted    ]                 that has seen one interval before it, no more
//!   hierarchy c                               [ fills      ┼ counted    ]    and no less
//! ```
//!
//! So an interval's counts depend on it and on those that warm it up, and not on where the run
//! began: nothing is drawn from a longer past, though one run through all intervals would know it.
//!
//! What a hierarchy held before its beginning is unknown. The lines of a set that were used since
//! then are its upper ones, in the same order as in a cache that was filled before: LRU is a stack
//! algorithm (Mattson et al., 1970). So an access to one of them hits for certain; once they fill
//! the set (it is "primed": Laha, Patel, Iyer, 1988; Wood, Hill, Kessler, 1991) any other misses
//! for certain; until then it is open. What is open in one level may or may not ask the next one,
//! whose set then begins anew. It counts as a miss unless the line is there; the number of certain
//! and of open misses says how wrong that can be.
//!
//! Row: level │ reads │ writes │ reads that missed │ writes that missed │ certain misses │ open ones. Instruction fetches, prefetching and
//! devices are left out.

use super::{Setup, Tool};
use crate::api::{self, Block, MemoryInfo};
use crate::arguments::number;
use crate::cut::{Reduced, Reducer};
use crate::physical::DEVICE;
use crate::state::State;
use crate::translations::Places;
use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};

/// No line has this number.
const EMPTY: u64 = u64::MAX;
/// Most bytes of a level, lines of a set, levels.
const LEVEL_BYTES_MAX: u64 = 1 << 30;
const WAYS_MAX: u64 = 64;
const LEVELS_MAX: usize = 4;
/// Most intervals that warm up: as many hierarchies are filled at once.
const WARM_UP_MAX: u64 = 16;

/// What a level counts in an interval.
#[derive(Clone, Copy, Default)]
struct Counts {
    /// Reads and writes, then those that missed.
    seen: [u64; 4],
    /// Misses whatever was there before.
    certain: u64,
    /// Misses or not, as was there before.
    open: u64,
}

/// One level.
#[derive(Clone)]
struct Level {
    /// Line numbers, set by set, the one used last first.
    lines: Vec<u64>,
    /// By set: so many of its first lines are there in this order, whatever was there before.
    known: Vec<u8>,
    ways: usize,
    sets: u64,
    counts: Counts,
}

/// What an access is to a level.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// It comes.
    Certainly,
    /// It comes here, and may not in truth, as the level above is open.
    Perhaps,
    /// It does not come here, and may in truth.
    PerhapsUnseen,
    /// It does not come.
    Not,
}

impl Level {
    /// Of `BYTES:WAYS`.
    fn new(text: &str, line_bytes: u64) -> Result<Self, String> {
        let wrong =
            || format!("cache level {text:?} is not BYTES:WAYS with a whole number of sets");
        let (bytes, ways) = text.split_once(':').ok_or_else(wrong)?;
        let (bytes, ways) = (number(bytes).ok_or_else(wrong)?, number(ways).ok_or_else(wrong)?);
        let whole = (1..=WAYS_MAX).contains(&ways) && (1..=LEVEL_BYTES_MAX).contains(&bytes);
        if !whole || bytes % (ways * line_bytes) != 0 {
            return Err(wrong());
        }
        let lines = (bytes / line_bytes) as usize;
        let sets = lines as u64 / ways;
        let known = vec![0; sets as usize];
        Ok(Self {
            lines: vec![EMPTY; lines],
            known,
            ways: ways as usize,
            sets,
            counts: Counts::default(),
        })
    }

    /// An access, after which the line is there; returns what it is to the next level.
    #[inline]
    fn access(&mut self, line: u64, write: usize, asked: Asked) -> Asked {
        let number = (line % self.sets) as usize;
        if asked == Asked::PerhapsUnseen {
            self.known[number] = 0;
            self.counts.open += 1;
            return asked;
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
        if asked == Asked::Certainly {
            if found.is_some_and(|at| at < usize::from(*known)) {
                return Asked::Not;
            }
            if usize::from(*known) == self.ways {
                self.counts.certain += 1;
                return Asked::Certainly;
            }
            *known += 1;
        } else {
            *known = 0;
        }
        self.counts.open += 1;
        if found.is_some() { Asked::PerhapsUnseen } else { Asked::Perhaps }
    }
}

/// Levels, and since when they have been filled is known.
#[derive(Clone)]
struct Hierarchy(Vec<Level>);

impl Hierarchy {
    #[inline]
    fn access(&mut self, line: u64, write: usize) {
        let mut asked = Asked::Certainly;
        for level in &mut self.0 {
            asked = level.access(line, write, asked);
            if asked == Asked::Not {
                break;
            }
        }
    }
}

/// The hierarchies that are filled in this interval.
pub struct Table {
    places: Places,
    line_shift: u32,
    empty: Hierarchy,
    /// The one whose counts are this interval's first, then those that warm up for later ones.
    filled: VecDeque<Hierarchy>,
    /// Intervals that one sees before that whose counts are its own.
    warm_up: u64,
    /// The interval that runs, and the last one.
    running: u64,
    last: u64,
}

impl Table {
    fn new(
        places: Places,
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

impl Reducer for Table {
    const KIND: &'static str = "cache";
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
        // One that would never be counted is not filled.
        if self.running + self.warm_up <= self.last {
            self.filled.push_back(self.empty.clone());
        }
        rows
    }
}

/// The tool.
pub type Cache = Reduced<Table>;

impl Cache {
    /// Takes `ram`, `parts`, `cuts`, `line` (bytes), `levels` (`BYTES:WAYS/BYTES:WAYS...`),
    /// `intervals` (how many there are) and `warmup` (how many of them fill the caches for the next
    /// one).
    pub fn of(setup: &mut Setup) -> Result<Self, String> {
        let line = setup.arguments.number("line")?;
        if !line.is_power_of_two() || !(8..=4096).contains(&line) {
            return Err(format!("argument line={line} is no power of two from 8 to 4096"));
        }
        let levels: Result<Vec<_>, _> = setup
            .arguments
            .text("levels")?
            .split('/')
            .map(|level| Level::new(level, line))
            .collect();
        let levels = levels?;
        if levels.len() > LEVELS_MAX {
            return Err(format!("more than {LEVELS_MAX} cache levels"));
        }
        let (warm_up, intervals) =
            (setup.arguments.number("warmup")?, setup.arguments.number("intervals")?);
        if warm_up > WARM_UP_MAX {
            return Err(format!("argument warmup={warm_up} is more than {WARM_UP_MAX}"));
        }
        let places = Places::new(setup.physical(false)?, setup.board);
        setup.reduced(Table::new(
            places,
            line.trailing_zeros(),
            Hierarchy(levels),
            warm_up,
            intervals,
        ))
    }
}

/// `REMAPS`: of an instruction that may ([`Places::on_memory`]).
extern "C" fn on_access<const REMAPS: bool>(
    _vcpu: c_uint,
    info: MemoryInfo,
    vaddr: u64,
    data: *mut c_void,
) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    let table = &mut unsafe { State::<Cache>::of(data) }.table;
    let store = api::is_store(info);
    let at = table.places.of_access::<REMAPS>(info, vaddr, store);
    if at & DEVICE == 0 {
        table.access(at, api::size_bytes(info).into(), usize::from(store));
    }
}

impl Tool for Cache {
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
        Hierarchy(levels.iter().map(|level| Level::new(level, 64).unwrap()).collect())
    }

    fn table(levels: &[&str], warm_up: u64, intervals: u64) -> Table {
        let places = Places::new(Physical::new("", &[]).unwrap(), board());
        Table::new(places, 6, hierarchy(levels), warm_up, intervals)
    }

    #[test]
    fn the_line_used_longest_ago_goes() {
        // One set of two lines.
        let mut table = table(&["128:2"], 1, 2);
        for line in [0, 1, 0, 2, 0, 1] {
            table.access(line * 64, 8, 0);
        }
        // 0 and 1 are new; 0 is there; 2 takes the place of 1; 0 is there; 1 is gone. Once the set
        // is full, no doubt is left.
        assert_eq!(table.take(), [1, 6, 0, 4, 0, 2, 2]);
        table.access(0, 1, 1);
        assert_eq!(table.take(), [1, 0, 1, 0, 0, 0, 0], "counts begin again, lines stay");
    }

    #[test]
    fn a_miss_asks_the_next_level_and_a_wide_access_takes_two_lines() {
        let mut table = table(&["64:1", "256:4"], 0, 1);
        table.access(60, 8, 1);
        table.access(0, 1, 0);
        table.access(0, 1, 0);
        // The first miss is open, and so is whether level 2 was asked; of its four lines it knows
        // two at most.
        assert_eq!(table.take(), [1, 2, 2, 1, 2, 2, 1, 2, 1, 2, 0, 2, 0, 3]);
    }

    /// Numbers as good as random: the same in each run.
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
    fn caches_that_were_filled_before_miss_within_the_bounds() {
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
        assert_eq!(met, [true; 3], "no bound is idle");
    }

    #[test]
    fn an_interval_is_counted_alike_wherever_the_run_began() {
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
            "of level 1 all misses are one or the other"
        );
    }

    #[test]
    fn impossible_levels_are_refused() {
        for level in ["", "64", "0:1", "100:1", "64:0", "64:65", "0x100000000000:1", "64:1:1"] {
            assert!(Level::new(level, 64).is_err(), "{level}");
        }
    }
}
