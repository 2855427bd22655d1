//! The head of `report.md`: what was measured, on which machine, with which build.

use super::measurement::Measurement;
use super::rounds::{RunRounds, Spread};
use std::collections::BTreeSet;
use std::fmt::Write;

/// The properties of all measurements of a report.
pub struct ReportHead {
    machine: String,
    keyframe: String,
    commits: BTreeSet<String>,
    plan: String,
    first_at: String,
    last_at: String,
    count: usize,
}

impl ReportHead {
    /// Describes `measurements`, which have the same provenance; `None` if there are none.
    pub fn of(measurements: &[Measurement]) -> Option<Self> {
        let provenance = &measurements.first()?.provenance;
        let times = || measurements.iter().map(|one| one.measured_at);
        let unknown = "unknown: the program is in no checkout";
        let commit = |one: &Measurement| one.commit.clone().unwrap_or_else(|| unknown.into());
        let at = |time: jiff::Timestamp| time.strftime("%Y-%m-%d %H:%M UTC").to_string();
        let hash = provenance.keyframe_blake3.get(..16).unwrap_or_default();
        Some(Self {
            machine: provenance.machine.rows(),
            keyframe: format!("{}, program with BLAKE3 {hash}...", provenance.keyframe),
            commits: measurements.iter().map(commit).collect(),
            plan: provenance.plan.clone(),
            first_at: times().min().map(at).unwrap_or_default(),
            last_at: times().max().map(at).unwrap_or_default(),
            count: measurements.len(),
        })
    }

    /// Returns the head as Markdown. `groups` are the measured runs, and `missing` says what is still
    /// to be measured; it is empty if the evaluation is complete.
    pub fn text(&self, groups: &[RunRounds], missing: &str) -> String {
        let mut text = String::from(INTRODUCTION);
        if !missing.is_empty() {
            let _ = writeln!(text, "\n**Not complete**: {missing}");
        }
        let commits: Vec<&str> = self.commits.iter().map(String::as_str).collect();
        let _ = write!(
            text,
            "\n| machine and build | |\n|---|---|\n{}| keyframe | {} |\n| commit | {} |\n| plan of each \
             measurement | {} |\n| measured | {} to {} |\n| measurements | {} |\n",
            self.machine,
            self.keyframe,
            commits.join("; "),
            self.plan,
            self.first_at,
            self.last_at,
            self.count
        );
        text.push_str(RUNS);
        for group in groups {
            let counts = |of: fn(&RunRounds) -> Spread| of(group).decimals(0);
            let is_same = group.rounds().iter().filter(|run| run.simulations.is_same).count();
            let all = group.rounds().len();
            let _ = writeln!(
                text,
                "| {}: {} | {} | {all} | {} s | {} | {} | {} |",
                group.key(),
                group.workload().about,
                group.workload().stands_for,
                group.spread(|run| run.recorded_s).decimals(1),
                counts(|group| group.spread(|run| (run.checkpoints.len() + 1) as f64)),
                counts(|group| group.spread(|run| run.instructions.len() as f64)),
                if is_same == all {
                    "yes".into()
                } else {
                    format!("**no**, in {} of {all}", all - is_same)
                }
            );
        }
        text
    }
}

const INTRODUCTION: &str = "\
# Evaluation, after chapter 6 of the SimuBoost checkpoint paper

The numbers were measured on this machine, under TCG (a recording counts instructions), except those
marked *computed* or *simulated*. The paper's numbers are from another machine, under
KVM: they show what was measured, and are no target. Means are over the checkpoints after the boot.
If not all intervals were analysed, run times and speed-ups are of the recording and of the analysed
intervals.

A value of several rounds is their median, with the least and the most in brackets: `12 (11 to 14)`.
CSV files have three columns for it (`x`, `x_least`, `x_most`), and pictures a bar of half the
distance between least and most. Values over time are those of the round whose total time is the
median; the column `round` says which one. Figure A.6 shows the first round with an analysis during
the recording.
";

const RUNS: &str = "
| run | stands for | rounds | recorded | checkpoints | intervals analysed | results equal those of one replay |
|---|---|---|---|---|---|---|
";
