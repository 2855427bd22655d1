//! What goes wrong.

use std::io;
use std::path::{Path, PathBuf};

/// The result of what may fail so.
pub type Result<T> = std::result::Result<T, Error>;

/// An error that names what it is about.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system.
    #[error("{operation} {}", path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A program of Slurm's is not there, or cannot be run.
    #[error("run {program}")]
    NoProgram {
        /// Its name.
        program: &'static str,
        /// Why.
        source: io::Error,
    },
    /// It took too long.
    #[error("{program} has not answered within {seconds} s")]
    TimedOut {
        /// The program.
        program: &'static str,
        /// How long it was waited for.
        seconds: u64,
    },
    /// It failed.
    #[error("{program}: {message}")]
    Refused {
        /// The program.
        program: &'static str,
        /// What it said.
        message: String,
    },
    /// Its answer is none.
    #[error("{program} answered what cannot be understood: {message}")]
    Answer {
        /// The program.
        program: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// Whoever knows what there is to do cannot tell any more.
    #[error("{0}")]
    Feed(String),
    /// `--on` names no runner.
    #[error("there is no runner {0:?}")]
    UnknownRunner(String),
    /// Pilots end one after the other and nothing gets done.
    #[error(
        "{rounds} times all pilots have ended while intervals are left, and none was worked off in between; {last}"
    )]
    NoProgress {
        /// How often.
        rounds: u32,
        /// What is known of the last one.
        last: String,
    },
}

impl Error {
    /// For `map_err`.
    pub(crate) fn io(
        operation: &'static str,
        path: &Path,
    ) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { operation, path, source }
    }

    /// What to do about it, where we know.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::NoProgram { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Some("call it on a machine from which jobs are submitted (Debian: apt-get install slurm-client), or without --on slurm".into())
            }
            Self::TimedOut { .. } => Some("see whether slurmctld is alive: scontrol ping".into()),
            Self::Refused { .. } => Some("see which partitions there are: sinfo; the limits of your account: scontrol show config".into()),
            Self::UnknownRunner(_) => Some("name local, slurm or slurm:PARTITION".into()),
            Self::NoProgress { .. } => {
                Some("read the pilots' logs (slurm/ in the analysis' directory); is that directory there on the nodes, and Keyframe?".into())
            }
            _ => None,
        }
    }
}
