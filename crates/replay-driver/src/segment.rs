//! A replay, as a VM of which checkpoints are taken.

use crate::error::{Error, ReplayError, Result};
use crate::{Course, Passage, Reached, SOCKET, Source, Started, With, begin, jobs};
use keyframe_qemu::restore::Until;
use keyframe_qemu::{QemuIdentity, Vm};
use keyframe_replay::interval::RecordedCheckpoint;
use keyframe_session::disk_capture::DiskCapture;
use keyframe_session::disk_capture::served::ServedDiskCapture;
use keyframe_session::engine::{ReplaySteps, Step};
use keyframe_session::launch::{self, RefusedVms, StartedVm};
use keyframe_session::machines::Peripherals;
use keyframe_session::run_dir::RunDir;
use keyframe_session::{Options, RecordingOptions, Verdict, engine_over};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Replays the recording from its checkpoint `from` on and takes a checkpoint at each cut of
/// `course` into its store.
pub fn segment(
    source: &Source,
    from: RecordedCheckpoint,
    course: &mut dyn Course,
    mut options: Options,
    tell: &mut dyn FnMut(u64),
) -> Result<Verdict> {
    let interrupted = jobs::interruption()?;
    launch::require_kernel(&options)?;
    let Some(first) = course.next_cut(from.icount, &interrupted)? else {
        return Ok(Verdict::Complete);
    };
    let name = options.name.clone().unwrap_or_else(|| source.recording.meta.vm.clone());
    let run_dir = RunDir::claim(&name).map_err(keyframe_session::Error::from)?;
    let writer = launch::lock(&source.store, "segment", &name, &options)?;
    let until = Until::Instruction(first);
    let with = With::default();
    let mut passage = Passage {
        icount: from.icount,
        until,
        holds: source.holds()?,
        log: source.log().into(),
        patience: with.patience,
    };
    let Started { mut restored, disks, loaded } = begin(source, from, passage.next_stop(), &with)?;
    let arrived = passage.arrive(&mut restored, &interrupted, tell);
    let socket = disks.as_ref().map(|(_, folder)| folder.path().join(SOCKET));
    let (served, _folder) =
        disks.map_or((None, None), |(served, folder)| (Some(served), Some(folder)));
    let pause_limit = options.pause_limit;
    let disks = served.map(|served| {
        let events = Arc::clone(&options.events);
        DiskCapture::Served(ServedDiskCapture::new(served, pause_limit, events))
    });
    let mut vm = restored.into_vm();
    if let Some(socket) = socket {
        vm.mind_server(socket);
    }
    if !matches!(arrived, Ok(Reached::There)) {
        let _ = vm.kill();
        if let Some(disks) = disks {
            let _ = disks.end();
        }
        return Err(match arrived? {
            Reached::Interrupted => Error::Interrupted,
            _ => ReplayError::LogTooShort(first).into(),
        });
    }
    let machine = &loaded.meta.machine;
    let identity = QemuIdentity {
        path: PathBuf::from(&machine.binary_path),
        version: machine.vmm_version.clone(),
        blake3: machine.binary_blake3.clone(),
    };
    let directory = PathBuf::from(&machine.working_directory);
    options.recorded = Some(RecordingOptions {
        recording: source.recording.meta.id.clone(),
        log: source.log().to_owned(),
        machine: Some(machine.clone()),
        begin: Some(from.checkpoint),
    });
    let found =
        StartedVm { name: name.clone(), vm, identity, directory, monitor: None, runs: false };
    let peripherals = Peripherals { lans: None, disks };
    let parts = launch::prepare(
        &source.store,
        writer,
        run_dir,
        (name, false),
        (vec![found], peripherals),
        &options,
    )
    .map_err(|refused| {
        let RefusedVms { error, found, peripherals } = *refused;
        launch::end(found, peripherals, error)
    })?;
    let engine = engine_over(&source.store, parts, options)?;
    tell(passage.icount);
    Ok(engine.run_through(&mut Steps { passage, course, tell })?.verdict())
}

/// The cuts of a course, reached one after the other by a passage.
struct Steps<'a> {
    passage: Passage,
    course: &'a mut dyn Course,
    tell: &'a mut dyn FnMut(u64),
}

impl ReplaySteps for Steps<'_> {
    type Error = Error;

    fn is_captured(&self) -> bool {
        self.course.is_there(self.passage.icount)
    }

    fn advance(&mut self, vm: &mut Vm, is_busy: bool, interrupted: &AtomicBool) -> Result<Step> {
        let next = if is_busy {
            self.course.behind_answer(self.passage.icount, interrupted)?
        } else {
            self.course.next_cut(self.passage.icount, interrupted)?
        };
        let Some(next) = next else { return Ok(Step::End) };
        let until = Until::Instruction(next);
        let reached = self.passage.go_on(vm, until, interrupted, self.tell)?;
        (self.tell)(self.passage.icount);
        Ok(match reached {
            Reached::There => Step::Stands,
            Reached::LogEnd => Step::End,
            Reached::Interrupted => Step::Interrupted,
        })
    }
}
