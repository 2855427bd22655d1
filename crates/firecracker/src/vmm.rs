//! Firecracker behind the trait of a running VM.

use crate::succession::FirecrackerSuccession;
use crate::{Error, FirecrackerVm, capabilities, watchdog};
use keyframe_machine::{HostBlock, MachineSpec};
use keyframe_units::RamLayout;
use keyframe_vmm::{
    AuditFinding, Capabilities, Lineage, Resumer, RunState, SavedPause, StopOutcome, Succession,
    VmEvent, VmExit, VmOrigin, Vmm, VmmError, VmmErrorKind, WritableDrive,
};
use std::any::Any;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

/// How long Firecracker may take to end after its guest has.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// The error of a VM whose process is gone, whatever else failed with it.
fn of(vm: &FirecrackerVm, error: Error) -> VmmError {
    let is_alive = std::path::Path::new(&format!("/proc/{}", vm.process_id())).exists();
    match (is_alive, error) {
        (false, error @ Error::Io { .. }) => VmmError::new(VmmErrorKind::MonitorLost, error, None),
        (_, error) => error.into(),
    }
}

impl Vmm for FirecrackerVm {
    fn pid(&self) -> u32 {
        self.process_id()
    }

    fn origin(&self) -> VmOrigin {
        self.came_by()
    }

    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn spec(&mut self) -> Result<MachineSpec, VmmError> {
        Ok(self.describe()?)
    }

    fn lineage(&self) -> Option<Lineage> {
        self.came_from()
    }

    fn audit(&mut self) -> Result<Vec<AuditFinding>, VmmError> {
        Ok(self.findings()?)
    }

    fn read_only_media(&mut self) -> Result<Vec<(String, PathBuf)>, VmmError> {
        Ok(self.media()?)
    }

    fn writable_drives(&mut self) -> Result<Vec<WritableDrive>, VmmError> {
        Ok(self.drives_to_capture()?)
    }

    fn reopen_drives(&mut self, drives: &[WritableDrive]) -> Result<(), VmmError> {
        Ok(self.reopen(drives)?)
    }

    fn ram_blocks(&mut self) -> Result<Vec<HostBlock>, VmmError> {
        Ok(self.host_blocks()?)
    }

    fn ram_layout(&mut self) -> Result<RamLayout, VmmError> {
        self.layout().map_err(|error| VmmError::new(VmmErrorKind::Other, error, None))
    }

    /// A balloon is refused.
    fn discards_ram(&mut self) -> Result<bool, VmmError> {
        Ok(false)
    }

    fn traps_unknown_calls(&self) -> bool {
        true
    }

    fn run_state(&mut self) -> Result<RunState, VmmError> {
        Ok(self.state()?)
    }

    fn drain_events(&mut self) -> Result<Vec<VmEvent>, VmmError> {
        self.events().map_err(|error| of(self, error))
    }

    fn stop(&mut self) -> Result<StopOutcome, VmmError> {
        self.pause().map_err(|error| of(self, error))
    }

    fn resume(&mut self) -> Result<(), VmmError> {
        Ok(self.run_on()?)
    }

    fn resume_after_stop(&mut self) -> Result<(), VmmError> {
        self.end_pause().map_err(|error| of(self, error))
    }

    fn pause_and_save(&mut self) -> Result<Option<SavedPause>, VmmError> {
        self.begin_whole_pause().map_err(|error| of(self, error))
    }

    fn end_saved_pause(&mut self) -> Result<(), VmmError> {
        self.end_whole_pause().map_err(|error| of(self, error))
    }

    fn complete_device_state(&mut self, device_state: &mut Vec<u8>) -> Result<(), VmmError> {
        if let Some(state) = self.take_state() {
            *device_state = state;
        }
        Ok(())
    }

    fn ran_meanwhile(&mut self) -> Result<bool, VmmError> {
        self.has_run().map_err(|error| of(self, error))
    }

    fn save_devices(&mut self) -> Result<Vec<u8>, VmmError> {
        self.save().map_err(|error| of(self, error))
    }

    fn resumer(&self) -> Result<Resumer, VmmError> {
        Ok(watchdog::resumer(self.process_id(), &self.api_socket(), self.pipe_path()))
    }

    fn succession(&mut self) -> Result<Option<Box<dyn Succession>>, VmmError> {
        Ok(Some(Box::new(FirecrackerSuccession::of(self)?)))
    }

    fn exit(&mut self) -> Result<Option<VmExit>, VmmError> {
        Ok(self.lifetime().wait(Duration::ZERO)?)
    }

    fn wait_exit(&mut self, timeout: Duration) -> Result<Option<VmExit>, VmmError> {
        Ok(self.lifetime().wait(timeout)?)
    }

    fn finish_shutdown(&mut self) -> Result<Option<VmExit>, VmmError> {
        match self.lifetime().wait(SHUTDOWN_TIMEOUT)? {
            None if self.came_by() == VmOrigin::Attached => Ok(None),
            None => Ok(Some(self.lifetime().kill()?)),
            ended => Ok(ended),
        }
    }

    fn end(&mut self) -> Result<(), VmmError> {
        if self.lifetime().wait(Duration::ZERO)?.is_none() {
            self.lifetime().kill()?;
        }
        if self.came_by() == VmOrigin::Launched {
            // Firecracker does not start where a socket is left.
            let _ = std::fs::remove_file(self.api_socket());
        }
        Ok(())
    }

    fn leave_running(self: Box<Self>) -> u32 {
        self.leave()
    }

    fn monitor_socket(&self) -> Option<PathBuf> {
        Some(self.api_socket())
    }

    fn monitor_connection(&self) -> Option<OwnedFd> {
        self.connection()
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
