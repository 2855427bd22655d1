//! Entry points of the fuzzers in `fuzz/`. Not part of the public interface.

use crate::FrameBuffer;

/// Parses a party's decrypted stream. The first byte of `data` is the size of the pieces in which
/// the rest arrives.
pub fn frames(data: &[u8]) {
    let Some((piece, bytes)) = data.split_first() else { return };
    let mut input = FrameBuffer::default();
    for piece in bytes.chunks(usize::from(*piece).max(1)) {
        input.push(piece);
        while let Ok(Some(frame)) = input.next("a fuzzer") {
            assert!(frame.payload.len() < bytes.len(), "longer than the stream");
        }
    }
}
