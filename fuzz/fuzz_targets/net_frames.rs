#![no_main]
//! See `keyframe_net::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_net::fuzzing::frames(data));
