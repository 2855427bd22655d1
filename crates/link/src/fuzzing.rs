//! Doors for the fuzzers in `fuzz/`. Not part of the interface.

use crate::Input;

/// What a party sends, decrypted, in pieces: the first byte says how long they are.
pub fn frames(data: &[u8]) {
    let Some((piece, bytes)) = data.split_first() else { return };
    let mut input = Input::default();
    for piece in bytes.chunks(usize::from(*piece).max(1)) {
        input.push(piece);
        while let Ok(Some(frame)) = input.next("a fuzzer") {
            assert!(frame.payload.len() < bytes.len(), "more than came");
        }
    }
}
