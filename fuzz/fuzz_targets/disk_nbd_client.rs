#![no_main]
//! See `keyframe_disk::fuzzing`.

use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;

static SOCKET: LazyLock<PathBuf> = LazyLock::new(|| {
    std::env::temp_dir().join(format!("keyframe-fuzz-nbd.{}", std::process::id()))
});

fuzz_target!(|data: &[u8]| keyframe_disk::fuzzing::nbd_client(data, &SOCKET));
