#![no_main]
//! See `keyframe_transfer::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_transfer::fuzzing::batch(data));
