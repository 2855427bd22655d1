//! The errors of a VM's disks, and what the user can do about them.

use crate::read_files::{ChangedFile, FileChange};
use keyframe_qemu::cmdline::CommandLineError;
use keyframe_units::CheckpointId;
use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate. Each variant names the object, and what is wrong with it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The process that serves disks, or the image of a disk, failed.
    #[error(transparent)]
    Disk(#[from] keyframe_disk::Error),
    /// A checkpoint's command line cannot be parsed.
    #[error("the checkpoint's command line: {0}")]
    CommandLine(Box<CommandLineError>),
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
    /// The process that serves a VM's disks serves neither set of a rollback's disks.
    #[error("the process that serves the disks serves others than those of the rollback")]
    OtherDisksServed,
    /// A description could not be written as JSON.
    #[error("describe {object}: {source}")]
    Describe {
        /// The described object.
        object: &'static str,
        /// The error of the JSON library.
        source: serde_json::Error,
    },
    /// The image below a checkpoint's disk cannot be opened.
    #[error("open {}: {source}", path.display())]
    ImageMissing {
        /// The image.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// An image was said to have moved that the checkpoint does not name.
    #[error("the checkpoint names no image or medium {}; it names {}", old.display(), named_list(named))]
    NotNamed {
        /// The old path, as the user gave it.
        old: PathBuf,
        /// The paths that the checkpoint names.
        named: Vec<String>,
    },
    /// An image that has moved names other files beneath it than those that the checkpoint needs.
    #[error("{} names {} beneath it, and the checkpoint needs {}", path.display(), named_list(found), named_list(needed))]
    MovedChainDiffers {
        /// The image.
        path: PathBuf,
        /// The files that the image names.
        found: Vec<String>,
        /// The files at their present paths that the checkpoint needs.
        needed: Vec<String>,
    },
    /// The image below a checkpoint's disk differs from the image at the checkpoint.
    #[error("{} has changed since the checkpoint, whose disk needs it: {change}", path.display())]
    ImageChanged {
        /// The image.
        path: PathBuf,
        /// How it differs.
        change: ImageChange,
    },
    /// A commit into the image has begun and not ended.
    #[error("{}: a commit of {commit} into it was interrupted", path.display())]
    CommitInterrupted {
        /// The image.
        path: PathBuf,
        /// The source of the commit.
        commit: String,
    },
    /// Metadata of a store can hold paths in UTF-8 only.
    #[error("{}: its path is not UTF-8", .0.display())]
    PathNotUtf8(PathBuf),
    /// A file that the guest reads differs from the file at the checkpoint.
    #[error("{0}, and the guest reads it")]
    MediumChanged(Box<ChangedFile>),
    /// A VM cannot go back to a checkpoint of other drives.
    #[error("checkpoint {0} has other drives than the VM")]
    OtherDrives(CheckpointId),
    /// A drive's file has a further name, which would stay with the former content.
    #[error("{} has other hard links, which would not go back with it", .0.display())]
    SeveralLinks(PathBuf),
    /// A file cannot change places with its copy.
    #[error(
        "the file {} of a drive is on another file system than {}, where its copy is made; a rollback \
         needs the files of all drives on one",
        place.display(), copy.display()
    )]
    SeveralFileSystems {
        /// The copy, which is beside the first drive's file.
        copy: PathBuf,
        /// The file of the VM's drive.
        place: PathBuf,
    },
    /// Two drives use the same image, and the guest can write to one of them.
    #[error("drives {first} and {second} use the same image, {}", image.display())]
    ImageUsedTwice {
        /// A drive that the guest can write to.
        first: String,
        /// Another drive.
        second: String,
        /// The image.
        image: PathBuf,
    },
    /// A command line names other images beneath a disk than the disk's own image.
    #[error(
        "{}: the command line names {} beneath it, and the image itself names {}; Keyframe serves \
         the images that the image names",
        path.display(),
        paths(stated),
        paths(found)
    )]
    BackingDiffers {
        /// The disk's own image.
        path: PathBuf,
        /// The images beneath it on the command line.
        stated: Vec<PathBuf>,
        /// The images beneath it by the headers of the images.
        found: Vec<PathBuf>,
    },
    /// A drive is a network export, not a file.
    #[error(
        "drive {name}: the guest can write to it, and it is an export ({address}); Keyframe \
         serves images that are files (raw or qcow2) and block devices"
    )]
    RemoteDrive {
        /// The drive.
        name: String,
        /// The address at which QEMU finds it.
        address: String,
    },
    /// Keyframe does not serve images of this format.
    #[error("drive {name}: images in format {format} cannot be served")]
    FormatNotServed {
        /// The drive.
        name: String,
        /// Its format, as the command line names it.
        format: String,
        /// Its image.
        image: PathBuf,
    },
    /// A checkpoint's disk has an image format that this program does not know.
    #[error("disk {disk}: unknown format {format}")]
    UnknownFormat {
        /// The disk.
        disk: String,
        /// The format that its checkpoint names.
        format: String,
    },
    /// A read-only medium is not a regular file.
    #[error("{} is not a regular file", .0.display())]
    MediumNotAFile(PathBuf),
    /// A read-only medium has a format that Keyframe does not serve.
    #[error("{} is in format {format}", path.display())]
    MediumFormat {
        /// The medium's image.
        path: PathBuf,
        /// Its format.
        format: String,
    },
    /// All numbers for overlay directories of a VM are taken.
    #[error("{}: too many overlay directories of VM {vm}", folder.display())]
    TooManyOverlays {
        /// The directory of all overlays.
        folder: PathBuf,
        /// The VM.
        vm: String,
    },
    /// An overlay directory does not tell which checkpoint it depends on.
    #[error(
        "{}: its disks.json cannot be read, so the checkpoint that it depends on is unknown",
        .0.display()
    )]
    OverlayUnreadable(PathBuf),
    /// A checkpoint lacks disks that its user left out.
    #[error("checkpoint {checkpoint} lacks disks, which were left out of it: {disks}")]
    DisksLeftOut {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The disks with their images, separated by commas.
        disks: String,
    },
    /// The user left this disk out of the checkpoint.
    #[error("disk {disk} was left out of checkpoint {checkpoint} (--leave-out-disk)")]
    DiskLeftOut {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The disk.
        disk: String,
    },
    /// The checkpoint has no such member.
    #[error("checkpoint {checkpoint} has no member {member}")]
    NoMember {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The member that was asked for.
        member: String,
        /// The members that it has; empty for a checkpoint of one VM.
        members: Vec<String>,
    },
    /// A checkpoint holds no disk at all.
    #[error(
        "checkpoint {checkpoint} holds no disk{}: the guest could write to none, or the disks \
         were left out", of_member(member.as_deref())
    )]
    NoDisks {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The member that was asked for. `None` if none was named.
        member: Option<String>,
    },
    /// A checkpoint holds no disk of this name.
    #[error("checkpoint {checkpoint} holds no disk {disk}{}", of_member(member.as_deref()))]
    NoDisk {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The disk that was asked for.
        disk: String,
        /// The member that was asked for. `None` if none was named.
        member: Option<String>,
        /// The disks that it holds, separated by commas.
        holds: String,
    },
    /// Several disks could be meant.
    #[error("checkpoint {checkpoint} holds several disks{}: {holds}", of_member(member.as_deref()))]
    SeveralDisks {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The member that was asked for. `None` if none was named.
        member: Option<String>,
        /// The disks that it holds, separated by commas.
        holds: String,
    },
    /// The page map of a checkpoint has no room for its disks.
    #[error("checkpoint {0}: its disks are larger than its page map allows")]
    DisksTooLarge(CheckpointId),
    /// The image has another size than the checkpoint's disk.
    #[error(
        "{}: a disk of {image_bytes} bytes; disk {disk} of checkpoint {checkpoint} has \
         {disk_bytes}",
        path.display()
    )]
    SizeDiffers {
        /// The image.
        path: PathBuf,
        /// The image's size as a disk, in bytes.
        image_bytes: u64,
        /// The disk.
        disk: String,
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The disk's size in the checkpoint, in bytes.
        disk_bytes: u64,
    },
    /// A VM runs on the image that the command should write.
    #[error("{}: VM {vms} runs over it; nothing was changed", image.display())]
    ImageInUse {
        /// The image.
        image: PathBuf,
        /// The VMs, separated by commas.
        vms: String,
    },
    /// An overlay lies over a checkpoint whose store cannot be opened.
    #[error("{overlay} lies over checkpoint {checkpoint}: {source}")]
    OverlayWithoutStore {
        /// The overlay, as a commit names it.
        overlay: String,
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The reason why the store cannot be opened.
        source: keyframe_store::Error,
    },
    /// The description of an overlay directory does not name this overlay.
    #[error("{0}: what is said beside it does not name it")]
    OverlayNotDescribed(String),
    /// A commit's image has another size than its disk.
    #[error(
        "{}: a disk of {image_bytes} bytes, {commit} is of one of {disk_bytes}", path.display()
    )]
    OtherImage {
        /// The image.
        path: PathBuf,
        /// The image's size as a disk, in bytes.
        image_bytes: u64,
        /// The source of the commit.
        commit: String,
        /// The size of its disk, in bytes.
        disk_bytes: u64,
    },
}

/// An error of a store, with the store's place.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct StoreError {
    /// The store's directory or address.
    pub store: PathBuf,
    /// What failed.
    #[source]
    pub source: keyframe_store::Error,
}

impl StoreError {
    pub(crate) fn of(store: &keyframe_store::Store, source: keyframe_store::Error) -> Self {
        Self { store: store.path().to_owned(), source }
    }
}

/// The difference between an image and its description in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageChange {
    /// The image's length differs.
    Length {
        /// The length at the checkpoint, in bytes.
        then: u64,
        /// The present length, in bytes.
        now: u64,
    },
    /// The modification time alone differs: the sampled parts are equal.
    Time {
        /// The modification time in the checkpoint, in seconds since 1970.
        modified_s: i64,
        /// The nanoseconds of that time.
        modified_ns: u32,
    },
    /// The image's content differs.
    Content,
}

impl std::fmt::Display for ImageChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Length { then, now } => write!(f, "it had {then} bytes and has {now}"),
            Self::Time { .. } => {
                f.write_str("its modification time differs, although the compared parts are equal")
            }
            Self::Content => f.write_str("its content differs"),
        }
    }
}

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The paths in one line of text.
fn paths(paths: &[PathBuf]) -> String {
    if paths.is_empty() {
        return "no image".into();
    }
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn of_member(member: Option<&str>) -> String {
    member.map(|member| format!(" of member {member}")).unwrap_or_default()
}

impl Error {
    /// Makes an [`Error::Io`]; `operation` is a verb.
    pub(crate) fn io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { operation, path: path.to_owned(), source }
    }

    /// True if a file system cannot be written, or lets this user write nothing.
    pub(crate) fn is_read_only(&self) -> bool {
        let kinds = [io::ErrorKind::ReadOnlyFilesystem, io::ErrorKind::PermissionDenied];
        matches!(self, Self::Io { source, .. } if kinds.contains(&source.kind()))
    }

    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Self::Store(_)
            | Self::Io { .. }
            | Self::Describe { .. }
            | Self::OtherDisksServed
            | Self::UnknownFormat { .. }
            | Self::MediumNotAFile(_)
            | Self::MediumFormat { .. }
            | Self::DisksLeftOut { .. }
            | Self::DiskLeftOut { .. }
            | Self::NoDisks { .. }
            | Self::DisksTooLarge(_)
            | Self::OverlayNotDescribed(_) => return None,
            Self::Disk(error) => return error.fix(),
            Self::CommandLine(error) => return error.fix(),
            Self::ImageMissing { .. } => {
                "the checkpoint's disk needs this image: if it has moved, name its new path \
                 (restore, branch, commit, bundle: --image OLD=NEW); otherwise put it back where it was, or \
                 make a symbolic link there that leads to it"
                    .into()
            }
            Self::NotNamed { .. } => {
                "name one of these as OLD in --image OLD=NEW, or a directory above it".into()
            }
            Self::MovedChainDiffers { .. } => {
                "move the files beneath it, too (--image OLD=NEW for each), or make symbolic links \
                 to them where the image looks for them"
                    .into()
            }
            Self::ImageChanged { path, change: ImageChange::Time { modified_s, modified_ns } } => {
                format!(
                    "put the image back as it was; if you are sure that its content is unchanged, \
                     reset the time: touch -d @{modified_s}.{modified_ns:09} {}",
                    path.display()
                )
            }
            Self::ImageChanged { .. } | Self::SizeDiffers { .. } => {
                "put the image back as it was".into()
            }
            Self::CommitInterrupted { .. } => {
                "finish it first: run keyframe commit --in-place again".into()
            }
            Self::PathNotUtf8(_) => "name it through a symbolic link".into(),
            Self::MediumChanged(changed) if changed.change == FileChange::Missing => {
                "if the file has moved, name its new path (restore, branch, commit, bundle: --image \
                 OLD=NEW); otherwise put it back"
                    .into()
            }
            Self::MediumChanged(_) => {
                "put the file back as it was; if its present content will do, say --changed-as-now"
                    .into()
            }
            Self::OtherDrives(_) | Self::SeveralFileSystems { .. } | Self::SeveralLinks(_) => {
                "restore the checkpoint as another VM: keyframe restore".into()
            }
            Self::ImageUsedTwice { .. } => {
                "give each drive an image of its own (QEMU itself refuses this)".into()
            }
            Self::BackingDiffers { path, stated, .. } => format!(
                "make the image name them (qemu-img rebase -u -b {} {}), or let QEMU open the disk \
                 (--disk bitmap)",
                stated
                    .first()
                    .map_or_else(|| "''".into(), |below| format!("{} -F FORMAT", below.display())),
                path.display()
            ),
            Self::RemoteDrive { .. } => {
                "let QEMU tell what the guest writes to it (--disk bitmap), copy it to a file \
                 (qemu-img convert), make the drive read-only (readonly=on), or leave it out of \
                 checkpoints (--leave-out-disk)"
                    .into()
            }
            Self::FormatNotServed { image, .. } => format!(
                "convert it (qemu-img convert -O qcow2 {} NEW.qcow2), or make the drive read-only \
                 (readonly=on)",
                image.display()
            ),
            Self::TooManyOverlays { .. } => "remove old overlay directories there".into(),
            Self::OverlayUnreadable(_) => {
                "if a VM is just being started, run the command again; else save the directory, \
                 and remove it"
                    .into()
            }
            Self::NoMember { members, .. } if members.is_empty() => {
                "it is a checkpoint of one VM: omit --member".into()
            }
            Self::NoMember { members, .. } => format!("its members are {}", members.join(", ")),
            Self::NoDisk { holds, .. } => format!("it holds {holds}"),
            Self::SeveralDisks { .. } => "name one with --disk NAME".into(),
            Self::ImageInUse { .. } => {
                "stop that VM first (keyframe stop), or write a new image with -o FILE".into()
            }
            Self::OverlayWithoutStore { .. } => {
                "put it back into the disks/ directory of its store".into()
            }
            Self::OtherImage { .. } => "name the image that the VM ran on".into(),
        })
    }
}

fn named_list(paths: &[String]) -> String {
    if paths.is_empty() { "none".into() } else { paths.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_qemu::ReadFile;
    use keyframe_testing::{assert_golden, error_text};

    #[test]
    fn error_texts_are_golden() {
        let (image, checkpoint) = (|| PathBuf::from("a.img"), CheckpointId(7));
        let medium = |change| {
            let file =
                ReadFile { path: "a.iso".into(), option: "-cdrom".into(), ..Default::default() };
            Error::MediumChanged(Box::new(ChangedFile { file, change }))
        };
        let errors = [
            Error::io("open", Path::new("a.img"), io::ErrorKind::NotFound.into()),
            Error::ImageMissing { path: image(), source: io::ErrorKind::NotFound.into() },
            Error::NotNamed { old: image(), named: vec!["/vm/b.img".into(), "/vm/c.iso".into()] },
            Error::MovedChainDiffers {
                path: image(),
                found: Vec::new(),
                needed: vec!["/new/base.img".into()],
            },
            Error::ImageChanged { path: image(), change: ImageChange::Content },
            Error::ImageChanged {
                path: image(),
                change: ImageChange::Length { then: 4096, now: 8192 },
            },
            Error::ImageChanged {
                path: image(),
                change: ImageChange::Time { modified_s: 1_700_000_000, modified_ns: 5 },
            },
            Error::CommitInterrupted { path: image(), commit: "checkpoint 7".into() },
            Error::PathNotUtf8(image()),
            Error::BackingDiffers {
                path: image(),
                stated: vec!["/images/base".into()],
                found: vec![],
            },
            medium(FileChange::Content),
            medium(FileChange::Missing),
            Error::OtherDisksServed,
            Error::OtherDrives(CheckpointId(7)),
            Error::SeveralLinks(image()),
            Error::SeveralFileSystems { copy: image(), place: image() },
            Error::ImageUsedTwice { first: "d".into(), second: "e".into(), image: image() },
            Error::RemoteDrive { name: "d".into(), address: "nbd:localhost:10809".into() },
            Error::FormatNotServed { name: "d".into(), format: "vmdk".into(), image: image() },
            Error::UnknownFormat { disk: "d".into(), format: "vmdk".into() },
            Error::MediumNotAFile(image()),
            Error::MediumFormat { path: image(), format: "vmdk".into() },
            Error::TooManyOverlays { folder: "/store/disks".into(), vm: "db".into() },
            Error::OverlayUnreadable("/store/disks/db.1".into()),
            Error::CommandLine(Box::new(CommandLineError::Argument {
                argument: "-blockdev {".into(),
                reason: "it is malformed".into(),
                fix: "correct it".into(),
            })),
            Error::DisksLeftOut { checkpoint, disks: "d (a.img)".into() },
            Error::DiskLeftOut { checkpoint, disk: "d".into() },
            Error::NoMember { checkpoint, member: "a".into(), members: Vec::new() },
            Error::NoMember { checkpoint, member: "a".into(), members: vec!["b".into()] },
            Error::NoDisks { checkpoint, member: None },
            Error::NoDisk {
                checkpoint,
                disk: "x".into(),
                member: Some("a".into()),
                holds: "d".into(),
            },
            Error::SeveralDisks { checkpoint, member: None, holds: "d, e".into() },
            Error::DisksTooLarge(checkpoint),
            Error::SizeDiffers {
                path: image(),
                image_bytes: 4096,
                disk: "d".into(),
                checkpoint,
                disk_bytes: 8192,
            },
            Error::ImageInUse { image: image(), vms: "db".into() },
            Error::OverlayWithoutStore {
                overlay: "overlay /x/0-d".into(),
                checkpoint,
                source: keyframe_store::Error::NoStore { object: "/x".into() },
            },
            Error::OverlayNotDescribed("overlay /x/0-d".into()),
            Error::OtherImage {
                path: image(),
                image_bytes: 4096,
                commit: "overlay /x/0-d".into(),
                disk_bytes: 8192,
            },
        ];
        let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
        assert_golden("tests/golden/errors.txt", &texts.concat());
    }
}
