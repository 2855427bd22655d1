//! `-blockdev`: the nodes of a line, which of them are disks, and which of their keys stay.

use super::backing::{Backing, backing_of, unknown_node_error};
use super::drive_option::{OPENING, OPENING_PREFIXES};
use super::{
    Drive, DriveKeys, Fate, NBD, Place, export_address, is_local, is_one_of, is_read_only,
    remote_drive_error, unknown_key_error,
};
use crate::options::{self, Argument, value_of};
use crate::{CommandLineError, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Node drivers above a disk, which hold no data.
const FILTERS: &[&str] =
    &["throttle", "copy-on-read", "blkdebug", "blklogwrites", "blkverify", "compress"];

/// The keys of a node that lead to another node.
const CHILDREN: &[&str] = &["file", "backing", "data-file"];

/// The nodes of all `-blockdev`, by index of the argument.
pub(super) struct BlockNodes {
    nodes: BTreeMap<usize, DriveKeys>,
    /// The names of the nodes that only served disks use.
    beneath_served: BTreeSet<String>,
}

/// The keys of one node: all keys of an argument, or those with a prefix, as of a node that is
/// written inside another.
pub(super) struct NodeKeys<'a> {
    keys: &'a DriveKeys,
    prefix: String,
}

impl<'a> NodeKeys<'a> {
    /// The node that the whole argument defines.
    pub fn whole(keys: &'a DriveKeys) -> Self {
        Self { keys, prefix: String::new() }
    }

    /// The value of `key`.
    pub fn value(&self, key: &str) -> Option<&'a str> {
        value_of(self.keys, &format!("{}{key}", self.prefix))
    }

    /// The file that the node names, or the address of its export.
    fn image(&self) -> Option<PathBuf> {
        if self.value("driver") == Some(NBD) {
            return Some(export_address(self.keys, &self.prefix));
        }
        self.value("filename").map(PathBuf::from)
    }
}

/// The node beneath another.
pub(super) enum Child<'a> {
    /// The line does not say.
    Unstated,
    /// The line says that there is none.
    Absent,
    /// It has these keys.
    Node(NodeKeys<'a>),
    /// It has this name, which no `-blockdev` of the line has.
    Unknown(&'a str),
}

impl BlockNodes {
    /// Parses the nodes. Error: a value is malformed JSON.
    pub fn parse(arguments: &[Argument]) -> Result<Self> {
        let mut nodes = BTreeMap::new();
        for (at, argument) in arguments.iter().enumerate().filter(|(_, a)| a.name() == "blockdev") {
            let keys =
                flattened_keys(argument.value()).ok_or_else(|| malformed_json_error(argument))?;
            nodes.insert(at, keys);
        }
        let mut nodes = Self { nodes, beneath_served: BTreeSet::new() };
        nodes.beneath_served = nodes.only_beneath_served(arguments);
        Ok(nodes)
    }

    fn named(&self, name: &str) -> Option<&DriveKeys> {
        self.nodes.values().find(|keys| value_of(keys, "node-name") == Some(name))
    }

    /// The node that `key` of `node` leads to.
    pub fn child<'a>(&'a self, node: &NodeKeys<'a>, key: &str) -> Child<'a> {
        match node.value(key) {
            Some("") => return Child::Absent,
            Some(name) => {
                return self
                    .named(name)
                    .map_or(Child::Unknown(name), |keys| Child::Node(NodeKeys::whole(keys)));
            }
            None => {}
        }
        let prefix = format!("{}{key}.", node.prefix);
        if node.keys.iter().any(|(key, _)| key.starts_with(&prefix)) {
            return Child::Node(NodeKeys { keys: node.keys, prefix });
        }
        Child::Unstated
    }

    /// The names of the nodes that lead to nothing but served disks. They leave the line with
    /// their disk: a restored VM needs none of their files.
    fn only_beneath_served(&self, arguments: &[Argument]) -> BTreeSet<String> {
        let served = self.nodes.values().filter(|keys| is_served(keys));
        let mut beneath: BTreeSet<String> = served.flat_map(children).map(str::to_owned).collect();
        // What is beneath a node of a served disk is beneath the disk.
        loop {
            let more: Vec<String> = beneath
                .iter()
                .filter_map(|name| self.named(name))
                .flat_map(children)
                .filter(|name| !beneath.contains(*name))
                .map(str::to_owned)
                .collect();
            if more.is_empty() {
                break;
            }
            beneath.extend(more);
        }
        let is_used_beside = |name: &String| {
            let by_node = self.nodes.values().any(|keys| {
                let own = value_of(keys, "node-name").unwrap_or_default();
                let stays = !is_served(keys) && !beneath.contains(own);
                stays && children(keys).any(|child| child == name)
            });
            let by_option = arguments.iter().filter(|a| a.name() != "blockdev").any(|argument| {
                let keys = options::properties(argument.value(), "").unwrap_or_default();
                keys.iter().any(|(_, value)| value == name)
            });
            by_node || by_option
        };
        let used: Vec<String> =
            beneath.iter().filter(|name| is_used_beside(name)).cloned().collect();
        beneath.retain(|name| !used.contains(name));
        beneath
    }

    /// Decides whether the `-blockdev` at index `at` stays, changes or goes.
    pub fn fate(&self, at: usize, argument: &Argument) -> Result<Fate> {
        let Some(keys) = self.nodes.get(&at) else { return Ok(Fate::Kept) };
        let driver = value_of(keys, "driver").unwrap_or_default();
        let name = value_of(keys, "node-name").unwrap_or_default();
        if self.beneath_served.contains(name) {
            return Ok(Fate::Removed);
        }
        if is_read_only(keys) {
            return Ok(Fate::Kept);
        }
        if FILTERS.contains(&driver) {
            return self.filter_fate(argument, keys);
        }
        if (is_local(driver) || driver == NBD) && self.is_file_of_format(name) {
            return Ok(Fate::Kept);
        }
        let drive = self.drive_at(argument, NodeKeys::whole(keys), name)?;
        Ok(Fate::Served(drive, node_keys(argument, keys)?, Place::Node))
    }

    /// A filter stays; a disk that is written inside it is served.
    fn filter_fate(&self, argument: &Argument, keys: &DriveKeys) -> Result<Fate> {
        let filter = NodeKeys::whole(keys);
        let below = match self.child(&filter, "file") {
            Child::Node(below) if !below.prefix.is_empty() => below,
            _ => return Ok(Fate::Kept),
        };
        if matches!(below.value("read-only"), Some("on" | "true" | "yes" | "y")) {
            return Ok(Fate::Kept);
        }
        let inner: DriveKeys = keys
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix("file.")?.into(), value.clone())))
            .collect();
        node_keys(argument, &inner)?;
        let name = filter.value("node-name").unwrap_or_default();
        let drive = self.drive_at(argument, below, name)?;
        let kept = keys.iter().filter(|(key, _)| !key.starts_with("file.")).cloned().collect();
        Ok(Fate::Served(drive, kept, Place::InFilter))
    }

    fn is_file_of_format(&self, name: &str) -> bool {
        self.nodes.values().any(|keys| is_format(keys) && children(keys).any(|child| child == name))
    }

    /// The disk whose topmost node is `node`, called `name`.
    ///
    /// Error: [`CommandLineError::Argument`] for one that cannot be served.
    fn drive_at(&self, argument: &Argument, node: NodeKeys<'_>, name: &str) -> Result<Drive> {
        let driver = node.value("driver").unwrap_or_default();
        let (protocol, image, backing) = if matches!(driver, "raw" | "qcow2") {
            let below = match self.child(&node, "file") {
                Child::Node(below) => below,
                Child::Unknown(name) => return Err(unknown_node_error(argument, name)),
                Child::Unstated | Child::Absent => return Err(remote_drive_error(argument, "")),
            };
            let protocol = below.value("driver").unwrap_or("file");
            (protocol, below.image(), backing_of(argument, self, node)?)
        } else {
            (driver, node.image(), Backing::default())
        };
        let remote = protocol == NBD;
        let Some(image) = image.filter(|_| remote || is_local(protocol)) else {
            return Err(remote_drive_error(argument, protocol));
        };
        let format = if matches!(driver, "raw" | "qcow2") { driver } else { "raw" };
        let format = Some(format.to_owned());
        Ok(Drive { name: name.into(), image, format, temporary: false, remote, backing })
    }
}

fn is_format(keys: &DriveKeys) -> bool {
    matches!(value_of(keys, "driver"), Some("raw" | "qcow2"))
}

/// True for the topmost node of a disk that the guest can write to.
fn is_served(keys: &DriveKeys) -> bool {
    is_format(keys) && !is_read_only(keys)
}

/// The names of the nodes right beneath the one with `keys`.
fn children(keys: &DriveKeys) -> impl Iterator<Item = &str> {
    let is_child = |key: &str| {
        let last = key.rsplit('.').next().unwrap_or_default();
        CHILDREN.contains(&last)
    };
    keys.iter().filter(move |(key, _)| is_child(key)).map(|(_, value)| value.as_str())
}

pub(super) fn malformed_json_error(argument: &Argument) -> CommandLineError {
    CommandLineError::Argument {
        argument: argument.display(),
        reason: "its value begins like JSON and is malformed".into(),
        fix: "correct it; QEMU refuses it too".into(),
    }
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

/// Keys and values of a `-blockdev`, nested ones as `a.b`; `null` is empty. `None` for malformed
/// JSON.
pub(crate) fn flattened_keys(value: &str) -> Option<DriveKeys> {
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
            Value::Null => keys.push((prefix.into(), String::new())),
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
