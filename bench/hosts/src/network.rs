//! A network of three hosts.
//!
//! ```text
//!   a: the VM's first host, tap0 ─ bridge ─ eth0 10.78.0.1 ──┐
//!   b: its standby's,       tap0 ─ bridge ─ eth0 10.78.0.2 ──┼── links of one rate ── bridge
//!   c: clients and witness,        bridge ─ eth0 10.78.0.3 ──┘
//! ```

use crate::Host;
use std::io;

/// The rate of a link.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// In the syntax of `tc`, for example `1gbit`.
    rate: &'static str,
    /// Largest burst, in the syntax of `tc`.
    burst: &'static str,
}

impl Rate {
    /// 1 Gbit/s.
    pub const GIGABIT: Self = Self { rate: "1gbit", burst: "256k" };
    /// 10 Gbit/s.
    pub const TEN_GIGABIT: Self = Self { rate: "10gbit", burst: "2m" };

    /// Limits the rate at which `host` sends on `link`.
    pub(crate) fn limit(self, host: &Host, link: &str) -> io::Result<()> {
        let Self { rate, burst } = self;
        host.ok(&format!(
            "tc qdisc replace dev {link} root tbf rate {rate} burst {burst} latency 100ms"
        ))
    }
}

/// A direction of traffic on a host's link, seen from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Packets that the host receives.
    In,
    /// Packets that the host sends.
    Out,
}

/// Three hosts with a switch between them.
pub struct Network {
    /// The host on which the VM starts.
    pub a: Host,
    /// The standby's host.
    pub b: Host,
    /// The host of clients and of the witness.
    pub c: Host,
    switch: Host,
    rate: Rate,
}

impl Network {
    /// Makes the hosts and their links. Each link has `rate` in each direction.
    pub fn new(rate: Rate) -> io::Result<Self> {
        let switch = Host::new()?;
        switch.ok("ip link add bridge type bridge")?;
        switch.ok("ip link set bridge up")?;
        let linked = |name: &str, n: u8| -> io::Result<Host> {
            let host = Host::new()?;
            switch.ok(&format!(
                "ip link add to-{name} type veth peer name eth0 netns {}",
                host.holder_pid()
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
            rate.limit(&switch, &format!("to-{name}"))?;
            rate.limit(&host, "eth0")?;
            Ok(host)
        };
        let (a, b, c) = (linked("a", 1)?, linked("b", 2)?, linked("c", 3)?);
        Ok(Self { a, b, c, switch, rate })
    }

    /// Cuts the link of `host` (`a`, `b`, `c`), or restores it if `cut` is false.
    pub fn cut(&self, host: &str, cut: bool) -> io::Result<()> {
        self.switch.ok(&format!("ip link set to-{host} {}", if cut { "down" } else { "up" }))
    }

    /// Drops every packet of `host` in one direction, as one broken wire does, or restores the link if
    /// `mute` is false.
    pub fn mute(&self, host: &str, direction: Direction, mute: bool) -> io::Result<()> {
        let (end, link) = match direction {
            Direction::In => (&self.switch, format!("to-{host}")),
            Direction::Out => (self.host(host), "eth0".into()),
        };
        if mute {
            // Every packet is larger than this burst.
            return end.ok(&format!(
                "tc qdisc replace dev {link} root tbf rate 8bit burst 1 latency 1ms"
            ));
        }
        self.rate.limit(end, &link)
    }

    /// Adds a second link, between `a` (10.79.0.1) and `b` (10.79.0.2).
    pub fn add_second_path(&self) -> io::Result<()> {
        let (a, b) = (self.a.holder_pid(), self.b.holder_pid());
        self.switch
            .ok(&format!("ip link add eth1 netns {a} type veth peer name eth1 netns {b}"))?;
        for (n, host) in [(1, &self.a), (2, &self.b)] {
            host.ok(&format!("ip addr add 10.79.0.{n}/24 dev eth1"))?;
            host.ok("ip link set eth1 up")?;
        }
        Ok(())
    }

    /// Cuts the second link, or restores it if `cut` is false.
    pub fn cut_second_path(&self, cut: bool) -> io::Result<()> {
        self.a.ok(&format!("ip link set eth1 {}", if cut { "down" } else { "up" }))
    }

    /// Returns the host named `a` or `b`; `c` for every other name.
    pub fn host(&self, host: &str) -> &Host {
        match host {
            "a" => &self.a,
            "b" => &self.b,
            _ => &self.c,
        }
    }
}
