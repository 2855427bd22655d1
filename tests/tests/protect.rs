//! A VM with a standby: nothing that a client was answered is ever taken back.

use keyframe_tests::protection::Hosts;
use keyframe_tests::{Bench, until};
use std::time::Duration;

const WORK: &str = "ledger kf.dev=/dev/vda kf.ip=10.78.0.15";

#[test]
fn what_was_answered_survives_the_host_and_the_connection_goes_on() {
    let bench = Bench::without_store();
    let hosts = Hosts::new(&bench);
    let _witness = hosts.witness(&bench);
    let mut standby = hosts.standby(&bench, "b", &[]);
    let mut vm = hosts.protect(&bench, &[], &hosts.ledger(WORK));
    hosts.until_protected(&bench, "a", &mut vm);
    let client = hosts.client();
    client.go_on(100, &mut vm);
    let before = client.seen();

    // Power loss: the engine, QEMU and all that stands beside them.
    hosts.a.kill_all();
    client.go_on(100, &mut standby);
    assert_eq!(hosts.running_qemus("b"), 1);
    let seen = client.end();
    let failover = seen.longest;
    println!("{} entries, the longest answer {failover:?}, before that {:?}", seen.entries, before.longest);
    let status = hosts.status(&bench, "b").expect("the standby's status");
    assert_eq!((status["role"].as_str(), status["term"].as_u64()), (Some("primary"), Some(2)));
}

#[test]
fn a_vm_goes_over_and_back_without_loss_and_is_protected_again() {
    let bench = Bench::without_store();
    let hosts = Hosts::new(&bench);
    let _witness = hosts.witness(&bench);
    let mut second = hosts.standby(&bench, "b", &["--peer", "10.78.0.1:7430"]);
    let mut first = hosts.protect(&bench, &["--policy", "fixed:50ms"], &hosts.ledger(WORK));
    hosts.until_protected(&bench, "a", &mut first);
    let client = hosts.client();
    client.go_on(20, &mut first);

    let over = hosts.command(&bench, "a", &["failover"]).output().expect("run keyframe failover");
    assert!(over.status.success(), "{over:?}");
    client.go_on(20, &mut second);
    assert!(first.wait().success(), "{}", first.report());
    assert_eq!((hosts.running_qemus("a"), hosts.running_qemus("b")), (0, 1));

    // The old host comes back as the standby, gets the VM, and then has it again after a failure.
    let mut back = hosts.standby(&bench, "a", &[]);
    hosts.until_protected(&bench, "b", &mut second);
    client.go_on(20, &mut second);
    hosts.b.kill_all();
    client.go_on(20, &mut back);
    client.end();
}

#[test]
fn a_primary_that_is_cut_off_stands_still_before_its_standby_runs() {
    let bench = Bench::without_store();
    let hosts = Hosts::new(&bench);
    let _witness = hosts.witness(&bench);
    let mut standby = hosts.standby(&bench, "b", &[]);
    let mut vm = hosts.protect(&bench, &[], &hosts.ledger(WORK));
    hosts.until_protected(&bench, "a", &mut vm);
    let client = hosts.client();
    client.go_on(20, &mut vm);

    hosts.cut("a", true);
    until("the standby has taken over", || {
        let took_over = hosts.status(&bench, "b").is_some_and(|r| r["role"] == "primary");
        // At no instant do both run: the old one stands before the new one begins.
        assert!(!took_over || hosts.running_qemus("a") == 0, "both run: {}", vm.report());
        took_over
    });
    client.go_on(20, &mut standby);
    // Back in the network it learns what has become of its VM.
    hosts.cut("a", false);
    vm.wait();
    assert!(vm.errors().contains("another host runs the VM"), "{}", vm.report());
    assert_eq!(hosts.running_qemus("a"), 0);
    client.go_on(20, &mut standby);
    client.end();
}

#[test]
fn a_vm_outlives_its_standby_and_is_protected_by_the_next_one() {
    let bench = Bench::without_store();
    let hosts = Hosts::new(&bench);
    let _witness = hosts.witness(&bench);
    let standby = hosts.standby(&bench, "b", &[]);
    let mut vm = hosts.protect(&bench, &[], &hosts.ledger(WORK));
    hosts.until_protected(&bench, "a", &mut vm);
    let client = hosts.client();
    client.go_on(20, &mut vm);

    hosts.b.kill_all();
    drop(standby);
    vm.wait_for_error("the VM runs unprotected");
    client.go_on(20, &mut vm);
    assert!(client.seen().longest < Duration::from_secs(30));
    let mut next = hosts.standby(&bench, "b", &[]);
    hosts.until_protected(&bench, "a", &mut vm);
    client.go_on(20, &mut vm);
    hosts.a.kill_all();
    client.go_on(20, &mut next);
    client.end();
}
