//! Sectors of disks that are found in RAM, on real QEMUs: a partition that begins at an odd sector,
//! as old tools make them, lies across the 4 KiB blocks of its disk, and the guest's page cache
//! across its.

use keyframe_tests::disks::{
    assert_same, copy, does, restored_disk, shell, sock, start, take, virtio, words,
};
use keyframe_tests::{Bench, number, qemus};
use serde_json::Value;
use std::path::PathBuf;

const IMAGE_BYTES: usize = 24 << 20;
const SECTOR_BYTES: usize = 512;
const FIRST_SECTOR: u32 = 63;

/// A raw image with one partition, from sector 63 on.
fn partitioned(bench: &Bench) -> PathBuf {
    let mut bytes = vec![0u8; IMAGE_BYTES];
    let sectors = (IMAGE_BYTES / SECTOR_BYTES) as u32 - FIRST_SECTOR;
    let entry = &mut bytes[446..462];
    entry[4] = 0x83;
    entry[8..12].copy_from_slice(&FIRST_SECTOR.to_le_bytes());
    entry[12..].copy_from_slice(&sectors.to_le_bytes());
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    let path = bench.path().join("disk.raw");
    std::fs::write(&path, bytes).expect("write the image");
    path
}

fn disk_of(bench: &Bench, id: &str) -> Value {
    bench.json(&["show", "--json", "--store", &bench.store(), id])["disks"][0].clone()
}

/// Each written sector is in the breakdown once, and its bytes are those of its sectors.
fn assert_adds_up(breakdown: &Value, written_bytes: u64) {
    let mut sum = 0;
    for kind in
        ["zero", "unchanged", "not_deduplicated", "not_counted", "against_disk", "against_ram"]
    {
        assert_eq!(
            number(&breakdown[kind], "bytes"),
            512 * number(&breakdown[kind], "sectors"),
            "{breakdown}"
        );
        sum += number(&breakdown[kind], "bytes");
    }
    assert_eq!(sum, written_bytes, "{breakdown}");
    assert_eq!(number(&breakdown["not_counted"], "sectors"), 0, "{breakdown}");
}

#[test]
fn a_shifted_partition_is_found_in_the_page_cache() {
    for qemu in qemus() {
        println!("-- QEMU {}", qemu.label);
        let bench = Bench::new();
        let drive = virtio(&partitioned(&bench), "raw");
        let mut run = start(&bench, &["--interval", "none"], &shell(&qemu, &words(&drive)));
        let mut expected = Vec::new();
        let steps = [
            "true",
            // Through the page cache: what is in RAM is on the disk, seven sectors further on.
            "dd if=/dev/urandom of=/dev/vda1 bs=4k count=300 conv=notrunc,fsync 2>/dev/null",
            // In the middle of the disk without a shift.
            "dd if=/dev/urandom of=/dev/vda bs=4k seek=4000 count=200 conv=notrunc,fsync 2>/dev/null",
            // What is on the disk already, as a whole.
            "dd if=/dev/vda1 of=/dev/vda1 bs=4k seek=1000 count=100 conv=notrunc,fsync 2>/dev/null",
        ];
        for (step, command) in steps.into_iter().enumerate() {
            does(&mut run, command, &step.to_string());
            let id = take(&bench);
            let copied = copy(&sock(&bench), "d", &bench.path().join("copy.raw"));
            expected.push((id, copied));
        }
        let disks: Vec<Value> = expected.iter().map(|(id, _)| disk_of(&bench, id)).collect();
        for disk in &disks {
            assert_adds_up(&disk["dedup"], number(disk, "written_bytes"));
        }
        let found = |step: usize, kind: &str, how: &str| {
            number(&disks[step]["dedup"][kind][how], "sectors")
        };
        // The blocks at both ends are known in parts.
        assert!(found(1, "against_ram", "parts") >= 298 * 8, "{}", disks[1]);
        assert!(number(&disks[1], "composed_blocks") >= 298, "{}", disks[1]);
        assert!(number(&disks[1], "stored_bytes") < 298 * 200, "{}", disks[1]);
        assert!(found(2, "against_ram", "whole") >= 195 * 8, "{}", disks[2]);
        assert!(found(3, "against_disk", "whole") >= 98 * 8, "{}", disks[3]);

        bench.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        let stats = bench.json(&["stats", "--json", "--store", &bench.store()]);
        assert_adds_up(&stats["disk_sectors"], number(&stats, "disk_dirty_bytes"));
        let shown = bench.ok(&["stats", "--store", &bench.store()]);
        assert!(shown.contains("  against RAM ") && shown.contains("single sectors"), "{shown}");
        println!("{shown}");
        bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
        bench.ok(&["check", "--quiet", "--store", &bench.store()]);
        for (id, copied) in &expected {
            for options in [&[][..], &["--lazy"]] {
                assert_same(
                    &restored_disk(&bench, id, options),
                    copied,
                    &format!("checkpoint {id} {options:?}"),
                );
            }
        }
    }
}
