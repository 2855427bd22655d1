//! The gate before a protected VM's network. It holds each frame that the guest sends until the
//! standby has the state that sent it (output commit). Frames to the guest pass at once.
//!
//! ```text
//!   guest ─▶ NIC ─▶ filter-redirector ──socket──▶ Gate ──socket──▶ filter-redirector ─▶ netdev (tap, user, bridge, ...)
//!                                                  ▲
//!      [VM stands] cut ─▶ epoch 7 ─▶ ... ─▶ release 7            the first frame held of an epoch rings the controller's bell
//!
//!   holding   frames wait, each with the epoch that it was sent in
//!   open      frames pass: the VM runs unprotected by right
//! ```
//!
//! Invariants:
//! 1. While it holds, no frame of an epoch passes before that epoch is released, whoever dies: a gate whose controller has
//!    gone drops what it holds, and ends.
//! 2. An open gate whose controller has gone goes on: the guest keeps its network.
//! 3. Frames keep their order, each NIC's. What does not fit in its memory is dropped, newest first, as a full network would.
//!
//! Left out: what a standby knows (the controller's).

mod remote;
mod server;

pub use remote::GateRemote;
pub use server::serve_gate;

use crate::frame::Frame;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::PathBuf;

/// The NICs of one VM at most.
pub const NICS_MAX: usize = 32;
/// What it holds at most, in bytes.
pub const HELD_BYTES_MAX: usize = 256 << 20;

/// The sockets of one NIC's filters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateNic {
    /// Where the guest's frames come from.
    pub from_guest: PathBuf,
    /// Where they go on.
    pub to_network: PathBuf,
}

/// What a controller asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Listen for these NICs.
    Listen { nics: Vec<GateNic> },
    /// From here on frames are held.
    Hold,
    /// All that is held may pass, and all that comes.
    Open,
    /// The VM stands: what it has sent belongs to the epoch that ends.
    Cut,
    /// Frames of epochs up to this one may pass.
    Release { epoch: u64 },
    /// How it is.
    Look,
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Done,
    Cut { epoch: u64 },
    Look(GateLook),
    Failed { problem: String },
}

/// How a gate is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateLook {
    /// It lets everything pass.
    pub open: bool,
    /// Frames that no cut epoch covers.
    pub fresh_frames: u64,
    /// How long ago the oldest of these came.
    pub oldest_ns: Option<u64>,
    /// All frames that are held.
    pub held_frames: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// Frames that have passed.
    pub passed_frames: u64,
    /// Frames that were dropped since they did not fit.
    pub dropped_frames: u64,
}

/// A frame that waits.
struct Waiting {
    epoch: u64,
    at_ns: u64,
    frame: Frame,
}

/// Which frames may pass, of one VM. Pure: time is given.
#[derive(Default)]
pub(crate) struct Queue {
    open: bool,
    /// The epoch that the guest is in.
    epoch: u64,
    released: Option<u64>,
    nics: Vec<VecDeque<Waiting>>,
    /// The epoch whose first frame was told.
    told: Option<u64>,
    held_bytes: usize,
    passed: u64,
    dropped: u64,
}

impl Queue {
    /// For `nics`, open.
    pub fn new(nics: usize) -> Self {
        Self { open: true, nics: (0..nics).map(|_| VecDeque::new()).collect(), ..Self::default() }
    }

    /// A frame of the guest's, on NIC number `nic`. True where it is the first of its epoch that is
    /// held.
    pub fn take(&mut self, nic: usize, frame: Frame, at_ns: u64) -> bool {
        let bytes = frame.wire().len();
        if self.held_bytes + bytes > HELD_BYTES_MAX {
            self.dropped += 1;
            return false;
        }
        let Some(queue) = self.nics.get_mut(nic) else { return false };
        self.held_bytes += bytes;
        queue.push_back(Waiting { epoch: self.epoch, at_ns, frame });
        !self.open && self.told.replace(self.epoch) != Some(self.epoch)
    }

    /// The next frame that may pass on NIC number `nic`.
    pub fn pass(&mut self, nic: usize) -> Option<Frame> {
        let queue = self.nics.get_mut(nic)?;
        let first = queue.front()?;
        if !(self.open || self.released.is_some_and(|released| first.epoch <= released)) {
            return None;
        }
        let waiting = queue.pop_front()?;
        self.held_bytes -= waiting.frame.wire().len();
        self.passed += 1;
        Some(waiting.frame)
    }

    /// The epoch that has ended; all that was taken belongs to it or to those before.
    pub fn cut(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch - 1
    }

    /// What waits only for room to be written was let pass already; what comes is of a new epoch.
    pub fn hold(&mut self) {
        if std::mem::take(&mut self.open) {
            self.released = Some(self.cut());
        }
    }

    pub fn open(&mut self) {
        self.open = true;
    }

    pub fn is_open(&self) -> bool {
        self.open
    }

    /// An epoch that was never cut cannot be released.
    pub fn release(&mut self, epoch: u64) -> Result<(), String> {
        if epoch >= self.epoch {
            return Err(format!("epoch {epoch} was to be released and has not ended"));
        }
        self.released = self.released.max(Some(epoch));
        Ok(())
    }

    pub fn look(&self, now_ns: u64) -> GateLook {
        let all = || self.nics.iter().flatten();
        let fresh = || all().filter(|waiting| !self.open && waiting.epoch == self.epoch);
        GateLook {
            open: self.open,
            fresh_frames: fresh().count() as u64,
            oldest_ns: fresh().map(|waiting| now_ns.saturating_sub(waiting.at_ns)).max(),
            held_frames: all().count() as u64,
            held_bytes: self.held_bytes as u64,
            passed_frames: self.passed,
            dropped_frames: self.dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(n: u32) -> Frame {
        Frame::new(&n.to_le_bytes()).unwrap()
    }

    fn number(frame: &Frame) -> u32 {
        u32::from_le_bytes(frame.bytes().try_into().unwrap())
    }

    proptest! {
        /// Against a list of who was sent in which epoch: nothing passes early, all pass in order
        /// once they may.
        #[test]
        fn no_frame_passes_before_its_epoch_is_released(steps in prop::collection::vec(0u8..6, 1..200)) {
            let mut queue = Queue::new(1);
            let (mut sent, mut ends, mut passed) = (0u32, Vec::new(), 0u32);
            // How many frames may have passed.
            let mut allowed = 0;
            queue.hold();
            for step in steps {
                match step {
                    0 | 1 => {
                        queue.take(0, frame(sent), 0);
                        sent += 1;
                    }
                    2 => ends.push((queue.cut(), sent)),
                    3 => {
                        if let Some((epoch, end)) = ends.pop() {
                            queue.release(epoch).unwrap();
                            allowed = allowed.max(end);
                        }
                    }
                    4 => prop_assert!(queue.release(queue.epoch).is_err()),
                    _ => {
                        while let Some(one) = queue.pass(0) {
                            prop_assert_eq!(number(&one), passed);
                            passed += 1;
                        }
                        prop_assert_eq!(passed, allowed);
                    }
                }
            }
        }
    }

    #[test]
    fn an_open_gate_lets_all_pass_and_a_held_one_what_it_had_let_pass() {
        let mut queue = Queue::new(2);
        queue.take(1, frame(1), 5);
        assert_eq!(queue.look(9).fresh_frames, 0);
        queue.hold();
        assert!(
            queue.take(1, frame(2), 7) && !queue.take(0, frame(9), 8),
            "the first one of an epoch is told"
        );
        assert_eq!(queue.pass(1).map(|f| number(&f)), Some(1));
        assert!(queue.pass(1).is_none() && queue.pass(0).is_none());
        let look = queue.look(9);
        assert_eq!((look.fresh_frames, look.oldest_ns, look.held_frames), (2, Some(2), 2));
        let epoch = queue.cut();
        assert_eq!(queue.look(9).fresh_frames, 0);
        assert!(queue.pass(1).is_none());
        queue.release(epoch).unwrap();
        assert_eq!(queue.pass(1).map(|f| number(&f)), Some(2));
        assert_eq!(queue.pass(0).map(|f| number(&f)), Some(9));
        assert!(queue.take(1, frame(3), 7));
        assert!(queue.pass(1).is_none());
        queue.open();
        assert!(!queue.take(0, frame(4), 7), "it passes");
        assert_eq!(queue.pass(0).map(|f| number(&f)), Some(4));
        assert_eq!(queue.pass(1).map(|f| number(&f)), Some(3));
        assert_eq!(queue.look(9).held_bytes, 0);
    }

    #[test]
    fn what_does_not_fit_is_dropped_and_counted() {
        let mut queue = Queue::new(1);
        queue.hold();
        let large = Frame::new(&vec![1; 60_000]).unwrap();
        for _ in 0..HELD_BYTES_MAX / 60_000 + 10 {
            queue.take(0, large.clone(), 0);
        }
        let look = queue.look(0);
        assert!(look.dropped_frames > 0 && look.held_bytes <= HELD_BYTES_MAX as u64, "{look:?}");
    }
}
