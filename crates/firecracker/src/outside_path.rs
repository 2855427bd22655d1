//! The paths by which this process may reach a file that another process names in its own root and
//! mount namespace (`jailer`).
//!
//! ```text
//!   a root directory alone:   /proc/PID/root ─▶ /srv/jail    /disk.img ─▶ /srv/jail/disk.img
//!   another mount namespace:  there /      is device 8:1, /srv/jail
//!                             here  /srv   is device 8:1, /srv    /disk.img ─▶ /srv/jail/disk.img
//! ```
//!
//! A mount may be hidden by another one, so the caller checks that a path leads to the file.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The longest table of mounts that is read, in bytes.
const TABLE_BYTES_MAX: usize = 16 << 20;

/// A mount: the directory `root` of the file system on `device`, at `at`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    device: Vec<u8>,
    root: PathBuf,
    at: PathBuf,
}

/// Returns the paths here of what process `pid` names `path`, an absolute path. Some may lead to other
/// files, or to none.
pub(crate) fn candidates(pid: u32, path: &Path) -> Vec<PathBuf> {
    let below = path.strip_prefix("/").unwrap_or(path);
    let root = std::fs::read_link(format!("/proc/{pid}/root")).into_iter();
    let mut found: Vec<PathBuf> = root.map(|root| root.join(below)).collect();
    let table = |whose: &str| std::fs::read(format!("/proc/{whose}/mountinfo")).unwrap_or_default();
    found.extend(by_mounts(&mounts(&table(&pid.to_string())), &mounts(&table("self")), path));
    found
}

fn by_mounts(theirs: &[Mount], ours: &[Mount], path: &Path) -> Vec<PathBuf> {
    // Of mounts at the same place the last one is seen.
    let seen = theirs.iter().filter(|mount| path.starts_with(&mount.at));
    let Some(mount) = seen.max_by_key(|mount| mount.at.components().count()) else {
        return Vec::new();
    };
    let Ok(below) = path.strip_prefix(&mount.at) else { return Vec::new() };
    let in_file_system = mount.root.join(below);
    let same = ours.iter().filter(|ours| ours.device == mount.device);
    same.filter_map(|ours| Some(ours.at.join(in_file_system.strip_prefix(&ours.root).ok()?)))
        .collect()
}

/// Reads a table as of `/proc/PID/mountinfo`. Lines of another form are left out.
fn mounts(table: &[u8]) -> Vec<Mount> {
    let table = table.get(..TABLE_BYTES_MAX.min(table.len())).unwrap_or_default();
    let mount = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let device = fields.next()?.to_vec();
        Some(Mount { device, root: unescaped(fields.next()?), at: unescaped(fields.next()?) })
    };
    table.split(|byte| *byte == b'\n').filter_map(mount).collect()
}

/// Returns a path in which blanks and backslashes are written as `\040`.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let digits = (*first == b'\\').then(|| after.first_chunk::<3>()).flatten();
        let byte = digits.and_then(|digits| {
            let text = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(text, 8).ok()
        });
        path.push(byte.unwrap_or(*first));
        rest = after.get(if byte.is_some() { 3 } else { 0 }..).unwrap_or_default();
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: &str = "22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 8:2 / /srv/my\\040disks rw - xfs /dev/sdb rw
31 22 8:2 /images /images rw - xfs /dev/sdb rw
malformed";

    fn found(theirs: &str, path: &str) -> Vec<String> {
        let (theirs, ours) = (mounts(theirs.as_bytes()), mounts(HERE.as_bytes()));
        let found = by_mounts(&theirs, &ours, Path::new(path));
        found.iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn a_path_of_another_namespace_has_one_here_for_each_mount_of_the_file_system() {
        let jail = "90 1 8:1 /srv/jail/vm/root / rw - ext4 /dev/sda1 rw
91 90 8:2 /images/a.img /disk.img rw - xfs /dev/sdb rw
92 90 0:99 / /run rw - tmpfs none rw";
        assert_eq!(found(jail, "/rootfs.ext4"), ["/srv/jail/vm/root/rootfs.ext4"]);
        assert_eq!(found(jail, "/disk.img"), ["/srv/my disks/images/a.img", "/images/a.img"]);
        assert_eq!(found(jail, "/run/d.img"), [""; 0], "a file system that is not mounted here");
        assert_eq!(found("", "/disk.img"), [""; 0]);
    }

    #[test]
    fn escapes_are_read_and_others_stay() {
        assert_eq!(unescaped(b"/a\\040b\\134"), Path::new("/a b\\"));
        assert_eq!(unescaped(b"/a\\9\\"), Path::new("/a\\9\\"));
    }
}
