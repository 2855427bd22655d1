//! Proof of exactness: `--audit` copies all RAM in the pause of each checkpoint. The checkpoint and
//! the RAM of the restored VM must equal that copy.

use crate::{Boot, Process, TestEnv, differing_pages, live_ram, number};

/// Runs `boot` with `options` until `count` audited checkpoints exist, then stops the run, which
/// must succeed. Returns the run and the id of the newest checkpoint but one.
pub fn take_audited_checkpoints(
    env: &TestEnv,
    boot: &Boot,
    options: &[&str],
    count: usize,
) -> (Process, String) {
    let mut all = vec!["--name", "guest", "--audit", "audit"];
    all.extend(options);
    let mut run = env.start(&all, boot);
    run.wait_for("KF READY");
    let mark = env.list().len();
    let taken = run.wait_until(|_| (env.list().len() >= mark + count).then_some(()));
    assert!(taken.is_some(), "{}", run.report());
    env.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    // The audit compares each checkpoint with its copy, and fails the run if one differs.
    assert!(exit.success(), "{exit}: {}", run.report());
    assert_no_errors(&run);
    let list = env.list();
    (run, number(&list[list.len() - 2], "id").to_string())
}

/// Restores checkpoint `id`, paused, and asserts that its RAM equals the audit's copy.
pub fn assert_restores_exactly(env: &TestEnv, id: &str) {
    assert_restores_exactly_with(env, id, &[]);
}

/// The pid of QEMU that `keyframe restore` has printed.
pub fn restored_pid(restored: &Process) -> u32 {
    let errors = restored.errors();
    let pid =
        errors.rsplit_once("(QEMU ").and_then(|(_, rest)| rest.split(')').next()?.parse().ok());
    pid.expect("the pid of the restored QEMU")
}

/// As [`assert_restores_exactly`], with options of `keyframe restore`.
pub fn assert_restores_exactly_with(env: &TestEnv, id: &str, options: &[&str]) {
    let qmp = env.path().join(format!("restored-{id}.sock"));
    let monitor = format!("unix:{},server=on,wait=off", qmp.display());
    let mut all = options.to_vec();
    all.extend(["--paused", "--", "-qmp", &monitor]);
    let mut restored = env.restore(id, &all);
    restored.wait_for_error("is paused after");
    let pid = restored_pid(&restored);
    let shown = env.json(&["show", "--json", "--store", &env.store(), id]);
    let blocks = shown["ram"].as_array().expect("RAM blocks");
    let names: Vec<String> =
        blocks.iter().filter_map(|b| Some(b["name"].as_str()?.to_owned())).collect();
    let live = live_ram(pid, &qmp, &names);
    let copy = std::fs::read(env.path().join("audit").join(format!("{id}.ram")))
        .expect("the audit's copy");
    let differing = differing_pages(&live, &copy);
    assert!(
        differing.is_empty(),
        "checkpoint {id}: {} of {} pages differ after the restore, first {:?}",
        differing.len(),
        live.len() / 4096,
        &differing[..differing.len().min(8)]
    );
}

/// Asserts that the guest, which checks its own memory, has reported no error.
pub fn assert_no_errors(vm: &Process) {
    let bad: Vec<_> = vm
        .lines()
        .into_iter()
        .filter(|l| l.contains("KF ERROR") || (l.contains("bad=") && !l.ends_with("bad=0")))
        .collect();
    assert!(bad.is_empty(), "the guest found errors: {bad:?}");
}
