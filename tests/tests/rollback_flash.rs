//! Tests `keyframe rollback` of a VM with a writable flash chip, as each UEFI machine has one: QEMU
//! loads the chip's state once while the VM stands still, and crashes after a second time.

use keyframe_tests::{
    Boot, PATIENCE, PassSequence, Process, Qemu, TestEnv, assert_no_errors, chosen_qemus,
    pass_lines,
};

/// The pages that the payload writes in a pass.
const DIRTY: u64 = 300;

/// The payload in a read-only chip, beside a writable one.
pub fn boot(env: &TestEnv, qemu: &Qemu) -> Boot {
    let payload = Boot { qemu: qemu.path.clone(), ..Boot::payload("tcg", DIRTY) };
    let line = payload.command();
    let code = &line[line.iter().position(|word| word == "-bios").expect("-bios") + 1];
    let variables = env.path().join("variables");
    std::fs::write(&variables, vec![0xff; 64 << 10]).expect("a file");
    let monitor = env.path().join("own.sock");
    payload.with(&[
        "-drive",
        &format!("if=pflash,unit=0,format=raw,readonly=on,file={code}"),
        "-drive",
        &format!("if=pflash,unit=1,format=raw,file={}", variables.display()),
        "-qmp",
        &format!("unix:{},server=on,wait=off", monitor.display()),
    ])
}

/// Waits for three more lines of the guest.
fn goes_on(vm: &mut Process) {
    let before = pass_lines(&vm.lines()).len();
    let grown = vm.wait_until(|p| (pass_lines(&p.lines()).len() >= before + 3).then_some(()));
    assert!(grown.is_some(), "the guest is silent; {}", vm.report());
}

#[test]
fn a_vm_with_a_writable_flash_chip_survives_each_rollback() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let boot = boot(&env, &qemu);
        let other = boot.clone().with(&["-device", "virtio-rng-pci"]);
        let mut run = env.start(&["--interval", "none", "--name", "other"], &other);
        run.wait_for("KF READY");
        env.ok(&["take", "--name", "other", "--tag", "other"]);
        env.ok(&["stop", "--name", "other"]);
        assert!(run.wait().success(), "{}", run.report());

        let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
        run.wait_for("KF READY");
        env.ok(&["take", "--name", "guest", "--tag", "target"]);
        goes_on(&mut run);
        let back = |name: &str| env.ok(&["rollback", name, "--name", "guest"]);
        back("target");
        goes_on(&mut run);
        // QEMU fails to load the devices, so the former state is a second one.
        env.refused(&["rollback", "other", "--name", "guest"], 1, &["the VM is as it was"]);
        goes_on(&mut run);
        let mut own = keyframe_qemu::Qmp::connect(&env.path().join("own.sock"), PATIENCE)
            .expect("its monitor");
        own.stop().expect("stop");
        for _ in 0..2 {
            back("target");
        }
        own.cont().expect("cont");
        goes_on(&mut run);
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        assert_no_errors(&run);

        let lines = pass_lines(&run.lines());
        let rows: Vec<_> = lines.chunk_by(|a, b| a.n < b.n).collect();
        assert!(rows.len() >= 3, "the guest never went back: {} rows", rows.len());
        let mut sequence = PassSequence::new(1024, DIRTY);
        for row in rows {
            sequence.check(row, 1);
        }
    }
}
