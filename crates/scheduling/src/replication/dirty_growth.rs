//! Predicts the growth of the dirty set with the age of an epoch, from the last epochs at each age
//! and the present epoch's share of them.
//!
//! No formula is fitted. Dirty sets grow fast, then slowly (Gerofi & Ishikawa 2011, figures 1 and
//! 2), but the bend depends on the workload. The model keeps the number of pages at the ages 1, 2,
//! 4, ... ms, and uses the median of the last epochs at each, so that one odd epoch has no effect.

use super::link_model::median;
use std::collections::VecDeque;

/// The number of ages with a page count: 1 ms to 4 s.
const AGES: usize = 13;
const AGE_NS_MIN: f64 = 1e6;
/// The number of epochs that are remembered.
const EPOCHS: usize = 7;

type Curve = [Option<f64>; AGES];

fn age_ns(k: usize) -> f64 {
    AGE_NS_MIN * (1_u64 << k) as f64
}

/// The growth of the dirty set over the last epochs.
#[derive(Clone, Debug, Default)]
pub(super) struct DirtyGrowth {
    epochs: VecDeque<Curve>,
    current: Curve,
    /// Age and pages at the newest look.
    newest: (f64, f64),
    /// The medians, rising; as many as are known.
    curve: Vec<f64>,
}

impl DirtyGrowth {
    /// Records that `pages` pages are dirty at `age` nanoseconds of the epoch.
    pub(super) fn look(&mut self, age: f64, pages: f64) {
        let (age_before, pages_before) = self.newest;
        if age <= age_before {
            return;
        }
        for k in 0..AGES {
            if age_before < age_ns(k) && age_ns(k) <= age {
                let part = (age_ns(k) - age_before) / (age - age_before);
                self.current[k] = Some((pages - pages_before).mul_add(part, pages_before));
            }
        }
        self.newest = (age, pages);
    }

    /// Ends the epoch and updates the curve.
    pub(super) fn close(&mut self) {
        let current = std::mem::take(&mut self.current);
        self.newest = (0.0, 0.0);
        if current[0].is_none() {
            return;
        }
        if self.epochs.len() == EPOCHS {
            self.epochs.pop_front();
        }
        self.epochs.push_back(current);
        self.curve.clear();
        let mut highest: f64 = 0.0;
        for k in 0..AGES {
            let mut seen: Vec<f64> = self.epochs.iter().filter_map(|epoch| epoch[k]).collect();
            // An age that few epochs reached is not typical: a single long and quiet epoch would
            // make the curve flat.
            if 2 * seen.len() <= self.epochs.len() {
                break;
            }
            // Short epochs have no late ages, so each median is over other epochs and could be
            // smaller than the one before. A dirty set does not shrink.
            highest = highest.max(median(&mut seen));
            self.curve.push(highest);
        }
    }

    /// The number of dirty pages at an age, according to the last epochs. Past the longest of them
    /// the last slope continues, which estimates too much rather than too little. `None` before the
    /// first epoch has ended.
    pub(super) fn pages_at(&self, age: f64) -> Option<f64> {
        let curve = &self.curve;
        let first = *curve.first()?;
        if age <= age_ns(0) {
            return Some(first * age.max(0.0) / age_ns(0));
        }
        let above = (1..curve.len()).find(|k| age <= age_ns(*k));
        let (low, high) = match above {
            Some(k) => (k - 1, k),
            None if curve.len() == 1 => return Some(first * age / age_ns(0)),
            None => (curve.len() - 2, curve.len() - 1),
        };
        let slope = (curve[high] - curve[low]) / (age_ns(high) - age_ns(low));
        Some(slope.mul_add(age - age_ns(low), curve[low]))
    }

    /// The predicted number of dirty pages `ahead_ns` after an age at which `pages` are dirty.
    pub(super) fn predict(&self, age: f64, pages: f64, ahead_ns: f64) -> f64 {
        match (self.pages_at(age), self.pages_at(age + ahead_ns)) {
            (Some(now), Some(then)) => {
                // This epoch may be busier than the last ones. The factor is bounded, because few
                // pages tell little.
                let share = (pages / now.max(1.0)).clamp(0.25, 4.0);
                (then - now).max(0.0).mul_add(share, pages)
            }
            _ => pages * (1.0 + ahead_ns / age.max(AGE_NS_MIN)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: f64 = 1e6;

    /// A set of 1,000 pages, most of it within 20 ms.
    fn bent(age: f64) -> f64 {
        1000.0 * (1.0 - (-age / (20.0 * MS)).exp())
    }

    #[test]
    fn one_long_quiet_epoch_does_not_make_the_curve_flat() {
        let mut growth = DirtyGrowth::default();
        for epoch in 0..4 {
            for look in 1..=if epoch == 0 { 1000 } else { 4 } {
                let age = f64::from(look) * MS;
                growth.look(age, if epoch == 0 { 5.0 } else { 100.0 * age / MS });
            }
            growth.close();
        }
        assert!((growth.predict(4.0 * MS, 400.0, 8.0 * MS) - 1200.0).abs() < 1.0);
    }

    #[test]
    fn a_bent_curve_is_predicted_within_a_tenth_despite_two_odd_epochs() {
        let mut growth = DirtyGrowth::default();
        assert!(
            (growth.predict(10.0 * MS, 100.0, 10.0 * MS) - 200.0).abs() < 1.0,
            "no epoch is known: in proportion"
        );
        for epoch in 0..7 {
            for look in 1..=100 {
                let age = f64::from(look) * 2.0 * MS;
                growth.look(age, if epoch % 3 == 1 { 30_000.0 } else { bent(age) });
            }
            growth.close();
        }
        for (age, ahead) in [(4.0, 4.0), (10.0, 22.0), (20.0, 60.0), (60.0, 60.0), (150.0, 50.0)] {
            let (age, ahead) = (age * MS, ahead * MS);
            let (want, got) = (bent(age + ahead), growth.predict(age, bent(age), ahead));
            assert!((got / want - 1.0).abs() < 0.1, "at {age} + {ahead}: {got}, not {want}");
            let busy = growth.predict(age, 2.0 * bent(age), ahead);
            assert!((busy / want / 2.0 - 1.0).abs() < 0.1, "an epoch twice as busy: {busy}");
        }
        let beyond = growth.predict(150.0 * MS, bent(150.0 * MS), 400.0 * MS);
        assert!(
            (1000.0..1500.0).contains(&beyond),
            "past the last epochs, rather too much: {beyond}"
        );
    }
}
