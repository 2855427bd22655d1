//! The measurements of an evaluation: workloads and intervals, in their order.

use super::evaluated_run::RunRequest;
use super::measurement::MeasurementKey;
use super::workload::{self, Workload};
use super::{FULL, Plan};
use crate::Error;

/// The interval that the paper examines in detail.
const DETAIL_MS: u64 = 2000;

/// The workloads and intervals to measure.
pub struct Selection {
    workloads: Vec<&'static Workload>,
    intervals_ms: Vec<u64>,
}

impl Selection {
    /// Selects the workloads and intervals that `only` names; those of the plan if it names none.
    pub fn new(only: &[String], plan: &Plan) -> Result<Self, Error> {
        let intervals: Vec<(String, u64)> =
            FULL.intervals_ms.iter().map(|ms| (format!("{ms}ms"), *ms)).collect();
        let names: Vec<&str> = workload::ALL
            .iter()
            .map(|workload| workload.key)
            .chain(intervals.iter().map(|(name, _)| name.as_str()))
            .collect();
        if let Some(part) = only.iter().find(|part| !names.contains(&part.as_str())) {
            let (benchmark, part) = ("evaluation", part.clone());
            return Err(Error::NoPart { benchmark, part, parts: names.join(", ") });
        }
        let is_named = |name: &str| only.iter().any(|part| part == name);
        let select = |is_selected: &dyn Fn(&str) -> bool| -> Vec<&'static Workload> {
            workload::ALL.iter().filter(|workload| is_selected(workload.key)).collect()
        };
        let mut workloads = select(&is_named);
        if workloads.is_empty() {
            workloads = select(&|key| plan.workloads.contains(&key));
        }
        let mut intervals_ms: Vec<u64> =
            intervals.iter().filter(|(name, _)| is_named(name)).map(|(_, ms)| *ms).collect();
        if intervals_ms.is_empty() {
            intervals_ms = plan.intervals_ms.to_vec();
        }
        Ok(Self { workloads, intervals_ms })
    }

    /// Returns all measurements: one round after the other, each over all workloads and intervals.
    pub fn keys(&self, rounds: u16) -> Vec<MeasurementKey> {
        let key = |round, workload: &Workload, every_ms| MeasurementKey {
            round,
            workload: workload.key,
            every_ms,
        };
        (1..=rounds)
            .flat_map(|round| self.workloads.iter().map(move |workload| (round, *workload)))
            .flat_map(|(round, workload)| {
                self.intervals_ms.iter().map(move |every_ms| key(round, workload, *every_ms))
            })
            .collect()
    }

    /// Returns what is measured for `key`. The first workload is also recorded while
    /// `analyze --follow` analyses it, with the interval that is nearest to 2 s.
    pub fn request(&self, key: MeasurementKey) -> Result<RunRequest, Error> {
        let MeasurementKey { round, every_ms, .. } = key;
        let workload = Workload::named(key.workload)
            .ok_or_else(|| Error::failed("find the workload", key.workload))?;
        let first = self.workloads.first().map(|workload| workload.key);
        let detail_ms = self.intervals_ms.iter().min_by_key(|ms| ms.abs_diff(DETAIL_MS));
        let is_immediate = first == Some(workload.key) && detail_ms == Some(&every_ms);
        Ok(RunRequest { workload, every_ms, round, is_immediate })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_complete_before_the_next_begins() {
        let only = ["small", "compile", "500ms", "2000ms"].map(str::to_owned);
        let selection = Selection::new(&only, &FULL).unwrap();
        let keys = selection.keys(2);
        let mut sorted = keys.clone();
        sorted.sort_by_key(|key| key.round);
        assert_eq!((keys.len(), &keys), (8, &sorted));
        let followed: Vec<_> = keys
            .iter()
            .filter(|key| selection.request(**key).unwrap().is_immediate)
            .map(|key| (key.workload, key.every_ms, key.round))
            .collect();
        assert_eq!(followed, [("compile", 2000, 1), ("compile", 2000, 2)]);
    }

    #[test]
    fn workloads_and_intervals_are_selected_independently() {
        let of = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            Selection::new(&only, &FULL).map(|selection| {
                let keys: Vec<_> = selection.workloads.iter().map(|one| one.key).collect();
                (keys, selection.intervals_ms)
            })
        };
        assert_eq!(of(&[]).unwrap(), (FULL.workloads.to_vec(), FULL.intervals_ms.to_vec()));
        assert_eq!(of(&["bonnie"]).unwrap(), (vec!["bonnie"], FULL.intervals_ms.to_vec()));
        assert_eq!(of(&["small", "2000ms"]).unwrap(), (vec!["small"], vec![2000]));
        let text = of(&["3s"]).unwrap_err().to_string();
        assert!(
            text.contains("no part 3s") && text.contains("bonnie") && text.contains("500ms"),
            "{text}"
        );
    }
}
