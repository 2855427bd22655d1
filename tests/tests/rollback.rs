//! Tests `keyframe rollback`: the running VM returns to a checkpoint, byte for byte, in the same
//! QEMU. If that fails, it runs on unchanged.

use keyframe_tests::rollbacks::{grow, hashing, newest, rows};
use keyframe_tests::{
    HashLine, PATIENCE, Sequence, TestEnv, assert_no_errors, chosen_qemus, differing_pages,
    distribution_qemu, hash_lines, live_ram, number, stored_ram, wait_until,
};
use serde_json::Value;
use std::path::Path;

fn pid_and_state(env: &TestEnv) -> (u64, String) {
    let status = env.json(&["status", "--json"]);
    (number(&status[0], "qemu_pid"), status[0]["state"].as_str().unwrap().to_owned())
}

#[test]
fn a_vm_under_load_rolls_back_repeatedly_in_the_same_qemu() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let (boot, monitor) = hashing(&env, &qemu);
        let mut run =
            env.start(&["--interval", "400ms", "--name", "guest", "--audit", "audit"], &boot);
        run.wait_for("KF READY");
        grow(&mut run, 4);
        let target_id = newest(&env);
        let good = target_id.to_string();
        let (pid, _) = pid_and_state(&env);
        let settings = switch_on_migration_capabilities(&monitor);
        let mut rollbacks = Vec::new();
        for _ in 0..3 {
            grow(&mut run, 12);
            let done = env.json(&["rollback", &good, "--name", "guest", "--json"]);
            assert_eq!((number(&done, "checkpoint"), &done["runs"]), (target_id, &true.into()));
            assert!(number(&done, "pages") > 0);
            rollbacks.push((number(&done, "before"), number(&done, "now")));
        }
        grow(&mut run, 6);
        assert_eq!(pid_and_state(&env), (pid, "running".into()), "the same QEMU");
        assert_eq!(migration_capabilities(&monitor), settings, "the user's settings");

        a_paused_vm_is_exactly_the_target(&env, &monitor, pid as u32, &good);
        grow(&mut run, 4);
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        assert_no_errors(&run);

        rows_continue_at_the_target(&hash_lines(&run.lines()), &mut sequence);
        the_lineage_has_all_checkpoints(&env, target_id, &rollbacks);
        env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    }
}

/// A VM goes back many times without a checkpoint of what it was, also to another checkpoint and
/// with checkpoints between. Without an audit only the pages are compared that can differ.
#[test]
fn fast_rollbacks_are_exact_each_time() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(0) {
        let env = TestEnv::new();
        let (boot, monitor) = hashing(&env, &qemu);
        let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
        run.wait_for("KF READY");
        grow(&mut run, 3);
        env.ok(&["take", "--name", "guest", "--tag", "base"]);
        grow(&mut run, 3);
        env.ok(&["take", "--name", "guest", "--tag", "later"]);
        let (pid, _) = pid_and_state(&env);
        for (round, target) in ["base", "base", "later", "base", "base"].into_iter().enumerate() {
            grow(&mut run, 3);
            if round % 2 == 1 {
                env.ok(&["take", "--name", "guest"]);
                grow(&mut run, 1);
            }
            let mut own = keyframe_qemu::Qmp::connect(&monitor, PATIENCE).unwrap();
            own.stop().unwrap();
            drop(own);
            wait_until("the engine sees the pause", || pid_and_state(&env).1 == "paused");
            let sealed = env.list().len();
            let done = env.json(&["rollback", target, "--fast", "--name", "guest", "--json"]);
            assert_eq!((&done["before"], &done["now"]), (&Value::Null, &Value::Null), "{done}");
            assert_eq!(env.list().len(), sealed, "a fast rollback takes no checkpoint");
            // QEMU's reset has written the kernel's 11,000 pages. They came with the state, so that no
            // device was loaded beside a wrong page, and none had to be written afterwards. The guest itself
            // has changed some 4,200.
            assert!(number(&done, "pages") < 6_000, "{done}");
            let (names, stored) = stored_ram(Path::new(&env.store()), number(&done, "checkpoint"));
            let live = live_ram(pid as u32, &monitor, &names);
            assert_eq!(differing_pages(&live, &stored), [0; 0], "round {round}");
            let mut own = keyframe_qemu::Qmp::connect(&monitor, PATIENCE).unwrap();
            own.cont().unwrap();
        }
        grow(&mut run, 3);
        let taken = env.json(&["take", "--name", "guest", "--json"]);
        let base = env.json(&["show", "--json", "--store", &env.store(), "base"]);
        assert_eq!(taken["restored_from"], base["id"], "{taken}");
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        // A rollback goes back, or from one checkpoint to the later one.
        let lines = hash_lines(&run.lines());
        for row in lines.chunk_by(|line, next| next.n == line.n + 1) {
            sequence.check(row, 1);
        }
        let mut restored = env.restore("latest", &[]);
        grow(&mut restored, 4);
        sequence.check(&hash_lines(&restored.lines()), 4);
    }
}

/// The settings of the migration, as the user's monitor tells them.
fn migration_capabilities(monitor: &Path) -> Value {
    let mut own = keyframe_qemu::Qmp::connect(monitor, PATIENCE).unwrap();
    own.execute("query-migrate-capabilities", None).unwrap()
}

/// Switches on those with which QEMU cannot load a snapshot, and returns all settings.
fn switch_on_migration_capabilities(monitor: &Path) -> Value {
    let known = migration_capabilities(monitor).to_string();
    let wanted = ["multifd", "x-ignore-shared", "mapped-ram", "validate-uuid"];
    let wanted = wanted.iter().filter(|name| known.contains(&format!("\"{name}\"")));
    let on: Vec<_> =
        wanted.map(|name| serde_json::json!({ "capability": name, "state": true })).collect();
    assert!(on.len() >= 3, "{known}");
    let mut own = keyframe_qemu::Qmp::connect(monitor, PATIENCE).unwrap();
    let arguments = serde_json::json!({ "capabilities": on });
    own.execute("migrate-set-capabilities", Some(arguments)).unwrap();
    drop(own);
    migration_capabilities(monitor)
}

/// Pauses the VM and rolls it back: devices and RAM equal the target to the last byte.
fn a_paused_vm_is_exactly_the_target(env: &TestEnv, monitor: &Path, qemu_pid: u32, target: &str) {
    let mut own = keyframe_qemu::Qmp::connect(monitor, PATIENCE).unwrap();
    own.stop().unwrap();
    drop(own);
    wait_until("the engine sees the pause", || pid_and_state(env).1 == "paused");
    let done = env.json(&["rollback", target, "--name", "guest", "--json"]);
    assert_eq!(done["runs"], false, "a paused VM stays paused");
    let shown = env.json(&["show", "--json", "--store", &env.store(), target]);
    let blocks = shown["ram"].as_array().unwrap();
    let names: Vec<String> =
        blocks.iter().filter_map(|b| Some(b["name"].as_str()?.to_owned())).collect();
    let live = live_ram(qemu_pid, monitor, &names);
    let raw = |id: u64| env.path().join(format!("audit/{id}.ram"));
    let after = std::fs::read(raw(number(&done, "now"))).unwrap();
    assert!(differing_pages(&live, &after).is_empty(), "the VM differs from its next checkpoint");
    let mut own = keyframe_qemu::Qmp::connect(monitor, PATIENCE).unwrap();
    own.cont().unwrap();
    drop(own);
}

/// Each row of lines is the sequence, and all but the first begin after the same line.
fn rows_continue_at_the_target(lines: &[HashLine], sequence: &mut Sequence) {
    let rows = rows(lines);
    assert_eq!(rows.len(), 5);
    for row in &rows {
        sequence.check(row, 1);
    }
    // A line that the rollback cuts in two spoils the next one.
    let firsts: Vec<u64> = rows[1..].iter().map(|row| row[0].n).collect();
    let (least, most) = (firsts.iter().min().unwrap(), firsts.iter().max().unwrap());
    assert!(most - least <= 1, "not the same instant each time: {firsts:?}");
}

/// Checkpoints after a rollback descend from its target, and those before it stay.
fn the_lineage_has_all_checkpoints(env: &TestEnv, target_id: u64, rollbacks: &[(u64, u64)]) {
    let list = env.list();
    let entry = |id: u64| list.iter().find(|e| number(e, "id") == id).unwrap();
    for &(before, now) in rollbacks {
        assert_eq!(number(entry(now), "parent"), target_id);
        assert_eq!(number(entry(now), "restored_from"), target_id);
        assert!(entry(before).get("restored_from").is_none());
        assert!(
            number(entry(now), "dirty_pages") < number(entry(1), "ram_bytes") / 4096,
            "a complete checkpoint"
        );
    }
    let tree = env.ok(&["list", "--tree", "--store", &env.store()]);
    assert_eq!(tree.matches("├─").count() + tree.matches("└─").count(), 5, "{tree}");
}

/// QEMU fails to load the devices half way: the VM returns to its state before the rollback, and
/// loses nothing.
#[test]
fn a_rollback_that_fails_half_way_leaves_the_vm_as_it_was() {
    let mut sequence = Sequence::new(16);
    for qemu in chosen_qemus(1) {
        let env = TestEnv::new();
        let (boot, _) = hashing(&env, &qemu);
        let other = boot.clone().with(&["-device", "virtio-rng-pci"]);
        let mut run = env.start(&["--interval", "none", "--name", "other"], &other);
        run.wait_for("KF READY");
        env.ok(&["take", "--name", "other", "--tag", "other"]);
        env.ok(&["stop", "--name", "other"]);
        assert!(run.wait().success(), "{}", run.report());

        let mut run = env.start(&["--interval", "300ms", "--name", "guest"], &boot);
        run.wait_for("KF READY");
        grow(&mut run, 6);
        let (pid, _) = pid_and_state(&env);
        env.refused(&["rollback", "other", "--name", "guest"], 1, &["the VM is as it was"]);
        assert_eq!(pid_and_state(&env), (pid, "running".into()));
        grow(&mut run, 6);
        let sealed = env.list().len();
        wait_until("checkpoints go on", || env.list().len() >= sealed + 2);
        env.ok(&["stop", "--name", "guest"]);
        assert!(run.wait().success(), "{}", run.report());
        sequence.check(&hash_lines(&run.lines()), 12);
        let mut restored = env.restore("latest", &[]);
        grow(&mut restored, 4);
        sequence.check(&hash_lines(&restored.lines()), 4);
    }
}

#[test]
fn what_cannot_be_is_refused_before_the_vm_is_touched() {
    let env = TestEnv::new();
    let (boot, monitor) = hashing(&env, &distribution_qemu());
    let mut small = boot.clone();
    small.mem_mib = 112;
    small.append = "kf.work=idle".into();
    let mut run = env.start(&["--interval", "none", "--name", "small"], &small);
    run.wait_for("KF READY");
    env.ok(&["take", "--name", "small", "--tag", "small"]);
    env.ok(&["stop", "--name", "small"]);
    assert!(run.wait().success(), "{}", run.report());

    env.refused(&["rollback", "small"], 1, &["no VM runs"]);
    let mut run = env.start(&["--interval", "none", "--name", "guest"], &boot);
    run.wait_for("KF READY");
    let before = env.list().len();
    env.refused(
        &["rollback", "small"],
        1,
        &["another machine's", "RAM blocks", "keyframe restore"],
    );
    env.refused(&["rollback", "77"], 1, &["77"]);
    assert_eq!(env.list().len(), before, "nothing was taken for a rollback that could not be");
    a_migration_is_not_disturbed(&env, &monitor);
    grow(&mut run, 3);
    env.ok(&["stop", "--name", "guest"]);
    assert!(run.wait().success(), "{}", run.report());
}

/// A rollback beside a migration is refused; the migration and the VM go on.
fn a_migration_is_not_disturbed(env: &TestEnv, monitor: &Path) {
    let mut own = keyframe_qemu::Qmp::connect(monitor, PATIENCE).unwrap();
    let slow = serde_json::json!({ "max-bandwidth": 1 << 20 });
    own.execute("migrate-set-parameters", Some(slow)).unwrap();
    let target = serde_json::json!({ "uri": "exec:cat > /dev/null" });
    own.execute("migrate", Some(target)).unwrap();
    env.ok(&["take", "--name", "guest", "--tag", "beside"]);
    let before = env.list().len();
    env.refused(&["rollback", "beside"], 1, &["migration is under way", "migrate_cancel"]);
    let answer = own.execute("query-migrate", None).unwrap();
    assert_eq!(answer["status"], "active");
    own.execute("migrate_cancel", None).unwrap();
    assert_eq!(env.list().len(), before, "nothing was taken for it");
}
