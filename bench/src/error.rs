//! Errors of benchmarks.

/// Why a benchmark has no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation that the benchmark needs failed.
    #[error("{operation}: {problem}")]
    Failed {
        /// The operation.
        operation: String,
        /// The cause.
        problem: String,
    },
    /// A file or process operation failed.
    #[error("{operation}: {source}")]
    Io {
        /// The operation.
        operation: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A command to QEMU's monitor failed.
    #[error("{operation}: {source}")]
    Qmp {
        /// The operation.
        operation: String,
        /// The cause.
        source: keyframe_qemu::Error,
    },
    /// `--only` names a part that the benchmark does not have.
    #[error("{benchmark} has no part {part}: its parts are {parts}")]
    NoPart {
        /// The benchmark.
        benchmark: &'static str,
        /// The unknown part.
        part: String,
        /// The known parts, separated by commas.
        parts: String,
    },
    /// The benchmark does not have an option that was set.
    #[error("{benchmark} has no {option}")]
    NoOption {
        /// The benchmark.
        benchmark: &'static str,
        /// The option.
        option: &'static str,
    },
    /// The program that drives the databases is missing.
    #[error("the databases are not built: {problem}")]
    NoPeers {
        /// The missing file.
        problem: String,
    },
    /// A file of a guest is missing.
    #[error("the {guest} guest is not built: {problem}")]
    NoGuest {
        /// `small` or `real`.
        guest: &'static str,
        /// The missing file.
        problem: String,
    },
}

impl Error {
    /// Returns what the user can do about it, if that is known.
    pub fn fix(&self) -> Option<&'static str> {
        match self {
            Self::NoGuest { .. } => Some(
                "build it with guests/build in the project's directory, and name its directory with \
                 --guest or KEYFRAME_GUEST",
            ),
            Self::NoPeers { .. } => {
                Some("run make bench-peers in the project's directory, and the benchmark there too")
            }
            _ => None,
        }
    }

    pub fn failed(operation: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        Self::Failed { operation: operation.into(), problem: problem.to_string() }
    }

    pub fn io(operation: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }

    pub fn qmp(operation: impl Into<String>) -> impl FnOnce(keyframe_qemu::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Qmp { operation, source }
    }
}
