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
//! If the queue of a port is full (its guest takes no packets, for example because its interface is
//! down):
//!
//! | frame for the port | delivering | held |
//! |---|---|---|
//! | addressed to it | queued; its sender waits until half is sent | queued; the hold must end |
//! | flooded | dropped for this port, and counted | queued; the hold must end |
//!
//! So a guest that takes no packets does not stop the floods of its LAN.
//!
//! Invariants:
//! 1. A frame waits for each of its destinations exactly once, in the order of arrival, and leaves
//!    once, unless the port disconnects or the table above says dropped.
//! 2. While the fabric is held, no frame leaves, and every port may be read.
//! 3. A queue exceeds its bound by at most the frames that its senders had begun to send.
//!
//! Left out: ageing of addresses (a disconnect forgets them), spanning trees, and VLANs (tags are
//! carried and not interpreted).

use crate::frame::Frame;
use crate::table::MacTable;
use std::collections::{BTreeMap, VecDeque};

/// The key of a VM's connection. No key is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortKey(pub u64);

/// The key of a LAN of the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanKey(pub usize);

/// The limits of the frames that wait in a switch.
#[derive(Clone, Copy, Debug)]
pub struct SwitchLimits {
    /// The largest number of bytes that wait for one port.
    pub port_bytes_max: usize,
    /// The largest number of bytes that wait for all ports together.
    pub total_bytes_max: usize,
}

impl Default for SwitchLimits {
    fn default() -> Self {
        Self { port_bytes_max: 16 << 20, total_bytes_max: 256 << 20 }
    }
}

/// Reports that the queue of this port is full while the switch is held, so that the hold must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Overflow(pub PortKey);

/// The memory that a waiting frame costs in addition to its bytes.
const ENTRY_BYTES: usize = 32;

struct Queue {
    lan: LanKey,
    frames: VecDeque<Frame>,
    bytes: usize,
    dropped: u64,
}

/// Forwards frames: all LANs of a switch, and the queues of their ports. It does no I/O.
pub struct Fabric {
    limits: SwitchLimits,
    tables: Vec<MacTable>,
    queues: BTreeMap<PortKey, Queue>,
    total_bytes: usize,
    /// The senders that are not read, each with the port whose queue is full.
    stalled: BTreeMap<PortKey, PortKey>,
    held: bool,
    next_key: u64,
}

impl Fabric {
    /// Creates a fabric without a LAN.
    pub fn new(limits: SwitchLimits) -> Self {
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

    /// Adds a LAN without ports, and returns its key.
    pub fn add_lan(&mut self) -> LanKey {
        self.tables.push(MacTable::default());
        LanKey(self.tables.len() - 1)
    }

    /// Adds a port to `lan`, and returns the port's key.
    pub fn connect(&mut self, lan: LanKey) -> PortKey {
        let key = PortKey(self.next_key);
        self.next_key += 1;
        self.queues.insert(key, Queue { lan, frames: VecDeque::new(), bytes: 0, dropped: 0 });
        key
    }

    /// Removes the port and drops the frames that wait for it.
    pub fn disconnect(&mut self, port: PortKey) {
        let Some(queue) = self.queues.remove(&port) else { return };
        self.total_bytes -= queue.bytes;
        if let Some(table) = self.tables.get_mut(queue.lan.0) {
            table.forget(port);
        }
        self.stalled.retain(|from, to| *from != port && *to != port);
    }

    /// Queues a frame that `from` sent for its destinations. Returns the port whose queue is full,
    /// if the fabric is held.
    pub fn receive(&mut self, from: PortKey, frame: &Frame) -> Option<Overflow> {
        let lan = self.queues.get(&from)?.lan;
        let table = self.tables.get_mut(lan.0)?;
        if let Some(source) = frame.source().filter(|mac| !mac.is_group()) {
            table.learn(source, from);
        }
        let known =
            frame.destination().filter(|mac| !mac.is_group()).and_then(|mac| table.port_of(mac));
        match known {
            // Both guests are reached through the same port.
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

    /// Adds a frame to the queue of `to`. Returns `to` if that queue is full now.
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

    /// Removes and returns the next frame for `port`. `None` if no frame waits or the fabric is
    /// held.
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

    /// Returns true if frames from `port` may be read now.
    pub fn may_read(&self, port: PortKey) -> bool {
        self.held || !self.stalled.contains_key(&port)
    }

    /// Stops delivery: from now on [`Self::next`] returns `None`.
    pub fn hold(&mut self) {
        self.held = true;
    }

    /// Resumes delivery.
    pub fn release(&mut self) {
        self.held = false;
    }

    /// Returns the frames that wait for `port`, in order.
    pub fn pending(&self, port: PortKey) -> impl ExactSizeIterator<Item = &Frame> {
        const NONE: &VecDeque<Frame> = &VecDeque::new();
        self.queues.get(&port).map_or(NONE, |queue| &queue.frames).iter()
    }

    /// Appends a frame that a checkpoint holds to the queue of `port`.
    pub fn restore(&mut self, port: PortKey, frame: &Frame) {
        // The format of recordings bounds the bytes, so an overflow needs no action.
        let _ = self.push(port, frame);
    }

    /// Returns the number of frames that were dropped for `port`.
    pub fn dropped(&self, port: PortKey) -> u64 {
        self.queues.get(&port).map_or(0, |queue| queue.dropped)
    }
}

fn cost(frame: &Frame) -> usize {
    frame.wire().len() + ENTRY_BYTES
}

#[cfg(test)]
mod tests;
