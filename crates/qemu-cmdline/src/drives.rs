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
//! cache). A disk that cannot be served is refused with reason and fix. A disk that the user leaves
//! out stays as the line says, with all nodes beneath it. The audit finds a disk that this module
//! does not find.
//!
//! A slice of a raw image (`offset`, `size`) stays a node of QEMU above the served image.
//!
//! Not handled here: opening images, and guessing a format that the line does not name.

mod backing;
mod block_nodes;
mod drive_option;
mod line_drive;

pub use line_drive::{DiskNames, LineDrive};

pub use backing::{Backing, BackingImage};

use crate::options::{self, Argument, is_on, value_of};
use crate::{CommandLineError, Result};
use block_nodes::BlockNodes;
pub(crate) use block_nodes::{child_names, flattened_keys};
use drive_option::{GeneratedNames, drive_fate, drive_on_index};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A disk that the guest can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// The id or node name; if it has neither, a generated name that is unique in the command line.
    pub name: String,
    /// The image, as the command line names it.
    pub image: PathBuf,
    /// The image's format; `None` if the command line does not name it.
    pub format: Option<String>,
    /// True if the command line discards the guest's writes at the end (`-snapshot`).
    pub temporary: bool,
    /// True if `image` is the address of an NBD export. Only QEMU can read it.
    pub remote: bool,
    /// What the command line says of the images beneath `image`.
    pub backing: Backing,
    /// The part of a raw image that the guest sees; `None` if it sees all of it.
    pub slice: Option<Slice>,
}

/// A part of a raw image, as the command line writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    /// Where it begins; `None` for the image's begin.
    pub offset: Option<String>,
    /// Its size; `None` if it ends with the image.
    pub size: Option<String>,
}

impl Slice {
    /// The slice of an image that is opened by the driver `driver`; `None` if that is all of it.
    fn of<'a>(driver: &str, value: impl Fn(&str) -> Option<&'a str>) -> Option<Self> {
        let [offset, size] = SLICE.map(|key| value(key).map(str::to_owned));
        let is_slice = driver == "raw" && (offset.is_some() || size.is_some());
        is_slice.then_some(Self { offset, size })
    }

    fn keys(&self, prefix: &str) -> DriveKeys {
        let values = SLICE.into_iter().zip([&self.offset, &self.size]);
        let key = |(key, value): (&str, &Option<String>)| {
            Some((format!("{prefix}{key}"), value.clone()?))
        };
        values.filter_map(key).collect()
    }
}

/// The keys of the driver `raw` that make a slice.
const SLICE: [&str; 2] = ["offset", "size"];

impl Drive {
    /// Returns the drive with absolute paths. Its relative paths begin at `directory`.
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

/// The address of a server of disks, and the disks that it serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskServer {
    /// The path of the server's unix socket.
    pub socket: PathBuf,
    /// The prefix of each export's name; the disk's name follows.
    pub prefix: String,
    /// The disks that it does not serve: QEMU opens them as the command line says.
    pub left_out: DiskNames,
    /// The disks of which it serves the slice that the guest sees, and not the whole image.
    pub cut_slices: DiskNames,
    /// For a QEMU that never runs: the sizes of the served disks in bytes, by name. QEMU gets empty
    /// disks of these sizes, and no server is needed. `None` for a server that is there.
    pub empty_disks: Option<BTreeMap<String, u64>>,
}

impl DiskServer {
    /// Describes the server at `socket` of all disks. The names of its exports have no prefix.
    pub fn at(socket: PathBuf) -> Self {
        let (left_out, cut_slices) = (DiskNames::None, DiskNames::None);
        Self { socket, prefix: String::new(), left_out, cut_slices, empty_disks: None }
    }
}

/// What happens to an argument of the command line.
enum Fate {
    Kept,
    Removed,
    /// It is a disk.
    Disk(Box<Disk>),
}

/// A disk that the guest can write to.
struct Disk {
    name: String,
    aliases: Vec<String>,
    /// How it is served; the reason why it cannot be.
    served: Result<Served>,
    /// True if it stays as the command line says.
    is_left_out: bool,
}

/// How a disk is served.
struct Served {
    drive: Drive,
    /// The keys of the argument that stay.
    kept: DriveKeys,
    place: Place,
}

impl Disk {
    fn line_drive(self) -> LineDrive {
        let Self { name, aliases, served, .. } = self;
        let devices = Vec::new();
        LineDrive { name, aliases, devices, drive: served.map(|served| served.drive) }
    }
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

/// Returns the disks of a command line that the guest can write to.
///
/// Error: [`CommandLineError::Argument`] for a disk that cannot be served.
pub fn drives(arguments: &[Argument]) -> Result<Vec<Drive>> {
    line_drives(arguments)?.into_iter().map(|disk| disk.drive).collect()
}

/// Returns the disks of a command line that the guest can write to, also those that cannot be
/// served.
///
/// Error: [`CommandLineError::Argument`] for a node that is malformed JSON.
pub fn line_drives(arguments: &[Argument]) -> Result<Vec<LineDrive>> {
    let disks = fates(arguments, &DiskNames::None)?.into_iter().filter_map(|fate| match fate {
        Fate::Disk(disk) => Some(disk.line_drive().with_devices(arguments)),
        Fate::Kept | Fate::Removed => None,
    });
    Ok(disks.collect())
}

/// Returns the command line `arguments` with its writable disks served by `server`, except those
/// that [`DiskServer::left_out`] names.
///
/// Error: [`CommandLineError::Argument`] for a disk that cannot be served.
pub fn rewrite_drives(arguments: &[Argument], server: &DiskServer) -> Result<Vec<Argument>> {
    let mut line = Vec::with_capacity(arguments.len());
    let fates = fates(arguments, &server.left_out)?;
    let keeps_snapshot = arguments
        .iter()
        .zip(&fates)
        .any(|(argument, fate)| argument.name() == "snapshot" && matches!(fate, Fate::Kept));
    for (argument, fate) in arguments.iter().zip(fates) {
        match fate {
            Fate::Kept => line.push(argument.clone()),
            Fate::Disk(disk) if disk.is_left_out => line.push(argument.clone()),
            Fate::Removed => {}
            Fate::Disk(disk) => line.push(served(disk.served?, server, keeps_snapshot)?),
        }
    }
    Ok(line)
}

/// The argument of a served disk. `keeps_snapshot` is true if `-snapshot` stays on the command
/// line.
fn served(served: Served, server: &DiskServer, keeps_snapshot: bool) -> Result<Argument> {
    let Served { drive, kept, place } = served;
    // The prefix of the keys of the disk's own node.
    let (option, node) = match place {
        Place::Drive => ("drive", ""),
        Place::Node => ("blockdev", ""),
        Place::InFilter => ("blockdev", "file."),
    };
    let slice = drive.slice.as_ref().filter(|_| !server.cut_slices.has(&drive.name));
    let mut keys: DriveKeys = Vec::new();
    match (place, slice) {
        (Place::Drive, _) => keys.push(("format".into(), "raw".into())),
        (_, Some(_)) => keys.push((format!("{node}driver"), "raw".into())),
        (_, None) => {}
    }
    keys.extend(slice.map_or_else(DriveKeys::new, |slice| slice.keys(node)));
    let is_beneath = place == Place::Drive || slice.is_some();
    let export = if is_beneath { format!("{node}file.") } else { node.to_owned() };
    keys.extend(content_keys(&export, server, &drive.name)?);
    // The overlay learns which blocks the guest discards.
    if place == Place::InFilter || (slice.is_some() && place == Place::Node) {
        keys.push((format!("{export}discard"), "unmap".into()));
    }
    if slice.is_some() && place == Place::InFilter {
        keys.push((format!("{node}discard"), "unmap".into()));
    }
    // QEMU puts no overlay of its own above a served disk.
    if keeps_snapshot && place == Place::Drive {
        keys.push(("snapshot".into(), "off".into()));
    }
    if value_of(&kept, "discard").is_none() {
        keys.push(("discard".into(), "unmap".into()));
    }
    keys.extend(kept);
    Ok(Argument::Option(option.into(), options::joined(&keys)))
}

/// Keys, each with `prefix` before it, that lead to the content of the disk `name`.
fn content_keys(prefix: &str, server: &DiskServer, name: &str) -> Result<DriveKeys> {
    let Some(sizes) = &server.empty_disks else { return export_keys(prefix, server, name) };
    let size = sizes.get(name).ok_or_else(|| CommandLineError::Argument {
        argument: name.into(),
        reason: "the size of this disk is not known".into(),
        fix: "leave the disk as it was when the checkpoint was taken".into(),
    })?;
    let keys = [("driver", "null-co"), ("size", &*size.to_string()), ("read-zeroes", "on")]
        .map(|(key, value)| (format!("{prefix}{key}"), value.to_owned()));
    Ok(keys.to_vec())
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

/// What happens to each argument if the disks `left_out` stay as the command line says.
fn fates(arguments: &[Argument], left_out: &DiskNames) -> Result<Vec<Fate>> {
    let mut nodes = BlockNodes::parse(arguments)?;
    let mut fates = fates_of(arguments, &nodes);
    if left_out.is_none() {
        return Ok(fates);
    }
    let is_left_out = |disk: &Disk| {
        left_out.has(&disk.name) || disk.aliases.iter().any(|alias| left_out.has(alias))
    };
    let mut names = Vec::new();
    for fate in &fates {
        if let Fate::Disk(disk) = fate
            && is_left_out(disk)
        {
            names.extend([&disk.name].into_iter().chain(&disk.aliases).cloned());
        }
    }
    nodes.leave_out(names, arguments);
    fates = fates_of(arguments, &nodes);
    let mut leaves_drive = false;
    for (argument, fate) in arguments.iter().zip(&mut fates) {
        if let Fate::Disk(disk) = fate
            && is_left_out(disk)
        {
            disk.is_left_out = true;
            leaves_drive |= argument.name() != "blockdev";
        }
    }
    // A drive that is left out keeps the overlay that QEMU throws away.
    if leaves_drive {
        for (argument, fate) in arguments.iter().zip(&mut fates) {
            if argument.name() == "snapshot" {
                *fate = Fate::Kept;
            }
        }
    }
    Ok(fates)
}

fn fates_of(arguments: &[Argument], nodes: &BlockNodes) -> Vec<Fate> {
    let snapshot = arguments.iter().any(|a| a.name() == "snapshot");
    let mut names = GeneratedNames::default();
    let mut fates = Vec::with_capacity(arguments.len());
    for (at, argument) in arguments.iter().enumerate() {
        fates.push(match (argument, argument.name()) {
            (Argument::Image(path), _) => drive_on_index(path, 0, snapshot, &mut names),
            (_, name @ ("hda" | "hdb" | "hdc" | "hdd")) => {
                let index = name.bytes().last().map_or(0, |letter| letter - b'a');
                drive_on_index(argument.value(), index, snapshot, &mut names)
            }
            (_, "drive") => drive_fate(argument, snapshot, nodes, &mut names),
            (_, "blockdev") => nodes.fate(at, argument),
            // It would put an overlay of QEMU above the served disk.
            (_, "snapshot") => Fate::Removed,
            _ => Fate::Kept,
        });
    }
    fates
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
        fix: "copy it to a file (qemu-img convert), make the drive read-only (readonly=on), or \
              leave it out of checkpoints (run, attach: --leave-out-disk)"
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
        fix: format!(
            "remove {key}, make the drive read-only (readonly=on), or leave it out of checkpoints \
             (run, attach: --leave-out-disk)"
        ),
    }
}

/// More nodes than QEMU stacks above one image.
const NODES_MAX: usize = 64;

/// Returns true if `file`, QEMU's description of an open image, is served at `socket`. An image
/// whose backing image is served there is not: what the guest writes goes into the image above.
pub fn is_served(file: &str, socket: &Path) -> bool {
    let text = socket.to_string_lossy();
    let names =
        |text_of: &str| text_of.contains(&*text) || text_of.contains(&text.replace('/', "%2F"));
    let Some(json) = file.strip_prefix("json:") else {
        return file.starts_with(NBD) && names(file);
    };
    let Ok(description) = serde_json::from_str::<Value>(json) else { return false };
    let mut node = &description;
    for _ in 0..NODES_MAX {
        let driver = node.get("driver").and_then(Value::as_str).unwrap_or_default();
        if driver == NBD {
            return names(&node.to_string());
        }
        // The filters of jobs are above what they call their backing image.
        let keys = if driver.ends_with("_top") { &["backing"][..] } else { CONTENT };
        match keys.iter().find_map(|key| node.get(*key)) {
            Some(Value::String(inner)) => {
                return !inner.starts_with("json:") && is_served(inner, socket);
            }
            Some(inner) => node = inner,
            None => return false,
        }
    }
    false
}

/// The keys under which nodes describe the node that has their content.
const CONTENT: &[&str] = &["file", "image", "test"];

#[cfg(test)]
mod tests;
