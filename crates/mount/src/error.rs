//! Why something of a checkpoint cannot be shown.

use keyframe_units::CheckpointId;
use std::io;

/// An error of the file system. A process that reads the file gets `EIO`;
/// [`std::error::Error::source`] gives the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] keyframe_store::Error),
    /// What a checkpoint holds cannot be used.
    #[error(transparent)]
    Inspect(#[from] keyframe_inspect::Error),
    /// A checkpoint lacks a file that others have.
    #[error("checkpoint {checkpoint} has no {file}")]
    NoFile {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The file's name.
        file: &'static str,
        /// The reason.
        source: keyframe_inspect::Error,
    },
    /// A file that is drawn as a whole cannot be made.
    #[error("read {file} of checkpoint {checkpoint}")]
    Make {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The file's name.
        file: &'static str,
        /// The reason.
        source: keyframe_inspect::Error,
    },
    /// A part of a file cannot be read.
    #[error("read {file} of checkpoint {checkpoint} at {offset:#x}")]
    Read {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The file's name.
        file: &'static str,
        /// The offset in bytes.
        offset: u64,
        /// The reason.
        source: io::Error,
    },
    /// The description of a checkpoint cannot be written as JSON.
    #[error("info.json of checkpoint {checkpoint}")]
    Info {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The reason.
        source: serde_json::Error,
    },
    /// The checkpoint has no such disk.
    #[error("no {0}")]
    NoDisk(String),
    /// A disk cannot be opened.
    #[error("open {disk}")]
    OpenDisk {
        /// The disk and its checkpoint.
        disk: String,
        /// The reason.
        source: keyframe_vm_disks::Error,
    },
    /// A part of a disk cannot be read.
    #[error("read {disk} at {offset:#x}")]
    ReadDisk {
        /// The disk and its checkpoint.
        disk: String,
        /// The offset in bytes.
        offset: u64,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
