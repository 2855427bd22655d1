//! The measurements: a sample of each figure for each store, and the report.

use crate::Report;
use crate::sample::Sample;
use keyframe_bench_feed::{FeedTime, StoreMeasurement};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series};
use keyframe_units::PAGE_BYTES;
use std::collections::BTreeMap;

/// Keyframe's store with a stream in which more words change.
pub const DIRTIER: &str = "dirtier";
const KEYFRAME: &str = "keyframe";
/// The note below the table.
const SETTLED: &str = "  fed: as the last checkpoint left the store; stored: after keyframe has recompressed it, as it does when it is \
                       idle, which took idle CPU s and is in no other column; read ms is of the store after that";
const DEDUP_ZSTD: &str = "dedup_zstd";

/// The samples of one store, by the ends of their keys.
#[derive(Default)]
struct Row(BTreeMap<&'static str, Sample>);

impl Row {
    fn push(&mut self, key: &'static str, value: f64) {
        self.0.entry(key).or_default().push(value);
    }

    fn rate(&mut self, key: &'static str, fed: FeedTime) {
        self.push(key, fed.bytes as f64 / (fed.ns as f64 / 1e9));
    }
}

/// The rows of all stores, in the order in which they were first measured.
#[derive(Default)]
pub struct Rows(Vec<(String, Row)>);

impl Rows {
    /// Adds a round of store `name`.
    pub fn add(&mut self, name: &str, m: &StoreMeasurement) {
        let at = self.0.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            self.0.push((name.into(), Row::default()));
            self.0.len() - 1
        });
        let row = &mut self.0[at].1;
        row.push("stored_bytes", m.stored_bytes as f64);
        if name == DEDUP_ZSTD {
            // It is no store and has sizes only.
            row.push("delta_stored_bytes", m.image_stored_bytes as f64);
            return;
        }
        row.rate("whole_bytes_per_s", m.whole);
        row.rate("image_bytes_per_s", m.image);
        row.rate("steady_bytes_per_s", m.steady);
        row.push(
            "pages_per_s",
            m.whole.bytes as f64 / PAGE_BYTES as f64 / (m.whole.ns as f64 / 1e9),
        );
        row.push("whole_ns", m.whole.ns as f64);
        row.push("cpu_ns", m.cpu_ns as f64);
        row.push("peak_bytes", m.peak_bytes as f64);
        for (rebuilt, one_core, all_cores) in [
            (Some(m.rebuilt), "reconstruct_ns", "reconstruct_all_cores_ns"),
            (
                m.rebuilt_settled,
                "recompressed_reconstruct_ns",
                "recompressed_reconstruct_all_cores_ns",
            ),
        ] {
            if let Some(rebuilt) = rebuilt {
                row.push(one_core, rebuilt.ns as f64);
                rebuilt.all_cores_ns.into_iter().for_each(|ns| row.push(all_cores, ns as f64));
            }
        }
        if let Some(dup) = m.dup {
            row.rate("dup_bytes_per_s", dup);
        }
        if let Some(cpu_ns) = m.settle_cpu_ns {
            row.push("settle_cpu_ns", cpu_ns as f64);
        }
        if let Some(unique) = m.unique {
            row.rate("unique_bytes_per_s", unique);
        }
        if [KEYFRAME, DIRTIER].contains(&name) {
            row.push("image_stored_bytes", m.image_stored_bytes as f64);
            row.push(
                "steady_stored_bytes",
                m.ingested_bytes.saturating_sub(m.image_stored_bytes) as f64,
            );
            row.push("ingested_bytes", m.ingested_bytes as f64);
            row.push("memcpy_ns", m.memcpy_ns as f64);
            row.push("dedup_only_bytes", m.distinct_bytes as f64);
        }
    }

    /// Returns the report: figures, ratios, table and chart.
    pub fn report(&self) -> Report {
        let mut report = Report::new("store");
        for (name, row) in &self.0 {
            for (key, sample) in &row.0 {
                report.figure(format!("{name}_{key}"), sample.median());
            }
        }
        for key in ["dup_bytes_per_s", "unique_bytes_per_s", "steady_bytes_per_s"] {
            if let Some(value) = report.figures.get(&format!("{KEYFRAME}_{key}")).copied() {
                report.figure(format!("ingest_{key}"), value);
            }
        }
        for (to, from, unit) in [
            ("stored_bytes_after_ingest", "ingested_bytes", 1.0),
            ("recompress_cpu_s", "settle_cpu_ns", 1e9),
        ] {
            if let Some(value) = report.figures.get(&format!("{KEYFRAME}_{from}")).copied() {
                report.figure(to.to_owned(), value / unit);
            }
        }
        for (name, _) in self
            .0
            .iter()
            .filter(|(name, _)| ![KEYFRAME, DIRTIER, DEDUP_ZSTD].contains(&name.as_str()))
        {
            for (ratio, key) in [
                ("ingest", "whole_bytes_per_s"),
                ("steady", "steady_bytes_per_s"),
                ("cpu", "cpu_ns"),
                ("stored", "stored_bytes"),
            ] {
                let (over, under) = (format!("{KEYFRAME}_{key}"), format!("{name}_{key}"));
                report.ratio_of(format!("{ratio}_over_{name}"), &over, &under);
            }
        }
        for (ratio, over, under) in [
            ("stored_over_dedup_only", "keyframe_stored_bytes", "keyframe_dedup_only_bytes"),
            ("stored_over_dedup_zstd", "keyframe_stored_bytes", "dedup_zstd_stored_bytes"),
            (
                "stored_over_dedup_zstd_delta",
                "keyframe_stored_bytes",
                "dedup_zstd_delta_stored_bytes",
            ),
            ("memcpy_over_reconstruct", "keyframe_reconstruct_all_cores_ns", "keyframe_memcpy_ns"),
            ("memcpy_over_reconstruct_one_core", "keyframe_reconstruct_ns", "keyframe_memcpy_ns"),
            (
                "memcpy_over_reconstruct_recompressed",
                "keyframe_recompressed_reconstruct_all_cores_ns",
                "keyframe_memcpy_ns",
            ),
            ("dirtier_stored_over_dedup_only", "dirtier_stored_bytes", "dirtier_dedup_only_bytes"),
        ] {
            report.ratio_of(ratio, over, under);
        }
        report.table = self.table();
        report.plot = self.chart();
        report
    }

    fn value(row: &Row, key: &str) -> Option<f64> {
        row.0.get(key).map(Sample::median)
    }

    /// Returns a table with a line for each store.
    fn table(&self) -> String {
        // Heading, key, units of the key in one unit of the column, digits.
        let columns = [
            ("pages/s", "pages_per_s", 1.0, 0),
            ("whole MB/s", "whole_bytes_per_s", 1e6, 0),
            ("steady MB/s", "steady_bytes_per_s", 1e6, 0),
            ("known MB/s", "dup_bytes_per_s", 1e6, 0),
            ("new MB/s", "unique_bytes_per_s", 1e6, 0),
            ("CPU s", "cpu_ns", 1e9, 2),
            ("fed MiB", "ingested_bytes", 1_048_576.0, 0),
            ("stored MiB", "stored_bytes", 1_048_576.0, 0),
            ("idle CPU s", "settle_cpu_ns", 1e9, 2),
            ("read ms", "reconstruct_ns", 1e6, 0),
            ("memory MiB", "peak_bytes", 1_048_576.0, 0),
        ];
        if self.0.is_empty() {
            return String::new();
        }
        let headings = columns.map(|(heading, ..)| format!("{heading:>13}")).concat();
        let mut lines = vec![format!("  {:<18}{headings}", "store")];
        for (name, row) in &self.0 {
            let cell = |key, unit: f64, digits: usize| {
                let value = Self::value(row, key);
                value.map_or("-".into(), |value| format!("{:.digits$}", value / unit))
            };
            let cells =
                columns.map(|(_, key, unit, digits)| format!("{:>13}", cell(key, unit, digits)));
            lines.push(format!("  {name:<18}{}", cells.concat()));
        }
        if self.0.iter().any(|(name, _)| name == KEYFRAME) {
            lines.push(SETTLED.into());
        }
        lines.join("\n")
    }

    /// Draws speed over size.
    fn chart(&self) -> Figure {
        let mut series = Vec::new();
        for (name, row) in self.0.iter().filter(|(name, _)| name != DIRTIER) {
            if let (Some(stored), Some(rate)) =
                (Self::value(row, "stored_bytes"), Self::value(row, "whole_bytes_per_s"))
            {
                let point = Point { x: stored / 1_048_576.0, y: rate / 1e6, deviation: None };
                series.push(Series { name: name.replace('_', " "), points: vec![point] });
            }
        }
        let chart = Chart {
            title: "A guest's RAM and nine seconds of what it writes, on one core".into(),
            x: Axis::new("stored, MiB", Scale::Linear),
            y: Axis::new("pages put, MB/s", Scale::Log),
            series,
        };
        Figure { title: "Stores for checkpoints: speed and size".into(), charts: vec![chart] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_bench_feed::RebuildTimes;

    fn measured(whole_ns: u64, stored_bytes: u64) -> StoreMeasurement {
        let fed = |ns| FeedTime { bytes: 1_000_000_000, ns };
        StoreMeasurement {
            whole: fed(whole_ns),
            image: fed(1_000_000_000),
            steady: fed(500_000_000),
            dup: Some(fed(250_000_000)),
            unique: Some(fed(2_000_000_000)),
            stored_bytes,
            distinct_bytes: 900,
            rebuilt: RebuildTimes { ns: 300, all_cores_ns: Some(200) },
            rebuilt_settled: Some(RebuildTimes { ns: 700, all_cores_ns: Some(500) }),
            memcpy_ns: 100,
            ..StoreMeasurement::default()
        }
    }

    /// Other programs read these keys.
    #[test]
    fn the_keys_and_ratios_are_those_promised() {
        let mut rows = Rows::default();
        rows.add("keyframe", &measured(1_000_000_000, 300));
        let peers = [
            "rocksdb",
            "leveldb",
            "lmdb",
            "kyoto",
            "sqlite",
            "redb",
            "borg",
            "restic",
            "flat_file",
        ];
        for peer in peers {
            rows.add(peer, &measured(4_000_000_000, 600));
        }
        rows.add("dedup_zstd", &measured(0, 600));
        let report = rows.report();
        let close = |value: f64, expected: f64, key: &str| {
            assert!((value / expected - 1.0).abs() < 1e-9, "{key}: {value}");
        };
        for (key, expected) in [("dup", 4e9), ("unique", 5e8), ("steady", 2e9)] {
            close(report.figures[&format!("ingest_{key}_bytes_per_s")], expected, key);
        }
        for peer in peers {
            close(report.ratios[&format!("ingest_over_{peer}")], 4.0, peer);
        }
        close(report.ratios["stored_over_dedup_only"], 1.0 / 3.0, "dedup only");
        close(report.ratios["stored_over_dedup_zstd"], 0.5, "dedup and zstd");
        close(report.ratios["memcpy_over_reconstruct"], 2.0, "memcpy");
        close(report.ratios["memcpy_over_reconstruct_one_core"], 3.0, "memcpy");
        close(report.ratios["memcpy_over_reconstruct_recompressed"], 5.0, "memcpy");
        assert!(
            report.table.lines().count() == 13 && report.table.contains("kyoto"),
            "{}",
            report.table
        );
    }

    #[test]
    fn a_store_that_was_not_measured_has_no_key() {
        let mut rows = Rows::default();
        rows.add("lmdb", &measured(1, 1));
        let report = rows.report();
        assert!(report.ratios.is_empty(), "{:?}", report.ratios);
        assert!(report.figures.keys().all(|key| key.starts_with("lmdb_")));
    }
}
