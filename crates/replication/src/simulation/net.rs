//! Links between hosts: ordered connections that break, over wires that are cut in one direction or
//! in both.
//!
//! ```text
//!   send ─▶ a delay ─▶ cut? ─▶ waits until the cut or the connection ends ─▶ in order, or never
//! ```
//!
//! Half of the requests on a broken connection to the witness still arrive, late: the witness had
//! received them and not read them yet.

use crate::SessionId;
use std::collections::VecDeque;
use std::rc::Rc;

/// The index of the witness; the nodes are 0 and 1.
pub const WITNESS: usize = 2;
/// The ends of each link: paths 0 and 1, then each node's link to the witness.
pub const LINKS: [(usize, usize); 4] = [(0, 1), (0, 1), (0, WITNESS), (1, WITNESS)];
pub const MS: u64 = 1_000_000;

#[derive(Clone)]
pub enum Packet {
    Message(Vec<u8>),
    Data(Data),
    Ask(u64, Vec<u8>),
    Answer(u64, Vec<u8>),
}

/// A piece of an epoch: `last` ends it.
#[derive(Clone)]
pub struct Data {
    pub session: SessionId,
    pub epoch: u64,
    pub piece: u8,
    pub last: bool,
    pub after: Option<u64>,
    /// The log keeps so many of its writes, then come these.
    pub base: usize,
    pub writes: Rc<Vec<u32>>,
}

#[derive(Default)]
pub struct HostLink {
    /// From the first end to the second, and back.
    pub cut: [bool; 2],
    /// The connection as each end knows it.
    pub connection: [Option<u64>; 2],
    pub last_ns: [u64; 2],
    /// Packets that wait for the cut to end.
    pub waiting: [VecDeque<(u64, Packet)>; 2],
    pub slow_ns: u64,
}

impl HostLink {
    pub fn is_cut(&self) -> bool {
        self.cut != [false; 2]
    }

    pub fn is_whole(&self) -> bool {
        self.connection[0].is_some() && self.connection[0] == self.connection[1]
    }

    /// When a packet that is sent now arrives: after all packets before it.
    pub fn arrival_ns(&mut self, from: usize, now_ns: u64, rng: &mut fastrand::Rng) -> u64 {
        let lost = if rng.u32(..200) == 0 { rng.u64(20 * MS..200 * MS) } else { 0 };
        let at = now_ns + rng.u64(MS / 5..3 * MS) + lost + self.slow_ns;
        self.last_ns[from] = at.max(self.last_ns[from] + 1);
        self.last_ns[from]
    }
}

/// Returns the link's end at `host`.
pub fn end_of(link: usize, host: usize) -> usize {
    usize::from(LINKS[link].1 == host)
}
