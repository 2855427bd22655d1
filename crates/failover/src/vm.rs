//! The thread that controls the VM: it takes epochs when the policy or the protocol says so.
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

/// An action that the primary's loop requests from the VM's thread.
pub enum VmAction {
    /// Let the policy take epochs (true), or not (false).
    MayCapture(bool),
    /// Capture an epoch now. If `last` is true, the VM is paused already and stays paused.
    Capture { last: bool },
    /// Begin this session with a standby: give up the epoch in flight, and capture a complete one.
    Sync { session: u64 },
    /// Hashes of the pages that the standby of a new session holds already.
    PageHashes { session: u64, first: u64, hashes: Vec<u8> },
    /// The standby holds all epochs up to this one.
    Acknowledged { epoch: Epoch },
    /// The standby holds no epoch after this one: the next epoch includes the pages of later ones.
    Owe { after: Option<Epoch> },
    /// Pause the VM by its monitor. The policy takes no epochs until [`VmAction::MayCapture`].
    Stop,
    /// Let the VM run again.
    Resume,
    /// The gate holds the first packet of an epoch.
    Packet,
    /// The encoder has encoded an epoch.
    Report(Box<EncodeReport<SentEpoch>>),
    /// End the thread and return the VM.
    End,
}

/// An event that the VM's thread reports to the primary.
pub enum ProtectedVmEvent {
    /// An epoch is captured.
    Captured {
        /// The number of the epoch.
        epoch: Epoch,
        /// The number of the gate's cut, before which are the packets that the guest had sent by
        /// then. `None` if the VM has no network.
        gate: Option<u64>,
        /// The reason why it was captured.
        reason: &'static str,
    },
    /// A capture has failed.
    CaptureFailed(Error),
    /// No capture can succeed before [`ProtectedVmEvent::CaptureUnblocked`].
    CaptureBlocked {
        /// The reason, for users.
        reason: String,
    },
    /// Captures can succeed again. If the machine has changed, this is its new description.
    CaptureUnblocked(Option<Box<MachineDescription>>),
    /// The VM is paused, as [`VmAction::Stop`] asked.
    Stopped,
    /// The VM could not be paused, as [`VmAction::Stop`] asked. It may be paused nevertheless.
    StopFailed(Error),
    /// The VM runs again.
    Resumed,
    /// QEMU has ended.
    Ended(ExitStatus),
    /// The standby has acknowledged an epoch.
    EpochDone(Box<EpochReport>),
}

/// The description of a machine from which a standby starts the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineDescription {
    /// The description of the VM.
    pub spec: MachineSpec,
    /// The RAM blocks of the VM.
    pub ram: RamLayout,
}

/// The numbers of an acknowledged epoch, as users see them.
#[derive(Clone, Debug, Default)]
pub struct EpochReport {
    /// The number of the epoch. `None` if no epoch was acknowledged yet.
    pub acknowledged: Option<Epoch>,
    /// The number of pages of the epoch.
    pub pages: u64,
    /// The number of bytes that were sent.
    pub wire_bytes: u64,
    /// The number of bytes of the pages before they were encoded.
    pub raw_bytes: u64,
    /// The length of the pause in nanoseconds.
    pub pause_ns: u64,
    /// The time from the end of the pause to the acknowledgement, in nanoseconds.
    pub transfer_ns: u64,
    /// The time since the pause of the epoch before, in nanoseconds.
    pub epoch_ns: u64,
    /// The reason why the epoch was taken.
    pub reason: &'static str,
    /// The time for which the policy has kept the VM suspended since the pause, in nanoseconds.
    pub suspended_ns: u64,
    /// The estimates of the policy: name and value.
    pub estimates: Vec<(&'static str, f64)>,
}

/// A VM that is captured into epochs. The thread's loop controls the VM only through this trait.
pub trait ProtectedVm: Send {
    /// Pauses the VM by a command of its monitor, without the watchdog of pauses. Error: the VMM
    /// refuses or does not answer; then the VM may be paused nevertheless.
    fn pause(&mut self) -> Result<()>;
    /// Lets the VM run again. A failure goes to the event sink.
    fn resume(&mut self);
    /// Reads the monitor's events. Returns how the VM ended, if it has. Error: the VM's process
    /// cannot be queried.
    fn poll_end(&mut self) -> Result<Option<ExitStatus>>;
    /// Returns the activity of the guest since the newest epoch. `now_ns` is the time of
    /// [`now_ns`].
    fn observe(&mut self, now_ns: u64) -> GuestActivity;
    /// Captures the VM as epoch `epoch`. Users read `reason` beside the epoch. The pages go to the
    /// encoder, whose report arrives as [`VmAction::Report`]. Returns the number of the capture and
    /// of the gate's cut. Errors: [`Error::NotCaptured`] before the first [`ProtectedVm::renew`];
    /// the machine has changed; the VM or its disks cannot be captured.
    fn capture(&mut self, epoch: Epoch, reason: &'static str) -> Result<CapturedEpoch>;
    /// Records the encoder's report about an epoch that was sent or has failed. Returns true if the
    /// epoch was given up before, so that the report changes nothing.
    fn settle(&mut self, report: EncodeReport<SentEpoch>) -> bool;
    /// Gives up the epoch of capture number `seq`: the next epoch includes its pages. `report` is
    /// the encoder's report about it, if there is one.
    fn give_up(&mut self, seq: u64, report: Option<EncodeReport<SentEpoch>>);
    /// Checks that the machine is the one that was described to the standby. Errors: it is not; the
    /// VMM does not describe its machine.
    fn check_machine(&mut self) -> Result<()>;
    /// Returns the reason why no capture can succeed before [`ProtectedVm::renew`]. Returns `None`
    /// if captures can succeed.
    fn outdated(&self) -> Option<String>;
    /// Begins to capture the machine as it is now. Returns its description if it differs from the
    /// one before, and `None` otherwise. The caller has given up an epoch in flight. Errors:
    /// [`Error::MachineChanged`] if a standby cannot follow the change; the capture cannot begin.
    fn renew(&mut self) -> Result<Option<MachineDescription>>;
    /// Returns the number of pages of RAM and disks.
    fn len_pages(&self) -> u64;
    /// Makes the next epoch hold all of the VM. `is_blank` is true if the standby holds only zeros.
    fn begin_session(&mut self, is_blank: bool);
    /// Sends the disks as they are now. Blocks that the guest writes during this go with the next
    /// epoch. Errors: a disk cannot be read; the blocks cannot be sent.
    fn copy_disks(&mut self) -> Result<()>;
}

/// The activity of the guest since the newest epoch.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestActivity {
    /// The number of pages of RAM that the guest wrote.
    pub dirty_pages: u64,
    /// The number and size of the packets that the gate holds.
    pub held: GateStatus,
    /// The number of bytes that the guest wrote to its disks.
    pub disk_bytes: u64,
    /// The time for which the virtual CPUs ran or waited for a core, in nanoseconds since a fixed
    /// instant. `None` if that is unknown.
    pub busy_ns: Option<u64>,
}

/// The result of the capture of an epoch.
#[derive(Clone, Copy, Debug)]
pub struct CapturedEpoch {
    /// The number of the capture.
    pub seq: u64,
    /// The number of the gate's cut at the pause. `None` if the VM has no network.
    pub gate: Option<u64>,
}

/// The handle to the thread that captures the VM.
pub struct VmThread {
    /// The sender of actions for the thread.
    pub actions: Sender<VmAction>,
    thread: JoinHandle<CapturedMachines>,
}

impl VmThread {
    /// Starts the thread for a VM that runs. The thread passes its events to `events`. Error: the
    /// thread cannot be started.
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

    /// Ends the thread and returns the VM. Error: [`Error::VmThreadPanicked`].
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
