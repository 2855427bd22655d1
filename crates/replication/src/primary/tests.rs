//! Single steps of a primary that the simulation does not single out.

use super::*;
use crate::{GroupId, GroupState, Hello, NodeRole, OwnerMode, WitnessReply};

const MS: u64 = 1_000_000;
const GROUP: GroupId = GroupId(5);
const ME: NodeId = NodeId(1);
const YOU: NodeId = NodeId(2);

fn config(arbitration: Arbitration) -> ReplicationConfig {
    ReplicationConfig::new(ME, 100, GROUP, arbitration, 600 * MS)
}

struct Test {
    primary: Primary,
    now_ns: u64,
}

impl Test {
    fn new(arbitration: Arbitration) -> Self {
        let mut test =
            Self { primary: Primary::new(config(arbitration), PrimaryStart::First), now_ns: 0 };
        test.after(0, PrimaryEvent::PathUp(0));
        test
    }

    fn after(&mut self, ms: u64, event: PrimaryEvent) -> Vec<PrimaryAction> {
        self.now_ns += ms * MS;
        self.primary.handle(self.now_ns, event)
    }

    fn hear(&mut self, message: PeerMessage) -> Vec<PrimaryAction> {
        self.after(1, PrimaryEvent::Peer { path: 0, message })
    }

    fn session(&self) -> SessionId {
        self.primary.session().expect("a session")
    }

    fn greet(&mut self, session: Option<SessionId>, complete: Option<Epoch>) -> Vec<PrimaryAction> {
        let hello = Hello {
            role: NodeRole::Standby,
            group: GROUP,
            node: YOU,
            instance: 200,
            term: Term(0),
            digest: self.primary.config.shared_digest(),
            session,
            left: None,
            complete,
        };
        self.hear(PeerMessage::Hello(hello))
    }

    fn answer(&mut self, pairing: u64, held: Option<u64>) -> Vec<PrimaryAction> {
        let (sequence, session) = (self.primary.sequence, self.session());
        let (sent_ns, held) = (self.now_ns, held.map(Epoch));
        self.hear(PeerMessage::HeartbeatAck { sequence, sent_ns, session, pairing, held })
    }

    fn reply(
        &mut self,
        generation: u64,
        term: u64,
        owner: NodeId,
        mode: OwnerMode,
    ) -> Vec<PrimaryAction> {
        let state = Some(GroupState { generation, term: Term(term), owner, mode });
        self.after(1, PrimaryEvent::Witness(WitnessReply { group: GROUP, state }))
    }

    /// Goes on until the standby is to be trusted, and returns the actions of that step.
    fn pair(&mut self) -> Vec<PrimaryAction> {
        self.greet(None, None);
        self.after(1, PrimaryEvent::Captured { epoch: Epoch(1) });
        let closing = self.answer(0, Some(1));
        assert!(
            closing
                .starts_with(&[PrimaryAction::HoldOutput, PrimaryAction::Capture { last: false }])
        );
        self.after(1, PrimaryEvent::Captured { epoch: Epoch(2) });
        self.answer(0, Some(2))
    }

    fn protect(arbitration: Arbitration) -> Self {
        let mut test = Self::new(arbitration);
        test.pair();
        match arbitration {
            Arbitration::Witness => {
                let mode = OwnerMode::Paired { standby: YOU, session: test.session() };
                test.reply(1, 1, ME, mode);
            }
            Arbitration::Fencing => drop(test.answer(1, None)),
            Arbitration::Manual => {}
        }
        assert_eq!(test.primary.state(), PrimaryState::Protected);
        test
    }
}

#[test]
fn the_guard_knows_before_the_witness_is_asked() {
    let mut test = Test::new(Arbitration::Witness);
    let outputs = test.pair();
    assert!(matches!(outputs[0], PrimaryAction::SetRunPermit(RunPermit::Until(_))), "{outputs:?}");
    assert!(
        outputs.iter().any(|output| matches!(
            output,
            PrimaryAction::AskWitness(WitnessRequest::Paired { .. })
        ))
    );
    assert_eq!(test.primary.state(), PrimaryState::Pairing);
}

#[test]
fn what_is_held_is_released_once_by_the_newest_acknowledgement() {
    let mut test = Test::protect(Arbitration::Witness);
    for epoch in 3..=5 {
        test.after(1, PrimaryEvent::Captured { epoch: Epoch(epoch) });
    }
    let session = test.session();
    let ack = |epoch| PeerMessage::EpochAck { session, epoch: Epoch(epoch) };
    assert_eq!(test.hear(ack(5)), [PrimaryAction::Release { epoch: Epoch(5) }]);
    assert_eq!(test.hear(ack(4)), []);
    assert_eq!(test.hear(ack(6)), [], "it was not captured");
    assert_eq!(test.hear(PeerMessage::EpochAck { session: SessionId(1), epoch: Epoch(5) }), []);
}

#[test]
fn a_lease_that_ends_stops_the_vm_and_an_answer_in_time_resumes_it() {
    let mut test = Test::protect(Arbitration::Fencing);
    let outputs = test.after(430, PrimaryEvent::Tick);
    assert_eq!(outputs[0], PrimaryAction::SetRunPermit(RunPermit::Stopped));
    assert!(outputs.contains(&PrimaryAction::StopVm) && outputs.contains(&PrimaryAction::Fence));
    test.after(1, PrimaryEvent::VmStopped);
    let outputs = test.answer(1, None);
    assert!(matches!(outputs[0], PrimaryAction::SetRunPermit(RunPermit::Until(_))));
    assert!(outputs.contains(&PrimaryAction::ResumeVm));
    // The hook may have been as fast.
    let outputs = test.after(1, PrimaryEvent::Fenced(true));
    assert!(
        outputs.contains(&PrimaryAction::SetRunPermit(RunPermit::Free))
            || test.primary.state() == PrimaryState::Solo
    );
}

#[test]
fn only_a_state_newer_than_the_pairing_lets_it_run_alone() {
    let mut test = Test::new(Arbitration::Witness);
    test.pair();
    test.after(1, PrimaryEvent::WitnessLost { sent: true });
    let outputs = test.after(700, PrimaryEvent::Tick);
    let solo = WitnessRequest::Solo { group: GROUP, node: ME, term: Term(1), generation: 0 };
    assert!(outputs.contains(&PrimaryAction::AskWitness(solo)), "{outputs:?}");
    // The pairing did arrive: the right is not there yet.
    let mode = OwnerMode::Paired { standby: YOU, session: test.session() };
    let outputs = test.reply(1, 1, ME, mode);
    assert!(outputs.contains(&PrimaryAction::AskWitness(WitnessRequest::Solo {
        group: GROUP,
        node: ME,
        term: Term(1),
        generation: 1
    })));
    assert_eq!(test.primary.state(), PrimaryState::Stopped);
    let outputs = test.reply(2, 1, ME, OwnerMode::Solo);
    assert_eq!(outputs[0], PrimaryAction::SetRunPermit(RunPermit::Free));
    assert!(
        outputs.contains(&PrimaryAction::ReleaseAll) && outputs.contains(&PrimaryAction::ResumeVm)
    );
}

#[test]
fn a_pairing_that_never_left_exposes_nothing() {
    let mut test = Test::new(Arbitration::Witness);
    test.pair();
    let outputs = test.after(1, PrimaryEvent::WitnessLost { sent: false });
    assert_eq!(outputs[0], PrimaryAction::SetRunPermit(RunPermit::Free));
    let outputs = test.after(700, PrimaryEvent::Tick);
    assert!(
        outputs.contains(&PrimaryAction::ReleaseAll) && !outputs.contains(&PrimaryAction::StopVm),
        "{outputs:?}"
    );
}

#[test]
fn who_is_deposed_releases_nothing() {
    let mut test = Test::protect(Arbitration::Witness);
    test.after(430, PrimaryEvent::Tick);
    let outputs = test.reply(2, 2, YOU, OwnerMode::Solo);
    assert!(outputs.contains(&PrimaryAction::KillVm));
    assert!(outputs.ends_with(&[PrimaryAction::Ended { deposed_by: Some(Term(2)) }]));
    assert!(
        !outputs.iter().any(|output| matches!(
            output,
            PrimaryAction::ReleaseAll | PrimaryAction::Release { .. }
        ))
    );
    assert_eq!(test.hear(PeerMessage::TookOver { term: Term(3) }), []);
}

#[test]
fn a_sick_standby_is_disarmed_before_the_primary_is_alone() {
    let mut test = Test::protect(Arbitration::Fencing);
    let session = test.session();
    let outputs = test.hear(PeerMessage::Sick { session, reason: "full".into() });
    assert!(!outputs.iter().any(|output| matches!(
        output,
        PrimaryAction::StopVm | PrimaryAction::Fence | PrimaryAction::ReleaseAll
    )));
    assert!(outputs.iter().any(|output| matches!(
        output,
        PrimaryAction::Send { message: PeerMessage::Heartbeat { pairing: 0, .. }, .. }
    )));
    let outputs = test.answer(0, None);
    assert!(outputs.contains(&PrimaryAction::ReleaseAll), "{outputs:?}");
}

#[test]
fn what_a_broken_data_path_swallowed_is_owed() {
    let mut test = Test::protect(Arbitration::Witness);
    test.after(1, PrimaryEvent::Captured { epoch: Epoch(3) });
    assert!(test.after(1, PrimaryEvent::PathDown(0)).contains(&PrimaryAction::MayCapture(false)));
    test.after(1, PrimaryEvent::PathUp(0));
    let outputs = test.greet(Some(test.session()), Some(Epoch(2)));
    let owed =
        [PrimaryAction::Owe { after: Some(Epoch(2)) }, PrimaryAction::Capture { last: false }];
    assert!(outputs.windows(2).any(|two| two == owed), "{outputs:?}");
    assert!(outputs.contains(&PrimaryAction::MayCapture(true)));
}

#[test]
fn the_output_of_a_vm_that_ended_leaves_when_nobody_can_take_it_over() {
    let mut test = Test::protect(Arbitration::Witness);
    let outputs = test.after(1, PrimaryEvent::VmEnded);
    assert!(!outputs.contains(&PrimaryAction::ReleaseAll));
    let session = test.session();
    let outputs = test.hear(PeerMessage::Bye { session });
    assert_eq!(outputs, [PrimaryAction::ReleaseAll, PrimaryAction::Ended { deposed_by: None }]);
}

#[test]
fn what_was_handed_over_does_not_run_on_a_lease() {
    for arbitration in [Arbitration::Witness, Arbitration::Fencing] {
        let mut test = Test::protect(arbitration);
        assert!(test.after(1, PrimaryEvent::SwitchOver).contains(&PrimaryAction::StopVm));
        let outputs = test.after(1, PrimaryEvent::VmStopped);
        assert_eq!(outputs, [PrimaryAction::Capture { last: true }]);
        test.after(1, PrimaryEvent::Captured { epoch: Epoch(3) });
        let outputs = test.answer(1, Some(3));
        let hand_over = PeerMessage::HandOver { session: test.session(), epoch: Epoch(3) };
        assert_eq!(outputs[0], PrimaryAction::Release { epoch: Epoch(3) });
        assert!(outputs.contains(&PrimaryAction::Send { path: 0, message: hand_over }));
        assert!(!test.answer(1, Some(3)).contains(&PrimaryAction::ResumeVm));
        let outputs = test.after(700, PrimaryEvent::Tick);
        let asks = outputs.iter().any(|output| matches!(output, PrimaryAction::AskWitness(_)));
        assert_eq!(asks, arbitration == Arbitration::Witness);
        assert!(
            !outputs.contains(&PrimaryAction::Fence),
            "who took over would lose what clients saw since"
        );
        let outputs = test.hear(PeerMessage::TookOver { term: Term(2) });
        assert!(outputs.contains(&PrimaryAction::KillVm));
    }
}

/// The standby must not get a VM that may still run here.
#[test]
fn a_vm_that_cannot_be_stopped_is_not_handed_over() {
    let mut test = Test::protect(Arbitration::Fencing);
    assert!(test.after(1, PrimaryEvent::SwitchOver).contains(&PrimaryAction::StopVm));
    let outputs = test.after(1, PrimaryEvent::VmStopFailed);
    assert!(matches!(outputs[0], PrimaryAction::SetRunPermit(RunPermit::Until(_))), "{outputs:?}");
    assert!(outputs.contains(&PrimaryAction::Notify(Notice::SwitchOverFailed)), "{outputs:?}");
    assert!(outputs.contains(&PrimaryAction::ResumeVm), "{outputs:?}");
    assert_eq!(test.primary.state(), PrimaryState::Protected);
    // It can be tried again.
    test.after(1, PrimaryEvent::SwitchOver);
    let outputs = test.after(1, PrimaryEvent::VmStopped);
    assert_eq!(outputs, [PrimaryAction::Capture { last: true }]);
}

#[test]
fn without_arbiter_the_vm_never_stops() {
    let mut test = Test::protect(Arbitration::Manual);
    let outputs = test.after(700, PrimaryEvent::Tick);
    assert!(
        outputs.contains(&PrimaryAction::ReleaseAll) && !outputs.contains(&PrimaryAction::StopVm)
    );
    assert_eq!(test.primary.state(), PrimaryState::Solo);
}

#[test]
fn a_vm_that_cannot_be_captured_leaves_its_standby_and_takes_none_before_it_can() {
    for arbitration in [Arbitration::Witness, Arbitration::Fencing, Arbitration::Manual] {
        let mut test = Test::protect(arbitration);
        let outputs = test.after(1, PrimaryEvent::CaptureBlocked("a device".into()));
        // It goes on running until it may run alone.
        assert!(!outputs.contains(&PrimaryAction::StopVm), "{outputs:?}");
        match arbitration {
            Arbitration::Witness => {
                assert!(test.primary.is_leaving_standby());
                test.reply(2, 1, ME, OwnerMode::Solo);
            }
            Arbitration::Fencing => drop(test.answer(0, Some(2))),
            Arbitration::Manual => {}
        }
        assert_eq!(test.primary.state(), PrimaryState::Solo, "{arbitration:?}");
        let outputs = test.greet(None, None);
        assert!(outputs.iter().any(|action| matches!(
            action,
            PrimaryAction::Send { message: PeerMessage::Refused(crate::PeerRefusal::Busy), .. }
        )));
        test.after(1, PrimaryEvent::CaptureUnblocked);
        test.greet(None, None);
        assert_eq!(test.primary.state(), PrimaryState::Syncing, "{arbitration:?}");
    }
}

#[test]
fn epochs_that_fail_for_too_long_end_the_protection() {
    let mut test = Test::protect(Arbitration::Manual);
    let limit_ms = test.primary.config.data_ns / MS;
    let fail = |test: &mut Test, ms: u64| {
        for _ in 0..ms / 100 {
            test.after(99, PrimaryEvent::CaptureFailed);
            // The standby lives.
            test.answer(1, Some(2));
        }
    };
    fail(&mut test, limit_ms - 200);
    assert_eq!(test.primary.state(), PrimaryState::Protected);
    // An epoch that arrives begins the time anew.
    test.after(1, PrimaryEvent::Captured { epoch: Epoch(3) });
    test.answer(1, Some(3));
    fail(&mut test, limit_ms - 200);
    assert_eq!(test.primary.state(), PrimaryState::Protected);
    test.after(400, PrimaryEvent::CaptureFailed);
    assert_eq!(test.primary.state(), PrimaryState::Solo);
}
