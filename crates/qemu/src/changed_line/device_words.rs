//! The words of a command line for a device that was plugged in, with the backends that it uses.
//!
//! All properties that differ from their defaults are among the words, and the address on the bus.
//! For a processor, its place in the topology is enough: `-cpu` holds for it too.

use super::PresentDevice;
use crate::machine_shape::{get, pci_address};
use crate::{Qmp, Result};
use keyframe_qemu_cmdline::options::{Argument, escape, properties, value_of};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The backends that the devices of a command line need.
pub(super) struct Wanted {
    /// The ids of those that exist.
    pub known: BTreeSet<String>,
    /// The words for those that the command line lacks.
    pub words: Vec<String>,
    /// The drives of the command line by the nodes that the captured disks have now.
    pub captured: BTreeMap<String, String>,
    /// The drives that the devices use.
    pub used_drives: BTreeSet<String>,
}

/// Types of devices whose words were tried: a QEMU that is started with them has the same device.
const KNOWN: &[&str] = &[
    "virtio-rng-",
    "virtio-balloon-",
    "virtio-keyboard-",
    "virtio-mouse-",
    "virtio-tablet-",
    "virtio-multitouch-",
    "virtio-net-",
    "virtio-blk-",
    "virtio-scsi-",
    "virtio-serial-",
    "virtserialport",
    "virtconsole",
    "scsi-",
    "usb-tablet",
    "usb-mouse",
    "usb-kbd",
    "usb-storage",
    "usb-hub",
    "usb-serial",
    "e1000",
    "rtl8139",
    "i6300esb",
];

/// The buses on which a device without an address gets the first free one.
pub(super) fn address(qmp: &mut Qmp, device: &PresentDevice) -> Result<Vec<(String, Value)>> {
    let mut keys = Vec::new();
    for property in property_names(qmp, &device.kind)? {
        match property.as_str() {
            "addr" => {
                let address = pci_address(&get(qmp, &device.path, "addr")?);
                keys.push(("addr".to_owned(), json!(address)));
            }
            "scsi-id" | "lun" | "channel" | "nr" | "unit" => {
                let value = get(qmp, &device.path, &property)?;
                if value.as_u64().is_some_and(|number| number < u64::from(u32::MAX)) {
                    keys.push((property, value));
                }
            }
            "port" if device.kind.starts_with("usb-") => {
                if let Some(port) = usb_port(qmp, &device.id)? {
                    keys.push(("port".to_owned(), json!(port)));
                }
            }
            _ => {}
        }
    }
    Ok(keys)
}

/// The value of `-device` that makes this device. `Err` inside: why no command line can make it.
pub(super) fn words_of(
    qmp: &mut Qmp,
    device: &PresentDevice,
    line: &[Argument],
    wanted: &mut Wanted,
) -> Result<Result<String, String>> {
    if device.kind.ends_with("-cpu") {
        return processor(qmp, device);
    }
    if !KNOWN.iter().any(|prefix| device.kind.starts_with(prefix)) {
        return Ok(Err(
            "Keyframe does not know how to write such a device into the command line".into()
        ));
    }
    let mut parts = vec![device.kind.clone()];
    if !device.id.is_empty() {
        parts.push(format!("id={}", escape(&device.id)));
    }
    let bus = device.bus.rsplit('/').next().unwrap_or_default();
    parts.push(format!("bus={}", escape(bus)));
    let listed = qmp.execute("device-list-properties", Some(json!({ "typename": device.kind })))?;
    let Some(listed) = listed.as_array() else {
        return Err(qmp.unexpected("device-list-properties", &listed));
    };
    for property in listed {
        let part = |key: &str| property.get(key).and_then(Value::as_str).unwrap_or_default();
        let (name, of) = (part("name"), part("type"));
        if name.is_empty() || of.starts_with("child<") {
            continue;
        }
        let value = get(qmp, &device.path, name)?;
        let word = match name {
            "addr" => Some(pci_address(&value)),
            "port" if device.kind.starts_with("usb-") => usb_port(qmp, &device.id)?,
            // An empty one differs from the default, which QEMU does not tell.
            "romfile" => Some(value.as_str().unwrap_or_default().to_owned()),
            "bootindex" => {
                value.as_i64().filter(|index| *index >= 0).map(|index| index.to_string())
            }
            "drive" | "netdev" | "chardev" => {
                let mut backend = value.as_str().unwrap_or_default().to_owned();
                if backend.is_empty() {
                    continue;
                }
                if name == "drive" {
                    // A disk that was plugged in again can have a node of another name.
                    backend = wanted.captured.get(&backend).cloned().unwrap_or(backend);
                    wanted.used_drives.insert(backend.clone());
                }
                let made = match name {
                    "drive" => drive_words(qmp, &backend, line, wanted)?,
                    "netdev" => netdev_words(qmp, &backend, wanted)?,
                    _ => chardev_words(qmp, &backend, wanted)?,
                };
                match made {
                    Ok(()) => Some(backend),
                    Err(reason) => return Ok(Err(reason)),
                }
            }
            _ if of.starts_with("link<") => match link(qmp, &value, device, wanted)? {
                Ok(word) => word,
                Err(reason) => return Ok(Err(reason)),
            },
            _ if property.get("default-value") == Some(&value) => None,
            _ => match plain(&value, property.get("default-value").is_some()) {
                Ok(word) => word,
                Err(()) => return Ok(Err(format!("its property {name} cannot be written there"))),
            },
        };
        if let Some(word) = word {
            parts.push(format!("{name}={}", escape(&word)));
        }
    }
    Ok(Ok(parts.join(",")))
}

/// The word of a property without a meaning of its own; `None` if it needs none.
fn plain(value: &Value, has_default: bool) -> Result<Option<String>, ()> {
    match value {
        Value::String(text) if text.is_empty() => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        // Those say how the device is, and cannot be set.
        Value::Bool(_) | Value::Number(_) if !has_default => Ok(None),
        Value::Bool(is_on) => Ok(Some(if *is_on { "on" } else { "off" }.into())),
        Value::Number(number) => Ok(Some(number.to_string())),
        Value::Array(items) if !items.is_empty() => Err(()),
        _ => Ok(None),
    }
}

fn processor(qmp: &mut Qmp, device: &PresentDevice) -> Result<Result<String, String>> {
    let answer = qmp.execute("query-hotpluggable-cpus", None)?;
    let slots = answer.as_array().into_iter().flatten();
    let mut mine = slots
        .filter(|slot| slot.get("qom-path").and_then(Value::as_str) == Some(device.path.as_str()));
    let Some(place) = mine.next().and_then(|slot| slot.get("props")).and_then(Value::as_object)
    else {
        return Ok(Err("QEMU does not tell which processor it is".into()));
    };
    let mut parts = vec![device.kind.clone()];
    if !device.id.is_empty() {
        parts.push(format!("id={}", escape(&device.id)));
    }
    parts.extend(place.iter().map(|(key, value)| format!("{key}={value}")));
    Ok(Ok(parts.join(",")))
}

/// The id of an object that a device uses; `None` if the device makes the object itself.
fn link(
    qmp: &mut Qmp,
    value: &Value,
    device: &PresentDevice,
    wanted: &mut Wanted,
) -> Result<Result<Option<String>, String>> {
    let path = value.as_str().unwrap_or_default();
    if path.is_empty() || path.starts_with(&device.path) {
        return Ok(Ok(None));
    }
    let Some(id) = path.strip_prefix("/objects/") else {
        return Ok(Err(format!("it uses {path}")));
    };
    if wanted.known.insert(id.to_owned()) {
        let kind = get(qmp, path, "type")?;
        match kind.as_str() {
            Some(kind @ ("iothread" | "rng-builtin")) => {
                wanted.words.extend(["-object".into(), format!("{kind},id={}", escape(id))]);
            }
            _ => return Ok(Err(format!("the command line lacks the object {id} that it uses"))),
        }
    }
    Ok(Ok(Some(id.to_owned())))
}

/// The words for a drive that the guest can only read. One of the command line needs none.
fn drive_words(
    qmp: &mut Qmp,
    node: &str,
    line: &[Argument],
    wanted: &mut Wanted,
) -> Result<Result<(), String>> {
    // A -drive of the line ends with its device.
    let is_drive = line.iter().any(|a| {
        let keys = properties(a.value(), "file").unwrap_or_default();
        a.name() == "drive" && value_of(&keys, "id") == Some(node)
    });
    if is_drive || !wanted.known.insert(node.to_owned()) {
        return Ok(Ok(()));
    }
    let answer = qmp.execute("query-named-block-nodes", Some(json!({ "flat": true })))?;
    let nodes = answer.as_array().into_iter().flatten();
    let text = |value: &Value, key: &str| {
        value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let mut named = nodes.filter(|found| text(found, "node-name") == node);
    let Some(found) = named.next() else {
        return Ok(Err(format!("its drive {node} has no node of that name")));
    };
    let (file, driver) = (text(found, "file"), text(found, "drv"));
    if found.get("ro").and_then(Value::as_bool) != Some(true) {
        return Ok(Err(format!(
            "the guest can write to its disk {file}, which this run does not capture"
        )));
    }
    if !matches!(driver.as_str(), "raw" | "qcow2") || !file.starts_with('/') {
        return Ok(Err(format!("its disk {file} ({driver}) is no raw or qcow2 image with a path")));
    }
    if node.starts_with('#') {
        return Ok(Err("the node of its disk has no name".into()));
    }
    let direct = found.get("cache").and_then(|cache| cache.get("direct"));
    if direct.and_then(Value::as_bool) == Some(true) {
        return Ok(Err("with direct I/O the kernel writes into pinned guest pages unseen".into()));
    }
    let words = format!(
        "driver={driver},node-name={},read-only=on,file.driver=file,file.filename={}",
        escape(node),
        escape(&file)
    );
    wanted.words.extend(["-blockdev".into(), words]);
    Ok(Ok(()))
}

/// The words for a network backend. One of the command line needs none.
fn netdev_words(qmp: &mut Qmp, id: &str, wanted: &mut Wanted) -> Result<Result<(), String>> {
    if wanted.known.contains(id) {
        return Ok(Ok(()));
    }
    let listed = qmp.hmp("info network")?;
    let marker = format!("{id}: index=");
    let mine = listed.lines().map(|line| line.trim_start_matches([' ', '\\'])).find_map(|line| {
        line.strip_prefix(&marker)?.split_once(',').map(|(_, rest)| rest.trim().to_owned())
    });
    let Some(mine) = mine else {
        return Ok(Err(format!("QEMU does not list its network backend {id}")));
    };
    // Ports that the host forwards are not among these words.
    let forwards = qmp.hmp("info usernet")?.lines().any(|line| line.contains("HOST_FORWARD"));
    let words = match mine.as_str() {
        "type=user,net=10.0.2.0,restrict=off" if !forwards => format!("user,id={}", escape(id)),
        "type=user,net=10.0.2.0,restrict=on" if !forwards => {
            format!("user,id={},restrict=on", escape(id))
        }
        other => {
            return Ok(Err(format!(
                "Keyframe cannot write its network backend {id} ({other}) there"
            )));
        }
    };
    wanted.known.insert(id.to_owned());
    wanted.words.extend(["-netdev".into(), words]);
    Ok(Ok(()))
}

/// The words for a character device. One of the command line needs none.
fn chardev_words(qmp: &mut Qmp, id: &str, wanted: &mut Wanted) -> Result<Result<(), String>> {
    if wanted.known.contains(id) {
        return Ok(Ok(()));
    }
    let answer = qmp.execute("query-chardev", None)?;
    let text = |value: &Value, key: &str| {
        value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let mut mine = answer.as_array().into_iter().flatten().filter(|c| text(c, "label") == id);
    let filename = mine.next().map(|found| text(found, "filename")).unwrap_or_default();
    let plain = filename.strip_prefix("disconnected:").unwrap_or(&filename);
    let socket = plain.strip_prefix("unix:").and_then(|rest| rest.strip_suffix(",server=on"));
    let words = match (plain, socket) {
        ("null", _) => format!("null,id={}", escape(id)),
        ("pty", _) => format!("pty,id={}", escape(id)),
        (pty, _) if pty.starts_with("pty:") => format!("pty,id={}", escape(id)),
        (_, Some(path)) => {
            format!("socket,id={},path={},server=on,wait=off", escape(id), escape(path))
        }
        _ => {
            return Ok(Err(format!(
                "Keyframe cannot write its character device {id} ({filename}) there"
            )));
        }
    };
    wanted.known.insert(id.to_owned());
    wanted.words.extend(["-chardev".into(), words]);
    Ok(Ok(()))
}

/// The port of a USB device, which its property does not tell if QEMU chose it.
fn usb_port(qmp: &mut Qmp, id: &str) -> Result<Option<String>> {
    if id.is_empty() {
        return Ok(None);
    }
    let listed = qmp.hmp("info usb")?;
    let end = format!("ID: {id}");
    let mine = listed.lines().find(|line| line.trim_end().ends_with(&end));
    let port = mine.and_then(|line| line.split("Port ").nth(1)?.split(',').next());
    Ok(port.map(|port| port.trim().to_owned()))
}

fn property_names(qmp: &mut Qmp, kind: &str) -> Result<Vec<String>> {
    let listed = qmp.execute("device-list-properties", Some(json!({ "typename": kind })))?;
    let Some(listed) = listed.as_array() else {
        return Err(qmp.unexpected("device-list-properties", &listed));
    };
    let name = |property: &Value| property.get("name").and_then(Value::as_str).map(str::to_owned);
    Ok(listed.iter().filter_map(name).collect())
}
