//! The parts that the end-to-end tests share: the program under test, guests, consoles, and the
//! sequences that guests print.
//!
//! Each test has a [`TestEnv`]: a temporary directory with its own run directory and store, so that
//! tests do not interfere. A test that fails prints the commands that it ran.

pub mod attach_soak;
mod boot;
mod browser;
pub mod core_file;
mod debugger;
pub mod disks;
mod echo;
mod exact;
mod external_vm;
pub mod fault_trial;
pub mod firecracker;
pub mod firecracker_drive;
mod hash;
pub mod helpers;
mod http;
mod huge;
mod journal;
pub mod journaling;
mod kvm;
mod machine_line;
mod memory_cgroup;
pub mod mounted;
mod orphan;
mod payload;
mod process;
pub mod protection;
mod ram;
pub mod recording;
pub mod relay;
pub mod rollbacks;
mod slot;
pub mod tap_network;
mod test_env;
mod virt;

/// A libvirt daemon for one test; the tests of `keyframe-qemu` start the same.
#[expect(missing_docs, reason = "the tests of keyframe-qemu do not need them")]
#[path = "../../crates/qemu/tests/support/libvirt.rs"]
pub mod libvirt;

/// An S3 server for one test; the tests of the store start the same.
#[path = "../../crates/store-backend/src/testing/s3_server.rs"]
pub mod s3;

pub use boot::Boot;
pub use browser::Browser;
pub use debugger::Debugger;
pub use echo::echo;
pub use exact::{
    assert_no_errors, assert_restores_exactly, assert_restores_exactly_with, restored_pid,
    take_audited_checkpoints,
};
pub use external_vm::{ExternalVm, Traces};
pub use firecracker::FirecrackerGuest;
pub use hash::{HashLine, Sequence, hash_lines};
pub use http::Http;
pub use huge::HugePages;
pub use journal::{JournalImage, journal_counter};
pub use keyframe_testing::{
    NO_QEMU_10, NO_QEMU_11, PATIENCE, Qemu, Scope, chosen_qemus, distribution_qemu, has_program,
    qemu_10, qemu_11, qemus, record_skip, seed, skip, small_guest, variants, wait_until,
};
pub use kvm::missing_kvm;
pub use machine_line::{Choices, MachineLine};
pub use memory_cgroup::MemoryCgroup;
pub use orphan::{Orphan, is_gone};
pub use payload::{PassLine, PassSequence, pass_lines};
pub use process::{Process, children};
pub use ram::{differing_pages, live_ram, stored_ram};
pub use slot::Slot;
pub use test_env::TestEnv;
pub use virt::{VirtGuest, virt_guest, virt_guests};

use serde_json::Value;
use std::path::{Path, PathBuf};

/// The complete lines of a console's file. While QEMU writes, the last line may be incomplete.
pub fn ended_lines(path: &Path) -> Vec<String> {
    let text = std::fs::read(path).unwrap_or_default();
    let ended = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    String::from_utf8_lossy(&text[..ended]).lines().map(|line| line.trim_end().to_owned()).collect()
}

/// The program under test: `KEYFRAME_BIN`, or the one of the same build as the tests.
pub fn keyframe() -> PathBuf {
    std::env::var_os("KEYFRAME_BIN").map_or_else(|| built_program("keyframe"), PathBuf::from)
}

/// The program `name` of the same build as the tests.
fn built_program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of the test program");
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let path = profile.join(name);
    assert!(path.is_file(), "no {}: build it first (make test does)", path.display());
    path
}

/// The path of a program in `PATH`.
pub fn on_path(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("no {program} in PATH"))
}

/// The number at `key` of a JSON object.
pub fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or_else(|| panic!("no number {key} in {value}"))
}
