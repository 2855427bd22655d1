#![no_main]
//! What a debugger sends, and what a stub answers, in pieces: the first byte says how long they
//! are.

use keyframe_gdb::{Decoder, Item, StopReply, command};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((piece, bytes)) = data.split_first() else { return };
    let mut decoder = Decoder::default();
    for part in bytes.chunks(usize::from(*piece).max(1)) {
        decoder.feed(part);
        while let Ok(Some(item)) = decoder.next_item() {
            if let Item::Packet(payload) = item {
                let _ = command(&payload);
                if let Some(reply) = StopReply::parse(&payload) {
                    let _ = reply.packet("replaylog:begin");
                }
            }
        }
    }
});
