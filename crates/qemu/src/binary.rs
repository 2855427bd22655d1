//! The QEMU binary: where it is, which version it is, and its hash.

use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a question to a binary may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The most that an answer may have.
const ANSWER_BYTES_MAX: usize = 64 << 10;
const SAYS: &str = "QEMU emulator version ";

/// The identity of a QEMU binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuIdentity {
    /// The binary, with links followed.
    pub path: PathBuf,
    /// The version with the distributor's part: `7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)`.
    pub version: String,
    /// The BLAKE3 hash of the binary, in hexadecimal digits.
    pub blake3: String,
}

impl QemuIdentity {
    /// Asks the binary at `path` for its version, and hashes it. Error: the binary cannot be run,
    /// or does not answer as a QEMU.
    pub fn of(path: &Path) -> Result<Self> {
        let version = version(path)?;
        let real = std::fs::canonicalize(path)
            .map_err(Error::io(format!("resolve the path {}", path.display())))?;
        Self::hashed(&real.clone(), real, version)
    }

    /// Returns the first two numbers of the version; `None` if it does not begin with two numbers.
    pub fn series(&self) -> Option<(u32, u32)> {
        series(&self.version)
    }

    /// Finds the program `name` as a shell does, and identifies it. Errors: there is no such program;
    /// those of [`QemuIdentity::of`].
    pub fn named(name: &str) -> Result<Self> {
        Self::of(&find(name)?)
    }

    /// The same of a binary that is most likely `known`, which then need not be run to tell its
    /// version.
    pub(crate) fn of_known(path: &Path, known: &Self) -> Result<Self> {
        let real = std::fs::canonicalize(path)
            .map_err(Error::io(format!("resolve the path {}", path.display())))?;
        let identity = Self::hashed(&real.clone(), real, known.version.clone())?;
        if identity.blake3 == known.blake3 { Ok(identity) } else { Self::of(path) }
    }

    /// The binary `path` of version `version`, whose contents can be read at `contents`.
    pub(crate) fn hashed(contents: &Path, path: PathBuf, version: String) -> Result<Self> {
        let blake3 = hash_of(contents)
            .map_err(Error::io(format!("read the QEMU binary {}", path.display())))?;
        Ok(Self { path, version, blake3 })
    }
}

/// Returns the BLAKE3 hash of the file at `path`, in hexadecimal digits. Error: the file cannot be
/// read.
pub(crate) fn hash_of(path: &Path) -> std::io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(std::fs::File::open(path)?)?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Finds a program as a shell does: a name with a slash is a path, any other name is looked up in
/// `PATH`.
pub(crate) fn find(name: &str) -> Result<PathBuf> {
    let missing = |reason: &str| Error::Binary {
        path: name.into(),
        reason: reason.into(),
        fix: "install QEMU (Debian: qemu-system-x86), or name the binary by its path".into(),
    };
    if name.is_empty() {
        return Err(missing("the command line is empty"));
    }
    if name.contains('/') {
        let path = PathBuf::from(name);
        return if is_executable(&path) {
            Ok(path)
        } else {
            Err(missing("there is no such program"))
        };
    }
    let places = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&places)
        .map(|dir| dir.join(name))
        .find(|path| is_executable(path))
        .ok_or_else(|| missing("there is no such program in PATH"))
}

/// Returns the first program of `PATH` that has the file name of `path` and the BLAKE3 hash `blake3`
/// (hexadecimal digits); `None` if there is none.
pub(crate) fn find_same(path: &Path, blake3: &str) -> Option<PathBuf> {
    let name = path.file_name()?;
    let places = std::env::var_os("PATH").unwrap_or_default();
    let mut programs = std::env::split_paths(&places).map(|dir| dir.join(name));
    programs.find(|path| is_executable(path) && hash_of(path).is_ok_and(|hash| hash == blake3))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Returns the output of `path --version` after "QEMU emulator version".
pub(crate) fn version(path: &Path) -> Result<String> {
    let text = ask(path, &["--version"])?;
    let line = text.lines().find_map(|line| line.strip_prefix(SAYS));
    line.map(|l| l.trim().to_owned())
        .filter(|v| v.starts_with(|c: char| c.is_ascii_digit()))
        .ok_or_else(|| Error::Binary {
            path: path.into(),
            reason: "it does not answer --version as QEMU's system emulator does".into(),
            fix: "begin the line with qemu-system-x86_64 (7.2 or later)".into(),
        })
}

/// Returns QEMU's own part of `version`, without the distributor's.
pub(crate) fn release(version: &str) -> &str {
    version.split_whitespace().next().unwrap_or_default()
}

/// Returns the first two numbers of `version`; `None` if it does not begin with two numbers.
pub(crate) fn series(version: &str) -> Option<(u32, u32)> {
    let mut numbers = release(version).split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Returns the names of the machine types of the binary at `path`, aliases too. Error: it cannot be
/// run, or does not answer in time.
pub(crate) fn machine_types(path: &Path) -> Result<Vec<String>> {
    let text = ask(path, &["-machine", "help"])?;
    let named = text.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    Ok(named.map(str::to_owned).collect())
}

/// Returns what the binary at `path` prints with the arguments `words`.
fn ask(path: &Path, words: &[&str]) -> Result<String> {
    let operation = || format!("run {} {}", path.display(), words.join(" "));
    let mut child = Command::new(path)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(Error::io(operation()))?;
    let read = match child.stdout.take() {
        Some(mut out) => {
            read_until(&mut out, Instant::now() + ANSWER_TIMEOUT).map_err(Error::io(operation()))
        }
        None => Ok(Vec::new()),
    };
    // Whatever it is, it is not to linger; killing one that has ended does nothing.
    let _ = child.kill();
    child.wait().map_err(Error::io(operation()))?;
    Ok(String::from_utf8_lossy(&read?).into_owned())
}

/// Reads to the end, the deadline, or the cap.
fn read_until(out: &mut std::process::ChildStdout, deadline: Instant) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut chunk = [0u8; 4096];
    while text.len() < ANSWER_BYTES_MAX {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(out, PollFlags::IN)], Some(&limit)) {
            Ok(0) => {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::TimedOut,
                    "it gave no answer in time",
                ));
            }
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
        }
        match out.read(&mut chunk)? {
            0 => break,
            len => text.extend_from_slice(chunk.get(..len).unwrap_or_default()),
        }
    }
    Ok(text)
}
