//! From a checkpoint's command line to the one that brings it to life: a value that is complete
//! before anything starts.
//!
//! ```text
//!   kept:   qemu -m 1G -object memory-backend-ram,id=a,size=512M,prealloc=on ...  -S  -mem-prealloc
//!   run:    qemu -m 1G -object memory-backend-file,id=a,size=536870912,mem-path=/proc/self/fd/N,share=on ...
//!                -S -global migration.send-configuration=off -machine suppress-vmdesc=on -incoming fd:N ...
//! ```
//!
//! Invariant: each block of the layout that lies behind a memory backend is given back by exactly
//! one backend of ours.

use super::{Lineage, RestoreOptions, RestoreSource, Until, carried};
use crate::accel::{self, Accelerator};
use crate::binary::{self, QemuIdentity};
use crate::drives;
use crate::invocation::text;
use crate::options::{self, Argument, Object, escape};
use crate::ramblock::backend_of;
use crate::{Error, Result};
use keyframe_units::{BlockKind, RamBlock, RamLayout};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Options that would make another machine than the checkpoint's.
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

/// Properties of a memory backend that need no word where they are replaced.
const REPLACED: &[&str] = &["size", "share", "mem-path", "x-use-canonical-path-for-ramblock-id"];

/// A word of the new line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// As it is.
    Plain(String),
    /// `-object` and the backend that holds the block of this number.
    Backend(usize),
}

/// How a checkpoint will be brought to life.
#[derive(Debug)]
pub struct Plan {
    pub(super) binary: PathBuf,
    pub(super) working_directory: Option<PathBuf>,
    pub(super) words: Vec<Word>,
    pub(super) arguments: Vec<Argument>,
    pub(super) source: RestoreSource,
    pub(super) paused: bool,
    pub(super) replays: Option<Until>,
    pub(super) accelerator: Option<Accelerator>,
    /// Its clock goes by its instructions, as it did not before.
    pub(super) counts: bool,
    pub(super) lineage: Option<Lineage>,
    pub(super) monitor: Option<PathBuf>,
    pub(super) log: Option<PathBuf>,
    /// Behind all others.
    pub(super) added: Vec<String>,
    pub(super) spawned: Option<fn()>,
    notes: Vec<String>,
}

impl Plan {
    /// Plans the restore of `source` with `extra` words added to its line.
    ///
    /// Errors: [`Error::Binary`] and [`Error::DifferentVersion`] for the QEMU binary;
    /// [`Error::CommandLine`] for a word of `extra` that would change the machine;
    /// [`Error::Source`] where line and RAM layout do not fit together.
    pub fn new(
        source: RestoreSource,
        extra: Vec<OsString>,
        options: RestoreOptions,
    ) -> Result<Self> {
        let RestoreOptions {
            qemu,
            paused,
            replays,
            icount_shift,
            accelerator,
            disks,
            lineage,
            monitor,
            log,
            added,
            spawned,
        } = options;
        let mut notes = Vec::new();
        let binary = find_binary(&source, qemu.as_deref(), &mut notes)?;
        let extra = check_extra(extra)?;
        let kept = options::parse(source.machine.user_command.get(1..).unwrap_or_default())?;
        let kept = carried::carry(&kept, &extra, &mut notes)?;
        let kept = match &disks {
            Some(server) => drives::rewrite(&kept, server)?,
            None => kept,
        };
        let mut words = match accelerator {
            Some(_) => rewrite(&accel::without_accelerator(&kept), &source.ram, &mut notes)?,
            None => rewrite(&kept, &source.ram, &mut notes)?,
        };
        words.extend(
            accelerator.iter().flat_map(|a| ["-accel".into(), a.to_string()]).map(Word::Plain),
        );
        let counted = icount_shift.map(|shift| ["-icount".into(), format!("shift={shift}")]);
        words.extend(counted.into_iter().flatten().map(Word::Plain));
        words.extend(extra.iter().flat_map(Argument::words).map(Word::Plain));
        let working_directory = Some(source.machine.directory()).filter(|dir| dir.is_dir());
        if working_directory.is_none() {
            notes.push(format!(
                "the VM's working directory {} is gone: relative paths of its line are looked for here",
                source.machine.working_directory
            ));
        }
        let arguments = kept.into_iter().chain(extra).collect();
        Ok(Self {
            binary,
            working_directory,
            words,
            arguments,
            source,
            paused,
            replays,
            accelerator,
            counts: icount_shift.is_some(),
            lineage,
            monitor,
            log,
            added,
            spawned,
            notes,
        })
    }

    /// What a person should know of how the restored VM differs from the checkpoint's.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The accelerator that QEMU is told to use, where that leaves it no choice.
    pub fn named_accelerator(&self) -> Option<Accelerator> {
        self.accelerator.or_else(|| accel::named_by(&self.arguments))
    }

    /// The QEMU binary.
    pub fn binary(&self) -> &Path {
        &self.binary
    }
}

fn find_binary(
    source: &RestoreSource,
    chosen: Option<&Path>,
    notes: &mut Vec<String>,
) -> Result<PathBuf> {
    let path = match chosen {
        Some(path) => {
            let name = path.to_str().ok_or_else(|| Error::Binary {
                path: path.into(),
                reason: "its path is not UTF-8".into(),
                fix: "name it by a link".into(),
            })?;
            binary::find(name)?
        }
        None => binary::find(&source.machine.binary_path).map_err(|e| match e {
            Error::Binary { path, reason, .. } => Error::Binary {
                path,
                reason,
                fix: format!(
                    "install QEMU {}, or name it with --qemu PATH",
                    source.machine.vmm_version
                ),
            },
            other => other,
        })?,
    };
    let known = QemuIdentity {
        path: path.clone(),
        version: source.machine.vmm_version.clone(),
        blake3: source.machine.binary_blake3.clone(),
    };
    let identity = QemuIdentity::of_known(&path, &known)?;
    if release(&identity.version) != release(&source.machine.vmm_version) {
        return Err(Error::DifferentVersion {
            path,
            expected: source.machine.vmm_version.clone(),
            found: identity.version,
        });
    }
    if identity.blake3 != source.machine.binary_blake3 {
        notes.push(format!(
            "{} (QEMU {}) is not the very binary that the checkpoint was taken of (QEMU {}), but of the same release",
            path.display(),
            identity.version,
            source.machine.vmm_version
        ));
    }
    std::path::absolute(&path).map_err(Error::io(format!("resolve {}", path.display())))
}

/// QEMU's own version, without the distributor's part.
fn release(version: &str) -> &str {
    version.split_whitespace().next().unwrap_or_default()
}

fn check_extra(extra: Vec<OsString>) -> Result<Vec<Argument>> {
    let words = extra.into_iter().map(text).collect::<Result<Vec<_>>>()?;
    let arguments = options::parse(&words)?;
    for argument in &arguments {
        if matches!(argument, Argument::Image(_)) || MACHINE_OPTIONS.contains(&argument.name()) {
            return Err(Error::CommandLine {
                argument: argument.display(),
                reason: "this would change the machine, which must be the checkpoint's own".into(),
                fix: "leave it out; consoles, monitors, displays and network backends may be added"
                    .into(),
            });
        }
    }
    Ok(arguments)
}

/// The kept line with its memory backends replaced by ours.
fn rewrite(kept: &[Argument], ram: &RamLayout, notes: &mut Vec<String>) -> Result<Vec<Word>> {
    let mut words = Vec::new();
    let mut given = vec![false; ram.blocks().len()];
    for argument in kept {
        match backend(argument, ram)? {
            Some((number, object)) => {
                if let Some(given) = given.get_mut(number) {
                    *given = true;
                }
                note_dropped(&object, notes);
                words.push(Word::Backend(number));
            }
            None => words.extend(argument.words().into_iter().map(Word::Plain)),
        }
    }
    let mut left = ram.blocks().iter().enumerate().filter(|(number, block)| {
        block.kind == BlockKind::Backend && given.get(*number) == Some(&false)
    });
    if let Some((number, block)) = left.next() {
        // RAM made from `-m` alone: QEMU names the block after the machine's default backend.
        let by_path = block.name.starts_with("/objects/");
        if by_path || left.next().is_some() {
            return Err(Error::Source {
                what: "RAM layout".into(),
                problem: format!(
                    "RAM block {} has no -object in the kept command line",
                    block.name
                ),
            });
        }
        words.push(Word::Backend(number));
        words.extend(
            ["-machine".into(), format!("memory-backend={}", escape(&block.name))].map(Word::Plain),
        );
    }
    Ok(words)
}

/// The numbers of the RAM blocks behind memory backends, in the order in which a restored QEMU
/// makes them.
pub fn backends_as_made(source: &RestoreSource) -> Result<Vec<usize>> {
    let kept = options::parse(source.machine.user_command.get(1..).unwrap_or_default())?;
    let words = rewrite(&kept, &source.ram, &mut Vec::new())?;
    let number = |word| if let Word::Backend(number) = word { Some(number) } else { None };
    Ok(words.into_iter().filter_map(number).collect())
}

/// Where `argument` defines a backend that holds a block of `ram`: the block's number.
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
        block.kind == BlockKind::Backend && backend_of(&block.name, &ids).is_some()
    };
    match ram.blocks().iter().position(is_its) {
        Some(number) => Ok(Some((number, object))),
        None => Err(Error::Source {
            what: "RAM layout".into(),
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

/// The value of `-object` for the backend that gives `block` from the file at `path`.
pub(super) fn backend_object(block: &RamBlock, path: &str, is_shared: bool) -> String {
    let id = block.name.strip_prefix("/objects/");
    // Where the block's name is the id alone, it must be so again.
    let naming = if id.is_some() { "" } else { ",x-use-canonical-path-for-ramblock-id=off" };
    format!(
        "memory-backend-file,id={},size={},mem-path={},share={}{naming}",
        escape(id.unwrap_or(&block.name)),
        block.total_bytes,
        escape(path),
        if is_shared { "on" } else { "off" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
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

    fn plain(line: &str) -> Vec<Word> {
        line.split(' ').map(|w| Word::Plain(w.into())).collect()
    }

    #[test]
    fn ram_from_m_alone_becomes_a_backend_of_the_same_name() {
        let ram = ram(&[("pc.ram", BlockKind::Backend), ("pc.bios", BlockKind::Stream)]);
        let mut notes = Vec::new();
        let line =
            carried::carry(&kept("-m 64 -S -mem-path /dev/shm -smp 2"), &[], &mut notes).unwrap();
        let words = rewrite(&line, &ram, &mut notes).unwrap();
        let mut expected = plain("-m 64 -smp 2");
        expected.push(Word::Backend(0));
        expected.extend(plain("-machine memory-backend=pc.ram"));
        assert_eq!(words, expected);
        assert!(notes.len() == 1 && notes[0].contains("-mem-path"));
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
        let mut notes = Vec::new();
        let words = rewrite(&kept(line), &ram, &mut notes).unwrap();
        let mut expected = vec![Word::Backend(1)];
        expected.extend(plain("-object iothread,id=a"));
        expected.push(Word::Backend(0));
        assert_eq!(words, expected);
        assert!(notes.len() == 1 && notes[0].contains("hugetlb"), "{notes:?}");
        assert!(!backend_object(&ram.blocks()[0], "/x", false).contains("canonical"));
    }

    #[test]
    fn a_line_that_does_not_fit_the_layout_is_refused() {
        let two = ram(&[("/objects/a", BlockKind::Backend), ("pc.ram", BlockKind::Backend)]);
        assert!(
            rewrite(&kept("-m 64"), &two, &mut Vec::new()).is_err(),
            "nothing gives /objects/a"
        );
        let one = ram(&[("pc.ram", BlockKind::Backend)]);
        let line = "-object memory-backend-ram,id=zz,size=8K";
        assert!(rewrite(&kept(line), &one, &mut Vec::new()).is_err(), "zz has no block");
    }

    #[test]
    fn extra_words_may_not_change_the_machine() {
        let extra = |line: &str| check_extra(line.split(' ').map(OsString::from).collect());
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
            let error = extra(line).unwrap_err();
            assert!(error.fix().is_some(), "{error}");
        }
        assert_eq!(extra("-qmp unix:/tmp/x,server=on,wait=off -display none").unwrap().len(), 2);
    }

    #[test]
    fn distributors_parts_do_not_make_another_release() {
        assert_eq!(release("7.2.22 (Debian 1:7.2+dfsg-7)"), release("7.2.22"));
        assert_ne!(release("7.2.22"), release("7.2.2"));
    }

    proptest! {
        #[test]
        fn no_line_panics(line in prop::collection::vec("(-object|-m|-S|memory-backend-ram,id=a|\\{|[-,={}\"a-z]{0,12})", 0..8)) {
            let ram = ram(&[("/objects/a", BlockKind::Backend)]);
            if let Ok(arguments) = options::parse(&line) {
                let _ = rewrite(&arguments, &ram, &mut Vec::new());
                let _ = carried::carry(&arguments, &[], &mut Vec::new());
            }
        }
    }
}
