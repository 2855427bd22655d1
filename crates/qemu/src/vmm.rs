//! QEMU behind the traits of crate `vmm`: a running VM, the watchdog of its pauses, and restores.

use crate::restore::{self, Plan, RestoreOptions, RestorePurpose, Restored};
use crate::vm::Origin;
use crate::{Error, Qmp, QmpEvent, Result, RunStatus, Vm, WritableNode};
use keyframe_machine::{HostBlock, MachineSpec, VmmKind};
use keyframe_units::{PageIndex, RamLayout};
use keyframe_vmm::{
    Ability, AuditFinding, Capabilities, ForeignOperation, GuestEnd, LazyLoading, Lineage,
    PlanOptions, RestorePlan, RestoreRam, RestoreSource, RestoredVm, Restorer, Resumer,
    RollbackTarget, RunState, SavedPause, StopOutcome, TellStep, VmEvent, VmExit, VmOrigin, Vmm,
    VmmError, VmmErrorKind,
};
use std::any::Any;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// How long a new connection to the monitor may take.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

impl From<Error> for VmmError {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::Gone { .. } => VmmErrorKind::MonitorLost,
            Error::Timeout { .. } => VmmErrorKind::Timeout,
            _ => VmmErrorKind::Other,
        };
        let fix = error.fix();
        Self::new(kind, error, fix)
    }
}

/// Returns the abilities of a VM that Keyframe starts under QEMU.
pub fn capabilities() -> Capabilities {
    Capabilities::all(VmmKind::Qemu).without(
        Ability::ChosenTaps,
        "QEMU's command line names its tap devices",
        "name another one by QEMU's own option after --: -netdev tap,id=ID,ifname=TAP",
    )
}

/// The same for a VM that another program started.
fn capabilities_if_attached(is_libvirts: bool) -> Capabilities {
    let attached = capabilities()
        .without(
            Ability::Record,
            "a recording begins with the VM's first instruction, and this VM already runs",
            "start the VM with: keyframe record",
        )
        .without(
            Ability::Protect,
            "its disks and its network were not set up for a standby when it was started",
            "start the VM with: keyframe protect",
        )
        .without(
            Ability::ServedDisks,
            "QEMU has opened its disks itself",
            "start the VM with: keyframe run",
        );
    if !is_libvirts {
        return attached;
    }
    attached.without(
        Ability::Rollback,
        "libvirt controls it and would not notice the rollback",
        "end the VM, and restore the checkpoint: keyframe restore",
    )
}

impl Vmm for Vm {
    fn pid(&self) -> u32 {
        self.pid()
    }

    fn origin(&self) -> VmOrigin {
        match self.origin_detail() {
            Origin::Launched { .. } => VmOrigin::Launched,
            Origin::Restored => VmOrigin::Restored,
            Origin::Attached { .. } | Origin::Libvirt { .. } => VmOrigin::Attached,
        }
    }

    fn capabilities(&self) -> Capabilities {
        match self.origin_detail() {
            Origin::Launched { .. } | Origin::Restored => capabilities(),
            Origin::Attached { .. } => capabilities_if_attached(false),
            Origin::Libvirt { .. } => capabilities_if_attached(true),
        }
    }

    fn spec(&mut self) -> Result<MachineSpec, VmmError> {
        Ok(self.spec()?)
    }

    fn lineage(&self) -> Option<Lineage> {
        self.lineage()
    }

    fn audit(&mut self) -> Result<Vec<AuditFinding>, VmmError> {
        Ok(self.audit()?)
    }

    fn ram_blocks(&mut self) -> Result<Vec<HostBlock>, VmmError> {
        Ok(self.ram_blocks()?)
    }

    fn ram_layout(&mut self) -> Result<RamLayout, VmmError> {
        Ok(self.ram_layout()?)
    }

    fn discards_ram(&mut self) -> Result<bool, VmmError> {
        Ok(self.discards_ram()?)
    }

    fn pins_ram(&mut self) -> Result<bool, VmmError> {
        Ok(self.pins_ram()?)
    }

    fn ram_layout_and_discards(&mut self) -> Result<(RamLayout, bool), VmmError> {
        Ok(self.ram_layout_and_discards()?)
    }

    fn run_state(&mut self) -> Result<RunState, VmmError> {
        Ok(match self.qmp().status()? {
            RunStatus::Running => RunState::Running,
            RunStatus::Paused | RunStatus::Prelaunch => RunState::Paused,
            RunStatus::Shutdown => RunState::ShutDown,
            RunStatus::InMigrate => RunState::Other("inmigrate".into()),
            RunStatus::Other(name) => RunState::Other(name),
        })
    }

    fn drain_events(&mut self) -> Result<Vec<VmEvent>, VmmError> {
        let events = self.qmp().drain_events()?;
        let left_out = self.left_out_disks();
        Ok(events.iter().filter_map(|event| vm_event(event, left_out)).collect())
    }

    fn stop(&mut self) -> Result<StopOutcome, VmmError> {
        let stopped = self.qmp().stop()?;
        Ok(if stopped.was_running { StopOutcome::Stopped } else { StopOutcome::AlreadyPaused })
    }

    fn note_pause(&mut self, begins: bool) {
        self.note_pause(begins);
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        Ok(self.qmp().cont()?)
    }

    fn resume_after_stop(&mut self) -> Result<(), VmmError> {
        // In any other state than that of our `stop`, another client has the VM: it migrates it
        // away or dumps it, and resumes it when that is over.
        match self.qmp().status()? {
            RunStatus::Paused => Ok(self.qmp().cont()?),
            _ => Ok(()),
        }
    }

    fn foreign_operation(&mut self) -> Result<Option<ForeignOperation>, VmmError> {
        Ok(self.qmp().foreign_operation()?)
    }

    fn pause_and_save(&mut self) -> Result<Option<SavedPause>, VmmError> {
        Ok(self.pause_by_one_command()?)
    }

    fn end_saved_pause(&mut self) -> Result<(), VmmError> {
        Ok(self.end_one_command_pause()?)
    }

    fn resume_by_new_connection(&mut self) {
        // QEMU accepts a new client once the lost connection is closed. A launched VM has a second
        // monitor, which its watchdog uses.
        if let Origin::Attached { monitor } = self.origin_detail() {
            let _ = Qmp::connect(monitor, RECONNECT_TIMEOUT).and_then(|mut qmp| qmp.cont());
        }
    }

    fn ran_meanwhile(&mut self) -> Result<bool, VmmError> {
        Ok(self.qmp().resumed_by_other()?)
    }

    fn save_devices(&mut self) -> Result<Vec<u8>, VmmError> {
        Ok(self.save_devices()?)
    }

    fn complete_device_state(&mut self, device_state: &mut Vec<u8>) -> Result<(), VmmError> {
        Ok(self.add_sse_flags(device_state)?)
    }

    fn resumer(&self) -> Result<Resumer, VmmError> {
        Ok(self.watched()?.into_resumer())
    }

    fn check_rollback(&mut self, device_state: &[u8]) -> Result<(), VmmError> {
        Ok(self.check_rollback(device_state)?)
    }

    fn stands_in(&self, device_state: &[u8]) -> bool {
        crate::standstill::stood_still(device_state).is_some()
    }

    fn reset_pages(&mut self, layout: &RamLayout) -> Result<Vec<PageIndex>, VmmError> {
        Ok(self.reset_pages(layout)?)
    }

    fn roll_back(
        &mut self,
        target: &RollbackTarget<'_>,
        scratch: File,
        tell: TellStep<'_>,
    ) -> Result<(), VmmError> {
        Ok(self.roll_back(target, scratch, tell)?)
    }

    fn exit(&mut self) -> Result<Option<VmExit>, VmmError> {
        Ok(self.ended()?)
    }

    fn wait_exit(&mut self, timeout: Duration) -> Result<Option<VmExit>, VmmError> {
        Ok(self.wait(timeout)?.map(VmExit::Status))
    }

    fn finish_shutdown(&mut self) -> Result<Option<VmExit>, VmmError> {
        Ok(self.finish_shutdown()?.map(VmExit::Status))
    }

    fn hold_end(&mut self) -> Result<bool, VmmError> {
        Ok(self.hold_end()?)
    }

    fn release_end(&mut self) -> Result<(), VmmError> {
        Ok(self.release_end()?)
    }

    fn end(&mut self) -> Result<(), VmmError> {
        Ok(self.kill()?)
    }

    fn leave_running(self: Box<Self>) -> u32 {
        self.keep()
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Returns the event as that of any VMM. `left_out` are the disks that the user left out.
fn vm_event(event: &QmpEvent, left_out: &[WritableNode]) -> Option<VmEvent> {
    match event {
        QmpEvent::Stop => Some(VmEvent::Paused),
        QmpEvent::Resume => Some(VmEvent::Resumed),
        // QEMU sends no STOP for a guest that falls asleep.
        QmpEvent::Other(name) if name == "SUSPEND" => Some(VmEvent::Paused),
        QmpEvent::Other(name) if name == "WAKEUP" => Some(VmEvent::Resumed),
        QmpEvent::Shutdown { guest, reason } => Some(match &**reason {
            "guest-panic" => VmEvent::GuestEnded(GuestEnd::Panicked),
            "guest-reset" | "host-qmp-system-reset" => VmEvent::GuestEnded(GuestEnd::Reset),
            _ if *guest => VmEvent::GuestEnded(GuestEnd::PoweredOff),
            _ => VmEvent::ShutDown,
        }),
        QmpEvent::DiskError { no_space: true, stops: true, names } => {
            let is_it = |disk: &WritableNode| {
                names.iter().any(|name| *name == disk.node || *name == disk.device)
            };
            Some(match names.last() {
                Some(name) if left_out.iter().any(is_it) => VmEvent::LeftOutDiskFull(name.clone()),
                _ => VmEvent::DiskFull,
            })
        }
        QmpEvent::GuestPanicked => Some(VmEvent::GuestFailed(GuestEnd::Panicked)),
        // After a reset the guest begins anew, and the state that failed is gone.
        QmpEvent::Watchdog { action } if matches!(&**action, "poweroff" | "pause" | "shutdown") => {
            Some(VmEvent::GuestFailed(GuestEnd::WatchdogExpired))
        }
        _ => None,
    }
}

/// Restores checkpoints under QEMU: the [`Restorer`] of this crate.
#[derive(Clone, Debug, Default)]
pub struct QemuRestorer {
    /// The options that only QEMU has. Those that are in [`PlanOptions`] too are ignored.
    pub options: RestoreOptions,
}

impl Restorer for QemuRestorer {
    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn plan(
        &self,
        source: RestoreSource,
        options: PlanOptions,
    ) -> Result<Box<dyn RestorePlan>, VmmError> {
        // The disks of QEMU are on its command line.
        let PlanOptions { binary, arguments, paused, lineage, log, taps, is_rehearsal, drives: _ } =
            options;
        if !taps.is_empty() {
            capabilities().require(Ability::ChosenTaps)?;
        }
        let mut options =
            RestoreOptions { qemu: binary, paused, lineage, log, ..self.options.clone() };
        if is_rehearsal {
            options.purpose = RestorePurpose::Rehearsal;
        }
        Ok(Box::new(Plan::new(source, arguments, options)?))
    }
}

impl RestorePlan for Plan {
    fn binary(&self) -> &Path {
        self.binary()
    }

    fn notes(&self) -> &[String] {
        self.notes()
    }

    fn start(
        self: Box<Self>,
        ram: RestoreRam<'_>,
        device_state: &[u8],
    ) -> Result<RestoredVm, VmmError> {
        let restored = match ram {
            RestoreRam::Eager(source) => restore::start(*self, source, device_state)?,
            RestoreRam::Lazy(source) => restore::start_lazy(*self, source, device_state)?,
        };
        Ok(restored.into())
    }
}

impl From<Restored> for RestoredVm {
    fn from(restored: Restored) -> Self {
        let (ready_ns, filled_ns) = (restored.ready_ns(), restored.filled_ns());
        let (vm, lazy) = restored.into_parts();
        let loading = lazy.map(|lazy| Box::new(lazy) as Box<dyn LazyLoading>);
        Self { vm: Box::new(vm), loading, ready_ns, filled_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_text_and_fix() {
        let error = Error::MonitorBusy { monitor: "/q".into() };
        let (text, fix) = (error.to_string(), error.fix());
        let wrapped = VmmError::from(error);
        assert_eq!((wrapped.to_string(), wrapped.fix()), (text, fix.as_deref()));
        assert_eq!(wrapped.kind(), VmmErrorKind::Other);
        let gone = Error::Gone { monitor: "/q".into(), operation: "cont".into() };
        assert_eq!(VmmError::from(gone).kind(), VmmErrorKind::MonitorLost);
    }

    #[test]
    fn a_full_disk_that_the_user_left_out_is_told_apart() {
        let event = |data: serde_json::Value| {
            let message = serde_json::json!({ "event": "BLOCK_IO_ERROR", "data": data });
            QmpEvent::parse(&message).unwrap()
        };
        let of = |device: &str, node: &str| {
            event(serde_json::json!({
                "device": device, "node-name": node, "nospace": true, "action": "stop",
            }))
        };
        let block = serde_json::json!({ "device": "", "inserted": {
            "ro": false, "file": "/a", "drv": "raw", "node-name": "logs",
            "image": { "virtual-size": 512 },
        } });
        let left_out = [WritableNode::of(&block).unwrap()];
        let full = |event| vm_event(&event, &left_out);
        assert_eq!(full(of("", "logs")), Some(VmEvent::LeftOutDiskFull("logs".into())));
        assert_eq!(full(of("d", "other")), Some(VmEvent::DiskFull));
        assert_eq!(full(of("", "")), Some(VmEvent::DiskFull));
        let goes_on = serde_json::json!({ "device": "d", "nospace": true, "action": "report" });
        assert_eq!(full(event(goes_on)), None);
    }

    #[test]
    fn attached_vms_lack_what_is_set_up_at_launch() {
        let attached = capabilities_if_attached(false);
        assert!(attached.require(Ability::Protect).is_err());
        assert!(attached.require(Ability::Rollback).is_ok());
        let refusal = capabilities_if_attached(true).require(Ability::Rollback).unwrap_err();
        assert!(refusal.to_string().contains("libvirt") && !refusal.fix.is_empty());
    }
}
