//! `keyframe rollback`: the running VM becomes what it was, byte for byte, in the same QEMU; and
//! where it cannot, it runs on as it was.

use keyframe_tests::{
    Bench, Boot, HashLine, PATIENCE, Process, Qemu, Sequence, assert_no_errors, chosen_qemus,
    differing_pages, distribution_qemu, hash_lines, live_ram, number, until,
};
use std::path::PathBuf;

fn hashing(bench: &Bench, qemu: &Qemu) -> (Boot, PathBuf) {
    let monitor = bench.path().join("own.sock");
    let mut boot = Boot::new("hash")
        .with(&["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
    boot.qemu.clone_from(&qemu.path);
    boot.mem_mib = 96;
    (boot, monitor)
}

/// Waits until the guest has printed `more` lines.
fn grow(vm: &mut Process, more: usize) {
    let before = hash_lines(&vm.lines()).len();
    let grown = vm.wait_until(|p| (hash_lines(&p.lines()).len() >= before + more).then_some(()));
    assert!(grown.is_some(), "the guest is silent; {}", vm.report());
}

/// The lines, cut where the numbers go back: one row for each life of the VM.
fn lives(lines: &[HashLine]) -> Vec<Vec<HashLine>> {
    let mut lives: Vec<Vec<HashLine>> = Vec::new();
    for line in lines {
        match lives.last_mut() {
            Some(life) if life.last().is_some_and(|last| last.n < line.n) => life.push(*line),
            _ => lives.push(vec![*line]),
        }
    }
    lives
}

fn pid_and_state(bench: &Bench) -> (u64, String) {
    let status = bench.json(&["status", "--json"]);
    (number(&status[0], "qemu_pid"), status[0]["state"].as_str().unwrap().to_owned())
}

#[test]
fn a_vm_under_load_goes_back_again_and_again_in_the_same_qemu() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(0) {
        let bench = Bench::new();
        let (boot, monitor) = hashing(&bench, &qemu);
        let mut run =
            bench.start(&["--interval", "400ms", "--name", "guest", "--audit", "audit"], &boot);
        run.wait_for("KF READY");
        grow(&mut run, 4);
        let target_id = number(bench.list().last().unwrap(), "id");
        let good = target_id.to_string();
        let (pid, _) = pid_and_state(&bench);
        let mut befores = Vec::new();
        for _ in 0..3 {
            grow(&mut run, 12);
            let done = bench.json(&["rollback", &good, "--name", "guest", "--json"]);
            assert_eq!((number(&done, "checkpoint"), &done["runs"]), (target_id, &true.into()));
            assert!(number(&done, "pages") > 0);
            befores.push((number(&done, "before"), number(&done, "now")));
        }
        grow(&mut run, 6);
        assert_eq!(pid_and_state(&bench), (pid, "running".into()), "the same QEMU");

        // What stands there is the target, devices and RAM, to the last byte: frozen at once behind
        // a rollback.
        let mut own = keyframe_qemu::Qmp::connect(&monitor, PATIENCE).unwrap();
        own.stop().unwrap();
        drop(own);
        until("the engine sees it", || pid_and_state(&bench).1 == "paused");
        let done = bench.json(&["rollback", &good, "--name", "guest", "--json"]);
        assert_eq!(done["runs"], false, "a VM that stood is left standing");
        let shown = bench.json(&["show", "--json", "--store", &bench.store(), &good]);
        let blocks = shown["ram"].as_array().unwrap();
        let names: Vec<String> =
            blocks.iter().filter_map(|b| Some(b["name"].as_str()?.to_owned())).collect();
        let live = live_ram(pid as u32, &monitor, &names);
        let raw = |id: u64| bench.path().join(format!("audit/{id}.ram"));
        let after = std::fs::read(raw(number(&done, "now"))).unwrap();
        assert!(
            differing_pages(&live, &after).is_empty(),
            "the VM is what the checkpoint behind says"
        );
        let mut own = keyframe_qemu::Qmp::connect(&monitor, PATIENCE).unwrap();
        own.cont().unwrap();
        drop(own);
        grow(&mut run, 4);
        bench.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        assert_no_errors(&run);

        // Each life is the sequence, and all but the first begin behind the same line.
        let lives = lives(&hash_lines(&run.lines()));
        assert_eq!(lives.len(), 5, "{}", run.report());
        for life in &lives {
            sequence.check(life, 1);
        }
        // A line that the rollback cut in two spoils the one that is printed behind it.
        let firsts: Vec<u64> = lives[1..].iter().map(|life| life[0].n).collect();
        let (least, most) = (firsts.iter().min().unwrap(), firsts.iter().max().unwrap());
        assert!(most - least <= 1, "one instant, each time: {firsts:?}");

        // The lineage: what came behind a rollback grew from its target, and what was before is
        // there.
        let list = bench.list();
        let entry = |id: u64| list.iter().find(|e| number(e, "id") == id).unwrap();
        for (before, now) in befores {
            assert_eq!(number(entry(now), "parent"), target_id);
            assert_eq!(number(entry(now), "restored_from"), target_id);
            assert!(entry(before).get("restored_from").is_none());
            assert!(
                number(entry(now), "dirty_pages") < number(entry(1), "ram_bytes") / 4096,
                "no complete one"
            );
        }
        let tree = bench.ok(&["list", "--tree", "--store", &bench.store()]);
        assert_eq!(tree.matches("├─").count() + tree.matches("└─").count(), 5, "{tree}");
        bench.ok(&["check", "--read-data", "--quiet", "--store", &bench.store()]);
    }
}

/// Half way through QEMU finds devices that it does not have: the VM becomes again what it was, and
/// has missed nothing.
#[test]
fn a_rollback_that_fails_half_way_leaves_the_vm_as_it_was() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(1) {
        let bench = Bench::new();
        let (boot, _) = hashing(&bench, &qemu);
        let other = boot.clone().with(&["-device", "virtio-rng-pci"]);
        let mut run = bench.start(&["--interval", "none", "--name", "other"], &other);
        run.wait_for("KF READY");
        bench.ok(&["take", "--name", "other", "--tag", "other"]);
        bench.ok(&["stop", "--name", "other"]);
        assert!(run.wait().success(), "{}", run.report());

        let mut run = bench.start(&["--interval", "300ms", "--name", "guest"], &boot);
        run.wait_for("KF READY");
        grow(&mut run, 6);
        let (pid, _) = pid_and_state(&bench);
        bench.refused(&["rollback", "other", "--name", "guest"], 1, &["the VM is as it was"]);
        assert_eq!(pid_and_state(&bench), (pid, "running".into()));
        grow(&mut run, 6);
        let sealed = bench.list().len();
        until("checkpoints go on", || bench.list().len() >= sealed + 2);
        bench.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        sequence.check(&hash_lines(&run.lines()), 12);
        let mut restored = bench.restore("latest", &[]);
        grow(&mut restored, 4);
        sequence.check(&hash_lines(&restored.lines()), 4);
    }
}

#[test]
fn what_cannot_be_is_refused_before_the_vm_is_touched() {
    let bench = Bench::new();
    let (boot, _) = hashing(&bench, &distribution_qemu());
    let mut small = boot.clone();
    small.mem_mib = 112;
    small.append = "kf.work=idle".into();
    let mut run = bench.start(&["--interval", "none", "--name", "small"], &small);
    run.wait_for("KF READY");
    bench.ok(&["take", "--name", "small", "--tag", "small"]);
    bench.ok(&["stop", "--name", "small"]);
    assert!(run.wait().success(), "{}", run.report());

    bench.refused(&["rollback", "small"], 1, &["no VM runs"]);
    let mut run = bench.start(&["--interval", "none", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    let before = bench.list().len();
    bench.refused(
        &["rollback", "small"],
        1,
        &["another machine's", "RAM blocks", "keyframe restore"],
    );
    bench.refused(&["rollback", "77"], 1, &["77"]);
    assert_eq!(bench.list().len(), before, "nothing was taken for a rollback that could not be");
    grow(&mut run, 3);
    bench.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
}
