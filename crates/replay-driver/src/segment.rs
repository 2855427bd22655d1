//! Takes checkpoints of a replay, as if it were a running VM.

use crate::error::{Error, ReplayError, Result};
use crate::replay::{ReplayDisks, StartedReplay, start_qemu};
use crate::{CutSource, ReplayOptions, ReplayStepper, ReplayableRecording, StopReason, jobs};
use keyframe_disk_capture::DiskCapture;
use keyframe_disk_capture::served::ServedDiskCapture;
use keyframe_qemu::restore::Until;
use keyframe_qemu::{QemuIdentity, Vm};
use keyframe_replay::interval::RecordedCheckpoint;
use keyframe_session::engine::{ReplaySteps, Step};
use keyframe_session::event::disk_events;
use keyframe_session::launch::{self, RefusedVms, StartedVm};
use keyframe_session::machines::Peripherals;
use keyframe_session::run_dir::RunDir;
use keyframe_session::{RecordingOptions, SessionOptions, Verdict, engine_over};
use keyframe_store::MachineMeta;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Replays `recording` from its checkpoint `from`, and takes a checkpoint at each cut of
/// `cut_source` into the recording's store. `on_progress` is called now and then with the
/// instruction that QEMU has reached.
///
/// # Errors
///
/// The store is locked, the replay fails before its first cut, or the session fails. The returned
/// verdict tells of checkpoints that failed.
pub fn segment(
    recording: &ReplayableRecording,
    from: RecordedCheckpoint,
    cut_source: &mut dyn CutSource,
    mut options: SessionOptions,
    on_progress: &mut dyn FnMut(u64),
) -> Result<Verdict> {
    let interrupted = jobs::interruption()?;
    launch::require_kernel(&options)?;
    let Some(first) = cut_source.next_cut(from.icount, &interrupted)? else {
        return Ok(Verdict::Complete);
    };
    let name = options.name.clone().unwrap_or_else(|| recording.recording.meta.vm.clone());
    let run_dir = RunDir::claim(&name).map_err(keyframe_session::Error::from)?;
    let writer = launch::lock(&recording.store, "segment", (&name, &[]), &options)?;
    let at_cut = replay_to(recording, from, first, &interrupted, on_progress)?;
    let AtFirstCut { vm, disks, stepper, machine } = at_cut;
    let (disks, _folder) =
        disks.map_or((None, None), |disks| (Some(disks.served), Some(disks.folder)));
    options.recorded = Some(RecordingOptions {
        has_lost_log: Arc::default(),
        recording: recording.recording.meta.id.clone(),
        log: recording.log().to_owned(),
        machine: Some(machine.clone()),
        begin: Some(from.checkpoint),
    });
    let (pause_limit, events) = (options.pause_limit, disk_events(&options.events));
    let disks = disks.map(|served| {
        Box::new(ServedDiskCapture::new(served, pause_limit, events)) as Box<dyn DiskCapture>
    });
    let started = StartedVm {
        name: name.clone(),
        vm,
        identity: QemuIdentity {
            path: PathBuf::from(&machine.binary_path),
            version: machine.vmm_version.clone(),
            blake3: machine.binary_blake3.clone(),
        },
        directory: PathBuf::from(&machine.working_directory),
        monitor: None,
        runs: false,
    };
    let peripherals = Peripherals { lans: None, disks };
    let parts = launch::prepare(
        &recording.store,
        writer,
        run_dir,
        (name, false),
        (vec![started], peripherals),
        &options,
    )
    .map_err(|refused| {
        let RefusedVms { error, found, peripherals } = *refused;
        launch::end(found, peripherals, error)
    })?;
    let engine = engine_over(&recording.store, parts, options)?;
    on_progress(stepper.icount);
    Ok(engine.run_through(&mut Steps { stepper, cut_source, on_progress })?.verdict())
}

/// A replay that has stopped at its first cut.
struct AtFirstCut {
    vm: Vm,
    disks: Option<ReplayDisks>,
    stepper: ReplayStepper,
    /// The machine of the checkpoint that it began with.
    machine: MachineMeta,
}

/// Replays from the checkpoint `from` to the cut `first`. If it does not come there, QEMU and the
/// process of its disks have ended when this returns.
fn replay_to(
    recording: &ReplayableRecording,
    from: RecordedCheckpoint,
    first: u64,
    interrupted: &AtomicBool,
    on_progress: &mut dyn FnMut(u64),
) -> Result<AtFirstCut> {
    let options = ReplayOptions::default();
    let mut stepper = ReplayStepper {
        icount: from.icount,
        until: Until::Instruction(first),
        holds: recording.holds()?,
        log: recording.log().into(),
        stops_anywhere: true,
        patience: options.patience,
    };
    let started = start_qemu(recording, from, &stepper, &options)?;
    let StartedReplay { mut restored, disks, loaded } = started;
    let arrived = stepper.arrive(&mut restored, interrupted, on_progress);
    let socket = disks.as_ref().map(ReplayDisks::socket);
    let mut vm = restored.into_vm();
    if let Some(socket) = socket {
        vm.mind_server(socket);
    }
    if !matches!(arrived, Ok(StopReason::Target)) {
        let _ = vm.kill();
        if let Some(disks) = disks {
            let _ = disks.served.end(false);
        }
        return Err(match arrived? {
            StopReason::Interrupted => Error::Interrupted,
            _ => ReplayError::LogTooShort(first).into(),
        });
    }
    Ok(AtFirstCut { vm, disks, stepper, machine: loaded.meta.machine.clone() })
}

/// Takes the engine's VM from cut to cut.
struct Steps<'a> {
    stepper: ReplayStepper,
    cut_source: &'a mut dyn CutSource,
    on_progress: &'a mut dyn FnMut(u64),
}

impl ReplaySteps for Steps<'_> {
    type Error = Error;

    fn is_captured(&self) -> bool {
        self.cut_source.has_checkpoint_at(self.stepper.icount)
    }

    fn advance(
        &mut self,
        vm: &mut Vm,
        is_busy: bool,
        interrupted: &AtomicBool,
    ) -> Result<Step, Error> {
        let next = if is_busy {
            self.cut_source.next_after_disk_answer(self.stepper.icount, interrupted)?
        } else {
            self.cut_source.next_cut(self.stepper.icount, interrupted)?
        };
        let Some(next) = next else { return Ok(Step::End) };
        let until = Until::Instruction(next);
        let reached = self.stepper.go_on(vm, until, interrupted, self.on_progress)?;
        (self.on_progress)(self.stepper.icount);
        Ok(match reached {
            StopReason::Target => Step::Stands,
            StopReason::LogEnd => Step::End,
            StopReason::Interrupted => Step::Interrupted,
        })
    }
}
