//! `keyframe check`: is every sealed checkpoint whole?

use super::StoreArg;
use crate::failure::{DONE, FAILED, Outcome};
use crate::output;
use indicatif::{ProgressBar, ProgressStyle};
use keyframe_store::{CheckOptions, CheckProgress, CheckReport};

/// Check a store: is every checkpoint whole?
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Without --read-data: every checkpoint, map and pack is there, well-formed and of the right size.
With it: every stored page is read and compared with its hash, so that any flipped bit is found.

Exit code 0: whole. 1: damaged; the checkpoints that are hurt are named.

Examples:
  keyframe check --store S
  keyframe check --store S --read-data --json"
)]
pub struct Check {
    #[command(flatten)]
    store: StoreArg,
    /// Read and verify every stored page
    #[arg(long)]
    read_data: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
}

impl Check {
    /// Checks and reports.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let bar = if self.quiet { ProgressBar::hidden() } else { ProgressBar::no_length() };
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {eta}") {
            bar.set_style(style);
        }
        bar.set_message("checking");
        let mut progress = |p: CheckProgress| {
            bar.set_length(p.total_bytes);
            bar.set_position(p.done_bytes);
        };
        let options = CheckOptions { read_data: self.read_data };
        let report = store.check(&options, &mut progress).map_err(|e| self.store.failure(&e))?;
        bar.finish_and_clear();
        if self.json {
            output::json(&report)?;
        } else {
            print(&report, self.read_data)?;
        }
        Ok(if report.is_clean() { DONE } else { FAILED })
    }
}

fn print(report: &CheckReport, read_data: bool) -> Result<(), crate::failure::Failure> {
    for note in &report.notes {
        output::print_line(&format!("note: {note}"))?;
    }
    for damage in &report.damages {
        let hurt = match damage.checkpoints.as_slice() {
            [] => "no checkpoint needs it".to_owned(),
            ids => format!(
                "hurts checkpoints {}",
                ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            ),
        };
        output::print_line(&format!("DAMAGED {}: {}; {hurt}", damage.object, damage.problem))?;
    }
    let depth = if read_data { "every page read" } else { "structure only; --read-data reads every page" };
    let verdict = if report.is_clean() { "whole" } else { "damaged" };
    output::print_line(&format!(
        "{} checkpoints, {} pages in {} packs: {verdict} ({depth})",
        report.checkpoints, report.records, report.packs
    ))
}
