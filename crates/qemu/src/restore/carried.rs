//! What of a checkpoint's line existed only while that VM ran, and what a restore does about it.
//!
//! | word | why it cannot be as it was | what is done |
//! |---|---|---|
//! | `-S`, `-incoming`, `-loadvm` | how the first run began | left out |
//! | `-daemonize`, `-pidfile` | how the first run was kept | left out, and said |
//! | `-mem-path`, `-mem-prealloc` | the restored RAM is our own | left out, and said |
//! | `-mon` over a socket given as a descriptor | whoever listened has gone | left out |
//! | another `-chardev` given as a descriptor | the same | becomes `null`, and said |
//! | a console in the directory of a clone that has gone | nobody would find it there | the first becomes the terminal, others `null`, and said |
//! | `-netdev` given as a descriptor | a network is not to be silently without a peer | refused, unless the restore's own words have one of that id |
//! | `-chardev`, `-netdev` whose id the restore's own words give again | the restore says where they go | left out |
//! | `-serial`, `-parallel` where the restore's own words give as many | the same | left out |
//! | `-add-fd` | the descriptor was its starter's | left out |
//! | a disk or anything else in `/dev/fdset` | its contents are not known | refused |
//! | `-readconfig` from a descriptor | the same; Keyframe's own is left out | refused |
//! | `-object secret` from a file that is gone | libvirt's key of that run | left out where nothing needs it, else refused |
//! | `-no-shutdown` of libvirt's | libvirt is not there to end QEMU | left out, and said |

use crate::options::{self, Argument, escape, properties, value_of};
use crate::{Error, Result};
use std::path::Path;

/// Options that are left out whatever their value, with what a person is told.
const DROPPED: &[(&str, Option<&str>)] = &[
    ("S", None),
    ("incoming", None),
    ("loadvm", None),
    ("add-fd", None),
    (
        "daemonize",
        Some("-daemonize is left out: put `keyframe restore` itself into the background"),
    ),
    ("pidfile", Some("-pidfile is left out: the file is the first run's")),
    ("mem-path", Some("-mem-path is left out: the restored RAM lies in memory of its own")),
    (
        "mem-prealloc",
        Some("-mem-prealloc is left out: the restored RAM holds what the checkpoint holds"),
    ),
];

/// Keys whose value is the number of a descriptor.
const DESCRIPTORS: &[&str] = &["fd", "fds", "vhostfd", "vhostfds"];

/// What QEMU opens as one of its own descriptors.
const FDSET: &str = "/dev/fdset/";

/// The directory with a directory for each clone.
const CLONES: &str = ".clones";

/// The id that libvirt gives its monitor.
const LIBVIRT_MONITOR: &str = "charmonitor";

/// The line `kept` as it can be run once more, with the words `extra` behind it.
///
/// Error: [`Error::CommandLine`] for what cannot, with what to do.
pub fn carry(
    kept: &[Argument],
    extra: &[Argument],
    notes: &mut Vec<String>,
) -> Result<Vec<Argument>> {
    let line = Line { all: kept, extra };
    let mut carried = Vec::new();
    for argument in kept {
        match line.fate(argument)? {
            Fate::Stays => carried.push(argument.clone()),
            Fate::Goes(note) => notes.extend(note),
            Fate::Becomes(other, note) => {
                carried.push(other);
                notes.push(note);
            }
        }
    }
    Ok(carried)
}

/// What becomes of an argument.
enum Fate {
    Stays,
    Goes(Option<String>),
    Becomes(Argument, String),
}

struct Line<'a> {
    all: &'a [Argument],
    extra: &'a [Argument],
}

impl Line<'_> {
    fn fate(&self, argument: &Argument) -> Result<Fate> {
        if let Some((_, note)) = DROPPED.iter().find(|(name, _)| *name == argument.name()) {
            return Ok(Fate::Goes(note.map(str::to_owned)));
        }
        match argument.name() {
            _ if self.is_replaced(argument) => Ok(Fate::Goes(None)),
            "mon" if self.is_over_descriptor(argument) => Ok(Fate::Goes(None)),
            "chardev" if by_descriptor(argument) => Ok(self.chardev(argument)),
            "chardev" if of_gone_clone(argument) => Ok(self.console(argument)),
            "netdev" if by_descriptor(argument) => self.netdev(argument),
            "readconfig" => self.config(argument),
            "object" => self.object(argument),
            "no-shutdown" if self.is_libvirts() => {
                Ok(Fate::Goes(Some("-no-shutdown, which libvirt had added, is left out".into())))
            }
            _ if argument.value().contains(FDSET) => Err(refused(
                argument,
                "what it names was given to the first QEMU as an open file, and is not known by a path",
                "start the VM with paths in place of descriptors; for libvirt, a disk without <fdgroup>",
            )),
            _ => Ok(Fate::Stays),
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
            return Fate::Goes(None);
        }
        let note = format!(
            "character device {id} had been opened by whoever started the VM: nobody is at its other end now \
             (give it anew with `-chardev ...,id={id}`)"
        );
        Fate::Becomes(Argument::Option("chardev".into(), format!("null,id={}", escape(&id))), note)
    }

    /// A console of a clone.
    fn console(&self, argument: &Argument) -> Fate {
        let is_first =
            self.all.iter().find(|a| a.name() == "chardev" && of_gone_clone(a)) == Some(argument);
        let (backend, place) =
            if is_first { ("stdio", "the terminal") } else { ("null", "nowhere") };
        let id = id(argument);
        let note = format!(
            "console {id} was a socket in the directory of a clone, which is gone: it is on {place} now (elsewhere with \
             `-- -chardev ...,id={id}`)"
        );
        Fate::Becomes(
            Argument::Option("chardev".into(), format!("{backend},id={}", escape(&id))),
            note,
        )
    }

    fn netdev(&self, argument: &Argument) -> Result<Fate> {
        let id = id(argument);
        if self.is_given_again("netdev", &id) {
            return Ok(Fate::Goes(None));
        }
        Err(refused(
            argument,
            "this network interface had been opened by whoever started the VM",
            &format!(
                "make one (`ip tuntap add dev tap9 mode tap`) and add behind -- the words \
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
            (false, _) => Ok(Fate::Stays),
            // The monitors that Keyframe itself had added.
            (true, true) => Ok(Fate::Goes(None)),
            (true, false) => Err(refused(
                argument,
                "the configuration was read from an open file, and is not known by a path",
                "start the VM with the configuration in a file that stays",
            )),
        }
    }

    fn object(&self, argument: &Argument) -> Result<Fate> {
        let Some(object) = options::Object::parse(argument.value()) else { return Ok(Fate::Stays) };
        let file = value_of(&object.properties, "file").map(Path::new);
        let gone = object.qom_type == "secret" && file.is_some_and(|file| !file.exists());
        if !gone {
            return Ok(Fate::Stays);
        }
        let needs = |a: &&Argument| *a != argument && mentions(a.value(), &object.id);
        match self.all.iter().find(needs) {
            None => Ok(Fate::Goes(None)),
            Some(user) => Err(refused(
                argument,
                &format!("the secret's file is gone, and {} needs it", user.display()),
                "restore while the first VM's files are there, or checkpoint the VM without what is encrypted",
            )),
        }
    }

    /// The restore's own words say where this goes.
    fn is_replaced(&self, argument: &Argument) -> bool {
        let name = argument.name();
        let count = |line: &[Argument]| line.iter().filter(|a| a.name() == name).count();
        match name {
            "chardev" | "netdev" => {
                let keys = properties(argument.value(), "type").unwrap_or_default();
                value_of(&keys, "id").is_some_and(|id| self.is_given_again(name, id))
            }
            // Each is a device of the machine, so there must be as many.
            "serial" | "parallel" => count(self.extra) == count(self.all),
            _ => false,
        }
    }

    fn is_given_again(&self, name: &str, id: &str) -> bool {
        self.extra.iter().any(|a| a.name() == name && has_id(a, id))
    }

    fn is_libvirts(&self) -> bool {
        self.all
            .iter()
            .any(|a| a.name() == "chardev" && by_descriptor(a) && has_id(a, LIBVIRT_MONITOR))
    }
}

fn refused(argument: &Argument, reason: &str, fix: &str) -> Error {
    Error::CommandLine { argument: argument.display(), reason: reason.into(), fix: fix.into() }
}

/// Whether a chardev or netdev was given as the number of a descriptor, or lies in a descriptor
/// set.
fn by_descriptor(argument: &Argument) -> bool {
    let keys = properties(argument.value(), "type").unwrap_or_default();
    keys.iter().any(|(key, value)| DESCRIPTORS.contains(&key.as_str()) || value.starts_with(FDSET))
}

/// Whether it lies in the directory of a clone, and that is no more.
fn of_gone_clone(argument: &Argument) -> bool {
    let keys = properties(argument.value(), "type").unwrap_or_default();
    let place = value_of(&keys, "path").map(Path::new).and_then(Path::parent);
    place.is_some_and(|place| {
        place.parent().is_some_and(|all| all.ends_with(CLONES)) && !place.is_dir()
    })
}

fn id(argument: &Argument) -> String {
    let keys = properties(argument.value(), "type").unwrap_or_default();
    value_of(&keys, "id").unwrap_or_default().to_owned()
}

fn has_id(argument: &Argument, wanted: &str) -> bool {
    id(argument) == wanted
}

/// Whether `word` stands in `text` as a word of its own.
fn mentions(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '-' | '.'))
        .any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As libvirt 9.0 starts a q35 VM on QEMU 7.2, shortened by devices that are like others.
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

    fn carried(kept: &str, extra: &str) -> Result<(String, Vec<String>)> {
        let mut notes = Vec::new();
        let carried = carry(&line(kept), &line(extra), &mut notes)?;
        Ok((carried.iter().flat_map(Argument::words).collect::<Vec<_>>().join(" "), notes))
    }

    #[test]
    fn a_line_of_libvirts_needs_its_network_and_nothing_else() {
        let error = carried(LIBVIRT, "").unwrap_err();
        assert!(error.to_string().contains("hostnet0"), "{error}");
        let fix = error.fix().unwrap();
        assert!(fix.contains("-netdev tap,id=hostnet0,"), "{fix}");
        let (carried, notes) =
            carried(LIBVIRT, "-netdev tap,id=hostnet0,ifname=t,script=no,downscript=no").unwrap();
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
            assert!(!carried.contains(gone), "{gone} in {carried}");
        }
        for kept in [
            "\"id\":\"pc.ram\"",
            "libvirt-2-format",
            "pty,id=charserial1",
            "-sandbox on",
            "\"netdev\":\"hostnet0\"",
        ] {
            assert!(carried.contains(kept), "{kept} not in {carried}");
        }
        assert!(
            carried.contains("-chardev null,id=charserial0")
                && carried.contains("-chardev null,id=charchannel0")
        );
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert!(
            notes.iter().any(|n| n.contains("charchannel0"))
                && notes.iter().any(|n| n.contains("-no-shutdown"))
        );
    }

    #[test]
    fn how_the_first_run_began_and_was_kept_is_left_out() {
        let kept = "-m 64 -daemonize -pidfile /run/x -incoming tcp:0:1 -loadvm s -S -no-shutdown";
        let (carried, notes) = carried(kept, "").unwrap();
        assert_eq!(carried, "-m 64 -no-shutdown");
        assert_eq!(notes.len(), 2, "{notes:?}");
    }

    #[test]
    fn the_console_of_a_clone_that_has_gone_is_the_terminal() {
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
        let (text, notes) = carried(&kept, "").unwrap();
        let expected = "-m 64 -chardev stdio,id=keyframe-serial-0 -chardev null,id=keyframe-serial-1 -serial chardev:keyframe-serial-0";
        assert_eq!(text, expected);
        assert_eq!(notes.len(), 2, "{notes:?}");
        // One that is being made has its directory; other places are the user's affair.
        let dir = tempfile::tempdir().unwrap();
        let clone = dir.path().join(".clones/c-2");
        std::fs::create_dir_all(&clone).unwrap();
        for place in [clone.to_str().unwrap(), "/no/such/place"] {
            let kept = console(place, 0);
            assert_eq!(carried(&kept, "").unwrap(), (kept, Vec::new()));
        }
        let given = carried(&console(gone, 0), "-chardev null,id=keyframe-serial-0").unwrap();
        assert_eq!(given, (String::new(), Vec::new()));
    }

    #[test]
    fn a_character_device_given_anew_takes_the_place_of_the_old() {
        let kept = "-chardev socket,id=c0,fd=9 -device isa-serial,chardev=c0";
        let (carried, notes) = carried(kept, "-chardev file,id=c0,path=/tmp/log").unwrap();
        assert_eq!((carried.as_str(), notes.len()), ("-device isa-serial,chardev=c0", 0));
    }

    #[test]
    fn what_the_restore_says_takes_the_place_of_what_the_line_said() {
        let kept = "-serial file:a -netdev user,id=n -netdev user,id=o -chardev null,id=c";
        assert_eq!(
            carried(kept, "-serial stdio -netdev tap,id=n").unwrap().0,
            "-netdev user,id=o -chardev null,id=c"
        );
        // Another number of ports would be another machine.
        assert_eq!(carried(kept, "-serial stdio -serial null").unwrap().0, kept);
    }

    #[test]
    fn what_is_known_only_by_a_descriptor_is_refused_with_a_way_out() {
        for kept in [
            "-drive file=/dev/fdset/3,format=raw",
            r#"-blockdev {"driver":"file","filename":"/dev/fdset/3","node-name":"a"}"#,
            "-readconfig /proc/self/fd/7",
            "-netdev tap,id=n,fds=3:4,vhostfds=5:6",
        ] {
            let error = carried(kept, "").unwrap_err();
            assert!(error.to_string().starts_with(kept) && error.fix().is_some(), "{error}");
        }
        // Keyframe's own monitors.
        let ours = "-add-fd fd=5,set=19270,opaque=keyframe-engine:1:2:3 -only-migratable -readconfig /proc/self/fd/7";
        assert_eq!(carried(ours, "").unwrap().0, "-only-migratable");
    }

    #[test]
    fn a_secret_stays_while_its_file_does_and_is_missed_only_where_it_is_needed() {
        let secret = |file: &str| format!("-object secret,id=sec0,file={file}");
        assert_eq!(carried(&secret("/dev/null"), "").unwrap().0, secret("/dev/null"));
        assert_eq!(carried(&secret("/no/such"), "").unwrap().0, "");
        let user = format!(
            "{} -blockdev driver=luks,file=f,key-secret=sec0,node-name=n",
            secret("/no/such")
        );
        let error = carried(&user, "").unwrap_err();
        assert!(error.to_string().contains("key-secret=sec0"), "{error}");
        assert!(carried(&user.replace("key-secret=sec0", "key-secret=sec01"), "").is_ok());
    }
}
