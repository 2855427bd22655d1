//! What the engine does as a cycle passes its phases: priority, status, faults, audits.

use super::audit::Audit;
use super::faults::Fault;
use crate::control::CaptureState;
use crate::control::server::SharedStatus;
use keyframe_capture::{BoxError, CaptureObserver, CapturePhase, PageReader};
use keyframe_units::RamLayout;

/// The engine's observer of captures: keeps the status up to date, injects faults, and makes the
/// copies of an audit.
pub struct CycleObserver {
    status: SharedStatus,
    fault: Option<Fault>,
    /// The audit, if one was asked for.
    pub audit: Option<Audit>,
}

impl CycleObserver {
    /// Creates an observer that shows phases in `status`, injects `fault`, and copies RAM for
    /// `audit`; `None` for no fault and no audit.
    pub fn new(status: SharedStatus, fault: Option<Fault>, audit: Option<Audit>) -> Self {
        Self { status, fault, audit }
    }
}

impl CaptureObserver for CycleObserver {
    fn reached(&mut self, phase: CapturePhase) {
        if phase == CapturePhase::Precopy {
            keyframe_kernel::priority::raise_current_thread();
        }
        // Between Stopping and Resumed the guest waits: no lock that a client of the control socket
        // may hold.
        if phase == CapturePhase::Precopy
            && let Ok(mut status) = self.status.lock()
        {
            status.phase = CaptureState::of(phase);
        }
        if let Some(fault) = &self.fault {
            fault.reached(phase);
        }
    }

    fn paused(&mut self, reader: &dyn PageReader, ram: &RamLayout) -> Result<(), BoxError> {
        match &mut self.audit {
            Some(audit) => audit.copy(reader, ram),
            None => Ok(()),
        }
    }
}
