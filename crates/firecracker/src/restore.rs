//! Starts VMs from checkpoints.
//!
//! ```text
//!   at once, and clones:
//!   checkpoint ─▶ RAM: memfd, sealed ◀── mapped privately ── Firecracker 1   its own: the pages that it wrote
//!              └▶ device state: memfd ◀── mapped privately ── Firecracker 2
//! ```
//!
//! Lazily ([`Plan::start_lazy`]) Firecracker gets no file of RAM. It passes a userfaultfd, through
//! which each page comes when the VM touches it.
//!
//! Firecracker inherits both files and opens them below its own `/proc/self/fd`. Afterwards it needs
//! neither this process nor the files. In the device state each drive to which the guest can write has
//! the path of a file of the restored VM ([`crate::drive_paths`]).

mod waiting;

pub(crate) use waiting::WaitingFirecracker;

use crate::api::{Api, MemoryBackend};
use crate::attach::command_line;
use crate::config::{Drive, VmConfig};
use crate::drive_paths::{MovedDrive, with_paths};
use crate::identity::Identity;
use crate::launch::wait_for_api;
use crate::process::Lifetime;
use crate::process_place::ProcessPlace;
use crate::state_file::{check, memfd};
use crate::taps::Taps;
use crate::uffd::Receiver;
use crate::vm::{FirecrackerVm, Parts};
use crate::{Error, Result, capabilities, ram};
use keyframe_kernel::child_setup::{kill_with_parent, start_new_session};
use keyframe_kernel::memfd_filler::MemfdFiller;
use keyframe_machine::{Lineage, MachineSpec, RamSource, VmmKind};
use keyframe_ram_loading::{Lazy, PageRun, check_within, pieces};
use keyframe_units::{PAGE_BYTES, PageIndex, PageRange, RamLayout, elapsed_ns};
use keyframe_vmm::{
    Capabilities, CloneRequest, DriveFile, LazyLoading, PlanOptions, RestorePlan, RestoreRam,
    RestoreSource, RestoredVm, Restorer, SharedRamSource, VmOrigin, Vmm, VmmError,
};
use rustix::fs::{SealFlags, fcntl_add_seals};
use std::borrow::Cow;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tempfile::TempDir;

/// Pages that are read at once: 16 MiB.
const PIECE_PAGES: u64 = 4096;

/// Restores checkpoints of Firecracker's VMs.
#[derive(Clone, Debug, Default)]
pub struct FirecrackerRestorer;

/// The RAM of a checkpoint, filled once, from which any number of VMs start.
#[derive(Debug)]
pub struct SharedRam {
    file: File,
    layout: RamLayout,
    /// How long the filling took, in nanoseconds.
    pub filled_ns: u64,
}

impl SharedRam {
    /// Fills memory with the RAM of `layout` from `source`. Errors: the source cannot be read; no
    /// memory for the RAM.
    pub fn fill(layout: &RamLayout, source: &dyn RamSource) -> Result<Self> {
        let began = Instant::now();
        let file = memfd("keyframe-ram")?;
        let operation = "make the memory of the VM";
        file.set_len(layout.len_bytes()).map_err(Error::io(operation))?;
        fill(&file, layout, source).map_err(Error::io("load the RAM of the checkpoint"))?;
        // The clones share it: none may change it.
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(Error::io("seal the memory of the VM"))?;
        Ok(Self { file, layout: layout.clone(), filled_ns: elapsed_ns(began) })
    }
}

fn fill(file: &File, layout: &RamLayout, source: &dyn RamSource) -> io::Result<()> {
    // A mapped file cannot be sealed, so the filler ends with this function.
    let filler = MemfdFiller::over(file.as_fd(), layout.len_bytes()).ok();
    let write = |offset: u64, bytes: &[u8]| match &filler {
        // All pages are empty, so all are placed.
        Some(filler) => filler.place(offset, bytes).map(drop).map_err(io::Error::other),
        None => file.write_all_at(bytes, offset),
    };
    for piece in pieces(PageRange::new(PageIndex(0), layout.len_pages()), PIECE_PAGES) {
        let mut run = PageRun::new(&write);
        source.read(piece, &mut |page, content| {
            check_within(page, piece)?;
            run.put(page.0 * PAGE_BYTES as u64, content)
        })?;
        run.flush()?;
    }
    Ok(())
}

/// A restore that is ready to start.
#[derive(Clone, Debug)]
pub struct Plan {
    identity: Identity,
    machine: MachineSpec,
    ram: RamLayout,
    arguments: Vec<OsString>,
    socket: Option<PathBuf>,
    paused: bool,
    lineage: Option<Lineage>,
    log: Option<PathBuf>,
    output: Option<PathBuf>,
    is_rehearsal: bool,
    drives: Vec<DriveFile>,
    /// The drives of the checkpoint.
    saved: Vec<SavedDrive>,
    taps: Taps,
    /// Where the Firecracker starts, and how Keyframe came to the VM whose place it takes.
    place: Option<(Arc<ProcessPlace>, VmOrigin)>,
    notes: Vec<String>,
}

/// A drive of a checkpoint.
#[derive(Clone, Debug)]
struct SavedDrive {
    name: String,
    /// The path of its file in the device state.
    in_state: PathBuf,
    /// The path on this host of the file that the VM had.
    former: PathBuf,
    is_writable: bool,
}

impl Plan {
    /// Checks that `source` can be restored on this host, and plans the restore. Errors: it is the
    /// checkpoint of another VMM; the binary is another version, or cannot be run; a drive's file
    /// is missing.
    pub fn new(source: RestoreSource, options: PlanOptions) -> Result<Self> {
        let RestoreSource { machine, ram } = source;
        let refuse = |problem: String, fix: &str| Error::Restore { problem, fix: fix.into() };
        if machine.vmm != VmmKind::Firecracker {
            return Err(refuse(
                format!("the checkpoint is of a VM of {}", machine.vmm),
                "restore it with its VMM",
            ));
        }
        let binary = options.binary.unwrap_or_else(|| machine.binary().to_owned());
        let identity = Identity::of_binary(&binary).map_err(|error| {
            refuse(
                format!("the checkpoint's Firecracker cannot be run: {error}"),
                "name another binary of the same version: --vmm PATH",
            )
        })?;
        let mut notes = Vec::new();
        if identity.version != machine.vmm_version {
            return Err(refuse(
                format!(
                    "{} is Firecracker {}, and the checkpoint was taken with {}",
                    binary.display(),
                    identity.version,
                    machine.vmm_version
                ),
                "name a binary of the checkpoint's version: --vmm PATH",
            ));
        }
        if identity.blake3 != machine.binary_blake3 {
            notes.push(format!(
                "{} is another build of Firecracker {} than the checkpoint's",
                binary.display(),
                identity.version
            ));
        }
        let config = machine.vmm_config.as_deref().and_then(|text| VmConfig::parse(text).ok());
        let config = config.ok_or_else(|| {
            refuse(
                "the checkpoint does not hold the configuration of its VM".into(),
                "restore another checkpoint",
            )
        })?;
        if ram.len_bytes()
            != ram::regions(config.machine.mem_size_mib).iter().map(|r| r.len_bytes).sum::<u64>()
        {
            return Err(refuse(
                "the checkpoint's RAM is not that of its configuration".into(),
                "restore another checkpoint",
            ));
        }
        let directory = machine.directory();
        let mut saved = Vec::new();
        for drive in &config.drives {
            let paths = drive.path_on_host.clone().zip(drive.host_path(&directory));
            let Some((in_state, former)) = paths else { continue };
            let (name, is_writable) = (drive.drive_id.clone(), drive.is_writable());
            if !is_writable && !former.exists() {
                return Err(refuse(
                    format!("the file of drive {name} is missing: {}", former.display()),
                    "put it back",
                ));
            }
            saved.push(SavedDrive { name, in_state, former, is_writable });
        }
        let taps = Taps::choose(&config.network, &options.taps)?;
        Self {
            identity,
            machine,
            ram,
            arguments: options.arguments,
            socket: None,
            paused: options.paused,
            lineage: options.lineage,
            log: options.log,
            output: None,
            is_rehearsal: options.is_rehearsal,
            drives: options.drives,
            saved,
            taps,
            place: None,
            notes,
        }
        .with_own_drives(&config)
    }

    /// Checks that each drive to which the guest can write has a file of its own. A restored VM
    /// never writes to the file of the VM that it comes from. Error: a drive has none.
    fn with_own_drives(self, config: &VmConfig) -> Result<Self> {
        let has_own = |drive: &&Drive| self.drives.iter().any(|own| own.name == drive.drive_id);
        let mut writable = config.drives.iter().filter(|drive| drive.is_writable());
        // The VM of a rehearsal never runs, so it writes nothing.
        match writable.find(|drive| !self.is_rehearsal && !has_own(drive)) {
            Some(drive) => Err(Error::Restore {
                problem: format!(
                    "the checkpoint does not hold drive {}, to which the guest can write",
                    drive.drive_id
                ),
                fix: "restore another checkpoint".into(),
            }),
            None => Ok(self),
        }
    }

    /// Has the VM's API at `socket`, in place of a socket in a directory that is removed with the
    /// VM.
    #[must_use]
    pub fn at_socket(self, socket: PathBuf) -> Self {
        Self { socket: Some(socket), ..self }
    }

    /// Has the VM write its output to the file `output`, and read no input.
    #[must_use]
    pub fn to_file(self, output: PathBuf) -> Self {
        Self { output: Some(output), ..self }
    }

    /// Has Firecracker start in `place`, where Keyframe came to the former VM by `origin`.
    #[must_use]
    pub(crate) fn in_place(self, place: Arc<ProcessPlace>, origin: VmOrigin) -> Self {
        Self { place: Some((place, origin)), ..self }
    }

    /// Makes a rehearsal of the plan: the VM never runs, and writes to no drive. It says nothing, in no
    /// log either.
    #[must_use]
    pub(crate) fn into_rehearsal(self) -> Self {
        Self {
            is_rehearsal: true,
            place: None,
            socket: None,
            drives: Vec::new(),
            arguments: Vec::new(),
            output: Some("/dev/null".into()),
            ..self
        }
    }

    /// Starts Firecracker and loads the VM, whose RAM is `shared`. Returns the VM, and the
    /// nanoseconds until it ran. Errors: Firecracker cannot be started, or does not load the state.
    /// No process is left then.
    pub fn start_shared(
        self,
        shared: &SharedRam,
        device_state: &[u8],
    ) -> Result<(FirecrackerVm, u64)> {
        let began = Instant::now();
        if shared.layout != self.ram {
            return Err(Error::Restore {
                problem: "the RAM is that of another checkpoint".into(),
                fix: "restore the checkpoint by itself".into(),
            });
        }
        let state = self.state_file(device_state)?;
        let mut place = Place::new(self.socket.clone())?;
        let mut lifetime = self.spawn(&place.socket, &[&state, &shared.file], self.is_rehearsal)?;
        let memory = inherited(&shared.file);
        let memory = MemoryBackend::File(&memory);
        let loaded = self.load(&mut lifetime, &place.socket, &inherited(&state), memory);
        let vm = self.finish(lifetime, loaded, place.folder.take())?;
        Ok((vm, elapsed_ns(began)))
    }

    /// Starts Firecracker and loads the VM, whose RAM is loaded from `source` as the VM touches it.
    /// Returns the VM, the loading of its RAM, and the nanoseconds until it ran. The calling thread
    /// must live until the loading has settled. Errors: those of [`Plan::start_shared`].
    pub fn start_lazy(
        self,
        source: SharedRamSource,
        device_state: &[u8],
    ) -> Result<(FirecrackerVm, Lazy, u64)> {
        let began = Instant::now();
        let state = self.state_file(device_state)?;
        let mut place = Place::new(self.socket.clone())?;
        let folder = tempfile::Builder::new().prefix("keyframe-uffd-").tempdir();
        let folder = folder.map_err(Error::io("make a directory for a socket"))?;
        let socket = folder.path().join("uffd.sock");
        let receiver = Receiver::listen(&socket)?;
        let mut lifetime = self.spawn(&place.socket, &[&state], true)?;
        let process = lifetime.process().try_clone()?;
        let given_up = AtomicBool::new(false);
        let (loaded, loading) = std::thread::scope(|scope| {
            // Firecracker touches RAM while it loads the VM, and waits for it.
            let serving = scope.spawn(|| {
                let (missing, places) = receiver.receive(&process, &self.ram, &given_up)?;
                Ok(Lazy::start(missing, places, source, began)?)
            });
            let backend = MemoryBackend::Uffd(&socket);
            let loaded = self.load(&mut lifetime, &place.socket, &inherited(&state), backend);
            given_up.store(loaded.is_err(), Ordering::Relaxed);
            let loading: Result<Lazy> = serving.join().unwrap_or_else(|panic| resume_unwind(panic));
            (loaded, loading)
        });
        // If Firecracker does not load the state, the user gets its reason.
        let (loaded, loading) = match (loaded, loading) {
            (Ok(loaded), Ok(loading)) => (Ok(loaded), Some(loading)),
            (Ok(_), Err(error)) | (Err(error), _) => (Err(error), None),
        };
        let mut vm = self.finish(lifetime, loaded, place.folder.take())?;
        let mut loading = loading.ok_or(Error::Interrupted)?;
        loading.prefetch().inspect_err(|_| drop(vm.lifetime().kill()))?;
        Ok((vm, loading, elapsed_ns(began)))
    }

    /// Starts Firecracker with its API at `socket`; it inherits `files`. With `ends_with_thread`, it
    /// ends with the calling thread. Error: it cannot be started.
    fn spawn(&self, socket: &Path, files: &[&File], ends_with_thread: bool) -> Result<Lifetime> {
        let mut command = Command::new(&self.identity.path);
        if self.is_rehearsal {
            self.taps.isolate(&mut command)?;
        } else if self.place.is_none() {
            self.taps.require_present()?;
        }
        command.arg("--api-sock").arg(socket).args(&self.arguments);
        let directory = self.machine.directory();
        if directory.is_dir() {
            command.current_dir(directory);
        }
        if let Some((place, origin)) = &self.place {
            place.enter(&mut command)?;
            if *origin == VmOrigin::Attached {
                // The VM is not to end with the terminal of this process.
                start_new_session(&mut command);
            }
        }
        if let Some(output) = self.output.as_ref().or(self.log.as_ref()) {
            let file = File::options().create(true).append(true).open(output);
            let file = file.map_err(Error::io(format!("open {}", output.display())))?;
            command.stdin(Stdio::null());
            if self.log.is_some() {
                command.stderr(file.try_clone().map_err(Error::io("copy a descriptor"))?);
            }
            // Firecracker writes its messages to standard output, among those of the guest.
            command.stdout(file);
        }
        if ends_with_thread {
            kill_with_parent(&mut command);
        }
        Lifetime::start(&mut command, files)
    }

    /// Has the Firecracker that was just started load the VM.
    fn load(
        &self,
        lifetime: &mut Lifetime,
        socket: &Path,
        state: &Path,
        memory: MemoryBackend<'_>,
    ) -> Result<Api> {
        let mut api = wait_for_api(lifetime, socket)?;
        api.load(state, memory, self.taps.chosen()).map_err(|error| match error {
            Error::Refused { message, .. } => self.taps.not_loaded(message),
            error => error,
        })?;
        Ok(api)
    }

    /// Returns the device state as a file, in which each drive has the path that is to be opened. Errors:
    /// it is none, or does not hold the drives of the checkpoint.
    fn state_file(&self, device_state: &[u8]) -> Result<File> {
        let moved = self.saved.iter().filter_map(|saved| self.moved(saved)).collect::<Vec<_>>();
        check(device_state)?;
        let changed = if moved.is_empty() {
            Cow::Borrowed(device_state)
        } else {
            Cow::Owned(with_paths(device_state, &moved)?)
        };
        let state = memfd("keyframe-device-state")?;
        state.write_all_at(&changed, 0).map_err(Error::io("hand over the device state"))?;
        Ok(state)
    }

    /// Returns a drive with the path that is to be opened. `None` if that is the path of the device
    /// state.
    fn moved(&self, saved: &SavedDrive) -> Option<MovedDrive> {
        let SavedDrive { name, in_state, former, is_writable } = saved;
        let own = self.drives.iter().find(|own| *is_writable && own.name == *name);
        let name = name.clone();
        match own {
            // The drive may have got another file since its configuration was read.
            Some(own) => Some(MovedDrive { name, former: None, path: own.path.clone() }),
            None if *former == self.machine.directory().join(in_state) => None,
            // A drive that is only read, or a rehearsal, whose VM never runs. It was in a jail.
            None => Some(MovedDrive { name, former: Some(in_state.clone()), path: former.clone() }),
        }
    }

    /// Takes control of the VM that was `loaded`, and lets it run unless it is to stay paused. Ends
    /// Firecracker after an error.
    fn finish(
        self,
        mut lifetime: Lifetime,
        loaded: Result<Api>,
        folder: Option<TempDir>,
    ) -> Result<FirecrackerVm> {
        let command = loaded
            .and_then(|api| Ok((api, command_line(lifetime.process().pid())?)))
            .inspect_err(|_| drop(lifetime.kill()));
        let (api, command) = command?;
        let mut spare = lifetime.try_clone()?;
        let parts = Parts {
            api,
            origin: self.place.map_or(VmOrigin::Restored, |(_, origin)| origin),
            lineage: self.lineage,
            identity: self.identity,
            command,
            directory: self.machine.directory(),
            folder,
            lifetime,
        };
        let mut vm = FirecrackerVm::new(parts).inspect_err(|_| drop(spare.kill()))?;
        if !self.paused {
            vm.api().resume().inspect_err(|_| drop(vm.lifetime().kill()))?;
        }
        Ok(vm)
    }
}

/// Where the API of a restored VM is.
struct Place {
    socket: PathBuf,
    /// The directory of the socket, if it is removed with the VM.
    folder: Option<TempDir>,
}

impl Place {
    fn new(socket: Option<PathBuf>) -> Result<Self> {
        if let Some(socket) = socket {
            return Ok(Self { socket, folder: None });
        }
        let folder = tempfile::Builder::new().prefix("keyframe-vm-").tempdir();
        let folder = folder.map_err(Error::io("make a directory for the API's socket"))?;
        Ok(Self { socket: folder.path().join("api.sock"), folder: Some(folder) })
    }
}

/// The path by which a child opens `file`, which it has inherited.
fn inherited(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

impl Restorer for FirecrackerRestorer {
    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn plan(
        &self,
        source: RestoreSource,
        options: PlanOptions,
    ) -> Result<Box<dyn RestorePlan>, VmmError> {
        Ok(Box::new(Plan::new(source, options)?))
    }

    fn start_clones(&self, request: CloneRequest<'_>) -> Result<Vec<RestoredVm>, VmmError> {
        let CloneRequest { source, options, drives, numbers, directories, .. } = request;
        let CloneRequest { ram, device_state, interrupted, .. } = request;
        let first = drives.first().cloned().unwrap_or_default();
        let options = PlanOptions { paused: true, log: None, drives: first, ..options };
        let plan = Plan::new(source, options)?;
        let count = directories.len();
        let of_clone = |number: &u32| plan.taps.of_clone(*number, count);
        let taps = numbers.iter().map(of_clone).collect::<Result<Vec<_>>>()?;
        taps.iter().try_for_each(Taps::require_present)?;
        let shared = SharedRam::fill(&plan.ram, ram)?;
        let mut clones: Vec<RestoredVm> = Vec::with_capacity(directories.len());
        for ((directory, drives), taps) in directories.iter().zip(drives).zip(taps) {
            let own = Plan { taps, drives: drives.clone(), ..plan.clone() };
            let own = own.at_socket(directory.join("api.sock"));
            let started = if interrupted.load(Ordering::Relaxed) {
                Err(Error::Interrupted)
            } else {
                own.to_file(directory.join("console.log")).start_shared(&shared, device_state)
            };
            match started {
                Ok((vm, ready_ns)) => {
                    let vm = Box::new(vm) as Box<dyn Vmm>;
                    clones.push(RestoredVm { vm, loading: None, ready_ns, filled_ns: None });
                }
                Err(error) => {
                    // The user gets the first error alone.
                    for clone in &mut clones {
                        let _ = clone.vm.end();
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(clones)
    }
}

impl RestorePlan for Plan {
    fn binary(&self) -> &Path {
        &self.identity.path
    }

    fn notes(&self) -> &[String] {
        &self.notes
    }

    fn start(
        self: Box<Self>,
        ram: RestoreRam<'_>,
        device_state: &[u8],
    ) -> Result<RestoredVm, VmmError> {
        let source = match ram {
            RestoreRam::Eager(source) => source,
            RestoreRam::Lazy(source) => {
                let (vm, loading, ready_ns) = self.start_lazy(source, device_state)?;
                let (vm, loading) = (Box::new(vm), Some(Box::new(loading) as Box<dyn LazyLoading>));
                return Ok(RestoredVm { vm, loading, ready_ns, filled_ns: None });
            }
        };
        let shared = SharedRam::fill(&self.ram, source)?;
        let filled_ns = Some(shared.filled_ns);
        let (vm, ready_ns) = self.start_shared(&shared, device_state)?;
        let ready_ns = ready_ns + shared.filled_ns;
        Ok(RestoredVm { vm: Box::new(vm) as Box<dyn Vmm>, loading: None, ready_ns, filled_ns })
    }
}
