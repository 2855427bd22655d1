//! The measurements, and their figures and ratios.

use super::LINKS;
use super::clients::{GOOD, TOLERABLE};
use super::method::{self, Method};
use super::test_bed::EpochTotals;
use super::workload::{RunResult, Workload};
use crate::Report;
use crate::sample::Sample;
use std::fmt::Write as _;

/// The default policy.
const OURS: &str = "adaptive";
/// The policy with which its latency is compared.
const FIXED: &str = "fixed100";
/// The method of plain runs.
const PLAIN: &str = "unprotected";

/// All runs of one workload over one link with one method. Each sample but `took_ns` has one value
/// for each run.
struct Row {
    workload: &'static Workload,
    link: &'static str,
    /// The key of the method, or `unprotected`.
    method: &'static str,
    is_replicated: bool,
    per_s: Sample,
    good_per_s: Sample,
    tolerable_per_s: Sample,
    took_ns: Sample,
    took_p50_ns: Sample,
    /// The slowdown against the plain runs before and after.
    slowdown: Sample,
    own_slowdown: Sample,
    good: Sample,
    tolerable: Sample,
    epochs: EpochTotals,
    /// Processors that Keyframe took on the guest's host and on the standby's.
    engine_processors: Sample,
    standby_processors: Sample,
}

/// All measurements of the benchmark.
pub struct Rows {
    all: Vec<Row>,
    seconds: u16,
    pub failovers_ns: Sample,
}

impl Rows {
    pub fn new(seconds: u16) -> Self {
        Self { all: Vec::new(), seconds, failovers_ns: Sample::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.all.iter().all(|row| row.method == PLAIN) && self.failovers_ns.len() == 0
    }

    /// Adds a plain run.
    pub fn plain(&mut self, workload: &'static Workload, link: &'static str, done: &RunResult) {
        let seconds = self.seconds;
        self.of(workload, link, None).push(done, seconds);
    }

    /// Adds a run with a method, with the plain runs before and after it.
    pub fn add(
        &mut self,
        workload: &'static Workload,
        link: &'static str,
        method: &Method,
        done: &RunResult,
        around: [&RunResult; 2],
    ) {
        let seconds = self.seconds;
        let row = self.of(workload, link, Some(method));
        row.push(done, seconds);
        let mean = |of: fn(&RunResult) -> f64| f64::midpoint(of(around[0]), of(around[1]));
        row.slowdown.push(mean(|done| done.per_s) / done.per_s);
        if let (Some(own), [Some(before), Some(after)]) =
            (done.own_per_s, around.map(|done| done.own_per_s))
        {
            row.own_slowdown.push(f64::midpoint(before, after) / own);
        }
        if workload.has_clients() {
            row.good.push(done.good_per_s / mean(|done| done.good_per_s));
            row.tolerable.push(done.tolerable_per_s / mean(|done| done.tolerable_per_s));
        }
    }

    fn of(
        &mut self,
        workload: &'static Workload,
        link: &'static str,
        method: Option<&Method>,
    ) -> &mut Row {
        let key = method.map_or(PLAIN, |method| method.key);
        let found = self
            .all
            .iter()
            .position(|row| (row.workload.key, row.link, row.method) == (workload.key, link, key));
        let at = found.unwrap_or_else(|| {
            self.all.push(Row::new(workload, link, method));
            self.all.len() - 1
        });
        &mut self.all[at]
    }

    /// Returns the measured links.
    pub fn links(&self) -> Vec<&'static str> {
        LINKS
            .iter()
            .map(|(link, _)| *link)
            .filter(|link| self.all.iter().any(|row| row.link == *link))
            .collect()
    }

    /// Returns the measured workloads.
    pub fn workloads(&self) -> Vec<&'static str> {
        let all = super::workload::ALL.iter().map(|workload| workload.key);
        all.filter(|workload| self.all.iter().any(|row| row.workload.key == *workload)).collect()
    }

    /// Returns the rows by link and workload, and within these by method, plain runs first.
    fn in_order(&self) -> impl Iterator<Item = &Row> {
        let methods = || [PLAIN].into_iter().chain(method::ALL.iter().map(|method| method.key));
        let keys = self.workloads().into_iter().flat_map(move |workload| {
            LINKS.into_iter().flat_map(move |(link, _)| methods().map(move |m| (workload, link, m)))
        });
        keys.filter_map(|key| {
            self.all.iter().find(|row| (row.workload.key, row.link, row.method) == key)
        })
    }

    /// Returns the workload, method and slowdown of each row of a link.
    pub fn slowdowns(
        &self,
        link: &str,
    ) -> impl Iterator<Item = (&'static str, &'static str, Sample)> {
        let of_link = self.in_order().filter(move |row| row.link == link);
        of_link.map(|row| (row.workload.key, row.method, row.slowdown()))
    }

    pub fn report(&self, report: &mut Report) {
        report.figure("run_seconds", f64::from(self.seconds));
        let mut all = EpochTotals::default();
        for row in &self.all {
            row.report(report, self.seconds);
            all = all.plus(row.epochs);
        }
        for workload in self.workloads() {
            let of_kind = self.all.iter().filter(|row| row.workload.key == workload);
            let (wire, raw) = of_kind.fold((0.0, 0.0), |(wire, raw), row| {
                (wire + row.epochs.wire_bytes, raw + row.epochs.raw_bytes)
            });
            ratio(report, format!("wire_over_raw_{workload}"), wire, raw);
        }
        ratio(report, "wire_over_raw".into(), all.wire_bytes, all.raw_bytes);
        for (link, _) in LINKS {
            for workload in super::workload::ALL.iter().filter(|workload| workload.has_clients()) {
                let of = |way| format!("{}_latency_p50_ns_{link}_{way}", workload.key);
                let key = format!("{}_latency_{FIXED}_over_{OURS}_{link}", workload.key);
                report.ratio_of(key, &of(FIXED), &of(OURS));
            }
        }
        if self.failovers_ns.len() > 0 {
            report.figure("failover_p50_ns", self.failovers_ns.median());
            report.figure("failover_max_ns", self.failovers_ns.percentile(100));
            report.figure("failovers", self.failovers_ns.len() as f64);
        }
        report.table = self.table();
    }

    /// Returns the table: slowdowns for each workload, link and method, then the answers to clients.
    fn table(&self) -> String {
        let mut text = String::new();
        let spread = "median (least to most)";
        let title = format!("runs of {} s, {spread}", self.seconds);
        for (n, row) in self.in_order().enumerate() {
            if n == 0 {
                let _ = write!(
                    text,
                    "\n{title:<47}{:<24}{:<24}{:>8}{:>8}{:>9}{:>9}{:>8}{:>8}",
                    "slowdown",
                    "own time",
                    "epochs/s",
                    "pages",
                    "pause ms",
                    "sent ms",
                    "engine",
                    "standby"
                );
            }
            row.line(&mut text, self.seconds);
        }
        for (n, row) in self.in_order().filter(|row| row.workload.has_clients()).enumerate() {
            if n == 0 {
                let (good, tolerable) = (GOOD.as_millis(), TOLERABLE.as_millis());
                let _ = write!(
                    text,
                    "\n{:<47}{:<24}{:<24}  p99 ms  in {good} ms in {tolerable} ms",
                    format!("answers, {spread}"),
                    "per s",
                    "p50 ms"
                );
            }
            row.answers_line(&mut text);
        }
        if self.failovers_ns.len() > 0 {
            let (p50, max) =
                (self.failovers_ns.median() / 1e6, self.failovers_ns.percentile(100) / 1e6);
            let number = self.failovers_ns.len();
            let _ = write!(
                text,
                "\n{number} failovers: {p50:.0} ms in the median, {max:.0} ms at most"
            );
        }
        text
    }
}

impl Row {
    fn new(workload: &'static Workload, link: &'static str, method: Option<&Method>) -> Self {
        Self {
            workload,
            link,
            method: method.map_or(PLAIN, |method| method.key),
            is_replicated: method.is_some_and(Method::is_replicated),
            per_s: Sample::default(),
            good_per_s: Sample::default(),
            tolerable_per_s: Sample::default(),
            took_ns: Sample::default(),
            took_p50_ns: Sample::default(),
            slowdown: Sample::default(),
            own_slowdown: Sample::default(),
            good: Sample::default(),
            tolerable: Sample::default(),
            epochs: EpochTotals::default(),
            engine_processors: Sample::default(),
            standby_processors: Sample::default(),
        }
    }

    fn push(&mut self, done: &RunResult, seconds: u16) {
        let processors = |cpu_ns: f64| cpu_ns / (f64::from(seconds) * 1e9);
        self.engine_processors.push(processors(done.cpu.engine_ns));
        self.standby_processors.push(processors(done.cpu.standby_ns));
        self.per_s.push(done.per_s);
        self.good_per_s.push(done.good_per_s);
        self.tolerable_per_s.push(done.tolerable_per_s);
        self.took_ns.append(&done.took_ns);
        self.took_p50_ns.push(done.took_ns.median());
        self.epochs = self.epochs.plus(done.epochs);
    }

    /// Returns the slowdown of each run: of plain runs against their median.
    fn slowdown(&self) -> Sample {
        if self.method != PLAIN {
            return self.slowdown.clone();
        }
        let mut slowdown = Sample::default();
        self.per_s.values().for_each(|per_s| slowdown.push(self.per_s.median() / per_s));
        slowdown
    }

    fn counted_s(&self, seconds: u16) -> f64 {
        f64::from(seconds) * self.per_s.len() as f64
    }

    /// Returns the mean of an epoch, of which `sum` is the total; `None` if there was no epoch.
    fn of_epoch(&self, sum: f64) -> Option<f64> {
        (self.epochs.epochs > 0.0).then(|| sum / self.epochs.epochs)
    }

    fn name(&self) -> String {
        format!("\n  {:<12} {:<8} {:<22} ", self.workload.key, self.link, self.method)
    }

    /// Adds its line of slowdown and epochs.
    fn line(&self, text: &mut String, seconds: u16) {
        let EpochTotals { epochs, pages, pause_ns, transfer_ns, .. } = self.epochs;
        let number = |value: Option<f64>, width: usize, decimals: usize| match value {
            Some(value) => format!("{value:>width$.decimals$}"),
            None => format!("{:>width$}", "-"),
        };
        let sent = |sum: f64| self.of_epoch(sum / 1e6).filter(|_| self.is_replicated);
        let engine = Some(self.engine_processors.median()).filter(|_| self.method != PLAIN);
        let standby = Some(self.standby_processors.median()).filter(|_| self.is_replicated);
        let _ = write!(
            text,
            "{}{:<24}{:<24}{}{}{}{}{}{}",
            self.name(),
            spread(&self.slowdown(), 1.0, 3),
            spread(&self.own_slowdown, 1.0, 3),
            number(self.of_epoch(epochs).map(|_| epochs / self.counted_s(seconds)), 8, 1),
            number(self.of_epoch(pages), 8, 0),
            number(sent(pause_ns), 9, 2),
            number(sent(transfer_ns), 9, 2),
            number(engine, 8, 2),
            number(standby, 8, 2),
        );
    }

    /// Adds its line of answers to clients.
    fn answers_line(&self, text: &mut String) {
        let _ = write!(
            text,
            "{}{:<24}{:<24}{:>8.1} {:>8.1}% {:>8.1}%",
            self.name(),
            spread(&self.per_s, 1.0, 1),
            spread(&self.took_p50_ns, 1e6, 1),
            self.took_ns.percentile(99) / 1e6,
            self.good_per_s.median() / self.per_s.median() * 100.0,
            self.tolerable_per_s.median() / self.per_s.median() * 100.0,
        );
    }

    fn report(&self, report: &mut Report, seconds: u16) {
        let (workload, end) = (self.workload.key, format!("{}_{}", self.link, self.method));
        let per_s = format!("{workload}_per_s_{end}");
        report.figure(&per_s, self.per_s.median());
        with_spread(&self.per_s, |least_or_most, value| {
            report.figure(format!("{per_s}_{least_or_most}"), value);
        });
        let slowdowns = [
            (format!("slowdown_{workload}_{end}"), self.slowdown()),
            (format!("slowdown_{workload}_{end}_own_time"), self.own_slowdown.clone()),
        ];
        for (key, slowdown) in slowdowns.into_iter().filter(|(_, slowdown)| slowdown.len() > 0) {
            report.ratio(&key, slowdown.median());
            with_spread(&slowdown, |least_or_most, value| {
                report.ratio(format!("{key}_{least_or_most}"), value);
            });
        }
        if self.method == PLAIN {
            // The spread of the plain runs is the uncertainty of the slowdown.
            if self.per_s.len() > 1 {
                let range = self.per_s.most() - self.per_s.least();
                report.ratio(format!("{workload}_spread_{end}"), range / self.per_s.median());
            }
        } else {
            self.report_epochs(report, seconds);
        }
        if self.workload.has_clients() {
            self.report_answers(report);
        }
    }

    fn report_epochs(&self, report: &mut Report, seconds: u16) {
        let (workload, end) = (self.workload.key, format!("{}_{}", self.link, self.method));
        let EpochTotals { epochs, pages, pause_ns, transfer_ns, .. } = self.epochs;
        let counted = self.counted_s(seconds);
        report.figure(format!("{workload}_epochs_per_s_{end}"), epochs / counted);
        let engine = self.engine_processors.median();
        report.figure(format!("{workload}_engine_processors_{end}"), engine);
        let mut of_epoch = vec![("pages", pages)];
        if self.is_replicated {
            let standby = self.standby_processors.median();
            report.figure(format!("{workload}_standby_processors_{end}"), standby);
            of_epoch.extend([("pause_ns", pause_ns), ("transfer_ns", transfer_ns)]);
            let wire_per_s = self.epochs.wire_bytes / counted;
            report.figure(format!("{workload}_wire_bytes_per_s_{end}"), wire_per_s);
            let suspended = self.epochs.suspended_ns / (counted * 1e9);
            report.ratio(format!("{workload}_suspended_part_{end}"), suspended);
        }
        for (name, sum) in of_epoch {
            if let Some(mean) = self.of_epoch(sum) {
                report.figure(format!("{workload}_epoch_{name}_{end}"), mean);
            }
        }
    }

    fn report_answers(&self, report: &mut Report) {
        let (workload, end) = (self.workload.key, format!("{}_{}", self.link, self.method));
        let p50 = format!("{workload}_latency_p50_ns_{end}");
        report.figure(&p50, self.took_ns.median());
        with_spread(&self.took_p50_ns, |least_or_most, value| {
            report.figure(format!("{p50}_{least_or_most}"), value);
        });
        for (name, percent) in [("p90", 90), ("p99", 99), ("max", 100)] {
            report.figure(
                format!("{workload}_latency_{name}_ns_{end}"),
                self.took_ns.percentile(percent),
            );
        }
        report.ratio(
            format!("{workload}_good_part_{end}"),
            self.good_per_s.median() / self.per_s.median(),
        );
        let tolerable = self.tolerable_per_s.median() / self.per_s.median();
        report.ratio(format!("{workload}_tolerable_part_{end}"), tolerable);
        if self.method != PLAIN {
            // The keys for 1 Gbit/s do not name the link.
            let end = end.strip_prefix("1gbit_").unwrap_or(&end);
            for (name, sample) in [("good", &self.good), ("tolerable", &self.tolerable)] {
                let key = format!("{workload}_{name}_answers_{end}");
                report.ratio(&key, sample.median());
                with_spread(sample, |least_or_most, value| {
                    report.ratio(format!("{key}_{least_or_most}"), value);
                });
            }
        }
    }
}

/// Calls `tell` with `least` and the least value, and with `most` and the largest, if there are
/// several values.
fn with_spread(sample: &Sample, mut tell: impl FnMut(&'static str, f64)) {
    if sample.len() > 1 {
        tell("least", sample.least());
        tell("most", sample.most());
    }
}

/// Returns the values over `unit` as text: `1.234 (1.200 to 1.310)`; `-` if there are none.
fn spread(sample: &Sample, unit: f64, decimals: usize) -> String {
    let show = |value: f64| format!("{:.decimals$}", value / unit);
    match sample.len() {
        0 => "-".into(),
        1 => show(sample.median()),
        _ => format!(
            "{} ({} to {})",
            show(sample.median()),
            show(sample.least()),
            show(sample.most())
        ),
    }
}

fn ratio(report: &mut Report, key: String, over: f64, under: f64) {
    if under > 0.0 {
        report.ratio(key, over / under);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replication::test_bed::CpuTime;
    use crate::replication::workload;

    /// Other programs read these keys.
    #[test]
    fn the_keys_are_those_promised() {
        let mut rows = Rows::new(5);
        let mut took_ns = Sample::default();
        took_ns.push(3e6);
        let epochs =
            EpochTotals { epochs: 10.0, wire_bytes: 1e6, raw_bytes: 4e6, ..EpochTotals::default() };
        let done = |per_s: f64| RunResult {
            per_s,
            own_per_s: Some(per_s * 2.0),
            good_per_s: per_s / 2.0,
            tolerable_per_s: per_s,
            took_ns: took_ns.clone(),
            epochs,
            cpu: CpuTime { engine_ns: 2e9, standby_ns: 1e9 },
        };
        for workload in &workload::ALL {
            for (link, _) in LINKS {
                for _ in 0..2 {
                    rows.plain(workload, link, &done(111.0));
                    for method in &method::ALL {
                        let around = [&done(105.0), &done(111.0)];
                        rows.add(workload, link, method, &done(100.0), around);
                    }
                }
            }
        }
        rows.failovers_ns.push(8e8);
        let mut report = Report::new("replication");
        rows.report(&mut report);
        for workload in ["compile", "ep", "sp", "web", "coordinator"] {
            for end in [
                "1gbit_adaptive",
                "1gbit_paper",
                "1gbit_fixed100",
                "10gbit_adaptive",
                "10gbit_fixed50",
                "1gbit_tracking100",
                "10gbit_transfer25",
            ] {
                let key = format!("slowdown_{workload}_{end}");
                assert!((report.ratios[&key] - 1.08).abs() < 1e-9, "{key}");
                for end in ["own_time", "least", "most", "own_time_least", "own_time_most"] {
                    let key = format!("{key}_{end}");
                    assert!((report.ratios[&key] - 1.08).abs() < 1e-9, "{key}");
                }
            }
        }
        for policy in ["adaptive", "paper", "fixed100"] {
            let key = format!("web_good_answers_{policy}");
            assert!((report.ratios[&key] - 1.0 / 1.08).abs() < 1e-9, "{key}");
        }
        assert!((report.ratios["wire_over_raw"] - 0.25).abs() < 1e-9);
        assert!((report.ratios["web_latency_fixed100_over_adaptive_1gbit"] - 1.0).abs() < 1e-9);
        for key in ["failover_p50_ns", "failover_max_ns", "web_latency_p50_ns_1gbit_adaptive"] {
            assert!(report.figures[key] > 0.0, "{key}");
        }
        for (key, processors) in [("engine", 0.4), ("standby", 0.2)] {
            let key = format!("sp_{key}_processors_10gbit_paper");
            assert!((report.figures[&key] - processors).abs() < 1e-9, "{key}");
        }
        let plain = report.ratios["slowdown_web_1gbit_unprotected_most"];
        assert!((plain - 1.0).abs() < 1e-9, "{plain}");
        // The tracking alone pauses and sends nothing.
        assert!(report.figures.contains_key("web_epoch_pages_1gbit_tracking100"));
        for key in
            ["web_epoch_pause_ns_1gbit_tracking100", "web_wire_bytes_per_s_1gbit_tracking100"]
        {
            assert!(!report.figures.contains_key(key), "{key}");
        }
        for text in ["coordinator", "unprotected", "transfer200", "1.080 (1.080 to 1.080)"] {
            assert!(report.table.contains(text), "{}", report.table);
        }
    }
}
