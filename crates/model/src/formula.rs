//! The two formulas.

use crate::Constants;
use serde::{Deserialize, Serialize};

/// Which of them holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Formula {
    /// There are nodes enough (equation 2.1).
    Enough,
    /// There are too few (equation 3.5).
    Limited,
}

impl Formula {
    /// The number of its equation.
    pub fn equation(self) -> &'static str {
        match self {
            Self::Enough => "2.1",
            Self::Limited => "3.5",
        }
    }
}

impl Constants {
    /// Nodes that are busy at once where none is missing: those that begin before the first one
    /// ends (equations 3.1, 3.2).
    pub fn nodes_demanded(&self, length: f64) -> f64 {
        self.simulation(length) / self.period(length)
    }

    /// Nodes with which no interval of `length` waits (equation 2.3).
    pub fn nodes_enough(&self, length: f64) -> u64 {
        (self.simulation(length) / (self.t_c + length) + 1.0).ceil() as u64
    }

    /// The best length with nodes enough, from equation 2.1. 0 where checkpoints cost nothing: the
    /// shorter the better.
    pub fn length_enough(&self) -> f64 {
        (self.s_log * self.s_log * self.t_vm * self.t_c / self.s_sim).sqrt()
    }

    /// The best length with `nodes`, where they are too few (equation 3.7).
    pub fn length_limited(&self, nodes: u64) -> f64 {
        let factor = self.s_cp.unwrap_or(1.0);
        (factor * self.s_log * self.t_vm * self.t_i).sqrt() / (nodes as f64 * factor)
    }

    /// How many nodes are missing at the best length for `nodes`; negative where they are enough
    /// (equation 3.8).
    pub fn nodes_missing(&self, nodes: u64) -> f64 {
        self.nodes_demanded(self.length_limited(nodes)) - nodes as f64
    }

    /// The formula for `nodes` and `length`: too few are those that the intervals which begin
    /// before the first one ends exceed.
    pub fn formula(&self, nodes: u64, length: f64) -> Formula {
        if (nodes as f64) < self.nodes_demanded(length) {
            Formula::Limited
        } else {
            Formula::Enough
        }
    }

    /// The time from the recording's begin to the last simulation's end, in seconds.
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

    /// How many times as fast that is as one simulation of the whole run.
    pub fn speed_up(&self, run_time: f64) -> f64 {
        self.s_sim * self.t_vm / run_time
    }
}
