//! Ends a succession in the place of an engine that has died: the part of the watchdog's process that
//! knows stores and disks.
//!
//! ```text
//!   engine: SuccessionWords ──JSON──▶ watchdog
//!     engine dies ─▶ driver: the VM has ended, and no successor is complete
//!       └▶ drives of the checkpoint ─▶ successor ─▶ runs
//!             └ does not start ─▶ former drives ─▶ VM as it was ─▶ runs
//! ```
//!
//! What the watchdog does is what [`crate::engine`] would have done. It opens the store with the secret
//! that the engine has passed on in the environment of this process.

use crate::error::Error;
use crate::interrupted_rollback::{InterruptedRollback, failed, parse};
use keyframe_inspect::guest_memory::CheckpointRam;
use keyframe_inspect::source_of;
use keyframe_store::{CheckpointId, LoadedCheckpoint, Store};
use keyframe_vm_disks::drive_exchange::ExchangedDrive;
use keyframe_vmm::{
    DriveFile, Lineage, RescuedVm, Succession, SuccessionRescuer, SuccessorState, Vmm, VmmError,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The text for the user about a VM that no process runs.
const ENDED: &str = "the VM has ended";

/// A checkpoint to which a VM goes, as its successor needs it.
pub(crate) struct Goal {
    pub checkpoint: Arc<LoadedCheckpoint>,
    ram: CheckpointRam,
    lineage: Lineage,
}

impl Goal {
    /// Makes the goal of a checkpoint of `store`.
    pub fn new(store: &Store, checkpoint: LoadedCheckpoint) -> Self {
        let lineage = Lineage { store: store.id().into(), checkpoint: checkpoint.id };
        let checkpoint = Arc::new(checkpoint);
        Self { ram: CheckpointRam(Arc::clone(&checkpoint)), checkpoint, lineage }
    }

    /// Returns the state with the files `drives`.
    pub fn state(&self, drives: Vec<DriveFile>) -> SuccessorState<'_> {
        let meta = &self.checkpoint.meta;
        SuccessorState {
            source: source_of(&meta.machine, &meta.ram),
            lineage: self.lineage.clone(),
            ram: &self.ram,
            device_state: &self.checkpoint.device_state,
            drives,
        }
    }
}

/// What the watchdog needs to end a succession.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SuccessionWords {
    /// The rollback.
    pub rollback: InterruptedRollback,
    /// The drives to which the guest can write.
    pub drives: Vec<ExchangedDrive>,
}

impl SuccessionWords {
    /// Starts checkpoint `id` with the copies of its drives (`are_copies`), or with the former files.
    fn start(
        &self,
        id: CheckpointId,
        are_copies: bool,
        succession: &mut dyn Succession,
    ) -> Result<Box<dyn Vmm>, VmmError> {
        let store = self.rollback.open_store().map_err(|e| failed(&e))?;
        let checkpoint = store.load(id).map_err(|e| failed(&Error::store(store.path(), e)))?;
        for drive in &self.drives {
            drive.put(are_copies).map_err(|e| failed(&Error::from(e)))?;
        }
        let file = |drive: &ExchangedDrive| DriveFile {
            name: drive.name.clone(),
            path: drive.place.clone(),
        };
        let goal = Goal::new(&store, checkpoint);
        let state = goal.state(self.drives.iter().map(file).collect());
        succession.prepare(&state, false)?;
        succession.start(&state)
    }
}

/// Ends successions by the store.
#[derive(Debug, Default)]
pub(crate) struct StoreSuccessionRescuer;

impl SuccessionRescuer for StoreSuccessionRescuer {
    fn succeed(
        &mut self,
        words: &str,
        succession: &mut dyn Succession,
    ) -> Result<(Box<dyn Vmm>, RescuedVm), VmmError> {
        let words: SuccessionWords = parse(words)?;
        let InterruptedRollback { checkpoint, before, .. } = words.rollback;
        let why = match words.start(checkpoint, true, succession) {
            Ok(vm) => return Ok((vm, RescuedVm::RolledBack)),
            Err(why) => why,
        };
        let again = before.map_or(Err(why), |before| words.start(before, false, succession));
        let vm = again.inspect_err(|_| {
            // They hold what the guest wrote last.
            for drive in &words.drives {
                let _ = drive.put(false);
            }
        })?;
        Ok((vm, RescuedVm::AsItWas))
    }

    fn tidy(&mut self, words: &str) {
        if let Ok(words) = parse::<SuccessionWords>(words) {
            words.drives.iter().for_each(ExchangedDrive::tidy);
        }
    }

    fn tell(&mut self, words: &str, rescued: Result<RescuedVm, &VmmError>) {
        if let Ok(words) = parse::<SuccessionWords>(words) {
            words.rollback.tell(rescued, ENDED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupted_rollback::line;
    use keyframe_vmm::VmmErrorKind;

    #[test]
    fn a_failed_rescue_names_the_checkpoint_to_restore() {
        let rollback = InterruptedRollback {
            vm: "web".into(),
            store: "/a store".into(),
            checkpoint: CheckpointId(5),
            before: Some(CheckpointId(6)),
            run_dir: "/run/web".into(),
        };
        let words = SuccessionWords { rollback, drives: Vec::new() };
        let written = line(&words);
        assert!(!written.contains('\n'));
        assert_eq!(line(&parse::<SuccessionWords>(&written).unwrap()), written);
        let error = VmmError::new(VmmErrorKind::Other, "no memory", None);
        let told = words.rollback.text(Err(&error), ENDED);
        assert!(
            told.contains("no memory") && told.contains("restore 6 --store /a store"),
            "{told}"
        );
        let fast = InterruptedRollback { before: None, ..words.rollback };
        let told = fast.text(Err(&error), ENDED);
        assert!(told.contains("restore 5 "), "{told}");
        assert!(fast.text(Ok(RescuedVm::RolledBack), ENDED).contains("is checkpoint 5"));
    }
}
