//! Captures that fail, or that cannot succeed before the machine is described anew.

use super::*;
use crate::frames::{Arbiter, MachineFrame};
use crate::vm::MachineDescription;
use keyframe_machine::MachineSpec;
use keyframe_session::control::ReplicationState;
use keyframe_units::{BlockKind, RamBlock, RamLayout};

fn ram(bytes: u64) -> RamLayout {
    let name = "pc.ram".into();
    let kind = BlockKind::Backend;
    RamLayout::new(vec![RamBlock { name, kind, used_bytes: bytes, total_bytes: bytes }]).unwrap()
}

pub fn machine() -> MachineFrame {
    MachineFrame {
        name: "vm".into(),
        group: "5".into(),
        arbiter: Arbiter::Witness,
        detection_ns: DETECTION_NS,
        paths: 1,
        streams: 1,
        spec: MachineSpec::default(),
        ram: ram(4 << 12),
        disks: Vec::new(),
    }
}

impl Test {
    /// The state and the note that `keyframe status` shows.
    fn shown(&self) -> (ReplicationState, String) {
        let status = self.status.lock().unwrap();
        let replication = status.replication.as_ref().unwrap();
        (replication.state, replication.note.clone())
    }
}

#[test]
fn a_machine_that_cannot_be_captured_is_shown_and_the_changed_one_gets_a_standby() {
    let mut test = Test::protected();
    let reason = "device r1 (virtio-rng-pci) was plugged in".to_owned();
    test.step(EngineEvent::Vm(ProtectedVmEvent::CaptureBlocked { reason }));
    // The witness has not answered yet, and no epoch gets through any more.
    assert_eq!(test.shown().0, ReplicationState::Unprotected);
    test.until(PrimaryState::Solo);
    let (state, note) = test.shown();
    assert_eq!(state, ReplicationState::Unprotected);
    assert!(note.contains("r1 (virtio-rng-pci) was plugged in"), "{note}");
    // A standby is refused as long as it cannot be captured.
    for _ in 0..50 {
        while test.pump() {}
        test.tick();
    }
    assert_eq!(test.state(), PrimaryState::Solo);
    let spec = MachineSpec { vcpus: 7, ..MachineSpec::default() };
    let changed = MachineDescription { spec, ram: ram(9 << 12) };
    test.step(EngineEvent::Vm(ProtectedVmEvent::CaptureUnblocked(Some(Box::new(changed)))));
    for _ in 0..10 {
        test.tick();
    }
    assert!(
        !test.linked.load(Ordering::Relaxed),
        "the standby gets the machine by a new connection"
    );
    {
        let machine = test.machine.lock().unwrap();
        assert_eq!((machine.spec.vcpus, &machine.ram), (7, &ram(9 << 12)));
    }
    // The standby has made that machine.
    test.standby = Standby::new(config(3), Term(0), None);
    test.connect(2);
    test.until(PrimaryState::Protected);
    assert!(!test.host.calls().contains(&Call::Kill));
}

#[test]
fn epochs_that_fail_are_told_once_and_end_the_protection() {
    let mut test = Test::protected();
    test.captures = false;
    for _ in 0..4 * DETECTION_NS / (20 * MS) + 10 {
        let error = Error::vm("copy the VM", "no memory");
        test.step(EngineEvent::Vm(ProtectedVmEvent::CaptureFailed(error)));
        while test.pump() {}
        test.tick();
        if test.has_told("Unprotected") > 0 {
            break;
        }
    }
    assert_eq!((test.has_told("EpochFailed"), test.has_told("Unprotected(FailedEpochs)")), (1, 1));
    assert_ne!(test.shown().0, ReplicationState::Protected);
    assert!(!test.host.calls().contains(&Call::Kill));
}

#[test]
fn a_failed_capture_is_told_and_asked_for_again() {
    let mut test = Test::new();
    test.captures = false;
    test.connect(1);
    test.until(PrimaryState::Syncing);
    while test.pump() {}
    let error = Error::vm("copy the disks", "no room");
    test.step(EngineEvent::Vm(ProtectedVmEvent::CaptureFailed(error)));
    assert_eq!(test.has_told("EpochFailed"), 1);
    test.captures = true;
    test.until(PrimaryState::Protected);
}
