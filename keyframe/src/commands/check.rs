//! `keyframe check`: is every sealed checkpoint whole?

use super::StoreArg;
use crate::failure::{DONE, FAILED, Failure, Outcome, WARNED};
use crate::output;
use crate::progress;
use keyframe_store::{CheckOptions, CheckProgress, CheckReport, RepairReport, Store};
use keyframe_vm_disks::clone_files::{UnusableClone, unusable_clones};
use serde::Serialize;

/// The most clones that are shown to people.
const CLONES_SHOWN_MAX: usize = 10;

/// What `--json` prints.
#[derive(Serialize)]
struct Checked<'a> {
    #[serde(flatten)]
    store: &'a CheckReport,
    /// Absent if all clones are as they were made.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    unusable_clones: &'a [UnusableClone],
}

/// Check a store: is every checkpoint whole?
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Without --read-data the command checks that every checkpoint, map and pack is there, well-formed and of the right size.
With --read-data it also reads every stored page and compares it with its hash, which finds any flipped bit.

With --repair the command rebuilds indexes, replaces bad pages by the same content from elsewhere in the store, and moves the
good pages of a damaged pack. It moves to STORE/quarantine what it cannot save, lists it, and deletes nothing. Afterwards the
store is whole. No run and no prune may use the store meanwhile. The repair may be killed at any instant.

The command also looks for the clones of disks that checkpoints name: copies beside the images (--disk reflink, Firecracker's
drives). It names each one that is missing or has changed. Such a clone may be on another host, so the store counts as whole.

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
        let unusable_clones = self.unusable_clones(&store)?;
        if self.json {
            output::json(&Checked { store: &report, unusable_clones: &unusable_clones })?;
        } else {
            print_clones(&unusable_clones)?;
            print(&report, self.read_data)?;
        }
        Ok(if report.is_clean() { DONE } else { FAILED })
    }

    /// The clones of disks that checkpoints name and that are not as they were made. Of a checkpoint
    /// that cannot be read, the report of the store tells.
    fn unusable_clones(&self, store: &Store) -> Result<Vec<UnusableClone>, Failure> {
        let listing = store.checkpoints().map_err(|e| self.store.failure(&e))?;
        let all = listing.sealed.iter().map(|sealed| (sealed.id, &*sealed.meta.disks));
        let mut clones = unusable_clones(all);
        // A checkpoint may have been forgotten meanwhile, and its clone removed.
        clones.retain(|clone| store.sealed(clone.checkpoint).is_ok());
        Ok(clones)
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

fn print_clones(clones: &[UnusableClone]) -> Result<(), Failure> {
    for clone in clones.iter().take(CLONES_SHOWN_MAX) {
        let UnusableClone { checkpoint, disk, problem, .. } = clone;
        output::print_line(&format!(
            "CLONE of disk {disk} of checkpoint {checkpoint} cannot be used here: {problem}"
        ))?;
    }
    if let Some(more) = clones.len().checked_sub(CLONES_SHOWN_MAX).filter(|more| *more > 0) {
        output::print_line(&format!("... and {more} clones more: --json lists them"))?;
    }
    if !clones.is_empty() {
        output::print_line(
            "  fix: put the files back, or name their new paths to restore and branch (--image OLD=NEW); if they are on another \
             host, check the store there; if they are lost, forget the checkpoints: keyframe forget",
        )?;
    }
    Ok(())
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
