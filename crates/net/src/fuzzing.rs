//! Doors for the fuzzers in `fuzz/`: each gives bytes to a reader of what VMs, controllers or
//! stores say.
//!
//! Not part of the interface. Each takes any bytes, and must neither panic nor take memory out of
//! proportion to them.

use crate::InFlight;
use crate::frame::Deframer;
use crate::wire::{Messages, Request, Response};

/// Packets in flight, as a store has them, before their checksum.
pub fn in_flight(covered: &[u8]) {
    let bytes = [covered, blake3::hash(covered).as_bytes()].concat();
    if let Ok(found) = InFlight::decode(&bytes) {
        assert!(
            found.encode().is_ok_and(|again| again == bytes),
            "packets in flight have one form"
        );
    }
}

/// What a VM sends, in pieces: the first byte says how long they are.
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

/// What a controller and a switch say to each other.
pub fn control(bytes: &[u8]) {
    let mut messages = Messages::default();
    messages.push(bytes);
    let _ = messages.is_too_much();
    while let Ok(Some(_)) = messages.next::<Request>() {}
    let mut messages = Messages::default();
    messages.push(bytes);
    while let Ok(Some(_)) = messages.next::<Response>() {}
}
