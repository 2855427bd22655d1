//! Machines that change, or that cannot be captured.

use super::*;

/// Lets a blocked VM be looked at again.
fn pass_a_look(test: &mut Test) {
    test.clock.fetch_add(2_000_000_000, Ordering::Relaxed);
    test.vm_loop.step(None);
}

#[test]
fn a_vm_whose_capture_cannot_begin_runs_on_and_is_tried_again() {
    let vm = FakeVm::default();
    vm.state().outdated = Some("not begun");
    vm.state().fails_renewal = Some("no process can be started");
    let mut test = Test::of(vm);
    test.vm_loop.step(None);
    assert_eq!(test.told(), ["blocked: no process can be started"]);
    pass_a_look(&mut test);
    assert!(test.told().is_empty(), "told once");
    // What a standby wants waits.
    test.step(VmAction::PageHashes { session: 7, first: u64::MAX, hashes: vec![1] });
    test.step(VmAction::Sync { session: 7 });
    test.step(VmAction::MayCapture(true));
    test.step(CAPTURE);
    assert_eq!(test.vm.calls(), [Call::Renew, Call::Renew]);
    test.vm.state().fails_renewal = None;
    pass_a_look(&mut test);
    assert_eq!(test.told(), ["unblocked", "captured 1"]);
    let begin = [Call::BeginSession { is_blank: true }, Call::CopyDisks, Call::Capture(1)];
    assert_eq!(test.vm.calls(), [&[Call::Renew][..], &begin].concat());
}

#[test]
fn a_changed_machine_ends_its_session_and_is_captured_anew() {
    let mut test = Test::new();
    test.step(VmAction::MayCapture(true));
    test.step(CAPTURE);
    test.step(sent(1));
    test.vm.state().outdated = Some("r1 was plugged in");
    let spec = MachineSpec::default();
    let ram = RamLayout::new(Vec::new()).unwrap();
    test.vm.state().changed = Some(MachineDescription { spec, ram });
    test.step(VmAction::Acknowledged { epoch: Epoch(1) });
    test.vm.calls();
    test.step(CAPTURE);
    let told = test.told();
    assert_eq!(told[..2], ["captured 1", "done 1"]);
    assert!(told[2].starts_with("blocked: r1 was plugged in"), "{told:?}");
    assert_eq!(told[3], "unblocked, changed");
    assert_eq!(test.vm.calls(), [Call::Capture(2), Call::Renew]);
    // Nothing of it gets to the standby of the machine before.
    test.decide(ReplicationDecision::Checkpoint(EpochReason::Due));
    test.step(VmAction::Owe { after: None });
    test.step(CAPTURE);
    assert!(test.told().is_empty());
    test.step(VmAction::PageHashes { session: 8, first: u64::MAX, hashes: vec![1] });
    test.step(VmAction::Sync { session: 8 });
    assert_eq!(test.told(), ["captured 2"]);
}

#[test]
fn a_change_that_no_standby_can_follow_blocks_captures_until_it_is_undone() {
    let mut test = Test::new();
    test.vm.state().outdated = Some("b1 was plugged in");
    test.vm.state().fails_renewal = Some("b1 was plugged in; unplug it");
    test.step(CAPTURE);
    assert_eq!(test.told(), ["blocked: b1 was plugged in; unplug it"]);
    test.step(CAPTURE);
    test.decide(ReplicationDecision::Checkpoint(EpochReason::Due));
    test.step(VmAction::MayCapture(true));
    assert!(test.told().is_empty());
    assert_eq!(test.vm.calls(), [Call::Capture(1), Call::Renew]);
    test.vm.state().fails_renewal = None;
    pass_a_look(&mut test);
    assert_eq!(test.told()[0], "unblocked");
}
