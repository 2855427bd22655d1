//! Recordings in QEMU: replay, comparison, checkpoints of a replay, analysis, debugging.
//!
//! ```text
//!   ReplayableRecording   a recording, its store and its log ─▶ intervals
//!   LiveRecording         the same while it is being recorded
//!   UnrecordedRun         the checkpoints of a run without a log, for simulations
//!
//!   Replay                checkpoint ─▶ QEMU ─▶ runs to an instruction ─▶ ends
//!   ReplayStepper         takes QEMU from instruction to instruction, and detects that it hangs
//!   PausedReplay          a replay that has stopped before an instruction, for a debugger
//!   Debugger              GDB over a recording, forward and backward
//!
//!   segment               takes checkpoints of a replay, at the cuts of a CutSource
//!   Analysis              a tool's plugin in the QEMU of each interval ─▶ parts ─▶ results
//!   JobSpec               what a worker on another node needs to know of an analysis
//!   RecordingMeasurements what the speed-up model needs to know of a recording and an analysis
//!   check_interval        replays an interval and compares its end with the next checkpoint
//! ```
//!
//! The crate prints nothing: it returns [`Error`]s and sends [`ReplayEvent`]s to an [`EventSink`].

pub mod analysis;
pub mod analysis_subject;
pub mod compare;
pub mod console;
pub mod cut_source;
pub mod debugger;
mod error;
pub mod event;
pub mod follower_process;
mod found_writes;
pub mod guest_ram;
pub mod idle_watch;
pub mod job_spec;
pub mod jobs;
pub mod live_recording;
pub mod measurements;
pub mod missing_cuts;
mod new_recording;
pub mod paused_replay;
mod qemu_probe;
pub mod qemu_support;
mod replay;
pub mod replay_stepper;
pub mod replayable_recording;
pub mod segment;
mod simulated_clusters;
mod try_count;
pub mod unrecorded_run;
pub mod verification;

pub use analysis::{
    Analysis, AnalysisHeader, FinishedPart, IntervalState, PartMaker, differing_files,
    interval_states, median_dispatch_ns, previous_timings,
};
pub use analysis_subject::{AnalysisSubject, KnownIntervals, ReplayControl};
pub use compare::{
    ComparedDisks, Difference, DifferencePlace, DifferingDevice, compare_disks, compare_ram,
    compare_ram_with_checkpoint,
};
pub use console::console;
pub use cut_source::{CompleteLogCuts, CutSource, GrowingLogCuts};
pub use debugger::Debugger;
pub use error::{AnalysisError, Error, ReplayError, Result};
pub use event::{EventSink, NoEvents, ReplayEvent, SharedReplayEventSink};
pub use follower_process::FollowerProcess;
pub use found_writes::{FoundWrite, WatchedMemory, found_writes};
pub use job_spec::{JobSpec, OpenedSubject, RunSelection, tool};
pub use keyframe_qemu::stream::DifferingSection;
pub use live_recording::LiveRecording;
pub use measurements::{MeasuredInterval, RecordingMeasurements};
pub use new_recording::{new_recording, recorded_images};
pub use paused_replay::{PauseOptions, PausedReplay, ReplayRoute};
pub use qemu_probe::log_version_of;
pub use qemu_support::QemuSupport;
pub use replay::{Replay, ReplayOptions, StartTimes};
pub use replay_stepper::{ReplayStepper, StopReason};
pub use replayable_recording::{
    ReplayableRecording, adopt_first_checkpoint, checkpoints_in, copy_checkpoints,
    sealed_checkpoints_in,
};
pub use simulated_clusters::{FailedSimulation, SimulatedClusters};
pub use unrecorded_run::{SimulatedVm, UnrecordedRun};
pub use verification::{CheckLimits, IntervalCheck, check_interval};
