//! A running QEMU that Keyframe started: launch, what it is, the state of its devices, its end.
//!
//! ```text
//!   QEMU ... the user's own words ...
//!        -S                              we look before the first instruction; the caller continues
//!        -only-migratable                QEMU itself refuses what it could not save
//!        -readconfig /proc/self/fd/N     two monitors: RUN_DIR/qmp.sock for us, RUN_DIR/watchdog.sock
//!        -add-fd fd=M,set=19270          a memfd, where QEMU writes device state
//! ```
//!
//! The monitors come from a configuration file and not from `-mon` because `-mon` takes the user's own default monitor
//! away (with `-nographic`, the one behind Ctrl-A C).
//!
//! Invariants:
//! 1. Dropping a [`Vm`] leaves the guest running; only [`Vm::kill`] ends it.
//! 2. A launch that fails leaves no process behind.

use crate::invocation::Invocation;
use crate::options::{Argument, keys, value_of};
use crate::ramblock::{self, HostBlock, find_ram_blocks};
use crate::spawn;
use crate::{Error, Qmp, Refusal, Result, audit, error};
use keyframe_units::RamLayout;
use rustix::fs::{MemfdFlags, OFlags, SeekFrom};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// How long a fresh QEMU may take to answer.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long QEMU may take to end when asked to.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);
/// A QEMU that was shut down and neither ends nor answers within this time is stuck in its own end.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
/// More than any device state: a vGPU's is some MiB.
const STATE_BYTES_MAX: u64 = 1 << 30;
/// The descriptor set for device state, or the first free one behind it. Users count theirs from 1.
const FDSET: u32 = 19270;
/// The longest path of a unix socket, without its terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// How to launch a VM.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// Where the monitors' sockets go: `qmp.sock` for the engine, `watchdog.sock` for the watchdog. Made if need be.
    pub run_dir: PathBuf,
}

/// A QEMU that was started here.
pub struct Vm {
    child: Child,
    qmp: Qmp,
    state: StateFile,
    user_command: Vec<String>,
    full_command: Vec<String>,
    snapshot: bool,
    backends: Option<Vec<String>>,
}

impl Vm {
    /// Starts the VM with its virtual CPUs standing still, whatever the user's line says.
    ///
    /// Errors: [`Error::Exited`] where QEMU ends at once (it has said why on its standard error), [`Error::Timeout`]
    /// where it does not answer within 30 s; no process is left then.
    pub fn launch(invocation: Invocation, options: &LaunchOptions) -> Result<Self> {
        let monitors = prepare_sockets(&options.run_dir)?;
        let state = StateFile::new(invocation.arguments())?;
        let config = memfd("monitors", &socket_config(&monitors)?)?;
        let mut added = Vec::new();
        if !invocation.starts_paused() {
            added.push("-S".to_owned());
        }
        added.extend(state.arguments());
        added.extend(["-only-migratable".into(), "-readconfig".into(), inherited_path(&config)]);
        let snapshot = invocation.arguments().iter().any(|a| a.name() == "snapshot");
        let (binary, user_command) = invocation.into_parts();
        let mut full_command = user_command.clone();
        full_command.extend(added);

        let mut command = Command::new(&binary);
        command.args(full_command.iter().skip(1));
        let mut child = spawn::start(&mut command, &[&config, &state.write_end])?;
        let [(_, ours), _] = &monitors;
        let connected = connect(&mut child, ours).and_then(|mut qmp| {
            let checked =
                check_is_child(&qmp, &child, &binary).and_then(|()| check_target(&mut qmp, &binary));
            if checked.is_err() {
                // It need not be the child that is killed below.
                let _ = qmp.quit();
            }
            checked.map(|()| qmp)
        });
        match connected {
            Ok(qmp) => Ok(Self { child, qmp, state, user_command, full_command, snapshot, backends: None }),
            Err(error) => {
                let _ = spawn::kill(&mut child);
                Err(error)
            }
        }
    }

    /// Over parts that a restore made.
    pub(crate) fn from_parts(
        child: Child,
        qmp: Qmp,
        state: StateFile,
        user_command: Vec<String>,
        full_command: Vec<String>,
    ) -> Self {
        let snapshot = full_command.iter().any(|w| w == "-snapshot" || w == "--snapshot");
        Self { child, qmp, state, user_command, full_command, snapshot, backends: None }
    }

    /// QEMU's pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// The line as the user gave it.
    pub fn user_command(&self) -> &[String] {
        &self.user_command
    }

    /// The line as it was run.
    pub fn full_command(&self) -> &[String] {
        &self.full_command
    }

    /// What stands in the way of exact checkpoints of this machine; all of it.
    pub fn audit(&mut self) -> Result<Vec<Refusal>> {
        let machine_type = self.machine_type()?;
        audit::audit(&mut self.qmp, &machine_type, self.snapshot)
    }

    /// Whether the machine has a device that discards guest RAM (balloon, virtio-mem).
    pub fn discards_ram(&mut self) -> Result<bool> {
        audit::discards(&mut self.qmp)
    }

    /// The machine's type with aliases resolved (`pc-i440fx-7.2`).
    pub fn machine_type(&mut self) -> Result<String> {
        machine_type(&mut self.qmp)
    }

    /// The number of virtual CPUs.
    pub fn cpus(&mut self) -> Result<u32> {
        let answer = self.qmp.execute("query-cpus-fast", None)?;
        match answer.as_array().and_then(|all| u32::try_from(all.len()).ok()) {
            Some(cpus) => Ok(cpus),
            None => Err(self.qmp.unexpected("query-cpus-fast", &answer)),
        }
    }

    /// The RAM blocks and where each lies in QEMU's memory: those behind memory backends first.
    pub fn ram_blocks(&mut self) -> Result<Vec<HostBlock>> {
        let pid = self.pid();
        find_ram_blocks(&mut self.qmp, pid)
    }

    /// The RAM blocks as they are now, in the same order, without their addresses.
    pub fn ram_layout(&mut self) -> Result<RamLayout> {
        // Backends that appear later (memory hotplug) make a new block, which the layout then shows as another space.
        let backends = match self.backends.take() {
            Some(backends) => backends,
            None => ramblock::backend_ids(&mut self.qmp)?,
        };
        let layout = ramblock::layout(&mut self.qmp, &backends);
        self.backends = Some(backends);
        layout
    }

    /// Asks for the state of all devices, without waiting. The VM should be paused.
    pub fn begin_save_devices(&mut self) -> Result<()> {
        self.state.rewind()?;
        self.qmp.begin_save_devices(&self.state.target())
    }

    /// Waits for the state that [`Vm::begin_save_devices`] asked for, and returns it.
    pub fn finish_save_devices(&mut self) -> Result<Vec<u8>> {
        self.qmp.finish_save_devices()?;
        let state = self.state.read()?;
        crate::stream::check(&state)?;
        Ok(state)
    }

    /// How QEMU ended, if it has.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        spawn::exit_status(&mut self.child)
    }

    /// Waits for QEMU's end for at most `timeout`; `None` where it still runs then.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        spawn::wait(&mut self.child, timeout)
    }

    /// To be called when the VM was shut down ([`crate::Event::Shutdown`]): how QEMU ended, or `None` where it stays
    /// (`-no-shutdown`).
    ///
    /// QEMU 7.2 can hang in `monitor_cleanup`, with its disks flushed and closed, where a command is under way as the VM
    /// shuts down. It is killed then, and counts as ended in success, as it would have been.
    pub fn finish_shutdown(&mut self) -> Result<Option<ExitStatus>> {
        let before = self.qmp.set_timeout(Duration::from_millis(500));
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        let ended = loop {
            if let Some(status) = spawn::wait(&mut self.child, Duration::from_millis(20))? {
                break Some(status);
            }
            if self.qmp.status().is_ok() {
                break None;
            }
            if Instant::now() > deadline {
                spawn::kill(&mut self.child)?;
                break Some(ExitStatus::default());
            }
        };
        self.qmp.set_timeout(before);
        Ok(ended)
    }

    /// Ends QEMU: on request, so that it gives the terminal back as it was, or else by force.
    pub fn kill(&mut self) -> Result<()> {
        if self.try_wait()?.is_some() {
            return Ok(());
        }
        self.qmp.set_timeout(QUIT_TIMEOUT);
        if self.qmp.quit().is_ok() && spawn::wait(&mut self.child, QUIT_TIMEOUT)?.is_some() {
            return Ok(());
        }
        spawn::kill(&mut self.child).map(drop)
    }

    /// Leaves the guest to itself, as it is. Returns QEMU's pid.
    pub fn keep(self) -> u32 {
        self.child.id()
    }
}

/// Where QEMU writes device state: a memfd that both have open.
///
/// QEMU takes a descriptor of a set only where its access mode is the very one asked for, write-only. Both ends of that
/// descriptor share one position, which stands behind the previous state until it is set back.
pub(crate) struct StateFile {
    pub(crate) write_end: OwnedFd,
    read_end: File,
    set: u32,
}

impl StateFile {
    /// A fresh one, in a set that `arguments` do not use.
    pub(crate) fn new(arguments: &[Argument]) -> Result<Self> {
        let operation = "make a file in memory for device state";
        let fd = rustix::fs::memfd_create("keyframe-devices", MemfdFlags::CLOEXEC)
            .map_err(Error::io(operation))?;
        let path = format!("/proc/self/fd/{}", spawn::number(&fd));
        let write_end = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty())
            .map_err(Error::io(operation))?;
        let taken: Vec<u32> = arguments
            .iter()
            .filter(|a| a.name() == "add-fd")
            .filter_map(|a| value_of(&keys(a.value(), ""), "set")?.parse().ok())
            .collect();
        let set = (FDSET..=u32::MAX).find(|set| !taken.contains(set)).unwrap_or(FDSET);
        Ok(Self { write_end, read_end: File::from(fd), set })
    }

    /// What gives it to QEMU.
    pub(crate) fn arguments(&self) -> [String; 2] {
        ["-add-fd".into(), format!("fd={},set={},opaque=keyframe", spawn::number(&self.write_end), self.set)]
    }

    /// QEMU's name for it.
    fn target(&self) -> String {
        format!("/dev/fdset/{}", self.set)
    }

    fn rewind(&self) -> Result<()> {
        rustix::fs::ftruncate(&self.write_end, 0).map_err(Error::io("empty the device state file"))?;
        rustix::fs::seek(&self.write_end, SeekFrom::Start(0))
            .map_err(Error::io("rewind the device state file"))?;
        Ok(())
    }

    fn read(&self) -> Result<Vec<u8>> {
        let len_bytes = self.read_end.metadata().map_err(Error::io("look at the device state file"))?.len();
        if len_bytes > STATE_BYTES_MAX {
            let problem = format!("it has {len_bytes} bytes, more than {STATE_BYTES_MAX}");
            return Err(Error::DeviceStream { offset: STATE_BYTES_MAX, problem });
        }
        let mut state = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
        self.read_end
            .read_exact_at(&mut state, 0)
            .map_err(Error::io(format!("read {len_bytes} bytes of the device state file")))?;
        Ok(state)
    }
}

/// The machine's type, without the suffix that QEMU's type names have.
pub(crate) fn machine_type(qmp: &mut Qmp) -> Result<String> {
    let answer = qmp.execute("qom-get", Some(json!({ "path": "/machine", "property": "type" })))?;
    match answer.as_str() {
        Some(name) => Ok(name.strip_suffix("-machine").unwrap_or(name).to_owned()),
        None => Err(qmp.unexpected("qom-get /machine type", &answer)),
    }
}

/// A memfd that holds `text`.
pub(crate) fn memfd(name: &str, text: &str) -> Result<OwnedFd> {
    let operation = format!("make a file in memory for {name}");
    let fd = rustix::fs::memfd_create(format!("keyframe-{name}"), MemfdFlags::CLOEXEC)
        .map_err(Error::io(operation.clone()))?;
    let file = File::from(fd);
    file.write_all_at(text.as_bytes(), 0).map_err(Error::io(operation))?;
    Ok(file.into())
}

/// The path by which a child that inherits `fd` opens it anew.
pub(crate) fn inherited_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", spawn::number(fd))
}

/// A monitor of machines' kind, over the chardev with `properties`, in the form that `-readconfig` reads.
pub(crate) fn monitor_config(id: &str, properties: &[(&str, &str)]) -> String {
    let mut lines = vec![format!("[chardev \"{id}\"]"), "  backend = \"socket\"".into()];
    lines.extend(properties.iter().map(|(key, value)| format!("  {key} = \"{value}\"")));
    lines.extend([
        format!("[mon \"{id}\"]"),
        "  mode = \"control\"".into(),
        format!("  chardev = \"{id}\"\n"),
    ]);
    lines.join("\n")
}

/// Ids and sockets of the two monitors, in a directory for us alone, where nothing stands in their way.
fn prepare_sockets(run_dir: &Path) -> Result<[(&'static str, PathBuf); 2]> {
    let run_dir =
        std::path::absolute(run_dir).map_err(Error::io(format!("resolve {}", run_dir.display())))?;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&run_dir)
        .map_err(Error::io(format!("make the run directory {}", run_dir.display())))?;
    let monitors =
        [("keyframe-qmp", run_dir.join("qmp.sock")), ("keyframe-watchdog", run_dir.join("watchdog.sock"))];
    for (_, path) in &monitors {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("remove the old socket {}", path.display()))(e));
            }
            _ => {}
        }
    }
    Ok(monitors)
}

fn socket_config(monitors: &[(&str, PathBuf)]) -> Result<String> {
    let mut config = String::new();
    for (id, path) in monitors {
        let text = path.to_str().filter(|p| !p.contains(['"', '\n']) && p.len() <= SOCKET_PATH_BYTES_MAX);
        let Some(text) = text else {
            return Err(Error::CommandLine {
                argument: path.display().to_string(),
                reason: format!(
                    "no socket can be made there: paths of sockets are UTF-8, at most {SOCKET_PATH_BYTES_MAX} bytes long, and have no quotation mark"
                ),
                fix: "choose another run directory".into(),
            });
        };
        config += &monitor_config(id, &[("path", text), ("server", "on"), ("wait", "off")]);
    }
    Ok(config)
}

fn connect(child: &mut Child, path: &Path) -> Result<Qmp> {
    Qmp::connect_while(path, START_TIMEOUT, &mut || spawn::alive(child, error::AT_START))
        .map_err(|e| spawn::exited_instead(e, child, error::AT_START))
}

/// All that follows acts on the child's pid, so the monitor must be that process's and not that of a child of its own.
fn check_is_child(qmp: &Qmp, child: &Child, binary: &Path) -> Result<()> {
    let peer =
        rustix::net::sockopt::socket_peercred(qmp).map_err(Error::io("ask who answers QEMU's monitor"))?;
    if u32::try_from(peer.pid.as_raw_nonzero().get()).ok() == Some(child.id()) {
        return Ok(());
    }
    Err(Error::Binary {
        path: binary.into(),
        reason: "it is a wrapper that runs QEMU as a child".into(),
        fix: "let the wrapper end in `exec qemu-system-x86_64 \"$@\"`, or name QEMU itself".into(),
    })
}

fn check_target(qmp: &mut Qmp, binary: &Path) -> Result<()> {
    let answer = qmp.execute("query-target", None)?;
    match answer.get("arch").and_then(Value::as_str) {
        Some("x86_64") => Ok(()),
        other => Err(Error::Binary {
            path: binary.into(),
            reason: format!("it emulates {}", other.unwrap_or("an unknown processor")),
            fix: "use qemu-system-x86_64".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_set_is_one_that_the_user_does_not_use() {
        let add = |set: u32| Argument::Option("add-fd".into(), format!("fd=3,set={set}"));
        assert_eq!(StateFile::new(&[add(1)]).unwrap().set, FDSET);
        assert_eq!(StateFile::new(&[add(FDSET), add(FDSET + 1)]).unwrap().set, FDSET + 2);
    }

    #[test]
    fn what_is_written_to_the_state_file_is_read_once() {
        let state = StateFile::new(&[]).unwrap();
        for text in ["a longer one", "short"] {
            state.rewind().unwrap();
            rustix::io::write(&state.write_end, text.as_bytes()).unwrap();
            assert_eq!(state.read().unwrap(), text.as_bytes());
        }
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused() {
        let long = PathBuf::from(format!("/{}", "x".repeat(120)));
        assert!(socket_config(&[("a", long)]).is_err());
        assert!(socket_config(&[("a", "/a\"b".into())]).is_err());
        assert!(socket_config(&[("a", "/a,b c".into())]).unwrap().contains("path = \"/a,b c\""));
    }
}
