//! Asks a QEMU binary which version its record/replay log has.
//!
//! A log gets its version when QEMU ends in good order. So a QEMU with an empty machine, whose
//! guest never runs, records until it is told to quit.

use crate::{Error, Result};
use keyframe_scratch_directory::ScratchDirectory;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long this QEMU may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often its end is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Returns the first four bytes of the logs that the binary at `path` writes, as a big-endian
/// number.
///
/// Errors: [`Error::Binary`] if it writes no log, as a QEMU that was built without TCG; the binary
/// cannot be run.
pub fn log_version(path: &Path) -> Result<u32> {
    let operation = || format!("run {} to look at its log", path.display());
    let scratch = ScratchDirectory::new("log-probe").map_err(Error::io(operation()))?;
    let log = scratch.path().join("log");
    let mut child = Command::new(path)
        .args(["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S"])
        .args(["-accel", "tcg", "-monitor", "stdio", "-icount"])
        .arg(format!("shift=0,rr=record,rrfile={}", log.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(Error::io(operation()))?;
    if let Some(mut monitor) = child.stdin.take() {
        // A QEMU that has ended already is noticed below.
        let _ = monitor.write_all(b"quit\n");
    }
    let began = Instant::now();
    while began.elapsed() < TIMEOUT && matches!(child.try_wait(), Ok(None)) {
        std::thread::sleep(LOOK_EVERY);
    }
    // Killing a child that has ended does nothing.
    let _ = child.kill();
    child.wait().map_err(Error::io(operation()))?;
    let header = std::fs::read(&log).unwrap_or_default();
    match header.first_chunk() {
        Some(version) if *version != [0; 4] => Ok(u32::from_be_bytes(*version)),
        _ => Err(Error::Binary {
            path: path.into(),
            reason: "it does not record: it writes no log of a run".into(),
            fix: "name a QEMU that has TCG, as those of distributions have".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_installed_qemu_has_a_log_and_another_program_has_none() {
        let found = crate::QemuIdentity::named("qemu-system-x86_64").unwrap();
        assert_eq!(log_version(&found.path).unwrap() >> 8, 0xe020);
        let refused = log_version(Path::new("/bin/true")).unwrap_err();
        assert!(refused.to_string().contains("does not record"), "{refused}");
    }
}
