//! Tests the resource agent for Pacemaker (packaging/ocf/keyframe): each action as a cluster calls
//! it, on two "hosts", which are two run directories in one network namespace.

use keyframe_test_hosts::Host;
use keyframe_tests::{Boot, TestEnv, keyframe, skip, wait_until};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;

const SUCCESS: i32 = 0;
const UNIMPLEMENTED: i32 = 3;
const CONFIGURED: i32 = 6;
const NOT_RUNNING: i32 = 7;
const PROMOTED: i32 = 8;

struct Cluster {
    env: TestEnv,
    host: Host,
}

fn agent() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/ocf/keyframe")
}

impl Cluster {
    fn new() -> Self {
        let (env, host) = (TestEnv::without_store(), Host::new().expect("make a host"));
        host.ok("ip link set lo up").expect("set the loopback interface up");
        let key = env.path().join("KEY");
        std::fs::write(&key, "a key of this test's own").expect("write the key");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))
            .expect("protect the key");
        Self { env, host }
    }

    /// The resource's parameters on a node.
    fn parameters(&self, node: &str) -> Vec<(&'static str, String)> {
        let boot = Boot { mem_mib: 128, ..Boot::new("hash kf.mib=4") };
        let quoted = |word: &String| format!("'{word}'");
        let qemu: Vec<String> = boot.command().iter().map(quoted).collect();
        let path = |name: &str| self.env.path().join(name).display().to_string();
        vec![
            ("qemu", qemu.join(" ")),
            ("peers", "a=127.0.0.1:7430 b=127.0.0.1:7431".into()),
            ("listen", format!("127.0.0.1:{}", if node == "a" { 7430 } else { 7431 })),
            ("key", path("KEY")),
            ("keyframe", keyframe().display().to_string()),
            ("run", path(node)),
            ("dir", path(&format!("{node}.dir"))),
            ("log", path(&format!("{node}.log"))),
            // A busy machine stalls for longer than the default.
            ("options", "--detection=3s".into()),
            ("cold_wait", "3".into()),
        ]
    }

    fn act_with(&self, node: &str, action: &str, others: &[(&str, &str)]) -> Output {
        // The agent is killed if it does not end, as a cluster manager does.
        let mut command = self.host.command("timeout");
        command
            .args(["-k", "5", "120"])
            .arg(agent())
            .arg(action)
            .env("OCF_RESOURCE_INSTANCE", "vm:0")
            .env("OCF_RESKEY_CRM_meta_on_node", node);
        for (name, value) in self.parameters(node) {
            command.env(format!("OCF_RESKEY_{name}"), value);
        }
        command.env("OCF_RESKEY_CRM_meta_interval", "5000");
        command.envs(others.iter().map(|(name, value)| (format!("OCF_RESKEY_{name}"), value)));
        let output = command.output().expect("run the agent");
        println!(
            "{node} {action}: {:?} {}",
            output.status.code(),
            String::from_utf8_lossy(&output.stderr)
        );
        output
    }

    #[track_caller]
    fn act(&self, node: &str, action: &str, code: i32) {
        let log = || std::fs::read_to_string(self.env.path().join(format!("{node}.log")));
        assert_eq!(
            self.act_with(node, action, &[]).status.code(),
            Some(code),
            "{node} {action}: {:?}",
            log()
        );
    }

    fn state(&self, node: &str) -> String {
        let mut command = self.host.command(keyframe());
        command.args(["status", "--json"]).env("XDG_RUNTIME_DIR", self.env.path().join(node));
        let output = command.output().expect("run keyframe status");
        let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        all[0]["replication"]["state"].as_str().unwrap_or_default().into()
    }

    fn qemus(&self) -> Vec<u32> {
        let is_qemu = |pid: &u32| {
            std::fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|name| name.starts_with("qemu"))
        };
        self.host.pids().into_iter().filter(is_qemu).collect()
    }
}

#[test]
fn a_cluster_starts_moves_and_stops_a_protected_vm() {
    let cluster = Cluster::new();
    cluster.act("a", "monitor", NOT_RUNNING);
    cluster.act("a", "stop", SUCCESS);
    for node in ["a", "b"] {
        cluster.act(node, "start", SUCCESS);
        cluster.act(node, "start", SUCCESS);
        cluster.act(node, "monitor", SUCCESS);
    }
    // No node has the VM: it is started where the cluster wants it.
    cluster.act("a", "promote", SUCCESS);
    cluster.act("a", "promote", SUCCESS);
    cluster.act("a", "monitor", PROMOTED);
    cluster.act("b", "monitor", SUCCESS);
    wait_until("it is protected", || cluster.state("a") == "protected");

    // As Pacemaker moves it: the VM changes nodes and is not started again.
    cluster.act("a", "demote", SUCCESS);
    cluster.act("a", "monitor", SUCCESS);
    cluster.act("b", "monitor", SUCCESS);
    let probe = cluster.act_with("b", "monitor", &[("CRM_meta_interval", "0")]);
    assert_eq!(probe.status.code(), Some(PROMOTED), "a probe tells what is");
    cluster.act("b", "promote", SUCCESS);
    cluster.act("b", "monitor", PROMOTED);
    wait_until("it is protected by a", || cluster.state("b") == "protected");
    let log = std::fs::read_to_string(cluster.env.path().join("b.log")).expect("b's log");
    assert_eq!(log.matches("took over: VM").count(), 1, "{log}");

    // Promoting the standby while the VM runs on the other node is a switch-over, too.
    cluster.act("a", "promote", SUCCESS);
    cluster.act("a", "monitor", PROMOTED);
    wait_until("b is its standby again", || {
        cluster.act_with("b", "monitor", &[]).status.code() == Some(SUCCESS)
    });

    for node in ["a", "b"] {
        cluster.act(node, "stop", SUCCESS);
        cluster.act(node, "monitor", NOT_RUNNING);
    }
    assert_eq!(cluster.qemus(), [0; 0]);
}

#[test]
fn a_standby_goes_on_where_the_cluster_has_switched_its_primary_off() {
    let cluster = Cluster::new();
    cluster.act("a", "start", SUCCESS);
    cluster.act("b", "start", SUCCESS);
    cluster.act("a", "promote", SUCCESS);
    wait_until("it is protected", || cluster.state("a") == "protected");
    // Without a witness no node takes over before the cluster orders it; the cluster has fenced a.
    let of_a = |pid: &u32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environ).contains("OCF_RESKEY_CRM_meta_on_node=a")
    };
    wait_until("host a is off", || {
        let pids: Vec<u32> = cluster.host.pids().into_iter().filter(of_a).collect();
        for pid in pids.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid as i32)) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        pids.is_empty()
    });
    cluster.act("b", "monitor", SUCCESS);
    cluster.act("b", "promote", SUCCESS);
    cluster.act("b", "monitor", PROMOTED);
    let log = std::fs::read_to_string(cluster.env.path().join("b.log")).expect("b's log");
    assert!(log.contains("took over: VM"), "{log}");
    cluster.act("b", "stop", SUCCESS);
}

#[test]
fn what_is_stopped_does_not_run_even_where_its_engine_was_killed() {
    let cluster = Cluster::new();
    cluster.act("a", "start", SUCCESS);
    cluster.act("a", "promote", SUCCESS);
    let pid = cluster.env.path().join("a/keyframe/vm/engine.pid");
    let pid =
        std::fs::read_to_string(pid).expect("the engine's pid").trim().parse().expect("a pid");
    let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill the engine");
    wait_until("the agent sees it", || {
        cluster.act_with("a", "monitor", &[]).status.code() != Some(PROMOTED)
    });
    cluster.act("a", "stop", SUCCESS);
    assert_eq!(cluster.qemus(), [0; 0]);
    cluster.act("a", "monitor", NOT_RUNNING);
}

#[test]
fn an_agent_says_what_it_is_and_what_it_lacks() {
    let cluster = Cluster::new();
    let metadata = cluster.act_with("a", "meta-data", &[("keyframe", "/nowhere")]);
    let text = String::from_utf8_lossy(&metadata.stdout).into_owned();
    for (name, _) in cluster.parameters("a") {
        assert!(text.contains(&format!("<parameter name=\"{name}\"")), "{name} is not documented");
    }
    cluster.act("a", "validate-all", SUCCESS);
    cluster.act("a", "reload", UNIMPLEMENTED);
    for (others, code) in [
        ([("qemu", "")], CONFIGURED),
        ([("peers", "a=127.0.0.1:7430")], CONFIGURED),
        ([("cold_wait", "soon")], CONFIGURED),
        ([("keyframe", "/nowhere")], 5),
        ([("key", "/nowhere")], 5),
    ] {
        let output = cluster.act_with("a", "validate-all", &others);
        assert_eq!(output.status.code(), Some(code), "{others:?}: {output:?}");
    }
}

/// The tester of Debian's resource-agents.
#[test]
fn ocf_tester_finds_nothing() {
    let Some(tester) = ["/usr/sbin/ocf-tester", "/usr/bin/ocf-tester"]
        .into_iter()
        .find(|p| Path::new(p).is_file())
    else {
        skip!("no ocf-tester (Debian packages resource-agents, libxml2-utils)");
    };
    let cluster = Cluster::new();
    let mut command = cluster.host.command(tester);
    command.args(["-n", "vm"]);
    for (name, value) in cluster.parameters("a") {
        // It quotes values by itself, with the other quotes.
        let value =
            if name == "peers" { "127.0.0.1:7431".into() } else { value.replace('\'', "\"") };
        command.arg("-o").arg(format!("{name}={value}"));
    }
    let output = command.arg(agent()).output().expect("run ocf-tester");
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("passed all tests"), "{said}");
}
