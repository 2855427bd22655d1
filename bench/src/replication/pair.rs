//! The guest on hosts of its own: plain QEMU, or `keyframe protect` with a standby and a witness.

use crate::guest::Guest as Files;
use crate::interrupt::Interrupt;
use crate::vm::Guest;
use crate::{Error, Options};
use keyframe_test_hosts::{Host, Network};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const WITNESS: &str = "10.78.0.3:7431";
const STANDBY: &str = "10.78.0.2:7430";
/// Of all guests here.
const MEM: &str = "256M";
/// How long witness and standby may take until they listen, a guest to boot, and until it is
/// protected.
const ROLE_S: u64 = 30;
const BOOT_S: u64 = 120;
const PROTECTED_S: f64 = 90.0;

/// Where guests are run.
pub struct Lab<'a> {
    pub options: &'a Options,
    pub interrupt: &'a Interrupt,
    pub files: &'a Files,
    pub network: Network,
    keyframe: PathBuf,
    dir: PathBuf,
    runs: u32,
}

/// A guest that is ready, and protected if it is to be. Dropping it is a loss of power on all
/// hosts.
pub struct Running<'a> {
    pub guest: Guest,
    lab: &'a Lab<'a>,
    dir: PathBuf,
    /// Standby and witness.
    _others: Vec<Guest>,
}

/// What has travelled to the standby by now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Travelled {
    pub epochs: f64,
    pub wire_bytes: f64,
    pub raw_bytes: f64,
    /// Sums over the epochs.
    pub pages: f64,
    pub pause_ns: f64,
    pub transfer_ns: f64,
    pub suspended_ns: f64,
}

impl Travelled {
    /// Since `before`.
    pub fn since(self, before: Self) -> Self {
        self.each(before, |now, before| now - before)
    }

    /// This and `more`.
    pub fn and(self, more: Self) -> Self {
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

impl<'a> Lab<'a> {
    /// With its files in `dir`.
    pub fn new(
        options: &'a Options,
        interrupt: &'a Interrupt,
        files: &'a Files,
        network: Network,
        dir: &Path,
    ) -> Result<Self, Error> {
        let key = dir.join("KEY");
        std::fs::write(&key, "a key of this benchmark's own").map_err(Error::io("write a key"))?;
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))
            .map_err(Error::io("protect a key"))?;
        let keyframe =
            std::path::absolute(&options.keyframe).map_err(Error::io("find keyframe"))?;
        Ok(Self { options, interrupt, files, network, keyframe, dir: dir.to_owned(), runs: 0 })
    }

    /// Starts the guest: under `policy` of `keyframe protect`, else plain. `extra` are QEMU's words
    /// beside the network.
    pub fn start(
        &mut self,
        policy: Option<&str>,
        append: &str,
        extra: &dyn Fn(&Path) -> Result<Vec<String>, Error>,
    ) -> Result<Running<'_>, Error> {
        self.runs += 1;
        let dir = self.dir.join(format!("run{}", self.runs));
        for host in ["a", "b", "c"] {
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
        if let Some(policy) = policy {
            let role = |words: &[&str]| self.keyframe(words);
            let settings = ["--witness", WITNESS, "--policy", policy];
            let witness = role(&["witness", "--listen", WITNESS, "--dir", "w"]);
            let mut witness = self.spawn(&network.c, &dir, "c", &witness)?;
            let listening = witness.wait_for("witness at", ROLE_S);
            listening.map_err(|e| Error::failed(e.to_string(), said(&dir, "c")))?;
            others.push(witness);
            let standby =
                role(&[&["standby", "--listen", STANDBY, "--dir", "s"], &settings[..]].concat());
            others.push(self.spawn(&network.b, &dir, "b", &standby)?);
            self.interrupt
                .wait("the standby listens", ROLE_S as f64, || {
                    Ok(said(&dir, "b").contains("waits for a primary").then_some(()))
                })
                .map_err(|e| Error::failed(e.to_string(), said(&dir, "b")))?;
            let mut protect = role(
                &[&["protect", "--standby", STANDBY, "--dir", "p"], &settings[..], &["--"]]
                    .concat(),
            );
            protect.extend(line);
            line = protect;
        }
        let guest = self.spawn(&network.a, &dir, "a", &line)?;
        // From here on dropping it ends all of them.
        let mut running = Running { guest, lab: self, dir, _others: others };
        self.until_ready(&mut running)?;
        if policy.is_some() {
            self.interrupt.wait("the guest is protected", PROTECTED_S, || {
                let state =
                    running.replication()?.get("state").and_then(Value::as_str).map(str::to_owned);
                Ok((state.as_deref() == Some("protected")).then_some(()))
            })?;
        }
        Ok(running)
    }

    fn until_ready(&self, running: &mut Running<'_>) -> Result<(), Error> {
        for _ in 0..BOOT_S * 5 {
            self.interrupt.check()?;
            if running.guest.at("KF READY").is_some() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        let ready = running.guest.wait_for("KF READY", 1);
        ready.map(drop).map_err(|e| Error::failed(e.to_string(), said(&running.dir, "a")))
    }

    fn keyframe(&self, words: &[&str]) -> Vec<String> {
        let program = self.keyframe.display().to_string();
        std::iter::once(program).chain(words.iter().map(ToString::to_string)).collect()
    }

    /// `line` on a host, which ends when this process does, and not by a key pressed in its
    /// terminal: ends have an order here.
    fn spawn(&self, host: &Host, dir: &Path, name: &str, line: &[String]) -> Result<Guest, Error> {
        let log = dir.join(format!("{name}.log"));
        let log =
            std::fs::File::create(&log).map_err(Error::io(format!("make {}", log.display())))?;
        let mut command = host.command("setpriv");
        command.args(["--pdeathsig", "TERM", "--"]).args(line).current_dir(dir.join(name));
        command.env("XDG_RUNTIME_DIR", dir.join(name)).env("KEYFRAME_KEY", self.dir.join("KEY"));
        Guest::spawn(command.stderr(Stdio::from(log)).process_group(0))
    }
}

/// What was said on standard error of a host's process.
fn said(dir: &Path, name: &str) -> String {
    std::fs::read_to_string(dir.join(format!("{name}.log"))).unwrap_or_default()
}

impl<'a> Running<'a> {
    /// Where it runs.
    pub fn lab(&self) -> &'a Lab<'a> {
        self.lab
    }

    /// What `keyframe status` says of the replication.
    fn replication(&self) -> Result<Value, Error> {
        let mut command = Command::new(&self.lab.keyframe);
        command.args(["status", "--json"]).env("XDG_RUNTIME_DIR", self.dir.join("a"));
        let output = command.output().map_err(Error::io("run keyframe status"))?;
        let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Ok(all.get(0).and_then(|vm| vm.get("replication")).cloned().unwrap_or_default())
    }

    /// What has travelled so far.
    pub fn travelled(&self) -> Result<Travelled, Error> {
        let all = self.replication()?;
        let of = |key: &str| {
            let found = all.get(key).and_then(Value::as_f64);
            found.ok_or_else(|| {
                Error::failed("read keyframe status", format!("no {key}: {}", self.report()))
            })
        };
        Ok(Travelled {
            epochs: of("epochs")?,
            wire_bytes: of("all_wire_bytes")?,
            raw_bytes: of("all_raw_bytes")?,
            pages: of("all_pages")?,
            pause_ns: of("all_pause_ns")?,
            transfer_ns: of("all_transfer_ns")?,
            suspended_ns: of("all_suspended_ns")?,
        })
    }

    /// It has to be protected still, or what was measured is something else.
    pub fn is_protected(&self) -> Result<(), Error> {
        let state = self.replication()?.get("state").and_then(Value::as_str).map(str::to_owned);
        match state.as_deref() {
            Some("protected") => Ok(()),
            other => Err(Error::failed(
                "measure a protected guest",
                format!("it is {other:?} by now: {}", self.report()),
            )),
        }
    }

    /// What its processes said.
    pub fn report(&self) -> String {
        ["a", "b", "c"].map(|name| format!("{name}: {}", said(&self.dir, name).trim())).join("; ")
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // The standby first, which would take over.
        for host in [&self.lab.network.b, &self.lab.network.a, &self.lab.network.c] {
            host.kill_all();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
