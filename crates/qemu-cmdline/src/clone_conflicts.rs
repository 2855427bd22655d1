//! Resolves conflicts between several VMs from one checkpoint: makes each clone's own command line
//! from the kept one.
//!
//! | word | in a clone |
//! |---|---|
//! | `-serial`, `-chardev`, `-parallel` on the terminal or in a file | a socket, and a log file |
//! | the same on a socket | a socket |
//! | `-monitor`, `-qmp`, `-mon`, `-gdb`, `-s` | removed: a clone has a monitor of its own |
//! | `-nographic` | `-display none` with the console as above |
//! | `-vnc`, `-spice` | `-vnc` at a socket |
//! | `-netdev user` | kept, without `hostfwd` and `guestfwd` (a port can be used once) |
//! | `-netdev tap` | a tap that leads nowhere: the guest's link is up, and no packet arrives |
//! | another `-netdev` | an empty hub, with the same effect |
//! | `-nic` | as `-netdev` |
//! | `-net` | refused: it makes device and network together |
//! | `-device vmgenid` | a fresh id, unless an exact copy is wanted |
//!
//! The sockets and log files are in the clone's directory. Other options that write to the host or
//! lock memory follow [`HOST_EFFECTS`](crate::HOST_EFFECTS).
//!
//! Words that the user adds win: a `-netdev` or `-chardev` of the same id replaces the kept one.
//!
//! Not changed: MAC addresses, because a running guest keeps the address that its driver has read,
//! and would not receive packets for another one (separate networks keep clones apart); disks,
//! because each clone has a disk server of its own.

use crate::host_effects::{HostEffects, LineUse, NoHost, Note};
use crate::network::{isolated_netdev, offers_offloads, tap_queues};
use crate::options::{self, Argument, devices, escape, properties, value_of};
use crate::{CommandLineError, Result};
use std::path::{Path, PathBuf};

/// The options for the command line of a clone.
#[derive(Clone, Copy, Debug)]
pub struct CloneOptions<'a> {
    /// The clone's own directory, for sockets and files.
    pub directory: &'a Path,
    /// True to keep the identity of the checkpoint's VM (`vmgenid`).
    pub exact: bool,
}

/// The command line of a clone.
#[derive(Clone, Debug, Default)]
pub struct CloneLine {
    /// The words, the binary first.
    pub words: Vec<String>,
    /// The differences from the kept command line that the user should know, a text each.
    pub notes: Vec<String>,
    /// The consoles, in the order of the command line.
    pub consoles: Vec<CloneConsole>,
}

/// A character device of a clone that is on a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneConsole {
    /// The device's purpose, unique in the clone: `serial`, `agent`, `console`, `parallel`, the
    /// name of a port, or `device`; the second of a name is `serial-2`.
    pub name: String,
    /// The unix socket.
    pub socket: PathBuf,
}

/// Makes a clone's command line from the kept one (`words`, the binary first), to which the caller
/// will add the words `added`.
///
/// Error: [`CommandLineError::Argument`] for an argument that clones can neither share nor replace.
pub fn clone_line(
    words: &[String],
    added: &[String],
    clone: CloneOptions<'_>,
) -> Result<CloneLine> {
    let kept = options::parse(words.get(1..).unwrap_or_default())?;
    let mut maker = CloneLineMaker {
        clone,
        added: options::parse(added)?,
        notes: Vec::new(),
        consoles: Vec::new(),
        hubs: 0,
        effects: HostEffects::new(&NoHost, LineUse::Clone(clone.directory)),
    };
    let monitors = monitors(&kept);
    let mut out: Vec<String> = words.first().cloned().into_iter().collect();
    for argument in &kept {
        let arguments = maker.argument(argument, &kept, &monitors)?;
        out.extend(arguments.iter().flat_map(Argument::words));
    }
    maker.note_randomness(&kept);
    Ok(CloneLine { words: out, notes: maker.notes, consoles: maker.consoles })
}

/// Returns the purpose of the character device that QEMU names `label`, in a VM with the command line
/// `words` (the binary first): a name as in [`CloneConsole::name`], but not unique. `None` if no device
/// of the guest uses it. Error: the words are no QEMU command line.
pub fn console_purpose(words: &[String], label: &str) -> Result<Option<String>> {
    let line = options::parse(words.get(1..).unwrap_or_default())?;
    // QEMU's names for devices without a -chardev.
    let of_port = ["serial", "parallel", "debugcon"].into_iter().find(|port| {
        let number = label.strip_prefix(port);
        number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    });
    if let Some(port) = of_port {
        return Ok(Some(port.into()));
    }
    let uses = |argument: &Argument| {
        let keys = options::keys(argument.value(), "driver");
        argument.name() == "device" && value_of(&keys, "chardev") == Some(label)
            || argument.value() == format!("chardev:{label}")
    };
    let is_monitor = monitors(&line).iter().any(|monitor| monitor == label);
    Ok((!is_monitor && line.iter().any(uses)).then(|| purpose(&line, label)))
}

/// The networks that a clone replaces by one with the same offloads, or keeps.
const HARMLESS_NETWORKS: &[&str] =
    &["user", "tap", "hubport", "socket", "stream", "dgram", "vde", "l2tpv3", "none"];

/// Returns the words of a line (the binary first) without the options by which QEMU changes its
/// user or its root directory: a rehearsal has no right to do so, and they are no part of the
/// machine. Error: the words are no QEMU command line.
pub fn without_other_user(words: &[String]) -> Result<Vec<String>> {
    let line = options::parse(words.get(1..).unwrap_or_default())?;
    let kept = line.iter().filter(|a| !matches!(a.name(), "runas" | "chroot" | "run-with"));
    Ok(words.iter().take(1).cloned().chain(kept.flat_map(Argument::words)).collect())
}

/// Returns the first argument of a command line that a second QEMU cannot have beside the VM's own,
/// or not without a display; `None` if there is none.
pub fn rehearsal_obstacle(line: &[Argument]) -> Option<&Argument> {
    let is_obstacle = |argument: &&Argument| {
        let keys = properties(argument.value(), "driver").unwrap_or_default();
        let driver = value_of(&keys, "driver").unwrap_or_default();
        let has = |word: &str| argument.value().contains(word);
        match argument.name() {
            // One program serves one VM at such a socket, or the kernel gives a number once. The
            // file of -readconfig may name such sockets.
            "tpmdev" | "net" => argument.value() != "none",
            "readconfig" | "spice" => true,
            "device" => {
                ["vhost-", "usb-redir", "usb-host", "ivshmem-doorbell"]
                    .iter()
                    .any(|prefix| driver.starts_with(prefix))
                    || driver.contains("-gl")
            }
            "object" => ["vhost", "input-linux", "dbus-vmstate"].iter().any(|kind| has(kind)),
            // The guest may use offloads that a hub does not have.
            "netdev" | "nic" => {
                let keys = properties(argument.value(), "type").unwrap_or_default();
                let kind = value_of(&keys, "type").unwrap_or_default();
                let is_card_of_tap = argument.name() == "nic" && kind == "tap";
                is_card_of_tap || !HARMLESS_NETWORKS.contains(&kind)
            }
            "display" => ["egl", "gl=", "vnc", "spice", "dbus"].iter().any(|word| has(word)),
            "audiodev" => ["spice", "dbus", "jack"].iter().any(|kind| has(kind)),
            _ => false,
        }
    };
    line.iter().find(is_obstacle)
}

/// Ids of the chardevs of monitors.
fn monitors(kept: &[Argument]) -> Vec<String> {
    let of_mon = kept.iter().filter(|a| a.name() == "mon");
    of_mon
        .filter_map(|a| {
            value_of(&options::keys(a.value(), "chardev"), "chardev").map(str::to_owned)
        })
        .collect()
}

struct CloneLineMaker<'a> {
    clone: CloneOptions<'a>,
    added: Vec<Argument>,
    notes: Vec<String>,
    consoles: Vec<CloneConsole>,
    hubs: u32,
    effects: HostEffects<'a>,
}

/// A `-nic` with the card of `keys` and the hub `hub`.
fn nic_on_hub(keys: &[(String, String)], hub: u32) -> Argument {
    const OF_CARD: &[&str] = &["model", "mac", "macaddr", "name", "addr", "vectors"];
    let mut value = format!("hubport,hubid={hub}");
    for (key, text) in keys.iter().filter(|(key, _)| OF_CARD.contains(&key.as_str())) {
        value.extend([",", key, "=", &escape(text)]);
    }
    option("nic", value)
}

/// What the character device `id` is for, by the device that uses it.
fn purpose(kept: &[Argument], id: &str) -> String {
    let of_port =
        |name: &str| kept.iter().any(|a| a.name() == name && a.value() == format!("chardev:{id}"));
    for port in ["serial", "parallel", "debugcon"] {
        if of_port(port) {
            return port.into();
        }
    }
    let user = devices(kept).find(|keys| value_of(keys, "chardev") == Some(id));
    let Some(user) = user else { return "device".into() };
    let driver = value_of(&user, "driver").unwrap_or_default();
    match (driver, value_of(&user, "name")) {
        ("virtserialport", Some("org.qemu.guest_agent.0")) => "agent".into(),
        ("virtserialport", Some(name)) => file_name(name),
        ("virtconsole", _) => "console".into(),
        _ if driver.contains("serial") => "serial".into(),
        _ => file_name(driver),
    }
}

/// `name` as the name of a file: without slashes and other letters with a meaning.
fn file_name(name: &str) -> String {
    let safe =
        |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') { c } else { '_' };
    let name: String = name.chars().take(40).map(safe).collect();
    if name.is_empty() || name.starts_with('.') { "device".into() } else { name }
}

fn option(name: &str, value: impl Into<String>) -> Argument {
    Argument::Option(name.into(), value.into())
}

impl CloneLineMaker<'_> {
    fn argument(
        &mut self,
        argument: &Argument,
        kept: &[Argument],
        monitors: &[String],
    ) -> Result<Vec<Argument>> {
        Ok(match argument.name() {
            "monitor" | "qmp" | "qmp-pretty" | "mon" | "gdb" | "s" => Vec::new(),
            "nographic" => self.nographic(kept),
            "serial" | "parallel" | "debugcon" => self.serial(argument),
            "chardev" => self.chardev(argument, kept, monitors)?,
            "vnc" | "spice" => self.display(),
            "netdev" => self.netdev(argument),
            "nic" if argument.value() != "none" => self.netdev(argument),
            "net" if argument.value() != "none" => return Err(CommandLineError::Argument {
                argument: argument.display(),
                reason:
                    "it creates device and network together, so clones could not have networks of \
                     their own"
                        .into(),
                fix: "start the VM with `-device virtio-net-pci,netdev=n0 -netdev ...,id=n0` \
                      instead"
                    .into(),
            }),
            "device" => {
                let device = self.device(argument)?;
                self.own(&device)?
            }
            _ => self.own(argument)?,
        })
    }

    /// An argument that writes into the clone's directory, if it writes at all.
    fn own(&mut self, argument: &Argument) -> Result<Vec<Argument>> {
        let made = self.effects.apply(argument)?;
        // The user expects that a clone has files of its own.
        let others = made.notes.into_iter().filter(|note| matches!(note, Note::Removed(_)));
        self.notes.extend(others.map(Note::into_text));
        Ok(made.arguments)
    }

    /// A chardev with this id on a socket in the clone's directory.
    fn console(&mut self, id: &str, purpose: &str) -> Argument {
        let number = self.consoles.len() + 1;
        let name = if number == 1 { "console".into() } else { format!("console{number}") };
        let unique = (1..=number).map(|n| match n {
            1 => purpose.to_owned(),
            n => format!("{purpose}-{n}"),
        });
        let is_new = |name: &String| !self.consoles.iter().any(|console| console.name == *name);
        let purpose = unique.into_iter().find(is_new).unwrap_or_else(|| format!("device-{number}"));
        let socket = self.clone.directory.join(format!("{name}.sock"));
        self.consoles.push(CloneConsole { name: purpose, socket });
        let path = |suffix: &str| {
            escape(&self.clone.directory.join(format!("{name}.{suffix}")).to_string_lossy())
        };
        let (socket, log) = (path("sock"), path("log"));
        option(
            "chardev",
            format!(
                "socket,id={},path={socket},server=on,wait=off,logfile={log},logappend=on",
                escape(id)
            ),
        )
    }

    fn nographic(&mut self, kept: &[Argument]) -> Vec<Argument> {
        let mut out = vec![option("display", "none"), option("monitor", "none")];
        let has = |name: &str| kept.iter().any(|a| a.name() == name);
        if has("nodefaults") {
            return out;
        }
        if !has("serial") {
            out.push(self.console("keyframe-serial", "serial"));
            out.push(option("serial", "chardev:keyframe-serial"));
        }
        // With -nographic QEMU has a parallel port that leads nowhere.
        if !has("parallel") {
            out.push(option("parallel", "null"));
        }
        out
    }

    fn serial(&mut self, argument: &Argument) -> Vec<Argument> {
        let value = argument.value();
        let harmless = ["chardev:", "null", "none", "vc"].iter().any(|p| value.starts_with(p));
        if harmless {
            return vec![argument.clone()];
        }
        let id = format!("keyframe-{}-{}", argument.name(), self.consoles.len());
        let console = self.console(&id, argument.name());
        vec![console, option(argument.name(), format!("chardev:{id}"))]
    }

    fn chardev(
        &mut self,
        argument: &Argument,
        kept: &[Argument],
        monitors: &[String],
    ) -> Result<Vec<Argument>> {
        let keys = properties(argument.value(), "backend").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or_default().to_owned();
        if monitors.contains(&id) || self.is_given(&["chardev"], &id) {
            return Ok(Vec::new());
        }
        match value_of(&keys, "backend").unwrap_or_default() {
            "null" | "vc" | "ringbuf" | "memory" | "pty" | "spicevmc" | "spiceport" => {
                self.own(argument)
            }
            _ => Ok(vec![self.console(&id, &purpose(kept, &id))]),
        }
    }

    fn display(&mut self) -> Vec<Argument> {
        let path = self.clone.directory.join("vnc.sock");
        vec![option("vnc", format!("unix:{}", escape(&path.to_string_lossy())))]
    }

    fn netdev(&mut self, argument: &Argument) -> Vec<Argument> {
        let keys = properties(argument.value(), "type").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or_default();
        let is_nic = argument.name() == "nic";
        if !is_nic && self.is_given(&["netdev"], id) {
            return Vec::new();
        }
        let forwards = |key: &str| key == "hostfwd" || key == "guestfwd";
        match value_of(&keys, "type") {
            Some("user") if argument.value().trim_start().starts_with('{') => {
                vec![argument.clone()]
            }
            Some("user") => {
                let (gone, stay): (Vec<_>, Vec<_>) =
                    keys.iter().partition(|(key, _)| forwards(key));
                if !gone.is_empty() {
                    self.notes.push(format!(
                        "network {id}: ports of the host are not forwarded to clones"
                    ));
                }
                let word = |(key, value): &(String, String)| match key.as_str() {
                    "type" => escape(value),
                    _ => format!("{key}={}", escape(value)),
                };
                // QEMU wants the type first.
                let mut words: Vec<_> =
                    stay.iter().filter(|(k, _)| k == "type").map(|kv| word(kv)).collect();
                words.extend(stay.iter().filter(|(k, _)| k != "type").map(|kv| word(kv)));
                vec![option(argument.name(), words.join(","))]
            }
            Some("hubport") => vec![argument.clone()],
            _ => {
                self.notes.push(format!(
                    "network {id}: a clone is not connected; give it a network of its own after -- \
                     (`-netdev tap,id={id},ifname=tap-{{n}},...`; {{n}} is the clone's number)"
                ));
                if !is_nic && offers_offloads(&keys) {
                    return vec![isolated_netdev(id, tap_queues(&keys))];
                }
                // The numbers are above those of the user's hubs.
                self.hubs += 1;
                let hub = 1_000_000 + self.hubs;
                if is_nic {
                    return vec![nic_on_hub(&keys, hub)];
                }
                vec![option("netdev", format!("hubport,id={},hubid={hub}", escape(id)))]
            }
        }
    }

    fn device(&mut self, argument: &Argument) -> Result<Argument> {
        let keys = properties(argument.value(), "driver").unwrap_or_default();
        if value_of(&keys, "driver") != Some("vmgenid") {
            return Ok(argument.clone());
        }
        if self.clone.exact {
            return match value_of(&keys, "guid") {
                Some(guid) if guid != "auto" => Ok(argument.clone()),
                _ => Err(CommandLineError::Argument {
                    argument: argument.display(),
                    reason: "QEMU chose this id itself, so no clone can have the same".into(),
                    fix: "remove --exact, or start the VM with an id: `-device \
                          vmgenid,guid=$(uuidgen)`"
                        .into(),
                }),
            };
        }
        let id = value_of(&keys, "id").map_or_else(String::new, |id| format!(",id={}", escape(id)));
        Ok(option("device", format!("vmgenid,guid=auto{id}")))
    }

    fn is_given(&self, names: &[&str], id: &str) -> bool {
        self.added.iter().filter(|a| names.contains(&a.name())).any(|a| {
            let keys = properties(a.value(), "type").unwrap_or_default();
            value_of(&keys, "id") == Some(id)
        })
    }

    fn note_randomness(&mut self, kept: &[Argument]) {
        let drivers: Vec<_> =
            devices(kept).filter_map(|keys| value_of(&keys, "driver").map(str::to_owned)).collect();
        let has = |prefix: &str| drivers.iter().any(|driver| driver.starts_with(prefix));
        if !self.clone.exact && !has("vmgenid") {
            let rng = if has("virtio-rng") {
                "it gets fresh randomness only at its next read from virtio-rng"
            } else {
                "its random numbers begin with the same values in all clones"
            };
            self.notes.push(format!(
                "the guest is not told that it is a clone: {rng} (a VM started with `-device \
                 vmgenid` is told)"
            ));
        }
        if drivers
            .iter()
            .any(|d| d.contains("-net") || d.starts_with("e1000") || d.starts_with("rtl"))
        {
            self.notes.push(
                "MAC and IP addresses, host name and machine id are the checkpoint's in all \
                 clones; clones on one network must get others inside the guest"
                    .into(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn made(kept: &str, added: &str, exact: bool) -> (String, String) {
        let added = if added.is_empty() { Vec::new() } else { words(added) };
        let options = CloneOptions { directory: Path::new("/r/c,1"), exact };
        let made = clone_line(&words(kept), &added, options).unwrap();
        (made.words.join(" "), made.notes.join("\n"))
    }

    #[test]
    fn a_line_without_another_user_keeps_its_machine() {
        let line =
            "q -m 1G -runas nobody -chroot /var/empty -run-with user=a,chroot=/b -device edu";
        assert_eq!(without_other_user(&words(line)).unwrap().join(" "), "q -m 1G -device edu");
    }

    #[test]
    fn character_devices_are_named_by_what_uses_them() {
        let line = words(
            "q -serial stdio -chardev socket,id=a,path=/a -chardev socket,id=m,path=/m -mon chardev=m \
             -device virtserialport,chardev=a,name=org.qemu.guest_agent.0 -chardev null,id=n \
             -chardev pty,id=s -serial chardev:s",
        );
        let purpose = |label| console_purpose(&line, label).unwrap();
        assert_eq!(purpose("serial0").as_deref(), Some("serial"));
        assert_eq!(purpose("s").as_deref(), Some("serial"));
        assert_eq!(purpose("a").as_deref(), Some("agent"));
        for label in ["m", "n", "compat_monitor0", "keyframe-qmp"] {
            assert_eq!(purpose(label), None, "{label}");
        }
    }

    const CONSOLE: &str =
        "path=/r/c,,1/console.sock,server=on,wait=off,logfile=/r/c,,1/console.log,logappend=on";

    #[test]
    fn consoles_move_into_the_clones_directory_and_monitors_are_removed() {
        let (line, _) =
            made("q -m 1G -serial stdio -monitor none -qmp unix:/q,server=on -s", "", false);
        assert_eq!(
            line,
            format!(
                "q -m 1G -chardev socket,id=keyframe-serial-0,{CONSOLE} -serial chardev:keyframe-serial-0"
            )
        );
        let (line, _) = made(
            "q -chardev stdio,id=a -serial chardev:a -chardev socket,id=m,fd=3 -mon m",
            "",
            false,
        );
        assert_eq!(line, format!("q -chardev socket,id=a,{CONSOLE} -serial chardev:a"));
        let (line, _) = made("q -nographic", "", false);
        assert!(line.starts_with("q -display none -monitor none -chardev socket"), "{line}");
        assert!(line.ends_with("-parallel null"), "{line}");
        let (line, _) = made("q -nographic -parallel none", "", false);
        assert!(line.contains("-parallel none") && !line.contains("-parallel null"), "{line}");
        assert!(!made("q -nographic -nodefaults", "", false).0.contains("serial"));
        let (line, _) =
            made("q -chardev file,id=a,path=/x -serial chardev:a", "-chardev null,id=a", false);
        assert_eq!(line, "q -serial chardev:a");
    }

    #[test]
    fn consoles_are_named_by_what_they_are() {
        let kept = "q -serial stdio -chardev socket,id=ga,path=/g,server=on -device \
                    virtserialport,chardev=ga,name=org.qemu.guest_agent.0 -chardev null,id=x \
                    -chardev file,id=s,path=/f -device isa-serial,chardev=s -chardev pipe,id=o,path=/p \
                    -device virtserialport,chardev=o,name=a/b";
        let options = CloneOptions { directory: Path::new("/c"), exact: true };
        let made = clone_line(&words(kept), &[], options).unwrap();
        let names: Vec<_> = made.consoles.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, ["serial", "agent", "serial-2", "a_b"]);
        assert_eq!(made.consoles[1].socket, Path::new("/c/console2.sock"));
    }

    #[test]
    fn clones_share_no_network() {
        let (line, notes) = made("q -netdev user,id=n,hostfwd=tcp::1-:2,net=10.0.0.0/8", "", false);
        assert_eq!(line, "q -netdev user,id=n,net=10.0.0.0/8");
        assert!(notes.contains("ports"));
        let (line, notes) =
            made("q -netdev tap,id=n,ifname=t0 -netdev stream,id=o,addr.path=/s", "", false);
        assert_eq!(
            line,
            "q -netdev tap,id=n,fds=/keyframe-tap-1 -netdev hubport,id=o,hubid=1000001"
        );
        let (line, _) = made("q -netdev tap,id=n,vnet_hdr=off", "", false);
        assert_eq!(line, "q -netdev hubport,id=n,hubid=1000001");
        let (line, _) = made("q -nic user,hostfwd=tcp::1-:2,model=e1000", "", false);
        assert_eq!(line, "q -nic user,model=e1000");
        let (line, _) = made("q -nic tap,ifname=t0,model=e1000,mac=52:54:00:00:00:01", "", false);
        assert_eq!(line, "q -nic hubport,hubid=1000001,model=e1000,mac=52:54:00:00:00:01");
        assert!(notes.contains("network n") && notes.contains("network o"));
        let (line, _) = made("q -netdev tap,id=n,ifname=t0", "-netdev tap,id=n,ifname=t1", false);
        assert_eq!(line, "q");
        let options = CloneOptions { directory: Path::new("/"), exact: true };
        let error = clone_line(&words("q -net tap"), &[], options);
        assert!(error.unwrap_err().fix().is_some());
    }

    #[test]
    fn the_generation_id_is_fresh_unless_exact() {
        let kept = "q -device vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87,id=g";
        assert_eq!(made(kept, "", false).0, "q -device vmgenid,guid=auto,id=g");
        assert_eq!(made(kept, "", true).0, kept);
        assert!(made("q -device virtio-rng-pci", "", false).1.contains("not told"));
        assert!(!made(kept, "", false).1.contains("not told"));
        assert!(made("q -device e1000,netdev=n", "", true).1.contains("MAC"));
    }
}
