//! Edits a VM's command line, so that it makes the machine as its user has changed it since its
//! start.
//!
//! ```text
//!   device_del r0          -device virtio-rng-pci,id=r0        removed
//!                          -device virtio-net-pci,id=net0      gets addr=04.0: with r0 gone, QEMU would choose another
//!   change ide1-cd0 b.iso  -cdrom a.iso                        -drive index=2,media=cdrom,file=b.iso,format=raw,readonly=on
//!   device_add u1          (appended)                          -device usb-tablet,id=u1,bus=usb.0,port=1
//! ```
//!
//! Left out: devices and media that a file of `-readconfig` defines.

use crate::drives::{child_names, flattened_keys};
use crate::options::{self, Argument, escape, joined, properties, value_of};
use serde_json::Value;

/// A device of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineDevice {
    /// The one with this id.
    Id(String),
    /// The `-device` without an id that has this number among those, from 0.
    Anonymous(usize),
}

/// A medium that the guest can only read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadOnlyMedium {
    /// Its file.
    pub file: String,
    /// Its format, by the name of QEMU's driver.
    pub format: String,
}

/// A drive whose medium was changed, with its present medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumEdit {
    /// The drive's name in QEMU; empty if it has none.
    pub drive: String,
    /// The id of the drive's device; empty if it has none.
    pub device: String,
    /// The medium; `None` for an empty drive.
    pub medium: Option<ReadOnlyMedium>,
}

/// The edits that make a command line describe the changed machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LineEdits {
    /// Ids of devices that leave the command line.
    pub removed: Vec<String>,
    /// Ids of objects that leave the command line.
    pub removed_objects: Vec<String>,
    /// The drives of devices that leave the command line. One that no other device uses opens no image.
    pub unused_drives: Vec<String>,
    /// Keys that devices of the command line get: their present addresses.
    pub pinned: Vec<(LineDevice, Vec<(String, Value)>)>,
    /// Media that were changed.
    pub media: Vec<MediumEdit>,
    /// Words at the end.
    pub appended: Vec<String>,
}

/// Where a command line defines the medium of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MediumPlace {
    /// In the argument at this index: `-drive` or a short form of it.
    Drive(usize),
    /// In the node that `-device` at this index names.
    Node(usize),
    /// Nowhere: QEMU makes an empty drive by default, with these keys.
    Default(&'static str),
}

/// Returns the file that `line` puts into a drive. `Some(None)` stands for an empty drive, and
/// `None` for a drive that the command line does not define in a known way.
pub fn medium_of_line(line: &[Argument], drive: &str, device: &str) -> Option<Option<String>> {
    match place_of(line, drive, device)? {
        MediumPlace::Drive(at) => Some(file_of(line.get(at)?)),
        MediumPlace::Node(at) => {
            let keys = properties(line.get(at)?.value(), "driver")?;
            let Some(node) = value_of(&keys, "drive") else { return Some(None) };
            node_file(line, node).map(Some)
        }
        MediumPlace::Default(_) => Some(None),
    }
}

/// Returns the drivers of the `-device` arguments without an id, in the order of the command line.
pub fn anonymous_devices(line: &[Argument]) -> Vec<String> {
    let anonymous = options::devices(line).filter(|keys| value_of(keys, "id").is_none());
    anonymous.map(|keys| value_of(&keys, "driver").unwrap_or_default().to_owned()).collect()
}

impl LineEdits {
    /// Returns the edited command line. Returns `None` if the line does not define a drive whose
    /// medium was changed.
    pub fn apply(&self, line: &[Argument]) -> Option<Vec<Argument>> {
        let mut edited = line.to_vec();
        for (device, keys) in &self.pinned {
            if let Some(argument) = find_device(line, device).and_then(|at| edited.get_mut(at)) {
                pin(argument, keys);
            }
        }
        let mut added = Vec::new();
        for medium in &self.media {
            medium.apply(line, &mut edited, &mut added)?;
        }
        let is_gone = |argument: &Argument| match argument.name() {
            "device" => {
                let keys = properties(argument.value(), "driver").unwrap_or_default();
                value_of(&keys, "id").is_some_and(|id| self.removed.iter().any(|gone| gone == id))
            }
            "object" => options::Object::parse(argument.value())
                .is_some_and(|object| self.removed_objects.contains(&object.id)),
            _ => false,
        };
        edited.retain(|argument| !is_gone(argument));
        edited.extend(added);
        edited.extend(options::parse(&self.appended).ok()?);
        for drive in &self.unused_drives {
            close_unused(&mut edited, drive);
        }
        Some(edited)
    }
}

impl MediumEdit {
    /// Edits the argument that defines the medium. Arguments for the command line's end go to
    /// `added`.
    fn apply(
        &self,
        line: &[Argument],
        edited: &mut [Argument],
        added: &mut Vec<Argument>,
    ) -> Option<()> {
        match place_of(line, &self.drive, &self.device)? {
            MediumPlace::Drive(at) => {
                let argument = edited.get_mut(at)?;
                *argument = self.drive_with(guest_keys(argument)?);
            }
            MediumPlace::Node(at) => {
                let argument = edited.get_mut(at)?;
                let keys = properties(argument.value(), "driver")?;
                let old = value_of(&keys, "drive").map(str::to_owned);
                let node = self.medium.as_ref().map(|_| format!("medium-of-{}", self.device));
                *argument = with_drive(argument, node.as_deref());
                if let Some(old) = old.filter(|old| !is_drive_of_a_device(edited, old)) {
                    let is_old = |a: &&mut Argument| a.name() == "blockdev" && is_node(a, &old);
                    if let Some(unused) = edited.iter_mut().find(is_old) {
                        // Its image may be gone.
                        *unused = null_node(&old);
                    }
                }
                if let (Some(medium), Some(node)) = (&self.medium, node) {
                    let value = format!(
                        "driver={},node-name={},read-only=on,file.driver=file,file.filename={}",
                        escape(&medium.format),
                        escape(&node),
                        escape(&medium.file)
                    );
                    added.push(Argument::Option("blockdev".into(), value));
                }
            }
            MediumPlace::Default(keys) => added.push(self.drive_with(options::keys(keys, ""))),
        }
        Some(())
    }

    fn drive_with(&self, mut keys: Vec<(String, String)>) -> Argument {
        if let Some(medium) = &self.medium {
            keys.push(("file".into(), medium.file.clone()));
            keys.push(("format".into(), medium.format.clone()));
            keys.push(("readonly".into(), "on".into()));
        }
        Argument::Option("drive".into(), joined(&keys))
    }
}

fn is_drive_of_a_device(line: &[Argument], node: &str) -> bool {
    options::devices(line).any(|keys| value_of(&keys, "drive") == Some(node))
}

/// Takes the image of the drive or node `name` from the line, and the nodes beneath that nothing else
/// uses. The line keeps a node of that name.
fn close_unused(line: &mut Vec<Argument>, name: &str) {
    let is_used = |line: &[Argument], name: &str| {
        let uses = |argument: &Argument| {
            let keys = flattened_keys(argument.value()).unwrap_or_default();
            let is_own = |key: &str| key == "id" || key == "node-name";
            keys.iter().any(|(key, value)| !is_own(key) && value == name)
        };
        line.iter().any(uses)
    };
    if is_used(line, name) {
        return;
    }
    line.retain(|argument| {
        let keys = properties(argument.value(), "file").unwrap_or_default();
        argument.name() != "drive" || value_of(&keys, "id") != Some(name)
    });
    let mut open = vec![name.to_owned()];
    while let Some(node) = open.pop() {
        let is_this = |a: &Argument| a.name() == "blockdev" && is_node(a, &node);
        let Some(at) = line.iter().position(is_this) else { continue };
        let keys = line.get(at).and_then(|a| flattened_keys(a.value())).unwrap_or_default();
        if node == name {
            line.splice(at..=at, [null_node(name)]);
        } else {
            line.remove(at);
        }
        let beneath = child_names(&keys).map(str::to_owned);
        open.extend(beneath.filter(|child| !is_used(line, child)));
    }
}

/// A node without contents, which takes the place of one whose image may be gone.
fn null_node(name: &str) -> Argument {
    let value =
        format!("driver=null-co,size=512,read-zeroes=on,read-only=on,node-name={}", escape(name));
    Argument::Option("blockdev".into(), value)
}

/// The keys of a drive that say what the guest sees, and not what is in it.
fn guest_keys(argument: &Argument) -> Option<Vec<(String, String)>> {
    let short = |keys: &str| Some(options::keys(keys, ""));
    match argument.name() {
        "cdrom" => short("index=2,media=cdrom"),
        "fda" => short("if=floppy,index=0"),
        "fdb" => short("if=floppy,index=1"),
        "drive" => {
            const CONTENT: &[&str] = &[
                "file",
                "format",
                "driver",
                "readonly",
                "read-only",
                "snapshot",
                "cache",
                "aio",
                "node-name",
            ];
            let is_content = |key: &str| {
                CONTENT.contains(&key)
                    || ["file.", "cache.", "backing"].iter().any(|prefix| key.starts_with(prefix))
            };
            let keys = options::keys(argument.value(), "file");
            Some(keys.into_iter().filter(|(key, _)| !is_content(key)).collect())
        }
        _ => None,
    }
}

/// The file that a `-drive`, or a short form of it, names; `None` for an empty drive.
pub(crate) fn file_of(argument: &Argument) -> Option<String> {
    let file = match argument.name() {
        "drive" => {
            let keys = options::keys(argument.value(), "file");
            let file = value_of(&keys, "file").or_else(|| value_of(&keys, "file.filename"));
            file.unwrap_or_default().to_owned()
        }
        _ => argument.value().to_owned(),
    };
    (!file.is_empty()).then_some(file)
}

/// The file below the node `name`, at most 16 nodes deep.
fn node_file(line: &[Argument], name: &str) -> Option<String> {
    let mut name = name.to_owned();
    for _ in 0..16 {
        let node = line.iter().find(|a| a.name() == "blockdev" && is_node(a, &name))?;
        let keys = properties(node.value(), "driver")?;
        for key in ["filename", "file.filename"] {
            if let Some(file) = value_of(&keys, key) {
                return Some(file.to_owned());
            }
        }
        value_of(&keys, "file")?.clone_into(&mut name);
        if let Ok(Value::Object(file)) = serde_json::from_str(&name) {
            return Some(file.get("filename")?.as_str()?.to_owned());
        }
    }
    None
}

fn is_node(argument: &Argument, name: &str) -> bool {
    let keys = properties(argument.value(), "driver").unwrap_or_default();
    value_of(&keys, "node-name") == Some(name)
}

fn place_of(line: &[Argument], drive: &str, device: &str) -> Option<MediumPlace> {
    if drive.is_empty() {
        let at = find_device(line, &LineDevice::Id(device.to_owned()))?;
        return Some(MediumPlace::Node(at));
    }
    let named = |a: &Argument| {
        let keys = options::keys(a.value(), "file");
        a.name() == "drive" && value_of(&keys, "id") == Some(drive)
    };
    if let Some(at) = line.iter().position(named) {
        return Some(MediumPlace::Drive(at));
    }
    let is_floppy = drive.starts_with("floppy");
    if !(is_floppy || drive.contains("-cd")) {
        return None;
    }
    let unnamed: Vec<usize> = (0..line.len())
        .filter(|at| line.get(*at).is_some_and(|a| is_unnamed(a, is_floppy, drive)))
        .collect();
    match unnamed[..] {
        [at] => Some(MediumPlace::Drive(at)),
        [] if drive == "floppy0" => Some(MediumPlace::Default("if=floppy,index=0")),
        [] if !is_floppy => Some(MediumPlace::Default("index=2,media=cdrom")),
        _ => None,
    }
}

/// True for an argument that defines a floppy drive or CD drive without an id.
fn is_unnamed(argument: &Argument, is_floppy: bool, drive: &str) -> bool {
    match argument.name() {
        "cdrom" => !is_floppy,
        "fda" => drive == "floppy0",
        "fdb" => drive == "floppy1",
        "drive" => {
            let keys = options::keys(argument.value(), "file");
            let is = |key: &str, value: &str| value_of(&keys, key) == Some(value);
            let is_of_kind = if is_floppy {
                let unit = drive.strip_prefix("floppy").unwrap_or_default();
                let number = value_of(&keys, "index").or_else(|| value_of(&keys, "unit"));
                is("if", "floppy") && number.is_none_or(|number| number == unit)
            } else {
                is("media", "cdrom") && value_of(&keys, "if") != Some("none")
            };
            value_of(&keys, "id").is_none() && is_of_kind
        }
        _ => false,
    }
}

fn find_device(line: &[Argument], device: &LineDevice) -> Option<usize> {
    let mut anonymous = 0;
    for (at, argument) in line.iter().enumerate().filter(|(_, a)| a.name() == "device") {
        let Some(keys) = properties(argument.value(), "driver") else { continue };
        match (value_of(&keys, "id"), device) {
            (Some(id), LineDevice::Id(wanted)) if id == wanted => return Some(at),
            (None, LineDevice::Anonymous(wanted)) if anonymous == *wanted => return Some(at),
            (None, _) => anonymous += 1,
            _ => {}
        }
    }
    None
}

/// Gives a `-device` these keys.
fn pin(argument: &mut Argument, pinned: &[(String, Value)]) {
    let Argument::Option(_, value) = argument else { return };
    if let Ok(Value::Object(mut object)) = serde_json::from_str(value) {
        object.extend(pinned.iter().cloned());
        *value = Value::Object(object).to_string();
        return;
    }
    for (key, pin) in pinned {
        let text = pin.as_str().map_or_else(|| pin.to_string(), str::to_owned);
        value.extend([",", key, "=", &escape(&text)]);
    }
}

/// The `-device` with node `node` as its medium, or with an empty drive.
fn with_drive(argument: &Argument, node: Option<&str>) -> Argument {
    let value = if let Ok(Value::Object(mut object)) = serde_json::from_str(argument.value()) {
        match node {
            Some(node) => object.insert("drive".into(), node.into()),
            None => object.remove("drive"),
        };
        Value::Object(object).to_string()
    } else {
        let mut keys = options::keys(argument.value(), "driver");
        keys.retain(|(key, _)| key != "drive");
        if let Some(node) = node {
            keys.push(("drive".into(), node.into()));
        }
        joined(&keys)
    };
    Argument::Option("device".into(), value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(text: &str) -> Vec<Argument> {
        options::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    fn edited(edits: &LineEdits, text: &str) -> Option<String> {
        let words: Vec<_> = edits.apply(&line(text))?.iter().flat_map(Argument::words).collect();
        Some(words.join(" "))
    }

    fn medium(drive: &str, device: &str, file: Option<&str>) -> LineEdits {
        let medium = file.map(|file| ReadOnlyMedium { file: file.into(), format: "raw".into() });
        let edit = MediumEdit { drive: drive.into(), device: device.into(), medium };
        LineEdits { media: vec![edit], ..LineEdits::default() }
    }

    #[test]
    fn an_unplugged_device_leaves_and_the_others_keep_their_addresses() {
        let edits = LineEdits {
            removed: vec!["r0".into()],
            pinned: vec![
                (LineDevice::Id("n0".into()), vec![("addr".into(), json!("4.0"))]),
                (LineDevice::Id("p".into()), vec![("nr".into(), json!(1))]),
                (LineDevice::Anonymous(1), vec![("addr".into(), json!("6.0"))]),
            ],
            appended: vec!["-device".into(), "usb-tablet,id=u".into()],
            ..LineEdits::default()
        };
        assert_eq!(
            edited(
                &edits,
                r#"-device virtio-rng-pci,id=r0 -device {"driver":"e1000","id":"n0"} -device a
                   -device virtserialport,id=p -device b -object x,id=r0"#
            )
            .unwrap(),
            r#"-device {"addr":"4.0","driver":"e1000","id":"n0"} -device a -device virtserialport,id=p,nr=1 -device b,addr=6.0 -object x,id=r0 -device usb-tablet,id=u"#
        );
    }

    #[test]
    fn the_drive_of_an_unplugged_device_opens_no_image() {
        let edits = |drive: &str, appended: &[&str]| LineEdits {
            removed: vec!["b0".into()],
            unused_drives: vec![drive.into()],
            appended: appended.iter().map(|&word| word.to_owned()).collect(),
            ..LineEdits::default()
        };
        let text = "-drive file=a.img,if=none,id=d -device virtio-blk,drive=d,id=b0 -m 1";
        assert_eq!(edited(&edits("d", &[]), text).unwrap(), "-m 1");
        let text = r#"-blockdev file,node-name=f,filename=a -blockdev file,node-name=g,filename=b
            -blockdev {"driver":"qcow2","node-name":"q","file":"f","backing":"g"} -m 1
            -blockdev throttle,node-name=t,file=q -device virtio-blk,drive=t,id=b0
            -blockdev raw,node-name=r,file=g -device virtio-blk,drive=r"#;
        assert_eq!(
            edited(&edits("t", &[]), text).unwrap(),
            "-blockdev file,node-name=g,filename=b -m 1 \
             -blockdev driver=null-co,size=512,read-zeroes=on,read-only=on,node-name=t \
             -blockdev raw,node-name=r,file=g -device virtio-blk,drive=r"
        );
        let again = edited(&edits("t", &["-device", "virtio-blk-pci,drive=t,id=b0"]), text);
        assert!(again.unwrap().contains("-blockdev throttle,node-name=t,file=q"));
    }

    #[test]
    fn a_changed_medium_is_the_lines_and_an_ejected_one_leaves_an_empty_drive() {
        let text = "-cdrom a.iso -m 1";
        assert_eq!(
            edited(&medium("ide1-cd0", "", Some("b,c.iso")), text).unwrap(),
            "-drive index=2,media=cdrom,file=b,,c.iso,format=raw,readonly=on -m 1"
        );
        assert_eq!(
            edited(&medium("ide1-cd0", "", None), text).unwrap(),
            "-drive index=2,media=cdrom -m 1"
        );
        let text = "-drive file=a.iso,format=raw,if=none,id=c,media=cdrom,readonly=on";
        assert_eq!(
            edited(&medium("c", "", None), text).unwrap(),
            "-drive if=none,id=c,media=cdrom"
        );
        assert_eq!(
            edited(&medium("floppy0", "", Some("f")), "-fda a -drive if=floppy,index=1,file=b")
                .unwrap(),
            "-drive if=floppy,index=0,file=f,format=raw,readonly=on -drive if=floppy,index=1,file=b"
        );
        // QEMU's default drive.
        assert_eq!(
            edited(&medium("ide1-cd0", "", Some("b")), "-m 1").unwrap(),
            "-m 1 -drive index=2,media=cdrom,file=b,format=raw,readonly=on"
        );
        assert_eq!(edited(&medium("virtio0", "", None), "-m 1"), None);
        let two = "-drive file=a,media=cdrom -drive file=b,media=cdrom";
        assert_eq!(edited(&medium("ide1-cd0", "", None), two), None, "either could be meant");
    }

    #[test]
    fn a_medium_by_node_gets_a_node_of_its_own() {
        let text = r#"-blockdev {"driver":"file","filename":"/a","node-name":"f"} -blockdev driver=raw,node-name=n,file=f
            -device {"driver":"ide-cd","id":"cd","drive":"n"}"#;
        assert_eq!(medium_of_line(&line(text), "", "cd"), Some(Some("/a".into())));
        let made = edited(&medium("", "cd", Some("/b")), text).unwrap();
        assert!(made.contains(r#"{"drive":"medium-of-cd","driver":"ide-cd","id":"cd"}"#), "{made}");
        assert!(
            made.contains("node-name=medium-of-cd,read-only=on,file.driver=file,file.filename=/b")
        );
        let made = edited(&medium("", "cd", None), text).unwrap();
        assert!(made.ends_with(r#"-device {"driver":"ide-cd","id":"cd"}"#), "{made}");
        assert_eq!(edited(&medium("", "other", None), text), None);
    }

    #[test]
    fn the_file_of_a_drive_is_found() {
        let of = |text: &str, drive: &str| medium_of_line(&line(text), drive, "");
        assert_eq!(of("-cdrom a", "ide1-cd0"), Some(Some("a".into())));
        assert_eq!(of("-drive media=cdrom,id=c,if=none", "c"), Some(None));
        assert_eq!(of("-m 1", "ide1-cd0"), Some(None));
        assert_eq!(of("-m 1", "virtio0"), None);
        assert_eq!(anonymous_devices(&line("-device a -device b,id=x -device c")), ["a", "c"]);
    }
}
