//! Checks, their outcomes, and the report.

use crate::SelfTest;
use keyframe_units::elapsed_ns;
use serde::Serialize;
use std::fmt;
use std::time::Instant;

/// The outcome of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome", content = "detail")]
pub enum CheckOutcome {
    /// What was found to be exact.
    Exact(String),
    /// What differs, or which step failed.
    Failed(String),
    /// Why it could not run here.
    Skipped(String),
}

/// One check of the self-test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What is checked: `capture`, `restore` or `recording`.
    pub area: &'static str,
    /// Its name within the area.
    pub name: String,
    /// Its outcome.
    #[serde(flatten)]
    pub outcome: CheckOutcome,
    /// Its duration, in nanoseconds.
    pub duration_ns: u64,
}

impl Check {
    /// Runs a check. `body` returns what it found exact, or what went wrong.
    pub(crate) fn run(
        area: &'static str,
        name: impl Into<String>,
        body: impl FnOnce() -> Result<String, String>,
    ) -> Self {
        let began = Instant::now();
        let outcome = match body() {
            Ok(found) => CheckOutcome::Exact(found),
            Err(problem) => CheckOutcome::Failed(problem),
        };
        Self { area, name: name.into(), outcome, duration_ns: elapsed_ns(began) }
    }

    /// Makes a check that cannot run here, for `reason`.
    pub(crate) fn skipped(
        area: &'static str,
        name: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        let outcome = CheckOutcome::Skipped(reason.into());
        Self { area, name: name.into(), outcome, duration_ns: 0 }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mark, detail) = match &self.outcome {
            CheckOutcome::Exact(detail) => ("ok", detail),
            CheckOutcome::Failed(detail) => ("FAILED", detail),
            CheckOutcome::Skipped(detail) => ("skipped", detail),
        };
        let seconds = self.duration_ns as f64 / 1e9;
        write!(f, "{mark:<8} {:<10} {:<29} {seconds:>5.1} s  {detail}", self.area, self.name)
    }
}

/// The report of a self-test.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The QEMU, as the user named it.
    pub qemu: String,
    /// Its version.
    pub version: String,
    /// The accelerator: `kvm` or `tcg`.
    pub accelerator: String,
    /// True if no check failed and at least one ran.
    pub exact: bool,
    /// All checks, in the order of their ends.
    pub checks: Vec<Check>,
}

impl Report {
    pub(crate) fn new(test: &SelfTest<'_>, checks: Vec<Check>) -> Self {
        let exact = is_exact(&checks);
        let (qemu, version) = (test.qemu.clone(), test.version.clone());
        Self { qemu, version, accelerator: test.accelerator.to_string(), exact, checks }
    }

    /// Returns the verdict, as a line for people.
    pub fn verdict(&self) -> String {
        let Self { version, accelerator, .. } = self;
        if self.exact {
            format!("exact: Keyframe works here with QEMU {version} under {accelerator}")
        } else {
            format!(
                "NOT EXACT with QEMU {version} under {accelerator}: see the lines marked FAILED"
            )
        }
    }
}

/// True if no check failed and at least one ran.
fn is_exact(checks: &[Check]) -> bool {
    let failed = |check: &Check| matches!(check.outcome, CheckOutcome::Failed(_));
    let exact = |check: &Check| matches!(check.outcome, CheckOutcome::Exact(_));
    checks.iter().any(exact) && !checks.iter().any(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_report_with_exact_checks_and_without_failed_ones_is_exact() {
        let exact = || Check::run("capture", "a", || Ok("5 checkpoints".into()));
        let failed = || Check::run("capture", "b", || Err("1 page differs".into()));
        let skipped = || Check::skipped("capture", "c", "no huge pages");
        assert!(is_exact(&[exact(), skipped()]));
        assert!(!is_exact(&[exact(), failed()]));
        assert!(!is_exact(&[skipped()]));
        assert!(!is_exact(&[]));
        let json = serde_json::to_value(failed()).unwrap();
        assert_eq!(
            (&json["outcome"], &json["detail"]),
            (&"failed".into(), &"1 page differs".into())
        );
    }
}
