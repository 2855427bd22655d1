//! What the model is told.

use serde::{Deserialize, Serialize};

/// Seconds that nothing here is longer than: some 30 years.
const SECONDS_MAX: f64 = 1e9;
/// No simulation is slower.
const FACTOR_MAX: f64 = 1e9;

/// The constants of a machine, a guest and a tool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Constants {
    /// How long the VM runs alone, in seconds.
    pub t_vm: f64,
    /// How many times as long a simulation takes.
    pub s_sim: f64,
    /// How many times as long recording takes.
    pub s_log: f64,
    /// The pause of a checkpoint, in seconds.
    pub t_c: f64,
    /// How long a simulation takes to begin, in seconds.
    pub t_i: f64,
    /// How many times as long an interval takes with its checkpoint; `1 + t_c/L` where it is not
    /// given.
    pub s_cp: Option<f64>,
}

/// A constant that is none.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}: it must be {must}")]
pub struct Error {
    /// Which.
    pub name: &'static str,
    /// What it is.
    pub value: f64,
    /// What it must be.
    pub must: &'static str,
}

impl Constants {
    /// Refuses constants with which the formulas say nothing.
    pub fn check(&self) -> Result<(), Error> {
        let positive = "more than 0, and at most 1e9";
        let seconds = "0 or more seconds, and at most 1e9";
        let factor = "1 or more, and at most 1e9";
        let rules: [(&'static str, f64, &'static str, f64, f64); 6] = [
            ("t_vm", self.t_vm, positive, f64::MIN_POSITIVE, SECONDS_MAX),
            ("s_sim", self.s_sim, positive, f64::MIN_POSITIVE, FACTOR_MAX),
            ("s_log", self.s_log, positive, f64::MIN_POSITIVE, FACTOR_MAX),
            ("t_c", self.t_c, seconds, 0.0, SECONDS_MAX),
            ("t_i", self.t_i, seconds, 0.0, SECONDS_MAX),
            ("s_cp", self.s_cp.unwrap_or(1.0), factor, 1.0, FACTOR_MAX),
        ];
        for (name, value, must, least, most) in rules {
            if !(least..=most).contains(&value) {
                return Err(Error { name, value, must });
            }
        }
        Ok(())
    }

    /// How many times as long a simulation takes as the recording of the same.
    pub(crate) fn slowdown(&self) -> f64 {
        self.s_sim / self.s_log
    }

    /// How long the simulation of an interval of `length` takes, both in seconds.
    pub fn simulation(&self, length: f64) -> f64 {
        self.t_i + self.slowdown() * length
    }

    /// An interval of `length` with its checkpoint, in seconds.
    pub(crate) fn period(&self, length: f64) -> f64 {
        self.s_cp.map_or(self.t_c + length, |factor| factor * length)
    }
}
