//! Makes a checkpoint's command line runnable once more: some words held only while that VM ran.
//!
//! | word | reason | change |
//! |---|---|---|
//! | `-S`, `-incoming`, `-loadvm` | the start of the first run | removed |
//! | `-daemonize`, `-pidfile` | the first run's process | removed, with a note |
//! | `-mem-path`, `-mem-prealloc` | the restored RAM has memory of its own | removed, with a note |
//! | `-mon` over a socket given as a descriptor | its other end is gone | removed |
//! | another `-chardev` given as a descriptor | the same | becomes `null`, with a note |
//! | a console in the removed directory of a clone | its socket is gone | see below |
//! | `-netdev` given as a descriptor | the guest would silently have no network | see below |
//! | `-chardev`, `-netdev` whose id the added words give again | the added words win | removed |
//! | `-serial`, `-parallel`, if the added words give as many | the same | removed |
//! | `-vnc`, `-spice`, `-gdb`, `-s`, if the added words have one | the same | removed |
//! | `-global migration.…` | with it QEMU would not load the checkpoint | removed, with a note |
//! | `-add-fd` | the descriptor belonged to the first starter | removed |
//! | a disk or other file in `/dev/fdset` | its contents are unknown | refused |
//! | `-readconfig` from a descriptor | the same; Keyframe's own is removed | refused |
//! | `-object secret` from a file that is gone | libvirt's key of that run | see below |
//! | `-no-shutdown` from libvirt | libvirt does not end this QEMU | removed, with a note |
//!
//! The first console of a removed clone becomes the terminal, the others `null`, with a note. A
//! `-netdev` given as a descriptor is refused unless the added words have one of that id. A secret
//! is removed if no other argument needs it, else refused.
//!
//! Options that write to the host, listen on it or lock memory follow
//! [`HOST_EFFECTS`](crate::HOST_EFFECTS).

use crate::host_effects::{HostEffects, HostProbe, LineUse, Note, Rewritten};
use crate::lineage::is_lineage;
use crate::network::{check_offloads, isolated_netdev, isolated_tap, tap_queues};
use crate::options::{self, Argument, escape, properties, value_of};
use crate::{CommandLineError, Result};
use std::path::Path;

/// Options that are always removed, with the note for the user.
const REMOVED: &[(&str, Option<&str>)] = &[
    ("S", None),
    ("incoming", None),
    ("loadvm", None),
    ("add-fd", None),
    ("daemonize", Some("-daemonize is removed: run `keyframe restore` itself in the background")),
    ("pidfile", Some("-pidfile is removed: the file belongs to the first run")),
    ("mem-path", Some("-mem-path is removed: the restored RAM has memory of its own")),
    (
        "mem-prealloc",
        Some("-mem-prealloc is removed: the restored RAM holds the checkpoint's pages"),
    ),
];

/// Keys whose value is the number of a descriptor.
const DESCRIPTORS: &[&str] = &["fd", "fds", "vhostfd", "vhostfds"];

/// Prefix of paths that QEMU opens as one of its descriptors.
const FDSET: &str = "/dev/fdset/";

/// Name of the directory that holds a directory for each clone.
const CLONES: &str = ".clones";

/// Id of libvirt's monitor.
const LIBVIRT_MONITOR: &str = "charmonitor";

/// A kept command line that can be run once more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestorableLine {
    /// The arguments, without the added ones.
    pub arguments: Vec<Argument>,
    /// The differences from the kept command line that the user should know, a text each.
    pub notes: Vec<String>,
}

/// Makes the command line `kept` runnable once more for `line_use`, with the arguments `added`
/// after it. `probe` looks at the host.
///
/// Error: [`CommandLineError::Argument`] for an argument that cannot be run again.
pub fn restorable_line(
    kept: &[Argument],
    added: &[Argument],
    probe: &dyn HostProbe,
    line_use: LineUse<'_>,
) -> Result<RestorableLine> {
    let line = KeptLine { all: kept, added };
    check_offloads(kept, added)?;
    let mut effects = HostEffects::new(probe, line_use);
    let mut restorable = RestorableLine::default();
    for argument in kept {
        let kept_argument = match line.fate(argument)? {
            Fate::Kept => argument.clone(),
            Fate::Removed(note) => {
                restorable.notes.extend(note);
                continue;
            }
            Fate::Replaced(other, note) => {
                restorable.notes.push(note);
                other
            }
        };
        let Rewritten { arguments, notes } = match effects.apply(&kept_argument) {
            Err(_) if line.is_other_monitor_given(&kept_argument) => Rewritten::default(),
            applied => applied?,
        };
        restorable.arguments.extend(arguments);
        restorable.notes.extend(notes.into_iter().map(Note::into_text));
    }
    Ok(restorable)
}

/// What happens to an argument, with the note for the user.
enum Fate {
    Kept,
    Removed(Option<String>),
    Replaced(Argument, String),
}

struct KeptLine<'a> {
    all: &'a [Argument],
    added: &'a [Argument],
}

impl KeptLine<'_> {
    fn fate(&self, argument: &Argument) -> Result<Fate> {
        if let Some((_, note)) = REMOVED.iter().find(|(name, _)| *name == argument.name()) {
            return Ok(Fate::Removed(note.map(str::to_owned)));
        }
        match argument.name() {
            _ if self.is_replaced(argument) => Ok(Fate::Removed(None)),
            "mon" if self.is_over_descriptor(argument) => Ok(Fate::Removed(None)),
            "chardev" if by_descriptor(argument) => Ok(self.chardev(argument)),
            "chardev" if of_gone_clone(argument) => Ok(self.console(argument)),
            "netdev" if by_descriptor(argument) => self.netdev(argument),
            "global" if sets_migration(argument) => Ok(Fate::Removed(Some(format!(
                "{} is removed: with it QEMU would not load the checkpoint (set the capability in \
                 QEMU's monitor: migrate_set_capability)",
                argument.display()
            )))),
            "readconfig" => self.config(argument),
            "object" => self.object(argument),
            "no-shutdown" if self.is_libvirts() => {
                Ok(Fate::Removed(Some("-no-shutdown, which libvirt had added, is removed".into())))
            }
            _ if argument.value().contains(FDSET) => Err(refused(
                argument,
                "the first QEMU got this as an open file, and its path is unknown",
                "start the VM with paths instead of descriptors; under libvirt, with a disk \
                 without <fdgroup>",
            )),
            _ => Ok(Fate::Kept),
        }
    }

    /// A monitor over a chardev that was given as a descriptor.
    fn is_over_descriptor(&self, monitor: &Argument) -> bool {
        let keys = options::keys(monitor.value(), "chardev");
        let id = value_of(&keys, "chardev").unwrap_or_default();
        self.all.iter().any(|a| a.name() == "chardev" && by_descriptor(a) && has_id(a, id))
    }

    fn chardev(&self, argument: &Argument) -> Fate {
        let id = id(argument);
        let monitors = self.all.iter().filter(|a| a.name() == "mon");
        let is_monitors = |a: &Argument| {
            value_of(&options::keys(a.value(), "chardev"), "chardev") == Some(id.as_str())
        };
        if monitors.clone().any(is_monitors) || self.is_given_again("chardev", &id) {
            return Fate::Removed(None);
        }
        let note = format!(
            "character device {id} had been opened by the program that started the VM: its other \
             end is gone (give a new one with `-chardev ...,id={id}`)"
        );
        Fate::Replaced(Argument::Option("chardev".into(), format!("null,id={}", escape(&id))), note)
    }

    /// Replaces a console of a clone.
    fn console(&self, argument: &Argument) -> Fate {
        let is_first =
            self.all.iter().find(|a| a.name() == "chardev" && of_gone_clone(a)) == Some(argument);
        let (backend, target) =
            if is_first { ("stdio", "the terminal") } else { ("null", "nowhere") };
        let id = id(argument);
        let note = format!(
            "console {id} was a socket in a clone's directory, which is gone: it is now connected \
             to {target} (choose another target with `-- -chardev ...,id={id}`)"
        );
        Fate::Replaced(
            Argument::Option("chardev".into(), format!("{backend},id={}", escape(&id))),
            note,
        )
    }

    fn netdev(&self, argument: &Argument) -> Result<Fate> {
        let id = id(argument);
        if self.is_given_again("netdev", &id) {
            return Ok(Fate::Removed(None));
        }
        if isolated_tap(argument.value()).is_some() {
            return Ok(Fate::Kept);
        }
        // A clone's: Keyframe gives no other VM a network as a descriptor.
        let is_restored = self.all.iter().any(|a| a.name() == "add-fd" && is_lineage(a.value()));
        let keys = properties(argument.value(), "type").unwrap_or_default();
        if is_restored && value_of(&keys, "type") == Some("tap") {
            let note = format!(
                "network {id} is not connected, as it was in the clone (connect it with `-- \
                 -netdev tap,id={id},ifname=...,script=no,downscript=no`)"
            );
            return Ok(Fate::Replaced(isolated_netdev(&id, tap_queues(&keys)), note));
        }
        Err(refused(
            argument,
            "this network interface had been opened by the program that started the VM",
            &format!(
                "make one (`ip tuntap add dev tap9 mode tap`) and add after -- the words \
                 `-netdev tap,id={id},ifname=tap9,script=no,downscript=no`"
            ),
        ))
    }

    fn config(&self, argument: &Argument) -> Result<Fate> {
        let descriptor =
            ["/proc/self/fd/", "/dev/fd/", FDSET].iter().any(|p| argument.value().starts_with(p));
        let ours =
            self.all.iter().any(|a| a.name() == "add-fd" && a.value().contains("opaque=keyframe"));
        match (descriptor, ours) {
            (false, _) => Ok(Fate::Kept),
            // The monitors that Keyframe itself had added.
            (true, true) => Ok(Fate::Removed(None)),
            (true, false) => Err(refused(
                argument,
                "the configuration was read from an open file, and its path is unknown",
                "start the VM with the configuration in a file with a path",
            )),
        }
    }

    fn object(&self, argument: &Argument) -> Result<Fate> {
        let Some(object) = options::Object::parse(argument.value()) else { return Ok(Fate::Kept) };
        let file = value_of(&object.properties, "file").map(Path::new);
        let gone = object.qom_type == "secret" && file.is_some_and(|file| !file.exists());
        if !gone {
            return Ok(Fate::Kept);
        }
        let needs = |a: &&Argument| *a != argument && mentions(a.value(), &object.id);
        match self.all.iter().find(needs) {
            None => Ok(Fate::Removed(None)),
            Some(user) => Err(refused(
                argument,
                &format!("the secret's file is gone, and {} needs it", user.display()),
                "restore while the first VM's files exist, or checkpoint the VM without \
                 encrypted disks",
            )),
        }
    }

    /// True if the added words define this again.
    fn is_replaced(&self, argument: &Argument) -> bool {
        let name = argument.name();
        let count = |line: &[Argument]| line.iter().filter(|a| a.name() == name).count();
        match name {
            "chardev" | "netdev" => {
                let keys = properties(argument.value(), "type").unwrap_or_default();
                value_of(&keys, "id").is_some_and(|id| self.is_given_again(name, id))
            }
            // Each is a device of the machine, so their number must stay.
            "serial" | "parallel" => count(self.added) == count(self.all),
            "vnc" | "spice" => count(self.added) > 0,
            "gdb" | "s" => self.added.iter().any(|a| matches!(a.name(), "gdb" | "s")),
            _ => false,
        }
    }

    /// True if `argument` is a monitor, and the added words have one of the same kind.
    fn is_other_monitor_given(&self, argument: &Argument) -> bool {
        let name = argument.name();
        matches!(name, "monitor" | "qmp" | "qmp-pretty")
            && self.added.iter().any(|a| a.name() == name)
    }

    fn is_given_again(&self, name: &str, id: &str) -> bool {
        self.added.iter().any(|a| a.name() == name && has_id(a, id))
    }

    fn is_libvirts(&self) -> bool {
        self.all
            .iter()
            .any(|a| a.name() == "chardev" && by_descriptor(a) && has_id(a, LIBVIRT_MONITOR))
    }
}

/// True for a default of QEMU's migration, which holds for the load of a checkpoint too.
fn sets_migration(global: &Argument) -> bool {
    options::global_property(global).is_some_and(|[driver, ..]| driver == "migration")
}

fn refused(argument: &Argument, reason: &str, fix: &str) -> CommandLineError {
    CommandLineError::Argument {
        argument: argument.display(),
        reason: reason.into(),
        fix: fix.into(),
    }
}

/// True if a chardev or netdev was given as the number of a descriptor, or lies in a descriptor
/// set.
fn by_descriptor(argument: &Argument) -> bool {
    let keys = properties(argument.value(), "type").unwrap_or_default();
    keys.iter().any(|(key, value)| DESCRIPTORS.contains(&key.as_str()) || value.starts_with(FDSET))
}

/// True if a chardev lies in the directory of a clone that does not exist.
fn of_gone_clone(argument: &Argument) -> bool {
    let keys = properties(argument.value(), "type").unwrap_or_default();
    let directory = value_of(&keys, "path").map(Path::new).and_then(Path::parent);
    directory.is_some_and(|directory| {
        directory.parent().is_some_and(|all| all.ends_with(CLONES)) && !directory.is_dir()
    })
}

fn id(argument: &Argument) -> String {
    let keys = properties(argument.value(), "type").unwrap_or_default();
    value_of(&keys, "id").unwrap_or_default().to_owned()
}

fn has_id(argument: &Argument, wanted: &str) -> bool {
    id(argument) == wanted
}

/// True if `text` contains `word` as a whole word.
fn mentions(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '-' | '.'))
        .any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line of a q35 VM that libvirt 9.0 starts on QEMU 7.2, without devices that are like
    /// others.
    const LIBVIRT: &str = r#"-name guest=web1,debug-threads=on -S
        -object {"qom-type":"secret","id":"masterKey0","format":"raw","file":"/no/such/domain-2-web1/master-key.aes"}
        -machine pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram -accel tcg -cpu qemu64 -m 256
        -object {"qom-type":"memory-backend-ram","id":"pc.ram","size":268435456} -overcommit mem-lock=off
        -smp 2,sockets=2,cores=1,threads=1 -uuid 517fed47-7a7c-40f5-9d2e-d154f11386e6 -no-user-config -nodefaults
        -chardev socket,id=charmonitor,fd=27,server=on,wait=off -mon chardev=charmonitor,id=monitor,mode=control
        -rtc base=utc,driftfix=slew -no-hpet -no-shutdown -boot strict=on
        -device {"driver":"virtio-serial-pci","id":"virtio-serial0","bus":"pci.3","addr":"0x0"}
        -blockdev {"driver":"file","filename":"/var/lib/web1.raw","node-name":"libvirt-2-storage","discard":"unmap"}
        -blockdev {"node-name":"libvirt-2-format","read-only":true,"driver":"raw","file":"libvirt-2-storage"}
        -netdev {"type":"tap","fd":"30","id":"hostnet0"}
        -device {"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0","mac":"52:54:00:ad:09:4a","bus":"pci.1"}
        -add-fd set=0,fd=23,opaque=serial0-source -chardev file,id=charserial0,path=/dev/fdset/0,append=on
        -device {"driver":"isa-serial","chardev":"charserial0","id":"serial0","index":0}
        -chardev socket,id=charchannel0,fd=23,server=on,wait=off -chardev pty,id=charserial1
        -device {"driver":"virtserialport","bus":"virtio-serial0.0","nr":1,"chardev":"charchannel0","id":"channel0"}
        -vnc 127.0.0.1:0,audiodev=audio1
        -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny -msg timestamp=on"#;

    fn line(text: &str) -> Vec<Argument> {
        options::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    fn restorable(kept: &str, added: &str) -> Result<(String, Vec<String>)> {
        let host = crate::host_effects::NoHost;
        let made = restorable_line(&line(kept), &line(added), &host, LineUse::default())?;
        let words: Vec<_> = made.arguments.iter().flat_map(Argument::words).collect();
        Ok((words.join(" "), made.notes))
    }

    #[test]
    fn a_libvirt_line_needs_only_its_network() {
        let error = restorable(LIBVIRT, "").unwrap_err();
        assert!(error.to_string().contains("hostnet0"), "{error}");
        let fix = error.fix().unwrap();
        assert!(fix.contains("-netdev tap,id=hostnet0,"), "{fix}");
        let (text, notes) =
            restorable(LIBVIRT, "-netdev tap,id=hostnet0,ifname=t,script=no,downscript=no")
                .unwrap();
        for gone in [
            "masterKey0",
            "charmonitor",
            "-mon",
            "fd=",
            "\"fd\"",
            "-S ",
            "fdset",
            "no-shutdown",
            "add-fd",
        ] {
            assert!(!text.contains(gone), "{gone} in {text}");
        }
        for kept in [
            "\"id\":\"pc.ram\"",
            "libvirt-2-format",
            "pty,id=charserial1",
            "-sandbox on",
            "\"netdev\":\"hostnet0\"",
        ] {
            assert!(text.contains(kept), "{kept} not in {text}");
        }
        assert!(
            text.contains("-chardev null,id=charserial0")
                && text.contains("-chardev null,id=charchannel0")
        );
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert!(
            notes.iter().any(|n| n.contains("charchannel0"))
                && notes.iter().any(|n| n.contains("-no-shutdown"))
        );
    }

    #[test]
    fn words_of_the_first_run_are_removed() {
        let kept = "-m 64 -daemonize -pidfile /run/x -incoming tcp:0:1 -loadvm s -S -no-shutdown";
        let (text, notes) = restorable(kept, "").unwrap();
        assert_eq!(text, "-m 64 -no-shutdown");
        assert_eq!(notes.len(), 2, "{notes:?}");
    }

    #[test]
    fn defaults_of_the_migration_are_removed() {
        let kept = "-global kvm-pit.lost_tick_policy=discard -global migration.x-multifd=on \
                    -global driver=migration,property=x-ignore-shared,value=on";
        let (text, notes) = restorable(kept, "").unwrap();
        assert_eq!(text, "-global kvm-pit.lost_tick_policy=discard");
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].starts_with("-global migration.x-multifd=on is removed"), "{notes:?}");
    }

    #[test]
    fn the_console_of_a_removed_clone_becomes_the_terminal() {
        let console = |dir: &str, n: u32| {
            format!(
                "-chardev socket,id=keyframe-serial-{n},path={dir}/console{n}.sock,server=on,wait=off"
            )
        };
        let gone = "/no/such/.clones/c-1";
        let kept = format!(
            "-m 64 {} {} -serial chardev:keyframe-serial-0",
            console(gone, 0),
            console(gone, 1)
        );
        let (text, notes) = restorable(&kept, "").unwrap();
        let expected = "-m 64 -chardev stdio,id=keyframe-serial-0 -chardev null,id=keyframe-serial-1 -serial chardev:keyframe-serial-0";
        assert_eq!(text, expected);
        assert_eq!(notes.len(), 2, "{notes:?}");
        // A console whose directory exists stays, and so does one in another place.
        let dir = tempfile::tempdir().unwrap();
        let clone = dir.path().join(".clones/c-2");
        std::fs::create_dir_all(&clone).unwrap();
        for place in [clone.to_str().unwrap(), "/no/such/place"] {
            let kept = console(place, 0);
            assert_eq!(restorable(&kept, "").unwrap(), (kept, Vec::new()));
        }
        let given = restorable(&console(gone, 0), "-chardev null,id=keyframe-serial-0").unwrap();
        assert_eq!(given, (String::new(), Vec::new()));
    }

    #[test]
    fn an_added_character_device_replaces_the_kept_one() {
        let kept = "-chardev socket,id=c0,fd=9 -device isa-serial,chardev=c0";
        let (text, notes) = restorable(kept, "-chardev file,id=c0,path=/tmp/log").unwrap();
        assert_eq!((text.as_str(), notes.len()), ("-device isa-serial,chardev=c0", 0));
    }

    #[test]
    fn added_serials_and_networks_replace_the_kept_ones() {
        let kept = "-serial null -netdev user,id=n -netdev user,id=o -chardev null,id=c";
        assert_eq!(
            restorable(kept, "-serial stdio -netdev tap,id=n").unwrap().0,
            "-netdev user,id=o -chardev null,id=c"
        );
        // Another number of ports would be another machine.
        assert_eq!(restorable(kept, "-serial stdio -serial null").unwrap().0, kept);
    }

    #[test]
    fn descriptors_are_refused_with_a_fix() {
        for kept in [
            "-drive file=/dev/fdset/3,format=raw",
            r#"-blockdev {"driver":"file","filename":"/dev/fdset/3","node-name":"a"}"#,
            "-readconfig /proc/self/fd/7",
            "-netdev tap,id=n,fds=3:4,vhostfds=5:6",
        ] {
            let error = restorable(kept, "").unwrap_err();
            assert!(error.to_string().starts_with(kept) && error.fix().is_some(), "{error}");
        }
        // Keyframe's own monitors.
        let ours = "-add-fd fd=5,set=19270,opaque=keyframe-engine:1:2:3 -only-migratable -readconfig /proc/self/fd/7";
        assert_eq!(restorable(ours, "").unwrap().0, "-only-migratable");
    }

    #[test]
    fn a_secret_without_its_file_is_refused_only_if_needed() {
        let secret = |file: &str| format!("-object secret,id=sec0,file={file}");
        assert_eq!(restorable(&secret("/dev/null"), "").unwrap().0, secret("/dev/null"));
        assert_eq!(restorable(&secret("/no/such"), "").unwrap().0, "");
        let user = format!(
            "{} -blockdev driver=luks,file=f,key-secret=sec0,node-name=n",
            secret("/no/such")
        );
        let error = restorable(&user, "").unwrap_err();
        assert!(error.to_string().contains("key-secret=sec0"), "{error}");
        assert!(restorable(&user.replace("key-secret=sec0", "key-secret=sec01"), "").is_ok());
    }
}
