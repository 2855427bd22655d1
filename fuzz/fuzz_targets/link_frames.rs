#![no_main]
//! See `keyframe_link::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_link::fuzzing::frames(data));
