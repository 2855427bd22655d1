//! Sharing and growth, against stores small enough to count by hand.

use super::*;
use crate::{DiskMeta, DiskState, Growth, ProcessingPhases, Timing};

#[test]
fn records_shared_by_images_vms_and_disks_are_counted_once() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let disk = DiskMeta { name: "d".into(), disk_bytes: 8 << 12, ..DiskMeta::default() };
    let mut run = writer.begin_run_with("a", &layout(6), vec![disk], DiskState::default()).unwrap();
    // Superseded by the next one: the first checkpoint alone needs it.
    run.put_page(PageIndex(5), &content(40)).unwrap();
    put_changes(&mut run, &[0; 5], &[2, 2, 4, 6, 0]).unwrap();
    run.put_block(0, 1, &content(4)).unwrap();
    run.put_block(0, 2, &content(10)).unwrap();
    seal(&mut run, 6).unwrap();
    run.put_zero(PageIndex(5)).unwrap();
    let newest = seal(&mut run, 6).unwrap().id;
    run.finish().unwrap();
    let mut run = writer.begin_run("b", &layout(3)).unwrap();
    put_changes(&mut run, &[0; 3], &[2, 8, 10]).unwrap();
    seal(&mut run, 3).unwrap();
    run.finish().unwrap();
    drop(writer);

    let sharing = store.sharing().unwrap();
    assert_eq!(sharing.raw_bytes, (6 + 6 + 3) << 12);
    assert_eq!(sharing.unique_bytes, 6 << 12, "2, 4, 6, 8, 10, 40");
    assert!(sharing.unique_stored_bytes > 0 && sharing.unused_bytes == 0, "{sharing:?}");
    let [a, b] = sharing.images.as_slice() else { panic!("{sharing:?}") };
    assert_eq!((a.vm.as_str(), a.checkpoint), ("a", newest));
    assert_eq!(
        (a.ram_pages, a.ram_unique_pages, a.with_other_vms_pages, a.with_disks_pages),
        (4, 3, 1, 1)
    );
    assert_eq!((a.disk_blocks, a.disk_unique_blocks), (2, 2));
    // 2 is in the other's RAM, 10 on its disk.
    assert_eq!(
        (b.ram_pages, b.ram_unique_pages, b.with_other_vms_pages, b.with_disks_pages),
        (3, 3, 2, 0)
    );

    store.forget(&[CheckpointId(1)].into()).unwrap();
    let sharing = store.sharing().unwrap();
    assert_eq!(sharing.unique_bytes, 5 << 12);
    assert!(sharing.unused_bytes > 0, "{sharing:?}");
}

#[test]
fn growth_is_the_sum_of_what_checkpoints_added_hour_by_hour() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("a", &layout(6)).unwrap();
    // 22:13:20: two in the first hour, none in the next, one in the third.
    for (number, second) in [(1, 0), (3, 2_000), (5, 8_000)] {
        run.put_page(PageIndex(number), &content(number)).unwrap();
        let taken_at = Timestamp::from_second(1_700_000_000 + second).unwrap();
        run.seal(SealRequest { taken_at, ..request(&layout(6)) }).unwrap();
    }
    run.finish().unwrap();
    let growth = Growth::of(&store.checkpoints().unwrap().sealed);
    let hours: Vec<_> =
        growth.hours.iter().map(|h| (h.checkpoints, h.from.as_second() % 3600)).collect();
    assert_eq!(hours, [(2, 0), (1, 0)]);
    assert!(
        growth
            .checkpoints
            .iter()
            .all(|added| added.dirty_bytes == 4096 && added.added_bytes > 4096)
    );
    let sum: u64 = growth.hours.iter().map(|hour| hour.added_bytes).sum();
    assert_eq!(growth.checkpoints.last().unwrap().sum_bytes, sum);
}

#[test]
fn a_seal_fills_in_the_steps_of_the_processing_if_it_is_asked_to() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let ram = layout(2);
    let mut run = writer.begin_run("vm", &ram).unwrap();
    let asked = ProcessingPhases { disks: 7, ..ProcessingPhases::default() };
    for processing in [None, Some(asked)] {
        run.put_page(PageIndex(0), &content(3)).unwrap();
        let timing = Timing { processing, ..Timing::default() };
        run.seal(SealRequest { timing, ..request(&ram) }).unwrap();
    }
    run.finish().unwrap();
    drop(writer);
    let sealed = store.checkpoints().unwrap().sealed;
    let found: Vec<_> = sealed.iter().map(|one| one.meta.timing.processing).collect();
    let [None, Some(filled)] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(filled.disks, 7);
    assert_ne!(*filled, asked);
    assert_image(&store, sealed[1].id, &[3, 0]);
}
