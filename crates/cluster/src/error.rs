//! The errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a queue or its workers.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// The operation that failed, as a verb such as "read".
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A program of Slurm's is missing or cannot be run.
    #[error("cannot run {program}")]
    NoProgram {
        /// The program's name.
        program: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A program of Slurm's took too long.
    #[error("{program} did not answer within {seconds} s")]
    TimedOut {
        /// The program's name.
        program: &'static str,
        /// The time limit, in seconds.
        seconds: u64,
    },
    /// A program of Slurm's failed.
    #[error("{program}: {message}")]
    Refused {
        /// The program's name.
        program: &'static str,
        /// Its error output.
        message: String,
    },
    /// A program of Slurm's gave an answer that cannot be parsed.
    #[error("unexpected answer of {program}: {message}")]
    Answer {
        /// The program's name.
        program: &'static str,
        /// What is wrong with the answer.
        message: String,
    },
    /// The source of items failed.
    #[error("{0}")]
    Source(String),
    /// `--on` names an unknown runner.
    #[error("unknown runner {0:?}")]
    UnknownRunner(String),
    /// Several rounds of pilots ended without settling an item.
    #[error("all pilots ended {rounds} times without finishing an interval; {last}")]
    NoProgress {
        /// The number of these rounds.
        rounds: u32,
        /// The state of the last pilot, and the end of its log.
        last: String,
    },
}

impl Error {
    /// Turns an I/O error into [`Error::Io`].
    pub(crate) fn io(
        operation: &'static str,
        path: &Path,
    ) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { operation, path, source }
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NoProgram { source, .. } if source.kind() == io::ErrorKind::NotFound => Some(
                "run it on a host that can submit jobs (Debian: apt-get install \
                     slurm-client), or without --on slurm"
                    .into(),
            ),
            Self::TimedOut { .. } => Some("check that slurmctld runs: scontrol ping".into()),
            Self::Refused { .. } => {
                Some("check the partitions (sinfo) and your account's limits (sacctmgr)".into())
            }
            Self::UnknownRunner(_) => Some("name local, slurm or slurm:PARTITION".into()),
            Self::NoProgress { .. } => Some(
                "read the pilots' logs in slurm/ of the analysis' directory; check that the nodes \
                 have that directory and Keyframe"
                    .into(),
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let not_found = || io::Error::from(io::ErrorKind::NotFound);
        let errors = [
            Error::Io { operation: "rename", path: "OUT/queue/items".into(), source: not_found() },
            Error::NoProgram { program: "sbatch", source: not_found() },
            Error::TimedOut { program: "squeue", seconds: 60 },
            Error::Refused {
                program: "sbatch",
                message: "invalid partition (exit status: 1)".into(),
            },
            Error::Answer { program: "sbatch", message: "nonsense".into() },
            Error::Source("the recording is damaged".into()),
            Error::UnknownRunner("kubernetes".into()),
            Error::NoProgress { rounds: 3, last: "the last one has ended".into() },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
