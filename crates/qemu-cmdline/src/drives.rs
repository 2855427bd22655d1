//! Finds the disks of a command line that the guest can write to, and rewrites the line so that a
//! disk server of Keyframe serves each of them.
//!
//! ```text
//!   user's   -drive file=a.qcow2,id=d,if=none,cache=none
//!            -blockdev qcow2,node-name=n,file=f ...
//!   run      -drive format=raw,file.driver=nbd,file.export=d,id=d,if=none
//!            -blockdev driver=nbd,node-name=n,...
//! ```
//!
//! Invariants: the guest sees the disk of the user's line (device, address, id, serial, write
//! cache). A disk that cannot be served is refused with reason and fix. The audit finds a disk that
//! this module does not find.
//!
//! Not handled here: opening images, and guessing a format that the line does not name.

mod backing;
mod block_nodes;
mod drive_option;

pub use backing::{Backing, BackingImage};

use crate::options::{self, Argument, is_on, value_of};
use crate::{CommandLineError, Result};
use block_nodes::BlockNodes;
pub(crate) use block_nodes::flattened_keys;
use drive_option::{GeneratedNames, drive_fate, drive_on_index};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A disk that the guest can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// The id or node name; if it has neither, a generated name that is unique in the line.
    pub name: String,
    /// The image, as the line names it.
    pub image: PathBuf,
    /// The image's format; `None` if the line does not name it.
    pub format: Option<String>,
    /// True if the line discards the guest's writes at the end (`-snapshot`).
    pub temporary: bool,
    /// True if `image` is the address of an NBD export. Only QEMU can read it.
    pub remote: bool,
    /// What the line says of the images beneath `image`.
    pub backing: Backing,
}

impl Drive {
    /// The drive with its files as absolute paths, if its relative ones begin at `directory`.
    #[must_use]
    pub fn at(mut self, directory: &Path) -> Self {
        if !self.remote {
            self.image = directory.join(&self.image);
            for below in &mut self.backing.images {
                below.image = directory.join(&below.image);
            }
        }
        self
    }
}

/// A server of disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskServer {
    /// The path of the server's unix socket.
    pub socket: PathBuf,
    /// The prefix of each export's name; the disk's name follows.
    pub prefix: String,
}

/// What happens to an argument of the line.
enum Fate {
    Kept,
    Removed,
    /// Served, with these keys kept, by keys at this place.
    Served(Drive, DriveKeys, Place),
}

/// Where the keys that lead to the disk server stand in an argument.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// `-drive`: they are those of its file.
    Drive,
    /// `-blockdev`: the node itself.
    Node,
    /// `-blockdev` of a filter: the node inside it.
    InFilter,
}

pub(crate) type DriveKeys = Vec<(String, String)>;

/// Returns the disks of a line that the guest can write to.
///
/// Error: [`CommandLineError::Argument`] for a disk that cannot be served.
pub fn drives(arguments: &[Argument]) -> Result<Vec<Drive>> {
    let fates = fates(arguments)?;
    Ok(fates
        .into_iter()
        .filter_map(|fate| match fate {
            Fate::Served(drive, ..) => Some(drive),
            _ => None,
        })
        .collect())
}

/// Returns the line `arguments` with its writable disks served by `server`.
///
/// Error: [`CommandLineError::Argument`] for a disk that cannot be served.
pub fn rewrite_drives(arguments: &[Argument], server: &DiskServer) -> Result<Vec<Argument>> {
    replace_drives(arguments, &|prefix, drive| export_keys(prefix, server, &drive.name))
}

/// Replaces the disks that the guest can write to by empty ones, for a QEMU that never runs. `sizes`
/// has their sizes in bytes, by name. Errors: those of [`writable_drives`];
/// [`CommandLineError::Argument`] for a disk that `sizes` lacks.
pub fn empty_drives(
    arguments: &[Argument],
    sizes: &BTreeMap<String, u64>,
) -> Result<Vec<Argument>> {
    replace_drives(arguments, &|prefix, drive| {
        let size = sizes.get(&drive.name).ok_or_else(|| CommandLineError::Argument {
            argument: drive.name.clone(),
            reason: "the size of this disk is not known".into(),
            fix: "leave the disk as it was when the checkpoint was taken".into(),
        })?;
        let keys = [("driver", "null-co"), ("size", &*size.to_string()), ("read-zeroes", "on")]
            .map(|(key, value)| (format!("{prefix}{key}"), value.to_owned()));
        Ok(keys.to_vec())
    })
}

/// Makes the keys of a disk's content, each with a prefix before it.
type ContentKeys<'a> = dyn Fn(&str, &Drive) -> Result<DriveKeys> + 'a;

fn replace_drives(arguments: &[Argument], content: &ContentKeys<'_>) -> Result<Vec<Argument>> {
    let mut line = Vec::with_capacity(arguments.len());
    for (argument, fate) in arguments.iter().zip(fates(arguments)?) {
        match fate {
            Fate::Kept => line.push(argument.clone()),
            Fate::Removed => {}
            Fate::Served(drive, kept, place) => line.push(replaced(&drive, kept, place, content)?),
        }
    }
    Ok(line)
}

fn replaced(
    drive: &Drive,
    kept: DriveKeys,
    place: Place,
    content: &ContentKeys<'_>,
) -> Result<Argument> {
    let (option, prefix) = match place {
        Place::Drive => ("drive", "file."),
        Place::Node => ("blockdev", ""),
        Place::InFilter => ("blockdev", "file."),
    };
    let mut keys: DriveKeys = Vec::new();
    if place == Place::Drive {
        keys.push(("format".into(), "raw".into()));
    }
    keys.extend(content(prefix, drive)?);
    // The overlay learns which blocks the guest discards.
    if place == Place::InFilter {
        keys.push(("file.discard".into(), "unmap".into()));
    }
    if value_of(&kept, "discard").is_none() {
        keys.push(("discard".into(), "unmap".into()));
    }
    keys.extend(kept);
    Ok(Argument::Option(option.into(), options::joined(&keys)))
}

/// Keys, each with `prefix` before it, that lead to the export for `name` at `server`.
pub(crate) fn export_keys(prefix: &str, server: &DiskServer, name: &str) -> Result<DriveKeys> {
    let socket = server.socket.to_str().ok_or_else(|| CommandLineError::Argument {
        argument: server.socket.display().to_string(),
        reason: "the path of the disks' socket is not UTF-8".into(),
        fix: "choose another run directory".into(),
    })?;
    let export = format!("{}{name}", server.prefix);
    let keys = [
        ("driver", "nbd"),
        ("server.type", "unix"),
        ("server.path", socket),
        ("export", &export),
        ("reconnect-delay", HOLD_SECONDS),
    ];
    Ok(keys.map(|(key, value)| (format!("{prefix}{key}"), value.into())).to_vec())
}

fn fates(arguments: &[Argument]) -> Result<Vec<Fate>> {
    let snapshot = arguments.iter().any(|a| a.name() == "snapshot");
    let nodes = BlockNodes::parse(arguments)?;
    let mut names = GeneratedNames::default();
    let mut fates = Vec::with_capacity(arguments.len());
    for (at, argument) in arguments.iter().enumerate() {
        fates.push(match (argument, argument.name()) {
            (Argument::Image(path), _) => drive_on_index(path, 0, snapshot, &mut names),
            (_, name @ ("hda" | "hdb" | "hdc" | "hdd")) => {
                let index = name.bytes().last().map_or(0, |letter| letter - b'a');
                drive_on_index(argument.value(), index, snapshot, &mut names)
            }
            (_, "drive") => drive_fate(argument, snapshot, &nodes, &mut names)?,
            (_, "blockdev") => nodes.fate(at, argument)?,
            // It would put an overlay of QEMU above the served disk.
            (_, "snapshot") => Fate::Removed,
            _ => Fate::Kept,
        });
    }
    Ok(fates)
}

/// True if the guest can only read the medium of a `-drive` with these keys.
pub(crate) fn is_read_only_drive(keys: &DriveKeys) -> bool {
    is_read_only(keys) || value_of(keys, "media") == Some("cdrom")
}

/// True if a drive or a node is declared read-only. Drives have both words, nodes the second.
pub(crate) fn is_read_only(keys: &DriveKeys) -> bool {
    is_on(keys, "readonly") || is_on(keys, "read-only")
}

pub(crate) fn is_one_of(key: &str, whole: &[&str], prefixes: &[&str]) -> bool {
    whole.contains(&key) || prefixes.iter().any(|prefix| key.starts_with(prefix))
}

/// For how long QEMU holds the guest's requests while no server answers: a day. The engine starts a
/// server that has ended again, and until then the guest must get no errors.
pub(crate) const HOLD_SECONDS: &str = "86400";

/// The driver of exports that QEMU reaches by NBD.
const NBD: &str = "nbd";

/// Address of the export that the keys with `prefix` lead to, in QEMU's form.
fn export_address(keys: &DriveKeys, prefix: &str) -> PathBuf {
    let of = |key: &str| value_of(keys, &format!("{prefix}{key}")).unwrap_or_default();
    let export = of("export");
    match (of("server.path"), of("path")) {
        ("", "") => format!("nbd://{}:{}/{export}", of("server.host"), of("server.port")).into(),
        ("", path) | (path, _) => format!("nbd+unix:///{export}?socket={path}").into(),
    }
}

fn is_local(driver: &str) -> bool {
    matches!(driver, "file" | "host_device")
}

/// The path that `file=` names.
///
/// Error: [`CommandLineError::Argument`] if it names a protocol instead.
fn local_path(argument: &Argument, file: &str) -> Result<PathBuf> {
    let protocol =
        || file.strip_prefix("file:").unwrap_or(file).split(':').next().unwrap_or_default();
    path_of(file).ok_or_else(|| remote_drive_error(argument, protocol()))
}

/// The path that `file=` names; `None` if it names a protocol.
pub(crate) fn path_of(file: &str) -> Option<PathBuf> {
    let path = file.strip_prefix("file:").unwrap_or(file);
    let is_foreign = path.split_once(':').is_some_and(|(protocol, _)| !protocol.contains('/'));
    (!is_foreign).then(|| path.into())
}

fn remote_drive_error(argument: &Argument, protocol: &str) -> CommandLineError {
    CommandLineError::Argument {
        argument: argument.display(),
        reason: format!(
            "the guest can write to this disk, which QEMU reaches by {protocol}; Keyframe serves \
             image files (raw or qcow2) and block devices"
        ),
        fix: "copy it to a file (qemu-img convert), or make the drive read-only (readonly=on)"
            .into(),
    }
}

fn unknown_key_error(argument: &Argument, key: &str) -> CommandLineError {
    CommandLineError::Argument {
        argument: argument.display(),
        reason: format!(
            "the guest can write to this disk, which Keyframe would serve, and Keyframe does not \
             know the key {key}"
        ),
        fix: format!("remove {key}, or make the drive read-only (readonly=on)"),
    }
}

/// Returns true if `file`, QEMU's description of an open image, is served at `socket`.
pub fn is_served(file: &str, socket: &Path) -> bool {
    let text = socket.to_string_lossy();
    file.contains(&*text) || file.contains(&text.replace('/', "%2F"))
}

#[cfg(test)]
mod tests;
