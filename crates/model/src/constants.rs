//! The constants of the model.

use serde::{Deserialize, Serialize};

/// The largest time, in seconds: about 30 years.
const SECONDS_MAX: f64 = 1e9;
/// The largest factor.
const FACTOR_MAX: f64 = 1e9;

/// The constants of the speed-up model: the times and the slowdowns of a machine, a guest and a
/// tool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Constants {
    /// The time that the VM runs without recording, in seconds.
    pub t_vm: f64,
    /// The slowdown of the simulation, as a factor over `t_vm`.
    pub s_sim: f64,
    /// The slowdown of the recording, as a factor over `t_vm`.
    pub s_log: f64,
    /// The pause of a checkpoint, in seconds.
    pub t_c: f64,
    /// The time to initialise a simulation, in seconds.
    pub t_i: f64,
    /// The slowdown of an interval by its checkpoint, as a factor of at least 1; `1 + t_c/L` if it
    /// is `None`.
    pub s_cp: Option<f64>,
}

/// The error of a constant of the model that is out of bounds.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}: it must be {must}")]
pub struct InvalidConstant {
    /// The name of the constant.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// The valid values.
    pub must: &'static str,
}

impl Constants {
    /// Checks that all constants have valid values. Error: the first constant whose value is not
    /// valid.
    pub fn check(&self) -> Result<(), InvalidConstant> {
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
                return Err(InvalidConstant { name, value, must });
            }
        }
        Ok(())
    }

    /// Returns the slowdown of the simulation over the recording: `s_sim / s_log`.
    pub(crate) fn slowdown(&self) -> f64 {
        self.s_sim / self.s_log
    }

    /// Returns the time to simulate an interval of `length`. Both are in seconds.
    pub fn simulation(&self, length: f64) -> f64 {
        self.t_i + self.slowdown() * length
    }

    /// Returns the time of an interval of `length` with its checkpoint. Both are in seconds.
    pub(crate) fn period(&self, length: f64) -> f64 {
        self.s_cp.map_or(self.t_c + length, |factor| factor * length)
    }
}
