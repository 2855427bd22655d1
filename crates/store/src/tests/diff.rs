//! The differences between two checkpoints, against contents compared byte by byte.

use super::*;
use crate::{BaseMeta, DiskMeta, DiskState};

#[test]
fn pages_sectors_and_bytes_are_counted_whatever_their_records() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(8)).unwrap();
    put_changes(&mut run, &[0; 8], &[1, 2, 3, 4, 0, 0, 7, 8]).unwrap();
    let first = seal(&mut run, 8).unwrap().id;
    let mut page = content(1);
    page[0] ^= 1;
    page[511] ^= 1;
    page[4095] ^= 1;
    run.put_page(PageIndex(0), &page).unwrap();
    run.put_zero(PageIndex(1)).unwrap();
    run.put_page(PageIndex(4), &content(3)).unwrap();
    let second = seal(&mut run, 8).unwrap().id;
    run.finish().unwrap();
    let other = |a: &Page, b: &Page| a.iter().zip(b).filter(|(a, b)| a != b).count() as u64;
    let diff = store.diff(first, second, &mut |_, _| {}).unwrap();
    let ram = &diff.ram[0];
    assert_eq!(
        (ram.pages, ram.changed_pages, ram.from_zero_pages, ram.to_zero_pages),
        (8, 3, 1, 1)
    );
    let bytes = 3 + other(&content(2), &ZERO_PAGE) + other(&content(3), &ZERO_PAGE);
    assert_eq!((ram.changed_sectors, ram.changed_bytes), (2 + 8 + 8, bytes));
    assert!(diff.same_devices && diff.disks.is_empty());
    let back = store.diff(second, first, &mut |_, _| {}).unwrap();
    assert_eq!((back.ram[0].changed_bytes, back.ram[0].from_zero_pages), (bytes, 1));
    assert_eq!(store.diff(first, first, &mut |_, _| {}).unwrap().ram[0].changed_pages, 0);
    // Another layout: what both have is compared.
    let mut run = writer.begin_run("small", &layout(3)).unwrap();
    put_changes(&mut run, &[0; 3], &[1, 2, 9]).unwrap();
    let small = seal(&mut run, 3).unwrap().id;
    let diff = store.diff(first, small, &mut |_, _| {}).unwrap();
    assert_eq!(
        (diff.ram[0].pages, diff.ram[0].changed_pages, diff.ram[0].only_first_pages),
        (3, 1, 5)
    );
}

#[test]
fn blocks_of_disks_are_compared_as_far_as_the_store_knows_them() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let base = BaseMeta { path: "/base".into(), format: "raw".into(), files: Vec::new() };
    let disk = DiskMeta { name: "d".into(), disk_bytes: 10 << 12, base, ..DiskMeta::default() };
    let mut run =
        writer.begin_run_with("vm", &layout(2), vec![disk], DiskState::default()).unwrap();
    run.put_block(0, 1, &content(3)).unwrap();
    run.put_block(0, 2, &content(5)).unwrap();
    let first = seal(&mut run, 2).unwrap().id;
    run.put_block(0, 1, &content(7)).unwrap();
    run.put_zero_blocks(0, 2, 1).unwrap();
    run.put_block(0, 9, &content(9)).unwrap();
    let second = seal(&mut run, 2).unwrap().id;
    let diff = store.diff(first, second, &mut |_, _| {}).unwrap();
    let disk = &diff.disks[0];
    assert_eq!(
        (disk.pages, disk.changed_pages, disk.to_zero_pages, disk.unknown_pages),
        (10, 2, 1, 1)
    );
    assert!(!disk.other_image && diff.ram[0].changed_pages == 0);
    run.set_base(0, BaseMeta::blank()).unwrap();
    let third = seal(&mut run, 2).unwrap().id;
    assert!(store.diff(second, third, &mut |_, _| {}).unwrap().disks[0].other_image);
}
