//! Finds the program with the databases, or builds it.

use crate::cli::own_path;
use crate::interrupt::Interrupt;
use crate::{Error, Options};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const NAME: &str = "keyframe-bench-peers";
const MANIFEST: &str = "bench/peers/Cargo.toml";
const BUILT: &str = "bench/peers/target/release";
/// Longest time to build it.
const BUILD_MAX: Duration = Duration::from_mins(10);

/// The program with the databases.
pub struct PeerProgram {
    /// Its path.
    pub program: PathBuf,
    has: Vec<String>,
}

/// The output of its option `--list`.
#[derive(Deserialize)]
struct ListedDatabases {
    has: Vec<String>,
}

impl PeerProgram {
    /// Looks beside this program and in the source tree, and builds it there.
    pub fn find(options: &Options, interrupt: &Interrupt) -> Result<Self, Error> {
        let beside = own_path()?.with_file_name(NAME);
        let in_tree = Path::new(BUILT).join(NAME);
        if beside.is_file() {
            return Self::ask(beside);
        }
        if Path::new(MANIFEST).is_file() {
            // It is built even if it exists, because its source or the libraries may have changed.
            options.say("building the program with the databases (bench/peers)");
            build(interrupt)?;
        }
        if in_tree.is_file() {
            return Self::ask(
                std::path::absolute(&in_tree).map_err(Error::io("find the current directory"))?,
            );
        }
        let problem = format!(
            "no {} and no {}, and the current directory is not the project's",
            beside.display(),
            in_tree.display()
        );
        Err(Error::NoPeers { problem })
    }

    fn ask(program: PathBuf) -> Result<Self, Error> {
        let output = Command::new(&program)
            .arg("--list")
            .stdin(Stdio::null())
            .output()
            .map_err(Error::io(format!("run {}", program.display())))?;
        let listed: ListedDatabases = serde_json::from_slice(&output.stdout).map_err(|e| {
            Error::NoPeers { problem: format!("{} --list: {e}", program.display()) }
        })?;
        Ok(Self { program, has: listed.has })
    }

    /// Returns whether it was built with database `store`.
    pub fn has(&self, store: &str) -> bool {
        self.has.iter().any(|known| known == store)
    }
}

fn build(interrupt: &Interrupt) -> Result<(), Error> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut child = Command::new(cargo)
        .args(["build", "--quiet", "--release", "--locked", "--manifest-path", MANIFEST])
        .args(["--target-dir", "bench/peers/target"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|e| Error::NoPeers { problem: format!("run cargo: {e}") })?;
    let deadline = Instant::now() + BUILD_MAX;
    loop {
        if let Some(status) = child.try_wait().map_err(Error::io("wait for cargo"))? {
            let problem = format!("cargo build of {MANIFEST} ended with {status}");
            return if status.success() { Ok(()) } else { Err(Error::NoPeers { problem }) };
        }
        if interrupt.is_set() || Instant::now() > deadline {
            child.kill().and_then(|()| child.wait()).map_err(Error::io("end cargo"))?;
            return Err(Error::NoPeers {
                problem: format!("cargo build of {MANIFEST} did not end in time"),
            });
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
