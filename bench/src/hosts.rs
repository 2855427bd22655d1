//! Hosts on this machine, each a network namespace, and a network of three.
//!
//! ```text
//!   a: the VM's first host, tap0 ─ bridge ─ eth0 10.78.0.1 ──┐
//!   b: its standby's,       tap0 ─ bridge ─ eth0 10.78.0.2 ──┼── links of one rate ── bridge
//!   c: clients and witness,        bridge ─ eth0 10.78.0.3 ──┘
//! ```
//!
//! A namespace is there as long as something is in it: the process that holds it ends when its
//! maker does, in whatever way that ends. Only root can make them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a namespace, or the end of what is in it, may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A host: a network namespace.
pub struct Host {
    holder: Child,
    namespace: u64,
}

impl Host {
    /// One with nothing in it.
    pub fn new() -> io::Result<Self> {
        let mut command = Command::new("unshare");
        // It reads what never comes, until whoever could write it is gone.
        command
            .args(["--net", "--", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0);
        let mut holder = command.spawn()?;
        let own = namespace_of(std::process::id());
        let deadline = Instant::now() + PATIENCE;
        loop {
            let there = namespace_of(holder.id());
            if let Some(namespace) = there.filter(|_| there != own) {
                return Ok(Self { holder, namespace });
            }
            if holder.try_wait()?.is_some() || Instant::now() > deadline {
                let _ = holder.kill();
                let _ = holder.wait();
                return Err(io::Error::other(
                    "unshare --net made no network namespace (only root can)",
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// A command that runs in it.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg("--").arg(program);
        command.stdin(Stdio::null());
        command
    }

    /// Runs a line in it, which has to succeed.
    pub fn ok(&self, line: &str) -> io::Result<()> {
        let mut words = line.split(' ');
        let mut command = self.command(words.next().unwrap_or_default());
        let output = command.args(words).output()?;
        if output.status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!("{line}: {}", String::from_utf8_lossy(&output.stderr))))
    }

    /// The process that keeps it.
    pub fn holder(&self) -> u32 {
        self.holder.id()
    }

    /// Runs `work` in a thread whose sockets are this host's.
    pub fn inside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<io::Result<T>>> {
        let file = fs::File::open(format!("/proc/{}/ns/net", self.holder.id()))?;
        Ok(std::thread::spawn(move || {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(file.as_fd(), kind)?;
            Ok(work())
        }))
    }

    /// Pids of all that is in it but what holds it, and threads of this process.
    pub fn pids(&self) -> Vec<u32> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let others = pids.filter(|pid| ![self.holder.id(), std::process::id()].contains(pid));
        others.filter(|pid| namespace_of(*pid) == Some(self.namespace)).collect()
    }

    /// Kills all that is in it but what holds it, as a loss of power does.
    pub fn kill_all(&self) {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let pids = self.pids();
            for pid in pids.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid as i32)) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            if pids.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill_all();
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Of a process that has ended, none: nobody has waited for it, maybe.
fn namespace_of(pid: u32) -> Option<u64> {
    fs::metadata(format!("/proc/{pid}/ns/net")).ok().map(|m| m.ino())
}

/// A link's rate, as `tc` says it, and the bytes that may go at once.
#[derive(Clone, Copy, Debug)]
pub struct Rate(&'static str, &'static str);

impl Rate {
    /// 1 Gbit/s.
    pub const GIGABIT: Self = Self("1gbit", "256k");
    /// 10 Gbit/s.
    pub const TEN_GIGABIT: Self = Self("10gbit", "2m");
}

/// A direction on a host's cable, as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// What comes to it.
    In,
    /// What it sends.
    Out,
}

/// Three hosts and a switch between them.
pub struct Network {
    /// The VM's first host.
    pub a: Host,
    /// Its standby's.
    pub b: Host,
    /// The clients' and the witness'.
    pub c: Host,
    switch: Host,
    rate: Rate,
}

impl Network {
    /// With all links of one rate, each way.
    pub fn new(rate: Rate) -> io::Result<Self> {
        let switch = Host::new()?;
        switch.ok("ip link add bridge type bridge")?;
        switch.ok("ip link set bridge up")?;
        let linked = |name: &str, n: u8| -> io::Result<Host> {
            let host = Host::new()?;
            switch.ok(&format!(
                "ip link add to-{name} type veth peer name eth0 netns {}",
                host.holder()
            ))?;
            switch.ok(&format!("ip link set to-{name} master bridge up"))?;
            host.ok("ip link set lo up")?;
            host.ok("ip link set eth0 up")?;
            host.ok("ip link add bridge type bridge")?;
            host.ok("ip link set eth0 master bridge")?;
            host.ok("ip link set bridge up")?;
            host.ok(&format!("ip addr add 10.78.0.{n}/24 dev bridge"))?;
            if n < 3 {
                host.ok("ip tuntap add tap0 mode tap")?;
                host.ok("ip link set tap0 master bridge up")?;
            }
            shape(&switch, &format!("to-{name}"), rate)?;
            shape(&host, "eth0", rate)?;
            Ok(host)
        };
        let (a, b, c) = (linked("a", 1)?, linked("b", 2)?, linked("c", 3)?);
        Ok(Self { a, b, c, switch, rate })
    }

    /// Cuts a host's cable, or mends it.
    pub fn cut(&self, host: &str, cut: bool) -> io::Result<()> {
        self.switch.ok(&format!("ip link set to-{host} {}", if cut { "down" } else { "up" }))
    }

    /// Has a host's cable lose everything one way, as one broken wire does, or mends it.
    pub fn mute(&self, host: &str, way: Way, mute: bool) -> io::Result<()> {
        let (end, link) = match way {
            Way::In => (&self.switch, format!("to-{host}")),
            Way::Out => (self.host(host), "eth0".into()),
        };
        if mute {
            // No packet is as small as what may go at once.
            return end.ok(&format!(
                "tc qdisc replace dev {link} root tbf rate 8bit burst 1 latency 1ms"
            ));
        }
        shape(end, &link, self.rate)
    }

    /// Joins a and b by a cable of their own: 10.79.0.1 and 10.79.0.2.
    pub fn add_second_path(&self) -> io::Result<()> {
        let (a, b) = (self.a.holder(), self.b.holder());
        self.switch
            .ok(&format!("ip link add eth1 netns {a} type veth peer name eth1 netns {b}"))?;
        for (n, host) in [(1, &self.a), (2, &self.b)] {
            host.ok(&format!("ip addr add 10.79.0.{n}/24 dev eth1"))?;
            host.ok("ip link set eth1 up")?;
        }
        Ok(())
    }

    /// Cuts that cable, or mends it.
    pub fn cut_second_path(&self, cut: bool) -> io::Result<()> {
        self.a.ok(&format!("ip link set eth1 {}", if cut { "down" } else { "up" }))
    }

    /// A host by its name.
    pub fn host(&self, host: &str) -> &Host {
        match host {
            "a" => &self.a,
            "b" => &self.b,
            _ => &self.c,
        }
    }
}

fn shape(host: &Host, link: &str, Rate(rate, burst): Rate) -> io::Result<()> {
    host.ok(&format!(
        "tc qdisc replace dev {link} root tbf rate {rate} burst {burst} latency 100ms"
    ))
}
