//! The compression of a page's content.
//!
//! A page is stored as its words ([`keyframe_pages::words`]) if these are few, else as one LZ4
//! block if that saves at least an eighth, else raw. In a recompressed pack it is stored with zstd
//! and a dictionary ([`crate::dictionary`]). A sample of its bytes identifies noise (compressed or
//! encrypted data), which is not worth an attempt.

use crate::dictionary::Dictionary;
use keyframe_pages::bytes::Problem;
use keyframe_pages::words::{self, WordCoder};
use keyframe_units::{PAGE_BYTES, Page};
use lz4::block::{CompressionMode, compress_to_buffer, decompress_to_buffer};
use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};

/// The codec: the encoding of a record's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// The page itself.
    Raw,
    /// One LZ4 block.
    Lz4,
    /// One zstd frame, made with the dictionary of the pack.
    Dense,
    /// The words of a page.
    Words,
}

impl Codec {
    const ALL: [Self; 4] = [Self::Raw, Self::Lz4, Self::Dense, Self::Words];

    /// Returns the number that stands for this codec in a record.
    pub fn number(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Lz4 => 1,
            Self::Dense => 2,
            Self::Words => 3,
        }
    }

    /// Returns the codec for which a number in a record stands. Returns `None` for an unknown
    /// number.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.number() == number)
    }
}

/// How hard LZ4 looks for matches. A running guest waits for this compression, so it is fast rather
/// than small (docs/design/encoding.md); recompression makes up for the bytes.
const FAST: Option<CompressionMode> = Some(CompressionMode::FAST(6));
/// The smallest number of bytes that a compressed payload must save. Saving less is not worth a
/// decompression at each read.
pub const SAVING_BYTES_MIN: usize = 64;
/// The least saving of a whole page by LZ4, in bytes. Recompression tries the page again.
const PAGE_SAVING_BYTES_MIN: usize = PAGE_BYTES / 8;
const NO_DICTIONARY: &str = "it is zstd, and there is no dictionary";
const NO_PAGE: &str = "it is coded as words, and is not a whole page";
/// LZ4 expresses at most 255 bytes per byte of input.
const LZ4_EXPANSION_MAX: u64 = 255;

/// Compresses pages with buffers of its own.
pub struct PageCompressor {
    words: WordCoder,
    buffer: Vec<u8>,
}

impl Default for PageCompressor {
    fn default() -> Self {
        Self::new()
    }
}

impl PageCompressor {
    /// Creates a compressor with empty buffers.
    pub fn new() -> Self {
        let buffer = vec![0; get_maximum_output_size(PAGE_BYTES)];
        Self { words: WordCoder::new(), buffer }
    }

    /// Compresses a page. Returns its payload, and the codec of the payload.
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

    /// Encodes a page as its words. Returns the payload. Returns `None` if the payload would not be
    /// shorter by [`SAVING_BYTES_MIN`].
    pub fn compress_words(&mut self, page: &Page) -> Option<&[u8]> {
        self.words.encode(page)
    }

    /// Compresses a section shorter than a page. Returns the payload and its codec.
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

/// Restores a page from its payload. `dictionary` is that of the pack, which dense payloads need;
/// `None` for a pack without one. Error: the payload is malformed or has another length.
pub fn decompress_page(
    codec: Codec,
    payload: &[u8],
    dictionary: Option<&Dictionary>,
    page: &mut Page,
) -> Result<(), Problem> {
    match (codec, dictionary) {
        (Codec::Dense, Some(dictionary)) => dictionary.decompress(payload, page),
        (Codec::Words, _) => words::decode(payload, page),
        _ => decompress_exactly(codec, payload, page),
    }
}

/// Restores `out` from its payload, which must fill it exactly. Error: the payload is malformed or
/// has another length.
pub fn decompress_exactly(codec: Codec, stored: &[u8], out: &mut [u8]) -> Result<(), Problem> {
    match codec {
        Codec::Raw if stored.len() == out.len() => out.copy_from_slice(stored),
        Codec::Raw => return Err(format!("{} raw bytes for {}", stored.len(), out.len())),
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

/// Decompresses a patch of at most `len_bytes_max` bytes, and returns it. Error: the payload is
/// malformed or too long.
pub fn decompress_patch(
    codec: Codec,
    stored: &[u8],
    len_bytes_max: usize,
) -> Result<Vec<u8>, Problem> {
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

/// Guesses from a sample whether a page is noise. 512 bytes of noise contain about 221 of the 256
/// values (standard deviation below 5); text, code, tables and pointers contain far fewer. A wrong
/// guess costs space only.
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

/// Compresses a section of any length. Returns `None` if that does not make it smaller.
pub fn compress_section(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0; get_maximum_output_size(bytes.len())];
    let len = compress_into(bytes, &mut out).ok()?;
    out.truncate(len);
    (len < bytes.len()).then_some(out)
}

/// Decompresses a section of exactly `len_bytes` bytes, and returns it. Refuses a length that LZ4
/// cannot reach, before it allocates memory. Error: the payload is malformed or has another length.
pub fn decompress_section(stored: &[u8], len_bytes: u64) -> Result<Vec<u8>, Problem> {
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
mod tests {
    use super::*;
    use crate::testing::noise;
    use proptest::prelude::*;

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
        // Half noise and half zeros is worth compressing.
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
