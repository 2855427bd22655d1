//! The rounds of one workload with one interval, and the spread of a value over them.

use super::evaluated_run::EvaluatedRun;
use super::measurement::Measurement;
use super::workload::Workload;
use crate::sample::Sample;

/// The rounds of one workload with one interval. There is at least one.
pub struct RunRounds {
    rounds: Vec<EvaluatedRun>,
}

/// The median, least and most of a value over rounds.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
    /// The number of rounds that have the value.
    pub rounds: usize,
}

impl Spread {
    /// Returns the spread of those `values` that are finite; NaN if there are none.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sample = Sample::default();
        values.filter(|value| value.is_finite()).for_each(|value| sample.push(value));
        Self {
            median: sample.median(),
            least: sample.percentile(0),
            most: sample.percentile(100),
            rounds: sample.len(),
        }
    }

    /// Returns its numbers, in the order of [`spread_columns`].
    pub fn numbers(self) -> [f64; 3] {
        [self.median, self.least, self.most]
    }

    /// Returns the half of the distance between least and most, for an error bar; `None` for one
    /// round.
    pub fn half_range(self) -> Option<f64> {
        (self.rounds > 1).then_some((self.most - self.least) / 2.0)
    }

    /// Returns it as text, for example `12.1 (11.8 to 13.0)`; `-` if there is no value. `show`
    /// formats a number.
    pub fn text(self, show: impl Fn(f64) -> String) -> String {
        match self.rounds {
            0 => "-".into(),
            1 => show(self.median),
            _ => format!("{} ({} to {})", show(self.median), show(self.least), show(self.most)),
        }
    }

    /// Returns it as text with this number of decimals.
    pub fn decimals(self, decimals: usize) -> String {
        self.text(|value| format!("{value:.decimals$}"))
    }
}

/// Returns the names of the columns of a spread.
pub fn spread_columns(name: &str) -> [String; 3] {
    [name.to_owned(), format!("{name}_least"), format!("{name}_most")]
}

impl RunRounds {
    /// Groups measurements by workload, in the order of all workloads, and by rising interval.
    pub fn group(measurements: Vec<Measurement>) -> Vec<Self> {
        Self::of_runs(measurements.into_iter().map(|one| one.run))
    }

    /// Groups runs, as [`Self::group`].
    pub fn of_runs(runs: impl Iterator<Item = EvaluatedRun>) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for run in runs {
            match groups.iter_mut().find(|group| group.key() == run.key()) {
                Some(group) => group.rounds.push(run),
                None => groups.push(Self { rounds: vec![run] }),
            }
        }
        groups.sort_by(|a, b| {
            let by_workload = a.workload().place().cmp(&b.workload().place());
            by_workload.then(a.every_s().total_cmp(&b.every_s()))
        });
        groups
    }

    /// Returns the rounds.
    pub fn rounds(&self) -> &[EvaluatedRun] {
        &self.rounds
    }

    pub fn workload(&self) -> &'static Workload {
        self.rounds[0].workload
    }

    /// Returns the time between two checkpoints.
    pub fn every_s(&self) -> f64 {
        self.rounds[0].every_s
    }

    /// Returns its name in keys, for example `compile_2000ms`.
    pub fn key(&self) -> String {
        self.rounds[0].key()
    }

    /// Returns its name in charts, for example `compile, 2 s`.
    pub fn label(&self) -> String {
        format!("{}, {} s", self.workload().key, self.every_s())
    }

    /// Returns the spread of a value over the rounds.
    pub fn spread(&self, of: impl Fn(&EvaluatedRun) -> f64) -> Spread {
        Spread::of(self.rounds.iter().map(of))
    }

    /// Returns the round whose total time is the median, the lower one of two.
    pub fn median_round(&self) -> &EvaluatedRun {
        let mut sorted: Vec<&EvaluatedRun> = self.rounds.iter().collect();
        sorted.sort_by(|a, b| a.total_s().total_cmp(&b.total_s()));
        sorted[(sorted.len() - 1) / 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_leaves_out_values_that_were_not_measured() {
        let spread = Spread::of([3.0, f64::NAN, 1.0, 9.0].into_iter());
        assert_eq!(spread.decimals(1), "3.0 (1.0 to 9.0)");
        assert_eq!(spread.half_range(), Some(4.0));
        assert_eq!(Spread::of([2.0].into_iter()).decimals(0), "2");
        assert_eq!(Spread::of([2.0].into_iter()).half_range(), None);
        assert_eq!(Spread::of(std::iter::empty()).decimals(0), "-");
    }
}
