//! The thread that has the VM: it takes epochs when the policy or the protocol says so.
//!
//! ```text
//!   protocol ─VmAction─▶ VmLoop: observe ─▶ policy ─▶ capture ─▶ [encoder: WireSink] ─▶ standby
//!            ◀──VmEvent──                                │
//!                                                     gate: cut in the pause
//! ```
//!
//! The thread may wait for QEMU. So it does nothing that has to be in time: that is the work of the
//! protocol's thread and of the guard.

mod epochs;
mod machines;
mod resyncing;
#[cfg(test)]
mod tests;

pub use super::gate::Gate;
use super::guard::now_ns;
use super::sending::SentEpoch;
use crate::error::{Error, Result};
use epochs::VmLoop;
use keyframe_capture::EncodeReport;
use keyframe_machine::MachineSpec;
use keyframe_net::GateStatus;
use keyframe_session::machines::Machines;
use keyframe_units::{Epoch, RamLayout};
use machines::CapturedMachines;
pub use machines::{CapturedParts, DiskExport, DiskExports, VmParts};
use std::io::{ErrorKind, PipeReader, Read};
use std::process::ExitStatus;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// An action that the primary asks of the VM's thread.
pub enum VmAction {
    /// Whether the policy may take epochs.
    MayCapture(bool),
    /// Capture an epoch now. With `last` the VM is paused already, and stays paused.
    Capture { last: bool },
    /// Begin this session with a standby: give up the epoch in flight, and capture a complete one.
    Sync { session: u64 },
    /// Hashes of the pages that the standby of a new session holds already.
    PageHashes { session: u64, first: u64, hashes: Vec<u8> },
    /// The standby has all up to this one.
    Acknowledged { epoch: Epoch },
    /// The standby has nothing after this one.
    Owe { after: Option<Epoch> },
    /// Pause the VM by its monitor.
    Stop,
    /// Let it run again.
    Resume,
    /// A packet is held, the first of its epoch.
    Packet,
    /// The encoder has encoded an epoch.
    Report(Box<EncodeReport<SentEpoch>>),
    /// Give the VM back.
    End,
}

/// An event that the VM's thread reports to the primary.
pub enum ProtectedVmEvent {
    /// This epoch is captured. At the gate, the packets that the guest has sent up to then have
    /// this number.
    Captured {
        epoch: Epoch,
        gate: Option<u64>,
        reason: &'static str,
    },
    CaptureFailed(Error),
    /// No capture can succeed before [`ProtectedVmEvent::CaptureUnblocked`].
    CaptureBlocked {
        reason: String,
    },
    /// Captures can succeed again, of the machine as it was described, or of this one.
    CaptureUnblocked(Option<Box<MachineDescription>>),
    /// The VM is paused, as [`VmAction::Stop`] asked.
    Stopped,
    Resumed,
    /// QEMU has ended.
    Ended(ExitStatus),
    /// The standby has acknowledged an epoch.
    EpochDone(Box<EpochReport>),
}

/// The machine that a standby has to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineDescription {
    pub spec: MachineSpec,
    pub ram: RamLayout,
}

/// An acknowledged epoch as it is shown to users.
#[derive(Clone, Debug, Default)]
pub struct EpochReport {
    pub acknowledged: Option<Epoch>,
    pub pages: u64,
    pub wire_bytes: u64,
    pub raw_bytes: u64,
    pub pause_ns: u64,
    pub transfer_ns: u64,
    pub epoch_ns: u64,
    /// The reason why it was taken.
    pub reason: &'static str,
    /// The time for which the policy has kept the VM suspended since then, in nanoseconds.
    pub suspended_ns: u64,
    pub estimates: Vec<(&'static str, f64)>,
}

/// A VM that is captured into epochs. The loop has no other access to it.
pub trait ProtectedVm: Send {
    /// Pauses the VM by its monitor.
    fn pause(&mut self) -> Result<()>;
    /// Lets it run again.
    fn resume(&mut self);
    /// Reads the monitor's events; how the VM ended, if it has.
    fn poll_end(&mut self) -> Result<Option<ExitStatus>>;
    /// Returns the activity of the guest since the newest epoch.
    fn observe(&mut self, now_ns: u64) -> GuestActivity;
    /// Captures the VM as epoch `epoch`. Its pages go to the encoder, whose report is a
    /// [`VmAction::Report`].
    fn capture(&mut self, epoch: Epoch, reason: &'static str) -> Result<CapturedEpoch>;
    /// Books an epoch that was sent or failed. True if it was given up before, so that the report
    /// says nothing.
    fn settle(&mut self, report: EncodeReport<SentEpoch>) -> bool;
    /// Gives up the epoch of capture `seq`: its pages are owed to the next one. `report` is the
    /// encoder's report about it, if there is one.
    fn give_up(&mut self, seq: u64, report: Option<EncodeReport<SentEpoch>>);
    /// Fails if the machine is not the one that was described to the standby.
    fn check_machine(&mut self) -> Result<()>;
    /// Returns why no capture can succeed before [`ProtectedVm::renew`], if that is so.
    fn outdated(&self) -> Option<String>;
    /// Begins to capture the machine as it is now. Returns its description if it is not the one
    /// before. An epoch in flight must be given up before.
    fn renew(&mut self) -> Result<Option<MachineDescription>>;
    /// Returns the number of pages of RAM and disks.
    fn len_pages(&self) -> u64;
    /// Makes the next epoch hold all of the VM. `is_blank`: the standby holds only zeros.
    fn begin_session(&mut self, is_blank: bool);
    /// Sends the disks as they are now. What changes meanwhile goes with the next epoch.
    fn copy_disks(&mut self) -> Result<()>;
}

/// The activity of the guest since the newest epoch.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestActivity {
    /// The number of pages that it wrote to.
    pub dirty_pages: u64,
    /// The packets that the gate holds.
    pub held: GateStatus,
    /// The number of bytes that it wrote to its disks.
    pub disk_bytes: u64,
    /// The number of nanoseconds in which its virtual CPUs ran or waited for a core, since any
    /// fixed time; `None` if that is unknown.
    pub busy_ns: Option<u64>,
}

/// A capture.
#[derive(Clone, Copy, Debug)]
pub struct CapturedEpoch {
    /// The number of the capture.
    pub seq: u64,
    /// The gate's cut at the pause; `None` if the VM has no network.
    pub gate: Option<u64>,
}

/// The thread's handle.
pub struct VmThread {
    pub actions: Sender<VmAction>,
    thread: JoinHandle<CapturedMachines>,
}

impl VmThread {
    /// Starts the thread, for a VM that runs.
    pub fn start(
        parts: VmParts,
        events: impl Fn(ProtectedVmEvent) + Send + 'static,
    ) -> Result<Self> {
        let (actions, inbox) = channel();
        let reports = actions.clone();
        let report = move |report| {
            let _ = reports.send(VmAction::Report(Box::new(report)));
        };
        if let Ok(Some(bell)) = parts.captured.gate.ask(|gate| gate.bell()) {
            // Without that thread a packet waits for the next look.
            let _ = listen(bell, actions.clone());
        }
        let vm_loop = VmLoop::new(epochs::LoopParts {
            vm: CapturedMachines::new(parts.captured, report),
            wire: parts.wire,
            policy: parts.policy,
            first_epoch: parts.first_epoch,
            events: Box::new(events),
            sink: parts.events,
            clock: Box::new(now_ns),
        });
        let thread =
            std::thread::Builder::new().name("vm".into()).spawn(move || vm_loop.run(&inbox));
        let thread = thread.map_err(|e| Error::io("start the VM's thread", e))?;
        Ok(Self { actions, thread })
    }

    /// Ends the thread and gives the VM back.
    pub fn end(self) -> Result<Machines> {
        let _ = self.actions.send(VmAction::End);
        let vm = self.thread.join().map_err(|_| Error::VmThreadPanicked)?;
        Ok(vm.end())
    }
}

/// Wakes the VM's thread as soon as the guest has sent a packet, which would wait for the next look
/// otherwise.
fn listen(mut bell: PipeReader, actions: Sender<VmAction>) -> Result<()> {
    let listen = move || {
        let mut rings = [0; 64];
        loop {
            match bell.read(&mut rings) {
                // The gate has ended.
                Ok(0) => break,
                Ok(_) if actions.send(VmAction::Packet).is_err() => break,
                Err(e) if e.kind() != ErrorKind::Interrupted => break,
                Ok(_) | Err(_) => {}
            }
        }
    };
    let thread = std::thread::Builder::new().name("bell".into()).spawn(listen);
    thread.map(drop).map_err(|e| Error::io("start a thread", e))
}
