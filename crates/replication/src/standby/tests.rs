//! Single steps of a standby that the simulation does not single out.

use super::*;
use crate::{GroupId, GroupState, NodeId, OwnerMode, WitnessReply};

const MS: u64 = 1_000_000;
const GROUP: GroupId = GroupId(5);
const ME: NodeId = NodeId(2);
const S: SessionId = SessionId(9);

struct Test {
    standby: Standby,
    now_ns: u64,
    sequence: u64,
}

impl Test {
    /// One that holds epoch 1 of a session.
    fn following(arbitration: Arbitration) -> Self {
        let standby = Standby::new(
            ReplicationConfig::new(ME, 200, GROUP, arbitration, 600 * MS),
            Term(0),
            None,
        );
        let mut test = Self { standby, now_ns: 0, sequence: 0 };
        let outputs = test.after(1, StandbyEvent::PathUp(0));
        assert!(matches!(
            outputs[..],
            [StandbyAction::Send { message: PeerMessage::Hello(_), .. }]
        ));
        test.hear(PeerMessage::HelloAck { term: Term(1), session: S, sequence: 0 });
        test.hold(1);
        test
    }

    fn after(&mut self, ms: u64, event: StandbyEvent) -> Vec<StandbyAction> {
        self.now_ns += ms * MS;
        self.standby.handle(self.now_ns, event)
    }

    fn hear(&mut self, message: PeerMessage) -> Vec<StandbyAction> {
        self.after(1, StandbyEvent::Peer { path: 0, message })
    }

    fn hold(&mut self, epoch: u64) -> Vec<StandbyAction> {
        let epoch = Epoch(epoch);
        assert_eq!(self.after(1, complete(epoch.0)), [StandbyAction::Apply { epoch }]);
        self.after(1, StandbyEvent::Applied { epoch })
    }

    fn beat(&mut self, pairing: u64) -> Vec<StandbyAction> {
        self.sequence += 1;
        let (sequence, sent_ns) = (self.sequence, self.now_ns);
        self.hear(PeerMessage::Heartbeat {
            sequence,
            sent_ns,
            term: Term(1),
            session: Some(S),
            pairing,
        })
    }

    /// So long nothing happens but ticks.
    fn silence(&mut self, ms: u64) -> Vec<StandbyAction> {
        let mut outputs = Vec::new();
        for _ in 0..ms / 50 {
            outputs.extend(self.after(50, StandbyEvent::Tick));
        }
        outputs
    }

    fn reply(
        &mut self,
        generation: u64,
        term: u64,
        owner: NodeId,
        mode: OwnerMode,
    ) -> Vec<StandbyAction> {
        let state = Some(GroupState { generation, term: Term(term), owner, mode });
        self.after(1, StandbyEvent::Witness(WitnessReply { group: GROUP, state }))
    }
}

fn complete(epoch: u64) -> StandbyEvent {
    let after = epoch.checked_sub(1).filter(|after| *after > 0).map(Epoch);
    StandbyEvent::EpochComplete { session: S, epoch: Epoch(epoch), after }
}

#[test]
fn an_epoch_that_builds_upon_what_did_not_come_is_rejected() {
    let mut test = Test::following(Arbitration::Witness);
    assert_eq!(test.after(1, complete(3)), [StandbyAction::Reject { epoch: Epoch(3) }]);
    test.hold(2);
}

fn activation(term: u64, forced: bool) -> StandbyAction {
    StandbyAction::Activate { epoch: Epoch(1), term: Term(term), forced }
}

fn answers(outputs: &[StandbyAction]) -> bool {
    outputs.iter().any(|output| {
        matches!(output, StandbyAction::Send { message: PeerMessage::HeartbeatAck { .. }, .. })
    })
}

#[test]
fn it_takes_over_once_when_the_witness_grants_it() {
    let mut test = Test::following(Arbitration::Witness);
    assert!(answers(&test.beat(4)));
    let outputs = test.silence(700);
    let request = WitnessRequest::TakeOver {
        group: GROUP,
        node: ME,
        term: Term(1),
        generation: 4,
        session: S,
    };
    assert!(outputs.contains(&StandbyAction::AskWitness(request)), "{outputs:?}");
    assert!(!answers(&test.beat(4)), "the question may be granted");
    assert!(test.reply(5, 2, ME, OwnerMode::Solo).contains(&activation(2, false)));
    assert_eq!(test.reply(5, 2, ME, OwnerMode::Solo), []);
    assert_eq!(test.after(1, StandbyEvent::FailOver { force: true }), []);
    let outputs = test.beat(4);
    assert_eq!(
        outputs,
        [StandbyAction::Send { path: 0, message: PeerMessage::TookOver { term: Term(2) } }]
    );
}

#[test]
fn without_the_generation_it_asks_for_the_state_first() {
    let mut test = Test::following(Arbitration::Witness);
    let outputs = test.silence(700);
    assert!(outputs.contains(&StandbyAction::AskWitness(WitnessRequest::State { group: GROUP })));
    let outputs = test.reply(4, 1, NodeId(1), OwnerMode::Paired { standby: ME, session: S });
    let request = WitnessRequest::TakeOver {
        group: GROUP,
        node: ME,
        term: Term(1),
        generation: 4,
        session: S,
    };
    assert!(outputs.contains(&StandbyAction::AskWitness(request)));
    let outputs = test.reply(5, 1, NodeId(1), OwnerMode::Solo);
    assert!(outputs.contains(&StandbyAction::Notify(Notice::TakeOverRefused)));
    assert_eq!(test.standby.state(), StandbyState::Alone);
}

#[test]
fn a_question_that_never_left_can_be_taken_back() {
    for sent in [false, true] {
        let mut test = Test::following(Arbitration::Witness);
        test.beat(4);
        test.silence(700);
        test.after(1, StandbyEvent::WitnessLost { sent });
        assert_eq!(answers(&test.beat(4)), !sent);
    }
}

#[test]
fn an_epoch_that_comes_while_it_asks_is_not_left_out() {
    let mut test = Test::following(Arbitration::Witness);
    test.beat(4);
    test.silence(700);
    test.after(1, StandbyEvent::WitnessLost { sent: false });
    test.hold(2);
    let outputs = test.beat(4);
    let held = Some(Epoch(2));
    assert!(outputs.iter().any(
        |output| matches!(output, StandbyAction::Send { message: PeerMessage::HeartbeatAck { held: of, .. }, .. } if *of == held)
    ));
}

#[test]
fn it_does_not_take_over_in_the_middle_of_an_epoch() {
    let mut test = Test::following(Arbitration::Fencing);
    test.beat(1);
    test.after(1, complete(2));
    assert!(test.silence(700).contains(&StandbyAction::Fence));
    assert_eq!(test.after(1, StandbyEvent::Fenced(true)), []);
    let outputs = test.after(1, StandbyEvent::ApplyFailed { reason: "full".into() });
    assert!(outputs.contains(&activation(2, false)), "{outputs:?}");
}

/// The thread that applies the epoch still writes the VM's pages.
#[test]
fn data_that_fails_in_the_middle_of_an_epoch_does_not_end_that_epoch() {
    let mut test = Test::following(Arbitration::Fencing);
    test.beat(1);
    test.after(1, complete(2));
    let outputs = test.after(1, StandbyEvent::DataFailed { reason: "malformed".into() });
    assert!(outputs.contains(&StandbyAction::DiscardPartial), "{outputs:?}");
    assert!(test.silence(700).contains(&StandbyAction::Fence));
    assert_eq!(test.after(1, StandbyEvent::Fenced(true)), []);
    let outputs = test.after(1, StandbyEvent::Applied { epoch: Epoch(2) });
    let activation = StandbyAction::Activate { epoch: Epoch(2), term: Term(2), forced: false };
    assert!(outputs.contains(&activation), "{outputs:?}");
}

#[test]
fn the_hook_is_for_who_is_armed() {
    let mut test = Test::following(Arbitration::Fencing);
    test.beat(0);
    assert!(!test.silence(700).contains(&StandbyAction::Fence));
    assert_eq!(test.standby.state(), StandbyState::Alone);
}

#[test]
fn a_hook_that_fails_is_tried_again_later() {
    let mut test = Test::following(Arbitration::Fencing);
    test.beat(1);
    test.silence(700);
    let outputs = test.after(1, StandbyEvent::Fenced(false));
    assert_eq!(outputs, [StandbyAction::Notify(Notice::FenceFailed(1))]);
    assert!(!test.silence(500).contains(&StandbyAction::Fence));
    assert!(test.silence(200).contains(&StandbyAction::Fence));
}

#[test]
fn without_arbiter_only_a_user_who_insists_makes_it_take_over() {
    let mut test = Test::following(Arbitration::Manual);
    test.beat(1);
    let outputs = test.silence(700);
    assert!(outputs.contains(&StandbyAction::Notify(Notice::PrimaryLost {
        held: Some(Epoch(1)),
        complete: true
    })));
    assert_eq!(
        test.after(1, StandbyEvent::FailOver { force: false }),
        [StandbyAction::Notify(Notice::NeedsForce)]
    );
    assert!(test.after(1, StandbyEvent::FailOver { force: true }).contains(&activation(2, true)));
}

#[test]
fn a_command_to_fail_over_waits_for_the_end_of_the_lease() {
    let mut test = Test::following(Arbitration::Fencing);
    test.beat(1);
    assert_eq!(test.after(1, StandbyEvent::FailOver { force: false }), []);
    assert!(!answers(&test.beat(1)));
    assert!(!test.silence(500).contains(&StandbyAction::Fence));
    assert!(test.silence(150).contains(&StandbyAction::Fence));
}

#[test]
fn a_stall_of_its_own_is_no_silence_of_the_primary() {
    let mut test = Test::following(Arbitration::Fencing);
    test.beat(1);
    assert_eq!(test.after(3000, StandbyEvent::Tick), []);
    assert!(answers(&test.beat(1)));
    // One that never runs in time judges all the same.
    test.after(400, StandbyEvent::Tick);
    assert!(test.after(400, StandbyEvent::Tick).contains(&StandbyAction::Fence));
}

#[test]
fn what_is_handed_over_is_taken_at_once() {
    let mut test = Test::following(Arbitration::Manual);
    test.beat(1);
    assert_eq!(
        test.hear(PeerMessage::HandOver { session: S, epoch: Epoch(2) }),
        [],
        "it does not hold that"
    );
    assert!(
        test.hear(PeerMessage::HandOver { session: S, epoch: Epoch(1) })
            .contains(&activation(2, false))
    );
}

#[test]
fn a_stale_primary_is_told() {
    let mut test = Test::following(Arbitration::Witness);
    test.standby.term = Term(3);
    let outputs = test.beat(1);
    let stale = PeerMessage::Refused(PeerRefusal::StaleTerm(Term(3)));
    assert_eq!(outputs, [StandbyAction::Send { path: 0, message: stale }]);
}
