//! `keyframe check`: is every sealed checkpoint whole?

use super::StoreArg;
use crate::failure::{DONE, FAILED, Failure, Outcome, WARNED};
use crate::output;
use crate::progress;
use keyframe_store::{CheckOptions, CheckProgress, CheckReport, RepairReport};

/// Check a store: is every checkpoint whole?
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Without --read-data the command checks that every checkpoint, map and pack is there, well-formed and of the right size.
With --read-data it also reads every stored page and compares it with its hash, which finds any flipped bit.

With --repair the command rebuilds indexes, replaces bad pages by the same content from elsewhere in the store, and moves the
good pages of a damaged pack. It moves to STORE/quarantine what it cannot save, lists it, and deletes nothing. Afterwards the
store is whole. No run and no prune may use the store meanwhile. The repair may be killed at any instant.

Exit code 0: the store is whole. 1: it is damaged; the damaged checkpoints are named. 3: it was damaged and is repaired.

Examples:
  keyframe check --store S
  keyframe check --store S --read-data --json
  keyframe check --store S --repair"
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub struct Check {
    #[command(flatten)]
    store: StoreArg,
    /// Read and verify every stored page
    #[arg(long)]
    read_data: bool,
    /// Save what can be saved, set aside what cannot, and list both; reads every page
    #[arg(long)]
    repair: bool,
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
        let bar = progress::bar(self.quiet, None, "{msg} {wide_bar} {bytes}/{total_bytes} {eta}");
        bar.set_message("checking");
        let mut progress = |p: CheckProgress| {
            bar.set_length(p.total_bytes);
            bar.set_position(p.done_bytes);
        };
        if self.repair {
            let report = store.repair(&mut progress).map_err(|e| self.repair_failure(&e))?;
            bar.finish_and_clear();
            return self.repaired(&report);
        }
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

    fn repair_failure(&self, error: &keyframe_store::Error) -> Failure {
        let failure = self.store.failure(error);
        match error {
            keyframe_store::Error::Damaged { .. } => failure
                .fix("what is whole can still be copied to another store: keyframe copy --all --to STORE2"),
            _ => failure,
        }
    }

    fn repaired(&self, report: &RepairReport) -> Outcome {
        let code = match &report.after {
            None => DONE,
            Some(after) if after.is_clean() => WARNED,
            Some(_) => FAILED,
        };
        if self.json {
            output::json(report)?;
            return Ok(code);
        }
        let Some(after) = &report.after else {
            print(&report.found, true)?;
            output::print_line("nothing to repair")?;
            return Ok(code);
        };
        for damage in &report.found.damages {
            output::print_line(&format!("was damaged: {}: {}", damage.object, damage.problem))?;
        }
        for name in &report.rebuilt {
            output::print_line(&format!("built anew: {name}"))?;
        }
        for file in &report.set_aside {
            let to = file.to.as_deref().unwrap_or("nothing was left of it");
            output::print_line(&format!("set aside: {} ({to}): {}", file.name, file.problem))?;
        }
        output::print_line(&format!(
            "saved: {} pages of damaged packs, {} of them by the same content elsewhere",
            report.saved_records, report.relinked_records
        ))?;
        for lost in &report.lost {
            let tags = if lost.tags.is_empty() {
                String::new()
            } else {
                format!(" ({})", lost.tags.join(", "))
            };
            output::print_line(&format!("LOST checkpoint {}{tags}: {}", lost.id, lost.problem))?;
        }
        output::print_line(&format!("{} checkpoints lost", report.lost.len()))?;
        print(after, true)?;
        Ok(code)
    }
}

fn print(report: &CheckReport, read_data: bool) -> Result<(), Failure> {
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
    let depth =
        if read_data { "every page read" } else { "structure only; --read-data reads every page" };
    let verdict = if report.is_clean() { "whole" } else { "damaged" };
    output::print_line(&format!(
        "{} checkpoints, {} pages in {} packs: {verdict} ({depth})",
        report.checkpoints, report.records, report.packs
    ))
}
