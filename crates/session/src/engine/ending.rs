//! The end of a run: captured checkpoints are sealed, and the VMs are ended or left running.

use super::{
    BrokenRun, End, Engine, EngineMessage, EngineRequest, EngineResponse, Event, OnExit, RunEnd,
    RunReport, StoreSink, Successor,
};
use crate::error::{Error, Result};
use crate::event::EventSink;
use crate::machines::NamedVm;
use crate::run_dir::RunDir;
use crate::teardown::Teardown;

/// The answers to a request that came after the end was decided.
const RUN_ENDS: &str = "the run is ending";
const WAS_SUCCEEDED: &str =
    "the VM was just put back to a checkpoint, by another process: ask again";

impl Engine<'_> {
    /// Seals all captured checkpoints.
    fn seal_remaining(&mut self) -> Result<()> {
        let sink = self.end_encoding()?;
        sink.finish().map(drop).map_err(|e| Error::store(self.store.path(), e))
    }

    /// Ends the encoder and handles its last reports.
    pub(super) fn end_encoding(&mut self) -> Result<StoreSink> {
        let encoding = self.encoding.take().ok_or(Error::EncoderEnded)?;
        let sink = encoding.finish()?;
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                EngineMessage::Report(report) => self.settle(*report),
                // The loop answers them if it goes on with another encoder.
                EngineMessage::Request(pending) => self.postponed.push_back(pending),
            }
        }
        Ok(sink)
    }

    /// Answers the requests that came too late with `reason`. Returns what the last of them that asked
    /// for the end wants.
    fn turn_away(&mut self, reason: &str) -> Option<OnExit> {
        let mut stop = None;
        while let Ok(message) = self.inbox.try_recv() {
            if let EngineMessage::Request(pending) = message {
                self.postponed.push_back(pending);
            }
        }
        for pending in self.postponed.drain(..) {
            let answer = match pending.request {
                EngineRequest::Stop { on_exit } => {
                    stop = Some(on_exit.unwrap_or(self.options.on_exit));
                    EngineResponse::Stopping
                }
                _ => EngineResponse::Failed(reason.into()),
            };
            // The client may have gone.
            let _ = pending.answer.send(answer);
        }
        stop
    }

    /// Releases all parts of the run, whatever fails, and returns all errors. VMs of a run that
    /// broke run on; those whose guests have not run are ended.
    pub(super) fn finish(mut self, end: Result<End, BrokenRun>) -> Result<RunReport> {
        keyframe_kernel::priority::lower_current_thread();
        let mut teardown = Teardown::default();
        let end = match end {
            Ok(end) => end,
            Err(BrokenRun { error, has_begun }) => {
                teardown = Teardown::after(error);
                End::Asked(if has_begun { OnExit::Keep } else { OnExit::Kill })
            }
        };
        teardown.step(self.seal_remaining());
        let goes_on = matches!(end, End::Succeeded(_));
        let stop = self.turn_away(if goes_on { WAS_SUCCEEDED } else { RUN_ENDS });
        let guest_end = self.machines.guest_end();
        if !matches!(end, End::Vm(_) | End::Succeeded(_)) {
            teardown.step(self.machines.release_ends());
        }
        self.recorder = None;
        // The tracker goes with the cycle: QEMU is on its own again before it is ended or left.
        drop(self.copying);
        let is_attached = self.machines.is_attached();
        if let Some((disks, mut vms)) = self.machines.storage() {
            disks.detach(&mut vms);
        }
        let is_group = self.machines.is_group();
        let vmm = self.machines.vmm();
        let (vms, peripherals) = self.machines.into_vms();
        let events = &*self.options.events;
        if let Some(recompressor) = self.recompressor.take() {
            recompressor.finish(events);
        }
        if let (true, Some(count)) =
            (self.given_up, self.options.count.filter(|n| *n > self.sealed))
        {
            events.event(&Event::CountNotReached { count, sealed: self.sealed });
        }
        let mut successor = None;
        let end = match end {
            End::Succeeded(vm) => {
                successor = Some(Successor { vm, stop });
                for (_, mut former) in vms {
                    // The kernel keeps an ended child until its parent asks for its exit status.
                    let _ = former.exit();
                }
                RunEnd::Succeeded
            }
            End::Vm(exit) => {
                if !exit.success() {
                    events.event(&Event::QemuFailed { vmm, exit });
                } else if is_attached {
                    // Its console is another terminal's.
                    events.event(&Event::VmEnded { vm: self.name.clone() });
                }
                RunEnd::VmEnded(exit)
            }
            End::Asked(_) if is_attached => detach(vms, events),
            End::Asked(OnExit::Kill) => kill(vms, &mut teardown),
            End::Asked(OnExit::Keep) => {
                self.run_dir.keep();
                keep(vms, is_group, &self.run_dir, |event| events.event(&event));
                RunEnd::Kept
            }
        };
        let keeps = matches!(end, RunEnd::Detached | RunEnd::Kept | RunEnd::Succeeded);
        if let Some(Some(directory)) = teardown.step(peripherals.release(keeps)) {
            events.event(&Event::WritesKept { directory });
        }
        teardown.finish()?;
        let (sealed, failed) = (self.sealed, self.failed);
        let has_qemu_failed = matches!(end, RunEnd::VmEnded(exit) if !exit.success());
        if successor.is_none() {
            events.event(&Event::Finished { sealed, failed, guest_end, has_qemu_failed });
        }
        let (audited_wrong, given_up, failing) = (self.audited_wrong, self.given_up, self.failing);
        Ok(RunReport {
            end,
            guest_end,
            sealed,
            failed,
            audited_wrong,
            given_up,
            failing,
            successor,
        })
    }
}

/// Leaves attached VMs running.
fn detach(vms: Vec<NamedVm>, events: &dyn EventSink<Event>) -> RunEnd {
    for (vm, left) in vms {
        let vmm = left.kind();
        events.event(&Event::Detached { vm, vmm, qemu_pid: left.leave_running() });
    }
    RunEnd::Detached
}

/// Ends all VMs. Errors go to `teardown`.
fn kill(vms: Vec<NamedVm>, teardown: &mut Teardown) -> RunEnd {
    for (_, mut vm) in vms {
        teardown.step(vm.end());
    }
    RunEnd::Killed
}

/// Leaves launched VMs running.
fn keep(vms: Vec<NamedVm>, is_group: bool, run_dir: &RunDir, tell: impl Fn(Event)) {
    for (number, (vm, left)) in vms.into_iter().enumerate() {
        let dir =
            if is_group { run_dir.path().join(number.to_string()) } else { run_dir.path().into() };
        let monitor = left.monitor_socket().unwrap_or_else(|| dir.join("qmp.sock"));
        let vmm = left.kind();
        tell(Event::Kept { vm, vmm, qemu_pid: left.leave_running(), monitor });
    }
}
