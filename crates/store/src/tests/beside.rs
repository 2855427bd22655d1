//! A prune, a forget and a run at the same time. At each step of the prune, the run seals a
//! checkpoint and others are forgotten. The same on a directory, at full speed.

use super::observed::{ObservedMedium, Observer};
use super::*;
use crate::{PruneOptions, PruneStep, Writer};
use keyframe_locks::IgnorePoison;
use keyframe_store_backend::testing::SeededRandom;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGES: u64 = 12;

/// What is done behind a step of the one that uses a medium.
type Hook = Box<dyn FnMut() + Send>;

/// Counts the looks at a medium, and does something behind one of them.
struct Watched {
    medium: FaultyBackend,
    looks: AtomicU64,
    at: u64,
    hook: Mutex<Hook>,
    /// The lock of the writer cannot be seen.
    hides_lock: bool,
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watched")
    }
}

impl Watched {
    fn new(medium: &FaultyBackend, at: u64, hook: Hook) -> Self {
        let (medium, hook) = (medium.clone(), Mutex::new(hook));
        Self { medium, looks: AtomicU64::new(0), at, hook, hides_lock: false }
    }

    /// Opens the store on the medium.
    fn open_store(self: &Arc<Self>) -> Store {
        Store::open_on(ObservedMedium::new(&self.medium, self), Path::new("memory")).unwrap()
    }
}

impl Observer for Watched {
    fn after_step(&self) {
        if self.looks.fetch_add(1, Ordering::Relaxed) == self.at {
            self.hook.lock().ignore_poison()();
        }
    }

    fn hides_lock(&self) -> bool {
        self.hides_lock
    }
}

/// A run, and what it has sealed.
struct Guest {
    writer: Writer,
    run: Run,
    image: Image,
    chance: SeededRandom,
    known: BTreeMap<CheckpointId, Image>,
}

impl Guest {
    fn begin(medium: &FaultyBackend, seed: u64) -> Self {
        let mut writer = on(medium).unwrap().lock_writer_tuned("test", TINY).unwrap();
        let run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        let image = vec![0; PAGES as usize];
        Self { writer, run, image, chance: SeededRandom(seed), known: BTreeMap::new() }
    }

    fn seal(&mut self) {
        let old = self.image.clone();
        for page in &mut self.image {
            if self.known.is_empty() || self.chance.next_u64().is_multiple_of(3) {
                *page = 1 + self.chance.next_u64() % 60;
            }
        }
        put_changes(&mut self.run, &old, &self.image).unwrap();
        let id = seal(&mut self.run, PAGES).unwrap().id;
        self.known.insert(id, self.image.clone());
    }

    /// Forgets all but the newest.
    fn forget(&mut self, store: &Store) {
        let newest = self.known.keys().next_back().copied();
        let gone: BTreeSet<_> =
            self.known.keys().copied().filter(|id| Some(*id) != newest).collect();
        store.forget(&gone).unwrap();
        self.known.retain(|id, _| Some(*id) == newest);
    }

    fn end(self) -> BTreeMap<CheckpointId, Image> {
        self.run.finish().unwrap();
        drop(self.writer);
        self.known
    }
}

fn locked(guest: &Mutex<Guest>) -> std::sync::MutexGuard<'_, Guest> {
    guest.lock().ignore_poison()
}

/// One prune, behind whose look number `at` a checkpoint is sealed and all others are forgotten;
/// false where it takes fewer looks.
fn pruned_with_a_forget_at(at: u64, recompress_bytes: u64, seed: u64) -> bool {
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    let guest = Arc::new(Mutex::new(Guest::begin(&medium, seed)));
    for _ in 0..7 {
        locked(&guest).seal();
    }
    let (theirs, store) = (Arc::clone(&guest), on(&medium).unwrap());
    let gone: BTreeSet<_> = [2, 3, 5].map(CheckpointId).into();
    store.forget(&gone).unwrap();
    locked(&guest).known.retain(|id, _| !gone.contains(id));
    let hook: Hook = Box::new(move || {
        let mut guest = locked(&theirs);
        guest.seal();
        guest.forget(&store);
    });
    let watched = Arc::new(Watched::new(&medium, at, hook));
    let beside = watched.open_store();
    let options = PruneOptions {
        max_unused: 0.0,
        dry_run: false,
        wait: Duration::from_secs(60),
        recompress_bytes,
    };
    let report = beside.prune_tuned(&options, TINY, &mut |progress| {
        if progress.step == PruneStep::Waiting {
            locked(&guest).seal();
        }
    });
    let context = format!("look {at}, recompress {recompress_bytes}, seed {seed}");
    let report = report.unwrap_or_else(|e| panic!("{context}: {e}"));
    assert!(report.damaged.is_empty(), "{context}: {report:#?}");
    let came = watched.looks.load(Ordering::Relaxed) > at;
    drop(watched);
    locked(&guest).seal();
    drop(beside);
    let guest = Arc::into_inner(guest);
    let Some(guest) = guest else { panic!("{context}: the run is held") };
    let known = guest.into_inner().ignore_poison().end();
    let store = on(&medium).unwrap();
    assert_intact(&store, &known, &context);
    came
}

#[test]
fn checkpoints_stay_intact_if_a_run_seals_and_others_are_forgotten_during_a_prune() {
    for (seed, recompress_bytes) in [(1, 0), (2, u64::MAX), (3, 20_000)] {
        let looks =
            (0..5000).take_while(|at| pruned_with_a_forget_at(*at, recompress_bytes, seed)).count();
        assert!(looks > 80, "only {looks} looks");
    }
}

/// A reader may have a removed pack open under its number, so no other pack may get it. Prunes
/// write packs that the run does not see: copies that the run does not confirm, and packs without
/// records.
#[test]
fn a_run_gives_no_pack_the_number_of_a_removed_one() {
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    let store = on(&medium).unwrap();
    let mut guest = Guest::begin(&medium, 4);
    let mut removed = 0;
    for (wait, max_unused) in [(0, 0.0), (60, 1.0), (60, 0.0)].repeat(8) {
        for _ in 0..4 {
            guest.seal();
        }
        guest.forget(&store);
        let wait = Duration::from_secs(wait);
        let options = PruneOptions { max_unused, dry_run: false, wait, recompress_bytes: 0 };
        let report = store.prune_tuned(&options, TINY, &mut |progress| {
            if progress.step == PruneStep::Waiting {
                guest.seal();
            }
        });
        removed += report.unwrap().removed_packs;
    }
    assert!(removed > 8, "only {removed} packs were removed");
    for (id, image) in &guest.end() {
        assert!(image_is(&store, *id, image).unwrap(), "{id} is not what was put");
    }
    let created = medium.created();
    let numbers: BTreeSet<_> = created.iter().collect();
    assert_eq!(numbers.len(), created.len(), "{created:?}");
}

/// Loads a checkpoint while another process forgets it and prunes, behind look number `at` of the
/// reader; false where a load takes fewer looks.
fn loaded_with_a_forget_and_a_prune_at(at: u64, seed: u64) -> bool {
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    let mut guest = Guest::begin(&medium, seed);
    (0..7).for_each(|_| guest.seal());
    let known = guest.end();
    let loaded = known.keys().copied().nth(3).unwrap();
    let elsewhere = on(&medium).unwrap();
    let others = known.keys().copied().take(4).collect::<BTreeSet<_>>();
    let hook = move || {
        elsewhere.forget(&others).unwrap();
        let options = PruneOptions { max_unused: 0.0, ..PruneOptions::default() };
        elsewhere.prune_tuned(&options, TINY, &mut |_| {}).unwrap();
    };
    let watched = Arc::new(Watched::new(&medium, at, Box::new(hook)));
    let store = watched.open_store();
    match image_is(&store, loaded, &known[&loaded]) {
        Ok(is_same) => assert!(is_same, "look {at}, seed {seed}: it is not what was put"),
        Err(Error::UnknownCheckpoint { .. }) => {}
        Err(error) => panic!("look {at}, seed {seed}: {error}"),
    }
    watched.looks.load(Ordering::Relaxed) > at
}

/// A prune leaves the maps of a forgotten checkpoint incomplete if others need them.
#[test]
fn a_checkpoint_that_is_forgotten_while_it_is_loaded_comes_as_it_was_or_not_at_all() {
    for seed in 0..8 {
        assert!((0..200).any(|at| !loaded_with_a_forget_and_a_prune_at(at, seed)));
    }
}

/// The first writer after power loss examines the checkpoints that did not wait for a sync. A prune
/// that asked for a writer before this one had the lock ends behind look number `at`. False where
/// the writer takes fewer looks.
fn settled_with_a_prune_at(base: &FaultyBackend, known: &[(CheckpointId, Image)], at: u64) -> bool {
    let medium = base.copy_with_same_durability();
    let pruned = Watched { hides_lock: true, ..Watched::new(&medium, u64::MAX, Box::new(|| ())) };
    let pruned = Arc::new(pruned);
    let hook = move || {
        let options = PruneOptions { max_unused: 0.0, ..PruneOptions::default() };
        let report = pruned.open_store().prune_tuned(&options, TINY, &mut |_| {}).unwrap();
        assert!(report.rewritten_packs > 0 && report.rewritten_maps > 0, "{report:#?}");
    };
    let watched = Arc::new(Watched::new(&medium, at, Box::new(hook)));
    let writer = watched.open_store().lock_writer_tuned("test", TINY).unwrap();
    assert!(writer.torn().is_empty(), "look {at}: {:?}", writer.torn());
    drop(writer);
    let store = on(&medium).unwrap();
    assert_images(&store, known.iter().map(|(id, image)| (id, image)), &format!("look {at}"));
    watched.looks.load(Ordering::Relaxed) > at
}

#[test]
fn a_prune_beside_the_first_writer_after_power_loss_makes_no_checkpoint_look_torn() {
    let medium = FaultyBackend::default();
    let store = init_on(&medium).unwrap();
    let images = crash::script(3).concat();
    let mut known = durability::killed_after(&medium, Durability::Never, &images);
    let gone: BTreeSet<CheckpointId> = known.drain(..6).map(|(id, _)| id).collect();
    store.forget(&gone).unwrap();
    // All is on the medium, and the machine has booted again.
    let base = medium.copy().after_power_loss(1);
    let looks = (0..1000).take_while(|at| settled_with_a_prune_at(&base, &known, *at)).count();
    assert!(looks > 20, "only {looks} looks");
}

/// A run whose pack is mostly unused closes it for a prune, which then frees it.
#[test]
fn a_prune_frees_the_pack_that_a_run_writes_to() {
    let medium = FaultyBackend::default();
    init_on(&medium).unwrap();
    let store = on(&medium).unwrap();
    let large = Tuning { pack_bytes_max: 64 << 20, ..TINY };
    let mut writer = on(&medium).unwrap().lock_writer_tuned("test", large).unwrap();
    let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
    let mut images = Vec::new();
    let mut write = |run: &mut Run| {
        let image: Vec<u64> =
            (0..PAGES).map(|page| 1 + page + PAGES * images.len() as u64).collect();
        for (page, number) in image.iter().enumerate() {
            run.put_page(PageIndex(page as u64), &content(*number)).unwrap();
        }
        let id = seal(run, PAGES).unwrap().id;
        images.push((id, image));
        id
    };
    let ids: Vec<_> = (0..8).map(|_| write(&mut run)).collect();
    store.forget(&ids[..7].iter().copied().collect()).unwrap();
    let options = PruneOptions { wait: Duration::ZERO, ..PruneOptions::default() };
    let report = store.prune_tuned(&options, large, &mut |_| ()).unwrap();
    assert_eq!((report.postponed_packs, report.removed_packs), (1, 0), "the run did nothing");
    let options = PruneOptions { wait: Duration::from_secs(60), ..PruneOptions::default() };
    let report = store.prune_tuned(&options, large, &mut |progress| {
        if progress.step == PruneStep::Waiting {
            write(&mut run);
        }
    });
    let report = report.unwrap();
    assert_eq!((report.postponed_packs, report.removed_packs + report.rewritten_packs), (0, 1));
    assert!(report.after_bytes < report.before_bytes, "{report:?}");
    run.finish().unwrap();
    for (id, image) in &images[7..] {
        assert!(image_is(&store, *id, image).unwrap(), "{id} is not what was put");
    }
}

/// What the threads of the test below share. Each opens the store for itself, as processes do.
struct Concurrent {
    path: PathBuf,
    known: Mutex<BTreeMap<CheckpointId, Image>>,
    forgotten: Mutex<BTreeSet<CheckpointId>>,
    ended: AtomicBool,
    /// Removed and rewritten packs.
    pruned: AtomicU64,
    /// Checkpoints that were read.
    read: AtomicU64,
    /// Checkpoints that were forgotten.
    lost: AtomicU64,
}

impl Concurrent {
    fn is_on(&self) -> bool {
        !self.ended.load(Ordering::Relaxed)
    }

    fn counts(&self) -> [u64; 3] {
        [&self.pruned, &self.read, &self.lost].map(|count| count.load(Ordering::Relaxed))
    }

    fn prune(&self) {
        let store = Store::open(&self.path).unwrap();
        let wait = Duration::from_secs(20);
        let options =
            PruneOptions { max_unused: 1.0, dry_run: false, wait, recompress_bytes: 60_000 };
        while self.is_on() {
            let report = store.prune_tuned(&options, TINY, &mut |_| {}).unwrap();
            assert!(report.damaged.is_empty(), "{report:#?}");
            let packs = report.removed_packs + report.rewritten_packs;
            self.pruned.fetch_add(packs, Ordering::Relaxed);
        }
    }

    fn forget(&self) {
        let mut chance = SeededRandom(5);
        while self.is_on() {
            let store = Store::open(&self.path).unwrap();
            let listing = store.checkpoints().unwrap();
            assert!(listing.unreadable.is_empty(), "{:?}", listing.unreadable);
            let mut ids: BTreeSet<_> = listing.sealed.iter().map(|sealed| sealed.id).collect();
            ids.pop_last();
            ids.retain(|_| !chance.next_u64().is_multiple_of(4));
            // Noted before the forget, for a reader that finds the checkpoint gone.
            self.forgotten.lock().unwrap().extend(&ids);
            store.forget(&ids).unwrap();
            self.lost.fetch_add(ids.len() as u64, Ordering::Relaxed);
        }
    }

    fn read(&self) {
        while self.is_on() {
            let store = Store::open(&self.path).unwrap();
            for id in store.ids().unwrap() {
                let Some(image) = self.known.lock().unwrap().get(&id).cloned() else { continue };
                match image_is(&store, id, &image) {
                    Ok(same) => assert!(same, "checkpoint {id} is not what was put"),
                    Err(Error::UnknownCheckpoint { .. }) => {
                        let is_forgotten = self.forgotten.lock().unwrap().contains(&id);
                        assert!(is_forgotten, "checkpoint {id} is gone");
                    }
                    Err(error) => panic!("checkpoint {id}: {error}"),
                }
                self.read.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Seals at least 600 checkpoints. Goes on until each of the others has worked, for at most two
    /// minutes.
    fn run(&self, store: &Store) {
        let _end = End(&self.ended);
        let mut chance = SeededRandom(6);
        let mut writer = store.lock_writer_tuned("test", TINY).unwrap();
        let mut run = writer.begin_run("vm", &layout(PAGES)).unwrap();
        let mut image = vec![0; PAGES as usize];
        let (mut seals, deadline) = (0, Instant::now() + Duration::from_mins(2));
        while seals < 600
            || (self.counts().iter().any(|count| *count <= 10) && Instant::now() < deadline)
        {
            seals += 1;
            let old = image.clone();
            for page in &mut image {
                if chance.next_u64().is_multiple_of(3) {
                    *page = 1 + chance.next_u64() % 90;
                }
            }
            put_changes(&mut run, &old, &image).unwrap();
            let id = seal(&mut run, PAGES).unwrap().id;
            self.known.lock().unwrap().insert(id, image.clone());
        }
        run.finish().unwrap();
    }
}

/// All at once on a real directory: a run that seals as fast as it can, a recompression, a forget,
/// and a reader.
#[test]
fn a_run_a_recompression_a_forget_and_a_reader_work_at_the_same_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let store = Store::init(&path).unwrap();
    let shared = Concurrent {
        path,
        known: Mutex::default(),
        forgotten: Mutex::default(),
        ended: AtomicBool::new(false),
        pruned: AtomicU64::new(0),
        read: AtomicU64::new(0),
        lost: AtomicU64::new(0),
    };
    std::thread::scope(|scope| {
        scope.spawn(|| shared.prune());
        scope.spawn(|| shared.forget());
        scope.spawn(|| shared.read());
        shared.run(&store);
    });
    let counts = shared.counts();
    assert!(counts.iter().all(|count| *count > 10), "packs, reads, forgotten: {counts:?}");
    let store = Store::open(&shared.path).unwrap();
    let (known, forgotten) =
        (shared.known.into_inner().unwrap(), shared.forgotten.into_inner().unwrap());
    let left: BTreeSet<_> = store.ids().unwrap().into_iter().collect();
    assert!(known.keys().all(|id| left.contains(id) != forgotten.contains(id)));
    for id in left {
        assert_image(&store, id, &known[&id]);
    }
    assert_clean(&store);
}

/// Ends the other threads when it is dropped, also after a failure.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
