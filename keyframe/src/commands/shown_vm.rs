//! A VM that came from a checkpoint, as `branch --json` and `restore --json` show it.

use keyframe_qemu::restore::CloneConsole;
use keyframe_session::run_dir::RunDir;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A clone or a restored VM.
#[derive(Serialize)]
pub struct ShownVm {
    /// The name by which `keyframe status` and `keyframe stop` find it.
    pub name: String,
    /// The number of a clone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    /// The checkpoint that it came from.
    pub checkpoint: u64,
    /// Of a group, that of the first member.
    pub qemu_pid: u32,
    /// Its QMP socket, or the socket of its API.
    pub monitor: Option<String>,
    /// Its consoles, by what they are for.
    pub consoles: BTreeMap<String, ShownConsole>,
    /// Where its writes to disks are.
    pub disks: Option<String>,
    /// Where its sockets and consoles are.
    pub directory: Option<String>,
    /// QEMU's name of its run state, or `running` or `paused`.
    pub state: String,
    /// The VMs of a group.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<ShownMember>,
}

/// A console: `serial`, `agent`, or the name of a port.
#[derive(Serialize)]
pub struct ShownConsole {
    pub socket: Option<String>,
    /// The file with its output.
    pub log: Option<String>,
}

/// A VM of a group.
#[derive(Serialize)]
pub struct ShownMember {
    pub name: String,
    pub qemu_pid: u32,
}

impl ShownVm {
    /// A VM of `checkpoint` with its place; the caller adds what else is known.
    pub fn new(name: String, directory: Option<&RunDir>, checkpoint: u64, qemu_pid: u32) -> Self {
        Self {
            name,
            number: None,
            checkpoint,
            qemu_pid,
            monitor: None,
            consoles: BTreeMap::new(),
            disks: None,
            directory: directory.map(|directory| text(directory.path())),
            state: "running".into(),
            members: Vec::new(),
        }
    }

    /// Says whether it was left paused.
    #[must_use]
    pub fn paused(mut self, is_paused: bool) -> Self {
        self.state = if is_paused { "paused".into() } else { "running".into() };
        self
    }
}

/// The consoles of a clone: each has a socket, and a file with its output beside it.
pub fn of_clone(consoles: &[CloneConsole]) -> BTreeMap<String, ShownConsole> {
    let shown = |console: &CloneConsole| {
        let log = Some(text(&console.socket.with_extension("log")));
        let socket = Some(text(&console.socket.with_file_name(format!("{}.sock", console.name))));
        (console.name.clone(), ShownConsole { socket, log })
    };
    consoles.iter().map(shown).collect()
}

/// The consoles of a restored VM, which are where its command line puts them.
pub fn of_restored(consoles: Vec<CloneConsole>) -> BTreeMap<String, ShownConsole> {
    let shown = |console: CloneConsole| {
        (console.name, ShownConsole { socket: Some(text(&console.socket)), log: None })
    };
    consoles.into_iter().map(shown).collect()
}

/// The console of a clone of Firecracker, which has no input.
pub fn of_firecracker(directory: &Path) -> BTreeMap<String, ShownConsole> {
    let log = Some(text(&directory.join("console.log")));
    BTreeMap::from([("serial".to_owned(), ShownConsole { socket: None, log })])
}

/// `path` as JSON shows it.
pub fn text(path: &Path) -> String {
    path.display().to_string()
}
