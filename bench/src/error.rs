//! Errors of benchmarks.

use std::path::PathBuf;

/// Why a benchmark has no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation that the benchmark needs failed.
    #[error(transparent)]
    Operation(#[from] keyframe_bench_feed::Error),
    /// A command to QEMU's monitor failed.
    #[error("{operation}: {source}")]
    Qmp {
        /// The operation.
        operation: String,
        /// The cause.
        source: keyframe_qemu::Error,
    },
    /// A request to Firecracker failed.
    #[error("{operation}: {source}")]
    Firecracker {
        /// The operation.
        operation: String,
        /// The cause.
        source: keyframe_firecracker::Error,
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
    /// A measurement of `evaluation` was made with something else than this call would use.
    #[error("{path} was measured with another {property}: it has {there}, expected {here}", path = path.display())]
    OtherMeasurement {
        /// The measurement's file.
        path: PathBuf,
        /// What differs.
        property: &'static str,
        /// Its value in the file.
        there: String,
        /// The expected value.
        here: String,
    },
    /// A file in the directory of the measurements of `evaluation` is not a measurement.
    #[error("{path} is not a measurement: {problem}", path = path.display())]
    BadMeasurement {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
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
        /// The guest's name: the argument of `guests/build`.
        guest: &'static str,
        /// The missing file.
        problem: String,
    },
}

impl Error {
    /// Returns what the user can do about it, if that is known.
    pub fn fix(&self) -> Option<&'static str> {
        match self {
            Self::NoGuest { guest: "firecracker", .. } => Some(
                "get it with guests/build firecracker in the project's directory, and name its \
                 directory with --firecracker-guest or KEYFRAME_FIRECRACKER_GUEST",
            ),
            Self::NoGuest { guest: "payload", .. } => Some(
                "build it with guests/build payload in the project's directory, and run the \
                 benchmark there",
            ),
            Self::NoGuest { .. } => Some(
                "build it with guests/build in the project's directory, and name its directory with \
                 --guest or KEYFRAME_GUEST",
            ),
            Self::NoPeers { .. } => {
                Some("run make bench-peers in the project's directory, and the benchmark there too")
            }
            Self::OtherMeasurement { .. } => Some(
                "use another directory with --out, or remove the directory measurements in it to \
                 measure all again",
            ),
            Self::BadMeasurement { .. } => {
                Some("remove the file to measure again, or name another directory with --out")
            }
            _ => None,
        }
    }

    /// Makes an error of an operation from the text of its cause.
    pub fn failed(operation: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        keyframe_bench_feed::Error::failed(operation, problem).into()
    }

    /// Makes an error of a system call, for `map_err`.
    pub fn io(operation: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let make = keyframe_bench_feed::Error::io(operation);
        move |source| make(source).into()
    }

    /// Makes an error of a request to Firecracker, for `map_err`.
    pub fn firecracker(
        operation: impl Into<String>,
    ) -> impl FnOnce(keyframe_firecracker::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Firecracker { operation, source }
    }

    /// Makes an error of a command to QEMU's monitor, for `map_err`.
    pub fn qmp(operation: impl Into<String>) -> impl FnOnce(keyframe_qemu::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Qmp { operation, source }
    }
}
