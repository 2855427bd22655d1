//! A rollback that a watchdog ends in the place of an engine that has died: what each kind of rollback
//! has in common.

use crate::error::{Error, error_chain};
use keyframe_store::{CheckpointId, Store};
use keyframe_store_keys::KeyArg;
use keyframe_vmm::{RescuedVm, VmmError, VmmErrorKind};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::PathBuf;

/// The file in the run directory in which a watchdog tells how it ended a rollback.
pub const NOTE: &str = "rollback.txt";

/// A rollback, for the process that ends it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct InterruptedRollback {
    /// The VM's name.
    pub vm: String,
    /// The path or address of the store.
    pub store: PathBuf,
    /// The checkpoint that the VM is to be.
    pub checkpoint: CheckpointId,
    /// The checkpoint of the state before the rollback, if one is sealed.
    pub before: Option<CheckpointId>,
    /// The run directory.
    pub run_dir: PathBuf,
}

impl InterruptedRollback {
    /// Opens the store with the secret that the engine has passed on in the environment. Error: that of
    /// the store.
    pub fn open_store(&self) -> Result<Store, Error> {
        KeyArg::from_environment().open(&self.store).map_err(|e| Error::store(&self.store, e))
    }

    /// Tells how the rollback ended, on standard error and in [`NOTE`]. After an error `ended` says what
    /// has become of the VM.
    pub fn tell(&self, rescued: Result<RescuedVm, &VmmError>, ended: &str) {
        let text = self.text(rescued, ended);
        // The terminal may have gone.
        let _ = writeln!(std::io::stderr(), "keyframe: {text}");
        let _ = std::fs::write(self.run_dir.join(NOTE), format!("{text}\n"));
    }

    /// Returns what [`Self::tell`] tells.
    pub fn text(&self, rescued: Result<RescuedVm, &VmmError>, ended: &str) -> String {
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
                    "{died}, and its watchdog could not end the rollback: {}; {ended}; restore \
                     {what}: keyframe restore {id} --store {}",
                    error_chain(error),
                    store.display()
                )
            }
        }
    }
}

/// Returns `words` as one line that [`parse`] reads.
pub(crate) fn line(words: &impl Serialize) -> String {
    serde_json::to_string(words).unwrap_or_default()
}

/// Reads the words of a line. Error: they are others.
pub(crate) fn parse<T: DeserializeOwned>(line: &str) -> Result<T, VmmError> {
    serde_json::from_str(line).map_err(|e| VmmError::new(VmmErrorKind::Other, e, None))
}

/// Returns `error` with its causes as an error of a VMM.
pub(crate) fn failed(error: &(dyn std::error::Error + 'static)) -> VmmError {
    VmmError::new(VmmErrorKind::Other, error_chain(error), None)
}
