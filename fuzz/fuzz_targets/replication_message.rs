#![no_main]
//! Messages between hosts, requests to a witness, and a witness' persisted state.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = keyframe_replication::PeerMessage::decode(data);
    let _ = keyframe_replication::WitnessRequest::decode(data);
    let _ = keyframe_replication::WitnessReply::decode(data);
    let _ = keyframe_replication::Witness::decode(data);
});
