//! Tests `--max-pause` and `--max-overhead`: the settings that the engine chooses, that it uses
//! them, and that it prints why. The tests compare decisions, never times, which depend on the
//! machine.

use keyframe_tests::{Boot, MemoryCgroup, Process, TestEnv, number};
use serde_json::Value;

const MS: u64 = 1_000_000;

/// A guest that writes 192 MiB, at 60,000 pages a second or as fast as it can.
fn heavy() -> Boot {
    let mut boot = Boot::new("dirty kf.rate=60000 kf.mib=192");
    boot.mem_mib = 384;
    boot
}

/// Starts `boot` as VM `guest` with `options`, and waits until the guest works.
fn start(env: &TestEnv, boot: &Boot, options: &[&str]) -> Process {
    let mut run = env.start(&[&["--name", "guest"], options].concat(), boot);
    run.wait_for("KF READY");
    run
}

/// Waits for a status for which `is_it` returns true.
fn wait_for_status(
    env: &TestEnv,
    run: &mut Process,
    what: &str,
    is_it: impl Fn(&Value) -> bool,
) -> Value {
    let found = run.wait_until(|_| {
        let all = env.json(&["status", "--json", "--name", "guest"]);
        is_it(&all[0]).then(|| all[0].clone())
    });
    found.unwrap_or_else(|| panic!("{what}: never; {}", run.report()))
}

fn why(status: &Value) -> &str {
    status["tuned"].as_str().unwrap_or_default()
}

/// Stops the run, which must succeed.
fn stop(env: &TestEnv, run: &mut Process) {
    env.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
}

#[test]
fn an_overhead_is_kept_by_taking_checkpoints_less_often_until_the_guest_calms_down() {
    let env = TestEnv::exclusive();
    let asked_ns = 300 * MS;
    let mut run = start(&env, &heavy(), &["--interval", "300ms", "--max-overhead", "3%"]);
    let longer =
        |s: &Value| number(s, "interval_ns") > asked_ns && why(s).contains("costs the guest");
    let chosen = wait_for_status(&env, &mut run, "a longer interval, with the reason", longer);
    run.wait_for_error("so checkpoints are taken less often");
    // The engine uses its choice. Single pauses differ by the pages copied before each, so this
    // compares the sum.
    let from = number(&chosen, "sealed") as usize + 1;
    wait_for_status(&env, &mut run, "two more checkpoints", |s| {
        number(s, "sealed") as usize >= from + 2
    });
    let intervals: Vec<u64> = env.list()[from..].iter().map(|e| number(e, "interval_ns")).collect();
    let mean_ns = intervals.iter().sum::<u64>() / intervals.len() as u64;
    assert!(mean_ns > asked_ns, "as often as asked for all the same: {intervals:?}");

    run.type_line("rate 0");
    // The overhead is near the requested one; on a slow machine the pauses alone may exceed it.
    let chosen_ns = number(&chosen, "interval_ns");
    let back =
        |s: &Value| [asked_ns, chosen_ns / 2].iter().any(|ns| number(s, "interval_ns") <= *ns);
    wait_for_status(&env, &mut run, "a shorter interval again", back);
    stop(&env, &mut run);
}

#[test]
fn a_pause_is_kept_by_taking_checkpoints_more_often_where_nothing_is_copied_before_it() {
    let env = TestEnv::exclusive();
    // With `slow-copy`, the pause for an interval's writes takes a second on any machine.
    let slow = ["--fault", "slow-copy"];
    let options = ["--strategy", "stop-copy", "--interval", "5s", "--max-pause", "200ms"];
    let mut run = start(&env, &heavy(), &[&options[..], &slow].concat());
    let shorter = |s: &Value| number(s, "interval_ns") < 5000 * MS && why(s).contains("more often");
    wait_for_status(&env, &mut run, "a shorter interval, with the reason", shorter);
    run.wait_for_error("so checkpoints are taken more often");
    stop(&env, &mut run);
}

#[test]
fn a_pause_that_cannot_be_kept_is_said_to_be_so_and_checkpoints_go_on_as_asked() {
    let env = TestEnv::exclusive();
    let mut run = start(&env, &heavy(), &["--interval", "300ms", "--max-pause", "1us"]);
    let impossible = |s: &Value| why(s).contains("exceeds the longest pause asked for");
    let status = wait_for_status(&env, &mut run, "that it is impossible", impossible);
    assert_eq!(number(&status, "interval_ns"), 300 * MS, "{status}");
    run.wait_for_error("which exceeds the longest pause asked for");
    let text = env.ok(&["status", "--name", "guest"]);
    assert!(
        text.contains("budget") && text.contains("exceeds the longest pause asked for"),
        "{text}"
    );
    let sealed = number(&status, "sealed");
    wait_for_status(&env, &mut run, "further checkpoints", |s| number(s, "sealed") >= sealed + 2);
    // The reason is printed once, not at each checkpoint.
    assert_eq!(
        run.errors().matches("exceeds the longest pause asked for").count(),
        1,
        "{}",
        run.report()
    );
    stop(&env, &mut run);
}

#[test]
fn budgets_that_hold_change_nothing_and_without_one_there_is_nothing_to_report() {
    for (options, reported) in
        [(&["--max-pause", "10s", "--max-overhead", "100%"][..], true), (&[], false)]
    {
        let env = TestEnv::exclusive();
        let light = Boot::new("dirty kf.rate=200 kf.mib=16");
        let mut run = start(&env, &light, &[&["--interval", "500ms"], options].concat());
        let status = wait_for_status(&env, &mut run, "checkpoints", |s| number(s, "sealed") >= 3);
        assert_eq!(number(&status, "interval_ns"), 500 * MS, "{status}");
        assert_eq!(status["tuned"].as_str(), reported.then_some("as asked"), "{status}");
        stop(&env, &mut run);
        assert!(!run.errors().contains("as asked"), "nothing has changed: {}", run.report());
    }
}

#[test]
fn budgets_that_make_no_sense_are_refused() {
    let env = TestEnv::exclusive();
    let store = env.store();
    let line = heavy().command();
    let refused = |options: &[&str], code: i32, words: &[&str]| {
        let mut args = [&["run", "--store", &store, "--name", "guest"], options, &["--"]].concat();
        args.extend(line.iter().map(String::as_str));
        env.refused(&args, code, words);
    };
    refused(&["--max-pause", "0s"], 2, &["--max-pause", "more than 0"]);
    refused(&["--max-overhead", "101%"], 2, &["--max-overhead", "at most 100%"]);
    refused(&["--max-overhead", "little"], 2, &["write 3% or 0.03"]);
    for budget in [["--max-pause", "5ms"], ["--max-overhead", "3%"]] {
        refused(&[&["--interval", "none"], &budget[..]].concat(), 1, &["--interval none", "fix:"]);
    }
    // If the engine cannot start, no VM stays behind: it would hold standard error open.
    refused(&["--audit", "/proc/no/where"], 1, &["/proc/no/where"]);
    assert!(env.list().is_empty());
}

#[test]
fn in_a_memory_cgroup_a_run_uses_what_its_vm_leaves_and_is_the_first_to_be_ended() {
    let mut boot = Boot::new("dirty kf.dirty.rate=4000 kf.dirty.mib=160");
    boot.mem_mib = 256;
    let Some(cgroup) = MemoryCgroup::new((256 + 256) << 20) else { return };
    let env = TestEnv::exclusive();
    let store = env.store();
    let line = boot.command();
    let mut args = vec!["run", "--store", &store, "--name", "guest", "--interval", "1s", "--"];
    args.extend(line.iter().map(String::as_str));
    let mut run = Process::start(cgroup.wrap(&env.command(&args)));
    run.wait_for_error("of its memory cgroup's limit");
    let status = wait_for_status(&env, &mut run, "12 checkpoints", |s| number(s, "sealed") >= 12);
    let victim = |pid: u64| {
        let score = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj"));
        score.expect("the score of a process that lives").trim().parse::<i32>().expect("a number")
    };
    assert_eq!(victim(number(&status, "engine_pid")), 1000);
    assert_eq!(victim(number(&status, "qemu_pid")), victim(std::process::id().into()));
    // One whose pause found more than fits has failed, and its pages went into the next one.
    env.ok(&["stop", "--name", "guest"]);
    assert!(matches!(run.wait().code(), Some(0 | 3)), "{}", run.report());
    assert_eq!(cgroup.ended_by_kernel(), 0, "{}", run.report());
    env.ok(&["check", "--read-data", "--quiet", "--store", &store]);
}
