//! The switch: connects sockets to the [`Fabric`], on the calling thread.
//!
//! ```text
//!             hold                  quiesce, then the VMs stop         collect
//!   open ───────────▶ held ───────────────────────────────────▶ held ─────────▶ held
//!    ▲                 │  time limit, or a queue is full                          │
//!    │                 ▼                                                          │
//!    │◀── release ── ended (delivers; collect fails as torn)                      │
//!    └────────────── release: waiting frames are delivered in order ──────────────┘
//! ```
//!
//! While held, the switch reads at once what guests send and queues it for its destination. Guests
//! run on; a hold looks to them like a network that is slow for a moment.
//!
//! Invariants:
//! 1. A hold loses and duplicates no frame, however it ends.
//! 2. [`Switch::collect`] returns every packet between the guests. It fails if QEMU may have
//!    dropped a frame when its VM stopped, or has a frame that the NIC has not taken.
//! 3. A hold ends by itself after its time limit, so guests never lose their network for good.
//! 4. A hostile peer costs its own connection and bounded memory.
//!
//! Left out: stopping the VMs. A connection to the outside is a peer like the others.

use crate::fabric::{Fabric, LanKey, Overflow, PortKey, SwitchLimits};
use crate::frame::Frame;
use crate::in_flight::{InFlight, PORTS_MAX, PortId, PortInFlight, StandInPort};
use crate::listener::{LanListener, peer_pid};
use crate::port::{Delivery, Port, ReadOutcome, SendOutcome};
use crate::{Error, Result};
use rustix::event::{Timespec, epoll};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// The largest number of LANs of a switch.
pub const LANS_MAX: usize = 64;
/// The time limit of a hold, if the caller names no other.
pub const HOLD_MAX: Duration = Duration::from_secs(10);
/// More than a socket holds by default, so that one read takes all waiting bytes.
const READ_BYTES: usize = 512 << 10;
/// The interval at which the switch asks whether QEMU has read its frames. The kernel sends no
/// event for this.
const LOOK_EVERY: Duration = Duration::from_micros(100);
/// The delay before sending is tried again after a limit of the user was reached.
const RETRY_AFTER: Duration = Duration::from_millis(1);
/// The number of ended connections that are remembered.
const CLOSED_MAX: usize = 64;
/// More reads than one stopped guest can have filled. Only a peer that is not a stopped guest sends
/// more.
const COLLECT_READS_MAX: usize = 1024;

const LAN_TOKENS: u64 = 1 << 62;
/// Tokens from here on belong to descriptors that the switch does not own.
pub(crate) const FOREIGN_TOKENS: u64 = 1 << 63;

/// The state of a connected port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortStatus {
    /// The port.
    pub port: PortId,
    /// The number of frames that wait for it.
    pub pending: usize,
    /// The number of flooded frames that were dropped because its queue was full.
    pub dropped: u64,
}

/// A port whose connection has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClosedPort {
    /// The port.
    pub port: PortId,
    /// The reason why it ended.
    pub reason: String,
}

/// The connections of a switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchPorts {
    /// The open connections, in the order of [`PortId`].
    pub ports: Vec<PortStatus>,
    /// The most recently ended connections, oldest first.
    pub closed: Vec<ClosedPort>,
    /// True if the switch is held and delivers nothing.
    pub held: bool,
}

enum HoldState {
    Open,
    Held { until: Instant },
    Ended { why: String },
}

struct Connection {
    id: PortId,
    port: Port,
    /// The events that epoll watches.
    watched: epoll::EventFlags,
    /// True if the socket has no room.
    full: bool,
    /// When sending is tried again.
    retry: Option<Instant>,
}

/// A quiesce that has not ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingQuiesce {
    began: Instant,
    timeout: Duration,
}

/// A switch between the NICs of VMs. A LAN of it is a unix socket to which QEMUs connect.
pub struct Switch {
    epoll: OwnedFd,
    /// The descriptor (of /dev/null) that marks the end of a frame.
    marker: OwnedFd,
    lans: Vec<LanListener>,
    fabric: Fabric,
    connections: BTreeMap<PortKey, Connection>,
    closed: VecDeque<ClosedPort>,
    hold: HoldState,
    buffer: Vec<u8>,
    events: Vec<epoll::Event>,
}

impl Switch {
    /// Creates a switch without a LAN, with the default limits. Errors: epoll or /dev/null cannot
    /// be opened.
    pub fn new() -> Result<Self> {
        Self::with_limits(SwitchLimits::default())
    }

    /// Makes a switch as [`Self::new`], with other limits of what may wait. Errors: those of
    /// [`Self::new`].
    pub fn with_limits(limits: SwitchLimits) -> Result<Self> {
        let marker = std::fs::File::open("/dev/null").map_err(Error::io("open /dev/null"))?.into();
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)
                .map_err(Error::io("create an epoll"))?,
            marker,
            lans: Vec::new(),
            fabric: Fabric::new(limits),
            connections: BTreeMap::new(),
            closed: VecDeque::new(),
            hold: HoldState::Open,
            buffer: vec![0; READ_BYTES],
            events: Vec::with_capacity(64),
        })
    }

    /// Adds a LAN that consists of all VMs that connect to the unix socket at `path`. A socket
    /// there on which no process listens is replaced. The socket is removed when the switch is
    /// dropped. Errors: [`Error::Listen`], also if the switch has [`LANS_MAX`] LANs.
    pub fn listen(&mut self, path: &Path) -> Result<()> {
        if self.lans.len() >= LANS_MAX {
            let problem = format!("a switch has at most {LANS_MAX} LANs");
            return Err(Error::Listen { path: path.display().to_string(), problem });
        }
        let lan = LanListener::bind(path)?;
        let token = LAN_TOKENS + self.lans.len() as u64;
        self.watch(lan.as_fd(), token)?;
        self.fabric.add_lan();
        self.lans.push(lan);
        Ok(())
    }

    /// Lets [`Self::turn`] report when `fd` can be read, as `token`. Tokens are [`FOREIGN_TOKENS`]
    /// or more.
    pub(crate) fn watch(&self, fd: impl AsFd, token: u64) -> Result<()> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)
            .map_err(Error::io("watch a socket"))
    }

    /// Watches `fd` for room to write in addition, if `writable`.
    pub(crate) fn watch_writable(&self, fd: impl AsFd, token: u64, writable: bool) -> Result<()> {
        let data = epoll::EventData::new_u64(token);
        let flags = if writable {
            epoll::EventFlags::IN | epoll::EventFlags::OUT
        } else {
            epoll::EventFlags::IN
        };
        epoll::modify(&self.epoll, fd, data, flags).map_err(Error::io("watch a socket"))
    }

    /// Returns true if no VM is connected.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Stops delivery for at most `limit`, and at most an hour.
    ///
    /// If the switch is held already, the hold begins anew, with the frames that wait.
    pub fn hold(&mut self, limit: Duration) {
        self.hold = HoldState::Held { until: Instant::now() + limit.min(Duration::from_hours(1)) };
        self.fabric.hold();
        for connection in self.connections.values_mut() {
            connection.port.watch();
        }
    }

    /// Waits until each QEMU and its NIC have taken all frames that were sent to them. A NIC that
    /// takes no frame for two seconds of a hold (no driver, switched off) counts as not listening:
    /// the frames that wait for it are lost.
    ///
    /// Errors: [`Error::NotHeld`] without a hold; [`Error::Torn`] if the hold has ended; after
    /// `timeout`, [`Error::NotQuiet`] with the first port that still has frames. The caller then
    /// releases and tries again later.
    pub fn quiesce(&mut self, timeout: Duration) -> Result<()> {
        let quiesce = self.begin_quiesce(timeout)?;
        loop {
            if let Some(result) = self.settled(quiesce) {
                return result;
            }
            self.turn(Some(LOOK_EVERY))?;
        }
    }

    pub(crate) fn begin_quiesce(&self, timeout: Duration) -> Result<PendingQuiesce> {
        self.check_held("quiesce")?;
        Ok(PendingQuiesce { began: Instant::now(), timeout })
    }

    /// The result of `quiesce`, if it has ended. To be called every [`LOOK_EVERY`].
    pub(crate) fn settled(&mut self, quiesce: PendingQuiesce) -> Option<Result<()>> {
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

    /// The first port whose QEMU has not taken all frames, and its state.
    fn unquiet(&mut self) -> Option<(PortId, &'static str)> {
        let mut first = None;
        for connection in self.connections.values_mut() {
            let problem = match connection.port.delivery() {
                Ok(Delivery::Complete | Delivery::Deaf) => continue,
                Ok(Delivery::Sending | Delivery::Unread) => {
                    "QEMU does not read its packets (its NIC takes none)"
                }
                Ok(Delivery::Waiting) => "a packet waits in QEMU, because the NIC does not take it",
                // The next read detects the end.
                Err(_) => "its connection is broken",
            };
            first = first.or(Some((connection.id.clone(), problem)));
        }
        first
    }

    /// Returns all packets between the guests. To be called after [`Self::quiesce`], when all VMs
    /// are stopped.
    ///
    /// Errors: [`Error::Torn`] if the hold has ended, or if packets of a guest may have been lost
    /// when its VM stopped; [`Error::NotQuiet`] if a QEMU or its NIC has not taken all frames;
    /// [`Error::NotHeld`] without a hold.
    pub fn collect(&mut self) -> Result<InFlight> {
        self.check_held("collect packets in flight")?;
        // A VM that has connected and is not accepted yet may have sent frames too.
        for lan in 0..self.lans.len() {
            while self.accept(LanKey(lan))? {}
        }
        let keys: Vec<PortKey> = self.connections.keys().copied().collect();
        for key in &keys {
            self.drain(*key)?;
        }
        // Reading may have filled a queue and so ended the hold.
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

    /// Reads all frames that `key` has sent.
    fn drain(&mut self, key: PortKey) -> Result<()> {
        for _ in 0..COLLECT_READS_MAX {
            if !self.forward(key) {
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

    /// Ends the hold: delivers the waiting frames in order, and all later ones.
    pub fn release(&mut self) {
        self.hold = HoldState::Open;
        self.fabric.release();
        self.deliver();
    }

    /// Queues packets of a checkpoint for ports of this switch, which must be held. `stand_ins`
    /// names the present port of each recorded one. After an error nothing is queued.
    ///
    /// Errors: [`Error::NotHeld`] without a hold, [`Error::Torn`] if the hold has ended,
    /// [`Error::UnknownPort`] if a present port is not connected, [`Error::Unmapped`] if
    /// `stand_ins` lacks a port with packets.
    pub fn restore(&mut self, in_flight: &InFlight, stand_ins: &[StandInPort]) -> Result<()> {
        let operation = "restore packets in flight";
        self.check_held(operation)?;
        let mut placed = Vec::new();
        for recorded in in_flight.ports.iter().filter(|port| !port.frames.is_empty()) {
            let stand_in =
                stand_ins.iter().find(|port| port.recorded == recorded.port).ok_or_else(|| {
                    Error::Unmapped { port: recorded.port.clone(), frames: recorded.frames.len() }
                })?;
            let now = &stand_in.present;
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

    /// Returns the open connections and the most recently ended ones.
    pub fn ports(&self) -> SwitchPorts {
        let status = |(key, connection): (&PortKey, &Connection)| PortStatus {
            port: connection.id.clone(),
            pending: self.fabric.pending(*key).len(),
            dropped: self.fabric.dropped(*key),
        };
        let mut ports: Vec<PortStatus> = self.connections.iter().map(status).collect();
        ports.sort_by(|a, b| a.port.cmp(&b.port));
        let held = matches!(self.hold, HoldState::Held { .. });
        SwitchPorts { ports, closed: self.closed.iter().cloned().collect(), held }
    }

    fn check_held(&self, operation: &str) -> Result<()> {
        match &self.hold {
            HoldState::Held { .. } => Ok(()),
            HoldState::Open => Err(Error::NotHeld { operation: operation.into() }),
            HoldState::Ended { why } => Err(Error::Torn { reason: why.clone() }),
        }
    }

    /// Ends the hold early: delivers, and remembers `why` for the error of [`Self::collect`].
    fn end_hold(&mut self, why: String) {
        self.hold = HoldState::Ended { why };
        self.fabric.release();
    }

    /// Runs the switch on this thread for `time`. Error: the sockets cannot be polled.
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

    /// Waits at most `timeout` (without limit if `None`) for events and forwards frames. Returns
    /// the tokens of readable descriptors that the switch does not own.
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
        if let HoldState::Held { until } = self.hold
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
            HoldState::Held { until } => Some(until),
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
            // Frames that the peer sent before its end are forwarded.
            for _ in 0..COLLECT_READS_MAX {
                if !self.forward(key) {
                    break;
                }
            }
            self.close(key, "its other end has closed it");
        } else if flags.contains(epoll::EventFlags::IN) && self.fabric.may_read(key) {
            self.forward(key);
        }
    }

    /// Reads once from a port and forwards its frames. True if more may wait.
    fn forward(&mut self, key: PortKey) -> bool {
        let Some(connection) = self.connections.get_mut(&key) else { return false };
        let mut frames: Vec<Frame> = Vec::new();
        let taken = connection.port.read(&mut self.buffer, &mut frames);
        let overflow =
            frames.iter().fold(None, |full, frame| full.or(self.fabric.receive(key, frame)));
        if let Some(Overflow(full)) = overflow {
            let id = self.connections.get(&full).map(|c| c.id.to_string()).unwrap_or_default();
            self.end_hold(format!("too much waits for {id}, so the hold ended by itself"));
        }
        match taken {
            Ok(ReadOutcome::Bytes(_)) => true,
            Ok(ReadOutcome::Nothing) => false,
            Ok(ReadOutcome::End) => {
                self.close(key, "its other end has closed it");
                false
            }
            Err(reason) => {
                self.close(key, &reason);
                false
            }
        }
    }

    /// Sends each port its waiting frames, as far as its socket has room.
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
                Ok(SendOutcome::All) => {}
                Ok(SendOutcome::Full) => connection.full = true,
                Ok(SendOutcome::Later) => connection.retry = Some(now + RETRY_AFTER),
                Err(reason) => broken.push((*key, reason)),
            }
        }
        for (key, reason) in broken {
            // The port cannot be written to, but frames that it sent may still wait.
            while self.forward(key) {}
            self.close(key, &reason);
        }
    }

    /// Updates the events that epoll watches.
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

    /// Accepts one waiting connection. False if none waits.
    fn accept(&mut self, lan: LanKey) -> Result<bool> {
        let Some(listener) = self.lans.get(lan.0) else { return Ok(false) };
        let Some(stream) = listener.accept() else { return Ok(false) };
        if self.connections.len() >= PORTS_MAX {
            // The limit is reached: dropping the stream closes it, and the peer sees the end.
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
        // Closing the socket removes it from the epoll.
        let Some(connection) = self.connections.remove(&key) else { return };
        if self.closed.len() >= CLOSED_MAX {
            self.closed.pop_front();
        }
        self.closed.push_back(ClosedPort { port: connection.id, reason: reason.into() });
    }
}
