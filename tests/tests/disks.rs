//! Disks in checkpoints, on real QEMUs: each comes back as it was at its checkpoint, whoever fails,
//! and the image beneath is never written.

use keyframe_tests::disks::{
    RECORDS, assert_goes_on, assert_same, copy, does, image, places, qemu_img, records,
    restored_disk, restored_disk_of, shell, sock, start, take, virtio, wait_for_records, words,
};
use keyframe_tests::{
    Bench, Boot, Orphan, Qemu, chosen_qemus, distribution_qemu, number, until, variants,
};
use std::path::{Path, PathBuf};

/// The guest writes, scattered and in rows, data and zeros; a copy of the disk is taken beside each
/// checkpoint.
fn each_checkpoint_has_its_disk(qemu: &Qemu, bench: &Bench, boot: &Boot) {
    println!("-- QEMU {}: {}", qemu.label, boot.extra.join(" "));
    let mut run = start(bench, &["--interval", "none"], boot);
    let mut expected = Vec::new();
    let steps = [
        "true",
        "for i in 1 77 500 4000 5; do dd if=/dev/urandom of=/dev/vda bs=3000 seek=$i count=2 conv=notrunc,fsync 2>/dev/null; done",
        "dd if=/dev/zero of=/dev/vda bs=64k seek=3 count=40 conv=notrunc,fsync 2>/dev/null",
        "dd if=/dev/vda of=/dev/vda bs=4k count=300 seek=1000 conv=notrunc,fsync 2>/dev/null",
    ];
    for (step, command) in steps.into_iter().enumerate() {
        does(&mut run, command, &step.to_string());
        let id = take(bench);
        let copied = copy(&sock(bench), "d", &bench.path().join("copy.raw"));
        expected.push((id, copied));
    }
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), &expected[1].0]);
    let written = number(&shown["disks"][0], "written_blocks");
    assert!((8..=40).contains(&written), "{shown}");
    assert!(
        expected.windows(2).all(|pair| pair[0].1 != pair[1].1),
        "the guest has written nothing"
    );
    bench.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    assert!(run.errors().contains("has written to its disks"), "{}", run.report());
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    let before = places(bench);
    for (id, copied) in &expected {
        for options in [&[][..], &["--lazy"]] {
            assert_same(
                &restored_disk(bench, id, options),
                copied,
                &format!("checkpoint {id} {options:?}"),
            );
        }
    }
    // What a restored VM writes is seen by nobody else.
    let (id, copied) = &expected[2];
    let mut restored = bench.restore(id, &[]);
    restored.wait_for_error("is running after");
    does(
        &mut restored,
        "dd if=/dev/urandom of=/dev/vda bs=64k count=20 conv=notrunc,fsync",
        "again",
    );
    restored.signal(rustix::process::Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    assert_same(&restored_disk(bench, id, &[]), copied, "a checkpoint that a VM was restored from");
    assert_eq!(places(bench), before, "restores leave nothing");
}

#[test]
fn a_raw_image() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::new();
        let image = image(&bench);
        let before = std::fs::read(&image).expect("the image");
        let drive = virtio(&image, "raw");
        each_checkpoint_has_its_disk(&qemu, &bench, &shell(&qemu, &words(&drive)));
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
    }
}

#[test]
fn a_qcow2_image_on_another_as_a_node() {
    for qemu in chosen_qemus(1) {
        let bench = Bench::new();
        let image = image(&bench);
        let before = std::fs::read(&image).expect("the image");
        let overlay = bench.path().join("over.qcow2").display().to_string();
        qemu_img(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-F",
            "raw",
            "-b",
            &image.display().to_string(),
            &overlay,
        ]);
        let overlay_before = std::fs::read(&overlay).expect("the image");
        let file = format!("driver=file,node-name=f,filename={overlay}");
        let boot = shell(
            &qemu,
            &[
                "-blockdev",
                &file,
                "-blockdev",
                "driver=qcow2,node-name=d,file=f",
                "-device",
                "virtio-blk-pci,drive=d",
            ],
        );
        each_checkpoint_has_its_disk(&qemu, &bench, &boot);
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
        assert_eq!(std::fs::read(&overlay).expect("the image"), overlay_before, "the qcow2 image");
    }
}

/// Whatever the way in which a disk is given, QEMU takes our line, and a restore has the disk.
#[test]
fn each_way_to_give_a_disk() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::new();
        let image = image(&bench);
        let expected = std::fs::read(&image).expect("the image");
        let path = image.display().to_string();
        let drive = |options: &str| format!("file={path},format=raw,{options}");
        let json = format!(
            r#"{{"driver":"raw","node-name":"d","file":{{"driver":"file","filename":"{path}","aio":"threads"}}}}"#
        );
        let ways: [(&[&str], &str); 7] = [
            (&["-hda", &path], "hd-0"),
            (&["-drive", &drive("if=ide,index=1,cache=writethrough")], "ide-0"),
            (
                &[
                    "-device",
                    "virtio-scsi-pci",
                    "-drive",
                    &drive("if=none,id=d,cache=none,aio=native"),
                    "-device",
                    "scsi-hd,drive=d,serial=abc",
                ],
                "d",
            ),
            (
                &[
                    "-drive",
                    &drive("if=none,id=d,discard=unmap,werror=stop"),
                    "-device",
                    "virtio-blk-pci,drive=d,serial=abc",
                ],
                "d",
            ),
            (&["-drive", &drive("if=virtio,snapshot=on")], "virtio-0"),
            (&["-snapshot", "-drive", &drive("if=virtio,id=d")], "d"),
            (&["-blockdev", &json, "-device", "ide-hd,drive=d"], "d"),
        ];
        for (way, export) in variants(ways, 4) {
            println!("-- QEMU {}: {}", qemu.label, way.join(" "));
            let mut boot = Boot::new("hash").with(way);
            boot.qemu.clone_from(&qemu.path);
            boot.mem_mib = 96;
            let mut run = start(&bench, &["--interval", "none"], &boot);
            let id = take(&bench);
            bench.ok(&["stop"]);
            assert!(run.wait().success(), "{}", run.report());
            assert_same(&restored_disk_of(&bench, &id, &[], export), &expected, &way.join(" "));
        }
        assert_same(&std::fs::read(&image).expect("the image"), &expected, "the image");
        assert_eq!(places(&bench), Vec::<PathBuf>::new());
    }
}

#[test]
fn ram_and_disk_are_of_one_instant() {
    for qemu in chosen_qemus(1) {
        println!("-- QEMU {}", qemu.label);
        let bench = Bench::new();
        let image = image(&bench);
        let drive = virtio(&image, "raw");
        let mut run = start(&bench, &["--interval", "300ms"], &shell(&qemu, &words(&drive)));
        run.say(RECORDS);
        wait_for_records(&mut run, 20);
        let mark = bench.list().len();
        until("checkpoints are sealed", || bench.list().len() >= mark + 6);
        bench.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        assert!(run.errors().contains(", 0 failed"), "{}", run.report());
        let list = bench.list();
        for entry in &list[mark..mark + 6] {
            assert_goes_on(&bench, &number(entry, "id").to_string());
        }
    }
}

#[test]
fn a_failed_checkpoint_gives_its_blocks_to_the_next() {
    let bench = Bench::new();
    let image = image(&bench);
    let drive = virtio(&image, "raw");
    // The first, complete checkpoint has fewer pages than that, and each further one some hundred
    // blocks and pages.
    let options = ["--interval", "none", "--fault", "disk-full:28000"];
    let mut run = start(&bench, &options, &shell(&distribution_qemu(), &words(&drive)));
    let mut failed = false;
    for step in 0..60 {
        let seek = step % 10 * 600;
        let count = if failed { 3 } else { 600 };
        let write = format!(
            "dd if=/dev/urandom of=/dev/vda bs=4k seek={seek} count={count} conv=notrunc,fsync 2>/dev/null"
        );
        does(&mut run, &write, &step.to_string());
        if failed {
            break;
        }
        failed = !bench.run(&["take", "--name", "guest"]).status.success();
    }
    assert!(failed && run.errors().contains("checkpoint failed"), "{}", run.report());
    let id = take(&bench);
    let copied = copy(&sock(&bench), "d", &bench.path().join("copy.raw"));
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), &id]);
    assert!(number(&shown["disks"][0], "written_blocks") >= 603, "{shown}");
    bench.ok(&["stop"]);
    assert_eq!(run.wait().code(), Some(3), "{}", run.report());
    assert_same(&restored_disk(&bench, &id, &[]), &copied, "the checkpoint behind the failed one");
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
}

/// That nobody has the overlay open any more.
fn is_free(overlay: &Path) -> bool {
    let dir = std::fs::File::open(overlay).expect("the overlay");
    rustix::fs::flock(&dir, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[test]
fn a_killed_engine_leaves_the_guest_its_disk() {
    for phase in ["paused", "device-state", "sealing"] {
        let bench = Bench::new();
        let image = image(&bench);
        let before = std::fs::read(&image).expect("the image");
        let drive = virtio(&image, "raw");
        let fault = format!("kill:{phase}:3");
        let boot = shell(&distribution_qemu(), &words(&drive));
        let mut run = start(&bench, &["--interval", "none", "--fault", &fault], &boot);
        let qemu = Orphan::of(&bench, &mut run, "guest");
        run.say(RECORDS);
        for _ in 0..2 {
            wait_for_records(&mut run, 3);
            take(&bench);
        }
        let killed = bench.run(&["take", "--name", "guest"]);
        assert!(!killed.status.success(), "the fault did not strike in {phase}");
        run.wait();
        let before_end = records(&run).len();
        until("the guest writes on without its engine", || records(&run).len() >= before_end + 5);
        let last = *records(&run).last().expect("a record");
        qemu.kill();
        // The server goes with its last client, and everything that was flushed is in the overlay.
        let place = places(&bench).remove(0);
        let overlay = place.join("0-d");
        until("the server has ended", || is_free(&overlay));
        let record = format!("record {last} \n");
        let bytes = std::fs::read(overlay.join("data")).expect("the overlay");
        assert!(
            bytes.chunks_exact(4096).any(|b| b.starts_with(record.as_bytes())),
            "no {record:?} in {overlay:?}"
        );
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
        let newest = number(bench.list().last().expect("a checkpoint"), "id");
        assert_goes_on(&bench, &newest.to_string());
        // Whoever starts the VM anew is told.
        let mut anew = bench.start(&["--name", "anew", "--interval", "none"], &boot);
        anew.wait_for_error(&place.display().to_string());
        anew.wait_for("KF READY");
        bench.ok(&["stop", "--name", "anew"]);
        anew.wait();
    }
}

#[test]
fn an_image_that_has_changed_is_refused() {
    let bench = Bench::new();
    let image = image(&bench);
    let drive = virtio(&image, "raw");
    let mut run =
        start(&bench, &["--interval", "none"], &shell(&distribution_qemu(), &words(&drive)));
    let id = take(&bench);
    bench.ok(&["stop"]);
    run.wait();
    assert_eq!(places(&bench), Vec::<PathBuf>::new(), "nothing was written, nothing stays");
    let mut bytes = std::fs::read(&image).expect("the image");
    bytes[5] ^= 1;
    std::fs::write(&image, bytes).expect("write the image");
    let words = ["changed since the checkpoint", "disk.raw", "fix:"];
    bench.refused(&["restore", "--store", &bench.store(), &id], 1, &words);
}
