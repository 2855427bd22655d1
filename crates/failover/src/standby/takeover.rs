//! The takeover: the QEMU that waited runs the VM, and this host becomes its primary.

use super::{Activation, StandbyEngine};
use crate::error::{Error, Result};
use crate::event::FailoverEvent;
use crate::launch::{self, DISKS_SOCKET, EngineContext, FirstTerm, LaunchedVm};
use crate::links;
use crate::primary::ProtectionEnding;
use crate::vm::MachineDescription;
use keyframe_qemu::QemuIdentity;
use keyframe_replication::{PeerMessage, PrimaryStart};
use keyframe_session::control::{ReplicationRole, ReplicationStatus};
use keyframe_units::Epoch;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The number of a takeover's first epoch, after the last one that the standby holds: the failed
/// primary may have numbered more epochs that never arrived.
const EPOCH_GAP: u64 = 1 << 20;

impl StandbyEngine {
    /// Runs the VM from the epoch that is held, with this host as its primary, until the VM has
    /// ended here. Returns how this host's part ended. Errors: [`Error::NothingHeld`]; QEMU does
    /// not load the epoch; a process or a thread cannot be started; those of the primary's engine.
    pub(super) fn take_over(
        mut self,
        Activation { epoch, term, forced }: Activation,
        interrupted: &Arc<AtomicBool>,
    ) -> Result<ProtectionEnding> {
        let ready = self.ready.take().ok_or(Error::NothingHeld)?;
        let devices = ready.devices.as_ref().ok_or(Error::NothingHeld)?;
        let restored = match ready.prepared.activate(&*ready.image, devices) {
            Ok(restored) => restored,
            Err(error) => {
                ready.gate.end();
                return Err(error.into());
            }
        };
        let (ready_ns, mut vm) = (restored.ready_ns(), restored.into_vm());
        self.options.setup.events.failover_event(&FailoverEvent::TookOver {
            vm: ready.machine.name.clone(),
            epoch,
            ready_ns,
        });
        self.update(|status| {
            *status = ReplicationStatus {
                role: ReplicationRole::Primary,
                protects: Some(ready.machine.name.clone()),
                took_over_ns: Some(ready_ns),
                acknowledged: None,
                ..ReplicationStatus::default()
            };
        });
        if let Err(error) = self.run_dir.runs(&ready.machine.name) {
            self.options.setup.events.failover_event(&FailoverEvent::NameNotKept(error.into()));
        }
        if let Some((_, channel)) = &self.control {
            links::send_message(channel, &PeerMessage::TookOver { term });
        }
        if ready.served.is_some() {
            vm.mind_server(self.run_dir.path().join(DISKS_SOCKET));
        }
        let identity = QemuIdentity {
            path: PathBuf::from(&ready.machine.spec.binary_path),
            version: ready.machine.spec.vmm_version.clone(),
            blake3: ready.machine.spec.binary_blake3.clone(),
        };
        let launched = LaunchedVm {
            vm,
            identity,
            machine: Some(MachineDescription {
                spec: ready.machine.spec.clone(),
                ram: ready.machine.ram.clone(),
            }),
            directory: ready.machine.spec.directory(),
            served: ready.served,
            gate: ready.gate,
        };
        let context = EngineContext {
            name: ready.machine.name.clone(),
            run_dir: self.run_dir,
            status: self.status,
            interrupted: Arc::clone(interrupted),
            inbox: Some(self.requests),
        };
        let start = FirstTerm {
            start: PrimaryStart::TakenOver { term, forced },
            first_epoch: Epoch(epoch.0 + EPOCH_GAP),
        };
        let engine = launch::start_taken_over(
            launched,
            context,
            self.options.setup,
            ready.config,
            start,
            self.options.peer,
        )?;
        engine.run()
    }
}
