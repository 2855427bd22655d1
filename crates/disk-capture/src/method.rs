//! Which way the disks of a session go into checkpoints, and which stay out.
//!
//! | `--disk` | `run` | `attach` |
//! |---|---|---|
//! | `served` | the line names our server; images are never written | refused: QEMU has its images open |
//! | `reflink` | QEMU writes to its images, which are cloned | the same |
//! | `bitmap` | QEMU writes to its images, and is asked what changed | the same |
//! | `auto` | served | reflink where it is cheap, else bitmap |
//!
//! Under `run`, `auto` never depends on the file system. A user must know beforehand whether QEMU
//! writes to the images.

use crate::error::{CloneObstacle, DiskError, Result};
use crate::event::SharedDiskEventSink;
use crate::qemu_disk::{QemuDisk, tell};
use crate::{ClonedDiskCapture, DiskCapture, FleecedDiskCapture};
use keyframe_disk::ImageFormat;
use keyframe_qemu::{DiskNames, Drive, LibvirtDisk, LineDisk, LineDrive, Vm, fleece};
use keyframe_store::{BaseMeta, DiskMeta, Store};
use keyframe_vm_disks::base_image;
use std::path::Path;
use std::sync::Arc;

/// The method that captures disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum DiskMethod {
    /// `run` serves the disks. `attach` clones the images if that is cheap for all of them, and
    /// uses bitmaps otherwise.
    #[default]
    Auto,
    /// Keyframe serves them, and leaves the images as they are (`run` alone).
    Served,
    /// QEMU writes to its images. Its dirty bitmaps tell the written blocks, which are read after
    /// the pause.
    Bitmap,
    /// QEMU writes to its images. The file system clones them in each pause (btrfs, XFS).
    Reflink,
}

/// A VM of QEMU that opens its disks' images itself.
pub struct DiskOwner<'a> {
    /// Its name, unique among a group's members.
    pub name: &'a str,
    /// The working directory of its QEMU.
    pub directory: &'a Path,
    /// Its QEMU.
    pub vm: &'a mut Vm,
}

/// The names of the disks that checkpoints leave out. The name `all` stands for all disks.
#[derive(Clone, Debug, Default)]
pub struct ExcludedDisks(pub Vec<String>);

impl ExcludedDisks {
    /// Returns the names that the disks `drives` have on the command line of a VM, whose disks have
    /// the prefix `prefix` in checkpoints. The id of a device stands for its disk, unless a disk
    /// has that name.
    pub fn in_line(&self, prefix: &str, drives: &[LineDrive]) -> DiskNames {
        if self.0.iter().any(|name| name == "all") {
            return DiskNames::All;
        }
        let of_line = |name: &String| {
            let own = name.strip_prefix(prefix).filter(|_| !prefix.is_empty()).map(str::to_owned);
            [name.clone()].into_iter().chain(own)
        };
        let named: Vec<String> =
            self.0.iter().filter(|name| !name.is_empty()).flat_map(of_line).collect();
        let is_drive = |name: &String| {
            let one = DiskNames::of([name.clone()]);
            drives.iter().any(|drive| drive.is_in(&one))
        };
        let of_devices = named.iter().filter(|name| !is_drive(name)).flat_map(|id| {
            drives.iter().filter(|drive| drive.is_of_device(id)).map(|drive| drive.name.clone())
        });
        let of_devices: Vec<String> = of_devices.collect();
        DiskNames::of(named.into_iter().chain(of_devices))
    }
}

/// Resolves the method `way` for the disks of VMs that are about to be launched. Error: a disk does
/// not allow it.
pub fn for_launch(way: DiskMethod, drives: &[Drive]) -> Result<DiskMethod> {
    match way {
        DiskMethod::Auto | DiskMethod::Served => Ok(DiskMethod::Served),
        DiskMethod::Bitmap => Ok(DiskMethod::Bitmap),
        DiskMethod::Reflink if drives.is_empty() => Ok(DiskMethod::Served),
        DiskMethod::Reflink => {
            for drive in drives {
                let objection = if drive.temporary {
                    Some(CloneObstacle::Temporary(drive.name.clone()))
                } else if drive.remote {
                    Some(CloneObstacle::NoFile(drive.name.clone()))
                } else if drive.slice.is_some() {
                    Some(CloneObstacle::Slice(drive.name.clone()))
                } else {
                    crate::image_clones::objection(&drive.image, format_of(drive), false)
                };
                if let Some(why) = objection {
                    return Err(DiskError::NotCloneable(why));
                }
            }
            Ok(DiskMethod::Reflink)
        }
    }
}

fn format_of(drive: &Drive) -> Option<ImageFormat> {
    match drive.format.as_deref() {
        Some(name) => ImageFormat::named(name),
        None => ImageFormat::probe(&drive.image).ok(),
    }
}

/// Makes the capture of disks whose images QEMU itself has open. `None` if the guests can write to
/// no disk. Error: a disk cannot be captured in this way, with the reason.
pub fn own(
    (store, name, run_dir): (&Store, &str, &Path),
    (found, is_group): (&mut [DiskOwner<'_>], bool),
    way: DiskMethod,
    leave_out: &ExcludedDisks,
    events: &SharedDiskEventSink,
) -> Result<Option<Box<dyn DiskCapture>>> {
    // An engine that was killed may have left nodes above the disks.
    found.iter_mut().try_for_each(|one| fleece::sweep(one.vm.qmp()).map(drop))?;
    let mut disks = all_disks(found, is_group)?;
    leave(&mut disks, leave_out)?;
    for (member, one) in found.iter_mut().enumerate() {
        tell(one.vm, member, &disks);
    }
    if disks.is_empty() {
        return Ok(None);
    }
    let mut captured = disks.iter().filter(|disk| !disk.left_out);
    if let Some(error) = captured.find_map(|disk| disk.refused.clone()) {
        return Err(keyframe_qemu::Error::from(error).into());
    }
    for one in found.iter_mut() {
        if let Some(job) = fleece::other_job(one.vm.qmp())? {
            return Err(DiskError::OtherJob(job));
        }
    }
    let kept = || disks.iter().filter(|disk| !disk.left_out);
    let objection = kept().find_map(|disk| {
        if disk.temporary {
            return Some(CloneObstacle::Temporary(disk.meta.name.clone()));
        }
        if disk.remote {
            return Some(CloneObstacle::NoFile(disk.meta.name.clone()));
        }
        if disk.slice.is_some() {
            return Some(CloneObstacle::Slice(disk.meta.name.clone()));
        }
        crate::image_clones::objection(&disk.image, disk.format, way == DiskMethod::Auto)
    });
    match (way, objection) {
        (DiskMethod::Served, _) => Err(DiskError::AlreadyOpen),
        (DiskMethod::Reflink, Some(why)) => Err(DiskError::NotCloneable(why)),
        (DiskMethod::Reflink | DiskMethod::Auto, None) => {
            cloned(store, name, disks, events).map(Some)
        }
        (DiskMethod::Bitmap | DiskMethod::Auto, _) => {
            fleeced((store, run_dir), disks, found, events).map(Some)
        }
    }
}

/// Adds the disks that are left out, which QEMU has opened, to the captured disks `served`. `None`
/// if the guests can write to no disk. Error: QEMU does not answer.
pub fn beside_served(
    (store, name): (&Store, &str),
    (found, is_group): (&mut [DiskOwner<'_>], bool),
    served: Option<Box<dyn DiskCapture>>,
    leave_out: &ExcludedDisks,
    events: &SharedDiskEventSink,
) -> Result<Option<Box<dyn DiskCapture>>> {
    if leave_out.0.is_empty() {
        return Ok(served);
    }
    let mut disks = all_disks(found, is_group)?;
    leave(&mut disks, leave_out)?;
    disks.retain(|disk| disk.left_out);
    for (member, one) in found.iter_mut().enumerate() {
        tell(one.vm, member, &disks);
    }
    match served {
        Some(mut served) => {
            served.leave_out(disks.into_iter().map(|disk| disk.meta).collect());
            Ok(Some(served))
        }
        None if disks.is_empty() => Ok(None),
        None => cloned(store, name, disks, events).map(Some),
    }
}

fn all_disks(found: &mut [DiskOwner<'_>], is_group: bool) -> Result<Vec<QemuDisk>> {
    let mut disks = Vec::new();
    for (member, one) in found.iter_mut().enumerate() {
        let prefix = if is_group { format!("{}/", one.name) } else { String::new() };
        disks.append(&mut disks_of(one.vm, one.directory, member, &prefix)?);
        for LibvirtDisk { target, device } in one.vm.libvirt_disks()? {
            let is_it = |d: &&mut QemuDisk| d.member == member && d.device_names.contains(&device);
            disks.iter_mut().filter(is_it).for_each(|d| d.device_names.push(target.clone()));
        }
    }
    Ok(disks)
}

fn cloned(
    store: &Store,
    name: &str,
    mut disks: Vec<QemuDisk>,
    events: &SharedDiskEventSink,
) -> Result<Box<dyn DiskCapture>> {
    for disk in disks.iter_mut().filter(|disk| !disk.left_out) {
        if let Some(format) = disk.format {
            disk.meta.base = base_image::describe(&disk.image, format)?;
        }
    }
    Ok(Box::new(ClonedDiskCapture::new(store, name, disks, Arc::clone(events))?))
}

fn fleeced(
    (store, run_dir): (&Store, &Path),
    disks: Vec<QemuDisk>,
    found: &mut [DiskOwner<'_>],
    events: &SharedDiskEventSink,
) -> Result<Box<dyn DiskCapture>> {
    for (member, one) in found.iter_mut().enumerate() {
        let kept = disks.iter().filter(|disk| !disk.left_out && disk.member == member);
        let nodes: Vec<&str> = kept.map(|disk| disk.node.node.as_str()).collect();
        if let Some(node) = fleece::fragile_disk(one.vm.qmp(), &nodes)? {
            let disk = disks.iter().find(|disk| disk.node.node == node);
            let name = disk.map_or(node.clone(), |disk| disk.meta.name.clone());
            return Err(DiskError::ThrottledInIothread(name));
        }
    }
    let mut vms: Vec<&mut Vm> = found.iter_mut().map(|one| &mut *one.vm).collect();
    let fleeced = FleecedDiskCapture::new((store, run_dir), disks, &mut vms, Arc::clone(events))?;
    Ok(Box::new(fleeced))
}

fn disks_of(vm: &mut Vm, directory: &Path, member: usize, prefix: &str) -> Result<Vec<QemuDisk>> {
    let mut disks = Vec::new();
    for LineDisk { drive, node } in vm.line_disks(directory)? {
        // One that the line does not make is the audit's.
        let Some(drive) = drive else { continue };
        let device_names = node.device_id().map(str::to_owned).into_iter().collect();
        let meta = DiskMeta {
            name: format!("{prefix}{}", drive.name),
            disk_bytes: node.disk_bytes,
            base: BaseMeta::blank(),
            ..DiskMeta::default()
        };
        let LineDrive { aliases, drive, .. } = drive;
        let (drive, refused) = match drive {
            Ok(drive) => (Some(drive), None),
            Err(error) => (None, Some(error)),
        };
        let is = |property: fn(&Drive) -> bool| drive.as_ref().is_some_and(property);
        // With -snapshot QEMU writes to a file of its own.
        let (temporary, remote) = (is(|drive| drive.temporary), is(|drive| drive.remote));
        let slice = drive.as_ref().and_then(|drive| drive.slice.clone());
        let format =
            if remote { Some(ImageFormat::Raw) } else { drive.as_ref().and_then(format_of) };
        let image = drive.map_or_else(|| node.file.clone().into(), |drive| drive.image);
        disks.push(QemuDisk {
            member,
            node,
            meta,
            aliases,
            device_names,
            refused,
            image,
            format,
            temporary,
            remote,
            slice,
            left_out: false,
        });
    }
    Ok(disks)
}

/// The numbers of the disks that `name` stands for: the disk of that name, or those of the device
/// of that name.
fn named(name: &str, disks: &[QemuDisk]) -> Vec<usize> {
    let which = |is: &dyn Fn(&QemuDisk) -> bool| -> Vec<usize> {
        disks.iter().enumerate().filter(|(_, disk)| is(disk)).map(|(number, _)| number).collect()
    };
    let is = |one: &String| one == name;
    let own = which(&|disk| {
        let names = [&disk.meta.name, &disk.node.device, &disk.node.node];
        name == "all" || names.into_iter().any(is) || disk.aliases.iter().any(is)
    });
    if own.is_empty() { which(&|disk| disk.device_names.iter().any(is)) } else { own }
}

/// Marks those that stay out.
fn leave(disks: &mut [QemuDisk], leave_out: &ExcludedDisks) -> Result<()> {
    for name in leave_out.0.iter().filter(|name| !name.is_empty()) {
        let which = named(name, disks);
        if which.is_empty() && name != "all" {
            let (name, disks) = (name.clone(), disks.iter().map(QemuDisk::all_names).collect());
            return Err(DiskError::UnknownDisk { name, disks });
        }
        for number in which {
            if let Some(disk) = disks.get_mut(number) {
                disk.left_out = true;
            }
        }
    }
    for disk in disks.iter_mut().filter(|disk| disk.left_out) {
        let format = disk.format.map_or_else(|| disk.node.driver.clone(), |f| f.to_string());
        disk.meta.base =
            BaseMeta { path: disk.image.display().to_string(), format, files: Vec::new() };
        disk.meta.left_out = true;
    }
    Ok(())
}
