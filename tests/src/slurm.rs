//! A Slurm cluster for one test, on this machine: without systemd, slurmdbd and files in `/etc`.
//!
//! ```text
//!   server's namespace: munged, slurmctld, bridge 10.77.0.1 ──┬── 1 Gbit/s ── n1's: slurmd, 10.77.0.11
//!                                                             ├── 1 Gbit/s ── n2's: slurmd, 10.77.0.12
//!                                                             └── ...
//! ```
//!
//! Each host is a network namespace that a process holds. All processes in them end with
//! [`Cluster`].

use crate::{TestEnv, wait_until};
use keyframe_test_hosts::Host;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// A running cluster.
pub struct Cluster {
    nodes: Vec<Host>,
    server: Host,
    /// The daemons, which end with the cluster.
    daemons: Vec<Child>,
    conf: PathBuf,
    dir: PathBuf,
}

impl Cluster {
    /// Starts a cluster of `nodes` nodes with one processor each, in the test's directory. Its links
    /// carry 1 Gbit/s.
    pub fn start(env: &TestEnv, nodes: u32) -> Self {
        let dir = env.path().join("cluster");
        for part in ["run", "state", "log", "spool"] {
            fs::create_dir_all(dir.join(part)).expect("make a directory");
        }
        let server = new_host();
        run_on(&server, "ip link set lo up");
        run_on(&server, "ip link add bridge type bridge");
        run_on(&server, "ip addr add 10.77.0.1/24 dev bridge");
        run_on(&server, "ip link set bridge up");
        let hosts: Vec<Host> = (1..=nodes).map(|n| linked_host(&server, n)).collect();
        let conf = write_conf(&dir, nodes);
        let mut cluster = Self { nodes: hosts, server, daemons: Vec::new(), conf, dir };
        cluster.start_munge();
        cluster.start_daemon(0, &["slurmctld", "-D", "-c", "-f"]);
        for n in 1..=nodes {
            cluster.start_daemon(n, &["slurmd", "-D", "-N", &format!("n{n}"), "-f"]);
        }
        wait_until(&format!("{nodes} idle nodes; logs in {}", cluster.dir.display()), || {
            let idle = cluster.output_of("sinfo", &["--noheader", "--format=%D", "--states=idle"]);
            idle.trim().parse() == Ok(nodes)
        });
        cluster
    }

    fn start_munge(&mut self) {
        let run = self.dir.join("run");
        let mut key = [0; 128];
        getrandom::fill(&mut key).expect("read random bytes");
        let path = run.join("munge.key");
        fs::write(&path, key).expect("write the key");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("protect the key");
        let mut command = self.server.command("munged");
        command.args(["--foreground", "--force", "--num-threads=2"]);
        for (option, name) in [
            ("key-file", "munge.key"),
            ("socket", "munge.sock"),
            ("pid-file", "munged.pid"),
            ("seed-file", "munge.seed"),
        ] {
            command.arg(format!("--{option}={}", run.join(name).display()));
        }
        self.spawn(command, "munged");
        let socket = run.join("munge.sock");
        wait_until("munged's socket", || socket.exists());
    }

    /// Starts a daemon on node `n`, or on the server if `n` is 0.
    fn start_daemon(&mut self, n: u32, words: &[&str]) {
        let host = n.checked_sub(1).map_or(&self.server, |at| &self.nodes[at as usize]);
        let mut command = host.command(sbin(words[0]));
        command.args(&words[1..]).arg(&self.conf).env("SLURM_CONF", &self.conf);
        self.spawn(command, &format!("{}{n}", words[0]));
    }

    fn spawn(&mut self, mut command: Command, name: &str) {
        let log =
            File::create(self.dir.join("log").join(format!("{name}.out"))).expect("make a log");
        let again = log.try_clone().expect("the log again");
        let child = command.stdout(log).stderr(again).spawn();
        self.daemons.push(child.unwrap_or_else(|e| panic!("start {command:?}: {e}")));
    }

    /// The same command on the server, where jobs are submitted.
    pub fn on_server(&self, command: &Command) -> Command {
        let mut there = self.server.command(command.get_program());
        there.args(command.get_args()).env("SLURM_CONF", &self.conf);
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => there.env(name, value),
                None => there.env_remove(name),
            };
        }
        if let Some(dir) = command.get_current_dir() {
            there.current_dir(dir);
        }
        there
    }

    /// Runs a program of Slurm on the server and returns its output.
    pub fn output_of(&self, program: &str, args: &[&str]) -> String {
        let mut command = Command::new(program);
        command.args(args);
        let output = self.on_server(&command).output().expect("run nsenter");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Kills all processes of node `n` (from 1 on), as a power failure does.
    pub fn kill_node(&self, n: usize) {
        self.nodes[n - 1].kill_all();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.nodes.iter().for_each(Host::kill_all);
        self.server.kill_all();
        for daemon in &mut self.daemons {
            let _ = daemon.wait();
        }
    }
}

/// Makes the host of node `n`, with a link to the server's bridge.
fn linked_host(server: &Host, n: u32) -> Host {
    let host = new_host();
    run_on(
        server,
        &format!("ip link add n{n} type veth peer name eth0 netns {}", host.holder_pid()),
    );
    run_on(server, &format!("ip link set n{n} master bridge up"));
    run_on(&host, "ip link set lo up");
    run_on(&host, &format!("ip addr add 10.77.0.{}/24 dev eth0", 10 + n));
    run_on(&host, "ip link set eth0 up");
    run_on(server, &format!("tc qdisc add dev n{n} root tbf rate 1gbit burst 256k latency 100ms"));
    run_on(&host, "tc qdisc add dev eth0 root tbf rate 1gbit burst 256k latency 100ms");
    host
}

/// Makes an empty host.
fn new_host() -> Host {
    Host::new().expect("make a network namespace")
}

/// Runs a command line on a host, which must succeed.
fn run_on(host: &Host, line: &str) {
    host.ok(line).expect("set a network up");
}

/// The path of a program in /usr/sbin, which is not in every user's PATH.
fn sbin(program: &str) -> PathBuf {
    let path = Path::new("/usr/sbin").join(program);
    if path.exists() { path } else { program.into() }
}

fn write_conf(dir: &Path, nodes: u32) -> PathBuf {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().into_owned();
    let last = 10 + nodes;
    let text = format!(
        "ClusterName=keyframe
SlurmctldHost={host}(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/run/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
ReturnToService=2
SlurmctldPort=16817
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd.%n.pid
SlurmdSpoolDir={dir}/spool/%n
StateSaveLocation={dir}/state
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd.%n.log
SlurmdTimeout=8
KillWait=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=10.77.0.[11-{last}] Port=17001 CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
",
        dir = dir.display()
    );
    let path = dir.join("slurm.conf");
    fs::write(&path, text).expect("write slurm.conf");
    path
}
