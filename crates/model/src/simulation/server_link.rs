//! The link of the server, which its concurrent transfers share equally.

use super::ClusterNetwork;

/// A slot of a node, in which one interval at a time is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotId {
    /// The number of the node, from 0.
    pub node: usize,
    /// The number of the slot in its node, from 0.
    pub slot: usize,
}

/// A transfer to a slot.
#[derive(Clone, Copy, Debug)]
struct Flow {
    to: SlotId,
    left_bytes: f64,
}

/// The network link of the server, and its running transfers.
pub struct ServerLink {
    /// `None` if a transfer takes no time.
    bytes_per_s: Option<f64>,
    flows: Vec<Flow>,
    /// The time for which the remaining bytes of the transfers hold.
    at_s: f64,
}

impl ServerLink {
    /// Makes the link that `network` describes, without transfers.
    pub fn new(network: &ClusterNetwork) -> Self {
        let bytes_per_s = network.bits_per_s.map(|bits| bits / 8.0);
        Self { bytes_per_s, flows: Vec::new(), at_s: 0.0 }
    }

    /// Returns the rate of each transfer, in bytes a second.
    fn share(&self) -> Option<f64> {
        self.bytes_per_s.map(|rate| rate / self.flows.len().max(1) as f64)
    }

    /// Advances all transfers to the time `to_s`, in seconds.
    pub fn advance(&mut self, to_s: f64) {
        let passed_s = (to_s - self.at_s).max(0.0);
        if let Some(share) = self.share() {
            for flow in &mut self.flows {
                flow.left_bytes = (flow.left_bytes - share * passed_s).max(0.0);
            }
        }
        self.at_s = self.at_s.max(to_s);
    }

    /// Begins a transfer of `bytes` bytes to a slot, at the time of the last [`Self::advance`].
    pub fn begin(&mut self, to: SlotId, bytes: f64) {
        self.flows.push(Flow { to, left_bytes: bytes });
    }

    /// Ends the transfer to a slot, complete or not.
    pub fn end(&mut self, to: SlotId) {
        self.flows.retain(|flow| flow.to != to);
    }

    /// Returns the time in seconds at which the next transfer completes, and its slot, if no other
    /// one begins before. Returns `None` if there is no transfer.
    pub fn next(&self) -> Option<(f64, SlotId)> {
        let first = self.flows.iter().min_by(|a, b| a.left_bytes.total_cmp(&b.left_bytes))?;
        let left_s = self.share().map_or(0.0, |share| first.left_bytes / share);
        Some((self.at_s + left_s, first.to))
    }
}
