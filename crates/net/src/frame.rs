//! Ethernet frames as QEMU's `stream` and `socket` netdevs send them, and their framing in a stream
//! of bytes.
//!
//! ```text
//!   | length, 4 bytes, big-endian | frame | length | frame | ...
//! ```
//!
//! Invariant: a [`Frame`] has 1 to [`FRAME_BYTES_MAX`] bytes, so the first byte of its header is 0.
//! [`crate::port`] relies on this.

use std::sync::Arc;

/// The longest frame: 64 KiB, and virtio's header of 12 bytes.
pub const FRAME_BYTES_MAX: usize = (64 << 10) + 12;
/// The size of the length field before each frame.
pub const HEADER_BYTES: usize = 4;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Returns true for broadcast and multicast addresses.
    pub fn is_group(self) -> bool {
        self.0[0] & 1 == 1
    }
}

/// A frame with its header. The ports that it goes to share its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame(Arc<[u8]>);

impl Frame {
    /// Makes a frame. Returns `None` if `bytes` is empty or longer than [`FRAME_BYTES_MAX`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty() || bytes.len() > FRAME_BYTES_MAX {
            return None;
        }
        let len = u32::try_from(bytes.len()).ok()?;
        Some(Self([&len.to_be_bytes()[..], bytes].concat().into()))
    }

    /// Returns the frame without its header.
    pub fn bytes(&self) -> &[u8] {
        self.0.get(HEADER_BYTES..).unwrap_or_default()
    }

    /// Returns the frame with its header, as it is sent.
    pub fn wire(&self) -> &[u8] {
        &self.0
    }

    /// Returns the destination address. `None` if the frame is too short for one.
    pub fn destination(&self) -> Option<Mac> {
        self.mac(0)
    }

    /// Returns the source address. `None` if the frame is too short for one.
    pub fn source(&self) -> Option<Mac> {
        self.mac(6)
    }

    fn mac(&self, at: usize) -> Option<Mac> {
        self.bytes().get(at..at + 6)?.try_into().ok().map(Mac)
    }
}

/// Splits a stream of bytes, which arrives in pieces, into frames.
#[derive(Default)]
pub struct Deframer {
    /// The incomplete last frame, with its header.
    begun: Vec<u8>,
}

impl Deframer {
    /// Consumes `bytes` and appends the frames that are complete now to `frames`. Error: the stream
    /// is invalid, with the reason; the caller closes it.
    pub fn push(&mut self, mut bytes: &[u8], frames: &mut Vec<Frame>) -> Result<(), String> {
        while !bytes.is_empty() {
            let want = self.wire_len()?;
            let (now, rest) = bytes.split_at((want - self.begun.len()).min(bytes.len()));
            self.begun.extend_from_slice(now);
            bytes = rest;
            if self.begun.len() > HEADER_BYTES && self.begun.len() == self.wire_len()? {
                frames.push(Frame(self.begun.as_slice().into()));
                self.begun.clear();
            }
        }
        // Checks a complete header at once, before its frame arrives.
        self.wire_len().map(drop)
    }

    /// Returns the length of the incomplete last frame, with its header, in bytes.
    pub fn begun_bytes(&self) -> usize {
        self.begun.len()
    }

    /// The length of the incomplete frame with its header, or of the header if that is incomplete.
    fn wire_len(&self) -> Result<usize, String> {
        let Some(header) = self.begun.first_chunk::<HEADER_BYTES>() else {
            return Ok(HEADER_BYTES);
        };
        let len = u32::from_be_bytes(*header) as usize;
        if (1..=FRAME_BYTES_MAX).contains(&len) {
            Ok(HEADER_BYTES + len)
        } else {
            Err(format!(
                "it announced a frame of {len} bytes (1 to {FRAME_BYTES_MAX} are possible)"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_back_however_the_stream_is_cut(
            sent in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 0..12),
            cuts in prop::collection::vec(1usize..40, 1..20),
        ) {
            let frames: Vec<Frame> = sent.iter().map(|b| Frame::new(b).unwrap()).collect();
            let stream: Vec<u8> = frames.iter().flat_map(|f| f.wire().to_vec()).collect();
            let (mut left, mut cuts) = (&stream[..], cuts.iter().cycle());
            let (mut deframer, mut found) = (Deframer::default(), Vec::new());
            while !left.is_empty() {
                let (now, rest) = left.split_at((*cuts.next().unwrap()).min(left.len()));
                deframer.push(now, &mut found).unwrap();
                left = rest;
            }
            prop_assert_eq!(deframer.begun_bytes(), 0);
            prop_assert_eq!(found, frames);
        }

        #[test]
        fn arbitrary_bytes_are_frames_or_refused_and_never_kept_beyond_one(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
        ) {
            let (mut deframer, mut found) = (Deframer::default(), Vec::new());
            for piece in &pieces {
                if deframer.push(piece, &mut found).is_err() {
                    break;
                }
            }
            prop_assert!(deframer.begun.len() <= HEADER_BYTES + FRAME_BYTES_MAX);
        }
    }

    #[test]
    fn a_length_that_cannot_be_is_refused_with_its_header() {
        for len in [0u32, FRAME_BYTES_MAX as u32 + 1, u32::MAX] {
            let error = Deframer::default().push(&len.to_be_bytes(), &mut Vec::new()).unwrap_err();
            assert!(error.contains(&len.to_string()), "{error}");
        }
        let longest = Frame::new(&vec![7; FRAME_BYTES_MAX]).unwrap();
        assert_eq!(longest.wire()[0], 0);
        let mut found = Vec::new();
        Deframer::default().push(longest.wire(), &mut found).unwrap();
        assert_eq!(found, [longest]);
        assert!(Frame::new(&vec![7; FRAME_BYTES_MAX + 1]).is_none() && Frame::new(&[]).is_none());
    }
}
