//! Makes another process open a file anew, under the same number, so that the kernel decides anew
//! what it reports of the accesses ([`crate::access_gate`]).
//!
//! ```text
//!   main thread of the process, stopped:
//!     openat("/proc") ─▶ openat("self/fd") ─▶ openat("N", the same flags) ─▶ lseek to the same offset ─▶ dup3 onto N
//! ```
//!
//! A process without `/proc`, as one in a jail, opens the path of the file instead. The new file must be
//! the former one.
//!
//! The names are written below the used part of the thread's stack ([`crate::attach`]). The new file
//! has the offset of the former one before it takes its number. So the process reads and writes where
//! it would have, at any instant at which it was stopped. If this process is killed meanwhile, the
//! other one keeps descriptors that it does not use.
//!
//! Only the main thread may use the file.

use crate::attach::{Filter, Hijack, in_session_with};
use crate::{Error, Process, Result, write_memory};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The longest path that is opened, with the byte that ends it.
const NAME_BYTES_MAX: usize = 4096;
/// The directory of the process, as the first argument of `openat`.
const HERE: u64 = (libc::AT_FDCWD as i64).cast_unsigned();

/// The flags of an open file that are those of its opening.
const KEPT_FLAGS: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_DIRECT
    | libc::O_DSYNC
    | libc::O_LARGEFILE
    | libc::O_NOATIME
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_CLOEXEC;

/// Makes the main thread of `process` open each of `files` anew, under its number. Each is given by its
/// number and by its path, as the process names it. The seccomp filter of the process is suspended
/// meanwhile.
///
/// Errors: those of [`crate::attach::inject_userfaultfd_unfiltered`]; the process cannot open the
/// file, or its path leads to another one. The process has the former file then.
pub fn reopen_files(process: &Process, files: &[(u32, &Path)]) -> Result<()> {
    in_session_with(process, Filter::MustSuspend, |hijack| {
        let mut opened = Vec::new();
        let done = reopen(process, hijack, files, &mut opened);
        let closed = opened.into_iter().try_for_each(|descriptor| close(hijack, descriptor));
        done.and(closed)
    })
}

fn reopen(
    process: &Process,
    hijack: &mut Hijack<'_>,
    files: &[(u32, &Path)],
    opened: &mut Vec<u64>,
) -> Result<()> {
    let descriptors = own_descriptors(process, hijack, opened)?;
    for (file, path) in files {
        let (offset, flags) = state_of(process, *file)?;
        let name = file.to_string();
        let (at, name) = match descriptors {
            Some(descriptors) => (descriptors, name.as_bytes()),
            None => (HERE, path.as_os_str().as_bytes()),
        };
        let new = open_at(process, hijack, at, name, flags & KEPT_FLAGS)?;
        let replaced = require_same(process, new, *file).and_then(|()| {
            let whence = libc::SEEK_SET as u64;
            hijack.call_with("lseek", libc::SYS_lseek, [new, offset, whence, 0, 0])?;
            let close_on_exec = (flags & libc::O_CLOEXEC) as u64;
            let arguments = [new, u64::from(*file), close_on_exec, 0, 0];
            hijack.call_with("dup3", libc::SYS_dup3, arguments)
        });
        close(hijack, new)?;
        replaced?;
    }
    Ok(())
}

/// Makes the process open the directory of its own descriptors. Returns it; `None` if it finds none.
fn own_descriptors(
    process: &Process,
    hijack: &mut Hijack<'_>,
    opened: &mut Vec<u64>,
) -> Result<Option<u64>> {
    let directory = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let mut at = HERE;
    for name in [&b"/proc"[..], b"self/fd"] {
        at = match open_at(process, hijack, at, name, directory) {
            Err(Error::Injected { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            found => found?,
        };
        opened.push(at);
    }
    Ok(Some(at))
}

/// Checks that two descriptors of the process are of one file. Error: they are not.
fn require_same(process: &Process, new: u64, former: u32) -> Result<()> {
    let pid = process.pid();
    let identity = |descriptor: u64| {
        let file = format!("fd/{descriptor}");
        std::fs::metadata(format!("/proc/{pid}/{file}"))
            .map(|found| (found.dev(), found.ino()))
            .map_err(|source| Error::ProcFile { pid, file, operation: "look at", source })
    };
    if identity(new)? == identity(u64::from(former))? {
        return Ok(());
    }
    let source = io::Error::other("its path leads to another file now");
    Err(Error::Attach { pid, operation: "open a file anew", source })
}

/// Opens `name` below `directory`. Returns the descriptor.
fn open_at(
    process: &Process,
    hijack: &mut Hijack<'_>,
    directory: u64,
    name: &[u8],
    flags: i32,
) -> Result<u64> {
    if name.len() >= NAME_BYTES_MAX || name.contains(&0) {
        return Err(Error::Attach {
            pid: process.pid(),
            operation: "open a file anew",
            source: io::ErrorKind::InvalidFilename.into(),
        });
    }
    let at = hijack.free_bytes(name.len() + 1);
    write_memory(process, at, &[name, &[0]].concat())?;
    hijack.call_with("openat", libc::SYS_openat, [directory, at.0, flags as u64, 0, 0])
}

fn close(hijack: &mut Hijack<'_>, descriptor: u64) -> Result<()> {
    hijack.call_with("close", libc::SYS_close, [descriptor, 0, 0, 0, 0]).map(drop)
}

/// Returns offset and flags of an open file of the stopped process.
fn state_of(process: &Process, file: u32) -> Result<(u64, i32)> {
    let pid = process.pid();
    let name = format!("fdinfo/{file}");
    let failed = |source| Error::ProcFile { pid, file: name.clone(), operation: "read", source };
    let text = std::fs::read_to_string(format!("/proc/{pid}/{name}")).map_err(failed)?;
    let value = |key| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let offset = value("pos:").and_then(|text| text.parse().ok());
    let flags = value("flags:").and_then(|text| i32::from_str_radix(text, 8).ok());
    offset.zip(flags).ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access_gate::AccessGate;
    use std::io::{Read, Write};
    use std::os::unix::fs::FileExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// A program that writes a byte to a file for each byte that it gets.
    #[test]
    fn a_file_that_was_open_before_is_held_after_it_was_opened_anew() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        let gate = match AccessGate::over(&[file.reopen().unwrap()]) {
            Ok(gate) => gate,
            Err(error) => keyframe_testing::skip!("{error}"),
        };
        drop(gate);
        let mut child = Command::new("dd")
            .args(["bs=1", "count=4", "conv=notrunc", "status=none"])
            .arg(format!("of={}", file.path().display()))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut bytes = child.stdin.take().unwrap();
        let has = |wanted: &[u8]| {
            let until = Instant::now() + Duration::from_secs(20);
            loop {
                let mut now = Vec::new();
                file.reopen().unwrap().read_to_end(&mut now).unwrap();
                if now == wanted {
                    return;
                }
                assert!(Instant::now() < until, "{now:?}");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        bytes.write_all(b"a").unwrap();
        has(b"a");
        let gate = AccessGate::over(&[file.reopen().unwrap()]).unwrap();
        let process = Process::open(child.id()).unwrap();
        // dd has its output as file 1.
        reopen_files(&process, &[(1, file.path())]).unwrap();
        bytes.write_all(b"b").unwrap();
        let mut accesses = Vec::new();
        while accesses.is_empty() {
            accesses = gate.next().unwrap();
        }
        let mut old = [0; 2];
        assert_eq!(gate.reader(0).unwrap().read_at(&mut old, 0).unwrap(), 1);
        drop(accesses);
        drop(gate);
        // It goes on where it was.
        bytes.write_all(b"cd").unwrap();
        has(b"abcd");
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn a_number_that_is_not_open_is_refused_and_the_process_goes_on() {
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(reopen_files(&process, &[(77, Path::new("/nowhere"))]).is_err());
        child.stdin.take().unwrap().write_all(b"on").unwrap();
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "on");
        child.wait().unwrap();
    }
}
