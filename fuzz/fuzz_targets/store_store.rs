#![no_main]
//! See `keyframe_store::fuzzing`.

use keyframe_store::fuzzing::{Files, store};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static FILES: LazyLock<Files> = LazyLock::new(keyframe_fuzz::golden_store);

fuzz_target!(|data: &[u8]| store(&FILES, data));
