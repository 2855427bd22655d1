//! Whether threads of a Firecracker ran: what the kernel counts for them.
//!
//! Firecracker sends no events. But a thread that was woken has another number of turns and another
//! run time in `/proc/PID/task/TID/schedstat` than before.
//!
//! ```text
//!   paused ─▶ at rest: reading 1 ── they sleep on ──────────────▶ reading 2 = reading 1
//!                                └─ a client resumes the VM ────▶ reading 2 differs
//! ```
//!
//! Saving the devices wakes the threads, too. By single requests a reading of the CPUs before the save
//! and another one after it enclose the save, and what happens during the request is Firecracker's: it refuses
//! to save a VM that runs.

use crate::{Error, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How the threads that run CPUs are named.
const THREAD_NAME: &str = "fc_vcpu";
/// How long a thread may take to go to sleep after Firecracker has said that it is paused. On a quiet
/// host that is some microseconds; on a busy one it waits for a processor.
const REST_MAX: Duration = Duration::from_millis(200);
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Threads of a Firecracker process.
#[derive(Debug)]
pub struct Threads {
    pid: u32,
    /// For each thread its `schedstat` and its `stat`, which never stand for another thread.
    files: Vec<(File, File)>,
}

/// What the kernel had counted at one instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading(Vec<Vec<u8>>);

impl Threads {
    /// Finds the threads of the CPUs of process `pid`, which must be `count`. Errors: there is
    /// another number of them; the kernel does not show what it counts.
    pub fn of_vcpus(pid: u32, count: u32) -> Result<Self> {
        let operation = || format!("look at the threads of process {pid}");
        let tasks =
            std::fs::read_dir(format!("/proc/{pid}/task")).map_err(Error::io(operation()))?;
        let mut files = Vec::new();
        for task in tasks {
            let task = task.map_err(Error::io(operation()))?.path();
            // A thread may have ended meanwhile.
            let Ok(name) = std::fs::read_to_string(task.join("comm")) else { continue };
            if name.starts_with(THREAD_NAME) {
                files.push(open(&task).map_err(Error::io(operation()))?);
            }
        }
        if files.len() != count as usize {
            return Err(Error::Attach {
                pid,
                problem: format!(
                    "it has {} threads named {THREAD_NAME}, and {count} CPUs",
                    files.len()
                ),
                fix: "use a Firecracker that Keyframe is tested with (docs/design/vmm.md)".into(),
            });
        }
        Ok(Self { pid, files })
    }

    /// Finds the first thread of process `pid`. Error: the kernel does not show what it counts.
    pub fn first_of(pid: u32) -> Result<Self> {
        let files = open(Path::new(&format!("/proc/{pid}/task/{pid}")))
            .map_err(Error::io(format!("look at the first thread of process {pid}")))?;
        Ok(Self { pid, files: vec![files] })
    }

    /// Returns what the kernel has counted so far. Error: the process has ended.
    pub fn reading(&self) -> Result<Reading> {
        self.files
            .iter()
            .map(|(schedstat, _)| self.read(schedstat))
            .collect::<Result<_>>()
            .map(Reading)
    }

    /// Returns true if each of the threads has run since `mark` was read. Error: the process has
    /// ended.
    pub fn all_ran_since(&self, mark: &Reading) -> Result<bool> {
        let Reading(now) = self.reading()?;
        Ok(now.iter().zip(&mark.0).all(|(now, before)| now != before))
    }

    /// Waits until all threads sleep, as they do in a pause. Returns what the kernel has counted
    /// then; `None` if one does not sleep. Error: the process has ended.
    pub fn at_rest(&self) -> Result<Option<Reading>> {
        let until = Instant::now() + REST_MAX;
        loop {
            let before = self.reading()?;
            if self.all_sleep()? && self.reading()? == before {
                return Ok(Some(before));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn all_sleep(&self) -> Result<bool> {
        for (_, stat) in &self.files {
            let text = self.read(stat)?;
            // The state follows the name, which is in parentheses and may hold any character.
            let after = text.iter().rposition(|byte| *byte == b')').map(|at| at + 2);
            if after.and_then(|at| text.get(at)) != Some(&b'S') {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn read(&self, file: &File) -> Result<Vec<u8>> {
        let mut bytes = [0; 1024];
        let len = file
            .read_at(&mut bytes, 0)
            .map_err(Error::io(format!("look at a thread of process {}", self.pid)))?;
        Ok(bytes.get(..len).unwrap_or_default().to_vec())
    }
}

/// Opens the files of the thread whose directory of `/proc` is `task`.
fn open(task: &Path) -> io::Result<(File, File)> {
    Ok((File::open(task.join("schedstat"))?, File::open(task.join("stat"))?))
}
