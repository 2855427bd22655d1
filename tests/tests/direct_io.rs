//! Tests disks with direct I/O: the kernel writes into pinned pages of guest RAM, so RAM is scanned
//! in pauses alone. Each checkpoint's RAM is compared with a copy that was made in its pause.

use keyframe_tests::disks::{
    as_strs, numbered_image, restored_disk, run_in_guest, shell_guest, start_guest,
};
use keyframe_tests::{ExternalVm, Process, TestEnv, chosen_qemus, variants, wait_until};
use std::path::Path;

/// A loop in the guest that reads all of its disk again and again, past the page cache's content.
const READS: &str = "{ while :; do echo 3 >/proc/sys/vm/drop_caches; \
                     dd if=/dev/vda of=/dev/null bs=256k 2>/dev/null; done & }";

/// Fails if a checkpoint differs from RAM.
fn assert_exact(run: &Process) {
    assert!(!run.errors().contains("AUDIT"), "{}", run.report());
    assert!(run.errors().contains(", 0 failed"), "{}", run.report());
}

/// The arguments of a virtio disk over `image`, with these keys.
fn disk(image: &Path, keys: &str) -> [String; 4] {
    let drive = format!("file={},format=raw,if=none,id=d,{keys}", image.display());
    ["-drive".into(), drive, "-device".into(), "virtio-blk-pci,drive=d".into()]
}

#[test]
fn a_vm_that_reads_its_disk_by_direct_io_is_exact() {
    let ways = ["cache=none,aio=native", "cache=directsync", "cache=none,aio=io_uring"];
    for qemu in chosen_qemus(0) {
        let keys = variants(ways, 1)[0];
        println!("-- QEMU {}: {keys}", qemu.label);
        let env = TestEnv::new();
        let image = numbered_image(&env);
        let words = disk(&image, keys);
        let mut vm = ExternalVm::start(&env, &shell_guest(&qemu, &as_strs(&words)));
        vm.console.wait_for("KF READY");
        run_in_guest(&mut vm.console, READS, "reads");
        let (monitor, audit) = (vm.socket("a"), env.path().join("audit").display().to_string());
        let common = ["--name", "guest", "--disk", "bitmap"];
        let refused = [&common[..], &["--strategy", "cow"]].concat();
        let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &refused);
        env.refused(&as_strs(&args), 1, &["direct I/O", "--strategy", "cache=writeback"]);
        let options = [&common[..], &["--interval", "250ms", "--audit", &audit]].concat();
        let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &options);
        let mut attached = Process::start(env.command(&as_strs(&args)));
        attached.wait_for_error("VM guest");
        wait_until("checkpoints are sealed", || env.list().len() >= 12);
        let taken = env.run(&["take", "--name", "guest", "--strategy", "fork"]);
        assert!(String::from_utf8_lossy(&taken.stderr).contains("direct I/O"), "{taken:?}");
        let shown = env.list().last().expect("a checkpoint")["strategy"].clone();
        assert_eq!(shown, "paused-scan");
        env.ok(&["stop", "--name", "guest"]);
        assert!(attached.wait().success(), "{}", attached.report());
        assert_exact(&attached);
        assert!(vm.is_running());
        vm.console.signal(rustix::process::Signal::KILL);
        vm.console.wait();
        assert!(restored_disk(&env, "latest", &[]) == std::fs::read(&image).expect("the image"));
    }
}

#[test]
fn a_read_only_disk_with_direct_io_is_no_reason_to_refuse_a_run() {
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let image = numbered_image(&env);
        let words = disk(&image, "readonly=on,cache=none");
        let audit = env.path().join("audit").display().to_string();
        let options = ["--interval", "250ms", "--audit", &audit];
        let mut run = start_guest(&env, &options, &shell_guest(&qemu, &as_strs(&words)));
        run_in_guest(&mut run, READS, "reads");
        wait_until("checkpoints are sealed", || env.list().len() >= 8);
        env.ok(&["stop"]);
        assert!(run.wait().success(), "{}", run.report());
        assert_exact(&run);
        let mut restored = env.restore("latest", &[]);
        restored.wait_for_error("is running after");
        run_in_guest(&mut restored, "true", "restored");
    }
}

#[test]
fn a_tracker_that_compares_pages_sees_what_direct_io_wrote() {
    let qemu = keyframe_tests::distribution_qemu();
    let env = TestEnv::new();
    let image = numbered_image(&env);
    let words = disk(&image, "cache=none");
    let mut vm = ExternalVm::start(&env, &shell_guest(&qemu, &as_strs(&words)));
    vm.console.wait_for("KF READY");
    run_in_guest(&mut vm.console, READS, "reads");
    let (monitor, audit) = (vm.socket("a"), env.path().join("audit").display().to_string());
    let options = ["--name", "guest", "--disk", "bitmap", "--interval", "500ms"];
    let further = ["--tracker", "compare", "--strategy", "stop-copy", "--audit", &audit];
    let options = [&options[..], &further].concat();
    let args = env.attach_args(&["--qmp", &monitor], vm.console.pid(), &options);
    let mut attached = Process::start(env.command(&as_strs(&args)));
    attached.wait_for_error("VM guest");
    wait_until("checkpoints are sealed", || env.list().len() >= 6);
    env.ok(&["stop", "--name", "guest"]);
    assert!(attached.wait().success(), "{}", attached.report());
    assert_exact(&attached);
}
