//! Which checkpoints to keep. Pure policy: it uses only what it is given about each checkpoint.
//!
//! ```text
//!   of each VM, newest first      t0      t1   t2  t3 |             t4 |        t5        t6
//!   --keep-last 2                 last    last         |                |
//!   --keep-within 10m             within  within within                |
//!   --keep-every 1h               every                | every          | every
//!   tagged                                                                               tagged
//!   pinned                                                                                         pinned
//!   forgotten                                      t3
//! ```
//!
//! Invariants: a checkpoint that any rule keeps is kept. These are kept without a rule: the newest
//! checkpoint of a VM, because a run builds upon it; a checkpoint that the overlay of a disk
//! depends on; a tagged one (if tags were named, one with one of these); a pinned one.
//!
//! Ages follow the clock of the host's kernel, not its wall clock, which may be set while a VM
//! runs: between two checkpoints of one boot their [`SinceBoot`] counts. Over a reboot, or to
//! another host, only the wall clock spans the time, and its difference counts.
//!
//! Not here: checkpoints that the user names, which are forgotten without a rule.

use crate::Sealed;
use jiff::Timestamp;
use keyframe_store_format::meta::SinceBoot;
use keyframe_units::CheckpointId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The rules that decide which checkpoints a forget keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Keeps this number of the newest checkpoints of each VM. `None` for no such rule.
    pub last: Option<u64>,
    /// Keeps the checkpoints that were taken no longer than this before the newest of their VM. So
    /// a VM that has ended loses none as time passes. `None` for no such rule.
    pub within: Option<Duration>,
    /// Keeps the newest checkpoint of each interval of this length. Intervals are counted on the
    /// wall clock, from 1970 on. If the clock was set back and an interval comes twice, one
    /// checkpoint of each time is kept. `None` for no such rule.
    pub every: Option<Duration>,
    /// Of the tagged checkpoints, keeps only those with one of these tags; `None` keeps all tagged
    /// ones.
    pub tags: Option<BTreeSet<String>>,
}

/// The properties of a checkpoint that retention rules use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionCandidate {
    /// Its number.
    pub id: CheckpointId,
    /// The VM, or the group.
    pub vm: String,
    /// The time at which its pause began, by the wall clock.
    pub taken_at: Timestamp,
    /// The same instant by the clock of the host's kernel, if known.
    pub since_boot: Option<SinceBoot>,
    /// Its tags, pins left out.
    pub tags: Vec<String>,
    /// True if it is pinned.
    pub pinned: bool,
}

impl From<&Sealed> for RetentionCandidate {
    fn from(sealed: &Sealed) -> Self {
        let meta = &sealed.meta;
        let (tags, pinned) = (sealed.names().cloned().collect(), sealed.is_pinned());
        let (vm, since_boot) = (meta.vm.clone(), meta.since_boot.clone());
        Self { id: sealed.id, vm, taken_at: meta.taken_at, since_boot, tags, pinned }
    }
}

impl RetentionCandidate {
    /// The nanoseconds from `earlier` to this one; negative if `earlier` was taken later.
    fn ns_after(&self, earlier: &Self) -> i128 {
        let booted = self.since_boot.as_ref().zip(earlier.since_boot.as_ref());
        booted
            .and_then(|(later, earlier)| later.ns_after(earlier))
            .unwrap_or_else(|| self.taken_at.as_nanosecond() - earlier.taken_at.as_nanosecond())
    }
}

/// The reason why the retention rules keep a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeepReason {
    /// The checkpoint is the newest of its VM.
    Newest,
    /// The checkpoint is one of the last.
    Last,
    /// The checkpoint is young enough.
    Within,
    /// The checkpoint is the newest of its interval.
    Every,
    /// The checkpoint has a tag.
    Tagged,
    /// The checkpoint is pinned.
    Pinned,
    /// The overlay of a disk depends on the checkpoint.
    Disk,
}

/// The verdict of the retention rules on a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionVerdict {
    /// Its number.
    pub id: CheckpointId,
    /// The reasons to keep it. If there are none, it is forgotten.
    pub kept: Vec<KeepReason>,
}

impl Retention {
    /// Returns true if there is no rule.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Judges all checkpoints of a store, which may be in any order. Returns a verdict for each, in
    /// the order of their numbers. `standing` holds the checkpoints that overlays of disks depend
    /// on.
    pub fn judge(
        &self,
        moments: &[RetentionCandidate],
        standing: &BTreeSet<CheckpointId>,
    ) -> Vec<RetentionVerdict> {
        let mut vms = BTreeMap::<&str, Vec<&RetentionCandidate>>::new();
        for moment in moments {
            vms.entry(&moment.vm).or_default().push(moment);
        }
        let mut verdicts = Vec::with_capacity(moments.len());
        for of_vm in vms.values_mut() {
            // Sorts by number, because clocks may go back. A run builds upon the highest number.
            of_vm.sort_unstable_by_key(|moment| std::cmp::Reverse(moment.id));
            verdicts.extend(self.judge_vm(of_vm, standing));
        }
        verdicts.sort_unstable_by_key(|verdict| verdict.id);
        verdicts
    }

    /// Judges the checkpoints of one VM, newest first.
    fn judge_vm(
        &self,
        of_vm: &[&RetentionCandidate],
        standing: &BTreeSet<CheckpointId>,
    ) -> Vec<RetentionVerdict> {
        let within_ns =
            self.within.map(|within| i128::try_from(within.as_nanos()).unwrap_or(i128::MAX));
        let mut newer: Option<&RetentionCandidate> = None;
        let (mut age_ns, mut newer_interval) = (0i128, None);
        let mut verdicts = Vec::with_capacity(of_vm.len());
        for (rank, moment) in of_vm.iter().copied().enumerate() {
            let interval = self.every.map(|every| interval_of(moment.taken_at, every));
            age_ns = age_ns.saturating_add(newer.map_or(0, |newer| newer.ns_after(moment)));
            let rules = [
                (KeepReason::Newest, rank == 0),
                (KeepReason::Last, self.last.is_some_and(|last| (rank as u64) < last)),
                (KeepReason::Within, within_ns.is_some_and(|within_ns| age_ns <= within_ns)),
                (KeepReason::Every, interval.is_some() && interval != newer_interval),
                (KeepReason::Tagged, self.keeps_tags(&moment.tags)),
                (KeepReason::Pinned, moment.pinned),
                (KeepReason::Disk, standing.contains(&moment.id)),
            ];
            let kept =
                rules.into_iter().filter(|(_, holds)| *holds).map(|(reason, _)| reason).collect();
            verdicts.push(RetentionVerdict { id: moment.id, kept });
            (newer, newer_interval) = (Some(moment), interval);
        }
        verdicts
    }

    fn keeps_tags(&self, tags: &[String]) -> bool {
        match &self.tags {
            None => !tags.is_empty(),
            Some(named) => tags.iter().any(|tag| named.contains(tag)),
        }
    }
}

/// The number of the interval that a time falls into.
fn interval_of(at: Timestamp, every: Duration) -> i128 {
    let every_ns = i128::try_from(every.as_nanos()).unwrap_or(i128::MAX).max(1);
    at.as_nanosecond().div_euclid(every_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn moment(id: u64, vm: &str, second: i64, tags: &[&str]) -> RetentionCandidate {
        RetentionCandidate {
            id: CheckpointId(id),
            vm: vm.into(),
            taken_at: Timestamp::from_second(second).unwrap(),
            since_boot: None,
            tags: tags.iter().map(|tag| String::from(*tag)).collect(),
            pinned: false,
        }
    }

    fn kept(rules: &Retention, moments: &[RetentionCandidate]) -> Vec<u64> {
        let verdicts = rules.judge(moments, &BTreeSet::new());
        verdicts.into_iter().filter(|v| !v.kept.is_empty()).map(|v| v.id.0).collect()
    }

    #[test]
    fn each_rule_keeps_what_it_says() {
        let seconds = [0, 10, 3599, 3600, 3700, 7199, 9000];
        let moments: Vec<_> =
            (1..).zip(seconds).map(|(id, at)| moment(id, "web", at, &[])).collect();
        let with = |last, within, every| Retention {
            last,
            within: Option::map(within, Duration::from_secs),
            every: Option::map(every, Duration::from_secs),
            tags: None,
        };
        assert_eq!(kept(&with(Some(3), None, None), &moments), [5, 6, 7]);
        assert_eq!(kept(&with(Some(0), None, None), &moments), [7]);
        assert_eq!(kept(&with(None, Some(5300), None), &moments), [5, 6, 7]);
        assert_eq!(kept(&with(None, None, Some(3600)), &moments), [3, 6, 7]);
        assert_eq!(kept(&with(Some(2), Some(1), Some(3600)), &moments), [3, 6, 7]);
        assert_eq!(kept(&with(None, Some(u64::MAX), None), &moments).len(), 7);
        assert_eq!(kept(&with(None, None, Some(u64::MAX)), &moments), [7]);
    }

    #[test]
    fn tags_vms_and_disks_are_told_apart() {
        let moments = [
            moment(1, "web", 0, &["boot"]),
            moment(2, "db", 1, &[]),
            moment(3, "web", 2, &["a", "b"]),
            moment(4, "web", 3, &[]),
        ];
        let last = Retention { last: Some(1), ..Retention::default() };
        assert_eq!(kept(&last, &moments), [1, 2, 3, 4]);
        let tags = Retention { tags: Some(BTreeSet::from(["b".to_owned()])), ..last.clone() };
        assert_eq!(kept(&tags, &moments), [2, 3, 4]);
        let untagged = [moment(1, "web", 0, &[]), moment(2, "web", 1, &[])];
        let verdicts = last.judge(&untagged, &BTreeSet::from([CheckpointId(1)]));
        assert_eq!(verdicts[0].kept, [KeepReason::Disk]);
        assert_eq!(verdicts[1].kept, [KeepReason::Newest, KeepReason::Last]);
    }

    /// Checkpoints of one VM, one a second by the kernel's clock of boot `boot`, whose wall clock
    /// shows `seconds`.
    fn of_boot(
        boot: &str,
        first: u64,
        seconds: impl IntoIterator<Item = i64>,
    ) -> Vec<RetentionCandidate> {
        let booted = |id: u64, at| {
            let since_boot = Some(SinceBoot { boot: boot.into(), ns: id * 1_000_000_000 });
            RetentionCandidate { since_boot, ..moment(id, "web", at, &[]) }
        };
        (first..).zip(seconds).map(|(id, at)| booted(id, at)).collect()
    }

    #[test]
    fn a_wall_clock_that_jumps_changes_no_age() {
        let within = Retention { within: Some(Duration::from_secs(5)), ..Retention::default() };
        let every = Retention { every: Some(Duration::from_secs(4)), ..Retention::default() };
        let ahead = of_boot("a", 1, [10, 11, 12, 3613, 3614, 3615, 3616, 3617]);
        assert_eq!(kept(&within, &ahead), [3, 4, 5, 6, 7, 8]);
        let back = of_boot("a", 1, [3600, 3601, 3602, 3, 4, 5, 6, 7]);
        assert_eq!(kept(&within, &back), [3, 4, 5, 6, 7, 8]);
        // The seconds 8 to 11 come twice, and one checkpoint of each time stays.
        let twice = of_boot("a", 1, [8, 9, 10, 11, 12, 8, 9, 10, 11, 12]);
        assert_eq!(kept(&every, &twice), [4, 5, 9, 10]);
    }

    #[test]
    fn over_a_reboot_the_wall_clock_counts() {
        let within = Retention { within: Some(Duration::from_secs(5)), ..Retention::default() };
        let mut both = of_boot("a", 101, [100, 101, 102]);
        both.extend(of_boot("b", 104, [104, 3605, 3606]));
        // 2 seconds over the reboot, 2 by the kernel's clock since then, 1 before it.
        assert_eq!(kept(&within, &both), [102, 103, 104, 105, 106]);
    }

    fn moments() -> impl Strategy<Value = Vec<RetentionCandidate>> {
        let one =
            (0u8..3, 0i64..5000, prop::collection::vec("[ab]", 0..2), prop::bool::weighted(0.1));
        prop::collection::vec(one, 0..40).prop_map(|all| {
            let moment = |(id, (vm, at, tags, pinned)): (u64, (u8, i64, Vec<String>, bool))| {
                RetentionCandidate { tags, pinned, ..moment(id, &vm.to_string(), at, &[]) }
            };
            (1..).zip(all).map(moment).collect()
        })
    }

    proptest! {
        /// Against each rule written once more, the slow way; and in any order that the checkpoints
        /// come.
        #[test]
        fn what_is_kept_has_exactly_these_reasons(
            moments in moments(), last in prop::option::of(0u64..6), within in prop::option::of(0u64..3000),
            every in prop::option::of(1u64..2000), tags in prop::option::of(prop::collection::btree_set("[abc]", 0..2)),
        ) {
            let seconds = |n: Option<u64>| n.map(Duration::from_secs);
            let rules = Retention { last, within: seconds(within), every: seconds(every), tags: tags.clone() };
            let verdicts = rules.judge(&moments, &BTreeSet::new());
            let mut turned = moments.clone();
            turned.reverse();
            prop_assert_eq!(&rules.judge(&turned, &BTreeSet::new()), &verdicts);
            prop_assert_eq!(verdicts.len(), moments.len());
            for (moment, verdict) in moments.iter().zip(&verdicts) {
                let at = |m: &RetentionCandidate| m.taken_at.as_second();
                let newer: Vec<_> = moments.iter().filter(|m| m.vm == moment.vm && m.id > moment.id).collect();
                let newest = newer.last().copied().unwrap_or(moment);
                let mut expected = Vec::new();
                if newer.is_empty() {
                    expected.push(KeepReason::Newest);
                }
                if last.is_some_and(|last| (newer.len() as u64) < last) {
                    expected.push(KeepReason::Last);
                }
                if within.is_some_and(|within| at(newest) - at(moment) <= within as i64) {
                    expected.push(KeepReason::Within);
                }
                if every.is_some_and(|n| newer.first().is_none_or(|m| at(m) / n as i64 != at(moment) / n as i64)) {
                    expected.push(KeepReason::Every);
                }
                let wanted = |tag: &String| tags.as_ref().is_none_or(|tags| tags.contains(tag));
                if moment.tags.iter().any(wanted) {
                    expected.push(KeepReason::Tagged);
                }
                if moment.pinned {
                    expected.push(KeepReason::Pinned);
                }
                prop_assert_eq!(&verdict.kept, &expected, "checkpoint {}", moment.id);
            }
        }

        /// Rules only add: with another one, nothing is forgotten that was kept.
        #[test]
        fn another_rule_forgets_nothing_more(moments in moments(), last in 0u64..6, every in 1u64..2000) {
            let one = Retention { last: Some(last), ..Retention::default() };
            let two = Retention { every: Some(Duration::from_secs(every)), ..one.clone() };
            let more = kept(&two, &moments);
            prop_assert!(kept(&one, &moments).iter().all(|id| more.contains(id)));
        }
    }
}
