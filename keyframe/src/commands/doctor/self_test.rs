//! `keyframe doctor --self-test`: is Keyframe exact on this machine?

use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use keyframe_qemu::Accelerator;
use keyframe_self_test::SelfTest;

/// Runs the self-test and prints its table and verdict.
pub fn run(qemu: &str, accelerator: Accelerator, json: bool) -> Outcome {
    let version = keyframe_qemu::QemuIdentity::named(qemu).map_err(|e| Failure::qemu(&e))?.version;
    let program = std::env::current_exe()
        .map_err(|e| Failure::new(format!("find this program's own file: {e}")))?;
    let interrupted = keyframe_session::interrupt::interruption()?;
    let test =
        SelfTest { program, qemu: qemu.into(), version, accelerator, interrupted: &interrupted };
    let mut printed = Ok(());
    let report = test.run(&mut |check| {
        if !json && printed.is_ok() {
            printed = output::print_line(&check.to_string());
        }
    });
    let report = report.map_err(|e| Failure::new(crate::failure::chain(&e)))?;
    printed?;
    if json {
        output::json(&report)?;
    } else {
        output::print_line(&report.verdict())?;
    }
    Ok(if report.exact { DONE } else { FAILED })
}
