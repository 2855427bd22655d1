//! Windows of page faults against the scan: what the scan finds written, the window has named.

use crate::target::{HugePages, PAGE, Target, pages, role_arguments, start_role};
use keyframe_kernel::fault_window::{FaultWindow, WindowGap};
use keyframe_kernel::write_tracker::WriteTracker;
use keyframe_kernel::{Process, write_memory};
use keyframe_testing::skip;
use keyframe_units::{HostRange, HostVirt};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// The windows of the long test; `KEYFRAME_WINDOWS` sets another number.
const WINDOWS: u64 = 300;

/// A process, its memory and its tracker, which has protected all of it.
struct Traced {
    target: Target,
    ram: HostRange,
    tracker: WriteTracker,
}

impl Traced {
    fn new(kind: &str, len_bytes: u64) -> Self {
        let mut target = Target::start();
        let ram = target.map(kind, len_bytes);
        let mut tracker = target.tracker();
        tracker.set_watch_discards(false);
        tracker.register(ram).unwrap();
        let traced = Self { target, ram, tracker };
        traced.protect();
        traced.wait_for(&['S']);
        traced
    }

    /// Protects all pages, and returns those that were written.
    fn protect(&self) -> BTreeSet<u64> {
        let mut out = Vec::new();
        self.tracker.scan_and_protect(self.ram, &mut out).unwrap();
        pages(self.ram, &out).into_iter().map(|(page, _)| page).collect()
    }

    /// Writes pages `first..first + pages`, and waits until the process is idle again.
    fn write(&mut self, first: u64, pages: u64, byte: u8) {
        self.target.write(self.ram, first, pages, byte);
        self.wait_for(&['S']);
    }

    /// The pages that the window names, or why it does not know them.
    fn named(&self, window: &mut FaultWindow) -> Result<BTreeSet<u64>, WindowGap> {
        let named = window.read(&self.tracker).expect("a window is open");
        window.disarm();
        let start = self.ram.start.0;
        let numbers =
            |range: HostRange| (range.start.0 - start) / PAGE..(range.end().0 - start) / PAGE;
        named.map(|ranges| ranges.into_iter().flat_map(numbers).collect())
    }

    /// Stops all threads of the process.
    fn stop(&mut self) {
        self.target.signal("STOP");
        self.wait_for(&['T', 'Z', 'X']);
    }

    /// Waits until each thread of the process is in one of these states.
    fn wait_for(&self, states: &[char]) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let tasks = format!("/proc/{}/task", self.target.process.pid());
        let runs = || {
            std::fs::read_dir(&tasks).unwrap().flatten().any(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(states))
            })
        };
        while runs() {
            assert!(Instant::now() < deadline, "a thread is not in {states:?}");
        }
    }
}

/// The window of a process, or the reason why this host has none, by which a test is skipped.
fn window(traced: &Traced, ring_bytes: usize) -> Result<FaultWindow, String> {
    FaultWindow::with_ring_bytes(&traced.tracker, ring_bytes).map_err(|error| error.to_string())
}

#[test]
fn each_page_that_a_storm_of_threads_writes_is_named() {
    for kind in ["anon", "thp", "copy"] {
        storm_in(kind);
    }
}

fn storm_in(kind: &str) {
    let windows = std::env::var("KEYFRAME_WINDOWS").map_or(WINDOWS, |n| n.parse().unwrap());
    let mut traced = Traced::new(kind, 64 * MIB);
    let mut window = match window(&traced, 512 << 10) {
        Ok(window) => window,
        Err(reason) => skip!("{reason}"),
    };
    let storm = |traced: &mut Traced| {
        traced.target.tell(&format!("storm {} {} 600", traced.ram.start.0, traced.ram.len_bytes));
        assert_eq!(traced.target.answer(), "waiting");
    };
    let (mut found, mut named_pages, mut known, mut left) = (0, 0, 0, 0);
    let mut gaps: BTreeMap<&str, u64> = BTreeMap::new();
    for round in 0..windows {
        if left == 0 {
            if round > 0 {
                assert_eq!(traced.target.answer(), "ok");
            }
            storm(&mut traced);
            left = 50;
        }
        left -= 1;
        window.arm(&traced.tracker).unwrap();
        traced.protect();
        std::thread::sleep(Duration::from_micros(200 + round % 7 * 300));
        traced.stop();
        let named = traced.named(&mut window);
        let written = traced.protect();
        match named {
            Ok(named) => {
                let missed: Vec<_> = written.difference(&named).collect();
                assert!(
                    missed.is_empty(),
                    "{kind}, window {round} missed {missed:?} of {}",
                    written.len()
                );
                found += written.len();
                named_pages += named.len();
                known += 1;
            }
            Err(gap) => *gaps.entry(gap.name()).or_default() += 1,
        }
        traced.target.signal("CONT");
    }
    println!(
        "{kind}: {windows} windows, {known} known: {found} pages written, {named_pages} named; gaps {gaps:?}"
    );
    // On a busy host a fault of the kernel often moves to another CPU, which is a gap.
    assert!(known * 20 > windows, "gaps: {gaps:?}");
    assert!(found > 100, "the storm wrote {found} pages");
}

/// A process, and a window whose ring holds so much for each CPU.
macro_rules! traced {
    ($kind:expr, $ring_bytes:expr) => {{
        let traced = Traced::new($kind, 64 * MIB);
        match window(&traced, $ring_bytes) {
            Ok(window) => (traced, window),
            Err(reason) => skip!("{reason}"),
        }
    }};
}

#[test]
fn a_full_ring_is_a_gap_and_the_next_window_is_whole_again() {
    let (mut traced, mut window) = traced!("anon", 4096);
    for round in 0..5 {
        window.arm(&traced.tracker).unwrap();
        traced.protect();
        traced.write(0, 2000, round);
        let gap = traced.named(&mut window).unwrap_err();
        assert!([WindowGap::Overflow, WindowGap::Lost].contains(&gap), "{gap:?}");
        assert_eq!(traced.protect().len(), 2000);

        window.arm(&traced.tracker).unwrap();
        traced.protect();
        traced.write(100, 3, round);
        // Other programs' faults fill so small a ring, too.
        if let Ok(named) = traced.named(&mut window) {
            assert_eq!(named, BTreeSet::from([100, 101, 102]));
        }
    }
}

#[test]
fn pages_stay_written_for_the_next_scan_and_nothing_is_recorded_between_windows() {
    let (mut traced, mut window) = traced!("anon", 512 << 10);
    window.arm(&traced.tracker).unwrap();
    traced.protect();
    traced.write(5, 2, 1);
    assert_eq!(traced.named(&mut window), Ok(BTreeSet::from([5, 6])));
    assert_eq!(traced.protect(), BTreeSet::from([5, 6]), "a window protects nothing");

    traced.write(20, 100, 1);
    assert!(window.read(&traced.tracker).is_none(), "no window is open");
    window.arm(&traced.tracker).unwrap();
    traced.protect();
    assert_eq!(traced.named(&mut window), Ok(BTreeSet::new()), "they were written before");
}

#[test]
fn a_write_of_this_process_is_a_gap() {
    let (traced, mut window) = traced!("anon", 512 << 10);
    window.arm(&traced.tracker).unwrap();
    traced.protect();
    write_memory(&traced.target.process, traced.ram.start, &[1]).unwrap();
    assert_eq!(traced.named(&mut window), Err(WindowGap::OwnWrite));
    assert_eq!(traced.protect(), BTreeSet::from([0]));
}

#[test]
fn a_write_of_another_process_is_a_gap() {
    let (traced, mut window) = traced!("anon", 512 << 10);
    for _ in 0..20 {
        window.arm(&traced.tracker).unwrap();
        traced.protect();
        let address = traced.ram.start.0.to_string();
        let mut role = start_role("windows::role_writes_from_outside", &traced.target, &address);
        assert!(role.wait());
        assert_eq!(traced.named(&mut window), Err(WindowGap::UnnamedAccess));
        assert_eq!(traced.protect(), BTreeSet::from([0]));
    }
}

#[test]
#[ignore = "the other process of a_write_of_another_process_is_a_gap"]
fn role_writes_from_outside() {
    let Some(arguments) = role_arguments() else { return };
    let process = Process::open(arguments[0].parse().unwrap()).unwrap();
    let start = HostVirt(arguments[1].parse().unwrap());
    write_memory(&process, start, &[2]).unwrap();
    println!("ready");
    std::process::exit(0);
}

#[test]
fn a_huge_page_of_hugetlbfs_is_named_whole() {
    let Some(_pages) = HugePages::reserve(32) else { return };
    let (mut traced, mut window) = traced!("hugetlb", 512 << 10);
    window.arm(&traced.tracker).unwrap();
    traced.protect();
    traced.write(515, 1, 1);
    assert_eq!(traced.named(&mut window), Ok((512..1024).collect()));
    assert_eq!(traced.protect(), (512..1024).collect());
}

#[test]
fn memory_whose_faults_do_not_name_all_pages_has_no_window() {
    let traced = Traced::new("memfd", 4 * MIB);
    assert!(window(&traced, 512 << 10).is_err());
}
