//! A QEMU that waits for a primary's VM, with the VM's disks and the gate before its network.

use super::super::frames::{EpochHead, MachineFrame, ReplicatedDisk};
use super::super::gate::Gate;
use super::super::launch::{DISKS_SOCKET, start_gate};
use super::super::settings::random;
use super::StandbyEngine;
use super::image::{StandbyImage, make_disks};
use super::streams::Streams;
use crate::error::{Error, Result};
use crate::event::Event;
use keyframe_inspect::source_of;
use keyframe_qemu::net_gate;
use keyframe_qemu::restore::{Plan, Prepared, RestoreOptions, prepare};
use keyframe_qemu::{DiskServer, Drive};
use keyframe_replication::{
    Epoch, GroupId, NodeId, ReplicationConfig, Standby, StandbyState, Term,
};
use keyframe_vm_disks::overlay_directory::OverlayDirectory;
use keyframe_vm_disks::{self as disks, DiskToServe, ServedDisks};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The device state and the description of an epoch that is arriving; its pages come by the streams.
pub struct IncomingEpoch {
    pub session: u64,
    pub epoch: Epoch,
    pub head: EpochHead,
    pub devices: Vec<u8>,
}

/// A QEMU that waits, and what belongs to it.
pub struct PreparedVm {
    pub machine: MachineFrame,
    pub prepared: Prepared,
    pub image: Arc<StandbyImage>,
    pub streams: Arc<Streams>,
    pub served: Option<ServedDisks>,
    pub gate: Gate,
    pub core: Standby,
    pub config: ReplicationConfig,
    /// The device state of the epoch that is held.
    pub devices: Option<Vec<u8>>,
    /// The epoch that is arriving, without its pages.
    pub coming: Option<IncomingEpoch>,
    pub marks: Vec<Option<(u64, Epoch)>>,
    /// Epochs that are being applied.
    pub applying: u32,
    /// No epoch was ever applied.
    pub blank: bool,
    /// A session whose primary waits for the hashes of the pages here.
    pub resync_session: Option<u64>,
}

impl StandbyEngine {
    /// Starts a QEMU of this machine that waits.
    pub(super) fn prepare(&mut self, machine: MachineFrame) -> Result<()> {
        let setup = self.options.setup.clone();
        if machine.arbiter != setup.arbiter() {
            let (primary, standby) = (machine.arbiter, setup.arbiter());
            return Err(Error::ArbitersDiffer { primary, standby });
        }
        if self.ready.as_ref().is_some_and(|ready| {
            matches!(ready.core.state(), StandbyState::Armed | StandbyState::Asking)
        }) {
            return Err(Error::HoldsAnotherVm);
        }
        self.discard();
        let folder = &self.options.folder;
        let paths = make_disks(folder, &machine)?;
        let words = machine.spec.user_command.get(1..).unwrap_or_default();
        let gated = net_gate(words, self.run_dir.path()).map_err(keyframe_qemu::Error::from)?;
        let gate = start_gate(&gated.nics)?;
        let socket = self.run_dir.path().join(DISKS_SOCKET);
        let made = self.serve(&machine, &paths, &socket).and_then(|served| {
            let server = DiskServer { socket: socket.clone(), prefix: String::new() };
            let disks = served.as_ref().map(|_| server);
            let options =
                RestoreOptions { disks, added: gated.words.clone(), ..RestoreOptions::default() };
            let source = source_of(&machine.spec, &machine.ram);
            let prepared =
                Plan::new(source, self.options.extra.clone(), options).and_then(|plan| {
                    for note in plan.notes() {
                        setup.events.failover_event(&Event::CommandLineNote(note.clone()));
                    }
                    let mut prepared = prepare(plan)?;
                    let memory = prepared.memory()?;
                    // Once the VM runs here, a refusal would come too late.
                    let disks = served.as_ref().map(|_| &*socket);
                    let refused = prepared.refusals(disks)?;
                    Ok((prepared, memory, refused))
                });
            let problem = match prepared {
                Ok((prepared, memory, refused)) if refused.is_empty() => {
                    return Ok(((prepared, memory), served));
                }
                Ok((.., refused)) => keyframe_session::Error::NotCheckpointable(refused).into(),
                Err(error) => error.into(),
            };
            if let Some(served) = served {
                let _ = served.end(false);
            }
            Err(problem)
        });
        let ((prepared, memory), served) = made.inspect_err(|_| gate.end())?;
        let image = Arc::new(StandbyImage::new(memory, &machine, &paths)?);
        let streams = Arc::new(Streams::new(machine.streams.clamp(1, 64), Arc::clone(&image)));
        let group = u128::from_str_radix(&machine.group, 16).map_err(|_| Error::Group)?;
        let arbitration = setup.arbitration;
        let mut config = ReplicationConfig::new(
            NodeId(random()?),
            random()?,
            GroupId(group),
            arbitration,
            machine.detection_ns,
        );
        config.paths = machine.paths;
        let core = Standby::new(config, Term(0), None);
        let (marks, blank) = (vec![None; streams.len()], image.disks_are_blank());
        let (vm, qemu_pid) = (machine.name.clone(), prepared.pid());
        setup.events.failover_event(&Event::QemuWaits { vm, qemu_pid });
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
            blank,
            resync_session: None,
        });
        Ok(())
    }

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
        drop(ready.prepared);
        if let Some(served) = ready.served {
            let _ = served.end(false);
        }
        ready.gate.end();
    }
}
