//! `keyframe doctor --self-test`: is Keyframe exact on this machine?

use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use keyframe_qemu::{Accelerator, QemuIdentity, probe::processor};
use keyframe_self_test::SelfTest;

/// Runs the self-test and prints its table and verdict.
pub fn run(qemu: &str, accelerator: Accelerator, json: bool) -> Outcome {
    let identity = QemuIdentity::named(qemu).map_err(|e| Failure::qemu(&e))?;
    let processor = processor(&identity.path).map_err(|e| Failure::qemu(&e))?;
    let program = std::env::current_exe()
        .map_err(|e| Failure::new(format!("find this program's own file: {e}")))?;
    let interrupted = keyframe_session::interrupt::interruption()?;
    // The VMs of the test start in directories of their own.
    let qemu = if qemu.contains('/') { identity.path.display().to_string() } else { qemu.into() };
    let version = identity.version;
    let interrupted = &interrupted;
    let test = SelfTest { program, qemu, processor, version, accelerator, interrupted };
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
