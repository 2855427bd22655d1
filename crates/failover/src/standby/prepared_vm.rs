//! A QEMU that waits for a primary's VM, with the VM's disks and the gate before its network.

use super::super::frames::{EpochHead, MachineFrame, ReplicatedDisk};
use super::super::gate::Gate;
use super::super::launch::{DISKS_SOCKET, start_gate};
use super::super::settings::random;
use super::StandbyEngine;
use super::image::{StandbyImage, make_disks};
use super::streams::Streams;
use crate::error::{Error, Result};
use crate::event::FailoverEvent;
use keyframe_inspect::source_of;
use keyframe_qemu::net_gate;
use keyframe_qemu::restore::{Plan, Prepared, PreparedRam, RestoreOptions, prepare};
use keyframe_qemu::{Backing, DiskServer, Drive};
use keyframe_replication::{
    Arbitration, Epoch, GroupId, NodeId, ReplicationConfig, Standby, StandbyState, Term,
};
use keyframe_vm_disks::overlay_directory::OverlayDirectory;
use keyframe_vm_disks::{self as disks, DiskToServe, ServedDisks};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// The description and the device state of an epoch that is arriving. The pages of the epoch arrive
/// over the streams.
pub struct IncomingEpoch {
    /// The number of its session.
    pub session: u64,
    /// The number of the epoch.
    pub epoch: Epoch,
    /// Its description.
    pub head: EpochHead,
    /// The device state, as QEMU's device stream.
    pub devices: Vec<u8>,
}

/// A QEMU that waits to take the VM over, with the objects that belong to it.
pub struct PreparedVm {
    /// The description of the machine that the primary sent.
    pub machine: MachineFrame,
    /// The QEMU that waits.
    pub prepared: Prepared,
    /// The pages of the VM that this standby holds.
    pub image: Arc<StandbyImage>,
    /// The data connections of the primary.
    pub streams: Arc<Streams>,
    /// The disks. `None` if the VM has none.
    pub served: Option<ServedDisks>,
    /// The gate before the VM's network.
    pub gate: Gate,
    /// The state machine of the standby.
    pub core: Standby,
    /// The settings of the replication that both hosts share.
    pub config: ReplicationConfig,
    /// The device state of the newest epoch that is held whole. `None` if there is none.
    pub devices: Option<Vec<u8>>,
    /// The epoch that is arriving, without its pages. `None` if there is none.
    pub coming: Option<IncomingEpoch>,
    /// The session and the epoch of the newest mark on each stream.
    pub marks: Vec<Option<(u64, Epoch)>>,
    /// The number of epochs that are being applied.
    pub applying: u32,
    /// The thread that applies the newest of them. `None` before the first one.
    pub apply_thread: Option<JoinHandle<()>>,
    /// True if no epoch was ever applied.
    pub blank: bool,
    /// The session whose primary waits for the hashes of this standby's pages. `None` if there is
    /// none.
    pub resync_session: Option<u64>,
}

/// A QEMU that has been started, and the processes that it needs.
struct WaitingQemu {
    prepared: Prepared,
    memory: PreparedRam,
    served: Option<ServedDisks>,
    gate: Gate,
}

/// The settings of this host's standby, which follow the primary's. Errors: [`Error::Group`] if the
/// primary's group is no number; [`Error::Random`].
fn replication_config(
    machine: &MachineFrame,
    arbitration: Arbitration,
) -> Result<ReplicationConfig> {
    let group = u128::from_str_radix(&machine.group, 16).map_err(|_| Error::Group)?;
    let mut config = ReplicationConfig::new(
        NodeId(random()?),
        random()?,
        GroupId(group),
        arbitration,
        machine.detection_ns,
    );
    config.paths = machine.paths;
    Ok(config)
}

impl StandbyEngine {
    /// Starts a QEMU that waits for the VM of this machine. A QEMU that waits for another VM ends.
    ///
    /// Errors: [`Error::ArbitersDiffer`]; [`Error::HoldsAnotherVm`] if this host may have to take
    /// over the VM for which a QEMU waits already; the files of the disks or the processes cannot
    /// be created; the VM could not be checkpointed on this host. After the last two of these the
    /// standby has no QEMU.
    pub(super) fn prepare(&mut self, machine: MachineFrame) -> Result<()> {
        let setup = self.options.setup.clone();
        if machine.arbiter != setup.arbiter() {
            let (primary, standby) = (machine.arbiter, setup.arbiter());
            return Err(Error::ArbitersDiffer { primary, standby });
        }
        if self.ready.as_ref().is_some_and(|ready| {
            matches!(
                ready.core.state(),
                StandbyState::Armed | StandbyState::Asking | StandbyState::Active
            )
        }) {
            return Err(Error::HoldsAnotherVm);
        }
        self.discard();
        let paths = make_disks(&self.options.folder, &machine)?;
        let WaitingQemu { prepared, memory, served, gate } = self.start_qemu(&machine, &paths)?;
        let image = Arc::new(StandbyImage::new(memory, &machine, &paths)?);
        let streams = machine.streams.clamp(1, 64);
        let streams = Arc::new(Streams::new(streams, image.len_pages(), image.clone()));
        let config = replication_config(&machine, setup.arbitration)?;
        let core = Standby::new(config, Term(0), None);
        let (marks, blank) = (vec![None; streams.len()], image.disks_are_blank());
        let (vm, qemu_pid) = (machine.name.clone(), prepared.pid());
        setup.events.failover_event(&FailoverEvent::QemuWaits { vm, qemu_pid });
        self.ready = Some(PreparedVm {
            machine,
            prepared,
            image,
            streams,
            served,
            gate,
            core,
            config,
            devices: None,
            coming: None,
            marks,
            applying: 0,
            apply_thread: None,
            blank,
            resync_session: None,
        });
        Ok(())
    }

    /// Starts the gate, the disks' server and the QEMU, in this order. If one fails, the ones
    /// before it end. Errors: a process cannot be started; the VM could not be checkpointed on this
    /// host.
    fn start_qemu(&self, machine: &MachineFrame, paths: &[PathBuf]) -> Result<WaitingQemu> {
        let words = machine.spec.user_command.get(1..).unwrap_or_default();
        let gated = net_gate(words, self.run_dir.path()).map_err(keyframe_qemu::Error::from)?;
        let gate = start_gate(&gated.nics)?;
        let socket = self.run_dir.path().join(DISKS_SOCKET);
        let started = self.serve(machine, paths, &socket).and_then(|served| {
            let server = DiskServer::at(socket.clone());
            let disks = served.as_ref().map(|_| server);
            let options =
                RestoreOptions { disks, added: gated.words.clone(), ..RestoreOptions::default() };
            let started = self.start_incoming(machine, options).map_err(Error::from);
            let checked = started.and_then(|(mut prepared, memory)| {
                // Once the VM runs here, a refusal would come too late.
                let refused = prepared.refusals(served.as_ref().map(|_| &*socket))?;
                if refused.is_empty() {
                    return Ok((prepared, memory));
                }
                Err(keyframe_session::Error::NotCheckpointable(refused).into())
            });
            match checked {
                Ok((prepared, memory)) => Ok((prepared, memory, served)),
                Err(error) => {
                    if let Some(served) = served {
                        let _ = served.end(false);
                    }
                    Err(error)
                }
            }
        });
        let (prepared, memory, served) = started.inspect_err(|_| gate.end())?;
        Ok(WaitingQemu { prepared, memory, served, gate })
    }

    /// Starts the QEMU alone, with its RAM in files that this process has mapped. Errors: no
    /// command line for it can be made; it cannot be started; its RAM cannot be mapped.
    fn start_incoming(
        &self,
        machine: &MachineFrame,
        options: RestoreOptions,
    ) -> keyframe_qemu::Result<(Prepared, PreparedRam)> {
        let source = source_of(&machine.spec, &machine.ram);
        let plan = Plan::new(source, self.options.extra.clone(), options)?;
        for note in plan.notes() {
            self.options.setup.events.failover_event(&FailoverEvent::CommandLineNote(note.clone()));
        }
        let mut prepared = prepare(plan)?;
        let memory = prepared.memory()?;
        Ok((prepared, memory))
    }

    /// Serves the replicated disks to the QEMU on `socket`; `None` if the VM has no disks. Errors:
    /// the overlays cannot be created; the server cannot be started.
    fn serve(
        &self,
        machine: &MachineFrame,
        paths: &[PathBuf],
        socket: &Path,
    ) -> Result<Option<ServedDisks>> {
        if paths.is_empty() {
            return Ok(None);
        }
        let wanted = |(path, disk): (&PathBuf, &ReplicatedDisk)| {
            let drive = Drive {
                name: disk.name.clone(),
                image: path.clone(),
                format: Some("raw".into()),
                temporary: false,
                remote: false,
                backing: Backing { complete: true, ..Backing::default() },
                slice: None,
            };
            DiskToServe::of_drive(&drive, "")
        };
        let wanted = paths.iter().zip(&machine.disks).map(wanted).collect::<Result<_, _>>()?;
        let place =
            OverlayDirectory::claim_in(&self.options.folder.join("overlays"), &self.options.name)?;
        Ok(Some(disks::serve_in(place, &machine.name, None, wanted, socket)?))
    }

    /// Ends the machine that waits.
    pub(super) fn discard(&mut self) {
        let Some(ready) = self.ready.take() else { return };
        // The next machine may use the same files of disks.
        if let Some(thread) = ready.apply_thread {
            let _ = thread.join();
        }
        drop(ready.prepared);
        if let Some(served) = ready.served {
            let _ = served.end(false);
        }
        ready.gate.end();
    }
}
