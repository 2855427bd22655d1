//! The measurements, and their ratios.

use super::recording::AnalysisCosts;
use super::tool_costs::{CALLBACK, MEMTRACE, NOTHING, TEXT};
use super::workload::Workload;
use crate::Report;
use crate::sample::Sample;
use crate::vcpu_clock::TimeSpent;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The ratios of two methods on the same work: key, numerator, denominator.
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

/// The runs of each method, in the order of the rounds.
type Runs = BTreeMap<&'static str, Vec<TimeSpent>>;

/// All measurements of the benchmark.
#[derive(Default)]
pub struct Rows {
    workloads: Vec<(&'static Workload, Runs)>,
    sweep: Runs,
    tools: Vec<(&'static str, Vec<AnalysisCosts>)>,
    jobs: Vec<[f64; 3]>,
}

fn time(spent: &TimeSpent) -> f64 {
    spent.time_ns
}

fn cpu(spent: &TimeSpent) -> f64 {
    spent.cpu_ns
}

/// Returns the ratios round by round; `None` if a method has no runs.
fn paired(runs: &Runs, over: &str, under: &str, of: fn(&TimeSpent) -> f64) -> Option<Sample> {
    let mut all = Sample::default();
    for (over, under) in runs.get(over)?.iter().zip(runs.get(under)?) {
        all.push(of(over) / of(under));
    }
    (all.len() > 0).then_some(all)
}

impl Rows {
    /// Adds a run of a workload.
    pub fn push(&mut self, workload: &'static Workload, method: &'static str, spent: TimeSpent) {
        let at =
            self.workloads.iter().position(|(known, _)| known.key == workload.key).unwrap_or_else(
                || {
                    self.workloads.push((workload, Runs::new()));
                    self.workloads.len() - 1
                },
            );
        self.workloads[at].1.entry(method).or_default().push(spent);
    }

    /// Returns whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.workloads.is_empty() && self.tools.is_empty() && self.jobs.is_empty()
    }

    /// Adds a run of the sweep over intervals.
    pub fn push_sweep(&mut self, method: &'static str, spent: TimeSpent) {
        self.sweep.entry(method).or_default().push(spent);
    }

    /// Adds an analysis with a tool.
    pub fn push_tool(&mut self, tool: &'static str, analysed: AnalysisCosts) {
        match self.tools.iter_mut().find(|(known, _)| *known == tool) {
            Some((_, all)) => all.push(analysed),
            None => self.tools.push((tool, vec![analysed])),
        }
    }

    /// Adds a round: the times with one job, with two jobs, and of two processes with one job each.
    pub fn push_jobs(&mut self, one_ns: f64, two_ns: f64, both_ns: f64) {
        self.jobs.push([one_ns, two_ns, both_ns]);
    }

    /// Returns a ratio for each workload that has it.
    pub fn of_workloads(&self, over: &str, under: &str) -> Vec<(&'static Workload, Sample)> {
        let of = |(workload, runs): &(&'static Workload, Runs)| {
            Some((*workload, paired(runs, over, under, time)?))
        };
        self.workloads.iter().filter_map(of).collect()
    }

    /// Returns the time of recordings with checkpoints over recordings without, by interval.
    pub fn of_sweep(&self) -> Vec<(&'static str, Sample)> {
        // A round has two recordings without checkpoints.
        let without: Vec<f64> = self.sweep.get("record").map_or_else(Vec::new, |all| {
            all.chunks(2).map(|two| two.iter().map(time).sum::<f64>() / two.len() as f64).collect()
        });
        let of = |method: &&'static str| {
            let mut sample = Sample::default();
            self.sweep
                .get(method)?
                .iter()
                .zip(&without)
                .for_each(|(with, without)| sample.push(time(with) / without));
            (sample.len() > 0).then_some((*method, sample))
        };
        super::SWEEP.iter().filter_map(of).collect()
    }

    /// Returns the median ratio of the costs of two tools.
    pub fn of_tools(&self, over: &str, under: &str, of: fn(&AnalysisCosts) -> f64) -> Option<f64> {
        let find = |tool: &str| Some(&self.tools.iter().find(|(known, _)| *known == tool)?.1);
        let mut all = Sample::default();
        find(over)?
            .iter()
            .zip(find(under)?)
            .for_each(|(over, under)| all.push(of(over) / of(under)));
        (all.len() > 0).then(|| all.median())
    }

    /// Returns the names of the tools.
    pub fn tools(&self) -> impl Iterator<Item = &'static str> {
        self.tools.iter().map(|(tool, _)| *tool).filter(|tool| *tool != NOTHING)
    }

    /// Adds all figures and ratios to `report`.
    pub fn report(&self, report: &mut Report) {
        for (workload, runs) in &self.workloads {
            for (method, all) in runs {
                for (unit, of) in [("ns", time as fn(&TimeSpent) -> f64), ("cpu_ns", cpu)] {
                    let mut sample = Sample::default();
                    for spent in all {
                        sample.push(of(spent));
                    }
                    report.figure(format!("{}_{method}_{unit}", workload.key), sample.median());
                }
            }
        }
        for (key, over, under) in RATIOS {
            self.ratio(report, key, over, under);
        }
        for (method, all) in &self.sweep {
            let mut sample = Sample::default();
            for spent in all {
                sample.push(spent.time_ns);
            }
            report.figure(format!("long_{method}_ns"), sample.median());
        }
        for (method, sample) in self.of_sweep() {
            report.ratio(format!("checkpointed_record_over_record_long_{method}"), sample.median());
        }
        self.report_jobs(report);
        self.report_tools(report);
        report.table = self.table(report);
    }

    /// Adds a ratio for each workload, and the geometric mean over the workloads that are not idle.
    fn ratio(&self, report: &mut Report, key: &str, over: &str, under: &str) {
        let mut product = (0.0, 0);
        for (workload, sample) in self.of_workloads(over, under) {
            let value = sample.median();
            report.ratio(format!("{key}_{}", workload.key), value);
            if !workload.is_idle {
                product = (product.0 + value.ln(), product.1 + 1);
            }
        }
        if product.1 > 0 {
            report.ratio(key, (product.0 / f64::from(product.1)).exp());
        }
        for (workload, runs) in self.workloads.iter().filter(|(workload, _)| !workload.is_idle) {
            if let Some(sample) = paired(runs, over, under, cpu) {
                report.ratio(format!("{key}_cpu_{}", workload.key), sample.median());
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
        let wall: fn(&AnalysisCosts) -> f64 = |analysed| analysed.intervals_ns;
        let cpu: fn(&AnalysisCosts) -> f64 = |analysed| analysed.cpu_ns;
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

    /// Returns a table with a line for each workload.
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
        for (workload, _) in &self.workloads {
            let _ = write!(table, "\n  {:12}", workload.key);
            for column in &columns {
                let value = report.ratios.get(&format!("{column}_{}", workload.key));
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

    fn spent(time_ns: f64) -> TimeSpent {
        TimeSpent { time_ns, cpu_ns: time_ns / 2.0 }
    }

    /// Other programs read these keys.
    #[test]
    fn the_keys_are_those_promised() {
        let mut rows = Rows::default();
        for workload in &ALL[..3] {
            for (method, ns) in [
                ("plain", 80.0),
                ("icount", 100.0),
                ("record", 110.0),
                ("1s", 121.0),
                ("three_stage", 110.0),
            ] {
                rows.push(workload, method, spent(ns));
            }
            rows.push(workload, "recorded_whole", spent(200.0));
            rows.push(workload, "replayed_whole", spent(300.0));
        }
        rows.push_jobs(10.0, 6.0, 11.0);
        let analysed = |ns, each| AnalysisCosts {
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
    fn a_ratio_without_measurements_has_no_key() {
        let mut rows = Rows::default();
        rows.push(&ALL[1], "record", spent(1.0));
        let mut report = Report::new("replay");
        rows.report(&mut report);
        assert!(report.ratios.is_empty(), "{:?}", report.ratios);
        assert_eq!(report.figures.len(), 2);
    }

    #[test]
    fn idle_workloads_are_in_no_mean() {
        let mut rows = Rows::default();
        for (workload, ns) in ALL.iter().zip([100.0, 2.0, 8.0]) {
            rows.push(workload, "record", spent(ns));
            rows.push(workload, "icount", spent(1.0));
        }
        let mut report = Report::new("replay");
        rows.report(&mut report);
        assert!((report.ratios["record_over_icount"] - 4.0).abs() < 1e-9);
    }
}
