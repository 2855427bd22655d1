//! Ends the VMs that a `keyframe` that died has left.
//!
//! A VM survives the death of its engine. A guest of the self-test serves no other purpose, so it is
//! ended. Its command line names the scratch directory of the self-test.

use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;

/// Ends all processes whose command line names the scratch directory `scratch`.
pub(crate) fn end(scratch: &Path) {
    let Ok(processes) = std::fs::read_dir("/proc") else { return };
    let scratch = scratch.as_os_str().as_encoded_bytes();
    for process in processes.flatten() {
        let pid = process.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        if line.windows(scratch.len()).any(|part| part == scratch) {
            // It may have ended.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}
