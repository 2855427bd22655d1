//! Reads the RAM and the vCPUs from a QEMU command line, and replaces its vCPUs.
//!
//! | in the line | means |
//! |---|---|
//! | `-m 512`, `-m size=1G,...`; nothing | main RAM of this size; 128 MiB |
//! | `-object memory-backend-*,size=S` | RAM of this size |
//! | `-machine memory-backend=ID`, `-numa node,memdev=ID` | backends are the main RAM, `-m` is their sum |
//! | `-smp 4`, `-smp cpus=4`, `-smp sockets=2,cores=2` | vCPUs |
//!
//! The sizes are not trusted: [`super::ram_discovery`] looks for mappings of these sizes in the
//! process.

use std::ffi::OsString;

/// RAM of a VM without `-m`.
const DEFAULT_RAM_BYTES: u64 = 128 << 20;

/// The RAM and the virtual CPUs that QEMU's command line names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatedResources {
    /// The size of each block of guest RAM, in bytes.
    pub ram_bytes: Vec<u64>,
    /// The number of virtual CPUs, if it can be read.
    pub vcpus: Option<u32>,
}

/// Reads the RAM and the virtual CPUs from QEMU's command line. `words` are its words after the
/// binary's name. The error is the part of the line that cannot be read.
pub fn read(words: &[String]) -> Result<StatedResources, String> {
    let (mut main_bytes, mut backends, mut is_main_a_backend) =
        (DEFAULT_RAM_BYTES, Vec::new(), false);
    let mut vcpus = Some(1);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let name = word.strip_prefix('-').map(|rest| rest.strip_prefix('-').unwrap_or(rest));
        let Some(name @ ("m" | "object" | "machine" | "M" | "numa" | "smp")) = name else {
            continue;
        };
        let Some(value) = words.next() else { continue };
        let keys = keys(value);
        let unread = || format!("-{name} {value}");
        match name {
            "m" => {
                if let Some(text) = get(&keys, "size").or_else(|| first(&keys)) {
                    main_bytes = size(text, 1 << 20).ok_or_else(unread)?;
                }
            }
            "object" => {
                let kind = get(&keys, "qom-type").or_else(|| first(&keys)).unwrap_or_default();
                if kind.starts_with("memory-backend-") {
                    backends.push(get(&keys, "size").and_then(|s| size(s, 1)).ok_or_else(unread)?);
                }
            }
            "smp" => vcpus = smp(&keys),
            _ => {
                is_main_a_backend |=
                    get(&keys, "memory-backend").or(get(&keys, "memdev")).is_some();
            }
        }
    }
    if !is_main_a_backend {
        backends.push(main_bytes);
    }
    Ok(StatedResources { ram_bytes: backends, vcpus })
}

/// Returns QEMU's command line `command` with `-smp` replaced by `count` virtual CPUs, without a
/// topology.
pub fn with_vcpus(command: &[OsString], count: u32) -> Vec<OsString> {
    let mut line = Vec::with_capacity(command.len() + 2);
    let mut words = command.iter();
    while let Some(word) = words.next() {
        if word == "-smp" || word == "--smp" {
            let _topology = words.next();
        } else {
            line.push(word.clone());
        }
    }
    line.extend(["-smp".into(), count.to_string().into()]);
    line
}

/// Splits `a=b,c` into pairs of key and value; a part without `=` has an empty key. Splits a JSON
/// object in the same way, without its nested values.
fn keys(value: &str) -> Vec<(String, String)> {
    if value.trim_start().starts_with('{') {
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(value).unwrap_or_default();
        let text = |v: serde_json::Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
        return object.into_iter().map(|(k, v)| (k, text(v))).collect();
    }
    // A doubled comma belongs to the value. None of the keys read here has one in its value.
    let parts = value.replace(",,", "\u{1}");
    parts
        .split(',')
        .map(|part| part.split_once('=').unwrap_or(("", part)))
        .map(|(k, v)| (k.to_owned(), v.to_owned()))
        .collect()
}

fn get<'a>(keys: &'a [(String, String)], key: &str) -> Option<&'a str> {
    keys.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
}

/// Returns the first part, if it has no key.
fn first(keys: &[(String, String)]) -> Option<&str> {
    keys.first().filter(|(k, v)| k.is_empty() && !v.is_empty()).map(|(_, v)| v.as_str())
}

/// Reads a size in bytes: a number, maybe with a fraction, and a letter. A number without a letter
/// is in units of `unit_bytes`.
fn size(text: &str, unit_bytes: u64) -> Option<u64> {
    let text = text.trim();
    let letter = text.chars().next_back()?.to_ascii_uppercase();
    let unit_bytes = match letter {
        'B' => 1,
        'K' => 1 << 10,
        'M' => 1 << 20,
        'G' => 1 << 30,
        'T' => 1 << 40,
        '0'..='9' => unit_bytes,
        _ => return None,
    };
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let bytes = match (number.parse::<u64>(), number.strip_prefix("0x")) {
        (Ok(whole), _) => whole.checked_mul(unit_bytes)?,
        (_, Some(hex)) => u64::from_str_radix(hex, 16).ok()?.checked_mul(unit_bytes)?,
        _ => {
            let fraction = number.parse::<f64>().ok().filter(|_| number.contains('.'))?;
            (fraction * unit_bytes as f64) as u64
        }
    };
    (bytes > 0).then_some(bytes)
}

fn smp(keys: &[(String, String)]) -> Option<u32> {
    if let Some(cpus) = get(keys, "cpus").or_else(|| first(keys)) {
        return cpus.parse().ok();
    }
    let parts = ["drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads"];
    parts.iter().try_fold(1u32, |all, part| {
        all.checked_mul(get(keys, part).map_or(Ok(1), str::parse).ok()?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str) -> Result<StatedResources, String> {
        read(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn sizes_of_ram_are_read_in_each_form() {
        let ram = |line: &str| said(line).unwrap().ram_bytes;
        assert_eq!(ram("-S"), [128 * MIB]);
        assert_eq!(ram("-m 512"), [512 * MIB]);
        assert_eq!(ram("-m 1.5G -nographic"), [1536 * MIB]);
        assert_eq!(ram("--m slots=2,size=64M,maxmem=4G"), [64 * MIB]);
        assert_eq!(
            ram("-object memory-backend-ram,id=a,size=1G -m 1G -machine pc,memory-backend=a"),
            [1 << 30]
        );
        let numa = "-m 96 -object memory-backend-memfd,id=a,size=32M -object {\"qom-type\":\"memory-backend-ram\",\"id\":\"b\",\"size\":67108864} -numa node,memdev=a -numa node,memdev=b";
        assert_eq!(ram(numa), [32 * MIB, 64 * MIB]);
        assert_eq!(
            ram("-m 32 -object memory-backend-ram,id=d,size=64M -device pc-dimm,memdev=d"),
            [64 * MIB, 32 * MIB]
        );
        assert_eq!(ram("-m 64 -object iothread,id=x -name a,,m=1"), [64 * MIB]);
        for line in [
            "-m lots",
            "-m -1",
            "-m 99999999999999999999G",
            "-object memory-backend-ram,id=a",
            "-m 0",
        ] {
            assert!(said(line).is_err(), "{line}");
        }
    }

    #[test]
    fn vcpus_are_read_in_each_form() {
        let vcpus = |line: &str| said(line).unwrap().vcpus;
        assert_eq!(vcpus("-S"), Some(1));
        assert_eq!(vcpus("-smp 4,maxcpus=8"), Some(4));
        assert_eq!(vcpus("-smp cpus=2"), Some(2));
        assert_eq!(vcpus("-smp sockets=2,cores=3"), Some(6));
        assert_eq!(vcpus("-smp many"), None);
    }

    #[test]
    fn vcpus_are_replaced_with_their_topology() {
        let line: Vec<OsString> =
            ["qemu", "-smp", "4,sockets=4", "-S", "--smp", "2"].map(OsString::from).into();
        assert_eq!(with_vcpus(&line, 8), ["qemu", "-S", "-smp", "8"]);
        assert_eq!(with_vcpus(&line[..1], 1), ["qemu", "-smp", "1"]);
    }
}
