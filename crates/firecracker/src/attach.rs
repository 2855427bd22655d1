//! Takes control of a Firecracker that another program started.

use crate::api::{Api, InstanceState};
use crate::identity::Identity;
use crate::process::Lifetime;
use crate::vm::{FirecrackerVm, Parts};
use crate::{Error, Result};
use keyframe_vmm::VmOrigin;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use std::path::{Path, PathBuf};

impl FirecrackerVm {
    /// Takes control of the Firecracker of process `pid`, whose API is at `socket`. Its VM runs on
    /// meanwhile. Errors: the process is no Firecracker, or another one than that of the API; its
    /// VM has not been started.
    pub fn attach(pid: u32, socket: &Path) -> Result<Self> {
        let lifetime = Lifetime::of(pid)?;
        Self::take(lifetime, socket, VmOrigin::Attached)
    }

    pub(crate) fn take(lifetime: Lifetime, socket: &Path, origin: VmOrigin) -> Result<Self> {
        let pid = lifetime.process().pid();
        let refuse = |problem: String, fix: &str| Error::Attach { pid, problem, fix: fix.into() };
        let socket = std::path::absolute(socket)
            .map_err(Error::io(format!("find the socket {}", socket.display())))?;
        let mut api = Api::connect(&socket)?;
        let peer = api.descriptor().and_then(|api| getsockopt(&api, PeerCredentials).ok());
        let served_by = peer.and_then(|peer| u32::try_from(peer.pid()).ok());
        let instance = api.instance()?;
        if instance.app_name != "Firecracker" {
            return Err(refuse(
                format!("the API at {} is that of {}", socket.display(), instance.app_name),
                "name the socket of Firecracker's API (--api-sock)",
            ));
        }
        // The kernel tells 0 for a process of a namespace that is not below this one.
        if let Some(other) = served_by.filter(|other| *other != pid && *other != 0) {
            return Err(refuse(
                format!("the API at {} is that of process {other}", socket.display()),
                "name the process and the socket of one Firecracker",
            ));
        }
        if instance.state == InstanceState::NotStarted {
            return Err(refuse(
                "its VM has not been started".into(),
                "start it (InstanceStart), then attach",
            ));
        }
        let identity = Identity::of_process(pid, &instance.vmm_version)?;
        let (command, directory) = (command_line(pid)?, directory(pid)?);
        let parts = Parts {
            lifetime,
            api,
            origin,
            lineage: None,
            identity,
            command,
            directory,
            folder: None,
        };
        Self::new(parts)
    }
}

/// The command line of process `pid`.
pub(crate) fn command_line(pid: u32) -> Result<Vec<String>> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline"))
        .map_err(Error::io(format!("read the command line of process {pid}")))?;
    let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into());
    let mut words: Vec<String> = words.collect();
    words.pop_if(|last| last.is_empty());
    Ok(words)
}

/// The working directory of process `pid`.
pub(crate) fn directory(pid: u32) -> Result<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/cwd"))
        .map_err(Error::io(format!("look for the working directory of process {pid}")))
}
