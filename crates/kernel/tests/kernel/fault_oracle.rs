//! First writes against a naive oracle: a copy kept up to date by nothing but what drains report
//! must equal the memory.

use crate::oracle::Random;
use crate::target::{HUGE, HugePages, PAGE, Target};
use keyframe_kernel::fault_tracker::FaultTracker;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::write_tracker::WrittenPages;
use keyframe_units::HostRange;
use std::collections::BTreeSet;

const ROUNDS: u64 = 30;
/// Three page tables, and parts of two more.
const PAGES: u64 = 3 * 512 + 300;

/// One drain, and the image brought up to date by it; gives back the pages reported.
fn drain(
    tracker: &FaultTracker,
    ram: HostRange,
    reader: &GuestReader,
    zeros: bool,
    image: &mut [u8],
) -> BTreeSet<u64> {
    let mut out: Vec<WrittenPages> = Vec::new();
    tracker.drain(ram, &mut out).unwrap();
    assert!(out.windows(2).all(|pair| pair[0].range.end() <= pair[1].range.start), "they rise");
    let mut reported = BTreeSet::new();
    for written in out {
        let at = (written.range.start.0 - ram.start.0) as usize;
        let bytes = &mut image[at..at + written.range.len_bytes as usize];
        if written.present || !zeros {
            reader.read(&[written.range], bytes).unwrap();
        } else {
            bytes.fill(0);
        }
        let first = at as u64 / PAGE;
        reported.extend(first..first + written.range.len_bytes / PAGE);
    }
    reported
}

fn lost(now: &[u8], image: &[u8]) -> Vec<usize> {
    let pages = now.chunks(PAGE as usize).zip(image.chunks(PAGE as usize)).enumerate();
    pages.filter(|(_, (memory, copy))| memory != copy).map(|(page, _)| page).collect()
}

/// One thing after the other: what is reported must have been touched, too, where `exact`.
fn run(kind: &str, seed: u64, exact: bool) {
    let mut target = Target::start();
    let ram = target.map(kind, if kind.starts_with("huge") { 6 * HUGE } else { PAGES * PAGE });
    let pages = ram.len_bytes / PAGE;
    let tracker = target.watch(ram);
    let reader = GuestReader::new(&target.process, &[ram]).unwrap();
    let zeros = ["anon", "thp"].contains(&kind);
    let mut random = Random(seed);
    let mut image = vec![0xee; ram.len_bytes as usize];
    let mut touched: BTreeSet<u64> = (0..pages).collect();
    for round in 0..ROUNDS {
        let context = format!("{kind}, seed {seed}, round {round}");
        for _ in 0..random.below(12) {
            let byte = 1 + random.below(255);
            let first = if random.below(4) == 0 {
                random.below(pages / 512) * 512
            } else {
                random.below(pages)
            };
            let some = |most: u64, random: &mut Random| (1 + random.below(most)).min(pages - first);
            let count = match random.below(8) {
                0 if !kind.starts_with("huge") => {
                    let most = [1, 40, 600, PAGES][random.below(4) as usize];
                    let count = some(most, &mut random);
                    target.on("zap", ram, first, count, "");
                    // In other memory than this, what was discarded is reported again and again.
                    if exact || !zeros { count } else { some(1, &mut random) }
                }
                1 => {
                    let count = some(4, &mut random);
                    target.on("receive", ram, first, count, &byte.to_string());
                    count
                }
                2 => {
                    let count = some(700, &mut random);
                    target.write(ram, first, count, byte as u8);
                    count
                }
                _ => {
                    target.ok(&format!(
                        "write {} 1 {byte}",
                        ram.start.0 + first * PAGE + random.below(PAGE)
                    ));
                    1
                }
            };
            touched.extend(first..first + count);
        }
        let reported = drain(&tracker, ram, &reader, zeros, &mut image);
        if exact {
            let idle: Vec<_> = reported.difference(&touched).collect();
            assert!(idle.is_empty(), "{context}: reported without having been touched: {idle:?}");
        }
        touched.clear();
        // Reading between a discard and a drain must hide nothing.
        if round % 4 == 3 {
            let lost = lost(&target.content(ram), &image);
            assert!(lost.is_empty(), "{context}: pages lost: {lost:?}");
        }
    }
    assert_eq!(
        lost(&target.content(ram), &image),
        [] as [usize; 0],
        "{kind}, seed {seed}, at the end"
    );
}

/// Threads write, and another discards, while it is drained and copied.
fn run_meanwhile(kind: &str, discards: u64) {
    let mut target = Target::start();
    let ram = target.map(kind, if kind.starts_with("huge") { 16 * HUGE } else { (1 << 13) * PAGE });
    let tracker = target.watch(ram);
    let reader = GuestReader::new(&target.process, &[ram]).unwrap();
    let mut image = vec![0; ram.len_bytes as usize];
    for round in 0..5 {
        target.tell(&format!("scribble {} {} 3 20000 {discards}", ram.start.0, ram.len_bytes));
        assert_eq!(target.answer(), "waiting");
        let (mut drains, mut ended) = (0, false);
        while !ended {
            ended = target.try_answer().is_some();
            drain(&tracker, ram, &reader, false, &mut image);
            drains += 1;
        }
        let lost = lost(&target.content(ram), &image);
        assert!(
            lost.is_empty(),
            "{kind}, round {round}, {discards} discards: lost in {drains} drains: {lost:?}"
        );
    }
}

#[test]
fn nothing_is_lost_one_after_the_other() {
    (1..5).for_each(|seed| run("anon", seed, true));
    for kind in ["thp", "memfd", "sealed", "memcopy"] {
        (1..4).for_each(|seed| run(kind, seed, false));
    }
}

#[test]
fn nothing_is_lost_of_what_threads_write_meanwhile() {
    for kind in ["anon", "thp", "memfd", "sealed", "memcopy"] {
        run_meanwhile(kind, 0);
    }
}

#[test]
fn nothing_is_lost_of_what_is_discarded_meanwhile() {
    for kind in ["anon", "thp", "memcopy"] {
        run_meanwhile(kind, 300);
    }
}

#[test]
fn nothing_is_lost_in_huge_pages() {
    let Some(_pool) = HugePages::reserve(24) else { return };
    for kind in ["hugetlb", "hugeanon"] {
        (1..3).for_each(|seed| run(kind, seed, false));
        run_meanwhile(kind, 0);
    }
}
