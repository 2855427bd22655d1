//! The rules that every test program of the workspace shares. Only tests depend on this crate.
//!
//! - A [seed](seed()) chooses the variants that a run tests: `KEYFRAME_TEST_SEED`, or 1. Neither
//!   the date nor a test's name has a say, so one seed means the same tests on each day.
//! - A test that cannot run its subject calls [`skip!`] with the reason. `scripts/test` counts it
//!   as skipped and lists the reason.
//! - [`assert_golden`] compares a text with a golden file; `KEYFRAME_BLESS=1` writes the file.
//! - [`qemus`] and [`small_guest`] find the QEMUs and the guest to test with.

mod golden;
mod guest;
mod qemu;
mod seed;
mod skip;
mod waiting;

pub use golden::{assert_golden, error_text};
pub use guest::{build_guest, has_program, small_guest};
pub use qemu::{
    NO_QEMU_10, NO_QEMU_11, Qemu, chosen_qemus, distribution_qemu, qemu_10, qemu_11, qemus,
};
pub use seed::{seed, tests_every_variant, variants};
pub use skip::{Scope, record_skip};
pub use waiting::{PATIENCE, pause_after, wait_until};
