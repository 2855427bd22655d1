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

use crate::error::{Error, RollbackError, error_chain};
use crate::ram_capture::RamAccess;
use crate::ram_capture::process::ProcessRam;
use crate::target_ram::{BATCH_PAGES, COMPARISONS, TargetRam, used, write_wrong_pages};
use keyframe_store::{CheckpointId, LoadedCheckpoint, Store};
use keyframe_store_keys::KeyArg;
use keyframe_units::{HostVirt, PageIndex, PageRange};
use keyframe_vm_disks::staged::{DiskSet, StagedDisks};
use keyframe_vmm::{RescuedVm, RollbackRescuer, VmmError, VmmErrorKind};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::PathBuf;

/// The file in the run directory in which a watchdog tells how it ended a rollback.
pub const NOTE: &str = "rollback.txt";

/// What the watchdog needs to end a rollback.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RescueWords {
    /// The VM's name.
    pub vm: String,
    /// The path or address of the store.
    pub store: PathBuf,
    /// The checkpoint that the VM is to be.
    pub checkpoint: CheckpointId,
    /// The checkpoint of the state before the rollback, if one is sealed.
    pub before: Option<CheckpointId>,
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
    /// The run directory.
    pub run_dir: PathBuf,
}

impl RescueWords {
    /// One line that [`RescueWords::parse`] reads.
    pub fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    fn parse(line: &str) -> Result<Self, VmmError> {
        serde_json::from_str(line).map_err(|e| VmmError::new(VmmErrorKind::Other, e, None))
    }

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
        let opened = KeyArg::from_environment().open(&self.store);
        let store = opened.map_err(|e| Error::store(&self.store, e))?;
        let target = store.load(self.checkpoint).map_err(|e| Error::store(&self.store, e))?;
        let hosts = self.hosts.iter().copied().map(HostVirt).collect();
        let ram = ProcessRam::of_process(self.qemu_pid, target.meta.ram.clone(), hosts)?;
        for _ in 0..COMPARISONS {
            let wrong = write_all_wrong(&store, &target, &ram)?;
            if wrong == 0 {
                return Ok(());
            }
        }
        Err(RollbackError::PagesDiffer { pages: 1, checkpoint: self.checkpoint })
    }
}

/// Makes all pages in use equal to `target`. Returns how many differed.
fn write_all_wrong(
    store: &Store,
    target: &LoadedCheckpoint,
    vm_ram: &ProcessRam,
) -> Result<u64, RollbackError> {
    let layout = &target.meta.ram;
    let target_ram = TargetRam::new(target, &[]).map_err(|e| Error::store(store.path(), e))?;
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
        RescueWords::parse(words)?.serve(DiskSet::Former).map_err(|e| failed(&e))
    }

    fn complete(&mut self, words: &str) -> Result<(), VmmError> {
        RescueWords::parse(words)?.complete().map_err(|e| failed(&e))
    }

    fn tidy(&mut self, words: &str) {
        if let Ok(RescueWords { disks: Some(disks), .. }) = RescueWords::parse(words) {
            // A server that has ended has removed nothing, and what is left does no harm.
            let _ = disks.tidy();
        }
    }

    fn tell(&mut self, words: &str, rescued: Result<RescuedVm, &VmmError>) {
        let Ok(words) = RescueWords::parse(words) else { return };
        let text = words.text(rescued);
        // The terminal may have gone.
        let _ = writeln!(std::io::stderr(), "keyframe: {text}");
        let _ = std::fs::write(words.run_dir.join(NOTE), format!("{text}\n"));
    }
}

impl RescueWords {
    fn text(&self, rescued: Result<RescuedVm, &VmmError>) -> String {
        let Self { vm, checkpoint, before, store, .. } = self;
        let died = format!("the engine of VM {vm} died during a rollback");
        match rescued {
            Ok(RescuedVm::AsItWas) => {
                format!("{died}; the VM is as it was before, without an engine")
            }
            Ok(RescuedVm::RolledBack) => format!(
                "{died}, which its watchdog has ended; the VM is checkpoint {checkpoint}, without \
                 an engine"
            ),
            Err(error) => {
                let (what, id) = match before {
                    Some(before) => ("the state before the rollback", before),
                    None => ("the target of the rollback", checkpoint),
                };
                format!(
                    "{died}, and its watchdog could not end the rollback: {}; the VM is ended, \
                     because its state is incomplete; restore {what}: keyframe restore {id} \
                     --store {}",
                    error_chain(error),
                    store.display()
                )
            }
        }
    }
}

fn failed(error: &(dyn std::error::Error + 'static)) -> VmmError {
    VmmError::new(VmmErrorKind::Other, error_chain(error), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(before: Option<u64>) -> RescueWords {
        RescueWords {
            vm: "web".into(),
            store: "/a store".into(),
            checkpoint: CheckpointId(5),
            before: before.map(CheckpointId),
            qemu_pid: 7,
            hosts: vec![1 << 40],
            disks: None,
            set: DiskSet::Target,
            stands: false,
            run_dir: "/run/web".into(),
        }
    }

    #[test]
    fn the_words_are_one_line_and_come_back() {
        let line = words(Some(6)).line();
        assert!(!line.contains('\n'));
        assert_eq!(RescueWords::parse(&line).unwrap().line(), line);
        assert!(RescueWords::parse("{}").is_err());
    }

    #[test]
    fn a_failed_rescue_names_the_checkpoint_to_restore() {
        let error = VmmError::new(VmmErrorKind::Other, "no space", None);
        let told = words(Some(6)).text(Err(&error));
        assert!(told.contains("no space") && told.contains("before the rollback"), "{told}");
        assert!(told.ends_with("keyframe restore 6 --store /a store"), "{told}");
        let told = words(None).text(Err(&error));
        assert!(told.contains("the target") && told.contains("restore 5 "), "{told}");
        assert!(words(None).text(Ok(RescuedVm::RolledBack)).contains("is checkpoint 5"));
        assert!(words(None).text(Ok(RescuedVm::AsItWas)).contains("as it was"));
    }
}
