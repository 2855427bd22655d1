//! Golden files: the expected text of a test, kept beside it.

use std::error::Error;
use std::fmt::Write;
use std::path::Path;

/// Compares `actual` with the golden file at `path`. If `KEYFRAME_BLESS` is 1, writes the file
/// instead.
///
/// # Panics
///
/// If the texts differ, with the first different line.
#[track_caller]
pub fn assert_golden(path: impl AsRef<Path>, actual: &str) {
    let path = path.as_ref();
    if std::env::var_os("KEYFRAME_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(path, actual)
            .unwrap_or_else(|e| panic!("cannot write {}: {e}", path.display()));
        return;
    }
    let expected = std::fs::read_to_string(path).unwrap_or_default();
    if expected == actual {
        return;
    }
    let differs = |(expected, actual): &(&str, &str)| expected != actual;
    let line = expected.lines().zip(actual.lines()).position(|pair| differs(&pair));
    let line = line.unwrap_or_else(|| expected.lines().count().min(actual.lines().count()));
    panic!(
        "{} differs from line {} on (KEYFRAME_BLESS=1 writes it):\n  golden: {}\n  actual: {}",
        path.display(),
        line + 1,
        expected.lines().nth(line).unwrap_or("(end)"),
        actual.lines().nth(line).unwrap_or("(end)"),
    );
}

/// Returns the text of an error for a golden file: its message, its causes and its fix, a line
/// each.
pub fn error_text(error: &dyn Error, fix: Option<String>) -> String {
    let mut text = format!("{error}\n");
    let mut cause = error.source();
    while let Some(one) = cause {
        let _ = writeln!(text, "  cause: {one}");
        cause = one.source();
    }
    if let Some(fix) = fix {
        let _ = writeln!(text, "  fix: {fix}");
    }
    text
}
