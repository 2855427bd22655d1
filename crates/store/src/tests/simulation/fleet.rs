//! One to four writers, forgets and prunes on one store, each a process of its own, with all faults,
//! in an order that a seed decides.
//!
//! ```text
//!   seed ─▶ an act of a process: a writer starts, seals, ends │ forget │ prune
//!             after some of its steps, in the middle of it: acts of other processes, whose own steps are interrupted likewise;
//!             or a look: what is sealed can be read, and what would be after a power loss at this instant
//!           a process: killed at some operation │ its sync fails │ the disk is full
//!           between two acts: power loss, which ends all processes
//!           a third of the writers is elsewhere, behind a checkpoint server (`served`): messages and answers are lost or come
//!             twice; its lease ends while it stands still, and it comes back late
//! ```
//!
//! A process that is interrupted stands still while others work: it holds its place in the store
//! and comes back late.
//!
//! Invariants: a sealed checkpoint is never lost and never changes, except those that `forget`
//! removed and those that their durability leaves to power loss; no incomplete one is visible. No
//! number is given twice, unless power loss has freed it.

mod look;
mod served;

use super::super::direct_server::DirectWriters;
use super::super::observed::{ObservedMedium, Observer};
use super::super::{TINY, encrypted, init_on, layout, on, request};
use super::world::{BLOCKS, Fact, Guest, Image, RAM_PAGES, change, disk, put};
use super::{Tally, play_seeds, random_tuning};
use crate::{
    CheckOptions, Damage, DiskState, Durability, Error, PruneOptions, PruneStep, Result, Run,
    SealRequest, Store, Tuning, Writer,
};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::testing::{FaultyBackend, SeededRandom};
use keyframe_units::CheckpointId;
use served::OfServer;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

const WRITERS_MAX: u64 = 4;
/// So many processes stand still within each other.
const DEPTH_MAX: u32 = 3;
/// A prune waits so long for writers that stand still.
const PRUNE_WAIT: Duration = Duration::from_micros(400);

/// Writers do not follow a prune that has looked so often.
const LOOKS_MAX: u32 = 30;

/// What must have come for the seeds to have tested anything.
const MUST_COME: [&str; 19] = [
    "two starts at once",
    "sealed",
    "seal failed",
    "late seal",
    "killed",
    "forgotten",
    "pruned beside several writers",
    "postponed by a writer",
    "two prunes at once",
    "record of an open pack of another writer",
    "number taken by another writer",
    "power loss in the middle",
    "power loss",
    "taken by power loss",
    "failed sync",
    "full disk",
    "remote writer",
    "message or answer lost",
    "late writer refused",
];

/// A writer with its run.
struct Member {
    /// Counts the processes that were writers.
    serial: u64,
    medium: FaultyBackend,
    /// The connection to its server, if it is elsewhere.
    elsewhere: Option<OfServer>,
    writer: Option<Writer>,
    run: Option<Run>,
    guest: Guest,
    tuning: Tuning,
}

/// What is known of the store.
#[derive(Default)]
struct Known {
    facts: BTreeMap<CheckpointId, Fact>,
    /// The writer of each.
    owners: BTreeMap<CheckpointId, u64>,
    /// Images of seals that failed or are at work.
    strangers: Vec<Image>,
    /// All numbers since the last power loss.
    numbers: BTreeSet<CheckpointId>,
}

struct Fleet {
    medium: Mutex<FaultyBackend>,
    members: Vec<Mutex<Option<Member>>>,
    /// The servers of remote writers.
    servers: Mutex<Vec<Arc<DirectWriters>>>,
    known: Mutex<Known>,
    chance: Mutex<SeededRandom>,
    depth: AtomicU32,
    serial: AtomicU64,
    /// The prunes that were carried out.
    prunes: AtomicU64,
    /// A fault of the medium is armed or has happened, so that any operation may fail.
    faults: Mutex<BTreeSet<&'static str>>,
    /// Power loss took what did not wait for a sync.
    may_mention_lost: Mutex<bool>,
    story: Mutex<Vec<String>>,
    tally: Mutex<Tally>,
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fleet")
    }
}

/// Lets other processes act after a step.
impl Observer for Arc<Fleet> {
    fn after_step(&self) {
        self.interrupt(14);
    }

    fn after_append(&self) {
        self.interrupt(10);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

/// The member, unless its process is the one that stands still.
fn idle(member: &Mutex<Option<Member>>) -> Option<MutexGuard<'_, Option<Member>>> {
    match member.try_lock() {
        Ok(member) => Some(member),
        Err(TryLockError::Poisoned(error)) => Some(PoisonError::into_inner(error)),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl Fleet {
    fn new(seed: u64) -> Arc<Self> {
        let mut chance = SeededRandom(seed);
        encrypted::ask(chance.next_u64().is_multiple_of(8));
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        let members = 1 + seed % WRITERS_MAX;
        Arc::new(Self {
            medium: Mutex::new(medium),
            members: (0..members).map(|_| Mutex::default()).collect(),
            servers: Mutex::default(),
            known: Mutex::default(),
            chance: Mutex::new(chance),
            depth: AtomicU32::new(0),
            serial: AtomicU64::new(0),
            prunes: AtomicU64::new(0),
            faults: Mutex::default(),
            may_mention_lost: Mutex::new(false),
            story: Mutex::default(),
            tally: Mutex::default(),
        })
    }

    fn below(&self, end: u64) -> u64 {
        locked(&self.chance).next_u64() % end
    }

    fn came(&self, what: &'static str, times: u64) {
        if times > 0 {
            *locked(&self.tally).entry(what).or_default() += times;
        }
    }

    fn tell(&self, what: impl std::fmt::Display) {
        let depth = self.depth.load(Ordering::Relaxed) as usize;
        locked(&self.story).push(format!("{}{what}", "    ".repeat(depth)));
    }

    /// The store as a new process opens it, whose steps others interrupt.
    fn open(self: &Arc<Self>, process: &FaultyBackend) -> Result<Store> {
        let medium = ObservedMedium::new(process, &Arc::new(Arc::clone(self)));
        let secret = |_| Ok(Some(encrypted::secret()));
        Store::open_on_with(medium, Path::new("memory"), &secret)
    }

    fn process(&self) -> FaultyBackend {
        locked(&self.medium).process()
    }

    /// True if any operation of this process may fail.
    fn is_due(&self, error: &Error, process: &FaultyBackend) -> bool {
        process.is_dead() || error.is_disk_full() || !locked(&self.faults).is_empty()
    }

    /// One time in `odds`, lets other processes act while this one stands still.
    fn interrupt(self: &Arc<Self>, odds: u64) {
        let depth = self.depth.load(Ordering::Relaxed);
        if depth == 0 || depth > DEPTH_MAX || self.below(odds * u64::from(depth)) != 0 {
            return;
        }
        if self.below(6) == 0 {
            self.look_into_the_future();
        } else {
            self.act();
        }
    }

    /// An act of some process that does not stand still.
    fn act(self: &Arc<Self>) {
        self.depth.fetch_add(1, Ordering::Relaxed);
        match self.below(25) {
            0..4 => self.forget(),
            4..8 => self.prune(),
            8 => self.end_a_lease(),
            _ => {
                let at = self.below(self.members.len() as u64) as usize;
                if let Some(mut member) = self.members.get(at).and_then(idle) {
                    self.act_of(&mut member);
                }
            }
        }
        self.depth.fetch_sub(1, Ordering::Relaxed);
    }

    fn act_of(self: &Arc<Self>, member: &mut Option<Member>) {
        let Some(at_work) = member else {
            *member = self.begin();
            return;
        };
        if self.below(12) == 0 {
            at_work.medium.kill_in(self.below(60));
        }
        match self.below(10) {
            0 => {
                let member = member.take();
                self.end(member);
            }
            1 => {
                let followed = at_work.run.as_mut().map_or(Ok(()), Run::follow_prune);
                if let Err(error) = followed {
                    assert!(self.may_fail(&error, at_work), "follow: {error}");
                    at_work.guest.owed = true;
                    at_work.run.as_mut().map(Run::abandon);
                }
            }
            _ => self.seal(at_work),
        }
        if member.as_mut().is_some_and(|member| self.is_late(member)) {
            *member = None;
        }
        if member.as_ref().is_some_and(|member| member.medium.is_dead()) {
            self.came("killed", 1);
            self.tell("killed");
            // The dead does nothing more, also when it is dropped.
            *member = None;
        }
    }

    fn begin(self: &Arc<Self>) -> Option<Member> {
        let medium = self.process();
        if self.below(8) == 0 {
            medium.kill_in(self.below(40));
        }
        let mut tuning = random_tuning(&mut |end| self.below(end));
        let (elsewhere, opened) = if self.below(3) == 0 {
            tuning.durability = Durability::Checkpoint;
            let (elsewhere, opened) = self.open_elsewhere(&medium);
            (Some(elsewhere), opened)
        } else {
            (None, self.open(&medium))
        };
        let begun = opened.and_then(|store| {
            // It settles what dead writers left. Those that die meanwhile are left to the next one.
            let before = self.living();
            let sealed = locked(&self.known).facts.keys().copied().collect::<BTreeSet<_>>();
            let mut writer = store.lock_writer_tuned("fleet", tuning)?;
            let doubt = writer.in_doubt();
            let mut known = locked(&self.known);
            let Known { facts, owners, .. } = &mut *known;
            for (id, fact) in facts.iter_mut().filter(|(id, _)| sealed.contains(id)) {
                let is_dead = owners.get(id).is_none_or(|owner| !before.contains(owner));
                fact.durable |= is_dead && doubt.is_none_or(|from| *id < from);
            }
            drop(known);
            let has_disk = self.below(2) == 0;
            let disks = if has_disk { vec![disk()] } else { Vec::new() };
            let ram = layout(RAM_PAGES as u64);
            let run = writer.begin_run_with("vm", &ram, disks, DiskState::default())?;
            Ok((writer, run, has_disk))
        });
        let (writer, run, has_disk) = match begun {
            Ok(begun) => begun,
            // Another one stands still while it starts.
            Err(Error::Locked { .. }) => {
                self.came("two starts at once", 1);
                return None;
            }
            Err(error) => {
                self.tell(format!("a writer does not start: {error}"));
                // Its lease may have ended, or its server cannot settle what others left.
                let is_due = elsewhere.is_some() || self.is_due(&error, &medium);
                assert!(is_due, "start: {error}");
                return None;
            }
        };
        let serial = 1 + self.serial.fetch_add(1, Ordering::Relaxed);
        self.tell(format!("writer {serial} starts, {:?}", tuning.durability));
        let mut image: Image = vec![Some(0); RAM_PAGES];
        image.resize(RAM_PAGES + if has_disk { BLOCKS } else { 0 }, None);
        let guest = Guest { image, owed: false };
        self.came("remote writer", u64::from(elsewhere.is_some()));
        let (writer, run) = (Some(writer), Some(run));
        Some(Member { serial, medium, elsewhere, writer, run, guest, tuning })
    }

    /// The writers that have not ended. One that stands still has not.
    fn living(&self) -> BTreeSet<u64> {
        let now = 0..=self.serial.load(Ordering::Relaxed);
        let dead = |serial: &u64| {
            let of_none = self.members.iter().all(|member| {
                idle(member).is_some_and(|member| {
                    member.as_ref().is_none_or(|m| m.serial != *serial || m.medium.is_dead())
                })
            });
            !of_none
        };
        now.filter(dead).collect()
    }

    fn end(self: &Arc<Self>, member: Option<Member>) {
        let Some(mut member) = member else { return };
        let (serial, tuning) = (member.serial, member.tuning);
        self.tell(format!("writer {serial} ends"));
        let finished = member.run.take().map_or(Ok(()), Run::finish);
        let is_due = finished.as_ref().err().is_some_and(|error| self.may_fail(error, &member));
        let medium = member.medium.clone();
        drop(member);
        let doubt = on(&locked(&self.medium)).and_then(|store| store.inner().in_doubt());
        let is_marked = tuning.durability != Durability::Checkpoint && medium.is_dead();
        match (finished, doubt) {
            (Ok(()), Ok(doubt)) if !is_marked => {
                // Whether the last sync succeeded is not told; its mark is.
                let has_mark = super::super::durability::has_mark(&locked(&self.medium));
                if !has_mark {
                    self.know_durable(serial, doubt);
                }
            }
            (Err(error), _) => assert!(is_due, "end: {error}"),
            _ => {}
        }
    }

    fn know_durable(&self, serial: u64, doubt: Option<CheckpointId>) {
        let mut known = locked(&self.known);
        let Known { facts, owners, .. } = &mut *known;
        for (id, fact) in facts.iter_mut().filter(|(id, _)| owners.get(id) == Some(&serial)) {
            fact.durable |= doubt.is_none_or(|from| *id < from);
        }
    }

    fn seal(self: &Arc<Self>, member: &mut Member) {
        // Messages that were lost before are no reason.
        let _ = member.elsewhere.as_ref().map(OfServer::was_disturbed);
        let Member { serial, run: Some(run), guest, tuning, .. } = &mut *member else { return };
        let mut next = guest.image.clone();
        change(&mut locked(&self.chance), &mut next);
        locked(&self.known).strangers.push(next.clone());
        let prunes = self.prunes.load(Ordering::Relaxed);
        let sealed = put(run, guest, &next)
            .and_then(|()| run.seal(SealRequest { ..request(&layout(RAM_PAGES as u64)) }));
        let is_late = self.prunes.load(Ordering::Relaxed) > prunes;
        match sealed {
            Err(error) => {
                self.came("seal failed", 1);
                self.tell(format!("writer {serial}: {error}"));
                *guest = Guest { image: next, owed: true };
                run.abandon();
                assert!(self.may_fail(&error, member), "seal: {error}");
            }
            Ok(sealed) => {
                self.tell(format!("writer {serial} sealed {}", sealed.id));
                self.came("sealed", 1);
                self.came("late seal", u64::from(is_late));
                let mut known = locked(&self.known);
                assert!(known.numbers.insert(sealed.id), "{} was given twice", sealed.id);
                // It may have been forgotten before the seal returned, if it was seen meanwhile.
                let durable = tuning.durability == Durability::Checkpoint;
                let fact = Fact { image: next.clone(), durable, going: false };
                known.facts.insert(sealed.id, fact);
                known.owners.insert(sealed.id, *serial);
                drop(known);
                if matches!(tuning.durability, Durability::Every(_)) {
                    let doubt = on(&locked(&self.medium)).and_then(|s| s.inner().in_doubt());
                    if let Ok(doubt) = doubt {
                        self.know_durable(*serial, doubt);
                    }
                }
                *guest = Guest { image: next, owed: false };
                self.count_shared(sealed.id, *serial);
            }
        }
    }

    /// Counts what the writers have to do with each other.
    fn count_shared(&self, id: CheckpointId, serial: u64) {
        let newest = locked(&self.known).owners.range(..id).next_back().map(|(_, owner)| *owner);
        self.came("number taken by another writer", u64::from(newest.is_some_and(|o| o != serial)));
        let Ok(store) = on(&locked(&self.medium)) else { return };
        let Ok(map) = store.inner().read_map(id.0) else { return };
        let Ok(writers) = store.inner().other_writers() else { return };
        let packs: BTreeSet<u32> = map.refs().iter().map(|to| to.pack()).collect();
        let open = packs.iter().filter(|pack| writers.shared_end(**pack).is_some());
        self.came(
            "record of an open pack of another writer",
            open.count().saturating_sub(1) as u64,
        );
    }

    fn forget(self: &Arc<Self>) {
        let process = self.process();
        if self.below(6) == 0 {
            process.kill_in(self.below(8));
        }
        let forgot = self.open(&process).and_then(|store| {
            let newest = store.inner().checkpoint_ids()?.last().copied().unwrap_or(CheckpointId(0));
            let writers = store.inner().other_writers()?;
            let mut known = locked(&self.known);
            let mut ids: BTreeSet<CheckpointId> = known.facts.keys().copied().collect();
            ids.retain(|id| writers.user_of(*id, newest).is_none() && self.below(2) == 0);
            for id in &ids {
                known.facts.entry(*id).and_modify(|fact| fact.going = true);
            }
            drop(known);
            store.forget(&ids).map(|()| ids)
        });
        match forgot {
            Ok(ids) => {
                self.came("forgotten", ids.len() as u64);
                self.tell(format!("forgotten: {ids:?}"));
                let mut known = locked(&self.known);
                known.facts.retain(|id, _| !ids.contains(id));
            }
            // A writer has begun to build on one meanwhile.
            Err(Error::InUse { .. }) => {}
            Err(error) => assert!(self.is_due(&error, &process), "forget: {error}"),
        }
    }

    fn prune(self: &Arc<Self>) {
        let process = self.process();
        if self.below(5) == 0 {
            process.kill_in(self.below(60));
        }
        let max_unused = [0.0, 0.0, 0.3][self.below(3) as usize];
        let recompress_bytes = [0, 0, 40_000, u64::MAX][self.below(4) as usize];
        let options =
            PruneOptions { max_unused, dry_run: false, wait: PRUNE_WAIT, recompress_bytes };
        let mut looks = 0;
        let pruned = self.open(&process).and_then(|store| {
            store.prune_tuned(&options, TINY, &mut |progress| {
                if progress.step != PruneStep::Waiting {
                    return;
                }
                // All that do not stand still follow, unless there is no end to it.
                looks += 1;
                for member in self.members.iter().filter_map(idle) {
                    let mut member = member;
                    let can_follow = looks < LOOKS_MAX && self.below(12) > 0;
                    if let Some(at_work) = member.as_mut().filter(|_| can_follow) {
                        self.depth.fetch_add(1, Ordering::Relaxed);
                        self.seal(at_work);
                        self.depth.fetch_sub(1, Ordering::Relaxed);
                    }
                }
            })
        });
        match pruned {
            Ok(report) => {
                self.tell(format!("pruned: {report:?}"));
                assert!(
                    report.damaged.is_empty() || !locked(&self.faults).is_empty(),
                    "{report:?}"
                );
                let removed = report.removed_packs + report.rewritten_packs;
                let others = self.living().len().saturating_sub(1);
                self.came("pruned beside several writers", if others > 1 { removed } else { 0 });
                self.came("postponed by a writer", report.postponed_packs);
                self.prunes.fetch_add(1, Ordering::Relaxed);
            }
            Err(Error::Locked { .. }) => self.came("two prunes at once", 1),
            Err(error) => {
                self.tell(format!("prune: {error}"));
                assert!(self.is_due(&error, &process), "prune: {error}");
            }
        }
    }

    fn lose_power(&self) {
        self.tell("power loss");
        self.came("power loss", 1);
        let after = locked(&self.medium).after_power_loss(self.below(u64::MAX));
        for member in &self.members {
            *locked(member) = None;
        }
        let left = self.look_after_power_loss(&after);
        let mut known = locked(&self.known);
        let before = known.facts.len();
        known.facts.retain(|id, fact| fact.durable && !fact.going || left.contains(id));
        self.came("taken by power loss", (before - known.facts.len()) as u64);
        known.facts.values_mut().for_each(|fact| fact.durable = true);
        known.owners.clear();
        known.numbers = left;
        drop(known);
        *locked(&self.may_mention_lost) = true;
        *locked(&self.medium) = after;
    }

    /// Arms a fault of the medium for some acts.
    fn arm(&self) {
        let medium = locked(&self.medium);
        match self.below(12) {
            0 => {
                medium.fail_sync_at(medium.syncs() + 1 + self.below(60));
                locked(&self.faults).insert("failed sync");
                drop(medium);
                self.came("failed sync", 1);
            }
            1 => {
                medium.limit(Some(medium.used_bytes() + self.below(40_000) as usize));
                locked(&self.faults).insert("full disk");
                drop(medium);
                self.came("full disk", 1);
            }
            2..5 => {
                medium.calm();
                let was_full = locked(&self.faults).remove("full disk");
                self.tell(format!("calm, was full: {was_full}"));
            }
            _ => {}
        }
    }

    fn live(self: &Arc<Self>) {
        for _ in 0..12 + self.below(24) {
            self.arm();
            self.act();
            self.look();
            if self.below(12) == 0 {
                self.lose_power();
            }
        }
        locked(&self.medium).calm();
        for member in &self.members {
            let member = locked(member).take();
            self.end(member);
        }
        self.look();
        let store = on(&locked(&self.medium)).unwrap();
        let report = store.check(&CheckOptions { read_data: true }, &mut |_| {}).unwrap();
        let of_nobody = |damage: &Damage| {
            damage.checkpoints.is_empty() && damage.problem.contains("no checkpoint needs it")
        };
        let is_clean = report.is_clean()
            || *locked(&self.may_mention_lost) && report.damages.iter().all(of_nobody);
        assert!(is_clean, "{report:#?}");
        self.lose_power();
    }
}

fn play(seed: u64) -> Tally {
    let fleet = Fleet::new(seed);
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| fleet.live())) {
        eprintln!("what happened:\n  {}", locked(&fleet.story).join("\n  "));
        // They hold the fleet.
        fleet.members.iter().for_each(|member| *locked(member) = None);
        resume_unwind(panic);
    }
    std::mem::take(&mut locked(&fleet.tally))
}

#[test]
fn no_sealed_checkpoint_is_lost_by_any_interleaving_of_writers_and_prunes() {
    play_seeds("KEYFRAME_FLEET_SEED", &MUST_COME, &play);
}
