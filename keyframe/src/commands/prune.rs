//! `keyframe prune`: space back from what no checkpoint needs.

use super::StoreArg;
use crate::failure::{DONE, Failure, Outcome, WARNED};
use crate::output;
use crate::progress;
use keyframe_store::{PruneOptions, PruneProgress, PruneReport, PruneStep};
use std::time::Duration;

/// Free the space of what no checkpoint needs any more
#[derive(clap::Args, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
#[command(
    after_help = "Prune removes packs that no checkpoint needs. It rewrites the emptiest of the other packs without the pages that are not
needed, until these are at most --max-unused of the packs. Prune may be killed at any instant. The next prune finishes its work.

Meanwhile checkpoints can be restored, mounted and checked, and a run may use the store. Prune waits up to --wait for the run's
next checkpoint. If none comes, it leaves the packs that depend on it to the next prune.

With --recompress prune also rewrites the other packs: it compresses their pages with zstd and a dictionary made from them, for
which a run has no time. This takes a core some seconds for each GiB of pages, once for each pack. Reading a page of such a
pack takes a few microseconds longer.

Exit code 0: done. 3: a part was left, which the output names.

Examples:
  keyframe prune --store S
  keyframe forget --store S --keep-last 100 && keyframe prune --store S
  keyframe prune --store S --recompress
  keyframe prune --store S --max-unused 20% --dry-run --json"
)]
pub struct Prune {
    #[command(flatten)]
    store: StoreArg,
    /// So much of the packs may stay unused, in percent: 0% copies most, 100% nothing
    #[arg(long, value_name = "PART", default_value = "5%", value_parser = parse_unused)]
    max_unused: f64,
    /// Wait so long for the next checkpoint of a run that goes on
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = super::checkpoints::parse_wait)]
    wait: Duration,
    /// Also write every pack anew, with its pages as small as they get: once, for packs that were
    /// not yet
    #[arg(long)]
    recompress: bool,
    /// Only say what would be freed
    #[arg(long, short = 'n')]
    dry_run: bool,
    /// Print JSON: sizes in bytes
    #[arg(long)]
    json: bool,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
}

fn parse_unused(text: &str) -> Result<f64, String> {
    let number = |text: &str| text.trim().parse::<f64>().map_err(|_| "write 5% or 0.05".to_owned());
    let part = match text.strip_suffix('%') {
        Some(percent) => number(percent)? / 100.0,
        None => number(text)?,
    };
    if (0.0..=1.0).contains(&part) { Ok(part) } else { Err("must be 0% to 100%".into()) }
}

impl Prune {
    /// Prunes and reports.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let bar = progress::bar(self.quiet, None, "{msg} {wide_bar} {bytes}/{total_bytes}");
        let mut progress = |p: PruneProgress| {
            bar.set_message(word(p.step));
            bar.set_length(p.total_bytes);
            bar.set_position(p.done_bytes);
        };
        let Self { max_unused, dry_run, wait, .. } = *self;
        let recompress_bytes = if self.recompress { u64::MAX } else { 0 };
        let options = PruneOptions { max_unused, dry_run, wait, recompress_bytes };
        let report = store.prune(&options, &mut progress).map_err(|e| self.failure(&e))?;
        bar.finish_and_clear();
        for damaged in &report.damaged {
            eprintln!(
                "keyframe: left as it is: {damaged}; see whom it hurts: keyframe check --read-data"
            );
        }
        if report.postponed_packs > 0 {
            eprintln!(
                "keyframe: {} packs stay for now: the run that writes to the store took no checkpoint within {}; run keyframe \
                 prune again, with a longer --wait",
                report.postponed_packs,
                humantime::format_duration(wait)
            );
        }
        if self.json {
            output::json(&report)?;
        } else {
            print(&report)?;
        }
        Ok(if report.damaged.is_empty() && report.postponed_packs == 0 { DONE } else { WARNED })
    }

    fn failure(&self, error: &keyframe_store::Error) -> Failure {
        use keyframe_store::Error;
        let failure = self.store.failure(error);
        match error {
            Error::Unreadable { id, .. } => failure
                .fix(format!("if it is lost, forget it (keyframe forget {id}), then prune again")),
            Error::Locked { .. } => failure.fix("wait until the other prune ends"),
            _ if error.is_disk_full() => failure.fix(
                "free some space, or allow more to stay unused: --max-unused 100% copies nothing",
            ),
            _ => failure,
        }
    }
}

fn print(report: &PruneReport) -> Result<(), Failure> {
    let b = output::bytes;
    let freed_bytes = report.before_bytes.saturating_sub(report.after_bytes);
    let (would, freed) = if report.dry_run { ("would be ", "would free") } else { ("", "freed") };
    let lines = [
        format!(
            "maps     {} {would}removed, {} rewritten",
            report.removed_maps, report.rewritten_maps
        ),
        format!(
            "packs    {} {would}removed, {} {would}rewritten ({} copied)",
            report.removed_packs,
            report.rewritten_packs,
            b(report.copied_bytes)
        ),
        format!("dense    {} packs {would}recompressed", report.recompressed_packs),
        format!("unused   {} in packs that stay", b(report.unused_bytes)),
        format!(
            "{freed}    {} ({} before, {} after)",
            b(freed_bytes),
            b(report.before_bytes),
            b(report.after_bytes)
        ),
    ];
    output::print_line(&lines.join("\n"))
}

fn word(step: PruneStep) -> &'static str {
    match step {
        PruneStep::Looking => "looking what is needed",
        PruneStep::Copying => "copying",
        PruneStep::Waiting => "waiting for the run's next checkpoint",
        PruneStep::Removing => "removing",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_as_people_write_them() {
        assert_eq!(
            (parse_unused("5%"), parse_unused("0"), parse_unused("100%")),
            (Ok(0.05), Ok(0.0), Ok(1.0))
        );
        assert!(["-1%", "101%", "x", "NaN", ""].iter().all(|bad| parse_unused(bad).is_err()));
    }
}
