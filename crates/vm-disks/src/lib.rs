//! A VM's disks: from the images on its command line, or in a checkpoint, to the process that
//! serves them.
//!
//! ```text
//!   run      -drive file=a.img    ──▶ DiskToServe ─┐               image a.img, unchanged
//!   restore  a checkpoint's disks ──▶ DiskToServe ─┴─serve──▶ __disks ──▶ (checkpoint's blocks)
//!                                                              └──▶ overlay in STORE/disks/NAME.1/
//!
//!   restore  a checkpoint's drive files ──▶ DriveFiles: copies, which the VMM opens itself
//!
//!   commit, export, mount      StoredDisk ──▶ checkpoint's blocks over a.img, read-only
//!   commit                     CommitSource ─▶ the layers of a disk, into an image
//! ```

pub mod base_image;
pub mod checkpoint_disks;
pub mod clone_files;
pub mod commit_source;
pub mod dependents;
pub mod drive_exchange;
pub mod drive_files;
mod error;
pub mod forget;
pub mod layer;
pub mod media;
pub mod moved_images;
pub mod overlay_directory;
pub mod read_files;
pub mod restored;
pub mod staged;
pub mod stored;
pub mod vm_name;

pub use error::{Error, ImageChange, Result, StoreError};

use keyframe_disk::{DiskSpec, Disks, ImageFormat};
use keyframe_qemu::{Drive, ReadFile};
use keyframe_store::{DiskMeta, Store};
use keyframe_store_keys as keys;
use overlay_directory::{OverlayDirectory, OverlayInfo};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A disk that the server is to open.
#[derive(Clone, Debug)]
pub struct DiskToServe {
    /// The disk's description; its size is unknown until it is served.
    pub meta: DiskMeta,
    /// The checkpoint's blocks between image and overlay: a [`layer::LayerSource`] as JSON. `None`
    /// for a disk that comes from no checkpoint.
    pub layer: Option<String>,
    /// True if the guest's writes are discarded at the end.
    pub temporary: bool,
}

impl DiskToServe {
    /// Describes the disk of a `-drive` or `-blockdev` on a command line. `prefix` is put before
    /// its name.
    ///
    /// Errors: the drive is a network export; its image has a format that is not served; the line
    /// names other images beneath it than the image itself ([`Error::BackingDiffers`]).
    pub fn of_drive(drive: &Drive, prefix: &str) -> Result<Self> {
        if drive.remote {
            let address = drive.image.display().to_string();
            return Err(Error::RemoteDrive { name: drive.name.clone(), address });
        }
        let format = match drive.format.as_deref() {
            Some(name) => ImageFormat::named(name).ok_or_else(|| Error::FormatNotServed {
                name: drive.name.clone(),
                format: name.to_owned(),
                image: drive.image.clone(),
            })?,
            None => ImageFormat::probe(&drive.image)?,
        };
        base_image::require_chain(&drive.image, format, &drive.backing)?;
        let meta = DiskMeta {
            name: format!("{prefix}{}", drive.name),
            base: base_image::describe(&drive.image, format)?,
            ..DiskMeta::default()
        };
        Ok(Self { meta, layer: None, temporary: drive.temporary })
    }
}

/// Checks that no image of `disks`, which the guest can write to, is used by another one of them,
/// or is one of the files `read` that a VM only reads. Each drive would have content of its own.
///
/// Error: [`Error::ImageUsedTwice`].
pub fn require_separate_images(disks: &[DiskToServe], read: &[ReadFile]) -> Result<()> {
    let identity = |path: &str| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    for (at, disk) in disks.iter().enumerate() {
        let Some(own) = identity(&disk.meta.base.path) else { continue };
        let others = disks.iter().enumerate().filter(|(other, _)| *other != at);
        let files = others.flat_map(|(_, other)| {
            other.meta.base.files.iter().map(move |file| (&other.meta.name, &file.path))
        });
        let media = read.iter().filter(|file| file.is_medium);
        let mut all = files.chain(media.map(|file| (&file.option, &file.path)));
        if let Some((second, _)) = all.find(|(_, path)| identity(path) == Some(own)) {
            return Err(Error::ImageUsedTwice {
                first: disk.meta.name.clone(),
                second: second.clone(),
                image: disk.meta.base.path.clone().into(),
            });
        }
    }
    Ok(())
}

/// Checks that no file beneath `disks` is the image of one of `left_out`, to which QEMU writes.
///
/// Error: [`Error::ImageUsedTwice`].
pub fn require_apart_from(disks: &[DiskToServe], left_out: &[Drive]) -> Result<()> {
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    for written in left_out.iter().filter(|drive| !drive.remote) {
        let Some(own) = identity(&written.image) else { continue };
        let is_beneath = |disk: &&DiskToServe| {
            let base = &disk.meta.base;
            let files = base.files.iter().map(|file| &file.path).chain([&base.path]);
            files.into_iter().any(|path| identity(Path::new(path)) == Some(own))
        };
        if let Some(disk) = disks.iter().find(is_beneath) {
            return Err(Error::ImageUsedTwice {
                first: disk.meta.name.clone(),
                second: written.name.clone(),
                image: written.image.clone(),
            });
        }
    }
    Ok(())
}

/// Disks that a separate process serves, with the directory of their overlays.
pub struct ServedDisks {
    /// The connection to the process that serves the disks.
    pub disks: Disks,
    /// The directory of the overlays.
    pub directory: OverlayDirectory,
    /// The description of each disk.
    pub metas: Vec<DiskMeta>,
    /// For each disk, true if the guest's writes are discarded at the end.
    pub temporary: Vec<bool>,
    /// The content of `disks.json`.
    info: OverlayInfo,
    /// The number of rollbacks so far. Each creates new overlays.
    round: u32,
}

/// Starts a process that serves `disks` on `socket`. Their overlays are in a new directory of VM
/// `vm` in `store`. `checkpoint` is the one that the VM was restored from; `None` for a VM that was
/// not restored.
///
/// Errors: an image cannot be opened; the directory cannot be created; the process does not start.
/// After an error the directory is removed.
pub fn serve(
    store: &Store,
    vm: &str,
    checkpoint: Option<u64>,
    disks: Vec<DiskToServe>,
    socket: &Path,
) -> Result<ServedDisks> {
    serve_in(OverlayDirectory::claim(store, vm, None)?, vm, checkpoint, disks, socket)
}

/// Serves disks as [`serve`] does, with overlays in `directory`. `checkpoint` is the one that the
/// VM was restored from; `None` for a VM that was not restored. Returns the served disks. Errors:
/// those of [`serve`]. After an error `directory` is removed.
pub fn serve_in(
    directory: OverlayDirectory,
    vm: &str,
    checkpoint: Option<u64>,
    disks: Vec<DiskToServe>,
    socket: &Path,
) -> Result<ServedDisks> {
    match start(&directory, vm, checkpoint, disks, socket) {
        Ok(Started { disks, metas, temporary, info }) => {
            Ok(ServedDisks { disks, directory, metas, temporary, info, round: 0 })
        }
        Err(error) => {
            directory.remove();
            Err(error)
        }
    }
}

/// A server that has started.
struct Started {
    disks: Disks,
    metas: Vec<DiskMeta>,
    temporary: Vec<bool>,
    info: OverlayInfo,
}

fn start(
    directory: &OverlayDirectory,
    vm: &str,
    checkpoint: Option<u64>,
    disks: Vec<DiskToServe>,
    socket: &Path,
) -> Result<Started> {
    let specs = specs(directory, &disks, 0)?;
    match std::fs::remove_file(socket) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io("remove", socket, e));
        }
        _ => {}
    }
    let mut command = server();
    keys::pass_on(&mut command);
    let served = Disks::spawn(command, socket, &specs)?;
    let temporary = disks.iter().map(|disk| disk.temporary).collect();
    let sized = |(disk, bytes): (DiskToServe, &u64)| DiskMeta { disk_bytes: *bytes, ..disk.meta };
    let metas: Vec<DiskMeta> = disks.into_iter().zip(served.disk_bytes()).map(sized).collect();
    let overlays = specs.iter().map(|spec| spec.overlay.display().to_string());
    let info = OverlayInfo {
        vm: vm.into(),
        began: jiff::Timestamp::now(),
        checkpoint,
        disks: metas.iter().cloned().zip(overlays).collect(),
    };
    directory.describe(&info)?;
    Ok(Started { disks: served, metas, temporary, info })
}

/// The command of the process that serves disks: this program with a hidden first argument.
fn server() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("keyframe").arg("__disks");
    command
}

/// Describes each disk for the server. `round` distinguishes the overlays of successive rollbacks
/// in one directory.
fn specs(directory: &OverlayDirectory, disks: &[DiskToServe], round: u32) -> Result<Vec<DiskSpec>> {
    let spec = |(index, disk): (usize, &DiskToServe)| {
        let (name, base) = (&disk.meta.name, &disk.meta.base);
        let blank_bytes = base.is_blank().then_some(disk.meta.disk_bytes);
        let format = ImageFormat::named(&base.format).or(blank_bytes.map(|_| ImageFormat::Raw));
        let format = format.ok_or_else(|| Error::UnknownFormat {
            disk: name.clone(),
            format: base.format.clone(),
        })?;
        let mut overlay = directory.overlay(index, name);
        if round > 0 {
            overlay.set_file_name(format!(
                "{}.{round}",
                overlay.file_name().unwrap_or_default().display()
            ));
        }
        Ok(DiskSpec {
            export: name.clone(),
            base: base.path.clone().into(),
            format,
            blank_bytes,
            overlay,
            layer: disk.layer.clone(),
            temporary: disk.temporary,
        })
    };
    disks.iter().enumerate().map(spec).collect()
}

impl ServedDisks {
    /// Ends the server. If `keep` is true and the guest has written data that is not temporary,
    /// keeps the directory of the overlays and returns its path. Otherwise removes the directory
    /// and returns `None`.
    ///
    /// Errors: the server does not answer, or does not end. Then the directory stays.
    pub fn end(self, keep: bool) -> Result<Option<PathBuf>> {
        let Self { mut disks, directory, temporary, .. } = self;
        let stats = disks.stats()?;
        let ended = disks.end();
        let written =
            |(disk, temporary): (&keyframe_disk::DiskStats, &bool)| disk.extents > 0 && !temporary;
        let lasts = keep && stats.disks.iter().zip(&temporary).any(written);
        if !lasts && ended.is_ok() {
            directory.remove();
            return Ok(None);
        }
        ended?;
        Ok(Some(directory.path().to_owned()))
    }
}
