//! Ends a rollback in the place of an engine that has died: the part of the watchdog's process that
//! knows stores and disks.
//!
//! ```text
//!   engine: RescueWords ──JSON──▶ watchdog
//!     engine dies ─▶ driver: the load has ended, or never begins
//!       └▶ StoreRescuer: disks ─▶ all of RAM compared with the checkpoint ─▶ VM runs
//! ```
//!
//! The engine's tracker is gone, so the watchdog compares all of RAM. It opens the store with the
//! secret that the engine has passed on in the environment of this process.
//!
//! Invariant: the watchdog compares again what it has written to RAM.

use crate::error::{Error, RollbackError};
use crate::interrupted_rollback::{InterruptedRollback, failed, parse};
use crate::ram_capture::RamAccess;
use crate::ram_capture::process::ProcessRam;
use crate::target_ram::{BATCH_PAGES, COMPARISONS, HeldPages, TargetRam, used, write_wrong_pages};
use keyframe_store::{LoadedCheckpoint, Store};
use keyframe_units::{HostVirt, PageIndex, PageRange};
use keyframe_vm_disks::staged::{DiskSet, StagedDisks};
use keyframe_vmm::{RescuedVm, RollbackRescuer, VmmError};
use serde::{Deserialize, Serialize};

/// The text for the user about a VM whose rollback the watchdog could not end.
const ENDED: &str = "the VM is ended, because its state is incomplete";

/// What the watchdog needs to end a rollback.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RescueWords {
    /// The rollback.
    pub rollback: InterruptedRollback,
    /// The process id of QEMU.
    pub qemu_pid: u32,
    /// The addresses of the RAM blocks in QEMU.
    pub hosts: Vec<u64>,
    /// The disks, if Keyframe serves some.
    pub disks: Option<StagedDisks>,
    /// The disks of the checkpoint.
    pub set: DiskSet,
    /// True if the checkpoint's VM stood still: nothing may have written to its disks.
    pub stands: bool,
}

impl RescueWords {
    /// Serves the disks of `set`.
    fn serve(&self, set: DiskSet) -> Result<(), Error> {
        self.disks.as_ref().map_or(Ok(()), |disks| Ok(disks.serve(set)?))
    }

    fn complete(&self) -> Result<(), RollbackError> {
        self.serve(self.set)?;
        if let Some(disks) = self.disks.as_ref().filter(|_| self.stands)
            && !disks.are_unwritten().map_err(Error::from)?
        {
            return Err(RollbackError::FirmwareWrote);
        }
        let InterruptedRollback { checkpoint, .. } = self.rollback;
        let store = self.rollback.open_store()?;
        let target = store.load(checkpoint).map_err(|e| Error::store(store.path(), e))?;
        let hosts = self.hosts.iter().copied().map(HostVirt).collect();
        let ram = ProcessRam::of_process(self.qemu_pid, target.meta.ram.clone(), hosts)?;
        for _ in 0..COMPARISONS {
            let wrong = write_all_wrong(&store, &target, &ram)?;
            if wrong == 0 {
                return Ok(());
            }
        }
        Err(RollbackError::PagesDiffer { pages: 1, checkpoint })
    }
}

/// Makes all pages in use equal to `target`. Returns how many differed.
fn write_all_wrong(
    store: &Store,
    target: &LoadedCheckpoint,
    vm_ram: &ProcessRam,
) -> Result<u64, RollbackError> {
    let layout = &target.meta.ram;
    let none = HeldPages::default();
    let target_ram = TargetRam::new(target, &none);
    let reader = vm_ram.reader();
    let mut wrong = 0;
    for number in 0..layout.blocks().len() {
        let PageRange { first, len_pages } = used(layout, number);
        for done in (0..len_pages).step_by(BATCH_PAGES) {
            let part = (len_pages - done).min(BATCH_PAGES as u64);
            let pages = PageRange::new(PageIndex(first.0 + done), part);
            let batch: Vec<PageIndex> = pages.iter().collect();
            let mut write = |page, right: &_| vm_ram.write_page(page, right);
            let pages = write_wrong_pages(&target_ram, store.path(), &*reader, &mut write, &batch)?;
            wrong += pages.len() as u64;
        }
    }
    Ok(wrong)
}

/// Ends rollbacks by the store and the disk server.
#[derive(Debug, Default)]
pub(crate) struct StoreRescuer;

impl RollbackRescuer for StoreRescuer {
    fn undo(&mut self, words: &str) -> Result<(), VmmError> {
        parse::<RescueWords>(words)?.serve(DiskSet::Former).map_err(|e| failed(&e))
    }

    fn complete(&mut self, words: &str) -> Result<(), VmmError> {
        parse::<RescueWords>(words)?.complete().map_err(|e| failed(&e))
    }

    fn tidy(&mut self, words: &str) {
        if let Ok(RescueWords { disks: Some(disks), .. }) = parse(words) {
            // A server that has ended has removed nothing, and what is left does no harm.
            let _ = disks.tidy();
        }
    }

    fn tell(&mut self, words: &str, rescued: Result<RescuedVm, &VmmError>) {
        if let Ok(words) = parse::<RescueWords>(words) {
            words.rollback.tell(rescued, ENDED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupted_rollback::line;
    use keyframe_store::CheckpointId;
    use keyframe_vmm::VmmErrorKind;

    fn words(before: Option<u64>) -> RescueWords {
        let rollback = InterruptedRollback {
            vm: "web".into(),
            store: "/a store".into(),
            checkpoint: CheckpointId(5),
            before: before.map(CheckpointId),
            run_dir: "/run/web".into(),
        };
        RescueWords {
            rollback,
            qemu_pid: 7,
            hosts: vec![1 << 40],
            disks: None,
            set: DiskSet::Target,
            stands: false,
        }
    }

    #[test]
    fn the_words_are_one_line_and_come_back() {
        let written = line(&words(Some(6)));
        assert!(!written.contains('\n'));
        assert_eq!(line(&parse::<RescueWords>(&written).unwrap()), written);
        assert!(parse::<RescueWords>("{}").is_err());
    }

    #[test]
    fn a_failed_rescue_names_the_checkpoint_to_restore() {
        let error = VmmError::new(VmmErrorKind::Other, "no space", None);
        let told = words(Some(6)).rollback.text(Err(&error), ENDED);
        assert!(told.contains("no space") && told.contains("before the rollback"), "{told}");
        assert!(told.ends_with("keyframe restore 6 --store /a store"), "{told}");
        let told = words(None).rollback.text(Err(&error), ENDED);
        assert!(told.contains("the target") && told.contains("restore 5 "), "{told}");
        assert!(
            words(None).rollback.text(Ok(RescuedVm::RolledBack), ENDED).contains("is checkpoint 5")
        );
        assert!(words(None).rollback.text(Ok(RescuedVm::AsItWas), ENDED).contains("as it was"));
    }
}
