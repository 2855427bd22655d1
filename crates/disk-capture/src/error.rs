//! The errors of this crate: each names the disk or file and the operation, and knows what the user
//! can do about it.

use keyframe_capture::BoxError;
use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = DiskError> = std::result::Result<T, E>;

/// An error of the disks of a running VM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// An error of QEMU.
    #[error(transparent)]
    Qemu(#[from] keyframe_qemu::Error),
    /// An error of the VMM that runs the VM.
    #[error(transparent)]
    Vmm(#[from] keyframe_vmm::VmmError),
    /// An error of the process that serves disks, or of the image of a disk.
    #[error(transparent)]
    VmDisks(#[from] keyframe_vm_disks::Error),
    /// An error of the store.
    #[error("{source}")]
    Store {
        /// The store's directory or address.
        store: PathBuf,
        /// What failed.
        source: keyframe_store::Error,
    },
    /// The process that served the disks has ended.
    #[error("the disks are not served any more")]
    NotServed,
    /// The VM opens its disk images itself, so they cannot be exchanged while it runs.
    #[error("the VM opens its disk images itself; they cannot go back while it runs")]
    OwnDisks,
    /// The operation exists in QEMU alone.
    #[error("only QEMU can do this, and another VMM runs this VM")]
    NotQemu,
    /// The file system refused an operation.
    #[error("{operation} {}", path.display())]
    Io {
        /// The operation, as a verb.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// QEMU has stopped the VM: this disk, which the user left out, has no space.
    #[error(
        "QEMU has stopped the VM because disk {0}, which checkpoints leave out, has no space; make \
         space for it, and then resume the VM in QEMU's monitor (cont)"
    )]
    LeftOutFull(String),
    /// `--disk reflink` was asked for, and an image cannot be cloned.
    #[error("--disk reflink: {0}")]
    NotCloneable(CloneObstacle),
    /// The drive of a VMM that opens its files itself cannot be captured.
    #[error("drive {name}, to which the guest can write, cannot be captured: {why}")]
    DriveNotCloneable {
        /// The drive.
        name: String,
        /// The reason why its file cannot be cloned.
        why: CloneObstacle,
    },
    /// The drive of a VMM that opens its files itself can be captured in no way.
    #[error(
        "drive {name}, to which the guest can write, cannot be captured: {why}; writes to it cannot \
         be recorded either"
    )]
    DriveNotCaptured {
        /// The drive.
        name: String,
        /// The reason why its file cannot be cloned.
        why: CloneObstacle,
        /// The reason why writes to it cannot be recorded.
        #[source]
        other: Box<DiskError>,
    },
    /// The kernel does not report writes to a file.
    #[error("record the writes to {}", path.display())]
    WritesNotReported {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        source: keyframe_kernel::Error,
    },
    /// The kernel has ceased to report writes to the drives.
    #[error("the kernel no longer reports writes to the VM's drives")]
    WritesLost(#[source] keyframe_kernel::Error),
    /// A file has changed, and the kernel has reported no write.
    #[error("{} has changed, and the kernel has reported no write to it", .0.display())]
    UnseenWrite(PathBuf),
    /// The guest overwrites blocks of its drives faster than the store takes them.
    #[error(
        "the guest overwrites blocks of its drives faster than the store takes their old content"
    )]
    OverwrittenTooFast,
    /// Two drives of a VMM that opens its files itself have one file.
    #[error("drives {first} and {second} have the same file, and a restored VM would have two")]
    SameFile {
        /// The one.
        first: String,
        /// The other.
        second: String,
    },
    /// A drive of a VMM that opens its files itself has another file than before.
    #[error("a drive of the VM was given another file, or another size")]
    DrivesChanged,
    /// `--disk served` was asked for, and QEMU has opened the images already.
    #[error("--disk served: QEMU has its images open already")]
    AlreadyOpen,
    /// Another block job works on a disk.
    #[error("a job works on the VM's disk {0} (a backup, a mirror, a commit)")]
    OtherJob(String),
    /// QEMU's NBD server could not be started.
    #[error("the VM's disks cannot be read")]
    NbdServer(#[source] keyframe_qemu::Error),
    /// The guest has no such disk.
    #[error("--leave-out-disk {name}: the guest can write to no disk of that name")]
    UnknownDisk {
        /// The name.
        name: String,
        /// The names of the disks that the guest can write to, those of their devices in
        /// parentheses.
        disks: Vec<String>,
    },
    /// The format of a disk's image is unknown.
    #[error("disk {0}: unknown format")]
    UnknownFormat(String),
    /// A disk was changed while checkpoints were taken.
    #[error(
        "the VM's disk {disk} ({file}) is not what it was when its checkpoints began: it was \
         plugged in, resized or given another image; end the checkpoints and begin anew"
    )]
    Changed {
        /// The disk.
        disk: String,
        /// Its image.
        file: String,
    },
    /// A disk was given another size, and another run has to begin.
    #[error("a disk of the VM was given another size")]
    OtherSize,
    /// A disk was unplugged, plugged in again, given direct I/O or another file, and another run has
    /// to begin.
    #[error("a disk of the VM was unplugged, plugged in again, given direct I/O or another file")]
    OtherDisks,
    /// A disk was unplugged during a checkpoint.
    #[error("the VM's disk {disk} ({file}) was unplugged during the checkpoint")]
    Unplugged {
        /// The disk.
        disk: String,
        /// Its image.
        file: String,
    },
    /// The scratch files have too little space.
    #[error(
        "{} has {free_bytes} bytes free: too few for the old content of the blocks that the guest \
         overwrites during a checkpoint; free some space there",
        folder.display()
    )]
    NoScratchSpace {
        /// The directory of the scratch files.
        folder: PathBuf,
        /// The number of bytes that are free there.
        free_bytes: u64,
    },
    /// The encoder has not read the disks of the checkpoint before.
    #[error("the disks of the previous checkpoint were not read within {seconds} s")]
    ReadTimeout {
        /// The number of seconds that were waited.
        seconds: u64,
    },
    /// The disks of a checkpoint were cut twice.
    #[error("the disks were cut twice in a capture")]
    CutTwice,
    /// The disks of a checkpoint were not cut.
    #[error("the checkpoint's disks were not cut")]
    NotCut,
    /// An export has another size than its disk.
    #[error("the size of disk {name} has changed from {then_bytes} to {now_bytes} bytes")]
    Resized {
        /// The export.
        name: String,
        /// Its size in bytes now.
        now_bytes: u64,
        /// The disk's size in bytes when its checkpoints began.
        then_bytes: u64,
    },
    /// A disk is throttled and has an iothread, with which QEMU before 9.0 aborts.
    #[error(
        "disk {0} is throttled and has an iothread: QEMU before 9.0 aborts in a checkpoint of \
         such a disk by dirty bitmaps"
    )]
    ThrottledInIothread(String),
    /// Disks that QEMU opens itself cannot be sent to a standby.
    #[error("only disks that Keyframe serves can be replicated")]
    NotReplicable,
    /// No free name is left for a clone.
    #[error("{}: too many clones of {}", folder.display(), image.display())]
    TooManyClones {
        /// The directory of the image.
        folder: PathBuf,
        /// The image.
        image: PathBuf,
    },
    /// An image could not be cloned.
    #[error("clone {} into {}{}", image.display(), clone.display(), unsupported(source))]
    Clone {
        /// The image.
        image: PathBuf,
        /// The clone.
        clone: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A slot lies beyond the overlay of a served disk.
    #[error("a slot beyond the overlay")]
    SlotBeyondOverlay,
    /// The disk belongs to no VM of the session.
    #[error("a disk of no VM")]
    NoVm,
    /// The process that serves the disks failed.
    #[error("{operation}")]
    Server {
        /// The operation.
        operation: &'static str,
        /// The reason.
        source: BoxError,
    },
}

/// The reason why an image cannot be cloned by its file system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloneObstacle {
    /// Writes to the disk are thrown away at the VM's end.
    #[error("writes to {0} do not last (snapshot=on)")]
    Temporary(String),
    /// The disk is a network export.
    #[error("{0} is not a file, but an export that QEMU reaches by NBD")]
    NoFile(String),
    /// The guest sees a part of the image only.
    #[error("{0} is a part of an image (offset, size), and a clone is the whole image")]
    Slice(String),
    /// The image's format cannot be cloned.
    #[error("{} is neither raw nor qcow2", .0.display())]
    Format(PathBuf),
    /// The image is not a regular file.
    #[error("{} is not a regular file", .0.display())]
    NotRegular(PathBuf),
    /// A qcow2 image is not whole by itself.
    #[error("{} {reason}", path.display())]
    NotWhole {
        /// The image.
        path: PathBuf,
        /// The property that is not supported.
        reason: &'static str,
    },
    /// The file system has no clones.
    #[error("the file system of {} does not clone files ({source})", path.display())]
    NoClones {
        /// The image.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is in a jail of its VMM.
    #[error(
        "{} is in the VM's jail: clones would lie beside it, and would be removed with the jail",
        .0.display()
    )]
    InJail(PathBuf),
    /// Cloning takes longer than other methods.
    #[error("cloning {} takes {took_ms} ms, longer than a pause may take", path.display())]
    Slow {
        /// The image.
        path: PathBuf,
        /// The number of milliseconds that a clone took.
        took_ms: u64,
    },
    /// The file system refused an operation.
    #[error("{operation} {}: {source}", path.display())]
    Io {
        /// The operation, as a verb.
        operation: &'static str,
        /// The image.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Says what the system's error `source` of a clone means, if it is that none can be made there.
fn unsupported(source: &io::Error) -> &'static str {
    if source.kind() == io::ErrorKind::Unsupported {
        " (this file system does not clone files; btrfs and XFS do)"
    } else {
        ""
    }
}

impl DiskError {
    /// Creates an error of `store`.
    pub(crate) fn store(store: &Path, source: keyframe_store::Error) -> Self {
        Self::Store { store: store.to_owned(), source }
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Self::Qemu(error) => return error.fix(),
            Self::Vmm(error) => return error.fix().map(str::to_owned),
            Self::VmDisks(error) => return error.fix(),
            Self::Store { source, .. } => return source.fix(),
            Self::NotCloneable(CloneObstacle::NoClones { .. } | CloneObstacle::Slow { .. }) => {
                "put the image on btrfs or XFS, or leave --disk out: Keyframe then chooses another \
                 method"
                    .into()
            }
            Self::NotCloneable(_) => {
                "leave --disk out: Keyframe then chooses another method".into()
            }
            Self::DriveNotCloneable { why: CloneObstacle::Io { .. }, .. } => {
                "let Keyframe write beside the drive's file, where it puts the clones".into()
            }
            Self::DriveNotCloneable { why: CloneObstacle::InJail(_), .. } => {
                "leave out --disk reflink: the blocks that the guest writes are copied then".into()
            }
            Self::DriveNotCaptured { why: CloneObstacle::InJail(_), .. } => {
                "use Linux 6.14 or newer, start Firecracker outside of a jail, or make the drive \
                 read-only (is_read_only)"
                    .into()
            }
            Self::DriveNotCloneable { why: CloneObstacle::NotRegular(_), .. } => {
                "give the drive a file on btrfs or XFS, or make it read-only (is_read_only)".into()
            }
            Self::DriveNotCloneable { .. } => "put the drive's file on btrfs or XFS, or make the \
                                               drive read-only (is_read_only)"
                .into(),
            Self::DriveNotCaptured { .. } => {
                "put the drive's file on btrfs or XFS, or on ext4 under \
                                              Linux 6.14 or newer, or make the drive read-only \
                                              (is_read_only)"
                    .into()
            }
            Self::OverwrittenTooFast => {
                "the next checkpoint tries again; with more of the guest's \
                                         writes than that, use a faster store, or put the drives' \
                                         files on btrfs or XFS"
                    .into()
            }
            Self::UnseenWrite(_) => {
                "let only the VM write to the file; the next checkpoint reads all \
                                     of it"
                    .into()
            }
            Self::WritesNotReported { source, .. } | Self::WritesLost(source) => {
                return source.fix();
            }
            Self::SameFile { .. } => "give each drive a file of its own".into(),
            Self::AlreadyOpen => "leave --disk out, or start the VM with `keyframe run`".into(),
            Self::OtherJob(_) => "wait until it ends, or cancel it (block-job-cancel)".into(),
            Self::NbdServer(_) => {
                "QEMU has one NBD server. If it serves another client (a backup, \
                                   a migration), wait until that ends, or leave the disk out \
                                   (--leave-out-disk)"
                    .into()
            }
            Self::ThrottledInIothread(_) => "take the limits off (block_set_io_throttle), put the \
                                             image on btrfs or XFS (--disk reflink), leave the \
                                             disk out (--leave-out-disk NAME), or start the VM \
                                             with `keyframe run`"
                .into(),
            Self::UnknownDisk { disks, .. } if disks.is_empty() => {
                "no disk of the VM's command line can be left out".into()
            }
            Self::UnknownDisk { disks, .. } => format!("its disks are {}", disks.join(", ")),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests;
