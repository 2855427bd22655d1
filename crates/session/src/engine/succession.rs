//! `keyframe rollback` of a VM whose VMM loads a state only into a new process: a successor takes the
//! place of the VM.
//!
//! ```text
//!   runs ─▶ checkpoint rehearsed, RAM filled ─▶ stands ─▶ checkpoint "before" ─▶ VMM ended, drives exchanged ─▶ successor runs
//!              │ fails                            │ fails: runs on                  │ fails
//!              ▼                                  ▼                                 ▼
//!           as it was                          as it was ◀── drives exchanged back, successor with "before"
//! ```
//!
//! If this process is killed, the watchdog ends the rollback in its place
//! ([`crate::succession_rescue`]): the VM is as it was, or the checkpoint.
//!
//! The engine's session ends with the VMM. The caller begins another one with the successor
//! ([`super::RunEnd::Succeeded`]).
//!
//! A *fast* rollback takes no checkpoint "before". If the successor does not start then, the VM has
//! ended.

use super::rollback::step;
use super::{Engine, Error, Event, Instant, RollbackPhases};
use crate::control::RolledBack;
use crate::error::RollbackError;
use crate::interrupted_rollback::line;
use crate::memory_limits;
use crate::run_dir;
use crate::succession_rescue::{Goal, SuccessionWords};
use keyframe_store::{CheckpointId, LoadedCheckpoint};
use keyframe_units::{PAGE_BYTES, elapsed_ns};
use keyframe_vm_disks::drive_exchange::DriveExchange;
use keyframe_vm_disks::read_files;
use keyframe_vmm::{RollbackPlan, RollbackStep, RunState, Succession, Vmm};

/// The memory that a successor takes beside its RAM, and what stays free for its start.
const VMM_BYTES: u64 = 64 << 20;

/// How a rollback by a successor has ended.
pub(super) struct Succeeded {
    /// The answer to the client.
    pub told: Result<RolledBack, RollbackError>,
    /// The VM that has taken the place; `None` if the former one is still there, or none is.
    pub vm: Option<Box<dyn Vmm>>,
}

impl From<RollbackError> for Succeeded {
    fn from(error: RollbackError) -> Self {
        Self { told: Err(error), vm: None }
    }
}

/// A VM that stands still, and whose successor waits.
struct Standing {
    goal: Goal,
    drives: DriveExchange,
    /// When its pause began.
    began: Instant,
    was_running: bool,
}

impl Engine<'_> {
    /// Puts the VM back to the checkpoint that `name` names, by a successor in `succession`.
    pub(super) fn succeed(
        &mut self,
        mut succession: Box<dyn Succession>,
        name: &str,
        fast: bool,
    ) -> Succeeded {
        let succession = &mut *succession;
        let standing = match self.stand_for_successor(succession, name) {
            Ok(standing) => standing,
            Err(error) => {
                self.tell_no_plan();
                return error.into();
            }
        };
        let Standing { goal, mut drives, began, was_running } = standing;
        let mut phases =
            RollbackPhases { pause_ns: elapsed_ns(began), ..RollbackPhases::default() };
        let id = goal.checkpoint.id;
        let saving = Instant::now();
        let kept = if fast { Ok(None) } else { self.keep_present().map(Some) };
        phases.before_ns = elapsed_ns(saving);
        let ended = kept.and_then(|kept| {
            self.tell_succession((id, kept), was_running, &drives)?;
            self.end_predecessor(succession).map(|()| kept)
        });
        let before = match ended {
            Ok(before) => before,
            Err(error) => {
                let error = RollbackError::Unharmed(Box::new(error));
                self.tell_no_plan();
                return self.run_on().map_or_else(Succeeded::from, |()| error.into());
            }
        };
        self.step();
        let loading = Instant::now();
        let successor = start(succession, &goal, &mut drives);
        phases.load_ns = elapsed_ns(loading);
        let (mut vm, failure) = match successor {
            Ok(vm) => (vm, None),
            Err(why) => match self.start_again(succession, before, &mut drives) {
                Ok(vm) => (vm, Some(why)),
                Err(again) => {
                    let (why, again) = (Box::new(why), Box::new(again));
                    let checkpoint = before.unwrap_or(id);
                    return RollbackError::Ended { why, again, checkpoint }.into();
                }
            },
        };
        drives.succeeded();
        self.tell_loaded();
        let resuming = Instant::now();
        let resumed = if was_running { vm.resume() } else { Ok(()) };
        phases.resume_ns = elapsed_ns(resuming);
        let stood_ns = elapsed_ns(began);
        if let Err(error) = resumed {
            return Succeeded { told: Err(step("resume the VM")(error.into())), vm: Some(vm) };
        }
        self.step();
        if let Ok(former) = self.vm() {
            former.is_succeeded();
        }
        if let Some(why) = failure {
            return Succeeded { told: Err(RollbackError::Unharmed(Box::new(why))), vm: Some(vm) };
        }
        self.tell(&Event::RolledBack { vm: self.name.clone(), checkpoint: id, fast });
        let done = RolledBack {
            vm: self.name.clone(),
            checkpoint: id.0,
            before: before.map(|id| id.0),
            now: None,
            pages: 0,
            stood_ns,
            phases,
            runs: was_running,
            successor_pid: Some(vm.pid()),
        };
        Succeeded { told: Ok(done), vm: Some(vm) }
    }

    /// Prepares the successor, and pauses the VM.
    fn stand_for_successor(
        &mut self,
        succession: &mut dyn Succession,
        name: &str,
    ) -> Result<Standing, RollbackError> {
        let (goal, drives) = self.prepare_succession(succession, name)?;
        self.step();
        let began = Instant::now();
        let was_running = self.vm()?.begin_standstill().map_err(step("pause the VM"))?;
        Ok(Standing { goal, drives, began, was_running })
    }

    /// Tells the watchdog that a successor is complete: it lets that one run from here on, and starts no
    /// other.
    fn tell_loaded(&mut self) {
        self.step();
        if let Ok(former) = self.vm() {
            let _ = former.note_step(&RollbackStep::Loaded);
        }
        self.step();
    }

    /// Ends the VM. The watchdog knows before that a successor is to follow. Error: the VM has not ended,
    /// and may run.
    fn end_predecessor(&mut self, succession: &mut dyn Succession) -> Result<(), RollbackError> {
        self.step();
        let vm = self.vm()?;
        vm.forbid_running().map_err(step("tell the watchdog"))?;
        let told = vm.note_step(&RollbackStep::Loads).map_err(step("tell the watchdog"));
        // What the VM did since its checkpoint would be lost. Keyframe itself has asked the VMM since, so
        // its threads have run.
        let still = told.and_then(|()| match self.run_state()? {
            RunState::Running => Err(RollbackError::Resumed),
            _ => Ok(()),
        });
        self.step();
        let ended = still
            .and_then(|()| succession.end_predecessor().map_err(|e| step("end the VM")(e.into())));
        if ended.is_err() {
            let _ = self.vm()?.allow_running();
        }
        ended
    }

    /// Tells the watchdog that the VM, which `ran`, goes to `checkpoint`; `before` is the checkpoint of
    /// its present state.
    fn tell_succession(
        &mut self,
        (checkpoint, before): (CheckpointId, Option<CheckpointId>),
        ran: bool,
        drives: &DriveExchange,
    ) -> Result<(), RollbackError> {
        let words = SuccessionWords {
            rollback: self.interrupted(checkpoint, before)?,
            drives: drives.described().map_err(Error::from)?,
        };
        let plan = RollbackPlan { ran, runs: ran, is_intact: true, words: line(&words) };
        self.vm()?.plan_rollback(Some(&plan)).map_err(step("tell the watchdog"))
    }

    fn run_on(&mut self) -> Result<(), RollbackError> {
        self.vm()?.end_standstill().map(drop).map_err(step("resume the VM"))
    }

    /// Does what can be done while the VM runs.
    fn prepare_succession(
        &mut self,
        succession: &mut dyn Succession,
        name: &str,
    ) -> Result<(Goal, DriveExchange), RollbackError> {
        let target = self.succession_target(name)?;
        let id = target.id;
        self.hold_target(id)?;
        self.refuse_own(id)?;
        self.require_memory(&target)?;
        let present = self.vm()?.vm_mut().writable_drives().map_err(Error::from)?;
        let drives = DriveExchange::make(self.store, (id, &target.meta), &self.name, &present);
        let drives = drives.map_err(Error::from)?;
        let goal = Goal::new(self.store, target);
        // The watchdog takes hold of the VM's place while there is one, and knows the successor before it
        // starts. It asks the VMM, which would disturb a pause.
        self.tell_succession((id, None), self.machines.run(), &drives)?;
        self.vm()?.await_watchdog().map_err(step("tell the watchdog"))?;
        let prepared = succession.prepare(&goal.state(drives.places().to_vec()), true);
        prepared.map_err(|e| step("rehearse the checkpoint beside the VM")(e.into()))?;
        self.step();
        self.await_idle()?;
        Ok((goal, drives))
    }

    /// Fails if the VM belongs to `keyframe restore` or `branch`: that command removes what its VM needs
    /// when the process ends.
    fn refuse_own(&mut self, checkpoint: CheckpointId) -> Result<(), RollbackError> {
        let pid = self.vm()?.pid();
        let others = run_dir::without_engine().map_err(Error::from)?;
        match others.into_iter().find(|(_, about)| about.qemu_pid == pid) {
            Some((_, about)) => Err(RollbackError::Restored { vm: about.vm, checkpoint }),
            None => Ok(()),
        }
    }

    /// Fails if the host has no memory for the checkpoint beside the VM.
    fn require_memory(&mut self, target: &LoadedCheckpoint) -> Result<(), RollbackError> {
        let needed_bytes = target.nonzero_pages() * PAGE_BYTES as u64 + VMM_BYTES;
        let left_bytes = memory_limits::remaining_beside(self.vm()?.pid());
        if left_bytes < needed_bytes {
            let checkpoint = target.id;
            return Err(RollbackError::NoMemory { needed_bytes, left_bytes, checkpoint });
        }
        Ok(())
    }

    /// The checkpoint, or the reason why this VM has no successor that is it.
    fn succession_target(&mut self, name: &str) -> Result<LoadedCheckpoint, RollbackError> {
        let target = self.checkpoint_of_machine(name)?;
        let read_files = target.meta.machine.read_files.as_deref().unwrap_or_default();
        let changed = read_files::changed(read_files).into_iter().find(|file| file.file.is_medium);
        if let Some(changed) = changed.map(Box::new) {
            return Err(Error::from(keyframe_vm_disks::Error::MediumChanged(changed)).into());
        }
        Ok(target)
    }

    /// Captures and seals a checkpoint of the paused VM.
    fn keep_present(&mut self) -> Result<CheckpointId, RollbackError> {
        let sealed = self.capture_for_rollback()?;
        self.wait_for_seal(&sealed)
    }

    /// Starts the VM that has ended as it was, which is checkpoint `before`.
    fn start_again(
        &mut self,
        succession: &mut dyn Succession,
        before: Option<CheckpointId>,
        drives: &mut DriveExchange,
    ) -> Result<Box<dyn Vmm>, RollbackError> {
        let before = before.ok_or(RollbackError::NotKept)?;
        if drives.is_exchanged() {
            return Err(RollbackError::DrivesExchanged);
        }
        let before = self.store.load(before).map_err(|e| Error::store(self.store.path(), e))?;
        let goal = Goal::new(self.store, before);
        let state = goal.state(drives.places().to_vec());
        let started = succession.prepare(&state, false).and_then(|()| succession.start(&state));
        started.map_err(|e| step("start the VM as it was")(e.into()))
    }
}

/// Starts the successor over the drives of `goal`. After an error the drives are the present ones.
fn start(
    succession: &mut dyn Succession,
    goal: &Goal,
    drives: &mut DriveExchange,
) -> Result<Box<dyn Vmm>, RollbackError> {
    drives.exchange().map_err(|e| step("exchange the drives")(e.into()))?;
    succession.start(&goal.state(drives.places().to_vec())).map_err(|error| {
        let why = step("start the successor")(error.into());
        match drives.exchange() {
            Ok(()) => why,
            Err(error) => step("exchange the drives")(error.into()),
        }
    })
}
