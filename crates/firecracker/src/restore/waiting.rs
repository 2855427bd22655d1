//! A Firecracker that has started in the place of another one and waits for its VM.

use super::{Plan, SharedRam, inherited};
use crate::api::MemoryBackend;
use crate::launch::wait_for_api;
use crate::process::Lifetime;
use crate::{Error, FirecrackerVm, Result};
use std::fs::File;
use std::path::{Path, PathBuf};

/// A Firecracker that has started and waits for its VM. Dropping it ends it.
pub(crate) struct WaitingFirecracker {
    plan: Plan,
    ram: SharedRam,
    state: File,
    socket: PathBuf,
    /// `None` once it has its VM.
    lifetime: Option<Lifetime>,
}

impl WaitingFirecracker {
    /// Starts the Firecracker of `plan`, with its API at `socket`, for a VM with `ram` and
    /// `device_state`. Error: it does not start.
    pub fn start(plan: Plan, ram: SharedRam, device_state: &[u8], socket: PathBuf) -> Result<Self> {
        let state = plan.state_file(device_state)?;
        let lifetime = plan.spawn(&socket, &[&state, &ram.file], false)?;
        let mut waiting = Self { plan, ram, state, socket, lifetime: Some(lifetime) };
        if let Some(lifetime) = &mut waiting.lifetime {
            if let Some((place, _)) = &waiting.plan.place {
                place.rank(lifetime.process().pid());
            }
            wait_for_api(lifetime, &waiting.socket)?;
        }
        Ok(waiting)
    }

    /// Moves the API to `socket`, and has Firecracker load the VM. Error: it does not; no process is
    /// left then.
    pub fn load(mut self, socket: &Path) -> Result<FirecrackerVm> {
        std::fs::rename(&self.socket, socket)
            .map_err(Error::io(format!("move the API's socket to {}", socket.display())))?;
        let mut lifetime = self.lifetime.take().ok_or(Error::Interrupted)?;
        let (state, memory) = (inherited(&self.state), inherited(&self.ram.file));
        let memory = MemoryBackend::File(&memory);
        let loaded = self.plan.load(&mut lifetime, socket, &state, memory);
        self.plan.clone().finish(lifetime, loaded, None)
    }
}

impl Drop for WaitingFirecracker {
    fn drop(&mut self) {
        if let Some(mut lifetime) = self.lifetime.take() {
            let _ = lifetime.kill();
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}
