//! What a user changes of a running machine through a monitor of their own: devices, memory and
//! media. And the words of a command line that makes the changed machine, if there are any.
//!
//! ```text
//!   qom-list, query-block ──▶ MachineShape ──▶ changes since another shape ──▶ -device virtio-rng-pci,id=r1,bus=pci.0,addr=04.0
//! ```
//!
//! Words are made for memory and for devices that need nothing of the host ([`SELF_CONTAINED`]).
//! All properties of such a device that differ from their defaults are among its words.
//!
//! Left out: backends that no device uses; they are not part of the machine.

use crate::audit::{self, name_and_kind};
use crate::hotplug::{self, is_memory};
use crate::{Qmp, Result, Vm};
use keyframe_qemu_cmdline::options::{Argument, Object, escape};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;

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
}

/// The medium of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Medium {
    /// The image; `None` if the drive is empty.
    image: Option<String>,
    is_read_only: bool,
    len_bytes: u64,
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.image {
            Some(image) => write!(f, "{image} ({} bytes)", self.len_bytes),
            None => f.write_str("no medium"),
        }
    }
}

/// One change of a machine.
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
}

impl MachineChange {
    /// Returns what the user can do about a change that no command line can make.
    pub fn fix(&self) -> &'static str {
        match self {
            Self::Plugged { .. } => "unplug it, or start the VM with it",
            Self::Unplugged { .. } => "plug it in again as it was, or start the VM without it",
            Self::Medium { .. } => "put the medium back, or start the VM with the new one",
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
        }
    }
}

impl MachineShape {
    fn of(qmp: &mut Qmp) -> Result<Self> {
        let listing = |path: &str| ("qom-list", json!({ "path": path }));
        let [with_id, without_id] = audit::PLUGGED.map(listing);
        let answers = qmp.ask_all([with_id, without_id, ("query-block", json!({}))])?;
        let [with_id, without_id, blocks] = &answers;
        let mut shape = Self::default();
        for (folder, answer) in audit::PLUGGED.iter().zip([with_id, without_id]) {
            let children = answer.as_array().ok_or_else(|| qmp.unexpected("qom-list", answer))?;
            for (name, kind) in children.iter().filter_map(name_and_kind) {
                shape.devices.insert(format!("{folder}/{name}"), kind.to_owned());
            }
        }
        let blocks = blocks.as_array().ok_or_else(|| qmp.unexpected("query-block", blocks))?;
        shape.media = blocks.iter().map(medium).collect();
        Ok(shape)
    }

    /// Returns the changes from `before` to this shape.
    pub fn changes_since(&self, before: &Self) -> Vec<MachineChange> {
        let name = |path: &String| {
            let id = path.strip_prefix(audit::PLUGGED[0]).and_then(|id| id.strip_prefix('/'));
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
        all
    }
}

/// A drive of `query-block`, and its medium.
fn medium(block: &Value) -> (String, Medium) {
    let text = |value: &Value, key: &str| {
        value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let drive = [text(block, "device"), text(block, "qdev")].into_iter().find(|n| !n.is_empty());
    let Some(inserted) = block.get("inserted") else {
        return (drive.unwrap_or_default(), Medium::default());
    };
    let size = inserted.get("image").and_then(|image| image.get("virtual-size"));
    let medium = Medium {
        image: Some(text(inserted, "file")),
        is_read_only: inserted.get("ro").and_then(Value::as_bool).unwrap_or_default(),
        len_bytes: size.and_then(Value::as_u64).unwrap_or_default(),
    };
    (drive.unwrap_or_else(|| text(inserted, "node-name")), medium)
}

fn is_self_contained(kind: &str) -> bool {
    SELF_CONTAINED.iter().any(|prefix| kind.starts_with(prefix))
}

impl Vm {
    /// Returns the devices and media of the machine as they are now. Error: QEMU does not answer.
    pub fn shape(&mut self) -> Result<MachineShape> {
        MachineShape::of(self.qmp())
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
            MachineChange::Unplugged { .. } | MachineChange::Medium { .. } => false,
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
/// line.
fn device_words(
    qmp: &mut Qmp,
    device: &str,
    kind: &str,
    line: &[Argument],
) -> Result<Option<String>> {
    let is_path = device.starts_with('/');
    let path = if is_path { device.to_owned() } else { format!("{}/{device}", audit::PLUGGED[0]) };
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

fn get(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value> {
    qmp.execute("qom-get", Some(json!({ "path": path, "property": property })))
}

/// The slot and function of a PCI device, of which QEMU tells one number.
fn pci_address(value: &Value) -> String {
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
    /// It names an object that is not on the line.
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
        };
        MachineShape {
            devices: devices.iter().map(|(id, kind)| (path(id), (*kind).into())).collect(),
            media: media.iter().map(|(drive, image)| ((*drive).into(), medium(*image))).collect(),
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
    fn a_device_that_brings_a_drive_is_one_change() {
        let before = shape(&[], &[]);
        let now = shape(&[("b1", "virtio-blk-pci")], &[("b1", Some("x"))]);
        assert_eq!(texts(&now, &before), ["device b1 (virtio-blk-pci) was plugged in"]);
        assert_eq!(texts(&before, &now), ["device b1 (virtio-blk-pci) was unplugged"]);
    }

    #[test]
    fn media_are_told_by_image_size_and_whether_they_can_be_written_to() {
        let block = |size: u64, ro: bool| {
            medium(&json!({"device": "", "qdev": "/machine/peripheral/cd", "tray_open": true,
                "inserted": {"file": "a", "ro": ro, "image": {"virtual-size": size, "actual-size": 3}}}))
        };
        assert_eq!(block(5, true).0, "/machine/peripheral/cd");
        assert_eq!(block(5, true), block(5, true));
        assert_ne!(block(5, true), block(6, true));
        assert_ne!(block(5, true), block(5, false));
        assert_eq!(medium(&json!({"device": "cd0"})), ("cd0".into(), Medium::default()));
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
