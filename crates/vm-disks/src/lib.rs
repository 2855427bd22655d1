//! A VM's disks: from the line that names images to a process that serves them.
//!
//! ```text
//!   run      -drive file=a.img  ──▶ Wanted ──┐                       image a.img, untouched
//!   restore  a checkpoint's disks ──▶ Wanted ─┴─serve──▶ __disks ──▶ (blocks of the checkpoint)
//!                                                           └──────▶ overlay in STORE/disks/NAME.1/
//!
//!   commit, export, mount          StoredDisk ──▶ blocks of the checkpoint over image a.img, for reading
//! ```

pub mod base;
pub mod forget;
pub mod layer;
pub mod media;
pub mod place;
pub mod restored;
pub mod standing;
pub mod stored;
pub mod vm_name;
pub mod writing;

use keyframe_disk::{Disks, ImageFormat, Spec};
use keyframe_failure::Failure;
use keyframe_qemu::Drive;
use keyframe_store::{DiskMeta, Store};
use keyframe_store_keys as keys;
use place::{Info, Place};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// A disk that is to be served.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// What is known of it; its size is not, before it is served.
    pub meta: DiskMeta,
    /// The checkpoint's blocks between its image and its overlay, as a [`layer::Source`].
    pub layer: Option<String>,
    /// What is written is to be thrown away at the end.
    pub temporary: bool,
}

impl Wanted {
    /// The disk that `drive` of a line says. `prefix` is what its name begins with.
    pub fn of_drive(drive: &Drive, prefix: &str) -> Result<Self, Failure> {
        if drive.remote {
            let (name, address) = (&drive.name, drive.image.display());
            return Err(Failure::new(format!(
                "drive {name}: the guest can write to it, and it is no file but an export ({address}): Keyframe serves images that \
                 are files (raw or qcow2) and block devices"
            ))
            .fix(
                "let QEMU tell what is written to it (--disk bitmap), copy it to a file (qemu-img convert), or make the drive \
                 read-only (readonly=on)",
            ));
        }
        let format = match drive.format.as_deref() {
            Some(name) => ImageFormat::named(name).ok_or_else(|| {
                Failure::new(format!("drive {}: images in format {name} cannot be served", drive.name)).fix(
                    format!(
                        "convert it (qemu-img convert -O qcow2 {} NEW.qcow2), or make the drive read-only (readonly=on)",
                        drive.image.display()
                    ),
                )
            })?,
            None => ImageFormat::probe(&drive.image).map_err(|e| Failure::new(e.to_string()))?,
        };
        let meta = DiskMeta {
            name: format!("{prefix}{}", drive.name),
            base: base::describe(&drive.image, format)?,
            ..DiskMeta::default()
        };
        Ok(Self { meta, layer: None, temporary: drive.temporary })
    }
}

/// Disks that are served, and where what is written to them lies.
pub struct Served {
    /// The hold of the process that serves them.
    pub disks: Disks,
    /// Where their overlays are.
    pub place: Place,
    /// What is known of them.
    pub metas: Vec<DiskMeta>,
    /// For each, whether its writes are to be thrown away.
    pub temporary: Vec<bool>,
    /// What is said of the place.
    info: Info,
    /// How often the VM was to go back to a checkpoint: each time its overlays are others.
    round: u32,
}

/// Starts a process that serves `wanted` on `socket`, with overlays in a place of `vm`'s own in
/// `store`.
pub fn serve(
    store: &Store,
    vm: &str,
    checkpoint: Option<u64>,
    wanted: Vec<Wanted>,
    socket: &Path,
) -> Result<Served, Failure> {
    serve_in(Place::claim(store, vm)?, vm, checkpoint, wanted, socket)
}

/// The same, with overlays in `place`, which is removed where it fails.
pub fn serve_in(
    place: Place,
    vm: &str,
    checkpoint: Option<u64>,
    wanted: Vec<Wanted>,
    socket: &Path,
) -> Result<Served, Failure> {
    start(&place, vm, checkpoint, wanted, socket).inspect_err(|_| place.remove()).map(
        |(disks, metas, temporary, info)| Served { disks, place, metas, temporary, info, round: 0 },
    )
}

fn start(
    place: &Place,
    vm: &str,
    checkpoint: Option<u64>,
    wanted: Vec<Wanted>,
    socket: &Path,
) -> Result<(Disks, Vec<DiskMeta>, Vec<bool>, Info), Failure> {
    let specs = specs(place, &wanted, 0)?;
    match std::fs::remove_file(socket) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Failure::new(format!("remove {}: {e}", socket.display())));
        }
        _ => {}
    }
    let mut command = server();
    keys::pass_on(&mut command);
    let disks = Disks::spawn(&mut command, socket, &specs)
        .map_err(|e| Failure::new(keyframe_failure::chain(&e)))?;
    let temporary = wanted.iter().map(|disk| disk.temporary).collect();
    let sized = |(disk, bytes): (Wanted, &u64)| DiskMeta { disk_bytes: *bytes, ..disk.meta };
    let metas: Vec<DiskMeta> = wanted.into_iter().zip(disks.disk_bytes()).map(sized).collect();
    let overlays = specs.iter().map(|spec| spec.overlay.display().to_string());
    let info = Info {
        vm: vm.into(),
        began: jiff::Timestamp::now(),
        checkpoint,
        disks: metas.iter().cloned().zip(overlays).collect(),
    };
    place.describe(&info)?;
    Ok((disks, metas, temporary, info))
}

/// The process that serves disks.
fn server() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("keyframe").arg("__disks");
    command
}

/// What the server is told of them. `round` tells overlays that follow each other in one place
/// apart.
fn specs(place: &Place, wanted: &[Wanted], round: u32) -> Result<Vec<Spec>, Failure> {
    let spec = |(index, disk): (usize, &Wanted)| {
        let (name, base) = (&disk.meta.name, &disk.meta.base);
        let blank_bytes = base.is_blank().then_some(disk.meta.disk_bytes);
        let format = ImageFormat::named(&base.format).or(blank_bytes.map(|_| ImageFormat::Raw));
        let format = format
            .ok_or_else(|| Failure::new(format!("disk {name}: unknown format {}", base.format)))?;
        let mut overlay = place.overlay(index, name);
        if round > 0 {
            overlay.set_file_name(format!(
                "{}.{round}",
                overlay.file_name().unwrap_or_default().display()
            ));
        }
        Ok(Spec {
            export: name.clone(),
            base: base.path.clone().into(),
            format,
            blank_bytes,
            overlay,
            layer: disk.layer.clone(),
            temporary: disk.temporary,
        })
    };
    wanted.iter().enumerate().map(spec).collect()
}

impl Served {
    /// Ends the server and removes the place unless the guest has written something that is to
    /// last; that is where it is.
    pub fn end(self, keep: bool) -> Result<Option<std::path::PathBuf>, Failure> {
        let Self { mut disks, place, temporary, .. } = self;
        let stats = disks.stats().map_err(|e| Failure::new(keyframe_failure::chain(&e)))?;
        let ended = disks.end().map_err(|e| Failure::new(keyframe_failure::chain(&e)));
        let written =
            |(disk, temporary): (&keyframe_disk::Stats, &bool)| disk.extents > 0 && !temporary;
        let lasts = keep && stats.disks.iter().zip(&temporary).any(written);
        if !lasts && ended.is_ok() {
            place.remove();
            return Ok(None);
        }
        ended.map(|()| Some(place.path().to_owned()))
    }
}
