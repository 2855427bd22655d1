#![no_main]
//! The bytes of GDB and of a gdbstub, in pieces whose length the first byte tells.

use keyframe_gdb::{DecodedItem, GdbRequest, PacketDecoder, StopReply};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((piece, bytes)) = data.split_first() else { return };
    let mut decoder = PacketDecoder::default();
    for part in bytes.chunks(usize::from(*piece).max(1)) {
        decoder.feed(part);
        while let Ok(Some(item)) = decoder.next_item() {
            if let DecodedItem::Packet(payload) = item {
                let _ = GdbRequest::parse(&payload);
                if let Some(reply) = StopReply::parse(&payload) {
                    let _ = reply.packet("replaylog:begin");
                }
            }
        }
    }
});
