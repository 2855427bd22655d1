//! Rewrites the memory backends of a kept line so that QEMU gets RAM that already holds the
//! checkpoint's pages.
//!
//! ```text
//!   kept:   qemu -m 1G -object memory-backend-ram,id=a,size=512M,prealloc=on ...
//!   run:    qemu -m 1G -object memory-backend-file,id=a,size=536870912,share=on,
//!                              mem-path=/proc/self/fd/N ...
//! ```
//!
//! Invariant: exactly one backend gives each block of the layout that has a memory backend.

use crate::options::{self, Argument, Object, escape};
use crate::{CommandLineError, Result, word_text};
use keyframe_units::{BlockKind, RamBlock, RamLayout};
use std::ffi::OsString;

/// Options that would change the checkpoint's machine.
const MACHINE_OPTIONS: &[&str] = &[
    "M",
    "machine",
    "m",
    "smp",
    "cpu",
    "accel",
    "enable-kvm",
    "device",
    "object",
    "numa",
    "global",
    "bios",
    "pflash",
    "kernel",
    "initrd",
    "append",
    "dtb",
    "fw_cfg",
    "smbios",
    "acpitable",
    "drive",
    "blockdev",
    "hda",
    "hdb",
    "hdc",
    "hdd",
    "cdrom",
    "fda",
    "fdb",
    "mtdblock",
    "sd",
    "snapshot",
    "vga",
    "usb",
    "usbdevice",
    "soundhw",
    "audio",
    "nic",
    "net",
    "no-acpi",
    "no-hpet",
    "nodefaults",
    "mem-path",
    "mem-prealloc",
    "icount",
    "rtc",
    "readconfig",
    "incoming",
    "S",
    "daemonize",
    "loadvm",
    "preconfig",
    "watchdog",
    "tpmdev",
    "fsdev",
    "virtfs",
];

/// Properties of a memory backend whose replacement needs no note.
const REPLACED: &[&str] = &["size", "share", "mem-path", "x-use-canonical-path-for-ramblock-id"];

/// A word of a restored command line, before the files of its memory backends are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineWord {
    /// The word itself.
    Plain(String),
    /// `-object` and the backend of the RAM block with this number: see [`backend_object`].
    Backend(usize),
}

/// The command line of a restored VM, before the files of its RAM are known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestoreLine {
    /// The words, without the binary.
    pub words: Vec<LineWord>,
    /// The differences from the kept command line that the user should know, a text each.
    pub notes: Vec<String>,
}

/// Returns the id of the memory backend that RAM block `name` belongs to, if one of `backends`
/// does. QEMU names such a block after the backend, by the backend's path, or by the path of the
/// device that uses it and the backend (virtio-mem: `0000:00:04.0/vm0`).
pub fn backend_id<'a>(name: &'a str, backends: &[String]) -> Option<&'a str> {
    let is_known = |id: &&str| backends.iter().any(|known| known == id);
    let last = name.rsplit_once('/').map(|(_, id)| id);
    Some(name).filter(is_known).or_else(|| last.filter(is_known))
}

/// Parses the words that a user adds to a restored command line.
///
/// Error: [`CommandLineError::Argument`] for a word that would change the machine.
pub fn check_added(added: Vec<OsString>) -> Result<Vec<Argument>> {
    let words = added.into_iter().map(word_text).collect::<Result<Vec<_>>>()?;
    let arguments = options::parse(&words)?;
    for argument in &arguments {
        if matches!(argument, Argument::Image(_)) || MACHINE_OPTIONS.contains(&argument.name()) {
            return Err(CommandLineError::Argument {
                argument: argument.display(),
                reason: "this would change the machine, which must be the checkpoint's".into(),
                fix: "remove it; consoles, monitors, displays and network backends may be added"
                    .into(),
            });
        }
    }
    Ok(arguments)
}

/// Returns the command line `kept` with its memory backends replaced by ones whose memory the
/// caller gives.
///
/// Error: [`CommandLineError::RamLayout`] if the command line does not fit the RAM blocks `ram`.
pub fn plan_backends(kept: &[Argument], ram: &RamLayout) -> Result<RestoreLine> {
    let RestoreLine { mut words, mut notes } = RestoreLine::default();
    let mut given = vec![false; ram.blocks().len()];
    for argument in kept {
        match backend(argument, ram)? {
            Some((number, object)) => {
                if let Some(given) = given.get_mut(number) {
                    *given = true;
                }
                note_dropped(&object, &mut notes);
                words.push(LineWord::Backend(number));
            }
            None => words.extend(argument.words().into_iter().map(LineWord::Plain)),
        }
    }
    let mut left = ram.blocks().iter().enumerate().filter(|(number, block)| {
        block.kind == BlockKind::Backend && given.get(*number) == Some(&false)
    });
    if let Some((number, block)) = left.next() {
        // RAM from `-m` alone: QEMU names the block after the machine's default backend.
        let by_path = block.name.starts_with("/objects/");
        if by_path || left.next().is_some() {
            return Err(CommandLineError::RamLayout {
                problem: format!(
                    "RAM block {} has no -object in the kept command line",
                    block.name
                ),
            });
        }
        words.push(LineWord::Backend(number));
        words.extend(
            ["-machine".into(), format!("memory-backend={}", escape(&block.name))]
                .map(LineWord::Plain),
        );
    }
    Ok(RestoreLine { words, notes })
}

/// Returns the numbers of the RAM blocks that have memory backends, in the order in which a QEMU
/// that was restored from the command line `words` (the binary first) makes them.
///
/// Error: [`CommandLineError::RamLayout`] if the line does not fit the RAM blocks.
pub fn backends_as_made(words: &[String], ram: &RamLayout) -> Result<Vec<usize>> {
    let kept = options::parse(words.get(1..).unwrap_or_default())?;
    let line = plan_backends(&kept, ram)?;
    let number = |word| if let LineWord::Backend(number) = word { Some(number) } else { None };
    Ok(line.words.into_iter().filter_map(number).collect())
}

/// If `argument` defines a memory backend: the number of its block in `ram`, and the object.
fn backend(argument: &Argument, ram: &RamLayout) -> Result<Option<(usize, Object)>> {
    if argument.name() != "object" {
        return Ok(None);
    }
    let Some(object) = Object::parse(argument.value()) else { return Ok(None) };
    if !object.qom_type.starts_with("memory-backend-") {
        return Ok(None);
    }
    let ids = [object.id.clone()];
    let is_its = |block: &RamBlock| {
        block.kind == BlockKind::Backend && backend_id(&block.name, &ids).is_some()
    };
    match ram.blocks().iter().position(is_its) {
        Some(number) => Ok(Some((number, object))),
        None => Err(CommandLineError::RamLayout {
            problem: format!(
                "memory backend {} of the kept command line has no RAM block in it",
                object.id
            ),
        }),
    }
}

fn note_dropped(object: &Object, notes: &mut Vec<String>) {
    let dropped: Vec<&str> = object
        .properties
        .iter()
        .map(|(k, _)| k.as_str())
        .filter(|k| !REPLACED.contains(k))
        .collect();
    if !dropped.is_empty() {
        notes.push(format!(
            "memory backend {}: {} not applied to the restored RAM",
            object.id,
            dropped.join(", ")
        ));
    }
}

/// Returns the value of `-object` for a backend whose memory is the file at `path`. With
/// `is_shared`, the guest's writes reach the file.
pub fn backend_object(block: &RamBlock, path: &str, is_shared: bool) -> String {
    let share = if is_shared { "on" } else { "off" };
    let memory = format!(",mem-path={},share={share}", escape(path));
    object_of_block("memory-backend-file", block, &memory)
}

/// Returns the value of `-object` for a backend with private memory of QEMU's own. The kernel
/// charges it page by page, as it does a memfd: a virtio-mem device may have more than the host.
pub fn private_backend_object(block: &RamBlock) -> String {
    object_of_block("memory-backend-ram", block, ",share=off,reserve=off")
}

fn object_of_block(kind: &str, block: &RamBlock, memory: &str) -> String {
    // A block that is named by the id, and not by the backend's path, must be named so again.
    let is_path = block.name.contains("/objects/");
    let naming = if is_path { "" } else { ",x-use-canonical-path-for-ramblock-id=off" };
    let id = block.name.rsplit_once('/').map_or(&*block.name, |(_, id)| id);
    let id = escape(id);
    format!("{kind},id={id},size={}{memory}{naming}", block.total_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::restorable_line;
    use proptest::prelude::*;

    fn ram(blocks: &[(&str, BlockKind)]) -> RamLayout {
        let block = |(name, kind): &(&str, BlockKind)| RamBlock {
            name: (*name).into(),
            kind: *kind,
            used_bytes: 4096,
            total_bytes: 8192,
        };
        RamLayout::new(blocks.iter().map(block).collect()).unwrap()
    }

    fn kept(line: &str) -> Vec<Argument> {
        options::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    fn plain(line: &str) -> Vec<LineWord> {
        line.split(' ').map(|w| LineWord::Plain(w.into())).collect()
    }

    #[test]
    fn ram_from_m_alone_becomes_a_backend_of_the_same_name() {
        let ram = ram(&[("pc.ram", BlockKind::Backend), ("pc.bios", BlockKind::Stream)]);
        let line = restorable_line(
            &kept("-m 64 -S -mem-path /dev/shm -smp 2"),
            &[],
            &crate::host_effects::NoHost,
            crate::LineUse::default(),
        )
        .unwrap();
        let words = plan_backends(&line.arguments, &ram).unwrap().words;
        let mut expected = plain("-m 64 -smp 2");
        expected.push(LineWord::Backend(0));
        expected.extend(plain("-machine memory-backend=pc.ram"));
        assert_eq!(words, expected);
        assert!(line.notes.len() == 1 && line.notes[0].contains("-mem-path"));
        let object = backend_object(&ram.blocks()[0], "/proc/self/fd/9", true);
        assert_eq!(
            object,
            "memory-backend-file,id=pc.ram,size=8192,mem-path=/proc/self/fd/9,share=on,x-use-canonical-path-for-ramblock-id=off"
        );
    }

    #[test]
    fn the_users_backends_are_replaced_in_place_in_both_forms() {
        let ram = ram(&[("/objects/a", BlockKind::Backend), ("/objects/b", BlockKind::Backend)]);
        let line = r#"-object {"qom-type":"memory-backend-memfd","id":"b","size":8192,"hugetlb":true} -object iothread,id=a -object memory-backend-ram,id=a,size=8K"#;
        let RestoreLine { words, notes } = plan_backends(&kept(line), &ram).unwrap();
        let mut expected = vec![LineWord::Backend(1)];
        expected.extend(plain("-object iothread,id=a"));
        expected.push(LineWord::Backend(0));
        assert_eq!(words, expected);
        assert!(notes.len() == 1 && notes[0].contains("hugetlb"), "{notes:?}");
        assert!(!backend_object(&ram.blocks()[0], "/x", false).contains("canonical"));
    }

    #[test]
    fn a_line_that_does_not_fit_the_layout_is_refused() {
        let two = ram(&[("/objects/a", BlockKind::Backend), ("pc.ram", BlockKind::Backend)]);
        assert!(plan_backends(&kept("-m 64"), &two).is_err(), "nothing gives /objects/a");
        let one = ram(&[("pc.ram", BlockKind::Backend)]);
        let line = "-object memory-backend-ram,id=zz,size=8K";
        assert!(plan_backends(&kept(line), &one).is_err(), "zz has no block");
    }

    #[test]
    fn added_words_must_not_change_the_machine() {
        let added = |line: &str| check_added(line.split(' ').map(OsString::from).collect());
        for line in [
            "-m 2G",
            "--machine q35",
            "-device e1000",
            "disk.img",
            "-S",
            "-incoming x",
            "-object x,id=y",
            "-accel kvm",
        ] {
            let error = added(line).unwrap_err();
            assert!(error.fix().is_some(), "{error}");
        }
        assert_eq!(added("-qmp unix:/tmp/x,server=on,wait=off -display none").unwrap().len(), 2);
    }

    proptest! {
        #[test]
        fn no_line_panics(line in prop::collection::vec("(-object|-m|-S|memory-backend-ram,id=a|\\{|[-,={}\"a-z]{0,12})", 0..8)) {
            let ram = ram(&[("/objects/a", BlockKind::Backend)]);
            if let Ok(arguments) = options::parse(&line) {
                let _ = plan_backends(&arguments, &ram);
                let host = crate::host_effects::NoHost;
                let _ = restorable_line(&arguments, &[], &host, crate::LineUse::default());
            }
        }
    }
}
