//! Pruning: checkpoints stay as they were while others read and write, and if the prune is
//! interrupted. The rest is gone.

use super::forget::{add_run, next_image, store_of};
use super::*;
use crate::prune::{Known, Live};
use crate::{
    BaseMeta, BlockContent, DiskMeta, DiskState, PruneOptions, PruneReport, PruneStep, Writer,
};
use keyframe_store_backend::testing::SeededRandom;
use keyframe_store_format::composed::{PART_BYTES, PARTS};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;

const PAGES: u64 = 20;

fn options(max_unused: f64) -> PruneOptions {
    PruneOptions { max_unused, dry_run: false, wait: Duration::from_secs(20), recompress_bytes: 0 }
}

fn prune(store: &Store, max_unused: f64) -> Result<PruneReport> {
    store.prune_tuned(&options(max_unused), TINY, &mut |_| {})
}

fn forget(store: &Store, known: &mut BTreeMap<CheckpointId, Image>, numbers: &[u64]) {
    let ids: BTreeSet<CheckpointId> = numbers.iter().copied().map(CheckpointId).collect();
    store.forget(&ids).unwrap();
    known.retain(|id, _| !ids.contains(id));
}

fn assert_kept(medium: &FaultyBackend, known: &BTreeMap<CheckpointId, Image>, context: &str) {
    let store = on(medium).unwrap();
    assert_eq!(store.ids().unwrap(), known.keys().copied().collect::<Vec<_>>(), "{context}");
    assert_intact(&store, known, context);
}

/// The files of a kind.
fn files(medium: &FaultyBackend, folder: &str) -> Vec<String> {
    medium.files().into_keys().filter(|name| name.starts_with(folder)).collect()
}

#[test]
fn unneeded_records_go_and_the_others_stay_as_they_were() {
    for (max_unused, gone) in
        [(0.0, [2, 3, 4, 5, 6, 9]), (0.3, [2, 3, 4, 5, 6, 9]), (0.0, [1, 10, 11, 12, 13, 20])]
    {
        let medium = FaultyBackend::default();
        let mut known = store_of(&medium, 14);
        add_run(&medium, 6, &mut known);
        let store = on(&medium).unwrap();
        let before = medium.used_bytes();
        forget(&store, &mut known, &gone);
        let dry = store
            .prune(&PruneOptions { dry_run: true, ..options(max_unused) }, &mut |_| {})
            .unwrap();
        assert!(dry.dry_run && dry.removed_maps > 0, "{dry:?}");
        let report = prune(&store, max_unused).unwrap();
        assert_kept(&medium, &known, &format!("{max_unused} without {gone:?}"));
        assert!(medium.used_bytes() < before, "{report:?}");
        assert_eq!(
            (report.removed_maps, report.removed_packs, report.rewritten_packs),
            (dry.removed_maps, dry.removed_packs, dry.rewritten_packs)
        );
        assert!(
            report.unused_bytes as f64 <= max_unused * report.after_bytes as f64 + 1.0,
            "{report:?}"
        );
        assert_eq!((report.postponed_packs, report.damaged.len()), (0, 0));
        // There is nothing more to do.
        let files = medium.files();
        let again = prune(&store, max_unused).unwrap();
        assert!(medium.files() == files, "{again:?}");
        assert_eq!(again.removed_packs + again.rewritten_packs + again.removed_maps, 0);
        add_run(&medium, 3, &mut known);
        assert_kept(&medium, &known, "with another run");
    }
}

#[test]
fn numbers_are_not_used_again_in_an_empty_store() {
    let medium = FaultyBackend::default();
    let mut known = store_of(&medium, 5);
    let store = on(&medium).unwrap();
    let newest_pack = files(&medium, "packs/").pop().unwrap();
    forget(&store, &mut known, &[1, 2, 3, 4, 5]);
    prune(&store, 0.0).unwrap();
    prune(&store, 0.0).unwrap();
    assert_kept(&medium, &known, "nothing");
    assert_eq!(files(&medium, "maps/"), ["maps/0000000005.map"]);
    assert!(files(&medium, "packs/").iter().all(|name| *name > newest_pack));
    assert!(
        medium
            .files()
            .iter()
            .all(|(name, bytes)| !name.starts_with("packs/") || bytes.len() == 128)
    );
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    run.put_page(PageIndex(0), &content(3)).unwrap();
    let sealed = seal(&mut run, PAGES).unwrap();
    assert_eq!(sealed.id, CheckpointId(6));
    assert!(*files(&medium, "packs/").last().unwrap() > newest_pack);
}

#[test]
fn a_crash_at_any_operation_costs_nothing_but_work() {
    let base = FaultyBackend::default();
    let mut known = store_of(&base, 12);
    add_run(&base, 4, &mut known);
    forget(&on(&base).unwrap(), &mut known, &[2, 3, 4, 5, 7, 9, 10, 16]);
    let whole = base.copy();
    prune(&on(&whole).unwrap(), 0.0).unwrap();
    let mut operation = 1;
    loop {
        let medium = base.copy();
        medium.crash_at(operation);
        let done = prune(&on(&medium).unwrap(), 0.0).is_ok();
        assert_eq!(done, !medium.has_crashed());
        if done {
            assert!(operation > 60, "only {operation} operations");
            break;
        }
        // The next process prunes on what it sees, durable or not.
        let next = medium.copy_with_same_durability();
        prune(&on(&next).unwrap(), 0.0).unwrap();
        for seed in 0..3 {
            let context = format!("crash at operation {operation}, pruned, then power loss {seed}");
            assert_kept(&next.after_power_loss(seed * 1000 + operation), &known, &context);
        }
        let mut found = vec![medium.copy()];
        found.extend((0..3).map(|seed| medium.after_power_loss(seed * 1000 + operation)));
        for (seed, after) in found.into_iter().enumerate() {
            let context = format!("crash at operation {operation}, outcome {seed}");
            assert_kept(&after, &known, &context);
            // A second crash, anywhere.
            let again = after.copy_with_same_durability();
            again.crash_at(operation % 37 + 3);
            let _ = prune(&on(&again).unwrap(), 0.0);
            assert_kept(
                &again.after_power_loss(operation),
                &known,
                &format!("{context}, and again"),
            );
            let mut more = known.clone();
            if seed == 0 {
                add_run(&after, 2, &mut more);
            }
            prune(&on(&after).unwrap(), 0.0).unwrap();
            assert_kept(&after, &more, &format!("{context}, then pruned"));
            if seed > 0 {
                let size = |of: &FaultyBackend| of.used_bytes();
                assert!(
                    size(&after) <= size(&whole) + 2000,
                    "{context}: {} {}",
                    size(&after),
                    size(&whole)
                );
            }
        }
        operation += 1;
    }
}

#[test]
fn a_failed_sync_and_a_full_disk_cost_nothing_but_work() {
    let base = FaultyBackend::default();
    let mut known = store_of(&base, 10);
    forget(&on(&base).unwrap(), &mut known, &[2, 3, 4, 5, 7]);
    for sync in 1.. {
        let medium = base.copy();
        medium.fail_sync_at(sync);
        let result = prune(&on(&medium).unwrap(), 0.0);
        assert_kept(&medium, &known, &format!("sync {sync}: {result:?}"));
        assert_kept(
            &medium.after_power_loss(sync),
            &known,
            &format!("sync {sync}, then power loss"),
        );
        if medium.syncs() < sync {
            assert!(result.is_ok() && sync > 20, "only {sync} syncs: {result:?}");
            break;
        }
    }
    for room in (0..60_000).step_by(997) {
        let medium = base.copy();
        medium.limit(Some(base.used_bytes() + room));
        let result = prune(&on(&medium).unwrap(), 0.0);
        assert!(result.as_ref().map_or_else(Error::is_disk_full, |_| true), "{result:?}");
        assert_kept(&medium, &known, &format!("room for {room}: {result:?}"));
    }
}

#[test]
fn readers_keep_loaded_checkpoints_and_can_load_others_during_a_prune() {
    let medium = FaultyBackend::default();
    let mut known = store_of(&medium, 12);
    let store = on(&medium).unwrap();
    let loaded: Vec<_> = known.keys().map(|id| on(&medium).unwrap().load(*id).unwrap()).collect();
    let before = known.clone();
    forget(&store, &mut known, &[2, 3, 4, 5, 6]);
    let mut during = Vec::new();
    let mut look = |_| during.push(on(&medium).unwrap().load(CheckpointId(9)).unwrap());
    store.prune_tuned(&options(0.0), TINY, &mut look).unwrap();
    assert!(during.len() > 3);
    for loaded in loaded.iter().chain(&during) {
        let image = &before[&loaded.id];
        let expected = (0u64..).zip(image).filter(|(_, n)| **n != 0).map(|(p, n)| (p, content(*n)));
        assert!(read_image(loaded).unwrap() == expected.collect(), "checkpoint {}", loaded.id);
    }
}

/// What the rounds of a prune rest on.
#[test]
fn a_look_at_one_pack_finds_all_that_is_needed_of_it_and_reads_few_maps() {
    let medium = FaultyBackend::default();
    let mut known = store_of(&medium, 60);
    let store = on(&medium).unwrap();
    let half: Vec<u64> = (1..60).filter(|n| n % 3 > 0).collect();
    forget(&store, &mut known, &half);
    let mut all = Live::find(store.inner()).unwrap();
    let packs: BTreeSet<u32> = store.inner().pack_numbers().unwrap().into_iter().collect();
    let maps = Known { mentions: all.take_mentions(), packs: packs.clone(), ..Known::default() };
    let mut least = usize::MAX;
    for pack in &packs {
        let one = BTreeSet::from([*pack]);
        let mut some = Live::find_where(store.inner(), &|id| maps.may_mention(id, &one)).unwrap();
        assert_eq!(some.offsets(*pack), all.offsets(*pack), "pack {pack}");
        least = least.min(some.take_mentions().len());
    }
    assert!(
        packs.len() > 5 && least * 2 < maps.mentions.len(),
        "{least} of {}",
        maps.mentions.len()
    );
    // One that is not known, and packs that there were not, are looked at.
    assert!(maps.may_mention(4711, &BTreeSet::new()));
    let fewer = Known { packs: BTreeSet::new(), ..maps.clone() };
    assert!(
        fewer
            .mentions
            .iter()
            .all(|(id, packs)| packs.is_empty() || fewer.may_mention(*id, &[].into()))
    );
}

/// The prune and the reader are in one process, as in a recorder. A removed pack is closed when no
/// reader holds it.
#[test]
fn a_prune_in_the_same_process_leaves_readers_what_they_have_loaded() {
    let medium = FaultyBackend::default();
    let mut known = store_of(&medium, 9);
    let store = on(&medium).unwrap();
    let gone = known[&CheckpointId(2)].clone();
    let (loaded, disks) =
        (store.load(CheckpointId(2)).unwrap(), store.load_disks(CheckpointId(2)).unwrap());
    forget(&store, &mut known, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let report = prune(&store, 0.0).unwrap();
    assert!(report.removed_packs + report.rewritten_packs > 0, "{report:?}");
    let expected = (0u64..).zip(&gone).filter(|(_, n)| **n != 0).map(|(p, n)| (p, content(*n)));
    assert!(read_image(&loaded).unwrap() == expected.collect());
    let there = |store: &Store| {
        let open = store.inner().open_packs();
        open.iter().all(|number| {
            medium.files().contains_key(&keyframe_store_backend::layout::pack(*number))
        })
    };
    assert!(!there(&store), "the reader holds nothing that is gone: this test looks at nothing");
    drop((loaded, disks));
    add_run(&medium, 3, &mut known);
    forget(&store, &mut known, &[9]);
    prune(&store, 0.0).unwrap();
    assert!(there(&store), "packs that are gone are open");
    assert_kept(&medium, &known, "pruned twice");
}

#[test]
fn a_prune_leaves_damaged_packs_and_reports_them() {
    let base = FaultyBackend::default();
    let mut known = store_of(&base, 10);
    forget(&on(&base).unwrap(), &mut known, &[2, 3, 4, 5]);
    // A record of the first pack that some checkpoint needs.
    let mut hurt = 0;
    for at in (70..18_000).step_by(700) {
        let medium = base.copy();
        let mut pack = medium.files()["packs/00000001.pack"].clone();
        pack[at] ^= 1;
        medium.overwrite("packs/00000001.pack", Some(pack));
        let before = check(&on(&medium).unwrap()).hurt_checkpoints();
        let report = prune(&on(&medium).unwrap(), 0.0).unwrap();
        let after = check(&on(&medium).unwrap()).hurt_checkpoints();
        assert_eq!(after, before, "byte {at}: {report:?}");
        assert_eq!(before.is_empty(), report.damaged.is_empty(), "byte {at}: {report:?}");
        hurt += usize::from(!before.is_empty());
        for (id, image) in known.iter().filter(|(id, _)| !before.contains(id)) {
            assert_image(&on(&medium).unwrap(), *id, image);
        }
    }
    assert!(hurt > 3, "{hurt}");
    // Nothing goes where it is not known what is needed.
    for name in ["checkpoints/0000000008.ckpt", "maps/0000000001.map"] {
        let medium = base.copy();
        let mut bytes = medium.files()[name].clone();
        bytes[50] ^= 1;
        medium.overwrite(name, Some(bytes));
        let files = medium.files();
        let error = prune(&on(&medium).unwrap(), 0.0).unwrap_err();
        assert!(matches!(error, Error::Unreadable { .. } | Error::Damaged { .. }), "{error}");
        assert!(medium.files() == files);
    }
}

#[test]
fn a_run_that_does_not_answer_keeps_its_packs() {
    let medium = FaultyBackend::default();
    let mut known = store_of(&medium, 10);
    let store = on(&medium).unwrap();
    let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    forget(&store, &mut known, &[2, 3, 4, 5, 6]);
    let short = PruneOptions { wait: Duration::from_millis(30), ..options(0.0) };
    let packs = files(&medium, "packs/");
    let report = store.prune_tuned(&short, TINY, &mut |_| {}).unwrap();
    assert!(report.postponed_packs > 0 && report.removed_maps > 0, "{report:?}");
    assert!(packs.iter().all(|pack| medium.files().contains_key(pack)));
    assert!(!medium.files().contains_key("moves"));
    let image = next_image(&[0; PAGES as usize], 5);
    put_changes(&mut run, &[0; PAGES as usize], &image).unwrap();
    known.insert(seal(&mut run, PAGES).unwrap().id, image);
    run.finish().unwrap();
    drop(writer);
    assert_kept(&medium, &known, "postponed");
    assert_eq!(prune(&store, 0.0).unwrap().postponed_packs, 0);
    assert_kept(&medium, &known, "then pruned");
}

const RAM_PAGES: u64 = 10;
const BLOCKS: u64 = 24;

/// A page of the file `n`, shifted by some sectors, so that blocks are put together from others.
fn shifted(n: u64, by: u64) -> Page {
    let mut page = ZERO_PAGE;
    let parts = page.as_chunks_mut::<PART_BYTES>().0.iter_mut();
    for (at, sector) in (n * PARTS as u64 + by..).zip(parts) {
        sector.copy_from_slice(&content(2 * at + 1001)[..PART_BYTES]);
    }
    page
}

/// RAM, and what is known of the disk.
#[derive(Clone)]
struct State {
    ram: Vec<Page>,
    disk: Vec<Option<Page>>,
}

impl State {
    fn blank() -> Self {
        Self { ram: vec![ZERO_PAGE; RAM_PAGES as usize], disk: vec![None; BLOCKS as usize] }
    }
}

/// A run with a disk, whose writer does what chance says, also while a prune is at work.
struct Subject {
    medium: FaultyBackend,
    chance: SeededRandom,
    writer: Option<Writer>,
    run: Option<Run>,
    now: State,
    sealed: State,
    known: BTreeMap<CheckpointId, State>,
}

impl Subject {
    fn new(seed: u64) -> Self {
        let medium = FaultyBackend::default();
        init_on(&medium).unwrap();
        let (now, sealed) = (State::blank(), State::blank());
        let (chance, known) = (SeededRandom(seed), BTreeMap::new());
        let mut this = Self { medium, chance, writer: None, run: None, now, sealed, known };
        this.reopen();
        this
    }

    fn below(&mut self, end: u64) -> u64 {
        self.chance.next_u64() % end
    }

    fn disk() -> DiskMeta {
        let base = BaseMeta { path: "/base".into(), format: "raw".into(), files: Vec::new() };
        DiskMeta {
            name: "d".into(),
            disk_bytes: BLOCKS * PAGE_BYTES as u64,
            base,
            ..DiskMeta::default()
        }
    }

    fn reopen(&mut self) {
        (self.run, self.writer) = (None, None);
        let writer = on(&self.medium).unwrap().lock_writer_tuned("test", TINY).unwrap();
        self.writer = Some(writer);
        self.begin(DiskState::default());
        self.now = State::blank();
        self.sealed = State::blank();
    }

    fn begin(&mut self, disks: DiskState) {
        let writer = self.writer.as_mut().unwrap();
        let run =
            writer.begin_run_with("vm", &layout(RAM_PAGES), vec![Self::disk()], disks).unwrap();
        self.run = Some(run);
    }

    fn put(&mut self) {
        let (n, by) = (self.below(12), self.below(4));
        let run = self.run.as_mut().unwrap();
        match self.chance.next_u64() % 8 {
            0..3 => {
                let page = self.chance.next_u64() % RAM_PAGES;
                run.put_page(PageIndex(page), &shifted(n, 0)).unwrap();
                self.now.ram[page as usize] = shifted(n, 0);
            }
            3 => {
                let page = self.chance.next_u64() % RAM_PAGES;
                // Half of them are like each other.
                let n = if n % 2 == 0 { n } else { 11 + 4 * n };
                run.put_page(PageIndex(page), &content(n)).unwrap();
                self.now.ram[page as usize] = content(n);
            }
            4 => {
                let block = self.chance.next_u64() % (BLOCKS - 3);
                run.put_zero_blocks(0, block, 3).unwrap();
                self.now.disk[block as usize..][..3].fill(Some(ZERO_PAGE));
            }
            _ => {
                let block = self.chance.next_u64() % BLOCKS;
                run.put_block(0, block, &shifted(n, by)).unwrap();
                self.now.disk[block as usize] = Some(shifted(n, by));
            }
        }
    }

    fn seal(&mut self) {
        let id = seal(self.run.as_mut().unwrap(), RAM_PAGES).unwrap().id;
        self.known.insert(id, self.now.clone());
        self.sealed = self.now.clone();
    }

    /// Something that a writer does.
    fn step(&mut self) {
        match self.below(24) {
            0..14 => self.put(),
            14..20 => self.seal(),
            20 => {
                self.run.as_mut().unwrap().abandon();
                self.now = self.sealed.clone();
            }
            21 => {
                let mut run = self.run.take().unwrap();
                let disks = run.disk_state();
                run.finish().unwrap();
                self.begin(disks);
                self.now = State { ram: State::blank().ram, disk: self.sealed.disk.clone() };
                self.sealed = self.now.clone();
            }
            22 => {
                let Some((id, state)) = self.known.iter().next_back() else { return };
                self.run.as_mut().unwrap().put_disks_of(*id).unwrap();
                self.now.disk.clone_from(&state.disk);
            }
            _ => self.reopen(),
        }
    }

    fn forget(&mut self) {
        let newest = self.known.keys().next_back().copied();
        let ids: BTreeSet<_> =
            self.known.keys().copied().filter(|id| Some(*id) != newest).collect();
        let ids: BTreeSet<_> =
            ids.into_iter().filter(|_| self.chance.next_u64().is_multiple_of(2)).collect();
        on(&self.medium).unwrap().forget(&ids).unwrap();
        self.known.retain(|id, _| !ids.contains(id));
    }

    fn prune(&mut self) {
        let max_unused = [0.0, 0.0, 0.2][self.below(3) as usize];
        let store = on(&self.medium).unwrap();
        let recompress_bytes = [0, 0, 20_000, u64::MAX][self.below(4) as usize];
        let options = PruneOptions { recompress_bytes, ..options(max_unused) };
        let report = store.prune_tuned(&options, TINY, &mut |progress| match progress.step {
            PruneStep::Waiting => self.seal(),
            _ => (0..self.below(4)).for_each(|_| self.step()),
        });
        let report = report.unwrap();
        assert!(report.damaged.is_empty() && report.postponed_packs == 0, "{report:?}");
    }

    fn verify(&self) {
        let store = on(&self.medium).unwrap();
        assert_eq!(store.ids().unwrap(), self.known.keys().copied().collect::<Vec<_>>());
        for (id, state) in &self.known {
            let loaded = store.load(*id).unwrap();
            for (page, expected) in (0..).map(PageIndex).zip(&state.ram) {
                assert!(loaded.read_page(page).unwrap() == *expected, "page {} of {id}", page.0);
            }
            let disks = store.load_disks(*id).unwrap();
            let first = disks.meta.blocks_of(0).unwrap().first.0;
            for (block, expected) in (first..).map(PageIndex).zip(&state.disk) {
                let mut page = ZERO_PAGE;
                let found = disks.read_block(block, &mut page).unwrap();
                let found = (found != BlockContent::Base).then_some(page);
                assert!(found == *expected, "block {} of {id}", block.0 - first);
            }
        }
        assert_clean(&store);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// A writer, prunes and forgetting in any order and at once: every checkpoint that is kept is
    /// what was put.
    #[test]
    fn a_run_continues_while_its_records_move(seed in any::<u64>(), rounds in 1usize..4) {
        let mut subject = Subject::new(seed);
        for _ in 0..rounds {
            (0..60).for_each(|_| subject.step());
            subject.forget();
            subject.prune();
            subject.verify();
        }
        (0..30).for_each(|_| subject.step());
        subject.run.take().unwrap().finish().unwrap();
        subject.writer = None;
        subject.verify();
        prune(&on(&subject.medium).unwrap(), 0.0).unwrap();
        subject.verify();
    }
}
