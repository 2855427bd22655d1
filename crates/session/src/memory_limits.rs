//! How much memory this process may still use: what the host has, and what the limits of its memory
//! cgroups leave.
//!
//! ```text
//!   /proc/PID/cgroup, mountinfo ─▶ own memory cgroup and its ancestors
//!      each:  min(max, high) − in use + file cache − what processes in it are going to use
//!   the least of these, and of MemAvailable
//! ```
//!
//! Both versions of cgroups are read. A container whose limits are not visible in its mounts is
//! seen as the host.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// A limit as large as this is none: version 1 writes the largest multiple of a page.
const UNLIMITED_BYTES: u64 = 1 << 60;
/// What is assumed to be available if `/proc/meminfo` cannot be read.
const UNKNOWN_BYTES: u64 = 1 << 30;

/// The memory that a process is going to use.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedGrowth {
    /// The process.
    pub pid: u32,
    /// The number of bytes that it is going to use in addition to the present ones.
    pub bytes: u64,
}

/// The memory that this process may still use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemainingMemory {
    /// The memory in bytes.
    pub bytes: u64,
    /// True if a memory cgroup leaves less than the host has.
    pub is_limited: bool,
}

/// Returns the memory that is left for this process. From a cgroup with a limit it subtracts
/// `growth` of those processes that belong to that cgroup.
pub fn remaining(growth: &[ExpectedGrowth]) -> RemainingMemory {
    let host = available(&read_to_string("/proc/meminfo").unwrap_or_default());
    let own = cgroups_of("self");
    let grown: Vec<(Vec<PathBuf>, u64)> =
        growth.iter().map(|growth| (cgroups_of(&growth.pid.to_string()), growth.bytes)).collect();
    let left = own.iter().filter_map(|folder| {
        let reserved = grown.iter().filter(|(theirs, _)| theirs.contains(folder));
        let reserved: u64 = reserved.map(|(_, bytes)| bytes).sum();
        Some(left_in(folder)?.saturating_sub(reserved))
    });
    match left.min() {
        Some(bytes) if bytes < host => RemainingMemory { bytes, is_limited: true },
        _ => RemainingMemory { bytes: host, is_limited: false },
    }
}

/// Returns the memory that this host leaves for a process in the place of process `pid`, whose RAM this
/// process fills: the least that the host and the limits of both leave.
pub fn remaining_beside(pid: u32) -> u64 {
    let limits = cgroups_of(&pid.to_string());
    let left = limits.iter().filter_map(|folder| left_in(folder));
    left.fold(remaining(&[]).bytes, u64::min)
}

/// Returns the memory that process `pid` has in use, in bytes, with huge pages; zero if it has
/// ended.
pub fn resident_bytes(pid: u32) -> u64 {
    let status = read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    kib_of(&status, "VmRSS:").unwrap_or(0) + kib_of(&status, "HugetlbPages:").unwrap_or(0)
}

/// Makes this process the one that the kernel ends first if memory runs out. Processes that it
/// starts later inherit that. Error: the kernel refuses.
pub fn volunteer_as_victim() -> std::io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000")
}

/// Undoes [`volunteer_as_victim`], as far as the kernel permits: this process has the rank of its parent.
/// Error: the kernel refuses.
pub fn withdraw_as_victim() -> std::io::Result<()> {
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    let rank = read_to_string(format!("/proc/{parent}/oom_score_adj"));
    std::fs::write("/proc/self/oom_score_adj", rank.unwrap_or_else(|_| "0".into()))
}

fn available(meminfo: &str) -> u64 {
    kib_of(meminfo, "MemAvailable:").unwrap_or(UNKNOWN_BYTES)
}

/// The number after `key` in a text with lines such as `VmRSS: 12 kB`, in bytes.
fn kib_of(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The folders of the memory cgroup of process `pid` and of its ancestors.
fn cgroups_of(pid: &str) -> Vec<PathBuf> {
    let read = |name: &str| read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    // The mounts are ours: another process may be in another mount namespace.
    let mounts = read_to_string("/proc/self/mountinfo").unwrap_or_default();
    folders(&read("cgroup"), &mounts)
}

fn folders(cgroup: &str, mountinfo: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let kind = if controllers.is_empty() {
            "cgroup2"
        } else if controllers.split(',').any(|c| c == "memory") {
            "cgroup"
        } else {
            continue;
        };
        for (root, mount) in mountinfo.lines().filter_map(|line| mounted(line, kind)) {
            // The mount may show a part of the tree alone, as in a container.
            let inside = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
            // Without the slash that an empty path leaves at the end.
            let own: PathBuf = Path::new(mount).join(inside).components().collect();
            let within = own.ancestors().take_while(|folder| folder.starts_with(mount));
            folders.extend(within.map(Path::to_path_buf));
        }
    }
    folders
}

/// Root and mount point of a line of mountinfo, if it is a mount of memory cgroups of `kind`.
fn mounted<'a>(line: &'a str, kind: &str) -> Option<(&'a str, &'a str)> {
    let (front, back) = line.split_once(" - ")?;
    let mut back = back.split(' ');
    let (found, options) = (back.next()?, back.nth(1)?);
    let is_memory = kind == "cgroup2" || options.split(',').any(|option| option == "memory");
    let mut front = front.split(' ').skip(3);
    (found == kind && is_memory).then_some((front.next()?, front.next()?))
}

/// What the limits of one cgroup leave, in bytes. `None` if it has none.
fn left_in(folder: &Path) -> Option<u64> {
    let read = |name: &str| read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let limits = ["memory.max", "memory.high", "memory.limit_in_bytes"];
    let limit =
        limits.iter().filter_map(|name| number(name)).filter(|l| *l < UNLIMITED_BYTES).min()?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let stat = read("memory.stat").unwrap_or_default();
    let of = |key: &str| {
        let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(name, _)| *name == key).and_then(|(_, value)| value.trim().parse::<u64>().ok())
    };
    // Version 1 counts descendants under names of their own.
    let cached = |key: &str| of(&format!("total_{key}")).or_else(|| of(key)).unwrap_or(0);
    let reclaimable = cached("inactive_file") + cached("active_file") + cached("slab_reclaimable");
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        folder
    }

    #[test]
    fn a_limit_leaves_what_is_not_in_use_and_what_is_only_cache() {
        let two = cgroup(&[
            ("memory.max", "1000\n"),
            ("memory.high", "max\n"),
            ("memory.current", "700\n"),
            ("memory.stat", "anon 300\nfile 400\ninactive_file 150\nactive_file 50\n"),
        ]);
        assert_eq!(left_in(two.path()), Some(500));
        std::fs::write(two.path().join("memory.high"), "600\n").unwrap();
        assert_eq!(left_in(two.path()), Some(100));
        let one = cgroup(&[
            ("memory.limit_in_bytes", "1000\n"),
            ("memory.usage_in_bytes", "700\n"),
            ("memory.stat", "inactive_file 1\ntotal_inactive_file 150\ntotal_active_file 50\n"),
        ]);
        assert_eq!(left_in(one.path()), Some(500));
        let none = cgroup(&[("memory.max", "max\n"), ("memory.current", "7\n")]);
        assert_eq!(left_in(none.path()), None);
        let none = cgroup(&[
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory.usage_in_bytes", "7\n"),
        ]);
        assert_eq!(left_in(none.path()), None);
        assert_eq!(left_in(Path::new("/nonexistent")), None);
    }

    #[test]
    fn a_cgroup_is_found_with_its_ancestors_in_either_version() {
        let mounts = "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n\
                      31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      32 25 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let paths = |cgroup: &str, mounts: &str| -> Vec<String> {
            folders(cgroup, mounts).iter().map(|p| p.display().to_string()).collect()
        };
        assert_eq!(
            paths("0::/a/b\n", mounts),
            ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]
        );
        assert_eq!(
            paths("4:memory:/a\n3:cpu:/c\n", mounts),
            ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory"]
        );
        let container = "31 25 0:27 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        assert_eq!(
            paths("4:memory:/docker/1/x\n", container),
            ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory"]
        );
        assert_eq!(paths("4:memory:/elsewhere\n", container), ["/sys/fs/cgroup/memory"]);
    }

    #[test]
    fn what_is_left_here_is_some_and_this_process_has_some_in_use() {
        let left = remaining(&[]);
        assert!(left.bytes > 0, "{left:?}");
        let own = std::process::id();
        assert!(resident_bytes(own) > 0);
        let all = ExpectedGrowth { pid: own, bytes: u64::MAX / 4 };
        // Only a cgroup with a limit keeps memory for its processes.
        let rest = remaining(&[all]);
        assert!(rest.bytes == 0 || !rest.is_limited, "{rest:?}");
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:   2 kB\n"), 2048);
        assert_eq!(available(""), UNKNOWN_BYTES);
    }
}
