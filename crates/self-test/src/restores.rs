//! A checkpoint comes back by each way. A checkpoint of the VM that came back must equal it.

use crate::check::Check;
use crate::guest::{Backing, Guest, passes};
use crate::program::{Program, Running};
use serde_json::Value;
use std::path::Path;

/// RAM that clones and lazy restores can share.
const SHARED_RAM: Backing =
    Backing { name: "shared memfd", object: Some("memory-backend-memfd"), options: ",share=on" };

/// A way back: returns what it found exact, or what went wrong.
type Way = fn(&Program<'_>) -> Result<String, String>;

/// Runs the checks.
pub(crate) fn run(program: &Program<'_>, guest: &Guest<'_>, on_check: &dyn Fn(Check)) {
    let first = Check::run("restore", "rollback in place", || rollback(program, guest));
    let can_go_on = program.json(&["show", "--store", "R", "base", "--json"]).is_ok();
    on_check(first);
    let ways: [(&str, Way); 4] = [
        ("eager", |program| restored(program, &[])),
        ("lazy", |program| restored(program, &["--lazy"])),
        ("branch", branched),
        ("running on", runs_on),
    ];
    for (name, way) in ways {
        on_check(if can_go_on {
            Check::run("restore", name, || way(program))
        } else {
            Check::skipped("restore", name, "no checkpoint was taken")
        });
    }
}

/// Takes the checkpoint `base`, runs on, and rolls the VM back to it.
fn rollback(program: &Program<'_>, guest: &Guest<'_>) -> Result<String, String> {
    program.ok(&["init", "R"])?;
    let console = program.path_of("base.log");
    let command = guest.command(&console, &SHARED_RAM);
    let mut words = vec!["run", "--store", "R", "--name", "base", "--interval", "none", "--"];
    words.extend(command.iter().map(String::as_str));
    let mut run = program.start("base", &words)?;
    wait_for_passes(&mut run, &console, 3)?;
    program.ok(&["take", "--name", "base", "--tag", "base"])?;
    let before = passes(&console)?;
    wait_for_passes(&mut run, &console, before + 3)?;
    program.ok(&["rollback", "base", "--name", "base"])?;
    let same = equals_base(program)?;
    let before = passes(&console)?;
    wait_for_passes(&mut run, &console, before + 3)?;
    program.ok(&["stop", "--name", "base"])?;
    drop(run);
    passes(&console)?;
    Ok(same)
}

/// Restores `base`, paused, and compares a checkpoint of it.
fn restored(program: &Program<'_>, options: &[&str]) -> Result<String, String> {
    let mut words = vec!["restore", "--store", "R", "base", "--paused"];
    words.extend(options);
    words.extend(["--", "-serial", "file:restored.log", "-qmp", "unix:q,server=on,wait=off"]);
    let mut restore = program.start("restore", &words)?;
    let pid =
        restore.wait_until("the VM was restored", |restore| Ok(qemu_pid(&restore.errors())))?;
    if options.contains(&"--lazy") {
        restore.wait_until("all pages were there", |restore| {
            Ok(restore.errors().contains("all of its RAM").then_some(()))
        })?;
    }
    compared(program, "q", pid)
}

/// Branches `base`, and compares a checkpoint of the clone.
fn branched(program: &Program<'_>) -> Result<String, String> {
    let words = ["branch", "--store", "R", "base", "--paused", "--json", "--name", "clone"];
    let mut branch = program.start("branch", &words)?;
    let clones: Vec<Value> = branch.wait_until("the clone was there", |branch| {
        Ok(serde_json::from_str(&branch.output()).ok())
    })?;
    let clone = clones.first().ok_or("keyframe branch made no clone")?;
    let monitor = clone["monitor"].as_str().ok_or("keyframe branch names no monitor")?;
    let pid = clone["qemu_pid"].as_u64().ok_or("keyframe branch names no QEMU")?;
    compared(program, monitor, pid)
}

/// Restores `base` and lets it run: the guest checks itself.
fn runs_on(program: &Program<'_>) -> Result<String, String> {
    let words = ["restore", "--store", "R", "base", "--", "-serial", "file:on.log"];
    let mut restore = program.start("restore", &words)?;
    let console = program.path_of("on.log");
    restore.wait_until("the VM was restored", |restore| Ok(qemu_pid(&restore.errors())))?;
    let made = wait_for_passes(&mut restore, &console, 5)?;
    Ok(format!("the guest has checked itself in {made} passes"))
}

/// Takes a checkpoint of the paused QEMU `pid` and compares it with `base`.
fn compared(program: &Program<'_>, monitor: &str, pid: u64) -> Result<String, String> {
    let pid = pid.to_string();
    let words = ["attach", "--store", "R", "--name", "again", "--interval", "none"];
    let words = [&words[..], &["--qmp", monitor, &pid]].concat();
    let mut attach = program.start("attach", &words)?;
    attach.wait_until("the engine was there", |_| {
        Ok(program.ok(&["take", "--name", "again"]).ok())
    })?;
    drop(attach);
    equals_base(program)
}

/// Compares the newest checkpoint with `base`: no page may differ.
fn equals_base(program: &Program<'_>) -> Result<String, String> {
    let diff = program.json(&["diff", "--store", "R", "base", "latest", "--json", "--quiet"])?;
    if diff["first"] == diff["second"] {
        return Err("no checkpoint was taken of the VM that came back".into());
    }
    let blocks = diff["ram"].as_array().ok_or("keyframe diff names no RAM block")?;
    let sum = |key: &str| -> u64 { blocks.iter().filter_map(|block| block[key].as_u64()).sum() };
    let differing = ["changed_pages", "from_zero_pages", "to_zero_pages"];
    let lone = ["only_first_pages", "only_second_pages", "unknown_pages"];
    let differing: u64 = differing.iter().chain(&lone).map(|key| sum(key)).sum();
    match (sum("pages"), differing) {
        (0, _) => Err("keyframe diff compared no page".into()),
        (pages, 0) => Ok(format!("0 of {pages} pages differ")),
        (pages, differing) => Err(format!("{differing} of {pages} pages differ")),
    }
}

/// The process id in `(QEMU 123)`.
fn qemu_pid(errors: &str) -> Option<u64> {
    errors.rsplit_once("(QEMU ")?.1.split_once(')')?.0.parse().ok()
}

/// Waits until the guest has made `count` passes, and returns their number.
pub(crate) fn wait_for_passes(
    run: &mut Running<'_>,
    console: &Path,
    count: usize,
) -> Result<usize, String> {
    run.wait_until("the guest had made its passes", |_| {
        if !console.exists() {
            return Ok(None);
        }
        Ok(Some(passes(console)?).filter(|made| *made >= count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_scratch_directory::ScratchDirectory;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::AtomicBool;

    /// What the comparison makes of this answer of `keyframe diff`.
    fn compared_by(answer: &str) -> Result<String, String> {
        let scratch = ScratchDirectory::new("self-test").unwrap();
        let script = scratch.path().join("keyframe");
        std::fs::write(&script, format!("#!/bin/sh\necho '{answer}'\n")).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o700)).unwrap();
        let interrupted = AtomicBool::new(false);
        let directory = scratch.path().to_owned();
        equals_base(&Program { path: &script, directory, interrupted: &interrupted })
    }

    #[test]
    fn each_difference_is_found() {
        let of = |block: &str| {
            compared_by(&format!(r#"{{"first":1,"second":2,"ram":[{{"pages":5}},{{{block}}}]}}"#))
        };
        assert_eq!(of(r#""pages":7,"changed_pages":0"#).unwrap(), "0 of 12 pages differ");
        for key in ["changed", "from_zero", "to_zero", "only_first", "only_second", "unknown"] {
            let problem = of(&format!(r#""pages":7,"{key}_pages":1"#)).unwrap_err();
            assert_eq!(problem, "1 of 12 pages differ", "{key}");
        }
        assert!(compared_by(r#"{"first":1,"second":1,"ram":[{"pages":5}]}"#).is_err());
        assert!(compared_by(r#"{"first":1,"second":2,"ram":[]}"#).is_err());
        assert!(compared_by("nonsense").is_err());
    }

    #[test]
    fn the_process_of_a_restored_vm_is_found() {
        assert_eq!(qemu_pid("keyframe: checkpoint 1 is paused (QEMU 77)\n"), Some(77));
        assert_eq!(qemu_pid("keyframe: a note"), None);
    }
}
