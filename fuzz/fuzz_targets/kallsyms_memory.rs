#![no_main]
//! See `keyframe_kallsyms::fuzzing`.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| keyframe_kallsyms::fuzzing::memory(data));
