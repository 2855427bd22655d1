//! Predicts the time of a transfer as `fixed + bytes / bandwidth`, fitted to the last transfers.
//!
//! The slope is the median of the slopes between all pairs of transfers (Theil 1950, Sen 1968), so
//! that up to three in ten may be odd, for example because the link was shared. If all transfers
//! had about the same size, the time is taken as proportional: that is right for this size, and too
//! little for smaller transfers.

use super::{AcknowledgedEpoch, ExponentialMean};
use std::collections::VecDeque;

/// The number of transfers that are remembered.
const TRANSFERS: usize = 16;
/// A pair shows a slope if its sizes differ by this share of the smaller one.
const APART: f64 = 0.25;
/// The fewest pairs that make a slope.
const PAIRS_MIN: usize = 6;

/// The fitted model of the link.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkModel {
    /// Bytes and nanoseconds of each transfer, oldest first.
    transfers: VecDeque<(f64, f64)>,
    bytes_per_page: ExponentialMean,
    fixed_ns: f64,
    ns_per_byte: f64,
}

impl LinkModel {
    pub(super) fn take(&mut self, acked: &AcknowledgedEpoch) {
        if acked.pages > 0 {
            self.bytes_per_page.take(acked.wire_bytes as f64 / acked.pages as f64);
        }
        if self.transfers.len() == TRANSFERS {
            self.transfers.pop_front();
        }
        self.transfers.push_back((acked.wire_bytes as f64, acked.transfer_ns as f64));
        self.fit();
    }

    fn fit(&mut self) {
        let all = || self.transfers.iter().copied();
        let mut slopes = Vec::with_capacity(TRANSFERS * TRANSFERS / 2);
        for (k, a) in all().enumerate() {
            for b in all().skip(k + 1) {
                if (a.0 - b.0).abs() > APART * a.0.min(b.0) {
                    slopes.push((a.1 - b.1) / (a.0 - b.0));
                }
            }
        }
        let slope =
            (slopes.len() >= PAIRS_MIN).then(|| median(&mut slopes)).filter(|slope| *slope > 0.0);
        if let Some(slope) = slope {
            let mut rests: Vec<f64> =
                all().map(|(bytes, ns)| (ns - slope * bytes).max(0.0)).collect();
            (self.fixed_ns, self.ns_per_byte) = (median(&mut rests), slope);
        } else {
            let mut rates: Vec<f64> = all().map(|(bytes, ns)| ns / bytes.max(1.0)).collect();
            (self.fixed_ns, self.ns_per_byte) = (0.0, median(&mut rates));
        }
    }

    /// True before the first transfer.
    pub(super) fn is_unknown(&self) -> bool {
        self.transfers.is_empty()
    }

    /// The predicted time of a transfer of `pages` pages, in nanoseconds. 0 before the first
    /// transfer.
    pub(super) fn transfer_ns(&self, pages: f64) -> f64 {
        self.fixed_ns + pages.max(0.0) * self.bytes_per_page.or(0.0) * self.ns_per_byte
    }

    pub(super) fn fixed_ns(&self) -> f64 {
        self.fixed_ns
    }

    pub(super) fn bandwidth_bytes_per_s(&self) -> f64 {
        if self.ns_per_byte > 0.0 { 1e9 / self.ns_per_byte } else { 0.0 }
    }

    pub(super) fn bytes_per_page(&self) -> f64 {
        self.bytes_per_page.or(0.0)
    }
}

/// The median of a list that is not empty.
pub(super) fn median(values: &mut [f64]) -> f64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acked(pages: u64, transfer_ns: u64) -> AcknowledgedEpoch {
        AcknowledgedEpoch { pages, wire_bytes: pages * 2000, pause_ns: 0, transfer_ns, epoch_ns: 0 }
    }

    #[test]
    fn fixed_part_and_bandwidth_are_separated_despite_some_odd_transfers() {
        let mut link = LinkModel::default();
        assert!(link.is_unknown());
        for k in 0..16_u64 {
            let pages = 100 + 137 * k;
            // 0.4 ms, and 16 us a page: 125 MB/s. Every fifth transfer is late by 50 ms.
            link.take(&acked(
                pages,
                400_000 + pages * 16_000 + if k % 5 == 2 { 50_000_000 } else { 0 },
            ));
        }
        assert!((link.fixed_ns() - 400_000.0).abs() < 20_000.0, "{}", link.fixed_ns());
        assert!(
            (link.bandwidth_bytes_per_s() / 125e6 - 1.0).abs() < 0.01,
            "{}",
            link.bandwidth_bytes_per_s()
        );
        assert!((link.transfer_ns(1000.0) - 16_400_000.0).abs() < 200_000.0);
    }

    #[test]
    fn transfers_of_one_size_are_taken_in_proportion() {
        let mut link = LinkModel::default();
        for _ in 0..20 {
            link.take(&acked(1000, 16_400_000));
        }
        assert!((link.transfer_ns(1000.0) - 16_400_000.0).abs() < 1.0);
        link.take(&acked(0, 300_000));
        assert!(
            (link.transfer_ns(1000.0) - 16_400_000.0).abs() < 200_000.0,
            "an empty transfer does not change the model"
        );
    }
}
