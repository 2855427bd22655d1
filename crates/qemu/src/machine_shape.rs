//! What a user changes of a running machine through a monitor of their own: devices, memory and
//! media. And the words of a command line that makes the changed machine, if there are any.
//!
//! ```text
//!   qom-list, query-block, query-cpus-fast, query-migrate ──▶ MachineShape ──▶ changes since another shape
//!                                                                                └──▶ -device virtio-rng-pci,id=r1,bus=pci.0,addr=04.0
//! ```
//!
//! Words are made for memory and for devices that need nothing of the host ([`SELF_CONTAINED`]).
//! All properties of such a device that differ from their defaults are among its words.
//!
//! Left out: backends that no device uses; they are not part of the machine.

use crate::blocknodes::WritableNode;
use crate::deletions::Deletions;
use crate::hotplug::{self, is_memory};
use crate::{Qmp, Result, Vm, ramblock};
use keyframe_qemu_audit::{self as rules, name_and_kind};
use keyframe_qemu_cmdline::is_served;
use keyframe_qemu_cmdline::options::{Argument, Object, escape};
use keyframe_units::RamLayout;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// Types of devices without a disk, a network, a console or another resource of the host.
const SELF_CONTAINED: &[&str] =
    &["virtio-rng-", "virtio-balloon-", "virtio-keyboard-", "virtio-mouse-", "virtio-tablet-"];

/// The devices and media of a machine at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineShape {
    /// The types of the devices from the command line and of those plugged in later, by path.
    devices: BTreeMap<String, String>,
    /// The media of the drives.
    media: BTreeMap<String, Medium>,
    /// The number of virtual CPUs.
    processors: usize,
    /// What keeps QEMU from saving the machine's whole state, in QEMU's words.
    blockers: Vec<String>,
    /// The devices that QEMU has reported as unplugged.
    deletions: Deletions,
}

/// The disks that a run captures.
#[derive(Clone, Debug, Default)]
pub(crate) struct CapturedDisks {
    /// The socket of the server of its disks. `None` if no server serves them.
    pub socket: Option<PathBuf>,
    /// The disks that QEMU has opened itself.
    pub nodes: Vec<WritableNode>,
}

impl CapturedDisks {
    /// Returns true if `block`, a drive in the answer to `query-block`, holds one of these disks.
    pub fn have(&self, block: &Value) -> bool {
        let Some(inserted) = block.get("inserted") else { return false };
        let file = inserted.get("file").and_then(Value::as_str).unwrap_or_default();
        self.socket.as_ref().is_some_and(|socket| is_served(file, socket))
            || WritableNode::of(block).is_some_and(|node| {
                self.nodes.iter().any(|known| known.node == node.node || known.is_same_disk(&node))
            })
    }
}

/// The medium of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Medium {
    /// The image; `None` if the drive is empty.
    image: Option<String>,
    is_read_only: bool,
    len_bytes: u64,
    /// True if QEMU reads it by direct I/O. False for a captured disk, whose capture looks at that.
    is_direct: bool,
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.image {
            Some(image) => {
                let direct = if self.is_direct { ", direct I/O" } else { "" };
                write!(f, "{image} ({} bytes{direct})", self.len_bytes)
            }
            None => f.write_str("no medium"),
        }
    }
}

/// A change of a machine's devices or media.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineChange {
    /// A device was plugged in.
    Plugged {
        /// Its id, or its path if it has none.
        device: String,
        /// Its type.
        kind: String,
    },
    /// A device was unplugged.
    Unplugged {
        /// Its id, or its path if it has none.
        device: String,
        /// Its type.
        kind: String,
    },
    /// The medium of a drive was changed.
    Medium {
        /// The drive.
        drive: String,
        /// The medium before.
        before: String,
        /// The medium now.
        now: String,
    },
    /// Virtual CPUs were plugged in or out.
    Processors {
        /// Their number before.
        before: usize,
        /// Their number now.
        now: usize,
    },
    /// QEMU can no longer save the machine's whole state.
    Blocked {
        /// Why, in QEMU's words.
        reason: String,
    },
}

impl MachineChange {
    /// Returns what the user can do about a change that no command line can make.
    pub fn fix(&self) -> &'static str {
        match self {
            Self::Plugged { .. } => "unplug it, or start the VM with it",
            Self::Unplugged { .. } => "plug it in again as it was, or start the VM without it",
            Self::Medium { .. } => "put the medium back, or start the VM with the new one",
            Self::Processors { .. } => "undo it, or start the VM with that number of processors",
            Self::Blocked { .. } => "undo what blocks it, for example unmount the shared directory",
        }
    }
}

impl fmt::Display for MachineChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plugged { device, kind } => {
                write!(f, "device {device} ({kind}) was plugged in")
            }
            Self::Unplugged { device, kind } => write!(f, "device {device} ({kind}) was unplugged"),
            Self::Medium { drive, before, now } => {
                write!(f, "the medium of drive {drive} was changed from {before} to {now}")
            }
            Self::Processors { before, now } => {
                write!(f, "the number of processors was changed from {before} to {now}")
            }
            Self::Blocked { reason } => {
                write!(f, "QEMU cannot save the VM's whole state: {reason}")
            }
        }
    }
}

impl MachineShape {
    fn of(qmp: &mut Qmp, captured: &CapturedDisks) -> Result<Self> {
        let [with_id, without_id, blocks, processors, migration] = questions();
        let answers = qmp.ask_all([with_id, without_id, blocks, processors, migration])?;
        Self::of_answers(qmp, &answers, captured)
    }

    fn of_answers(qmp: &Qmp, answers: &[Value; 5], captured: &CapturedDisks) -> Result<Self> {
        let [with_id, without_id, blocks, processors, migration] = answers;
        let mut shape = Self { deletions: qmp.deletions().clone(), ..Self::default() };
        for (folder, answer) in rules::PLUGGED.iter().zip([with_id, without_id]) {
            let children = answer.as_array().ok_or_else(|| qmp.unexpected("qom-list", answer))?;
            for (name, kind) in children.iter().filter_map(name_and_kind) {
                shape.devices.insert(format!("{folder}/{name}"), kind.to_owned());
            }
        }
        let blocks = blocks.as_array().ok_or_else(|| qmp.unexpected("query-block", blocks))?;
        shape.media = blocks.iter().map(|block| medium(block, captured)).collect();
        let all = processors.as_array();
        shape.processors = all.ok_or_else(|| qmp.unexpected("query-cpus-fast", processors))?.len();
        shape.blockers = rules::blocked_reasons(migration).map(str::to_owned).collect();
        Ok(shape)
    }

    /// Returns true if a device discards guest RAM, from the start or plugged in since.
    pub fn discards_ram(&self) -> bool {
        self.devices.values().any(|kind| rules::discards_ram(kind))
    }

    /// Returns the reasons, in QEMU's words, why it cannot save the machine's whole state.
    pub fn blockers(&self) -> &[String] {
        &self.blockers
    }

    /// Returns true if the machine may have been changed since `before`, also if it looks the same:
    /// a device can be unplugged and plugged in again elsewhere.
    pub fn may_differ_from(&self, before: &Self) -> bool {
        self.deletions != before.deletions || !self.changes_since(before).is_empty()
    }

    /// Returns true if a memory device that is there now was unplugged since `before`, and plugged in
    /// again: its RAM is another one, also if all names are the same.
    pub fn has_other_memory(&self, before: &Self) -> bool {
        let memory = self.devices.iter().filter(|(_, kind)| is_memory(kind));
        memory.into_iter().any(|(path, _)| self.deletions.of(path) != before.deletions.of(path))
    }

    /// Returns the changes from `before` to this shape.
    pub fn changes_since(&self, before: &Self) -> Vec<MachineChange> {
        let name = |path: &String| {
            let id = path.strip_prefix(rules::PLUGGED[0]).and_then(|id| id.strip_prefix('/'));
            id.unwrap_or(path).to_owned()
        };
        let differs =
            |other: &Self, path: &String, kind: &String| other.devices.get(path) != Some(kind);
        let plugged =
            self.devices.iter().filter(|(path, kind)| differs(before, path, kind)).map(
                |(path, kind)| MachineChange::Plugged { device: name(path), kind: kind.clone() },
            );
        let unplugged = before.devices.iter().filter(|(path, kind)| differs(self, path, kind)).map(
            |(path, kind)| MachineChange::Unplugged { device: name(path), kind: kind.clone() },
        );
        // The drive of a device comes and goes with it, and then the device says it all.
        let media = self.media.iter().filter_map(|(drive, now)| {
            let old = before.media.get(drive)?;
            (old != now).then(|| MachineChange::Medium {
                drive: drive.clone(),
                before: old.to_string(),
                now: now.to_string(),
            })
        });
        let lost = before
            .media
            .iter()
            .filter(|(drive, old)| old.image.is_some() && !self.media.contains_key(*drive));
        let lost = lost.map(|(drive, old)| MachineChange::Medium {
            drive: drive.clone(),
            before: old.to_string(),
            now: Medium::default().to_string(),
        });
        let mut all: Vec<_> = unplugged.chain(plugged).collect();
        let has_devices = !all.is_empty();
        all.extend(media);
        if !has_devices {
            all.extend(lost);
        }
        if self.processors != before.processors {
            all.push(MachineChange::Processors { before: before.processors, now: self.processors });
        }
        let new = self.blockers.iter().filter(|reason| !before.blockers.contains(reason));
        all.extend(new.map(|reason| MachineChange::Blocked { reason: reason.clone() }));
        all
    }
}

/// The questions whose answers make a shape.
fn questions() -> [(&'static str, Value); 5] {
    let [with_id, without_id] = rules::PLUGGED.map(|path| ("qom-list", json!({ "path": path })));
    let plain = |command| (command, json!({}));
    [with_id, without_id, plain("query-block"), plain("query-cpus-fast"), plain("query-migrate")]
}

/// A drive of `query-block`, and its medium.
fn medium(block: &Value, captured: &CapturedDisks) -> (String, Medium) {
    let drive = rules::drive_key(block);
    let Some(inserted) = block.get("inserted") else {
        return (drive, Medium::default());
    };
    let file = inserted.get("file").and_then(Value::as_str).unwrap_or_default();
    let size = inserted.get("image").and_then(|image| image.get("virtual-size"));
    let is_captured = captured.have(block);
    let is_direct = inserted.pointer("/cache/direct").and_then(Value::as_bool) == Some(true);
    let medium = Medium {
        // The file of a captured disk has other names while the disk is read.
        image: Some(if is_captured { "the captured disk" } else { file }.to_owned()),
        is_read_only: inserted.get("ro").and_then(Value::as_bool).unwrap_or_default(),
        len_bytes: size.and_then(Value::as_u64).unwrap_or_default(),
        is_direct: is_direct && !is_captured,
    };
    (drive, medium)
}

fn is_self_contained(kind: &str) -> bool {
    SELF_CONTAINED.iter().any(|prefix| kind.starts_with(prefix))
}

impl Vm {
    /// Returns the devices and media of the machine as they are now. Error: QEMU does not answer.
    pub fn shape(&mut self) -> Result<MachineShape> {
        let captured = self.captured_disks();
        let shape = MachineShape::of(self.qmp(), &captured)?;
        self.find_new_cpus(shape.processors);
        Ok(shape)
    }

    /// Returns [`Vm::ram_layout`] and [`Vm::shape`] of the same time. Error: QEMU does not answer.
    pub fn ram_layout_and_shape(&mut self) -> Result<(RamLayout, MachineShape)> {
        let captured = self.captured_disks();
        let (layout, shape) = self.asked_for_ram(|qmp, backends| {
            let [with_id, without_id, blocks, processors, migration] = questions();
            let list = (ramblock::LIST, json!({}));
            let [list, answers @ ..] =
                qmp.ask_all([list, with_id, without_id, blocks, processors, migration])?;
            let layout = ramblock::layout_of_answer(qmp, &list, backends)?;
            Ok((layout, MachineShape::of_answers(qmp, &answers, &captured)?))
        })?;
        self.find_new_cpus(shape.processors);
        Ok((layout, shape))
    }

    /// Returns the words that, after [`Vm::user_command`], make the machine as it is now. `now` is
    /// its shape, and `before` the shape that the command made. The inner `Err` holds the changes
    /// that no word can make. Error: QEMU does not answer.
    pub fn words_of_changes(
        &mut self,
        before: &MachineShape,
        now: &MachineShape,
    ) -> Result<Result<Vec<String>, Vec<MachineChange>>> {
        let changes = now.changes_since(before);
        let can_be_made = |change: &MachineChange| match change {
            MachineChange::Plugged { kind, .. } => is_self_contained(kind) || is_memory(kind),
            MachineChange::Unplugged { .. }
            | MachineChange::Medium { .. }
            | MachineChange::Processors { .. }
            | MachineChange::Blocked { .. } => false,
        };
        let (made, mut other): (Vec<_>, Vec<_>) = changes.into_iter().partition(can_be_made);
        let mut words = self.plugged_memory()?;
        let line = hotplug::arguments(self.user_command());
        for change in made {
            let MachineChange::Plugged { device, kind } = &change else { continue };
            if is_memory(kind) {
                continue;
            }
            match device_words(self.qmp(), device, kind, &line)? {
                Some(text) => words.extend(["-device".into(), text]),
                None => other.push(change),
            }
        }
        Ok(if other.is_empty() { Ok(words) } else { Err(other) })
    }
}

/// The value of `-device` that makes this device; `None` if it uses an object that is not on the
/// command line.
fn device_words(
    qmp: &mut Qmp,
    device: &str,
    kind: &str,
    line: &[Argument],
) -> Result<Option<String>> {
    let is_path = device.starts_with('/');
    let path = if is_path { device.to_owned() } else { format!("{}/{device}", rules::PLUGGED[0]) };
    let properties = qmp.execute("device-list-properties", Some(json!({ "typename": kind })))?;
    let Some(properties) = properties.as_array() else {
        return Err(qmp.unexpected("device-list-properties", &properties));
    };
    let mut parts = vec![kind.to_owned()];
    if !is_path {
        parts.push(format!("id={}", escape(device)));
    }
    let bus = get(qmp, &path, "parent_bus")?;
    let bus = bus.as_str().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    parts.push(format!("bus={}", escape(bus)));
    for property in properties {
        let part = |key: &str| property.get(key).and_then(Value::as_str).unwrap_or_default();
        let (name, of) = (part("name"), part("type"));
        if name.is_empty() || of.starts_with("child<") {
            continue;
        }
        let value = get(qmp, &path, name)?;
        let word = match (name, property.get("default-value")) {
            ("addr", _) => PropertyWord::Text(pci_address(&value)),
            (_, Some(default)) if *default == value => PropertyWord::Default,
            // Those say how the device is, and cannot be set.
            (_, None) if !value.is_string() => PropertyWord::Default,
            _ => word_of(&value, of, &path, line),
        };
        match word {
            PropertyWord::Default => {}
            PropertyWord::Text(word) => parts.push(format!("{name}={}", escape(&word))),
            PropertyWord::Foreign => return Ok(None),
        }
    }
    Ok(Some(parts.join(",")))
}

/// The property `property` of the QOM object at `path`. Error: QEMU does not answer, or has none.
pub(crate) fn get(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value> {
    qmp.execute("qom-get", Some(json!({ "path": path, "property": property })))
}

/// The slot and function of a PCI device, of which QEMU tells one number.
pub(crate) fn pci_address(value: &Value) -> String {
    match value.as_u64() {
        Some(number) => format!("{:x}.{:x}", number >> 3, number & 7),
        None => value.as_str().unwrap_or_default().to_owned(),
    }
}

/// How a property is written.
#[derive(Debug, PartialEq, Eq)]
enum PropertyWord {
    /// Not at all: it is empty, or says what the device does and not what it is.
    Default,
    /// As this text.
    Text(String),
    /// It names an object that is not on the command line.
    Foreign,
}

fn word_of(value: &Value, of: &str, device: &str, line: &[Argument]) -> PropertyWord {
    match value {
        Value::Bool(is_on) => PropertyWord::Text(if *is_on { "on" } else { "off" }.into()),
        Value::Number(number) => PropertyWord::Text(number.to_string()),
        Value::String(text) if text.is_empty() => PropertyWord::Default,
        Value::String(text) if of.starts_with("link<") => {
            let objects = line.iter().filter(|a| a.name() == "object");
            let mut ids = objects.filter_map(|a| Object::parse(a.value())).map(|object| object.id);
            match text.strip_prefix("/objects/") {
                _ if text.starts_with(device) => PropertyWord::Default,
                Some(id) if ids.any(|known| known == id) => PropertyWord::Text(id.into()),
                _ => PropertyWord::Foreign,
            }
        }
        Value::String(text) => PropertyWord::Text(text.clone()),
        _ => PropertyWord::Default,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_qemu_cmdline::options;

    fn shape(devices: &[(&str, &str)], media: &[(&str, Option<&str>)]) -> MachineShape {
        let path = |id: &str| format!("/machine/peripheral/{id}");
        let medium = |image: Option<&str>| Medium {
            image: image.map(str::to_owned),
            is_read_only: true,
            len_bytes: 7,
            is_direct: false,
        };
        MachineShape {
            devices: devices.iter().map(|(id, kind)| (path(id), (*kind).into())).collect(),
            media: media.iter().map(|(drive, image)| ((*drive).into(), medium(*image))).collect(),
            ..MachineShape::default()
        }
    }

    fn texts(now: &MachineShape, before: &MachineShape) -> Vec<String> {
        now.changes_since(before).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn changes_are_told_and_what_came_back_is_none() {
        let before =
            shape(&[("net0", "e1000"), ("r0", "virtio-rng-pci")], &[("cd", Some("a.iso"))]);
        assert_eq!(before.changes_since(&before), []);
        let now = shape(&[("net0", "e1000"), ("u1", "usb-kbd")], &[("cd", Some("b.iso"))]);
        assert_eq!(
            texts(&now, &before),
            [
                "device r0 (virtio-rng-pci) was unplugged",
                "device u1 (usb-kbd) was plugged in",
                "the medium of drive cd was changed from a.iso (7 bytes) to b.iso (7 bytes)",
            ]
        );
        // The same id for another device is another device.
        let other = shape(&[("net0", "e1000"), ("r0", "usb-kbd")], &[("cd", Some("a.iso"))]);
        assert_eq!(other.changes_since(&before).len(), 2);
        let ejected = shape(&[("net0", "e1000"), ("r0", "virtio-rng-pci")], &[("cd", None)]);
        assert_eq!(
            texts(&ejected, &before),
            ["the medium of drive cd was changed from a.iso (7 bytes) to no medium"]
        );
        let gone = shape(&[("net0", "e1000"), ("r0", "virtio-rng-pci")], &[]);
        assert_eq!(gone.changes_since(&before).len(), 1);
    }

    #[test]
    fn a_memory_device_that_was_unplugged_and_plugged_in_again_is_other_memory() {
        let before = shape(&[("dimm1", "pc-dimm"), ("r0", "virtio-rng-pci")], &[]);
        let after = |id: &str| {
            let mut now = before.clone();
            let path = format!("/machine/peripheral/{id}");
            now.deletions.note(&json!({ "data": { "device": id, "path": path } }));
            now
        };
        assert!(after("dimm1").has_other_memory(&before));
        assert!(!after("r0").has_other_memory(&before) && !before.has_other_memory(&before));
        // An unplugged one is no RAM of this machine.
        let gone = MachineShape { devices: BTreeMap::new(), ..after("dimm1") };
        assert!(!gone.has_other_memory(&before) && gone.may_differ_from(&before));
    }

    #[test]
    fn a_device_that_brings_a_drive_is_one_change() {
        let before = shape(&[], &[]);
        let now = shape(&[("b1", "virtio-blk-pci")], &[("b1", Some("x"))]);
        assert_eq!(texts(&now, &before), ["device b1 (virtio-blk-pci) was plugged in"]);
        assert_eq!(texts(&before, &now), ["device b1 (virtio-blk-pci) was unplugged"]);
    }

    #[test]
    fn media_are_told_by_image_size_and_whether_they_can_be_written_to() {
        let block = |size: u64, ro: bool| {
            let image = json!({"virtual-size": size, "actual-size": 3});
            let inserted = json!({"file": "a", "ro": ro, "image": image});
            let qdev = "/machine/peripheral/cd";
            let block =
                json!({"device": "", "qdev": qdev, "tray_open": true, "inserted": inserted});
            medium(&block, &CapturedDisks::default())
        };
        assert_eq!(block(5, true).0, "/machine/peripheral/cd");
        assert_eq!(block(5, true), block(5, true));
        assert_ne!(block(5, true), block(6, true));
        assert_ne!(block(5, true), block(5, false));
        let empty = medium(&json!({"device": "cd0"}), &CapturedDisks::default());
        assert_eq!(empty, ("cd0".into(), Medium::default()));
    }

    #[test]
    fn a_captured_disk_is_the_same_under_a_filter_of_qemus_own() {
        let image = |node: &str, file: &str| {
            let image = json!({"virtual-size": 512});
            let inserted = json!({"file": file, "ro": false, "node-name": node, "image": image});
            json!({"device": "d", "inserted": inserted})
        };
        let nodes = WritableNode::of(&image("n", "a")).into_iter().collect();
        let captured = CapturedDisks { socket: None, nodes };
        let of = |node: &str, file: &str| medium(&image(node, file), &captured).1.image;
        assert_eq!(of("n", "a"), of("#block7", "a"));
        assert_ne!(of("n", "a"), of("#block7", "b"));
    }

    #[test]
    fn processors_blockers_and_devices_that_came_back_are_changes() {
        let before = shape(&[], &[]);
        let now = MachineShape { processors: 2, blockers: vec!["9p".into()], ..before.clone() };
        assert_eq!(now.changes_since(&before).len(), 2);
        // What no longer blocks is no obstacle.
        assert_eq!(before.changes_since(&now).len(), 1);
        let mut replugged = before.clone();
        replugged.deletions.note(&json!({ "data": { "path": "/machine/peripheral/r0" } }));
        assert_eq!(replugged.changes_since(&before), []);
        assert!(replugged.may_differ_from(&before) && !before.may_differ_from(&before));
    }

    #[test]
    fn properties_become_words_unless_they_need_another_object() {
        let line = options::parse(&["-object", "rng-random,id=g0"].map(str::to_owned)).unwrap();
        let word = |value: Value, of: &str| word_of(&value, of, "/machine/peripheral/r1", &line);
        let text = |text: &str| PropertyWord::Text(text.into());
        assert_eq!(word(json!(true), "bool"), text("on"));
        assert_eq!(word(json!(3), "uint32"), text("3"));
        assert_eq!(word(json!("04.0"), "str"), text("04.0"));
        assert_eq!(word(json!(""), "str"), PropertyWord::Default);
        assert_eq!(word(json!({"stats": {}}), "guest statistics"), PropertyWord::Default);
        assert_eq!(
            (pci_address(&json!(24)), pci_address(&json!("04.0"))),
            ("3.0".into(), "04.0".into())
        );
        let link = "link<rng-backend>";
        assert_eq!(word(json!("/objects/g0"), link), text("g0"));
        assert_eq!(word(json!("/objects/g1"), link), PropertyWord::Foreign);
        let own = "/machine/peripheral/r1/virtio-device/default-backend";
        assert_eq!(word(json!(own), link), PropertyWord::Default);
    }
}
