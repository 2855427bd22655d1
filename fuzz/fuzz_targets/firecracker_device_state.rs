#![no_main]
//! See `keyframe_firecracker::registers`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| drop(keyframe_firecracker::registers::read(data)));
