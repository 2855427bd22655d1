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
//! | another `-netdev` | an empty hub: the guest's link is up, and no packet arrives |
//! | `-nic`, `-net` | refused: they make device and network together |
//! | `-device vmgenid` | a fresh id, unless an exact copy is wanted |
//!
//! The sockets and log files are in the clone's directory.
//!
//! Words that the user adds win: a `-netdev` or `-chardev` of the same id replaces the kept one.
//!
//! Not changed: MAC addresses, because a running guest keeps the address that its driver has read,
//! and would not receive packets for another one (separate networks keep clones apart); disks,
//! because each clone has a disk server of its own.

use crate::options::{self, Argument, devices, escape, properties, value_of};
use crate::{CommandLineError, Result};
use std::path::Path;

/// The options of a clone's line.
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
    /// The differences from the kept line that the user should know, a text each.
    pub notes: Vec<String>,
}

/// Makes a clone's line from the kept one (`words`, the binary first), to which the caller will add
/// the words `added`.
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
        consoles: 0,
        hubs: 0,
    };
    let monitors = monitors(&kept);
    let mut out: Vec<String> = words.first().cloned().into_iter().collect();
    for argument in &kept {
        let arguments = maker.argument(argument, &kept, &monitors)?;
        out.extend(arguments.iter().flat_map(Argument::words));
    }
    maker.note_randomness(&kept);
    Ok(CloneLine { words: out, notes: maker.notes })
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
    consoles: usize,
    hubs: usize,
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
        let same = || vec![argument.clone()];
        Ok(match argument.name() {
            "monitor" | "qmp" | "qmp-pretty" | "mon" | "gdb" | "s" => Vec::new(),
            "nographic" => self.nographic(kept),
            "serial" | "parallel" | "debugcon" => self.serial(argument),
            "chardev" => self.chardev(argument, monitors),
            "vnc" | "spice" => self.display(),
            "netdev" => self.netdev(argument),
            "nic" | "net" if argument.value() != "none" => return Err(CommandLineError::Argument {
                argument: argument.display(),
                reason:
                    "it creates device and network together, so clones could not have networks of \
                     their own"
                        .into(),
                fix: "start the VM with `-device virtio-net-pci,netdev=n0 -netdev ...,id=n0` \
                      instead"
                    .into(),
            }),
            "device" => vec![self.device(argument)?],
            _ => same(),
        })
    }

    /// A chardev with this id on a socket in the clone's directory.
    fn console(&mut self, id: &str) -> Argument {
        self.consoles += 1;
        let name =
            if self.consoles == 1 { "console".into() } else { format!("console{}", self.consoles) };
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
            out.push(self.console("keyframe-serial"));
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
        let id = format!("keyframe-{}-{}", argument.name(), self.consoles);
        let console = self.console(&id);
        vec![console, option(argument.name(), format!("chardev:{id}"))]
    }

    fn chardev(&mut self, argument: &Argument, monitors: &[String]) -> Vec<Argument> {
        let keys = properties(argument.value(), "backend").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or_default().to_owned();
        if monitors.contains(&id) || self.is_given(&["chardev"], &id) {
            return Vec::new();
        }
        match value_of(&keys, "backend").unwrap_or_default() {
            "null" | "vc" | "ringbuf" | "memory" | "pty" | "spicevmc" | "spiceport" => {
                vec![argument.clone()]
            }
            _ => vec![self.console(&id)],
        }
    }

    fn display(&mut self) -> Vec<Argument> {
        let path = self.clone.directory.join("vnc.sock");
        vec![option("vnc", format!("unix:{}", escape(&path.to_string_lossy())))]
    }

    fn netdev(&mut self, argument: &Argument) -> Vec<Argument> {
        let keys = properties(argument.value(), "type").unwrap_or_default();
        let id = value_of(&keys, "id").unwrap_or_default();
        if self.is_given(&["netdev"], id) {
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
                vec![option("netdev", words.join(","))]
            }
            Some("hubport") => vec![argument.clone()],
            _ => {
                self.notes.push(format!(
                    "network {id}: a clone is not connected; give it a network of its own after -- \
                     (`-netdev tap,id={id},ifname=tap-{{n}},...`; {{n}} is the clone's number)"
                ));
                // The numbers are above those of the user's hubs.
                self.hubs += 1;
                let hub = 1_000_000 + self.hubs;
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
    fn clones_share_no_network() {
        let (line, notes) = made("q -netdev user,id=n,hostfwd=tcp::1-:2,net=10.0.0.0/8", "", false);
        assert_eq!(line, "q -netdev user,id=n,net=10.0.0.0/8");
        assert!(notes.contains("ports"));
        let (line, notes) =
            made("q -netdev tap,id=n,ifname=t0 -netdev stream,id=o,addr.path=/s", "", false);
        assert_eq!(line, "q -netdev hubport,id=n,hubid=1000001 -netdev hubport,id=o,hubid=1000002");
        assert!(notes.contains("network n") && notes.contains("network o"));
        let (line, _) = made("q -netdev tap,id=n,ifname=t0", "-netdev tap,id=n,ifname=t1", false);
        assert_eq!(line, "q");
        let options = CloneOptions { directory: Path::new("/"), exact: true };
        let error = clone_line(&words("q -nic tap"), &[], options);
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
