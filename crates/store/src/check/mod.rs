//! Checks a whole store and tells which checkpoints each damage hurts.
//!
//! ```text
//!   store.json ─▶ checkpoint files ─▶ maps (and where they say pages are) ─▶ packs ─▶ who needs what is bad ─▶ tags
//! ```
//!
//! Invariants: the checkpoints named by the damages are exactly those whose meta, device state or
//! RAM image cannot be read correctly any more. What is unreadable and needed by nothing is a note
//! where a crash may leave it, a damage without checkpoints otherwise. Nothing is changed; a writer
//! may be at work meanwhile.

mod packs;
mod quarantine;
mod repair;

use crate::config::{Config, STORE_JSON_BYTES_MAX};
use crate::identity::PageRef;
use crate::meta::Meta;
use crate::prune::packs::numbers;
use crate::store::Inner;
use crate::{Error, Result, Store};
use keyframe_bytes::hex::to_hex;
use keyframe_store_backend::layout;
use keyframe_store_backend::layout::STORE_JSON;
use keyframe_units::CheckpointId;
use packs::{PackBounds, check_pack};
pub use repair::{Lost, RepairReport, SetAside};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Prunes that may come to an end while a store is checked.
const ATTEMPTS: u32 = 4;

/// How thorough a check is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckOptions {
    /// Read and verify every page; without it closed packs are taken at their (verified) index.
    pub read_data: bool,
}

/// How far a check is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckProgress {
    /// The file being checked.
    pub object: String,
    /// Bytes of the store checked so far.
    pub done_bytes: u64,
    /// Bytes to check in all.
    pub total_bytes: u64,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Checkpoint files looked at.
    pub checkpoints: u64,
    /// Map files looked at.
    pub maps: u64,
    /// Packs looked at.
    pub packs: u64,
    /// Page records verified, or listed by a verified index.
    pub records: u64,
    /// True where every page was read.
    pub read_data: bool,
    /// What is damaged.
    pub damages: Vec<Damage>,
    /// What is worth knowing and harms nothing.
    pub notes: Vec<String>,
}

impl CheckReport {
    /// True where nothing is damaged.
    pub fn is_clean(&self) -> bool {
        self.damages.is_empty()
    }

    /// The checkpoints that some damage hurts.
    pub fn hurt_checkpoints(&self) -> BTreeSet<CheckpointId> {
        self.damages.iter().flat_map(|d| d.checkpoints.iter().copied()).collect()
    }
}

/// One damaged object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The file, with the offset where one applies.
    pub object: String,
    /// What is wrong with it.
    pub problem: String,
    /// The checkpoints that cannot be read correctly any more because of it, rising; may be none.
    pub checkpoints: Vec<CheckpointId>,
}

impl Store {
    /// Checks everything in the store. Errors only where the store cannot be looked at; damage is
    /// in the report. What seems damaged while a prune is at work is looked at again.
    pub fn check(
        &self,
        options: &CheckOptions,
        progress: &mut dyn FnMut(CheckProgress),
    ) -> Result<CheckReport> {
        for _ in 1..ATTEMPTS {
            let before = self.inner().removable()?;
            let report = self.check_once(*options, progress)?;
            if report.is_clean() || before.is_subset(&self.inner().removable()?) {
                return Ok(report);
            }
        }
        self.check_once(*options, progress)
    }

    fn check_once(
        &self,
        options: CheckOptions,
        progress: &mut dyn FnMut(CheckProgress),
    ) -> Result<CheckReport> {
        let inner = self.inner();
        let mut check = Check {
            inner,
            report: CheckReport { read_data: options.read_data, ..CheckReport::default() },
            metas: BTreeMap::new(),
            wanted: BTreeMap::new(),
            flow: Flow { progress, done_bytes: 0, total_bytes: 0 },
        };
        // The checkpoints first: what a writer adds from here on is not looked for.
        let ids = inner.checkpoint_ids()?;
        check.measure()?;
        check.identity(&ids);
        check.checkpoints(&ids);
        check.maps()?;
        check.packs(options.read_data)?;
        check.tags(&ids)?;
        check.leftovers()?;
        Ok(check.report)
    }
}

impl Inner {
    /// Refuses a description, as it is on disk now, that is not the one that the store was opened
    /// with.
    fn own_identity(&self) -> Result<()> {
        let object = self.backend.describe(STORE_JSON);
        let bytes = self.backend.read(STORE_JSON, STORE_JSON_BYTES_MAX)?;
        let config = Config::decode(&bytes, &object)?;
        if self.config.is(&config) {
            return Ok(());
        }
        Err(Error::damaged(object, "it is that of another store"))
    }

    /// What a prune can remove.
    fn removable(&self) -> Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for folder in [layout::CHECKPOINTS, layout::MAPS, layout::PACKS] {
            names.extend(self.backend.list(folder)?);
        }
        Ok(names)
    }
}

struct Check<'a> {
    inner: &'a Inner,
    report: CheckReport,
    /// The checkpoints whose file and maps are in order.
    metas: BTreeMap<CheckpointId, Meta>,
    /// Per pack, the offsets that maps refer to.
    wanted: BTreeMap<u32, Vec<u64>>,
    flow: Flow<'a>,
}

/// Tells the caller how far the check is.
struct Flow<'a> {
    progress: &'a mut dyn FnMut(CheckProgress),
    done_bytes: u64,
    total_bytes: u64,
}

impl Flow<'_> {
    fn tell(&mut self, object: &str, more_bytes: u64) {
        let done_bytes = (self.done_bytes + more_bytes).min(self.total_bytes);
        let object = object.to_string();
        (self.progress)(CheckProgress { object, done_bytes, total_bytes: self.total_bytes });
    }
}

/// The object and the problem of an error met while reading `name`.
fn explain(inner: &Inner, name: &str, error: Error) -> (String, String) {
    match error {
        Error::Damaged { object, problem } => (object, problem),
        other => (inner.backend.describe(name), other.to_string()),
    }
}

impl Check<'_> {
    fn damage(&mut self, object: String, problem: String, checkpoints: Vec<CheckpointId>) {
        self.report.damages.push(Damage { object, problem, checkpoints });
    }

    fn measure(&mut self) -> Result<()> {
        for folder in [layout::CHECKPOINTS, layout::MAPS, layout::PACKS] {
            for file in self.inner.backend.list(folder)? {
                self.flow.total_bytes += self.len_of(&format!("{folder}/{file}"));
            }
        }
        Ok(())
    }

    fn len_of(&self, name: &str) -> u64 {
        self.inner.backend.open(name).and_then(|file| file.len_bytes()).unwrap_or(0)
    }

    fn passed(&mut self, name: &str) {
        let len = self.len_of(name);
        self.flow.tell(name, len);
        self.flow.done_bytes += len;
    }

    /// The store's own description, as it is on disk now.
    fn identity(&mut self, ids: &[CheckpointId]) {
        if let Err(error) = self.inner.own_identity() {
            let (object, problem) = explain(self.inner, STORE_JSON, error);
            self.damage(object, problem, ids.to_vec());
        }
    }

    fn checkpoints(&mut self, ids: &[CheckpointId]) {
        for id in ids {
            let name = layout::checkpoint(*id);
            self.report.checkpoints += 1;
            match self.inner.read_checkpoint(*id) {
                Ok(file) => {
                    self.metas.insert(*id, file.meta);
                }
                // Removed since it was listed.
                Err(Error::UnknownCheckpoint { .. }) => {}
                Err(error) => {
                    let (object, problem) = explain(self.inner, &name, error);
                    self.damage(object, problem, vec![*id]);
                }
            }
            self.passed(&name);
        }
    }

    /// Every map there is or should be.
    fn maps(&mut self) -> Result<()> {
        let mut users = BTreeMap::<u64, Vec<CheckpointId>>::new();
        for file in self.inner.backend.list(layout::MAPS)? {
            users.extend(layout::parse_map(&file).map(|id| (id, Vec::new())));
        }
        for (id, meta) in &self.metas {
            for map in &meta.map_chain {
                users.entry(*map).or_default().push(*id);
            }
        }
        for (id, users) in users {
            let name = layout::map(id);
            self.report.maps += 1;
            match self.inner.read_map(id) {
                Err(error) => {
                    let (object, problem) = explain(self.inner, &name, error);
                    self.damage(object, problem, users);
                }
                Ok(run) if users.is_empty() => {
                    let pages = run.refs().len();
                    self.report
                        .notes
                        .push(format!("{name}: no checkpoint uses this map ({pages} pages)"));
                }
                Ok(run) => {
                    let strangers: Vec<_> =
                        users.into_iter().filter(|user| !self.fits(&run.header, *user)).collect();
                    if !strangers.is_empty() {
                        let object = self.inner.backend.describe(&name);
                        self.damage(
                            object,
                            "it does not belong where its chain has it".into(),
                            strangers,
                        );
                    }
                    for to in run.refs() {
                        self.wanted.entry(to.pack()).or_default().push(to.offset());
                    }
                }
            }
            self.passed(&name);
        }
        for offsets in self.wanted.values_mut() {
            offsets.sort_unstable();
            offsets.dedup();
        }
        Ok(())
    }

    fn fits(&self, header: &crate::map_run::MapHeader, user: CheckpointId) -> bool {
        self.metas.get(&user).is_none_or(|meta| {
            let below = meta.map_chain.iter().skip_while(|id| **id != header.id).nth(1).copied();
            header.parent == below
                && to_hex(&header.run) == meta.run
                && Some(header.space_pages) == meta.space_pages()
        })
    }

    fn packs(&mut self, read_data: bool) -> Result<()> {
        // What is lost already needs no second reason. Not sooner: each bad map names all that need
        // it.
        for id in self.report.hurt_checkpoints() {
            self.metas.remove(&id);
        }
        let mut numbers: BTreeSet<u32> = numbers(self.inner)?.into_iter().collect();
        numbers.extend(self.wanted.keys());
        let mut bad = Vec::new();
        for number in numbers {
            let name = layout::pack(number);
            self.report.packs += 1;
            let wanted = self.wanted.remove(&number).unwrap_or_default();
            let flow = &mut self.flow;
            let mut tell = |at: u64| flow.tell(&name, at);
            let findings = check_pack(self.inner, number, &wanted, read_data, &mut tell);
            self.report.records += findings.records;
            self.report.notes.extend(findings.notes);
            for (object, problem) in findings.harmless {
                self.damage(object, problem, Vec::new());
            }
            bad.extend(findings.bad);
            self.passed(&name);
        }
        self.blame(bad);
        Ok(())
    }

    /// Finds out which images need the bad records. Only checkpoints whose maps mention one are
    /// loaded.
    fn blame(&mut self, bad: Vec<PackBounds>) {
        if bad.is_empty() {
            return;
        }
        let refs: BTreeMap<PageRef, usize> = bad
            .iter()
            .enumerate()
            .flat_map(|(at, b)| b.refs.iter().map(move |to| (*to, at)))
            .collect();
        let mut victims = vec![BTreeSet::new(); bad.len()];
        let mut mentions = BTreeMap::<u64, bool>::new();
        for (id, meta) in &self.metas {
            let mut mentioned = false;
            for map in &meta.map_chain {
                mentioned |= *mentions.entry(*map).or_insert_with(|| {
                    // A map that was readable a moment ago; if it is not now, look at the image to
                    // be safe.
                    self.inner
                        .read_map(*map)
                        .map_or(true, |run| run.refs().iter().any(|r| refs.contains_key(r)))
                });
            }
            if !mentioned {
                continue;
            }
            if let Ok((ram, disks)) = self.inner.read_maps(meta) {
                for to in ram.iter().map(|(_, to)| to).chain(disks.records()) {
                    if let Some(set) = refs.get(&to).and_then(|at| victims.get_mut(*at)) {
                        set.insert(*id);
                    }
                }
            }
        }
        let mut stale: BTreeMap<String, (String, u64)> = BTreeMap::new();
        for (bounds, victims) in bad.into_iter().zip(victims) {
            let mut problem = bounds.problem;
            if victims.is_empty() && bounds.stale {
                stale.entry(problem).or_insert((bounds.object, 0)).1 += 1;
                continue;
            }
            if victims.is_empty() {
                problem.push_str("; no checkpoint needs it");
            }
            self.damage(bounds.object, problem, victims.into_iter().collect());
        }
        // A prune leaves thousands of them, of a few kinds.
        for (problem, (object, count)) in stale {
            let others = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
            let note = format!(
                "{object}{others}: left over from a prune, no checkpoint needs it ({problem})"
            );
            self.report.notes.push(note);
        }
    }

    fn tags(&mut self, ids: &[CheckpointId]) -> Result<()> {
        for tag in self.inner.backend.list(layout::TAGS)? {
            let name = layout::tag(&tag);
            if !layout::is_tag(&tag) {
                self.report.notes.push(format!("{name}: not a file of the store"));
                continue;
            }
            match self.inner.read_tag(&tag) {
                Ok(Some(id)) if ids.binary_search(&id).is_err() && !self.is_sealed(id) => {
                    let object = self.inner.backend.describe(&name);
                    let problem =
                        format!("it points to checkpoint {id}, which is not in the store");
                    self.damage(object, problem, vec![id]);
                }
                Ok(_) => {}
                Err(error) => {
                    let (object, problem) = explain(self.inner, &name, error);
                    self.damage(object, format!("{problem}; no checkpoint is hurt"), Vec::new());
                }
            }
        }
        Ok(())
    }

    /// Asks again, for what a writer sealed since the check began.
    fn is_sealed(&self, id: CheckpointId) -> bool {
        self.inner.checkpoint_ids().is_ok_and(|ids| ids.binary_search(&id).is_ok())
    }

    fn leftovers(&mut self) -> Result<()> {
        self.strangers(layout::PACKS, |file| layout::parse_pack(file).is_some())?;
        self.strangers(layout::MAPS, |file| layout::parse_map(file).is_some())?;
        self.strangers(layout::CHECKPOINTS, |file| layout::parse_checkpoint(file).is_some())?;
        for file in self.inner.backend.list(layout::TMP)? {
            self.report.notes.push(format!("tmp/{file}: unfinished, removed by the next writer"));
        }
        Ok(())
    }

    fn strangers(&mut self, folder: &str, is_known: impl Fn(&str) -> bool) -> Result<()> {
        let unknown = self.inner.backend.list(folder)?.into_iter().filter(|file| !is_known(file));
        self.report
            .notes
            .extend(unknown.map(|file| format!("{folder}/{file}: not a file of the store")));
        Ok(())
    }
}
