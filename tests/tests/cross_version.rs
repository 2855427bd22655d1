//! Checkpoints of an earlier QEMU come back in a later one, where QEMU promises it: for versioned
//! machine types. All else is refused before a VM starts.

use keyframe_tests::disks::{
    RECORDS, as_strs, numbered_image, records, shell_guest, start_guest, take_checkpoint,
    virtio_disk, wait_for_records,
};
use keyframe_tests::{
    Boot, NO_QEMU_10, Process, Qemu, TestEnv, distribution_qemu, hash_lines, qemu_10, qemu_11,
    skip, variants,
};
use rustix::process::Signal;

/// The QEMUs that are later than the distribution's.
fn later_qemus() -> Vec<Qemu> {
    qemu_10().into_iter().chain(qemu_11()).collect()
}

/// Machines with their devices.
fn machines() -> Vec<(&'static str, &'static [&'static str])> {
    vec![
        ("pc", &["-device", "virtio-net-pci,netdev=n", "-netdev", "user,id=n", "-vga", "std"]),
        (
            "q35",
            &[
                "-device",
                "e1000e,netdev=n",
                "-netdev",
                "user,id=n",
                "-device",
                "virtio-vga",
                "-device",
                "qemu-xhci",
                "-device",
                "usb-tablet",
                "-device",
                "virtio-rng-pci",
            ],
        ),
        ("pc", &["-device", "e1000,netdev=n", "-netdev", "user,id=n", "-vga", "cirrus"]),
        (
            "q35",
            &["-smp", "2", "-device", "virtio-scsi-pci", "-device", "intel-hda", "-vga", "vmware"],
        ),
    ]
}

/// Takes a checkpoint of a guest that writes records to its disk, and returns it with the last
/// record before it.
fn checkpoint_with_records(env: &TestEnv, qemu: &Qemu, machine: &str, devices: &[&str]) -> String {
    let drive = virtio_disk(&numbered_image(env), "raw");
    let mut boot = shell_guest(qemu, &as_strs(&drive)).with(devices);
    boot.machine = machine.into();
    let mut run = start_guest(env, &["--interval", "none"], &boot);
    run.type_line(RECORDS);
    wait_for_records(&mut run, 10);
    let id = take_checkpoint(env);
    env.ok(&["stop"]);
    assert!(run.wait().success(), "{}", run.report());
    id
}

/// Asserts that the restored guest writes its next records, and finds its disk as it left it.
fn goes_on(mut restored: Process, later: &Qemu) {
    restored.wait_for_error("is running after");
    assert!(
        restored.errors().contains("as it does for a migration"),
        "no note; {}",
        restored.report()
    );
    wait_for_records(&mut restored, 10);
    let all = records(&restored);
    assert!(all.windows(2).all(|pair| pair[1] == pair[0] + 1), "{}: {all:?}", later.label);
    assert!(!restored.lines().iter().any(|line| line.contains("BUG:")), "{}", restored.report());
    restored.signal(Signal::TERM);
    restored.wait();
}

/// The guest checks its disk and its memory all the time. It goes on in the later QEMU, with its
/// RAM loaded at once and on first touch.
#[test]
fn a_later_qemu_goes_on_with_a_checkpoint() {
    let all = later_qemus();
    if all.is_empty() {
        skip!("{NO_QEMU_10}");
    }
    for (machine, devices) in variants(machines(), 1) {
        println!("-- {machine} {devices:?}");
        let env = TestEnv::new();
        let id = checkpoint_with_records(&env, &distribution_qemu(), machine, devices);
        for later in &all {
            println!("-- QEMU {}", later.label);
            goes_on(env.restore(&id, &["--qemu", &later.path]), later);
            goes_on(env.restore(&id, &["--qemu", &later.path, "--lazy"]), later);
        }
    }
    // From 10 to 11.
    if let [ten, eleven] = &all[..] {
        let (machine, devices) = variants(machines(), 1)[0];
        let env = TestEnv::new();
        let id = checkpoint_with_records(&env, ten, machine, devices);
        goes_on(env.restore(&id, &["--qemu", &eleven.path]), eleven);
    }
}

/// The clones in the later QEMU compute the same hashes as the first VM.
#[test]
fn clones_in_a_later_qemu_go_on_with_a_checkpoint() {
    let Some(later) = qemu_10() else { skip!("{NO_QEMU_10}") };
    let env = TestEnv::new();
    let boot = Boot { mem_mib: 96, ..Boot::new("hash") };
    let mut run = start_guest(&env, &["--interval", "none"], &boot);
    run.wait_until(|p| (hash_lines(&p.lines()).len() >= 3).then_some(())).expect("hashes");
    let id = take_checkpoint(&env);
    run.wait_until(|p| (hash_lines(&p.lines()).len() >= 60).then_some(())).expect("hashes");
    let first = hash_lines(&run.lines());
    env.ok(&["stop"]);
    run.wait();
    let store = env.store();
    let words = ["branch", "--store", &store, &id, "--qemu", &later.path, "--name", "clone"];
    let mut branch = Process::start(env.command(&words));
    branch.wait_for_error("clone clone-1");
    let log = env.path().join("keyframe/.clones/clone-1/console.log");
    let lines = || std::fs::read_to_string(&log).unwrap_or_default();
    let hashes = || hash_lines(&lines().lines().map(str::to_owned).collect::<Vec<_>>());
    keyframe_tests::wait_until("the clone goes on", || hashes().len() >= 10);
    let all = hashes();
    let same = all.iter().filter(|hash| first.contains(hash)).count();
    // The last line may be incomplete.
    assert!(same + 1 >= all.len().min(40), "{all:?} {first:?}");
    branch.signal(Signal::INT);
    branch.wait();
}

#[test]
fn what_no_qemu_promises_is_refused() {
    let Some(later) = qemu_10() else { skip!("{NO_QEMU_10}") };
    let here = distribution_qemu();
    // A later QEMU's checkpoint, and a machine type without a version.
    let cases = [
        (&later, "pc", &here, "an earlier QEMU cannot load it"),
        (&here, "microvm", &later, "machine type microvm has no version"),
    ];
    for (from, machine, to, reason) in cases {
        let env = TestEnv::new();
        let boot = Boot { qemu: from.path.clone(), machine: machine.into(), ..Boot::new("hash") };
        let mut run = start_guest(&env, &["--interval", "none"], &boot);
        let id = take_checkpoint(&env);
        env.ok(&["stop"]);
        run.wait();
        for command in ["restore", "branch"] {
            let words = [command, "--store", &env.store(), &id, "--qemu", &to.path];
            env.refused(&words, 1, &["7.2", "10.0", reason, "fix:", "--qemu PATH"]);
        }
    }
}
