//! Tests disks under `keyframe attach`, tracked by QEMU's dirty bitmaps: each checkpoint has the
//! disk of its instant, a failed checkpoint loses nothing, and QEMU keeps no trace.

use keyframe_tests::disks::{
    self, IMAGE_BYTES, RECORDS, as_strs, assert_goes_on, assert_same, copy_disk, disk_socket,
    disk_socket_of, qemu_img, restored_disk, run_in_guest, shell_guest, start_guest,
    take_checkpoint, virtio_disk, wait_for_records,
};
use keyframe_tests::{
    Boot, ExternalVm, Process, Qemu, TestEnv, chosen_qemus, distribution_qemu, number,
    restored_pid, skip, wait_until,
};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The prefix of the names of Keyframe's objects in QEMU, as JSON. The quote excludes the paths of
/// tests, which contain the prefix in their middle.
const OURS: &str = "\"keyframe-";

/// Makes an image whose end is a hole, which reads as zero.
fn image(env: &TestEnv) -> PathBuf {
    let path = disks::numbered_image(env);
    let file = std::fs::File::options().write(true).open(&path).expect("the image");
    for bytes in [IMAGE_BYTES - (4 << 20), IMAGE_BYTES] {
        file.set_len(bytes).expect("change the image's length");
    }
    path
}

fn foreign(env: &TestEnv, boot: &Boot) -> ExternalVm {
    let mut vm = ExternalVm::start(env, boot);
    vm.console.wait_for("KF READY");
    vm
}

/// The arguments of `keyframe attach` to `vm`, as VM `guest`.
fn attach(env: &TestEnv, vm: &ExternalVm, options: &[&str]) -> Process {
    let monitor = vm.socket("a");
    let options = [&["--name", "guest", "--disk", "bitmap"], options].concat();
    let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &options);
    let mut attached = Process::start(env.command(&as_strs(&args)));
    attached.wait_for_error("VM guest");
    attached
}

/// The content of the guest's disk, read from outside while the guest does not write.
fn disk_now(vm: &ExternalVm, image: &Path, format: &str, env: &TestEnv) -> Vec<u8> {
    // The guest's synced data is in the image after QEMU has flushed it.
    vm.monitor().hmp("qemu-io d flush").expect("flush");
    let to = env.path().join("copy.raw");
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

/// Asserts that no object of Keyframe is left in QEMU, and no file beside the store's own.
fn assert_no_trace(vm: &ExternalVm, env: &TestEnv) {
    let mut qmp = vm.monitor();
    for query in ["query-block-exports", "query-jobs", "query-named-block-nodes"] {
        let found = qmp.execute(query, None).expect(query).to_string();
        assert!(!found.contains(OURS), "{query}: {found}");
    }
    assert!(qmp.execute("nbd-server-stop", None).is_err(), "QEMU's NBD server still runs");
    let scratch = std::fs::read_dir(PathBuf::from(env.store()).join("disks")).expect("STORE/disks");
    assert_eq!(scratch.count(), 0, "files in STORE/disks");
}

/// The guest writes data and zeros; each checkpoint has the disk of its instant.
fn each_checkpoint_has_its_disk(
    qemu: &Qemu,
    env: &TestEnv,
    words: &[&str],
    image: &Path,
    format: &str,
) {
    println!("-- QEMU {}: {words:?}", qemu.label);
    let mut vm = foreign(env, &shell_guest(qemu, words));
    let before = vm.traces();
    let mut attached = attach(env, &vm, &["--interval", "none"]);
    let steps = [
        "true",
        "for i in 1 77 500 4000 5; do dd if=/dev/urandom of=/dev/vda bs=3000 seek=$i count=2 conv=notrunc,fsync 2>/dev/null; done",
        "dd if=/dev/zero of=/dev/vda bs=64k seek=3 count=40 conv=notrunc,fsync 2>/dev/null",
        "dd if=/dev/urandom of=/dev/vda bs=512 seek=49150 count=2 conv=notrunc,fsync 2>/dev/null",
    ];
    let mut expected = Vec::new();
    for (step, command) in steps.into_iter().enumerate() {
        run_in_guest(&mut vm.console, command, &step.to_string());
        let id = take_checkpoint(env);
        expected.push((id, disk_now(&vm, image, format, env)));
    }
    assert!(
        expected.windows(2).all(|pair| pair[0].1 != pair[1].1),
        "the guest has written nothing"
    );
    let written = |id: &str| {
        let shown = env.json(&["show", "--json", "--store", &env.store(), id]);
        assert_eq!(shown["disks"][0]["base"], "blank", "{shown}");
        number(&shown["disks"][0], "written_blocks")
    };
    assert!(written(&expected[0].0) >= 5000, "the first one has the whole disk");
    assert!((8..=40).contains(&written(&expected[1].0)), "and the second what was written");
    assert_eq!(written(&expected[3].0), 1, "the last sectors are of one block");
    env.ok(&["stop", "--name", "guest"]);
    assert!(attached.wait().success(), "{}", attached.report());
    assert!(attached.errors().contains(", 0 failed"), "{}", attached.report());
    assert_no_trace(&vm, env);
    vm.assert_unchanged_since(&before);
    run_in_guest(
        &mut vm.console,
        "dd if=/dev/urandom of=/dev/vda bs=64k count=2 conv=notrunc,fsync 2>/dev/null",
        "on",
    );
    vm.console.signal(rustix::process::Signal::KILL);
    vm.console.wait();
    // The restore does not need the image either.
    std::fs::remove_file(image).expect("remove the image");
    for (id, disk) in &expected {
        assert_same(&restored_disk(env, id, &[]), disk, &format!("checkpoint {id}"));
    }
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
}

#[test]
fn a_raw_image() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let image = image(&env);
        each_checkpoint_has_its_disk(
            &qemu,
            &env,
            &as_strs(&virtio_disk(&image, "raw")),
            &image,
            "raw",
        );
    }
}

#[test]
fn a_qcow2_image_on_another_as_a_node() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let below = image(&env).display().to_string();
        let over = env.path().join("over.qcow2");
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
        each_checkpoint_has_its_disk(&qemu, &env, &words, &over, "qcow2");
    }
}

#[test]
fn ram_and_disk_are_of_one_instant() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let image = image(&env);
        let mut vm = foreign(&env, &shell_guest(&qemu, &as_strs(&virtio_disk(&image, "raw"))));
        vm.console.type_line(RECORDS);
        wait_for_records(&mut vm.console, 5);
        let mut attached = attach(&env, &vm, &["--interval", "300ms"]);
        wait_until("checkpoints are sealed", || env.list().len() >= 6);
        env.ok(&["stop", "--name", "guest"]);
        assert!(attached.wait().success(), "{}", attached.report());
        assert!(attached.errors().contains(", 0 failed"), "{}", attached.report());
        wait_for_records(&mut vm.console, 3);
        for entry in &env.list()[..6] {
            assert_goes_on(&env, &number(entry, "id").to_string());
        }
    }
}

#[test]
fn a_failed_checkpoint_gives_its_blocks_to_the_next() {
    let env = TestEnv::new();
    let image = image(&env);
    let mut vm =
        foreign(&env, &shell_guest(&distribution_qemu(), &as_strs(&virtio_disk(&image, "raw"))));
    // The first, complete checkpoint exceeds this number of pages and blocks; each further one has
    // some hundred.
    let mut attached = attach(&env, &vm, &["--interval", "none", "--fault", "disk-full:33000"]);
    let mut failed = false;
    for step in 0..60 {
        let (seek, count) = (step % 10 * 600, if failed { 3 } else { 600 });
        let write = format!(
            "dd if=/dev/urandom of=/dev/vda bs=4k seek={seek} count={count} conv=notrunc,fsync 2>/dev/null"
        );
        run_in_guest(&mut vm.console, &write, &step.to_string());
        if failed {
            break;
        }
        failed = !env.run(&["take", "--name", "guest"]).status.success();
    }
    assert!(failed && attached.errors().contains("checkpoint failed"), "{}", attached.report());
    let id = take_checkpoint(&env);
    let now = disk_now(&vm, &image, "raw", &env);
    let shown = env.json(&["show", "--json", "--store", &env.store(), &id]);
    assert!(number(&shown["disks"][0], "written_blocks") >= 603, "{shown}");
    env.ok(&["stop", "--name", "guest"]);
    assert_eq!(attached.wait().code(), Some(3), "{}", attached.report());
    assert_no_trace(&vm, &env);
    vm.console.signal(rustix::process::Signal::KILL);
    vm.console.wait();
    assert_same(&restored_disk(&env, &id, &[]), &now, "the checkpoint behind the failed one");
}

#[test]
fn what_a_killed_engine_leaves_is_taken_away() {
    for phase in ["paused", "copied", "sealing"] {
        let env = TestEnv::new();
        let image = image(&env);
        let mut vm = foreign(
            &env,
            &shell_guest(&distribution_qemu(), &as_strs(&virtio_disk(&image, "raw"))),
        );
        let before = vm.traces();
        let fault = format!("kill:{phase}:2");
        let mut attached = attach(&env, &vm, &["--interval", "none", "--fault", &fault]);
        take_checkpoint(&env);
        assert!(!env.run(&["take", "--name", "guest"]).status.success(), "no fault in {phase}");
        attached.wait();
        wait_until("the guest runs", || vm.is_running());
        // Its watchdog takes it away: a job would fill the disk of its scratch file.
        wait_until("nothing is left", || {
            let nodes = vm.monitor().execute("query-named-block-nodes", None);
            !nodes.expect("its nodes").to_string().contains(OURS)
        });
        run_in_guest(
            &mut vm.console,
            "dd if=/dev/urandom of=/dev/vda bs=4k seek=7 count=9 conv=notrunc,fsync",
            phase,
        );
        let mut attached = attach(&env, &vm, &["--interval", "none"]);
        let id = take_checkpoint(&env);
        let now = disk_now(&vm, &image, "raw", &env);
        env.ok(&["stop", "--name", "guest"]);
        attached.wait();
        assert_no_trace(&vm, &env);
        vm.assert_unchanged_since(&before);
        vm.console.signal(rustix::process::Signal::KILL);
        vm.console.wait();
        assert_same(&restored_disk(&env, &id, &[]), &now, phase);
    }
}

/// Kills engines of a VM whose disk has an iothread, at moments from their start to their fourth
/// checkpoint or so. QEMU up to 8.2 aborts if it loses a reader of such a disk.
fn killed_engines_leave_the_vm_alive(cycles: u64) {
    let env = TestEnv::new();
    let image = image(&env);
    let drive = format!("file={},format=raw,if=none,id=d", image.display());
    let device = "virtio-blk-pci,drive=d,iothread=io0";
    let words = ["-object", "iothread,id=io0", "-drive", &drive, "-device", device];
    let mut vm = foreign(&env, &shell_guest(&distribution_qemu(), &words));
    let before = vm.traces();
    vm.console.type_line(RECORDS);
    wait_for_records(&mut vm.console, 5);
    for cycle in 0..cycles {
        let monitor = vm.socket("a");
        let options = ["--name", "guest", "--disk", "bitmap", "--interval", "40ms"];
        let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &options);
        let mut attached = Process::start(env.command(&as_strs(&args)));
        // Every other one begins its checkpoints; the step of the moments is prime to their number.
        if cycle % 2 == 0 {
            attached.wait_for_error("VM guest");
        }
        std::thread::sleep(Duration::from_millis(60 + cycle * 617 % 1000));
        if cycle == 2 {
            wait_until("a checkpoint is sealed", || !env.list().is_empty());
        }
        attached.signal(rustix::process::Signal::KILL);
        attached.wait();
        wait_until(&format!("the guest runs after cycle {cycle}"), || vm.is_running());
    }
    wait_for_records(&mut vm.console, 3);
    let mut attached = attach(&env, &vm, &["--interval", "none"]);
    take_checkpoint(&env);
    take_checkpoint(&env);
    env.ok(&["stop", "--name", "guest"]);
    assert!(attached.wait().success(), "{}", attached.report());
    assert_no_trace(&vm, &env);
    vm.assert_unchanged_since(&before);
}

#[test]
fn a_killed_engine_costs_no_vm_its_life_whose_disk_has_an_iothread() {
    killed_engines_leave_the_vm_alive(5);
}

#[test]
#[ignore = "takes minutes; scripts/soak runs it"]
fn soak_killed_engines_leave_a_vm_with_an_iothread_alive() {
    killed_engines_leave_the_vm_alive(120);
}

#[test]
fn a_throttled_disk_in_an_iothread_is_refused_where_qemu_would_abort() {
    let env = TestEnv::new();
    let image = image(&env);
    let drive =
        format!("file={},format=raw,if=none,id=d,throttling.bps-total=3000000", image.display());
    let device = "virtio-blk-pci,drive=d,iothread=io0";
    let words = ["-object", "iothread,id=io0", "-drive", &drive, "-device", device];
    let vm = foreign(&env, &shell_guest(&distribution_qemu(), &words));
    let monitor = vm.socket("a");
    let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &["--disk", "bitmap"]);
    let version = vm.monitor().execute("query-version", None).expect("its version");
    if number(&version["qemu"], "major") >= 9 {
        skip!("this QEMU does not abort");
    }
    env.refused(&as_strs(&args), 1, &["disk d is throttled", "iothread", "fix:"]);
    assert!(vm.is_running());
}

#[test]
fn a_disk_is_left_out_only_where_it_is_said_and_so_it_is_restored() {
    let env = TestEnv::new();
    let image = image(&env);
    let drive = format!("file={},format=raw,if=none,id=d", image.display());
    let words = ["-drive", &drive, "-device", "virtio-blk-pci,drive=d,id=virtio-disk0"];
    let mut vm = foreign(&env, &shell_guest(&distribution_qemu(), &words));
    let monitor = vm.socket("a");
    let refused =
        env.attach_args(&["--qmp", &monitor], vm.console.pid(), &["--leave-out-disk", "other"]);
    env.refused(&as_strs(&refused), 1, &["other", "its disks are d (virtio-disk0)"]);
    let leave_out = ["--interval", "none", "--leave-out-disk", "virtio-disk0"];
    let mut attached = attach(&env, &vm, &leave_out);
    let id = take_checkpoint(&env);
    env.ok(&["stop", "--name", "guest"]);
    assert!(attached.wait().success(), "{}", attached.report());
    vm.console.signal(rustix::process::Signal::KILL);
    vm.console.wait();
    let store = env.store();
    assert!(env.ok(&["show", "--store", &store, &id]).contains("LEFT OUT"));
    assert_eq!(env.list()[0]["disks"][0]["left_out"], true);
    env.refused(
        &["restore", "--store", &store, &id],
        1,
        &["lacks", "disk.raw", "--left-out-as-now"],
    );
    let mut restored = env.restore(&id, &["--paused", "--left-out-as-now"]);
    restored.wait_for_error("is paused after");
    let disk =
        copy_disk(&disk_socket_of(restored_pid(&restored)), "d", &env.path().join("restored.raw"));
    assert_same(&disk, &std::fs::read(&image).expect("the image"), "the image as it is now");
    assert!(restored.errors().contains("lacks"), "{}", restored.report());
}

/// Exports `image` over NBD at `socket` until the result is dropped.
fn nbd_export(image: &Path, socket: &Path) -> Process {
    let mut command = std::process::Command::new("qemu-nbd");
    command.args(["-t", "-e", "8", "-f", "raw", "-k"]).arg(socket).arg(image);
    let export = Process::start(command);
    wait_until("qemu-nbd listens", || socket.exists());
    export
}

#[test]
fn a_disk_that_cannot_be_served_is_left_out_under_run_and_comes_back_as_the_line_says() {
    let env = TestEnv::new();
    let image = image(&env);
    let (other, socket) = (env.path().join("other.raw"), env.path().join("nbd"));
    std::fs::write(&other, vec![0; 4 << 20]).expect("make an image");
    let _export = nbd_export(&other, &socket);
    let node = format!(
        "driver=nbd,node-name=n,server.type=unix,server.path={},discard=unmap",
        socket.display()
    );
    let served = virtio_disk(&image, "raw");
    let mut words = as_strs(&served);
    words.extend(["-object", "throttle-group,id=g,x-iops-total=10000", "-blockdev", &node]);
    words.extend(["-blockdev", "throttle,node-name=t,throttle-group=g,file=n"]);
    words.extend(["-device", "virtio-blk-pci,drive=t,id=b1"]);
    let boot = shell_guest(&distribution_qemu(), &words);
    let (store, line) = (env.store(), boot.command());
    let run = [&["run", "--store", &store, "--leave-out-disk", "x", "--"][..], &as_strs(&line)];
    env.refused(&run.concat(), 1, &["--leave-out-disk x", "its disks are d, n (b1)"]);
    // The id of its device stands for the disk, and so does the name of the filter above it.
    let name = "b1";
    let options = ["--interval", "none", "--leave-out-disk", name];
    let mut vm = start_guest(&env, &options, &boot);
    let write = |disk: &str, byte: &str| {
        format!("tr '\\0' {byte} </dev/zero | dd of={disk} bs=4k count=4 conv=notrunc,fsync")
    };
    for disk in ["/dev/vda", "/dev/vdb"] {
        run_in_guest(&mut vm, &write(disk, "a"), disk);
    }
    let id = take_checkpoint(&env);
    let at_checkpoint = copy_disk(&disk_socket(&env), "d", &env.path().join("copy.raw"));
    for disk in ["/dev/vda", "/dev/vdb"] {
        run_in_guest(&mut vm, &write(disk, "b"), &format!("{disk} again"));
    }
    let rollback = ["rollback", &*id, "--name", "guest"];
    env.refused(&rollback, 1, &["disk n is left out", "--left-out-as-now"]);
    env.ok(&["stop", "--name", "guest"]);
    assert!(vm.wait().success(), "{}", vm.report());
    assert_eq!(std::fs::read(&other).expect("the export's image")[..4096], [b'b'; 4096]);
    env.refused(&["restore", "--store", &store, &id], 1, &["lacks disks", "--left-out-as-now"]);
    assert_same(&restored_disk(&env, &id, &["--left-out-as-now"]), &at_checkpoint, "disk d");
    let mut restored = env.restore(&id, &["--left-out-as-now"]);
    restored.wait_for_error("is running after");
    for disk in ["/dev/vda", "/dev/vdb"] {
        run_in_guest(&mut restored, &write(disk, "c"), &format!("{disk} restored"));
    }
    assert_eq!(std::fs::read(&other).expect("the export's image")[..4096], [b'c'; 4096]);
    assert!(restored.errors().contains("QEMU opens disk n itself"), "{}", restored.report());
}

#[test]
fn an_nbd_server_or_a_job_of_somebody_elses_is_refused() {
    let env = TestEnv::new();
    let image = image(&env);
    let vm =
        foreign(&env, &shell_guest(&distribution_qemu(), &as_strs(&virtio_disk(&image, "raw"))));
    let monitor = vm.socket("a");
    let options = ["--disk", "bitmap"];
    let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &options);
    let socket = env.path().join("theirs").display().to_string();
    let address = json!({ "addr": { "type": "unix", "data": { "path": socket } } });
    vm.monitor().execute("nbd-server-start", Some(address)).expect("start an NBD server");
    env.refused(&as_strs(&args), 1, &["NBD server", "fix:"]);
    vm.monitor().execute("nbd-server-stop", None).expect("theirs still runs");
    let target = env.path().join("target.raw").display().to_string();
    let job = json!({ "device": "d", "job-id": "theirs", "target": target, "sync": "none", "format": "qcow2" });
    vm.monitor().execute("drive-backup", Some(job)).expect("start a job");
    env.refused(&as_strs(&args), 1, &["a job works on the VM's disk theirs", "fix:"]);
    vm.monitor().execute("job-cancel", Some(json!({ "id": "theirs" }))).expect("theirs still runs");
    assert!(vm.is_running());
}
