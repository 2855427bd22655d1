//! Tests a VM with a standby: no answer that a client got is ever taken back.

use keyframe_tests::protection::{Client, Hosts};
use keyframe_tests::{Http, PATIENCE, Process, TestEnv, wait_until};
use rustix::process::Signal;
use std::time::{Duration, Instant};

const WORK: &str = "ledger kf.dev=/dev/vda kf.ip=10.78.0.15";

/// A VM on host a that host b protects, and its client on host c.
struct Pair {
    // The order in which they are dropped: processes before their hosts.
    client: Client,
    a: Process,
    b: Process,
    _witness: Process,
    hosts: Hosts,
    env: TestEnv,
}

impl Pair {
    /// Starts a protected VM, with options for `protect` and `standby`.
    fn new(protect: &[&str], standby: &[&str]) -> Self {
        Self::that_does(WORK, protect, standby)
    }

    fn that_does(work: &str, protect: &[&str], standby: &[&str]) -> Self {
        let env = TestEnv::without_store();
        let hosts = Hosts::new(&env);
        let witness = hosts.witness(&env);
        let b = hosts.standby(&env, "b", standby);
        let mut a = hosts.protect(&env, protect, &hosts.ledger_guest(work));
        hosts.wait_until_protected(&env, "a", &mut a);
        let client = hosts.client();
        Self { client, a, b, _witness: witness, hosts, env }
    }

    /// The replication in the engine's status on a host.
    fn status(&self, host: &str) -> Option<serde_json::Value> {
        self.hosts.status(&self.env, host)
    }

    /// Asserts that the dashboards of both hosts show the replication as healthy.
    fn on_the_dashboard(&self) {
        for (host, role, state) in
            [("a", "primary", "protected"), ("b", "standby", "ready to take over")]
        {
            let mut command = self.env.command(&["serve", "--http", "127.0.0.1:0", "--json"]);
            command.env("XDG_RUNTIME_DIR", self.hosts.run_dir(host));
            let mut server = Process::start(command);
            let said: serde_json::Value =
                serde_json::from_str(&server.wait_for("\"http\"")).expect("JSON");
            let http = Http::at(said["http"].as_str().expect("an address"));
            let vms = http.get("/api/v1/vms").json();
            let told = &vms[0]["status"]["replication"];
            assert_eq!(
                (told["role"].as_str(), told["state"].as_str()),
                (Some(role), Some(state)),
                "{vms}"
            );
            let metrics = http.get("/metrics").body;
            let of = |name: &str| {
                let line = metrics
                    .lines()
                    .find_map(|line| line.strip_prefix(&format!("keyframe_replication_{name}{{")));
                line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            };
            assert_eq!(of("primary"), Some(f64::from(u8::from(host == "a"))), "{metrics}");
            assert!(of("connected") == Some(1.0) && of("term") == Some(1.0), "{metrics}");
            assert!(host == "b" || of("epochs_total") >= Some(25.0), "{metrics}");
            server.signal(Signal::TERM);
            server.wait();
        }
    }

    fn fail_over(&self, from: &str) {
        let over = self
            .hosts
            .command(&self.env, from, &["failover"])
            .output()
            .expect("run keyframe failover");
        assert!(over.status.success(), "{over:?}");
    }
}

#[test]
fn what_was_answered_survives_the_host_and_the_connection_goes_on() {
    let mut pair = Pair::new(&[], &[]);
    pair.client.wait_for_entries(100, &mut pair.a);
    let before = pair.client.seen();

    // Power loss: the engine, QEMU and all processes beside them.
    pair.hosts.a.kill_all();
    pair.client.wait_for_entries(100, &mut pair.b);
    assert_eq!(pair.hosts.running_qemus("b"), 1);
    let status = pair.status("b").expect("the standby's status");
    let seen = pair.client.end();
    let failover = seen.longest;
    println!(
        "{} entries, the longest answer {failover:?}, before that {:?}",
        seen.entries, before.longest
    );
    assert_eq!((status["role"].as_str(), status["term"].as_u64()), (Some("primary"), Some(2)));
    // The VM keeps its name, beside that of the host that took it over.
    let vm = status["protects"].as_str().expect("the VM's name");
    let by_name = pair.hosts.command(&pair.env, "b", &["status", "--name", vm, "--json"]).output();
    let by_name = by_name.expect("run keyframe status");
    assert!(by_name.status.success(), "{by_name:?}");
}

/// Both hosts hash each epoch's RAM, in the pause and at the standby. The guest checks its disk
/// against its RAM.
#[test]
fn a_standby_holds_exactly_what_the_vm_was_at_each_epoch() {
    let work = "ledger+dirty kf.ledger.dev=/dev/vda kf.ip=10.78.0.15 kf.ledger.dirty=400 kf.mib=24 kf.rate=20000";
    let mut pair = Pair::that_does(work, &["--verify", "--policy", "fixed:100ms"], &[]);
    let epochs = |pair: &Pair| pair.status("a").and_then(|r| r["epochs"].as_u64()).unwrap_or(0);
    let from = epochs(&pair);
    wait_until("25 epochs have come", || epochs(&pair) >= from + 25);
    let status = pair.status("a").expect("the primary's status");
    assert_eq!(status["state"], "protected", "{}", pair.a.report());
    assert!(!pair.b.errors().contains("differs"), "{}", pair.b.report());
    let reasons = status["reasons"].as_object().expect("why epochs were taken");
    let taken: u64 = reasons.values().filter_map(serde_json::Value::as_u64).sum();
    assert!(status["epochs"] == taken && reasons.contains_key("due"), "{status}");
    // Small changes travel as small changes.
    let (wire, raw) = (status["all_wire_bytes"].as_u64(), status["all_raw_bytes"].as_u64());
    assert!(wire.zip(raw).is_some_and(|(wire, raw)| wire * 3 < raw), "{status}");
    pair.on_the_dashboard();
    pair.hosts.a.kill_all();
    pair.client.wait_for_entries(20, &mut pair.b);
    pair.client.end();
}

#[test]
fn what_cannot_be_protected_is_refused_with_the_way_out() {
    let env = TestEnv::without_store();
    let hosts = Hosts::new(&env);
    let refused = |args: &[&str], words: &[&str]| {
        let output = hosts.command(&env, "a", args).output().expect("run keyframe");
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
    let open = env.path().join("OPEN");
    std::fs::write(&open, "a key that everybody can read").expect("write a key");
    refused(&["standby", "--key", "OPEN", "--dir", "d"], &["others may read", "umask 077"]);
    refused(&["standby", "--key", "NONE", "--dir", "d"], &["NONE", "urandom"]);
    refused(&["failover"], &["no VM runs"]);
    let mut keyless = hosts.command(&env, "a", &line(&[]));
    let output = keyless.env_remove("KEYFRAME_KEY").output().expect("run keyframe");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("head -c 32 /dev/urandom"), "{said}");

    // A standby with another key, or with another witness, is refused.
    let _witness = hosts.witness(&env);
    let other = env.path().join("OTHER");
    std::fs::write(&other, "another key than theirs").expect("write a key");
    std::fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("protect it");
    let mut vm = hosts.protect(&env, &[], &hosts.ledger_guest(WORK));
    let standby = hosts.standby(&env, "b", &["--key", "OTHER"]);
    vm.wait_for_error("same key file");
    drop(standby);
    let command =
        hosts.command(&env, "b", &["standby", "--listen", "10.78.0.2:7430", "--dir", "d"]);
    let _manual = Process::start(command);
    vm.wait_for_error("the primary is started with --witness");
    // Two standbys would write over each other's disks.
    let mut second = hosts.command(
        &env,
        "b",
        &["standby", "--name", "second", "--listen", "10.78.0.2:7433", "--dir", "d"],
    );
    let said = second.output().expect("run keyframe");
    let said = (said.status.code(), String::from_utf8_lossy(&said.stderr).into_owned());
    assert!(
        said.0 == Some(1) && said.1.contains("another standby uses") && said.1.contains("--dir"),
        "{said:?}"
    );
}

#[test]
fn a_vm_goes_over_and_back_without_loss_and_is_protected_again() {
    let mut pair = Pair::new(&["--policy", "fixed:50ms"], &["--peer", "10.78.0.1:7430"]);
    pair.client.wait_for_entries(20, &mut pair.a);

    pair.fail_over("a");
    pair.client.wait_for_entries(20, &mut pair.b);
    assert!(pair.a.wait().success(), "{}", pair.a.report());
    assert_eq!((pair.hosts.running_qemus("a"), pair.hosts.running_qemus("b")), (0, 1));

    // The old host returns as the standby, gets the VM, and gets it again after a failure.
    let mut back = pair.hosts.standby(&pair.env, "a", &[]);
    pair.hosts.wait_until_protected(&pair.env, "b", &mut pair.b);
    pair.client.wait_for_entries(20, &mut pair.b);
    pair.hosts.b.kill_all();
    pair.client.wait_for_entries(20, &mut back);
    pair.client.end();
}

#[test]
fn a_standby_that_was_cut_off_gets_what_differs() {
    let mut pair = Pair::new(&["--verify"], &[]);
    pair.client.wait_for_entries(20, &mut pair.a);
    let sent =
        |pair: &Pair| pair.status("a").and_then(|r| r["all_wire_bytes"].as_u64()).unwrap_or(0);
    let first = sent(&pair);

    pair.hosts.cut("b", true);
    pair.a.wait_for_error("the VM runs unprotected");
    pair.client.wait_for_entries(20, &mut pair.a);
    pair.hosts.cut("b", false);
    let before = sent(&pair);
    pair.hosts.wait_until_protected(&pair.env, "a", &mut pair.a);
    pair.client.wait_for_entries(20, &mut pair.a);
    let again = sent(&pair) - before;
    println!("{first} bytes at first, {again} when it came back");
    assert!(again * 2 < first, "{first} bytes at first, {again} when it came back");
    pair.hosts.a.kill_all();
    pair.client.wait_for_entries(20, &mut pair.b);
    pair.client.end();
}

#[test]
fn two_hosts_change_roles_again_and_again() {
    let protect = ["--listen", "10.78.0.1:7430", "--name", "vm"];
    let mut pair = Pair::new(&protect, &["--peer", "10.78.0.1:7430"]);
    for round in 0..4 {
        let (from, to) = if round % 2 == 0 { ("a", "b") } else { ("b", "a") };
        pair.fail_over(from);
        let next = if to == "a" { &mut pair.a } else { &mut pair.b };
        pair.hosts.wait_until_protected(&pair.env, to, next);
        pair.client.wait_for_entries(10, next);
        assert_eq!(pair.status(from).expect("a standby")["role"], "standby", "round {round}");
    }
    pair.client.end();
}

#[test]
fn a_primary_that_is_cut_off_stands_still_before_its_standby_runs() {
    let mut pair = Pair::new(&[], &[]);
    pair.client.wait_for_entries(20, &mut pair.a);

    pair.hosts.cut("a", true);
    // Looks as often as possible.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let took_over = pair.status("b").is_some_and(|r| r["role"] == "primary");
        // At no instant do both run: the old VM is paused before the new one starts.
        assert!(!took_over || pair.hosts.running_qemus("a") == 0, "both run: {}", pair.a.report());
        if took_over {
            break;
        }
        assert!(Instant::now() < deadline, "the standby never takes over: {}", pair.b.report());
        std::thread::sleep(Duration::from_millis(20));
    }
    pair.client.wait_for_entries(20, &mut pair.b);
    // Back in the network, the host learns that the VM runs on the other host.
    pair.hosts.cut("a", false);
    pair.a.wait();
    assert!(pair.a.errors().contains("another host runs the VM"), "{}", pair.a.report());
    assert_eq!(pair.hosts.running_qemus("a"), 0);
    pair.client.wait_for_entries(20, &mut pair.b);
    pair.client.end();
}

#[test]
fn a_vm_outlives_its_standby_and_is_protected_by_the_next_one() {
    let mut pair = Pair::new(&[], &[]);
    pair.client.wait_for_entries(20, &mut pair.a);

    pair.hosts.b.kill_all();
    pair.a.wait_for_error("the VM runs unprotected");
    pair.client.wait_for_entries(20, &mut pair.a);
    assert!(pair.client.seen().longest < Duration::from_secs(30));
    pair.b = pair.hosts.standby(&pair.env, "b", &[]);
    pair.hosts.wait_until_protected(&pair.env, "a", &mut pair.a);
    pair.client.wait_for_entries(20, &mut pair.a);
    pair.hosts.a.kill_all();
    pair.client.wait_for_entries(20, &mut pair.b);
    pair.client.end();
}
