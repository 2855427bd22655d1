//! What a line says of the images beneath a disk.
//!
//! ```text
//!   -blockdev qcow2,node-name=d,file=s,backing=b    ──▶ [image of b, image beneath b, ...]
//!   -blockdev {"driver":"qcow2",...,"backing":null} ──▶ [], complete
//!   -blockdev qcow2,node-name=d,file=s              ──▶ [], what the image's header names
//! ```

use super::block_nodes::{BlockNodes, Child, NodeKeys};
use super::{is_local, remote_drive_error};
use crate::options::Argument;
use crate::{CommandLineError, Result};
use std::path::PathBuf;

/// The images beneath a disk's own image, as far as its command line names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backing {
    /// The images that the command line names, the topmost first.
    pub images: Vec<BackingImage>,
    /// True if the command line says that there is none beneath the last of them. If false, the
    /// header of the last one tells what is beneath it.
    pub complete: bool,
}

/// An image beneath a disk's own image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingImage {
    /// Its file, as the command line names it.
    pub image: PathBuf,
    /// Its format, `raw` or `qcow2`; `None` if the command line leaves it to QEMU to find out.
    pub format: Option<String>,
}

/// More than any chain has; a chain that contains itself must end.
const IMAGES_MAX: usize = 64;

/// Reads what `argument` says of the images beneath `node`, with the nodes that it names.
///
/// Error: [`CommandLineError::Argument`] for a chain that is not made of raw and qcow2 files.
pub(super) fn backing_of(
    argument: &Argument,
    nodes: &BlockNodes,
    node: NodeKeys<'_>,
) -> Result<Backing> {
    let mut backing = Backing::default();
    let mut above = node;
    loop {
        let node = match nodes.child(&above, "backing") {
            Child::Unstated => return Ok(backing),
            Child::Absent => return Ok(Backing { complete: true, ..backing }),
            Child::Unknown(name) => return Err(unknown_node_error(argument, name)),
            Child::Node(node) => node,
        };
        if backing.images.len() >= IMAGES_MAX {
            return Err(CommandLineError::Argument {
                argument: argument.display(),
                reason: format!("it names more than {IMAGES_MAX} images beneath the disk"),
                fix: "join them: qemu-img convert or qemu-img commit".into(),
            });
        }
        backing.images.push(image_of(argument, nodes, &node)?);
        above = node;
    }
}

fn image_of(argument: &Argument, nodes: &BlockNodes, node: &NodeKeys<'_>) -> Result<BackingImage> {
    let driver = node.value("driver").unwrap_or_default();
    if is_local(driver) {
        let image = node.value("filename").map(PathBuf::from);
        let image = image.ok_or_else(|| remote_drive_error(argument, driver))?;
        return Ok(BackingImage { image, format: Some("raw".into()) });
    }
    let whole_file = || node.value("offset").is_none() && node.value("size").is_none();
    if !matches!(driver, "" | "raw" | "qcow2") || !whole_file() {
        return Err(CommandLineError::Argument {
            argument: argument.display(),
            reason: format!(
                "an image beneath this disk is opened by the driver {driver:?}; Keyframe reads \
                 whole files in the formats raw and qcow2"
            ),
            fix: "convert it (qemu-img convert), or let QEMU open the disk (--disk bitmap)".into(),
        });
    }
    let file = match nodes.child(node, "file") {
        Child::Node(file) => file,
        Child::Unknown(name) => return Err(unknown_node_error(argument, name)),
        Child::Unstated | Child::Absent => return Err(remote_drive_error(argument, driver)),
    };
    let protocol = file.value("driver").unwrap_or("file");
    match file.value("filename").filter(|_| is_local(protocol)) {
        Some(path) => {
            let format = Some(driver.to_owned()).filter(|driver| !driver.is_empty());
            Ok(BackingImage { image: path.into(), format })
        }
        None => Err(remote_drive_error(argument, protocol)),
    }
}

pub(super) fn unknown_node_error(argument: &Argument, name: &str) -> CommandLineError {
    CommandLineError::Argument {
        argument: argument.display(),
        reason: format!("no -blockdev of the line has the node name {name}"),
        fix: "define it with -blockdev too".into(),
    }
}
