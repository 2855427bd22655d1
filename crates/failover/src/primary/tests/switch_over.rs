//! Switch-overs: the VM is stopped here, and its last epoch goes to the standby.

use super::*;

#[test]
fn a_failover_is_refused_without_a_standby() {
    let mut test = Test::new();
    let response = test.ask(EngineRequest::FailOver { force: false });
    assert!(matches!(response, EngineResponse::Failed(text) if text.contains("no standby")));
}

#[test]
fn a_failover_during_a_capture_hands_the_vm_over_with_its_last_epoch() {
    let mut test = Test::protected();
    test.data_flows = false;
    test.capture();
    let in_flight = test.epoch;
    let response = test.ask(EngineRequest::FailOver { force: false });
    assert!(matches!(response, EngineResponse::Done(_)));
    // The epoch in flight arrives, then the last one.
    let (session, after) = (SessionId(test.session), test.held);
    test.tell_standby(StandbyEvent::EpochComplete { session, epoch: in_flight, after });
    test.data_flows = true;
    while test.others.is_empty() {
        assert!(test.pump());
    }
    assert_eq!(test.others, ["stop"]);
    // The monitor has to answer for the last epoch: the guard does not stop QEMU.
    let calls = test.host.calls();
    assert!(calls.contains(&Call::Paused), "{calls:?}");
    assert!(!calls.contains(&Call::Permit(RunPermit::Stopped)), "{calls:?}");
    assert!(matches!(test.until_end(), End::Deposed { .. }));
    assert!(test.held > Some(in_flight) && test.activated.is_some());
}

/// With the guard told that it is paused, it would run without a limit.
#[test]
fn a_vm_that_cannot_be_paused_is_not_handed_over_and_its_guard_keeps_the_limit() {
    let mut test = Test::protected();
    test.fails_stop = true;
    test.ask(EngineRequest::FailOver { force: false });
    while test.others.len() < 2 {
        assert!(test.pump());
    }
    assert_eq!(test.others, ["stop", "resume"]);
    assert_eq!(test.state(), PrimaryState::Protected);
    assert_eq!(test.has_told("SwitchOverFailed"), 1);
    let calls = test.host.calls();
    assert!(!calls.contains(&Call::Paused), "{calls:?}");
    assert!(
        calls.iter().any(|call| matches!(call, Call::Permit(RunPermit::Until(_)))),
        "{calls:?}"
    );
    for _ in 0..50 {
        while test.pump() {}
        test.tick();
    }
    assert_eq!((test.state(), test.activated), (PrimaryState::Protected, None));
}
