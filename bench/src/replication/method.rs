//! The methods: how a guest runs, from the tracking of its writes alone to a standby that its
//! packets wait for.
//!
//! ```text
//!                 written pages found   VM paused, pages copied   sent to a standby   packets wait
//!   trackingN            x
//!   transferN            x                        x                       x
//!   fixedN               x                        x                       x                x
//!   paper, adaptive      x                        x                       x                x
//! ```
//!
//! N is the interval in milliseconds: that of `--policy fixed:N`, and the length of the epochs that
//! are tracked. So the difference between two lines of one N is the cost of what the second one does
//! more.

/// A method.
#[derive(Debug)]
pub struct Method {
    /// Its name in keys.
    pub key: &'static str,
    pub setup: Setup,
}

/// What runs beside the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setup {
    /// `keyframe profile` with epochs of `interval`. It scans for written pages and protects them
    /// again before and after each epoch. It never pauses the VM, and copies nothing.
    Tracked { interval: &'static str },
    /// `keyframe protect` with `--policy` and `--hold-output`, a standby and a witness.
    Replicated { policy: &'static str, hold_output: &'static str },
}

const fn tracking(key: &'static str, interval: &'static str) -> Method {
    Method { key, setup: Setup::Tracked { interval } }
}

const fn transfer(key: &'static str, policy: &'static str) -> Method {
    Method { key, setup: Setup::Replicated { policy, hold_output: "none" } }
}

const fn committed(key: &'static str, policy: &'static str) -> Method {
    Method { key, setup: Setup::Replicated { policy, hold_output: "net" } }
}

/// All methods but that of plain runs, in the order of the first round.
pub const ALL: [Method; 14] = [
    tracking("tracking25", "25ms"),
    tracking("tracking50", "50ms"),
    tracking("tracking100", "100ms"),
    tracking("tracking200", "200ms"),
    transfer("transfer25", "fixed:25ms"),
    transfer("transfer50", "fixed:50ms"),
    transfer("transfer100", "fixed:100ms"),
    transfer("transfer200", "fixed:200ms"),
    committed("fixed25", "fixed:25ms"),
    committed("fixed50", "fixed:50ms"),
    committed("fixed100", "fixed:100ms"),
    committed("fixed200", "fixed:200ms"),
    committed("paper", "paper"),
    committed("adaptive", "adaptive"),
];

impl Method {
    /// Returns whether the guest has a standby.
    pub fn is_replicated(&self) -> bool {
        matches!(self.setup, Setup::Replicated { .. })
    }
}
