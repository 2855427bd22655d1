//! The store of one seed, its facts, and its operations.
//!
//! ```text
//!   act(what) ─▶ a fault armed ─▶ what ─▶ crashed? ─▶ the next process, or power loss ─▶ look: facts compared with the store
//!
//!   a fact: a checkpoint that was sealed, and its image.      durable: power loss cannot remove it
//!                                                             going: a forget of it was interrupted
//! ```
//!
//! A failed seal may have left a checkpoint, if the writer died after its rename. Power loss may
//! bring back a checkpoint whose forget was interrupted. Such a *stranger* must be as correct as
//! others.

use super::super::durability::has_mark;
use super::super::unreliable::{BadReads, Unreliable};
use super::super::{content, encrypted, init_on, layout, on, request};
use super::look::matches;
use super::{Tally, random_tuning};
use crate::{
    BaseMeta, CheckOptions, CheckReport, DiskMeta, DiskState, Durability, Error, PruneOptions,
    PruneStep, Result, Run, SealRequest, Store, Tuning,
};
use jiff::Timestamp;
use keyframe_store_backend::testing::{FaultyBackend, SeededRandom};
use keyframe_store_format::composed::{PART_BYTES, PARTS};
use keyframe_units::{CheckpointId, PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub const RAM_PAGES: usize = 12;
pub const BLOCKS: usize = 10;
/// A run that is asked to follow a prune does so at once, or has failed.
const PRUNE_WAIT: Duration = Duration::from_millis(45);

/// The number of each page's content, then that of each block's; none: as the disk's image has it.
pub type Image = Vec<Option<u64>>;

/// From this number on: blocks of a file that lies shifted against its pages.
const SHIFTED: u64 = 1000;

pub fn page_of(number: u64) -> Page {
    if number < SHIFTED {
        return content(number);
    }
    let (n, by) = ((number - SHIFTED) / 4, number % 4);
    let mut page = ZERO_PAGE;
    for (at, sector) in (n * PARTS as u64 + by..).zip(page.as_chunks_mut::<PART_BYTES>().0) {
        sector.copy_from_slice(&content(2 * at + 2001)[..PART_BYTES]);
    }
    page
}

#[derive(Clone)]
pub struct Fact {
    pub image: Image,
    pub durable: bool,
    pub going: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Crash,
    Sync,
    Full,
    Read,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    Run,
    Forget,
    Prune,
    Copy,
    Check,
    Repair,
}

/// The VM of a run.
pub struct Guest {
    pub image: Image,
    /// A seal of it failed: all is put again.
    pub owed: bool,
}

pub struct World {
    pub chance: SeededRandom,
    pub medium: FaultyBackend,
    /// Where copies go.
    pub other: FaultyBackend,
    pub facts: BTreeMap<CheckpointId, Fact>,
    pub strangers: Vec<Image>,
    /// All checkpoints that had each number: power loss may give a number twice.
    pub history: BTreeMap<CheckpointId, Vec<Image>>,
    /// In the other store.
    pub copies: BTreeMap<CheckpointId, Image>,
    fault: Fault,
    /// Each is taken a second after the one before.
    seals: i64,
    /// The operations so far, for the report of a failure.
    story: Vec<String>,
    pub tally: Tally,
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("what happened:\n  {}", self.story.join("\n  "));
        }
    }
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut chance = SeededRandom(seed);
        encrypted::ask(chance.next_u64().is_multiple_of(6));
        let (medium, other) = (FaultyBackend::default(), FaultyBackend::default());
        for medium in [&medium, &other] {
            init_on(medium).unwrap();
        }
        Self {
            chance,
            medium,
            other,
            facts: BTreeMap::new(),
            strangers: Vec::new(),
            history: BTreeMap::new(),
            copies: BTreeMap::new(),
            fault: Fault::None,
            seals: 0,
            story: Vec::new(),
            tally: Tally::new(),
        }
    }

    /// From the first run to the last repair.
    pub fn live(&mut self) {
        self.act(Act::Run);
        for _ in 0..5 + self.below(5) {
            let act = match self.below(14) {
                0..5 => Act::Run,
                5..7 => Act::Forget,
                7..10 => Act::Prune,
                10..12 => Act::Copy,
                12 => Act::Check,
                _ => Act::Repair,
            };
            self.act(act);
        }
        self.look_closely();
        self.damage();
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.chance.next_u64() % end
    }

    pub fn came(&mut self, what: &'static str, times: u64) {
        if times > 0 {
            *self.tally.entry(what).or_default() += times;
        }
    }

    pub fn tell(&mut self, what: String) {
        self.story.push(what);
    }

    fn arm(&mut self, medium: &FaultyBackend, act: Act) {
        let operations = if act == Act::Forget { 8 } else { 70 };
        self.fault = match self.below(9) {
            0..3 => Fault::None,
            3..6 => {
                medium.crash_at(medium.operations() + 1 + self.below(operations));
                Fault::Crash
            }
            6 => {
                medium.fail_sync_at(medium.syncs() + 1 + self.below(operations / 3));
                Fault::Sync
            }
            7 => {
                let capacity = medium.used_bytes() + self.below(40_000) as usize;
                if self.below(2) == 0 {
                    medium.limit(Some(capacity));
                } else {
                    // The writer adapts to it.
                    medium.limit_and_tell(capacity);
                }
                Fault::Full
            }
            _ => {
                medium.fail_read_in(1 + self.below(60));
                Fault::Read
            }
        };
    }

    /// True where the fault that is armed can have this error.
    fn is_due(&self, error: &Error, medium: &FaultyBackend) -> bool {
        match self.fault {
            Fault::None => false,
            Fault::Crash => medium.has_crashed(),
            Fault::Full => error.is_disk_full(),
            Fault::Sync | Fault::Read => true,
        }
    }

    /// Does something while something may fail, and looks at what that leaves.
    fn act(&mut self, act: Act) {
        let on_other = act == Act::Copy && self.below(2) == 0;
        let hit = if on_other { self.other.clone() } else { self.medium.clone() };
        self.arm(&hit, act);
        self.tell(format!(
            "{act:?}, {:?} of the {}",
            self.fault,
            if on_other { "copies" } else { "store" }
        ));
        let done = match act {
            Act::Run => self.run(),
            Act::Forget => self.forget(),
            Act::Prune => self.prune(),
            Act::Copy => self.copy(),
            Act::Check => self.check(),
            Act::Repair => self.repair_of_nothing(),
        };
        if let Err(error) = &done {
            self.tell(format!("    {error}"));
            assert!(self.is_due(error, &hit), "{act:?}: {error}");
            match (act, self.fault) {
                (Act::Copy, _) => self.came("copy cut off", 1),
                (_, Fault::Full) => self.came("full disk", 1),
                (_, Fault::Sync) => self.came("failed sync", 1),
                (_, Fault::Read) => self.came("short read", 1),
                _ => {}
            }
        }
        hit.calm();
        let power = self.below(3) == 0;
        if on_other {
            if hit.has_crashed() {
                let seed = self.chance.next_u64();
                self.other = if power {
                    hit.after_power_loss(seed)
                } else {
                    hit.copy_with_same_durability()
                };
            }
            self.look_at_copies();
        } else if hit.has_crashed() || power {
            self.die(power);
        }
        self.look();
    }

    fn die(&mut self, power: bool) {
        let seed = self.chance.next_u64();
        self.tell(format!("    {}", if power { "power loss" } else { "process death" }));
        if power {
            self.came("power loss", 1);
            self.medium = self.medium.after_power_loss(seed);
            self.settle();
        } else {
            self.came("process death", 1);
            self.medium = self.medium.copy_with_same_durability();
        }
    }

    pub fn know(&mut self, id: CheckpointId, image: Image, durable: bool) {
        self.history.entry(id).or_default().push(image.clone());
        self.facts.insert(id, Fact { image, durable, going: false });
    }

    /// All are durable that are not in doubt.
    fn know_durable(&mut self, doubt: Option<CheckpointId>) {
        self.came("doubted", doubt.iter().len() as u64);
        for (id, fact) in &mut self.facts {
            fact.durable |= doubt.is_none_or(|from| *id < from);
        }
    }

    fn tuning(&mut self) -> Tuning {
        random_tuning(&mut |end| self.below(end))
    }

    /// A run: some checkpoints, each of which may fail, and at whose end the process may just stop.
    fn run(&mut self) -> Result<()> {
        let tuning = self.tuning();
        self.came("did not wait", u64::from(tuning.durability != Durability::Checkpoint));
        let store = on(&self.medium)?;
        let mut writer = store.lock_writer_tuned("simulation", tuning)?;
        // What it found is durable, but for what a failed sync may have lost.
        self.know_durable(writer.in_doubt());
        let has_disk = self.below(2) == 0;
        let disks = if has_disk { vec![disk()] } else { Vec::new() };
        let mut run =
            writer.begin_run_with("vm", &layout(RAM_PAGES as u64), disks, DiskState::default())?;
        let mut image: Image = vec![Some(0); RAM_PAGES];
        image.resize(RAM_PAGES + if has_disk { BLOCKS } else { 0 }, None);
        let mut guest = Guest { image, owed: false };
        for _ in 0..=self.below(5) {
            let beside = self.below(8) == 0;
            let sealed = if beside {
                self.seal_beside_a_prune(&store, &mut run, tuning, &mut guest)
            } else {
                self.seal(&mut run, tuning, &mut guest)
            };
            if let Err(error) = sealed {
                if self.medium.has_crashed() || !self.is_due(&error, &self.medium) {
                    return Err(error);
                }
                run.abandon();
            }
        }
        if self.below(3) > 0 {
            run.finish()?;
            drop(writer);
            if tuning.durability != Durability::Checkpoint && !has_mark(&self.medium) {
                self.know_durable(None);
            }
        }
        Ok(())
    }

    fn seal(&mut self, run: &mut Run, tuning: Tuning, guest: &mut Guest) -> Result<()> {
        let mut next = guest.image.clone();
        change(&mut self.chance, &mut next);
        self.strangers.push(next.clone());
        let tag = format!("t{}", self.below(4));
        let tag = (self.below(5) == 0).then_some(tag.as_str());
        self.seals += 1;
        let taken_at = Timestamp::from_second(1_700_000_000 + self.seals).unwrap();
        let sealed = put(run, guest, &next).and_then(|()| {
            run.seal(SealRequest { taken_at, tag, ..request(&layout(RAM_PAGES as u64)) })
        });
        let (id, result) = match sealed {
            Ok(sealed) => (sealed.id, Ok(())),
            Err(error @ Error::TagNotSet { id, .. }) => (id, Err(error)),
            Err(error) => {
                self.came("seal failed", 1);
                self.tell(format!("    seal: {error}"));
                *guest = Guest { image: next, owed: true };
                return Err(error);
            }
        };
        self.came("sealed", 1);
        self.tell(format!("    sealed {id}, {:?}", tuning.durability));
        self.strangers.pop();
        self.know(id, next.clone(), tuning.durability == Durability::Checkpoint);
        if matches!(tuning.durability, Durability::Every(_)) && result.is_ok() {
            let doubt = on(&self.medium)
                .and_then(|store| store.inner().in_doubt())
                .unwrap_or(Some(CheckpointId(0)));
            self.know_durable(doubt);
        }
        *guest = Guest { image: next, owed: false };
        result
    }

    /// The run seals when the prune waits for it.
    fn seal_beside_a_prune(
        &mut self,
        store: &Store,
        run: &mut Run,
        tuning: Tuning,
        guest: &mut Guest,
    ) -> Result<()> {
        let options =
            PruneOptions { max_unused: 0.0, dry_run: false, wait: PRUNE_WAIT, recompress_bytes: 0 };
        let mut failed = None;
        let report = store.prune_tuned(&options, tuning, &mut |progress| {
            if progress.step == PruneStep::Waiting && failed.is_none() {
                failed = self.seal(run, tuning, guest).err();
            }
        });
        if let Ok(report) = &report {
            self.came("pruned beside a run", report.removed_packs + report.rewritten_packs);
        }
        failed.map_or(report.map(drop), Err)
    }

    fn forget(&mut self) -> Result<()> {
        let newest = self.facts.keys().next_back().copied();
        let mut ids: BTreeSet<CheckpointId> = self.facts.keys().copied().collect();
        ids.retain(|id| Some(*id) != newest && self.chance.next_u64().is_multiple_of(2));
        for id in &ids {
            self.facts.entry(*id).and_modify(|fact| fact.going = true);
        }
        on(&self.medium)?.forget(&ids).inspect_err(|_| self.came("forget cut off", 1))?;
        self.facts.retain(|id, _| !ids.contains(id));
        self.came("forgotten", ids.len() as u64);
        Ok(())
    }

    fn prune(&mut self) -> Result<()> {
        let max_unused = [0.0, 0.0, 0.3][self.below(3) as usize];
        let recompress_bytes = [0, 0, 40_000, u64::MAX][self.below(4) as usize];
        let options =
            PruneOptions { max_unused, dry_run: false, wait: PRUNE_WAIT, recompress_bytes };
        let tuning = Tuning { durability: Durability::Checkpoint, ..self.tuning() };
        let report = on(&self.medium)?.prune_tuned(&options, tuning, &mut |_| {})?;
        assert!(self.fault == Fault::Read || report.damaged.is_empty(), "{report:#?}");
        self.tell(format!("    {report:?}"));
        self.came("packs pruned", report.removed_packs + report.rewritten_packs);
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        let (from, to) = (on(&self.medium)?, on(&self.other)?);
        let mut ids: BTreeSet<CheckpointId> = self.facts.keys().copied().collect();
        ids.retain(|_| !self.chance.next_u64().is_multiple_of(3));
        let tuning = Tuning { durability: Durability::Checkpoint, ..self.tuning() };
        let report = from.copy_tuned(&to, &ids, tuning, &mut |_| {})?;
        assert!(self.fault == Fault::Read || report.damaged.is_empty(), "{report:#?}");
        self.medium.calm();
        self.other.calm();
        for copied in report.copied.iter().chain(&report.known) {
            let image = &self.facts[&copied.from].image;
            let is_same = matches(&to, copied.to, image);
            assert!(is_same.is_ok_and(|same| same), "{copied:?} is another checkpoint");
            self.copies.insert(copied.to, image.clone());
        }
        self.came("copied", report.copied.len() as u64);
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        let report = on(&self.medium)?
            .check(&CheckOptions { read_data: self.below(2) == 0 }, &mut |_| {})?;
        assert!(self.fault == Fault::Read || self.is_clean(&report), "{report:#?}");
        Ok(())
    }

    /// A repair of an intact store changes nothing. If a read times out, it loses nothing.
    fn repair_of_nothing(&mut self) -> Result<()> {
        let times_out = self.fault == Fault::Read;
        let store = if times_out {
            // A file that ends too early would be damaged.
            self.medium.calm();
            let read = 1 + self.below(400);
            Unreliable::new(&self.medium, BadReads::TimedOut(read)).open_store()?
        } else {
            on(&self.medium)?
        };
        let files = self.medium.files();
        let report = store.repair(&mut |_| {})?;
        assert!(report.lost.is_empty(), "{report:#?}");
        assert!(times_out || self.is_clean(&report.found), "{report:#?}");
        if report.found.is_clean() {
            assert!(report.after.is_none(), "{report:#?}");
            assert!(self.medium.files() == files, "a repair of a whole store changed it");
        } else {
            let is_clean = report.after.as_ref().is_some_and(CheckReport::is_clean);
            assert!(times_out || is_clean, "{report:#?}");
        }
        Ok(())
    }
}

pub fn disk() -> DiskMeta {
    let base = BaseMeta { path: "/base".into(), format: "raw".into(), files: Vec::new() };
    DiskMeta {
        name: "d".into(),
        disk_bytes: (BLOCKS * PAGE_BYTES) as u64,
        base,
        ..DiskMeta::default()
    }
}

/// Writes to some pages and blocks.
pub fn change(chance: &mut SeededRandom, image: &mut Image) {
    for (at, place) in image.iter_mut().enumerate() {
        let is_block = at >= RAM_PAGES;
        *place = match chance.next_u64() % 12 {
            0 => Some(0),
            1 => Some(1 + chance.next_u64() % 40),
            // Like each other.
            2..4 => Some(11 + 4 * (chance.next_u64() % 16)),
            4 if is_block => Some(SHIFTED + chance.next_u64() % 12),
            4 => Some(SHIFTED + 4 * (chance.next_u64() % 3)),
            _ => continue,
        };
    }
}

/// Puts where `new` differs from what was sealed last.
pub fn put(run: &mut Run, guest: &Guest, new: &Image) -> Result<()> {
    for (at, (old, new)) in guest.image.iter().zip(new).enumerate() {
        let is_dirty = guest.owed || old != new;
        match new {
            Some(number) if is_dirty && at < RAM_PAGES => {
                run.put_page(PageIndex(at as u64), &page_of(*number))?;
            }
            Some(number) if is_dirty => {
                run.put_block(0, (at - RAM_PAGES) as u64, &page_of(*number))?;
            }
            _ => {}
        }
    }
    Ok(())
}
