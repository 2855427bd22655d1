//! Tests `--disk reflink`: QEMU writes to its own images on btrfs and XFS, and each checkpoint has
//! clones of them.

use keyframe_tests::disks::{
    as_strs, numbered_image_in, qemu_img, restored_disk, run_in_guest, shell_guest,
    take_checkpoint, virtio_disk,
};
use keyframe_tests::mounted::{Mounted, clones};
use keyframe_tests::{
    ExternalVm, Process, Qemu, TestEnv, chosen_qemus, distribution_qemu, number, wait_until,
};
use std::path::Path;

/// The guest's writes at `step`, and their place on the disk.
fn write(vm: &mut Process, step: usize) {
    let command = format!(
        "yes step-{step} | head -c 40960 | dd of=/dev/vda bs=4096 seek={} conv=notrunc,fsync 2>/dev/null",
        100 * step + 3
    );
    run_in_guest(vm, &command, &step.to_string());
}

fn expected(before: &[u8], steps: usize) -> Vec<u8> {
    let mut disk = before.to_vec();
    for step in 1..=steps {
        let text = format!("step-{step}\n");
        let written: Vec<u8> = text.bytes().cycle().take(40960).collect();
        let at = (100 * step + 3) * 4096;
        disk[at..at + written.len()].copy_from_slice(&written);
    }
    disk
}

fn each_checkpoint_has_a_clone_of_its_disk(kind: &str, qemus: Vec<Qemu>) {
    for qemu in qemus {
        let env = TestEnv::new();
        let Some(mounted) = Mounted::new(&env, kind) else { return };
        println!("-- {kind}, QEMU {}", qemu.label);
        let image = numbered_image_in(&mounted.dir);
        let before = std::fs::read(&image).expect("the image");
        let drive = format!("file={},format=raw,if=virtio,id=d", image.display());
        let options = ["--name", "guest", "--interval", "none", "--disk", "reflink"];
        let mut run = env.start(&options, &shell_guest(&qemu, &["-drive", &drive]));
        run.wait_for("KF READY");
        let mut ids = vec![take_checkpoint(&env)];
        for step in 1..=2 {
            write(&mut run, step);
            ids.push(take_checkpoint(&env));
        }
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        assert_eq!(clones(&mounted.dir), 3, "a clone for each checkpoint");
        let shown = env.json(&["show", "--json", "--store", &env.store(), &ids[1]]);
        assert_eq!(number(&shown["disks"][0], "written_blocks"), 0, "{shown}");
        assert!(
            std::fs::read(&image).expect("the image") == expected(&before, 2),
            "QEMU wrote to its image"
        );
        for (steps, id) in ids.iter().enumerate() {
            assert!(restored_disk(&env, id, &[]) == expected(&before, steps), "checkpoint {id}");
        }
        assert_eq!(clones(&mounted.dir), 3, "restores leave nothing");
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
        assert_clones_are_looked_for(&env, &mounted.dir, &ids);
    }
}

/// The commands that look at checkpoints tell of their clones in `dir`, also of one that is missing.
fn assert_clones_are_looked_for(env: &TestEnv, dir: &Path, ids: &[String]) {
    let store = env.store();
    let shown = env.ok(&["show", "--store", &store, &ids[1]]);
    let folder = dir.display().to_string();
    assert!(shown.contains("as it was, in a clone of its image:"), "{shown}");
    assert!(shown.contains(&folder) && !shown.contains("written in"), "{shown}");
    let diff = env.ok(&["diff", "--store", &store, &ids[0], &ids[1]]);
    assert!(diff.contains("d: not compared: each checkpoint has a clone"), "{diff}");
    let all = env.list();
    let clone = all.iter().find(|entry| number(entry, "id").to_string() == ids[1]).unwrap()
        ["disks"][0]["base"]
        .clone();
    let (clone, moved) = (Path::new(clone.as_str().unwrap()), dir.join("moved"));
    std::fs::rename(clone, &moved).unwrap();
    let checked = env.ok(&["check", "--quiet", "--store", &store]);
    let line = format!("CLONE of disk d of checkpoint {} cannot be used here", ids[1]);
    let says = |what: &str| checked.contains(what);
    assert!(says(&line) && says("fix: put the files back") && says(": whole"), "{checked}");
    assert_eq!(checked.matches("CLONE").count(), 1, "{checked}");
    let json = env.json(&["check", "--json", "--quiet", "--store", &store]);
    assert_eq!(json["unusable_clones"][0]["path"], clone.to_str().unwrap(), "{json}");
    std::fs::rename(&moved, clone).unwrap();
    let checked = env.ok(&["check", "--quiet", "--store", &store]);
    assert!(!checked.contains("CLONE"), "{checked}");
}

#[test]
fn each_checkpoint_has_a_clone_of_its_disk_on_btrfs() {
    each_checkpoint_has_a_clone_of_its_disk("btrfs", chosen_qemus(0));
}

#[test]
fn each_checkpoint_has_a_clone_of_its_disk_on_xfs() {
    each_checkpoint_has_a_clone_of_its_disk("xfs", chosen_qemus(1));
}

#[test]
fn a_vm_of_somebody_elses_on_a_qcow2_image_with_another_beneath() {
    let env = TestEnv::new();
    let Some(mounted) = Mounted::new(&env, "btrfs") else { return };
    let image = numbered_image_in(&mounted.dir);
    let before = std::fs::read(&image).expect("the image");
    let over = mounted.dir.join("over.qcow2").display().to_string();
    // The backing file has a relative name, which is resolved beside the clone.
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "disk.raw", &over]);
    let drive = virtio_disk(Path::new(&over), "qcow2");
    let mut vm = ExternalVm::start(&env, &shell_guest(&distribution_qemu(), &as_strs(&drive)));
    vm.console.wait_for("KF READY");
    let monitor = vm.socket("a");
    // Keyframe finds out by itself that reflink works.
    let options = ["--name", "guest", "--interval", "none"];
    let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &options);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut attached = Process::start(env.command(&args));
    attached.wait_for_error("VM guest");
    write(&mut vm.console, 1);
    let first = take_checkpoint(&env);
    write(&mut vm.console, 2);
    let second = take_checkpoint(&env);
    env.ok(&["stop", "--name", "guest"]);
    assert!(attached.wait().success(), "{}", attached.report());
    assert!(vm.is_running());
    write(&mut vm.console, 3);
    vm.console.signal(rustix::process::Signal::KILL);
    vm.console.wait();
    assert!(restored_disk(&env, &first, &[]) == expected(&before, 1), "the first checkpoint");
    assert!(restored_disk(&env, &second, &[]) == expected(&before, 2), "the second checkpoint");
    // A missing clone is reported.
    let clone = env.list().last().expect("a checkpoint")["disks"][0]["base"]
        .as_str()
        .expect("a path")
        .to_owned();
    std::fs::remove_file(&clone).expect("remove the clone");
    env.refused(&["restore", "--store", &env.store(), &second], 1, &[&clone, "put it back"]);
}

#[test]
fn a_checkpoint_that_fails_leaves_no_clone() {
    let env = TestEnv::new();
    let Some(mounted) = Mounted::new(&env, "btrfs") else { return };
    let drive =
        format!("file={},format=raw,if=virtio,id=d", numbered_image_in(&mounted.dir).display());
    let options =
        ["--name", "guest", "--interval", "none", "--disk", "reflink", "--fault", "kill:sealing:2"];
    let mut run = env.start(&options, &shell_guest(&distribution_qemu(), &["-drive", &drive]));
    run.wait_for("KF READY");
    let qemu = keyframe_tests::Orphan::of(&env, &mut run, "guest");
    let kept = take_checkpoint(&env);
    assert!(!env.run(&["take", "--name", "guest"]).status.success(), "the fault did not strike");
    run.wait();
    qemu.kill();
    assert!(clones(&mounted.dir) >= 1);
    // The next run removes the clones that no checkpoint names, and no others.
    let options = ["--name", "guest", "--interval", "none", "--disk", "reflink"];
    let mut anew = env.start(&options, &shell_guest(&distribution_qemu(), &["-drive", &drive]));
    anew.wait_for("KF READY");
    wait_until("what the killed engine left is gone", || clones(&mounted.dir) == 1);
    env.ok(&["stop", "--name", "guest"]);
    assert!(anew.wait().success(), "{}", anew.report());
    restored_disk(&env, &kept, &[]);
}

#[test]
fn a_file_system_that_does_not_clone_is_refused_by_name() {
    let env = TestEnv::new();
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let drive =
        format!("file={},format=raw,if=virtio,id=d", numbered_image_in(dir.path()).display());
    let line = shell_guest(&distribution_qemu(), &["-drive", &drive]).command();
    let store = env.store();
    let mut args = vec!["run", "--store", &store, "--disk", "reflink", "--"];
    args.extend(line.iter().map(String::as_str));
    env.refused(&args, 1, &["does not clone files", "disk.raw", "fix:", "btrfs"]);
}
