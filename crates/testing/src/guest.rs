//! Guests and programs that tests need.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the small guest's directory: `KEYFRAME_GUEST`, or the one that `guests/build small`
/// makes.
pub fn small_guest() -> PathBuf {
    std::env::var_os("KEYFRAME_GUEST")
        .filter(|dir| !dir.is_empty())
        .map_or_else(|| build_guest("small"), PathBuf::from)
}

/// Runs `guests/build NAME` and returns the directory that it made.
///
/// # Panics
/// If the build fails.
pub fn build_guest(name: &str) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/build");
    let output = Command::new(&script).arg(name).output().expect("run guests/build");
    let (stdout, stderr) =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).into();
    assert!(output.status.success(), "guests/build {name}: {stderr}");
    PathBuf::from(stdout.lines().last().expect("a directory"))
}

/// Returns true if `PATH` has this program.
pub fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}
