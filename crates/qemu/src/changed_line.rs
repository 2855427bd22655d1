//! The command line that makes a machine as its user has changed it since its start.
//!
//! ```text
//!   the line, qom-list, hotplugged?, query-block ──▶ LineEdits ──▶ the line of the next checkpoint
//!                                               └──▶ findings: what no line of ours can make
//! ```
//!
//! QEMU's property `hotplugged` tells which devices came after the start. A device of the line that
//! was unplugged and plugged in again is two changes: it leaves the line, and another one comes.
//!
//! Left out: devices without an id that were unplugged, since QEMU's numbers for the others do not
//! tell which arguments made them. Backends that no device uses are no part of the machine.

mod device_words;

use crate::blocknodes::drive_on_line;
use crate::hotplug::{self, is_memory};
use crate::machine_shape::{CapturedDisks, get};
use crate::{Qmp, Result, Vm};
use device_words::{Wanted, words_of};
use keyframe_qemu_audit::{PLUGGED, name_and_kind};
use keyframe_qemu_cmdline::{
    LineDevice, LineEdits, MediumEdit, Object, ReadOnlyMedium, anonymous_devices, medium_of_line,
    options::{self, Argument, value_of},
};
use keyframe_vmm::{AuditFinding, Severity};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The command lines that make a machine as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineLines {
    /// The command line as the user gave it, with the changes.
    pub user_command: Vec<String>,
    /// The command line with the options that Keyframe added, with the changes.
    pub full_command: Vec<String>,
}

/// A device of the machine that can be plugged in and out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PresentDevice {
    /// QOM path.
    pub path: String,
    /// The id; empty if it has none.
    pub id: String,
    pub kind: String,
    pub is_hotplugged: bool,
    /// QOM path of the bus that it is plugged into; empty for a device without one.
    pub bus: String,
}

impl PresentDevice {
    fn subject(&self) -> String {
        let name = if self.id.is_empty() { &self.path } else { &self.id };
        format!("device {name} ({})", self.kind)
    }

    /// The number in the path of a device without an id.
    fn number(&self) -> Option<usize> {
        self.path.rsplit_once("/device[")?.1.strip_suffix(']')?.parse().ok()
    }
}

impl Vm {
    /// Returns the command lines that make the machine as it is now: [`Vm::user_command`] and
    /// [`Vm::full_command`] with the changes since the start. The inner `Err` holds the changes
    /// that no line can make. Error: QEMU does not answer.
    pub fn lines_now(&mut self) -> Result<Result<MachineLines, Vec<AuditFinding>>> {
        let directory = self.working_directory().unwrap_or_default();
        let line = hotplug::arguments(self.user_command());
        let full = hotplug::arguments(self.full_command());
        let is_recorded = |a: &Argument| a.name() == "icount" && a.value().contains("rr=");
        if full.iter().any(is_recorded) {
            // Keyframe serves the media, and nothing may be plugged into a recorded machine.
            return Ok(Ok(MachineLines {
                user_command: self.user_command().to_vec(),
                full_command: self.full_command().to_vec(),
            }));
        }
        let captured = self.captured_disks();
        let mut look =
            ChangedLine { line: &line, edits: LineEdits::default(), findings: Vec::new() };
        look.devices(self.qmp(), &directory, &captured)?;
        look.media(self.qmp(), &directory, &captured)?;
        look.memory(self.qmp())?;
        let ChangedLine { edits, mut findings, .. } = look;
        if edits == LineEdits::default() && findings.is_empty() {
            return Ok(Ok(MachineLines {
                user_command: self.user_command().to_vec(),
                full_command: self.full_command().to_vec(),
            }));
        }
        let edited = |words: &[String], line: &[Argument]| {
            let edited = edits.apply(line)?;
            let words = words.iter().take(1).cloned();
            Some(words.chain(edited.iter().flat_map(Argument::words)).collect())
        };
        let user = edited(self.user_command(), &line);
        let user_command = user.unwrap_or_else(|| {
            findings.push(finding(
                "a drive".into(),
                "its medium was changed, and the command line does not say how the drive was made",
                "put the medium back, or start the VM with -drive ...,id=ID for it",
            ));
            Vec::new()
        });
        // Keyframe's own changes of the full line do not concern devices.
        let full_command = edited(self.full_command(), &full).unwrap_or_default();
        Ok(if findings.is_empty() {
            Ok(MachineLines { user_command, full_command })
        } else {
            Err(findings)
        })
    }
}

struct ChangedLine<'a> {
    line: &'a [Argument],
    edits: LineEdits,
    findings: Vec<AuditFinding>,
}

impl ChangedLine<'_> {
    /// Compares the devices.
    fn devices(&mut self, qmp: &mut Qmp, directory: &Path, captured: &CapturedDisks) -> Result<()> {
        let present = present_devices(qmp)?;
        let has_config = self.line.iter().any(|a| a.name() == "readconfig");
        let at_start = |id: &str| present.iter().any(|d| d.id == id && !d.is_hotplugged);
        let named =
            options::devices(self.line).filter_map(|keys| value_of(&keys, "id").map(str::to_owned));
        self.edits.removed = named.filter(|id| !at_start(id)).collect();
        let known: BTreeSet<String> = ids_of(self.line);
        self.edits.unused_drives = unused_drives(self.line, &self.edits.removed, captured);
        self.check_anonymous(&present, has_config);
        if !self.edits.removed.is_empty() {
            self.pin(qmp, &present)?;
        }
        let mut appended = Vec::new();
        let mut wanted = Wanted {
            known,
            words: Vec::new(),
            captured: self.captured_drives(captured, directory),
            used_drives: BTreeSet::new(),
        };
        for device in present.iter().filter(|d| d.is_hotplugged && !is_memory(&d.kind)) {
            if let Some(finding) = keyframe_qemu_audit::device_finding(&device.id, &device.kind) {
                self.findings.push(finding);
                continue;
            }
            match words_of(qmp, device, self.line, &mut wanted)? {
                Ok(text) => appended.extend(["-device".to_owned(), text]),
                Err(reason) => {
                    let reason = format!("it was plugged in after the VM's start, and {reason}");
                    let fix = "unplug it, or start the VM with it";
                    self.findings.push(finding(device.subject(), reason, fix));
                }
            }
        }
        self.edits.unused_drives.retain(|drive| !wanted.used_drives.contains(drive));
        self.edits.appended.extend(wanted.words);
        self.edits.appended.append(&mut appended);
        Ok(())
    }

    /// Returns the drives of the command line by the names of the nodes that the captured disks
    /// have now.
    fn captured_drives(
        &self,
        captured: &CapturedDisks,
        directory: &Path,
    ) -> BTreeMap<String, String> {
        let drives = captured.nodes.iter().filter_map(|disk| {
            let drive = drive_on_line(self.line, disk, directory)?;
            let backends = [&disk.node, &disk.device].into_iter().filter(|name| !name.is_empty());
            Some(backends.map(move |name| (name.clone(), drive.clone())).collect::<Vec<_>>())
        });
        drives.flatten().collect()
    }

    /// Finds devices without an id that were unplugged.
    fn check_anonymous(&mut self, present: &[PresentDevice], has_config: bool) {
        let mut numbers: Vec<usize> =
            present.iter().filter(|d| !d.is_hotplugged).filter_map(PresentDevice::number).collect();
        numbers.sort_unstable();
        let of_line = anonymous_devices(self.line).len();
        let is_whole = numbers.iter().enumerate().all(|(at, number)| at == *number);
        if !is_whole || (numbers.len() < of_line && !has_config) {
            self.findings.push(finding(
                "a device without an id".into(),
                "it was unplugged after the VM's start, and a VM restored from the line would have it",
                "plug it in again as it was, or start the VM with an id for each device",
            ));
        }
    }

    /// Gives the devices that share a bus with a removed one their present addresses, which QEMU
    /// would otherwise choose anew.
    fn pin(&mut self, qmp: &mut Qmp, present: &[PresentDevice]) -> Result<()> {
        let anonymous = anonymous_devices(self.line);
        for device in present.iter().filter(|d| !d.is_hotplugged) {
            let which = match device.number() {
                None => LineDevice::Id(device.id.clone()),
                Some(number) if is_of_driver(&device.kind, anonymous.get(number)) => {
                    LineDevice::Anonymous(number)
                }
                Some(_) => {
                    let reason = "another device was unplugged, this one was made by an option \
                                  other than -device, and its address would change";
                    let fix = "plug the other device in again, or start the VM without it";
                    self.findings.push(finding(device.subject(), reason, fix));
                    continue;
                }
            };
            let keys = device_words::address(qmp, device)?;
            if !keys.is_empty() {
                self.edits.pinned.push((which, keys));
            }
        }
        Ok(())
    }

    /// Compares the media of drives with those of the command line.
    fn media(&mut self, qmp: &mut Qmp, directory: &Path, captured: &CapturedDisks) -> Result<()> {
        // With -snapshot, the files are QEMU's own.
        let is_temporary = self.line.iter().any(|a| {
            a.name() == "snapshot" || a.name() == "drive" && a.value().contains("snapshot=on")
        });
        let blocks = qmp.execute("query-block", None)?;
        let Some(blocks) = blocks.as_array() else {
            return Err(qmp.unexpected("query-block", &blocks));
        };
        for block in blocks {
            let drive = PresentDrive::of(block);
            let is_captured = captured.have(block);
            if drive.is_writable && !is_captured {
                self.findings.push(finding(
                    format!("drive {} ({})", drive.name, drive.file.as_deref().unwrap_or_default()),
                    "the guest can write to it, and this run does not capture it: it came after the \
                     VM's start, or a snapshot or a mirror gave the drive another image",
                    "unplug or eject it, or give it read-only; to capture it, begin a new run with it",
                ));
                continue;
            }
            if is_captured || is_temporary || !drive.is_removable {
                continue;
            }
            let Some(on_line) = medium_of_line(self.line, &drive.device, &drive.qdev) else {
                continue;
            };
            if on_line.as_deref().is_some_and(|file| !is_path(file)) {
                continue;
            }
            let same = match (&on_line, &drive.file) {
                (Some(a), Some(b)) => directory.join(a) == directory.join(b),
                (a, b) => a == b,
            };
            if !same {
                self.medium(&drive, directory);
            }
        }
        Ok(())
    }

    fn medium(&mut self, drive: &PresentDrive, directory: &Path) {
        let medium = match &drive.file {
            Some(file) if !directory.join(file).exists() => {
                self.findings.push(finding(
                    format!("drive {}", drive.name),
                    format!(
                        "its medium was changed to {file}, which is no file that a restore can open"
                    ),
                    "use an image file, or put the former medium back",
                ));
                return;
            }
            Some(file) => Some(ReadOnlyMedium { file: file.clone(), format: drive.format.clone() }),
            None => None,
        };
        let (drive, device) = (drive.device.clone(), drive.qdev.clone());
        self.edits.media.push(MediumEdit { drive, device, medium });
    }

    /// The memory that was plugged in or out.
    fn memory(&mut self, qmp: &mut Qmp) -> Result<()> {
        let backends = crate::ramblock::backend_ids(qmp)?;
        if !self.edits.removed.is_empty() {
            let objects = self.line.iter().filter(|a| a.name() == "object");
            let objects = objects.filter_map(|a| Object::parse(a.value()));
            let gone = objects.filter(|object| {
                object.qom_type.starts_with("memory-backend-") && !backends.contains(&object.id)
            });
            self.edits.removed_objects = gone.map(|object| object.id).collect();
        }
        let edits = LineEdits {
            removed: self.edits.removed.clone(),
            removed_objects: self.edits.removed_objects.clone(),
            ..LineEdits::default()
        };
        let line = edits.apply(self.line).unwrap_or_default();
        self.edits.appended.extend(hotplug::memory_words(qmp, &line)?);
        Ok(())
    }
}

/// The drives of the devices `removed`, if checkpoints do not hold them.
fn unused_drives(line: &[Argument], removed: &[String], captured: &CapturedDisks) -> Vec<String> {
    // A server of Keyframe goes on serving its disks.
    if captured.socket.is_some() {
        return Vec::new();
    }
    let is_unused = |id: &str| {
        let is_captured = captured.nodes.iter().any(|node| node.device_id() == Some(id));
        removed.iter().any(|gone| gone == id) && !is_captured
    };
    let devices = options::devices(line);
    let unused = devices.filter(|keys| value_of(keys, "id").is_some_and(is_unused));
    unused.filter_map(|keys| value_of(&keys, "drive").map(str::to_owned)).collect()
}

/// True if `driver` on a command line makes a device of type `kind`.
fn is_of_driver(kind: &str, driver: Option<&String>) -> bool {
    driver.is_some_and(|driver| kind == driver || kind.strip_suffix("-pci") == Some(driver))
}

/// True if a command line names an image by its path, and not by a protocol.
fn is_path(file: &str) -> bool {
    file.split_once(':').is_none_or(|(protocol, _)| protocol.contains('/'))
}

/// A drive of `query-block`.
struct PresentDrive {
    /// The name of its block backend; empty if it has none.
    device: String,
    /// The id of its device; empty if it has none.
    qdev: String,
    /// One of both.
    name: String,
    file: Option<String>,
    format: String,
    is_writable: bool,
    is_removable: bool,
}

impl PresentDrive {
    fn of(block: &Value) -> Self {
        let text = |value: &Value, key: &str| {
            value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let inserted = block.get("inserted");
        let is = |value: &Value, key: &str| value.get(key).and_then(Value::as_bool) == Some(true);
        Self {
            device: text(block, "device"),
            qdev: text(block, "qdev"),
            name: keyframe_qemu_audit::drive_key(block),
            file: inserted.map(|inserted| text(inserted, "file")),
            format: inserted.map_or_else(String::new, |inserted| text(inserted, "drv")),
            is_writable: inserted.is_some_and(|inserted| !is(inserted, "ro")),
            is_removable: is(block, "removable"),
        }
    }
}

/// The devices that were named on the command line or plugged in later.
fn present_devices(qmp: &mut Qmp) -> Result<Vec<PresentDevice>> {
    let mut present = Vec::new();
    for folder in PLUGGED {
        let answer = qmp.execute("qom-list", Some(json!({ "path": folder })))?;
        let Some(children) = answer.as_array() else {
            return Err(qmp.unexpected("qom-list", &answer));
        };
        for (name, kind) in children.iter().filter_map(name_and_kind) {
            let path = format!("{folder}/{name}");
            let is_hotplugged = get(qmp, &path, "hotplugged")? == json!(true);
            let bus = get(qmp, &path, "parent_bus")?.as_str().unwrap_or_default().to_owned();
            let id = if folder == PLUGGED[0] { name.to_owned() } else { String::new() };
            present.push(PresentDevice {
                path: path.clone(),
                id,
                kind: kind.into(),
                is_hotplugged,
                bus,
            });
        }
    }
    Ok(present)
}

/// The ids of the command line's objects, network backends, character devices, drives and nodes.
fn ids_of(line: &[Argument]) -> BTreeSet<String> {
    let id = |argument: &Argument| {
        let keys = options::properties(argument.value(), "type")?;
        let key = if argument.name() == "blockdev" { "node-name" } else { "id" };
        value_of(&keys, key).map(str::to_owned)
    };
    let kinds = ["object", "netdev", "chardev", "drive", "blockdev"];
    line.iter().filter(|a| kinds.contains(&a.name())).filter_map(id).collect()
}

fn finding(subject: String, reason: impl Into<String>, fix: impl Into<String>) -> AuditFinding {
    AuditFinding { subject, reason: reason.into(), fix: fix.into(), severity: Severity::Refused }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_its_driver_or_its_alias() {
        let of = |kind: &str, driver: &str| is_of_driver(kind, Some(&driver.to_owned()));
        assert!(of("virtio-rng-pci", "virtio-rng-pci") && of("virtio-blk-pci", "virtio-blk"));
        assert!(!of("virtio-blk-pci", "e1000") && !is_of_driver("e1000", None));
    }

    #[test]
    fn a_path_is_no_protocol() {
        assert!(is_path("a.iso") && is_path("/x/a:b.iso") && is_path("./a:b"));
        assert!(!is_path("nbd:localhost:1") && !is_path("http://a/b.iso"));
    }

    #[test]
    fn objects_and_backends_of_a_line_are_known_by_id() {
        let words = ["-netdev", "user,id=n", "-blockdev", "driver=file,node-name=b", "-m", "1"];
        let line = options::parse(&words.map(str::to_owned)).unwrap();
        assert_eq!(ids_of(&line).into_iter().collect::<Vec<_>>(), ["b", "n"]);
    }
}
