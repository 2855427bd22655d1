//! Entry points of the fuzzers in `fuzz/`. Each gives bytes to a parser of what VMs, controllers or
//! stores send.
//!
//! Not part of the public interface. Each function takes any bytes. It must neither panic nor take
//! memory out of proportion to them.

use crate::InFlight;
use crate::frame::Deframer;
use crate::wire::{Messages, SwitchRequest, SwitchResponse};

/// Decodes packets in flight as a store holds them, without their checksum.
pub fn in_flight(covered: &[u8]) {
    let bytes = [covered, blake3::hash(covered).as_bytes()].concat();
    if let Ok(found) = InFlight::decode(&bytes) {
        assert!(
            found.encode().is_ok_and(|again| again == bytes),
            "packets in flight have one form"
        );
    }
}

/// Parses a VM's stream of frames. The first byte of `data` is the size of the pieces in which the
/// rest arrives.
pub fn frames(data: &[u8]) {
    let Some((piece, bytes)) = data.split_first() else { return };
    let (mut deframer, mut found) = (Deframer::default(), Vec::new());
    for piece in bytes.chunks(usize::from(*piece).max(1)) {
        if deframer.push(piece, &mut found).is_err() {
            return;
        }
    }
    let whole: usize = found.iter().map(|frame| frame.wire().len()).sum();
    assert_eq!(whole + deframer.begun_bytes(), bytes.len(), "bytes were lost between frames");
    for frame in &found {
        let _ = (frame.destination(), frame.source());
    }
}

/// Parses the messages of a controller and of a switch.
pub fn control(bytes: &[u8]) {
    let mut messages = Messages::default();
    messages.push(bytes);
    let _ = messages.is_too_much();
    while let Ok(Some(_)) = messages.next::<SwitchRequest>() {}
    let mut messages = Messages::default();
    messages.push(bytes);
    while let Ok(Some(_)) = messages.next::<SwitchResponse>() {}
}
