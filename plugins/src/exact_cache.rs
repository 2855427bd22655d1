//! A hierarchy of set-associative LRU caches that is simulated by intervals and still counted
//! exactly.
//!
//! ```text
//!   access ──▶ level 1 ── miss ──▶ level 2 ── miss ──▶ level 3 ── miss ──▶ memory     a miss fills all levels on its way
//!
//!   set of a recorder  │ most recent │ ... │ least recent │ unknown │ unknown │
//!                       known lines ──────────────────────┘
//!
//!   certain reference ─┬─ to a known line ──────────▶ hit: counted
//!                      ├─ to another, all known ────▶ miss: counted, certain in the next level
//!                      └─ to another, some unknown ─▶ open: logged, known from now on; in all further levels the
//!                                                     set that it may reach forgets its lines
//! ```
//!
//! A [`CacheRecorder`] simulates an interval without the contents of the caches before it. It
//! counts what is certain and logs the rest. A join (`crates/analysis/src/tools/cache/join.rs`)
//! applies the logs in the order of the intervals to the true contents.
//!
//! Why this is exact. LRU is a stack algorithm (Mattson, Gecsei, Slutz, Traiger, "Evaluation
//! techniques for storage hierarchies", IBM Systems Journal 9, 1970): a set holds the last lines
//! that were referenced, in this order, as many as it has ways. The recorder keeps, for each set,
//! the lines referenced since the last reference of which it does not know whether it happened.
//! These *known* lines are therefore the first ones of the true set, in the true order, and no
//! other line can be above them. So:
//!
//! 1. A reference to a known line hits. If all lines are known (the set is *primed*: Laha, Patel,
//!    Iyer, IEEE ToC 37, 1988; Wood, Hill, Kessler, SIGMETRICS 1991), a reference to another
//!    misses. The recorder is right about both, whatever was there before.
//! 2. Any other reference is open. It is in the log, with the first level at which it is open:
//!    above it the recorder has counted, from there on the join simulates. As the recorder does not
//!    know whether the reference reaches the further levels, it forgets the lines of those sets.
//! 3. While some lines are unknown, the join's set holds the same lines as the true one, and below
//!    the known ones also in the same order: references that the join does not see go to known lines
//!    and change only their mutual order. A line that the join replaces is its last one, and not a
//!    known one, as fewer lines are known than there are ways. So the join's hits and misses are the
//!    true ones.
//! 4. The mutual order of known lines matters from the moment on when they are forgotten, as then
//!    others may come above them. In a primed set, misses also replace lines unseen by the join. A
//!    set of which the join does not have the true order is *stale*. Before the recorder forgets a
//!    stale set, and at the end of the interval, it logs the known lines from the least to the most
//!    recent one; the join moves each to the front. If they fill the set, this replaces all others.
//! 5. After the end of an interval all sets of the join are therefore true. They depend on nothing
//!    but the references since the first interval, so the next interval's log may come from any
//!    recorder: from this one, which goes on with its known lines, or from one that began at this
//!    interval.
//!
//! The log is short. Level 1 gets certain references alone: each of its lines is logged at most
//! once. Only an open reference makes a set of a further level forget, at most as many lines as it
//! has ways. With n lines and w ways in each level, a recorder logs at most n1 open references of
//! level 1, n2 + w2 n1 of level 2, n3 + w3 (n1 + n2 + w2 n1) of level 3, however long it runs.
//!
//! Not modelled: instruction fetches, prefetching, devices.

use crate::arguments::number;

/// The number of no line.
pub(crate) const EMPTY: u64 = u64::MAX;
/// The most bytes of a level.
const LEVEL_BYTES_MAX: u64 = 1 << 30;
/// The most lines of a set.
const WAYS_MAX: u64 = 64;
/// The most levels.
pub const LEVELS_MAX: usize = 4;
/// The most words of an interval's log before its end, 512 MiB.
const LOG_WORDS_MAX: usize = 1 << 26;

/// The numbers of reads and writes, then of those that missed.
pub type LevelCounts = [u64; 4];

/// What a reference met in its set. The line is the most recent one afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Met {
    /// The line, as the most recent one.
    MostRecent,
    /// The line, below others.
    Present,
    /// Not the line, but room for it.
    Room,
    /// Not the line; it has replaced the least recent one.
    Full,
}

/// The sets of a level, with LRU.
#[derive(Clone, Debug)]
pub struct LruSets {
    /// Line numbers, set by set, the most recent first; [`EMPTY`] after the last one.
    lines: Vec<u64>,
    ways: usize,
    sets: u64,
    /// The number of sets less 1, if it is a power of two.
    mask: Option<u64>,
}

impl LruSets {
    /// Empty sets. Parses `BYTES:WAYS`.
    pub fn new(text: &str, line_bytes: u64) -> Result<Self, String> {
        let wrong =
            || format!("cache level {text:?} is not BYTES:WAYS with a whole number of sets");
        let (bytes, ways) = text.split_once(':').ok_or_else(wrong)?;
        let (bytes, ways) = (number(bytes).ok_or_else(wrong)?, number(ways).ok_or_else(wrong)?);
        let whole = (1..=WAYS_MAX).contains(&ways) && (1..=LEVEL_BYTES_MAX).contains(&bytes);
        if !whole || line_bytes == 0 || bytes % (ways * line_bytes) != 0 {
            return Err(wrong());
        }
        let sets = bytes / line_bytes / ways;
        let mask = sets.is_power_of_two().then(|| sets - 1);
        let lines = vec![EMPTY; (sets * ways) as usize];
        Ok(Self { lines, ways: ways as usize, sets, mask })
    }

    /// Parses the levels `BYTES:WAYS/BYTES:WAYS...`, at least one.
    pub fn of_levels(text: &str, line_bytes: u64) -> Result<Vec<Self>, String> {
        let levels: Result<Vec<_>, _> =
            text.split('/').map(|level| Self::new(level, line_bytes)).collect();
        let levels = levels?;
        if levels.len() > LEVELS_MAX {
            return Err(format!("more than {LEVELS_MAX} cache levels"));
        }
        Ok(levels)
    }

    /// The numbers of sets and of lines of a set.
    pub fn size(&self) -> (u64, usize) {
        (self.sets, self.ways)
    }

    /// The number of the set of `line`.
    #[inline]
    fn set_of(&self, line: u64) -> usize {
        (match self.mask {
            Some(mask) => line & mask,
            None => line % self.sets,
        }) as usize
    }

    /// The most recent line of a set, or [`EMPTY`].
    #[inline]
    fn most_recent(&self, set: usize) -> u64 {
        self.lines[set * self.ways]
    }

    #[inline]
    fn set(&mut self, set: usize) -> &mut [u64] {
        let begin = set * self.ways;
        &mut self.lines[begin..begin + self.ways]
    }

    /// References `line`.
    #[inline]
    pub fn touch(&mut self, line: u64) -> Met {
        let set = self.set_of(line);
        self.touch_in(set, line)
    }

    /// References `line` in its set.
    #[inline]
    fn touch_in(&mut self, set: usize, line: u64) -> Met {
        let set = self.set(set);
        if set[0] == line {
            return Met::MostRecent;
        }
        // Each line moves down by one, until the place of `line`.
        let mut moved = line;
        for held in set {
            std::mem::swap(held, &mut moved);
            if moved == line {
                return Met::Present;
            }
            if moved == EMPTY {
                return Met::Room;
            }
        }
        Met::Full
    }

    /// Empties all sets.
    pub fn clear(&mut self) {
        self.lines.fill(EMPTY);
    }
}

/// An entry of the log, one word: `line << 4 | code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogEntry {
    /// An access whose outcome is open from level `level` (counted from 0) on, where it is a
    /// certain reference.
    Open {
        /// The number of the line.
        line: u64,
        /// Whether it is a write.
        is_write: bool,
        /// The level.
        level: usize,
    },
    /// A known line of a stale set, after the less recent ones.
    Front {
        /// The number of the line.
        line: u64,
        /// The level.
        level: usize,
    },
}

const CODE_BITS: u32 = 4;
const LEVEL_MASK: u64 = LEVELS_MAX as u64 - 1;
const WRITE: u64 = 4;
const FRONT: u64 = 8;

impl LogEntry {
    /// Parses a word; `None` if it is no entry.
    #[inline]
    pub fn from_word(word: u64) -> Option<Self> {
        let (line, level) = (word >> CODE_BITS, (word & LEVEL_MASK) as usize);
        match word & (FRONT | WRITE) {
            FRONT => Some(Self::Front { line, level }),
            write @ (0 | WRITE) => Some(Self::Open { line, is_write: write != 0, level }),
            _ => None,
        }
    }

    /// The level.
    #[inline]
    pub fn level(self) -> usize {
        match self {
            Self::Open { level, .. } | Self::Front { level, .. } => level,
        }
    }

    /// The entry as a word. A line has at least eight bytes and a physical address at most 63 bits,
    /// so that the code's bits are free.
    #[inline]
    fn to_word(self) -> u64 {
        match self {
            Self::Open { line, is_write, level } => {
                line << CODE_BITS | if is_write { WRITE } else { 0 } | level as u64
            }
            Self::Front { line, level } => line << CODE_BITS | FRONT | level as u64,
        }
    }
}

/// The log has reached its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogFull;

/// A level of a recorder. Its sets hold the known lines.
struct Level {
    sets: LruSets,
    /// For each set, whether the join has another order or other lines.
    stale: Vec<bool>,
    counts: LevelCounts,
}

impl Level {
    fn new(sets: LruSets) -> Self {
        Self { stale: vec![false; sets.sets as usize], sets, counts: LevelCounts::default() }
    }

    /// References `line` with certainty. If the set has room for it, it is open whether the line is
    /// present.
    #[inline]
    fn reference(&mut self, line: u64, is_write: bool) -> Met {
        self.counts[usize::from(is_write)] += 1;
        let set = self.sets.set_of(line);
        let met = self.sets.touch_in(set, line);
        if matches!(met, Met::Present | Met::Full) {
            self.stale[set] = true;
        }
        if met == Met::Full {
            self.counts[2 + usize::from(is_write)] += 1;
        }
        met
    }

    /// Forgets the lines of the set of `line`, which level `number` may or may not reference.
    fn forget(&mut self, line: u64, number: usize, log: &mut Vec<u64>) {
        let set = self.sets.set_of(line);
        if self.stale[set] {
            self.log(set, number, log);
        }
        self.sets.set(set).fill(EMPTY);
    }

    /// Logs the lines of `set`, from the least to the most recent one.
    fn log(&mut self, set: usize, number: usize, log: &mut Vec<u64>) {
        let lines = self.sets.set(set).iter().rev().filter(|line| **line != EMPTY);
        log.extend(lines.map(|&line| LogEntry::Front { line, level: number }.to_word()));
        self.stale[set] = false;
    }

    /// Logs the lines of all stale sets.
    fn log_stale(&mut self, number: usize, log: &mut Vec<u64>) {
        for set in 0..self.stale.len() {
            if self.stale[set] {
                self.log(set, number, log);
            }
        }
    }

    fn clear(&mut self) {
        self.sets.clear();
        self.stale.fill(false);
        self.counts = LevelCounts::default();
    }
}

/// Simulates caches with unknown contents. It counts what is certain and logs the rest.
pub struct CacheRecorder {
    /// Level 1, which nearly all accesses end in.
    first: Level,
    further: Vec<Level>,
    /// Room for the counts of each level, then the log.
    part: Vec<u64>,
    words_max: usize,
}

impl CacheRecorder {
    /// A recorder of level 1 and `further` levels, of which it knows no line.
    pub fn new(first: LruSets, further: Vec<LruSets>) -> Self {
        let part = Self::empty_part(further.len());
        let further = further.into_iter().map(Level::new).collect();
        Self { first: Level::new(first), further, part, words_max: LOG_WORDS_MAX }
    }

    fn empty_part(further_levels: usize) -> Vec<u64> {
        vec![0; (1 + further_levels) * LevelCounts::default().len()]
    }

    /// Performs an access to a line if that is the most recent one of its set in level 1. Returns
    /// whether it was.
    #[inline]
    pub fn access_most_recent(&mut self, line: u64, is_write: bool) -> bool {
        let set = self.first.sets.set_of(line);
        let is_most_recent = self.first.sets.most_recent(set) == line;
        if is_most_recent {
            self.first.counts[usize::from(is_write)] += 1;
        }
        is_most_recent
    }

    /// Performs an access to a line. Error: the log is full.
    pub fn access(&mut self, line: u64, is_write: bool) -> Result<(), LogFull> {
        match self.first.reference(line, is_write) {
            Met::MostRecent | Met::Present => return Ok(()),
            Met::Full => {}
            Met::Room => return self.open(line, is_write, 0),
        }
        for (number, level) in self.further.iter_mut().enumerate() {
            match level.reference(line, is_write) {
                Met::MostRecent | Met::Present => return Ok(()),
                Met::Full => {}
                Met::Room => return self.open(line, is_write, 1 + number),
            }
        }
        Ok(())
    }

    /// Logs an access that is open from level `open` on, of which that level has learnt.
    #[cold]
    fn open(&mut self, line: u64, is_write: bool, open: usize) -> Result<(), LogFull> {
        if self.part.len() > self.words_max {
            return Err(LogFull);
        }
        for (number, level) in self.further.iter_mut().enumerate().skip(open) {
            level.forget(line, 1 + number, &mut self.part);
        }
        self.part.push(LogEntry::Open { line, is_write, level: open }.to_word());
        Ok(())
    }

    /// Ends the interval and returns its part: four counts for each level, then the log. The known
    /// lines stay known.
    pub fn end_interval(&mut self) -> Vec<u64> {
        let mut part = std::mem::replace(&mut self.part, Self::empty_part(self.further.len()));
        let levels = std::iter::once(&mut self.first).chain(&mut self.further);
        for (number, level) in levels.enumerate() {
            level.log_stale(number, &mut part);
            let counts = std::mem::take(&mut level.counts);
            part[number * counts.len()..][..counts.len()].copy_from_slice(&counts);
        }
        part
    }

    /// Forgets all lines, counts and the log.
    pub fn clear(&mut self) {
        self.first.clear();
        self.further.iter_mut().for_each(Level::clear);
        self.part = Self::empty_part(self.further.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder(levels: &str) -> CacheRecorder {
        let mut levels = LruSets::of_levels(levels, 64).unwrap();
        CacheRecorder::new(levels.remove(0), levels)
    }

    fn entries(part: &[u64], levels: usize) -> Vec<LogEntry> {
        part[4 * levels..].iter().map(|&word| LogEntry::from_word(word).unwrap()).collect()
    }

    fn open(line: u64, level: usize) -> LogEntry {
        LogEntry::Open { line, is_write: false, level }
    }

    fn front(line: u64, level: usize) -> LogEntry {
        LogEntry::Front { line, level }
    }

    #[test]
    fn the_least_recently_used_line_is_replaced() {
        let mut set = LruSets::new("128:2", 64).unwrap();
        let met: Vec<_> = [0, 1, 0, 0, 2, 0, 1].into_iter().map(|line| set.touch(line)).collect();
        let expected = [
            Met::Room,
            Met::Room,
            Met::Present,
            Met::MostRecent,
            Met::Full,
            Met::Present,
            Met::Full,
        ];
        assert_eq!(met, expected);
    }

    #[test]
    fn sets_need_not_be_a_power_of_two() {
        let mut three = LruSets::new("192:1", 64).unwrap();
        assert_eq!(
            (three.touch(0), three.touch(3), three.touch(4)),
            (Met::Room, Met::Full, Met::Room)
        );
    }

    #[test]
    fn a_primed_set_logs_nothing_until_the_end() {
        let mut recorder = recorder("128:2");
        for line in [0, 1, 0, 2, 0, 1] {
            recorder.access(line, false).unwrap();
        }
        let part = recorder.end_interval();
        // 0 and 1 are open; 0 hits; 2 replaces 1; 0 hits; 1 misses.
        assert_eq!(part[..4], [6, 0, 2, 0]);
        assert_eq!(entries(&part, 1), [open(0, 0), open(1, 0), front(0, 0), front(1, 0)]);
        recorder.access(1, true).unwrap();
        assert_eq!(
            recorder.end_interval(),
            [0, 1, 0, 0],
            "the lines stay known, and none has moved"
        );
        recorder.access(5, false).unwrap();
        recorder.clear();
        assert_eq!(recorder.end_interval(), [0; 4]);
        recorder.access(1, false).unwrap();
        assert_eq!(entries(&recorder.end_interval(), 1), [open(1, 0)], "it was forgotten");
    }

    #[test]
    fn an_open_access_makes_further_levels_forget() {
        let mut recorder = recorder("128:1/256:4");
        // Level 1 has two sets. Both miss there at first, which is open.
        recorder.access(0, false).unwrap();
        recorder.access(2, false).unwrap();
        recorder.access(4, false).unwrap();
        recorder.access(2, false).unwrap();
        recorder.access(1, false).unwrap();
        let part = recorder.end_interval();
        assert_eq!(part[..8], [5, 0, 3, 0, 3, 0, 0, 0]);
        let expected =
            [open(0, 0), open(2, 1), open(4, 1), front(4, 1), front(2, 1), open(1, 0), front(2, 0)];
        assert_eq!(entries(&part, 2), expected);
    }

    #[test]
    fn a_log_has_a_bound() {
        let mut recorder = recorder("65536:1");
        recorder.words_max = 100;
        let logged = (0..1000).take_while(|&line| recorder.access(line, false).is_ok()).count();
        assert_eq!(logged, 97);
    }

    #[test]
    fn words_are_entries() {
        let line = (1 << 60) - 1;
        for level in 0..LEVELS_MAX {
            for entry in [
                LogEntry::Open { line, is_write: false, level },
                LogEntry::Open { line, is_write: true, level },
                LogEntry::Front { line, level },
            ] {
                assert_eq!(LogEntry::from_word(entry.to_word()), Some(entry));
            }
        }
        assert_eq!(LogEntry::from_word(FRONT | WRITE), None);
    }

    #[test]
    fn impossible_levels_are_refused() {
        for level in ["", "64", "0:1", "100:1", "64:0", "64:65", "0x100000000000:1", "64:1:1"] {
            assert!(LruSets::new(level, 64).is_err(), "{level}");
        }
        assert!(LruSets::of_levels("64:1/64:1/64:1/64:1/64:1", 64).is_err());
    }
}
