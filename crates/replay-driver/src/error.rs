//! The errors of this crate. Each names the object and the operation, and knows what the user can
//! do about it.

mod analysis;
mod qemu;

pub use analysis::AnalysisError;
use keyframe_replay::log::LogVersion;
pub use qemu::ReplayError;

use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a replay or of an analysis. The sources tell the cause;
/// [`keyframe_units::error_chain`] prints both in one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of QEMU, or of the command line for it.
    #[error(transparent)]
    Qemu(#[from] keyframe_qemu::Error),
    /// An error of an interface of the kernel.
    #[error(transparent)]
    Kernel(#[from] keyframe_kernel::Error),
    /// An error of the recording.
    #[error(transparent)]
    Recording(#[from] keyframe_replay::Error),
    /// An error of the store.
    #[error("{source}")]
    Store {
        /// The store's directory or address.
        store: PathBuf,
        /// What failed.
        source: keyframe_store::Error,
    },
    /// Pages of a checkpoint cannot be read.
    #[error(transparent)]
    CheckpointPages(keyframe_store::Error),
    /// An error of the process that serves disks, or of the image of a disk.
    #[error(transparent)]
    VmDisks(#[from] keyframe_vm_disks::Error),
    /// The disks of a replay cannot be read.
    #[error(transparent)]
    Disk(#[from] keyframe_disk::Error),
    /// An error of the session that takes checkpoints of a replay.
    #[error(transparent)]
    Session(#[from] keyframe_session::Error),
    /// An error of the connection to a debugger, or to QEMU's gdbstub.
    #[error(transparent)]
    Gdb(#[from] keyframe_gdb::Error),
    /// An error of the analysis tool.
    #[error(transparent)]
    Tool(#[from] keyframe_analysis::Error),
    /// An error of the queue of intervals, or of one of its workers.
    #[error(transparent)]
    Cluster(#[from] keyframe_cluster::Error),
    /// A replay did not do what was asked for.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// An error of an analysis, or of its directory.
    #[error(transparent)]
    Analysis(#[from] AnalysisError),
    /// The operating system refused an operation.
    #[error("{operation}")]
    Io {
        /// The operation and its object.
        operation: String,
        /// The system's error.
        source: io::Error,
    },
    /// An error in one of several intervals.
    #[error("interval {index}: {source}")]
    InInterval {
        /// The interval.
        index: u32,
        /// What failed.
        source: Box<Self>,
    },
    /// The user asked for an end.
    #[error("interrupted")]
    Interrupted,
    /// The recording is not complete.
    #[error("{} is still being recorded", .0.display())]
    StillRecording(PathBuf),
    /// The store of a recording that has just begun does not exist.
    #[error("{} has no store yet", .0.display())]
    NoStoreYet(PathBuf),
    /// A store has no checkpoint of a recording.
    #[error("{} has no checkpoint of recording {recording}", store.display())]
    NoCheckpoint {
        /// The store.
        store: PathBuf,
        /// The recording's id.
        recording: String,
    },
    /// A store lacks the checkpoint before a recording's first instruction.
    #[error("{} has no checkpoint of the recording's first instruction", .0.display())]
    NoFirstCheckpoint(PathBuf),
    /// A recording ended before it had written something.
    #[error("the recording ended before {0} was there")]
    EndedBefore(&'static str),
    /// A recording was cut before an interval of it was complete.
    #[error("the recording was cut before its second checkpoint: no interval is left to replay")]
    NoInterval,
    /// QEMU writes logs of a version that Keyframe does not read.
    #[error("{} writes record/replay logs of version {found}, which Keyframe does not know", qemu.display())]
    UnknownLog {
        /// The QEMU binary.
        qemu: PathBuf,
        /// The version.
        found: LogVersion,
    },
    /// The recording is shorter than what was asked for.
    #[error("the recording has no instruction {icount}")]
    NoInstruction {
        /// The instruction that was asked for.
        icount: u64,
        /// The last instruction before which a replay can stop.
        last_stop: u64,
    },
    /// Two replays, or a replay and a checkpoint, cannot be compared.
    #[error("{0}")]
    NotComparable(String),
}

impl Error {
    /// Creates an error of `store`.
    pub fn store(store: &Path, source: keyframe_store::Error) -> Self {
        Self::Store { store: store.to_owned(), source }
    }

    /// An error of the operating system in `operation`.
    pub(crate) fn io(operation: impl Into<String>, source: io::Error) -> Self {
        Self::Io { operation: operation.into(), source }
    }

    /// The error of a file operation; `verb` is what was done to `path`.
    pub(crate) fn file(verb: &str, path: &Path, source: io::Error) -> Self {
        Self::io(format!("{verb} {}", path.display()), source)
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        let text = match self {
            Self::Qemu(error) => return error.fix(),
            Self::Kernel(error) => return error.fix(),
            Self::Disk(error) => return error.fix(),
            Self::Recording(error) => return error.fix(),
            Self::Store { source, .. } | Self::CheckpointPages(source) => return source.fix(),
            Self::VmDisks(error) => return error.fix(),
            Self::Session(error) => return error.fix(),
            Self::Tool(error) => return error.fix(),
            Self::Cluster(error) => return error.fix(),
            Self::Replay(error) => return error.fix(),
            Self::Analysis(error) => return error.fix(),
            Self::InInterval { source, .. } => return source.fix(),
            Self::StillRecording(_) => {
                "wait until its `keyframe record` has ended, or end it: keyframe stop"
            }
            Self::NoStoreYet(_) => "try again in a moment",
            Self::NoCheckpoint { .. } => {
                "name the store that has them with --store; or take them from a replay: \
                 keyframe segment"
            }
            Self::NoFirstCheckpoint(_) => {
                "name the store that it was recorded with, or copy that checkpoint there: keyframe copy"
            }
            Self::NoInterval => "record it again with --checkpoint-every",
            Self::UnknownLog { .. } => "record with QEMU 7.2, 10.0 or 11.1",
            Self::NoInstruction { last_stop, .. } => {
                return Some(format!("a replay can stand before any up to {last_stop}"));
            }
            Self::Gdb(_)
            | Self::Io { .. }
            | Self::Interrupted
            | Self::EndedBefore(_)
            | Self::NotComparable(_) => {
                return None;
            }
        };
        Some(text.into())
    }
}

#[cfg(test)]
mod tests;
