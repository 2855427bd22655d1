//! Tests disks in checkpoints on real QEMUs. Each disk comes back as it was, after any failure, and
//! the base image is never written.

use keyframe_tests::disks::{
    RECORDS, as_strs, assert_goes_on, assert_same, copy_disk, disk_socket, disk_write_dirs,
    numbered_image, qemu_img, records, restored_disk, restored_disk_named, run_in_guest,
    shell_guest, start_guest, take_checkpoint, virtio_disk, wait_for_records,
};
use keyframe_tests::{
    Boot, Orphan, Qemu, TestEnv, chosen_qemus, distribution_qemu, number, variants, wait_until,
};
use std::path::{Path, PathBuf};

/// The guest writes scattered and consecutive blocks of data and zeros; the test copies the disk at
/// each checkpoint.
fn each_checkpoint_has_its_disk(qemu: &Qemu, env: &TestEnv, boot: &Boot) {
    println!("-- QEMU {}: {}", qemu.label, boot.extra.join(" "));
    let mut run = start_guest(env, &["--interval", "none"], boot);
    let mut expected = Vec::new();
    let steps = [
        "true",
        "for i in 1 77 500 4000 5; do dd if=/dev/urandom of=/dev/vda bs=3000 seek=$i count=2 conv=notrunc,fsync 2>/dev/null; done",
        "dd if=/dev/zero of=/dev/vda bs=64k seek=3 count=40 conv=notrunc,fsync 2>/dev/null",
        "dd if=/dev/vda of=/dev/vda bs=4k count=300 seek=1000 conv=notrunc,fsync 2>/dev/null",
    ];
    for (step, command) in steps.into_iter().enumerate() {
        run_in_guest(&mut run, command, &step.to_string());
        let id = take_checkpoint(env);
        let copied = copy_disk(&disk_socket(env), "d", &env.path().join("copy.raw"));
        expected.push((id, copied));
    }
    let shown = env.json(&["show", "--json", "--store", &env.store(), &expected[1].0]);
    let written = number(&shown["disks"][0], "written_blocks");
    assert!((8..=40).contains(&written), "{shown}");
    assert!(
        expected.windows(2).all(|pair| pair[0].1 != pair[1].1),
        "the guest has written nothing"
    );
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    assert!(run.errors().contains("has written to its disks"), "{}", run.report());
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    let before = disk_write_dirs(env);
    for (id, copied) in &expected {
        for options in [&[][..], &["--lazy"]] {
            assert_same(
                &restored_disk(env, id, options),
                copied,
                &format!("checkpoint {id} {options:?}"),
            );
        }
    }
    // The writes of a restored VM are its own.
    let (id, copied) = &expected[2];
    let mut restored = env.restore(id, &[]);
    restored.wait_for_error("is running after");
    run_in_guest(
        &mut restored,
        "dd if=/dev/urandom of=/dev/vda bs=64k count=20 conv=notrunc,fsync",
        "again",
    );
    restored.signal(rustix::process::Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    assert_same(&restored_disk(env, id, &[]), copied, "a checkpoint that a VM was restored from");
    assert_eq!(disk_write_dirs(env), before, "restores leave nothing");
}

/// A run begins with the image as it is. The command that it names writes the earlier run's writes
/// into the image.
fn the_next_run_says_how_to_keep_the_writes(
    env: &TestEnv,
    boot: &Boot,
    image: &Path,
    before: &[u8],
) {
    let mut run = start_guest(env, &["--interval", "none"], boot);
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    let errors = run.errors();
    let command =
        errors.split("and use: keyframe ").nth(1).and_then(|rest| rest.split(". With").next());
    let command = command.unwrap_or_else(|| panic!("no command: {errors}"));
    let mut words: Vec<&str> = command.split_whitespace().collect();
    let of_vm = Path::new(words[2]).parent().unwrap().display().to_string();
    let whole = ["commit", "--overlay", &of_vm, "--base", words[4], "--in-place", "--yes"];
    env.refused(&whole, 1, &["holds the overlays", words[2]]);
    words.push("--yes");
    env.ok(&words);
    let mut run = start_guest(env, &["--interval", "none"], boot);
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    assert!(!run.errors().contains("has written to"), "{}", run.report());
    assert!(
        std::fs::read(image).expect("the image") != before,
        "nothing was written into the image"
    );
}

#[test]
fn a_raw_image() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let image = numbered_image(&env);
        let before = std::fs::read(&image).expect("the image");
        let drive = virtio_disk(&image, "raw");
        let boot = shell_guest(&qemu, &as_strs(&drive));
        each_checkpoint_has_its_disk(&qemu, &env, &boot);
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
        the_next_run_says_how_to_keep_the_writes(&env, &boot, &image, &before);
    }
}

#[test]
fn a_qcow2_image_on_another_as_a_node() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let image = numbered_image(&env);
        let before = std::fs::read(&image).expect("the image");
        let overlay = env.path().join("over.qcow2").display().to_string();
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
        let boot = shell_guest(
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
        each_checkpoint_has_its_disk(&qemu, &env, &boot);
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
        assert_eq!(std::fs::read(&overlay).expect("the image"), overlay_before, "the qcow2 image");
    }
}

/// QEMU accepts Keyframe's options for each way of giving a disk, and a restore has the disk.
#[test]
fn each_way_to_give_a_disk() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let image = numbered_image(&env);
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
            let mut run = start_guest(&env, &["--interval", "none"], &boot);
            let id = take_checkpoint(&env);
            env.ok(&["stop"]);
            assert!(run.wait().success(), "{}", run.report());
            assert_same(&restored_disk_named(&env, &id, &[], export), &expected, &way.join(" "));
        }
        assert_same(&std::fs::read(&image).expect("the image"), &expected, "the image");
        assert_eq!(disk_write_dirs(&env), Vec::<PathBuf>::new());
    }
}

#[test]
fn ram_and_disk_are_of_one_instant() {
    for qemu in chosen_qemus(1) {
        println!("-- QEMU {}", qemu.label);
        let env = TestEnv::new();
        let image = numbered_image(&env);
        let drive = virtio_disk(&image, "raw");
        let mut run =
            start_guest(&env, &["--interval", "300ms"], &shell_guest(&qemu, &as_strs(&drive)));
        run.type_line(RECORDS);
        wait_for_records(&mut run, 20);
        let mark = env.list().len();
        wait_until("checkpoints are sealed", || env.list().len() >= mark + 6);
        env.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        assert!(run.errors().contains(", 0 failed"), "{}", run.report());
        let list = env.list();
        for entry in &list[mark..mark + 6] {
            assert_goes_on(&env, &number(entry, "id").to_string());
        }
    }
}

#[test]
fn a_failed_checkpoint_gives_its_blocks_to_the_next() {
    let env = TestEnv::new();
    let image = numbered_image(&env);
    let drive = virtio_disk(&image, "raw");
    // The first, complete checkpoint exceeds this number of pages; each further one has some
    // hundred blocks and pages.
    let options = ["--interval", "none", "--fault", "disk-full:28000"];
    let mut run = start_guest(&env, &options, &shell_guest(&distribution_qemu(), &as_strs(&drive)));
    let mut failed = false;
    for step in 0..60 {
        let seek = step % 10 * 600;
        let count = if failed { 3 } else { 600 };
        let write = format!(
            "dd if=/dev/urandom of=/dev/vda bs=4k seek={seek} count={count} conv=notrunc,fsync 2>/dev/null"
        );
        run_in_guest(&mut run, &write, &step.to_string());
        if failed {
            break;
        }
        failed = !env.run(&["take", "--name", "guest"]).status.success();
    }
    assert!(failed && run.errors().contains("checkpoint failed"), "{}", run.report());
    let id = take_checkpoint(&env);
    let copied = copy_disk(&disk_socket(&env), "d", &env.path().join("copy.raw"));
    let shown = env.json(&["show", "--json", "--store", &env.store(), &id]);
    assert!(number(&shown["disks"][0], "written_blocks") >= 603, "{shown}");
    env.ok(&["stop"]);
    assert_eq!(run.wait().code(), Some(3), "{}", run.report());
    assert_same(&restored_disk(&env, &id, &[]), &copied, "the checkpoint behind the failed one");
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
}

/// Asserts that no process has the overlay open.
fn is_free(overlay: &Path) -> bool {
    let dir = std::fs::File::open(overlay).expect("the overlay");
    rustix::fs::flock(&dir, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

#[test]
fn a_killed_engine_leaves_the_guest_its_disk() {
    for phase in ["paused", "device-state", "sealing"] {
        let env = TestEnv::new();
        let image = numbered_image(&env);
        let before = std::fs::read(&image).expect("the image");
        let drive = virtio_disk(&image, "raw");
        let fault = format!("kill:{phase}:3");
        let boot = shell_guest(&distribution_qemu(), &as_strs(&drive));
        let mut run = start_guest(&env, &["--interval", "none", "--fault", &fault], &boot);
        let qemu = Orphan::of(&env, &mut run, "guest");
        run.type_line(RECORDS);
        for _ in 0..2 {
            wait_for_records(&mut run, 3);
            take_checkpoint(&env);
        }
        let killed = env.run(&["take", "--name", "guest"]);
        assert!(!killed.status.success(), "the fault did not strike in {phase}");
        run.wait();
        let before_end = records(&run).len();
        wait_until("the guest writes on without its engine", || {
            records(&run).len() >= before_end + 5
        });
        let last = *records(&run).last().expect("a record");
        qemu.kill();
        // The server ends with its last client, and the overlay has all flushed data.
        let place = disk_write_dirs(&env).remove(0);
        let overlay = place.join("0-d");
        wait_until("the server has ended", || is_free(&overlay));
        let record = format!("record {last} \n");
        let bytes = std::fs::read(overlay.join("data")).expect("the overlay");
        assert!(
            bytes.chunks_exact(4096).any(|b| b.starts_with(record.as_bytes())),
            "no {record:?} in {overlay:?}"
        );
        assert_same(&std::fs::read(&image).expect("the image"), &before, "the image");
        let newest = number(env.list().last().expect("a checkpoint"), "id");
        assert_goes_on(&env, &newest.to_string());
        // The next start of the VM is refused with the reason.
        let mut anew = env.start(&["--name", "anew", "--interval", "none"], &boot);
        anew.wait_for_error(&place.display().to_string());
        anew.wait_for("KF READY");
        env.ok(&["stop", "--name", "anew"]);
        anew.wait();
    }
}

#[test]
fn an_image_that_has_changed_is_refused() {
    let env = TestEnv::new();
    let image = numbered_image(&env);
    let drive = virtio_disk(&image, "raw");
    let mut run = start_guest(
        &env,
        &["--interval", "none"],
        &shell_guest(&distribution_qemu(), &as_strs(&drive)),
    );
    let id = take_checkpoint(&env);
    assert!(!run.errors().contains("an image must be put back"), "{}", run.report());
    let mut bytes = std::fs::read(&image).expect("the image");
    bytes[5] ^= 1;
    std::fs::write(&image, bytes).expect("write the image");
    // The run tells of it at its next checkpoint.
    take_checkpoint(&env);
    run.wait_for_error("an image must be put back");
    env.ok(&["stop"]);
    run.wait();
    assert_eq!(disk_write_dirs(&env), Vec::<PathBuf>::new(), "nothing was written, nothing stays");
    let words = ["changed since the checkpoint", "disk.raw", "fix:"];
    env.refused(&["restore", "--store", &env.store(), &id], 1, &words);
}
