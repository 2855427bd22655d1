//! The figures and tables of the paper, a file for each group of them.

mod chart;
mod deduplication;
mod dirty;
mod pauses;
mod processing;
mod reading;
mod sizes;
mod speed_up;

use super::evaluated_run::EvaluatedRun;
use super::output::Outputs;
use crate::{Error, Report};

/// Writes the files of all figures and adds their main values to `report`.
pub fn write_all(
    runs: &[EvaluatedRun],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    dirty::write(runs, outputs, report)?;
    deduplication::write(runs, outputs, report)?;
    sizes::write(runs, outputs, report)?;
    pauses::write(runs, outputs, report)?;
    processing::write(runs, outputs, report)?;
    reading::write(runs, outputs, report)?;
    speed_up::write(runs, outputs, report)
}
