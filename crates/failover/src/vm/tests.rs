//! The loop of the VM's thread, on a VM that exists only here.

mod changed_machines;
mod intervals;

use super::epochs::{LOOK_EVERY, LoopParts, VmLoop};
use super::*;
use crate::error::PageHashesError;
use crate::event::{FailoverEvent, FailoverEventSink};
use crate::sending::SharedWire;
use keyframe_capture::EncodeError;
use keyframe_scheduling::replication::{
    AcknowledgedEpoch, EpochReason, ReplicationDecision, ReplicationScheduler, VmObservation,
};
use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard};

/// What the loop has asked of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Pause,
    Resume,
    Capture(u64),
    Settle { has_failed: bool },
    GiveUp { seq: u64, is_reported: bool },
    BeginSession { is_blank: bool },
    CopyDisks,
    Renew,
}

/// What a capture comes to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum CaptureResult {
    #[default]
    Captured,
    Failed,
    /// The VM ends in the pause.
    Ended,
}

/// The VM's state, which tests change.
#[derive(Default)]
struct State {
    calls: Vec<Call>,
    exit: Option<ExitStatus>,
    /// The monitor does not answer.
    is_monitor_lost: bool,
    capture: CaptureResult,
    /// The clock that a capture moves on, and by how many nanoseconds.
    capture_takes: Option<(Arc<AtomicU64>, u64)>,
    fails_disks: bool,
    captures: u64,
    /// Captures up to this one were given up: their reports are stale.
    given_up: u64,
    /// The machine is not the one that was described, or its capture cannot begin.
    outdated: Option<&'static str>,
    /// The machine can be captured anew as this one.
    changed: Option<MachineDescription>,
    /// Nothing can be captured.
    fails_renewal: Option<&'static str>,
}

#[derive(Clone, Default)]
struct FakeVm(Arc<Mutex<State>>);

impl FakeVm {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }
}

fn lost() -> Error {
    Error::vm("pause the VM", "the monitor is closed")
}

impl ProtectedVm for FakeVm {
    fn pause(&mut self) -> Result<()> {
        self.state().calls.push(Call::Pause);
        if self.state().is_monitor_lost { Err(lost()) } else { Ok(()) }
    }

    fn resume(&mut self) {
        self.state().calls.push(Call::Resume);
    }

    fn poll_end(&mut self) -> Result<Option<ExitStatus>> {
        let state = self.state();
        if state.is_monitor_lost && state.exit.is_none() { Err(lost()) } else { Ok(state.exit) }
    }

    fn observe(&mut self, _: u64) -> GuestActivity {
        GuestActivity::default()
    }

    fn capture(&mut self, epoch: Epoch, _: &'static str) -> Result<CapturedEpoch> {
        let mut state = self.state();
        state.calls.push(Call::Capture(epoch.0));
        if let Some((clock, ns)) = &state.capture_takes {
            clock.fetch_add(*ns, Ordering::Relaxed);
        }
        if state.capture == CaptureResult::Ended {
            state.exit = Some(ExitStatus::from_raw(0));
        }
        if state.capture != CaptureResult::Captured || state.outdated.is_some() {
            return Err(lost());
        }
        state.captures += 1;
        Ok(CapturedEpoch { seq: state.captures, gate: Some(100 + epoch.0) })
    }

    fn settle(&mut self, report: EncodeReport<SentEpoch>) -> bool {
        let mut state = self.state();
        if report.seq.is_some_and(|seq| seq <= state.given_up) {
            return true;
        }
        state.calls.push(Call::Settle { has_failed: report.outcome.is_err() });
        false
    }

    fn give_up(&mut self, seq: u64, report: Option<EncodeReport<SentEpoch>>) {
        let mut state = self.state();
        state.given_up = seq;
        state.calls.push(Call::GiveUp { seq, is_reported: report.is_some() });
    }

    fn check_machine(&mut self) -> Result<()> {
        self.state().outdated.map_or(Ok(()), |_| Err(lost()))
    }

    fn outdated(&self) -> Option<String> {
        self.state().outdated.map(str::to_owned)
    }

    fn renew(&mut self) -> Result<Option<MachineDescription>> {
        let mut state = self.state();
        state.calls.push(Call::Renew);
        if let Some(problem) = state.fails_renewal {
            return Err(Error::NotSent(problem.into()));
        }
        state.outdated = None;
        Ok(state.changed.take())
    }

    fn len_pages(&self) -> u64 {
        4
    }

    fn begin_session(&mut self, is_blank: bool) {
        self.state().calls.push(Call::BeginSession { is_blank });
    }

    fn copy_disks(&mut self) -> Result<()> {
        self.state().calls.push(Call::CopyDisks);
        if self.state().fails_disks { Err(Error::vm("copy the disks", "no room")) } else { Ok(()) }
    }
}

/// A policy whose decisions a test writes; it waits without one.
#[derive(Clone, Default)]
struct Script(Arc<Mutex<VecDeque<ReplicationDecision>>>);

impl ReplicationScheduler for Script {
    fn name(&self) -> String {
        "script".into()
    }

    fn look(&mut self, _: &VmObservation) -> ReplicationDecision {
        let next = self.0.lock().unwrap().pop_front();
        next.unwrap_or(ReplicationDecision::Wait { look_in_ns: 1_000_000_000 })
    }

    fn acknowledged(&mut self, _: &AcknowledgedEpoch) {}

    fn describe(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}

/// Counts the looks that failed.
#[derive(Default)]
struct FailedLooks(AtomicU64);

impl keyframe_session::EventSink<keyframe_session::Event> for FailedLooks {
    fn event(&self, _: &keyframe_session::Event) {}
}

impl FailoverEventSink for FailedLooks {
    fn failover_event(&self, event: &FailoverEvent) {
        if matches!(event, FailoverEvent::LookFailed(_)) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

struct Test {
    clock: Arc<AtomicU64>,
    vm: FakeVm,
    policy: Script,
    vm_loop: VmLoop<FakeVm>,
    told: Receiver<ProtectedVmEvent>,
    failed_looks: Arc<FailedLooks>,
}

impl Test {
    fn new() -> Self {
        Self::of(FakeVm::default())
    }

    fn of(vm: FakeVm) -> Self {
        let policy = Script::default();
        Self::with(vm, policy.clone(), Box::new(policy))
    }

    fn with(vm: FakeVm, script: Script, policy: Box<dyn ReplicationScheduler>) -> Self {
        let failed_looks = Arc::<FailedLooks>::default();
        let (sender, told) = channel();
        let clock = Arc::<AtomicU64>::default();
        let now = Arc::clone(&clock);
        let vm_loop = VmLoop::new(LoopParts {
            vm: vm.clone(),
            wire: SharedWire::new(1, 1 << 20, 4, &[]),
            policy,
            first_epoch: Epoch(1),
            events: Box::new(move |event| sender.send(event).unwrap()),
            sink: failed_looks.clone(),
            clock: Box::new(move || now.load(Ordering::Relaxed)),
        });
        Self { clock, vm, policy: script, vm_loop, told, failed_looks }
    }

    fn step(&mut self, action: VmAction) {
        self.vm_loop.step(Some(action));
    }

    /// The events so far, a word each.
    fn told(&self) -> Vec<String> {
        let name = |event: ProtectedVmEvent| match event {
            ProtectedVmEvent::Captured { epoch, gate, .. } => {
                assert_eq!(gate, Some(100 + epoch.0));
                format!("captured {epoch}")
            }
            ProtectedVmEvent::CaptureFailed(error) => format!("failed: {error}"),
            ProtectedVmEvent::CaptureBlocked { reason } => format!("blocked: {reason}"),
            ProtectedVmEvent::CaptureUnblocked(machine) => {
                format!("unblocked{}", if machine.is_some() { ", changed" } else { "" })
            }
            ProtectedVmEvent::Stopped => "stopped".into(),
            ProtectedVmEvent::StopFailed(error) => format!("not stopped: {error}"),
            ProtectedVmEvent::Resumed => "resumed".into(),
            ProtectedVmEvent::Ended(_) => "ended".into(),
            ProtectedVmEvent::EpochDone(report) => {
                format!("done {}", report.acknowledged.unwrap().0)
            }
        };
        self.told.try_iter().map(name).collect()
    }

    fn decide(&self, decision: ReplicationDecision) {
        self.policy.0.lock().unwrap().push_back(decision);
    }
}

fn sent(seq: u64) -> VmAction {
    let outcome = Ok(SentEpoch::default());
    VmAction::Report(Box::new(EncodeReport { generation: 0, seq: Some(seq), outcome }))
}

fn not_sent(seq: u64) -> VmAction {
    let outcome =
        Err(EncodeError::Sink { operation: "seal", source: "no standby is connected".into() });
    VmAction::Report(Box::new(EncodeReport { generation: 0, seq: Some(seq), outcome }))
}

const CAPTURE: VmAction = VmAction::Capture { last: false };

#[test]
fn an_epoch_is_done_once_it_is_sent_and_acknowledged() {
    let mut test = Test::new();
    test.step(CAPTURE);
    test.step(sent(1));
    assert_eq!(test.told(), ["captured 1"]);
    test.step(VmAction::Acknowledged { epoch: Epoch(1) });
    assert_eq!(test.told(), ["done 1"]);
    assert_eq!(test.vm.calls(), [Call::Capture(1), Call::Settle { has_failed: false }]);
    // The acknowledgement may overtake the encoder's report.
    test.step(CAPTURE);
    test.step(VmAction::Acknowledged { epoch: Epoch(2) });
    assert_eq!(test.told(), ["captured 2"]);
    test.step(sent(2));
    assert_eq!(test.told(), ["done 2"]);
}

#[test]
fn a_request_during_a_flight_is_taken_after_it() {
    let mut test = Test::new();
    test.step(CAPTURE);
    test.step(CAPTURE);
    test.step(CAPTURE);
    assert_eq!(test.told(), ["captured 1"]);
    test.step(sent(1));
    test.step(VmAction::Acknowledged { epoch: Epoch(1) });
    assert_eq!(test.told(), ["done 1", "captured 2"]);
}

#[test]
fn the_last_epoch_waits_for_no_other_and_leaves_the_vm_paused() {
    let mut test = Test::new();
    test.step(CAPTURE);
    test.step(VmAction::Stop);
    test.step(VmAction::Capture { last: true });
    assert_eq!(test.told(), ["captured 1", "stopped", "captured 2"]);
    assert_eq!(test.vm.calls(), [Call::Capture(1), Call::Pause, Call::Capture(2)]);
    test.step(VmAction::Resume);
    assert_eq!(test.told(), ["resumed"]);
}

#[test]
fn a_failed_capture_uses_up_no_epoch() {
    let mut test = Test::new();
    test.vm.state().capture = CaptureResult::Failed;
    test.step(CAPTURE);
    assert_eq!(test.told(), ["failed: pause the VM"]);
    test.vm.state().capture = CaptureResult::Captured;
    test.step(CAPTURE);
    assert_eq!(test.told(), ["captured 1"]);
}

#[test]
fn a_vm_that_ends_in_a_pause_is_captured_no_more() {
    let mut test = Test::new();
    test.vm.state().capture = CaptureResult::Ended;
    test.step(CAPTURE);
    assert_eq!(test.told(), ["failed: pause the VM", "ended"]);
    test.step(VmAction::MayCapture(true));
    test.step(CAPTURE);
    test.decide(ReplicationDecision::Checkpoint(EpochReason::Due));
    assert_eq!(test.vm_loop.step(None), LOOK_EVERY);
    assert!(test.told().is_empty());
    assert_eq!(test.vm.calls(), [Call::Capture(1)]);
}

#[test]
fn a_lost_monitor_is_told_and_the_loop_goes_on() {
    let mut test = Test::new();
    test.vm.state().is_monitor_lost = true;
    test.step(VmAction::Stop);
    // The protocol's thread must not wait for a pause that never comes, nor take the VM for paused.
    assert_eq!(test.told(), ["not stopped: pause the VM"]);
    assert_eq!(test.failed_looks.0.load(Ordering::Relaxed), 1);
    test.vm.state().exit = Some(ExitStatus::from_raw(9));
    test.vm_loop.step(None);
    assert_eq!(test.told(), ["ended"]);
}

#[test]
fn a_link_that_breaks_in_flight_fails_the_epoch_and_the_next_one_is_taken() {
    let mut test = Test::new();
    test.step(CAPTURE);
    test.step(not_sent(1));
    let told = test.told();
    assert_eq!(told[0], "captured 1");
    assert!(told[1].contains("no standby is connected"), "{told:?}");
    assert_eq!(test.vm.calls(), [Call::Capture(1), Call::Settle { has_failed: true }]);
    test.step(VmAction::Owe { after: None });
    test.step(CAPTURE);
    assert_eq!(test.told(), ["captured 2"]);
}

#[test]
fn an_epoch_that_is_given_up_before_its_report_has_no_stale_end() {
    let mut test = Test::new();
    test.step(CAPTURE);
    test.step(VmAction::Owe { after: None });
    test.step(CAPTURE);
    assert_eq!(
        test.vm.calls(),
        [Call::Capture(1), Call::GiveUp { seq: 1, is_reported: false }, Call::Capture(2)]
    );
    // The encoder failed the first one since its connection is gone.
    test.step(not_sent(1));
    assert_eq!(test.told(), ["captured 1", "captured 2"]);
    test.step(sent(2));
    test.step(VmAction::Acknowledged { epoch: Epoch(2) });
    assert_eq!(test.told(), ["done 2"]);
}

#[test]
fn an_epoch_that_the_standby_has_after_all_is_kept() {
    let mut test = Test::new();
    test.step(CAPTURE);
    test.step(sent(1));
    test.step(VmAction::Owe { after: Some(Epoch(1)) });
    assert_eq!(test.told(), ["captured 1", "done 1"]);
    // Another that it does not have is given up with its report.
    test.step(CAPTURE);
    test.step(sent(2));
    test.step(VmAction::Owe { after: Some(Epoch(1)) });
    assert!(test.vm.calls().contains(&Call::GiveUp { seq: 2, is_reported: true }));
}

#[test]
fn a_suspended_vm_runs_again_after_the_epoch_or_when_it_may_not_be_captured() {
    let mut test = Test::new();
    test.step(VmAction::MayCapture(true));
    test.step(CAPTURE);
    test.decide(ReplicationDecision::Suspend);
    test.vm_loop.step(None);
    test.step(sent(1));
    assert_eq!(test.vm.calls(), [Call::Capture(1), Call::Pause]);
    test.step(VmAction::Acknowledged { epoch: Epoch(1) });
    assert_eq!(test.vm.calls(), [Call::Settle { has_failed: false }, Call::Resume]);
    test.step(CAPTURE);
    test.decide(ReplicationDecision::Suspend);
    test.vm_loop.step(None);
    test.step(VmAction::MayCapture(false));
    assert_eq!(test.vm.calls(), [Call::Capture(2), Call::Pause, Call::Resume]);
}

#[test]
fn a_suspension_whose_outcome_is_unknown_is_ended() {
    let mut test = Test::new();
    test.step(VmAction::MayCapture(true));
    test.vm.state().is_monitor_lost = true;
    test.decide(ReplicationDecision::Suspend);
    test.vm_loop.step(None);
    assert_eq!(test.vm.calls(), [Call::Pause, Call::Resume]);
}

/// The standby may run the VM that was stopped for it.
#[test]
fn a_suspended_vm_that_is_stopped_runs_only_when_the_protocol_says_so() {
    let mut test = Test::new();
    test.step(VmAction::MayCapture(true));
    test.step(CAPTURE);
    test.decide(ReplicationDecision::Suspend);
    test.vm_loop.step(None);
    test.decide(ReplicationDecision::Suspend);
    test.step(VmAction::Stop);
    test.step(VmAction::MayCapture(false));
    test.step(sent(1));
    test.step(VmAction::Acknowledged { epoch: Epoch(1) });
    test.step(VmAction::Capture { last: true });
    let calls = test.vm.calls();
    assert!(!calls.contains(&Call::Resume), "{calls:?}");
    test.step(VmAction::Resume);
    assert_eq!(test.vm.calls(), [Call::Resume]);
}

#[test]
fn the_policy_takes_epochs_only_while_it_may() {
    let mut test = Test::new();
    test.decide(ReplicationDecision::Checkpoint(EpochReason::Due));
    test.vm_loop.step(None);
    assert!(test.told().is_empty());
    test.step(VmAction::MayCapture(true));
    assert_eq!(test.told(), ["captured 1"]);
}

#[test]
fn a_session_begins_once_the_standbys_pages_are_known() {
    let mut test = Test::new();
    test.step(VmAction::Sync { session: 7 });
    assert!(test.vm.calls().is_empty());
    let end = |session, is_blank| VmAction::PageHashes {
        session,
        first: u64::MAX,
        hashes: vec![u8::from(is_blank)],
    };
    // Hashes of another session begin nothing.
    test.step(end(6, true));
    assert!(test.vm.calls().is_empty());
    test.step(end(7, true));
    let begin = [Call::BeginSession { is_blank: true }, Call::CopyDisks, Call::Capture(1)];
    assert_eq!(test.vm.calls(), begin);
    // The same session may have to begin again, with the hashes that are known.
    test.step(VmAction::Sync { session: 7 });
    let calls = test.vm.calls();
    assert_eq!(calls[0], Call::GiveUp { seq: 1, is_reported: false });
    assert_eq!(calls[3], Call::Capture(2));
}

#[test]
fn disks_that_cannot_be_copied_fail_the_session() {
    let mut test = Test::new();
    test.vm.state().fails_disks = true;
    test.step(VmAction::PageHashes { session: 7, first: u64::MAX, hashes: vec![1] });
    test.step(VmAction::Sync { session: 7 });
    assert_eq!(test.told(), ["failed: copy the disks"]);
    assert!(!test.vm.calls().contains(&Call::Capture(1)));
}

#[test]
fn page_hashes_without_sense_are_told() {
    let mut test = Test::new();
    test.step(VmAction::PageHashes { session: 7, first: 3, hashes: vec![0; 16] });
    let Ok(ProtectedVmEvent::CaptureFailed(Error::PageHashes(error))) = test.told.try_recv() else {
        panic!("no error of the hashes")
    };
    assert_eq!(error, PageHashesError::Misplaced { hashes: 1, first: 3 });
}

#[test]
fn the_thread_gives_the_vm_back_at_its_end() {
    let Test { vm, vm_loop, told: _told, .. } = Test::new();
    let (actions, inbox) = channel();
    actions.send(VmAction::Stop).unwrap();
    actions.send(VmAction::End).unwrap();
    let back = vm_loop.run(&inbox);
    assert!(Arc::ptr_eq(&back.0, &vm.0));
    assert_eq!(vm.calls(), [Call::Pause]);
}
