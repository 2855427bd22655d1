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
use crate::disks::place;
use crate::failure::{Failure, Outcome, WARNED, chain};
use crate::output;
use keyframe_store::{CheckpointId, Listing, Moment, Reason, Retention, Sealed, Store, Verdict};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Forget checkpoints: those named, or those that no rule keeps
#[derive(clap::Args, Debug)]
#[command(
    group(clap::ArgGroup::new("which").required(true).multiple(true)
        .args(["checkpoints", "keep_last", "keep_within", "keep_every", "keep_tag"])),
    after_help = "Of each VM, what any rule keeps is kept. Always kept, unless named: the newest of each VM, on
which a run that goes on builds, and those with a tag (with --keep-tag: with one of these tags).
A pinned one (keyframe pin) is kept by all rules, and where it is named only --force takes it.
Never forgotten: one that the writes in a directory of STORE/disks stand on, and the newest of a
store while a run writes to it.

A run may go on meanwhile. The space comes back with: keyframe prune

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
    /// Keep the newest N of each VM
    #[arg(long, value_name = "N")]
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
    reasons: Vec<Reason>,
}

/// What `--json` prints.
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
        let standing = standing(&store)?;
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
            report.removed_clones = removed(clones, &mut |clone, why| {
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

    fn judge(&self, listing: &Listing, standing: &BTreeSet<CheckpointId>) -> Vec<Verdict> {
        let tags = (!self.keep_tag.is_empty()).then(|| self.keep_tag.iter().cloned().collect());
        let rules = Retention {
            last: self.keep_last,
            within: self.keep_within,
            every: self.keep_every,
            tags,
        };
        let of_vm = |sealed: &&Sealed| self.vm.as_ref().is_none_or(|vm| *vm == sealed.meta.vm);
        let moments: Vec<Moment> = listing.sealed.iter().filter(of_vm).map(Moment::from).collect();
        rules.judge(&moments, standing)
    }

    /// All others than those named are not spoken of.
    fn named(
        &self,
        store: &Store,
        listing: &Listing,
        standing: &BTreeMap<CheckpointId, PathBuf>,
    ) -> Result<Vec<Verdict>, Failure> {
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
        let is_held = |(id, _): &&(CheckpointId, _)| !ids.contains(id);
        if let Some((id, error)) = listing.unreadable.iter().find(is_held) {
            eprintln!("keyframe: note: checkpoint {id} cannot be read: {}", chain(error));
        }
        Ok(ids.into_iter().map(|id| Verdict { id, kept: Vec::new() }).collect())
    }
}

/// The checkpoints that overlays of disks stand on, each with one of these.
pub fn standing(store: &Store) -> Result<BTreeMap<CheckpointId, PathBuf>, Failure> {
    let folder = store.local_folder().map_err(|e| Failure::store(&e, store.path()))?.join("disks");
    let places = place::all(store);
    let known: BTreeSet<&Path> = places.iter().map(|(path, _)| path.as_path()).collect();
    let entries = match std::fs::read_dir(&folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        other => other.map_err(|e| Failure::new(format!("list {}: {e}", folder.display())))?,
    };
    for path in
        entries.flatten().map(|entry| entry.path()).filter(|path| !known.contains(path.as_path()))
    {
        let holds = std::fs::read_dir(&path).is_ok_and(|mut inside| inside.next().is_some());
        // Described in the meantime, or not at all.
        if holds && place::info(&path).is_none() {
            return Err(Failure::new(format!(
                "{}: its disks.json cannot be read, so that the checkpoint that it stands on is not known",
                path.display()
            ))
            .fix(
                "run it again if a VM is being started; else save what the directory holds, and remove it",
            ));
        }
    }
    let on = |(path, info): (PathBuf, place::Info)| Some((CheckpointId(info.checkpoint?), path));
    Ok(place::all(store).into_iter().filter_map(on).collect())
}

/// The clones of images that only `forgotten` checkpoints name; and whether some may be that are
/// not known.
fn clones_of(
    store: &Store,
    listing: &Listing,
    forgotten: &BTreeSet<CheckpointId>,
) -> (Vec<PathBuf>, bool) {
    let mark = format!(".keyframe-{:.8}-", store.id());
    let is_clone = |path: &&str| {
        let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
        name.starts_with('.') && name.contains(&mark)
    };
    let (gone, left): (Vec<_>, Vec<_>) =
        listing.sealed.iter().partition(|sealed| forgotten.contains(&sealed.id));
    let paths = |sealed: &[&Sealed]| {
        let bases = sealed.iter().flat_map(|sealed| &sealed.meta.disks).map(|disk| &disk.base);
        let all = bases.flat_map(|base| {
            std::iter::once(base.path.clone())
                .chain(base.files.iter().map(|file| file.path.clone()))
        });
        all.collect::<BTreeSet<String>>()
    };
    let left = paths(&left);
    let clones: Vec<_> = paths(&gone)
        .iter()
        .filter(|path| !left.contains(*path))
        .map(String::as_str)
        .filter(is_clone)
        .map(PathBuf::from)
        .collect();
    let hidden = listing.unreadable.iter().any(|(id, _)| !forgotten.contains(id));
    if hidden && !clones.is_empty() { (Vec::new(), true) } else { (clones, false) }
}

/// Forgets checkpoints of which none is pinned, and removes the clones of images that none names
/// any more; `warn` hears of those that cannot be removed.
pub fn forget(
    store: &Store,
    ids: &BTreeSet<CheckpointId>,
    warn: &mut dyn FnMut(&Path, &std::io::Error),
) -> Result<(), Failure> {
    let failure = |e| Failure::store(&e, store.path());
    // Without disks there are no clones, and what the others name needs no look.
    let has_disks =
        |id: &CheckpointId| store.sealed(*id).map_or(true, |s| !s.meta.disks.is_empty());
    let clones = if ids.iter().any(has_disks) {
        clones_of(store, &store.checkpoints().map_err(failure)?, ids).0
    } else {
        Vec::new()
    };
    store.forget(ids).map_err(failure)?;
    removed(clones, warn);
    Ok(())
}

/// Removes clones; returns those that were there.
fn removed(clones: Vec<PathBuf>, warn: &mut dyn FnMut(&Path, &std::io::Error)) -> Vec<PathBuf> {
    let remove = |clone: &PathBuf| match std::fs::remove_file(clone) {
        Ok(()) => true,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
        Err(e) => {
            warn(clone, &e);
            false
        }
    };
    clones.into_iter().filter(remove).collect()
}

fn report(dry_run: bool, listing: &Listing, verdicts: &[Verdict]) -> Report {
    let sealed: BTreeMap<_, _> = listing.sealed.iter().map(|sealed| (sealed.id, sealed)).collect();
    let line = |verdict: &Verdict| {
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

fn word(reason: Reason) -> &'static str {
    match reason {
        Reason::Newest => "newest",
        Reason::Last => "last",
        Reason::Within => "within",
        Reason::Every => "every",
        Reason::Tagged => "tagged",
        Reason::Pinned => "pinned",
        Reason::Disk => "disk",
    }
}
