//! A Firecracker of the benchmark's own, and its own snapshots.

use crate::Error;
use crate::guest_files::FirecrackerFiles;
use crate::interrupt::Interrupt;
use crate::running_process::RunningProcess;
use keyframe_firecracker::api::{Api, InstanceState, MemoryBackend};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time until a guest prints, in seconds.
const BOOT_S: f64 = 120.0;
/// Longest time until the API answers.
const API_TIMEOUT: Duration = Duration::from_secs(20);
/// The guest's table of pages: it writes them in a pseudo-random order.
const TABLE_PAGES: u64 = 2048;

/// What the guest does after it has written its RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// It writes pages.
    Writing,
    /// It halts.
    Idle,
}

/// A VM to start.
#[derive(Clone, Copy, Debug)]
pub struct VmShape {
    /// The size of its RAM.
    pub mib: u64,
    /// The part of its RAM that the guest writes once, besides its table of 8 MiB.
    pub filled_mib: u64,
    pub work: Work,
    /// Whether Firecracker tracks dirty pages for its Diff snapshots.
    pub tracks_dirty_pages: bool,
}

/// A running Firecracker. Dropping it ends the VM.
pub struct FirecrackerVm {
    process: RunningProcess,
    socket: PathBuf,
    api: Api,
}

/// The files of a snapshot.
#[derive(Clone, Debug)]
pub struct SnapshotFiles {
    pub state: PathBuf,
    pub memory: PathBuf,
}

/// The times of Firecracker's own load.
pub struct LoadTimes {
    /// From the start of Firecracker until it has resumed the VM.
    pub command_ns: f64,
    /// The requests to load and to resume.
    pub requests_ns: f64,
}

impl FirecrackerVm {
    /// Starts a VM, with its files in the new directory `dir`. Returns when the guest has printed.
    pub fn start(
        files: &FirecrackerFiles,
        dir: &Path,
        shape: VmShape,
        interrupt: &Interrupt,
    ) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))?;
        let fill = shape.filled_mib << 8;
        let idle = u8::from(shape.work == Work::Idle);
        let config = json!({
            "boot-source": {
                "kernel_image_path": files.payload(),
                "boot_args": format!("kf.pages={TABLE_PAGES} kf.fill={fill} kf.idle={idle}"),
            },
            "drives": [],
            "machine-config": {
                "vcpu_count": 1,
                "mem_size_mib": shape.mib,
                "track_dirty_pages": shape.tracks_dirty_pages,
            },
        });
        let file = dir.join("vm.json");
        std::fs::write(&file, config.to_string()).map_err(Error::io("write a configuration"))?;
        let output = dir.join("console.log");
        let (process, socket) = spawn(files, dir, Some(&file), &output)?;
        let api = connect(&socket)?;
        let mut vm = Self { process, socket, api };
        interrupt.wait("the guest has written its RAM", BOOT_S, || {
            if let Ok(Some(exit)) = vm.process.0.try_wait() {
                return Err(Error::failed("start a VM", format!("Firecracker ended with {exit}")));
            }
            let printed = std::fs::read_to_string(&output).unwrap_or_default();
            if printed.contains("kf ERROR") {
                return Err(Error::failed("start a VM", "the guest's RAM is damaged"));
            }
            Ok(printed.contains("kf 0").then_some(()))
        })?;
        Ok(vm)
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// Returns the socket of its API.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Pauses the VM, has a Full snapshot written to new files, and resumes it. Returns how long the
    /// VM stood still, in nanoseconds.
    pub fn full_snapshot(&mut self, files: &SnapshotFiles) -> Result<f64, Error> {
        self.snapshot(files, Api::save)
    }

    /// As [`Self::full_snapshot`], with the pages that were written since the snapshot before.
    pub fn diff_snapshot(&mut self, files: &SnapshotFiles) -> Result<f64, Error> {
        self.snapshot(files, Api::save_changes)
    }

    fn snapshot(
        &mut self,
        files: &SnapshotFiles,
        save: impl FnOnce(&mut Api, &Path, &Path) -> keyframe_firecracker::Result<()>,
    ) -> Result<f64, Error> {
        // A snapshot of its own for each time, as a user keeps them.
        for file in [&files.state, &files.memory] {
            match std::fs::remove_file(file) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io("remove a snapshot")(e));
                }
                _ => {}
            }
        }
        let failed = || Error::firecracker("Firecracker's own snapshot");
        let started = Instant::now();
        self.api.pause().map_err(failed())?;
        save(&mut self.api, &files.state, &files.memory).map_err(failed())?;
        self.api.resume().map_err(failed())?;
        Ok(started.elapsed().as_nanos() as f64)
    }
}

impl SnapshotFiles {
    /// Returns the files in `dir`.
    pub fn below(dir: &Path) -> Self {
        Self { state: dir.join("snapshot-state"), memory: dir.join("snapshot-memory") }
    }

    /// Loads the snapshot into a new Firecracker, which ends then.
    pub fn load(&self, files: &FirecrackerFiles, dir: &Path) -> Result<LoadTimes, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("make {}", dir.display())))?;
        let failed = || Error::firecracker("Firecracker's own load");
        let started = Instant::now();
        let (process, socket) = spawn(files, dir, None, &dir.join("console.log"))?;
        let mut api = connect(&socket)?;
        let connected = Instant::now();
        api.load(&self.state, MemoryBackend::File(&self.memory), &[]).map_err(failed())?;
        api.resume().map_err(failed())?;
        let command_ns = started.elapsed().as_nanos() as f64;
        let requests_ns = connected.elapsed().as_nanos() as f64;
        if api.instance().map_err(failed())?.state != InstanceState::Running {
            return Err(Error::failed("Firecracker's own load", "the VM does not run"));
        }
        drop(process);
        Ok(LoadTimes { command_ns, requests_ns })
    }
}

/// Starts Firecracker with a socket in `dir`, and with the VM of `config`, or without a VM.
fn spawn(
    files: &FirecrackerFiles,
    dir: &Path,
    config: Option<&Path>,
    output: &Path,
) -> Result<(RunningProcess, PathBuf), Error> {
    let socket = dir.join("api.sock");
    let _ = std::fs::remove_file(&socket);
    let output = File::create(output).map_err(Error::io("make a console's file"))?;
    let errors = output.try_clone().map_err(Error::io("make a console's file"))?;
    let mut command = Command::new(files.binary());
    command.arg("--api-sock").arg(&socket).current_dir(dir);
    if let Some(config) = config {
        command.arg("--config-file").arg(config);
    }
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    let child = command.spawn().map_err(Error::io("start Firecracker"))?;
    Ok((RunningProcess(child), socket))
}

/// Waits until the API at `socket` answers.
fn connect(socket: &Path) -> Result<Api, Error> {
    let until = Instant::now() + API_TIMEOUT;
    loop {
        match Api::connect(socket).and_then(|mut api| api.instance().map(|_| api)) {
            Ok(api) => return Ok(api),
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_micros(500)),
            Err(error) => return Err(Error::firecracker("connect to Firecracker")(error)),
        }
    }
}
