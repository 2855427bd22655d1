#![no_main]
//! See `keyframe_screen::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_screen::fuzzing::draw(data));
