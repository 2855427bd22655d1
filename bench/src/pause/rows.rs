//! The measured pauses: a sample for each method to save a VM and each load.

use crate::Report;
use crate::sample::Sample;

/// The measured rates, in dirty pages a second.
pub const RATES: [u64; 4] = [1_000, 5_000, 20_000, 60_000];
/// The measured sizes of RAM, in GiB.
pub const SIZES: [u64; 5] = [1, 2, 4, 8, 12];

/// The load of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The pages that it writes in a second.
    pub rate: u64,
    /// The size of its RAM, if all of it was written; `None` for the guest of the rates.
    pub gib: Option<u64>,
}

impl Load {
    /// Returns its name in keys, for example `20k` or `20k_4gib`.
    pub fn label(self) -> String {
        let rate = format!("{}k", self.rate / 1000);
        self.gib.map_or_else(|| rate.clone(), |gib| format!("{rate}_{gib}gib"))
    }
}

/// The measurements of one method at one load.
pub struct Row {
    /// The name of the method in keys.
    pub way: String,
    /// The load.
    pub load: Load,
    /// The pauses of the VM.
    pub pause_ns: Sample,
    /// The times of the whole saves; empty for checkpoints.
    pub whole_ns: Sample,
    /// The times of the last look for dirty pages, in the pause; empty for QEMU's own methods.
    pub scan_ns: Sample,
    /// The dirty pages of each checkpoint; empty for QEMU's own methods.
    pub dirty_pages: Sample,
    /// The part of its work that the guest lost during background snapshots.
    pub work_lost: Sample,
}

/// All rows, in the order in which they were first measured.
#[derive(Default)]
pub struct Rows {
    rows: Vec<Row>,
    /// The key and the pause of each VM's first background snapshot.
    pub first_snapshots: Vec<(String, f64)>,
}

impl Rows {
    /// Returns the row of `way` at `load`; makes it if it is missing.
    pub fn of(&mut self, way: &str, load: Load) -> &mut Row {
        let at =
            self.rows.iter().position(|r| r.way == way && r.load == load).unwrap_or_else(|| {
                let (pause_ns, whole_ns, scan_ns, dirty_pages, work_lost) = Default::default();
                self.rows.push(Row {
                    way: way.into(),
                    load,
                    pause_ns,
                    whole_ns,
                    scan_ns,
                    dirty_pages,
                    work_lost,
                });
                self.rows.len() - 1
            });
        &mut self.rows[at]
    }

    /// Returns the rows.
    pub fn iter(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter()
    }

    /// Returns how often `way` was measured at `load`.
    pub fn count(&self, way: &str, load: Load) -> usize {
        self.iter().filter(|r| r.way == way && r.load == load).map(|r| r.pause_ns.len()).sum()
    }

    /// Returns the median number of dirty pages of a checkpoint at `load`, over all strategies.
    pub fn dirty_pages_p50(&self, load: Load) -> f64 {
        let mut all = Sample::default();
        self.iter().filter(|r| r.load == load).for_each(|r| all.append(&r.dirty_pages));
        all.median()
    }

    /// Adds the figures of each row to `report`.
    pub fn figures(&self, report: &mut Report) {
        for (key, pause_ns) in &self.first_snapshots {
            report.figure(key, *pause_ns);
        }
        for row in self.iter() {
            let key = format!("{}_{}", row.way, row.load.label());
            report.figure(format!("{key}_pause_p50_ns"), row.pause_ns.median());
            if row.scan_ns.len() > 0 {
                report.figure(format!("{key}_scan_in_pause_p50_ns"), row.scan_ns.median());
            }
            if row.dirty_pages.len() > 0 {
                report.figure(format!("{key}_pause_p99_ns"), row.pause_ns.percentile(99));
                report.figure(format!("{key}_dirty_pages_p50"), row.dirty_pages.median());
            }
            if row.whole_ns.len() > 0 {
                report.figure(format!("{key}_whole_p50_ns"), row.whole_ns.median());
            }
            if row.work_lost.len() > 0 {
                report.ratio(format!("{key}_work_lost"), row.work_lost.median());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_the_method_the_load_and_the_unit() {
        let mut rows = Rows::default();
        for (gib, pause_ns) in [(None, 1.0), (None, 3.0), (Some(4), 7.0)] {
            let row = rows.of("precopy", Load { rate: 20_000, gib });
            row.pause_ns.push(pause_ns);
            row.dirty_pages.push(100.0);
        }
        rows.of("savevm", Load { rate: 1000, gib: None }).pause_ns.push(9.0);
        let mut report = Report::new("pause");
        rows.figures(&mut report);
        let figures: Vec<_> = report.figures.iter().map(|(k, v)| (k.as_str(), *v)).collect();
        assert_eq!(
            figures,
            [
                ("precopy_20k_4gib_dirty_pages_p50", 100.0),
                ("precopy_20k_4gib_pause_p50_ns", 7.0),
                ("precopy_20k_4gib_pause_p99_ns", 7.0),
                ("precopy_20k_dirty_pages_p50", 100.0),
                ("precopy_20k_pause_p50_ns", 2.0),
                ("precopy_20k_pause_p99_ns", 3.0),
                ("savevm_1k_pause_p50_ns", 9.0),
            ]
        );
        assert_eq!(rows.count("precopy", Load { rate: 20_000, gib: None }), 2);
    }
}
