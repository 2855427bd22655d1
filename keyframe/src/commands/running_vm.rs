//! Which running VM a command means.

use crate::failure::Failure;
use keyframe_session::Error;
use keyframe_session::control::client;
use keyframe_session::error::RunDirError;
use keyframe_session::run_dir;
use std::path::{Path, PathBuf};

/// The choice of a running VM: by its name, its store, or both; or the only one.
#[derive(clap::Args, Debug)]
pub struct RunningVm {
    /// Which VM, if several run
    #[arg(long, alias = "vm", value_name = "NAME")]
    pub name: Option<String>,
    /// The VM whose checkpoints go into this store. If several VMs run, KEYFRAME_STORE stands in for
    /// it
    #[arg(long, value_name = "STORE")]
    pub store: Option<PathBuf>,
}

impl RunningVm {
    /// Returns the run directory of its engine.
    pub fn engine(&self) -> Result<PathBuf, Failure> {
        let name = self.name.as_deref();
        if let Some(store) = &self.store {
            return Ok(client::find_by_store(name, store)?);
        }
        match (run_dir::find(name), std::env::var_os("KEYFRAME_STORE")) {
            (Err(several @ RunDirError::Several { .. }), Some(store)) => {
                match client::find_by_store(None, Path::new(&store)) {
                    Err(Error::RunDir(RunDirError::NotOfStore { .. })) => Err(several.into()),
                    found => Ok(found?),
                }
            }
            (found, _) => Ok(found?),
        }
    }

    /// Returns whether `store`, as a status has it, may be the store that is meant.
    pub fn is_of_store(&self, store: &str) -> bool {
        self.store.as_ref().is_none_or(|meant| client::is_same_store(store, meant))
    }
}
