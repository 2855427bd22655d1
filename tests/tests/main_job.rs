//! Tests the main job on each supported machine and QEMU: run, restore from the middle, continue
//! exactly, reboot.

use keyframe_tests::{
    Boot, Process, Qemu, Sequence, TestEnv, chosen_qemus, hash_lines, number, qemus,
};

/// The default table size of the hash workload in MiB.
const MIB: u64 = 16;

/// Waits until the console has `more` complete hash lines after the first `skip` lines.
fn wait_for_hashes(vm: &mut Process, skip: usize, more: usize) {
    let grown = vm.wait_until(|p| (hash_lines(&p.lines()[skip..]).len() >= more).then_some(()));
    assert!(grown.is_some(), "the guest's sequence does not go on; {}", vm.report());
}

fn round_trip(boot: &Boot) {
    let env = TestEnv::new().with_rehearsals();
    let mut run = env.start(&["--interval", "400ms", "--name", "guest", "--audit", "audit"], boot);
    run.wait_for("KF READY");
    let mark = env.list().len();
    let taken = run.wait_until(|_| (env.list().len() >= mark + 6).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    env.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
    let mut sequence = Sequence::new(MIB);
    sequence.check(&hash_lines(&run.lines()), 5);
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);

    let checkpoint = number(&env.list()[mark + 3], "id").to_string();
    let mut restored = env.restore(&checkpoint, &[]);
    wait_for_hashes(&mut restored, 0, 12);
    sequence.check(&hash_lines(&restored.lines()), 12);
    let first = hash_lines(&restored.lines())[0].n;
    assert!(first > 1, "the restored guest began anew");

    // ROMs and firmware tables came back too: the machine boots again.
    let before = restored.lines().len();
    restored.type_line("reboot");
    restored.wait_for_after(before, "KF READY");
    // The guest may print some lines before it reboots.
    let ready = restored.lines()[before..].iter().position(|line| line.contains("KF READY"));
    let ready = before + ready.expect("it was there");
    wait_for_hashes(&mut restored, ready, 3);
    let anew = hash_lines(&restored.lines()[ready..]);
    assert!(anew[0].n < first, "it went on instead of booting: {anew:?}");
    sequence.check(&anew, 3);
    restored.type_line("poweroff");
    assert!(restored.wait().success(), "{}", restored.report());
}

fn on(machine: &str, cpus: u32, qemus: Vec<Qemu>) {
    for qemu in qemus {
        println!("-- {machine}, {cpus} vCPUs, QEMU {}", qemu.label);
        let mut boot = Boot::new("hash");
        boot.qemu = qemu.path;
        boot.machine = machine.into();
        boot.cpus = cpus;
        round_trip(&boot);
    }
}

#[test]
fn pc_goes_on_after_a_restore_and_reboots() {
    on("pc", 1, qemus());
}

#[test]
fn q35_with_four_vcpus_goes_on_after_a_restore_and_reboots() {
    on("q35", 4, chosen_qemus(0));
}

#[test]
fn microvm_goes_on_after_a_restore_and_reboots() {
    on("microvm", 1, chosen_qemus(1));
}

#[test]
fn a_vm_with_a_display_and_a_network_card_goes_on_after_a_restore_and_reboots() {
    let boot = Boot::new("hash").with(&[
        "-vga",
        "std",
        "-netdev",
        "user,id=n0",
        "-device",
        "virtio-net-pci,netdev=n0",
    ]);
    round_trip(&boot);
}
