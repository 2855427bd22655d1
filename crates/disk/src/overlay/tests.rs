//! Compares the overlay with a naive one, and runs it on a medium that loses unsynced data.
#![expect(
    clippy::needless_range_loop,
    clippy::unnecessary_wraps,
    reason = "the oracle indexes sectors, and simulates operations that can fail"
)]

mod slow;

use super::medium::{OverlayFile, OverlayFolder};
use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const BLOCKS: u64 = 24;
const BYTES: u64 = BLOCKS * BLOCK - 1536;

/// A file whose unsynced sectors a crash may lose.
#[derive(Default)]
struct SimFile {
    now: Mutex<Vec<u8>>,
    /// The durable content, and the operations since: offset and bytes, or a new length.
    durable: Mutex<Vec<u8>>,
    since: Mutex<Vec<(u64, Vec<u8>)>>,
}

fn put(bytes: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let end = offset as usize + data.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset as usize..end].copy_from_slice(data);
}

impl SimFile {
    /// Simulates a power loss: each unsynced sector survives if `keep` returns true.
    fn crash(&self, keep: &mut impl FnMut() -> bool) -> Arc<Self> {
        let mut bytes = locked(&self.durable).clone();
        for (offset, data) in locked(&self.since).iter() {
            let mut at = 0;
            while at < data.len() {
                let len = (512 - (*offset as usize + at) % 512).min(data.len() - at);
                if keep() {
                    put(&mut bytes, offset + at as u64, &data[at..at + len]);
                }
                at += len;
            }
        }
        Arc::new(Self {
            now: Mutex::new(bytes.clone()),
            durable: Mutex::new(bytes),
            since: Mutex::default(),
        })
    }
}

#[derive(Default)]
struct SimFolder {
    files: Mutex<BTreeMap<String, Arc<SimFile>>>,
    /// The names before an unsynced rename.
    before: Mutex<Option<BTreeMap<String, Arc<SimFile>>>>,
    /// The number of operations that succeed. After them all fail.
    budget: Arc<Mutex<Option<u64>>>,
    /// If true, a failure is a full disk, and the next operation succeeds.
    full: Arc<Mutex<bool>>,
    boot: u64,
}

struct SimHandle {
    file: Arc<SimFile>,
    budget: Arc<Mutex<Option<u64>>>,
    full: Arc<Mutex<bool>>,
}

fn spend(budget: &Mutex<Option<u64>>, full: &Mutex<bool>) -> Result<()> {
    let mut budget = locked(budget);
    match budget.as_mut() {
        Some(0) if *locked(full) => {
            *budget = Some(12);
            Err(Error::io("sim", "write")(std::io::Error::from_raw_os_error(28)))
        }
        Some(0) => Err(Error::io("sim", "anything")(std::io::Error::from_raw_os_error(5))),
        Some(left) => {
            *left -= 1;
            Ok(())
        }
        None => Ok(()),
    }
}

impl OverlayFile for SimHandle {
    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let now = locked(&self.file.now);
        for (i, byte) in buf.iter_mut().enumerate() {
            *byte = now.get(offset as usize + i).copied().unwrap_or(0);
        }
        Ok(())
    }

    fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let spent = spend(&self.budget, &self.full);
        // A failed write may have written a part.
        let sectors = (offset as usize + buf.len() / 2) / 512 * 512;
        let buf = if spent.is_ok() { buf } else { &buf[..sectors.saturating_sub(offset as usize)] };
        let mut now = locked(&self.file.now);
        put(&mut now, offset, buf);
        // A medium holds whole sectors, with their content in memory at some time.
        let start = offset / 512 * 512;
        let end = (offset + buf.len() as u64).next_multiple_of(512).min(now.len() as u64);
        locked(&self.file.since).push((start, now[start as usize..end as usize].to_vec()));
        spent
    }

    fn sync(&self) -> Result<()> {
        if !*locked(&self.full) {
            spend(&self.budget, &self.full)?;
        }
        locked(&self.file.durable).clone_from(&locked(&self.file.now));
        locked(&self.file.since).clear();
        Ok(())
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(locked(&self.file.now).len() as u64)
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        locked(&self.file.now).resize(len_bytes as usize, 0);
        // A new length counts as durable after the next sync. Until then both lengths are possible,
        // and the longer one is the harder case.
        Ok(())
    }
}

impl OverlayFolder for SimFolder {
    fn name(&self) -> String {
        "sim".into()
    }

    fn open(&self, name: &str) -> Result<Arc<dyn OverlayFile>> {
        let file = Arc::clone(locked(&self.files).entry(name.into()).or_default());
        Ok(Arc::new(SimHandle {
            file,
            budget: Arc::clone(&self.budget),
            full: Arc::clone(&self.full),
        }))
    }

    fn replace(&self, from: &str, to: &str) -> Result<()> {
        spend(&self.budget, &self.full)?;
        let mut files = locked(&self.files);
        locked(&self.before).get_or_insert_with(|| files.clone());
        let file = files.remove(from).unwrap();
        files.insert(to.into(), file);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        if !*locked(&self.full) {
            spend(&self.budget, &self.full)?;
        }
        *locked(&self.before) = None;
        Ok(())
    }

    fn boot_seed(&self) -> Result<u64> {
        Ok(self.boot)
    }
}

impl SimFolder {
    fn crash(&self, keep: &mut impl FnMut() -> bool) -> Arc<Self> {
        let before = locked(&self.before).clone().filter(|_| keep());
        let files = before.unwrap_or_else(|| locked(&self.files).clone());
        let files = files.iter().map(|(name, file)| (name.clone(), file.crash(keep))).collect();
        Arc::new(Self { files: Mutex::new(files), boot: self.boot + 1, ..Self::default() })
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, len: u64, tag: u8 },
    Zero { offset: u64, len: u64 },
    Discard { offset: u64, len: u64 },
    Cut,
    Release(usize),
    GiveBack(usize),
    Sync,
    Reopen,
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    let any = (0..BYTES, 1..5 * BLOCK).prop_map(|(offset, len)| (offset, len.min(BYTES - offset)));
    let whole = (0..BLOCKS - 1, 1..5u64)
        .prop_map(|(block, n)| (block * BLOCK, (n * BLOCK).min(BYTES - block * BLOCK)));
    prop_oneof![any, whole]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (range(), 1u8..).prop_map(|((offset, len), tag)| Step::Write { offset, len, tag }),
        2 => range().prop_map(|(offset, len)| Step::Zero { offset, len }),
        2 => range().prop_map(|(offset, len)| Step::Discard { offset, len }),
        3 => Just(Step::Cut),
        2 => (0usize..4).prop_map(Step::Release),
        1 => (0usize..4).prop_map(Step::GiveBack),
        3 => Just(Step::Sync),
        1 => Just(Step::Reopen),
    ]
}

fn base_byte(at: u64) -> u8 {
    (at / 97 % 251) as u8
}

fn read_below(at: u64, buf: &mut [u8]) -> Result<()> {
    buf.iter_mut().enumerate().for_each(|(i, byte)| {
        *byte = if at + (i as u64) < BYTES { base_byte(at + i as u64) } else { 0 }
    });
    Ok(())
}

fn content(overlay: &Overlay) -> Vec<u8> {
    let mut all = vec![0; BYTES as usize];
    for (start, len) in overlay.read(0, &mut all).unwrap() {
        read_below(start as u64, &mut all[start..start + len]).unwrap();
    }
    all
}

/// The overlay's specification in its simplest form: whole copies.
struct Naive {
    now: Vec<u8>,
    dirty: Vec<bool>,
    epochs: Vec<(DiskEpoch, Vec<u8>, Vec<bool>)>,
}

impl Naive {
    fn mark(&mut self, offset: u64, len: u64) {
        for block in offset / BLOCK..(offset + len).div_ceil(BLOCK) {
            self.dirty[block as usize] = true;
        }
    }
}

/// Performs a step on both. The error is the overlay's.
fn apply(step: &Step, overlay: &Overlay, naive: &mut Naive) -> Result<()> {
    match *step {
        Step::Write { offset, len, tag } => {
            let data: Vec<u8> = (0..len).map(|i| tag.wrapping_add((i / 512) as u8)).collect();
            overlay.write(offset, &data, &read_below)?;
            naive.now[offset as usize..(offset + len) as usize].copy_from_slice(&data);
            naive.mark(offset, len);
        }
        Step::Zero { offset, len } => {
            overlay.zero(offset, len, &read_below)?;
            naive.now[offset as usize..(offset + len) as usize].fill(0);
            naive.mark(offset, len);
        }
        Step::Discard { offset, len } => {
            overlay.discard(offset, len)?;
            let end = if offset + len == BYTES { BYTES } else { (offset + len) / BLOCK * BLOCK };
            let start = offset.next_multiple_of(BLOCK);
            if start < end {
                naive.now[start as usize..end as usize].fill(0);
                naive.mark(start, end - start);
            }
        }
        Step::Cut => {
            let epoch = overlay.cut()?;
            let dirty = std::mem::replace(&mut naive.dirty, vec![false; BLOCKS as usize]);
            naive.epochs.push((epoch, naive.now.clone(), dirty));
        }
        Step::Release(which) if which < naive.epochs.len() => {
            let (epoch, _, _) = naive.epochs.remove(which);
            overlay.release(epoch)?;
            assert!(
                overlay.release(epoch).is_err() && overlay.pages(epoch, DiskBlock(0), 1).is_err()
            );
        }
        Step::GiveBack(which) if which < naive.epochs.len() => {
            let (epoch, _, dirty) = naive.epochs.remove(which);
            overlay.give_back(epoch)?;
            dirty.iter().enumerate().for_each(|(block, dirty)| naive.dirty[block] |= dirty);
        }
        Step::Sync => overlay.sync()?,
        Step::Release(_) | Step::GiveBack(_) | Step::Reopen => {}
    }
    Ok(())
}

fn check_epochs(overlay: &Overlay, naive: &Naive) {
    for (epoch, then, dirty) in &naive.epochs {
        let (mut seen, mut from) = (vec![false; BLOCKS as usize], Some(DiskBlock(0)));
        while let Some(at) = from {
            let (extents, next) = overlay.pages(*epoch, at, 2).unwrap();
            for extent in extents {
                for i in 0..extent.blocks {
                    let block = (extent.block.0 + i) as usize;
                    assert!(
                        !std::mem::replace(&mut seen[block], true),
                        "block {block} of {epoch} twice"
                    );
                    let mut page = [0u8; BLOCK_BYTES];
                    if let Some(slot) = extent.slot {
                        overlay.read_slot(Slot(slot.0 + i as u32), &mut page).unwrap();
                    }
                    let start = block * BLOCK_BYTES;
                    let end = then.len().min(start + BLOCK_BYTES);
                    assert!(
                        page[..end - start] == then[start..end],
                        "block {block} of epoch {epoch}"
                    );
                }
            }
            from = next;
        }
        assert_eq!(&seen, dirty, "what epoch {epoch} covers");
    }
}

fn fresh() -> (Arc<SimFolder>, Overlay, Naive) {
    let folder = Arc::new(SimFolder::default());
    let overlay = Overlay::on(folder.clone(), Some(BYTES)).unwrap();
    let mut now = vec![0; BYTES as usize];
    read_below(0, &mut now).unwrap();
    (folder, overlay, Naive { now, dirty: vec![false; BLOCKS as usize], epochs: Vec::new() })
}

/// As [`fresh`], but the journal is rewritten all the time.
fn fresh_short() -> (Arc<SimFolder>, Overlay, Naive) {
    let all = fresh();
    locked(&all.1.syncing).journal.rewrite_from(300);
    all
}

/// All blocks in the overlay count as written after it was opened.
fn all_dirty(overlay: &Overlay, naive: &mut Naive) {
    naive.epochs.clear();
    naive.dirty.fill(false);
    let mut from = DiskBlock(0);
    while let Some((block, blocks)) = overlay.next(from) {
        naive.mark(block.0 * BLOCK, (blocks * BLOCK).min(BYTES - block.0 * BLOCK));
        from = DiskBlock(block.0 + blocks);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn agrees_with_a_naive_overlay(steps in prop::collection::vec(step(), 1..60)) {
        let (folder, mut overlay, mut naive) = fresh_short();
        for step in steps {
            if matches!(step, Step::Reopen) {
                // As after `kill -9`: nothing is synced before.
                drop(overlay);
                overlay = Overlay::on(folder.clone(), Some(BYTES)).unwrap();
                all_dirty(&overlay, &mut naive);
            } else {
                apply(&step, &overlay, &mut naive).unwrap();
            }
            prop_assert!(content(&overlay) == naive.now, "after {:?}", step);
            check_epochs(&overlay, &naive);
        }
        // Slots do not leak: after a sync, slots without readers are free.
        overlay.cut().unwrap();
        overlay.release_all();
        overlay.sync().unwrap();
        let mut held = 0;
        overlay.status(DiskBlock(0), BLOCKS, &mut |_, n, zero| held += if zero == Some(false) { n } else { 0 });
        let size = overlay.size();
        prop_assert_eq!(size.data_bytes - size.free_bytes, held * BLOCK);
    }

    /// After a power loss at any operation, each sector holds a content that it had at the last
    /// successful sync or later.
    #[test]
    fn keeps_what_was_synced(
        steps in prop::collection::vec(step(), 1..40), budget in 0u64..120, seed in any::<u64>(),
    ) {
        let (folder, overlay, mut naive) = fresh_short();
        *locked(&folder.budget) = Some(budget);
        let sectors = (BYTES / 512) as usize;
        let sector = |bytes: &[u8], i: usize| bytes[i * 512..(i + 1) * 512].to_vec();
        // The contents that each sector may hold: that of the last sync, and all later ones.
        let mut may: Vec<Vec<Vec<u8>>> = (0..sectors).map(|i| vec![sector(&naive.now, i)]).collect();
        for step in &steps {
            let before = naive.now.clone();
            let done = apply(step, &overlay, &mut naive);
            if done.is_err() {
                // After a failed step each sector may be written. A second, healthy disk shows the
                // content after the step.
                let (_, healthy, mut after) = fresh();
                after.now = before;
                let _ = healthy.write(0, &after.now, &read_below);
                let _ = apply(step, &healthy, &mut after);
                (0..sectors).for_each(|i| may[i].push(sector(&after.now, i)));
                break;
            }
            for i in 0..sectors {
                let now = sector(&naive.now, i);
                if matches!(step, Step::Sync) {
                    may[i].clear();
                }
                if may[i].last() != Some(&now) {
                    may[i].push(now);
                }
            }
        }
        let mut random = seed | 1;
        let mut keep = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            random >> 63 == 0
        };
        let after = Overlay::on(folder.crash(&mut keep), Some(BYTES)).unwrap();
        let now = content(&after);
        for (i, may) in may.iter().enumerate() {
            prop_assert!(may.contains(&sector(&now, i)), "sector {} holds what it never did since the last sync", i);
        }
    }

    /// A full disk fails requests and has no other effect: after there is space, all goes on.
    #[test]
    fn a_full_disk_passes(steps in prop::collection::vec(step(), 1..40), budget in 0u64..20) {
        let (folder, overlay, mut naive) = fresh_short();
        *locked(&folder.full) = true;
        *locked(&folder.budget) = Some(budget);
        for step in &steps {
            let mut tries = 0;
            while let Err(error) = apply(step, &overlay, &mut naive) {
                prop_assert!(error.is_disk_full(), "{}", error);
                tries += 1;
                prop_assert!(tries < 50);
            }
        }
        prop_assert!(content(&overlay) == naive.now);
        check_epochs(&overlay, &naive);
        let mut tries = 0;
        while overlay.sync().is_err() {
            tries += 1;
            prop_assert!(tries < 50);
        }
        let after = Overlay::on(folder.crash(&mut || false), Some(BYTES)).unwrap();
        prop_assert!(content(&after) == naive.now, "lost after a full disk");
    }
}

/// Writes a few batches. Returns the journal's bytes and the content after each sync.
fn journal_of_batches() -> (Arc<SimFolder>, Vec<(usize, Vec<u8>)>) {
    let (folder, overlay, _) = fresh();
    let mut states = vec![(journal::HEADER_BYTES, content(&overlay))];
    for round in 0..6u8 {
        for block in 0..3u64 {
            let at = (u64::from(round) * 2 + block * 5) * BLOCK;
            overlay.write(at, &[round + 1; 4096], &read_below).unwrap();
        }
        overlay.zero(u64::from(round) * BLOCK, BLOCK, &read_below).unwrap();
        // A new epoch, so that slots change.
        overlay.cut().unwrap();
        overlay.sync().unwrap();
        states.push((folder.bytes("journal").len(), content(&overlay)));
    }
    (folder, states)
}

impl SimFolder {
    fn bytes(&self, name: &str) -> Vec<u8> {
        locked(&locked(&self.files)[name].now).clone()
    }

    /// A copy with another journal.
    fn with_journal(&self, bytes: Vec<u8>) -> Arc<Self> {
        let copy = self.crash(&mut || true);
        *locked(&locked(&copy.files)["journal"].now) = bytes;
        copy
    }
}

#[test]
fn a_journal_torn_at_any_byte_gives_the_last_whole_state() {
    let (folder, states) = journal_of_batches();
    let journal = folder.bytes("journal");
    for len in journal::HEADER_BYTES..=journal.len() {
        let torn = folder.with_journal(journal[..len].to_vec());
        let (_, expected) = states.iter().rev().find(|(end, _)| *end <= len).unwrap();
        let overlay = Overlay::on(torn.clone(), Some(BYTES)).unwrap();
        // The content of the last state is exact, because no later state reuses its slots.
        assert!(content(&overlay) == *expected, "torn at {len}");
        overlay.write(0, &[9; 4096], &read_below).unwrap();
        overlay.sync().unwrap();
        let mut then = expected.clone();
        then[..4096].fill(9);
        drop(overlay);
        assert!(
            content(&Overlay::on(torn, Some(BYTES)).unwrap()) == then,
            "written after the tear at {len}"
        );
    }
}

#[test]
fn a_flipped_byte_is_damage_or_the_torn_end_and_never_other_content() {
    let (folder, states) = journal_of_batches();
    let journal = folder.bytes("journal");
    let (last_start, before_last) = &states[states.len() - 2];
    for at in 0..journal.len() {
        let mut bytes = journal.clone();
        bytes[at] ^= 0x40;
        match Overlay::on(folder.with_journal(bytes), Some(BYTES)) {
            // The last batch cannot be distinguished from one that was being written.
            Ok(overlay) => {
                assert!(at >= *last_start && content(&overlay) == *before_last, "byte {at}");
            }
            Err(error) => {
                assert!(
                    at < *last_start && error.to_string().contains("journal"),
                    "byte {at}: {error}"
                );
            }
        }
    }
}

#[test]
fn a_long_journal_is_rewritten_with_the_same_content() {
    let (folder, overlay, mut naive) = fresh();
    let mut random = 1u64;
    let mut longest = 0;
    for _ in 0..60_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let block = (random >> 33) % (BLOCKS - 1);
        // Only zeros, which become records without a new epoch.
        overlay.zero(block * BLOCK, BLOCK, &read_below).unwrap();
        naive.now[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize].fill(0);
        overlay.write(block * BLOCK, &[random as u8; 4096], &read_below).unwrap();
        naive.now[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize].fill(random as u8);
        overlay.sync().unwrap();
        longest = longest.max(locked(&folder.files)["journal"].now.lock().unwrap().len());
    }
    let now = folder.bytes("journal").len();
    assert!(longest > 4_000_000 && now < longest, "it was to be rewritten: {now} of {longest}");
    drop(overlay);
    assert!(content(&Overlay::on(folder, Some(BYTES)).unwrap()) == naive.now);
}

#[test]
fn an_overlay_is_for_one_disk_and_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("o");
    let overlay = Overlay::create(&path, 1 << 20, Lasting::Durable).unwrap();
    assert!(matches!(Overlay::create(&path, 1 << 20, Lasting::Durable), Err(Error::Locked { .. })));
    overlay.write(0, &[1; 4096], &read_below).unwrap();
    overlay.sync().unwrap();
    drop(overlay);
    let error = Overlay::create(&path, 2 << 20, Lasting::Durable).err().unwrap().to_string();
    assert!(error.contains("1048576") && error.contains("2097152"), "{error}");
    assert!(Overlay::open(dir.path()).is_err(), "no overlay there");
    assert_eq!(Overlay::open(&path).unwrap().disk_bytes(), 1 << 20);
}

#[test]
fn epochs_in_flight_are_bounded() {
    let (_, overlay, _) = fresh();
    let epochs: Vec<DiskEpoch> = (0..EPOCHS_MAX).map(|_| overlay.cut().unwrap()).collect();
    assert!(matches!(overlay.cut(), Err(Error::Limit { .. })));
    overlay.release(epochs[0]).unwrap();
    overlay.cut().unwrap();
}
