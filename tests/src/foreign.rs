//! QEMUs that somebody else started: by hand, not through Keyframe.

use crate::process::rest;
use crate::{Bench, Boot, Process};
use keyframe_qemu::{Qmp, RunStatus};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long anything may take that happens at all, on a machine that does ten other things.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// A QEMU with its console on standard streams and two monitors, `a` and `b`; it ends with its
/// test.
pub struct Foreign {
    /// The process and its console.
    pub console: Process,
    dir: PathBuf,
}

impl Foreign {
    /// Starts `boot`, with its monitors in the directory of `bench`.
    pub fn start(bench: &Bench, boot: &Boot) -> Self {
        Self::start_in(bench.path(), boot)
    }

    /// Starts `boot`, with its monitors in `dir`.
    pub fn start_in(dir: &Path, boot: &Boot) -> Self {
        let mut line = boot.command();
        let dir = dir.to_owned();
        for name in ["a", "b"] {
            line.extend([
                "-qmp".into(),
                format!("unix:{},server=on,wait=off", dir.join(name).display()),
            ]);
        }
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).current_dir(&dir);
        let foreign = Self { console: Process::start(command), dir };
        // It is there when it answers.
        drop(foreign.other());
        foreign
    }

    /// The path of monitor `name`.
    pub fn socket(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    /// The monitor `b`, for a moment.
    pub fn other(&self) -> Qmp {
        Qmp::connect(&self.dir.join("b"), PATIENCE).expect("connect to the other monitor")
    }

    /// Whether its vCPUs run.
    pub fn runs(&self) -> bool {
        self.other().status().expect("ask for its state") == RunStatus::Running
    }

    /// What an engine would leave behind.
    pub fn traces(&self) -> Traces {
        let sets = self
            .other()
            .execute("query-fdsets", None)
            .expect("ask for its descriptor sets")
            .to_string();
        let pid = self.console.pid();
        let links = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("look at its open files");
        let name = |f: std::fs::DirEntry| {
            let target = std::fs::read_link(f.path()).ok()?.display().to_string();
            // A connection to a monitor gets a number of its own.
            Some(target.split(':').next().unwrap_or_default().to_owned())
        };
        let mut files: Vec<String> = links.flatten().filter_map(name).collect();
        files.sort();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        Traces { sets, files, children }
    }

    /// Everything is as it was `before`. A connection that was closed is gone a moment later.
    pub fn assert_left_as(&self, before: &Traces) {
        let deadline = Instant::now() + PATIENCE;
        while self.traces() != *before {
            assert!(
                Instant::now() < deadline,
                "QEMU has {:?}, before it had {before:?}",
                self.traces()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What an engine would leave behind in QEMU.
#[derive(Debug, PartialEq, Eq)]
pub struct Traces {
    /// Its descriptor sets.
    sets: String,
    /// Its open files, by name.
    files: Vec<String>,
    /// Its children.
    children: String,
}

/// Waits until `done`.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let began = Instant::now();
        if done() {
            return;
        }
        assert!(began < deadline, "{what}: never");
        std::thread::sleep(rest(began.elapsed()));
    }
}
