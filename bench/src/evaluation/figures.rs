//! The figures and tables of the paper, a file for each group of them.

mod chart;
mod deduplication;
mod dirty;
mod distribution;
mod en_bloc;
mod pauses;
mod predictions;
mod processing;
mod queueing;
mod reading;
mod sizes;
mod speed_up;

use super::output::Outputs;
use super::rounds::RunRounds;
use crate::{Error, Report};

/// Writes the files of all figures and adds their main values to `report`.
pub fn write_all(
    groups: &[RunRounds],
    outputs: &mut Outputs,
    report: &mut Report,
) -> Result<(), Error> {
    queueing::write(outputs)?;
    en_bloc::write(groups, outputs, report)?;
    dirty::write(groups, outputs, report)?;
    deduplication::write(groups, outputs, report)?;
    sizes::write(groups, outputs, report)?;
    pauses::write(groups, outputs, report)?;
    processing::write(groups, outputs, report)?;
    reading::write(groups, outputs, report)?;
    speed_up::write(groups, outputs, report)?;
    distribution::write(groups, outputs, report)?;
    predictions::write(groups, outputs, report)
}
