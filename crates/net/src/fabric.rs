//! The switching logic without sockets: the ports that each frame goes to, and their queues.
//!
//! ```text
//!                 receive                          next
//!   port a ──▶ destination known ──▶ queue of b ──────────▶ port b      delivering
//!          └─▶ group, unknown ─────▶ queue of all others ─▶ ...
//!                                        │
//!                                        └── held: nothing leaves
//! ```
//!
//! What becomes of a queue that is full (a guest that takes no packets, as one whose interface is
//! down):
//!
//! | frame for it | delivering | held |
//! |---|---|---|
//! | addressed to it | queued, and its sender is not read from until the queue is half empty | queued; the hold must end |
//! | flooded | dropped for this port and counted: one deaf guest must not stop a LAN | queued; the hold must end |
//!
//! Invariants:
//! 1. A frame waits for each of its destinations exactly once, in the order of arrival, and leaves once, unless the port
//!    disconnects or the table above says dropped.
//! 2. While held nothing leaves and every port may be read.
//! 3. A queue exceeds its bound by at most what each sender had under way.
//!
//! Left out: ageing of addresses (a disconnect forgets them), spanning trees, VLANs (tags are
//! carried, not looked at). A gate that holds the frames of one sender only, as replication wants
//! it, has its place in `receive`.

use crate::frame::Frame;
use crate::table::MacTable;
use std::collections::{BTreeMap, VecDeque};

/// A connection of a VM; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortKey(pub u64);

/// A LAN of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanKey(pub usize);

/// How much may wait.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For one port.
    pub port_bytes_max: usize,
    /// For all ports.
    pub total_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { port_bytes_max: 16 << 20, total_bytes_max: 256 << 20 }
    }
}

/// A queue is full and the switch is held: the hold must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Overflow(pub PortKey);

/// What a waiting frame costs beside its bytes.
const ENTRY_BYTES: usize = 32;

struct Queue {
    lan: LanKey,
    frames: VecDeque<Frame>,
    bytes: usize,
    dropped: u64,
}

/// All LANs and the queues of their ports.
pub struct Fabric {
    limits: Limits,
    tables: Vec<MacTable>,
    queues: BTreeMap<PortKey, Queue>,
    total_bytes: usize,
    /// Senders that wait, and for which port's queue.
    stalled: BTreeMap<PortKey, PortKey>,
    held: bool,
    next_key: u64,
}

impl Fabric {
    /// Without a LAN.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            tables: Vec::new(),
            queues: BTreeMap::new(),
            total_bytes: 0,
            stalled: BTreeMap::new(),
            held: false,
            next_key: 0,
        }
    }

    /// A new LAN.
    pub fn add_lan(&mut self) -> LanKey {
        self.tables.push(MacTable::default());
        LanKey(self.tables.len() - 1)
    }

    /// A new port of `lan`.
    pub fn connect(&mut self, lan: LanKey) -> PortKey {
        let key = PortKey(self.next_key);
        self.next_key += 1;
        self.queues.insert(key, Queue { lan, frames: VecDeque::new(), bytes: 0, dropped: 0 });
        key
    }

    /// The port is gone, with what waited for it.
    pub fn disconnect(&mut self, port: PortKey) {
        let Some(queue) = self.queues.remove(&port) else { return };
        self.total_bytes -= queue.bytes;
        if let Some(table) = self.tables.get_mut(queue.lan.0) {
            table.forget(port);
        }
        self.stalled.retain(|from, to| *from != port && *to != port);
    }

    /// Takes in a frame that `from` sent.
    pub fn receive(&mut self, from: PortKey, frame: &Frame) -> Option<Overflow> {
        let lan = self.queues.get(&from)?.lan;
        let table = self.tables.get_mut(lan.0)?;
        if let Some(source) = frame.source().filter(|mac| !mac.is_group()) {
            table.learn(source, from);
        }
        let known =
            frame.destination().filter(|mac| !mac.is_group()).and_then(|mac| table.port_of(mac));
        match known {
            // Both ends are behind the same port.
            Some(to) if to == from => None,
            Some(to) => {
                self.push(to, frame).inspect(|full| self.stall(from, *full)).filter(|_| self.held)
            }
            None => self.flood(lan, from, frame),
        }
    }

    fn flood(&mut self, lan: LanKey, from: PortKey, frame: &Frame) -> Option<Overflow> {
        let others: Vec<PortKey> = self
            .queues
            .iter()
            .filter(|(key, queue)| queue.lan == lan && **key != from)
            .map(|(k, _)| *k)
            .collect();
        let mut overflow = None;
        for to in others {
            if !self.held && self.is_full(to) {
                self.queues.entry(to).and_modify(|queue| queue.dropped += 1);
            } else {
                overflow = overflow.or(self.push(to, frame));
            }
        }
        overflow.filter(|_| self.held)
    }

    /// Adds to the queue of `to`; tells where that is full now.
    fn push(&mut self, to: PortKey, frame: &Frame) -> Option<Overflow> {
        let queue = self.queues.get_mut(&to)?;
        let bytes = cost(frame);
        queue.frames.push_back(frame.clone());
        queue.bytes += bytes;
        self.total_bytes += bytes;
        self.is_full(to).then_some(Overflow(to))
    }

    fn stall(&mut self, from: PortKey, full: Overflow) {
        if !self.held {
            self.stalled.insert(from, full.0);
        }
    }

    fn is_full(&self, port: PortKey) -> bool {
        self.total_bytes >= self.limits.total_bytes_max
            || self.queues.get(&port).is_some_and(|queue| queue.bytes >= self.limits.port_bytes_max)
    }

    /// The next frame to send to `port`; `None` where there is none or nothing may leave.
    pub fn next(&mut self, port: PortKey) -> Option<Frame> {
        if self.held {
            return None;
        }
        let queue = self.queues.get_mut(&port)?;
        let frame = queue.frames.pop_front()?;
        queue.bytes -= cost(&frame);
        self.total_bytes -= cost(&frame);
        if queue.bytes <= self.limits.port_bytes_max / 2 {
            self.stalled.retain(|_, to| *to != port);
        }
        Some(frame)
    }

    /// Whether frames are to be taken from `port` now.
    pub fn may_read(&self, port: PortKey) -> bool {
        self.held || !self.stalled.contains_key(&port)
    }

    /// Nothing leaves from here on.
    pub fn hold(&mut self) {
        self.held = true;
    }

    /// Frames leave again.
    pub fn release(&mut self) {
        self.held = false;
    }

    /// What waits for `port`, in order.
    pub fn pending(&self, port: PortKey) -> impl ExactSizeIterator<Item = &Frame> {
        const NONE: &VecDeque<Frame> = &VecDeque::new();
        self.queues.get(&port).map_or(NONE, |queue| &queue.frames).iter()
    }

    /// Puts a frame behind what waits for `port`.
    pub fn restore(&mut self, port: PortKey, frame: &Frame) {
        // Bounded by what can be recorded.
        let _ = self.push(port, frame);
    }

    /// Frames that were dropped for `port`.
    pub fn dropped(&self, port: PortKey) -> u64 {
        self.queues.get(&port).map_or(0, |queue| queue.dropped)
    }
}

fn cost(frame: &Frame) -> usize {
    frame.wire().len() + ENTRY_BYTES
}

#[cfg(test)]
mod tests;
