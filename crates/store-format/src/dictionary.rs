//! The dictionary of a recompressed pack, and compression of pages with it.
//!
//! ```text
//!   pages that move ──samples──▶ train ──▶ DenseCompressor ──pages, one by one──▶ payloads   its dictionary goes to the pack's head
//!   a pack's head ──▶ Dictionary ──payloads──▶ pages
//! ```
//!
//! One page repeats little. The dictionary holds what pages have in common. So each page stays a
//! record of its own, which is read and checked without its neighbours, and takes about as many
//! bytes as in a block of sixteen pages compressed together (`docs/design/encoding.md`).
//!
//! Invariants: the output of decompression is bounded by the caller's buffer, whatever the bytes
//! say. A dictionary belongs to one pack, so packs can be removed independently of each other.

use keyframe_pages::bytes::Problem;
use keyframe_units::Page;
use std::cell::RefCell;
use zstd::zstd_safe::{
    CCtx, CDict, DCtx, DDict, compress_bound, get_error_name, train_from_buffer,
};

/// The largest length of a dictionary, in bytes.
pub const DICTIONARY_BYTES_MAX: usize = 64 << 10;
/// The largest number of pages that train one dictionary.
pub const SAMPLES_MAX: usize = 1600;
/// The fewest samples that are worth a dictionary.
const SAMPLES_MIN: usize = 64;
/// The samples are this many times longer than the dictionary.
const SAMPLE_PART: usize = 25;
/// The zstd level. Higher ones cost much time for few bytes (`docs/design/encoding.md`).
const LEVEL: i32 = 3;
/// One in this many samples is kept out of the training, to compare compression with and without
/// the dictionary.
const TRIED_STEP: usize = 13;
/// The place of its id in a trained dictionary. Each payload would repeat it. A pack has one
/// dictionary, so the id is set to zero.
const NUMBER: std::ops::Range<usize> = 4..8;

thread_local! {
    /// The decompression context of a thread. The dictionary comes with each call.
    static READER: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// The dictionary that the pages of a pack are decompressed with.
pub struct Dictionary(DDict<'static>);

impl Dictionary {
    /// Makes the dictionary from the bytes in a pack's head, which may be empty. Error: zstd
    /// refuses the dictionary.
    pub fn new(bytes: &[u8]) -> Result<Self, Problem> {
        DDict::try_create(bytes).map(Self).ok_or_else(|| "its dictionary is not one of zstd".into())
    }

    /// Restores `out`, which the payload must fill exactly. Error: the payload is malformed or has
    /// another length.
    pub fn decompress(&self, stored: &[u8], out: &mut [u8]) -> Result<(), Problem> {
        let len = READER
            .with_borrow_mut(|reader| reader.decompress_using_ddict(out, stored, &self.0))
            .map_err(|code| format!("zstd: {}", get_error_name(code)))?;
        if len == out.len() {
            Ok(())
        } else {
            Err(format!("zstd gave {len} bytes for {}", out.len()))
        }
    }
}

impl std::fmt::Debug for Dictionary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Dictionary")
    }
}

/// Compresses pages with zstd and a dictionary.
pub struct DenseCompressor {
    bytes: Vec<u8>,
    dictionary: Option<CDict<'static>>,
    context: CCtx<'static>,
    buffer: Vec<u8>,
}

impl DenseCompressor {
    /// Trains a dictionary of at most `bytes_max` bytes with `samples`, and creates a compressor
    /// with it. The compressor has no dictionary if there are too few samples, or if pages outside
    /// the training become larger with it.
    pub fn train(samples: &[Page], bytes_max: usize) -> Self {
        let mut alone = Self::with(Vec::new(), None);
        if samples.len() < SAMPLES_MIN {
            return alone;
        }
        // The dictionary fits the pages that it was trained with too well to be judged by them.
        let is_tried = |at: &usize| at.is_multiple_of(TRIED_STEP);
        let taught: Vec<Page> = samples
            .iter()
            .enumerate()
            .filter(|(at, _)| !is_tried(at))
            .map(|(_, page)| *page)
            .collect();
        let Some(mut trained) = Self::teach(&taught, bytes_max) else { return alone };
        let all_of = |dense: &mut Self| -> usize {
            let tried = samples.iter().step_by(TRIED_STEP);
            tried.map(|page| dense.compress(page).map_or(page.len(), <[u8]>::len)).sum()
        };
        if all_of(&mut trained) < all_of(&mut alone) { trained } else { alone }
    }

    fn teach(samples: &[Page], bytes_max: usize) -> Option<Self> {
        let worth = size_of_val(samples) / SAMPLE_PART;
        let mut bytes = vec![0; worth.min(DICTIONARY_BYTES_MAX).min(bytes_max)];
        let sizes = vec![size_of::<Page>(); samples.len()];
        let len = train_from_buffer(bytes.as_mut_slice(), samples.as_flattened(), &sizes).ok()?;
        bytes.truncate(len);
        bytes.get_mut(NUMBER)?.fill(0);
        let dictionary = CDict::try_create(&bytes, LEVEL)?;
        Some(Self::with(bytes, Some(dictionary)))
    }

    fn with(bytes: Vec<u8>, dictionary: Option<CDict<'static>>) -> Self {
        let buffer = vec![0; compress_bound(size_of::<Page>())];
        Self { bytes, dictionary, context: CCtx::create(), buffer }
    }

    /// Returns the bytes of the dictionary, for the head of the pack.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Compresses a page with the dictionary. Returns the payload; `None` if zstd fails.
    pub fn compress(&mut self, page: &Page) -> Option<&[u8]> {
        let (context, buffer) = (&mut self.context, self.buffer.as_mut_slice());
        let len = match &self.dictionary {
            Some(dictionary) => context.compress_using_cdict(buffer, page, dictionary),
            None => context.compress(buffer, page, LEVEL),
        };
        self.buffer.get(..len.ok()?)
    }
}

impl std::fmt::Debug for DenseCompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DenseCompressor(dictionary of {} bytes)", self.bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lines;
    use keyframe_units::{PAGE_BYTES, ZERO_PAGE};
    use proptest::prelude::*;

    #[test]
    fn a_dictionary_makes_pages_with_common_lines_smaller() {
        let samples: Vec<Page> = (0..400).map(lines).collect();
        let mut dense = DenseCompressor::train(&samples, usize::MAX);
        assert!(!dense.bytes().is_empty());
        let mut alone = DenseCompressor::train(&[], usize::MAX);
        assert!(alone.bytes().is_empty());
        let dictionary = Dictionary::new(dense.bytes()).unwrap();
        for seed in 1000..1100 {
            let page = lines(seed);
            let with = dense.compress(&page).unwrap();
            assert!(with.len() * 3 < alone.compress(&page).unwrap().len(), "{}", with.len());
            let mut back = [7; PAGE_BYTES];
            dictionary.decompress(with, &mut back).unwrap();
            assert!(back == page);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_and_never_write_beyond(
            dictionary in prop::collection::vec(any::<u8>(), 0..300), marked in any::<bool>(),
            stored in prop::collection::vec(any::<u8>(), 0..300), flip in any::<usize>(),
        ) {
            // The magic number of a trained dictionary.
            let mark: &[u8] = if marked { &[0x37, 0xa4, 0x30, 0xec] } else { &[] };
            let mut dense = DenseCompressor::train(&[], usize::MAX);
            let mut whole = dense.compress(&lines(1)).unwrap().to_vec();
            let at = flip % whole.len();
            whole[at] ^= 1 << (flip % 8);
            let mut page = ZERO_PAGE;
            if let Ok(dictionary) = Dictionary::new(&[mark, &dictionary].concat()) {
                let _ = dictionary.decompress(&stored, &mut page);
                let _ = dictionary.decompress(&whole, &mut page);
                let _ = dictionary.decompress(&whole, &mut page[..100]);
            }
        }
    }
}
