//! A recording of the guest: it replays exactly, and intervals analysed apart give what one replay
//! gives.

use crate::check::Check;
use crate::guest::{DEFAULT_RAM, Guest};
use crate::program::Program;
use crate::restores::wait_for_passes;
use keyframe_machine::Accelerator;

/// The passes of the recorded guest.
const PASSES: usize = 40;

/// Runs the checks.
pub(crate) fn run(program: &Program<'_>, guest: &Guest<'_>, on_check: &dyn Fn(Check)) {
    const NAMES: [&str; 2] = ["record and verify", "analyze"];
    if guest.accelerator == Accelerator::Kvm {
        for name in NAMES {
            let reason = "QEMU records under TCG alone: --accel tcg";
            on_check(Check::skipped("recording", name, reason));
        }
        return;
    }
    on_check(Check::run("recording", NAMES[0], || recorded(program, guest)));
    on_check(if program.path_of("REC/recording.json").exists() {
        Check::run("recording", NAMES[1], || analysed(program))
    } else {
        Check::skipped("recording", NAMES[1], "nothing was recorded")
    });
}

/// Records the guest with checkpoints, and verifies each interval.
fn recorded(program: &Program<'_>, guest: &Guest<'_>) -> Result<String, String> {
    let console = program.path_of("record.log");
    let command = guest.command(&console, &DEFAULT_RAM);
    let mut words = vec!["record", "--out", "REC", "--checkpoint-every", "500ms", "--"];
    words.extend(command.iter().map(String::as_str));
    let mut record = program.start("record", &words)?;
    wait_for_passes(&mut record, &console, PASSES)?;
    record.end()?;
    let report = program.json(&["verify", "REC", "--json", "--quiet"])?;
    let intervals = report["intervals"].as_array().map_or(0, Vec::len);
    if report["exact"] != true || intervals == 0 {
        return Err(format!("keyframe verify REC: not exact: {report}"));
    }
    Ok(format!("{intervals} intervals replay exactly"))
}

/// Counts instructions in two jobs, and compares with one replay.
fn analysed(program: &Program<'_>) -> Result<String, String> {
    let words = ["analyze", "REC", "--tool", "icount", "--out", "OUT", "--jobs", "2"];
    program.ok(&[&words[..], &["--check-sequential", "--quiet"]].concat())?;
    Ok("two jobs give what one replay gives".into())
}
