//! The disks that a guest can write to, as QEMU has them, and which words of the VM's line each of
//! them is.
//!
//! ```text
//!   the line      -drive file=a.img,id=d ─┐ by name, or by the file that both name
//!   query-block   device d, node #block1 ─┴─▶ LineDisk: the drive's name for checkpoints, the node for the monitor
//! ```
//!
//! Invariant: a disk that the line does not make has no name here, as no restore could make it.

use crate::machine_shape::get;
use crate::{Qmp, Result, Vm};
use keyframe_qemu_cmdline::{
    DiskNames, LineDrive, line_drives,
    options::{self, Argument, value_of},
};
use serde_json::{Value, json};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A disk that the guest can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WritableNode {
    /// The name of its block backend; empty if it has none.
    pub device: String,
    /// The id or QOM path of the device that uses it; empty if none does.
    pub qdev: String,
    /// The name of its topmost node.
    pub node: String,
    /// The image's name, as QEMU opened it.
    pub file: String,
    /// Its driver: `raw`, `qcow2`, ...
    pub driver: String,
    /// The size of the disk in bytes.
    pub disk_bytes: u64,
    /// True if QEMU reads it by direct I/O.
    pub is_direct: bool,
    /// True if the image has internal snapshots, to which the VM's user can go back (`loadvm`).
    pub has_snapshots: bool,
}

impl WritableNode {
    /// Returns true if `other` is the same disk, perhaps under a filter of a job, which has a name
    /// of its own and shows the file of the node beneath it.
    pub fn is_same_disk(&self, other: &Self) -> bool {
        self.device == other.device && self.file == other.file
    }

    /// Returns true if `other` is in the same place of the machine, perhaps over another image.
    pub fn is_in_same_place(&self, other: &Self) -> bool {
        !self.qdev.is_empty() && self.device == other.device && self.qdev == other.qdev
    }

    /// Returns the id of the device that uses it; `None` if that has none.
    pub fn device_id(&self) -> Option<&str> {
        let id = match self.qdev.strip_prefix("/machine/peripheral/") {
            Some(within) => within.split('/').next()?,
            None if self.qdev.starts_with('/') => return None,
            None => &self.qdev,
        };
        Some(id).filter(|id| !id.is_empty())
    }

    pub(crate) fn of(block: &Value) -> Option<Self> {
        let inserted = block.get("inserted")?;
        // What is not said to be read-only is not.
        if inserted.get("ro").and_then(Value::as_bool) == Some(true) {
            return None;
        }
        let text = |value: &Value, key: &str| {
            value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        Some(Self {
            device: text(block, "device"),
            qdev: text(block, "qdev"),
            node: text(inserted, "node-name"),
            file: text(inserted, "file"),
            driver: text(inserted, "drv"),
            disk_bytes: inserted.get("image")?.get("virtual-size")?.as_u64()?,
            is_direct: inserted.pointer("/cache/direct").and_then(Value::as_bool) == Some(true),
            has_snapshots: inserted.pointer("/image/snapshots/0").is_some(),
        })
    }
}

/// A disk that the guest can write to, with its drive on the VM's command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineDisk {
    /// Its drive on the command line; `None` if the line does not define it.
    pub drive: Option<LineDrive>,
    /// QEMU's node of the disk.
    pub node: WritableNode,
}

/// The disks that the guest can write to.
pub(crate) fn writable(qmp: &mut Qmp) -> Result<Vec<WritableNode>> {
    let blocks = qmp.execute("query-block", None)?;
    let Some(all) = blocks.as_array() else { return Err(qmp.unexpected("query-block", &blocks)) };
    Ok(all.iter().filter_map(WritableNode::of).collect())
}

impl Vm {
    /// Returns true if the device of `disk` was there when the VM started. Error: QEMU does not
    /// answer.
    pub fn is_from_start(&mut self, disk: &WritableNode) -> Result<bool> {
        let path = match &disk.qdev {
            id if id.is_empty() => return Ok(false),
            path if path.starts_with('/') => path.clone(),
            id => format!("/machine/peripheral/{id}"),
        };
        match get(self.qmp(), &path, "hotplugged") {
            Ok(is_hotplugged) => Ok(is_hotplugged == json!(false)),
            // It has gone.
            Err(crate::Error::Refused { .. }) => Ok(false),
            Err(other) => Err(other),
        }
    }

    /// Returns the disks that the guest can write to now. Error: QEMU does not answer.
    pub fn writable_nodes(&mut self) -> Result<Vec<WritableNode>> {
        writable(self.qmp())
    }

    /// Returns true if the block node `node` exists, also beneath others. Error: QEMU does not
    /// answer.
    pub fn has_block_node(&mut self, node: &str) -> Result<bool> {
        let nodes = self.qmp().execute("query-named-block-nodes", Some(json!({ "flat": true })))?;
        let mut all = nodes.as_array().into_iter().flatten();
        Ok(all.any(|found| found.get("node-name").and_then(Value::as_str) == Some(node)))
    }

    /// Returns the disks that the guest can write to, each with its drive on the VM's command line,
    /// whose relative paths begin at `directory`.
    ///
    /// Errors: [`crate::Error::CommandLine`] if the line cannot be parsed; QEMU does not answer.
    pub fn line_disks(&mut self, directory: &Path) -> Result<Vec<LineDisk>> {
        let nodes = writable(self.qmp())?;
        if nodes.is_empty() {
            return Ok(Vec::new());
        }
        let line = options::parse(self.user_command().get(1..).unwrap_or_default())?;
        Ok(matched(line_drives(&line)?, nodes, directory))
    }
}

/// Returns what a device of `line` names to use the disk `disk`; `None` if the line does not make
/// it. Relative paths begin at `directory`.
pub(crate) fn drive_on_line(
    line: &[Argument],
    disk: &WritableNode,
    directory: &Path,
) -> Option<String> {
    let drive = matched(line_drives(line).ok()?, vec![disk.clone()], directory).pop()?.drive?;
    // It can name a filter above the disk.
    let of_device = options::devices(line)
        .filter(|keys| value_of(keys, "id").is_some_and(|id| drive.is_of_device(id)))
        .find_map(|keys| value_of(&keys, "drive").map(str::to_owned));
    Some(of_device.unwrap_or(drive.name))
}

fn matched(
    mut drives: Vec<LineDrive>,
    nodes: Vec<WritableNode>,
    directory: &Path,
) -> Vec<LineDisk> {
    let mut disks: Vec<LineDisk> =
        nodes.into_iter().map(|node| LineDisk { drive: None, node }).collect();
    // By name first: two nodes can be over one file, where the guest sees it through an overlay of
    // QEMU's.
    for disk in &mut disks {
        let names =
            [&disk.node.device, &disk.node.node].into_iter().filter(|name| !name.is_empty());
        let names = DiskNames::of(names);
        disk.drive = drives.iter().position(|d| d.is_in(&names)).map(|at| drives.remove(at));
    }
    for disk in disks.iter_mut().filter(|disk| disk.drive.is_none()) {
        let same = |drive: &LineDrive| {
            let image = drive.drive.as_ref().map(|drive| directory.join(&drive.image));
            image.is_ok_and(|image| same_file(&image, &directory.join(&disk.node.file)))
        };
        disk.drive = drives.iter().position(same).map(|at| drives.remove(at));
    }
    for disk in &mut disks {
        disk.drive = disk.drive.take().map(|found| LineDrive {
            drive: found.drive.map(|drive| drive.at(directory)),
            ..found
        });
    }
    disks
}

fn same_file(a: &PathBuf, b: &PathBuf) -> bool {
    let number = |path| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    a == b || number(a).is_some_and(|of_a| number(b) == Some(of_a))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_qemu_cmdline::{Backing, CommandLineError, Drive};

    fn node(device: &str, file: &str) -> WritableNode {
        let image = json!({ "virtual-size": 512 });
        let inserted = json!({ "ro": false, "file": file, "drv": "raw", "node-name": "#block1", "image": image });
        WritableNode::of(&json!({ "device": device, "inserted": inserted })).unwrap()
    }

    fn drive(name: &str, image: &str) -> LineDrive {
        let drive = Drive {
            name: name.into(),
            image: image.into(),
            format: None,
            temporary: false,
            remote: false,
            backing: Backing::default(),
            slice: None,
        };
        let (aliases, devices) = (Vec::new(), Vec::new());
        LineDrive { name: name.into(), aliases, devices, drive: Ok(drive) }
    }

    #[test]
    fn a_device_is_known_by_its_id_whatever_part_of_it_has_the_disk() {
        let id = |qdev: &str| {
            let node = WritableNode { qdev: qdev.into(), ..node("", "a") };
            node.device_id().map(str::to_owned)
        };
        assert_eq!(id("scsi0-0").unwrap(), "scsi0-0");
        assert_eq!(id("/machine/peripheral/virtio-disk0/virtio-backend").unwrap(), "virtio-disk0");
        assert_eq!(id("/machine/peripheral-anon/device[0]/virtio-backend"), None);
        assert_eq!(id(""), None);
    }

    #[test]
    fn disks_are_found_in_the_line_by_name_or_by_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("b.img"), "b").unwrap();
        std::os::unix::fs::symlink("b.img", dir.path().join("link")).unwrap();
        let nodes = vec![node("virtio0", "link"), node("d", "/tmp/vl.x"), node("plugged", "c.img")];
        let drives = vec![drive("d", "a.img"), drive("virtio-0", "b.img")];
        let found = matched(drives, nodes, dir.path());
        let names: Vec<_> =
            found.iter().map(|disk| disk.drive.as_ref().map(|d| d.name.as_str())).collect();
        assert_eq!(names, [Some("virtio-0"), Some("d"), None]);
        let image = |disk: &LineDisk| disk.drive.clone().unwrap().drive.unwrap().image;
        assert_eq!(image(&found[0]), dir.path().join("b.img"));
    }

    #[test]
    fn a_disk_on_a_node_of_another_name_is_found_in_the_line_by_its_file() {
        let words = ["-blockdev", "raw,node-name=e,file.driver=file,file.filename=/a.img"];
        let device = ["-device", "virtio-blk-pci,drive=e,id=b1"];
        let words: Vec<String> = words.into_iter().chain(device).map(str::to_owned).collect();
        let line = options::parse(&words).unwrap();
        let other = WritableNode { node: "e2".into(), ..node("", "/a.img") };
        assert_eq!(drive_on_line(&line, &other, Path::new("/")).as_deref(), Some("e"));
        assert_eq!(drive_on_line(&line, &node("", "/b.img"), Path::new("/")), None);
    }

    #[test]
    fn a_disk_that_cannot_be_served_is_found_by_the_names_of_the_line() {
        let line = ["-blockdev", "throttle,node-name=#block1,throttle-group=g,file=luks"];
        let below = ["-blockdev", "luks,node-name=luks,key-secret=s,file.driver=file"];
        let words: Vec<String> = line.into_iter().chain(below).map(str::to_owned).collect();
        let drives = line_drives(&options::parse(&words).unwrap()).unwrap();
        let found = matched(drives, vec![node("", "a")], Path::new("/"));
        let drive = found[0].drive.as_ref().unwrap();
        assert_eq!(drive.name, "luks");
        assert!(matches!(drive.drive, Err(CommandLineError::Argument { .. })));
    }

    #[test]
    fn what_is_read_only_or_empty_is_no_disk_to_write_to() {
        assert_eq!(WritableNode::of(&json!({ "device": "floppy0" })), None);
        assert_eq!(WritableNode::of(&json!({ "device": "d", "inserted": { "ro": true } })), None);
    }
}
