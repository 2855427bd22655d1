//! What was measured, and the ratios of it.

use super::analyses::{CALLBACK, MEMTRACE, NOTHING, TEXT};
use super::clock::Spent;
use super::recorded::Analysed;
use super::workload::Kind;
use crate::Report;
use crate::sample::Sample;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Ratios of two ways of the same work: key, over, under.
const RATIOS: [(&str, &str, &str); 11] = [
    ("icount_over_plain", "icount", "plain"),
    ("record_over_plain", "record", "plain"),
    ("record_over_icount", "record", "icount"),
    ("record_over_unlogged", "record", "unlogged"),
    ("checkpointed_record_over_record_1s", "1s", "record"),
    ("three_stage_record_over_record", "three_stage", "record"),
    ("three_stage_over_two_stage", "three_stage", "1s"),
    ("replay_over_record", "replayed_whole", "recorded_whole"),
    ("segment_over_record", "segmented_whole", "recorded_whole"),
    ("followed_over_recorded", "followed_whole", "three_stage_whole"),
    ("segment_over_replay", "segmented_whole", "replayed_whole"),
];

/// A way's runs, in the order of the rounds.
type Runs = BTreeMap<&'static str, Vec<Spent>>;

/// All of it.
#[derive(Default)]
pub struct Rows {
    workloads: Vec<(&'static Kind, Runs)>,
    sweep: Runs,
    tools: Vec<(&'static str, Vec<Analysed>)>,
    jobs: Vec<[f64; 3]>,
}

fn time(spent: &Spent) -> f64 {
    spent.time_ns
}

fn cpu(spent: &Spent) -> f64 {
    spent.cpu_ns
}

/// Round by round; none where a way is missing in all.
fn paired(runs: &Runs, over: &str, under: &str, of: fn(&Spent) -> f64) -> Option<Sample> {
    let mut all = Sample::default();
    for (over, under) in runs.get(over)?.iter().zip(runs.get(under)?) {
        all.push(of(over) / of(under));
    }
    (all.len() > 0).then_some(all)
}

impl Rows {
    pub fn push(&mut self, kind: &'static Kind, way: &'static str, spent: Spent) {
        let at = self.workloads.iter().position(|(known, _)| known.key == kind.key).unwrap_or_else(
            || {
                self.workloads.push((kind, Runs::new()));
                self.workloads.len() - 1
            },
        );
        self.workloads[at].1.entry(way).or_default().push(spent);
    }

    /// Whether no workload has run.
    pub fn is_empty(&self) -> bool {
        self.workloads.is_empty() && self.tools.is_empty() && self.jobs.is_empty()
    }

    pub fn push_sweep(&mut self, way: &'static str, spent: Spent) {
        self.sweep.entry(way).or_default().push(spent);
    }

    pub fn push_tool(&mut self, tool: &'static str, analysed: Analysed) {
        match self.tools.iter_mut().find(|(known, _)| *known == tool) {
            Some((_, all)) => all.push(analysed),
            None => self.tools.push((tool, vec![analysed])),
        }
    }

    /// With one job, with two, and two with one job each at once.
    pub fn push_jobs(&mut self, one_ns: f64, two_ns: f64, both_ns: f64) {
        self.jobs.push([one_ns, two_ns, both_ns]);
    }

    /// A ratio of each workload that has it.
    pub fn of_workloads(&self, over: &str, under: &str) -> Vec<(&'static Kind, Sample)> {
        let of =
            |(kind, runs): &(&'static Kind, Runs)| Some((*kind, paired(runs, over, under, time)?));
        self.workloads.iter().filter_map(of).collect()
    }

    /// Time of the recording with checkpoints over that without, by what lies between them.
    pub fn of_sweep(&self) -> Vec<(&'static str, Sample)> {
        // Two recordings without stand round those of a round.
        let without: Vec<f64> = self.sweep.get("record").map_or_else(Vec::new, |all| {
            all.chunks(2).map(|two| two.iter().map(time).sum::<f64>() / two.len() as f64).collect()
        });
        let of = |way: &&'static str| {
            let mut sample = Sample::default();
            self.sweep
                .get(way)?
                .iter()
                .zip(&without)
                .for_each(|(with, without)| sample.push(time(with) / without));
            (sample.len() > 0).then_some((*way, sample))
        };
        super::SWEEP.iter().filter_map(of).collect()
    }

    /// A tool's time or CPU time over another's, round by round.
    pub fn of_tools(&self, over: &str, under: &str, of: fn(&Analysed) -> f64) -> Option<f64> {
        let find = |tool: &str| Some(&self.tools.iter().find(|(known, _)| *known == tool)?.1);
        let mut all = Sample::default();
        find(over)?
            .iter()
            .zip(find(under)?)
            .for_each(|(over, under)| all.push(of(over) / of(under)));
        (all.len() > 0).then(|| all.median())
    }

    /// Names of the tools.
    pub fn tools(&self) -> impl Iterator<Item = &'static str> {
        self.tools.iter().map(|(tool, _)| *tool).filter(|tool| *tool != NOTHING)
    }

    /// All figures and ratios.
    pub fn report(&self, report: &mut Report) {
        for (kind, runs) in &self.workloads {
            for (way, all) in runs {
                for (unit, of) in [("ns", time as fn(&Spent) -> f64), ("cpu_ns", cpu)] {
                    let mut sample = Sample::default();
                    for spent in all {
                        sample.push(of(spent));
                    }
                    report.figure(format!("{}_{way}_{unit}", kind.key), sample.median());
                }
            }
        }
        for (key, over, under) in RATIOS {
            self.ratio(report, key, over, under);
        }
        for (way, all) in &self.sweep {
            let mut sample = Sample::default();
            for spent in all {
                sample.push(spent.time_ns);
            }
            report.figure(format!("long_{way}_ns"), sample.median());
        }
        for (way, sample) in self.of_sweep() {
            report.ratio(format!("checkpointed_record_over_record_long_{way}"), sample.median());
        }
        self.report_jobs(report);
        self.report_tools(report);
        report.table = self.table(report);
    }

    /// Of each workload, and under its bare name the geometric mean of those that work.
    fn ratio(&self, report: &mut Report, key: &str, over: &str, under: &str) {
        let mut product = (0.0, 0);
        for (kind, sample) in self.of_workloads(over, under) {
            let value = sample.median();
            report.ratio(format!("{key}_{}", kind.key), value);
            if !kind.is_idle {
                product = (product.0 + value.ln(), product.1 + 1);
            }
        }
        if product.1 > 0 {
            report.ratio(key, (product.0 / f64::from(product.1)).exp());
        }
        for (kind, runs) in self.workloads.iter().filter(|(kind, _)| !kind.is_idle) {
            if let Some(sample) = paired(runs, over, under, cpu) {
                report.ratio(format!("{key}_cpu_{}", kind.key), sample.median());
            }
        }
    }

    fn report_jobs(&self, report: &mut Report) {
        let median = |of: fn(&[f64; 3]) -> f64| {
            let mut all = Sample::default();
            self.jobs.iter().for_each(|round| all.push(of(round)));
            all.median()
        };
        if self.jobs.is_empty() {
            return;
        }
        report.figure("analysis_1_job_ns", median(|[one, ..]| *one));
        report.ratio("analysis_speedup_2_jobs", median(|[one, two, _]| one / two));
        report.ratio("machine_gain_2", median(|[one, _, both]| 2.0 * one / both));
        report.ratio(
            "analysis_speedup_2_jobs_over_machine_gain_2",
            median(|[_, two, both]| both / (2.0 * two)),
        );
    }

    fn report_tools(&self, report: &mut Report) {
        let wall: fn(&Analysed) -> f64 = |analysed| analysed.intervals_ns;
        let cpu: fn(&Analysed) -> f64 = |analysed| analysed.cpu_ns;
        for tool in self.tools() {
            let name = tool.replace("baseline-", "").replace('-', "_");
            for (unit, of) in [("", wall), ("_cpu", cpu)] {
                if let Some(value) = self.of_tools(tool, NOTHING, of) {
                    report.ratio(format!("tool_{name}_over_replay{unit}"), value);
                }
            }
        }
        for (unit, of) in [("", wall), ("_cpu", cpu)] {
            for (key, over, under) in [
                ("memtrace_over_callback", MEMTRACE, CALLBACK),
                ("text_over_memtrace", TEXT, MEMTRACE),
            ] {
                if let Some(value) = self.of_tools(over, under, of) {
                    report.ratio(format!("{key}{unit}"), value);
                }
            }
        }
        let traces = self.tools.iter().find(|(tool, _)| *tool == MEMTRACE);
        if let Some(each) = traces.and_then(|(_, all)| all.first()?.bytes_per_access) {
            report.figure("memtrace_bytes_per_access", each);
        }
    }

    /// A line for each workload.
    fn table(&self, report: &Report) -> String {
        let columns: Vec<&str> = RATIOS
            .iter()
            .map(|(key, ..)| *key)
            .filter(|key| report.ratios.contains_key(*key))
            .collect();
        if columns.is_empty() {
            return String::new();
        }
        let mut table = String::new();
        for (number, column) in (1..).zip(&columns) {
            let _ = writeln!(table, "  ({number}) {column}");
        }
        let _ = write!(table, "  {:12}", "");
        (1..=columns.len()).for_each(|number| {
            let _ = write!(table, "{:>8}", format!("({number})"));
        });
        for (kind, _) in &self.workloads {
            let _ = write!(table, "\n  {:12}", kind.key);
            for column in &columns {
                let value = report.ratios.get(&format!("{column}_{}", kind.key));
                let shown = value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
                let _ = write!(table, "{shown:>8}");
            }
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::super::workload::ALL;
    use super::*;

    fn spent(time_ns: f64) -> Spent {
        Spent { time_ns, cpu_ns: time_ns / 2.0 }
    }

    /// Those are read by others.
    #[test]
    fn the_keys_are_those_promised() {
        let mut rows = Rows::default();
        for kind in &ALL[..3] {
            for (way, ns) in [
                ("plain", 80.0),
                ("icount", 100.0),
                ("record", 110.0),
                ("1s", 121.0),
                ("three_stage", 110.0),
            ] {
                rows.push(kind, way, spent(ns));
            }
            rows.push(kind, "recorded_whole", spent(200.0));
            rows.push(kind, "replayed_whole", spent(300.0));
        }
        rows.push_jobs(10.0, 6.0, 11.0);
        let analysed = |ns, each| Analysed {
            intervals_ns: ns,
            cpu_ns: ns,
            wall_ns: ns,
            bytes_per_access: each,
        };
        rows.push_tool(NOTHING, analysed(10.0, None));
        rows.push_tool(CALLBACK, analysed(12.0, None));
        rows.push_tool(MEMTRACE, analysed(18.0, Some(1.5)));
        rows.push_tool(TEXT, analysed(90.0, None));
        let mut report = Report::new("replay");
        rows.report(&mut report);
        let is = |key: &str, value: f64| {
            assert!((report.ratios[key] - value).abs() < 1e-9, "{key}: {:?}", report.ratios);
        };
        is("record_over_icount", 1.1);
        is("record_over_icount_idle", 1.1);
        is("checkpointed_record_over_record_1s", 1.1);
        is("three_stage_record_over_record", 1.0);
        is("replay_over_record", 1.5);
        is("analysis_speedup_2_jobs", 10.0 / 6.0);
        is("machine_gain_2", 20.0 / 11.0);
        is("memtrace_over_callback", 1.5);
        is("text_over_memtrace", 5.0);
        assert!((report.figures["memtrace_bytes_per_access"] - 1.5).abs() < 1e-9);
        assert!(report.table.contains("compute"), "{}", report.table);
    }

    #[test]
    fn what_was_not_measured_has_no_key() {
        let mut rows = Rows::default();
        rows.push(&ALL[1], "record", spent(1.0));
        let mut report = Report::new("replay");
        rows.report(&mut report);
        assert!(report.ratios.is_empty(), "{:?}", report.ratios);
        assert_eq!(report.figures.len(), 2);
    }

    #[test]
    fn sleeping_is_in_no_mean() {
        let mut rows = Rows::default();
        for (kind, ns) in ALL.iter().zip([100.0, 2.0, 8.0]) {
            rows.push(kind, "record", spent(ns));
            rows.push(kind, "icount", spent(1.0));
        }
        let mut report = Report::new("replay");
        rows.report(&mut report);
        assert!((report.ratios["record_over_icount"] - 4.0).abs() < 1e-9);
    }
}
