//! The kinds of failures, by names that programs can rely on.

use super::{Failure, LOCKED, NO_STORE, USAGE};
use keyframe_session::Error;
use keyframe_session::error::RunDirError;
use serde::Serialize;
use std::fmt::Write as _;

/// What kind of failure ended a command. `keyframe help scripting` lists the names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// None of the others.
    #[default]
    Failed,
    /// The command line is wrong.
    Usage,
    /// There is no store at the place.
    NoStore,
    /// Another process writes to the store.
    StoreLocked,
    /// The store is damaged.
    StoreDamaged,
    /// The medium of the store has no space left.
    StoreFull,
    /// The store has no such checkpoint.
    UnknownCheckpoint,
    /// The checkpoint is pinned, or a run needs it.
    CheckpointInUse,
    /// No such VM runs.
    NoVm,
    /// Several VMs run, and none was named.
    SeveralVms,
    /// Another VM has the name.
    NameTaken,
    /// The VM cannot be checkpointed exactly.
    NotCheckpointable,
    /// The VM's hypervisor or its driver cannot do that.
    Unsupported,
}

impl FailureKind {
    /// The kind of a store's error.
    pub fn of_store(error: &keyframe_store::Error) -> Self {
        use keyframe_store::Error;
        match error {
            Error::NoStore { .. } => Self::NoStore,
            Error::Locked { .. } => Self::StoreLocked,
            Error::Damaged { .. } => Self::StoreDamaged,
            Error::UnknownCheckpoint { .. } | Error::UnknownTag { .. } => Self::UnknownCheckpoint,
            Error::Pinned { .. } | Error::InUse { .. } => Self::CheckpointInUse,
            error if error.is_disk_full() => Self::StoreFull,
            _ => Self::Failed,
        }
    }

    /// The kind of a session's error.
    pub fn of_session(error: &Error) -> Self {
        match error {
            Error::Store { source, .. } => Self::of_store(source),
            Error::RunDir(error) => Self::of_run_dir(error),
            Error::NotCheckpointable(_) => Self::NotCheckpointable,
            Error::Unsupported(_) => Self::Unsupported,
            Error::OfMember { source, .. } => Self::of_session(source),
            _ => Self::Failed,
        }
    }

    fn of_run_dir(error: &RunDirError) -> Self {
        match error {
            RunDirError::NameRuns(_) | RunDirError::NameLeft(_) => Self::NameTaken,
            RunDirError::Unknown { .. }
            | RunDirError::NotOfStore { .. }
            | RunDirError::NothingRuns
            | RunDirError::Gone(_) => Self::NoVm,
            RunDirError::Several { .. } => Self::SeveralVms,
            _ => Self::Failed,
        }
    }
}

/// A failure as a command with `--json` prints it.
#[derive(Serialize)]
struct Report<'a> {
    error: ErrorReport<'a>,
}

#[derive(Serialize)]
struct ErrorReport<'a> {
    kind: FailureKind,
    message: &'a str,
    fix: Option<&'a str>,
}

impl Failure {
    /// Returns the kind. An exit code of its own tells it, too.
    pub fn kind(&self) -> FailureKind {
        match self.code {
            USAGE => FailureKind::Usage,
            NO_STORE => FailureKind::NoStore,
            LOCKED => FailureKind::StoreLocked,
            _ => self.kind,
        }
    }

    /// Sets the kind.
    #[must_use]
    pub fn of_kind(mut self, kind: FailureKind) -> Self {
        self.kind = kind;
        self
    }

    /// Returns the failure as one line of JSON: `{"error": {"kind", "message", "fix"}}`.
    pub fn json(&self) -> String {
        let (kind, message, fix) = (self.kind(), &*self.message, self.fix.as_deref());
        let report = Report { error: ErrorReport { kind, message, fix } };
        serde_json::to_string(&report).unwrap_or_else(|_| {
            let mut text = String::new();
            let _ = write!(text, "{self}");
            text
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::FAILED;

    #[test]
    fn a_failure_is_one_line_with_a_kind() {
        let failure: Failure = RunDirError::NameRuns("web".into()).into();
        assert_eq!((failure.code, failure.kind()), (FAILED, FailureKind::NameTaken));
        assert_eq!(
            failure.json(),
            r#"{"error":{"kind":"name_taken","message":"a VM named web is running under Keyframe already","fix":"give this one another name: --name NAME"}}"#
        );
        let plain = Failure::new("two\nlines");
        assert_eq!(
            plain.json(),
            r#"{"error":{"kind":"failed","message":"two\nlines","fix":null}}"#
        );
        assert_eq!(Failure { code: USAGE, ..plain }.kind(), FailureKind::Usage);
    }
}
