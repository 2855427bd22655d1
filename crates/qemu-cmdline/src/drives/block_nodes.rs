//! `-blockdev`: the nodes of a line, which of them are disks, and which of their keys stay.

use super::drive_option::{OPENING, OPENING_PREFIXES};
use super::{
    Drive, DriveKeys, Fate, NBD, export_address, is_local, is_one_of, is_read_only,
    remote_drive_error, unknown_key_error,
};
use crate::options::{self, Argument, value_of};
use crate::{CommandLineError, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Node drivers above a disk, which hold no data.
const FILTERS: &[&str] =
    &["throttle", "copy-on-read", "blkdebug", "blklogwrites", "blkverify", "compress"];

/// The nodes of all `-blockdev`, by index of the argument.
pub(super) struct BlockNodes {
    nodes: BTreeMap<usize, DriveKeys>,
}

impl BlockNodes {
    /// Parses the nodes. Error: a value is malformed JSON.
    pub fn parse(arguments: &[Argument]) -> Result<Self> {
        let mut nodes = BTreeMap::new();
        for (at, argument) in arguments.iter().enumerate().filter(|(_, a)| a.name() == "blockdev") {
            let keys =
                flattened_keys(argument.value()).ok_or_else(|| CommandLineError::Argument {
                    argument: argument.display(),
                    reason: "its value begins like JSON and is malformed".into(),
                    fix: "correct it; QEMU refuses it too".into(),
                })?;
            nodes.insert(at, keys);
        }
        Ok(Self { nodes })
    }

    fn named(&self, name: &str) -> Option<&DriveKeys> {
        self.nodes.values().find(|keys| value_of(keys, "node-name") == Some(name))
    }

    /// True if a format node has the node `name` as its file.
    fn is_file_of_another(&self, name: &str) -> bool {
        self.nodes.values().any(|keys| {
            value_of(keys, "file") == Some(name)
                && matches!(value_of(keys, "driver"), Some("raw" | "qcow2"))
        })
    }

    /// True if each format node over `name` is read-only.
    fn has_only_read_only_users(&self, name: &str) -> bool {
        self.nodes.values().filter(|keys| value_of(keys, "file") == Some(name)).all(is_read_only)
    }

    /// Decides whether the `-blockdev` at index `at` stays, changes or goes.
    pub fn fate(&self, at: usize, argument: &Argument) -> Result<Fate> {
        let Some(keys) = self.nodes.get(&at) else { return Ok(Fate::Kept) };
        let driver = value_of(keys, "driver").unwrap_or_default();
        let name = value_of(keys, "node-name").unwrap_or_default();
        if is_read_only(keys) || FILTERS.contains(&driver) {
            return Ok(Fate::Kept);
        }
        let (protocol, image) = match driver {
            "raw" | "qcow2" => match value_of(keys, "file") {
                Some(below) => {
                    let below = self.named(below).ok_or_else(|| CommandLineError::Argument {
                        argument: argument.display(),
                        reason: format!("no -blockdev of the line has the node name {below}"),
                        fix: "define it with -blockdev too".into(),
                    })?;
                    (value_of(below, "driver"), image_of(below, ""))
                }
                None => (value_of(keys, "file.driver"), image_of(keys, "file.")),
            },
            _ if (is_local(driver) || driver == NBD) && self.is_file_of_another(name) => {
                return Ok(if self.has_only_read_only_users(name) {
                    Fate::Kept
                } else {
                    Fate::Removed
                });
            }
            other => (Some(other), image_of(keys, "")),
        };
        let protocol = protocol.unwrap_or_default();
        let remote = protocol == NBD;
        let Some(image) = image.filter(|_| remote || is_local(protocol)) else {
            return Err(remote_drive_error(argument, protocol));
        };
        let kept = node_keys(argument, keys)?;
        let format = if matches!(driver, "raw" | "qcow2") { driver } else { "raw" };
        let format = Some(format.to_owned());
        Ok(Fate::Served(Drive { name: name.into(), image, format, temporary: false, remote }, kept))
    }
}

/// The file that a node's keys with `prefix` name, or the address of its export.
fn image_of(keys: &DriveKeys, prefix: &str) -> Option<PathBuf> {
    if value_of(keys, &format!("{prefix}driver")) == Some(NBD) {
        return Some(export_address(keys, prefix));
    }
    value_of(keys, &format!("{prefix}filename")).map(PathBuf::from)
}

/// The keys of a node that are kept.
///
/// Error: [`CommandLineError::Argument`] for an unknown key.
fn node_keys(argument: &Argument, keys: &DriveKeys) -> Result<DriveKeys> {
    const NODE_KEPT: &[&str] = &["node-name", "discard", "detect-zeroes", "cache.no-flush"];
    const NODE_OPENING: &[&str] = &[
        "filename",
        "locking",
        "drop-cache",
        "aio-max-batch",
        "pr-manager",
        "x-check-cache-dropped",
    ];
    const EXPORT: &[&str] =
        &["export", "path", "reconnect-delay", "open-timeout", "tls-creds", "tls-hostname"];
    let is_export = value_of(keys, "driver") == Some(NBD);
    let opens_export = |key: &str| is_export && is_one_of(key, EXPORT, &["server."]);
    let mut kept = Vec::new();
    for (key, value) in keys {
        if NODE_KEPT.contains(&key.as_str()) {
            kept.push((key.clone(), value.clone()));
        } else if !is_one_of(key, OPENING, OPENING_PREFIXES)
            && !NODE_OPENING.contains(&key.as_str())
            && !opens_export(key)
        {
            return Err(unknown_key_error(argument, key));
        }
    }
    Ok(kept)
}

/// Keys and values of a `-blockdev`, nested ones as `a.b`. `None` for malformed JSON.
fn flattened_keys(value: &str) -> Option<DriveKeys> {
    use serde_json::Value;
    fn add(prefix: &str, value: Value, keys: &mut DriveKeys) {
        match value {
            Value::Object(object) => {
                for (key, value) in object {
                    let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
                    add(&key, value, keys);
                }
            }
            Value::String(text) => keys.push((prefix.into(), text)),
            Value::Bool(on) => keys.push((prefix.into(), if on { "on" } else { "off" }.into())),
            other => keys.push((prefix.into(), other.to_string())),
        }
    }
    if !value.trim_start().starts_with('{') {
        return Some(options::keys(value, "driver"));
    }
    // serde_json bounds the depth.
    let object: Value = serde_json::from_str(value).ok()?;
    let mut keys = DriveKeys::new();
    add("", object, &mut keys);
    Some(keys)
}
