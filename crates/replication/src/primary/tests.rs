//! Single steps of a primary, which the simulation cannot name.

use super::*;
use crate::{GroupId, GroupState, Hello, Mode, Role};

const MS: u64 = 1_000_000;
const GROUP: GroupId = GroupId(5);
const ME: NodeId = NodeId(1);
const YOU: NodeId = NodeId(2);

fn config(arbitration: Arbitration) -> Config {
    Config::new(ME, 100, GROUP, arbitration, 600 * MS)
}

struct Test {
    primary: Primary,
    now_ns: u64,
}

impl Test {
    fn new(arbitration: Arbitration) -> Self {
        let mut test = Self { primary: Primary::new(config(arbitration), Start::First), now_ns: 0 };
        test.after(0, PrimaryInput::PathUp(0));
        test
    }

    fn after(&mut self, ms: u64, input: PrimaryInput) -> Vec<PrimaryOutput> {
        self.now_ns += ms * MS;
        self.primary.handle(self.now_ns, input)
    }

    fn hear(&mut self, message: Message) -> Vec<PrimaryOutput> {
        self.after(1, PrimaryInput::Peer { path: 0, message })
    }

    fn session(&self) -> Session {
        self.primary.session().expect("a session")
    }

    fn greet(&mut self, session: Option<Session>, complete: Option<Epoch>) -> Vec<PrimaryOutput> {
        let hello = Hello {
            role: Role::Standby,
            group: GROUP,
            node: YOU,
            instance: 200,
            term: Term(0),
            digest: self.primary.config.agreed(),
            session,
            left: None,
            complete,
        };
        self.hear(Message::Hello(hello))
    }

    fn answer(&mut self, pairing: u64, held: Option<u64>) -> Vec<PrimaryOutput> {
        let (sequence, session) = (self.primary.sequence, self.session());
        let (sent_ns, held) = (self.now_ns, held.map(Epoch));
        self.hear(Message::HeartbeatAck { sequence, sent_ns, session, pairing, held })
    }

    fn reply(
        &mut self,
        generation: u64,
        term: u64,
        owner: NodeId,
        mode: Mode,
    ) -> Vec<PrimaryOutput> {
        let state = Some(GroupState { generation, term: Term(term), owner, mode });
        self.after(1, PrimaryInput::Witness(WitnessReply { group: GROUP, state }))
    }

    /// Up to where the standby is to be trusted; what that step says.
    fn pair(&mut self) -> Vec<PrimaryOutput> {
        self.greet(None, None);
        self.after(1, PrimaryInput::Captured { epoch: Epoch(1) });
        let closing = self.answer(0, Some(1));
        assert!(
            closing
                .starts_with(&[PrimaryOutput::HoldOutput, PrimaryOutput::Capture { last: false }])
        );
        self.after(1, PrimaryInput::Captured { epoch: Epoch(2) });
        self.answer(0, Some(2))
    }

    fn protect(arbitration: Arbitration) -> Self {
        let mut test = Self::new(arbitration);
        test.pair();
        match arbitration {
            Arbitration::Witness => {
                let mode = Mode::Paired { standby: YOU, session: test.session() };
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
    assert!(matches!(outputs[0], PrimaryOutput::Guard(Guard::Until(_))), "{outputs:?}");
    assert!(
        outputs.iter().any(|output| matches!(
            output,
            PrimaryOutput::AskWitness(WitnessRequest::Paired { .. })
        ))
    );
    assert_eq!(test.primary.state(), PrimaryState::Pairing);
}

#[test]
fn what_is_held_is_released_once_by_the_newest_acknowledgement() {
    let mut test = Test::protect(Arbitration::Witness);
    for epoch in 3..=5 {
        test.after(1, PrimaryInput::Captured { epoch: Epoch(epoch) });
    }
    let session = test.session();
    let ack = |epoch| Message::EpochAck { session, epoch: Epoch(epoch) };
    assert_eq!(test.hear(ack(5)), [PrimaryOutput::Release { epoch: Epoch(5) }]);
    assert_eq!(test.hear(ack(4)), []);
    assert_eq!(test.hear(ack(6)), [], "it was not captured");
    assert_eq!(test.hear(Message::EpochAck { session: Session(1), epoch: Epoch(5) }), []);
}

#[test]
fn a_lease_that_ends_stops_the_vm_and_an_answer_in_time_resumes_it() {
    let mut test = Test::protect(Arbitration::Fencing);
    let outputs = test.after(430, PrimaryInput::Tick);
    assert_eq!(outputs[0], PrimaryOutput::Guard(Guard::Stopped));
    assert!(outputs.contains(&PrimaryOutput::StopVm) && outputs.contains(&PrimaryOutput::Fence));
    test.after(1, PrimaryInput::VmStopped);
    let outputs = test.answer(1, None);
    assert!(matches!(outputs[0], PrimaryOutput::Guard(Guard::Until(_))));
    assert!(outputs.contains(&PrimaryOutput::ResumeVm));
    // The hook may have been as fast.
    let outputs = test.after(1, PrimaryInput::Fenced(true));
    assert!(
        outputs.contains(&PrimaryOutput::Guard(Guard::Free))
            || test.primary.state() == PrimaryState::Solo
    );
}

#[test]
fn only_a_state_newer_than_the_pairing_lets_it_run_alone() {
    let mut test = Test::new(Arbitration::Witness);
    test.pair();
    test.after(1, PrimaryInput::WitnessLost { sent: true });
    let outputs = test.after(700, PrimaryInput::Tick);
    let solo = WitnessRequest::Solo { group: GROUP, node: ME, term: Term(1), generation: 0 };
    assert!(outputs.contains(&PrimaryOutput::AskWitness(solo)), "{outputs:?}");
    // The pairing did arrive: the right is not there yet.
    let mode = Mode::Paired { standby: YOU, session: test.session() };
    let outputs = test.reply(1, 1, ME, mode);
    assert!(outputs.contains(&PrimaryOutput::AskWitness(WitnessRequest::Solo {
        group: GROUP,
        node: ME,
        term: Term(1),
        generation: 1
    })));
    assert_eq!(test.primary.state(), PrimaryState::Stopped);
    let outputs = test.reply(2, 1, ME, Mode::Solo);
    assert_eq!(outputs[0], PrimaryOutput::Guard(Guard::Free));
    assert!(
        outputs.contains(&PrimaryOutput::ReleaseAll) && outputs.contains(&PrimaryOutput::ResumeVm)
    );
}

#[test]
fn a_pairing_that_never_left_exposes_nothing() {
    let mut test = Test::new(Arbitration::Witness);
    test.pair();
    let outputs = test.after(1, PrimaryInput::WitnessLost { sent: false });
    assert_eq!(outputs[0], PrimaryOutput::Guard(Guard::Free));
    let outputs = test.after(700, PrimaryInput::Tick);
    assert!(
        outputs.contains(&PrimaryOutput::ReleaseAll) && !outputs.contains(&PrimaryOutput::StopVm),
        "{outputs:?}"
    );
}

#[test]
fn who_is_deposed_releases_nothing() {
    let mut test = Test::protect(Arbitration::Witness);
    test.after(430, PrimaryInput::Tick);
    let outputs = test.reply(2, 2, YOU, Mode::Solo);
    assert!(outputs.contains(&PrimaryOutput::KillVm));
    assert!(outputs.ends_with(&[PrimaryOutput::Ended { deposed_by: Some(Term(2)) }]));
    assert!(
        !outputs.iter().any(|output| matches!(
            output,
            PrimaryOutput::ReleaseAll | PrimaryOutput::Release { .. }
        ))
    );
    assert_eq!(test.hear(Message::TookOver { term: Term(3) }), []);
}

#[test]
fn a_sick_standby_is_disarmed_before_the_primary_is_alone() {
    let mut test = Test::protect(Arbitration::Fencing);
    let session = test.session();
    let outputs = test.hear(Message::Sick { session, reason: "full".into() });
    assert!(!outputs.iter().any(|output| matches!(
        output,
        PrimaryOutput::StopVm | PrimaryOutput::Fence | PrimaryOutput::ReleaseAll
    )));
    assert!(outputs.iter().any(|output| matches!(
        output,
        PrimaryOutput::Send { message: Message::Heartbeat { pairing: 0, .. }, .. }
    )));
    let outputs = test.answer(0, None);
    assert!(outputs.contains(&PrimaryOutput::ReleaseAll), "{outputs:?}");
}

#[test]
fn what_a_broken_data_path_swallowed_is_owed() {
    let mut test = Test::protect(Arbitration::Witness);
    test.after(1, PrimaryInput::Captured { epoch: Epoch(3) });
    assert!(test.after(1, PrimaryInput::PathDown(0)).contains(&PrimaryOutput::MayCapture(false)));
    test.after(1, PrimaryInput::PathUp(0));
    let outputs = test.greet(Some(test.session()), Some(Epoch(2)));
    let owed =
        [PrimaryOutput::Owe { after: Some(Epoch(2)) }, PrimaryOutput::Capture { last: false }];
    assert!(outputs.windows(2).any(|two| two == owed), "{outputs:?}");
    assert!(outputs.contains(&PrimaryOutput::MayCapture(true)));
}

#[test]
fn the_output_of_a_vm_that_ended_leaves_when_nobody_can_take_it_over() {
    let mut test = Test::protect(Arbitration::Witness);
    let outputs = test.after(1, PrimaryInput::VmEnded);
    assert!(!outputs.contains(&PrimaryOutput::ReleaseAll));
    let session = test.session();
    let outputs = test.hear(Message::Bye { session });
    assert_eq!(outputs, [PrimaryOutput::ReleaseAll, PrimaryOutput::Ended { deposed_by: None }]);
}

#[test]
fn what_was_handed_over_does_not_run_on_a_lease() {
    for arbitration in [Arbitration::Witness, Arbitration::Fencing] {
        let mut test = Test::protect(arbitration);
        assert!(test.after(1, PrimaryInput::SwitchOver).contains(&PrimaryOutput::StopVm));
        let outputs = test.after(1, PrimaryInput::VmStopped);
        assert_eq!(outputs, [PrimaryOutput::Capture { last: true }]);
        test.after(1, PrimaryInput::Captured { epoch: Epoch(3) });
        let outputs = test.answer(1, Some(3));
        let hand_over = Message::HandOver { session: test.session(), epoch: Epoch(3) };
        assert_eq!(outputs[0], PrimaryOutput::Release { epoch: Epoch(3) });
        assert!(outputs.contains(&PrimaryOutput::Send { path: 0, message: hand_over }));
        assert!(!test.answer(1, Some(3)).contains(&PrimaryOutput::ResumeVm));
        let outputs = test.after(700, PrimaryInput::Tick);
        let asks = outputs.iter().any(|output| matches!(output, PrimaryOutput::AskWitness(_)));
        assert_eq!(asks, arbitration == Arbitration::Witness);
        assert!(
            !outputs.contains(&PrimaryOutput::Fence),
            "who took over would lose what clients saw since"
        );
        let outputs = test.hear(Message::TookOver { term: Term(2) });
        assert!(outputs.contains(&PrimaryOutput::KillVm));
    }
}

#[test]
fn without_arbiter_the_vm_never_stops() {
    let mut test = Test::protect(Arbitration::Manual);
    let outputs = test.after(700, PrimaryInput::Tick);
    assert!(
        outputs.contains(&PrimaryOutput::ReleaseAll) && !outputs.contains(&PrimaryOutput::StopVm)
    );
    assert_eq!(test.primary.state(), PrimaryState::Solo);
}
