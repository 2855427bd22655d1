//! Tests disk sectors that are found in RAM, on real QEMUs. A partition that begins at an odd
//! sector, as old tools make them, is not aligned to the 4 KiB blocks of its disk, so that the
//! guest's page cache is not either.

use keyframe_tests::disks::{
    as_strs, assert_same, copy_disk, disk_socket, restored_disk, run_in_guest, shell_guest,
    start_guest, take_checkpoint, virtio_disk,
};
use keyframe_tests::{TestEnv, number, qemus};
use serde_json::Value;
use std::path::PathBuf;

const IMAGE_BYTES: usize = 24 << 20;
const SECTOR_BYTES: usize = 512;
const FIRST_SECTOR: u32 = 63;

/// A raw image with one partition, from sector 63 on.
fn partitioned(env: &TestEnv) -> PathBuf {
    let mut bytes = vec![0u8; IMAGE_BYTES];
    let sectors = (IMAGE_BYTES / SECTOR_BYTES) as u32 - FIRST_SECTOR;
    let entry = &mut bytes[446..462];
    entry[4] = 0x83;
    entry[8..12].copy_from_slice(&FIRST_SECTOR.to_le_bytes());
    entry[12..].copy_from_slice(&sectors.to_le_bytes());
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    let path = env.path().join("disk.raw");
    std::fs::write(&path, bytes).expect("write the image");
    path
}

fn disk_of(env: &TestEnv, id: &str) -> Value {
    env.json(&["show", "--json", "--store", &env.store(), id])["disks"][0].clone()
}

/// Asserts that each written sector is in the breakdown once, and that the bytes match.
fn assert_adds_up(breakdown: &Value, written_bytes: u64) {
    let mut sum = 0;
    for kind in ["zero", "unchanged", "not_deduplicated", "against_disk", "against_ram"] {
        assert_eq!(
            number(&breakdown[kind], "bytes"),
            512 * number(&breakdown[kind], "sectors"),
            "{breakdown}"
        );
        sum += number(&breakdown[kind], "bytes");
    }
    assert_eq!(sum, written_bytes, "{breakdown}");
}

#[test]
fn a_shifted_partition_is_found_in_the_page_cache() {
    for qemu in qemus() {
        println!("-- QEMU {}", qemu.label);
        let env = TestEnv::new();
        let drive = virtio_disk(&partitioned(&env), "raw");
        let mut run =
            start_guest(&env, &["--interval", "none"], &shell_guest(&qemu, &as_strs(&drive)));
        let mut expected = Vec::new();
        let steps = [
            "true",
            // Through the page cache: RAM has the data of the disk, shifted by seven sectors.
            "dd if=/dev/urandom of=/dev/vda1 bs=4k count=300 conv=notrunc,fsync 2>/dev/null",
            // In the middle of the disk, without a shift.
            "dd if=/dev/urandom of=/dev/vda bs=4k seek=4000 count=200 conv=notrunc,fsync 2>/dev/null",
            // Data that the disk already has, as a whole.
            "dd if=/dev/vda1 of=/dev/vda1 bs=4k seek=1000 count=100 conv=notrunc,fsync 2>/dev/null",
        ];
        for (step, command) in steps.into_iter().enumerate() {
            run_in_guest(&mut run, command, &step.to_string());
            let id = take_checkpoint(&env);
            let copied = copy_disk(&disk_socket(&env), "d", &env.path().join("copy.raw"));
            expected.push((id, copied));
        }
        let disks: Vec<Value> = expected.iter().map(|(id, _)| disk_of(&env, id)).collect();
        for disk in &disks {
            assert_adds_up(&disk["dedup"], number(disk, "written_bytes"));
        }
        let found = |step: usize, kind: &str, how: &str| {
            number(&disks[step]["dedup"][kind][how], "sectors")
        };
        // The blocks at both ends are known in part.
        assert!(found(1, "against_ram", "parts") >= 298 * 8, "{}", disks[1]);
        assert!(number(&disks[1], "composed_blocks") >= 298, "{}", disks[1]);
        assert!(number(&disks[1], "stored_bytes") < 298 * 200, "{}", disks[1]);
        assert!(found(2, "against_ram", "whole") >= 195 * 8, "{}", disks[2]);
        assert!(found(3, "against_disk", "whole") >= 98 * 8, "{}", disks[3]);

        env.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        let stats = env.json(&["stats", "--json", "--store", &env.store()]);
        assert_adds_up(&stats["disk_sectors"], number(&stats, "disk_dirty_bytes"));
        let shown = env.ok(&["stats", "--store", &env.store()]);
        assert!(shown.contains("  against RAM ") && shown.contains("single sectors"), "{shown}");
        println!("{shown}");
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
        env.ok(&["check", "--quiet", "--store", &env.store()]);
        for (id, copied) in &expected {
            for options in [&[][..], &["--lazy"]] {
                assert_same(
                    &restored_disk(&env, id, options),
                    copied,
                    &format!("checkpoint {id} {options:?}"),
                );
            }
        }
    }
}
