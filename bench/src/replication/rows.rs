//! The measurements, and their figures and ratios.

use super::clients::{GOOD, TOLERABLE};
use super::test_bed::TransferTotals;
use super::workload::{RunResult, Workload};
use super::{LINKS, POLICIES, Policy};
use crate::Report;
use crate::sample::Sample;
use std::fmt::Write as _;

/// The default policy.
const OURS: &str = "adaptive";
/// The policy with which its latency is compared.
const FIXED: &str = "fixed100";
/// The method of plain runs.
const PLAIN: &str = "unprotected";

/// All runs of one workload over one link with one policy or without.
struct Row {
    workload: &'static Workload,
    link: &'static str,
    /// The key of a policy, or `unprotected`.
    way: &'static str,
    per_s: Sample,
    good_per_s: Sample,
    tolerable_per_s: Sample,
    took_ns: Sample,
    /// The slowdown against the plain runs before and after.
    slowdown: Sample,
    own_slowdown: Sample,
    good: Sample,
    tolerable: Sample,
    transfer: TransferTotals,
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
        self.all.iter().all(|row| row.way == PLAIN) && self.failovers_ns.len() == 0
    }

    /// Adds a plain run.
    pub fn plain(&mut self, workload: &'static Workload, link: &'static str, done: &RunResult) {
        self.of(workload, link, PLAIN).push(done);
    }

    /// Adds a protected run, with the plain runs before and after it.
    pub fn protected(
        &mut self,
        workload: &'static Workload,
        link: &'static str,
        policy: &Policy,
        done: &RunResult,
        around: [&RunResult; 2],
    ) {
        let row = self.of(workload, link, policy.key);
        row.push(done);
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
        way: &'static str,
    ) -> &mut Row {
        let found = self
            .all
            .iter()
            .position(|row| (row.workload.key, row.link, row.way) == (workload.key, link, way));
        let at = found.unwrap_or_else(|| {
            self.all.push(Row::new(workload, link, way));
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

    /// Returns the workload, policy and slowdown of each row of a link.
    pub fn slowdowns<'a>(
        &'a self,
        link: &'a str,
    ) -> impl Iterator<Item = (&'static str, &'static str, &'a Sample)> {
        let of_link = self.all.iter().filter(move |row| row.link == link && row.way != PLAIN);
        of_link.map(|row| (row.workload.key, row.way, &row.slowdown))
    }

    pub fn report(&self, report: &mut Report) {
        report.figure("run_seconds", f64::from(self.seconds));
        let mut all = TransferTotals::default();
        for row in &self.all {
            row.report(report, self.seconds);
            all = all.plus(row.transfer);
        }
        for workload in self.workloads() {
            let of_kind = self.all.iter().filter(|row| row.workload.key == workload);
            let (wire, raw) = of_kind.fold((0.0, 0.0), |(wire, raw), row| {
                (wire + row.transfer.wire_bytes, raw + row.transfer.raw_bytes)
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

    /// Returns the table: slowdowns for each workload and link, then the answers to clients.
    fn table(&self) -> String {
        let mut text = format!("\nslowdown, runs of {} s{:21}", self.seconds, "");
        for policy in &POLICIES {
            let _ = write!(text, "{:>10}", policy.key);
        }
        let links = self.links();
        for (workload, link) in self
            .workloads()
            .into_iter()
            .flat_map(|workload| links.iter().map(move |link| (workload, *link)))
        {
            self.line(&mut text, (workload, link, ""), |row| &row.slowdown);
            self.line(&mut text, (workload, link, "own time"), |row| &row.own_slowdown);
        }
        let answered = self.all.iter().filter(|row| row.workload.has_clients());
        for (n, row) in answered.enumerate() {
            if n == 0 {
                let (good, tolerable) = (GOOD.as_millis(), TOLERABLE.as_millis());
                let _ = write!(
                    text,
                    "\nanswers{:37} per s   p50 ms   p99 ms  in {good} ms in {tolerable} ms",
                    ""
                );
            }
            let _ = write!(
                text,
                "\n  {:<12} {:<8} {:<19} {:>8.1} {:>8.1} {:>8.1} {:>7.1}% {:>8.1}%",
                row.workload.key,
                row.link,
                row.way,
                row.per_s.median(),
                row.took_ns.median() / 1e6,
                row.took_ns.percentile(99) / 1e6,
                row.good_per_s.median() / row.per_s.median() * 100.0,
                row.tolerable_per_s.median() / row.per_s.median() * 100.0,
            );
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

impl Rows {
    /// Adds a line of slowdowns, if there are any.
    fn line(
        &self,
        text: &mut String,
        (workload, link, how): (&str, &str, &str),
        of: fn(&Row) -> &Sample,
    ) {
        let found = |policy: &Policy| {
            let mut rows = self.all.iter();
            rows.find(|row| (row.workload.key, row.link, row.way) == (workload, link, policy.key))
                .map(of)
        };
        let cells =
            POLICIES.each_ref().map(|policy| found(policy).filter(|sample| sample.len() > 0));
        if cells.iter().all(Option::is_none) {
            return;
        }
        let _ = write!(text, "\n  {workload:<12} {link:<8} {how:<18}");
        for cell in cells {
            let _ = match cell {
                Some(sample) => write!(text, "{:>10.3}", sample.median()),
                None => write!(text, "{:>10}", "-"),
            };
        }
    }
}

impl Row {
    fn new(workload: &'static Workload, link: &'static str, way: &'static str) -> Self {
        Self {
            workload,
            link,
            way,
            per_s: Sample::default(),
            good_per_s: Sample::default(),
            tolerable_per_s: Sample::default(),
            took_ns: Sample::default(),
            slowdown: Sample::default(),
            own_slowdown: Sample::default(),
            good: Sample::default(),
            tolerable: Sample::default(),
            transfer: TransferTotals::default(),
        }
    }

    fn push(&mut self, done: &RunResult) {
        self.per_s.push(done.per_s);
        self.good_per_s.push(done.good_per_s);
        self.tolerable_per_s.push(done.tolerable_per_s);
        self.took_ns.append(&done.took_ns);
        self.transfer = self.transfer.plus(done.transfer);
    }

    fn report(&self, report: &mut Report, seconds: u16) {
        let (workload, end) = (self.workload.key, format!("{}_{}", self.link, self.way));
        report.figure(format!("{workload}_per_s_{end}"), self.per_s.median());
        if self.way == PLAIN {
            // The spread of the plain runs is the uncertainty of the slowdown.
            if self.per_s.len() > 1 {
                let range = self.per_s.percentile(100) - self.per_s.percentile(1);
                report.ratio(format!("{workload}_spread_{end}"), range / self.per_s.median());
            }
        } else {
            report.ratio(format!("slowdown_{workload}_{end}"), self.slowdown.median());
            if self.own_slowdown.len() > 0 {
                report.ratio(
                    format!("slowdown_{workload}_{end}_own_time"),
                    self.own_slowdown.median(),
                );
            }
            let counted = f64::from(seconds) * self.per_s.len() as f64;
            report.figure(format!("{workload}_epochs_per_s_{end}"), self.transfer.epochs / counted);
            report.figure(
                format!("{workload}_wire_bytes_per_s_{end}"),
                self.transfer.wire_bytes / counted,
            );
            if self.transfer.epochs > 0.0 {
                let of_epoch = |sum: f64| sum / self.transfer.epochs;
                report
                    .figure(format!("{workload}_epoch_pages_{end}"), of_epoch(self.transfer.pages));
                report.figure(
                    format!("{workload}_epoch_pause_ns_{end}"),
                    of_epoch(self.transfer.pause_ns),
                );
                report.figure(
                    format!("{workload}_epoch_transfer_ns_{end}"),
                    of_epoch(self.transfer.transfer_ns),
                );
            }
            let suspended = self.transfer.suspended_ns / (counted * 1e9);
            report.ratio(format!("{workload}_suspended_part_{end}"), suspended);
        }
        if !self.workload.has_clients() {
            return;
        }
        report.figure(format!("{workload}_latency_p50_ns_{end}"), self.took_ns.median());
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
        if self.way != PLAIN {
            // The keys for 1 Gbit/s do not name the link.
            let end = end.strip_prefix("1gbit_").unwrap_or(&end);
            report.ratio(format!("{workload}_good_answers_{end}"), self.good.median());
            report.ratio(format!("{workload}_tolerable_answers_{end}"), self.tolerable.median());
        }
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
    use crate::replication::workload;

    /// Other programs read these keys.
    #[test]
    fn the_keys_are_those_promised() {
        let mut rows = Rows::new(5);
        let mut took_ns = Sample::default();
        took_ns.push(3e6);
        let transfer = TransferTotals {
            epochs: 10.0,
            wire_bytes: 1e6,
            raw_bytes: 4e6,
            ..TransferTotals::default()
        };
        let done = |per_s: f64| RunResult {
            per_s,
            own_per_s: Some(per_s * 2.0),
            good_per_s: per_s / 2.0,
            tolerable_per_s: per_s,
            took_ns: took_ns.clone(),
            transfer,
        };
        for workload in &workload::ALL {
            for (link, _) in LINKS {
                for policy in &POLICIES {
                    rows.protected(
                        workload,
                        link,
                        policy,
                        &done(100.0),
                        [&done(105.0), &done(111.0)],
                    );
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
            ] {
                let key = format!("slowdown_{workload}_{end}");
                assert!((report.ratios[&key] - 1.08).abs() < 1e-9, "{key}");
                assert!((report.ratios[&format!("{key}_own_time")] - 1.08).abs() < 1e-9, "{key}");
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
        assert!(report.table.contains("coordinator"), "{}", report.table);
    }
}
