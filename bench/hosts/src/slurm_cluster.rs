//! A Slurm cluster on this machine: without systemd, slurmdbd and files in `/etc`.
//!
//! ```text
//!   server's namespace: munged, slurmctld, bridge 10.77.0.1 ──┬── link of one rate ── n1's: slurmd, 10.77.0.11
//!                                                             ├── link of one rate ── n2's: slurmd, 10.77.0.12
//!                                                             └── ...
//! ```
//!
//! Each host is a network namespace that a process holds. All processes in them end with
//! [`SlurmCluster`].

use crate::{Host, Rate};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// The address of the server on the nodes' network.
pub const SERVER_ADDRESS: &str = "10.77.0.1";

/// Longest time until all nodes are idle, and until munged listens.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running cluster.
pub struct SlurmCluster {
    nodes: Vec<Host>,
    server: Host,
    /// The daemons, which end with the cluster.
    daemons: Vec<Child>,
    conf: PathBuf,
    dir: PathBuf,
}

impl SlurmCluster {
    /// Starts a cluster of `nodes` nodes with one processor each. Its files go to `dir`, which all
    /// nodes see. Each node's link carries `rate` in each direction.
    ///
    /// Fails without root, without Slurm or munge, and if the nodes are not idle within a minute.
    pub fn start(dir: &Path, nodes: u32, rate: Rate) -> io::Result<Self> {
        for part in ["run", "state", "log", "spool"] {
            fs::create_dir_all(dir.join(part))?;
        }
        let server = Host::new()?;
        server.ok("ip link set lo up")?;
        server.ok("ip link add bridge type bridge")?;
        server.ok(&format!("ip addr add {SERVER_ADDRESS}/24 dev bridge"))?;
        server.ok("ip link set bridge up")?;
        let hosts = (1..=nodes)
            .map(|n| linked_host(&server, n, rate))
            .collect::<io::Result<Vec<Host>>>()?;
        let conf = write_conf(dir, nodes)?;
        let mut cluster = Self { nodes: hosts, server, daemons: Vec::new(), conf, dir: dir.into() };
        cluster.start_munge()?;
        cluster.start_daemon(0, &["slurmctld", "-D", "-c", "-f"])?;
        for n in 1..=nodes {
            cluster.start_daemon(n, &["slurmd", "-D", "-N", &format!("n{n}"), "-f"])?;
        }
        wait_until(&format!("{nodes} idle nodes; logs in {}", dir.display()), || {
            let options = ["--noheader", "--format=%D", "--states=idle"];
            let idle = cluster.output_of("sinfo", &options).unwrap_or_default();
            idle.trim().parse() == Ok(nodes)
        })?;
        Ok(cluster)
    }

    fn start_munge(&mut self) -> io::Result<()> {
        let run = self.dir.join("run");
        let mut key = [0; 128];
        getrandom::fill(&mut key).map_err(io::Error::other)?;
        let path = run.join("munge.key");
        fs::write(&path, key)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
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
        self.spawn(command, "munged")?;
        let socket = run.join("munge.sock");
        wait_until("the socket of munged", || socket.exists())
    }

    /// Starts a daemon on node `n`, or on the server if `n` is 0.
    fn start_daemon(&mut self, n: u32, words: &[&str]) -> io::Result<()> {
        let host = n.checked_sub(1).map_or(&self.server, |at| &self.nodes[at as usize]);
        let mut command = host.command(sbin(words[0]));
        command.args(&words[1..]).arg(&self.conf).env("SLURM_CONF", &self.conf);
        self.spawn(command, &format!("{}{n}", words[0]))
    }

    fn spawn(&mut self, mut command: Command, name: &str) -> io::Result<()> {
        let log = File::create(self.dir.join("log").join(format!("{name}.out")))?;
        let child = command.stdout(log.try_clone()?).stderr(log).spawn();
        self.daemons.push(child.map_err(|e| {
            io::Error::other(format!("start {}: {e}", command.get_program().display()))
        })?);
        Ok(())
    }

    /// Returns a node's network namespace; `n` is from 1 on.
    pub fn node(&self, n: usize) -> &Host {
        &self.nodes[n - 1]
    }

    /// Returns the same command on the server, where jobs are submitted.
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
    pub fn output_of(&self, program: &str, args: &[&str]) -> io::Result<String> {
        let mut command = Command::new(program);
        command.args(args);
        let output = self.on_server(&command).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Kills all processes of node `n` (from 1 on), as a power failure does.
    pub fn kill_node(&self, n: usize) {
        self.nodes[n - 1].kill_all();
    }
}

impl Drop for SlurmCluster {
    fn drop(&mut self) {
        self.nodes.iter().for_each(Host::kill_all);
        self.server.kill_all();
        for daemon in &mut self.daemons {
            let _ = daemon.wait();
        }
    }
}

/// Makes the host of node `n`, with a link to the server's bridge.
fn linked_host(server: &Host, n: u32, rate: Rate) -> io::Result<Host> {
    let host = Host::new()?;
    let holder = host.holder_pid();
    server.ok(&format!("ip link add n{n} type veth peer name eth0 netns {holder}"))?;
    server.ok(&format!("ip link set n{n} master bridge up"))?;
    host.ok("ip link set lo up")?;
    host.ok(&format!("ip addr add 10.77.0.{}/24 dev eth0", 10 + n))?;
    host.ok("ip link set eth0 up")?;
    rate.limit(server, &format!("n{n}"))?;
    rate.limit(&host, "eth0")?;
    Ok(host)
}

/// Waits until `is_there`; at most [`START_TIMEOUT`].
fn wait_until(subject: &str, is_there: impl Fn() -> bool) -> io::Result<()> {
    let began = Instant::now();
    while !is_there() {
        if began.elapsed() > START_TIMEOUT {
            let seconds = START_TIMEOUT.as_secs();
            return Err(io::Error::other(format!(
                "timed out after {seconds} s waiting for {subject}"
            )));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns the path of a program in /usr/sbin, which is not in every user's PATH.
fn sbin(program: &str) -> PathBuf {
    let path = Path::new("/usr/sbin").join(program);
    if path.exists() { path } else { program.into() }
}

fn write_conf(dir: &Path, nodes: u32) -> io::Result<PathBuf> {
    let uname = rustix::system::uname();
    let host = uname.nodename().to_string_lossy().into_owned();
    let last = 10 + nodes;
    let text = format!(
        "ClusterName=keyframe
SlurmctldHost={host}({SERVER_ADDRESS})
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
    fs::write(&path, text)?;
    Ok(path)
}
