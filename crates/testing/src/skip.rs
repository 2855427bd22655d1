//! Skips that are counted.
//!
//! The test runner of Rust cannot skip a test that already runs: the test returns, and the runner
//! counts it as passed. So each skip is also a line in the file that `KEYFRAME_TEST_SKIPS` names:
//! program, test, scope and reason, with tabs between them. `scripts/count-tests` reads the file.

use std::fmt::Display;
use std::io::Write;
use std::path::Path;

/// The part of the running test that is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The test does not run its subject. It counts as skipped.
    Test,
    /// The test runs without one of its parts, such as a QEMU version. It counts as passed, and the
    /// reason is listed.
    Part,
}

/// Skips the running test: records the reason, a format string with its arguments, and returns
/// from the function. Use it in the test's own function; a helper calls [`record_skip`] and tells
/// its caller.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)+) => {{
        $crate::record_skip($crate::Scope::Test, ::std::format!($($reason)+));
        return;
    }};
}

/// Records that the running test, or a part of it, is skipped for `reason`. Call it on the
/// test's own thread, whose name is the test's.
pub fn record_skip(scope: Scope, reason: impl Display) {
    // The file has one skip a line.
    let reason = reason.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    let what = match scope {
        Scope::Test => "test",
        Scope::Part => "part",
    };
    println!("skipped {what}: {reason}");
    let Some(file) = std::env::var_os("KEYFRAME_TEST_SKIPS") else { return };
    let program = std::env::current_exe().ok();
    let program = program.as_deref().and_then(Path::file_name).unwrap_or_default();
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("unknown test");
    let line = format!("{}\t{test}\t{what}\t{reason}\n", program.display());
    // One write, so that lines of two programs do not mix.
    std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(&file)
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}
