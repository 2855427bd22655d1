//! The networks between the VMs of a group, held while it is checkpointed: the switch as the engine
//! and a restore use it.
//!
//! ```text
//!   hold ─▶ quiet ─▶ (all VMs stop) ─▶ collect ─▶ (all VMs run) ─▶ release
//! ```
//!
//! Invariant: a hold that fails, or whose checkpoint fails, is released; the guests' packets are
//! late and never lost.

use crate::error::{Error, Result};
use crate::event::{Event, EventSink};
use keyframe_capture::BoxError;
use keyframe_net::{HOLD_MAX, InFlight, PortId, StandInPort, SwitchRemote};
use keyframe_qemu::cmdline::{NetworkLink, network_links, packet_holders};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The longest time in which VMs receive the packets that were sent to them. A network card without
/// a listener is noticed sooner.
const QUIET_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest time in which restored VMs connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The handle to the switch that connects the VMs of a group.
pub struct Lans {
    remote: SwitchRemote,
    held: bool,
}

impl Lans {
    /// Starts a switch that listens at the sockets `paths`. Error: the process cannot be started,
    /// or a socket cannot be made.
    pub fn start(paths: &[PathBuf]) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("keyframe").arg("__switch");
        let mut remote = SwitchRemote::spawn(&mut command)?;
        for path in paths {
            remote.listen(path)?;
        }
        Ok(Self { remote, held: false })
    }

    /// Takes control of the user's switch (`keyframe switch`) through its control socket `control`.
    /// Error: no switch answers there.
    pub fn connect(control: &Path) -> Result<Self> {
        Ok(Self { remote: SwitchRemote::connect(control)?, held: false })
    }

    /// Stops the delivery of packets and waits until all sent packets have arrived at the switch.
    /// Errors: the switch does not answer; a VM does not take its packets in time. After an error
    /// delivery goes on.
    pub fn hold(&mut self) -> Result<(), BoxError> {
        self.held = true;
        let quiet = self.remote.hold(HOLD_MAX).and_then(|()| self.remote.quiesce(QUIET_TIMEOUT));
        if quiet.is_err() {
            self.release();
        }
        Ok(quiet?)
    }

    /// Returns true if the switch has ended, or does not answer any more: its networks are dead.
    pub fn is_lost(&mut self) -> bool {
        self.remote.is_lost()
    }

    /// Returns the packets in flight, encoded for the checkpoint. All VMs must be paused. Errors:
    /// the switch does not answer; the packets cannot be encoded.
    pub fn collect(&mut self) -> Result<Vec<u8>, BoxError> {
        Ok(self.remote.collect()?.encode()?)
    }

    /// Delivers the held packets, and holds no more.
    pub fn release(&mut self) {
        if std::mem::take(&mut self.held) {
            // A switch that does not hear us releases by itself.
            let _ = self.remote.release();
        }
    }

    /// Holds delivery and queues the packets of a checkpoint for restored VMs, once these are
    /// connected. `pids` pairs the process id of each recorded VM with that of the restored one.
    /// `now` returns the present socket of a recorded network.
    ///
    /// Error: the switch does not answer, or a recorded port has no VM.
    pub fn restore(
        &mut self,
        in_flight: &InFlight,
        pids: &[(u32, u32)],
        now: impl Fn(&str) -> String,
    ) -> Result<()> {
        let stands_in = |port: &PortId| {
            let (_, pid) = pids.iter().find(|(then, _)| *then == port.pid)?;
            let present = PortId { lan: now(&port.lan), pid: *pid, number: port.number };
            Some(StandInPort { recorded: port.clone(), present })
        };
        let ports: Vec<StandInPort> =
            in_flight.ports.iter().filter_map(|recorded| stands_in(&recorded.port)).collect();
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        loop {
            let there = self.remote.ports()?.ports;
            let is_there = |port: &StandInPort| there.iter().any(|one| one.port == port.present);
            let missing = ports.iter().find(|port| !is_there(port));
            match missing {
                None => break,
                Some(port) if Instant::now() >= deadline => {
                    return Err(Error::NotConnected { port: port.present.to_string() });
                }
                Some(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        self.held = true;
        self.remote.hold(HOLD_MAX)?;
        Ok(self.remote.restore(in_flight, &ports)?)
    }

    /// Returns the sockets of the switch's networks to which VMs are connected. Error: the switch
    /// does not answer.
    pub fn connected(&mut self) -> Result<Vec<PathBuf>> {
        let ports = self.remote.ports()?.ports;
        let mut lans: Vec<PathBuf> =
            ports.into_iter().map(|status| status.port.lan.into()).collect();
        lans.dedup();
        Ok(lans)
    }

    /// Releases held packets and gives up the control of the switch. A switch that
    /// [`Self::start`] started ends when its last VM has disconnected.
    pub fn end(mut self) {
        self.release();
        let _ = self.remote.end();
    }
}

/// Warns of links of a group's member that no checkpoint can hold.
pub fn report_loose_links(
    vm: &str,
    words: &[String],
    directory: &Path,
    lans: &[PathBuf],
    events: &dyn EventSink<Event>,
) {
    let is_held = |link: &NetworkLink| {
        link.lan.as_ref().is_some_and(|path| lans.contains(&directory.join(path)))
    };
    for link in network_links(words).iter().filter(|link| link.may_meet_others() && !is_held(link))
    {
        events.event(&Event::LooseLink { vm: vm.into(), option: link.option.clone() });
    }
    for option in if lans.is_empty() { Vec::new() } else { packet_holders(words) } {
        events.event(&Event::PacketBuffer { vm: vm.into(), option });
    }
}
