//! A rollback: another Firecracker takes the place of the one that runs.
//!
//! ```text
//!   prepare: memfd of RAM ─▶ trial of the load ─▶ successor started in the place, at SOCKET.next
//!   end:     SIGKILL
//!   start:   SOCKET.next becomes SOCKET ─▶ load ─▶ drives ─▶ data of the metadata service
//! ```
//!
//! The place is streams, network namespace, control group and directory of the socket. The successor is
//! in it before the former one ends, so a place in which none can start is found out in time.
//!
//! A tap has one Firecracker at a time. So a VM with a network card cannot be loaded beside the
//! former one, and the trial has taps of its own. What can fail after the trial is a lack of memory or
//! a file that has vanished since; the caller can start the former state then.

use crate::api::Api;
use crate::process::Lifetime;
use crate::process_place::ProcessPlace;
use crate::restore::{Plan, SharedRam, WaitingFirecracker};
use crate::{Error, FirecrackerVm, Result};
use keyframe_kernel::Process;
use keyframe_kernel::isolated_tap::is_persistent;
use keyframe_vmm::{PlanOptions, Succession, SuccessorState, VmOrigin, Vmm, VmmError};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use serde_json::Value;
use std::ffi::OsString;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file by which taps are opened.
const TUN: &str = "/dev/net/tun";
/// What the name of the successor's socket has in addition, until the predecessor has ended.
const NEXT: &str = ".next";
/// The longest path of a socket.
const SOCKET_BYTES_MAX: usize = 107;
/// Options of a command line, each with a value, that a Firecracker that loads a VM does not get.
const OPTIONS_OF_A_START: [&str; 3] = ["--api-sock", "--config-file", "--metadata"];

/// The place of a running Firecracker.
pub(crate) struct FirecrackerSuccession {
    predecessor: Lifetime,
    place: Arc<ProcessPlace>,
    binary: PathBuf,
    arguments: Vec<OsString>,
    origin: VmOrigin,
    socket: PathBuf,
    /// Mode, user and group of the socket.
    socket_rights: (u32, u32, u32),
    /// The data of the metadata service; `None` if there is none. No device state holds it.
    metadata: Option<Value>,
    has_metadata: bool,
    /// A successor that has started in the place. It waits for the VM's socket and state.
    waiting: Option<WaitingFirecracker>,
}

impl FirecrackerSuccession {
    /// Takes hold of the place of `vm`. Error: that of [`ProcessPlace::of`]; the socket is gone.
    pub fn of(vm: &mut FirecrackerVm) -> Result<Self> {
        let predecessor = vm.parts.lifetime.try_clone()?;
        let socket = vm.api_socket();
        let found = std::fs::metadata(&socket)
            .map_err(Error::io(format!("look at the socket {}", socket.display())))?;
        if socket.as_os_str().len() + NEXT.len() > SOCKET_BYTES_MAX {
            return Err(Error::Place {
                pid: predecessor.process().pid(),
                problem: format!(
                    "the path of its API is too long for another one beside it: {}",
                    socket.display()
                ),
            });
        }
        require_persistent_taps(predecessor.process())?;
        let has_metadata = vm.config().mmds.is_some();
        Ok(Self {
            place: Arc::new(ProcessPlace::of(predecessor.process())?),
            predecessor,
            binary: vm.parts.identity.path.clone(),
            arguments: arguments_of_a_load(&vm.parts.command),
            origin: vm.parts.origin,
            socket_rights: (found.mode() & 0o777, found.uid(), found.gid()),
            socket,
            metadata: if has_metadata { Some(vm.api().metadata()?) } else { None },
            has_metadata,
            waiting: None,
        })
    }

    fn plan(&self, state: &SuccessorState<'_>) -> Result<Plan> {
        let options = PlanOptions {
            binary: Some(self.binary.clone()),
            arguments: self.arguments.clone(),
            paused: true,
            lineage: Some(state.lineage.clone()),
            drives: state.drives.clone(),
            ..PlanOptions::default()
        };
        Ok(Plan::new(state.source.clone(), options)?.in_place(Arc::clone(&self.place), self.origin))
    }

    fn prepared(&mut self, state: &SuccessorState<'_>, rehearse: bool) -> Result<()> {
        let plan = self.plan(state)?;
        // Not two RAMs at once.
        self.waiting = None;
        let ram = SharedRam::fill(&state.source.ram, state.ram)?;
        if rehearse {
            let (mut trial, _) =
                plan.clone().into_rehearsal().start_shared(&ram, state.device_state)?;
            trial.lifetime().kill()?;
        }
        // Firecracker does not start where a socket is left.
        self.end_incomplete(false)?;
        let next = self.next_socket();
        let waiting = WaitingFirecracker::start(plan, ram, state.device_state, next.clone())?;
        // The name of the socket changes later, and its rights do not.
        self.give_rights(&next)?;
        self.waiting = Some(waiting);
        Ok(())
    }

    /// Where a successor has its API until it has the VM's place.
    fn next_socket(&self) -> PathBuf {
        let mut path = self.socket.clone().into_os_string();
        path.push(NEXT);
        path.into()
    }

    /// Ends a successor whose starter has died. Once the predecessor has ended (`has_ended`), also one
    /// that has its socket already; it holds the taps.
    pub fn end_incomplete(&self, has_ended: bool) -> Result<()> {
        let next = self.next_socket();
        let sockets = [Some(&next), has_ended.then_some(&self.socket)];
        for stream in
            sockets.into_iter().flatten().filter_map(|path| UnixStream::connect(path).ok())
        {
            let peer = getsockopt(&stream, PeerCredentials)
                .map_err(|e| Error::io("look who serves the API")(std::io::Error::from(e)))?;
            // A process that cannot be opened has ended.
            let pid = u32::try_from(peer.pid()).ok().filter(|pid| *pid != 0);
            if let Some(mut lifetime) = pid.and_then(|pid| Lifetime::of(pid).ok()) {
                lifetime.kill()?;
            }
        }
        let _ = std::fs::remove_file(next);
        Ok(())
    }

    fn started(&mut self) -> Result<FirecrackerVm> {
        let waiting = self.waiting.take().ok_or(Error::Interrupted)?;
        let mut vm = waiting.load(&self.socket)?;
        if let Some(data) = self.metadata.as_ref().filter(|data| !data.is_null()) {
            vm.api().set_metadata(data).inspect_err(|_| drop(vm.lifetime().kill()))?;
        }
        Ok(vm)
    }

    fn end(&mut self) -> Result<()> {
        // The newest data. The watchdog comes too late for them, and has those of the rollback's begin.
        if self.has_metadata
            && self.predecessor.process().is_alive()
            && let Ok(data) = Api::connect(&self.socket).and_then(|mut api| api.metadata())
        {
            self.metadata = Some(data);
        }
        self.predecessor.kill().map(drop)
    }

    /// Gives `socket` the rights of the VM's socket.
    fn give_rights(&self, socket: &Path) -> Result<()> {
        let (mode, user, group) = self.socket_rights;
        let operation = || format!("give {} the rights of the API's socket", socket.display());
        std::os::unix::fs::chown(socket, Some(user), Some(group))
            .and_then(|()| std::fs::set_permissions(socket, std::fs::Permissions::from_mode(mode)))
            .map_err(Error::io(operation()))
    }
}

impl Succession for FirecrackerSuccession {
    fn prepare(&mut self, state: &SuccessorState<'_>, rehearse: bool) -> Result<(), VmmError> {
        Ok(self.prepared(state, rehearse)?)
    }

    fn end_predecessor(&mut self) -> Result<(), VmmError> {
        Ok(self.end()?)
    }

    fn start(&mut self, _: &SuccessorState<'_>) -> Result<Box<dyn Vmm>, VmmError> {
        Ok(Box::new(self.started()?))
    }
}

/// Checks that the taps of process `process` stay when it has ended. Error: one does not; a descriptor
/// cannot be taken.
fn require_persistent_taps(process: &Process) -> Result<()> {
    let pid = process.pid();
    let failed = || Error::io(format!("look at the taps of process {pid}"));
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let is_tap = std::fs::read_link(entry.path()).is_ok_and(|path| path == Path::new(TUN));
        if let Some(number) = number.filter(|_| is_tap) {
            let tap = pidfd_getfd(process.pidfd(), number, PidfdGetfdFlags::empty());
            let tap = tap.map_err(std::io::Error::from).map_err(failed())?;
            if !is_persistent(&tap).map_err(failed())? {
                return Err(Error::Place {
                    pid,
                    problem:
                        "a tap of its network cards vanishes with it (make taps with `ip tuntap \
                              add`)"
                            .into(),
                });
            }
        }
    }
    Ok(())
}

/// The options of `command`, the binary first, for a Firecracker that loads its VM.
fn arguments_of_a_load(command: &[String]) -> Vec<OsString> {
    let mut words = command.iter().skip(1);
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        let (name, has_value) =
            word.split_once('=').map_or((&**word, false), |(name, _)| (name, true));
        if !OPTIONS_OF_A_START.contains(&name) {
            kept.push(word.into());
        } else if !has_value {
            words.next();
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_gets_the_options_that_are_not_of_a_start() {
        let line = "firecracker --id web --api-sock /run/a --config-file=vm.json --no-seccomp \
                    --metadata m.json --log-path /log --level Info";
        let command: Vec<String> = line.split_whitespace().map(String::from).collect();
        let kept = arguments_of_a_load(&command);
        assert_eq!(kept, ["--id", "web", "--no-seccomp", "--log-path", "/log", "--level", "Info"]);
        assert!(arguments_of_a_load(&["firecracker".into()]).is_empty());
    }
}
