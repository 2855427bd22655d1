//! The dictionary of a pack, and pages compressed with it.
//!
//! ```text
//!   pages that move ──some of them──▶ train ──▶ Dense ──pages, one by one──▶ payloads        the dictionary goes to the pack's head
//!   a pack's head ──▶ Dictionary ──payloads──▶ pages
//! ```
//!
//! A page alone has little in it that comes twice; what pages have in common is in the dictionary.
//! So each page stays a record of its own, read and checked without its neighbours, and takes about
//! what a block of sixteen pages compressed together would (`docs/design/encoding.md`).
//!
//! Invariants: what is decompressed is bounded by the memory that is given for it, whatever the
//! bytes say. A dictionary is of its pack alone, so that packs come and go each by itself.

use keyframe_pages::bytes::Problem;
use keyframe_units::Page;
use std::cell::RefCell;
use zstd::zstd_safe::{
    CCtx, CDict, DCtx, DDict, compress_bound, get_error_name, train_from_buffer,
};

/// No dictionary is longer.
pub const DICTIONARY_BYTES_MAX: usize = 64 << 10;
/// The pages that one is trained with.
pub const SAMPLES_MAX: usize = 1600;
/// With fewer there is nothing to learn, and none is made.
const SAMPLES_MIN: usize = 64;
/// The samples are so many times longer than the dictionary.
const SAMPLE_PART: usize = 25;
/// More takes several times the time for a fifteenth less (`docs/design/encoding.md`).
const LEVEL: i32 = 3;
/// One in so many of the samples is tried with and without.
const TRIED_STEP: usize = 13;
/// Where a dictionary that was trained has its number, which each payload would repeat. A pack has
/// one, so that none is needed.
const NUMBER: std::ops::Range<usize> = 4..8;

thread_local! {
    /// What a thread decompresses with; the dictionary comes with each call.
    static READER: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// What the pages of a pack are read with.
pub struct Dictionary(DDict<'static>);

impl Dictionary {
    /// Of the bytes in a pack's head, which may be none.
    pub fn new(bytes: &[u8]) -> Result<Self, Problem> {
        DDict::try_create(bytes).map(Self).ok_or_else(|| "its dictionary is none".into())
    }

    /// Restores what fills `out`.
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

/// Compresses pages as small as they get.
pub struct Dense {
    bytes: Vec<u8>,
    dictionary: Option<CDict<'static>>,
    context: CCtx<'static>,
    buffer: Vec<u8>,
}

impl Dense {
    /// With a dictionary of at most `bytes_max` made of `samples`; with none where they are too
    /// few, or take more with it.
    pub fn train(samples: &[Page], bytes_max: usize) -> Self {
        let mut alone = Self::with(Vec::new(), None);
        if samples.len() < SAMPLES_MIN {
            return alone;
        }
        // It would be too good for those that it was made of.
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

    /// What has to be in the head of the pack.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The page compressed; `None` where that does not go.
    pub fn compress(&mut self, page: &Page) -> Option<&[u8]> {
        let (context, buffer) = (&mut self.context, self.buffer.as_mut_slice());
        let len = match &self.dictionary {
            Some(dictionary) => context.compress_using_cdict(buffer, page, dictionary),
            None => context.compress(buffer, page, LEVEL),
        };
        self.buffer.get(..len.ok()?)
    }
}

impl std::fmt::Debug for Dense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Dense(dictionary of {} bytes)", self.bytes.len())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::codec::tests::noise;
    use keyframe_units::{PAGE_BYTES, ZERO_PAGE};
    use proptest::prelude::*;

    /// A page of lines, each of which other pages have too.
    pub fn lines(seed: u64) -> Page {
        let (mut page, order) = (ZERO_PAGE, noise(seed));
        for (line, which) in page.chunks_mut(64).zip(order) {
            line.copy_from_slice(&noise(u64::from(which % 32))[..64]);
        }
        page
    }

    #[test]
    fn what_pages_have_in_common_is_in_the_dictionary() {
        let samples: Vec<Page> = (0..400).map(lines).collect();
        let mut dense = Dense::train(&samples, usize::MAX);
        assert!(!dense.bytes().is_empty());
        let mut alone = Dense::train(&[], usize::MAX);
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
            // With the mark of a trained one before it.
            let mark: &[u8] = if marked { &[0x37, 0xa4, 0x30, 0xec] } else { &[] };
            let mut dense = Dense::train(&[], usize::MAX);
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
