//! A guest on test hosts: under plain QEMU, tracked by `keyframe profile`, or under `keyframe protect`
//! with a standby and a witness.

use super::method::Setup;
use crate::guest_files::SmallGuest;
use crate::interrupt::Interrupt;
use crate::running_guest::RunningGuest;
use crate::{Error, Options};
use keyframe_kernel::cpu_time::process_cpu_time;
use keyframe_test_hosts::{Host, Network};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const WITNESS: &str = "10.78.0.3:7431";
const STANDBY: &str = "10.78.0.2:7430";
/// The RAM of the guests.
const MEM: &str = "256M";
/// Longest time until the witness and the standby listen.
const LISTEN_S: u64 = 30;
/// Longest time to boot.
const BOOT_S: u64 = 120;
/// Longest time until a guest is protected.
const PROTECTED_S: f64 = 90.0;
/// Longest time to end the tracking.
const UNTRACKED_S: f64 = 10.0;
/// More epochs than a run has; it is the most that `keyframe profile` takes.
const TRACKED_EPOCHS_MAX: &str = "100000";

/// The hosts and files for guests.
pub struct TestBed<'a> {
    pub options: &'a Options,
    pub interrupt: &'a Interrupt,
    pub files: &'a SmallGuest,
    pub network: Network,
    keyframe: PathBuf,
    dir: PathBuf,
    runs: u32,
}

/// A ready guest, protected if its setup says so. Dropping it kills all processes on the hosts.
pub struct GuestOnHosts<'a> {
    pub guest: RunningGuest,
    test_bed: &'a TestBed<'a>,
    dir: PathBuf,
    is_replicated: bool,
    tracker: Option<Tracker>,
    /// Standby and witness.
    _others: Vec<RunningGuest>,
}

/// `keyframe profile` on a running guest.
struct Tracker {
    process: RunningGuest,
    started: Instant,
}

/// The CPU time of Keyframe's processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTime {
    /// On the guest's host, without its QEMU.
    pub engine_ns: f64,
    /// On the standby's host.
    pub standby_ns: f64,
}

impl CpuTime {
    /// Returns the difference to `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            engine_ns: self.engine_ns - before.engine_ns,
            standby_ns: self.standby_ns - before.standby_ns,
        }
    }
}

/// Totals of the epochs of a run. If they were only tracked, their number and pages alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpochTotals {
    pub epochs: f64,
    pub wire_bytes: f64,
    pub raw_bytes: f64,
    /// Sums over the epochs, as the following fields.
    pub pages: f64,
    pub pause_ns: f64,
    pub transfer_ns: f64,
    pub suspended_ns: f64,
}

impl EpochTotals {
    /// Returns the difference to `before`.
    pub fn since(self, before: Self) -> Self {
        self.each(before, |now, before| now - before)
    }

    /// Returns the sum with `more`.
    pub fn plus(self, more: Self) -> Self {
        self.each(more, |one, other| one + other)
    }

    fn each(self, other: Self, of: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            epochs: of(self.epochs, other.epochs),
            wire_bytes: of(self.wire_bytes, other.wire_bytes),
            raw_bytes: of(self.raw_bytes, other.raw_bytes),
            pages: of(self.pages, other.pages),
            pause_ns: of(self.pause_ns, other.pause_ns),
            transfer_ns: of(self.transfer_ns, other.transfer_ns),
            suspended_ns: of(self.suspended_ns, other.suspended_ns),
        }
    }
}

impl<'a> TestBed<'a> {
    /// Makes a test bed with its files in `dir`, which is made if there is none.
    pub fn new(
        options: &'a Options,
        interrupt: &'a Interrupt,
        files: &'a SmallGuest,
        network: Network,
        dir: &Path,
    ) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io("make a directory"))?;
        let key = dir.join("KEY");
        std::fs::write(&key, "a key of this benchmark's own").map_err(Error::io("write a key"))?;
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))
            .map_err(Error::io("protect a key"))?;
        let keyframe =
            std::path::absolute(&options.keyframe).map_err(Error::io("find keyframe"))?;
        Ok(Self { options, interrupt, files, network, keyframe, dir: dir.to_owned(), runs: 0 })
    }

    /// Starts a guest: under plain QEMU without a `setup`. `extra` returns further options of QEMU.
    pub fn start(
        &mut self,
        setup: Option<Setup>,
        append: &str,
        extra: &dyn Fn(&Path) -> Result<Vec<String>, Error>,
    ) -> Result<GuestOnHosts<'_>, Error> {
        self.runs += 1;
        let dir = self.dir.join(format!("run{}", self.runs));
        for host in ["a", "b", "c", "t"] {
            std::fs::create_dir_all(dir.join(host)).map_err(Error::io("make a directory"))?;
        }
        let mut qemu = self.files.command(MEM, &format!("{append} kf.ip=10.78.0.15"));
        qemu.extend(
            [
                "-netdev",
                "tap,id=n0,ifname=tap0,script=no,downscript=no",
                "-device",
                "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:15,romfile=",
            ]
            .map(str::to_owned),
        );
        qemu.extend(extra(&dir)?);
        let network = &self.network;
        let mut others = Vec::new();
        let mut line = qemu;
        let mut is_replicated = false;
        if let Some(Setup::Replicated { policy, hold_output }) = setup {
            is_replicated = true;
            let role = |words: &[&str]| self.keyframe(words);
            let settings = ["--witness", WITNESS, "--policy", policy, "--hold-output", hold_output];
            let witness = role(&["witness", "--listen", WITNESS, "--dir", "w"]);
            let mut witness = self.spawn(&network.c, &dir, "c", &witness)?;
            let listening = witness.wait_for("witness at", LISTEN_S);
            listening.map_err(|e| Error::failed(e.to_string(), errors_of(&dir, "c")))?;
            others.push(witness);
            let standby =
                role(&[&["standby", "--listen", STANDBY, "--dir", "s"], &settings[..]].concat());
            others.push(self.spawn(&network.b, &dir, "b", &standby)?);
            self.interrupt
                .wait("the standby listens", LISTEN_S as f64, || {
                    Ok(errors_of(&dir, "b").contains("waits for a primary").then_some(()))
                })
                .map_err(|e| Error::failed(e.to_string(), errors_of(&dir, "b")))?;
            let mut protect = role(
                &[&["protect", "--standby", STANDBY, "--dir", "p"], &settings[..], &["--"]]
                    .concat(),
            );
            protect.extend(line);
            line = protect;
        }
        let guest = self.spawn(&network.a, &dir, "a", &line)?;
        // From here on, dropping it ends all processes.
        let mut running = GuestOnHosts {
            guest,
            test_bed: self,
            dir,
            is_replicated,
            tracker: None,
            _others: others,
        };
        self.until_ready(&mut running)?;
        if let Some(Setup::Tracked { interval }) = setup {
            running.tracker = Some(self.track(&running, interval)?);
        }
        if is_replicated {
            self.interrupt.wait("the guest is protected", PROTECTED_S, || {
                let state =
                    running.replication()?.get("state").and_then(Value::as_str).map(str::to_owned);
                Ok((state.as_deref() == Some("protected")).then_some(()))
            })?;
        }
        Ok(running)
    }

    fn track(&self, running: &GuestOnHosts<'_>, interval: &str) -> Result<Tracker, Error> {
        let qemu = running.guest.pid().to_string();
        let line = self.keyframe(&[
            "profile",
            "--json",
            "--quiet",
            "--samples",
            TRACKED_EPOCHS_MAX,
            "--epochs",
            interval,
            &qemu,
        ]);
        let started = Instant::now();
        Ok(Tracker { process: self.spawn(&self.network.a, &running.dir, "t", &line)?, started })
    }

    fn until_ready(&self, running: &mut GuestOnHosts<'_>) -> Result<(), Error> {
        for _ in 0..BOOT_S * 5 {
            self.interrupt.check()?;
            if running.guest.at("KF READY").is_some() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        let ready = running.guest.wait_for("KF READY", 1);
        ready.map(drop).map_err(|e| Error::failed(e.to_string(), errors_of(&running.dir, "a")))
    }

    fn keyframe(&self, words: &[&str]) -> Vec<String> {
        let program = self.keyframe.display().to_string();
        std::iter::once(program).chain(words.iter().map(ToString::to_string)).collect()
    }

    /// Runs `line` on a host. The process ends with this one, and not by a key in the terminal, because
    /// the processes must end in an order.
    fn spawn(
        &self,
        host: &Host,
        dir: &Path,
        name: &str,
        line: &[String],
    ) -> Result<RunningGuest, Error> {
        let log = dir.join(format!("{name}.log"));
        let log =
            std::fs::File::create(&log).map_err(Error::io(format!("make {}", log.display())))?;
        let mut command = host.command("setpriv");
        command.args(["--pdeathsig", "TERM", "--"]).args(line).current_dir(dir.join(name));
        command.env("XDG_RUNTIME_DIR", dir.join(name)).env("KEYFRAME_KEY", self.dir.join("KEY"));
        RunningGuest::spawn(command.stderr(Stdio::from(log)).process_group(0))
    }
}

/// Returns the standard error of a host's process.
fn errors_of(dir: &Path, name: &str) -> String {
    std::fs::read_to_string(dir.join(format!("{name}.log"))).unwrap_or_default()
}

impl<'a> GuestOnHosts<'a> {
    /// Returns its test bed.
    pub fn test_bed(&self) -> &'a TestBed<'a> {
        self.test_bed
    }

    /// Returns the replication status from `keyframe status`.
    fn replication(&self) -> Result<Value, Error> {
        let mut command = Command::new(&self.test_bed.keyframe);
        command.args(["status", "--json"]).env("XDG_RUNTIME_DIR", self.dir.join("a"));
        let output = command.output().map_err(Error::io("run keyframe status"))?;
        let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Ok(all.get(0).and_then(|vm| vm.get("replication")).cloned().unwrap_or_default())
    }

    /// Returns the epochs that were sent so far; none without a standby.
    pub fn epochs(&self) -> Result<EpochTotals, Error> {
        if !self.is_replicated {
            return Ok(EpochTotals::default());
        }
        let all = self.replication()?;
        let of = |key: &str| {
            let found = all.get(key).and_then(Value::as_f64);
            found.ok_or_else(|| {
                Error::failed("read keyframe status", format!("no {key}: {}", self.report()))
            })
        };
        Ok(EpochTotals {
            epochs: of("epochs")?,
            wire_bytes: of("all_wire_bytes")?,
            raw_bytes: of("all_raw_bytes")?,
            pages: of("all_pages")?,
            pause_ns: of("all_pause_ns")?,
            transfer_ns: of("all_transfer_ns")?,
            suspended_ns: of("all_suspended_ns")?,
        })
    }

    /// Returns the CPU time so far of the processes that run now.
    pub fn cpu_time(&self) -> CpuTime {
        let is_qemu = |pid: &u32| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.starts_with("qemu")
        };
        let of = |pids: Vec<u32>| {
            let times = pids.into_iter().filter(|pid| !is_qemu(pid)).filter_map(process_cpu_time);
            times.map(|time| time.as_nanos() as f64).sum()
        };
        let Network { a, b, .. } = &self.test_bed.network;
        CpuTime { engine_ns: of(a.pids()), standby_ns: of(b.pids()) }
    }

    /// Ends the tracking of the guest's writes, and returns the epochs of `seconds`, as the mean over
    /// the time of the tracking; `None` if they were not tracked. Fails if the tracking had ended.
    pub fn end_tracking(&self, seconds: u16) -> Result<Option<EpochTotals>, Error> {
        let Some(Tracker { process, started }) = &self.tracker else { return Ok(None) };
        let tracked_s = started.elapsed().as_secs_f64();
        if let Some(pid) = rustix::process::Pid::from_raw(process.pid() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        }
        let read = || {
            let lines: Vec<String> = process.lines("").into_iter().map(|line| line.text).collect();
            Ok(serde_json::from_str::<Value>(&lines.join("\n")).ok())
        };
        let ended = self.test_bed.interrupt.wait("the tracking ends", UNTRACKED_S, read);
        let profile = ended.map_err(|e| Error::failed(e.to_string(), self.report()))?;
        let row = &profile["curves"][0]["rows"][0];
        let (epochs, pages) = (row["samples"].as_f64(), row["pages"]["mean"].as_f64());
        let (Some(epochs), Some(pages), Some(false)) =
            (epochs, pages, profile["complete"].as_bool())
        else {
            let problem = format!("it ended early or measured nothing: {profile}");
            return Err(Error::failed("track the guest's writes", problem));
        };
        let epochs = epochs / tracked_s * f64::from(seconds);
        Ok(Some(EpochTotals { epochs, pages: epochs * pages, ..EpochTotals::default() }))
    }

    /// Fails unless the guest is still protected, if it has a standby.
    pub fn check(&self) -> Result<(), Error> {
        if !self.is_replicated {
            return Ok(());
        }
        let state = self.replication()?.get("state").and_then(Value::as_str).map(str::to_owned);
        match state.as_deref() {
            Some("protected") => Ok(()),
            other => Err(Error::failed(
                "measure a protected guest",
                format!("its state is {other:?}: {}", self.report()),
            )),
        }
    }

    /// Returns the standard error of all its processes.
    pub fn report(&self) -> String {
        ["a", "b", "c", "t"]
            .map(|name| format!("{name}: {}", errors_of(&self.dir, name).trim()))
            .join("; ")
    }
}

impl Drop for GuestOnHosts<'_> {
    fn drop(&mut self) {
        // The standby first, or it would take over.
        for host in [&self.test_bed.network.b, &self.test_bed.network.a, &self.test_bed.network.c] {
            host.kill_all();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
