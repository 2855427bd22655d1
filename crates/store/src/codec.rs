//! How the content of a page is compressed, and when it is not worth trying.
//!
//! A page is stored as its words ([`crate::words`]) where these are few, else as one LZ4 block
//! where that saves at least an eighth of it, as it is otherwise; when its pack is recompressed,
//! with zstd and a dictionary ([`crate::dictionary`]). Pages of noise (compressed or encrypted
//! data) are told by a sample of their bytes, so that they cost next to nothing.

use crate::dictionary::Dictionary;
use crate::words::{self, WordCoder};
use keyframe_units::{PAGE_BYTES, Page};
use lz4::block::{CompressionMode, compress_to_buffer, decompress_to_buffer};
use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};

/// How a payload is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// The page itself.
    Raw,
    /// One LZ4 block.
    Lz4,
    /// One frame of zstd, with the dictionary of the pack.
    Dense,
    /// The words of a page.
    Words,
}

impl Codec {
    const ALL: [Self; 4] = [Self::Raw, Self::Lz4, Self::Dense, Self::Words];

    /// As it is written.
    pub fn number(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Lz4 => 1,
            Self::Dense => 2,
            Self::Words => 3,
        }
    }

    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.number() == number)
    }
}

/// How hard LZ4 looks for matches, in pages that have to be stored while the guest runs on: 40 to
/// 60 % less time than at 1, for 17 to 25 % more bytes, which recompression makes up for.
const FAST: Option<CompressionMode> = Some(CompressionMode::FAST(6));
/// Less than this saved is not worth a decompression at each read.
pub const SAVING_BYTES_MIN: usize = 64;
/// And of a whole page, which recompression takes up again.
const PAGE_SAVING_BYTES_MIN: usize = PAGE_BYTES / 8;
/// Only whole pages of packs that have a dictionary are dense.
const NO_DICTIONARY: &str = "zstd where there is no dictionary";
const NO_PAGE: &str = "words of what is no page";
/// LZ4 expresses at most 255 bytes per byte of input.
const LZ4_EXPANSION_MAX: u64 = 255;

/// Compresses pages with buffers of its own.
pub struct PageCompressor {
    words: WordCoder,
    buffer: Vec<u8>,
}

impl PageCompressor {
    pub fn new() -> Self {
        let buffer = vec![0; get_maximum_output_size(PAGE_BYTES)];
        Self { words: WordCoder::new(), buffer }
    }

    /// The bytes to store for a page.
    pub fn compress<'a>(&'a mut self, page: &'a Page) -> (Codec, &'a [u8]) {
        if looks_like_noise(page) {
            return (Codec::Raw, page);
        }
        if let Some(words) = self.words.encode(page) {
            return (Codec::Words, words);
        }
        if let Ok(len) = compress_to_buffer(page, FAST, false, &mut self.buffer)
            && len <= PAGE_BYTES - PAGE_SAVING_BYTES_MIN
            && let Some(coded) = self.buffer.get(..len)
        {
            return (Codec::Lz4, coded);
        }
        (Codec::Raw, page)
    }

    /// The words of a page, where they are few.
    pub fn compress_words(&mut self, page: &Page) -> Option<&[u8]> {
        self.words.encode(page)
    }

    /// The bytes to store for less than a page.
    pub fn compress_part<'a>(&'a mut self, bytes: &'a [u8]) -> (Codec, &'a [u8]) {
        if let Ok(len) = compress_to_buffer(bytes, FAST, false, &mut self.buffer)
            && len + SAVING_BYTES_MIN <= bytes.len()
            && let Some(coded) = self.buffer.get(..len)
        {
            return (Codec::Lz4, coded);
        }
        (Codec::Raw, bytes)
    }
}

impl std::fmt::Debug for PageCompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PageCompressor")
    }
}

/// Restores a page from its payload.
pub fn decompress_page(
    codec: Codec,
    payload: &[u8],
    dictionary: Option<&Dictionary>,
    page: &mut Page,
) -> Result<(), String> {
    match (codec, dictionary) {
        (Codec::Dense, Some(dictionary)) => dictionary.decompress(payload, page),
        (Codec::Words, _) => words::decode(payload, page),
        _ => decompress_exactly(codec, payload, page),
    }
}

/// Restores what fills `out` from what is stored for it.
pub fn decompress_exactly(codec: Codec, stored: &[u8], out: &mut [u8]) -> Result<(), String> {
    match codec {
        Codec::Raw if stored.len() == out.len() => out.copy_from_slice(stored),
        Codec::Raw => return Err(format!("{} bytes as they are for {}", stored.len(), out.len())),
        Codec::Lz4 => {
            let len = decompress_to_buffer(stored, Some(out.len() as i32), out)
                .map_err(|e| format!("LZ4: {e}"))?;
            if len != out.len() {
                return Err(format!("LZ4 gave {len} bytes for {}", out.len()));
            }
        }
        Codec::Dense => return Err(NO_DICTIONARY.into()),
        Codec::Words => return Err(NO_PAGE.into()),
    }
    Ok(())
}

/// Restores a patch of at most `len_bytes_max`.
pub fn decompress_patch(
    codec: Codec,
    stored: &[u8],
    len_bytes_max: usize,
) -> Result<Vec<u8>, String> {
    match codec {
        Codec::Raw if stored.len() > len_bytes_max => {
            Err(format!("a patch of {} bytes", stored.len()))
        }
        Codec::Raw => Ok(stored.to_vec()),
        Codec::Lz4 => {
            let mut out = vec![0; len_bytes_max];
            let len = decompress_into(stored, &mut out).map_err(|e| format!("LZ4: {e}"))?;
            out.truncate(len);
            Ok(out)
        }
        Codec::Dense => Err(NO_DICTIONARY.into()),
        Codec::Words => Err(NO_PAGE.into()),
    }
}

/// Among 512 bytes drawn from noise about 221 of the 256 values occur (standard deviation below 5).
/// Text, code, tables and pointers stay far below. A wrong guess costs space, nothing else.
fn looks_like_noise(page: &Page) -> bool {
    const SAMPLES: usize = 4;
    const SAMPLE_BYTES: usize = 128;
    const DISTINCT_MIN: u32 = 200;
    let mut seen = [0u8; 256];
    for sample in page.as_chunks::<{ PAGE_BYTES / SAMPLES }>().0 {
        for byte in &sample[..SAMPLE_BYTES] {
            seen[usize::from(*byte)] = 1;
        }
    }
    seen.iter().map(|seen| u32::from(*seen)).sum::<u32>() >= DISTINCT_MIN
}

/// Compresses a section of any length; `None` where that does not make it smaller.
pub fn compress_section(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0; get_maximum_output_size(bytes.len())];
    let len = compress_into(bytes, &mut out).ok()?;
    out.truncate(len);
    (len < bytes.len()).then_some(out)
}

/// Restores a section of exactly `len_bytes`; refuses lengths that LZ4 cannot reach before it
/// allocates.
pub fn decompress_section(stored: &[u8], len_bytes: u64) -> Result<Vec<u8>, String> {
    if len_bytes > (stored.len() as u64).saturating_mul(LZ4_EXPANSION_MAX) {
        return Err(format!("{} bytes of LZ4 cannot hold {len_bytes}", stored.len()));
    }
    let mut out = vec![0; len_bytes as usize];
    let len = decompress_into(stored, &mut out).map_err(|e| format!("LZ4: {e}"))?;
    if len != out.len() {
        return Err(format!("LZ4 gave {len} bytes of {len_bytes}"));
    }
    Ok(out)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A page of noise from a seed.
    pub fn noise(seed: u64) -> Page {
        let mut page = [0; PAGE_BYTES];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut page);
        page
    }

    fn round_trip(page: &Page) -> (Codec, usize) {
        let mut compressor = PageCompressor::new();
        let (codec, payload) = compressor.compress(page);
        let mut back = [0xee; PAGE_BYTES];
        decompress_page(codec, payload, None, &mut back).unwrap();
        assert_eq!(&back, page);
        (codec, payload.len())
    }

    #[test]
    fn noise_is_stored_raw_and_text_is_not() {
        assert!((0..200).all(|seed| round_trip(&noise(seed)).0 == Codec::Raw));
        let text = include_str!("codec.rs").as_bytes();
        let page: Page = text[..PAGE_BYTES].try_into().unwrap();
        let (codec, len) = round_trip(&page);
        assert!(codec == Codec::Lz4 && len < PAGE_BYTES * 3 / 4, "{len}");
        // Noise in which a quarter of the page is zeros gains from compression, and gets it.
        let mut mixed = noise(1);
        mixed[1024..2048].fill(0);
        mixed[3072..].fill(0);
        assert_eq!(round_trip(&mixed).0, Codec::Lz4);
    }

    proptest! {
        #[test]
        fn pages_come_back(seed in any::<u64>(), cuts in prop::collection::vec((0usize..4096, 0usize..4096, any::<u8>()), 0..8)) {
            let mut page = noise(seed);
            for (from, len, value) in cuts {
                page[from..(from + len).min(PAGE_BYTES)].fill(value);
            }
            round_trip(&page);
        }

        #[test]
        fn arbitrary_payloads_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..5000), len in any::<u64>()) {
            let mut page = [0; PAGE_BYTES];
            let _ = decompress_page(Codec::Lz4, &bytes, None, &mut page);
            let _ = decompress_page(Codec::Raw, &bytes, None, &mut page);
            let _ = decompress_page(Codec::Words, &bytes, None, &mut page);
            let _ = decompress_section(&bytes, len);
            let _ = decompress_section(&bytes, len % 100_000);
        }

        #[test]
        fn sections_come_back(bytes in prop::collection::vec(0u8..4, 0..3000)) {
            if let Some(coded) = compress_section(&bytes) {
                prop_assert!(coded.len() < bytes.len());
                prop_assert_eq!(decompress_section(&coded, bytes.len() as u64).unwrap(), bytes);
            }
        }
    }
}
