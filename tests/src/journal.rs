//! Checks the records of the guest's `journal` workload in an image, on the host (docs/guests.md
//! defines them).

use crate::hash::mix;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const MAGIC: u64 = 0x304C_4E52_4A66_6B21;
const RECORD_BYTES: usize = 4096;
const RECORD_WORDS: u64 = 512;

/// The state of a ring of records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalImage {
    /// Every record up to this one is there, except those that later ones have overwritten.
    pub whole: u64,
    /// The newest record.
    pub newest: u64,
    /// Blocks that are neither zero nor a complete record that belongs there.
    pub torn: Vec<u64>,
}

impl JournalImage {
    /// Reads the first `mib` MiB of `image`.
    pub fn read(image: &Path, mib: u64) -> Self {
        let file = File::open(image).unwrap_or_else(|e| panic!("open {}: {e}", image.display()));
        let blocks = (mib << 20) / RECORD_BYTES as u64;
        let mut found = Self { whole: u64::MAX, ..Self::default() };
        let mut record = [0u8; RECORD_BYTES];
        for block in 0..blocks {
            file.read_exact_at(&mut record, block * RECORD_BYTES as u64).expect("read the image");
            let number = record_number(&record).filter(|number| number % blocks == block);
            if number.is_none() && record != [0; RECORD_BYTES] {
                found.torn.push(block);
            }
            // The first record that belongs to this block and is not in it yet.
            let missing =
                number.map_or(if block == 0 { blocks } else { block }, |number| number + blocks);
            found.whole = found.whole.min(missing - 1);
            found.newest = found.newest.max(number.unwrap_or(0));
        }
        found
    }

    /// Asserts that no block is torn and that every record up to `synced` is there.
    pub fn assert_whole_to(&self, synced: u64, context: &str) {
        assert!(
            self.torn.is_empty(),
            "{context}: torn blocks {:?}",
            &self.torn[..self.torn.len().min(8)]
        );
        assert!(
            self.whole >= synced,
            "{context}: synced up to {synced}, but whole only to {}",
            self.whole
        );
    }
}

/// The number of a complete record; `None` for other content.
fn record_number(record: &[u8; RECORD_BYTES]) -> Option<u64> {
    let words: Vec<u64> =
        record.chunks_exact(8).map(|b| b.try_into().map_or(0, u64::from_le_bytes)).collect();
    let number = words[1];
    let word = |i: u64| match i {
        0 => MAGIC,
        1 => number,
        _ => mix(GOLDEN.wrapping_mul(number.wrapping_mul(RECORD_WORDS).wrapping_add(i))),
    };
    let (body, last) = words.split_at(RECORD_WORDS as usize - 1);
    let sum = body.iter().copied().fold(0, u64::wrapping_add);
    let whole = (0..).zip(body).all(|(i, is)| *is == word(i)) && last == [mix(sum)];
    (whole && number > 0).then_some(number)
}

/// The last number after `field` (such as `written=`) in the guest's `journal` lines.
pub fn journal_counter(lines: &[String], field: &str) -> u64 {
    let number = |line: &String| {
        let line = line.strip_prefix("journal ")?;
        // Only a complete line ends with this field.
        line.contains(" bad=").then_some(())?;
        line.split(' ').find_map(|word| word.strip_prefix(field))?.parse().ok()
    };
    lines.iter().rev().find_map(number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64) -> [u8; RECORD_BYTES] {
        let mut words = vec![MAGIC, number];
        words.extend(
            (2..RECORD_WORDS - 1).map(|i| mix(GOLDEN.wrapping_mul(number * RECORD_WORDS + i))),
        );
        words.push(mix(words.iter().copied().fold(0, u64::wrapping_add)));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.try_into().expect("a record")
    }

    /// A record that is missing, torn or misplaced would hide a lost write.
    #[test]
    fn missing_torn_and_misplaced_records_are_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("image");
        let look = |records: &[(u64, [u8; RECORD_BYTES])]| {
            let file = File::create(&path).expect("an image");
            file.set_len(1 << 20).expect("its length");
            for (block, bytes) in records {
                file.write_all_at(bytes, block * RECORD_BYTES as u64).expect("write");
            }
            JournalImage::read(&path, 1)
        };
        let all: Vec<_> = (1..=300).map(|n| (n % 256, record(n))).collect();
        assert_eq!(look(&all), JournalImage { whole: 300, newest: 300, torn: vec![] });
        assert_eq!(look(&all[..3]), JournalImage { whole: 3, newest: 3, torn: vec![] });
        let without: Vec<_> =
            all.iter().filter(|(_, bytes)| *bytes != record(290)).copied().collect();
        assert_eq!(look(&without).whole, 289);
        let mut torn = all.clone();
        torn[299].1[3000] ^= 1;
        assert_eq!(look(&torn).torn, [44]);
        let moved = [&all[..], &[(7, record(8))]].concat();
        assert_eq!(look(&moved).torn, [7]);
    }

    #[test]
    fn an_incomplete_line_is_ignored() {
        let lines =
            ["journal written=10 synced=8 bad=0", "journal written=20 syn"].map(String::from);
        assert_eq!(
            (journal_counter(&lines, "written="), journal_counter(&lines, "synced=")),
            (10, 8)
        );
    }
}
