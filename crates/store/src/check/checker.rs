//! Checking all files of a store.

use crate::check::packs::{PackBounds, check_pack};
use crate::check::report::{CheckOptions, CheckProgress, CheckReport, Damage, explain};
use crate::open_store::OpenStore;
use crate::store::Store;
use crate::{Error, Result};
use keyframe_bytes::hex::to_hex;
use keyframe_store_backend::layout;
use keyframe_store_backend::layout::STORE_JSON;
use keyframe_store_format::map_run::MapHeader;
use keyframe_store_format::meta::Meta;
use keyframe_store_format::page_ref::PageRef;
use keyframe_units::CheckpointId;
use std::collections::{BTreeMap, BTreeSet};

/// The most attempts at a check, if prunes end meanwhile.
const ATTEMPTS: u32 = 4;

impl Store {
    /// Checks everything in the store, and returns the damage that it found. If a prune removes
    /// files during the check, the check begins again. Calls `progress` now and then. Error: the
    /// store cannot be read at all.
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
        // Lists the checkpoints first: the check leaves out what a writer adds later.
        let ids = inner.checkpoint_ids()?;
        check.measure()?;
        check.identity(&ids);
        check.checkpoints(&ids);
        check.maps()?;
        check.packs(options.read_data)?;
        check.tags(&ids)?;
        check.bundled_files(&ids, options.read_data)?;
        check.leftovers()?;
        Ok(check.report)
    }
}

impl OpenStore {
    /// The names of all files that a prune can remove.
    fn removable(&self) -> Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for folder in [layout::CHECKPOINTS, layout::MAPS, layout::PACKS] {
            names.extend(self.backend.list(folder)?);
        }
        Ok(names)
    }
}

struct Check<'a> {
    inner: &'a OpenStore,
    report: CheckReport,
    /// The checkpoints whose file and maps are correct.
    metas: BTreeMap<CheckpointId, Meta>,
    /// The offsets that maps refer to, for each pack.
    wanted: BTreeMap<u32, Vec<u64>>,
    flow: Flow<'a>,
}

/// Reports the progress of the check to the caller.
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

impl Check<'_> {
    fn damage(&mut self, object: String, problem: String, checkpoints: Vec<CheckpointId>) {
        self.report.damages.push(Damage { object, problem, checkpoints });
    }

    fn measure(&mut self) -> Result<()> {
        for folder in [layout::CHECKPOINTS, layout::MAPS, layout::PACKS, layout::FILES] {
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

    /// Checks `store.json` as it is on disk now.
    fn identity(&mut self, ids: &[CheckpointId]) {
        if let Err(error) = self.inner.check_identity() {
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
                // Removed since the listing.
                Err(Error::UnknownCheckpoint { .. }) => {}
                Err(error) => {
                    let (object, problem) = explain(self.inner, &name, error);
                    self.damage(object, problem, vec![*id]);
                }
            }
            self.passed(&name);
        }
    }

    /// Reads the files of a bundle. A checkpoint is of no use without one of them.
    fn bundled_files(&mut self, ids: &[CheckpointId], read_data: bool) -> Result<()> {
        for hash in self.inner.bundled_files()? {
            let name = layout::bundled_file(&hash.to_hex());
            if read_data
                && let Err(error) =
                    self.inner.read_bundled_file(&hash, None, &mut std::io::sink(), &mut |_| ())
            {
                let (object, problem) = explain(self.inner, &name, error);
                self.damage(object, problem, ids.to_vec());
            }
            self.passed(&name);
        }
        Ok(())
    }

    /// Checks all maps that exist, and all that checkpoints name.
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

    fn fits(&self, header: &MapHeader, user: CheckpointId) -> bool {
        self.metas.get(&user).is_none_or(|meta| {
            let below = meta.map_chain.iter().skip_while(|id| **id != header.id).nth(1).copied();
            header.parent == below
                && to_hex(&header.run) == meta.run
                && Some(header.space_pages) == meta.space_pages()
        })
    }

    fn packs(&mut self, read_data: bool) -> Result<()> {
        // Checkpoints that are lost already need no second reason. Each bad map has named all
        // checkpoints that need it.
        for id in self.report.hurt_checkpoints() {
            self.metas.remove(&id);
        }
        let mut numbers: BTreeSet<u32> = self.inner.pack_numbers()?.into_iter().collect();
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

    /// Finds the checkpoints that need the bad records. Loads only checkpoints whose maps refer to
    /// one.
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
                    // The map was readable a moment ago. If it is not now, load the checkpoint to
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
        // A prune may leave thousands of them, with a few problems.
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

    /// True if the checkpoint was sealed since the check began.
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
