//! QEMUs that the test starts itself, not through Keyframe.

use crate::{Boot, PATIENCE, Process, TestEnv};
use keyframe_qemu::{Qmp, RunStatus};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// A QEMU with its console on standard streams and two monitors, `a` and `b`. It ends when this is
/// dropped.
pub struct ExternalVm {
    /// The process and its console.
    pub console: Process,
    dir: PathBuf,
}

impl ExternalVm {
    /// Starts `boot`, with its monitors in the directory of `env`.
    pub fn start(env: &TestEnv, boot: &Boot) -> Self {
        Self::start_in(env.path(), boot)
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
        let vm = Self { console: Process::start(command), dir };
        // QEMU is ready when its monitor answers.
        drop(vm.monitor());
        vm
    }

    /// The path of monitor `name`.
    pub fn socket(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    /// A connection to monitor `b`.
    pub fn monitor(&self) -> Qmp {
        Qmp::connect(&self.dir.join("b"), PATIENCE).expect("connect to monitor b")
    }

    /// True if the vCPUs run.
    pub fn is_running(&self) -> bool {
        self.monitor().status().expect("ask for its state") == RunStatus::Running
    }

    /// The state of QEMU that an engine changes and must restore.
    pub fn traces(&self) -> Traces {
        let sets = self
            .monitor()
            .execute("query-fdsets", None)
            .expect("query the descriptor sets")
            .to_string();
        let pid = self.console.pid();
        let links = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("look at its open files");
        let name = |f: std::fs::DirEntry| {
            let target = std::fs::read_link(f.path()).ok()?.display().to_string();
            // Each connection to a monitor has another number.
            Some(target.split(':').next().unwrap_or_default().to_owned())
        };
        let mut files: Vec<String> = links.flatten().filter_map(name).collect();
        files.sort();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        Traces { sets, files, children }
    }

    /// Asserts that QEMU's state becomes what it was `before`. A closed connection disappears a
    /// moment later, so this waits.
    pub fn assert_unchanged_since(&self, before: &Traces) {
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

/// The state of QEMU that an engine changes and must restore.
#[derive(Debug, PartialEq, Eq)]
pub struct Traces {
    /// The answer of `query-fdsets`.
    sets: String,
    /// Its open files, by name.
    files: Vec<String>,
    /// Its child processes.
    children: String,
}
