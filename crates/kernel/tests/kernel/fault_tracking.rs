//! First writes: what is reported for each kind of memory, what a hook is told, and that nobody is
//! left waiting.

use crate::target::{
    HUGE, HugePages, PAGE, SEES_NO_MARKERS, Target, drain, part, role_arguments, sees_markers,
    start_role, try_drain,
};
use keyframe_kernel::attach::inject_userfaultfd;
use keyframe_kernel::fault_tracker::{FaultTracker, MemoryEvent};
use keyframe_kernel::write_tracker::WrittenPages;
use keyframe_kernel::{Error, Process, read_memory};
use keyframe_testing::{Scope, record_skip, skip};
use keyframe_units::{HostRange, HostVirt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Kinds with pages of 4 KiB on which first writes can be watched.
const KINDS: [&str; 4] = ["anon", "memfd", "sealed", "memcopy"];
/// Longer than any answer of a target is waited for.
const WAIT_MAX: Duration = Duration::from_mins(1);

fn numbers(pages: &[(u64, bool)]) -> Vec<u64> {
    pages.iter().map(|(page, _)| *page).collect()
}

fn present(pages: &[u64]) -> Vec<(u64, bool)> {
    pages.iter().map(|page| (*page, true)).collect()
}

/// A hook that keeps what it was told.
fn recorder(tracker: &FaultTracker) -> Arc<Mutex<Vec<MemoryEvent>>> {
    let told = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&told);
    tracker.set_hook(Some(Arc::new(move |touch| record.lock().unwrap().push(touch))));
    told
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT_MAX;
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_first_drain_reports_all_and_each_further_one_what_was_written() {
    const PAGES: u64 = 2000;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    for kind in KINDS {
        let mut target = Target::start();
        let ram = target.map(kind, PAGES * PAGE);
        target.write(ram, 3, 2, 1);
        let tracker = target.watch(ram);
        // Not drained yet: nobody waits.
        target.write(ram, 3, 2, 1);
        let first = drain(&tracker, ram);
        assert_eq!(numbers(&first), (0..PAGES).collect::<Vec<_>>(), "{kind}");
        let there: Vec<_> =
            first.iter().filter(|(_, present)| *present).map(|(page, _)| *page).collect();
        assert_eq!(there, [3, 4], "{kind}");
        assert_eq!(drain(&tracker, ram), [], "{kind}: nothing was written");
        // Reading is not writing.
        target.content(ram);
        assert_eq!(drain(&tracker, ram), [], "{kind}: nothing was written");
        for _ in 0..2 {
            target.write(ram, 4, 1, 2);
            target.write(ram, 9, 2, 2);
            target.write(ram, 1999, 1, 2);
            assert_eq!(drain(&tracker, ram), present(&[4, 9, 10, 1999]), "{kind}");
            assert_eq!(drain(&tracker, ram), [], "{kind}: reported once");
        }
        target.write(ram, 100, 1000, 3);
        assert_eq!(drain(&tracker, part(ram, 0, 600)).len(), 500, "{kind}");
        assert_eq!(
            drain(&tracker, ram).len(),
            500,
            "{kind}: the rest is reported by the next drain"
        );
    }
}

#[test]
fn huge_pages_are_tracked_whole() {
    let Some(_pool) = HugePages::reserve(16) else { return };
    for kind in ["hugetlb", "hugeanon"] {
        let mut target = Target::start();
        let ram = target.map(kind, 6 * HUGE);
        target.write(ram, 512, 1, 1);
        let tracker = target.watch(ram);
        assert_eq!(drain(&tracker, ram).len(), 6 * 512, "{kind}");
        assert_eq!(drain(&tracker, ram), [], "{kind}");
        let told = recorder(&tracker);
        target.write(ram, 700, 1, 2);
        target.write(ram, 3 * 512 + 5, 2, 2);
        let written: Vec<_> =
            (512..1024).chain(3 * 512..4 * 512).map(|page| (page, true)).collect();
        assert_eq!(drain(&tracker, ram), written, "{kind}");
        let pages = [part(ram, 512, 512), part(ram, 3 * 512, 512)].map(MemoryEvent::Write);
        assert_eq!(*told.lock().unwrap(), pages, "{kind}");
        assert_eq!(drain(&tracker, ram), [], "{kind}");
        let error = try_drain(&tracker, part(ram, 0, 1)).unwrap_err();
        assert!(matches!(error, Error::Unaligned { page_bytes: HUGE, .. }), "{error:?}");
    }
}

/// The kernel writes the memory, by copying and by DMA: it waits as any thread does.
#[test]
fn writes_by_the_kernel_are_watched() {
    for kind in ["anon", "memfd"] {
        let mut target = Target::start();
        let ram = target.map(kind, 512 * PAGE);
        target.write(ram, 0, 512, 1);
        let tracker = target.watch(ram);
        drain(&tracker, ram);
        target.on("receive", ram, 3, 2, "5");
        assert_eq!(drain(&tracker, ram), present(&[3, 4]), "{kind}");
        assert_eq!(target.content(part(ram, 3, 2)), vec![5; 2 * PAGE as usize]);
        target.on("direct", ram, 8, 2, "6");
        assert_eq!(drain(&tracker, ram), present(&[8, 9]), "{kind}");
        assert_eq!(target.content(part(ram, 8, 2)), vec![6; 2 * PAGE as usize]);
    }
}

/// Once for each page, with its old content still in memory.
#[test]
fn a_hook_sees_each_page_once_before_it_is_written() {
    for kind in ["anon", "thp", "memfd", "sealed", "memcopy"] {
        let mut target = Target::start();
        let ram = target.map(kind, 2048 * PAGE);
        target.write(ram, 0, 2048, 1);
        let tracker = target.watch(ram);
        drain(&tracker, ram);
        target.write(ram, 7, 1, 2);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (process, list) = (target.process.try_clone().unwrap(), Arc::clone(&seen));
        tracker.set_hook(Some(Arc::new(move |touch| {
            let MemoryEvent::Write(page) = touch else { panic!("{touch:?}") };
            let mut bytes = vec![0; page.len_bytes as usize];
            read_memory(&process, page.start, &mut bytes).unwrap();
            list.lock().unwrap().push((page, bytes));
        })));
        for round in 0..3 {
            target.write(ram, 5, 3, 3 + round);
            target.on("receive", ram, 600, 2, "9");
            target.write(ram, 5, 3, 3 + round);
        }
        // Page 7 was written before: nothing to see there.
        let expected = [(5, 1), (6, 1), (600, 1), (601, 1)];
        let expected: Vec<_> = expected
            .iter()
            .map(|(page, byte)| (part(ram, *page, 1), vec![*byte; PAGE as usize]))
            .collect();
        assert_eq!(*seen.lock().unwrap(), expected, "{kind}");
        tracker.set_hook(None);
        assert_eq!(numbers(&drain(&tracker, ram)), [5, 6, 7, 600, 601], "{kind}");
        target.write(ram, 0, 2048, 4);
        assert_eq!(seen.lock().unwrap().len(), 4);
    }
}

/// Private memory that is discarded is reported once, as often as it happens; other memory from
/// then on always.
#[test]
fn discarded_pages_are_reported_and_told() {
    const PAGES: u64 = 4 * 512;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    for kind in ["anon", "thp"] {
        let mut target = Target::start();
        let ram = target.map(kind, PAGES * PAGE);
        target.write(ram, 0, PAGES, 7);
        let tracker = target.watch(ram);
        assert_eq!(drain(&tracker, ram).len() as u64, PAGES);
        let tables = (ram.start.0.next_multiple_of(HUGE) - ram.start.0) / PAGE;
        for (first, pages) in [(5, 1), (tables, 512), (tables + 512, 700), (0, PAGES), (0, PAGES)] {
            let pages = pages.min(PAGES - first);
            let told = recorder(&tracker);
            target.on("zap", ram, first, pages, "");
            assert_eq!(
                *told.lock().unwrap(),
                [MemoryEvent::Discard(part(ram, first, pages))],
                "{kind}"
            );
            tracker.set_hook(None);
            let absent: Vec<_> = (first..first + pages).map(|page| (page, false)).collect();
            assert_eq!(drain(&tracker, ram), absent, "{kind}: {pages} pages from {first}");
            assert_eq!(drain(&tracker, ram), [], "{kind}: reported once");
            target.write(ram, first, 1, 9);
            assert_eq!(numbers(&drain(&tracker, ram)), [first], "{kind}");
            target.write(ram, first, pages, 9);
            assert_eq!(drain(&tracker, ram).len() as u64, pages, "{kind}");
        }
    }
    for (kind, discard) in [("memcopy", "zap"), ("memfd", "zap"), ("memfd", "remove")] {
        let mut target = Target::start();
        let ram = target.map(kind, PAGES * PAGE);
        target.write(ram, 0, PAGES, 7);
        let tracker = target.watch(ram);
        drain(&tracker, ram);
        let told = recorder(&tracker);
        target.on(discard, ram, 600, 3, "");
        assert_eq!(
            *told.lock().unwrap(),
            [MemoryEvent::Discard(part(ram, 600, 3))],
            "{kind}, {discard}"
        );
        for _ in 0..3 {
            // Read or not, it counts.
            target.content(part(ram, 600, 1));
            assert_eq!(numbers(&drain(&tracker, ram)), [600, 601, 602], "{kind}, {discard}");
        }
        target.write(ram, 5, 1, 1);
        assert_eq!(numbers(&drain(&tracker, ram)), [5, 600, 601, 602], "{kind}, {discard}");
    }
}

/// What changes without a word to a hook beforehand can be found out: here, a discard.
#[test]
fn protection_lost_unseen_is_found() {
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    let mut target = Target::start();
    let ram = target.map("anon", 2000 * PAGE);
    target.write(ram, 0, 1000, 1);
    let tracker = target.watch(ram);
    assert_eq!(tracker.pages_with_lost_protection(ram).unwrap(), [], "never drained");
    drain(&tracker, ram);
    recorder(&tracker);
    target.write(ram, 5, 9, 2);
    target.write(ram, 1500, 9, 2);
    assert_eq!(tracker.pages_with_lost_protection(ram).unwrap(), []);
    target.on("zap", ram, 10, 2, "");
    target.on("zap", ram, 100, 900, "");
    // Where it had been announced as written, it was lost before.
    assert_eq!(tracker.pages_with_lost_protection(ram).unwrap(), [part(ram, 100, 900)]);
    target.write(ram, 200, 1, 3);
    assert_eq!(
        tracker.pages_with_lost_protection(ram).unwrap(),
        [part(ram, 100, 900)],
        "it is there again, as another"
    );
    assert_eq!(drain(&tracker, ram).len(), 9 + 900 + 9);
    assert_eq!(tracker.pages_with_lost_protection(ram).unwrap(), []);
}

#[test]
fn what_cannot_be_watched_is_refused_by_name() {
    let mut target = Target::start();
    let ram = target.map("anon", 8 * PAGE);
    let mut tracker = target.watcher();
    let odd = HostRange { start: HostVirt(ram.start.0 + 1), len_bytes: PAGE };
    assert!(matches!(tracker.register(odd), Err(Error::Unaligned { .. })));
    assert!(matches!(tracker.register(part(ram, 0, 0)), Err(Error::Unaligned { .. })));
    for kind in ["file", "copy"] {
        let on_disk = target.map(kind, 8 * PAGE);
        let error = tracker.register(on_disk).unwrap_err();
        assert!(
            matches!(error, Error::NotWatchable { range, .. } if range == on_disk),
            "{error:?}"
        );
        assert!(error.fix().is_some());
    }
    target.ok(&format!("unmap {} {}", ram.start.0 + 4 * PAGE, PAGE));
    let error = tracker.register(ram).unwrap_err();
    assert!(
        matches!(error, Error::Unmapped { hole, .. } if hole == part(ram, 4, 1).start),
        "{error:?}"
    );
    tracker.register(part(ram, 0, 4)).unwrap();
    assert!(matches!(tracker.register(part(ram, 3, 1)), Err(Error::Registered { .. })));
    let error = try_drain(&tracker, part(ram, 0, 5)).unwrap_err();
    assert!(
        matches!(error, Error::NotRegistered { hole, .. } if hole == part(ram, 4, 1).start),
        "{error:?}"
    );
    // A second tracker of the same memory.
    let error = target.watcher().register(part(ram, 0, 4)).unwrap_err();
    assert!(error.fix().is_some_and(|fix| fix.contains("another userfaultfd")), "{error:?}");
    // Unregistered, it can be registered again; the rest goes on.
    drain(&tracker, part(ram, 0, 4));
    tracker.unregister(part(ram, 1, 1)).unwrap();
    target.write(ram, 0, 4, 3);
    assert_eq!(drain(&tracker, part(ram, 0, 1)), present(&[0]));
    assert_eq!(drain(&tracker, part(ram, 2, 2)).len(), 2);
    tracker.register(part(ram, 1, 1)).unwrap();
    assert_eq!(drain(&tracker, part(ram, 0, 4)), present(&[1]));
}

/// With a userfaultfd for user-mode faults alone a `read` into guest RAM would fail in the process.
#[test]
fn a_descriptor_for_user_mode_faults_is_refused() {
    let mut target = Target::start();
    if rustix::process::geteuid().is_root() {
        target.ok("demote");
    }
    let attached = inject_userfaultfd(&target.process).unwrap();
    if !attached.user_mode_only {
        let reason = "a descriptor for user-mode faults alone: the host permits all users more";
        record_skip(Scope::Part, reason);
    }
    let error = FaultTracker::new(&target.process, attached.uffd, true).unwrap_err();
    assert!(matches!(error, Error::UserModeOnly { .. }), "{error:?}");
    assert!(error.fix().unwrap().contains("vm.unprivileged_userfaultfd"));
}

/// Memory mapped anew under the tracker has lost its protection.
#[test]
fn a_broken_drain_says_so_and_adds_nothing() {
    for remap in [true, false] {
        let mut target = Target::start();
        let ram = target.map("anon", 64 * PAGE);
        target.write(ram, 0, 64, 1);
        let tracker = target.watch(ram);
        drain(&tracker, ram);
        target.ok(&format!("unmap {} {}", ram.start.0 + 32 * PAGE, PAGE));
        if remap {
            target.ok(&format!("remap {} {}", ram.start.0 + 32 * PAGE, PAGE));
        }
        let mut out = vec![WrittenPages { range: part(ram, 0, 1), present: true }];
        let error = tracker.drain(ram, &mut out).unwrap_err();
        assert!(matches!(error, Error::ScanBroken { range, .. } if range == ram), "{error:?}");
        assert_eq!(out.len(), 1);
        // What is left of the memory works on.
        target.write(ram, 0, 32, 2);
    }
}

#[test]
fn a_drain_of_a_process_that_is_gone_is_an_error() {
    let mut target = Target::start();
    let ram = target.map("anon", 8 * PAGE);
    let tracker = target.watch(ram);
    drain(&tracker, ram);
    target.end();
    let error = try_drain(&tracker, ram).unwrap_err();
    assert!(matches!(error, Error::Gone { .. } | Error::ScanBroken { .. }), "{error:?}");
}

/// A hook that fails ends the tracking: the writer goes on, and no later drain passes for an
/// answer.
#[test]
fn a_hook_that_panics_blocks_nobody_and_is_told() {
    let mut target = Target::start();
    let ram = target.map("anon", 64 * PAGE);
    target.write(ram, 0, 64, 1);
    let tracker = target.watch(ram);
    drain(&tracker, ram);
    tracker
        .set_hook(Some(Arc::new(|_| std::panic::resume_unwind(Box::new("a failure on purpose")))));
    target.write(ram, 3, 1, 2);
    target.write(ram, 0, 64, 3);
    target.on("zap", ram, 0, 8, "");
    for _ in 0..2 {
        let error = try_drain(&tracker, ram).unwrap_err();
        assert!(matches!(error, Error::ScanBroken { .. }), "{error:?}");
        assert!(error.to_string().contains("handler"), "{error}");
    }
}

/// Dropping the tracker lets the process go on at once, however long the hook takes.
#[test]
fn a_dropped_tracker_leaves_nobody_waiting() {
    for kind in KINDS {
        let mut target = Target::start();
        let ram = target.map(kind, 64 * PAGE);
        target.write(ram, 0, 32, 1);
        let before = target.content(ram);
        let tracker = target.watch(ram);
        drain(&tracker, ram);
        let (entered, leave) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (inside, may_leave) = (Arc::clone(&entered), Arc::clone(&leave));
        tracker.set_hook(Some(Arc::new(move |_| {
            inside.store(true, Ordering::SeqCst);
            wait_until("the hook may leave", || may_leave.load(Ordering::SeqCst));
        })));
        assert_eq!(target.content(ram), before);
        target.tell(&format!("write {} 1 9", ram.start.0));
        wait_until("the hook is called", || entered.load(Ordering::SeqCst));
        assert_eq!(target.try_answer(), None, "{kind}: the writer waits");
        let dropping = std::thread::spawn(move || drop(tracker));
        assert_eq!(target.answer(), "ok", "{kind}: the writer goes on");
        leave.store(true, Ordering::SeqCst);
        dropping.join().unwrap();
        target.write(ram, 0, 64, 3);
        drain(&target.watch(ram), ram);
    }
}

/// Tracks another test's target with a hook that never ends, until killed.
#[test]
#[ignore = "a role of another test"]
fn role_that_holds_a_writer() {
    let Some(arguments) = role_arguments() else { return };
    let number = |index: usize| arguments[index].parse::<u64>().unwrap();
    let process = Process::open(number(0) as u32).unwrap();
    let ram = HostRange { start: HostVirt(number(1)), len_bytes: number(2) };
    let attached = inject_userfaultfd(&process).unwrap();
    let mut tracker = FaultTracker::new(&process, attached.uffd, attached.user_mode_only).unwrap();
    tracker.register(ram).unwrap();
    tracker.drain(ram, &mut Vec::new()).unwrap();
    tracker.set_hook(Some(Arc::new(|_| std::thread::sleep(WAIT_MAX))));
    println!("ready");
    std::thread::sleep(WAIT_MAX);
}

#[test]
fn a_killed_tracker_leaves_nobody_waiting() {
    for kind in KINDS {
        let mut target = Target::start();
        let ram = target.map(kind, 64 * PAGE);
        let arguments = format!("{} {}", ram.start.0, ram.len_bytes);
        let mut role = start_role("fault_tracking::role_that_holds_a_writer", &target, &arguments);
        target.tell(&format!("write {} {} 9", ram.start.0, ram.len_bytes));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(target.try_answer(), None, "{kind}: the writer waits");
        role.kill();
        assert_eq!(target.answer(), "ok", "{kind}: the writer goes on");
        target.write(ram, 0, 64, 3);
        assert_eq!(target.content(ram), vec![3; 64 * PAGE as usize]);
    }
}
