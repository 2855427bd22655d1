//! The rules of the audit of a QEMU machine: what of it could not be checkpointed exactly. Pure: the
//! caller asks QEMU, and gives the answers.
//!
//! | what | why |
//! |---|---|
//! | a disk that the guest can write to and Keyframe does not capture | a checkpoint without the disk's contents at that instant is torn |
//! | direct disk I/O (refused unless scans are in pauses) | the kernel writes into pinned guest pages; a scan meanwhile makes it unseen |
//! | vhost-user, vDPA, VFIO, ivshmem | another process or a device writes into guest RAM unseen |
//! | balloon or virtio-mem over shared memory | a hole punched into shared memory is not reported as a write |
//! | riscv64 before QEMU 10.2 | QEMU saves no alarms of its timers, so a restored guest waits for ever |
//! | a device of `unsavable_devices.tsv` | QEMU ends when it saves the device, and with it the VM |
//! | a device of `stateless_devices.tsv` (a warning) | QEMU saves nothing of it, so a restore loses its registers |
//!
//! All of them are reported at once. Devices that QEMU itself calls non-migratable need no entry:
//! QEMU says what blocks a migration.

mod device_table;
mod stateless;
pub mod unsavable;

use keyframe_machine::Processor;
use keyframe_qemu_cmdline::is_served;
use keyframe_qemu_cmdline::options::{
    Argument, devices as devices_of_line, global_property, value_of,
};
use keyframe_vmm::{AuditFinding, Severity};
use serde_json::{Value, json};
use std::path::Path;

/// Types of devices whose RAM accesses, or part of them, come from outside QEMU.
const FOREIGN: &[(&str, &str)] = &[
    ("vhost-user-", "the device runs in another process, which writes into guest RAM unseen"),
    ("vhost-vdpa-", "the device is hardware, which writes into guest RAM unseen"),
    ("vhost-scsi", "the device runs in the kernel and writes into pinned guest pages unseen"),
    ("vfio-", "the device is hardware, which writes into guest RAM unseen"),
    ("ivshmem-", "other processes share this memory and write into it unseen"),
    ("x-pci-proxy-dev", "the device runs in another process, which writes into guest RAM unseen"),
    ("xen-pci-passthrough", "the device is hardware, which writes into guest RAM unseen"),
];

/// Block drivers that map or register guest RAM when they open a device, and not for each request.
const MAPPING: &[&str] = &["nvme", "io_uring", "virtio-blk-"];

/// Types of devices that discard guest RAM.
const DISCARDING: &[&str] = &["virtio-balloon", "virtio-mem"];

/// The server of a machine's writable disks.
#[derive(Clone, Copy, Debug)]
pub enum Disks<'a> {
    /// Keyframe, at this socket, serves the disks of the command line that it can serve. `None` if
    /// there are none.
    Launched(Option<&'a Path>),
    /// The program that started the machine.
    Foreign,
}

impl<'a> Disks<'a> {
    /// Keyframe serves them at `socket`, if it serves any.
    pub fn of_server(socket: Option<&'a Path>) -> Self {
        socket.map_or(Self::Foreign, |socket| Self::Launched(Some(socket)))
    }
}

/// QEMU's answers about a machine.
#[derive(Clone, Copy, Debug)]
pub struct MachineAnswers<'a> {
    /// The blocks of `query-block`.
    pub blocks: &'a [Value],
    /// The nodes of `query-named-block-nodes`.
    pub nodes: &'a [Value],
    /// The answer to `query-memdev`.
    pub memory_backends: &'a Value,
    /// The children that `qom-list` lists of the machine's devices.
    pub devices: &'a [Value],
    /// The text of `info network`.
    pub network: &'a str,
}

/// Returns the findings about the disks, images, devices and networks of a machine.
///
/// The disks behind the nodes `minded` are captured already: they cause no finding.
pub fn findings(
    answers: MachineAnswers<'_>,
    (disks, minded): (Disks<'_>, &[String]),
) -> Vec<AuditFinding> {
    let MachineAnswers { blocks, nodes, memory_backends, devices, network: networks } = answers;
    let mut found = Vec::new();
    for block in blocks {
        drive(block, (disks, minded), &mut found);
    }
    found.extend(nodes.iter().filter_map(mapping));
    found.extend(direct_files(nodes).iter().map(|file| direct_io(file)));
    let shared = memory_backends
        .as_array()
        .is_some_and(|all| all.iter().any(|m| m.get("share") == Some(&json!(true))));
    for child in devices {
        device(child, shared, &mut found);
    }
    network(networks, &mut found);
    found
}

/// Returns findings about options of the command line that no answer of QEMU shows.
pub fn of_line(line: &[Argument]) -> Vec<AuditFinding> {
    let lacks_footers = |argument: &&Argument| {
        global_property(argument).is_some_and(|[driver, property, value]| {
            driver == "migration"
                && property == "send-section-footer"
                && matches!(&*value, "off" | "no" | "false" | "n")
        })
    };
    let found = line.iter().filter(lacks_footers).map(|argument| {
        refused(
            argument.display(),
            "device states would have no section footers, without which Keyframe cannot check them",
            "start the VM without this option",
        )
    });
    found.collect()
}

/// Returns the reasons in an answer to `query-migrate` for which QEMU cannot save the machine's
/// whole state. A dump of another client blocks migrations only, and only while it lasts.
pub fn blocked_reasons(answer: &Value) -> impl Iterator<Item = &str> {
    let reasons = answer.get("blocked-reasons").and_then(Value::as_array).into_iter().flatten();
    reasons.filter_map(Value::as_str).filter(|reason| !reason.contains("dump-guest-memory"))
}

/// Returns the finding about a reason for which QEMU cannot save the machine's whole state.
pub fn blocker(reason: &str) -> AuditFinding {
    let what = reason.strip_prefix("non-migratable device: ");
    let name = what
        .map_or("the machine".into(), |device| format!("device {}", device.trim_end_matches('.')));
    let reason = match what {
        Some(_) => "QEMU cannot save its state (it calls the device non-migratable)".into(),
        None => format!("QEMU cannot save its state: {reason}"),
    };
    if what.is_none() && reason.contains(" format used by node ") {
        let fix =
            "convert the image to raw or qcow2 (qemu-img convert), or start the VM without it";
        return refused(name, reason, fix);
    }
    if what.is_none() && reason.contains("VirtFS") {
        return refused(name, reason, "unmount the shared directory in the guest");
    }
    refused(name, reason, "unplug it, or start the VM without it")
}

/// Returns true if `line` names a device that discards guest RAM. A file of `-readconfig` is not read.
pub fn line_discards(line: &[Argument]) -> bool {
    devices_of_line(line).any(|keys| value_of(&keys, "driver").is_some_and(discards_ram))
}

/// Returns true if a child that `qom-list` lists is a device that discards guest RAM.
pub fn is_discarding(child: &Value) -> bool {
    name_and_kind(child).is_some_and(|(_, kind)| discards_ram(kind))
}

/// Returns true for a type of device that discards guest RAM.
pub fn discards_ram(driver: &str) -> bool {
    DISCARDING.iter().any(|prefix| driver.starts_with(prefix))
}

/// The QOM paths of devices that were named on the command line or plugged in later: with an id,
/// and without.
pub const PLUGGED: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

fn refused(
    subject: impl Into<String>,
    reason: impl Into<String>,
    fix: impl Into<String>,
) -> AuditFinding {
    AuditFinding {
        subject: subject.into(),
        reason: reason.into(),
        fix: fix.into(),
        severity: Severity::Refused,
    }
}

fn warned(
    subject: impl Into<String>,
    reason: impl Into<String>,
    fix: impl Into<String>,
) -> AuditFinding {
    AuditFinding { severity: Severity::Warning, ..refused(subject, reason, fix) }
}

/// Returns a finding if Keyframe is not tested with the machine type `machine_type` of `processor`.
pub fn machine_finding(processor: Processor, machine_type: &str) -> Option<AuditFinding> {
    (!processor.knows_machine(machine_type)).then(|| {
        warned(
            format!("machine type {machine_type}"),
            format!("Keyframe is tested with {} only", processor.machine_names()),
            "choose one of those with -machine",
        )
    })
}

/// Returns findings about what QEMU leaves out of the state of `processor` and its timers. `version`
/// is the answer to `query-version`; it is needed if [`Processor::timers_saved_since`] names a
/// version.
pub fn unsaved(processor: Processor, version: Option<&Value>) -> Vec<AuditFinding> {
    let mut found = Vec::new();
    if let Some((major, minor)) = processor.timers_saved_since() {
        let part = |key: &str| version?.get("qemu")?.get(key)?.as_u64();
        let version = part("major").zip(part("minor"));
        if version.is_none_or(|version| version < (major.into(), minor.into())) {
            found.push(refused(
                format!("processor {processor}"),
                format!(
                    "QEMU before {major}.{minor} does not save the alarms of its timers: a \
                     restored guest would wait for them for ever"
                ),
                format!("use QEMU {major}.{minor} or later"),
            ));
        }
    }
    found.extend(processor.unsaved().map(|part| {
        warned(
            format!("processor {processor}"),
            format!("QEMU does not save {part}: a restored guest finds them cleared"),
            "ignore this if no program of the guest reads them much later",
        )
    }));
    found
}

fn drive(block: &Value, (disks, minded): (Disks<'_>, &[String]), found: &mut Vec<AuditFinding>) {
    let Some(inserted) = block.get("inserted") else { return };
    let text = |value: &Value, key: &str| {
        value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let mut name = text(block, "device");
    if name.is_empty() {
        name = text(inserted, "node-name");
    }
    if name.is_empty() {
        name = text(block, "qdev");
    }
    let file = text(inserted, "file");
    let what = format!("drive {name} ({file})");
    let served = matches!(disks, Disks::Launched(Some(socket)) if is_served(&file, socket))
        || minded.contains(&text(inserted, "node-name"));
    // What is not said to be read-only is not.
    if !served && inserted.get("ro").and_then(Value::as_bool) != Some(true) {
        let (reason, fix) = match disks {
            Disks::Launched(_) => (
                "the guest can write to it, and it was not given in a way in which Keyframe serves disks",
                "give it by -drive file=...,format=... or -blockdev, or add readonly=on (-blockdev: read-only=on)",
            ),
            Disks::Foreign => (
                "the guest can write to it, and the VM's command line does not make it: no restore could",
                "unplug it, or start the VM with it",
            ),
        };
        found.push(refused(&what, reason, fix));
    }
}

/// A finding about a node whose driver gives guest RAM to a device, or to the kernel, for good.
fn mapping(node: &Value) -> Option<AuditFinding> {
    let driver = node.get("drv").and_then(Value::as_str)?;
    let file = node.get("file").and_then(Value::as_str).unwrap_or_default();
    MAPPING.iter().any(|prefix| driver.starts_with(prefix)).then(|| {
        refused(
            format!("image {file} (driver {driver})"),
            "the driver gives guest RAM to a device or to the kernel, which write into it unseen",
            "use the driver file or host_device",
        )
    })
}

/// Returns the images that QEMU reads by direct I/O, of the nodes that `query-named-block-nodes`
/// lists.
pub fn direct_files(nodes: &[Value]) -> Vec<String> {
    let is_direct = |node: &&Value| {
        let direct = node.get("cache").and_then(|cache| cache.get("direct"));
        direct.and_then(Value::as_bool) == Some(true)
    };
    let text = |node: &Value, key: &str| {
        node.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let mut files: Vec<String> =
        nodes.iter().filter(is_direct).map(|node| text(node, "file")).collect();
    files.sort_unstable();
    files.dedup();
    files
}

fn direct_io(file: &str) -> AuditFinding {
    AuditFinding {
        severity: Severity::ScansInPauses,
        ..refused(
            format!("image {file}"),
            "with direct I/O the kernel writes into pinned guest pages, and write protection does not \
             see that while the VM runs",
            "use the page cache: cache=writeback, or cache.direct=off",
        )
    }
}

/// Returns the name of a drive of `query-block`: that of its block backend, of its device, or of its node.
pub fn drive_key(block: &Value) -> String {
    let text = |value: &Value, key: &str| {
        value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let node = block.get("inserted").map_or_else(String::new, |i| text(i, "node-name"));
    let names = [text(block, "device"), text(block, "qdev"), node];
    names.into_iter().find(|name| !name.is_empty()).unwrap_or_default()
}

/// Returns the reason why the device `name` of type `kind` cannot be checkpointed, wherever it comes
/// from; `None` if it can.
pub fn device_finding(name: &str, kind: &str) -> Option<AuditFinding> {
    let mut found = Vec::new();
    let child = json!({ "name": name, "type": format!("child<{kind}>") });
    device(&child, false, &mut found);
    found.retain(|finding| finding.severity == Severity::Refused);
    found.pop()
}

/// Returns the name and the type of a child that `qom-list` lists; `None` if it is no object.
pub fn name_and_kind(child: &Value) -> Option<(&str, &str)> {
    let text = |key: &str| child.get(key).and_then(Value::as_str).unwrap_or_default();
    Some((text("name"), text("type").strip_prefix("child<")?.strip_suffix('>')?))
}

fn device(child: &Value, shared: bool, found: &mut Vec<AuditFinding>) {
    let Some((name, kind)) = name_and_kind(child) else { return };
    let what = format!("device {name} ({kind})");
    if let Some(how) = unsavable::how_qemu_ends(kind) {
        found.push(refused(
            &what,
            format!("QEMU ends when it saves the state of such a device ({how})"),
            "unplug it, or start the VM without it",
        ));
    }
    if kind.starts_with("virtio-pmem") {
        found.push(refused(
            &what,
            "its memory is no part of the state that QEMU saves, so no restore could have it",
            "use -device nvdimm with the same memory backend (and -machine nvdimm=on)",
        ));
    }
    if let Some(lost) = stateless::lost_of(kind) {
        found.push(warned(
            &what,
            format!(
                "QEMU saves nothing of such a device: a restored guest finds it as after a reset \
                 (lost: {lost})"
            ),
            "leave it out if the guest uses it",
        ));
    }
    if let Some((_, reason)) = FOREIGN.iter().find(|(prefix, _)| kind.starts_with(prefix)) {
        found.push(refused(
            &what,
            *reason,
            "use a device that QEMU emulates itself (virtio-blk, virtio-net, ...)",
        ));
    }
    if shared && DISCARDING.iter().any(|prefix| kind.starts_with(prefix)) {
        found.push(refused(
            what,
            "it discards pages of guest RAM, and where RAM is shared memory the kernel does not report that",
            "leave the device out, or give the guest private RAM (no share=on, no memfd backend)",
        ));
    }
}

fn network(text: &str, found: &mut Vec<AuditFinding>) {
    for line in text.lines() {
        for kind in ["vhost-user", "vhost-vdpa"] {
            if line.contains(&format!("type={kind}")) {
                let name =
                    line.split(':').next().unwrap_or_default().trim().trim_start_matches("\\ ");
                found.push(refused(
                    format!("network backend {name} ({kind})"),
                    "another process or a device writes the packets into guest RAM unseen",
                    "use -netdev user, tap, stream or socket",
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(line: &[String]) -> Vec<Argument> {
        keyframe_qemu_cmdline::options::parse(&line[1..]).unwrap_or_default()
    }

    fn of(run: impl FnOnce(&mut Vec<AuditFinding>)) -> Vec<AuditFinding> {
        let mut found = Vec::new();
        run(&mut found);
        found
    }

    #[test]
    fn a_line_tells_whether_its_devices_discard_ram() {
        let line = |words: &str| {
            let words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
            line_discards(&arguments(&words))
        };
        assert!(line("qemu -device virtio-balloon-pci,id=b"));
        assert!(line(r#"qemu -m 1G -device {"driver":"virtio-mem-pci","id":"m"}"#));
        assert!(!line("qemu -m 1G -device virtio-rng-pci,id=virtio-balloon-pci"));
    }

    #[test]
    fn images_with_direct_io_are_found_and_drivers_that_map_ram_are_refused() {
        let node = |driver: &str, file: &str, direct: bool| json!({ "drv": driver, "file": file, "cache": { "direct": direct } });
        let nodes = [
            node("qcow2", "a", true),
            node("file", "a", true),
            node("raw", "b", false),
            node("file", "c", true),
        ];
        assert_eq!(direct_files(&nodes), ["a", "c"]);
        assert!(nodes.iter().all(|node| mapping(node).is_none()));
        for driver in ["nvme", "nvme-io_uring", "io_uring", "virtio-blk-vfio-pci"] {
            let found = mapping(&node(driver, "a", true)).unwrap();
            assert_eq!(found.severity, Severity::Refused);
        }
        assert_eq!(direct_io("a").severity, Severity::ScansInPauses);
    }

    #[test]
    fn a_drive_that_no_checkpoint_holds_is_told() {
        let block = json!({"device": "ide0-hd0", "inserted": {"ro": false, "file": "a.img"}});
        let found = of(|f| drive(&block, (Disks::Launched(None), &[]), f));
        assert_eq!(found.len(), 1);
        assert!(found.iter().all(|r| r.subject.contains("ide0-hd0")
            && r.subject.contains("a.img")
            && !r.fix.is_empty()));
        let found = of(|f| drive(&block, (Disks::Foreign, &[]), f));
        assert!(found[0].fix.contains("unplug"));
        let minded = [String::from("n")];
        let captured =
            json!({"device": "d", "inserted": {"ro": false, "file": "a.img", "node-name": "n"}});
        assert_eq!(of(|f| drive(&captured, (Disks::Foreign, &minded), f)), []);
        let ours = json!({"device": "d", "inserted": {"ro": false, "file": "nbd+unix:///d?socket=/r/d.sock"}});
        assert_eq!(
            of(|f| drive(&ours, (Disks::Launched(Some(Path::new("/r/d.sock"))), &[]), f)),
            []
        );
        assert_eq!(
            of(|f| drive(&ours, (Disks::Launched(Some(Path::new("/r/e.sock"))), &[]), f)).len(),
            1
        );
        assert_eq!(of(|f| drive(&ours, (Disks::Foreign, &[]), f)).len(), 1);
        let fine = json!({"device": "d", "inserted": {"ro": true, "file": "a.img", "cache": {"direct": false}}});
        assert_eq!(of(|f| drive(&fine, (Disks::Foreign, &[]), f)), []);
        assert_eq!(
            of(|f| drive(&json!({"device": "floppy0"}), (Disks::Foreign, &[]), f)),
            [],
            "an empty drive"
        );
    }

    #[test]
    fn foreign_devices_are_refused_and_discarding_ones_over_shared_memory() {
        let child = |kind: &str| json!({"name": "d0", "type": format!("child<{kind}>")});
        for kind in ["vhost-user-fs-pci", "vfio-pci", "ivshmem-plain", "vhost-vdpa-device-pci"] {
            assert_eq!(of(|f| device(&child(kind), false, f)).len(), 1, "{kind}");
        }
        assert_eq!(of(|f| device(&child("virtio-balloon-pci"), false, f)), []);
        assert_eq!(of(|f| device(&child("virtio-balloon-pci"), true, f)).len(), 1);
        assert_eq!(of(|f| device(&child("virtio-net-pci"), true, f)), []);
        let found = of(|f| device(&child("virtio-pmem-pci"), false, f));
        assert!(found[0].severity == Severity::Refused && found[0].fix.contains("nvdimm"));
        assert_eq!(of(|f| device(&json!({"name": "type", "type": "string"}), true, f)), []);
    }

    #[test]
    fn a_device_that_ends_qemu_at_a_save_is_refused() {
        let child = |kind: &str| json!({"name": "ser0", "type": format!("child<{kind}>")});
        let found = of(|f| device(&child("pci-serial-2x"), false, f));
        assert!(found[0].subject.contains("ser0") && found[0].severity == Severity::Refused);
        assert_eq!(of(|f| device(&child("pci-serial-4x"), false, f)), []);
    }

    #[test]
    fn a_foreign_network_backend_is_refused() {
        let text = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci\r\n \\ n0: index=0,type=vhost-user,vhost-user\r\n";
        assert!(of(|f| network(text, f))[0].subject.contains("n0"));
        assert_eq!(of(|f| network("n0: index=0,type=user,net=10.0.2.0", f)), []);
    }

    #[test]
    fn a_line_without_section_footers_is_refused() {
        let line = |word: &str| {
            let words = ["q", "-m", "1G", "-global", word].map(str::to_owned);
            of_line(&arguments(&words)).len()
        };
        assert_eq!(line("migration.send-section-footer=off"), 1);
        assert_eq!(line("driver=migration,property=send-section-footer,value=no"), 1);
        assert_eq!(line("migration.send-section-footer=on"), 0);
        assert_eq!(line("migration.store-global-state=off"), 0);
    }

    #[test]
    fn what_blocks_a_migration_is_refused_in_qemus_words() {
        let found = blocker("non-migratable device: 0000:00:02.0/nvme");
        assert!(found.subject.contains("0000:00:02.0/nvme") && found.severity == Severity::Refused);
        assert!(blocker("State blocked by invtsc").reason.contains("invtsc"));
        let shared = "Migration is disabled when VirtFS export path '/s' is mounted in the guest";
        assert!(blocker(shared).fix.contains("unmount"));
    }

    #[test]
    fn an_unknown_machine_is_a_warning() {
        assert_eq!(machine_finding(Processor::X86_64, "pc-q35-7.2"), None);
        let found = machine_finding(Processor::X86_64, "isapc").unwrap();
        assert_eq!(found.severity, Severity::Warning);
    }
}
