//! Tests a checkpoint's disks as images. Each image equals the guest's disk byte for byte. An image
//! is written in place only on request, and a kill at any time leaves it repairable.

use keyframe_tests::disks::{
    as_strs, assert_same, copy_disk, disk_socket, disk_socket_of, disk_write_dirs, numbered_image,
    qemu_img, restored_disk, run_in_guest, shell_guest, start_guest, take_checkpoint, virtio_disk,
};
use keyframe_tests::{
    Boot, JournalImage, Qemu, TestEnv, chosen_qemus, distribution_qemu, journal_counter, number,
    restored_pid,
};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// A disk at a checkpoint.
pub type Taken = (String, Vec<u8>);

/// Runs a guest that writes data and zeros before each of three checkpoints, and reads its disk at
/// each.
pub fn three(env: &TestEnv, boot: &Boot) -> Vec<Taken> {
    let mut run = start_guest(env, &["--interval", "none"], boot);
    let steps = [
        "for i in 1 77 500 4000 5; do dd if=/dev/urandom of=/dev/vda bs=3000 seek=$i count=2 conv=notrunc,fsync 2>/dev/null; done",
        "dd if=/dev/zero of=/dev/vda bs=64k seek=3 count=40 conv=notrunc,fsync 2>/dev/null",
        "dd if=/dev/urandom of=/dev/vda bs=4k count=300 seek=1500 conv=notrunc,fsync 2>/dev/null",
    ];
    let mut taken = Vec::new();
    for (step, command) in steps.into_iter().enumerate() {
        run_in_guest(&mut run, command, &step.to_string());
        let id = take_checkpoint(env);
        taken.push((id, copy_disk(&disk_socket(env), "d", &env.path().join("copy.raw"))));
    }
    assert!(taken.windows(2).all(|pair| pair[0].1 != pair[1].1), "the guest has written nothing");
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    taken
}

fn commit(env: &TestEnv, options: &[&str]) -> Vec<String> {
    let store = env.store();
    [&["commit", "--store", &store], options].concat().into_iter().map(str::to_owned).collect()
}

fn ok(env: &TestEnv, options: &[&str]) -> String {
    env.ok(&as_strs(&commit(env, options)))
}

fn refused(env: &TestEnv, options: &[&str], expected: &[&str]) -> String {
    env.refused(&as_strs(&commit(env, options)), 1, expected)
}

fn planned(env: &TestEnv, options: &[&str]) -> Value {
    env.json(&as_strs(&commit(env, &[options, &["--dry-run", "--json"]].concat())))
}

/// The content of a qcow2 image, which `qemu-img check` must accept.
pub fn of_qcow2(path: &Path, raw: &Path) -> Vec<u8> {
    qemu_img(&["check", "-q", "-f", "qcow2", &path.display().to_string()]);
    let paths = [path, raw].map(|path| path.display().to_string());
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &paths[0], &paths[1]]);
    std::fs::read(raw).expect("the raw image")
}

/// Makes a qcow2 image on top of the raw image of `env`.
fn over(env: &TestEnv) -> String {
    let base = numbered_image(env).display().to_string();
    let overlay = env.path().join("over.qcow2").display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base, &overlay]);
    overlay
}

fn each_checkpoint_is_an_image(env: &TestEnv, boot: &Boot) {
    for (id, expected) in three(env, boot) {
        let raw = env.path().join(format!("{id}.raw"));
        let raw_name = raw.display().to_string();
        ok(env, &[&id, "-o", &raw_name]);
        assert_same(
            &std::fs::read(&raw).expect("the image"),
            &expected,
            &format!("checkpoint {id}"),
        );
        refused(env, &[&id, "-o", &raw_name], &["it exists"]);
        let qcow2 = env.path().join(format!("{id}.qcow2"));
        ok(env, &[&id, "--disk", "d", "-o", &qcow2.display().to_string(), "--format", "qcow2"]);
        assert_same(&of_qcow2(&qcow2, &env.path().join("again.raw")), &expected, "qcow2");
        if id != "1" {
            // 40 times 64 KiB are zero.
            let stored = raw.metadata().expect("the image").blocks() * 512;
            assert!(
                stored + (40 << 16) <= expected.len() as u64,
                "{stored} bytes for a disk with holes"
            );
        }
    }
}

#[test]
fn a_new_image_is_what_the_guest_had() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let drive = virtio_disk(&numbered_image(&env), "raw");
        each_checkpoint_is_an_image(&env, &shell_guest(&qemu, &as_strs(&drive)));
        let env = TestEnv::new();
        let drive = virtio_disk(Path::new(&over(&env)), "qcow2");
        each_checkpoint_is_an_image(&env, &shell_guest(&qemu, &as_strs(&drive)));
    }
}

/// A checkpoint's disk has all records that the guest had synced, and no torn one.
#[test]
fn a_guest_that_never_rests_has_its_records_in_each_image() {
    const MIB: u64 = 8;
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let path = env.path().join("journal.raw");
        std::fs::File::create(&path).and_then(|file| file.set_len(MIB << 20)).expect("an image");
        let mut boot = Boot::new(&format!("journal kf.mib={MIB} kf.rate=400"))
            .with(&as_strs(&virtio_disk(&path, "raw")));
        boot.qemu.clone_from(&qemu.path);
        boot.mem_mib = 96;
        let mut run = start_guest(&env, &["--interval", "none"], &boot);
        let mut known = Vec::new();
        for _ in 0..3 {
            let before = journal_counter(&run.lines(), "synced=");
            let grown =
                run.wait_until(|p| (journal_counter(&p.lines(), "synced=") > before).then_some(()));
            assert!(grown.is_some(), "the guest writes nothing; {}", run.report());
            let synced = journal_counter(&run.lines(), "synced=");
            known.push((take_checkpoint(&env), synced));
        }
        env.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        for (id, synced) in known {
            let new = env.path().join(format!("{id}.raw"));
            ok(&env, &[&id, "-o", &new.display().to_string()]);
            let what = format!("QEMU {}, checkpoint {id}", qemu.label);
            let journal = JournalImage::read(&new, MIB);
            assert!(journal.newest > 0, "{what}: no record");
            journal.assert_whole_to(synced, &what);
            assert_same(
                &restored_disk(&env, &id, &[]),
                &std::fs::read(&new).expect("the image"),
                &what,
            );
        }
    }
}

#[test]
fn in_place_needs_consent_and_no_running_vm() {
    let env = TestEnv::new();
    let base = numbered_image(&env);
    let before = std::fs::read(&base).expect("the image");
    let drive = virtio_disk(&base, "raw");
    let boot = shell_guest(&distribution_qemu(), &as_strs(&drive));
    let taken = three(&env, &boot);
    let untouched = |what: &str| {
        assert_same(&std::fs::read(&base).expect("the image"), &before, what);
        assert!(!env.path().join("disk.raw.keyframe-commit").exists(), "{what}: a mark");
    };
    let (id, expected) = &taken[1];
    refused(&env, &[id, "--in-place"], &["not agreed", "1-3", "--yes", "nothing was changed"]);
    untouched("not agreed");
    running_vms_are_in_the_way(&env, &base, &boot, id);
    untouched("VMs ran");

    let plan = planned(&env, &[id, "--in-place"]);
    assert_eq!(plan["standing"]["running"], serde_json::json!([]), "{plan}");
    assert!(
        number(&plan, "zero_bytes") >= 40 << 16 && number(&plan, "data_bytes") >= 8 * 4096,
        "{plan}"
    );
    let text = ok(&env, &[id, "--in-place", "--dry-run"]);
    assert!(text.contains("would write") && text.contains("can no longer be restored"), "{text}");
    untouched("a dry run");
    ok(&env, &[id, "--in-place", "--yes"]);
    assert_same(&std::fs::read(&base).expect("the image"), expected, "in place");
    assert!(!env.path().join("disk.raw.keyframe-commit").exists());
    // The checkpoints on top of it are refused, with the reason.
    let changed = ["changed since the checkpoint", "disk.raw"];
    env.refused(&["restore", "--store", &env.store(), "3"], 1, &changed);
    refused(&env, &["3", "-o", "new.raw"], &changed);
    refused(&env, &["3", "--in-place", "--yes"], &changed);
    assert!(!env.path().join("new.raw").exists());
    assert_same(&std::fs::read(&base).expect("the image"), expected, "after it was refused");
}

/// A commit in place is refused while a VM runs on the image, or on an image above it.
fn running_vms_are_in_the_way(env: &TestEnv, base: &Path, boot: &Boot, id: &str) {
    let mut other = env.start(&["--interval", "none", "--name", "other"], boot);
    other.wait_for("KF READY");
    refused(env, &[id, "--in-place", "--yes"], &["VM other runs over it", "nothing was changed"]);
    let plan = planned(env, &[id, "--in-place"]);
    assert_eq!(plan["standing"]["running"], serde_json::json!(["other"]), "{plan}");
    // An image that is the base of the VM's image is refused too.
    env.ok(&["stop", "--name", "other"]);
    assert!(other.wait().success(), "{}", other.report());
    let overlay = env.path().join("over.qcow2").display().to_string();
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        &base.display().to_string(),
        &overlay,
    ]);
    let above =
        shell_guest(&distribution_qemu(), &as_strs(&virtio_disk(Path::new(&overlay), "qcow2")));
    let mut other = env.start(&["--interval", "none", "--name", "above"], &above);
    other.wait_for("KF READY");
    refused(env, &[id, "--in-place", "--yes"], &["VM above runs over it"]);
    env.ok(&["stop", "--name", "above"]);
    assert!(other.wait().success(), "{}", other.report());
}

#[test]
fn a_commit_that_is_killed_is_finished_by_the_same_command_and_by_no_other() {
    let env = TestEnv::new();
    let base = numbered_image(&env);
    let before = std::fs::read(&base).expect("the image");
    let drive = virtio_disk(&base, "raw");
    let taken = three(&env, &shell_guest(&distribution_qemu(), &as_strs(&drive)));
    let (id, expected) = &taken[2];
    let in_place = commit(&env, &[id, "--in-place", "--yes"]);
    // The kernel ends the process at a write past 8 MiB; the writes before it are done.
    let mut limited = Command::new("prlimit");
    let command = env.command(&as_strs(&in_place));
    limited
        .args(["--fsize=8388608", "--core=0"])
        .arg(command.get_program())
        .args(command.get_args());
    limited.current_dir(env.path()).env("XDG_RUNTIME_DIR", env.path());
    let killed = limited.output().expect("run prlimit");
    assert!(!killed.status.success(), "it was to be killed");
    let half = std::fs::read(&base).expect("the image");
    assert!(half != before && half != *expected, "it was to be killed half way");
    // A half-written image is refused.
    let words_of_it = ["interrupted", &format!("checkpoint {id}")];
    refused(&env, &["1", "--in-place", "--yes"], &words_of_it);
    env.refused(&["restore", "--store", &env.store(), id], 1, &words_of_it);
    refused(&env, &[id, "-o", "new.raw"], &words_of_it);
    assert!(planned(&env, &[id, "--in-place"])["interrupted"].as_bool().expect("a word"));
    assert!(std::fs::read(&base).expect("the image") == half, "somebody wrote to it");
    ok(&env, &[id, "--in-place", "--yes"]);
    assert_same(&std::fs::read(&base).expect("the image"), expected, "the finished commit");
    assert!(!env.path().join("disk.raw.keyframe-commit").exists());
}

#[test]
fn a_qcow2_image_is_written_and_the_one_beneath_is_not() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let overlay = over(&env);
        let beneath = std::fs::read(env.path().join("disk.raw")).expect("the image");
        let drive = virtio_disk(Path::new(&overlay), "qcow2");
        let taken = three(&env, &shell_guest(&qemu, &as_strs(&drive)));
        ok(&env, &["latest", "--in-place", "--yes"]);
        let now = of_qcow2(Path::new(&overlay), &env.path().join("now.raw"));
        assert_same(&now, &taken[2].1, "the qcow2 image");
        assert_same(
            &std::fs::read(env.path().join("disk.raw")).expect("the image"),
            &beneath,
            "beneath",
        );
    }
}

/// The VM's overlay lies on a checkpoint, which lies on the image.
#[test]
fn what_a_restored_vm_wrote_is_committed_with_its_checkpoint() {
    let env = TestEnv::new();
    let base = numbered_image(&env);
    let drive = virtio_disk(&base, "raw");
    let taken = three(&env, &shell_guest(&distribution_qemu(), &as_strs(&drive)));
    let known = disk_write_dirs(&env);
    let mut restored = env.restore(&taken[1].0, &["--keep-disks"]);
    restored.wait_for_error("is running after");
    run_in_guest(
        &mut restored,
        "dd if=/dev/urandom of=/dev/vda bs=64k seek=9 count=5 conv=notrunc,fsync 2>/dev/null",
        "a",
    );
    let socket = disk_socket_of(restored_pid(&restored));
    let expected = copy_disk(&socket, "d", &env.path().join("copy.raw"));
    restored.signal(Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    let place = disk_write_dirs(&env)
        .into_iter()
        .find(|place| !known.contains(place))
        .expect("a place that was kept");
    let overlay = place.join("0-d").display().to_string();
    let base_name = base.display().to_string();
    let from = ["commit", "--overlay", &overlay, "--base", &base_name];
    env.ok(&[&from[..], &["-o", "new.raw"]].concat());
    assert_same(
        &std::fs::read(env.path().join("new.raw")).expect("the image"),
        &expected,
        "a new image",
    );
    env.ok(&[&from[..], &["--in-place", "--yes"]].concat());
    assert_same(&std::fs::read(&base).expect("the image"), &expected, "in place");
}

#[test]
fn one_disk_of_several_has_to_be_named() {
    let env = TestEnv::new();
    let qemu: &Qemu = &distribution_qemu();
    let one = numbered_image(&env);
    let two = env.path().join("two.raw");
    std::fs::write(&two, vec![5u8; 1 << 20]).expect("an image");
    let mut drives = virtio_disk(&one, "raw");
    drives.extend(["-drive".into(), format!("file={},format=raw,if=virtio,id=e", two.display())]);
    let mut run = start_guest(&env, &["--interval", "none"], &shell_guest(qemu, &as_strs(&drives)));
    run_in_guest(
        &mut run,
        "echo hello | dd of=/dev/vdb bs=512 seek=3 conv=notrunc,fsync,sync 2>/dev/null",
        "a",
    );
    take_checkpoint(&env);
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    refused(&env, &["latest", "-o", "new"], &["several disks: d, e", "--disk"]);
    refused(&env, &["latest", "--disk", "f", "-o", "new"], &["no disk f", "d, e"]);
    ok(&env, &["latest", "--disk", "e", "-o", "new"]);
    let mut expected = vec![5u8; 1 << 20];
    expected[3 * 512..4 * 512].fill(0);
    expected[3 * 512..3 * 512 + 6].copy_from_slice(b"hello\n");
    assert_same(&std::fs::read(env.path().join("new")).expect("the image"), &expected, "disk e");
    let store = env.store();
    let shown = env.ok(&["show", "--store", &store, "latest"]);
    assert!(shown.contains("disk       e, 1.0 MiB: 4.0 KiB written in 1 blocks"), "{shown}");
    let stats = env.json(&["stats", "--json", "--store", &store]);
    let names: Vec<_> =
        stats["disks"].as_array().expect("disks").iter().map(|d| d["name"].clone()).collect();
    assert_eq!(names, ["d", "e"], "{stats}");
    assert_eq!(stats["disks"][1]["checkpoints"][0]["written_bytes"], 4096, "{stats}");
    let table = env.ok(&["stats", "--store", &store]);
    assert!(table.lines().any(|l| l.starts_with("guest e ") && l.contains("4.0 KiB")), "{table}");
    let list = env.ok(&["list", "--store", &store]);
    assert!(list.lines().next().expect("a header").contains("disk"), "{list}");
}
