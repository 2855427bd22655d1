//! The curve of one VM: pages written by length of the epoch, their growth, and the dirty page set.
//!
//! ```text
//!   pages │                       · · ·
//!         │              ·  ·  ·
//!         │         ·    ╰ dirty page set
//!         │      ·
//!         │   ·
//!         └────────────────────── epoch
//!
//!   growth between two lengths, in percent per doubling of the epoch:
//!   ((pages2 / pages1) ^ (1 / log2(time2 / time1)) - 1) * 100       all pages new: 100; none: 0
//! ```
//!
//! Growth is given per doubling because lengths need not be evenly spaced. It uses the measured
//! durations of the epochs, not the requested ones.

use crate::Statistic;
use keyframe_units::duration_ns;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Growth below this many percent per doubling of the epoch is a plateau (5 % in Gerofi and
/// Ishikawa, CLUSTER 2011).
pub const PLATEAU_PERCENT: f64 = 5.0;

/// The counts of one measured epoch: a time between two scans for written pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredEpoch {
    /// The requested length.
    pub length: Duration,
    /// The measured length between the two scans, in nanoseconds.
    pub measured_ns: u64,
    /// The number of distinct pages of 4 KiB written.
    pub pages: u64,
    /// The number of sectors of 512 bytes written to disks, if known.
    pub sectors: Option<u64>,
    /// The number of write requests to disks, if known.
    pub disk_writes: Option<u64>,
    /// The number of packets that the guest sent, if known.
    pub packets: Option<u64>,
}

/// The statistics of all measured epochs of one length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CurveRow {
    /// The requested length, in nanoseconds.
    pub epoch_ns: u64,
    /// The number of epochs.
    pub samples: u64,
    /// The measured lengths, in nanoseconds.
    pub measured_ns: Statistic,
    /// The numbers of distinct pages of 4 KiB written.
    pub pages: Statistic,
    /// The numbers of sectors of 512 bytes written to disks. `None` if they are not known.
    pub sectors: Option<Statistic>,
    /// The numbers of write requests to disks. `None` if they are not known.
    pub disk_writes: Option<Statistic>,
    /// The numbers of packets that the guest sent. `None` if they are not known.
    pub packets: Option<Statistic>,
    /// The growth of the pages since the row before, in percent per doubling of the epoch. `None`
    /// in the first row, and if the row before has no pages.
    pub growth_percent: Option<f64>,
}

/// The set of pages that a workload works on: longer epochs write hardly any other pages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DirtyPageSet {
    /// The length in nanoseconds of the shortest measured epoch from which growth stays below
    /// [`PLATEAU_PERCENT`].
    pub epoch_ns: u64,
    /// The mean number of pages written in that epoch.
    pub pages: f64,
    /// False if the standard error of a mean on the plateau exceeds [`PLATEAU_PERCENT`] of it, so
    /// that the growth may be noise. More samples help.
    pub certain: bool,
}

/// The numbers of pages and sectors that one VM writes and of packets that it sends, by the length
/// of the epoch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// The number of virtual CPUs, if known.
    pub vcpus: Option<u32>,
    /// One row for each length, in rising order.
    pub rows: Vec<CurveRow>,
    /// The dirty page set. `None` if the pages grow up to the longest epoch, or if only one length
    /// was measured.
    pub dirty_page_set: Option<DirtyPageSet>,
}

impl Curve {
    /// Computes the curve from the measured epochs of a VM, in any order. `vcpus` is the number of
    /// its virtual CPUs; `None` if it is not known.
    pub fn new(vcpus: Option<u32>, epochs: &[MeasuredEpoch]) -> Self {
        let mut by_length: BTreeMap<Duration, Vec<MeasuredEpoch>> = BTreeMap::new();
        for epoch in epochs {
            by_length.entry(epoch.length).or_default().push(*epoch);
        }
        let mut rows: Vec<CurveRow> =
            by_length.iter().filter_map(|(length, epochs)| row(*length, epochs)).collect();
        for index in 1..rows.len() {
            rows[index].growth_percent = growth_percent(&rows[index - 1], &rows[index]);
        }
        let dirty_page_set = dirty_page_set(&rows);
        Self { vcpus, rows, dirty_page_set }
    }
}

fn row(length: Duration, epochs: &[MeasuredEpoch]) -> Option<CurveRow> {
    Some(CurveRow {
        epoch_ns: duration_ns(length),
        samples: epochs.len() as u64,
        measured_ns: Statistic::of_all(epochs.iter().map(|e| Some(e.measured_ns)))?,
        pages: Statistic::of_all(epochs.iter().map(|e| Some(e.pages)))?,
        sectors: Statistic::of_all(epochs.iter().map(|e| e.sectors)),
        disk_writes: Statistic::of_all(epochs.iter().map(|e| e.disk_writes)),
        packets: Statistic::of_all(epochs.iter().map(|e| e.packets)),
        growth_percent: None,
    })
}

fn growth_percent(before: &CurveRow, after: &CurveRow) -> Option<f64> {
    let doublings = (after.measured_ns.mean / before.measured_ns.mean).log2();
    let factor = after.pages.mean / before.pages.mean;
    // Two lengths with equal measured durations say nothing about growth.
    let growth = (factor.powf(1.0 / doublings) - 1.0) * 100.0;
    (doublings > 0.01 && before.pages.mean > 0.0 && growth.is_finite()).then_some(growth)
}

/// Finds the dirty page set. Growth must stay low up to the longest epoch: a single flat step may
/// be chance, or a workload between two phases.
fn dirty_page_set(rows: &[CurveRow]) -> Option<DirtyPageSet> {
    let flat = |row: &&CurveRow| row.growth_percent.is_some_and(|g| g < PLATEAU_PERCENT);
    let flat_steps = rows.iter().rev().take_while(flat).count();
    let plateau = rows.get(rows.len().checked_sub(flat_steps + 1)?..)?;
    let first = plateau.first().filter(|_| flat_steps > 0)?;
    let certain = plateau.iter().all(|r| standard_error_percent(r) <= PLATEAU_PERCENT);
    Some(DirtyPageSet { epoch_ns: first.epoch_ns, pages: first.pages.mean, certain })
}

/// Returns the standard error of the mean number of pages, in percent of the mean; infinity for a
/// single epoch.
fn standard_error_percent(row: &CurveRow) -> f64 {
    if row.samples < 2 || row.pages.mean <= 0.0 {
        return f64::INFINITY;
    }
    row.pages.deviation / (row.samples as f64).sqrt() / row.pages.mean * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn epoch(ms: u64, pages: u64) -> MeasuredEpoch {
        MeasuredEpoch {
            length: Duration::from_millis(ms),
            measured_ns: ms * 1_000_000,
            pages,
            sectors: Some(pages * 8),
            disk_writes: None,
            packets: (pages > 0).then_some(1),
        }
    }

    fn curve(points: &[(u64, u64)]) -> Curve {
        let epochs: Vec<_> = points.iter().map(|(ms, pages)| epoch(*ms, *pages)).collect();
        Curve::new(Some(1), &epochs)
    }

    #[test]
    fn growth_is_per_doubling_of_the_epoch() {
        let curve = curve(&[(10, 100), (20, 200), (80, 3200), (160, 3200)]);
        let growth: Vec<_> =
            curve.rows.iter().map(|r| r.growth_percent.map(|g| g.round() as i64)).collect();
        assert_eq!(growth, [None, Some(100), Some(300), Some(0)]);
    }

    #[test]
    fn the_dirty_page_set_is_where_growth_ends_for_good() {
        let found = |points: &[(u64, u64)]| {
            curve(points).dirty_page_set.map(|s| (s.epoch_ns / 1_000_000, s.pages))
        };
        let plateau = [(10, 200), (20, 400), (50, 900), (100, 1000), (200, 1040), (500, 1060)];
        assert_eq!(found(&plateau), Some((100, 1000.0)));
        assert_eq!(
            found(&[(10, 200), (20, 202), (50, 900), (100, 1000)]),
            None,
            "one flat step is no plateau"
        );
        assert_eq!(found(&[(10, 200), (20, 190)]), Some((10, 200.0)), "flat from the beginning");
        assert_eq!(found(&[(10, 0), (20, 0)]), None, "nothing was written");
        assert_eq!(found(&[(10, 0), (20, 5), (50, 5)]), Some((20, 5.0)));
        assert_eq!(found(&[(10, 200)]), None);
        assert_eq!(found(&[]), None);
    }

    #[test]
    fn a_plateau_in_the_noise_is_uncertain() {
        let certain = |points: &[(u64, u64)]| curve(points).dirty_page_set.map(|s| s.certain);
        assert_eq!(certain(&[(10, 100), (10, 102), (20, 101), (20, 102)]), Some(true));
        assert_eq!(certain(&[(10, 20), (10, 255), (20, 103), (20, 160)]), Some(false));
        assert_eq!(certain(&[(10, 100), (20, 100)]), Some(false), "single epochs");
    }

    #[test]
    fn epochs_are_grouped_by_length_and_unknown_counts_stay_unknown() {
        let mut epochs = vec![epoch(20, 7), epoch(10, 1), epoch(20, 9), epoch(10, 0)];
        let curve = Curve::new(None, &epochs);
        let lengths: Vec<_> =
            curve.rows.iter().map(|r| (r.epoch_ns, r.samples, r.pages.mean)).collect();
        assert_eq!(lengths, [(10_000_000, 2, 0.5), (20_000_000, 2, 8.0)]);
        assert!(curve.rows[0].packets.is_none(), "one of its epochs has no count");
        assert_eq!(curve.rows[1].sectors.map(|s| (s.min, s.max)), Some((56, 72)));
        epochs.clear();
        assert!(Curve::new(None, &epochs).rows.is_empty());
    }

    proptest! {
        /// For all counts: rows rise, no value is NaN, and the dirty page set lies on the curve.
        #[test]
        fn any_epochs_make_a_curve(list in prop::collection::vec((1u64..3000, 0u64..1 << 30, 1u64..1 << 40), 0..60)) {
            let epochs: Vec<_> = list
                .iter()
                .map(|(ms, pages, ns)| MeasuredEpoch { measured_ns: *ns, ..epoch(*ms, *pages) })
                .collect();
            let curve = Curve::new(None, &epochs);
            prop_assert!(curve.rows.windows(2).all(|w| w[0].epoch_ns < w[1].epoch_ns));
            prop_assert!(curve.rows.iter().all(|r| r.growth_percent.is_none_or(f64::is_finite)));
            prop_assert_eq!(curve.rows.iter().map(|r| r.samples).sum::<u64>(), epochs.len() as u64);
            if let Some(set) = curve.dirty_page_set {
                prop_assert!(curve.rows.iter().any(|r| r.epoch_ns == set.epoch_ns && r.pages.mean.total_cmp(&set.pages).is_eq()));
            }
        }
    }
}
