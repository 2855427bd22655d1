//! The directories of running engines: one per VM, with its sockets.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/keyframe/        (or /run/keyframe for root, /tmp/keyframe-UID otherwise), mode 0700
//!     NAME/           of a long name: its begin, `~` and a hash
//!       name          the long name
//!       engine.pid    who runs it; locked (flock) while it lives
//!       qmp.sock      QEMU's monitor, for the engine
//!       api.sock      a link to the API of a Firecracker that the engine started
//!       watchdog.sock QEMU's monitor, for the watchdog
//!       control.sock  the engine's own
//!       rollback.txt  how the watchdog ended the rollback of an engine that died
//!       runs          of a standby that has taken over: the VM's name, by which it is found, too
//!     .clones/NAME/   a clone: engine.pid (its `keyframe branch`), qmp.sock, console.sock, console.log, about.json
//!     .restored/NAME/ a VM that was restored: engine.pid (its `keyframe restore`), qmp.sock (of QEMU), about.json; from the
//!                     dashboard: console.log
//!     .goto/NAME/     a recorded VM at an instruction: engine.pid (its `keyframe goto`), about.json
//! ```
//!
//! A directory whose `engine.pid` is not locked is left over from an engine that was killed: its
//! name is free again, unless a kept VM still answers on its sockets.

mod place;

use crate::error::RunDirError;
use crate::interrupted_rollback::NOTE;
use keyframe_store::Store;
use keyframe_units::CheckpointId;
pub use keyframe_vm_disks::vm_name::{is_name_char, name_from, numbered_name};
use keyframe_vmm::VmmKind;
use rustix::fs::{FlockOperation, flock};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// The directory of the run directories of VMs without an engine. No VM's name begins with a dot.
const CLONES: &str = ".clones";
const RESTORED: &str = ".restored";
const GOTO: &str = ".goto";
/// The name of the file that describes a VM without an engine.
pub const ABOUT: &str = "about.json";
/// The most restored or replayed VMs of one name; a number distinguishes them.
const NAMESAKES_MAX: u32 = 99;
/// The highest number that a clone without a name of its own gets.
const CLONE_NUMBER_MAX: u32 = 9999;
const ABOUT_BYTES_MAX: u64 = 64 << 10;
/// The link to an API.
const API: &str = "api.sock";
/// QEMU's monitor.
const QMP: &str = "qmp.sock";
/// The sockets by which a VM without an engine is found, and the VMM that listens there.
const MONITORS: [(&str, VmmKind); 2] = [(QMP, VmmKind::Qemu), (API, VmmKind::Firecracker)];
/// Whose VM a standby runs.
const RUNS: &str = "runs";
const NAME_BYTES_MAX: u64 = 64;

/// The command that started a VM without an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunKind {
    /// `keyframe branch`.
    Clone,
    /// `keyframe restore`.
    Restored,
    /// `keyframe goto`.
    Goto,
}

/// The origin of a VM without an engine.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The command that started it.
    pub kind: RunKind,
    /// The absolute path or the address of the store of its checkpoint.
    pub store: PathBuf,
    /// The checkpoint that the VM was brought back to.
    pub checkpoint: CheckpointId,
    /// Where its replay stands; `None` if it is no replay.
    pub replayed: Option<ReplayedPoint>,
}

impl Origin {
    /// Makes the origin of a VM that `kind` brought back to `checkpoint` of `store`.
    pub fn new(kind: RunKind, store: &Store, checkpoint: CheckpointId) -> Self {
        Self { kind, store: path_of(store), checkpoint, replayed: None }
    }
}

/// Returns the absolute path or the address of `store`; its path if the working directory is unknown.
pub(crate) fn path_of(store: &Store) -> PathBuf {
    store.absolute_path().unwrap_or_else(|_| store.path().into())
}

/// The point of a recording at which `keyframe goto` brings a VM up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayedPoint {
    /// The recording's directory.
    pub recording: PathBuf,
    /// The instruction before which the VM was brought up, counted from the recording's beginning.
    pub instruction: u64,
}

/// The description of a VM without an engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct About {
    /// The name under which it runs.
    pub vm: String,
    /// Its origin.
    pub kind: RunKind,
    /// The path or address of the store of its checkpoint.
    pub store: String,
    /// The number of the checkpoint that the VM was brought back to.
    pub checkpoint: u64,
    /// Its VMM. The JSON leaves QEMU out.
    #[serde(default, skip_serializing_if = "is_qemu")]
    pub vmm: VmmKind,
    /// The process id of its VMM; of a group, that of the first member.
    pub qemu_pid: u32,
    /// The process id of the Keyframe command that ends the VM when it ends itself.
    pub keyframe_pid: u32,
    /// The point of its recording; the JSON has both fields for a VM of `goto` only.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub replayed: Option<ReplayedPoint>,
}

/// True for the VMM that the JSON leaves out.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(crate) fn is_qemu(vmm: &VmmKind) -> bool {
    *vmm == VmmKind::Qemu
}

/// The process of a VM without an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmProcess {
    /// The VMM that it is.
    pub vmm: VmmKind,
    /// Its process id; of a group, that of the first member.
    pub pid: u32,
}

/// A run directory that this process has claimed.
pub struct RunDir {
    path: PathBuf,
    /// Holds the lock.
    _pid: File,
    keep: bool,
}

impl RunDir {
    /// Claims the directory for VM `name`. Error: the name is no valid one or is in use, or the
    /// directory cannot be made.
    pub fn claim(name: &str) -> Result<Self, RunDirError> {
        Self::claim_in(&place::base()?, name)
    }

    /// Claims the directory of a clone, which has no engine; `keyframe attach` may add one later.
    /// Error: the name is taken, or the directory cannot be made.
    pub fn claim_clone(name: &str) -> Result<Self, RunDirError> {
        peripherals(CLONES)?;
        Self::claim_free(&place::base()?, CLONES, name)
    }

    /// Claims the directory of a clone of VM `vm`, with the first free name of `VM-NUMBER` after
    /// `after`: a name that neither a clone nor another VM has. Returns the number, too. Error: none
    /// of the names is free, or the directory cannot be made.
    pub fn claim_next_clone(vm: &str, after: u32) -> Result<(u32, Self), RunDirError> {
        peripherals(CLONES)?;
        Self::claim_next_in(&place::base()?, vm, after)
    }

    fn claim_next_in(base: &Path, vm: &str, after: u32) -> Result<(u32, Self), RunDirError> {
        let mut taken = RunDirError::NameRuns(vm.into());
        for number in after.saturating_add(1)..=CLONE_NUMBER_MAX {
            match Self::claim_free(base, CLONES, &numbered_name(vm, number)) {
                Err(error @ (RunDirError::NameRuns(_) | RunDirError::NameLeft(_))) => taken = error,
                claimed => return claimed.map(|directory| (number, directory)),
            }
        }
        Err(taken)
    }

    /// Claims the directory of a restored VM by the name that its user has chosen. Error: the name
    /// is no valid one or is taken, or the directory cannot be made.
    pub fn claim_restored_as(name: &str) -> Result<Self, RunDirError> {
        peripherals(RESTORED)?;
        Self::claim_free(&place::base()?, RESTORED, name)
    }

    /// Claims the directory of a restored VM. If a VM has the name, it becomes `NAME-2`, `NAME-3`,
    /// ... Error: the directory cannot be made.
    pub fn claim_restored(name: &str) -> Result<Self, RunDirError> {
        Self::claim_numbered(RESTORED, name)
    }

    /// Claims the directory of a recorded VM at an instruction, by a name as of
    /// [`Self::claim_restored`]. Error: the directory cannot be made.
    pub fn claim_goto(name: &str) -> Result<Self, RunDirError> {
        Self::claim_numbered(GOTO, name)
    }

    fn claim_numbered(folder: &str, name: &str) -> Result<Self, RunDirError> {
        peripherals(folder)?;
        let (base, name) = (place::base()?, name_from(name));
        let claim = |name: &str| Self::claim_free(&base, folder, name);
        let numbered = (2..=NAMESAKES_MAX).map(|number| numbered_name(&name, number));
        numbered.fold(claim(&name), |claimed, name| claimed.or_else(|_| claim(&name)))
    }

    /// Claims the directory of a VM in `folder` if no other VM has its name: `keyframe stop` ends VMs by
    /// their names.
    fn claim_free(base: &Path, folder: &str, name: &str) -> Result<Self, RunDirError> {
        if is_taken(base, name) {
            return Err(RunDirError::NameRuns(name.into()));
        }
        Self::claim_in(&base.join(folder), name)
    }

    /// Writes the description of a VM without an engine that this process has started, for
    /// `keyframe status` and `keyframe stop`. Error: the file cannot be written.
    pub fn tell(&self, origin: Origin, process: VmmProcess) -> Result<(), RunDirError> {
        let about = About {
            vm: name_of(&self.path),
            kind: origin.kind,
            store: origin.store.display().to_string(),
            checkpoint: origin.checkpoint.0,
            vmm: process.vmm,
            qemu_pid: process.pid,
            keyframe_pid: std::process::id(),
            replayed: origin.replayed,
        };
        let path = self.path.join(ABOUT);
        let text = serde_json::to_vec(&about)?;
        std::fs::write(&path, text).map_err(|source| io("write", &path, source))
    }

    /// Writes that this directory's engine runs VM `vm` from now on, after a takeover. Error: the
    /// file cannot be written.
    pub fn runs(&self, vm: &str) -> Result<(), RunDirError> {
        let path = self.path.join(RUNS);
        std::fs::write(&path, vm).map_err(|source| io("write", &path, source))
    }

    /// Removes the description that [`Self::tell`] has written, after its VM has ended. Other files
    /// stay for inspection.
    pub fn untell(&self) {
        let _ = std::fs::remove_file(self.path.join(ABOUT));
    }

    pub(crate) fn claim_in(base: &Path, name: &str) -> Result<Self, RunDirError> {
        if name.is_empty()
            || name.len() > 64
            || name.starts_with('.')
            || !name.chars().all(is_name_char)
        {
            return Err(RunDirError::BadName(name.into()));
        }
        let path = base.join(place::entry(name));
        make_private(&path)?;
        let fail = |operation, source| io(operation, &path, source);
        let mut pid = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join("engine.pid"))
            .map_err(|e| fail("open engine.pid in", e))?;
        if flock(&pid, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(RunDirError::NameRuns(name.into()));
        }
        if MONITORS.iter().any(|(file, _)| UnixStream::connect(path.join(file)).is_ok()) {
            return Err(RunDirError::NameLeft(name.into()));
        }
        for file in [QMP, API, "watchdog.sock", "control.sock", RUNS, NOTE] {
            match std::fs::remove_file(path.join(file)) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(fail("clear", e)),
                _ => {}
            }
        }
        pid.set_len(0).map_err(|e| fail("write engine.pid in", e))?;
        writeln!(pid, "{}", std::process::id()).map_err(|e| fail("write engine.pid in", e))?;
        place::write_name(&path, name)?;
        Ok(Self { path, _pid: pid, keep: false })
    }

    /// Returns the name of the VM that has the directory.
    pub fn name(&self) -> String {
        name_of(&self.path)
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes that the VMM of this directory's VM has its API at `socket`, by which the VM is found
    /// once its engine has died. Error: the link cannot be made.
    pub(crate) fn link_api(&self, socket: &Path) -> Result<(), RunDirError> {
        let link = self.path.join(API);
        let target = std::path::absolute(socket).map_err(|e| io("resolve", socket, e))?;
        std::os::unix::fs::symlink(target, &link).map_err(|e| io("make", &link, e))
    }

    /// Leaves the sockets in place when the engine ends: the VM goes on and uses them.
    pub fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if !self.keep {
            // Left-overs do no harm: the next engine of this name clears them.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Returns the run directories whose engines run. Error: the directory of the run directories
/// cannot be read.
pub fn all() -> Result<Vec<PathBuf>, RunDirError> {
    living_in(&place::base()?)
}

/// Returns the directories and descriptions of VMs that `keyframe branch`, `restore` or `goto` has
/// started and holds. Error: the directory of the run directories cannot be read.
pub fn without_engine() -> Result<Vec<(PathBuf, About)>, RunDirError> {
    // One that says nothing is just being made.
    let about = |dir: PathBuf| about(&dir).map(|about| (dir, about));
    let base = place::base()?;
    let mut all = Vec::new();
    for folder in [CLONES, RESTORED, GOTO] {
        all.extend(living_in(&base.join(folder))?.into_iter().filter_map(about));
    }
    Ok(all)
}

/// Returns the name under which `keyframe branch` or `restore` runs the VM of the VMM process `pid`.
/// `None` if neither runs it, or if that cannot be read.
pub fn name_of_process(pid: u32) -> Option<String> {
    let all = without_engine().ok()?;
    all.into_iter()
        .map(|(_, about)| about)
        .find(|about| about.qemu_pid == pid)
        .map(|about| about.vm)
}

/// A VM that runs on without an engine, which has died or has left it by `--on-exit keep`.
#[derive(Clone, Debug, Serialize)]
pub struct Orphan {
    /// The name under which it runs.
    pub vm: String,
    /// Always `orphan`.
    pub kind: &'static str,
    /// Its VMM. The JSON leaves QEMU out.
    #[serde(skip_serializing_if = "is_qemu")]
    pub vmm: VmmKind,
    /// The process id of its VMM.
    pub qemu_pid: u32,
    /// The socket of its monitor or API.
    pub qmp: PathBuf,
}

/// Returns all VMs that run without an engine, sorted by name. Error: the directory of the run
/// directories cannot be read.
pub fn orphans() -> Result<Vec<Orphan>, RunDirError> {
    let of = |dir: PathBuf| {
        // No engine uses this monitor: it would hold the lock.
        if lives(&dir) {
            return None;
        }
        let answers = |(file, vmm): &(&str, VmmKind)| {
            let socket = dir.join(file);
            Some((UnixStream::connect(&socket).ok()?, std::fs::read_link(&socket), socket, *vmm))
        };
        let (stream, link, socket, vmm) = MONITORS.iter().find_map(answers)?;
        let qemu_pid = socket_peercred(&stream).ok()?.pid.as_raw_nonzero().get().cast_unsigned();
        let qmp = link.unwrap_or(socket);
        Some(Orphan { vm: name_of(&dir), kind: "orphan", vmm, qemu_pid, qmp })
    };
    let mut all: Vec<Orphan> = entries(&place::base()?)?.filter_map(of).collect();
    all.sort_by(|one, other| one.vm.cmp(&other.vm));
    Ok(all)
}

/// Returns the directory that holds the directories of restored VMs. Error: the environment names
/// no directory for it.
pub fn of_restored() -> Result<PathBuf, RunDirError> {
    peripherals(RESTORED)
}

/// Ends the VM of the directory `dir`, by ending the Keyframe command to which it belongs. `about`
/// is the VM's description. Errors: the VM has ended already; the command cannot be signalled.
pub fn end_with(dir: &Path, about: &About) -> Result<(), RunDirError> {
    let fail = |e: rustix::io::Errno| RunDirError::End { vm: about.vm.clone(), source: e.into() };
    let gone = || RunDirError::Gone(about.vm.clone());
    let pid = i32::try_from(about.keyframe_pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(fail)?;
    // The command held the lock after the pidfd was opened, so the pid was not reused.
    if !lives(dir) {
        return Err(gone());
    }
    pidfd_send_signal(&process, Signal::TERM).map_err(fail)
}

/// Ends the VM `vm` by a signal to its VMM, the process `vmm_pid`, which listens at `socket`. Errors:
/// the VM has ended already; its VMM cannot be signalled.
pub fn end_vmm(socket: &Path, vm: &str, vmm_pid: u32) -> Result<(), RunDirError> {
    let fail = |e: rustix::io::Errno| RunDirError::End { vm: vm.into(), source: e.into() };
    let gone = || RunDirError::Gone(vm.into());
    let pid = i32::try_from(vmm_pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(fail)?;
    // It listened after the pidfd was opened, so the pid was not reused.
    let stream = UnixStream::connect(socket).map_err(|_| gone())?;
    if socket_peercred(&stream).map_err(fail)?.pid != pid {
        return Err(gone());
    }
    pidfd_send_signal(&process, Signal::TERM).map_err(fail)
}

/// True if a VM has `name`, with an engine or without one.
fn is_taken(base: &Path, name: &str) -> bool {
    let entry = place::entry(name);
    let folders = [base.to_owned(), base.join(CLONES), base.join(RESTORED), base.join(GOTO)];
    folders.iter().any(|folder| lives(&folder.join(&entry)))
}

fn about(dir: &Path) -> Option<About> {
    let mut text = String::new();
    File::open(dir.join(ABOUT)).ok()?.take(ABOUT_BYTES_MAX).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Makes the directory of the VMs without an engine of one kind, and returns it.
fn peripherals(folder: &str) -> Result<PathBuf, RunDirError> {
    let folder = place::base()?.join(folder);
    make_private(&folder)?;
    Ok(folder)
}

/// Returns the entries of a directory; none if it does not exist.
fn entries(base: &Path) -> Result<impl Iterator<Item = PathBuf>, RunDirError> {
    let entries = match std::fs::read_dir(base) {
        Ok(entries) => Some(entries),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(io("read", base, e)),
    };
    Ok(entries.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())))
}

fn living_in(base: &Path) -> Result<Vec<PathBuf>, RunDirError> {
    let mut live: Vec<PathBuf> = entries(base)?.filter(|path| lives(path)).collect();
    live.sort();
    Ok(live)
}

/// Returns the socket of the monitor, or of the API, of a clone or a restored VM of `vmm` with this
/// directory.
pub fn monitor_in(directory: &Path, vmm: VmmKind) -> PathBuf {
    directory.join(if vmm == VmmKind::Firecracker { API } else { QMP })
}

/// Returns the name of the VM whose engine has this directory.
pub fn name_of(run_dir: &Path) -> String {
    place::name_of(run_dir)
}

/// The VM that the standby of this directory has taken over.
fn taken_over(dir: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(dir.join(RUNS)).ok()?.take(NAME_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Returns the directory of the engine of VM `name`, or with `None` that of the only running
/// engine. A directory's own name takes precedence over that of a VM that was taken over: both
/// hosts may be one machine.
///
/// Errors: no engine of that name; several engines and no name.
pub fn find(name: Option<&str>) -> Result<PathBuf, RunDirError> {
    let mut live = all()?;
    let names = |live: &[PathBuf]| live.iter().map(|dir| name_of(dir)).collect();
    match name {
        Some(name) => {
            let own = live.iter().find(|dir| name_of(dir) == name);
            let runs = || live.iter().find(|dir| taken_over(dir).is_some_and(|vm| vm == name));
            own.or_else(runs)
                .cloned()
                .ok_or_else(|| RunDirError::Unknown { name: name.into(), running: names(&live) })
        }
        None if live.len() > 1 => Err(RunDirError::Several { running: names(&live) }),
        None => live.pop().ok_or(RunDirError::NothingRuns),
    }
}

/// Returns whether the command that claimed the directory runs.
pub fn lives(dir: &Path) -> bool {
    File::open(dir.join("engine.pid"))
        .is_ok_and(|pid| flock(&pid, FlockOperation::NonBlockingLockShared).is_err())
}

/// Creates a directory that only its owner may enter. Refuses one that belongs to another user.
fn make_private(path: &Path) -> Result<(), RunDirError> {
    let fail = |source| io("make", path, source);
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(fail(e)),
    }
    let meta = std::fs::symlink_metadata(path).map_err(fail)?;
    if !meta.is_dir()
        || meta.uid() != rustix::process::getuid().as_raw()
        || meta.mode() & 0o077 != 0
    {
        return Err(RunDirError::NotPrivate(path.into()));
    }
    Ok(())
}

fn io(operation: &'static str, path: &Path, source: std::io::Error) -> RunDirError {
    RunDirError::Io { operation, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_get_the_next_names_that_no_vm_has() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path();
        for folder in [CLONES, RESTORED] {
            std::fs::create_dir(base.join(folder)).unwrap();
        }
        let next = |after| {
            let (number, claimed) = RunDir::claim_next_in(base, "web", after).unwrap();
            assert_eq!(claimed.name(), format!("web-{number}"));
            (number, claimed)
        };
        let (first, held) = next(0);
        let (second, _held) = next(first);
        assert_eq!((first, second), (1, 2));
        let _engine = RunDir::claim_in(base, "web-3").unwrap();
        let _restored = RunDir::claim_in(&base.join(RESTORED), "web-4").unwrap();
        assert_eq!(next(0).0, 5);
        drop(held);
        assert_eq!(next(0).0, 1);
        let none = RunDir::claim_next_in(base, "web", CLONE_NUMBER_MAX).map(drop);
        assert!(matches!(none, Err(RunDirError::NameRuns(_))));
    }
}
