#![no_main]
//! See `keyframe_store_backend::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_store_backend::fuzzing::archive(data));
