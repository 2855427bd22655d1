//! The QEMUs to test with.

use crate::seed::{choose, report_choice, seed, tests_every_variant};
use crate::{Scope, record_skip};

/// A QEMU to test with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qemu {
    /// The QEMU's name in test output: `distribution`, `10` or `11`.
    pub label: &'static str,
    /// The QEMU's program: a path, or a name that `PATH` resolves.
    pub path: String,
}

/// Returns the distribution's QEMU, in `PATH`.
pub fn distribution_qemu() -> Qemu {
    Qemu { label: "distribution", path: "qemu-system-x86_64".into() }
}

/// Returns QEMU 10 if `KEYFRAME_QEMU10` names its program; `None` if not, and then the caller
/// records a skip.
pub fn qemu_10() -> Option<Qemu> {
    let path = std::env::var("KEYFRAME_QEMU10").ok().filter(|path| !path.is_empty())?;
    Some(Qemu { label: "10", path })
}

/// Returns QEMU 11 if `KEYFRAME_QEMU11` names its program; `None` if not, and then the caller
/// records a skip.
pub fn qemu_11() -> Option<Qemu> {
    let path = std::env::var("KEYFRAME_QEMU11").ok().filter(|path| !path.is_empty())?;
    Some(Qemu { label: "11", path })
}

/// The reason why a test runs without QEMU 10.
pub const NO_QEMU_10: &str =
    "QEMU 10: KEYFRAME_QEMU10 names no program (guests/build qemu10 builds one)";
/// The reason why a test runs without QEMU 11.
pub const NO_QEMU_11: &str = "QEMU 11: KEYFRAME_QEMU11 names no program (guests/build qemu11 builds one; it runs under \
     bin/with-libraries there)";

/// Returns the distribution's QEMU, QEMU 10 and QEMU 11. If one of the latter is not there, that
/// part of the running test is recorded as skipped.
pub fn qemus() -> Vec<Qemu> {
    let (ten, eleven) = (qemu_10(), qemu_11());
    if ten.is_none() {
        record_skip(Scope::Part, NO_QEMU_10);
    }
    // `make test` leaves it to `make test-all`.
    if eleven.is_none() && tests_every_variant() {
        record_skip(Scope::Part, NO_QEMU_11);
    }
    std::iter::once(distribution_qemu()).chain(ten).chain(eleven).collect()
}

/// Chooses one of [`qemus`] by the seed; all of them if [`tests_every_variant`].
///
/// `turn` spreads the tests over the QEMUs: with one seed, tests with different turns run on
/// different ones. The next seed moves each test to the next QEMU. Give the tests of a file the
/// turns 0, 1, 0, 1, ...
pub fn chosen_qemus(turn: u64) -> Vec<Qemu> {
    let all = qemus();
    if tests_every_variant() || all.len() == 1 {
        return all;
    }
    let chosen = choose(all, 1, seed().wrapping_add(turn));
    report_choice(&chosen);
    chosen
}
