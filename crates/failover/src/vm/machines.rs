//! The VM of QEMU with its disks, its gate, its capture and its encoder.

use super::{CapturedEpoch, Gate, GuestActivity, MachineDescription, ProtectedVm};
use crate::error::{Error, Result};
use crate::event::{FailoverEvent, SharedFailoverEventSink};
use crate::gate::GatedMachines;
use crate::sending::{EpochLabel, SentEpoch, SharedWire, WireSink};
use crate::vcpu_time::VcpuTime;
use crate::verify::{Checks, Verifier};
use keyframe_capture::{
    BoxError, CaptureCycle, CaptureError, EncodeError, EncodeReport, SettledReport,
};
use keyframe_disk::nbd::client::Client;
use keyframe_machine::MachineSpec;
use keyframe_net::GateRemote;
use keyframe_qemu::{MachineShape, Vm};
use keyframe_scheduling::replication::ReplicationScheduler;
use keyframe_session::control::Strategy;
use keyframe_session::encoder_thread::EncoderThread;
use keyframe_session::machines::Machines;
use keyframe_session::ram_capture::RamCapture;
use keyframe_session::{SessionOptions, refuse_running_scans};
use keyframe_units::{Epoch, PAGE_BYTES};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;

/// The time between two queries of the written disk bytes, in nanoseconds.
const DISK_LOOK_NS: u64 = 20_000_000;
/// The bits of a report's generation that the cycle itself counts.
const GENERATION_BITS: u32 = 32;
/// NBD_STATE_ZERO of `base:allocation`.
const ZERO: u32 = 2;

/// The parts of the thread that captures the VM.
pub struct VmParts {
    /// The VM and the objects that capture it.
    pub captured: CapturedParts,
    /// The connections to the standby.
    pub wire: SharedWire,
    /// The policy that decides when epochs are taken.
    pub policy: Box<dyn ReplicationScheduler>,
    /// The number of the first epoch.
    pub first_epoch: Epoch,
    /// Receives failed attempts to resume the VM, and its other errors.
    pub events: SharedFailoverEventSink,
}

/// The disks of a VM, as their server presents them over NBD.
#[derive(Clone, Debug)]
pub struct DiskExports {
    /// The path of the server's socket.
    pub socket: PathBuf,
    /// The exports, in the order of the disks.
    pub exports: Vec<DiskExport>,
}

/// One disk, as the disk server exports it over NBD.
#[derive(Clone, Debug)]
pub struct DiskExport {
    /// The name of the NBD export.
    pub name: String,
    /// The size of the disk in bytes.
    pub disk_bytes: u64,
}

/// A VM and the objects that capture it.
pub struct CapturedParts {
    /// The VM.
    pub machines: Machines,
    /// The capture of its RAM. `None` if it has not begun.
    pub ram: Option<RamCapture>,
    /// The description of the machine that standbys receive.
    pub description: MachineDescription,
    /// The devices and media that the VM's command line creates. `None` if they are not known.
    pub shape: Option<MachineShape>,
    /// The options of captures.
    pub options: SessionOptions,
    /// The gate before its network.
    pub gate: Gate,
    /// The connections to the standby.
    pub wire: SharedWire,
    /// True if RAM is compared with the standby's at each epoch.
    pub verify: bool,
    /// The disks of the VM. `None` if it has none.
    pub disks: Option<DiskExports>,
    /// Receives failed attempts to resume the VM, and its other errors.
    pub events: SharedFailoverEventSink,
}

/// A capture and its encoder.
struct Capturing {
    ram: RamCapture,
    encoding: EncoderThread<WireSink>,
}

impl Capturing {
    fn end(mut self) {
        self.ram.strategies.untrack();
        self.ram.cycle.untrack();
        let _ = self.encoding.finish();
    }
}

/// Receives the encoder's result for each epoch.
type ReportSink = Arc<dyn Fn(EncodeReport<SentEpoch>) + Send + Sync>;

/// A VM that QEMU runs, with the objects that capture it.
pub struct CapturedMachines {
    gated: GatedMachines,
    /// `None` until [`ProtectedVm::renew`] succeeds.
    capturing: Option<Capturing>,
    /// A capture that was made already, until its encoder is started.
    first: Option<RamCapture>,
    /// The machine at its start.
    original: MachineSpec,
    description: MachineDescription,
    /// The devices and media that the original command line makes.
    base: Option<MachineShape>,
    /// The words after the original command line that the description has.
    words: Vec<String>,
    /// The RAM blocks are not those that are tracked.
    has_other_ram: bool,
    options: SessionOptions,
    report: ReportSink,
    /// The number of captures begun. Reports of earlier ones are stale.
    renewals: u64,
    wire: SharedWire,
    verify: bool,
    verifier: Verifier,
    disks: Option<DiskExports>,
    events: SharedFailoverEventSink,
    /// Nothing was captured yet.
    is_fresh: bool,
    disk_bytes: u64,
    disk_looked_ns: u64,
    vcpu_time: VcpuTime,
}

impl CapturedMachines {
    /// Creates a VM whose capture begins with the first [`ProtectedVm::renew`]. The encoder passes
    /// its report about each epoch to `report`.
    pub fn new(
        parts: CapturedParts,
        report: impl Fn(EncodeReport<SentEpoch>) + Send + Sync + 'static,
    ) -> Self {
        let gated = GatedMachines {
            machines: parts.machines,
            gate: parts.gate,
            cut: None,
            expected: None,
            changes: Vec::new(),
        };
        Self {
            gated,
            capturing: None,
            first: parts.ram,
            original: parts.description.spec.clone(),
            description: parts.description,
            base: parts.shape,
            words: Vec::new(),
            has_other_ram: false,
            options: parts.options,
            report: Arc::new(report),
            renewals: 0,
            wire: parts.wire,
            verify: parts.verify,
            verifier: Verifier::default(),
            disks: parts.disks,
            events: parts.events,
            is_fresh: true,
            disk_bytes: 0,
            disk_looked_ns: 0,
            vcpu_time: VcpuTime::default(),
        }
    }

    /// Ends the capture and returns the VM.
    pub fn end(self) -> Machines {
        if let Some(capturing) = self.capturing {
            capturing.end();
        }
        self.gated.machines
    }

    fn vm(&mut self) -> Result<&mut Vm> {
        let member = self.gated.machines.members_mut().first_mut();
        let member = member.ok_or(keyframe_session::Error::NoVm)?;
        member.vm.qemu().map_err(|e| Error::vm("look at the machine", e))
    }

    /// Begins the capture of the RAM as it is now. Ends an earlier capture first, also if this one
    /// fails. Errors: the RAM cannot be captured; QEMU does not answer; the encoder's thread cannot
    /// be started.
    fn begin_capture(&mut self) -> Result<()> {
        if let Some(before) = self.capturing.take() {
            before.end();
        }
        let ram = if let Some(ram) = self.first.take() {
            ram
        } else {
            let events = Arc::clone(&self.options.events);
            refuse_running_scans(self.vm()?, &*events)?;
            let members = self.gated.machines.members_mut().iter_mut();
            let mut vms: Vec<_> = members.map(|m| (&*m.name, m.vm.vm_mut())).collect();
            RamCapture::start(&mut vms, false, &self.options)?
        };
        for (member, watches) in
            self.gated.machines.members_mut().iter_mut().zip(&ram.watches_discards)
        {
            member.vm.set_watches_discards(*watches);
        }
        let space = ram.layout.len_pages();
        self.wire.reshape(space, &self.disk_blocks());
        self.renewals += 1;
        let (sink, generation) = (WireSink(self.wire.clone()), self.renewals << GENERATION_BITS);
        let report = Arc::clone(&self.report);
        let report = move |said: EncodeReport<SentEpoch>| {
            report(EncodeReport { generation: said.generation + generation, ..said });
        };
        let encoding = EncoderThread::start(sink, space, Box::new(|_| ()), report)?;
        self.capturing = Some(Capturing { ram, encoding });
        (self.is_fresh, self.has_other_ram) = (true, false);
        Ok(())
    }

    /// Returns the machine of the original command line followed by `words`. Error: QEMU does not
    /// answer.
    fn spec_with(&mut self, words: &[String]) -> Result<MachineSpec> {
        let mut spec = self.original.clone();
        if !words.is_empty() {
            spec.user_command.extend_from_slice(words);
            spec.full_command.extend_from_slice(words);
            let vm = self.vm()?;
            (spec.vcpus, spec.guest_map) = (vm.cpus()?, Some(vm.guest_map()?));
        }
        Ok(spec)
    }

    fn disk_blocks(&self) -> Vec<u64> {
        let disks = self.disks.iter().flat_map(|disks| &disks.exports);
        disks.map(|disk| disk.disk_bytes.div_ceil(PAGE_BYTES as u64)).collect()
    }

    /// Returns the bytes that the guest has written to its disks since the newest epoch, as the
    /// last query told.
    fn disk_bytes(&mut self, now_ns: u64) -> u64 {
        if now_ns.saturating_sub(self.disk_looked_ns) > DISK_LOOK_NS
            && let Some((storage, _)) = self.gated.machines.storage()
        {
            self.disk_looked_ns = now_ns;
            self.disk_bytes = storage.written_bytes().unwrap_or(0);
        }
        self.disk_bytes
    }

    fn send_disks(&mut self) -> Result<(), BoxError> {
        let Some(DiskExports { socket, exports }) = self.disks.clone() else { return Ok(()) };
        if let Some((storage, _)) = self.gated.machines.storage() {
            storage.begin_anew()?;
        }
        for (number, export) in exports.iter().enumerate() {
            let mut client = Client::connect(&socket, &export.name, "base:allocation")?;
            self.send_disk(number, &mut client)?;
        }
        Ok(())
    }

    /// Sends the blocks with data, and the holes between them as zeros. Errors: the disk cannot be
    /// read; the blocks cannot be sent.
    fn send_disk(&self, number: usize, client: &mut Client) -> Result<(), BoxError> {
        let blocks = client.len_bytes().div_ceil(PAGE_BYTES as u64);
        let mut done = 0;
        client.each_block(
            |flags| flags & ZERO == 0,
            |first, data| {
                self.wire.put_hole(number, done, first - done)?;
                done = first + data.len() as u64;
                self.wire.put_blocks(number, first, data)
            },
        )?;
        self.wire.put_hole(number, done, blocks - done)
    }

    /// Tries to capture epoch `epoch`. Returns the number of the capture, or the reason why it
    /// failed. Error: no checkpoints are taken, or the disks cannot be prepared.
    fn try_to_capture(
        &mut self,
        epoch: Epoch,
        reason: &'static str,
    ) -> Result<std::result::Result<u64, CaptureError>> {
        let Capturing { ram, encoding } = self.capturing.as_mut().ok_or(Error::NotCaptured)?;
        let cut =
            self.gated.machines.storage().map(|(disks, mut vms)| disks.begin(&mut vms)).transpose();
        let cut = cut.map_err(|e| Error::vm("prepare the VM's disks", e))?;
        let checks = self.verify.then(Checks::default);
        self.verifier.checks.clone_from(&checks);
        let label = EpochLabel { epoch, reason, cut, checks };
        let strategy = ram.strategies.get(Strategy::Auto)?;
        let captured = ram.cycle.capture(
            &mut self.gated,
            &mut self.verifier,
            strategy,
            encoding.queue(),
            label,
        );
        keyframe_kernel::priority::lower_current_thread();
        let seq = captured.as_ref().ok().copied();
        if let Some((disks, mut vms)) = self.gated.machines.storage() {
            disks.captured(seq, &mut vms);
        }
        Ok(captured)
    }
}

impl ProtectedVm for CapturedMachines {
    fn pause(&mut self) -> Result<()> {
        for member in self.gated.machines.members_mut() {
            member.vm.vm_mut().stop().map_err(|e| Error::vm("pause the VM", e))?;
        }
        Ok(())
    }

    fn resume(&mut self) {
        for member in self.gated.machines.members_mut() {
            if let Err(error) = member.vm.vm_mut().resume() {
                let error = Error::vm("let the VM run", error);
                self.events.failover_event(&FailoverEvent::ResumeFailed(error));
            }
        }
    }

    fn poll_end(&mut self) -> Result<Option<ExitStatus>> {
        self.gated.machines.look();
        Ok(self.gated.machines.try_wait()?)
    }

    fn observe(&mut self, now_ns: u64) -> GuestActivity {
        GuestActivity {
            held: self.gated.gate.ask(GateRemote::status).ok().flatten().unwrap_or_default(),
            dirty_pages: self
                .capturing
                .as_mut()
                .and_then(|capturing| capturing.ram.cycle.estimate_pages())
                .unwrap_or(0),
            disk_bytes: self.disk_bytes(now_ns),
            busy_ns: self.vcpu_time.total_ns(&mut self.gated.machines),
        }
    }

    fn capture(&mut self, epoch: Epoch, reason: &'static str) -> Result<CapturedEpoch> {
        let mut captured = self.try_to_capture(epoch, reason)?;
        let cycle = self.capturing.as_ref().map(|capturing| &capturing.ram.cycle);
        if captured.is_err() && cycle.is_some_and(CaptureCycle::wants_another_try) {
            // The VM ran meanwhile, so the disks are cut anew.
            captured = self.try_to_capture(epoch, reason)?;
        }
        let seq = captured.inspect_err(|error| {
            self.has_other_ram |= matches!(error, CaptureError::OtherRam);
        })?;
        (self.is_fresh, self.disk_bytes) = (false, 0);
        Ok(CapturedEpoch { seq, gate: self.gated.cut })
    }

    fn settle(&mut self, report: EncodeReport<SentEpoch>) -> bool {
        let Some(Capturing { ram, .. }) = &mut self.capturing else { return true };
        let own = self.renewals << GENERATION_BITS;
        let Some(generation) = report.generation.checked_sub(own) else { return true };
        match ram.cycle.settle(EncodeReport { generation, ..report }) {
            SettledReport::Sealed { seq, .. } => {
                if let Some((disks, mut vms)) = self.gated.machines.storage() {
                    disks.sealed(seq, &mut vms);
                }
            }
            SettledReport::Failed { lost, .. } => {
                if let Some((disks, mut vms)) = self.gated.machines.storage() {
                    disks.failed(&lost, &mut vms);
                }
            }
            SettledReport::Stale => return true,
        }
        false
    }

    fn give_up(&mut self, seq: u64, report: Option<EncodeReport<SentEpoch>>) {
        match (report, &mut self.capturing) {
            (Some(report), _) => {
                self.settle(EncodeReport { outcome: Err(EncodeError::Behind), ..report });
            }
            // The encoder's report comes later, and is stale then.
            (None, Some(capturing)) => capturing.ram.cycle.give_back(),
            (None, None) => {}
        }
        if let Some((disks, mut vms)) = self.gated.machines.storage() {
            disks.failed(&[seq], &mut vms);
        }
    }

    fn check_machine(&mut self) -> Result<()> {
        self.gated.check_shape().map_err(|e| Error::vm("look at the machine", e))
    }

    fn outdated(&self) -> Option<String> {
        match &self.gated.changes[..] {
            _ if self.capturing.is_none() => Some(Error::NotCaptured.to_string()),
            [] if self.has_other_ram => Some(CaptureError::OtherRam.to_string()),
            [] => None,
            changes => Some(Error::MachineChanged { changes: changes.to_vec() }.to_string()),
        }
    }

    fn renew(&mut self) -> Result<Option<MachineDescription>> {
        let now = self.vm()?.shape()?;
        let base = self.base.get_or_insert_with(|| now.clone()).clone();
        let words = match self.vm()?.words_of_changes(&base, &now)? {
            Ok(words) => words,
            Err(changes) => return Err(Error::MachineChanged { changes }),
        };
        if self.capturing.is_none() || words != self.words || self.has_other_ram {
            self.begin_capture()?;
        }
        let ram = self.capturing.as_ref().map(|capturing| capturing.ram.layout.clone());
        let ram = ram.ok_or(Error::NotCaptured)?;
        let description = MachineDescription { spec: self.spec_with(&words)?, ram };
        (self.gated.expected, self.gated.changes) = (Some(now), Vec::new());
        let is_new = words != self.words || description.ram != self.description.ram;
        (self.words, self.description) = (words, description);
        Ok(is_new.then(|| self.description.clone()))
    }

    fn len_pages(&self) -> u64 {
        self.description.ram.len_pages() + self.disk_blocks().iter().sum::<u64>()
    }

    fn begin_session(&mut self, is_blank: bool) {
        let Some(capturing) = &mut self.capturing else { return };
        // A fresh tracker reports all pages that are not zeros.
        if !(std::mem::take(&mut self.is_fresh) && is_blank) {
            capturing.ram.cycle.restart();
        }
    }

    fn copy_disks(&mut self) -> Result<()> {
        self.send_disks().map_err(|e| Error::vm("copy the disks", e))
    }
}
