//! The ids of the kernel's tracepoints, from tracefs.
//!
//! A mounted tracefs is read where it is. If there is none, the kernel makes one for this process
//! alone, which no directory shows and which ends with its descriptor.

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Where a tracefs is usually mounted.
const MOUNTS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
/// No file of a tracepoint is longer.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// A tracepoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tracepoint {
    /// Its number in `perf_event_open`.
    pub id: u64,
    /// Where its raw record holds the wanted field, in bytes.
    pub field_offset: usize,
}

/// Finds the tracepoint `name`, such as `mmap_lock/mmap_lock_acquire_returned`, and in its records
/// the field `field` of eight bytes. Errors: there is no tracefs, it may not be read, or the kernel
/// has no such tracepoint or field.
pub(super) fn find(name: &str, field: &str) -> io::Result<Tracepoint> {
    let mut refused = io::Error::from(io::ErrorKind::NotFound);
    for mount in MOUNTS {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = match openat(CWD, mount, flags, Mode::empty()) {
            Ok(root) => root,
            Err(error) => {
                refused = error.into();
                continue;
            }
        };
        match read(root.as_fd(), name, field) {
            Ok(found) => return Ok(found),
            // The directory is empty if nothing is mounted on it.
            Err(error) => refused = error,
        }
    }
    match own_tracefs() {
        Ok(root) => read(root.as_fd(), name, field),
        Err(error) if refused.kind() == io::ErrorKind::NotFound => Err(error),
        Err(_) => Err(refused),
    }
}

/// A tracefs that is mounted nowhere.
fn own_tracefs() -> io::Result<OwnedFd> {
    let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    let flags = MountAttrFlags::MOUNT_ATTR_RDONLY;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

fn read(root: BorrowedFd<'_>, name: &str, field: &str) -> io::Result<Tracepoint> {
    let text = |file: &str| -> io::Result<String> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = openat(root, format!("events/{name}/{file}"), flags, Mode::empty())?;
        let mut text = String::new();
        File::from(file).take(FILE_BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    };
    let id = text("id")?.trim().parse().map_err(io::Error::other)?;
    let field_offset = offset_of(&text("format")?, field).ok_or_else(|| {
        io::Error::other(format!("the tracepoint {name} has no field {field} of eight bytes"))
    })?;
    Ok(Tracepoint { id, field_offset })
}

/// Returns the offset of the field `name` of eight bytes, from the `format` of a tracepoint.
fn offset_of(format: &str, name: &str) -> Option<usize> {
    format.lines().find_map(|line| {
        let mut parts = line.trim().split(';').map(str::trim);
        let declared = parts.next()?.strip_prefix("field:")?;
        let word = declared.rsplit([' ', '*']).next()?;
        let offset = parts.next()?.strip_prefix("offset:")?.parse().ok()?;
        (word == name && parts.next()? == "size:8").then_some(offset)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_name_and_size() {
        let format = "name: mmap_lock_acquire_returned\nID: 675\nformat:\n\
            \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
            \tfield:struct mm_struct * mm;\toffset:8;\tsize:8;\tsigned:0;\n\
            \tfield:bool write;\toffset:24;\tsize:1;\tsigned:0;\n";
        assert_eq!(offset_of(format, "mm"), Some(8));
        assert_eq!(offset_of(format, "write"), None, "it has one byte");
        assert_eq!(offset_of(format, "m"), None);
        assert_eq!(offset_of("field:x;offset:99999999999999999999;size:8", "x"), None);
    }
}
