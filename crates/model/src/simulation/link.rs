//! The server's link: all that it sends at one time gets an equal share of it.

use super::Network;

/// A transfer.
#[derive(Clone, Copy, Debug)]
struct Flow {
    node: usize,
    slot: usize,
    left_bytes: f64,
}

/// The link and what is on it.
pub struct Link {
    /// None: nothing takes time.
    bytes_per_s: Option<f64>,
    flows: Vec<Flow>,
    /// Until when what is left is true.
    at_s: f64,
}

impl Link {
    pub fn new(network: &Network) -> Self {
        Self {
            bytes_per_s: network.bits_per_s.map(|bits| bits / 8.0),
            flows: Vec::new(),
            at_s: 0.0,
        }
    }

    /// What each transfer gets.
    fn share(&self) -> Option<f64> {
        self.bytes_per_s.map(|rate| rate / self.flows.len().max(1) as f64)
    }

    /// Lets time pass.
    pub fn advance(&mut self, to_s: f64) {
        let passed = (to_s - self.at_s).max(0.0);
        if let Some(share) = self.share() {
            for flow in &mut self.flows {
                flow.left_bytes = (flow.left_bytes - share * passed).max(0.0);
            }
        }
        self.at_s = self.at_s.max(to_s);
    }

    /// Begins to send, now.
    pub fn begin(&mut self, (node, slot): (usize, usize), bytes: f64) {
        self.flows.push(Flow { node, slot, left_bytes: bytes });
    }

    /// Ends what is sent to a slot, whether it has arrived or not.
    pub fn end(&mut self, (node, slot): (usize, usize)) {
        self.flows.retain(|flow| (flow.node, flow.slot) != (node, slot));
    }

    /// The next transfer that is through, and when, if nothing else begins.
    pub fn next(&self) -> Option<(f64, (usize, usize))> {
        let first = self.flows.iter().min_by(|a, b| a.left_bytes.total_cmp(&b.left_bytes))?;
        let left_s = self.share().map_or(0.0, |share| first.left_bytes / share);
        Some((self.at_s + left_s, (first.node, first.slot)))
    }
}
