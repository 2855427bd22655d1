//! A protected VM on hosts of a test's own, and a client that believes nothing.
//!
//! Host a runs `keyframe protect`, b `keyframe standby`, c the witness and the client
//! (`keyframe_test_hosts::Network` draws them); the guest is 10.78.0.15, wherever it runs.

use crate::{Bench, Boot, PATIENCE, Process, until};
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

/// The guest's own address.
pub const GUEST: &str = "10.78.0.15";
const WITNESS: &str = "10.78.0.3:7431";
/// Of the flags in /proc/PID/stat.
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

/// Other tests have the processors, too: a host is not dead because it waits for one.
fn be_patient(args: &mut Vec<&str>) {
    if !args.contains(&"--detection") {
        args.extend(["--detection", "4s"]);
    }
}

impl Hosts {
    /// With links of 1 Gbit/s, and a key in the bench's directory.
    pub fn new(bench: &Bench) -> Self {
        Self::with(bench, Rate::GIGABIT)
    }

    /// With links of another rate.
    pub fn with(bench: &Bench, rate: Rate) -> Self {
        let network = Network::new(rate).expect("make hosts and a network");
        let dir = bench.path().to_owned();
        let key = dir.join("KEY");
        std::fs::write(&key, "a key of this test's own").expect("write the key");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))
            .expect("protect the key");
        for host in ["a", "b", "c"] {
            std::fs::create_dir_all(dir.join(host)).expect("make a directory");
        }
        Self { network, dir }
    }

    /// `keyframe` on a host, with a run directory of its own there.
    pub fn command(&self, bench: &Bench, host: &str, args: &[&str]) -> Command {
        let own = bench.command(args);
        let mut command = self.host(host).command(own.get_program());
        command.args(own.get_args()).current_dir(&self.dir);
        for (name, value) in own.get_envs() {
            if let Some(value) = value {
                command.env(name, value);
            }
        }
        command.env("XDG_RUNTIME_DIR", self.run_folder(host)).env("KEYFRAME_KEY", "KEY");
        command
    }

    /// Where the engines of a host have their sockets.
    pub fn run_folder(&self, host: &str) -> PathBuf {
        self.dir.join(host)
    }

    /// The witness, answering.
    pub fn witness(&self, bench: &Bench) -> Process {
        let mut witness = Process::start(self.command(
            bench,
            "c",
            &["witness", "--listen", WITNESS, "--dir", "w"],
        ));
        witness.wait_for("witness at");
        witness
    }

    /// A standby on `host`, listening.
    pub fn standby(&self, bench: &Bench, host: &str, options: &[&str]) -> Process {
        let listen = format!("10.78.0.{}:7430", if host == "a" { 1 } else { 2 });
        let dir = format!("standby-{host}");
        let mut args = vec!["standby", "--witness", WITNESS, "--dir", &dir];
        args.extend(options);
        if !options.contains(&"--listen") {
            args.extend(["--listen", &listen]);
        }
        be_patient(&mut args);
        let mut standby = Process::start(self.command(bench, host, &args));
        standby.wait_for_error("waits for a primary");
        standby
    }

    /// A standby whose directory is a disk with so little room, mounted where nobody else sees it.
    pub fn standby_with_room(&self, bench: &Bench, host: &str, room: &str) -> Process {
        let (dir, listen) = (format!("standby-{host}"), "10.78.0.2:7430");
        std::fs::create_dir_all(self.dir.join(&dir)).expect("make a directory");
        let args = ["standby", "--witness", WITNESS, "--listen", listen, "--dir", &dir];
        let plain = self.command(bench, host, &args);
        let script = format!("mount -t tmpfs -o size={room} small {dir} && exec \"$@\"");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", &script, "sh"]);
        command.arg(plain.get_program()).args(plain.get_args()).current_dir(&self.dir);
        command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut standby = Process::start(command);
        standby.wait_for_error("waits for a primary");
        standby
    }

    /// The VM on host a, with the standby on b.
    pub fn protect(&self, bench: &Bench, options: &[&str], boot: &Boot) -> Process {
        self.protect_line(bench, options, &boot.command())
    }

    /// The VM of QEMU's command line `line`.
    pub fn protect_line(&self, bench: &Bench, options: &[&str], line: &[String]) -> Process {
        let mut args = vec!["protect", "--witness", WITNESS, "--dir", "primary"];
        args.extend(options);
        if !options.contains(&"--standby") {
            args.extend(["--standby", "10.78.0.2:7430"]);
        }
        be_patient(&mut args);
        let mut command = self.command(bench, "a", &args);
        command.arg("--").args(line);
        Process::start(command)
    }

    /// The ledger guest, with a disk.
    pub fn ledger(&self, work: &str) -> Boot {
        let disk = self.dir.join("ledger.img");
        // Its last block is not whole.
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

    /// What `keyframe status` says of the replication on a host; none where nothing runs.
    pub fn status(&self, bench: &Bench, host: &str) -> Option<Value> {
        let output =
            self.command(bench, host, &["status", "--json"]).output().expect("run keyframe status");
        let all: Value = serde_json::from_slice(&output.stdout).ok()?;
        all.get(0)?.get("replication").cloned()
    }

    /// Waits until the primary on `host` says that it is protected, and the standby that it is
    /// ready.
    pub fn until_protected(&self, bench: &Bench, host: &str, vm: &mut Process) {
        let state = |host: &str| {
            self.status(bench, host)
                .and_then(|r| Some(r.get("state")?.as_str()?.to_owned()))
                .unwrap_or_default()
        };
        let protected = vm.wait_until(|_| (state(host) == "protected").then_some(()));
        assert!(protected.is_some(), "not protected but {:?}: {}", state(host), vm.report());
    }

    /// The QEMUs on a host that are not stopped.
    pub fn running_qemus(&self, host: &str) -> usize {
        self.qemus(host).iter().filter(|state| !matches!(state, 'T' | 'Z' | 'X')).count()
    }

    /// Those that are.
    pub fn stopped_qemus(&self, host: &str) -> usize {
        self.qemus(host).iter().filter(|state| **state == 'T').count()
    }

    /// Their states; of one that has SIGKILL and is about to end, `X`.
    fn qemus(&self, host: &str) -> Vec<char> {
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

    /// Cuts a host's cable, or mends it.
    pub fn cut(&self, host: &str, cut: bool) {
        self.network.cut(host, cut).expect("cut a cable, or mend it");
    }

    /// Has a host's cable lose everything one way, or mends it.
    pub fn mute(&self, host: &str, direction: Direction, mute: bool) {
        self.network.mute(host, direction, mute).expect("mute a cable, or mend it");
    }

    /// A client that enters values, from host c.
    pub fn client(&self) -> Client {
        let client = self.client_that(enter);
        until("the guest answers", || {
            let seen = client.seen();
            seen.entries > 0 || seen.wrong.is_some()
        });
        client
    }

    /// A client that does `work` on host c until it is told to end, and keeps what it was answered.
    pub fn client_that(
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

/// What a client was answered.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Entries that the guest has confirmed.
    pub entries: u64,
    /// When the newest was.
    pub at: Option<Instant>,
    /// The longest time between two answers.
    pub longest: Duration,
    /// All times between a question and its answer.
    pub took: Vec<Duration>,
    /// What cannot be.
    pub wrong: Option<String>,
}

/// The client, in a thread of its own.
pub struct Client {
    ends: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Client {
    /// What it has seen so far.
    pub fn seen(&self) -> Seen {
        self.seen.lock().expect("the client's thread").clone()
    }

    /// Waits until so many more entries are confirmed.
    pub fn go_on(&self, more: u64, of: &mut Process) {
        let from = self.seen().entries;
        let went = of.wait_until(|_| {
            let seen = self.seen();
            (seen.entries >= from + more || seen.wrong.is_some()).then_some(())
        });
        let seen = self.seen();
        assert!(
            went.is_some() && seen.wrong.is_none(),
            "{:?} at entry {}: {}",
            seen.wrong,
            seen.entries,
            of.report()
        );
    }

    /// Ends it; nothing that it saw was wrong.
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

/// Enters one value after the other over one connection.
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
