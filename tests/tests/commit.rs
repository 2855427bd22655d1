//! A checkpoint's disks as images: each is, byte for byte, what the guest had then; and an image is
//! written in place only when somebody said so, whoever is killed meanwhile.

use keyframe_tests::disks::{
    assert_same, copy, does, image, places, qemu_img, restored_disk, shell, sock, socket_of, start,
    take, virtio, words,
};
use keyframe_tests::{
    Bench, Boot, JournalImage, Qemu, chosen_qemus, distribution_qemu, journal_counter, number,
    restored_pid,
};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// A disk at a checkpoint.
pub type Taken = (String, Vec<u8>);

/// Runs a guest that writes before each of three checkpoints, data and zeros; its disk is read
/// beside each.
pub fn three(bench: &Bench, boot: &Boot) -> Vec<Taken> {
    let mut run = start(bench, &["--interval", "none"], boot);
    let steps = [
        "for i in 1 77 500 4000 5; do dd if=/dev/urandom of=/dev/vda bs=3000 seek=$i count=2 conv=notrunc,fsync 2>/dev/null; done",
        "dd if=/dev/zero of=/dev/vda bs=64k seek=3 count=40 conv=notrunc,fsync 2>/dev/null",
        "dd if=/dev/urandom of=/dev/vda bs=4k count=300 seek=1500 conv=notrunc,fsync 2>/dev/null",
    ];
    let mut taken = Vec::new();
    for (step, command) in steps.into_iter().enumerate() {
        does(&mut run, command, &step.to_string());
        let id = take(bench);
        taken.push((id, copy(&sock(bench), "d", &bench.path().join("copy.raw"))));
    }
    assert!(taken.windows(2).all(|pair| pair[0].1 != pair[1].1), "the guest has written nothing");
    bench.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    taken
}

fn commit(bench: &Bench, options: &[&str]) -> Vec<String> {
    let store = bench.store();
    [&["commit", "--store", &store], options].concat().into_iter().map(str::to_owned).collect()
}

fn ok(bench: &Bench, options: &[&str]) -> String {
    bench.ok(&words(&commit(bench, options)))
}

fn refused(bench: &Bench, options: &[&str], expected: &[&str]) -> String {
    bench.refused(&words(&commit(bench, options)), 1, expected)
}

fn planned(bench: &Bench, options: &[&str]) -> Value {
    bench.json(&words(&commit(bench, &[options, &["--dry-run", "--json"]].concat())))
}

/// The disk in a qcow2 image, which QEMU finds nothing wrong with.
pub fn of_qcow2(path: &Path, raw: &Path) -> Vec<u8> {
    qemu_img(&["check", "-q", "-f", "qcow2", &path.display().to_string()]);
    let paths = [path, raw].map(|path| path.display().to_string());
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &paths[0], &paths[1]]);
    std::fs::read(raw).expect("the raw image")
}

/// A qcow2 image over the raw image of `bench`.
fn over(bench: &Bench) -> String {
    let base = image(bench).display().to_string();
    let overlay = bench.path().join("over.qcow2").display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base, &overlay]);
    overlay
}

fn each_checkpoint_is_an_image(bench: &Bench, boot: &Boot) {
    for (id, expected) in three(bench, boot) {
        let raw = bench.path().join(format!("{id}.raw"));
        let raw_name = raw.display().to_string();
        ok(bench, &[&id, "-o", &raw_name]);
        assert_same(
            &std::fs::read(&raw).expect("the image"),
            &expected,
            &format!("checkpoint {id}"),
        );
        refused(bench, &[&id, "-o", &raw_name], &["it exists"]);
        let qcow2 = bench.path().join(format!("{id}.qcow2"));
        ok(bench, &[&id, "--disk", "d", "-o", &qcow2.display().to_string(), "--format", "qcow2"]);
        assert_same(&of_qcow2(&qcow2, &bench.path().join("again.raw")), &expected, "qcow2");
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
        let bench = Bench::new();
        let drive = virtio(&image(&bench), "raw");
        each_checkpoint_is_an_image(&bench, &shell(&qemu, &words(&drive)));
        let bench = Bench::new();
        let drive = virtio(Path::new(&over(&bench)), "qcow2");
        each_checkpoint_is_an_image(&bench, &shell(&qemu, &words(&drive)));
    }
}

/// Records that the guest was told are durable before a checkpoint are in its disk, and none is
/// torn.
#[test]
fn a_guest_that_never_rests_has_its_records_in_each_image() {
    const MIB: u64 = 8;
    for qemu in chosen_qemus(1) {
        let bench = Bench::new();
        let path = bench.path().join("journal.raw");
        std::fs::File::create(&path).and_then(|file| file.set_len(MIB << 20)).expect("an image");
        let mut boot = Boot::new(&format!("journal kf.mib={MIB} kf.rate=400"))
            .with(&words(&virtio(&path, "raw")));
        boot.qemu.clone_from(&qemu.path);
        boot.mem_mib = 96;
        let mut run = start(&bench, &["--interval", "none"], &boot);
        let mut known = Vec::new();
        for _ in 0..3 {
            let before = journal_counter(&run.lines(), "synced=");
            let grown =
                run.wait_until(|p| (journal_counter(&p.lines(), "synced=") > before).then_some(()));
            assert!(grown.is_some(), "the guest writes nothing; {}", run.report());
            let synced = journal_counter(&run.lines(), "synced=");
            known.push((take(&bench), synced));
        }
        bench.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        for (id, synced) in known {
            let new = bench.path().join(format!("{id}.raw"));
            ok(&bench, &[&id, "-o", &new.display().to_string()]);
            let what = format!("QEMU {}, checkpoint {id}", qemu.label);
            let journal = JournalImage::read(&new, MIB);
            assert!(journal.newest > 0, "{what}: no record");
            journal.assert_whole_to(synced, &what);
            assert_same(
                &restored_disk(&bench, &id, &[]),
                &std::fs::read(&new).expect("the image"),
                &what,
            );
        }
    }
}

#[test]
fn in_place_takes_a_word_and_no_vm_that_runs() {
    let bench = Bench::new();
    let base = image(&bench);
    let before = std::fs::read(&base).expect("the image");
    let drive = virtio(&base, "raw");
    let boot = shell(&distribution_qemu(), &words(&drive));
    let taken = three(&bench, &boot);
    let untouched = |what: &str| {
        assert_same(&std::fs::read(&base).expect("the image"), &before, what);
        assert!(!bench.path().join("disk.raw.keyframe-commit").exists(), "{what}: a mark");
    };
    let (id, expected) = &taken[1];
    refused(&bench, &[id, "--in-place"], &["not agreed", "1-3", "--yes", "nothing was changed"]);
    untouched("not agreed");
    let mut other = bench.start(&["--interval", "none", "--name", "other"], &boot);
    other.wait_for("KF READY");
    refused(
        &bench,
        &[id, "--in-place", "--yes"],
        &["VM other runs over it", "nothing was changed"],
    );
    untouched("a VM runs");
    let plan = planned(&bench, &[id, "--in-place"]);
    assert_eq!(plan["standing"]["running"], serde_json::json!(["other"]), "{plan}");
    // One over an image that stands on it is as bad.
    bench.ok(&["stop", "--name", "other"]);
    assert!(other.wait().success(), "{}", other.report());
    let overlay = bench.path().join("over.qcow2").display().to_string();
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
    let above = shell(&distribution_qemu(), &words(&virtio(Path::new(&overlay), "qcow2")));
    let mut other = bench.start(&["--interval", "none", "--name", "above"], &above);
    other.wait_for("KF READY");
    refused(&bench, &[id, "--in-place", "--yes"], &["VM above runs over it"]);
    bench.ok(&["stop", "--name", "above"]);
    assert!(other.wait().success(), "{}", other.report());
    untouched("a VM runs above");

    let plan = planned(&bench, &[id, "--in-place"]);
    assert_eq!(plan["standing"]["running"], serde_json::json!([]), "{plan}");
    assert!(
        number(&plan, "zero_bytes") >= 40 << 16 && number(&plan, "data_bytes") >= 8 * 4096,
        "{plan}"
    );
    let told = ok(&bench, &[id, "--in-place", "--dry-run"]);
    assert!(told.contains("would write") && told.contains("can no longer be restored"), "{told}");
    untouched("a dry run");
    ok(&bench, &[id, "--in-place", "--yes"]);
    assert_same(&std::fs::read(&base).expect("the image"), expected, "in place");
    assert!(!bench.path().join("disk.raw.keyframe-commit").exists());
    // What stood on it is refused, and says why.
    let changed = ["changed since the checkpoint", "disk.raw"];
    bench.refused(&["restore", "--store", &bench.store(), "3"], 1, &changed);
    refused(&bench, &["3", "-o", "new.raw"], &changed);
    refused(&bench, &["3", "--in-place", "--yes"], &changed);
    assert!(!bench.path().join("new.raw").exists());
    assert_same(&std::fs::read(&base).expect("the image"), expected, "after it was refused");
}

#[test]
fn a_commit_that_is_killed_is_finished_by_the_same_command_and_by_no_other() {
    let bench = Bench::new();
    let base = image(&bench);
    let before = std::fs::read(&base).expect("the image");
    let drive = virtio(&base, "raw");
    let taken = three(&bench, &shell(&distribution_qemu(), &words(&drive)));
    let (id, expected) = &taken[2];
    let in_place = commit(&bench, &[id, "--in-place", "--yes"]);
    // The kernel ends it when it writes behind 8 MiB: what lies before is written then.
    let mut limited = Command::new("prlimit");
    let command = bench.command(&words(&in_place));
    limited
        .args(["--fsize=8388608", "--core=0"])
        .arg(command.get_program())
        .args(command.get_args());
    limited.current_dir(bench.path()).env("XDG_RUNTIME_DIR", bench.path());
    let killed = limited.output().expect("run prlimit");
    assert!(!killed.status.success(), "it was to be killed");
    let half = std::fs::read(&base).expect("the image");
    assert!(half != before && half != *expected, "it was to be killed half way");
    // Nobody uses half an image.
    let words_of_it = ["interrupted", &format!("checkpoint {id}")];
    refused(&bench, &["1", "--in-place", "--yes"], &words_of_it);
    bench.refused(&["restore", "--store", &bench.store(), id], 1, &words_of_it);
    refused(&bench, &[id, "-o", "new.raw"], &words_of_it);
    assert!(planned(&bench, &[id, "--in-place"])["interrupted"].as_bool().expect("a word"));
    assert!(std::fs::read(&base).expect("the image") == half, "somebody wrote to it");
    ok(&bench, &[id, "--in-place", "--yes"]);
    assert_same(&std::fs::read(&base).expect("the image"), expected, "the finished commit");
    assert!(!bench.path().join("disk.raw.keyframe-commit").exists());
}

#[test]
fn a_qcow2_image_is_written_and_the_one_beneath_is_not() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::new();
        let overlay = over(&bench);
        let beneath = std::fs::read(bench.path().join("disk.raw")).expect("the image");
        let drive = virtio(Path::new(&overlay), "qcow2");
        let taken = three(&bench, &shell(&qemu, &words(&drive)));
        ok(&bench, &["latest", "--in-place", "--yes"]);
        let now = of_qcow2(Path::new(&overlay), &bench.path().join("now.raw"));
        assert_same(&now, &taken[2].1, "the qcow2 image");
        assert_same(
            &std::fs::read(bench.path().join("disk.raw")).expect("the image"),
            &beneath,
            "beneath",
        );
    }
}

/// Its overlay lies over a checkpoint, which lies over the image.
#[test]
fn what_a_restored_vm_wrote_is_committed_with_its_checkpoint() {
    let bench = Bench::new();
    let base = image(&bench);
    let drive = virtio(&base, "raw");
    let taken = three(&bench, &shell(&distribution_qemu(), &words(&drive)));
    let known = places(&bench);
    let mut restored = bench.restore(&taken[1].0, &["--keep-disks"]);
    restored.wait_for_error("is running after");
    does(
        &mut restored,
        "dd if=/dev/urandom of=/dev/vda bs=64k seek=9 count=5 conv=notrunc,fsync 2>/dev/null",
        "a",
    );
    let socket = socket_of(restored_pid(&restored));
    let expected = copy(&socket, "d", &bench.path().join("copy.raw"));
    restored.signal(Signal::TERM);
    assert!(restored.wait().success(), "{}", restored.report());
    let place = places(&bench)
        .into_iter()
        .find(|place| !known.contains(place))
        .expect("a place that was kept");
    let overlay = place.join("0-d").display().to_string();
    let base_name = base.display().to_string();
    let from = ["commit", "--overlay", &overlay, "--base", &base_name];
    bench.ok(&[&from[..], &["-o", "new.raw"]].concat());
    assert_same(
        &std::fs::read(bench.path().join("new.raw")).expect("the image"),
        &expected,
        "a new image",
    );
    bench.ok(&[&from[..], &["--in-place", "--yes"]].concat());
    assert_same(&std::fs::read(&base).expect("the image"), &expected, "in place");
}

#[test]
fn one_disk_of_several_has_to_be_named() {
    let bench = Bench::new();
    let qemu: &Qemu = &distribution_qemu();
    let one = image(&bench);
    let two = bench.path().join("two.raw");
    std::fs::write(&two, vec![5u8; 1 << 20]).expect("an image");
    let mut drives = virtio(&one, "raw");
    drives.extend(["-drive".into(), format!("file={},format=raw,if=virtio,id=e", two.display())]);
    let mut run = start(&bench, &["--interval", "none"], &shell(qemu, &words(&drives)));
    does(
        &mut run,
        "echo hello | dd of=/dev/vdb bs=512 seek=3 conv=notrunc,fsync,sync 2>/dev/null",
        "a",
    );
    take(&bench);
    bench.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    refused(&bench, &["latest", "-o", "new"], &["several disks: d, e", "--disk"]);
    refused(&bench, &["latest", "--disk", "f", "-o", "new"], &["no disk f", "d, e"]);
    ok(&bench, &["latest", "--disk", "e", "-o", "new"]);
    let mut expected = vec![5u8; 1 << 20];
    expected[3 * 512..4 * 512].fill(0);
    expected[3 * 512..3 * 512 + 6].copy_from_slice(b"hello\n");
    assert_same(&std::fs::read(bench.path().join("new")).expect("the image"), &expected, "disk e");
    let store = bench.store();
    let shown = bench.ok(&["show", "--store", &store, "latest"]);
    assert!(shown.contains("disk       e, 1.0 MiB: 4.0 KiB written in 1 blocks"), "{shown}");
    let stats = bench.json(&["stats", "--json", "--store", &store]);
    let names: Vec<_> =
        stats["disks"].as_array().expect("disks").iter().map(|d| d["name"].clone()).collect();
    assert_eq!(names, ["d", "e"], "{stats}");
    assert_eq!(stats["disks"][1]["checkpoints"][0]["written_bytes"], 4096, "{stats}");
    let table = bench.ok(&["stats", "--store", &store]);
    assert!(table.lines().any(|l| l.starts_with("guest e ") && l.contains("4.0 KiB")), "{table}");
    let list = bench.ok(&["list", "--store", &store]);
    assert!(list.lines().next().expect("a header").contains("disk"), "{list}");
}
