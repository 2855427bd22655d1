//! The machine on which a measurement was made.

use crate::{Error, Options};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;

/// The machine of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The model of its processor.
    pub processor: String,
    /// The number of logical processors that this process can use.
    pub processors: usize,
    pub ram_bytes: u64,
    /// The kernel's name and release.
    pub kernel: String,
    /// The virtualisation that the machine itself runs under, as far as it is visible.
    pub virtualisation: String,
    /// The file system that holds the recordings.
    pub scratch: String,
    /// The first line of `qemu-system-x86_64 --version`.
    pub qemu: String,
}

impl Machine {
    /// Describes this machine and the QEMU that `options` name.
    pub fn this(options: &Options) -> Result<Self, Error> {
        let uname = rustix::system::uname();
        let cpuinfo = read("/proc/cpuinfo");
        let qemu = match &options.qemu {
            Some(qemu) => qemu.display().to_string(),
            None => "qemu-system-x86_64".into(),
        };
        Ok(Self {
            processor: value_of(&cpuinfo, "model name").unwrap_or("unknown").into(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            ram_bytes: ram_bytes(&read("/proc/meminfo")),
            kernel: format!(
                "{} {}",
                uname.sysname().to_string_lossy(),
                uname.release().to_string_lossy()
            ),
            virtualisation: virtualisation(&cpuinfo),
            scratch: file_system_of(&read("/proc/self/mounts"), &std::env::temp_dir()),
            qemu: first_line_of(&qemu, &["--version"])?,
        })
    }

    /// Returns its rows for a table in Markdown with two columns.
    pub fn rows(&self) -> String {
        let rows = [
            ("processor", self.processor.clone()),
            ("logical processors", self.processors.to_string()),
            ("RAM", format!("{:.1} GiB", self.ram_bytes as f64 / f64::from(1 << 30))),
            ("kernel", self.kernel.clone()),
            ("virtualisation", self.virtualisation.clone()),
            ("file system of the recordings", self.scratch.clone()),
            ("QEMU", self.qemu.clone()),
        ];
        rows.map(|(name, value)| format!("| {name} | {value} |\n")).concat()
    }
}

/// Returns the first line that `program` prints.
pub fn first_line_of(program: &str, arguments: &[&str]) -> Result<String, Error> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .map_err(Error::io(format!("run {program} {}", arguments.join(" "))))?;
    if !output.status.success() {
        let problem = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::failed(format!("run {program} {}", arguments.join(" ")), problem));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Returns the value of the first line `name : value`.
fn value_of<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
}

fn ram_bytes(meminfo: &str) -> u64 {
    let kib = value_of(meminfo, "MemTotal").and_then(|text| text.strip_suffix("kB"));
    kib.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn virtualisation(cpuinfo: &str) -> String {
    let is_guest = value_of(cpuinfo, "flags")
        .is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"));
    let kvm = if Path::new("/dev/kvm").exists() { "/dev/kvm is there" } else { "no /dev/kvm" };
    let name = match first_line_of("systemd-detect-virt", &[]) {
        Ok(name) if name != "none" => name,
        _ if is_guest => "a hypervisor, by the processor's flags".into(),
        _ => "none visible".into(),
    };
    format!("{name}; {kvm}")
}

/// Returns the type of the file system that holds `path`, by the longest mount point above it.
fn file_system_of(mounts: &str, path: &Path) -> String {
    let mounted = mounts.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        Some((words.next()?, words.next()?))
    });
    let above = mounted.filter(|(point, _)| path.starts_with(point));
    above.max_by_key(|(point, _)| point.len()).map_or("unknown", |(_, kind)| kind).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_read_from_what_the_kernel_shows() {
        assert_eq!(
            value_of("vendor_id\t: A\nmodel name\t: AMD EPYC\n", "model name"),
            Some("AMD EPYC")
        );
        assert_eq!(ram_bytes("MemTotal:       16384 kB\nMemFree: 1 kB\n"), 16_384 * 1024);
        assert_eq!(ram_bytes(""), 0);
        let mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n";
        assert_eq!(file_system_of(mounts, Path::new("/tmp/a")), "tmpfs");
        assert_eq!(file_system_of(mounts, Path::new("/home")), "ext4");
        assert_eq!(file_system_of("", Path::new("/home")), "unknown");
    }
}
