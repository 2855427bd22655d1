#![no_main]
//! See `keyframe_analysis::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_analysis::fuzzing::types(data));
