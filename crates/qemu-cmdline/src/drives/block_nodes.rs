//! `-blockdev`: the nodes of a line, which of them are disks, and which of their keys stay.

use super::backing::{Backing, backing_of, unknown_node_error};
use super::drive_option::{OPENING, OPENING_PREFIXES};
use super::{
    Disk, Drive, DriveKeys, Fate, NBD, Place, SLICE, Served, Slice, export_address, is_local,
    is_one_of, is_read_only, remote_drive_error, unknown_key_error,
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
    /// The names of the disks that stay as the command line says.
    left_out: BTreeSet<String>,
    /// The names of the nodes beneath those disks.
    beneath_left_out: BTreeSet<String>,
}

/// The keys of one node: all keys of an argument, or those with a prefix, as of a node that is
/// written inside another.
pub(super) struct NodeKeys<'a> {
    keys: &'a DriveKeys,
    prefix: String,
}

impl<'a> NodeKeys<'a> {
    /// Returns the node that the whole argument defines.
    pub fn whole(keys: &'a DriveKeys) -> Self {
        Self { keys, prefix: String::new() }
    }

    /// The node that `other` is.
    fn of(other: &Self) -> Self {
        Self { keys: other.keys, prefix: other.prefix.clone() }
    }

    /// Returns the value of `key` in this node. Returns `None` if the node does not have the key.
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
    /// The command line does not say.
    Unstated,
    /// The command line says that there is none.
    Absent,
    /// It has these keys.
    Node(NodeKeys<'a>),
    /// It has this name, which no `-blockdev` of the command line has.
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
        let mut nodes = Self {
            nodes,
            beneath_served: BTreeSet::new(),
            left_out: BTreeSet::new(),
            beneath_left_out: BTreeSet::new(),
        };
        nodes.beneath_served = nodes.only_beneath_served(arguments);
        Ok(nodes)
    }

    /// Lets the disks `names` stay as the command line says, with the nodes beneath them.
    pub fn leave_out(&mut self, names: Vec<String>, arguments: &[Argument]) {
        self.left_out = names.into_iter().collect();
        self.beneath_left_out = self.beneath(self.left_out.iter().cloned());
        self.beneath_left_out.retain(|name| !self.left_out.contains(name));
        self.beneath_served = self.only_beneath_served(arguments);
    }

    /// The names of the nodes beneath the nodes `names`.
    fn beneath(&self, names: impl IntoIterator<Item = String>) -> BTreeSet<String> {
        let mut beneath = BTreeSet::new();
        let mut open: Vec<String> = names.into_iter().collect();
        while let Some(name) = open.pop() {
            let Some(keys) = self.named(&name) else { continue };
            for child in child_names(keys).filter(|child| !child.is_empty()) {
                if beneath.insert(child.to_owned()) {
                    open.push(child.to_owned());
                }
            }
        }
        beneath
    }

    /// The names of the filters above the node `name`.
    fn filters_above(&self, name: &str) -> Vec<String> {
        let mut above: Vec<String> = Vec::new();
        let mut at = name.to_owned();
        loop {
            let filter = self.nodes.values().find(|keys| {
                is_filter(keys) && child_names(keys).any(|child| child == at && !child.is_empty())
            });
            match filter.and_then(|keys| value_of(keys, "node-name")) {
                Some(next) if !above.iter().any(|known| known == next) && next != name => {
                    above.push(next.to_owned());
                    at = next.to_owned();
                }
                _ => return above,
            }
        }
    }

    /// True for the topmost node of a disk that is to be served.
    fn is_served(&self, keys: &DriveKeys) -> bool {
        let name = value_of(keys, "node-name").unwrap_or_default();
        let stays = self.left_out.contains(name) || self.beneath_left_out.contains(name);
        is_format(keys) && !is_read_only(keys) && !stays
    }

    fn named(&self, name: &str) -> Option<&DriveKeys> {
        self.nodes.values().find(|keys| value_of(keys, "node-name") == Some(name))
    }

    /// Returns the node to which `key` of `node` leads.
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

    /// The names of the nodes that lead to nothing but served disks. They leave the command line
    /// with their disk: a restored VM needs none of their files.
    fn only_beneath_served(&self, arguments: &[Argument]) -> BTreeSet<String> {
        let served = self.nodes.values().filter(|keys| self.is_served(keys));
        let own = |keys: &DriveKeys| value_of(keys, "node-name").unwrap_or_default().to_owned();
        let mut beneath = self.beneath(served.map(own));
        let by_option = |name: &String| {
            arguments.iter().filter(|a| a.name() != "blockdev").any(|argument| {
                let keys = options::properties(argument.value(), "").unwrap_or_default();
                keys.iter().any(|(_, value)| value == name)
            })
        };
        let mut used: BTreeSet<String> =
            beneath.iter().filter(|name| by_option(name)).cloned().collect();
        for keys in self.nodes.values() {
            if !self.is_served(keys) && !beneath.contains(&own(keys)) {
                used.extend(child_names(keys).map(str::to_owned));
            }
        }
        // A node that stays needs all nodes beneath it, unless it is a disk that is served.
        let stays = |name: &String| self.named(name).is_none_or(|keys| !self.is_served(keys));
        let needed = self.beneath(used.iter().filter(|name| stays(name)).cloned());
        beneath.retain(|name| !used.contains(name) && !needed.contains(name));
        beneath
    }

    /// Returns whether the `-blockdev` at index `at` stays, changes or is removed.
    pub fn fate(&self, at: usize, argument: &Argument) -> Fate {
        let Some(keys) = self.nodes.get(&at) else { return Fate::Kept };
        let driver = value_of(keys, "driver").unwrap_or_default();
        let name = value_of(keys, "node-name").unwrap_or_default();
        if self.beneath_served.contains(name) {
            return Fate::Removed;
        }
        if is_read_only(keys) || self.beneath_left_out.contains(name) {
            return Fate::Kept;
        }
        let served = if is_filter(keys) {
            match self.in_filter(argument, keys) {
                Some(served) => served,
                None => return Fate::Kept,
            }
        } else if !matches!(driver, "raw" | "qcow2") && self.is_beneath_disk(name) {
            return Fate::Kept;
        } else {
            self.whole_node(argument, keys, name)
        };
        let aliases = self.filters_above(name);
        let name = name.into();
        Fate::Disk(Box::new(Disk { name, aliases, served, is_left_out: false }))
    }

    fn whole_node(&self, argument: &Argument, keys: &DriveKeys, name: &str) -> Result<Served> {
        let drive = self.drive_at(argument, &NodeKeys::whole(keys), name)?;
        let kept = node_keys(argument, keys, &drive)?;
        Ok(Served { drive, kept, place: Place::Node })
    }

    /// The disk that is written inside a filter; `None` if there is none that the guest can write
    /// to. The filter stays.
    fn in_filter(&self, argument: &Argument, keys: &DriveKeys) -> Option<Result<Served>> {
        let filter = NodeKeys::whole(keys);
        let below = match self.child(&filter, "file") {
            Child::Node(below) if !below.prefix.is_empty() => below,
            _ => return None,
        };
        if matches!(below.value("read-only"), Some("on" | "true" | "yes" | "y")) {
            return None;
        }
        let inner: DriveKeys = keys
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix("file.")?.into(), value.clone())))
            .collect();
        let name = filter.value("node-name").unwrap_or_default();
        let kept = keys.iter().filter(|(key, _)| !key.starts_with("file.")).cloned().collect();
        let served = || {
            let drive = self.drive_at(argument, &below, name)?;
            node_keys(argument, &inner, &drive)?;
            Ok(Served { drive, kept, place: Place::InFilter })
        };
        Some(served())
    }

    /// True if `name` is a node beneath another one that is no filter.
    fn is_beneath_disk(&self, name: &str) -> bool {
        let mut above = self.nodes.values().filter(|keys| !is_filter(keys));
        !name.is_empty() && above.any(|keys| child_names(keys).any(|child| child == name))
    }

    /// The disk whose topmost node is `node`, called `name`.
    ///
    /// Error: [`CommandLineError::Argument`] for one that cannot be served.
    fn drive_at(&self, argument: &Argument, node: &NodeKeys<'_>, name: &str) -> Result<Drive> {
        let driver = node.value("driver").unwrap_or_default();
        let (protocol, image, backing) = if matches!(driver, "raw" | "qcow2") {
            let below = match self.child(node, "file") {
                Child::Node(below) => below,
                Child::Unknown(name) => return Err(unknown_node_error(argument, name)),
                Child::Unstated | Child::Absent => return Err(remote_drive_error(argument, "")),
            };
            let protocol = below.value("driver").unwrap_or("file");
            (protocol, below.image(), backing_of(argument, self, NodeKeys::of(node))?)
        } else {
            (driver, node.image(), Backing::default())
        };
        let remote = protocol == NBD;
        let Some(image) = image.filter(|_| remote || is_local(protocol)) else {
            return Err(remote_drive_error(argument, protocol));
        };
        let format = if matches!(driver, "raw" | "qcow2") { driver } else { "raw" };
        let format = Some(format.to_owned());
        let slice = Slice::of(driver, |key| node.value(key));
        let (name, temporary) = (name.into(), false);
        Ok(Drive { name, image, format, temporary, remote, backing, slice })
    }
}

fn is_format(keys: &DriveKeys) -> bool {
    matches!(value_of(keys, "driver"), Some("raw" | "qcow2"))
}

fn is_filter(keys: &DriveKeys) -> bool {
    value_of(keys, "driver").is_some_and(|driver| FILTERS.contains(&driver))
}

/// The names of the nodes right beneath the one with `keys`.
pub(crate) fn child_names(keys: &DriveKeys) -> impl Iterator<Item = &str> {
    let is_child = |key: &str| {
        let mut segments = key.rsplit('.');
        let last = segments.next().unwrap_or_default();
        // quorum numbers its children.
        CHILDREN.contains(&last) || segments.next() == Some("children")
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

/// The keys of the node of `drive` that are kept.
///
/// Error: [`CommandLineError::Argument`] for an unknown key.
fn node_keys(argument: &Argument, keys: &DriveKeys, drive: &Drive) -> Result<DriveKeys> {
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
            continue;
        }
        let makes_slice = drive.slice.is_some() && SLICE.contains(&key.as_str());
        let is_known = is_one_of(key, OPENING, OPENING_PREFIXES)
            || NODE_OPENING.contains(&key.as_str())
            || opens_export(key);
        if !is_known && !makes_slice {
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
