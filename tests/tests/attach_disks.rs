//! Disks under `keyframe attach`, by QEMU's dirty bitmaps: each checkpoint has the disk of its
//! instant, nothing is lost where one fails, and QEMU is left without a trace.

use keyframe_tests::disks::{
    self, IMAGE_BYTES, RECORDS, assert_goes_on, assert_same, copy, does, qemu_img, restored_disk,
    shell, socket_of, take, virtio, wait_for_records, words,
};
use keyframe_tests::{
    Bench, Boot, Foreign, Process, Qemu, chosen_qemus, distribution_qemu, number, restored_pid,
    until,
};
use serde_json::json;
use std::path::{Path, PathBuf};

/// How the names of what is ours in QEMU begin, as JSON; the paths of tests have it in their
/// middle.
const OURS: &str = "\"keyframe-";

/// An image with a hole at its end, which is zero.
fn image(bench: &Bench) -> PathBuf {
    let path = disks::image(bench);
    let file = std::fs::File::options().write(true).open(&path).expect("the image");
    for bytes in [IMAGE_BYTES - (4 << 20), IMAGE_BYTES] {
        file.set_len(bytes).expect("change the image's length");
    }
    path
}

fn foreign(bench: &Bench, boot: &Boot) -> Foreign {
    let mut vm = Foreign::start(bench, boot);
    vm.console.wait_for("KF READY");
    vm
}

/// `keyframe attach` to `vm`, as VM `guest`.
fn attach(bench: &Bench, vm: &Foreign, options: &[&str]) -> Process {
    let monitor = vm.socket("a");
    let options = [&["--name", "guest", "--disk", "bitmap"], options].concat();
    let args = bench.attach_args(&["--qmp", &monitor], vm.console.pid(), &options);
    let mut attached = Process::start(bench.command(&words(&args)));
    attached.wait_for_error("VM guest");
    attached
}

/// What a reader of the guest's disk sees, from outside, while the guest does not write.
fn disk_now(vm: &Foreign, image: &Path, format: &str, bench: &Bench) -> Vec<u8> {
    // What the guest has synced is in the image once QEMU has flushed.
    vm.other().hmp("qemu-io d flush").expect("flush");
    let to = bench.path().join("copy.raw");
    qemu_img(&[
        "convert",
        "-U",
        "-f",
        format,
        "-O",
        "raw",
        &image.display().to_string(),
        &to.display().to_string(),
    ]);
    std::fs::read(to).expect("read the copy")
}

/// Nothing of ours is in QEMU, nor beside the store's own files.
fn assert_no_trace(vm: &Foreign, bench: &Bench) {
    let mut qmp = vm.other();
    for query in ["query-block-exports", "query-jobs", "query-named-block-nodes"] {
        let found = qmp.execute(query, None).expect(query).to_string();
        assert!(!found.contains(OURS), "{query}: {found}");
    }
    assert!(qmp.execute("nbd-server-stop", None).is_err(), "QEMU's NBD server still runs");
    let scratch =
        std::fs::read_dir(PathBuf::from(bench.store()).join("disks")).expect("STORE/disks");
    assert_eq!(scratch.count(), 0, "files in STORE/disks");
}

/// The guest writes data and zeros; each checkpoint has the disk as it was at it.
fn each_checkpoint_has_its_disk(
    qemu: &Qemu,
    bench: &Bench,
    words: &[&str],
    image: &Path,
    format: &str,
) {
    println!("-- QEMU {}: {words:?}", qemu.label);
    let mut vm = foreign(bench, &shell(qemu, words));
    let before = vm.traces();
    let mut attached = attach(bench, &vm, &["--interval", "none"]);
    let steps = [
        "true",
        "for i in 1 77 500 4000 5; do dd if=/dev/urandom of=/dev/vda bs=3000 seek=$i count=2 conv=notrunc,fsync 2>/dev/null; done",
        "dd if=/dev/zero of=/dev/vda bs=64k seek=3 count=40 conv=notrunc,fsync 2>/dev/null",
        "dd if=/dev/urandom of=/dev/vda bs=512 seek=49150 count=2 conv=notrunc,fsync 2>/dev/null",
    ];
    let mut expected = Vec::new();
    for (step, command) in steps.into_iter().enumerate() {
        does(&mut vm.console, command, &step.to_string());
        let id = take(bench);
        expected.push((id, disk_now(&vm, image, format, bench)));
    }
    assert!(
        expected.windows(2).all(|pair| pair[0].1 != pair[1].1),
        "the guest has written nothing"
    );
    let written = |id: &str| {
        let shown = bench.json(&["show", "--json", "--store", &bench.store(), id]);
        assert_eq!(shown["disks"][0]["base"], "blank", "{shown}");
        number(&shown["disks"][0], "written_blocks")
    };
    assert!(written(&expected[0].0) >= 5000, "the first one has the whole disk");
    assert!((8..=40).contains(&written(&expected[1].0)), "and the second what was written");
    assert_eq!(written(&expected[3].0), 1, "the last sectors are of one block");
    bench.ok(&["stop", "--name", "guest"]);
    assert!(attached.wait().success(), "{}", attached.report());
    assert!(attached.errors().contains(", 0 failed"), "{}", attached.report());
    assert_no_trace(&vm, bench);
    vm.assert_left_as(&before);
    does(
        &mut vm.console,
        "dd if=/dev/urandom of=/dev/vda bs=64k count=2 conv=notrunc,fsync 2>/dev/null",
        "on",
    );
    vm.console.signal(rustix::process::Signal::KILL);
    vm.console.wait();
    // Nor is the image needed any more.
    std::fs::remove_file(image).expect("remove the image");
    for (id, disk) in &expected {
        assert_same(&restored_disk(bench, id, &[]), disk, &format!("checkpoint {id}"));
    }
    bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
}

#[test]
fn a_raw_image() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::new();
        let image = image(&bench);
        each_checkpoint_has_its_disk(&qemu, &bench, &words(&virtio(&image, "raw")), &image, "raw");
    }
}

#[test]
fn a_qcow2_image_on_another_as_a_node() {
    for qemu in chosen_qemus(1) {
        let bench = Bench::new();
        let below = image(&bench).display().to_string();
        let over = bench.path().join("over.qcow2");
        let path = over.display().to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &below, &path]);
        let file = format!("driver=file,node-name=f,filename={path}");
        let words = [
            "-blockdev",
            &file,
            "-blockdev",
            "driver=qcow2,node-name=d,file=f",
            "-device",
            "virtio-blk-pci,drive=d",
        ];
        each_checkpoint_has_its_disk(&qemu, &bench, &words, &over, "qcow2");
    }
}

#[test]
fn ram_and_disk_are_of_one_instant() {
    for qemu in chosen_qemus(0) {
        let bench = Bench::new();
        let image = image(&bench);
        let mut vm = foreign(&bench, &shell(&qemu, &words(&virtio(&image, "raw"))));
        vm.console.say(RECORDS);
        wait_for_records(&mut vm.console, 5);
        let mut attached = attach(&bench, &vm, &["--interval", "300ms"]);
        until("checkpoints are sealed", || bench.list().len() >= 6);
        bench.ok(&["stop", "--name", "guest"]);
        assert!(attached.wait().success(), "{}", attached.report());
        assert!(attached.errors().contains(", 0 failed"), "{}", attached.report());
        wait_for_records(&mut vm.console, 3);
        for entry in &bench.list()[..6] {
            assert_goes_on(&bench, &number(entry, "id").to_string());
        }
    }
}

#[test]
fn a_failed_checkpoint_gives_its_blocks_to_the_next() {
    let bench = Bench::new();
    let image = image(&bench);
    let mut vm = foreign(&bench, &shell(&distribution_qemu(), &words(&virtio(&image, "raw"))));
    // The first, complete checkpoint has fewer pages and blocks than that, and each further one
    // some hundred.
    let mut attached = attach(&bench, &vm, &["--interval", "none", "--fault", "disk-full:33000"]);
    let mut failed = false;
    for step in 0..60 {
        let (seek, count) = (step % 10 * 600, if failed { 3 } else { 600 });
        let write = format!(
            "dd if=/dev/urandom of=/dev/vda bs=4k seek={seek} count={count} conv=notrunc,fsync 2>/dev/null"
        );
        does(&mut vm.console, &write, &step.to_string());
        if failed {
            break;
        }
        failed = !bench.run(&["take", "--name", "guest"]).status.success();
    }
    assert!(failed && attached.errors().contains("checkpoint failed"), "{}", attached.report());
    let id = take(&bench);
    let now = disk_now(&vm, &image, "raw", &bench);
    let shown = bench.json(&["show", "--json", "--store", &bench.store(), &id]);
    assert!(number(&shown["disks"][0], "written_blocks") >= 603, "{shown}");
    bench.ok(&["stop", "--name", "guest"]);
    assert_eq!(attached.wait().code(), Some(3), "{}", attached.report());
    assert_no_trace(&vm, &bench);
    vm.console.signal(rustix::process::Signal::KILL);
    vm.console.wait();
    assert_same(&restored_disk(&bench, &id, &[]), &now, "the checkpoint behind the failed one");
}

#[test]
fn what_a_killed_engine_leaves_is_taken_away_by_the_next() {
    for phase in ["paused", "copied", "sealing"] {
        let bench = Bench::new();
        let image = image(&bench);
        let mut vm = foreign(&bench, &shell(&distribution_qemu(), &words(&virtio(&image, "raw"))));
        let before = vm.traces();
        let fault = format!("kill:{phase}:2");
        let mut attached = attach(&bench, &vm, &["--interval", "none", "--fault", &fault]);
        take(&bench);
        assert!(!bench.run(&["take", "--name", "guest"]).status.success(), "no fault in {phase}");
        attached.wait();
        until("the guest runs", || vm.runs());
        let left =
            vm.other().execute("query-named-block-nodes", None).expect("its nodes").to_string();
        assert!(left.contains(OURS), "{phase}: an engine that was killed leaves something");
        does(
            &mut vm.console,
            "dd if=/dev/urandom of=/dev/vda bs=4k seek=7 count=9 conv=notrunc,fsync",
            phase,
        );
        let mut attached = attach(&bench, &vm, &["--interval", "none"]);
        let id = take(&bench);
        let now = disk_now(&vm, &image, "raw", &bench);
        bench.ok(&["stop", "--name", "guest"]);
        attached.wait();
        assert_no_trace(&vm, &bench);
        vm.assert_left_as(&before);
        vm.console.signal(rustix::process::Signal::KILL);
        vm.console.wait();
        assert_same(&restored_disk(&bench, &id, &[]), &now, phase);
    }
}

#[test]
fn a_disk_is_left_out_only_where_it_is_said_and_so_it_is_restored() {
    let bench = Bench::new();
    let image = image(&bench);
    let mut vm = foreign(&bench, &shell(&distribution_qemu(), &words(&virtio(&image, "raw"))));
    let monitor = vm.socket("a");
    let refused =
        bench.attach_args(&["--qmp", &monitor], vm.console.pid(), &["--leave-out-disk", "other"]);
    bench.refused(&words(&refused), 1, &["other", "its disks are d"]);
    let mut attached = attach(&bench, &vm, &["--interval", "none", "--leave-out-disk", "d"]);
    let id = take(&bench);
    bench.ok(&["stop", "--name", "guest"]);
    assert!(attached.wait().success(), "{}", attached.report());
    vm.console.signal(rustix::process::Signal::KILL);
    vm.console.wait();
    let store = bench.store();
    assert!(bench.ok(&["show", "--store", &store, &id]).contains("LEFT OUT"));
    assert_eq!(bench.list()[0]["disks"][0]["left_out"], true);
    bench.refused(
        &["restore", "--store", &store, &id],
        1,
        &["lacks", "disk.raw", "--left-out-as-now"],
    );
    let mut restored = bench.restore(&id, &["--paused", "--left-out-as-now"]);
    restored.wait_for_error("is paused after");
    let disk = copy(&socket_of(restored_pid(&restored)), "d", &bench.path().join("restored.raw"));
    assert_same(&disk, &std::fs::read(&image).expect("the image"), "the image as it is now");
    assert!(restored.errors().contains("lacks"), "{}", restored.report());
}

#[test]
fn an_nbd_server_or_a_job_of_somebody_elses_is_refused() {
    let bench = Bench::new();
    let image = image(&bench);
    let vm = foreign(&bench, &shell(&distribution_qemu(), &words(&virtio(&image, "raw"))));
    let monitor = vm.socket("a");
    let options = ["--disk", "bitmap"];
    let args = bench.attach_args(&["--qmp", &monitor], vm.console.pid(), &options);
    let socket = bench.path().join("theirs").display().to_string();
    let address = json!({ "addr": { "type": "unix", "data": { "path": socket } } });
    vm.other().execute("nbd-server-start", Some(address)).expect("start an NBD server");
    bench.refused(&words(&args), 1, &["NBD server", "fix:"]);
    vm.other().execute("nbd-server-stop", None).expect("theirs still runs");
    let target = bench.path().join("target.raw").display().to_string();
    let job = json!({ "device": "d", "job-id": "theirs", "target": target, "sync": "none", "format": "qcow2" });
    vm.other().execute("drive-backup", Some(job)).expect("start a job");
    bench.refused(&words(&args), 1, &["a job works on the VM's disk theirs", "fix:"]);
    vm.other().execute("job-cancel", Some(json!({ "id": "theirs" }))).expect("theirs still runs");
    assert!(vm.runs());
}
