//! The VM of QEMU with its disks, its gate, its capture and its encoder.

use super::{CapturedEpoch, Gate, GuestActivity, ProtectedVm};
use crate::error::{Error, Result};
use crate::event::{Event, SharedEventSink};
use crate::gate::GatedMachines;
use crate::sending::{EpochLabel, SentEpoch, SharedWire, WireSink};
use crate::vcpu_time::VcpuTime;
use crate::verify::{Checks, Verifier};
use keyframe_capture::{BoxError, EncodeError, EncodeReport, SettledReport};
use keyframe_disk::nbd::client::Client;
use keyframe_net::GateRemote;
use keyframe_scheduling::replication::ReplicationScheduler;
use keyframe_session::control::Strategy;
use keyframe_session::encoder_thread::EncoderThread;
use keyframe_session::machines::Machines;
use keyframe_session::ram_capture::RamCapture;
use keyframe_units::{Epoch, PAGE_BYTES};
use std::path::PathBuf;
use std::process::ExitStatus;

/// The time between two queries of the written disk bytes, in nanoseconds.
const DISK_LOOK_NS: u64 = 20_000_000;
/// NBD_STATE_ZERO of `base:allocation`.
const ZERO: u32 = 2;

/// The parts of the VM's thread.
pub struct VmParts {
    /// The VM with all that captures it.
    pub captured: CapturedParts,
    /// The connections to the standby.
    pub wire: SharedWire,
    /// Decides when epochs are taken.
    pub policy: Box<dyn ReplicationScheduler>,
    /// The first epoch's number.
    pub first_epoch: Epoch,
    /// Receives failed resumes and other errors of the VM.
    pub events: SharedEventSink,
}

/// The VM with all that captures it.
pub struct CapturedParts {
    /// The VM.
    pub machines: Machines,
    /// The capture of its RAM.
    pub ram: RamCapture,
    /// The gate before its network.
    pub gate: Gate,
    /// The connections to the standby.
    pub wire: SharedWire,
    /// RAM is compared with the standby's at each epoch.
    pub verify: bool,
    /// The socket of the disks' server, and the exports with their bytes.
    pub disks: Option<(PathBuf, Vec<(String, u64)>)>,
    /// Receives failed resumes and other errors of the VM.
    pub events: SharedEventSink,
}

/// The VM of QEMU, captured.
pub struct CapturedMachines {
    gated: GatedMachines,
    ram: RamCapture,
    encoding: EncoderThread<WireSink>,
    wire: SharedWire,
    verify: bool,
    verifier: Verifier,
    disks: Option<(PathBuf, Vec<(String, u64)>)>,
    events: SharedEventSink,
    /// Nothing was captured yet.
    is_fresh: bool,
    disk_bytes: u64,
    disk_looked_ns: u64,
    vcpu_time: VcpuTime,
}

impl CapturedMachines {
    /// Starts the encoder; `report` gets its result for each epoch.
    pub fn new(
        parts: CapturedParts,
        report: impl FnMut(EncodeReport<SentEpoch>) + Send + 'static,
    ) -> Result<Self> {
        let space = parts.ram.layout.len_pages();
        let sink = WireSink(parts.wire.clone());
        Ok(Self {
            gated: GatedMachines { machines: parts.machines, gate: parts.gate, cut: None },
            ram: parts.ram,
            encoding: EncoderThread::start(sink, space, Box::new(|_| ()), report)?,
            wire: parts.wire,
            verify: parts.verify,
            verifier: Verifier::default(),
            disks: parts.disks,
            events: parts.events,
            is_fresh: true,
            disk_bytes: 0,
            disk_looked_ns: 0,
            vcpu_time: VcpuTime::default(),
        })
    }

    /// Ends the capture and gives the VM back.
    pub fn end(mut self) -> Machines {
        self.ram.strategies.untrack();
        self.ram.cycle.untrack();
        let _ = self.encoding.finish();
        self.gated.machines
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
        let Some((socket, disks)) = self.disks.clone() else { return Ok(()) };
        if let Some((storage, _)) = self.gated.machines.storage() {
            storage.begin_anew()?;
        }
        for (number, (export, _)) in disks.iter().enumerate() {
            let mut client = Client::connect(&socket, export, "base:allocation")?;
            self.send_disk(number, &mut client)?;
        }
        Ok(())
    }

    /// Sends the blocks with data, and the holes between them as zeros.
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
                self.events.failover_event(&Event::ResumeFailed(error));
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
            dirty_pages: self.ram.cycle.estimate_pages().unwrap_or(0),
            disk_bytes: self.disk_bytes(now_ns),
            busy_ns: self.vcpu_time.total_ns(&mut self.gated.machines),
        }
    }

    fn capture(&mut self, epoch: Epoch, reason: &'static str) -> Result<CapturedEpoch> {
        let cut = self.gated.machines.storage().map(|(disks, vms)| disks.begin(vms)).transpose();
        let cut = cut.map_err(|e| Error::vm("prepare the VM's disks", e))?;
        let checks = self.verify.then(Checks::default);
        self.verifier.checks.clone_from(&checks);
        let label = EpochLabel { epoch, reason, cut, checks };
        let strategy = self.ram.strategies.get(Strategy::Auto)?;
        let captured = self.ram.cycle.capture(
            &mut self.gated,
            &mut self.verifier,
            strategy,
            self.encoding.queue(),
            label,
        );
        keyframe_kernel::priority::lower_current_thread();
        let seq = captured.as_ref().ok().copied();
        if let Some((disks, vms)) = self.gated.machines.storage() {
            disks.captured(seq, vms);
        }
        let seq = captured?;
        (self.is_fresh, self.disk_bytes) = (false, 0);
        Ok(CapturedEpoch { seq, gate: self.gated.cut })
    }

    fn settle(&mut self, report: EncodeReport<SentEpoch>) -> bool {
        match self.ram.cycle.settle(report) {
            SettledReport::Sealed { seq, .. } => {
                if let Some((disks, vms)) = self.gated.machines.storage() {
                    disks.sealed(seq, vms);
                }
            }
            SettledReport::Failed { lost, .. } => {
                if let Some((disks, vms)) = self.gated.machines.storage() {
                    disks.failed(&lost, vms);
                }
            }
            SettledReport::Stale => return true,
        }
        false
    }

    fn give_up(&mut self, seq: u64, report: Option<EncodeReport<SentEpoch>>) {
        match report {
            Some(report) => {
                self.settle(EncodeReport { outcome: Err(EncodeError::Behind), ..report });
            }
            // The encoder's report comes later, and is stale then.
            None => self.ram.cycle.give_back(),
        }
        if let Some((disks, vms)) = self.gated.machines.storage() {
            disks.failed(&[seq], vms);
        }
    }

    fn len_pages(&self) -> u64 {
        let disks = self.disks.iter().flat_map(|(_, disks)| disks);
        let blocks: u64 = disks.map(|(_, bytes)| bytes.div_ceil(PAGE_BYTES as u64)).sum();
        self.ram.layout.len_pages() + blocks
    }

    fn begin_session(&mut self, is_blank: bool) {
        // A fresh tracker reports all pages that are not zeros.
        if !(std::mem::take(&mut self.is_fresh) && is_blank) {
            self.ram.cycle.restart();
        }
    }

    fn copy_disks(&mut self) -> Result<()> {
        self.send_disks().map_err(|e| Error::vm("copy the disks", e))
    }
}
