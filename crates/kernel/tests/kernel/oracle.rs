//! The tracker against a naive oracle: a copy kept up to date by nothing but what scans report must
//! equal the memory.
//!
//! A process writes, discards, receives from the kernel, at random, in memory of each kind; scans
//! come in between. Where tracking is exact, what is reported must have been touched, too.

use crate::target::{HUGE, HugePages, PAGE, Target};
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::write_tracker::{WriteTracker, WrittenPages};
use keyframe_units::{HostRange, HostVirt};
use std::collections::BTreeSet;

const ROUNDS: u64 = 40;
/// Three page tables, and parts of two more.
const PAGES: u64 = 3 * 512 + 300;

pub struct Random(pub u64);

impl Random {
    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

struct Run {
    target: Target,
    ram: HostRange,
    tracker: WriteTracker,
    reader: GuestReader,
    random: Random,
    /// Absent pages are zeros, without being read.
    absent_is_zero: bool,
    discards: bool,
    reads: bool,
    image: Vec<u8>,
    touched: BTreeSet<u64>,
}

impl Run {
    /// A run of pages that begins near the start or end of a page table as often as anywhere else.
    fn some_pages(&mut self, most: u64) -> (u64, u64) {
        let pages = self.ram.len_bytes / PAGE;
        let first = match self.random.below(4) {
            0 => self.random.below(pages / 512).saturating_mul(512),
            _ => self.random.below(pages),
        };
        (first, (1 + self.random.below(most)).min(pages - first))
    }

    fn act(&mut self) {
        let byte = 1 + self.random.below(255);
        let (first, pages) = match self.random.below(8) {
            0 if self.discards => {
                let most = [1, 40, 600, PAGES][self.random.below(4) as usize];
                let (first, pages) = self.some_pages(most);
                // Reaching both ways to a table's end makes whole tables go away.
                self.target.on("zap", self.ram, first, pages, "");
                (first, pages)
            }
            1 => {
                let (first, pages) = self.some_pages(4);
                self.target.on("receive", self.ram, first, pages, &byte.to_string());
                (first, pages)
            }
            2 => {
                let (first, pages) = self.some_pages(700);
                self.target.write(self.ram, first, pages, byte as u8);
                (first, pages)
            }
            // Reading puts pages where there are none, and changes nothing.
            3 if self.reads => {
                let (first, pages) = self.some_pages(600);
                let range = HostRange { len_bytes: pages * PAGE, ..self.page(first) };
                self.target.content(range);
                return;
            }
            _ => {
                let (first, _) = self.some_pages(1);
                let at = self.ram.start.0 + first * PAGE + self.random.below(PAGE);
                self.target.ok(&format!("write {at} 1 {byte}"));
                (first, 1)
            }
        };
        self.touched.extend(first..first + pages);
    }

    fn page(&self, page: u64) -> HostRange {
        HostRange { start: HostVirt(self.ram.start.0 + page * PAGE), len_bytes: PAGE }
    }

    /// One scan, and the image brought up to date by it.
    fn scan(&mut self) -> BTreeSet<u64> {
        let mut out: Vec<WrittenPages> = Vec::new();
        self.tracker.scan_and_protect(self.ram, &mut out).unwrap();
        let mut reported = BTreeSet::new();
        for written in out {
            let first = (written.range.start.0 - self.ram.start.0) / PAGE;
            for page in first..first + written.range.len_bytes / PAGE {
                let at = (page * PAGE) as usize;
                let bytes = &mut self.image[at..at + PAGE as usize];
                if written.present || !self.absent_is_zero {
                    let range = HostRange {
                        start: HostVirt(self.ram.start.0 + page * PAGE),
                        len_bytes: PAGE,
                    };
                    self.reader.read(&[range], bytes).unwrap();
                } else {
                    bytes.fill(0);
                }
                reported.insert(page);
            }
        }
        reported
    }

    fn compare(&self, context: &str) {
        let now = self.target.content(self.ram);
        for page in 0..self.ram.len_bytes / PAGE {
            let at = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
            assert!(
                now[at.clone()] == self.image[at],
                "{context}: page {page} ({:?}) was lost",
                self.page(page)
            );
        }
    }
}

/// Odd seeds trust the kernel with what was found of it, even ones with nothing.
fn run(kind: &str, seed: u64, exact: bool) {
    let mut target = Target::start();
    let ram = target.map(kind, if kind.starts_with("huge") { 6 * HUGE } else { PAGES * PAGE });
    let mut tracker = target.tracker();
    // Where they could be discarded, private huge pages are refused.
    tracker.set_watch_discards(!kind.starts_with("huge"));
    tracker.register(ram).unwrap();
    if seed.is_multiple_of(2) {
        tracker.trust_no_kernel();
    }
    let reader = GuestReader::new(&target.process, &[ram]).unwrap();
    let private = ["anon", "thp", "copy", "memcopy", "hugeanon"].contains(&kind);
    let mut run = Run {
        target,
        ram,
        tracker,
        reader,
        random: Random(seed),
        absent_is_zero: ["anon", "thp", "hugeanon"].contains(&kind),
        // Discarding part of a huge page of hugetlbfs is refused.
        discards: private && !kind.starts_with("huge"),
        // Reading may bring a file's pages as a huge one; split at a write, all of it counts as
        // written.
        reads: !(exact && ["copy", "memcopy"].contains(&kind)),
        image: vec![0xee; ram.len_bytes as usize],
        touched: (0..ram.len_bytes / PAGE).collect(),
    };
    for round in 0..ROUNDS {
        let context = format!("{kind}, seed {seed}, round {round}");
        for _ in 0..run.random.below(12) {
            run.act();
        }
        let reported = run.scan();
        if exact {
            let idle: Vec<_> = reported.difference(&run.touched).collect();
            assert!(idle.is_empty(), "{context}: reported without having been touched: {idle:?}");
        }
        run.touched.clear();
        if round % 4 == 3 {
            run.compare(&context);
        }
    }
    run.compare(&format!("{kind}, seed {seed}, at the end"));
}

/// The process writes while it is scanned and copied, as in a pre-copy round; each page once, so
/// that one that a scan lost stays lost. Each scan has more runs to tell than the kernel's own
/// buffer holds.
#[test]
fn nothing_is_lost_of_what_is_written_meanwhile() {
    for (kind, trusting) in
        [("anon", true), ("memfd", true), ("anon", false), ("sealed", false), ("thp", true)]
    {
        let mut target = Target::start();
        let ram = target.map(kind, (1 << 15) * PAGE);
        let mut tracker = target.track(ram);
        if !trusting {
            tracker.trust_no_kernel();
        }
        let reader = GuestReader::new(&target.process, &[ram]).unwrap();
        let mut image = vec![0; ram.len_bytes as usize];
        for round in 1..5 {
            target.tell(&format!("churn {} {} {round}", ram.start.0, ram.len_bytes));
            assert_eq!(target.answer(), "waiting");
            let (mut scans, mut ended) = (0, false);
            while !ended {
                ended = target.try_answer().is_some();
                let mut out: Vec<WrittenPages> = Vec::new();
                tracker.scan_and_protect(ram, &mut out).unwrap();
                assert!(
                    out.windows(2).all(|pair| pair[0].range.end() <= pair[1].range.start),
                    "they rise"
                );
                let ranges: Vec<HostRange> = out.iter().map(|written| written.range).collect();
                let mut copied = vec![0; ranges.iter().map(|range| range.len_bytes as usize).sum()];
                reader.read(&ranges, &mut copied).unwrap();
                let mut from = copied.as_slice();
                for range in ranges {
                    let (bytes, rest) = from.split_at(range.len_bytes as usize);
                    let at = (range.start.0 - ram.start.0) as usize;
                    image[at..at + bytes.len()].copy_from_slice(bytes);
                    from = rest;
                }
                scans += 1;
            }
            let now = target.content(ram);
            let pages = now.chunks(PAGE as usize).zip(image.chunks(PAGE as usize));
            let lost = pages.filter(|(memory, copy)| memory != copy).count();
            assert_eq!(lost, 0, "{kind}, round {round}: pages lost in {scans} scans");
        }
    }
}

#[test]
fn nothing_is_lost_in_private_anonymous_memory() {
    (1..5).for_each(|seed| run("anon", seed, true));
}

#[test]
fn nothing_is_lost_in_transparent_huge_pages() {
    (1..5).for_each(|seed| run("thp", seed, false));
}

#[test]
fn nothing_is_lost_in_private_file_memory() {
    (1..3).for_each(|seed| run("copy", seed, true));
    (3..5).for_each(|seed| run("memcopy", seed, true));
    (5..9).for_each(|seed| run("copy", seed, false));
    (9..13).for_each(|seed| run("memcopy", seed, false));
}

/// Not exact: the neighbours of a page that was never touched come with it.
#[test]
fn nothing_is_lost_in_shared_memory() {
    for kind in ["memfd", "sealed", "file"] {
        (1..3).for_each(|seed| run(kind, seed, false));
    }
}

#[test]
fn nothing_is_lost_in_huge_pages() {
    let Some(_pool) = HugePages::reserve(20) else { return };
    for kind in ["hugetlb", "hugeanon"] {
        (1..3).for_each(|seed| run(kind, seed, false));
    }
}
