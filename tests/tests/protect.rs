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

/// Each epoch's RAM is hashed in the pause and at the standby; disks by the guest, whose blocks say what its memory says.
#[test]
fn a_standby_holds_exactly_what_the_vm_was_at_each_epoch() {
    let bench = Bench::without_store();
    let hosts = Hosts::new(&bench);
    let _witness = hosts.witness(&bench);
    let mut standby = hosts.standby(&bench, "b", &[]);
    let work =
        "ledger+dirty kf.ledger.dev=/dev/vda kf.ip=10.78.0.15 kf.ledger.dirty=400 kf.mib=24 kf.rate=20000";
    let mut vm = hosts.protect(&bench, &["--verify", "--policy", "fixed:100ms"], &hosts.ledger(work));
    hosts.until_protected(&bench, "a", &mut vm);
    let client = hosts.client();
    let epochs = || hosts.status(&bench, "a").and_then(|r| r["epochs"].as_u64()).unwrap_or(0);
    let from = epochs();
    let came = vm.wait_until(60, |_| (epochs() >= from + 25).then_some(()));
    assert!(came.is_some(), "{} epochs: {}", epochs(), vm.report());
    let status = hosts.status(&bench, "a").expect("the primary's status");
    assert_eq!(status["state"], "protected", "{}", vm.report());
    assert!(!standby.errors().contains("differs"), "{}", standby.report());
    // Small changes travel as small changes.
    let (wire, raw) = (status["all_wire_bytes"].as_u64(), status["all_raw_bytes"].as_u64());
    assert!(wire.zip(raw).is_some_and(|(wire, raw)| wire * 3 < raw), "{status}");
    hosts.a.kill_all();
    client.go_on(20, &mut standby);
    client.end();
}

#[test]
fn what_cannot_be_protected_is_refused_with_the_way_out() {
    let bench = Bench::without_store();
    let hosts = Hosts::new(&bench);
    let refused = |args: &[&str], words: &[&str]| {
        let output = hosts.command(&bench, "a", args).output().expect("run keyframe");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1), "{args:?}: {:?} {said}", output.status);
        for word in words {
            assert!(said.contains(word), "{args:?} does not say {word}: {said}");
        }
    };
    let line = |rest: &[&'static str]| {
        let mut args = vec!["protect", "--standby", "10.78.0.2:7430", "--dir", "primary", "--"];
        args.extend(["qemu-system-x86_64", "-m", "64", "-display", "none"]);
        args.extend(rest);
        args
    };
    refused(&line(&[]), &["names no network", "-nic none"]);
    refused(&line(&["-netdev", "tap,id=n,vhost=on"]), &["vhost"]);
    refused(&line(&["-nic", "user"]), &["has no id"]);
    refused(
        &["protect", "--standby", "10.78.0.2", "--", "qemu-system-x86_64", "-nic", "none"],
        &["host and a port"],
    );
    let open = bench.path().join("OPEN");
    std::fs::write(&open, "a key that everybody can read").expect("write a key");
    refused(&["standby", "--key", "OPEN", "--dir", "d"], &["others may read", "umask 077"]);
    refused(&["standby", "--key", "NONE", "--dir", "d"], &["NONE", "urandom"]);
    refused(&["failover"], &["no VM runs"]);

    // A standby with another key, or told otherwise who decides, is no standby for this VM.
    let _witness = hosts.witness(&bench);
    let other = bench.path().join("OTHER");
    std::fs::write(&other, "another key than theirs").expect("write a key");
    std::fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("protect it");
    let mut vm = hosts.protect(&bench, &[], &hosts.ledger(WORK));
    let standby = hosts.standby(&bench, "b", &["--key", "OTHER"]);
    vm.wait_for_error("same key file");
    drop(standby);
    let command = hosts.command(&bench, "b", &["standby", "--listen", "10.78.0.2:7430", "--dir", "d"]);
    let _manual = keyframe_tests::Process::start(command);
    vm.wait_for_error("the primary is started with --witness");
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
fn a_standby_that_was_cut_off_gets_what_differs() {
    let bench = Bench::without_store();
    let hosts = Hosts::new(&bench);
    let _witness = hosts.witness(&bench);
    let mut standby = hosts.standby(&bench, "b", &[]);
    let mut vm = hosts.protect(&bench, &["--verify"], &hosts.ledger(WORK));
    hosts.until_protected(&bench, "a", &mut vm);
    let client = hosts.client();
    client.go_on(20, &mut vm);
    let sent = || hosts.status(&bench, "a").and_then(|r| r["all_wire_bytes"].as_u64()).unwrap_or(0);
    let first = sent();

    hosts.cut("b", true);
    vm.wait_for_error("the VM runs unprotected");
    client.go_on(20, &mut vm);
    hosts.cut("b", false);
    let before = sent();
    hosts.until_protected(&bench, "a", &mut vm);
    client.go_on(20, &mut vm);
    let again = sent() - before;
    println!("{first} bytes at first, {again} when it came back");
    assert!(again * 2 < first, "{first} bytes at first, {again} when it came back");
    hosts.a.kill_all();
    client.go_on(20, &mut standby);
    client.end();
}

#[test]
fn two_hosts_change_roles_again_and_again() {
    let bench = Bench::without_store();
    let hosts = Hosts::new(&bench);
    let _witness = hosts.witness(&bench);
    let mut b = hosts.standby(&bench, "b", &["--peer", "10.78.0.1:7430"]);
    let mut a = hosts.protect(&bench, &["--listen", "10.78.0.1:7430", "--name", "vm"], &hosts.ledger(WORK));
    hosts.until_protected(&bench, "a", &mut a);
    let client = hosts.client();
    for round in 0..4 {
        let (from, to) = if round % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let over = hosts.command(&bench, from, &["failover"]).output().expect("run keyframe failover");
        assert!(over.status.success(), "round {round}: {over:?}");
        let next = if to == "a" { &mut a } else { &mut b };
        hosts.until_protected(&bench, to, next);
        client.go_on(10, next);
        assert_eq!(hosts.status(&bench, from).expect("a standby")["role"], "standby", "round {round}");
    }
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
