use super::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tempfile::NamedTempFile;

const BLOCKS: u64 = 700;

/// What an encoder has put, in place of a store.
#[derive(Default)]
struct Stored {
    blocks: BTreeMap<u64, Vec<u8>>,
    /// How many blocks were put that are not zero.
    put: u64,
}

impl BlockSink for Stored {
    fn put_block(&mut self, _: usize, block: u64, content: &Page) -> Result<(), BoxError> {
        self.put += u64::from(*content != [0; PAGE_BYTES]);
        self.blocks.insert(block, content.to_vec());
        Ok(())
    }

    fn put_zero_blocks(&mut self, _: usize, block: u64, blocks: u64) -> Result<(), BoxError> {
        (block..block + blocks).for_each(|block| drop(self.blocks.remove(&block)));
        Ok(())
    }
}

impl Stored {
    fn image(&self, len: usize) -> Vec<u8> {
        let mut image = vec![0; BLOCKS as usize * PAGE_BYTES];
        for (block, content) in &self.blocks {
            let at = *block as usize * PAGE_BYTES;
            image[at..at + PAGE_BYTES].copy_from_slice(content);
        }
        image.truncate(len);
        image
    }
}

/// A file of `disk_bytes`, which ends within a block, with its recorder, and a descriptor that was
/// opened after it. `Err` with the reason if this machine cannot record writes.
struct Bed {
    file: NamedTempFile,
    copies: CopyBeforeWrite,
    writer: File,
}

const DISK_BYTES: u64 = BLOCKS * PAGE_BYTES as u64 - 1024;

impl Bed {
    fn new(disk_bytes: u64) -> Result<Self, DiskError> {
        let file = NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(disk_bytes).unwrap();
        let copies = CopyBeforeWrite::over(&[(file.path(), disk_bytes)])?;
        let writer = File::options().write(true).open(file.path()).unwrap();
        Ok(Self { file, copies, writer })
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(self.file.path()).unwrap()
    }

    fn write(&self, block: u64, value: u8) {
        let len = (DISK_BYTES - block * PAGE_BYTES as u64).min(PAGE_BYTES as u64) as usize;
        self.writer.write_all_at(&vec![value; len], block * PAGE_BYTES as u64).unwrap();
    }

    /// Cuts and reads the file. Returns the blocks of the cut.
    fn checkpoint(&self, stored: &mut Stored) -> Result<CutBlocks, BoxError> {
        let (cut, number) = self.copies.begin(true);
        let blocks = self.copies.cut(&number)?;
        cut.put(stored, &mut || Ok(())).map(|()| blocks)
    }
}

/// Ends the writer also if the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

macro_rules! needs_bed {
    ($disk_bytes:expr) => {
        match Bed::new($disk_bytes) {
            Ok(bed) => bed,
            Err(error) => keyframe_testing::skip!("{error}"),
        }
    };
}

#[test]
fn a_cut_is_the_file_of_its_instant_whatever_is_written_meanwhile() {
    let bed = needs_bed!(DISK_BYTES);
    let (stands, ends, writes) = (Mutex::new(()), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = 1u64;
            while !ends.load(Ordering::Relaxed) {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (at, len) = (random >> 33, (random >> 20) % 9000 + 1);
                let at = at % (DISK_BYTES - len);
                let _stands = stands.lock().unwrap();
                let value = (random >> 56) as u8;
                bed.writer.write_all_at(&vec![value; len as usize], at).unwrap();
                writes.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _ends = Ends(&ends);
        let mut stored = Stored::default();
        for round in 0..40 {
            let (cut, number) = bed.copies.begin(round > 0);
            let then = {
                let _stands = stands.lock().unwrap();
                bed.copies.cut(&number).unwrap();
                bed.content()
            };
            let before = writes.load(Ordering::Relaxed);
            // The file is read while it is written.
            while writes.load(Ordering::Relaxed) < before + 3 {
                std::thread::yield_now();
            }
            cut.put(&mut stored, &mut || Ok(())).unwrap();
            assert!(stored.image(then.len()) == then, "round {round}: another content");
        }
    });
}

#[test]
fn a_cut_has_what_was_written_and_a_lost_one_is_owed() {
    let bed = needs_bed!(DISK_BYTES);
    let mut stored = Stored::default();
    bed.write(3, 1);
    bed.checkpoint(&mut stored).unwrap();
    assert_eq!(stored.put, 1);
    bed.write(5, 2);
    bed.write(BLOCKS - 1, 3);
    let lost = bed.checkpoint(&mut Stored::default()).unwrap();
    bed.write(6, 4);
    bed.copies.owe(&lost);
    let before = stored.put;
    bed.checkpoint(&mut stored).unwrap();
    assert_eq!(stored.put - before, 3);
    assert!(stored.image(DISK_BYTES as usize) == bed.content());
}

#[test]
fn an_encoder_that_is_much_too_slow_loses_its_cut_and_no_write_waits_for_ever() {
    let blocks = SAVED_BLOCKS_MAX as u64 + 8;
    let bed = needs_bed!(blocks * PAGE_BYTES as u64);
    let (cut, number) = bed.copies.begin(false);
    let owed = bed.copies.cut(&number).unwrap();
    let began = Instant::now();
    bed.writer.write_all_at(&vec![7; blocks as usize * PAGE_BYTES], 0).unwrap();
    assert!(began.elapsed() >= WAIT_MAX, "it waits for the encoder before it gives up");
    let error = cut.put(&mut Stored::default(), &mut || Ok(())).unwrap_err();
    assert!(error.to_string().contains("faster than the store"), "{error}");
    assert!(cut.put(&mut Stored::default(), &mut || Ok(())).is_err(), "it stays lost");
    drop(cut);
    assert!(bed.copies.is_read());
    bed.copies.owe(&owed);
    let mut stored = Stored::default();
    bed.checkpoint(&mut stored).unwrap();
    assert_eq!(stored.put, blocks);
}

#[test]
fn a_write_that_was_not_reported_fails_the_next_cut() {
    let file = NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(DISK_BYTES).unwrap();
    // The kernel reports nothing of a descriptor that was open before.
    let unseen = file.reopen().unwrap();
    let copies = match CopyBeforeWrite::over(&[(file.path(), DISK_BYTES)]) {
        Ok(copies) => copies,
        Err(error) => keyframe_testing::skip!("{error}"),
    };
    // Of a fresh recorder nothing is known yet.
    let (cut, number) = copies.begin(false);
    copies.cut(&number).unwrap();
    cut.put(&mut Stored::default(), &mut || Ok(())).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    unseen.write_all_at(&[1; 512], 0).unwrap();
    let (_cut, number) = copies.begin(false);
    let error = copies.cut(&number).unwrap_err().to_string();
    assert!(error.contains("reported no write") && copies.is_broken(), "{error}");
}

#[test]
fn a_cut_that_is_dropped_is_over_and_one_that_has_ended_is_not_read() {
    let bed = needs_bed!(DISK_BYTES);
    let (cut, number) = bed.copies.begin(false);
    bed.copies.cut(&number).unwrap();
    assert!(!bed.copies.is_read());
    let (_, second) = bed.copies.begin(false);
    assert!(bed.copies.cut(&second).is_err(), "one after the other");
    drop(cut);
    assert!(bed.copies.is_read());
    let (cut, number) = bed.copies.begin(false);
    bed.copies.cut(&number).unwrap();
    bed.copies.end_cut();
    assert!(cut.put(&mut Stored::default(), &mut || Ok(())).is_err());
}
