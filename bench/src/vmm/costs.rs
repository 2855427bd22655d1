//! What a checkpoint, or a VMM's own snapshot, costs: the parts of its pause, and its size.

use super::rows::{Rows, Vm};
use crate::Error;
use crate::keyframe_json::number;
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Adds the parts of a checkpoint's pause.
pub fn push_pause_parts(vm: Vm, checkpoint: &Value, rows: &mut Rows) -> Result<(), Error> {
    for (part, measure) in [
        ("stop", "pause_stop_ns"),
        ("device_state", "pause_device_state_ns"),
        ("scan", "pause_scan_ns"),
        ("copy", "pause_copy_ns"),
        ("resume", "pause_resume_ns"),
    ] {
        rows.push(vm, measure, number(&checkpoint["pause"], part)?);
    }
    Ok(())
}

/// Returns what a checkpoint takes in the store: pages, map and device state.
pub fn stored_bytes(checkpoint: &Value) -> Result<f64, Error> {
    let parts = ["stored_bytes", "map_bytes", "device_bytes"];
    parts.iter().map(|key| number(checkpoint, key)).sum()
}

/// Returns the bytes that a file takes, without its holes.
pub fn allocated_bytes(file: &Path) -> Result<f64, Error> {
    let about = file.metadata().map_err(Error::io(format!("look at {}", file.display())))?;
    Ok(about.blocks() as f64 * 512.0)
}
