//! The protocol's loop with the real cores of a standby and a witness at the other end, on a host,
//! a VM and a clock that exist only here. Links are connections of this process with itself.

mod captures;
mod switch_over;

use super::PrimaryEngineEvent as EngineEvent;
use super::host::HostControl;
use super::protocol::{END_TIMEOUT_NS, End, Protocol, ProtocolParts};
use crate::error::Error;
use crate::event::{FailoverEvent, FailoverEventSink};
use crate::frames::FrameKind;
use crate::links::{LinkEvent, SharedMachineFrame};
use crate::sending::{Link, SharedWire};
use crate::settings::HeldOutput;
use crate::vm::{ProtectedVmEvent, VmAction};
use crate::witness::WitnessAnswer;
use keyframe_link::{Channel, FrameBuffer, Party, SharedKey};
use keyframe_net::GateStatus;
use keyframe_replication::{
    Arbitration, Epoch, GroupId, NodeId, PeerMessage, Primary, PrimaryStart, PrimaryState,
    ReplicationConfig, RunPermit, SessionId, Standby, StandbyAction, StandbyEvent, Term, Witness,
    WitnessRequest,
};
use keyframe_session::control::server::{Pending, SharedStatus};
use keyframe_session::control::{EngineRequest, EngineResponse};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MS: u64 = 1_000_000;
const DETECTION_NS: u64 = 600 * MS;
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a frame of this process may take to itself.
const FRAME_WAIT: Duration = Duration::from_millis(2);

/// What the loop has asked of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    Permit(RunPermit),
    Paused,
    Kill,
    Hold,
    Release(u64),
    Open,
    Fence,
}

/// A host that notes what it is asked.
#[derive(Clone, Default)]
struct FakeHost {
    calls: Arc<Mutex<Vec<Call>>>,
    questions: Arc<Mutex<Vec<WitnessRequest>>>,
}

impl FakeHost {
    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

impl HostControl for FakeHost {
    fn set_run_permit(&mut self, permit: RunPermit) {
        self.note(Call::Permit(permit));
    }

    fn vm_paused(&mut self) {
        self.note(Call::Paused);
    }

    fn kill_vm(&mut self) {
        self.note(Call::Kill);
    }

    fn hold_output(&mut self) {
        self.note(Call::Hold);
    }

    fn release_output(&mut self, cut: u64) {
        self.note(Call::Release(cut));
    }

    fn open_gate(&mut self) {
        self.note(Call::Open);
    }

    fn gate_status(&mut self) -> GateStatus {
        GateStatus::default()
    }

    fn ask_witness(&mut self, request: WitnessRequest) {
        self.questions.lock().unwrap().push(request);
    }

    fn fence(&mut self) {
        self.note(Call::Fence);
    }

    fn end_guard(&mut self) {}
}

/// Keeps events as their debug text.
#[derive(Default)]
struct Told(Mutex<Vec<String>>);

impl keyframe_session::EventSink<keyframe_session::Event> for Told {
    fn event(&self, _: &keyframe_session::Event) {}
}

impl FailoverEventSink for Told {
    fn failover_event(&self, event: &FailoverEvent) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }
}

/// The other end of a link.
struct Peer {
    number: u64,
    channel: Channel,
    input: FrameBuffer,
}

struct Test {
    protocol: Protocol,
    party: Party,
    host: FakeHost,
    told: Arc<Told>,
    clock: Arc<AtomicU64>,
    actions: Receiver<VmAction>,
    interrupted: Arc<AtomicBool>,
    linked: Arc<AtomicBool>,
    machine: SharedMachineFrame,
    status: SharedStatus,
    witness: Option<Witness>,
    standby: Standby,
    peer: Option<Peer>,
    /// The newest epoch that was captured, and the newest that the standby holds.
    epoch: Epoch,
    held: Option<Epoch>,
    session: u64,
    /// Epochs arrive at the standby.
    data_flows: bool,
    /// The VM's thread captures epochs.
    captures: bool,
    /// The VM's monitor does not answer when it is to pause the VM.
    fails_stop: bool,
    /// Actions of the VM's thread that are not a capture.
    others: Vec<&'static str>,
    activated: Option<Term>,
}

fn config(node: u64) -> ReplicationConfig {
    let (node, group) = (NodeId(node), GroupId(5));
    let mut config =
        ReplicationConfig::new(node, 100 + node.0, group, Arbitration::Witness, DETECTION_NS);
    config.paths = 1;
    config
}

impl Test {
    fn new() -> Self {
        Self::holding(HeldOutput::Net)
    }

    fn holding(hold_output: HeldOutput) -> Self {
        let (sender, actions) = channel();
        let (host, told) = (FakeHost::default(), Arc::<Told>::default());
        let clock = Arc::new(AtomicU64::new(1_000 * MS));
        let (interrupted, linked) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (machine, status) =
            (Arc::new(Mutex::new(captures::machine())), SharedStatus::default());
        let now = Arc::clone(&clock);
        let mut protocol = Protocol::new(ProtocolParts {
            core: Primary::new(config(1), PrimaryStart::First),
            vm: sender,
            host: Box::new(host.clone()),
            wire: SharedWire::new(1, 1 << 20, 4, &[]),
            linked: Arc::clone(&linked),
            beating: Arc::default(),
            hold_output,
            status: Arc::clone(&status),
            events: told.clone(),
            machine: Arc::clone(&machine),
            interrupted: Arc::clone(&interrupted),
            clock: Box::new(move || now.load(Ordering::Relaxed)),
        });
        protocol.begin();
        Self {
            protocol,
            party: Party::new(&SharedKey::of(&[7; 32]).unwrap()).unwrap(),
            host,
            told,
            clock,
            actions,
            interrupted,
            linked,
            machine,
            status,
            witness: Some(Witness::default()),
            standby: Standby::new(config(2), Term(0), None),
            peer: None,
            epoch: Epoch(0),
            held: None,
            session: 0,
            data_flows: true,
            captures: true,
            fails_stop: false,
            others: Vec::new(),
            activated: None,
        }
    }

    fn now_ns(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    fn pass(&self, ms: u64) {
        self.clock.fetch_add(ms * MS, Ordering::Relaxed);
    }

    fn step(&mut self, event: EngineEvent) {
        self.protocol.step(Some(event));
    }

    fn state(&self) -> PrimaryState {
        self.protocol.core.state()
    }

    /// Connects the standby, by a connection with this number.
    fn connect(&mut self, number: u64) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (party, address) = (self.party.clone(), listener.local_addr().unwrap());
        let accept = std::thread::spawn(move || {
            party.accept(listener.accept().unwrap().0, TIMEOUT).unwrap()
        });
        let control = Arc::new(self.party.connect(address, TIMEOUT).unwrap());
        let channel = accept.join().unwrap();
        self.peer = Some(Peer { number, channel, input: FrameBuffer::default() });
        self.linked.store(true, Ordering::Relaxed);
        let link = Arc::new(Link { control, data: Vec::new() });
        self.step(EngineEvent::Link(LinkEvent::Connected(number, link)));
        self.tell_standby(StandbyEvent::PathUp(0));
    }

    /// Breaks the connection, as both ends see it.
    fn disconnect(&mut self) {
        let peer = self.peer.take().unwrap();
        peer.channel.close();
        self.step(EngineEvent::Link(LinkEvent::Broken { path: 0, number: peer.number }));
        self.tell_standby(StandbyEvent::PathDown(0));
    }

    fn tell_standby(&mut self, event: StandbyEvent) {
        for action in self.standby.handle(self.now_ns(), event) {
            match action {
                StandbyAction::Send { message, .. } => {
                    if let Some(peer) = &self.peer {
                        let (path, number) = (0, peer.number);
                        let event = LinkEvent::Received { path, number, message };
                        self.step(EngineEvent::Link(event));
                    }
                }
                StandbyAction::AskWitness(request) => {
                    let event = match &mut self.witness {
                        Some(witness) => StandbyEvent::Witness(witness.handle(request).0),
                        None => StandbyEvent::WitnessLost { sent: true },
                    };
                    self.tell_standby(event);
                }
                StandbyAction::Apply { epoch } => {
                    self.held = Some(epoch);
                    self.tell_standby(StandbyEvent::Applied { epoch });
                }
                StandbyAction::Activate { term, .. } => {
                    self.activated = Some(term);
                    if let Some(peer) = &self.peer {
                        let (path, number) = (0, peer.number);
                        let message = PeerMessage::TookOver { term };
                        let event = LinkEvent::Received { path, number, message };
                        self.step(EngineEvent::Link(event));
                    }
                }
                _ => {}
            }
        }
    }

    /// Has the network, the VM's thread or the witness do one thing; false if there is nothing to
    /// do.
    fn pump(&mut self) -> bool {
        if let Some(message) = self.receive() {
            self.tell_standby(StandbyEvent::Peer { path: 0, message });
            return true;
        }
        if let Ok(action) = self.actions.try_recv() {
            self.do_in_vm(&action);
            return true;
        }
        let question = self.host.questions.lock().unwrap().pop();
        let Some(request) = question else { return false };
        let answer = match &mut self.witness {
            Some(witness) => WitnessAnswer::Answered(witness.handle(request).0),
            None => WitnessAnswer::Lost { sent: true },
        };
        self.step(EngineEvent::Witness(answer));
        true
    }

    fn do_in_vm(&mut self, action: &VmAction) {
        match action {
            VmAction::Sync { session } => {
                (self.session, self.held) = (*session, None);
                self.capture();
            }
            VmAction::Capture { .. } => self.capture(),
            VmAction::Stop => {
                self.others.push("stop");
                let event = if self.fails_stop {
                    ProtectedVmEvent::StopFailed(Error::vm("pause the VM", "no answer"))
                } else {
                    ProtectedVmEvent::Stopped
                };
                self.step(EngineEvent::Vm(event));
            }
            VmAction::Resume => {
                self.others.push("resume");
                self.step(EngineEvent::Vm(ProtectedVmEvent::Resumed));
            }
            VmAction::Owe { .. } => self.others.push("owe"),
            _ => {}
        }
    }

    fn receive(&mut self) -> Option<PeerMessage> {
        let peer = self.peer.as_mut()?;
        let frame = peer.channel.receive(&mut peer.input, FRAME_WAIT).ok()??;
        assert_eq!(FrameKind::of(frame.kind), Some(FrameKind::Core));
        Some(PeerMessage::decode(&frame.payload).unwrap())
    }

    fn capture(&mut self) {
        if !self.captures {
            return;
        }
        let after = self.held;
        self.epoch = self.epoch.next();
        let (epoch, gate) = (self.epoch, Some(100 + self.epoch.0));
        self.step(EngineEvent::Vm(ProtectedVmEvent::Captured { epoch, gate, reason: "due" }));
        if self.data_flows {
            let session = SessionId(self.session);
            self.tell_standby(StandbyEvent::EpochComplete { session, epoch, after });
        }
    }

    /// Lets time pass until the primary is in `state`.
    fn until(&mut self, state: PrimaryState) {
        for _ in 0..2_000 {
            if self.state() == state {
                return;
            }
            if !self.pump() {
                self.tick();
            }
        }
        panic!("{:?}, not {state:?}: {:?}", self.state(), self.told.0.lock().unwrap());
    }

    /// Lets time pass until the loop has ended.
    fn until_end(&mut self) -> End {
        for _ in 0..2_000 {
            if let Some(end) = self.protocol.end() {
                return end;
            }
            if !self.pump() {
                self.tick();
            }
        }
        panic!("{:?} has no end: {:?}", self.state(), self.told.0.lock().unwrap());
    }

    fn tick(&mut self) {
        self.pass(20);
        self.protocol.step(None);
        self.tell_standby(StandbyEvent::Tick);
    }

    fn protected() -> Self {
        let mut test = Self::new();
        test.connect(1);
        test.until(PrimaryState::Protected);
        while test.pump() {}
        test.host.calls();
        test
    }

    fn ask(&mut self, request: EngineRequest) -> EngineResponse {
        let (answer, answers) = channel();
        self.step(EngineEvent::Request(Pending { request, answer }));
        answers.try_recv().expect("an answer at once")
    }

    fn vm_ends(&mut self, status: i32) {
        self.step(EngineEvent::Vm(ProtectedVmEvent::Ended(ExitStatus::from_raw(status))));
    }

    fn has_told(&self, text: &str) -> usize {
        self.told.0.lock().unwrap().iter().filter(|told| told.contains(text)).count()
    }
}

#[test]
fn output_leaves_after_the_epoch_that_sent_it() {
    let mut test = Test::protected();
    test.data_flows = false;
    test.capture();
    while test.pump() {}
    assert!(!test.host.calls().iter().any(|call| matches!(call, Call::Release(_))));
    let (session, epoch, after) = (SessionId(test.session), test.epoch, test.held);
    test.tell_standby(StandbyEvent::EpochComplete { session, epoch, after });
    while test.pump() {}
    assert!(test.host.calls().contains(&Call::Release(100 + epoch.0)));
}

#[test]
fn output_that_is_not_to_be_held_leaves_at_once_and_the_user_is_warned() {
    let mut test = Test::holding(HeldOutput::None);
    test.connect(1);
    test.until(PrimaryState::Protected);
    while test.pump() {}
    let calls = test.host.calls();
    assert!(!calls.contains(&Call::Hold), "{calls:?}");
    assert_eq!(test.has_told("OutputNotHeld"), 1);
}

#[test]
fn a_link_that_breaks_in_flight_is_made_again_and_what_it_lost_is_owed() {
    let mut test = Test::protected();
    test.data_flows = false;
    test.capture();
    test.disconnect();
    assert!(!test.linked.load(Ordering::Relaxed));
    assert!(!test.protocol.is_linked());
    // An end of an older connection breaks nothing.
    test.connect(2);
    test.step(EngineEvent::Link(LinkEvent::Broken { path: 0, number: 1 }));
    assert!(test.protocol.is_linked());
    for _ in 0..20 {
        while test.pump() {}
        test.tick();
    }
    assert!(test.others.contains(&"owe"), "{:?}", test.others);
    assert_eq!(test.state(), PrimaryState::Protected);
    assert!(!test.host.calls().contains(&Call::Kill));
}

#[test]
fn a_standby_that_cannot_be_connected_is_told_once() {
    let mut test = Test::new();
    for _ in 0..3 {
        let error = Error::StandbySilent("192.0.2.7:7430".parse().unwrap());
        test.step(EngineEvent::Link(LinkEvent::ConnectFailed(error)));
    }
    assert_eq!(test.has_told("ConnectFailed"), 1);
    test.step(EngineEvent::Link(LinkEvent::ConnectFailed(Error::HoldsAnotherVm)));
    assert_eq!(test.has_told("ConnectFailed"), 2);
}

#[test]
fn a_vm_that_ends_ends_the_loop_in_every_state() {
    for (status, has_failed) in [(0, false), (1 << 8, true)] {
        let mut test = Test::new();
        test.vm_ends(status);
        assert_eq!(test.until_end(), End::Vm { has_failed });
        // The clients have seen every packet that left, so the primary releases the standby before
        // it ends.
        let mut test = Test::protected();
        test.vm_ends(status);
        assert_eq!(test.until_end(), End::Vm { has_failed });
        assert_eq!(test.activated, None);
    }
}

#[test]
fn a_stop_of_the_user_kills_the_vm_once() {
    let mut test = Test::protected();
    assert!(matches!(test.ask(EngineRequest::Stop { on_exit: None }), EngineResponse::Stopping));
    test.protocol.step(None);
    let kills = test.host.calls().iter().filter(|call| **call == Call::Kill).count();
    assert_eq!(kills, 1);
}

/// Brings a primary into `state`.
fn in_state(state: PrimaryState) -> Test {
    let mut test = Test::new();
    match state {
        PrimaryState::Solo => {}
        PrimaryState::Syncing => {
            test.data_flows = false;
            test.connect(1);
            test.until(state);
        }
        PrimaryState::Pairing => {
            test.connect(1);
            test.until(PrimaryState::Closing);
            test.witness = None;
            test.until(state);
        }
        PrimaryState::Stopped => {
            test = Test::protected();
            test.witness = None;
            test.disconnect();
            test.until(state);
        }
        PrimaryState::SwitchingOver => {
            test = Test::protected();
            test.captures = false;
            test.ask(EngineRequest::FailOver { force: false });
        }
        _ => {
            test.connect(1);
            test.until(state);
        }
    }
    assert_eq!(test.state(), state);
    test.host.calls();
    test
}

#[test]
fn a_signal_ends_the_vm_in_every_state() {
    let states = [
        PrimaryState::Solo,
        PrimaryState::Syncing,
        PrimaryState::Closing,
        PrimaryState::Pairing,
        PrimaryState::Protected,
        PrimaryState::Stopped,
        PrimaryState::SwitchingOver,
    ];
    for state in states {
        let mut test = in_state(state);
        test.interrupted.store(true, Ordering::Relaxed);
        test.protocol.step(None);
        test.protocol.step(None);
        let calls = test.host.calls();
        assert_eq!(calls.iter().filter(|call| **call == Call::Kill).count(), 1, "{state:?}");
        // SIGKILL is no failure of a VM that the user ends.
        test.vm_ends(9);
        let end = test.until_end();
        assert!(matches!(end, End::Vm { has_failed: false } | End::GivenUp), "{state:?}: {end:?}");
        // A VM that does not end is given up.
        let mut test = in_state(state);
        test.interrupted.store(true, Ordering::Relaxed);
        test.protocol.step(None);
        test.pass(END_TIMEOUT_NS / MS + 1);
        test.protocol.step(None);
        assert_eq!(test.protocol.end(), Some(End::GivenUp), "{state:?}");
    }
}

#[test]
fn a_primary_that_the_witness_deposes_kills_its_vm() {
    let mut test = Test::protected();
    // The witness answers the standby alone, which takes over.
    let witness = test.witness.take();
    test.disconnect();
    test.until(PrimaryState::Stopped);
    assert_eq!(test.activated, None);
    test.witness = witness;
    for _ in 0..400 {
        test.pass(20);
        test.tell_standby(StandbyEvent::Tick);
        if test.activated.is_some() {
            break;
        }
    }
    let term = test.activated.expect("the standby takes over");
    assert_eq!(test.until_end(), End::Deposed { term: term.0 });
    assert!(test.host.calls().contains(&Call::Kill));
}
