//! `-drive` and its short forms: which disk the argument defines, and which of its keys stay for
//! the guest.

use super::backing::{Backing, backing_of};
use super::block_nodes::{BlockNodes, NodeKeys, flattened_keys, malformed_json_error};
use super::{
    Disk, DriveKeys, Fate, NBD, Place, SLICE, Served, Slice, export_address, is_local, is_one_of,
    is_read_only_drive, local_path, remote_drive_error, unknown_key_error,
};
use crate::Result;
use crate::drives::Drive;
use crate::options::{self, Argument, is_on, value_of};
use std::collections::{BTreeMap, BTreeSet};

/// Keys of `-drive` that tell how QEMU opens the image. They have no meaning for a served disk.
pub(super) const OPENING: &[&str] = &[
    "file",
    "backing",
    "format",
    "driver",
    "aio",
    "snapshot",
    "cache",
    "cache.direct",
    "auto-read-only",
    "force-share",
    "lazy-refcounts",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-size",
    "cache-clean-interval",
    "discard-no-unref",
    "read-only",
    "readonly",
];
pub(super) const OPENING_PREFIXES: &[&str] =
    &["file.", "backing.", "pass-discard-", "overlap-check"];

/// Keys of `-drive` that the guest sees, or that hold for any image.
const KEPT: &[&str] = &[
    "if",
    "id",
    "index",
    "bus",
    "unit",
    "media",
    "werror",
    "rerror",
    "detect-zeroes",
    "discard",
    "copy-on-read",
    "cache.writeback",
    "cache.no-flush",
    "node-name",
    "group",
];
const KEPT_PREFIXES: &[&str] = &["throttling", "bps", "iops", "stats-"];

/// Generates names for drives without an id.
#[derive(Default)]
pub(super) struct GeneratedNames {
    counts: BTreeMap<String, u32>,
    /// The units of `if=virtio` that are taken.
    virtio_units: BTreeSet<u32>,
}

impl GeneratedNames {
    fn next(&mut self, kind: &str) -> String {
        let count = self.counts.entry(kind.into()).or_default();
        *count += 1;
        format!("{kind}-{}", *count - 1)
    }

    /// Takes the unit that QEMU gives a `-drive` with these keys, and returns QEMU's own name for
    /// the drive. `None` for a drive with an id, or without `if=virtio`.
    fn virtio(&mut self, keys: &DriveKeys) -> Option<String> {
        if value_of(keys, "if") != Some("virtio") {
            return None;
        }
        let given = ["index", "unit"].iter().find_map(|key| value_of(keys, key)?.parse().ok());
        let unit =
            given.or_else(|| (0..u32::MAX).find(|unit| !self.virtio_units.contains(unit)))?;
        self.virtio_units.insert(unit);
        value_of(keys, "id").is_none().then(|| format!("virtio{unit}"))
    }
}

/// The disk that `-hda` (`index` 0) to `-hdd` or a bare image defines.
pub(super) fn drive_on_index(
    path: &str,
    index: u8,
    temporary: bool,
    names: &mut GeneratedNames,
) -> Fate {
    let name = names.next("hd");
    let backing = Backing::default();
    let drive = Drive {
        name: name.clone(),
        image: path.into(),
        format: None,
        temporary,
        remote: false,
        backing,
        slice: None,
    };
    let kept = vec![("index".into(), index.to_string()), ("media".into(), "disk".into())];
    let served = Ok(Served { drive, kept, place: Place::Drive });
    Fate::Disk(Box::new(Disk { name, aliases: Vec::new(), served, is_left_out: false }))
}

/// What happens to a `-drive`. `snapshot` is true if the command line has `-snapshot`.
pub(super) fn drive_fate(
    argument: &Argument,
    snapshot: bool,
    nodes: &BlockNodes,
    names: &mut GeneratedNames,
) -> Fate {
    let own = options::keys(argument.value(), "file");
    let of_qemu = names.virtio(&own);
    let keys = drive_keys(argument);
    if is_read_only_drive(keys.as_ref().unwrap_or(&own)) {
        return Fate::Kept;
    }
    let served = match keys.and_then(|keys| served_drive(argument, keys, snapshot, nodes)) {
        Ok(Some(served)) => Ok(served),
        // It has no medium.
        Ok(None) => return Fate::Kept,
        Err(error) => Err(error),
    };
    let mut own_names = ["id", "node-name"].iter().filter_map(|key| value_of(&own, key));
    let kind = value_of(&own, "if").unwrap_or("drive");
    let name = own_names.next().map_or_else(|| names.next(kind), str::to_owned);
    let aliases = own_names.map(str::to_owned).chain(of_qemu).collect();
    let named = |served: Served| {
        let drive = Drive { name: name.clone(), ..served.drive };
        Served { drive, ..served }
    };
    let served = served.map(named);
    Fate::Disk(Box::new(Disk { name, aliases, served, is_left_out: false }))
}

/// How the disk of a `-drive` with the keys `keys` is served, without its name; `None` if it has no
/// medium.
///
/// Error: [`CommandLineError::Argument`](crate::CommandLineError::Argument) for a disk that cannot
/// be served.
fn served_drive(
    argument: &Argument,
    mut keys: DriveKeys,
    snapshot: bool,
    nodes: &BlockNodes,
) -> Result<Option<Served>> {
    let file = value_of(&keys, "file").or_else(|| value_of(&keys, "file.filename"));
    let protocol = value_of(&keys, "file.driver");
    let remote = protocol == Some(NBD);
    let format = value_of(&keys, "format").or_else(|| value_of(&keys, "driver")).map(str::to_owned);
    let image = match file.filter(|file| !file.is_empty()) {
        _ if remote => export_address(&keys, "file."),
        None => match protocol.or(format.as_deref()) {
            Some(driver) if !matches!(driver, "raw" | "qcow2") => {
                return Err(remote_drive_error(argument, driver));
            }
            _ => return Ok(None),
        },
        Some(file) => local_path(argument, file)?,
    };
    if let Some(protocol) = protocol.filter(|d| !remote && !is_local(d)) {
        return Err(remote_drive_error(argument, protocol));
    }
    let backing = backing_of(argument, nodes, NodeKeys::whole(&keys))?;
    let slice = Slice::of(format.as_deref().unwrap_or_default(), |key| value_of(&keys, key));
    let temporary = snapshot || is_on(&keys, "snapshot");
    if let Some(writeback) = cache(argument, &keys)? {
        keys.extend(writeback);
    }
    let mut kept = Vec::new();
    for (key, value) in keys {
        if is_one_of(&key, KEPT, KEPT_PREFIXES) {
            kept.push((key, value));
            continue;
        }
        let makes_slice = slice.is_some() && SLICE.contains(&key.as_str());
        if !makes_slice && !is_one_of(&key, OPENING, OPENING_PREFIXES) {
            return Err(unknown_key_error(argument, &key));
        }
    }
    let name = String::new();
    let drive = Drive { name, image, format, temporary, remote, backing, slice };
    Ok(Some(Served { drive, kept, place: Place::Drive }))
}

/// The keys of a `-drive`; those in `file=json:{...}` as if they stood beside it.
fn drive_keys(argument: &Argument) -> Result<DriveKeys> {
    let mut keys = options::keys(argument.value(), "file");
    let json = value_of(&keys, "file").and_then(|file| file.strip_prefix("json:"));
    let Some(json) = json.map(str::to_owned) else { return Ok(keys) };
    let inner = flattened_keys(&json).ok_or_else(|| malformed_json_error(argument))?;
    if value_of(&inner, "file.filename").is_none() {
        return Err(remote_drive_error(argument, "json"));
    }
    keys.retain(|(key, _)| key != "file");
    // What stands beside it wins.
    keys.splice(0..0, inner);
    Ok(keys)
}

/// The keys that `cache=` stands for and that the guest sees.
fn cache(argument: &Argument, keys: &DriveKeys) -> Result<Option<DriveKeys>> {
    let Some(mode) = value_of(keys, "cache") else { return Ok(None) };
    let (writeback, no_flush) = match mode {
        "none" | "off" | "writeback" => ("on", "off"),
        "directsync" | "writethrough" => ("off", "off"),
        "unsafe" => ("on", "on"),
        _ => return Err(unknown_key_error(argument, &format!("cache={mode}"))),
    };
    Ok(Some(vec![
        ("cache.writeback".into(), writeback.into()),
        ("cache.no-flush".into(), no_flush.into()),
    ]))
}
