//! Joined intervals give what one simulation of all gives, whichever runs made their parts.

use super::*;
use crate::context::{Icount, IcountInterval};
use keyframe_plugins::exact_cache::CacheRecorder;
use proptest::collection::vec;
use proptest::prelude::*;
use std::path::Path;

/// A level as the model's: an LRU list for each set.
struct ModelLevel {
    sets: Vec<Vec<u64>>,
    ways: usize,
    counts: LevelCounts,
}

/// One simulation of everything, written in the simplest way.
struct Model(Vec<ModelLevel>);

impl Model {
    fn new(levels: &[(usize, usize)]) -> Self {
        let level = |&(sets, ways): &(usize, usize)| ModelLevel {
            sets: vec![Vec::new(); sets],
            ways,
            counts: [0; 4],
        };
        Self(levels.iter().map(level).collect())
    }

    fn access(&mut self, line: u64, is_write: bool) {
        for level in &mut self.0 {
            level.counts[usize::from(is_write)] += 1;
            let number = line as usize % level.sets.len();
            let set = &mut level.sets[number];
            let found = set.iter().position(|held| *held == line);
            found.map(|at| set.remove(at));
            set.insert(0, line);
            set.truncate(level.ways);
            if found.is_some() {
                return;
            }
            level.counts[2 + usize::from(is_write)] += 1;
        }
    }

    fn take(&mut self) -> Vec<LevelCounts> {
        self.0.iter_mut().map(|level| std::mem::take(&mut level.counts)).collect()
    }
}

fn sets(levels: &[(usize, usize)]) -> Vec<LruSets> {
    let level = |&(sets, ways)| LruSets::new(&format!("{}:{ways}", sets * ways * 8), 8).unwrap();
    levels.iter().map(level).collect()
}

fn new_recorder(levels: &[(usize, usize)]) -> CacheRecorder {
    let mut levels = sets(levels);
    CacheRecorder::new(levels.remove(0), levels)
}

type Access = (u64, bool);

/// An interval: its accesses; whether a run begins with it, and then how many of the accesses
/// before it the run replays and drops.
#[derive(Clone, Debug)]
struct Interval {
    accesses: Vec<Access>,
    begins: Option<usize>,
}

/// The parts of all intervals. Each run goes on until another one begins.
fn parts(levels: &[(usize, usize)], intervals: &[Interval]) -> Vec<Vec<u64>> {
    let mut recorder = new_recorder(levels);
    let run = |recorder: &mut CacheRecorder, accesses: &[Access]| {
        for &(line, is_write) in accesses {
            if !recorder.access_most_recent(line, is_write) {
                recorder.access(line, is_write).unwrap();
            }
        }
    };
    let mut before: &[Access] = &[];
    let mut parts = Vec::new();
    for interval in intervals {
        if let Some(dropped) = interval.begins {
            recorder = new_recorder(levels);
            run(&mut recorder, &before[before.len().saturating_sub(dropped)..]);
            recorder.clear();
        }
        run(&mut recorder, &interval.accesses);
        parts.push(recorder.end_interval());
        before = &interval.accesses;
    }
    parts
}

fn a_line() -> impl Strategy<Value = u64> {
    // Some lines are frequent, some return rarely, some share a set of any level.
    let shared = (0..8_u64).prop_map(|n| n * 840);
    prop_oneof![4 => 0..6_u64, 3 => 0..40_u64, 2 => 0..300_u64, 1 => shared]
}

fn an_interval() -> impl Strategy<Value = Interval> {
    let accesses = prop_oneof![1 => 0..4_usize, 4 => 0..60_usize, 3 => 0..500_usize]
        .prop_flat_map(|count| vec((a_line(), any::<bool>()), count));
    (accesses, proptest::option::of(0..30_usize))
        .prop_map(|(accesses, begins)| Interval { accesses, begins })
}

/// Levels as sets and ways.
fn some_levels() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let level = |sets: std::ops::Range<usize>| (sets, prop_oneof![1..5_usize, 1..17_usize]);
    (vec(level(1..9), 1..2), vec(level(1..17), 0..4))
        .prop_map(|(first, rest)| [first, rest].concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn joined_parts_equal_one_simulation(
        levels in some_levels(),
        intervals in vec(an_interval(), 1..9),
    ) {
        let (mut model, mut join) = (Model::new(&levels), CacheJoin::new(sets(&levels)));
        for (interval, part) in intervals.iter().zip(parts(&levels, &intervals)) {
            interval.accesses.iter().for_each(|&(line, is_write)| model.access(line, is_write));
            prop_assert_eq!(join.apply(&part).unwrap(), model.take());
            // The contents are the true ones, too: the same references change nothing.
            for (number, level) in model.0.iter().enumerate() {
                let before = format!("{:?}", join.levels[number]);
                level.sets.iter().flatten().rev().for_each(|&line| {
                    join.levels[number].touch(line);
                });
                prop_assert_eq!(before, format!("{:?}", join.levels[number]));
            }
        }
    }

    #[test]
    fn any_words_are_counted_or_refused(words in vec(any::<u64>(), 0..40)) {
        let _ = CacheJoin::new(sets(&[(2, 2), (4, 4)])).apply(&words);
    }
}

/// A log's length for a guest that uses everything again and again.
#[test]
fn a_log_does_not_grow_with_the_run() {
    let levels = [(4, 2), (8, 4), (16, 8)];
    let interval = |seed: u64| {
        let line = |n: u64| ((n << 2 | seed) * (n + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        Interval { accesses: (0..100_000).map(|n| (line(n), false)).collect(), begins: None }
    };
    let parts = parts(&levels, &[0, 1, 2].map(interval));
    let [n1, n2, n3] = levels.map(|(sets, ways)| sets * ways);
    let open = |part: &[u64]| {
        let entries = part[12..].iter().map(|&word| LogEntry::from_word(word).unwrap());
        entries.filter(|entry| matches!(entry, LogEntry::Open { .. })).count()
    };
    let (first, others) =
        (open(&parts[0]), parts[1..].iter().map(|part| open(part)).sum::<usize>());
    assert!(first <= n1 + (n2 + 4 * n1) + (n3 + 8 * (n1 + n2 + 4 * n1)), "{first}");
    assert_eq!(others, 0, "all sets are primed");
    for part in &parts[1..] {
        assert_eq!(part.len(), 12 + n1 + n2 + n3, "the lines of all sets");
    }
}

fn part_of(dir: &Path, index: u32, start: u64, words: &[u64]) -> Part {
    let interval = IcountInterval { index, start: Icount(start), end: Icount(start + 10) };
    let part = Part { interval, dir: dir.to_owned() };
    keyframe_plugins::write_part(&part.file(KIND, "part"), KIND, 1, words).unwrap();
    part
}

#[test]
fn caches_are_empty_where_intervals_are_missing() {
    let dir = tempfile::tempdir().unwrap();
    let levels = [(1, 2)];
    let mut recorder = new_recorder(&levels);
    let mut words = || {
        recorder.clear();
        recorder.access(7, true).unwrap();
        recorder.end_interval()
    };
    let parts = [(0, 0), (1, 10), (2, 30)]
        .map(|(index, start)| part_of(dir.path(), index, start, &words()))
        .to_vec();
    let context = MergeContext {
        parts,
        out: dir.path().to_owned(),
        guest_symbols: std::sync::Arc::default(),
    };
    let summary = merge(&context, CacheJoin::new(sets(&levels))).unwrap();
    assert_eq!(summary.lines, ["level 1: 3 accesses, 2 misses (66.67 %)"]);
    let expected = "interval,start_icount,level,reads,writes,read_misses,write_misses\n\
                    0,0,1,0,1,0,1\n1,10,1,0,1,0,0\n2,30,1,0,1,0,1\n";
    assert_eq!(std::fs::read_to_string(&summary.files[0]).unwrap(), expected);
}

#[test]
fn damaged_parts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = |words: &[u64]| {
        let part = part_of(dir.path(), 0, 0, words);
        let error = CacheJoin::new(sets(&[(2, 2), (4, 4)])).join(&part).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }));
        error.to_string()
    };
    assert!(refusal(&[1, 0, 1]).contains("row 0: counts are missing"));
    // Level 3, level 4, no code.
    for code in [2, 3 + 8, 12] {
        let words = [0, 0, 0, 0, 0, 0, 0, 0, 99 << 4 | code];
        assert!(refusal(&words).contains("row 8: not an access of these caches"), "{code}");
    }
    for counts in [[5, 0, 4, 0, 3, 0, 0, 0], [5, 0, 6, 0, 6, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]] {
        assert!(refusal(&counts).contains("do not match the log"), "{counts:?}");
    }
}
