//! The store as the checkpoint cycle's sink.

use super::error::Result;
use super::faults::{Fault, FaultKind};
use super::recording::Position;
use super::rehearsal::Rehearsal;
use super::session_vm::SessionVm;
use keyframe_capture::{BoxError, CapturedCheckpoint, CheckpointSink, PausedFind};
use keyframe_disk_capture::DiskCut;
use keyframe_qemu::AuditFinding;
use keyframe_store::{
    DiskState, MachineMeta, MemberMeta, PausePhases, ProcessingPhases, Recorded, Run, SealRequest,
    Sealed, SinceBoot, Timing,
};
use keyframe_units::{CheckpointId, Epoch, Page, PageIndex, duration_ns, elapsed_ns};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The reason why a session takes a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointReason {
    /// The interval has passed.
    #[default]
    Interval,
    /// A user asked for it.
    Take,
    /// A recording begins.
    Begin,
    /// A recording ends.
    End,
    /// The guest has ended or failed.
    GuestEnd,
    /// A replay stands at an instruction at which a checkpoint was asked for.
    Segment,
    /// A rollback keeps the state before it, and the state after it.
    Rollback,
}

impl CheckpointReason {
    /// Returns the reason's name in a checkpoint's metadata, such as `interval`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interval => "interval",
            Self::Take => "take",
            Self::Begin => "begin",
            Self::End => "end",
            Self::GuestEnd => "guest-end",
            Self::Segment => "segment",
            Self::Rollback => "rollback",
        }
    }
}

/// The session's data about a checkpoint, besides the captured pages.
#[derive(Clone, Debug, Default)]
pub struct CheckpointLabel {
    /// The reason why it is taken.
    pub reason: CheckpointReason,
    /// The delay with which it began, in nanoseconds.
    pub backlog_ns: u64,
    /// A tag for it; `None` for no tag.
    pub tag: Option<String>,
    /// The disk blocks that its pause cut; `None` if no disks are captured.
    pub cut: Option<DiskCut>,
    /// The checkpoint that the VM was brought back to since the previous one, and the number of
    /// times that it has been brought back by then; `None` if it was not brought back.
    pub parent: Option<(CheckpointId, u64)>,
    /// The instruction count of a recorded or counted VM; `None` for another VM.
    pub position: Option<Position>,
    /// The machines, if they were changed since the run's begin.
    pub machines: Option<Arc<MachineDescriptions>>,
}

/// The descriptions of the machines of a session, as checkpoints hold them.
#[derive(Clone, Debug, Default)]
pub struct MachineDescriptions {
    machine: MachineMeta,
    members: Vec<MemberMeta>,
}

impl MachineDescriptions {
    /// Describes the members of a group, or the one VM.
    pub fn new(mut members: Vec<MemberMeta>, is_group: bool) -> Self {
        if is_group {
            return Self { machine: MachineMeta::default(), members };
        }
        Self { machine: members.pop().unwrap_or_default().machine, members: Vec::new() }
    }

    /// Returns the description of the one VM.
    pub fn machine(&self) -> &MachineMeta {
        &self.machine
    }

    /// Brings the command lines and RAM blocks of the descriptions up to date with `vms`. Error: a
    /// VMM does not answer.
    pub fn refresh<'a>(&mut self, vms: impl Iterator<Item = &'a mut SessionVm>) -> Result<()> {
        if self.members.is_empty() {
            for vm in vms {
                vm.refresh(&mut self.machine)?;
            }
            return Ok(());
        }
        for (member, vm) in self.members.iter_mut().zip(vms) {
            vm.refresh(&mut member.machine)?;
            member.ram_blocks = vm.vm_mut().ram_layout()?.blocks().len();
        }
        Ok(())
    }
}

impl MachineDescriptions {
    /// Updates the descriptions of changed VMs to the machines as they are now. The inner `Err` has
    /// the changes that no command line can make. Errors: those of [`SessionVm::follow`].
    pub fn follow<'a>(
        &mut self,
        vms: impl Iterator<Item = &'a mut SessionVm>,
    ) -> Result<Result<(), Vec<AuditFinding>>, BoxError> {
        let is_group = !self.members.is_empty();
        for (number, vm) in vms.enumerate() {
            if vm.changes().is_none() {
                continue;
            }
            let machine = match self.members.get_mut(number) {
                Some(member) => &mut member.machine,
                None if is_group => continue,
                None => &mut self.machine,
            };
            if let Err(findings) = vm.follow(machine)? {
                return Ok(Err(findings));
            }
        }
        Ok(Ok(()))
    }
}

/// A sink that stores the checkpoints of one run.
pub struct StoreSink {
    run: Run,
    machines: MachineDescriptions,
    fault: Option<Fault>,
    origin: Option<CheckpointId>,
    /// The id of the recording to which the checkpoints belong; `None` for no recording.
    pub recording: Option<String>,
    /// The rehearsal of a restore of the first checkpoint; `None` for no rehearsal, and afterwards.
    pub(crate) rehearsal: Option<Rehearsal>,
    /// The number of rollbacks that the newest sealed checkpoint includes.
    went_back: u64,
    /// The checkpoint whose disks the first checkpoint of the run begins with; `None` if there is
    /// none, and after that one is sealed.
    disks_of: Option<CheckpointId>,
    /// The id of this boot of the host; `None` if the kernel does not show it.
    boot: Option<String>,
}

impl StoreSink {
    /// Creates a sink into `run`, whose VM came from checkpoint `origin` (`None` if from none).
    /// `machines` are described in each checkpoint. Injects `fault`, if there is one.
    pub fn new(
        run: Run,
        machines: MachineDescriptions,
        fault: Option<Fault>,
        origin: Option<CheckpointId>,
    ) -> Self {
        let boot = boot_id();
        let (recording, rehearsal) = (None, None);
        let (went_back, disks_of) = (0, None);
        Self { run, machines, fault, origin, recording, rehearsal, went_back, disks_of, boot }
    }

    /// Lets the first checkpoint of the run begin with the disks of checkpoint `id`, in place of
    /// those that an earlier run knew.
    pub(crate) fn await_disks(&mut self, id: Option<CheckpointId>) {
        self.disks_of = id;
    }

    /// Returns the checkpoint with whose disks the run still has to begin; `None` if it has begun.
    pub(crate) fn awaited_disks(&self) -> Option<CheckpointId> {
        self.disks_of
    }

    /// Closes the run's pack. Returns the state of the disks at the last sealed checkpoint. Error:
    /// the pack cannot be written.
    pub fn finish(mut self) -> Result<DiskState, keyframe_store::Error> {
        let disks = self.run.disk_state();
        self.run.finish()?;
        Ok(disks)
    }

    fn strike(fault: Option<&Fault>) -> Result<(), BoxError> {
        fault.and_then(|fault| fault.strike(FaultKind::DiskFull)).map_or(Ok(()), Err)
    }
}

fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}

/// When `at` was by the kernel's clock, in the boot of this id.
fn since_boot(boot: &str, at: Instant) -> SinceBoot {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::new(
        u64::try_from(now.tv_sec).unwrap_or_default(),
        u32::try_from(now.tv_nsec).unwrap_or_default(),
    );
    SinceBoot { boot: boot.into(), ns: duration_ns(now.saturating_sub(at.elapsed())) }
}

impl CheckpointSink for StoreSink {
    type Label = CheckpointLabel;
    type Sealed = Sealed;

    fn put(&mut self, pages: &[(PageIndex, &Page)]) -> Result<(), BoxError> {
        let (mut whole, mut struck) = (pages.len(), Ok(()));
        if let Some(fault) = &self.fault {
            // At one page of them: those before it are put.
            let strike =
                (0..pages.len()).find_map(|at| Some((at, fault.strike(FaultKind::DiskFull)?)));
            if let Some((at, error)) = strike {
                (whole, struck) = (at, Err(error));
            }
        }
        self.run.put_pages(pages.get(..whole).unwrap_or_default(), &mut |_, _| ())?;
        struck
    }

    fn seal(
        &mut self,
        captured: &CapturedCheckpoint,
        label: CheckpointLabel,
    ) -> Result<Sealed, BoxError> {
        // A checkpoint may have been taken before the one behind the rollback was sealed: it
        // follows that one.
        let parent = label.parent.filter(|(_, times)| *times > self.went_back);
        let storing_disks = Instant::now();
        if let Some(cut) = &label.cut {
            // After a rollback, the overlay is a new one over that checkpoint. A failed seal undoes
            // this, so the next one does it again.
            if let Some(of) = parent.map(|(parent, _)| parent).or(self.disks_of) {
                self.run.put_disks_of(of)?;
            }
            let fault = self.fault.as_ref();
            cut.put(&mut self.run, &mut || Self::strike(fault))?;
        }
        let disks = elapsed_ns(storing_disks);
        let icount = label.position.as_ref().and_then(|position| position.get().copied());
        let (recorded, counted_instructions) = match (self.recording.clone(), icount) {
            (Some(recording), Some(icount)) => (Some(Recorded { recording, icount }), None),
            (_, counted) => (None, counted),
        };
        let machines = label.machines.as_deref().unwrap_or(&self.machines);
        let t = &captured.timeline;
        let timing = Timing {
            interval_ns: t.interval_ns,
            backlog_ns: label.backlog_ns,
            pause_ns: t.pause_ns,
            pause: PausePhases {
                stop: t.stop_ns,
                scan: t.scan_ns,
                copy: t.copy_ns,
                device_state: t.device_state_ns,
                resume: t.resume_ns,
            },
            precopy_rounds: t.rounds.len() as u32,
            strategy: t.strategy.into(),
            found_by: match t.found_by {
                PausedFind::Scan => "scan".into(),
                PausedFind::Window => "window".into(),
                PausedFind::FellBack(reason) => format!("scan:{reason}"),
            },
            round_pages: t.rounds.iter().map(|r| r.pages).chain([t.pause_pages]).collect(),
            encode_ns: t.encode_ns,
            processing: Some(ProcessingPhases { disks, ..ProcessingPhases::default() }),
        };
        let sealed = self.run.seal(SealRequest {
            taken_at: captured.taken_at.try_into()?,
            since_boot: self.boot.as_ref().map(|boot| since_boot(boot, captured.paused_at)),
            reason: label.reason.name().into(),
            parent: parent
                .map(|(id, _)| id)
                .or(self.origin.filter(|_| self.run.epoch() == Epoch(0))),
            ram: captured.ram.clone(),
            machine: MachineMeta { recorded, counted_instructions, ..machines.machine.clone() },
            members: machines.members.clone(),
            timing,
            device_state: &captured.device_state,
            tag: label.tag.as_deref(),
        })?;
        self.disks_of = None;
        if let Some((_, times)) = parent {
            self.went_back = times;
        }
        if let Some(rehearsal) = self.rehearsal.take()
            && let Err(error) = rehearsal.of(sealed.id)
        {
            // If the checkpoint cannot be removed, the reason to do so says more.
            let _ = self.run.retract(sealed.id);
            return Err(error.into());
        }
        Ok(sealed)
    }

    fn abandon(&mut self) {
        self.run.abandon();
        // The store may be full until a prune has freed space, for which the prune needs this run.
        self.idle();
    }

    fn idle(&mut self) {
        // The next seal tries again, and tells the error.
        let _ = self.run.follow_prune();
    }
}
