//! Restores of a checkpoint, of whichever VMM.

use super::Bench;
use super::rows::{Rows, Vm};
use crate::Error;
use crate::restore::restore_times::CheckpointRestores;
use std::path::Path;

/// The measures of one kind of VM that is restored.
#[derive(Clone, Copy)]
pub struct RestoreMeasures {
    eager: &'static str,
    eager_command: &'static str,
    fill: &'static str,
    lazy: &'static str,
    lazy_command: &'static str,
    lazy_resident: &'static str,
}

/// Those of a VM whose RAM is written.
pub const RESTORED: RestoreMeasures = RestoreMeasures {
    eager: "restore_ns",
    eager_command: "restore_command_ns",
    fill: "restore_fill_ns",
    lazy: "lazy_restore_ns",
    lazy_command: "lazy_restore_command_ns",
    lazy_resident: "lazy_resident_ns",
};
/// Those of a VM that has written nothing but its table.
pub const RESTORED_BARE: RestoreMeasures = RestoreMeasures {
    eager: "bare_restore_ns",
    eager_command: "bare_restore_command_ns",
    fill: "bare_restore_fill_ns",
    lazy: "bare_lazy_restore_ns",
    lazy_command: "bare_lazy_restore_command_ns",
    lazy_resident: "bare_lazy_resident_ns",
};

impl Bench<'_> {
    /// Restores the newest checkpoint of `store`, one of `vm`, eagerly and then lazily. `dir` is for
    /// files of the restored VMs.
    pub fn restore(
        &self,
        vm: Vm,
        (store, dir): (&Path, &Path),
        measures: RestoreMeasures,
        rows: &mut Rows,
    ) -> Result<(), Error> {
        self.interrupt.check()?;
        let restores = CheckpointRestores { options: self.options, store, dir };
        let eager = restores.eager()?;
        rows.push(vm, measures.eager, eager.running.reported_ns);
        rows.push(vm, measures.eager_command, eager.running.whole_ns);
        rows.push(vm, measures.fill, eager.filled_ns);
        restores.forget_working_set()?;
        let lazy = restores.lazy()?;
        rows.push(vm, measures.lazy, lazy.running.reported_ns);
        rows.push(vm, measures.lazy_command, lazy.running.whole_ns);
        rows.push(vm, measures.lazy_resident, lazy.resident_ns);
        Ok(())
    }
}
