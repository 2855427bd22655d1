//! `keyframe forget`: checkpoints that are not needed any more.
//!
//! ```text
//!   names, or rules ─▶ which ─▶ refused or kept where something stands on them ─▶ forgotten ─▶ clones of images removed
//! ```
//!
//! Invariants: a clone of an image is removed only after the checkpoints that name it are gone, and
//! where what the others name is known. What was written to a disk since a checkpoint is worth
//! nothing without it: that one stays.

use super::checkpoints::parse_duration;
use super::{StoreArg, warn_of_unreadable};
use crate::failure::{Failure, Outcome, WARNED, chain};
use crate::output;
use keyframe_store::{
    CheckpointId, KeepReason, Listing, Retention, RetentionCandidate, RetentionVerdict, Sealed,
    Store, UnreadableCheckpoint,
};
use keyframe_vm_disks::forget::{checkpoints_under_overlays, clones_of, remove_clones};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

/// Forget checkpoints: those named, or those that no rule keeps
#[derive(clap::Args, Debug)]
#[command(
    group(clap::ArgGroup::new("which").required(true).multiple(true)
        .args(["checkpoints", "keep_last", "keep_within", "keep_every", "keep_tag"])),
    after_help = "A checkpoint is kept if any rule keeps it. The rules are applied to each VM by itself. Unless you name them, the newest checkpoint
of each VM is kept, because a run builds on it, and so are tagged ones (with --keep-tag: those with one of these tags). All
rules keep a pinned checkpoint (keyframe pin); if you name one, --force is needed too. A checkpoint is never forgotten if an
overlay in STORE/disks lies over it, or if it is the newest one of a store to which a run writes.

A run may use the store meanwhile. To free the space: keyframe prune

Examples:
  keyframe forget --store S 12 13 before-upgrade
  keyframe forget --store S --keep-last 100 --keep-every 1h --dry-run
  keyframe forget --store S --vm web --keep-within 30m
  keyframe forget --store S --keep-last 10 --json | jq '.forgotten[].id'"
)]
pub struct Forget {
    #[command(flatten)]
    store: StoreArg,
    /// The checkpoints to forget: numbers, tags, or `latest`
    #[arg(value_name = "CHECKPOINT", conflicts_with_all = ["keep_last", "keep_within", "keep_every", "keep_tag", "vm"])]
    checkpoints: Vec<String>,
    /// Keep the newest N of each VM, at least 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep_last: Option<u64>,
    /// Keep those that are at most so much older than the newest of their VM
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    keep_within: Option<Duration>,
    /// Keep the newest of each interval of this length
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    keep_every: Option<Duration>,
    /// Of those with tags, keep only those with this one (may be given several times)
    #[arg(long, value_name = "TAG")]
    keep_tag: Vec<String>,
    /// Only those of this VM
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
    /// Also pinned ones
    #[arg(long, requires = "checkpoints")]
    force: bool,
    /// Only say what would be forgotten
    #[arg(long, short = 'n')]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A checkpoint and what became of it.
#[derive(Serialize)]
struct Line {
    id: CheckpointId,
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    taken_at: Option<String>,
    tags: Vec<String>,
    /// Why it is kept.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasons: Vec<KeepReason>,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    dry_run: bool,
    forgotten: Vec<Line>,
    kept: Vec<Line>,
    /// Clones of images that no checkpoint names any more.
    removed_clones: Vec<PathBuf>,
}

impl Forget {
    /// Forgets, and says what.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let listing = store.checkpoints().map_err(|e| self.store.failure(&e))?;
        let standing = checkpoints_under_overlays(&store)?;
        let verdicts = if self.checkpoints.is_empty() {
            self.judge(&listing, &standing.keys().copied().collect())
        } else {
            self.named(&store, &listing, &standing)?
        };
        let forgotten: BTreeSet<_> = verdicts
            .iter()
            .filter(|verdict| verdict.kept.is_empty())
            .map(|verdict| verdict.id)
            .collect();
        let mut code = if self.checkpoints.is_empty() { warn_of_unreadable(&listing) } else { 0 };
        let (clones, unknown) = clones_of(&store, &listing, &forgotten);
        let mut report = report(self.dry_run, &listing, &verdicts);
        if self.dry_run {
            report.removed_clones = clones;
        } else {
            let forget = if self.force { Store::forget_even_pinned } else { Store::forget };
            forget(&store, &forgotten).map_err(|e| self.store.failure(&e))?;
            report.removed_clones = remove_clones(clones, &mut |clone, why| {
                eprintln!("keyframe: warning: remove {}: {why}", clone.display());
                code = WARNED;
            });
        }
        if unknown {
            eprintln!(
                "keyframe: clones of images stay: what a checkpoint that cannot be read names is not known"
            );
            code = WARNED;
        }
        if self.json {
            output::json(&report)?;
        } else {
            print(&report)?;
        }
        Ok(code)
    }

    fn judge(&self, listing: &Listing, standing: &BTreeSet<CheckpointId>) -> Vec<RetentionVerdict> {
        let tags = (!self.keep_tag.is_empty()).then(|| self.keep_tag.iter().cloned().collect());
        let rules = Retention {
            last: self.keep_last,
            within: self.keep_within,
            every: self.keep_every,
            tags,
        };
        let of_vm = |sealed: &&Sealed| self.vm.as_ref().is_none_or(|vm| *vm == sealed.meta.vm);
        let moments: Vec<RetentionCandidate> =
            listing.sealed.iter().filter(of_vm).map(RetentionCandidate::from).collect();
        rules.judge(&moments, standing)
    }

    /// All others than those named are not spoken of.
    fn named(
        &self,
        store: &Store,
        listing: &Listing,
        standing: &BTreeMap<CheckpointId, PathBuf>,
    ) -> Result<Vec<RetentionVerdict>, Failure> {
        let mut ids = BTreeSet::new();
        for name in &self.checkpoints {
            let id = store.resolve(name).map_err(|e| self.store.failure(&e))?;
            if let Some(place) = standing.get(&id) {
                return Err(Failure::new(format!(
                    "checkpoint {id} cannot be forgotten: what was written to a disk since it was restored stands on it ({})",
                    place.display()
                ))
                .fix("save the disk with keyframe commit, or remove that directory, then forget the checkpoint"));
            }
            let pinned =
                || listing.sealed.iter().any(|sealed| sealed.id == id && sealed.is_pinned());
            if !self.force && pinned() {
                return Err(self.store.failure(&keyframe_store::Error::Pinned { id }));
            }
            ids.insert(id);
        }
        let held = listing.unreadable.iter().find(|one| !ids.contains(&one.id));
        if let Some(UnreadableCheckpoint { id, error }) = held {
            eprintln!("keyframe: note: checkpoint {id} cannot be read: {}", chain(error));
        }
        Ok(ids.into_iter().map(|id| RetentionVerdict { id, kept: Vec::new() }).collect())
    }
}

fn report(dry_run: bool, listing: &Listing, verdicts: &[RetentionVerdict]) -> Report {
    let sealed: BTreeMap<_, _> = listing.sealed.iter().map(|sealed| (sealed.id, sealed)).collect();
    let line = |verdict: &RetentionVerdict| {
        let known = sealed.get(&verdict.id);
        Line {
            id: verdict.id,
            vm: known.map(|sealed| sealed.meta.vm.clone()),
            taken_at: known.map(|sealed| sealed.meta.taken_at.to_string()),
            tags: known.map(|sealed| sealed.names().cloned().collect()).unwrap_or_default(),
            reasons: verdict.kept.clone(),
        }
    };
    let lines =
        |kept: bool| verdicts.iter().filter(|v| v.kept.is_empty() != kept).map(line).collect();
    Report { dry_run, forgotten: lines(false), kept: lines(true), removed_clones: Vec::new() }
}

fn print(report: &Report) -> Result<(), Failure> {
    let header = ["id", "vm", "taken at", "tags", "kept as"];
    let row = |line: &Line| {
        let reasons: Vec<_> = line.reasons.iter().map(|reason| word(*reason)).collect();
        vec![
            line.id.to_string(),
            line.vm.clone().unwrap_or_else(|| "?".into()),
            line.taken_at.clone().unwrap_or_else(|| "?".into()),
            line.tags.join(","),
            reasons.join(","),
        ]
    };
    if !report.kept.is_empty() {
        let rows: Vec<_> = report.kept.iter().map(row).collect();
        output::print_line(&output::table(&header, &rows))?;
    }
    for clone in &report.removed_clones {
        let verb = if report.dry_run { "would remove" } else { "removed" };
        output::print_line(&format!("{verb} the clone {}", clone.display()))?;
    }
    let ids: Vec<_> = report.forgotten.iter().map(|line| line.id.to_string()).collect();
    let (count, kept) = (ids.len(), report.kept.len());
    let text = match (count, report.dry_run) {
        (0, _) => format!("nothing to forget; {kept} kept"),
        (_, true) => format!("would forget {count} checkpoints ({}); {kept} kept", ids.join(", ")),
        (_, false) => format!(
            "forgot {count} checkpoints ({}); {kept} kept; free their space with: keyframe prune",
            ids.join(", ")
        ),
    };
    output::print_line(&text)
}

fn word(reason: KeepReason) -> &'static str {
    match reason {
        KeepReason::Newest => "newest",
        KeepReason::Last => "last",
        KeepReason::Within => "within",
        KeepReason::Every => "every",
        KeepReason::Tagged => "tagged",
        KeepReason::Pinned => "pinned",
        KeepReason::Disk => "disk",
    }
}
