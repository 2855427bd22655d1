//! The switch: connects sockets with the [`Fabric`], on the calling thread.
//!
//! ```text
//!             hold                      quiesce, then the VMs stop              collect
//!   open ───────────▶ held ──────────────────────────────────────────▶ held ─────────────▶ held
//!    ▲                 │  time limit, or a queue is full                                     │
//!    │                 ▼                                                                     │
//!    │◀── release ── ended (delivers; collect says torn)                                     │
//!    └──────────────────────────── release: what waits is delivered in order ────────────────┘
//! ```
//!
//! While held, what guests send is read at once and queued for its destination. Guests run on; for
//! them a hold is a network that is slow for a moment.
//!
//! Invariants:
//! 1. No frame is lost or doubled by a hold, however it ends.
//! 2. What [`Switch::collect`] returns is everything between the guests: it is refused where QEMU may have dropped a
//!    frame at its stop, or has one that the NIC has not taken.
//! 3. A hold ends by itself after its time limit: guests are never cut off for good.
//! 4. A hostile peer costs its own connection and bounded memory.
//!
//! Left out: who stops the VMs, and when. Reaching the world: every port is a peer like the others.

use crate::fabric::{Fabric, LanKey, Limits, Overflow, PortKey};
use crate::frame::Frame;
use crate::in_flight::{InFlight, PORTS_MAX, PortId, PortInFlight};
use crate::listener::{LanListener, peer_pid};
use crate::port::{Port, Rest, Sent, Taken};
use crate::{Error, Result};
use rustix::event::{Timespec, epoll};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// The most LANs of a switch.
pub const LANS_MAX: usize = 64;
/// How long a hold may last where nothing else is said.
pub const HOLD_MAX: Duration = Duration::from_secs(10);
/// More than a socket holds by default, so that one read takes all that waits.
const READ_BYTES: usize = 512 << 10;
/// How often it is looked at whether QEMU has read what it was sent; the kernel does not tell.
const LOOK_EVERY: Duration = Duration::from_micros(100);
/// How soon sending is tried again where a limit of the user's was met.
const RETRY_AFTER: Duration = Duration::from_millis(1);
/// Connections remembered after their end.
const CLOSED_MAX: usize = 64;
/// What one stopped guest can have sent; more comes from a peer that is none.
const COLLECT_READS_MAX: usize = 1024;

const LAN_TOKENS: u64 = 1 << 62;
/// Tokens from here on are not the switch's own.
pub(crate) const FOREIGN_TOKENS: u64 = 1 << 63;

/// A port as it is now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortStatus {
    /// Which.
    pub port: PortId,
    /// Frames that wait for it.
    pub pending: usize,
    /// Flooded frames that were dropped because too much waited.
    pub dropped: u64,
}

/// A connection that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClosedPort {
    /// Which.
    pub port: PortId,
    /// Why.
    pub reason: String,
}

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ports {
    /// The connections, in the order of [`PortId`].
    pub ports: Vec<PortStatus>,
    /// The newest that have ended, oldest first.
    pub closed: Vec<ClosedPort>,
    /// Nothing is delivered now.
    pub held: bool,
}

enum Hold {
    Open,
    Held { until: Instant },
    Ended { why: String },
}

struct Connection {
    id: PortId,
    port: Port,
    /// What epoll was told to watch.
    watched: epoll::EventFlags,
    /// The socket is full.
    full: bool,
    /// To be tried again at this time.
    retry: Option<Instant>,
}

/// A quiesce under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quiesce {
    began: Instant,
    timeout: Duration,
}

/// The switch.
pub struct Switch {
    epoll: OwnedFd,
    /// Sent along to mark the ends of frames.
    marker: OwnedFd,
    lans: Vec<LanListener>,
    fabric: Fabric,
    connections: BTreeMap<PortKey, Connection>,
    closed: VecDeque<ClosedPort>,
    hold: Hold,
    buffer: Vec<u8>,
    events: Vec<epoll::Event>,
}

impl Switch {
    /// Without a LAN.
    pub fn new() -> Result<Self> {
        Self::with_limits(Limits::default())
    }

    /// As [`Self::new`], with other bounds.
    pub fn with_limits(limits: Limits) -> Result<Self> {
        let marker = std::fs::File::open("/dev/null").map_err(Error::io("open /dev/null"))?.into();
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)
                .map_err(Error::io("create an epoll"))?,
            marker,
            lans: Vec::new(),
            fabric: Fabric::new(limits),
            connections: BTreeMap::new(),
            closed: VecDeque::new(),
            hold: Hold::Open,
            buffer: vec![0; READ_BYTES],
            events: Vec::with_capacity(64),
        })
    }

    /// A LAN of its own for everybody who connects at `path`. The socket is removed when the switch
    /// ends; one that was left behind there is replaced.
    pub fn listen(&mut self, path: &Path) -> Result<()> {
        if self.lans.len() >= LANS_MAX {
            let problem = format!("a switch has {LANS_MAX} LANs at most");
            return Err(Error::Listen { path: path.display().to_string(), problem });
        }
        let lan = LanListener::bind(path)?;
        let token = LAN_TOKENS + self.lans.len() as u64;
        self.watch(lan.as_fd(), token)?;
        self.fabric.add_lan();
        self.lans.push(lan);
        Ok(())
    }

    /// Has [`Self::turn`] report when `fd` can be read, as `token`, from [`FOREIGN_TOKENS`] on.
    pub(crate) fn watch(&self, fd: impl AsFd, token: u64) -> Result<()> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)
            .map_err(Error::io("watch a socket"))
    }

    /// Has it watched for room to write, too.
    pub(crate) fn watch_writable(&self, fd: impl AsFd, token: u64, writable: bool) -> Result<()> {
        let data = epoll::EventData::new_u64(token);
        let flags = if writable {
            epoll::EventFlags::IN | epoll::EventFlags::OUT
        } else {
            epoll::EventFlags::IN
        };
        epoll::modify(&self.epoll, fd, data, flags).map_err(Error::io("watch a socket"))
    }

    /// True where no VM is connected.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// From here on nothing is delivered, for at most `limit`.
    ///
    /// A hold that is on begins anew. What waits from before it is part of it.
    pub fn hold(&mut self, limit: Duration) {
        self.hold = Hold::Held { until: Instant::now() + limit.min(Duration::from_hours(1)) };
        self.fabric.hold();
        for connection in self.connections.values_mut() {
            connection.port.watch();
        }
    }

    /// Waits until each QEMU has taken in all that it was sent, and its NICs too. A NIC that takes
    /// nothing at all for two seconds of a hold (no driver, switched off) counts as one that does
    /// not listen: what waits for it is lost. Error: [`Error::NotQuiet`] with the first port where
    /// that is not so in time; release, and try later.
    pub fn quiesce(&mut self, timeout: Duration) -> Result<()> {
        let quiesce = self.begin_quiesce(timeout)?;
        loop {
            if let Some(result) = self.settled(quiesce) {
                return result;
            }
            self.turn(Some(LOOK_EVERY))?;
        }
    }

    pub(crate) fn begin_quiesce(&self, timeout: Duration) -> Result<Quiesce> {
        self.check_held("quiesce")?;
        Ok(Quiesce { began: Instant::now(), timeout })
    }

    /// How it ended, if it has. To be asked each [`LOOK_EVERY`].
    pub(crate) fn settled(&mut self, quiesce: Quiesce) -> Option<Result<()>> {
        if let Err(e) = self.check_held("quiesce") {
            return Some(Err(e));
        }
        match self.unquiet() {
            None => Some(Ok(())),
            Some((port, problem)) if quiesce.began.elapsed() >= quiesce.timeout => {
                let waited_ms = quiesce.timeout.as_millis() as u64;
                Some(Err(Error::NotQuiet { port, waited_ms, problem: problem.into() }))
            }
            Some(_) => None,
        }
    }

    /// The first port whose QEMU has not taken in everything, and what is seen of it.
    fn unquiet(&mut self) -> Option<(PortId, &'static str)> {
        let mut first = None;
        for connection in self.connections.values_mut() {
            let problem = match connection.port.rest() {
                Ok(Rest::Quiet | Rest::Deaf) => continue,
                Ok(Rest::Sending | Rest::Unread) => {
                    "QEMU does not read what it was sent (its NIC takes no packets)"
                }
                Ok(Rest::Waiting) => "a packet waits in QEMU, because the NIC does not take it",
                // Its end is seen when it is read from.
                Err(_) => "its connection is broken",
            };
            first = first.or(Some((connection.id.clone(), problem)));
        }
        first
    }

    /// All packets between the guests. To be called behind [`Self::quiesce`], when all VMs are
    /// stopped.
    ///
    /// Errors: [`Error::Torn`] where the hold has ended, or where a guest's packets may have been
    /// lost at the stop; [`Error::NotQuiet`].
    pub fn collect(&mut self) -> Result<InFlight> {
        self.check_held("collect packets in flight")?;
        // Who has connected and was not let in yet may have sent, too.
        for lan in 0..self.lans.len() {
            while self.accept(LanKey(lan))? {}
        }
        let keys: Vec<PortKey> = self.connections.keys().copied().collect();
        for key in &keys {
            self.drain(*key)?;
        }
        // Reading may have filled a queue.
        self.check_held("collect packets in flight")?;
        if let Some((port, problem)) = self.unquiet() {
            return Err(Error::NotQuiet { port, waited_ms: 0, problem: problem.into() });
        }
        let mut ports = Vec::with_capacity(self.connections.len());
        for (key, connection) in &self.connections {
            if let Some(reason) = connection.port.torn() {
                return Err(Error::Torn { reason: format!("{}: {reason}", connection.id) });
            }
            let frames = self.fabric.pending(*key).cloned().collect();
            ports.push(PortInFlight { port: connection.id.clone(), frames });
        }
        ports.sort_by(|a, b| a.port.cmp(&b.port));
        Ok(InFlight { ports })
    }

    /// Reads all that `key` has sent.
    fn drain(&mut self, key: PortKey) -> Result<()> {
        for _ in 0..COLLECT_READS_MAX {
            if !self.take(key) {
                return Ok(());
            }
        }
        match self.connections.get(&key) {
            Some(connection) => {
                Err(Error::Torn { reason: format!("{} does not stop sending", connection.id) })
            }
            None => Ok(()),
        }
    }

    /// Delivers what waits, in order, and whatever comes from here on.
    pub fn release(&mut self) {
        self.hold = Hold::Open;
        self.fabric.release();
        self.deliver();
    }

    /// Makes recorded packets wait for the ports that stand for the recorded ones. Only while held.
    /// Nothing is changed where it fails.
    pub fn restore(&mut self, in_flight: &InFlight, stand_ins: &[(PortId, PortId)]) -> Result<()> {
        let operation = "restore packets in flight";
        self.check_held(operation)?;
        let mut placed = Vec::new();
        for recorded in in_flight.ports.iter().filter(|port| !port.frames.is_empty()) {
            let (_, now) =
                stand_ins.iter().find(|(then, _)| *then == recorded.port).ok_or_else(|| {
                    Error::Unmapped { port: recorded.port.clone(), frames: recorded.frames.len() }
                })?;
            let key = self
                .connections
                .iter()
                .find(|(_, connection)| connection.id == *now)
                .map(|(key, _)| *key);
            let unknown = || Error::UnknownPort { port: now.clone(), operation: operation.into() };
            placed.push((key.ok_or_else(unknown)?, &recorded.frames));
        }
        for (key, frames) in placed {
            for frame in frames {
                self.fabric.restore(key, frame);
            }
        }
        Ok(())
    }

    /// Who is connected.
    pub fn ports(&self) -> Ports {
        let status = |(key, connection): (&PortKey, &Connection)| PortStatus {
            port: connection.id.clone(),
            pending: self.fabric.pending(*key).len(),
            dropped: self.fabric.dropped(*key),
        };
        let mut ports: Vec<PortStatus> = self.connections.iter().map(status).collect();
        ports.sort_by(|a, b| a.port.cmp(&b.port));
        let held = matches!(self.hold, Hold::Held { .. });
        Ports { ports, closed: self.closed.iter().cloned().collect(), held }
    }

    fn check_held(&self, operation: &str) -> Result<()> {
        match &self.hold {
            Hold::Held { .. } => Ok(()),
            Hold::Open => Err(Error::NotHeld { operation: operation.into() }),
            Hold::Ended { why } => Err(Error::Torn { reason: why.clone() }),
        }
    }

    /// Ends the hold from here: delivers, and has [`Self::collect`] say why.
    fn end_hold(&mut self, why: String) {
        self.hold = Hold::Ended { why };
        self.fabric.release();
    }

    /// Switches for that long, on this thread.
    pub fn run_for(&mut self, time: Duration) -> Result<()> {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            self.turn(Some(left))?;
            if left.is_zero() {
                return Ok(());
            }
        }
    }

    /// Waits for events for at most `timeout` (without end where `None`) and forwards what came.
    /// Returns the tokens of watched descriptors that are not the switch's own.
    pub(crate) fn turn(&mut self, timeout: Option<Duration>) -> Result<Vec<u64>> {
        self.wait(timeout)?;
        let mut foreign = Vec::new();
        let events = std::mem::take(&mut self.events);
        for event in &events {
            let (token, flags) = (event.data.u64(), event.flags);
            match token {
                FOREIGN_TOKENS.. => foreign.push(token),
                LAN_TOKENS.. => drop(self.accept(LanKey((token - LAN_TOKENS) as usize))?),
                key => self.serve_port(PortKey(key), flags),
            }
        }
        self.events = events;
        if let Hold::Held { until } = self.hold
            && Instant::now() >= until
        {
            self.end_hold("the hold reached its time limit and ended by itself".into());
        }
        self.deliver();
        self.rewatch()?;
        Ok(foreign)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<()> {
        let now = Instant::now();
        let until = match self.hold {
            Hold::Held { until } => Some(until),
            _ => None,
        };
        let due = until.into_iter().chain(self.connections.values().filter_map(|c| c.retry)).min();
        let timeout = match (timeout, due.map(|at| at.saturating_duration_since(now))) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let timeout = timeout.map(|d| Timespec {
            tv_sec: d.as_secs().cast_signed(),
            tv_nsec: d.subsec_nanos().into(),
        });
        self.events.clear();
        match epoll::wait(
            &self.epoll,
            rustix::buffer::spare_capacity(&mut self.events),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(Error::io("wait for packets")(e)),
        }
    }

    fn serve_port(&mut self, key: PortKey, flags: epoll::EventFlags) {
        if let Some(connection) = self.connections.get_mut(&key)
            && flags.contains(epoll::EventFlags::OUT)
        {
            connection.full = false;
        }
        if flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            // What it sent before its end still counts.
            for _ in 0..COLLECT_READS_MAX {
                if !self.take(key) {
                    break;
                }
            }
            self.close(key, "its other end has closed it");
        } else if flags.contains(epoll::EventFlags::IN) && self.fabric.may_read(key) {
            self.take(key);
        }
    }

    /// Reads once from a port and forwards; true where there may be more.
    fn take(&mut self, key: PortKey) -> bool {
        let Some(connection) = self.connections.get_mut(&key) else { return false };
        let mut frames: Vec<Frame> = Vec::new();
        let taken = connection.port.take(&mut self.buffer, &mut frames);
        let overflow =
            frames.iter().fold(None, |full, frame| full.or(self.fabric.receive(key, frame)));
        if let Some(Overflow(full)) = overflow {
            let id = self.connections.get(&full).map(|c| c.id.to_string()).unwrap_or_default();
            self.end_hold(format!("too much waits for {id}, so the hold ended by itself"));
        }
        match taken {
            Ok(Taken::Bytes(_)) => true,
            Ok(Taken::Nothing) => false,
            Ok(Taken::End) => {
                self.close(key, "its other end has closed it");
                false
            }
            Err(reason) => {
                self.close(key, &reason);
                false
            }
        }
    }

    /// Sends to each port what waits for it, as far as its socket takes it.
    fn deliver(&mut self) {
        let mut broken = Vec::new();
        let now = Instant::now();
        for (key, connection) in &mut self.connections {
            if connection.retry.is_some_and(|at| at <= now) {
                connection.retry = None;
            }
            if connection.full || connection.retry.is_some() {
                continue;
            }
            let fabric = &mut self.fabric;
            match connection.port.send(self.marker.as_fd(), || fabric.next(*key)) {
                Ok(Sent::All) => {}
                Ok(Sent::Full) => connection.full = true,
                Ok(Sent::Later) => connection.retry = Some(now + RETRY_AFTER),
                Err(reason) => broken.push((*key, reason)),
            }
        }
        for (key, reason) in broken {
            // It cannot be written to, but what it sent may still wait to be read.
            while self.take(key) {}
            self.close(key, &reason);
        }
    }

    /// Tells epoll what is to be watched now.
    fn rewatch(&mut self) -> Result<()> {
        for (key, connection) in &mut self.connections {
            let mut wanted = epoll::EventFlags::empty();
            wanted.set(epoll::EventFlags::IN, self.fabric.may_read(*key));
            wanted.set(epoll::EventFlags::OUT, connection.full);
            if wanted != connection.watched {
                let data = epoll::EventData::new_u64(key.0);
                epoll::modify(&self.epoll, &connection.port, data, wanted)
                    .map_err(Error::io("watch a port"))?;
                connection.watched = wanted;
            }
        }
        Ok(())
    }

    /// Lets in one that has connected; false where there is none, or no room.
    fn accept(&mut self, lan: LanKey) -> Result<bool> {
        let Some(listener) = self.lans.get(lan.0) else { return Ok(false) };
        let Some(stream) = listener.accept() else { return Ok(false) };
        if self.connections.len() >= PORTS_MAX {
            // Closed by being dropped: the peer sees the end.
            return Ok(false);
        }
        let (name, pid) = (listener.name().to_owned(), peer_pid(&stream));
        let taken: Vec<u32> = self
            .connections
            .values()
            .filter(|c| c.id.lan == name && c.id.pid == pid)
            .map(|c| c.id.number)
            .collect();
        let number =
            (0..PORTS_MAX as u32).find(|number| !taken.contains(number)).unwrap_or_default();
        let key = self.fabric.connect(lan);
        let watched = epoll::EventFlags::IN;
        let data = epoll::EventData::new_u64(key.0);
        epoll::add(&self.epoll, &stream, data, watched).map_err(Error::io("watch a port"))?;
        let id = PortId { lan: name, pid, number };
        let connection =
            Connection { id, port: Port::new(stream), watched, full: false, retry: None };
        self.connections.insert(key, connection);
        Ok(true)
    }

    fn close(&mut self, key: PortKey, reason: &str) {
        self.fabric.disconnect(key);
        // Closing the socket takes it out of the epoll.
        let Some(connection) = self.connections.remove(&key) else { return };
        if self.closed.len() >= CLOSED_MAX {
            self.closed.pop_front();
        }
        self.closed.push_back(ClosedPort { port: connection.id, reason: reason.into() });
    }
}
