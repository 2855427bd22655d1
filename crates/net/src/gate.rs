//! The gate before a protected VM's network. It holds each frame that the guest sends until the
//! standby has the state that sent it (output commit). Frames to the guest pass at once.
//!
//! ```text
//!   guest ─▶ NIC ─▶ filter-redirector ─socket─▶ Gate ─socket─▶ filter-redirector ─▶ netdev
//!                                                ▲                                (tap, user, ...)
//!      [VM paused] cut ─▶ epoch 7 ─▶ ... ─▶ release 7
//!
//!   holding   frames wait, each with the epoch in which it was sent; the first held frame of an
//!             epoch rings the controller's bell
//!   open      frames pass: the VM may run unprotected
//! ```
//!
//! Invariants:
//! 1. While the gate holds, no frame of an epoch passes before that epoch is released, even if a
//!    process dies: if the controller of a holding gate ends, the gate drops the held frames and
//!    ends.
//! 2. If the controller of an open gate ends, the gate goes on, and the guest keeps its network.
//! 3. The frames of each NIC keep their order. If a frame does not fit in the gate's memory, the
//!    gate drops it, as a full network would.
//!
//! Left out: which epochs a standby has. The controller knows that.

mod remote;
mod server;

pub use remote::GateRemote;
pub use server::serve_gate;

use crate::frame::Frame;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::PathBuf;

/// The largest number of NICs of one VM.
pub const NICS_MAX: usize = 32;
/// The largest number of bytes that a gate holds. Frames that do not fit are dropped.
pub const HELD_BYTES_MAX: usize = 256 << 20;

/// The unix sockets of one NIC's filters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateNic {
    /// The socket on which the guest's frames arrive.
    pub from_guest: PathBuf,
    /// The socket on which frames leave for the network.
    pub to_network: PathBuf,
}

/// A controller's request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GateRequest {
    /// Listen on the sockets of these NICs.
    Listen { nics: Vec<GateNic> },
    /// Hold all frames from now on.
    Hold,
    /// Let all held frames and all new frames pass.
    Open,
    /// The VM is paused: the frames that it has sent belong to the epoch that ends.
    Cut,
    /// Let frames of epochs up to this one pass.
    Release { epoch: u64 },
    /// Report the gate's state.
    Look,
}

/// The gate's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GateResponse {
    Done,
    Cut { epoch: u64 },
    Look(GateStatus),
    Failed { problem: String },
}

/// The state of a gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateStatus {
    /// True if all frames pass.
    pub open: bool,
    /// The number of held frames of the current epoch, which no cut has ended yet.
    pub fresh_frames: u64,
    /// The age of the oldest of these, in nanoseconds. `None` if there are none.
    pub oldest_ns: Option<u64>,
    /// The number of all held frames.
    pub held_frames: u64,
    /// The number of bytes of all held frames.
    pub held_bytes: u64,
    /// The number of frames that have passed.
    pub passed_frames: u64,
    /// The number of frames that were dropped because they did not fit in memory.
    pub dropped_frames: u64,
}

/// A frame in the queue.
struct Waiting {
    epoch: u64,
    at_ns: u64,
    frame: Frame,
}

/// Decides which frames of one VM may pass. Pure: the caller gives the time.
#[derive(Default)]
pub(crate) struct GateQueue {
    open: bool,
    /// The epoch that the guest is in.
    epoch: u64,
    released: Option<u64>,
    nics: Vec<VecDeque<Waiting>>,
    /// The last epoch whose first held frame was reported.
    told: Option<u64>,
    held_bytes: usize,
    passed: u64,
    dropped: u64,
}

impl GateQueue {
    /// Creates an open queue for `nics` NICs.
    pub fn new(nics: usize) -> Self {
        Self { open: true, nics: (0..nics).map(|_| VecDeque::new()).collect(), ..Self::default() }
    }

    /// Adds a frame that the guest sent on NIC number `nic`. `at_ns` is the time of the frame, in
    /// nanoseconds of the clock of [`Self::status`]. Drops the frame if the gate would hold more
    /// than [`HELD_BYTES_MAX`], or if there is no such NIC. Returns true if the frame is the first
    /// held one of its epoch.
    pub fn push(&mut self, nic: usize, frame: Frame, at_ns: u64) -> bool {
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

    /// Removes and returns the next frame that may pass on NIC number `nic`. Returns `None` if none
    /// may pass.
    pub fn pop_released(&mut self, nic: usize) -> Option<Frame> {
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

    /// Ends the current epoch and returns its number. All frames taken so far belong to it or to
    /// earlier epochs.
    pub fn cut(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch - 1
    }

    /// Holds the frames that come from now on. Frames that were already let pass, and wait only for
    /// room in the socket, still pass; later frames belong to a new epoch.
    pub fn hold(&mut self) {
        if std::mem::take(&mut self.open) {
            self.released = Some(self.cut());
        }
    }

    /// Lets all frames pass.
    pub fn open(&mut self) {
        self.open = true;
    }

    /// Returns true if all frames pass.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Lets the frames of epochs up to `epoch` pass. Error: `epoch` has not been cut.
    pub fn release(&mut self, epoch: u64) -> Result<(), String> {
        if epoch >= self.epoch {
            return Err(format!("epoch {epoch} cannot be released: it has not ended"));
        }
        self.released = self.released.max(Some(epoch));
        Ok(())
    }

    /// Returns the state at the time `now_ns`.
    pub fn status(&self, now_ns: u64) -> GateStatus {
        let all = || self.nics.iter().flatten();
        let fresh = || all().filter(|waiting| !self.open && waiting.epoch == self.epoch);
        GateStatus {
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
        /// Compares the queue with a list of the epochs in which frames were sent: no frame passes
        /// early, and all pass in order.
        #[test]
        fn no_frame_passes_before_its_epoch_is_released(steps in prop::collection::vec(0u8..6, 1..200)) {
            let mut queue = GateQueue::new(1);
            let (mut sent, mut ends, mut passed) = (0u32, Vec::new(), 0u32);
            // The number of frames that may have passed.
            let mut allowed = 0;
            queue.hold();
            for step in steps {
                match step {
                    0 | 1 => {
                        queue.push(0, frame(sent), 0);
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
                        while let Some(one) = queue.pop_released(0) {
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
    fn an_open_gate_passes_all_and_a_held_one_only_frames_from_before() {
        let mut queue = GateQueue::new(2);
        queue.push(1, frame(1), 5);
        assert_eq!(queue.status(9).fresh_frames, 0);
        queue.hold();
        assert!(
            queue.push(1, frame(2), 7) && !queue.push(0, frame(9), 8),
            "the first frame of an epoch is reported"
        );
        assert_eq!(queue.pop_released(1).map(|f| number(&f)), Some(1));
        assert!(queue.pop_released(1).is_none() && queue.pop_released(0).is_none());
        let look = queue.status(9);
        assert_eq!((look.fresh_frames, look.oldest_ns, look.held_frames), (2, Some(2), 2));
        let epoch = queue.cut();
        assert_eq!(queue.status(9).fresh_frames, 0);
        assert!(queue.pop_released(1).is_none());
        queue.release(epoch).unwrap();
        assert_eq!(queue.pop_released(1).map(|f| number(&f)), Some(2));
        assert_eq!(queue.pop_released(0).map(|f| number(&f)), Some(9));
        assert!(queue.push(1, frame(3), 7));
        assert!(queue.pop_released(1).is_none());
        queue.open();
        assert!(!queue.push(0, frame(4), 7), "it passes");
        assert_eq!(queue.pop_released(0).map(|f| number(&f)), Some(4));
        assert_eq!(queue.pop_released(1).map(|f| number(&f)), Some(3));
        assert_eq!(queue.status(9).held_bytes, 0);
    }

    #[test]
    fn what_does_not_fit_is_dropped_and_counted() {
        let mut queue = GateQueue::new(1);
        queue.hold();
        let large = Frame::new(&vec![1; 60_000]).unwrap();
        for _ in 0..HELD_BYTES_MAX / 60_000 + 10 {
            queue.push(0, large.clone(), 0);
        }
        let look = queue.status(0);
        assert!(look.dropped_frames > 0 && look.held_bytes <= HELD_BYTES_MAX as u64, "{look:?}");
    }
}
