#![no_main]
//! What hosts say to each other, and what a witness keeps.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = keyframe_replication::Message::decode(data);
    let _ = keyframe_replication::WitnessRequest::decode(data);
    let _ = keyframe_replication::WitnessReply::decode(data);
    let _ = keyframe_replication::Witness::decode(data);
});
