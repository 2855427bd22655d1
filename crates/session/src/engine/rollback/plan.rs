//! The plan of a rollback. The engine tells it to the watchdog, which ends the rollback by it if
//! the engine dies.

use super::{Engine, LoadedCheckpoint, RollbackError, step};
use crate::control::VmState;
use crate::error::Error;
use crate::interrupted_rollback::{InterruptedRollback, line};
use crate::rollback_rescue::RescueWords;
use keyframe_store::CheckpointId;
use keyframe_units::RamLayout;
use keyframe_vm_disks::staged::DiskSet;
use keyframe_vmm::{RollbackPlan, RunState};

/// The VM before a rollback.
pub(super) struct VmBefore {
    /// The addresses of its RAM blocks in its VMM. `None` if the engine does not know them, or if
    /// they are not those of the checkpoint's blocks: then only the engine can end the rollback.
    pub hosts: Option<Vec<u64>>,
    /// Whether it ran.
    pub ran: bool,
    /// Its run state.
    pub former: RunState,
}

/// A state to which the paused VM goes.
pub(super) struct Goal<'a> {
    pub checkpoint: &'a LoadedCheckpoint,
    /// The checkpoint of the state before the rollback, if one is sealed.
    pub before: Option<CheckpointId>,
    /// Its disks.
    pub set: DiskSet,
    /// True if RAM and devices are as they were before the rollback.
    pub is_intact: bool,
}

impl Engine<'_> {
    /// Returns the addresses of the VM's RAM blocks, if the blocks are those of `layout`.
    pub(super) fn ram_hosts(&mut self, layout: &RamLayout) -> Option<Vec<u64>> {
        let blocks = self.vm().ok()?.vm_mut().ram_blocks().ok()?;
        let hosts = blocks.iter().map(|block| block.host.0).collect();
        let here = RamLayout::new(blocks.into_iter().map(|block| block.block).collect()).ok()?;
        here.same_space(layout).then_some(hosts)
    }

    /// Returns whether the VM is to run once it is `target`.
    pub(super) fn is_to_run(
        &mut self,
        target: &LoadedCheckpoint,
        vm: &VmBefore,
    ) -> Result<bool, RollbackError> {
        let target_stands = self.vm()?.vm().stands_in(&target.device_state);
        Ok(!target_stands && (vm.ran || VmState::stands_by_itself(&vm.former)))
    }

    /// Tells the watchdog that the VM goes to `goal`. Error: the watchdog has ended.
    pub(super) fn tell_plan(
        &mut self,
        goal: &Goal<'_>,
        vm: &VmBefore,
    ) -> Result<(), RollbackError> {
        let Some(hosts) = vm.hosts.clone() else { return Ok(()) };
        let target = goal.checkpoint;
        let Ok(rollback) = self.interrupted(target.id, goal.before) else { return Ok(()) };
        let words = RescueWords {
            rollback,
            qemu_pid: self.vm()?.pid(),
            hosts,
            disks: self.machines.disks.as_ref().and_then(|disks| disks.staged(target.id)),
            set: goal.set,
            stands: self.vm()?.vm().stands_in(&target.device_state),
        };
        let runs = match goal.set {
            DiskSet::Target => self.is_to_run(target, vm)?,
            DiskSet::Former => vm.ran,
        };
        let (ran, is_intact, words) = (vm.ran, goal.is_intact, line(&words));
        let plan = RollbackPlan { ran, runs, is_intact, words };
        self.vm()?.plan_rollback(Some(&plan)).map_err(step("tell the watchdog"))
    }

    /// The rollback to `checkpoint`, as the process that may have to end it needs it. Error: the store's
    /// path cannot be resolved.
    pub(in crate::engine) fn interrupted(
        &self,
        checkpoint: CheckpointId,
        before: Option<CheckpointId>,
    ) -> Result<InterruptedRollback, RollbackError> {
        let store = self.store.absolute_path().map_err(|e| Error::store(self.store.path(), e))?;
        let run_dir = self.run_dir.path().to_owned();
        Ok(InterruptedRollback { vm: self.name.clone(), store, checkpoint, before, run_dir })
    }

    /// Tells the watchdog, if there is one, that the rollback has ended.
    pub(in crate::engine) fn tell_no_plan(&mut self) {
        if let Ok(vm) = self.vm() {
            let _ = vm.plan_rollback(None);
        }
    }
}
