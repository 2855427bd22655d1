//! The figures and tables of the paper, a file for each group of them.

mod best_interval;
mod chart;
mod deduplication;
mod dirty;
mod en_bloc;
mod immediate_pauses;
mod pauses;
mod predictions;
mod processing;
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
    best_interval::write(outputs)?;
    en_bloc::write(groups, outputs, report)?;
    dirty::write(groups, outputs, report)?;
    deduplication::write(groups, outputs, report)?;
    sizes::write(groups, outputs, report)?;
    pauses::write(groups, outputs, report)?;
    processing::write(groups, outputs, report)?;
    reading::write(groups, outputs, report)?;
    speed_up::write(groups, outputs, report)?;
    immediate_pauses::write(groups, outputs, report)?;
    predictions::write(groups, outputs, report)
}

#[cfg(test)]
mod tests {
    use super::super::evaluated_run::samples;
    use super::*;

    #[test]
    fn every_table_has_rows_of_numbers_and_every_link_leads_to_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let runs = [500, 1000, 2000].map(|ms| [1, 2].map(|round| samples::run(ms, round)));
        let groups = RunRounds::of_runs(runs.into_iter().flatten());
        let (mut outputs, mut report) =
            (Outputs::new(dir.path()).unwrap(), Report::new("evaluation"));
        write_all(&groups, &mut outputs, &mut report).unwrap();
        outputs.write_report("head\n").unwrap();
        let index = std::fs::read_to_string(dir.path().join("report.md")).unwrap();
        let links: Vec<&str> =
            index.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
        assert!(links.len() > 60, "{index}");
        for link in links {
            let bytes = std::fs::read(dir.path().join(link)).unwrap();
            if std::path::Path::new(link).extension().is_some_and(|end| end == "csv") {
                let text = String::from_utf8(bytes).unwrap();
                let widths: Vec<usize> = text.lines().map(|line| line.split(',').count()).collect();
                assert!(
                    widths.len() > 1 && widths.iter().all(|width| *width == widths[0]),
                    "{text}"
                );
                assert!(!text.contains("NaN") && !text.contains("inf"), "{link}: {text}");
            }
        }
        // The runs follow the model exactly, so that the test interval is predicted exactly.
        let ratio = report.ratios["small_1000ms_1_jobs_formula_over_measured"];
        assert!((ratio - 1.0).abs() < 1e-6, "{ratio}");
        assert!((report.ratios["small_2000ms_immediate_over_deferred_pause"] - 1.0).abs() < 1e-9);
    }
}
