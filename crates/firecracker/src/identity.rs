//! The binary of Firecracker: where it is, and its hash.

use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};

/// The longest answer of a binary to `--version`.
const ANSWER_BYTES_MAX: u64 = 4096;
/// How long it may take.
const ANSWER_SECONDS_MAX: i64 = 10;

/// The identity of a Firecracker binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The binary.
    pub path: PathBuf,
    /// The version: `1.12.1`.
    pub version: String,
    /// The BLAKE3 hash of the binary, in hexadecimal digits.
    pub blake3: String,
}

impl Identity {
    /// Identifies the binary of the running process `pid`, whose API tells `version`. Error: the
    /// binary cannot be read.
    pub fn of_process(pid: u32, version: &str) -> Result<Self> {
        let link = PathBuf::from(format!("/proc/{pid}/exe"));
        let path = std::fs::read_link(&link)
            .map_err(Error::io(format!("look which program process {pid} runs")))?;
        // The link works also for a binary that was replaced, or is in another root.
        Ok(Self { path, version: version.into(), blake3: hash(&link)? })
    }

    /// Identifies the binary at `path`, and runs it to learn its version. Error: it cannot be run,
    /// or is not Firecracker.
    pub fn of_binary(path: &Path) -> Result<Self> {
        Ok(Self { path: path.into(), version: version(path)?, blake3: hash(path)? })
    }
}

fn hash(path: &Path) -> Result<String> {
    let operation = || format!("read the program {}", path.display());
    let mut hasher = blake3::Hasher::new();
    let file = std::fs::File::open(path).map_err(Error::io(operation()))?;
    hasher.update_reader(file).map_err(Error::io(operation()))?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Waits until a program says something; false if it does not.
fn speaks(stdout: &ChildStdout) -> bool {
    let limit = Timespec { tv_sec: ANSWER_SECONDS_MAX, tv_nsec: 0 };
    poll(&mut [PollFd::new(stdout, PollFlags::IN)], Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// What the binary says about its version.
fn version(path: &Path) -> Result<String> {
    let operation = || format!("ask {} for its version", path.display());
    let mut child = Command::new(path)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(Error::io(operation()))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take().filter(speaks) {
        let _ = BufReader::new(stdout.take(ANSWER_BYTES_MAX)).read_line(&mut line);
    }
    // It has said what was asked for; one that goes on is none of Firecracker.
    let _ = child.kill();
    let _ = child.wait();
    let version = line.trim().strip_prefix("Firecracker v");
    version.map(str::to_owned).ok_or_else(|| Error::CommandLine {
        subject: path.display().to_string(),
        reason: "it does not say that it is Firecracker (--version)".into(),
        fix: "name the binary of Firecracker".into(),
    })
}
