//! Tests lazy restores: a VM that runs before its RAM is loaded has the checkpoint's RAM, byte by
//! byte. It never reads a page that has not come, not if the restore is killed, and not if the
//! store is damaged.

use keyframe_kernel::read_memory;
use keyframe_qemu::{Qmp, find_ram_blocks};
use keyframe_tests::{
    Boot, PATIENCE, PassSequence, Process, Qemu, TestEnv, assert_no_errors,
    assert_restores_exactly_with, chosen_qemus, is_gone, needs_kvm, number, pass_lines,
    restored_pid, take_audited_checkpoints, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::FileExt;
use std::time::Duration;

const RESIDENT: &str = "all of its RAM is there after";

fn scribble(qemu: &Qemu) -> Boot {
    let mut boot = Boot::new("scribble kf.mib=64 kf.cpus=2");
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 160;
    boot.cpus = 2;
    boot
}

/// A checkpoint of a guest that checks itself, and the audit's copy of its RAM.
fn checkpoint(env: &TestEnv, boot: &Boot) -> String {
    take_audited_checkpoints(env, boot, &["--interval", "600ms"], 4).1
}

/// Waits until the guest has printed `more` further lines.
fn wait_for_lines(vm: &mut Process, more: usize) {
    let before = vm.lines().len();
    let grown = vm.wait_until(|p| (p.lines().len() >= before + more).then_some(()));
    assert!(grown.is_some(), "the restored guest is silent; {}", vm.report());
}

/// The numbers in the restore's output: pages that the VM waited for, and pages that it was
/// expected to touch first.
fn told(restored: &Process) -> (u64, u64) {
    let said = restored.errors();
    let number = |from: &str| {
        let (_, rest) = said.split_once(from)?;
        rest.split(' ').next()?.parse().ok()
    };
    let both = (number("it waited for "), number("before it asked ("));
    let (Some(waited), Some(expected)) = both else { panic!("no numbers in {said}") };
    (waited, expected)
}

type Step = fn(&TestEnv, &str);

/// The tests share one checkpoint, which takes longer to make than any of them.
#[test]
fn a_checkpoint_is_restored_exactly_whoever_is_killed() {
    let steps: [(&str, Step); 5] = [
        ("the guest goes on, and what it touched comes first the next time", goes_on),
        ("a restore that is killed takes its VM along", restore_is_killed),
        ("a VM that has all of its RAM outlives the restore", outlives),
        ("a QEMU that is killed ends the restore", qemu_is_killed),
        ("a store that lost its packs is an error and leaves nothing", lost_packs),
    ];
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let id = checkpoint(&env, &scribble(&qemu));
        assert_restores_exactly_with(&env, &id, &["--lazy"]);
        for (what, step) in steps {
            println!("{what}");
            step(&env, &id);
        }
    }
}

/// Without a working set (the next checkpoint is the guess), with one, with a damaged one, and
/// without its directory.
fn goes_on(env: &TestEnv, id: &str) {
    let _ = std::fs::remove_dir_all(env.path().join("store/worksets"));
    let set = env.path().join(format!("store/worksets/{id:0>10}.wset"));
    let mut touched = 0;
    for round in 0..4 {
        match round {
            2 => std::fs::write(&set, b"KF:WST\r\nnonsense").unwrap(),
            3 => std::fs::remove_dir_all(set.parent().unwrap()).unwrap(),
            _ => {}
        }
        let mut restored = env.restore(id, &["--lazy"]);
        restored.wait_for_error(RESIDENT);
        let (waited, expected) = told(&restored);
        if round == 1 {
            assert_eq!(
                expected,
                touched,
                "all that it touched, and nothing else; {}",
                restored.report()
            );
        } else {
            assert!(expected > 0, "no guess from the next checkpoint; {}", restored.report());
        }
        touched = waited;
        wait_for_lines(&mut restored, 2);
        assert_no_errors(&restored);
        assert!(set.is_file(), "what it touched is kept");
        assert!(restored.is_running());
    }
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
}

#[test]
fn under_kvm_it_goes_on_exactly() {
    needs_kvm!();
    let mut sequence = PassSequence::new(1024, 300);
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let boot = Boot { qemu: qemu.path.clone(), ..Boot::payload("kvm", 300) };
        let mut run = env.start(&["--interval", "300ms", "--name", "guest"], &boot);
        run.wait_for("KF READY");
        let passes = |vm: &mut Process, least: usize| {
            let done = vm.wait_until(|p| (pass_lines(&p.lines()).len() >= least).then_some(()));
            assert!(done.is_some(), "{}", vm.report());
        };
        passes(&mut run, 5);
        env.ok(&["take", "--name", "guest"]);
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        let mut restored = env.restore("latest", &["--lazy"]);
        restored.wait_for_error(RESIDENT);
        passes(&mut restored, 5);
        let first = sequence.check(&pass_lines(&restored.lines()), 5);
        assert!(first.n > 2, "the restored payload began anew: {first:?}");
    }
}

/// Killed at any instant before all RAM is loaded, the restore ends QEMU, and the guest has found
/// no error.
fn restore_is_killed(env: &TestEnv, id: &str) {
    let mut caught = 0;
    for kill in 0..30_u64 {
        // Further rounds only if none of the first six was early enough.
        if kill >= 6 && caught > 0 {
            break;
        }
        // Each round reads ahead in another order.
        let _ = std::fs::remove_dir_all(env.path().join("store/worksets"));
        let mut restored = env.restore(id, &["--lazy"]);
        restored.wait_for_error("is running after");
        let pid = restored_pid(&restored);
        std::thread::sleep(Duration::from_millis(kill % 6 * 15));
        restored.signal(Signal::KILL);
        restored.wait();
        if restored.errors().contains(RESIDENT) {
            // The VM has all its RAM by now, or almost.
            let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL);
        } else {
            caught += 1;
        }
        wait_until("QEMU ends", || is_gone(pid));
        assert_no_errors(&restored);
    }
    assert!(caught > 0, "each restore was done before it was killed");
}

fn outlives(env: &TestEnv, id: &str) {
    let mut restored = env.restore(id, &["--lazy"]);
    restored.wait_for_error(RESIDENT);
    let pid = restored_pid(&restored);
    restored.signal(Signal::KILL);
    restored.wait();
    let before = restored.lines().len();
    let lines = || restored.lines().len();
    wait_until("the guest goes on by itself", || lines() >= before + 3 || is_gone(pid));
    let lives = !is_gone(pid);
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL);
    wait_until("QEMU ends", || is_gone(pid));
    assert!(lives, "{}", restored.report());
    assert_no_errors(&restored);
}

fn qemu_is_killed(env: &TestEnv, id: &str) {
    for wait_ms in [0, 40] {
        let mut restored = env.restore(id, &["--lazy"]);
        restored.wait_for_error("is running after");
        std::thread::sleep(Duration::from_millis(wait_ms));
        kill_process(Pid::from_raw(restored_pid(&restored) as i32).unwrap(), Signal::KILL).unwrap();
        assert_eq!(restored.wait().code(), Some(1), "{}", restored.report());
        assert!(restored.errors().contains("QEMU ended with"), "{}", restored.report());
    }
}

/// Flips bytes in the middle half of each pack. The same `shift` again restores them.
fn damage(env: &TestEnv, shift: u64) {
    for pack in std::fs::read_dir(env.path().join("store/packs")).unwrap() {
        let file =
            std::fs::File::options().read(true).write(true).open(pack.unwrap().path()).unwrap();
        let len = file.metadata().unwrap().len();
        // That many, because no checkpoint refers to pages that were superseded before the seal.
        for at in (12..36).map(|step| len / 48 * step + shift) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        }
    }
}

/// The VM runs as long as it does not need an unreadable page. If it does, it is ended and never
/// reads wrong data.
#[test]
fn a_damaged_page_ends_the_vm_only_when_it_is_needed() {
    let env = TestEnv::new();
    let mut boot = Boot::new("hash");
    boot.mem_mib = 96;
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    env.ok(&["take", "--name", "guest"]);
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
    let qmp = env.path().join("restored.sock");
    let monitor = format!("unix:{},server=on,wait=off", qmp.display());
    let first = number(&env.list()[0], "id").to_string();
    let broken = |shift: u64| {
        damage(&env, shift);
        let mut restored = env.restore(&first, &["--lazy", "--paused", "--", "-qmp", &monitor]);
        let stands = restored.wait_until(|p| p.errors().contains("is paused after").then_some(()));
        // Devices need pages before the VM runs; those must be among the readable ones.
        stands.map(|()| restored).or_else(|| {
            damage(&env, shift);
            None
        })
    };
    let mut restored = (0..8).find_map(|try_of| broken(try_of * 20_011)).expect("a VM that stands");
    restored.wait_for_error("cannot be read");
    restored.wait_for_error("keyframe: page ");
    assert!(!restored.errors().contains(RESIDENT), "{}", restored.report());
    let pid = restored_pid(&restored);
    let mut monitor = Qmp::connect(&qmp, PATIENCE).unwrap();
    assert!(monitor.status().is_ok(), "it is still there");
    let main = find_ram_blocks(&mut monitor, pid).unwrap().remove(0);
    drop(monitor);
    // Reading each page of the VM waits for it, as the guest's read would.
    let process = keyframe_kernel::Process::open(pid).unwrap();
    let mut all = vec![0; main.block.total_bytes as usize];
    assert!(
        read_memory(&process, main.host, &mut all).is_err(),
        "a page that cannot be read was read"
    );
    assert_eq!(restored.wait().code(), Some(1), "{}", restored.report());
    assert!(is_gone(pid));
    let said = restored.errors();
    for word in ["the VM needed page", "block pc.ram", "fix:", "damaged"] {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
}

fn lost_packs(env: &TestEnv, id: &str) {
    for pack in std::fs::read_dir(env.path().join("store/packs")).unwrap() {
        std::fs::remove_file(pack.unwrap().path()).unwrap();
    }
    let text = env.refused(
        &["restore", "--store", &env.store(), id, "--lazy"],
        1,
        &["the pack is missing"],
    );
    assert!(text.contains("fix:"), "{text}");
}
