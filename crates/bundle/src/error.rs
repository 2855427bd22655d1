//! The errors of bundles, and what the user can do about them.

use keyframe_store::CheckpointId;
use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate. Each variant names the object, and what is wrong with it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A store failed: that of the checkpoint, or the one that becomes a bundle.
    #[error("{source}")]
    Store {
        /// The store's directory or address, or the bundle.
        store: PathBuf,
        /// What failed.
        source: Box<keyframe_store::Error>,
    },
    /// An image or a medium of the checkpoint cannot be used.
    #[error(transparent)]
    VmDisks(#[from] keyframe_vm_disks::Error),
    /// An image cannot be read.
    #[error(transparent)]
    Disk(#[from] keyframe_disk::Error),
    /// The file system refused an operation.
    #[error("{operation} {}: {source}", path.display())]
    Io {
        /// The operation, as a verb.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// There is a file of the bundle's name.
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    /// What an interrupted command left is of another checkpoint.
    #[error(
        "{} is no part of this bundle: it is another store, or it was made of another checkpoint or \
         with other options",
        .0.display()
    )]
    OtherPartial(PathBuf),
    /// The checkpoint is one of a recording.
    #[error("checkpoint {0} is of a recording, and goes on only in a replay")]
    Recorded(CheckpointId),
    /// QEMU itself opens these disks in a restore, so no bundle can hold them.
    #[error("Keyframe cannot read {disks}, which checkpoint {checkpoint} leaves out")]
    OpenedByQemu {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The disks, with their images.
        disks: String,
    },
    /// A file that the command line names is no regular file.
    #[error("{path} ({option}) is no regular file, so a bundle cannot hold it")]
    NotRegular {
        /// The file.
        path: String,
        /// The option of the command line.
        option: String,
    },
    /// The command line names the images beneath a read-only image.
    #[error(
        "{path} ({option}): the command line names the images beneath it, and a bundle does not hold \
         them"
    )]
    OwnLayers {
        /// The image.
        path: String,
        /// The option of the command line.
        option: String,
    },
    /// The directory of the bundle does not exist.
    #[error("there is no directory {}", .0.display())]
    NoDirectory(PathBuf),
    /// A path is not UTF-8, and the command line of a checkpoint is.
    #[error("{} is not UTF-8", .0.display())]
    NotUtf8(PathBuf),
    /// The description in a bundle is not valid.
    #[error("the bundle's description: {0}")]
    Manifest(String),
    /// A store that is no bundle.
    #[error("{} is no bundle: it holds no description of one", .0.display())]
    NoBundle(PathBuf),
    /// The bundle holds no checkpoint, or several.
    #[error("{} holds {count} checkpoints; a bundle holds one", path.display())]
    CheckpointCount {
        /// The bundle.
        path: PathBuf,
        /// The number of its checkpoints.
        count: usize,
    },
    /// The checkpoint in the bundle is damaged.
    #[error("the checkpoint in {} is damaged: {problem}", path.display())]
    Damaged {
        /// The bundle.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The command line of the checkpoint does not name a file of the bundle as Keyframe expects it.
    #[error("the checkpoint's command line names {path} in a way that Keyframe cannot change")]
    NotRewritten {
        /// The path on the machine where the bundle was made.
        path: String,
    },
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The error of a store.
    pub(crate) fn store(store: &keyframe_store::Store, source: keyframe_store::Error) -> Self {
        Self::Store { store: store.path().to_owned(), source: Box::new(source) }
    }

    /// Makes the error of an operation on a file from the system's.
    pub(crate) fn io(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { operation, path, source }
    }

    /// Returns what the user can do about the error; `None` if that is not known, or if the error of
    /// a store tells.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Self::Store { .. } | Self::VmDisks(_) | Self::Io { .. } => return None,
            Self::Disk(error) => return error.fix(),
            Self::Exists(_) => "name another file, or remove this one".into(),
            Self::OtherPartial(path) => format!(
                "name another file; or remove that directory, if nothing in it is wanted: rm -r {}",
                path.display()
            ),
            Self::Recorded(_) => {
                "copy the directory of the recording, which holds all that its replays need, or take \
                 a checkpoint with keyframe run"
                    .into()
            }
            Self::OpenedByQemu { .. } => {
                "take a checkpoint of a VM whose disks are raw or qcow2 images, or copy the images \
                 yourself and restore the checkpoint from a copy of the store (keyframe copy)"
                    .into()
            }
            Self::OwnLayers { .. } => {
                "make one image of it (qemu-img convert), and start the VM with that".into()
            }
            Self::NoDirectory(_) => "make it, or name another file".into(),
            Self::NotUtf8(_) => "name another directory".into(),
            Self::NotRegular { .. } => {
                "make an image of the device, and name it: --image DEVICE=IMAGE".into()
            }
            Self::Manifest(_) | Self::NoBundle(_) | Self::CheckpointCount { .. } => {
                "make the bundle again: keyframe bundle --store STORE CHECKPOINT -o FILE".into()
            }
            Self::Damaged { .. } => {
                "copy the bundle again from where it was made, or make it again; nothing was imported"
                    .into()
            }
            Self::NotRewritten { path } => format!(
                "unpack the bundle (tar -xf), which gives a store; put the file at {path}, and \
                 restore from that store"
            ),
        })
    }
}
