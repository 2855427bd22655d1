//! One QEMU that replays a recording from a checkpoint.
//!
//! ```text
//!   start(n) ─▶ runs from the checkpoint's instruction ─▶ stops at n ─▶ go_on(m) ...
//!                                                      ├─▶ the log ends, and QEMU with it
//!                                                      └─▶ it diverges: QEMU hangs, and does not say so
//! ```
//!
//! While a replay is paused, QEMU's main loop takes events from the log that it finds there, also
//! those that belong behind the point at which the recorded VM went on. So a replay never stops at
//! its own checkpoint, and goes on only from an instruction at which the log has no event
//! ([`LogIndex::next_unambiguous`](keyframe_replay::log::LogIndex::next_unambiguous)).
//!
//! Invariant: dropping a [`Replay`] ends its QEMU.

use crate::ReplayableRecording;
use crate::error::{Error, Result};
use crate::replay_stepper::{PATIENCE, ReplayStepper, StopReason};
use keyframe_inspect::guest_memory::CheckpointRam;
use keyframe_inspect::source_of;
use keyframe_qemu::recording::{
    RecordingClock, RecordingLineOptions, RecordingMode, recording_line,
};
use keyframe_qemu::restore::{
    self, Plan, ReplayStart, RestoreOptions, RestoreSource, Restored, Until,
};
use keyframe_qemu::{DiskServer, media_of};
use keyframe_replay::interval::RecordedCheckpoint;
use keyframe_scratch_directory::ScratchDirectory;
use keyframe_store::{LoadedCheckpoint, MachineMeta, Store};
use keyframe_units::elapsed_ns;
use keyframe_vm_disks::media::Media;
use keyframe_vm_disks::{self as disks, ServedDisks, restored};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The name of the disks' socket.
const DISKS_SOCKET: &str = "disks.sock";

/// The options of a replay.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Words for QEMU's command line, after the recorded ones.
    pub extra: Vec<OsString>,
    /// The file that receives the guest's serial output; `None` to discard it.
    pub console: Option<PathBuf>,
    /// The file to which QEMU's messages are appended; `None` for this process's standard error.
    pub log: Option<PathBuf>,
    /// True if pages of RAM are loaded when the guest touches them, not all before it runs.
    pub lazy: bool,
    /// True if the replay may be stopped at any instruction, not only between intervals.
    pub stops_anywhere: bool,
    /// The time for which the replay may stay at one instruction before it counts as diverged.
    pub patience: Duration,
}

impl Default for ReplayOptions {
    fn default() -> Self {
        Self {
            extra: Vec::new(),
            console: None,
            log: None,
            lazy: false,
            stops_anywhere: false,
            patience: PATIENCE,
        }
    }
}

/// How long the steps of a replay's start took, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTimes {
    /// Reading the checkpoint's index and serving its disks.
    pub checkpoint_ns: u64,
    /// Then, until QEMU's process with the tool's plugin answered.
    pub process_ns: u64,
    /// Then, until the VM could run: waiting for the copy of the RAM, and loading the devices.
    pub devices_ns: u64,
    /// The copy of the RAM out of the store, which begins with the process; `None` if the guest
    /// loads pages by touching them.
    pub ram_ns: Option<u64>,
}

/// A QEMU that replays.
pub struct Replay {
    vm: RunningVm,
    stepper: ReplayStepper,
    /// The checkpoint that the replay began with.
    pub loaded: Arc<LoadedCheckpoint>,
    /// How long its start took.
    pub start_times: StartTimes,
}

impl Replay {
    /// Starts QEMU at `checkpoint` of `recording`, and lets it run to `until`. Errors: the
    /// checkpoint or the log cannot be read; QEMU cannot be started, or refuses the state.
    pub fn start(
        recording: &ReplayableRecording,
        checkpoint: RecordedCheckpoint,
        until: Until,
        options: &ReplayOptions,
    ) -> Result<Self> {
        let stepper = ReplayStepper {
            icount: checkpoint.icount,
            until,
            holds: recording.holds()?,
            log: recording.log().into(),
            stops_anywhere: options.stops_anywhere,
            patience: options.patience,
        };
        let began = Instant::now();
        let started = start_qemu(recording, checkpoint, &stepper, options)?;
        let whole_ns = elapsed_ns(began);
        let StartedReplay { restored, disks, loaded } = started;
        let (ready_ns, process_ns) = (restored.ready_ns(), restored.process_ns());
        let ram_ns = restored.filled_ns();
        let start_times = StartTimes {
            checkpoint_ns: whole_ns.saturating_sub(ready_ns),
            process_ns,
            devices_ns: ready_ns.saturating_sub(process_ns),
            ram_ns,
        };
        Ok(Self { vm: RunningVm { restored, disks }, stepper, loaded, start_times })
    }

    /// Returns the replay's QEMU.
    pub fn restored(&mut self) -> &mut Restored {
        &mut self.vm.restored
    }

    /// Returns the replay's disks; `None` if the VM has none.
    pub fn served(&mut self) -> Option<&mut ServedDisks> {
        self.vm.disks.as_mut().map(|disks| &mut disks.served)
    }

    /// Replaces the instructions at which the replay stops for a moment on its way
    /// ([`ReplayableRecording::holds`]), which are more in a recording that has grown.
    pub fn set_holds(&mut self, holds: Arc<[u64]>) {
        self.stepper.holds = holds;
    }

    /// Waits until the replay has reached its target, as [`ReplayStepper::arrive`] does. Errors:
    /// the replay departs from the recording; QEMU ends early or does not answer.
    pub fn arrive(
        &mut self,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<StopReason> {
        self.stepper.arrive(&mut self.vm.restored, interrupted, on_progress)
    }

    /// Lets the replay run on to `until`, and waits until it is there, as [`ReplayStepper::go_on`]
    /// does. Errors: the replay departs from the recording; QEMU ends early or does not answer.
    pub fn go_on(
        &mut self,
        until: Until,
        interrupted: &AtomicBool,
        on_progress: &mut dyn FnMut(u64),
    ) -> Result<StopReason> {
        self.stepper.go_on(&mut self.vm.restored, until, interrupted, on_progress)
    }

    /// Ends QEMU in good order, so that a plugin writes its results. Error: QEMU or the process of
    /// its disks does not end in good order.
    pub fn end(self) -> Result<()> {
        self.vm.end()
    }
}

/// The disks of a replay, served by a process of their own.
pub(crate) struct ReplayDisks {
    pub served: ServedDisks,
    /// The directory of their socket.
    pub folder: ScratchDirectory,
}

impl ReplayDisks {
    /// Returns the path of the socket at which the disks are served.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join(DISKS_SOCKET)
    }

    /// Returns the server of the disks, for QEMU's command line.
    pub fn server(&self) -> DiskServer {
        DiskServer::at(self.socket())
    }
}

/// A QEMU and its disks. Dropping it ends both.
pub(crate) struct RunningVm {
    pub restored: Restored,
    pub disks: Option<ReplayDisks>,
}

impl RunningVm {
    /// Ends QEMU in good order, then the process of its disks. Error: QEMU or the process of its
    /// disks does not end in good order.
    pub fn end(mut self) -> Result<()> {
        let killed = self.restored.kill().map_err(Error::from);
        let closed = self.disks.take().map_or(Ok(()), |disks| disks.served.end(false).map(drop));
        killed.and(closed.map_err(Error::from))
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        // The caller has the error that led here.
        let _ = self.restored.kill();
        if let Some(disks) = self.disks.take() {
            let _ = disks.served.end(false);
        }
    }
}

/// A QEMU that was started at a checkpoint of a recording.
pub(crate) struct StartedReplay {
    pub restored: Restored,
    pub disks: Option<ReplayDisks>,
    /// The checkpoint.
    pub loaded: Arc<LoadedCheckpoint>,
}

/// Starts QEMU at `checkpoint`, and lets it run to the first stop of `stepper`.
pub(crate) fn start_qemu(
    recording: &ReplayableRecording,
    checkpoint: RecordedCheckpoint,
    stepper: &ReplayStepper,
    options: &ReplayOptions,
) -> Result<StartedReplay> {
    let network_may_be_late = stepper.may_be_late();
    let store = &recording.store;
    let loaded = store.load(checkpoint.checkpoint).map_err(|e| Error::store(store.path(), e))?;
    let loaded = Arc::new(loaded);
    let mut disks = serve_disks(store, &loaded)?;
    let mut source = source_of(&loaded.meta.machine, &loaded.meta.ram);
    let media = serve_media(&source.machine);
    add_replay_options(&mut source, recording, options, disks.as_ref(), media.as_ref())?;
    let restore_options = RestoreOptions {
        qemu: recording.qemu.clone(),
        replays: Some(ReplayStart { until: stepper.next_stop(), network_may_be_late }),
        log: options.log.clone(),
        ..RestoreOptions::default()
    };
    let plan = Plan::new(source, options.extra.clone(), restore_options)?;
    let ram = Arc::new(CheckpointRam(Arc::clone(&loaded)));
    let mut restored = if options.lazy {
        restore::start_lazy(plan, ram, &loaded.device_state)
    } else {
        restore::start(plan, &*ram, &loaded.device_state)
    }?;
    let core = restored.vm().core();
    if let (Some(disks), Some(core)) = (&mut disks, core) {
        disks.served.disks.answer_on(core)?;
    }
    if let Some(mut media) = media {
        core.map_or(Ok(()), |core| media.answer_on(core))?;
        restored.vm().accompany(media);
    }
    Ok(StartedReplay { restored, disks, loaded })
}

/// Changes the command line in `source` so that QEMU replays the log of `recording`.
fn add_replay_options(
    source: &mut RestoreSource,
    recording: &ReplayableRecording,
    options: &ReplayOptions,
    disks: Option<&ReplayDisks>,
    media: Option<&Media>,
) -> Result<()> {
    let (server, media) = (disks.map(ReplayDisks::server), media.map(Media::server));
    let machine = &mut source.machine;
    let words = machine.user_command.split_off(1.min(machine.user_command.len()));
    let recording = RecordingLineOptions {
        mode: RecordingMode::Replay,
        log: recording.log(),
        disks: server.as_ref(),
        media: media.as_ref(),
        qemu_version: &machine.vmm_version,
        processor: machine.processor,
        console: options.console.as_deref(),
        clock: RecordingClock::Same(&machine.full_command),
    };
    let line = recording_line(&words, recording).map_err(keyframe_qemu::Error::from)?;
    machine.user_command.extend(line.words);
    Ok(())
}

/// Serves the disks as they were at the checkpoint. The VM's writes are discarded at its end.
/// Returns `None` if the VM has no disks.
pub(crate) fn serve_disks(store: &Store, loaded: &LoadedCheckpoint) -> Result<Option<ReplayDisks>> {
    if loaded.meta.disks.is_empty() {
        return Ok(None);
    }
    restored::require_all(loaded.id, &loaded.meta)?;
    let mut wanted = restored::disks_of_checkpoint(store, loaded.id, &loaded.meta)?;
    for disk in &mut wanted {
        disk.temporary = true;
    }
    let folder = ScratchDirectory::new("replay");
    let folder = folder.map_err(|e| Error::io("make a directory for a socket", e))?;
    let socket = folder.path().join(DISKS_SOCKET);
    let served = disks::serve(store, &loaded.meta.vm, Some(loaded.id.0), wanted, &socket)?;
    Ok(Some(ReplayDisks { served, folder }))
}

/// Serves the media that the guest can only read. Returns `None` if QEMU has to read them itself.
fn serve_media(machine: &MachineMeta) -> Option<Media> {
    let media = media_of(machine.user_command.get(1..)?).ok()?;
    Media::serve(&media, &machine.directory(), &std::env::temp_dir()).ok()?
}
