//! Freeing what no checkpoint needs: maps, records, whole packs.
//!
//! ```text
//!   live records found ─▶ plan ─▶ dead maps removed ─▶ rounds of packs:
//!
//!     live records copied, new pack closed ─▶ moves put ─▶ the writer follows ─▶ maps rewritten ─▶ packs removed ─▶ moves removed
//!         crash: a pack that nothing needs        crash: each map refers to records that exist, in one place or the other
//! ```
//!
//! Invariants: a file is removed only after everything that refers to it has been replaced durably.
//! Numbers are not used again. A copy is verified before it replaces a record. Writers may be at
//! work: each confirms that it needs a pack no longer ([`crate::moves`]). What one of them does not
//! confirm in time is left to the next prune. If the packs that runs write to have too much unused,
//! the runs are asked to close them first, by moves that move nothing. Packs with a needed record
//! that is damaged are left to the next prune, too. A reader with a loaded checkpoint has its packs
//! open. A reader that is loading one reads the maps again if a pack has gone.
//!
//! A recompressing prune compresses the copies with zstd and a dictionary
//! ([`keyframe_store_format::dictionary`]). Recompressed packs stay so: a round with such a pack
//! recompresses all of its copies.
//!
//! Not here: which checkpoints are forgotten ([`crate::Retention`]).

mod choice;
mod live;
mod rewrite;

use crate::medium;
use crate::open_store::OpenStore;
use crate::pack_shape::{PackShape, PackStanding, PackUsage};
use crate::tuning::Tuning;
use crate::writers::Writers;
use crate::{Result, Store};
use keyframe_store_backend::layout;
use keyframe_store_format::moves::{Generation, Moves};
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::CheckpointId;
pub(crate) use live::{Known, Live};
pub(crate) use rewrite::{Copier, maps as rewrite_maps};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The most bytes that one round copies. An interruption costs one round.
const ROUND_BYTES_MAX: u64 = 1 << 30;
/// The most records that one round moves.
const ROUND_RECORDS_MAX: usize = 2 << 20;
/// How often a prune looks whether the writers have followed.
const POLL: Duration = Duration::from_micros(if cfg!(test) { 100 } else { 20_000 });

/// The options of a prune.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PruneOptions {
    /// The largest unused part of the packs that the prune leaves in place, from 0 to 1. A smaller
    /// part means more copying.
    pub max_unused: f64,
    /// True to change nothing and only report.
    pub dry_run: bool,
    /// The time for which to wait for a run at work, which confirms with its next checkpoint.
    pub wait: Duration,
    /// The number of bytes of packs to recompress, about, the oldest first: 0 for none,
    /// [`u64::MAX`] for all that were not recompressed yet. Any other number recompresses at least
    /// one pack.
    pub recompress_bytes: u64,
}

impl Default for PruneOptions {
    fn default() -> Self {
        Self {
            max_unused: 0.05,
            dry_run: false,
            wait: Duration::from_secs(60),
            recompress_bytes: 0,
        }
    }
}

/// The step of a prune.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PruneStep {
    /// Finding the live records.
    Looking,
    /// Copying records.
    Copying,
    /// Waiting for the next checkpoint of a run at work.
    Waiting,
    /// Rewriting maps and removing files.
    Removing,
}

/// The progress of a prune of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PruneProgress {
    /// The current step.
    pub step: PruneStep,
    /// The number of bytes of the packs that are complete.
    pub done_bytes: u64,
    /// The number of bytes of the packs that will be removed.
    pub total_bytes: u64,
}

/// The result of a prune, or of a dry run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PruneReport {
    /// True for a dry run, which changed nothing.
    pub dry_run: bool,
    /// The size of packs and maps before, in bytes.
    pub before_bytes: u64,
    /// The size of packs and maps after, in bytes; an estimate in a dry run.
    pub after_bytes: u64,
    /// The number of removed maps, which no checkpoint needed.
    pub removed_maps: u64,
    /// The number of maps that were written again with new places of records; 0 in a dry run.
    pub rewritten_maps: u64,
    /// The number of removed working sets of forgotten checkpoints.
    pub removed_worksets: u64,
    /// The number of removed packs without needed records.
    pub removed_packs: u64,
    /// The number of removed packs with needed records, which were copied.
    pub rewritten_packs: u64,
    /// The number of rewritten packs that were recompressed.
    pub recompressed_packs: u64,
    /// The number of bytes of the copied records.
    pub copied_bytes: u64,
    /// The number of unused bytes in packs that stay, as `--max-unused` allows.
    pub unused_bytes: u64,
    /// The number of packs that stay because a writer did not confirm in time.
    pub postponed_packs: u64,
    /// Packs that stay because they are damaged or lack needed records.
    pub damaged: Vec<String>,
}

impl Store {
    /// Frees the space of records and maps that no checkpoint needs. Calls `progress` now and then.
    /// The process may be killed at any instant without harm. Returns the report.
    ///
    /// Errors, after which nothing is removed: [`crate::Error::Locked`] if another prune is at
    /// work; [`crate::Error::Unreadable`] if a checkpoint cannot be read; [`crate::Error::Damaged`]
    /// if a needed map cannot be read.
    pub fn prune(
        &self,
        options: &PruneOptions,
        progress: &mut dyn FnMut(PruneProgress),
    ) -> Result<PruneReport> {
        self.prune_tuned(options, Tuning::default(), progress)
    }

    /// Prunes as [`Store::prune`], with the caller's limits for the written packs. Returns the
    /// report. Errors: those of [`Store::prune`].
    pub fn prune_tuned(
        &self,
        options: &PruneOptions,
        tuning: Tuning,
        progress: &mut dyn FnMut(PruneProgress),
    ) -> Result<PruneReport> {
        let inner = self.inner();
        let lock = if options.dry_run { None } else { Some(inner.lock_prune()?) };
        let tuning = medium::fit(tuning, inner.backend.space());
        let copier = Copier::new(inner.clone(), tuning);
        let report = PruneReport { dry_run: options.dry_run, ..PruneReport::default() };
        let known = Known::default();
        let mut prune = Prune {
            inner,
            options,
            copier,
            report,
            progress,
            done_bytes: 0,
            total_bytes: 0,
            known,
        };
        prune.report.before_bytes = prune.size()?;
        let mut plan = prune.plan()?;
        if options.dry_run {
            prune.foretell(&plan);
        } else {
            // A killed prune may have left its moves.
            inner.remove_moves()?;
            let left_open = prune.wants_open_pack(&plan) && !prune.close_open_pack()?;
            if !left_open && prune.wants_open_pack(&plan) {
                prune.report.damaged.clear();
                plan = prune.plan()?;
            }
            prune.carry_out(&plan, tuning)?;
            prune.report.postponed_packs += u64::from(left_open);
            prune.report.after_bytes = prune.size()?;
        }
        drop(lock);
        Ok(prune.report)
    }
}

/// The work of a prune, found before anything is changed.
struct Plan {
    maps: Vec<u64>,
    maps_bytes: u64,
    /// The map with the highest number, if no checkpoint needs it. An empty one keeps its number.
    emptied_map: Option<u64>,
    worksets: Vec<CheckpointId>,
    packs: Vec<PackUsage>,
    victims: Vec<u32>,
}

struct Prune<'a> {
    inner: &'a OpenStore,
    options: &'a PruneOptions,
    copier: Copier,
    report: PruneReport,
    progress: &'a mut dyn FnMut(PruneProgress),
    done_bytes: u64,
    total_bytes: u64,
    known: Known,
}

impl Prune<'_> {
    fn tell(&mut self, step: PruneStep) {
        let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
        (self.progress)(PruneProgress { step, done_bytes, total_bytes });
    }

    fn size(&self) -> Result<u64> {
        let folder = |folder| self.inner.folder_bytes(folder);
        Ok(folder(layout::PACKS)? + folder(layout::MAPS)?)
    }

    fn plan(&mut self) -> Result<Plan> {
        self.tell(PruneStep::Looking);
        // The order matters: a writer says what it has open before it creates that, and has sealed
        // its checkpoint before it says that it is done.
        let maps = self.inner.map_ids()?;
        let numbers = self.inner.pack_numbers()?;
        let writers = self.inner.other_writers()?;
        let mut live = Live::find(self.inner)?;
        let newest = live.ids.last().map_or(0, |id| id.0);
        let dead = |id: &u64| !live.has_map(*id) && !writers.may_seal(*id, newest);
        let emptied_map = maps
            .last()
            .copied()
            .filter(|id| dead(id) && *id > newest && !self.inner.is_empty_map(*id));
        let keeps_number = |id: &u64| *id > newest && maps.last() == Some(id);
        let maps: Vec<u64> =
            maps.iter().copied().filter(|id| dead(id) && !keeps_number(id)).collect();
        let at_work = writers.are_at_work();
        let is_gone = |id: &CheckpointId| {
            !live.ids.contains(id)
                && (!at_work || id.0 <= newest && !writers.may_seal(id.0, newest))
        };
        let worksets = self.inner.workset_ids()?.into_iter().filter(is_gone).collect();
        let packs = self.usages(&mut live, &numbers, &writers)?;
        self.known.mentions = live.take_mentions();
        self.known.packs = numbers.into_iter().collect();
        let mut victims = choice::choose(&packs, self.options.max_unused);
        victims.extend(choice::to_recompress(&packs, &victims, self.options.recompress_bytes));
        let maps_bytes = maps.iter().map(|id| self.inner.len_of(&layout::map(*id))).sum();
        Ok(Plan { maps, maps_bytes, emptied_map, worksets, packs, victims })
    }

    /// How much of each pack checkpoints need.
    fn usages(
        &mut self,
        live: &mut Live,
        numbers: &[u32],
        writers: &Writers,
    ) -> Result<Vec<PackUsage>> {
        for number in numbers {
            if let Some(shape) = PackShape::of(self.inner, *number)? {
                let on =
                    live.close(self.inner, &shape)?.into_iter().flat_map(|(_, records)| records);
                let on: BTreeSet<u32> = on.map(PageRef::pack).collect();
                if !on.is_empty() {
                    self.known.depends.insert(*number, on);
                }
            }
        }
        live.settle();
        let mut packs = Vec::with_capacity(numbers.len());
        for number in numbers {
            let wanted = live.offsets(*number);
            let usage = match PackShape::of(self.inner, *number)? {
                Some(shape) => {
                    let mut usage = shape.usage(wanted);
                    if usage.is_untouchable() {
                        let object = self.inner.backend.describe(&layout::pack(*number));
                        self.report
                            .damaged
                            .push(format!("{object}: lacks records that checkpoints need"));
                    }
                    if !shape.closed && writers.have_open(*number) {
                        usage.standing = PackStanding::Open;
                    }
                    usage
                }
                // A pack without a header: its writer died.
                None => PackUsage {
                    number: *number,
                    len_bytes: self.inner.len_of(&layout::pack(*number)),
                    live_bytes: 0,
                    live_records: 0,
                    head_bytes: 0,
                    is_dense: false,
                    standing: if writers.have_open(*number) || !wanted.is_empty() {
                        PackStanding::Untouchable
                    } else {
                        PackStanding::Free
                    },
                    holds_none: false,
                },
            };
            packs.push(usage);
        }
        // A missing pack, not one that a writer has created since.
        let is_lost = |number: &u32| {
            numbers.binary_search(number).is_err() && self.inner.len_of(&layout::pack(*number)) == 0
        };
        let lost = live
            .packs()
            .filter(is_lost)
            .map(|number| format!("{}: is missing", layout::pack(number)));
        self.report.damaged.extend(lost);
        Ok(packs)
    }

    /// Whether the packs to which runs at work write have more unused bytes than may stay.
    fn wants_open_pack(&self, plan: &Plan) -> bool {
        let all_bytes: u64 = plan.packs.iter().map(|usage| usage.len_bytes).sum();
        let open = plan.packs.iter().filter(|usage| usage.standing == PackStanding::Open);
        let unused_bytes: u64 = open.map(PackUsage::unused_bytes).sum();
        unused_bytes > 0 && unused_bytes as f64 > self.options.max_unused * all_bytes as f64
    }

    /// Has the runs at work close their packs: a writer does so when it follows moves, also empty
    /// ones. False if one does not in time.
    fn close_open_pack(&mut self) -> Result<bool> {
        let moves =
            Moves { generation: keyframe_store_backend::random_bytes()?, ..Moves::default() };
        self.inner.put_moves(&moves)?;
        let is_closed = self.is_followed(moves.generation);
        self.inner.remove_moves()?;
        is_closed
    }

    fn foretell(&mut self, plan: &Plan) {
        let (mut gone_bytes, mut copied_bytes) = (plan.maps_bytes, 0);
        for usage in &plan.packs {
            if !plan.victims.contains(&usage.number) {
                self.report.unused_bytes += usage.unused_bytes();
                continue;
            }
            gone_bytes += usage.len_bytes;
            copied_bytes += usage.live_bytes;
            self.count_pack(usage);
        }
        self.report.removed_maps = plan.maps.len() as u64;
        self.report.removed_worksets = plan.worksets.len() as u64;
        self.report.copied_bytes = copied_bytes;
        self.report.after_bytes =
            self.report.before_bytes.saturating_sub(gone_bytes) + copied_bytes;
    }

    fn count_pack(&mut self, usage: &PackUsage) {
        let removed = usage.live_records == 0;
        self.report.recompressed_packs +=
            u64::from(!removed && !usage.is_dense && self.options.recompress_bytes > 0);
        *(if removed {
            &mut self.report.removed_packs
        } else {
            &mut self.report.rewritten_packs
        }) += 1;
    }

    fn carry_out(&mut self, plan: &Plan, tuning: Tuning) -> Result<()> {
        let usage = |number: &u32| plan.packs.iter().find(|usage| usage.number == *number);
        self.total_bytes = plan.victims.iter().filter_map(usage).map(|usage| usage.len_bytes).sum();
        self.tell(PruneStep::Removing);
        self.inner.settle_forgotten()?;
        // Removes maps before the records that they refer to.
        if let Some(id) = plan.emptied_map {
            self.inner.empty_map(id)?;
        }
        // Also without names: this syncs the maps that a killed prune has replaced, before packs go
        // below.
        let map_names: Vec<String> = plan.maps.iter().map(|id| layout::map(*id)).collect();
        self.inner.backend.remove_all(layout::MAPS, &map_names)?;
        self.report.removed_maps = map_names.len() as u64;
        let worksets: Vec<String> = plan.worksets.iter().map(|id| layout::workset(*id)).collect();
        self.inner.backend.remove_all(layout::WORKSETS, &worksets)?;
        self.report.removed_worksets = worksets.len() as u64;
        let bytes_max = ROUND_BYTES_MAX.min(tuning.pack_bytes_max.saturating_mul(4));
        let mut left = plan.victims.clone();
        while !left.is_empty() {
            // A full medium has more space after each round.
            let bytes_max = bytes_max.min(medium::round_bytes_max(&self.inner.backend));
            let round = choice::next_round(&plan.packs, &left, bytes_max, ROUND_RECORDS_MAX);
            let is_dense = self.options.recompress_bytes > 0
                || round.iter().filter_map(usage).any(|usage| usage.is_dense);
            let Some(removed) = self.round(&round, is_dense)? else {
                self.report.postponed_packs = left.len() as u64;
                break;
            };
            left.retain(|victim| !round.contains(victim));
            for usage in removed.iter().filter_map(usage) {
                self.done_bytes += usage.len_bytes;
                self.count_pack(usage);
            }
        }
        self.copier.tidy()?;
        let stays = |usage: &&PackUsage| !plan.victims.contains(&usage.number);
        self.report.unused_bytes =
            plan.packs.iter().filter(stays).map(PackUsage::unused_bytes).sum();
        Ok(())
    }

    /// Removes packs; returns those that were removed. `None` if a run did not confirm in time.
    fn round(&mut self, victims: &BTreeSet<u32>, is_dense: bool) -> Result<Option<BTreeSet<u32>>> {
        let mut moves = Moves {
            generation: keyframe_store_backend::random_bytes()?,
            victims: victims.clone(),
            ..Moves::default()
        };
        let dense = if is_dense { Some(self.copier.train(victims)?) } else { None };
        self.copier.set_dense(dense)?;
        let mut live = self.cover(&mut moves)?;
        if moves.victims.is_empty() {
            return Ok(Some(moves.victims));
        }
        self.inner.put_moves(&moves)?;
        if !self.is_followed(moves.generation)? {
            self.inner.remove_moves()?;
            return Ok(None);
        }
        // Checkpoints may have been sealed or forgotten before the writer followed.
        let now: BTreeSet<CheckpointId> =
            self.inner.settled_checkpoint_ids()?.into_iter().collect();
        if now != live.ids {
            live = self.cover(&mut moves)?;
        }
        self.tell(PruneStep::Removing);
        // The packs that go, and those with derived records that refer to them: these records have
        // moved too.
        let touched = self.known.with_dependents(&moves.victims);
        let known = &self.known;
        let rewritten =
            rewrite::maps(self.inner, &live, &moves, &|id| known.may_mention(id, &touched))?;
        self.report.rewritten_maps += rewritten.len() as u64;
        self.known.mentions.retain(|id, _| !rewritten.contains(id));
        let newest = self.inner.pack_numbers()?.last().copied();
        if newest.is_some_and(|newest| moves.victims.contains(&newest)) {
            self.copier.reserve()?;
        }
        self.inner.remove_packs(&moves.victims)?;
        self.inner.remove_moves()?;
        Ok(Some(moves.victims))
    }

    /// Copies the live records of the packs that go, unless they were copied.
    fn cover(&mut self, moves: &mut Moves) -> Result<Live> {
        self.tell(PruneStep::Copying);
        let touched = self.known.with_dependents(&moves.victims);
        let known = &self.known;
        let mut live = Live::find_where(self.inner, &|id| known.may_mention(id, &touched))?;
        let mut composed = Vec::new();
        for number in self.inner.pack_numbers()? {
            if live.offsets(number).is_empty() {
                continue;
            }
            let Some(shape) = PackShape::of(self.inner, number)? else { continue };
            let refers = |of: &u32, to: &[PageRef]| {
                moves.victims.contains(of) || to.iter().any(|to| moves.victims.contains(&to.pack()))
            };
            let found = live.close(self.inner, &shape)?;
            composed.extend(
                found.into_iter().filter(|(of, to)| refers(&of.pack(), to)).map(|(of, _)| of),
            );
        }
        live.settle();
        self.copier.raise()?;
        let done_bytes = self.done_bytes;
        for victim in moves.victims.clone() {
            if let Err(problem) = self.copier.copy_plain(victim, live.offsets(victim), moves)? {
                moves.victims.remove(&victim);
                self.report.damaged.push(problem);
            }
            self.done_bytes += self.inner.len_of(&layout::pack(victim));
            self.tell(PruneStep::Copying);
        }
        // The packs count as complete when they are removed.
        self.done_bytes = done_bytes;
        composed.sort_unstable();
        self.copier.copy_derived(&composed, moves, &mut self.report.damaged)?;
        self.copier.close()?;
        self.report.copied_bytes = self.copier.copied_bytes;
        Ok(live)
    }

    /// Waits until no writer uses the packs that go; false if that takes too long.
    fn is_followed(&mut self, generation: Generation) -> Result<bool> {
        let deadline = Instant::now() + self.options.wait;
        let mut looks = 0;
        loop {
            if self.inner.is_seen(generation)? {
                return Ok(true);
            }
            looks += 1;
            // A simulation does the same on a machine that is slow.
            let is_over = if cfg!(test) {
                POLL * looks > self.options.wait
            } else {
                Instant::now() >= deadline
            };
            if is_over {
                return Ok(false);
            }
            self.tell(PruneStep::Waiting);
            std::thread::sleep(POLL);
        }
    }
}
