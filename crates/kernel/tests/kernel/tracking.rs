//! What the tracker reports, for each kind of memory, and what it cannot see.

use crate::target::{
    HUGE, HugePages, PAGE, SEES_NO_MARKERS, Target, pages, scan, sees_markers, try_scan,
};
use keyframe_kernel::attach::inject_userfaultfd;
use keyframe_kernel::memory::GuestReader;
use keyframe_kernel::{Error, write_tracker::WrittenPages};
use keyframe_testing::{Scope, record_skip, skip};
use keyframe_units::{HostRange, HostVirt};

/// Kinds with pages of 4 KiB, on which tracking is exact.
const EXACT: [&str; 5] = ["anon", "memfd", "sealed", "file", "copy"];

fn part(range: HostRange, first: u64, pages: u64) -> HostRange {
    HostRange { start: HostVirt(range.start.0 + first * PAGE), len_bytes: pages * PAGE }
}

fn numbers(pages: &[(u64, bool)]) -> Vec<u64> {
    pages.iter().map(|(page, _)| *page).collect()
}

/// A first scan of `pages` pages, of which `present` are there.
fn assert_first(found: &[(u64, bool)], pages: u64, present: &[u64], context: &str) {
    assert_eq!(numbers(found), (0..pages).collect::<Vec<_>>(), "{context}");
    let there: Vec<u64> =
        found.iter().filter(|(_, present)| *present).map(|(page, _)| *page).collect();
    assert_eq!(there, present, "{context}");
}

/// Never-touched pages are reported once; then what is written and nothing else. The memory is
/// larger than a page table covers, so that some tables do not exist.
#[test]
fn the_first_scan_reports_all_and_each_further_one_what_was_written() {
    const PAGES: u64 = 2000;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    for kind in EXACT {
        let mut target = Target::start();
        let ram = target.map(kind, PAGES * PAGE);
        target.write(ram, 3, 2, 1);
        let tracker = target.track(ram);
        assert_first(&scan(&tracker, ram), PAGES, &[3, 4], kind);
        assert_eq!(scan(&tracker, ram), [], "{kind}: nothing was written");

        target.write(ram, 4, 1, 2);
        target.write(ram, 9, 2, 2);
        target.write(ram, 1999, 1, 2);
        assert_eq!(tracker.count_written(part(ram, 0, 512)).unwrap(), 3, "{kind}");
        let found = scan(&tracker, ram);
        let written: Vec<u64> = [4, 9, 10, 1999].into();
        if ["anon", "copy"].contains(&kind) {
            assert_eq!(
                found,
                written.iter().map(|page| (*page, true)).collect::<Vec<_>>(),
                "{kind}"
            );
        } else {
            // Shared memory keeps its holes: touching a page reports its neighbours that were never
            // touched, absent.
            let there: Vec<u64> =
                found.iter().filter(|(_, present)| *present).map(|(page, _)| *page).collect();
            assert_eq!(there, written, "{kind}");
        }
        assert_eq!(scan(&tracker, ram), [], "{kind}: reported once");
    }
}

/// By two threads: each page written is found once, in order, and protected, in memory that is
/// large enough to be shared out.
#[test]
fn a_scan_by_two_threads_finds_what_one_does() {
    const PAGES: u64 = 5 << 18;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    for kind in ["anon", "memfd"] {
        let mut target = Target::start();
        let ram = target.map(kind, PAGES * PAGE);
        let places = [0, 511, PAGES / 2 - 1, PAGES / 2, PAGES - 700, PAGES - 1];
        let near = |page: u64| (page / 7 * 7, (page / 7 * 7 + 7).min(PAGES));
        for page in places {
            let (first, end) = near(page);
            target.write(ram, first, end - first, 1);
        }
        let tracker = target.track(ram);
        tracker.scan_and_protect(ram, &mut Vec::new()).unwrap();
        for round in 2..5 {
            for page in places {
                target.write(ram, page, 1, round);
            }
            let by_two = || {
                let mut written = Vec::new();
                tracker.scan_and_protect_by_two(ram, &mut written).unwrap();
                numbers(&pages(ram, &written))
            };
            assert_eq!(by_two(), places, "{kind}");
            assert_eq!(by_two(), [0; 0], "{kind}: reported once");
        }
    }
}

/// Reading is not writing.
#[test]
fn a_page_that_is_only_read_is_not_reported() {
    const PAGES: u64 = 600;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    for kind in EXACT {
        let mut target = Target::start();
        let ram = target.map(kind, PAGES * PAGE);
        target.write(ram, 0, PAGES / 2, 1);
        let tracker = target.track(ram);
        scan(&tracker, ram);
        target.content(part(ram, 0, PAGES / 2));
        assert_eq!(scan(&tracker, ram), [], "{kind}");
        // Private memory was given markers where nothing is; reading through them keeps the
        // protection.
        if kind == "anon" || kind == "copy" {
            target.content(ram);
            assert_eq!(scan(&tracker, ram), [], "{kind}");
            target.write(ram, 500, 1, 1);
            assert_eq!(scan(&tracker, ram), [(500, true)], "{kind}");
        }
    }
}

/// Discarding private memory changes it: a page, a whole page table, a huge page; again and again.
#[test]
fn discarded_private_pages_are_reported_each_time() {
    const PAGES: u64 = 4 * 512;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    for kind in ["anon", "thp", "copy", "memcopy"] {
        let mut target = Target::start();
        let ram = target.map(kind, PAGES * PAGE);
        target.write(ram, 0, PAGES, 7);
        let tracker = target.track(ram);
        assert_eq!(scan(&tracker, ram).len() as u64, PAGES);
        let tables = (ram.start.0.next_multiple_of(HUGE) - ram.start.0) / PAGE;
        for (first, pages) in [(5, 1), (tables, 512), (tables + 512, 700), (0, PAGES), (0, PAGES)] {
            let pages = pages.min(PAGES - first);
            target.on("zap", ram, first, pages, "");
            let absent: Vec<_> = (first..first + pages).map(|page| (page, false)).collect();
            assert_eq!(scan(&tracker, ram), absent, "{kind}: {pages} pages from {first}");
            assert_eq!(scan(&tracker, ram), [], "{kind}: reported once");
            target.write(ram, first, 1, 9);
            assert_eq!(scan(&tracker, ram), [(first, true)], "{kind}");
            target.write(ram, first, pages, 9);
            assert_eq!(scan(&tracker, ram).len() as u64, pages, "{kind}");
        }
    }
}

/// Reading puts something there again, which is not what was there: zeros, or the file's page.
#[test]
fn discarded_pages_that_are_read_before_the_scan_are_reported() {
    const PAGES: u64 = 3 * 512;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    for kind in ["anon", "thp", "copy", "memcopy"] {
        for trusting in [true, false] {
            let mut target = Target::start();
            let ram = target.map(kind, PAGES * PAGE);
            target.write(ram, 0, 700, 7);
            let mut tracker = target.track(ram);
            if !trusting {
                tracker.trust_no_kernel();
            }
            scan(&tracker, ram);
            for round in 0..3 {
                let context = format!("{kind}, trusting: {trusting}, round {round}");
                target.on("zap", ram, 3, 2, "");
                target.content(part(ram, 0, 5));
                assert_eq!(numbers(&scan(&tracker, ram)), [3, 4], "{context}: some");
                assert_eq!(scan(&tracker, ram), [], "{context}: reported once");
                target.content(ram);
                assert_eq!(scan(&tracker, ram), [], "{context}: reading is not writing");
                // Never written since, but once more nothing.
                target.on("zap", ram, 3, 1, "");
                let again = numbers(&scan(&tracker, ram));
                assert!(
                    again.is_empty() || (kind != "copy" && again == [3]),
                    "{context}: {again:?}"
                );
                target.write(ram, 4, 1, 8);
                assert_eq!(scan(&tracker, ram), [(4, true)], "{context}");
                target.on("zap", ram, 0, PAGES, "");
                target.content(ram);
                let all = numbers(&scan(&tracker, ram));
                assert!([0, 4, 699].iter().all(|page| all.contains(page)), "{context}: {all:?}");
                target.write(ram, 0, 700, 9);
                scan(&tracker, ram);
            }
        }
    }
}

/// The kernel says nothing of them: refused where they can be discarded, tracked where not.
#[test]
fn private_huge_pages_that_can_be_discarded_are_refused() {
    let Some(_pool) = HugePages::reserve(8) else { return };
    for kind in ["hugeanon", "hugecopy"] {
        let mut target = Target::start();
        let ram = target.map(kind, 2 * HUGE);
        let mut tracker = target.tracker();
        let error = tracker.register(ram).unwrap_err();
        assert!(
            matches!(error, Error::DiscardsUnseen { range, .. } if range == ram),
            "{kind}: {error:?}"
        );
        assert!(error.fix().unwrap().contains("balloon"));
        tracker.set_watch_discards(false);
        tracker.register(ram).unwrap();
        assert_eq!(scan(&tracker, ram).len(), 2 * 512, "{kind}");
        // Told only now: no scan passes over them.
        tracker.set_watch_discards(true);
        let error = try_scan(&tracker, ram).unwrap_err();
        assert!(
            matches!(error, Error::DiscardsUnseen { operation: "scan", .. }),
            "{kind}: {error:?}"
        );
        tracker.set_watch_discards(false);
        target.write(ram, 512, 1, 1);
        assert_eq!(numbers(&scan(&tracker, ram)), (512..1024).collect::<Vec<_>>(), "{kind}");
    }
}

/// Touched and discarded again between two scans, reported all the same: whoever copied it
/// meanwhile holds old data.
#[test]
fn a_page_touched_and_discarded_between_scans_is_reported() {
    const PAGES: u64 = 3 * 512;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    let mut target = Target::start();
    let ram = target.map("anon", PAGES * PAGE);
    let tracker = target.track(ram);
    assert_first(&scan(&tracker, ram), PAGES, &[], "untouched");
    for _ in 0..3 {
        target.write(ram, 700, 1, 1);
        target.on("zap", ram, 0, PAGES, "");
        let found = numbers(&scan(&tracker, ram));
        assert!(found.contains(&700), "{found:?}");
        scan(&tracker, ram);
    }
}

/// Told that nothing discards, a scan still reports all writes.
#[test]
fn without_watching_discards_writes_are_reported() {
    const PAGES: u64 = 1500;
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    let mut target = Target::start();
    let ram = target.map("anon", PAGES * PAGE);
    let mut tracker = target.track(ram);
    tracker.set_watch_discards(false);
    assert_first(&scan(&tracker, ram), PAGES, &[], "untouched");
    target.write(ram, 3, 2, 1);
    target.write(ram, 1400, 1, 1);
    assert_eq!(scan(&tracker, ram), [(3, true), (4, true), (1400, true)]);
    assert_eq!(scan(&tracker, ram), []);
}

#[test]
fn huge_pages_are_tracked_whole() {
    let Some(_pool) = HugePages::reserve(16) else { return };
    for kind in ["hugetlb", "hugeanon"] {
        let mut target = Target::start();
        let ram = target.map(kind, 6 * HUGE);
        let mapping = target.process.maps().unwrap().into_iter().find(|m| m.range == ram).unwrap();
        assert_eq!(mapping.page_bytes, HUGE, "{kind}");
        assert_eq!(mapping.is_private_anonymous(), kind == "hugeanon");
        target.write(ram, 512, 1, 1);
        let mut tracker = target.tracker();
        tracker.set_watch_discards(false);
        tracker.register(ram).unwrap();
        assert_first(&scan(&tracker, ram), 6 * 512, &(512..1024).collect::<Vec<_>>(), kind);
        assert_eq!(scan(&tracker, ram), [], "{kind}");
        target.write(ram, 700, 1, 2);
        target.write(ram, 3 * 512, 1, 2);
        let written: Vec<_> =
            (512..1024).chain(3 * 512..4 * 512).map(|page| (page, true)).collect();
        assert_eq!(scan(&tracker, ram), written, "{kind}");
        assert_eq!(scan(&tracker, ram), [], "{kind}");
        let error = try_scan(&tracker, part(ram, 0, 1)).unwrap_err();
        assert!(matches!(error, Error::Unaligned { page_bytes: HUGE, .. }), "{error:?}");
    }
}

/// The kernel writes the memory, by copying and by DMA: as tracked as any write, also through a
/// descriptor that the process was only permitted for user-mode faults.
#[test]
fn writes_by_the_kernel_are_tracked() {
    for (kind, demoted) in [("anon", false), ("memfd", false), ("anon", true), ("memfd", true)] {
        if demoted && !rustix::process::geteuid().is_root() {
            record_skip(Scope::Part, "a process without rights: only root can start one");
            continue;
        }
        let mut target = Target::start();
        let ram = target.map(kind, 512 * PAGE);
        target.write(ram, 0, 512, 1);
        if demoted {
            target.ok("demote");
        }
        let attached = inject_userfaultfd(&target.process).unwrap();
        if demoted {
            assert_eq!(attached.user_mode_only, !anybody_may());
        }
        let mut tracker =
            keyframe_kernel::write_tracker::WriteTracker::new(&target.process, attached.uffd)
                .unwrap();
        tracker.register(ram).unwrap();
        scan(&tracker, ram);
        target.on("receive", ram, 3, 2, "5");
        assert_eq!(scan(&tracker, ram), [(3, true), (4, true)], "{kind}, demoted: {demoted}");
        assert_eq!(target.content(part(ram, 3, 2)), vec![5; 2 * PAGE as usize]);
        if !demoted {
            target.on("direct", ram, 8, 2, "6");
            assert_eq!(scan(&tracker, ram), [(8, true), (9, true)], "{kind}");
            assert_eq!(target.content(part(ram, 8, 2)), vec![6; 2 * PAGE as usize]);
        }
    }
}

fn anybody_may() -> bool {
    std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd")
        .is_ok_and(|text| text.trim() == "1")
}

/// More runs than one call can answer.
#[test]
fn no_run_is_lost_where_they_are_many() {
    const PAGES: u64 = 2 * 20_000;
    let mut target = Target::start();
    let ram = target.map("anon", PAGES * PAGE);
    target.write(ram, 0, PAGES, 1);
    let tracker = target.track(ram);
    scan(&tracker, ram);
    let even: Vec<u64> = (0..PAGES).step_by(2).collect();
    for page in &even {
        target.tell(&format!("write {} 1 2", ram.start.0 + page * PAGE));
    }
    for _ in &even {
        assert_eq!(target.answer(), "ok");
    }
    let found = scan(&tracker, ram);
    assert!(found.iter().all(|(_, present)| *present));
    assert_eq!(numbers(&found), even);
    assert_eq!(scan(&tracker, ram), []);
}

/// A documented limit: the page in memory changes, the protection does not. What is left in the
/// file tells.
#[test]
fn a_hole_punched_into_shared_memory_shows_in_the_file_alone() {
    let mut target = Target::start();
    let ram = target.map("memfd", 64 * PAGE);
    target.write(ram, 0, 64, 1);
    let tracker = target.track(ram);
    scan(&tracker, ram);
    target.on("punch", ram, 8, 4, "");
    assert!(target.content(part(ram, 8, 4)).iter().all(|byte| *byte == 0));
    let reader = GuestReader::new(&target.process, &[ram]).unwrap();
    target.on("punch", ram, 20, 4, "");
    let extents = reader.data_extents(ram).unwrap();
    assert_eq!(extents, [part(ram, 0, 20), part(ram, 24, 40)]);
    assert_eq!(
        scan(&tracker, ram),
        [],
        "if the kernel reports these now, the documentation is to be changed"
    );
}

#[test]
fn ranges_over_several_mappings_and_parts_of_them() {
    let mut target = Target::start();
    let ram = target.map("anon", 64 * PAGE);
    // Unlike advice makes three mappings of one.
    target.on("zap", ram, 0, 1, "");
    target.ok(&format!("advise {} {}", ram.start.0 + 16 * PAGE, 16 * PAGE));
    let mut tracker = target.track(ram);
    assert_eq!(scan(&tracker, ram).len(), 64);
    target.write(ram, 14, 4, 1);
    assert_eq!(numbers(&scan(&tracker, part(ram, 0, 15))), [14]);
    assert_eq!(
        numbers(&scan(&tracker, ram)),
        [15, 16, 17],
        "the rest is reported by the next scan"
    );

    let error = tracker.register(part(ram, 63, 1)).unwrap_err();
    assert!(matches!(error, Error::Registered { .. }), "{error:?}");
    tracker.unregister(part(ram, 10, 10)).unwrap();
    target.write(ram, 0, 64, 2);
    assert_eq!(scan(&tracker, part(ram, 0, 10)).len(), 10);
    let error = try_scan(&tracker, ram).unwrap_err();
    assert!(
        matches!(error, Error::NotRegistered { hole, .. } if hole == part(ram, 10, 1).start),
        "{error:?}"
    );
    assert_eq!(scan(&tracker, part(ram, 20, 44)).len(), 44);
}

#[test]
fn what_cannot_be_tracked_is_refused_by_name() {
    let mut target = Target::start();
    let ram = target.map("anon", 8 * PAGE);
    let mut tracker = target.tracker();
    let odd = HostRange { start: HostVirt(ram.start.0 + 1), len_bytes: PAGE };
    assert!(matches!(tracker.register(odd), Err(Error::Unaligned { .. })));
    assert!(matches!(tracker.register(part(ram, 0, 0)), Err(Error::Unaligned { .. })));
    target.ok(&format!("unmap {} {}", ram.start.0 + 4 * PAGE, PAGE));
    let error = tracker.register(ram).unwrap_err();
    assert!(
        matches!(error, Error::Unmapped { hole, .. } if hole == part(ram, 4, 1).start),
        "{error:?}"
    );
    tracker.register(part(ram, 0, 4)).unwrap();
    // A second tracker of the same memory.
    let mut second = target.tracker();
    let error = second.register(part(ram, 0, 4)).unwrap_err();
    assert!(error.fix().is_some_and(|fix| fix.contains("another userfaultfd")), "{error:?}");
}

/// Memory that is mapped anew under the tracker has lost its protection, and what was found before
/// is lost with it.
#[test]
fn a_broken_scan_says_so_and_adds_nothing() {
    for remap in [true, false] {
        let mut target = Target::start();
        let ram = target.map("anon", 64 * PAGE);
        target.write(ram, 0, 64, 1);
        let tracker = target.track(ram);
        scan(&tracker, ram);
        target.write(ram, 3, 1, 2);
        target.ok(&format!("unmap {} {}", ram.start.0 + 32 * PAGE, PAGE));
        if remap {
            target.ok(&format!("remap {} {}", ram.start.0 + 32 * PAGE, PAGE));
        }
        let mut out = vec![WrittenPages { range: part(ram, 0, 1), present: true }];
        let error = tracker.scan_and_protect(ram, &mut out).unwrap_err();
        assert!(matches!(error, Error::ScanBroken { range, .. } if range == ram), "{error:?}");
        assert_eq!(out.len(), 1);
    }
}

/// What a broken scan knew of a page is forgotten: it may have protected the page, and a discard
/// then leaves no trace but that the page is gone.
#[test]
fn a_page_discarded_after_a_broken_scan_is_reported() {
    let mut target = Target::start();
    let ram = target.map("memcopy", 64 * PAGE);
    let tracker = target.track(ram);
    scan(&tracker, ram);
    target.write(ram, 3, 1, 1);
    target.ok(&format!("unmap {} {}", ram.start.0 + 40 * PAGE, PAGE));
    assert!(matches!(try_scan(&tracker, ram), Err(Error::ScanBroken { .. })));
    target.on("zap", ram, 3, 1, "");
    let found = numbers(&scan(&tracker, part(ram, 0, 40)));
    assert!(found.contains(&3), "{found:?}");
}

#[test]
fn a_dropped_tracker_leaves_the_memory_as_if_it_had_never_been() {
    let mut target = Target::start();
    for kind in EXACT {
        let ram = target.map(kind, 64 * PAGE);
        target.write(ram, 0, 32, 1);
        let before = target.content(ram);
        for _ in 0..3 {
            let tracker = target.track(ram);
            assert_eq!(scan(&tracker, ram).len(), 64, "{kind}");
            drop(tracker);
        }
        assert_eq!(target.content(ram), before, "{kind}");
        target.write(ram, 0, 64, 3);
    }
}

/// A process without memory has nothing written; that must not pass for an answer.
#[test]
fn a_scan_of_a_process_that_is_gone_is_an_error() {
    let mut target = Target::start();
    let ram = target.map("anon", 8 * PAGE);
    let tracker = target.track(ram);
    scan(&tracker, ram);
    target.end();
    let error = try_scan(&tracker, ram).unwrap_err();
    assert!(matches!(error, Error::Gone { .. } | Error::ScanBroken { .. }), "{error:?}");
    drop(tracker);
}

/// Swaps pages 5 to 7 out. The kernel takes the request as a hint, so it is repeated.
fn swap_out(target: &mut Target, ram: HostRange) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(2);
    let status = format!("/proc/{}/status", target.process.pid());
    while !std::fs::read_to_string(&status).unwrap().contains("VmSwap:\t      12 kB") {
        assert!(std::time::Instant::now() < deadline, "the pages are swapped out");
        target.on("pageout", ram, 5, 3, "");
    }
}

/// Where the host has swap: a page that was written and swapped out is reported, with its content.
#[test]
fn a_page_on_swap_is_reported_as_present() {
    let swap = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swap.lines().count() < 2 {
        skip!("this host has no swap");
    }
    if !sees_markers() {
        skip!("{SEES_NO_MARKERS}");
    }
    for kind in ["anon", "memcopy"] {
        let mut target = Target::start();
        let ram = target.map(kind, 64 * PAGE);
        let tracker = target.track(ram);
        scan(&tracker, ram);
        target.write(ram, 5, 3, 4);
        swap_out(&mut target, ram);
        assert_eq!(scan(&tracker, ram), [(5, true), (6, true), (7, true)], "{kind}");
        swap_out(&mut target, ram);
        assert_eq!(scan(&tracker, ram), [], "{kind}");
        let reader = GuestReader::new(&target.process, &[ram]).unwrap();
        assert_eq!(reader.data_extents(ram).unwrap(), [part(ram, 5, 3)], "{kind}");
        assert_eq!(target.content(part(ram, 5, 3)), vec![4; 3 * PAGE as usize], "{kind}");
        assert_eq!(scan(&tracker, ram), [], "{kind}");
        swap_out(&mut target, ram);
        target.on("zap", ram, 5, 3, "");
        assert_eq!(scan(&tracker, ram), [(5, false), (6, false), (7, false)], "{kind}");
    }
}
