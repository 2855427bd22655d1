#![no_main]
//! See `keyframe_qemu::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_qemu::fuzzing::monitor(data));
