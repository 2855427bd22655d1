//! A VM under continuous checkpoints, from its launch to its end.
//!
//! ```text
//!   launch (paused) ─▶ audit ─▶ attach ─▶ watchdog ─▶ cont ─▶ ┌ due, or asked for ─▶ cycle ┐ ─▶ end: finish the pack,
//!        │ refused: ended before the guest ran                └────────────────────────────┘    kill or keep the VM
//! ```
//!
//! Two threads: the engine captures, at a raised priority; the encoder stores the captured pages,
//! at a lowered one. With `--keep-within` a third thread forgets and prunes, with the encoder's
//! priority ([`flight_recorder`]); otherwise one recompresses packs ([`recompressor`]). The control
//! socket's threads only pass requests on. If the engine fails or is killed, the VM runs on.
//!
//! The engine drives the VM through the traits of `keyframe_vmm`; [`session_vm::SessionVm`] is the
//! one place that knows QEMU. [`run_vm`] runs a session of any other VMM. The engine's loop is
//! tested on a fake VM (`engine/tests`).
//!
//! A program that runs sessions itself calls [`helper_process::run_if_asked`] first in its `main`;
//! `examples/checkpoint_vm.rs` is one.

mod any_vmm;
pub mod attach;
pub mod audit;
pub mod budget;
pub mod console;
pub mod control;
pub mod cycle_observer;
pub mod encoder_thread;
pub mod engine;
pub mod error;
pub mod event;
pub mod faults;
pub mod flight_recorder;
pub mod group_restore;
pub mod helper_process;
pub mod instruction_count;
pub mod interrupt;
mod interrupted_rollback;
pub mod lans;
pub mod launch;
pub mod machines;
pub mod memory_guard;
pub mod memory_limits;
pub mod migration_import;
pub mod ram_capture;
pub mod readiness;
pub mod recompressor;
pub mod recording;
mod rehearsal;
pub mod rights;
pub mod rollback_rescue;
pub mod run_dir;
pub mod session_vm;
pub mod store_sink;
mod succession_rescue;
mod target_ram;
pub mod teardown;
pub mod watchdog_keeper;

pub use any_vmm::{VmSource, run_vm};
pub use engine::{RunEnd, RunReport, Successor, Verdict};
pub use error::{CheckpointError, Error, Result, error_chain};
pub use event::{Event, EventSink, NoEvents, SharedEventSink};
pub use faults::Fault;
pub use keyframe_vmm::GuestEnd;
pub use launch::{CommandLines, machine_meta, refuse, refuse_running_scans};
pub use recompressor::Recompress;
pub use recording::RecordingOptions;

use crate::control::{OnExit, Strategy, TrackerKind};
use keyframe_disk_capture::{DiskMethod, ExcludedDisks};
use keyframe_qemu::AttachOptions;
use keyframe_store::Store;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The networks that checkpoints of a group hold.
#[derive(Clone, Debug, Default)]
pub enum LanChoice {
    /// No networks.
    #[default]
    None,
    /// Those of a switch that the session starts, which listens at these sockets.
    Own(Vec<PathBuf>),
    /// Those of the user's switch, with this control socket.
    Control(PathBuf),
}

/// The options of a session.
#[derive(Clone)]
pub struct SessionOptions {
    /// The time between two checkpoints; `None` if checkpoints are taken by command only.
    pub interval: Option<Duration>,
    /// The number of checkpoints after which the session ends; `None` for no limit.
    pub count: Option<u64>,
    /// The name of the VM, or of the group; `None` for the name on its command line.
    pub name: Option<String>,
    /// What happens to a VM that still runs at the session's end.
    pub on_exit: OnExit,
    /// The strategy that copies pages.
    pub strategy: Strategy,
    /// The method that finds dirty pages.
    pub tracker: TrackerKind,
    /// The longest pause that the user asks for; `None` for no limit.
    pub max_pause: Option<Duration>,
    /// The largest share of the guest's time that the user asks for, for example 0.03 for 3 %;
    /// `None` for no limit.
    pub max_overhead: Option<f64>,
    /// The number of threads that copy; `None` for as many as turn out to be fastest.
    pub copy_threads: Option<usize>,
    /// The memory for pages between the copy and the store, in MiB; `None` for the RAM's size, but
    /// at most a quarter of the free memory.
    pub staging_mib: Option<u64>,
    /// The number of threads that encode; `None` for as many as suit the machine.
    pub encode_threads: Option<usize>,
    /// The memory for the pages against which changes are stored, in MiB.
    pub encode_memory_mib: u64,
    /// The memory for the index of deduplication, in MiB.
    pub index_memory_mib: u64,
    /// The time at which checkpoints become durable.
    pub durability: keyframe_store::Durability,
    /// The longest pause, after which the watchdog resumes the VM.
    pub pause_limit: Duration,
    /// The sink for the session's events.
    pub events: SharedEventSink,
    /// The directory for full copies of RAM, with which each checkpoint is compared; `None` for no
    /// such audit.
    pub audit: Option<PathBuf>,
    /// The method that captures disks.
    pub disk: DiskMethod,
    /// The disks that stay out of checkpoints.
    pub leave_out: ExcludedDisks,
    /// The networks between the members of a group.
    pub lans: LanChoice,
    /// The age after which the running session forgets checkpoints; `None` to keep all.
    pub keep_within: Option<Duration>,
    /// The options of the recording, if the VM is recorded or replays one.
    pub recorded: Option<RecordingOptions>,
    /// The time at which packs are recompressed.
    pub recompress: Recompress,
    /// True to load the first checkpoint into a second QEMU, which never runs, before it is
    /// reported as sealed. If that QEMU refuses it, no more checkpoints are taken.
    pub rehearsal: bool,
    /// True to count the guest's instructions by the host's processor, so that intervals of a VM
    /// under KVM have a length in instructions.
    pub count_instructions: bool,
    /// A fault to inject, for tests. `None` for no fault.
    pub fault: Option<Fault>,
}

impl SessionOptions {
    /// Returns the options of a session that takes a checkpoint each `interval`, with the defaults
    /// of `keyframe run` for all else, and without an event sink.
    pub fn every(interval: Option<Duration>, on_exit: OnExit) -> Self {
        Self {
            interval,
            count: None,
            name: None,
            on_exit,
            strategy: Strategy::Precopy,
            tracker: TrackerKind::Auto,
            max_pause: None,
            max_overhead: None,
            copy_threads: None,
            staging_mib: None,
            encode_threads: None,
            encode_memory_mib: 256,
            index_memory_mib: 256,
            durability: keyframe_store::Durability::default(),
            pause_limit: Duration::from_secs(5),
            events: Arc::new(NoEvents),
            audit: None,
            disk: DiskMethod::Auto,
            leave_out: ExcludedDisks::default(),
            lans: LanChoice::None,
            keep_within: None,
            recorded: None,
            recompress: Recompress::default(),
            rehearsal: true,
            count_instructions: false,
            fault: None,
        }
    }

    /// Returns the tracker that the strategy needs. Error: [`Error::CopyOnWriteTracker`] if
    /// copy-on-write is asked for with another tracker.
    pub fn tracker_kind(&self) -> Result<TrackerKind> {
        match (self.tracker, self.strategy) {
            (TrackerKind::Auto, Strategy::Cow) => Ok(TrackerKind::Sync),
            (
                TrackerKind::Window | TrackerKind::WriteProtect | TrackerKind::Compare,
                Strategy::Cow,
            ) => Err(Error::CopyOnWriteTracker),
            (other, _) => Ok(other),
        }
    }
}

/// Launches the VMs of `commands`, and takes checkpoints of them into `store` until they end or the
/// session is asked to end. Returns the result of the run. Errors: those of the launch; the failure
/// that ended the run; a failed teardown.
pub fn run(store: &Store, commands: CommandLines, options: SessionOptions) -> Result<RunReport> {
    budget::check(&options)?;
    let parts = launch::launch(store, commands, &options)?;
    engine_over(store, parts, options)?.run()
}

/// Creates an engine over VMs whose guests have not run, or that only replay. Errors: the run
/// cannot be begun in the store; a thread cannot be started. After an error the VMs are ended.
pub fn engine_over(
    store: &Store,
    parts: launch::PreparedSession,
    options: SessionOptions,
) -> Result<engine::Engine<'_>> {
    let open = |member: &machines::Member| keyframe_kernel::Process::open(member.vm.pid());
    let qemus: Vec<_> = parts.machines.members().iter().map(open).collect();
    engine::Engine::new(store, parts, options).inspect_err(|_| {
        for qemu in qemus.iter().flatten() {
            let _ = rustix::process::pidfd_send_signal(qemu.pidfd(), rustix::process::Signal::KILL);
        }
    })
}

/// Takes checkpoints of the running QEMUs of `vms` (process id and way to the monitor) into
/// `store`, until the session is asked to end or the VMs end. Several are a group. Returns the
/// result of the run. Errors: those of [`attach::attach`]; the failure that ended the run; a failed
/// teardown.
pub fn attach(
    store: &Store,
    vms: &[(u32, AttachOptions)],
    options: SessionOptions,
) -> Result<RunReport> {
    budget::check(&options)?;
    let parts = attach::attach(store, vms, &options)?;
    engine::Engine::new(store, parts, options)?.run()
}
