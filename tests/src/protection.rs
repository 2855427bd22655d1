//! A protected VM on hosts of its own, and a client that checks each answer.
//!
//! Host a runs `keyframe protect`, host b `keyframe standby`, host c the witness and the client
//! (`keyframe_test_hosts::Network` draws them). The guest's address is 10.78.0.15 on either host.

use crate::{Boot, PATIENCE, Process, TestEnv, wait_until};
use keyframe_test_hosts::ledger::{self, Ledger};
use keyframe_test_hosts::{Direction, Network, Rate};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The guest's address.
pub const GUEST: &str = "10.78.0.15";
const WITNESS: &str = "10.78.0.3:7431";
/// The flag in /proc/PID/stat of a process that is ending.
const PF_EXITING: u64 = 4;

/// Three hosts and a switch between them.
pub struct Hosts {
    network: Network,
    dir: PathBuf,
}

impl std::ops::Deref for Hosts {
    type Target = Network;

    fn deref(&self) -> &Network {
        &self.network
    }
}

/// Sets a long failure detection unless `args` have one: other tests use the processors too, and a
/// host that waits for one is not dead.
fn allow_slow_hosts(args: &mut Vec<&str>) {
    if !args.contains(&"--detection") {
        args.extend(["--detection", "4s"]);
    }
}

impl Hosts {
    /// Makes hosts with links of 1 Gbit/s, and a key in the test's directory.
    pub fn new(env: &TestEnv) -> Self {
        Self::with_rate(env, Rate::GIGABIT)
    }

    /// As [`Self::new`], with links of another rate.
    pub fn with_rate(env: &TestEnv, rate: Rate) -> Self {
        let network = Network::new(rate).expect("make hosts and a network");
        let dir = env.path().to_owned();
        let key = dir.join("KEY");
        std::fs::write(&key, "the key of this test").expect("write the key");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))
            .expect("protect the key");
        for host in ["a", "b", "c"] {
            std::fs::create_dir_all(dir.join(host)).expect("make a directory");
        }
        Self { network, dir }
    }

    /// The command `keyframe ARGS` on a host, with the host's run directory.
    pub fn command(&self, env: &TestEnv, host: &str, args: &[&str]) -> Command {
        let own = env.command(args);
        let mut command = self.host(host).command(own.get_program());
        command.args(own.get_args()).current_dir(&self.dir);
        for (name, value) in own.get_envs() {
            if let Some(value) = value {
                command.env(name, value);
            }
        }
        command.env("XDG_RUNTIME_DIR", self.run_dir(host)).env("KEYFRAME_KEY", "KEY");
        command
    }

    /// The run directory of a host, with the sockets of its engines.
    pub fn run_dir(&self, host: &str) -> PathBuf {
        self.dir.join(host)
    }

    /// Starts the witness and waits until it listens.
    pub fn witness(&self, env: &TestEnv) -> Process {
        let mut witness =
            Process::start(self.command(env, "c", &["witness", "--listen", WITNESS, "--dir", "w"]));
        witness.wait_for("witness at");
        witness
    }

    /// Starts a standby on `host` and waits until it listens.
    pub fn standby(&self, env: &TestEnv, host: &str, options: &[&str]) -> Process {
        let listen = format!("10.78.0.{}:7430", if host == "a" { 1 } else { 2 });
        let dir = format!("standby-{host}");
        let mut args = vec!["standby", "--witness", WITNESS, "--dir", &dir];
        args.extend(options);
        if !options.contains(&"--listen") {
            args.extend(["--listen", &listen]);
        }
        allow_slow_hosts(&mut args);
        let mut standby = Process::start(self.command(env, host, &args));
        standby.wait_for_error("waits for a primary");
        standby
    }

    /// As [`Self::standby`], with a directory that is a file system of `size` (as in `mount -o size`),
    /// in a mount namespace of its own.
    pub fn standby_on_small_disk(&self, env: &TestEnv, host: &str, size: &str) -> Process {
        let (dir, listen) = (format!("standby-{host}"), "10.78.0.2:7430");
        std::fs::create_dir_all(self.dir.join(&dir)).expect("make a directory");
        let args = ["standby", "--witness", WITNESS, "--listen", listen, "--dir", &dir];
        let plain = self.command(env, host, &args);
        let script = format!("mount -t tmpfs -o size={size} small {dir} && exec \"$@\"");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", &script, "sh"]);
        command.arg(plain.get_program()).args(plain.get_args()).current_dir(&self.dir);
        command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut standby = Process::start(command);
        standby.wait_for_error("waits for a primary");
        standby
    }

    /// Starts the protected VM `boot` on host a, with the standby on host b.
    pub fn protect(&self, env: &TestEnv, options: &[&str], boot: &Boot) -> Process {
        self.protect_line(env, options, &boot.command())
    }

    /// As [`Self::protect`], with QEMU's command line.
    pub fn protect_line(&self, env: &TestEnv, options: &[&str], line: &[String]) -> Process {
        let mut args = vec!["protect", "--witness", WITNESS, "--dir", "primary"];
        args.extend(options);
        if !options.contains(&"--standby") {
            args.extend(["--standby", "10.78.0.2:7430"]);
        }
        allow_slow_hosts(&mut args);
        let mut command = self.command(env, "a", &args);
        command.arg("--").args(line);
        Process::start(command)
    }

    /// The guest that runs the workload `work` of a ledger, with a disk and a NIC.
    pub fn ledger_guest(&self, work: &str) -> Boot {
        let disk = self.dir.join("ledger.img");
        // The last block of 4 KiB is incomplete.
        std::fs::File::create(&disk)
            .and_then(|file| file.set_len((8 << 20) + 512))
            .expect("make a disk");
        let drive = format!("file={},if=virtio,format=raw,id=ledger", disk.display());
        let boot = Boot { machine: "pc".into(), mem_mib: 128, ..Boot::new(work) };
        boot.with(&[
            "-netdev",
            "tap,id=n0,ifname=tap0,script=no,downscript=no",
            "-device",
            "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:15,romfile=",
            "-drive",
            &drive,
        ])
    }

    /// The replication in the output of `keyframe status` on a host; `None` if no engine runs there.
    pub fn status(&self, env: &TestEnv, host: &str) -> Option<Value> {
        let output =
            self.command(env, host, &["status", "--json"]).output().expect("run keyframe status");
        let all: Value = serde_json::from_slice(&output.stdout).ok()?;
        all.get(0)?.get("replication").cloned()
    }

    /// Waits until the primary on `host` reports that its VM is protected.
    pub fn wait_until_protected(&self, env: &TestEnv, host: &str, vm: &mut Process) {
        let state = |host: &str| {
            self.status(env, host)
                .and_then(|r| Some(r.get("state")?.as_str()?.to_owned()))
                .unwrap_or_default()
        };
        let protected = vm.wait_until(|_| (state(host) == "protected").then_some(()));
        assert!(protected.is_some(), "not protected but {:?}: {}", state(host), vm.report());
    }

    /// The number of QEMUs on a host that are not stopped.
    pub fn running_qemus(&self, host: &str) -> usize {
        self.qemu_states(host).iter().filter(|state| !matches!(state, 'T' | 'Z' | 'X')).count()
    }

    /// The number of QEMUs on a host that are stopped.
    pub fn stopped_qemus(&self, host: &str) -> usize {
        self.qemu_states(host).iter().filter(|state| **state == 'T').count()
    }

    /// The process states of the QEMUs on a host. A QEMU that ends or has got SIGKILL counts as `X`.
    fn qemu_states(&self, host: &str) -> Vec<char> {
        let state = |pid: u32| {
            let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
            let (stat, status) = (read("stat")?, read("status")?);
            let mut fields = stat.rsplit(") ").next()?.split(' ');
            let state = fields.next()?.chars().next().filter(|_| stat.contains("(qemu"))?;
            let exits = fields.nth(5)?.parse::<u64>().ok()? & PF_EXITING != 0;
            let pending = status.lines().find_map(|line| line.strip_prefix("SigPnd:"))?.trim();
            let killed =
                u64::from_str_radix(pending, 16).ok()? & (1 << (Signal::KILL.as_raw() - 1)) != 0;
            Some(if exits || killed { 'X' } else { state })
        };
        self.host(host).pids().into_iter().filter_map(state).collect()
    }

    /// Cuts a host's cable, or repairs it.
    pub fn cut(&self, host: &str, cut: bool) {
        self.network.cut(host, cut).expect("cut or repair a cable");
    }

    /// Makes a host's cable lose all packets of one direction, or repairs it.
    pub fn mute(&self, host: &str, direction: Direction, mute: bool) {
        self.network.mute(host, direction, mute).expect("mute or repair a cable");
    }

    /// Starts a client on host c that enters values, and waits for the first answer.
    pub fn client(&self) -> Client {
        let client = self.client_running(enter);
        wait_until("the guest answers", || {
            let seen = client.seen();
            seen.entries > 0 || seen.wrong.is_some()
        });
        client
    }

    /// Starts a client that runs `work` on host c. The flag tells it to end; it records its answers in
    /// the mutex.
    pub fn client_running(
        &self,
        work: impl FnOnce(&AtomicBool, &Mutex<Seen>) + Send + 'static,
    ) -> Client {
        let (ends, seen) =
            (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Seen::default())));
        let (stop, shared) = (Arc::clone(&ends), Arc::clone(&seen));
        let thread = self.c.inside(move || work(&stop, &shared)).expect("enter a namespace");
        Client { ends, seen, thread: Some(thread) }
    }
}

/// The answers that a client has got.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Entries that the guest has confirmed.
    pub entries: u64,
    /// When the newest entry was confirmed.
    pub at: Option<Instant>,
    /// The longest time between two answers.
    pub longest: Duration,
    /// The time between each question and its answer.
    pub took: Vec<Duration>,
    /// A wrong answer or a broken connection.
    pub wrong: Option<String>,
}

/// A client, in its own thread.
pub struct Client {
    ends: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Client {
    /// The answers so far.
    pub fn seen(&self) -> Seen {
        self.seen.lock().expect("the client's thread").clone()
    }

    /// Waits until `more` further entries are confirmed. `of` is the engine that runs the VM.
    pub fn wait_for_entries(&self, more: u64, of: &mut Process) {
        let from = self.seen().entries;
        let grown = of.wait_until(|_| {
            let seen = self.seen();
            (seen.entries >= from + more || seen.wrong.is_some()).then_some(())
        });
        let seen = self.seen();
        assert!(
            grown.is_some() && seen.wrong.is_none(),
            "{:?} at entry {}: {}",
            seen.wrong,
            seen.entries,
            of.report()
        );
    }

    /// Ends the client and asserts that it saw nothing wrong.
    pub fn end(mut self) -> Seen {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the client's thread").expect("enter a namespace");
        }
        let seen = self.seen();
        assert!(seen.wrong.is_none(), "{:?}", seen.wrong);
        seen
    }
}

/// Enters values, one after the other, over one connection.
fn enter(ends: &AtomicBool, seen: &Mutex<Seen>) {
    let deadline = Instant::now() + PATIENCE;
    let address = format!("{GUEST}:{}", ledger::PORT).parse().expect("an address");
    let is_over = || ends.load(Ordering::Relaxed);
    let entered = Ledger::connect(address, deadline, is_over).and_then(|mut ledger| {
        while !is_over() {
            let took = ledger.enter()?;
            let mut seen = seen.lock().expect("the test's thread");
            (seen.entries, seen.at) = (ledger.entries(), Some(Instant::now()));
            seen.took.push(took);
            seen.longest = seen.longest.max(took);
        }
        Ok(())
    });
    if let Err(wrong) = entered {
        seen.lock().expect("the test's thread").wrong = Some(wrong);
    }
}
