//! Reading the memory of another process: the right bytes, by the right way, or an error.

use crate::target::{HUGE, HugePages, PAGE, Target, sees_markers};
use keyframe_kernel::memory::{GuestReader, ReadMethod};
use keyframe_kernel::{Error, Process, read_memory, write_memory};
use keyframe_units::{HostRange, HostVirt};

fn at(range: HostRange, offset: u64, len_bytes: u64) -> HostRange {
    HostRange { start: HostVirt(range.start.0 + offset), len_bytes }
}

/// Page n holds n.
fn fill(target: &mut Target, ram: HostRange) {
    for page in 0..ram.len_bytes / PAGE {
        target.write(ram, page, 1, page as u8);
    }
}

/// Only a file that cannot shrink is mapped here as well.
#[test]
fn each_kind_of_memory_is_read_by_the_way_that_suits_it() {
    let mut target = Target::start();
    for (kind, method) in [
        ("anon", ReadMethod::ProcessVm),
        ("memfd", ReadMethod::ProcessVm),
        ("sealed", ReadMethod::OwnMapping),
        ("file", ReadMethod::ProcessVm),
        ("copy", ReadMethod::ProcessVm),
        ("memcopy", ReadMethod::ProcessVm),
    ] {
        let ram = target.map(kind, 32 * PAGE);
        fill(&mut target, ram);
        let reader = GuestReader::new(&target.process, &[ram]).unwrap();
        assert_eq!(reader.methods(), [(ram, method)], "{kind}");
        let ranges = [
            at(ram, 5 * PAGE, PAGE),
            at(ram, 2 * PAGE + 100, 50),
            at(ram, 0, 0),
            at(ram, 31 * PAGE, PAGE),
        ];
        let mut bytes = vec![0xff; 2 * PAGE as usize + 50];
        reader.read(&ranges, &mut bytes).unwrap();
        let expected: Vec<u8> =
            [vec![5; PAGE as usize], vec![2; 50], vec![31; PAGE as usize]].concat();
        assert_eq!(bytes, expected, "{kind}");
        // What is written later is seen.
        target.write(ram, 5, 1, 99);
        reader.read(&ranges[..1], &mut bytes[..PAGE as usize]).unwrap();
        assert!(bytes[..PAGE as usize].iter().all(|byte| *byte == 99), "{kind}");
    }
}

/// More ranges than one call takes, of both kinds of region, in mixed order.
#[test]
fn many_ranges_over_several_regions_come_in_the_order_asked_for() {
    const PAGES: u64 = 200;
    let mut target = Target::start();
    let regions: Vec<_> =
        ["anon", "sealed", "memfd"].iter().map(|kind| target.map(kind, PAGES * PAGE)).collect();
    for ram in &regions {
        fill(&mut target, *ram);
    }
    let reader = GuestReader::new(&target.process, &regions).unwrap();
    let mut ranges = Vec::new();
    let mut expected = Vec::new();
    for step in 0..5000_u64 {
        let (ram, page) = (regions[(step * step / 7 % 3) as usize], step * 37 % PAGES);
        let (offset, len) = (step * 11 % 4000, 1 + step % 90);
        ranges.push(at(ram, page * PAGE + offset, len));
        expected.extend((0..len).map(|byte| ((page * PAGE + offset + byte) / PAGE) as u8));
    }
    let mut bytes = vec![0; expected.len()];
    reader.read(&ranges, &mut bytes).unwrap();
    assert!(bytes == expected);
}

#[test]
fn what_cannot_be_read_is_an_error_and_never_part_of_an_answer() {
    let mut target = Target::start();
    let ram = target.map("anon", 16 * PAGE);
    fill(&mut target, ram);
    let reader = GuestReader::new(&target.process, &[ram]).unwrap();
    let mut page = vec![0; PAGE as usize];
    let error = reader.read(&[at(ram, 0, 100)], &mut page).unwrap_err();
    assert!(matches!(error, Error::Length { ranges_bytes: 100, dst_bytes: 4096 }), "{error:?}");
    for outside in [
        at(ram, 16 * PAGE, PAGE),
        at(ram, 15 * PAGE + 1, PAGE),
        HostRange { start: HostVirt(u64::MAX - 5), len_bytes: PAGE },
    ] {
        let error = reader.read(&[outside], &mut page).unwrap_err();
        assert!(matches!(error, Error::OutsideRegions { .. }), "{error:?}");
    }
    target.ok(&format!("unmap {} {}", ram.start.0 + 8 * PAGE, PAGE));
    let mut all = vec![0; 16 * PAGE as usize];
    let error = reader.read(&[ram], &mut all).unwrap_err();
    assert!(
        matches!(error, Error::Transfer { at, .. } if at.0 == ram.start.0 + 8 * PAGE),
        "{error:?}"
    );
    let error = GuestReader::new(&target.process, &[ram]).unwrap_err();
    assert!(
        matches!(error, Error::Unmapped { hole, .. } if hole.0 == ram.start.0 + 8 * PAGE),
        "{error:?}"
    );
    let overlapping = [at(ram, 0, 2 * PAGE), at(ram, PAGE, PAGE)];
    assert!(matches!(
        GuestReader::new(&target.process, &overlapping),
        Err(Error::BadRegion { .. })
    ));
    assert!(matches!(
        GuestReader::new(&target.process, &[at(ram, 0, 0)]),
        Err(Error::BadRegion { .. })
    ));
    target.end();
    assert!(matches!(reader.read(&[at(ram, 0, PAGE)], &mut page), Err(Error::Gone { .. })));
}

/// Also of memory that we have mapped ourselves, which outlives the process.
#[test]
fn a_process_that_is_gone_gives_no_more_answers() {
    let mut target = Target::start();
    let ram = target.map("sealed", 4 * PAGE);
    let reader = GuestReader::new(&target.process, &[ram]).unwrap();
    target.end();
    let mut page = vec![0; PAGE as usize];
    assert!(matches!(reader.read(&[at(ram, 0, PAGE)], &mut page), Err(Error::Gone { .. })));
}

#[test]
fn memory_is_read_and_written_across_pages() {
    let mut target = Target::start();
    let ram = target.map("anon", 4 * PAGE);
    let bytes: Vec<u8> = (0..2 * PAGE).map(|n| (n % 251) as u8).collect();
    let start = HostVirt(ram.start.0 + 1000);
    write_memory(&target.process, start, &bytes).unwrap();
    let mut back = vec![0; bytes.len()];
    read_memory(&target.process, start, &mut back).unwrap();
    assert_eq!(back, bytes);
    read_memory(&target.process, HostVirt(8), &mut []).unwrap();
    let mut beyond = vec![0; 5 * PAGE as usize];
    // The page behind may be mapped: ask from an address that never is.
    assert!(matches!(
        read_memory(&target.process, HostVirt(8), &mut beyond),
        Err(Error::Transfer { .. })
    ));
    assert!(matches!(
        write_memory(&target.process, HostVirt(8), &bytes),
        Err(Error::Transfer { .. })
    ));
}

/// Everything that is not zero lies in the extents, and where the kernel tells, little else does.
#[test]
fn data_extents_hold_all_data_and_few_zeros() {
    const PAGES: u64 = 1200;
    let mut target = Target::start();
    for kind in ["anon", "memfd", "sealed", "file", "memcopy"] {
        let ram = target.map(kind, PAGES * PAGE);
        let reader = GuestReader::new(&target.process, &[ram]).unwrap();
        assert_eq!(reader.data_extents(ram).unwrap(), [], "{kind}: untouched");
        target.write(ram, 3, 2, 1);
        target.write(ram, 700, 300, 1);
        let expected = [at(ram, 3 * PAGE, 2 * PAGE), at(ram, 700 * PAGE, 300 * PAGE)];
        let found = reader.data_extents(ram).unwrap();
        if kind == "file" {
            // A filesystem's blocks may be larger.
            assert!(expected.iter().all(|e| found.iter().any(|f| f.contains(*e))), "{found:?}");
        } else {
            assert_eq!(found, expected, "{kind}");
        }
        let part = at(ram, 4 * PAGE, 800 * PAGE);
        let clipped = reader.data_extents(part).unwrap();
        assert!(clipped.iter().all(|extent| part.contains(*extent)), "{kind}: {clipped:?}");
        assert_eq!(clipped.last().unwrap().end(), part.end(), "{kind}");
        // Protecting fills the holes with markers, which are not data.
        if (kind == "anon" || kind == "memcopy") && sees_markers() {
            let tracker = target.track(ram);
            tracker.scan_and_protect(ram, &mut Vec::new()).unwrap();
            assert_eq!(reader.data_extents(ram).unwrap(), expected, "{kind}, with markers");
        }
    }
    // What the file of private memory holds is data, though the process never touched it.
    let ram = target.map("copy", 40 * PAGE);
    let reader = GuestReader::new(&target.process, &[ram]).unwrap();
    assert_eq!(reader.data_extents(ram).unwrap(), [ram]);
    target.on("punch", ram, 10, 10, "");
    target.write(ram, 12, 1, 1);
    let expected = [at(ram, 0, 10 * PAGE), at(ram, 12 * PAGE, PAGE), at(ram, 20 * PAGE, 20 * PAGE)];
    let found = reader.data_extents(ram).unwrap();
    assert!(expected.iter().all(|e| found.iter().any(|f| f.contains(*e))), "{found:?}");
}

#[test]
fn data_of_shared_memory_counts_though_the_page_table_lacks_it() {
    let mut target = Target::start();
    let ram = target.map("memfd", 8 * PAGE);
    target.write(ram, 2, 1, 1);
    let reader = GuestReader::new(&target.process, &[ram]).unwrap();
    // Drops the page table's entries; the content stays in the file.
    target.on("zap", ram, 0, 8, "");
    assert_eq!(reader.data_extents(ram).unwrap(), [at(ram, 2 * PAGE, PAGE)]);
    assert_eq!(target.content(at(ram, 2 * PAGE, PAGE)), vec![1; PAGE as usize]);
}

#[test]
fn huge_pages_are_read_by_calls_alone() {
    let Some(_pool) = HugePages::reserve(8) else { return };
    let mut target = Target::start();
    for kind in ["hugetlb", "hugeanon"] {
        let ram = target.map(kind, 3 * HUGE);
        target.write(ram, 600, 3, 5);
        let reader = GuestReader::new(&target.process, &[ram]).unwrap();
        assert_eq!(reader.methods(), [(ram, ReadMethod::ProcessVm)]);
        let extents = reader.data_extents(ram).unwrap();
        assert!(
            extents.iter().any(|extent| extent.contains(at(ram, HUGE, HUGE))),
            "{kind}: {extents:?}"
        );
        let mut bytes = vec![0xff; 5 * PAGE as usize];
        reader.read(&[at(ram, 599 * PAGE, 5 * PAGE)], &mut bytes).unwrap();
        let page = |byte: u8| vec![byte; PAGE as usize];
        assert_eq!(bytes, [page(0), page(5), page(5), page(5), page(0)].concat(), "{kind}");
    }
}

/// Four threads through one reader, each the right bytes.
#[test]
fn threads_read_at_once() {
    let mut target = Target::start();
    let regions = [target.map("sealed", 256 * PAGE), target.map("anon", 256 * PAGE)];
    for ram in &regions {
        fill(&mut target, *ram);
    }
    let reader = GuestReader::new(&target.process, &regions).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let reader = &reader;
            scope.spawn(move || {
                for step in 0..500 {
                    let (ram, page) =
                        (regions[(step % 2) as usize], (step * 7 + thread * 31) % 256);
                    let mut bytes = vec![0; PAGE as usize];
                    reader.read(&[at(ram, page * PAGE, PAGE)], &mut bytes).unwrap();
                    assert!(bytes.iter().all(|byte| u64::from(*byte) == page));
                }
            });
        }
    });
}

/// Our own process is one like any other, and what it maps is found.
#[test]
fn mappings_are_found_with_their_flags() {
    let mut target = Target::start();
    let (anon, shared, file) =
        (target.map("anon", 8 * PAGE), target.map("sealed", 8 * PAGE), target.map("copy", PAGE));
    let maps = target.process.maps().unwrap();
    let find = |range: HostRange| maps.iter().find(|m| m.range.contains(range)).unwrap();
    assert!(find(anon).is_private_anonymous() && find(anon).writable && find(anon).path.is_empty());
    assert!(
        find(shared).shared && find(shared).path.contains("guest-ram") && find(shared).inode != 0
    );
    assert!(!find(file).shared && !find(file).is_private_anonymous() && find(file).offset == 0);
    assert!(maps.iter().all(|m| m.page_bytes == PAGE));
    assert!(maps.windows(2).all(|pair| pair[0].range.end() <= pair[1].range.start));
    let own = Process::open(std::process::id()).unwrap();
    let here = std::ptr::from_ref(&own) as u64;
    assert!(
        own.maps()
            .unwrap()
            .iter()
            .any(|m| m.range.contains(HostRange { start: HostVirt(here), len_bytes: 1 }))
    );
}
