//! The paper's figures and tables, a file for each group of them.

mod deduplication;
mod dirty;
mod lines;
mod pauses;
mod processing;
mod reading;
mod sizes;
mod speed_up;

use super::measured::Run;
use super::output::Outputs;
use crate::{Error, Report};

/// Writes all; the values that are compared at a glance go into `report`.
pub fn all(runs: &[Run], outputs: &mut Outputs, report: &mut Report) -> Result<(), Error> {
    dirty::write(runs, outputs, report)?;
    deduplication::write(runs, outputs, report)?;
    sizes::write(runs, outputs, report)?;
    pauses::write(runs, outputs, report)?;
    processing::write(runs, outputs, report)?;
    reading::write(runs, outputs, report)?;
    speed_up::write(runs, outputs, report)
}
