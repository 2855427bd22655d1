//! Configuration files of QEMU (`-readconfig`), as the options that they stand for.
//!
//! ```text
//!   [object "ram0"]
//!     qom-type = "memory-backend-memfd"     ──▶   -object memory-backend-memfd,id=ram0,size=128M
//!     size = "128M"
//! ```
//!
//! A file with a secret stays a file, because every user of the host can read a command line.
//!
//! A line without such files shows all disks, memory and devices. It also makes the same machine
//! after the file was changed.

use crate::options::{Argument, escape};

/// The groups whose option has another name.
const OTHER_NAMES: &[(&str, &str)] =
    &[("memory", "m"), ("smp-opts", "smp"), ("boot-opts", "boot"), ("acpi", "acpitable")];

/// The groups whose option has the same name.
const GROUPS: &[&str] = &[
    "accel",
    "audiodev",
    "chardev",
    "device",
    "drive",
    "fsdev",
    "fw_cfg",
    "global",
    "icount",
    "machine",
    "mon",
    "name",
    "netdev",
    "nic",
    "numa",
    "object",
    "option-rom",
    "overcommit",
    "rtc",
    "sandbox",
    "smbios",
    "spice",
    "tpmdev",
    "vnc",
];

/// The keys that come first in an option, without their name.
const FIRST: &[(&str, &str)] = &[
    ("object", "qom-type"),
    ("device", "driver"),
    ("chardev", "backend"),
    ("netdev", "type"),
    ("audiodev", "driver"),
    ("tpmdev", "type"),
    ("fsdev", "fsdriver"),
    ("machine", "type"),
];

/// Returns the options that the configuration file with this text stands for; `None` if it has a
/// line or a group that is not known here, or a secret.
pub fn config_options(text: &str) -> Option<Vec<Argument>> {
    let mut groups: Vec<Group> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(head) = line.strip_prefix('[') {
            groups.push(Group::of(head.strip_suffix(']')?.trim())?);
        } else {
            let (key, value) = line.split_once('=')?;
            let value = value.trim().strip_prefix('"')?.strip_suffix('"')?;
            groups.last_mut()?.keys.push((key.trim().into(), value.into()));
        }
    }
    if groups.iter().any(Group::has_secret) {
        return None;
    }
    Some(groups.into_iter().map(Group::into_argument).collect())
}

struct Group {
    option: String,
    keys: Vec<(String, String)>,
}

impl Group {
    /// The group with `head` between its brackets: `NAME` or `NAME "ID"`.
    fn of(head: &str) -> Option<Self> {
        let (name, id) = match head.split_once(char::is_whitespace) {
            Some((name, id)) => (name, Some(id.trim().strip_prefix('"')?.strip_suffix('"')?)),
            None => (head, None),
        };
        let other = OTHER_NAMES.iter().find(|(group, _)| *group == name);
        let option = match other {
            Some((_, option)) => option,
            None => *GROUPS.iter().find(|group| **group == name)?,
        };
        let keys = id.map(|id| ("id".to_owned(), id.to_owned())).into_iter().collect();
        Some(Self { option: option.into(), keys })
    }

    fn has_secret(&self) -> bool {
        self.keys.iter().any(|(key, value)| {
            key.contains("password") || (key == "qom-type" && value.starts_with("secret"))
        })
    }

    fn into_argument(self) -> Argument {
        let first = FIRST.iter().find(|(option, _)| *option == self.option).map(|(_, key)| *key);
        let is_first = |key: &str| first == Some(key);
        let heads = self.keys.iter().filter(|(key, _)| is_first(key));
        let mut words: Vec<String> = heads.map(|(_, value)| escape(value)).collect();
        let others = self.keys.iter().filter(|(key, _)| !is_first(key));
        words.extend(others.map(|(key, value)| format!("{key}={}", escape(value))));
        Argument::Option(self.option, words.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Option<String> {
        let options = config_options(text)?;
        Some(options.iter().map(Argument::display).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn groups_become_their_options() {
        let text = "# qemu config file\n\n[memory]\n  size = \"128M\"\n[object \"ram0\"]\n  \
                    qom-type = \"memory-backend-memfd\"\n  size = \"128M\"\n[machine]\n  type = \
                    \"q35\"\n  memory-backend = \"ram0\"\n[device \"rng0\"]\n  driver = \
                    \"virtio-rng-pci\"\n[drive]\n  file = \"/d,e.raw\"\n  format = \"raw\"\n";
        let line = "-m size=128M -object memory-backend-memfd,id=ram0,size=128M -machine \
                    q35,memory-backend=ram0 -device virtio-rng-pci,id=rng0 -drive \
                    file=/d,,e.raw,format=raw";
        assert_eq!(words(text).as_deref(), Some(line));
        assert_eq!(words("").as_deref(), Some(""));
        assert_eq!(
            words("[global]\n driver = \"a\"\n property = \"b\"\n value = \"\"").as_deref(),
            Some("-global driver=a,property=b,value=")
        );
    }

    #[test]
    fn what_is_not_known_is_left_to_qemu() {
        for text in [
            "[object \"s\"]\nqom-type = \"secret\"\ndata = \"x\"",
            "[plugin]\n",
            "a = \"b\"",
            "[device \"x]\n",
            "[device]\n driver = rng",
            "[device]\ndriver",
        ] {
            assert_eq!(words(text), None, "{text}");
        }
    }
}
