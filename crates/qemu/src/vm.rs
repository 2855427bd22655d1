//! A running QEMU: its launch, its properties, its device state, its end. Module `attach` makes a
//! [`Vm`] of a QEMU that another program started.
//!
//! ```text
//!   QEMU ... the user's own arguments ...
//!        -S                              QEMU waits before the first instruction; the caller resumes
//!        -readconfig /proc/self/fd/N     two monitors: RUN_DIR/qmp.sock for the engine, RUN_DIR/watchdog.sock
//!        -add-fd fd=M,set=19270          a memfd, where QEMU writes device state
//! ```
//!
//! The monitors come from a configuration file, because `-mon` would remove the user's default
//! monitor (with `-nographic`, the one behind Ctrl-A C).
//!
//! Invariants:
//! 1. Dropping a [`Vm`] leaves the guest running; only [`Vm::kill`] ends it. A QEMU that was
//!    attached to forgets the engine.
//! 2. A launch that fails leaves no process behind.

mod ending;
mod monitor_sockets;
mod one_command_pause;

use crate::blocknodes::WritableNode;
use crate::invocation::Invocation;
use crate::lifetime::Lifetime;
use crate::machine_shape::CapturedDisks;
use crate::ramblock::{self, find_ram_blocks};
use crate::spawn;
use crate::sse_flags::SseFlags;
use crate::statefile::StateFile;
use crate::thread_affinity::{self, LogRole, SingleCore};
use crate::watchdog::{Watched, WatchedMonitor};
use crate::{
    AuditFinding, Error, QemuIdentity, Qmp, Result, VmExit, accelerator_check, audit, error,
    hotplug,
};
use keyframe_machine::{HostBlock, Processor};
use keyframe_qemu_cmdline::{Argument, options_added_by_wrapper};
use keyframe_qemu_memory_map::reset_files::BlockPart;
use keyframe_units::RamLayout;
use monitor_sockets::prepare_sockets;
use one_command_pause::OneCommandPause;
use rustix::fs::MemfdFlags;
use serde_json::{Value, json};
use std::any::Any;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

pub(crate) use monitor_sockets::{monitor_config, socket_config};

/// How long an attached QEMU may take to forget the engine.
const DETACH_TIMEOUT: Duration = Duration::from_secs(1);
/// The options of the launch of a VM.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The directory of the monitors' sockets: `qmp.sock` for the engine, `watchdog.sock` for the
    /// watchdog. It is made if it does not exist.
    pub run_dir: PathBuf,
}

/// A QEMU that Keyframe has started or attached to.
pub struct Vm {
    lifetime: Lifetime,
    qmp: Qmp,
    state: StateFile,
    one_command: OneCommandPause,
    user_command: Vec<String>,
    full_command: Vec<String>,
    origin: Origin,
    backends: Option<Vec<String>>,
    /// Nodes of disks that are captured, or left out knowingly.
    minded: Vec<WritableNode>,
    /// The disks that the user left out.
    left_out: Vec<WritableNode>,
    /// The socket of the disk server, for a restored VM whose disks the caller serves.
    server: Option<PathBuf>,
    /// Present if the VM records or replays.
    single_core: Option<SingleCore>,
    /// The guest's processor, once QEMU has told it.
    processor: Option<Processor>,
    /// The virtual CPUs whose SSE flags are added to device states.
    pub(crate) sse_flags: Option<SseFlags>,
    /// Whether the attach ended a pause of an engine that had died with its watchdog.
    pub(crate) ended_a_left_pause: bool,
    /// The identity of the binary, once it is known.
    pub(crate) identity: Option<QemuIdentity>,
    /// What each reset of the machine overwrites, once QEMU has told it.
    pub(crate) reset_parts: Option<Vec<BlockPart>>,
    /// Values that must live as long as the VM.
    kept: Vec<Box<dyn Any + Send + Sync>>,
}

/// The way in which a VM came under Keyframe's control.
pub(crate) enum Origin {
    /// Launched, with a monitor for its watchdog.
    Launched {
        /// The watchdog's monitor socket.
        watchdog: PathBuf,
        /// The socket of the server of its disks. `None` if no server serves them.
        disks: Option<PathBuf>,
    },
    /// Restored from a checkpoint.
    Restored,
    /// Started by another program.
    Attached {
        /// The socket of its monitor.
        monitor: PathBuf,
    },
    /// Started by libvirt.
    Libvirt {
        /// The domain's name.
        domain: String,
        /// libvirt's URI. `None` for virsh's default.
        uri: Option<String>,
    },
}

impl Vm {
    /// Starts the VM with its virtual CPUs paused, with or without `-S` in the user's arguments.
    ///
    /// Errors: [`Error::Exited`] if QEMU ends at once (its standard error says why);
    /// [`Error::Timeout`] if it does not answer within 30 s. After an error no process is left.
    pub fn launch(invocation: &Invocation, options: &LaunchOptions) -> Result<Self> {
        Self::launch_by(invocation, options, |_| ())
    }

    /// Launches a VM as [`Self::launch`]; the kernel ends the VM when the thread that started it
    /// ends, and so when this process ends. Errors: those of [`Self::launch`].
    pub fn launch_mortal(invocation: &Invocation, options: &LaunchOptions) -> Result<Self> {
        Self::launch_by(invocation, options, keyframe_kernel::child_setup::kill_with_parent)
    }

    fn launch_by(
        invocation: &Invocation,
        options: &LaunchOptions,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let monitors = prepare_sockets(&options.run_dir)?;
        let state = StateFile::new(invocation.arguments())?;
        let config = memfd("monitors", &socket_config(&monitors)?)?;
        let mut added = Vec::new();
        if !invocation.starts_paused() {
            added.push("-S".to_owned());
        }
        added.extend(state.arguments());
        added.extend(["-readconfig".into(), inherited_path(&config)]);
        let line = invocation.line();
        let is_recorded = line.is_recorded();
        let binary = invocation.binary().to_owned();
        let user_command = line.words().to_vec();
        let disks = line.disk_server().map(|server| server.socket.clone());
        let mut full_command = line.run_words()?.words;
        full_command.extend(added);

        let line = hotplug::arguments(&full_command);
        let mut command = Command::new(&binary);
        command.args(full_command.iter().skip(1));
        prepare(&mut command);
        if is_recorded {
            thread_affinity::prepare(&mut command, &line, LogRole::Records);
        }
        let mut child = spawn::start(&mut command, &[&config, &state.write_end])?;
        let [(_, ours), (_, watchdog)] = &monitors;
        let connected = connect(&mut child, ours, &line).and_then(|mut qmp| {
            let checked =
                check_is_child(&qmp, &child, &binary).and_then(|()| target(&mut qmp, &binary));
            if checked.is_err() {
                // It need not be the child that is killed below.
                let _ = qmp.quit();
            }
            checked.map(|_| qmp)
        });
        match connected {
            Ok(mut qmp) => {
                let single_core = is_recorded
                    .then(|| SingleCore::begin(&mut qmp, child.id(), &line, LogRole::Records))
                    .flatten();
                let origin = Origin::Launched { watchdog: watchdog.clone(), disks };
                let lines = (user_command, full_command);
                let mut vm = Self::from_parts(Lifetime::Child(child), qmp, state, lines, origin);
                vm.set_single_core(single_core);
                Ok(vm)
            }
            Err(error) => {
                let _ = spawn::kill(&mut child);
                Err(error)
            }
        }
    }

    /// A VM of existing parts, with the user's arguments and the full command line.
    pub(crate) fn from_parts(
        lifetime: Lifetime,
        qmp: Qmp,
        state: StateFile,
        (user_command, full_command): (Vec<String>, Vec<String>),
        origin: Origin,
    ) -> Self {
        Self {
            lifetime,
            qmp,
            state,
            one_command: OneCommandPause::default(),
            user_command,
            full_command,
            origin,
            backends: None,
            minded: Vec::new(),
            left_out: Vec::new(),
            server: None,
            single_core: None,
            processor: None,
            sse_flags: None,
            ended_a_left_pause: false,
            identity: None,
            reset_parts: None,
            kept: Vec::new(),
        }
    }

    /// Keeps the placement of the threads of a recording or replaying VM.
    pub(crate) fn set_single_core(&mut self, single_core: Option<SingleCore>) {
        self.single_core = single_core;
    }

    /// Keeps `what` alive for as long as this handle of the VM.
    pub fn accompany(&mut self, what: impl Any + Send + Sync) {
        self.kept.push(Box::new(what));
    }

    /// Decides whether QEMU may answer its monitor some milliseconds late from now on, which
    /// disturbs the guest less. Has no effect on a VM that neither records nor replays.
    pub fn may_answer_late(&self, late: bool) {
        if let Some(single_core) = &self.single_core {
            single_core.let_run_late(late);
        }
    }

    /// Decides how the threads of a paused replay run from now on: with `takes_turns` in turns on
    /// one core, which is faster, otherwise at once on any cores. Has no effect on other VMs.
    pub fn take_turns(&mut self, takes_turns: bool) {
        if let Some(single_core) = &mut self.single_core {
            single_core.take_turns(takes_turns);
        }
    }

    /// Returns the core on which all threads of a recording or replaying VM run. `None` for other
    /// VMs.
    pub fn core(&self) -> Option<u32> {
        self.single_core.as_ref()?.core()
    }

    /// Returns QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.lifetime.pid()
    }

    /// Fails with [`Error::Hidden`] if the command is a script that added options for disks,
    /// networks or consoles before it started QEMU. Keyframe has not seen these. Only a launched VM
    /// can have such options.
    pub fn require_whole_line(&self) -> Result<()> {
        let Origin::Launched { .. } = self.origin else { return Ok(()) };
        let path = format!("/proc/{}/cmdline", self.pid());
        let line = std::fs::read(&path).map_err(Error::io(format!("read {path}")))?;
        let options =
            options_added_by_wrapper(&line, self.full_command.get(1..).unwrap_or_default());
        match self.full_command.first() {
            Some(script) if !options.is_empty() => {
                Err(Error::Hidden { script: script.clone(), options })
            }
            _ => Ok(()),
        }
    }

    /// Returns true if the VM stood in a pause of an engine that had died together with its
    /// watchdog, and the attach resumed it.
    pub fn ended_a_left_pause(&self) -> bool {
        self.ended_a_left_pause
    }

    pub(crate) fn note_pause(&mut self, begins: bool) {
        self.state.note_pause(begins);
    }

    /// Returns true if another program started this QEMU.
    pub fn is_attached(&self) -> bool {
        matches!(self.origin, Origin::Attached { .. } | Origin::Libvirt { .. })
    }

    /// Returns what a watchdog of this VM uses: see [`crate::watchdog::spawn`]. Error: a
    /// descriptor cannot be copied.
    pub fn watched(&self) -> Result<Watched> {
        let monitor = match &self.origin {
            Origin::Launched { watchdog, .. } => WatchedMonitor::Own(watchdog.clone()),
            Origin::Libvirt { domain, uri } => {
                let set = Some(self.state.set());
                WatchedMonitor::Libvirt { domain: domain.clone(), uri: uri.clone(), set }
            }
            Origin::Restored | Origin::Attached { .. } => match self.qmp.duplicate()? {
                Some(socket) => WatchedMonitor::Shared { socket, set: self.state.set() },
                None => {
                    return Err(Error::Watchdog {
                        problem: "the VM's monitor is no socket".into(),
                    });
                }
            },
        };
        Ok(Watched { monitor, pipe: Some(self.state.pipe.duplicate()?), hold: None })
    }

    pub(crate) fn origin_detail(&self) -> &Origin {
        &self.origin
    }

    /// Returns the connection to QEMU's monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Returns the command line as the user gave it.
    pub fn user_command(&self) -> &[String] {
        &self.user_command
    }

    /// Returns the command line with which QEMU runs.
    pub fn full_command(&self) -> &[String] {
        &self.full_command
    }

    /// Returns all properties of this machine that prevent exact checkpoints, or may prevent them.
    /// Error: QEMU does not answer.
    pub fn audit(&mut self) -> Result<Vec<AuditFinding>> {
        let (processor, machine_type) = (self.processor()?, self.machine_type()?);
        let disks = match (&self.origin, &self.server) {
            (Origin::Launched { disks, .. }, _) => {
                keyframe_qemu_audit::Disks::Launched(disks.as_deref())
            }
            (_, server) => keyframe_qemu_audit::Disks::of_server(server.as_deref()),
        };
        let minded: Vec<String> = self.minded.iter().map(|disk| disk.node.clone()).collect();
        let machine = (processor, &*machine_type);
        let mut found = audit::audit(&mut self.qmp, machine, (disks, &minded))?;
        found.extend(audit::blockers(&mut self.qmp)?);
        found.extend(keyframe_qemu_audit::of_line(&hotplug::arguments(&self.full_command)));
        if let Err(changes) = self.lines_now()? {
            // The audit tells more about a disk that is not captured.
            let is_new = |f: &AuditFinding| !f.subject.starts_with("drive ");
            found.extend(changes.into_iter().filter(is_new));
        }
        Ok(found)
    }

    /// The disks that this run captures.
    pub(crate) fn captured_disks(&self) -> CapturedDisks {
        let socket = match (&self.origin, &self.server) {
            (Origin::Launched { disks, .. }, None) => disks.clone(),
            (_, server) => server.clone(),
        };
        CapturedDisks { socket, nodes: self.minded.clone() }
    }

    /// Fails with [`Error::Unsavable`] if a device was plugged in with which QEMU would end in
    /// [`Vm::save_devices`]. [`Vm::audit`] finds those that were there before.
    pub fn require_savable(&mut self) -> Result<()> {
        audit::require_savable(&mut self.qmp)
    }

    /// Tells the audit that the caller serves the disks of this restored VM at the socket `socket`,
    /// so that it does not report them.
    pub fn mind_server(&mut self, socket: PathBuf) {
        self.server = Some(socket);
    }

    /// Tells the audit that the caller captures `disks`, or that the user left them out, so that it
    /// does not report them.
    pub fn mind_disks(&mut self, disks: Vec<WritableNode>) {
        self.minded = disks;
    }

    /// Tells the VM which of its disks the user left out: that one of them has no space is reported
    /// as [`keyframe_vmm::VmEvent::LeftOutDiskFull`].
    pub fn leave_out_disks(&mut self, disks: Vec<WritableNode>) {
        self.left_out = disks;
    }

    pub(crate) fn left_out_disks(&self) -> &[WritableNode] {
        &self.left_out
    }

    /// Returns true if the machine has a device that discards guest RAM (balloon, virtio-mem).
    /// Error: QEMU does not answer.
    pub fn discards_ram(&mut self) -> Result<bool> {
        audit::discards(&mut self.qmp)
    }

    /// Returns true if QEMU reads a disk by direct I/O: then the kernel writes into pinned pages of
    /// guest RAM. Error: QEMU does not answer.
    pub fn pins_ram(&mut self) -> Result<bool> {
        audit::reads_directly(&mut self.qmp)
    }

    /// Returns the machine's type with aliases resolved (`pc-i440fx-7.2`). Error: QEMU does not
    /// answer.
    pub fn machine_type(&mut self) -> Result<String> {
        machine_type(&mut self.qmp)
    }

    /// Returns the guest's processor. Errors: QEMU does not answer; [`Error::Binary`] if Keyframe
    /// does not support the processor.
    pub fn processor(&mut self) -> Result<Processor> {
        if let Some(processor) = self.processor {
            return Ok(processor);
        }
        let binary = self.full_command.first().map(PathBuf::from).unwrap_or_default();
        let processor = target(&mut self.qmp, &binary)?;
        Ok(*self.processor.insert(processor))
    }

    /// Returns the features of the processor model that the guest does not have, because the
    /// accelerator or the host lacks them. Error: QEMU does not answer.
    pub fn cpu_lacks(&mut self) -> Result<Vec<String>> {
        if !self.processor()?.tells_lacking_features() {
            return Ok(Vec::new());
        }
        accelerator_check::lacking(&mut self.qmp)
    }

    /// Returns the number of virtual CPUs. Error: QEMU does not answer.
    pub fn cpus(&mut self) -> Result<u32> {
        let answer = self.qmp.execute("query-cpus-fast", None)?;
        match answer.as_array().and_then(|all| u32::try_from(all.len()).ok()) {
            Some(cpus) => Ok(cpus),
            None => Err(self.qmp.unexpected("query-cpus-fast", &answer)),
        }
    }

    /// Returns the arguments for the memory that was plugged in since the start. A restore makes
    /// this machine of [`Vm::user_command`] followed by them. Empty if no memory was plugged in.
    /// Error: QEMU does not answer.
    pub fn plugged_memory(&mut self) -> Result<Vec<String>> {
        hotplug::memory_words(&mut self.qmp, &hotplug::arguments(&self.user_command))
    }

    /// Returns the RAM blocks with their addresses in QEMU's memory. Those of memory backends come
    /// first. Error: QEMU does not answer.
    pub fn ram_blocks(&mut self) -> Result<Vec<HostBlock>> {
        // Memory may have been plugged in: the layout is from now on that of these blocks.
        self.backends = None;
        let pid = self.pid();
        find_ram_blocks(&mut self.qmp, pid)
    }

    /// Returns the RAM blocks as they are now, in the order of [`Vm::ram_blocks`], without their
    /// addresses. Error: QEMU does not answer.
    pub fn ram_layout(&mut self) -> Result<RamLayout> {
        self.asked_for_ram(ramblock::layout)
    }

    /// Returns [`Vm::ram_layout`], and true if the machine has a device that discards guest RAM,
    /// from its start or plugged in since. Error: QEMU does not answer.
    pub fn ram_layout_and_discards(&mut self) -> Result<(RamLayout, bool)> {
        self.asked_for_ram(ramblock::layout_and_discards)
    }

    pub(crate) fn asked_for_ram<T>(
        &mut self,
        ask: impl FnOnce(&mut Qmp, &[String]) -> Result<T>,
    ) -> Result<T> {
        // Backends that appear later (memory hotplug) make a new block, which the layout then shows
        // as another space.
        let backends = match self.backends.take() {
            Some(backends) => backends,
            None => ramblock::backend_ids(&mut self.qmp)?,
        };
        let answer = ask(&mut self.qmp, &backends);
        self.backends = Some(backends);
        answer
    }

    /// Returns the state of all devices. The VM should be paused. Error: QEMU refuses or does not
    /// answer.
    pub fn save_devices(&mut self) -> Result<Vec<u8>> {
        self.state.rewind()?;
        self.qmp.save_devices(&self.state.target())?;
        self.note_sse_flags();
        let state = self.state.read()?;
        crate::stream::check(&state)?;
        self.note_standstill(state)
    }

    /// Returns how QEMU has ended; `None` if it runs. Error: the kernel does not tell.
    pub fn ended(&mut self) -> Result<Option<VmExit>> {
        self.lifetime.ended()
    }

    /// Returns QEMU's exit status; `None` if it runs. The status of an attached QEMU is known only
    /// to its parent; the result is then success. Error: the kernel does not tell.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.ended()?.map(|ended| ended.status()))
    }

    /// Waits at most `timeout` for QEMU's end, and returns the status as [`Vm::try_wait`] does;
    /// `None` if QEMU still runs then. Error: the kernel does not tell.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        Ok(self.lifetime.wait(timeout)?.map(|ended| ended.status()))
    }

    /// Drops this handle and leaves the guest running, with everything that it needs. Returns
    /// QEMU's process id.
    pub fn keep(mut self) -> u32 {
        // Not dropped, so that nothing of it is ended.
        std::mem::take(&mut self.kept).into_iter().for_each(std::mem::forget);
        self.lifetime.pid()
    }
}

impl Drop for Vm {
    /// Leaves an attached QEMU as it was found.
    fn drop(&mut self) {
        if self.is_attached() && !matches!(self.ended(), Ok(Some(_))) {
            self.qmp.set_timeout(DETACH_TIMEOUT);
            self.state.take_back(&mut self.qmp);
        }
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

/// A memfd that holds `content`.
pub(crate) fn memfd(name: &str, content: impl AsRef<[u8]>) -> Result<OwnedFd> {
    let operation = format!("make a file in memory for {name}");
    let fd = rustix::fs::memfd_create(format!("keyframe-{name}"), MemfdFlags::CLOEXEC)
        .map_err(Error::io(operation.clone()))?;
    let file = File::from(fd);
    file.write_all_at(content.as_ref(), 0).map_err(Error::io(operation))?;
    Ok(file.into())
}

/// The path by which a child that inherits `fd` opens it anew.
pub(crate) fn inherited_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", spawn::number(fd))
}

fn connect(child: &mut Child, path: &Path, line: &[Argument]) -> Result<Qmp> {
    let wait = spawn::start_timeout(line);
    Qmp::connect_while(path, wait, &mut || spawn::alive(child, error::AT_START))
        .map_err(|e| spawn::waits_instead(spawn::exited_instead(e, child, error::AT_START), line))
}

/// Checks that the child itself answers the monitor, and no child of the child: everything else
/// acts on the child's pid.
fn check_is_child(qmp: &Qmp, child: &Child, binary: &Path) -> Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(qmp)
        .map_err(Error::io("ask which process answers QEMU's monitor"))?;
    if u32::try_from(peer.pid.as_raw_nonzero().get()).ok() == Some(child.id()) {
        return Ok(());
    }
    Err(Error::Binary {
        path: binary.into(),
        reason: "it is a wrapper that runs QEMU as a child".into(),
        fix: "let the wrapper end in `exec qemu-system-x86_64 \"$@\"`, or name QEMU itself".into(),
    })
}

/// Returns the processor that QEMU emulates. Error: [`Error::Binary`] if Keyframe does not support
/// it.
pub(crate) fn target(qmp: &mut Qmp, binary: &Path) -> Result<Processor> {
    let answer = qmp.execute("query-target", None)?;
    let name = answer.get("arch").and_then(Value::as_str);
    supported_processor(name.unwrap_or("an unknown processor"), binary)
}

/// Returns the processor that QEMU calls `name`. Error: [`Error::Binary`] if Keyframe does not
/// support it.
pub(crate) fn supported_processor(name: &str, binary: &Path) -> Result<Processor> {
    Processor::named(name).ok_or_else(|| Error::Binary {
        path: binary.into(),
        reason: format!("it emulates {name}"),
        fix: format!(
            "use a QEMU for one of the processors that are supported: {}",
            Processor::ALL.map(|one| format!("qemu-system-{one}")).join(", ")
        ),
    })
}

#[cfg(test)]
mod tests;
