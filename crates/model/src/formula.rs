//! The two formulas.

use crate::Constants;
use serde::{Deserialize, Serialize};

/// The formula that holds for a number of nodes and a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Formula {
    /// The nodes are enough (equation 2.1).
    Enough,
    /// The nodes are too few (equation 3.5).
    Limited,
}

impl Formula {
    /// Returns the number of the formula's equation in Eicher's thesis (see the documentation of
    /// this crate), such as `2.1`.
    pub fn equation(self) -> &'static str {
        match self {
            Self::Enough => "2.1",
            Self::Limited => "3.5",
        }
    }
}

impl Constants {
    /// Returns the number of nodes that are busy at once if there are enough nodes: those that
    /// begin before the first one ends (equations 3.1 and 3.2 of Eicher's thesis). `length` is the
    /// length of an interval in seconds.
    pub fn nodes_demanded(&self, length: f64) -> f64 {
        self.simulation(length) / self.period(length)
    }

    /// Returns the number of nodes with which no interval of `length` seconds waits for a node
    /// (equation 2.3 of Eicher's thesis).
    pub fn nodes_enough(&self, length: f64) -> u64 {
        (self.simulation(length) / (self.t_c + length) + 1.0).ceil() as u64
    }

    /// Returns the best length of an interval if there are enough nodes, in seconds, from equation
    /// 2.1 of Eicher's thesis. It is 0 if `t_c` is 0: then shorter intervals are always better.
    pub fn length_enough(&self) -> f64 {
        (self.s_log * self.s_log * self.t_vm * self.t_c / self.s_sim).sqrt()
    }

    /// Returns the best length of an interval if `nodes` nodes are too few, in seconds (equation
    /// 3.7 of Eicher's thesis).
    pub fn length_limited(&self, nodes: u64) -> f64 {
        let factor = self.s_cp.unwrap_or(1.0);
        (factor * self.s_log * self.t_vm * self.t_i).sqrt() / (nodes as f64 * factor)
    }

    /// Returns how many nodes are missing at the best length for `nodes`; negative if they are
    /// enough (equation 3.8 of Eicher's thesis).
    pub fn nodes_missing(&self, nodes: u64) -> f64 {
        self.nodes_demanded(self.length_limited(nodes)) - nodes as f64
    }

    /// Returns the formula for `nodes` nodes and intervals of `length` seconds. Nodes are too few
    /// if there are fewer than [`Self::nodes_demanded`].
    pub fn formula(&self, nodes: u64, length: f64) -> Formula {
        if (nodes as f64) < self.nodes_demanded(length) {
            Formula::Limited
        } else {
            Formula::Enough
        }
    }

    /// Returns the time, by `formula`, from the beginning of the recording to the end of the last
    /// simulation on `nodes` nodes, in seconds. The intervals have `length` seconds.
    pub fn run_time(&self, formula: Formula, nodes: u64, length: f64) -> f64 {
        let nodes = nodes as f64;
        match formula {
            Formula::Enough => {
                self.s_log * self.t_vm * (self.t_c / length + 1.0) + self.simulation(length)
            }
            Formula::Limited => {
                let busy =
                    self.t_vm * (self.s_log * self.t_i + self.s_sim * length) / (nodes * length);
                nodes * self.period(length) + busy
            }
        }
    }

    /// Returns the speed-up of a run of `run_time` seconds over one simulation of the whole run.
    pub fn speed_up(&self, run_time: f64) -> f64 {
        self.s_sim * self.t_vm / run_time
    }
}
