//! A VM of Firecracker.
//!
//! ```text
//!   single requests:
//!   stop ─▶ at rest: reading ─▶ before a save: same reading? save; reading ─▶ before the resumption: same reading?
//!                                    └── no: another client let the VM run; the capture is torn
//! ```
//!
//! A whole pause has one reading, while Firecracker waits in the save ([`crate::whole_pause`]).
//!
//! The readings are of the threads of the CPUs. The reading after the save is also of the devices'
//! thread ([`EventLoop`]): if that one has run, a device may have written to RAM, and the capture is
//! torn, too.

use crate::api::{Api, Instance, InstanceState};
use crate::config::{Drive, VmConfig};
use crate::event_loop::EventLoop;
use crate::identity::Identity;
use crate::open_drives::OpenFiles;
use crate::process::Lifetime;
use crate::state_file::StateFile;
use crate::state_pipe::StatePipe;
use crate::threads::{Reading, Threads};
use crate::whole_pause::WholePauses;
use crate::{Result, audit, ram};
use keyframe_kernel::reopened_file::reopen_files;
use keyframe_machine::{HostBlock, Lineage, MachineSpec, Processor, VmmKind};
use keyframe_units::{LayoutError, RamLayout};
use keyframe_vmm::{AuditFinding, RunState, StopOutcome, VmEvent, VmOrigin, WritableDrive};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long the CPUs must have stood still before Firecracker is asked whether the VM is paused.
/// Each question is a line in Firecracker's log.
const STILL_BEFORE_ASKING: Duration = Duration::from_millis(500);

/// What is known of a VM when Keyframe begins to control it.
pub(crate) struct Parts {
    pub lifetime: Lifetime,
    pub api: Api,
    pub origin: VmOrigin,
    pub lineage: Option<Lineage>,
    pub identity: Identity,
    /// The command line, the binary first.
    pub command: Vec<String>,
    pub directory: PathBuf,
    /// The directory of the API's socket, if Keyframe made it.
    pub folder: Option<TempDir>,
}

/// A VM of Firecracker. Dropping it leaves the guest running.
pub struct FirecrackerVm {
    pub(crate) parts: Parts,
    config: VmConfig,
    /// The configuration as Firecracker tells it.
    config_text: String,
    pub(crate) vcpus: Threads,
    pub(crate) event_loop: EventLoop,
    state_file: StateFile,
    /// `None` for a Firecracker that cannot open it.
    pub(crate) pipe: Option<StatePipe>,
    pub(crate) whole: WholePauses,
    pub(crate) ran: RanMeanwhile,
    watch: QuietWatch,
}

/// Whether the VM ran in a pause.
#[derive(Debug, Default)]
pub(crate) struct RanMeanwhile {
    pub(crate) ran: bool,
    /// The reading of the CPUs that must still hold; `None` outside of pauses.
    pub(crate) mark: Option<Reading>,
    /// The reading of the devices that must still hold; `None` before they were saved.
    devices_mark: Option<Reading>,
}

impl RanMeanwhile {
    /// Forgets the readings at the end of a pause, but not what they have shown.
    fn forget(&mut self) {
        (self.mark, self.devices_mark) = (None, None);
    }
}

/// Whether the VM runs, as far as its CPUs show it.
#[derive(Debug)]
struct QuietWatch {
    reading: Option<Reading>,
    since: Instant,
    /// Whether Firecracker was asked since the CPUs stand still.
    has_asked: bool,
    is_paused: bool,
}

impl FirecrackerVm {
    /// Looks at a VM that has been started. Errors: Firecracker does not answer; its CPUs' threads
    /// are not found; there is no place for its device state.
    pub(crate) fn new(mut parts: Parts) -> Result<Self> {
        let (config, config_text) = parts.api.config()?;
        let pid = parts.lifetime.process().pid();
        let vcpus = Threads::of_vcpus(pid, config.machine.vcpu_count)?;
        let event_loop = EventLoop::of(pid)?;
        let state_file = StateFile::create(pid)?;
        let (pipe, whole) = (StatePipe::create(pid)?, WholePauses::default());
        let watch =
            QuietWatch { reading: None, since: Instant::now(), has_asked: false, is_paused: false };
        let ran = RanMeanwhile::default();
        Ok(Self {
            parts,
            config,
            config_text,
            vcpus,
            event_loop,
            state_file,
            pipe,
            whole,
            ran,
            watch,
        })
    }

    /// Returns the API.
    pub fn api(&mut self) -> &mut Api {
        &mut self.parts.api
    }

    /// Returns the file for the device state.
    pub fn state_file(&mut self) -> &mut StateFile {
        &mut self.state_file
    }

    /// Returns the configuration.
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    pub(crate) fn lifetime(&mut self) -> &mut Lifetime {
        &mut self.parts.lifetime
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.parts.lifetime.process().pid()
    }

    pub(crate) fn came_by(&self) -> VmOrigin {
        self.parts.origin
    }

    pub(crate) fn came_from(&self) -> Option<Lineage> {
        self.parts.lineage.clone()
    }

    pub(crate) fn api_socket(&self) -> PathBuf {
        self.parts.api.socket().to_owned()
    }

    /// The path by which the watchdog opens the pipe for the device state.
    pub(crate) fn pipe_path(&self) -> Option<&Path> {
        self.pipe.as_ref().map(StatePipe::path)
    }

    pub(crate) fn connection(&self) -> Option<OwnedFd> {
        self.parts.api.descriptor().and_then(|api| api.try_clone_to_owned().ok())
    }

    /// Leaves the process, and a directory that Keyframe made for its socket.
    pub(crate) fn leave(self) -> u32 {
        if let Some(folder) = self.parts.folder {
            let _ = folder.keep();
        }
        self.parts.lifetime.leave()
    }

    pub(crate) fn describe(&mut self) -> Result<MachineSpec> {
        (self.config, self.config_text) = self.parts.api.config()?;
        self.locate_drives(|_| true)?;
        let vmm_config = self.config.described(&self.config_text);
        let Parts { identity, command, directory, .. } = &self.parts;
        Ok(MachineSpec {
            vmm: VmmKind::Firecracker,
            binary_path: identity.path.to_string_lossy().into_owned(),
            vmm_version: identity.version.clone(),
            binary_blake3: identity.blake3.clone(),
            processor: Processor::X86_64,
            machine_type: "firecracker".into(),
            vcpus: self.config.machine.vcpu_count,
            working_directory: directory.to_string_lossy().into_owned(),
            user_command: command.clone(),
            full_command: command.clone(),
            guest_map: Some(ram::guest_map(self.config.machine.mem_size_mib)),
            vmm_config: Some(vmm_config),
            ..MachineSpec::default()
        })
    }

    pub(crate) fn findings(&mut self) -> Result<Vec<AuditFinding>> {
        (self.config, self.config_text) = self.parts.api.config()?;
        self.locate_drives(|_| true)?;
        Ok(audit::audit(&self.config, &self.parts.identity.version))
    }

    /// Returns the drives to which the guest can write now. Errors: Firecracker does not answer; the
    /// file of a drive cannot be looked at, or is not the one under its path ([`crate::Error::Drive`]).
    pub(crate) fn drives_to_capture(&mut self) -> Result<Vec<WritableDrive>> {
        (self.config, self.config_text) = self.parts.api.config()?;
        self.locate_drives(Drive::is_writable)?;
        self.config.writable_drives(&self.parts.directory)
    }

    /// Returns the drives to which the guest cannot write, each with the path of its file. Error: the
    /// file of a drive is not the one under its path.
    pub(crate) fn media(&mut self) -> Result<Vec<(String, PathBuf)>> {
        self.locate_drives(|drive| !drive.is_writable())?;
        let drives = self.config.drives.iter().filter(|drive| !drive.is_writable());
        let path = |drive: &Drive| drive.host_path(&self.parts.directory);
        Ok(drives.filter_map(|drive| Some((drive.drive_id.clone(), path(drive)?))).collect())
    }

    /// Makes Firecracker open the files of `drives` anew. Its thread of the devices, which alone uses
    /// them, is the main thread. Error: it does not; it has the former files then.
    pub(crate) fn reopen(&self, drives: &[WritableDrive]) -> Result<()> {
        let open = OpenFiles::of(self.process_id())?;
        let mut files = Vec::new();
        for drive in drives {
            let named = self.config.drives.iter().find(|one| one.drive_id == drive.name);
            let path = named.and_then(|one| one.path_on_host.as_deref()).unwrap_or(&drive.path);
            files.extend(open.numbers(drive.identity).iter().map(|number| (*number, path)));
        }
        Ok(reopen_files(self.parts.lifetime.process(), &files)?)
    }

    /// Finds the files of the drives of the `kind` on this host. Error: the path of one does not lead to
    /// the file that Firecracker has open.
    fn locate_drives(&mut self, kind: impl Fn(&Drive) -> bool) -> Result<()> {
        let open = OpenFiles::of(self.process_id())?;
        for drive in self.config.drives.iter_mut().filter(|drive| kind(drive)) {
            drive.path_outside = open.path_outside(drive, &self.parts.directory)?;
        }
        Ok(())
    }

    pub(crate) fn host_blocks(&self) -> Result<Vec<HostBlock>> {
        ram::find(self.parts.lifetime.process(), self.config.machine.mem_size_mib)
    }

    /// The RAM blocks. Firecracker's VMs keep the RAM that they were started with.
    pub(crate) fn layout(&self) -> Result<RamLayout, LayoutError> {
        RamLayout::new(
            ram::regions(self.config.machine.mem_size_mib).iter().map(ram::block).collect(),
        )
    }

    pub(crate) fn state(&mut self) -> Result<RunState> {
        let Instance { state, .. } = self.parts.api.instance()?;
        self.watch.is_paused = state == InstanceState::Paused;
        Ok(match state {
            InstanceState::Running => RunState::Running,
            InstanceState::Paused => RunState::Paused,
            InstanceState::NotStarted => RunState::Other("not started".into()),
        })
    }

    /// Pauses the VM, unless it is paused.
    pub(crate) fn pause(&mut self) -> Result<StopOutcome> {
        self.ran = RanMeanwhile::default();
        self.finish_whole_pause()?;
        self.whole.state = None;
        // A VM that was loaded and has not run yet is paused, too, but its event loop is at work until
        // then.
        let outcome = match self.parts.api.pause()? {
            InstanceState::Paused => StopOutcome::AlreadyPaused,
            InstanceState::Running | InstanceState::NotStarted => StopOutcome::Stopped,
        };
        self.mark()?;
        Ok(outcome)
    }

    pub(crate) fn save(&mut self) -> Result<Vec<u8>> {
        self.look_whether_it_ran()?;
        self.ran.devices_mark = None;
        let may_write_memory = !self.config.machine.track_dirty_pages;
        let saved = self.state_file.save(&mut self.parts.api, may_write_memory)?;
        self.mark()?;
        let rest = self.event_loop.at_rest()?;
        self.ran.ran |= rest.is_none();
        self.ran.devices_mark = rest;
        Ok(saved)
    }

    /// Resumes the VM after [`Self::pause`].
    pub(crate) fn end_pause(&mut self) -> Result<()> {
        self.look_whether_it_ran()?;
        self.ran.forget();
        self.parts.api.resume()
    }

    /// Resumes the VM if it is paused.
    pub(crate) fn run_on(&mut self) -> Result<()> {
        self.ran.forget();
        if self.state()? == RunState::Paused { self.parts.api.resume() } else { Ok(()) }
    }

    /// Returns whether the VM ran between the last pause and its end, or until now.
    pub(crate) fn has_run(&mut self) -> Result<bool> {
        self.finish_whole_pause()?;
        self.look_whether_it_ran()?;
        Ok(self.ran.ran)
    }

    pub(crate) fn mark(&mut self) -> Result<()> {
        // A CPU that does not come to rest has been let run.
        let rest = self.vcpus.at_rest()?;
        self.ran.ran |= rest.is_none();
        self.ran.mark = rest;
        Ok(())
    }

    pub(crate) fn look_whether_it_ran(&mut self) -> Result<()> {
        if let Some(mark) = &self.ran.mark {
            let ran = self.vcpus.reading()? != *mark;
            self.ran.ran |= ran;
        }
        if let Some(mark) = &self.ran.devices_mark {
            let ran = self.event_loop.reading()? != *mark;
            self.ran.ran |= ran;
        }
        Ok(())
    }

    /// Returns whether another client has paused or resumed the VM since the last call. Asks
    /// Firecracker only if the CPUs have stood still for a while.
    pub(crate) fn events(&mut self) -> Result<Vec<VmEvent>> {
        if !self.parts.lifetime.process().is_alive() {
            return Ok(Vec::new());
        }
        let reading = Some(self.vcpus.reading()?);
        if reading != self.watch.reading {
            let is_first = self.watch.reading.is_none();
            (self.watch.reading, self.watch.since) = (reading, Instant::now());
            self.watch.has_asked = false;
            let was_paused = std::mem::take(&mut self.watch.is_paused);
            return Ok(if was_paused && !is_first { vec![VmEvent::Resumed] } else { Vec::new() });
        }
        if self.watch.has_asked || self.watch.since.elapsed() < STILL_BEFORE_ASKING {
            return Ok(Vec::new());
        }
        self.watch.has_asked = true;
        let is_paused = self.state()? == RunState::Paused;
        Ok(if is_paused { vec![VmEvent::Paused] } else { Vec::new() })
    }
}
