//! The index against a plain map, over a folder that is killed, damaged and pruned under it.
//!
//! The harness plays the packs: what is in them is what is true. The index may know less than they
//! hold where a file was damaged while it was open, never anything else.

use super::spill::BUCKET_BYTES;
use super::*;
use keyframe_store_backend::testing::SeededRandom;
use keyframe_store_format::page_hash::HashKey;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

const STORE: [u8; 16] = [3; 16];
/// The least that there is: some 600 entries in the table.
const BUDGET_BYTES: usize = BUDGET_BYTES_MIN;

fn hash(number: u64) -> PageHash {
    let mut page = [0; 4096];
    page[..8].copy_from_slice(&number.to_le_bytes());
    PageHash::of(&HashKey([1; 32]), &page)
}

fn seal(number: u32) -> PackSeal {
    let mut seal = [7; 16];
    seal[..4].copy_from_slice(&number.to_le_bytes());
    seal
}

/// Packs, as they are in the store, and the index over them.
struct Subject {
    _dir: tempfile::TempDir,
    folder: Folder,
    index: Index,
    chance: SeededRandom,
    /// Closed packs, and the one that is being written.
    packs: BTreeMap<u32, Vec<PackEntry>>,
    open: u32,
    /// What the index has to know: hash and place of all that were inserted and are there.
    model: HashMap<PageHash, Found>,
    /// Packs whose writer died: they may be forgotten when there is no room.
    unfinished: BTreeSet<u32>,
    /// Hashes that were put, and those that were more than once: of such the index may hold another
    /// record, which may go.
    seen: HashSet<PageHash>,
    seen_again: HashSet<PageHash>,
    /// How often the index had to know a page, and how often it did not.
    owed: u64,
    missed: u64,
    /// A file was damaged since the index was opened: it may know less.
    is_hurt: bool,
    /// In a bucket it is found when that is read, by whichever writer.
    is_flipped: bool,
    content: u64,
}

impl Subject {
    fn new(seed: u64, mask: Option<MaskKey>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder { path: dir.path().join("index"), bond: Bond { store: STORE, mask } };
        let index = Index::new(BUDGET_BYTES, Some(folder.clone()));
        let packs = BTreeMap::from([(1, Vec::new())]);
        Self {
            _dir: dir,
            folder,
            index,
            chance: SeededRandom(seed),
            packs,
            open: 1,
            model: HashMap::new(),
            unfinished: BTreeSet::new(),
            seen: HashSet::new(),
            seen_again: HashSet::new(),
            owed: 0,
            missed: 0,
            is_hurt: false,
            is_flipped: false,
            content: 0,
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.chance.next_u64() % end
    }

    /// Puts pages, new ones and such as may be known, as a writer does.
    fn put(&mut self) {
        for _ in 0..self.below(150) {
            self.content += 1;
            let number = if self.below(3) == 0 { self.below(self.content) } else { self.content };
            if self.look(number).is_none() {
                if self.index.is_full() {
                    self.close();
                    self.index.make_room();
                }
                let kind =
                    [RecordKind::Page, RecordKind::Page, RecordKind::Delta, RecordKind::Block]
                        [self.below(4) as usize];
                self.append(hash(number), kind);
            }
        }
    }

    fn append(&mut self, hash: PageHash, kind: RecordKind) {
        let entries = self.packs.get_mut(&self.open).unwrap();
        let place = PageRef::new(self.open, 64 + 40 * entries.len() as u64);
        entries.push(PackEntry::new(hash, place.offset(), kind));
        if !self.seen.insert(hash) {
            self.seen_again.insert(hash);
        }
        self.index.insert(hash, place, kind);
        self.model.insert(hash, Found { place, kind, unproven: false });
    }

    /// What the index says of a page, which must be so.
    fn look(&mut self, number: u64) -> Option<Found> {
        let found = self.index.get(hash(number));
        let expected = self.model.get(&hash(number));
        if let Some(found) = found {
            let entries = self.packs.get(&found.place.pack()).expect("a pack that has gone");
            let entry = entries
                .iter()
                .find(|entry| entry.offset() == found.place.offset())
                .expect("no record");
            assert_eq!((entry.hash, entry.kind()), (hash(number), found.kind));
        }
        let is_owed = expected
            .is_some_and(|expected| !self.unfinished.contains(&expected.place.pack()))
            && !self.is_hurt
            && !self.seen_again.contains(&hash(number));
        self.owed += u64::from(is_owed);
        self.missed += u64::from(is_owed && found.is_none());
        // It may know one more place. But a derived record is relied on only as long as nothing was
        // pruned.
        let is_proven = found.is_some_and(|found| found.kind.is_derived() && !found.unproven);
        assert!(!is_proven || expected == found.as_ref(), "{number}: {found:?}, not {expected:?}");
        found
    }

    fn close(&mut self) {
        self.index.closed(self.open, seal(self.open));
        self.open += 1;
        self.packs.insert(self.open, Vec::new());
    }

    /// Another writer: what was not closed is gone, or was found, as a crash has it.
    fn reopen(&mut self) {
        if self.below(2) == 0 {
            let lost = self.packs.get_mut(&self.open).unwrap();
            let keep = self.chance.next_u64() as usize % (lost.len() + 1);
            lost.truncate(keep);
        }
        self.index = Index::new(BUDGET_BYTES, Some(self.folder.clone()));
        self.unfinished.insert(self.open);
        let (packs, unfinished) = (&self.packs, &self.unfinished);
        let is_closed = |number: u32| packs.contains_key(&number) && !unfinished.contains(&number);
        self.index.load(false, &mut |number| is_closed(number).then(|| seal(number)));
        let mut learnt = 0;
        for (number, entries) in packs.iter().rev() {
            if !self.index.covers(*number) {
                learnt += 1;
                self.index.learn(
                    *number,
                    is_closed(*number).then(|| seal(*number)),
                    entries.iter(),
                );
            }
        }
        assert!(learnt > 0, "the unfinished one");
        self.is_hurt = self.is_flipped;
        self.model.clear();
        for (number, entry) in
            packs.iter().flat_map(|(number, all)| all.iter().map(move |entry| (*number, entry)))
        {
            let place = PageRef::new(number, entry.offset());
            self.model.insert(
                entry.hash,
                Found { place, kind: entry.kind(), unproven: entry.kind().is_derived() },
            );
        }
        self.forgive();
        self.open += 1;
        self.packs.insert(self.open, Vec::new());
    }

    /// Packs go: some of their records move to a new one. A prune beside the writer, or before the
    /// next.
    fn prune(&mut self) {
        self.close();
        let victims: Vec<u32> = self
            .packs
            .keys()
            .copied()
            .filter(|_| self.chance.next_u64().is_multiple_of(4))
            .collect();
        let victims: Vec<u32> = victims.into_iter().filter(|number| *number != self.open).collect();
        let mut moves = Moves { victims: victims.iter().copied().collect(), ..Moves::default() };
        let (new, mut moved) = (self.open, Vec::new());
        for (number, entries) in &self.packs {
            for entry in entries.iter().filter(|_| victims.contains(number)) {
                // A pack that is larger than the table is another matter.
                if self.chance.next_u64().is_multiple_of(2) && moved.len() < 400 {
                    let to = PageRef::new(new, 64 + 40 * moved.len() as u64);
                    moves.to.insert(PageRef::new(*number, entry.offset()), to);
                    moved.push(PackEntry::new(entry.hash, to.offset(), entry.kind()));
                }
            }
        }
        self.packs.insert(new, moved.clone());
        self.open = new + 1;
        self.packs.insert(self.open, Vec::new());
        // As a writer follows.
        let plain: Vec<PackEntry> =
            moved.iter().copied().filter(|entry| !entry.kind().is_derived()).collect();
        let mut index = std::mem::replace(&mut self.index, Index::new(0, None));
        index.learn(new, Some(seal(new)), plain.iter());
        index.follow(&moves);
        self.index = index;
        self.packs.retain(|number, _| !victims.contains(number));
        let still = |found: &mut Found| match moves.place(found.place) {
            MovedPlace::Same => !found.kind.is_derived(),
            MovedPlace::Moved(to) => {
                found.place = to;
                true
            }
            MovedPlace::Gone => false,
        };
        self.model.retain(|_, found| still(found));
        self.forgive();
    }

    /// A derived record may be forgotten by a prune where it need not be: when it was spilled, then
    /// and by all later writers.
    fn forgive(&mut self) {
        let index = &mut self.index;
        self.model.retain(|hash, found| !found.kind.is_derived() || index.get(*hash).is_some());
    }

    /// Something happens to a file: while it is open, or to be found by the next writer.
    fn damage(&mut self) {
        let mut files: Vec<_> =
            std::fs::read_dir(&self.folder.path).into_iter().flatten().flatten().collect();
        files.sort_by_key(std::fs::DirEntry::path);
        let chosen = self.below(files.len().max(1) as u64) as usize;
        let Some(file) = files.get(chosen).map(std::fs::DirEntry::path) else { return };
        let mut bytes = std::fs::read(&file).unwrap();
        match self.below(4) {
            0 => std::fs::remove_file(&file).unwrap(),
            1 => {
                bytes.truncate(self.below(bytes.len() as u64) as usize);
                std::fs::write(&file, bytes).unwrap();
            }
            2 => std::fs::write(self.folder.path.join(".new-torn"), &bytes[..bytes.len() / 2])
                .unwrap(),
            _ => {
                let at = self.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.below(8);
                self.is_flipped = true;
                // In place: the file is open.
                std::fs::write(&file, bytes).unwrap();
            }
        }
        self.is_hurt = true;
    }

    fn look_at_all(&mut self) {
        for number in 0..self.content + 10 {
            self.look(number);
        }
    }
}

#[test]
fn it_answers_as_a_map_does_whatever_happens_to_packs_and_files() {
    let (mut spilled, mut merged, mut lost, mut owed, mut missed) = (0, 0, 0, 0, 0);
    for seed in 0..40 {
        let mask = (seed % 2 == 0).then_some(MaskKey([5; 32]));
        let mut subject = Subject::new(seed * 7919 + 1, mask);
        for _ in 0..60 {
            match subject.below(100) {
                0..60 => subject.put(),
                60..75 => subject.close(),
                75..80 => {
                    subject.close();
                    subject.index.save();
                }
                80..88 => subject.prune(),
                88..93 if seed % 4 > 1 => subject.damage(),
                93..97 => subject.reopen(),
                _ => subject.look_at_all(),
            }
            let usage = subject.index.usage();
            assert!(usage.memory_bytes <= BUDGET_BYTES as u64, "{usage:?}");
            spilled = spilled.max(usage.spilled_entries);
            merged += u64::from(usage.spills >= SPILLS_MAX as u64);
            lost += u64::from(subject.is_hurt);
        }
        subject.look_at_all();
        subject.close();
        subject.index.save();
        subject.reopen();
        subject.look_at_all();
        (owed, missed) = (owed + subject.owed, missed + subject.missed);
    }
    assert!(owed > 50_000 && missed == 0, "{missed} of {owed}");
    assert!(spilled > 2000 && merged > 3 && lost > 3, "{spilled} {merged} {lost}");
}

/// An index of `n` pages, saved in one file.
fn saved(n: u64) -> (Subject, PathBuf) {
    let mut subject = Subject::new(1, None);
    (0..n).for_each(|number| subject.append(hash(number), RecordKind::Page));
    subject.close();
    subject.index.make_room();
    let file = std::fs::read_dir(&subject.folder.path).unwrap().next().unwrap().unwrap().path();
    (subject, file)
}

#[test]
fn no_damaged_byte_and_no_cut_is_believed() {
    let (subject, file) = saved(50);
    let bytes = std::fs::read(&file).unwrap();
    let (mut refused, mut lost) = (0, 0);
    let mut open = |bytes: &[u8], what: &str| {
        std::fs::write(&file, bytes).unwrap();
        let mut index = Index::new(BUDGET_BYTES, Some(subject.folder.clone()));
        index.load(false, &mut |number| Some(seal(number)));
        refused += usize::from(!index.covers(1));
        for number in 0..50 {
            let expected = subject.model[&hash(number)];
            let found = index.get(hash(number));
            assert!(found.is_none_or(|found| found == expected), "{what}: {found:?}");
            lost += usize::from(found.is_none());
        }
        assert!(index.usage().spills == 0 || index.get(hash(51)).is_none());
    };
    open(&bytes, "whole");
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        open(&flipped, &format!("byte {at}"));
        if at % 13 == 0 {
            open(&bytes[..at], &format!("cut at {at}"));
        }
    }
    // All but those in the buckets are found when it is opened: these when a page in one of them is
    // looked for.
    let cuts = bytes.len().div_ceil(13);
    assert_eq!(refused, bytes.len() - 3 * BUCKET_BYTES + cuts);
    assert!(lost >= 50 * refused + 3 * BUCKET_BYTES * 8, "{lost}");
}

#[test]
fn a_spill_of_another_store_or_of_packs_that_are_others_now_is_ignored() {
    let (subject, file) = saved(50);
    let open = |folder: &Folder, seal_of: &mut dyn FnMut(u32) -> Option<PackSeal>| {
        let bytes = std::fs::read(&file).unwrap();
        let mut index = Index::new(BUDGET_BYTES, Some(folder.clone()));
        index.load(false, seal_of);
        std::fs::write(&file, bytes).unwrap();
        (0..50).filter(|number| index.get(hash(*number)).is_some()).count()
    };
    assert_eq!(open(&subject.folder, &mut |number| Some(seal(number))), 50);
    assert_eq!(open(&subject.folder, &mut |number| Some(seal(number + 1))), 0);
    assert_eq!(open(&subject.folder, &mut |_| None), 0);
    let mut other = subject.folder.clone();
    other.bond.store = [4; 16];
    assert_eq!(open(&other, &mut |number| Some(seal(number))), 0);
}

#[test]
fn the_places_in_a_masked_file_are_not_in_clear_and_come_back() {
    let find = |mask: Option<MaskKey>| {
        let mut subject = Subject::new(1, mask);
        (0..500).for_each(|number| subject.append(hash(number), RecordKind::Page));
        let places: Vec<_> = subject.model.values().map(|found| found.place).collect();
        subject.close();
        subject.index.make_room();
        subject.look_at_all();
        let file = std::fs::read_dir(&subject.folder.path).unwrap().next().unwrap().unwrap().path();
        let bytes = std::fs::read(file).unwrap();
        let is_there =
            |place: &PageRef| bytes.windows(8).any(|bytes| bytes == place.0.to_le_bytes());
        places.iter().filter(|place| is_there(place)).count()
    };
    assert_eq!((find(None), find(Some(MaskKey([6; 32])))), (500, 0));
}

#[test]
fn what_is_too_much_is_forgotten_oldest_first() {
    let mut subject = Subject::new(1, None);
    let max = subject.index.spilled_max as u64;
    for number in 0..max * 3 / 2 {
        if subject.index.is_full() {
            subject.close();
            subject.index.make_room();
        }
        subject.append(hash(number), RecordKind::Page);
    }
    let usage = subject.index.usage();
    assert!(
        usage.memory_bytes <= BUDGET_BYTES as u64 && usage.spills <= 2 * SPILLS_MAX as u64,
        "{usage:?}"
    );
    subject.is_hurt = true;
    let is_known: Vec<bool> =
        (0..max * 3 / 2).map(|number| subject.look(number).is_some()).collect();
    let known = is_known.iter().filter(|known| **known).count() as u64;
    assert!(known > max / 2, "{known} of {max}");
    // The last half of what fits is there to the last one.
    assert!(is_known[(max * 3 / 2 - max / 2) as usize..].iter().all(|known| *known));
    let old = is_known[..(max / 4) as usize].iter().filter(|known| **known).count() as u64;
    assert!(old < max / 16, "{old} of {max}");
}

#[test]
fn without_a_folder_it_forgets_and_stays_small() {
    let mut index = Index::new(BUDGET_BYTES, None);
    for number in 0..3000 {
        if index.is_full() {
            index.closed(1, seal(1));
            index.make_room();
        }
        let place = PageRef::new(1, 64 + number * 40);
        index.insert(hash(number), place, RecordKind::Page);
        assert_eq!(
            index.get(hash(number)),
            Some(Found { place, kind: RecordKind::Page, unproven: false })
        );
    }
    assert_eq!(index.get(hash(0)), None);
    assert!(index.usage().memory_bytes < BUDGET_BYTES as u64);
}
