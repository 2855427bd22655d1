#![no_main]
//! See `keyframe_disk::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_disk::fuzzing::engine_requests(data));
