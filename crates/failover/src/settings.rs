//! The options of both roles on the command line.

use super::frames::Arbiter;
use crate::error::{Error, Result};
use crate::event::{FailoverEvent, SharedFailoverEventSink};
use keyframe_link::{Party, SharedKey};
use keyframe_replication::Arbitration;
use keyframe_scheduling::replication::{
    AdaptiveParameters, LatencyTarget, OverheadTarget, ReplicationPolicy,
};
use keyframe_units::duration_ns;
use rustix::process::{Pid, Signal, kill_process_group};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest time of the fence hook.
const FENCE_TIMEOUT: Duration = Duration::from_mins(2);

/// The options that `keyframe protect` and `keyframe standby` share, as the user gives them.
#[derive(clap::Args, Clone, Debug)]
pub struct FailoverSettings {
    #[command(flatten)]
    key: HostKey,
    /// The witness (keyframe witness), which lets at most one host run the VM: failover is
    /// automatic
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "fence_with")]
    witness: Option<String>,
    /// A command that switches the other host off, and succeeds only if that is off for sure:
    /// failover is automatic. It finds the VM's name in KEYFRAME_VM and its own host's role in
    /// KEYFRAME_ROLE
    #[arg(long, value_name = "COMMAND")]
    fence_with: Option<String>,
    /// How long the other host is silent before it is taken as lost
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = humantime::parse_duration)]
    detection: Duration,
    /// When epochs are taken: adaptive, paper (Gerofi & Ishikawa 2011, figure 6) or fixed:INTERVAL
    #[arg(long, value_name = "POLICY", default_value = "adaptive")]
    policy: ReplicationPolicy,
    /// With adaptive: take as few epochs as keep packets from waiting longer than this
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    latency: Option<Duration>,
    /// With adaptive: the largest part of the guest's time that epochs may take
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=95), conflicts_with = "latency")]
    overhead: Option<u32>,
    /// What the guest sends that waits until the standby has the state that sent it
    #[arg(long, value_name = "OUTPUT", default_value = "net")]
    hold_output: HeldOutput,
    /// Connections that carry pages side by side
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    streams: u8,
    /// Memory for what the standby has of the pages sent last, in MiB: changes are sent against it
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    wire_memory: usize,
    /// Hash all of RAM in each pause and at the standby, and compare: pauses as long as that takes
    #[arg(long)]
    verify: bool,
    /// Nothing but errors
    #[arg(long, short)]
    quiet: bool,
}

/// The output of a protected VM that leaves its host only when the standby holds the state that
/// produced it.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldOutput {
    /// Its packets
    Net,
    /// Nothing: after a takeover clients may have seen answers that the guest has forgotten
    None,
}

/// The settings of this host after names are resolved and the key is read.
#[derive(Clone)]
pub struct FailoverSetup {
    /// This host's key and certificate, with which it connects to hosts that share the key.
    pub party: Party,
    /// The address of the witness. `None` without one.
    pub witness: Option<SocketAddr>,
    /// The command that switches the other host off. `None` without one.
    pub fence_with: Option<String>,
    /// The arbitration that decides which host runs the VM.
    pub arbitration: Arbitration,
    /// The detection time in nanoseconds.
    pub detection_ns: u64,
    /// The policy that decides when the VM is checkpointed.
    pub policy: ReplicationPolicy,
    /// The parameters of the adaptive policy.
    pub parameters: AdaptiveParameters,
    /// The output that waits for the standby.
    pub hold_output: HeldOutput,
    /// The number of data connections.
    pub streams: usize,
    /// The memory for copies of the standby's pages in bytes, shared by all streams.
    pub wire_bytes: usize,
    /// True if the standby's RAM is compared with the VM's at each epoch.
    pub verify: bool,
    /// Receives the events of this host and of its VM's session.
    pub events: SharedFailoverEventSink,
}

/// The key that all hosts of a protected VM share.
#[derive(clap::Args, Clone, Debug)]
pub struct HostKey {
    /// The key that all hosts share: a file for its owner's eyes alone
    #[arg(long, value_name = "FILE", env = "KEYFRAME_KEY")]
    key: Option<PathBuf>,
}

impl HostKey {
    /// Reads the key, and creates the identity that proves the key to the other hosts. Errors:
    /// [`Error::NoKey`] if no key file is named; [`Error::Link`] if the key cannot be read or used.
    pub fn party(&self) -> Result<Party> {
        let path = self.key.as_ref().ok_or(Error::NoKey)?;
        Ok(Party::new(&SharedKey::read(path)?)?)
    }
}

impl FailoverSettings {
    /// Returns true if the user wants to read errors only.
    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Reads the key and resolves the addresses. `events` receives the events of this host and of
    /// its VM's session. Errors: those of [`HostKey::party`] and of [`address`];
    /// [`Error::Detection`] and [`Error::NotAdaptive`] if an option has an invalid value.
    pub fn resolve(&self, events: SharedFailoverEventSink) -> Result<FailoverSetup> {
        let party = self.key.party()?;
        let witness = self.witness.as_deref().map(address).transpose()?;
        let arbitration = match (&self.witness, &self.fence_with) {
            (Some(_), _) => Arbitration::Witness,
            (None, Some(_)) => Arbitration::Fencing,
            (None, None) => Arbitration::Manual,
        };
        if !(Duration::from_millis(100)..=Duration::from_mins(5)).contains(&self.detection) {
            return Err(Error::Detection);
        }
        let mut parameters = AdaptiveParameters::default();
        if self.policy != ReplicationPolicy::Adaptive
            && (self.latency.is_some() || self.overhead.is_some())
        {
            return Err(Error::NotAdaptive(self.policy));
        }
        if let Some(latency) = self.latency {
            parameters.latency = Some(LatencyTarget { ns: duration_ns(latency) });
        }
        if let Some(percent) = self.overhead {
            parameters.overhead = Some(OverheadTarget { percent: f64::from(percent) });
        }
        Ok(FailoverSetup {
            party,
            witness,
            fence_with: self.fence_with.clone(),
            arbitration,
            detection_ns: duration_ns(self.detection),
            policy: self.policy,
            parameters,
            hold_output: self.hold_output,
            streams: self.streams.into(),
            wire_bytes: self.wire_memory << 20,
            verify: self.verify,
            events,
        })
    }
}

impl FailoverSetup {
    /// Returns the arbiter, as the hosts tell it to each other.
    pub fn arbiter(&self) -> Arbiter {
        match self.arbitration {
            Arbitration::Witness => Arbiter::Witness,
            Arbitration::Fencing => Arbiter::Fencing,
            Arbitration::Manual => Arbiter::Manual,
        }
    }

    /// Runs the fence hook for the VM `vm` and waits for its end, for at most 2 min. `role` is this
    /// host's role. Returns true if the hook reports that the other host is off. Returns false if
    /// the hook fails or takes longer, and if there is none.
    pub fn fence(&self, vm: &str, role: &str) -> bool {
        let Some(text) = &self.fence_with else { return false };
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(text).env("KEYFRAME_VM", vm).env("KEYFRAME_ROLE", role);
        command.stdin(Stdio::null());
        run_hook(&mut command, FENCE_TIMEOUT).unwrap_or_else(|error| {
            self.events.failover_event(&FailoverEvent::FenceHookFailed(error));
            false
        })
    }
}

/// Runs `command`, and waits for its end for at most `timeout`. Returns true if it succeeds. If it
/// takes longer, kills it with all processes that it has started, except those that have left its
/// process group, and returns false. Error: the command cannot be started.
fn run_hook(command: &mut Command, timeout: Duration) -> std::io::Result<bool> {
    let mut child = command.process_group(0).spawn()?;
    let deadline = Instant::now() + timeout;
    loop {
        match child.try_wait() {
            Ok(Some(exit)) => return Ok(exit.success()),
            Ok(None) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            _ => {
                // The child has not been waited for, so its group's number is not another's.
                let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
                let _ = child.wait();
                return Ok(false);
            }
        }
    }
}

/// Returns the first of the addresses to which `text`, a host and a port, resolves. Errors:
/// [`Error::Address`] if it cannot be resolved; [`Error::NoAddress`] if there is no address.
pub fn address(text: &str) -> Result<SocketAddr> {
    let bad = |source| Error::Address { text: text.to_owned(), source };
    let mut found = text.to_socket_addrs().map_err(bad)?;
    found.next().ok_or_else(|| Error::NoAddress(text.to_owned()))
}

/// Returns a random number other than 0. Error: [`Error::Random`] if the kernel gives none.
pub fn random() -> Result<u64> {
    Ok(getrandom::u64().map_err(Error::Random)?.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn shell(text: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(text);
        command
    }

    #[test]
    fn a_hook_succeeds_as_its_command_does() {
        let timeout = Duration::from_mins(2);
        assert!(run_hook(&mut shell("true"), timeout).unwrap());
        assert!(!run_hook(&mut shell("false"), timeout).unwrap());
        run_hook(&mut Command::new("/no/such/program"), timeout).unwrap_err();
    }

    /// It would go on to switch hosts off, whatever was decided meanwhile.
    #[test]
    fn a_hook_that_takes_too_long_leaves_no_process() {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut command = shell("sleep 60 & wait");
        command.stdout(writer);
        assert!(!run_hook(&mut command, Duration::from_millis(300)).unwrap());
        // The command has the last other end of the pipe.
        drop(command);
        let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
        let mut ends = [PollFd::new(&reader, PollFlags::IN)];
        assert_eq!(poll(&mut ends, Some(&limit)), Ok(1), "a process of the hook lives");
    }
}
