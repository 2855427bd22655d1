//! `--max-pause` and `--max-overhead`: what the engine chooses to keep them, that it goes by it,
//! and that it says why. Decisions are looked at, never times: how long anything took is whatever
//! this machine made of it.

use keyframe_tests::{Bench, Boot, Process, number};
use serde_json::Value;

const MS: u64 = 1_000_000;

/// A guest that writes to 192 MiB at 60,000 pages a second, or as fast as it can.
fn heavy() -> Boot {
    let mut boot = Boot::new("dirty kf.rate=60000 kf.mib=192");
    boot.mem_mib = 384;
    boot
}

/// Starts `boot` as VM `guest` with `options`, and waits until it works.
fn start(bench: &Bench, boot: &Boot, options: &[&str]) -> Process {
    let mut run = bench.start(&[&["--name", "guest"], options].concat(), boot);
    run.wait_for("KF READY");
    run
}

/// Waits for a status that `is_it`.
fn wait_for_status(
    bench: &Bench,
    run: &mut Process,
    what: &str,
    is_it: impl Fn(&Value) -> bool,
) -> Value {
    let found = run.wait_until(|_| {
        let all = bench.json(&["status", "--json", "--name", "guest"]);
        is_it(&all[0]).then(|| all[0].clone())
    });
    found.unwrap_or_else(|| panic!("{what}: never; {}", run.report()))
}

fn why(status: &Value) -> &str {
    status["tuned"].as_str().unwrap_or_default()
}

/// Stops the run, which must have ended well.
fn stop(bench: &Bench, run: &mut Process) {
    bench.ok(&["stop", "--name", "guest"]);
    let exit = run.wait();
    assert!(exit.success(), "{exit}: {}", run.report());
}

#[test]
fn an_overhead_is_kept_by_taking_checkpoints_less_often_until_the_guest_calms_down() {
    let bench = Bench::alone();
    let asked_ns = 300 * MS;
    let mut run = start(&bench, &heavy(), &["--interval", "300ms", "--max-overhead", "3%"]);
    let longer =
        |s: &Value| number(s, "interval_ns") > asked_ns && why(s).contains("costs the guest");
    let chosen = wait_for_status(&bench, &mut run, "a longer interval, with the reason", longer);
    run.wait_for_error("so they are taken less often");
    // Chosen, and gone by. From pause to pause they differ by what was copied before each, so
    // together.
    let from = number(&chosen, "sealed") as usize + 1;
    wait_for_status(&bench, &mut run, "two more checkpoints", |s| {
        number(s, "sealed") as usize >= from + 2
    });
    let intervals: Vec<u64> =
        bench.list()[from..].iter().map(|e| number(e, "interval_ns")).collect();
    let mean_ns = intervals.iter().sum::<u64>() / intervals.len() as u64;
    assert!(mean_ns > asked_ns, "as often as asked for all the same: {intervals:?}");

    run.say("rate 0");
    // To what was asked for, or near: a slow machine's pauses alone may cost more.
    let chosen_ns = number(&chosen, "interval_ns");
    let back =
        |s: &Value| [asked_ns, chosen_ns / 2].iter().any(|ns| number(s, "interval_ns") <= *ns);
    wait_for_status(&bench, &mut run, "a shorter interval again", back);
    stop(&bench, &mut run);
}

#[test]
fn a_pause_is_kept_by_taking_checkpoints_more_often_where_nothing_is_copied_before_it() {
    let bench = Bench::alone();
    // A second for what the guest writes in an interval, however fast the machine is.
    let slow = ["--fault", "slow-copy"];
    let options = ["--strategy", "stop-copy", "--interval", "5s", "--max-pause", "200ms"];
    let mut run = start(&bench, &heavy(), &[&options[..], &slow].concat());
    let shorter = |s: &Value| number(s, "interval_ns") < 5000 * MS && why(s).contains("more often");
    wait_for_status(&bench, &mut run, "a shorter interval, with the reason", shorter);
    run.wait_for_error("so checkpoints are taken more often");
    stop(&bench, &mut run);
}

#[test]
fn a_pause_that_cannot_be_kept_is_said_to_be_so_and_checkpoints_go_on_as_asked() {
    let bench = Bench::alone();
    let mut run = start(&bench, &heavy(), &["--interval", "300ms", "--max-pause", "1us"]);
    let impossible = |s: &Value| why(s).contains("more than was asked for");
    let status = wait_for_status(&bench, &mut run, "that it is impossible", impossible);
    assert_eq!(number(&status, "interval_ns"), 300 * MS, "{status}");
    run.wait_for_error("without copying a page, which is more than was asked for");
    let text = bench.ok(&["status", "--name", "guest"]);
    assert!(text.contains("budget") && text.contains("more than was asked for"), "{text}");
    let sealed = number(&status, "sealed");
    wait_for_status(&bench, &mut run, "further checkpoints", |s| number(s, "sealed") >= sealed + 2);
    // Said once, not at each checkpoint.
    assert_eq!(run.errors().matches("more than was asked for").count(), 1, "{}", run.report());
    stop(&bench, &mut run);
}

#[test]
fn budgets_that_hold_change_nothing_and_without_one_there_is_nothing_to_report() {
    for (options, reported) in
        [(&["--max-pause", "10s", "--max-overhead", "100%"][..], true), (&[], false)]
    {
        let bench = Bench::alone();
        let light = Boot::new("dirty kf.rate=200 kf.mib=16");
        let mut run = start(&bench, &light, &[&["--interval", "500ms"], options].concat());
        let status = wait_for_status(&bench, &mut run, "checkpoints", |s| number(s, "sealed") >= 3);
        assert_eq!(number(&status, "interval_ns"), 500 * MS, "{status}");
        assert_eq!(status["tuned"].as_str(), reported.then_some("as asked"), "{status}");
        stop(&bench, &mut run);
        assert!(!run.errors().contains("as asked"), "nothing has changed: {}", run.report());
    }
}

#[test]
fn budgets_that_make_no_sense_are_refused() {
    let bench = Bench::alone();
    let store = bench.store();
    let line = heavy().command();
    let refused = |options: &[&str], code: i32, words: &[&str]| {
        let mut args = [&["run", "--store", &store, "--name", "guest"], options, &["--"]].concat();
        args.extend(line.iter().map(String::as_str));
        bench.refused(&args, code, words);
    };
    refused(&["--max-pause", "0s"], 2, &["--max-pause", "more than 0"]);
    refused(&["--max-overhead", "101%"], 2, &["--max-overhead", "at most 100%"]);
    refused(&["--max-overhead", "little"], 2, &["write 3% or 0.03"]);
    for budget in [["--max-pause", "5ms"], ["--max-overhead", "3%"]] {
        refused(&[&["--interval", "none"], &budget[..]].concat(), 1, &["--interval none", "fix:"]);
    }
    // Nor does a VM stay behind whose engine could not be made: that it holds standard error open
    // would be seen here.
    refused(&["--audit", "/proc/no/where"], 1, &["/proc/no/where"]);
    assert!(bench.list().is_empty());
}
