//! Encodes a page by its 64-bit words. For pages of pointers, tables and counters this is several
//! times faster than LZ4, and the result is smaller.
//!
//! ```text
//!   payload   0  8 groups of eight words (64 bytes of the page): bit g is set if group g is not zero
//!             8 32 four bases             40 .. four bytes for each such group: a code of four bits for each word, the lowest first
//!                                          .. bytes of the words, in their order: as many as the code says, the lowest first
//!   code      0 zero     1, 2, 3  1, 4, 8 bytes, those above are zero
//!             4 + b, 8 + b, 12 + b        0, 2, 3 bytes, those above are as in base b
//! ```
//!
//! A base is a word whose upper 40 bits occur in many words of the page. The payload ends with the
//! last byte of a word.
//!
//! Invariants: no payload is longer than [`WORDS_BYTES_MAX`]; decoding any bytes gives a page or a
//! [`Problem`].

use crate::bytes::Problem;
use keyframe_units::{PAGE_BYTES, Page};

/// The largest length of a page encoded as its words, in bytes. The caller compresses a page with a
/// longer encoding by LZ4.
pub const WORDS_BYTES_MAX: usize = PAGE_BYTES * 3 / 8;
const GROUP_WORDS: usize = 8;
const GROUP_BYTES: usize = GROUP_WORDS * 8;
const GROUPS: usize = PAGE_BYTES / GROUP_BYTES;
const BASES: usize = 4;
const HEAD_BYTES: usize = 8 + BASES * 8;
const CODE_BYTES: usize = 4;
/// Bytes of a group and of one more word, because words are read and written eight bytes at a time.
const WINDOW_BYTES: usize = GROUP_BYTES + 8;
/// Bytes of the longest payload and of a group after it.
const BUFFER_BYTES: usize = WORDS_BYTES_MAX + WINDOW_BYTES;
/// Bytes at the end of a payload. A window that begins before them ends within the payload.
const TAIL_BYTES: usize = WINDOW_BYTES;

/// The number of bytes of a word in the payload, by code.
const LEN_BYTES: [usize; 16] = [0, 1, 4, 8, 0, 0, 0, 0, 2, 2, 2, 2, 3, 3, 3, 3];
const MASK: [u64; 16] = masks();
/// The number of slots of the table that counts words by their upper bits.
const SLOTS: usize = 64;
/// One word in a slot's count. The bits below it hold the number of the slot.
const ONE: i16 = SLOTS as i16;
const LOW_BITS: u32 = 24;
/// The number of groups that are sampled to find the bases of a page.
const SAMPLED_GROUPS: usize = 16;

const fn masks() -> [u64; 16] {
    let mut out = [0; 16];
    let mut code = 0;
    while code < 16 {
        out[code] = if LEN_BYTES[code] == 8 { u64::MAX } else { (1 << (LEN_BYTES[code] * 8)) - 1 };
        code += 1;
    }
    out
}

/// Returns the cost of a word without a base: the number of its bytes in the upper four bits, its
/// code in the lower four. It has no branch, because a processor could not predict one.
#[inline]
fn alone(word: u64) -> u64 {
    let cost = if word < 1 << 32 { 0x42 } else { 0x83 };
    let cost = if word < 1 << 8 { 0x11 } else { cost };
    if word == 0 { 0 } else { cost }
}

/// Returns the cost of a word on base 0, from the bits in which the two differ. The result for more
/// than 24 bits is so high that it is never the smallest cost.
#[inline]
fn on_base(different: u64) -> u64 {
    let cost = if different < 1 << 24 { 0x3c } else { 0xec };
    let cost = if different < 1 << 16 { 0x28 } else { cost };
    if different == 0 { 0x04 } else { cost }
}

type Group = [u64; GROUP_WORDS];

/// Encodes pages by their 64-bit words, in the format of this module. It keeps its buffers from
/// page to page.
pub struct WordCoder {
    /// The groups of the current page that are not zero, and the cost of each of their words.
    words: Box<[Group; GROUPS]>,
    costs: Box<[[u8; GROUP_WORDS]; GROUPS]>,
    buffer: Box<[u8; BUFFER_BYTES]>,
}

impl Default for WordCoder {
    fn default() -> Self {
        Self::new()
    }
}

impl WordCoder {
    /// Creates a coder and allocates its buffers.
    pub fn new() -> Self {
        let (words, costs) =
            (Box::new([[0; GROUP_WORDS]; GROUPS]), Box::new([[0; GROUP_WORDS]; GROUPS]));
        Self { words, costs, buffer: Box::new([0; BUFFER_BYTES]) }
    }

    /// Returns the payload of a page, for [`decode`]. Returns `None` if it would exceed
    /// [`WORDS_BYTES_MAX`], or if LZ4 compresses the page better.
    pub fn encode(&mut self, page: &Page) -> Option<&[u8]> {
        let Self { words, costs, buffer } = self;
        let (mut groups, mut count) = (0u64, 0);
        for (number, bytes) in page.as_chunks::<GROUP_BYTES>().0.iter().enumerate() {
            let group: Group = std::array::from_fn(|at| {
                bytes.as_chunks().0.get(at).map_or(0, |word| u64::from_le_bytes(*word))
            });
            let is_some = group.iter().fold(0, |all, word| all | word) != 0;
            words[count % GROUPS] = group;
            groups |= u64::from(is_some) << number;
            count += usize::from(is_some);
        }
        let words = words.get(..count)?;
        let bases = bases(words)?;
        // LZ4 compresses repetitions fast and far better.
        if words.windows(2).filter(|pair| pair[0] == pair[1]).count() * 2 > count {
            return None;
        }
        for (into, word) in
            buffer.as_chunks_mut().0.iter_mut().zip(std::iter::once(groups).chain(bases))
        {
            *into = word.to_le_bytes();
        }
        let costs = costs.get_mut(..count)?;
        price(words.as_flattened(), &bases, costs.as_flattened_mut());
        let mut codes_at = HEAD_BYTES;
        let mut at = HEAD_BYTES + CODE_BYTES * count;
        for (group, costs) in words.iter().zip(costs) {
            let window: &mut [u8; WINDOW_BYTES] = buffer.get_mut(at..)?.first_chunk_mut()?;
            let (mut codes, mut len) = (0u32, 0);
            for (place, (word, cost)) in group.iter().zip(costs).enumerate() {
                codes |= u32::from(*cost & 15) << (4 * place);
                // No check is needed for each word: a window holds eight words.
                window[len % GROUP_BYTES..][..8].copy_from_slice(&word.to_le_bytes());
                len += usize::from(*cost >> 4);
            }
            buffer
                .get_mut(codes_at..)?
                .first_chunk_mut::<CODE_BYTES>()?
                .copy_from_slice(&codes.to_le_bytes());
            codes_at += CODE_BYTES;
            at += len;
            if at > WORDS_BYTES_MAX {
                return None;
            }
        }
        buffer.get(..at)
    }
}

/// Computes the smallest cost of each word, without a base or on one of the bases. It is also
/// compiled for AVX2 and AVX-512, which process several words at a time.
#[multiversion::multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+bmi1+bmi2+lzcnt+popcnt",
    "x86_64+avx2+bmi1+bmi2+lzcnt+popcnt"
))]
fn price(words: &[u64], bases: &[u64; BASES], costs: &mut [u8]) {
    let [a, b, c, d] = *bases;
    for (cost, word) in costs.iter_mut().zip(words) {
        let mut least = alone(*word);
        least = least.min(on_base(word ^ a));
        least = least.min(on_base(word ^ b) + 1);
        least = least.min(on_base(word ^ c) + 2);
        least = least.min(on_base(word ^ d) + 3);
        *cost = least as u8;
    }
}

/// Returns the slot that counts words with these upper bits.
fn slot_of(high: u64) -> usize {
    (high.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}

/// Returns the bases that occur in most words of a sample of the groups; `None` if the page would
/// become too long even with them. In text and code hardly two words have the same upper bits.
fn bases(words: &[Group]) -> Option<[u64; BASES]> {
    let count = words.len();
    let stride = count.div_ceil(SAMPLED_GROUPS).max(1);
    let mut slots = [0u64; SLOTS];
    // The number of words of each slot, above the number of the slot: one comparison finds the slot
    // with the most words.
    let mut counts: [i16; SLOTS] = std::array::from_fn(|slot| slot as i16);
    let (mut others, mut sampled) = (0, 0);
    for group in words.iter().step_by(stride) {
        for word in group {
            if *word < 256 {
                continue;
            }
            others += 1;
            let slot = slot_of(word >> LOW_BITS);
            if slots[slot] >> LOW_BITS == word >> LOW_BITS {
                counts[slot] += ONE;
            } else if counts[slot] < 2 * ONE {
                (slots[slot], counts[slot]) = (*word, slot as i16 + ONE);
            }
        }
        sampled += 1;
    }
    let mut found = [0; BASES];
    for base in &mut found {
        let best = counts.iter().copied().fold(0, i16::max);
        if best < ONE {
            break;
        }
        let slot = (best % ONE) as usize;
        *base = slots[slot];
        others -= best / ONE;
        counts[slot] = 0;
    }
    // A word on no base usually takes eight bytes. The limit is raised by an eighth, because the
    // sample is not exact.
    let bytes = HEAD_BYTES + count * CODE_BYTES + others as usize * 8 * count / sampled.max(1);
    (bytes <= WORDS_BYTES_MAX * 9 / 8).then_some(found)
}

/// Decodes `stored`, a payload that [`WordCoder::encode`] made, into `page`. Error: the payload is
/// malformed; `page` then has undefined content.
pub fn decode(stored: &[u8], page: &mut Page) -> Result<(), Problem> {
    let len = stored.len();
    if !(HEAD_BYTES..=WORDS_BYTES_MAX).contains(&len) {
        return Err(format!("{len} bytes cannot be a page's words"));
    }
    // A copy of the end with spare bytes after it, because words are read eight bytes at a time.
    let tail_at = len.saturating_sub(TAIL_BYTES);
    let mut tail = [0; TAIL_BYTES + WINDOW_BYTES];
    for (into, from) in tail.iter_mut().zip(stored.get(tail_at..).unwrap_or_default()) {
        *into = *from;
    }
    let head = stored.as_chunks().0;
    let word = |at: usize| u64::from_le_bytes(head.get(at).copied().unwrap_or_default());
    let groups = word(0);
    // By code: what is above the bytes of the payload.
    let above: [u64; 16] = std::array::from_fn(|code| match code {
        0..4 => 0,
        _ => word(1 + code % BASES) & !MASK[code],
    });
    let mut codes_at = HEAD_BYTES;
    let mut at = HEAD_BYTES + CODE_BYTES * groups.count_ones() as usize;
    for (number, group) in page.as_chunks_mut::<GROUP_BYTES>().0.iter_mut().enumerate() {
        if groups >> number & 1 == 0 {
            group.fill(0);
            continue;
        }
        let codes = stored.get(codes_at..).and_then(<[u8]>::first_chunk);
        let inside = || stored.get(at..).and_then(<[u8]>::first_chunk);
        let near_end =
            || at.checked_sub(tail_at).and_then(|at| tail.get(at..)).and_then(<[u8]>::first_chunk);
        let window: Option<&[u8; WINDOW_BYTES]> = inside().or_else(near_end);
        let (Some(codes), Some(window)) = (codes, window) else { return Err(TOO_SHORT.into()) };
        let mut codes = u32::from_le_bytes(*codes);
        let mut from = 0;
        for into in group.as_chunks_mut::<8>().0 {
            let code = (codes & 15) as usize;
            let bytes =
                window.get(from..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
            *into = (above[code] | u64::from_le_bytes(bytes) & MASK[code]).to_le_bytes();
            from += LEN_BYTES[code];
            codes >>= 4;
        }
        codes_at += CODE_BYTES;
        at += from;
        if at > len {
            return Err(TOO_SHORT.into());
        }
    }
    if at == len {
        Ok(())
    } else {
        Err(format!("{} bytes behind a page's words", len - at.min(len)))
    }
}

const TOO_SHORT: &str = "the bytes of a page's words end too early";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::noise;
    use keyframe_units::ZERO_PAGE;
    use proptest::prelude::*;

    fn page_of(word: impl FnMut(u64) -> u64) -> Page {
        let words: Vec<u8> = (0..512).map(word).flat_map(u64::to_le_bytes).collect();
        words.try_into().unwrap()
    }

    fn round_trip(page: &Page) -> Option<usize> {
        let mut coder = WordCoder::new();
        let payload = coder.encode(page)?.to_vec();
        let mut back = [0xee; PAGE_BYTES];
        decode(&payload, &mut back).unwrap();
        assert!(back == *page);
        assert!(decode(&payload[..payload.len() - 1], &mut back).is_err());
        assert!(decode(&[&payload[..], &[0]].concat(), &mut back).is_err());
        Some(payload.len())
    }

    #[test]
    fn pointers_and_tables_take_little_and_noise_is_refused() {
        let heap = page_of(|at| if at % 2 == 0 { 0x7f12_3400_0000 + at * 4096 } else { at % 200 });
        let table = page_of(|at| {
            [0xffff_8880_1234_5000 + at * 64, 0x8000_0000_0000_0067, 0, 7][at as usize % 4]
        });
        let kernel = page_of(|at| 0xffff_ffff_8100_0000 + (at << 6));
        let assert_short = |page: &Page, len_bytes_max: usize| {
            let len = round_trip(page).unwrap();
            assert!(len <= len_bytes_max, "{len} of at most {len_bytes_max}");
        };
        assert_short(&heap, 1400);
        assert_short(&table, 900);
        assert_short(&kernel, WORDS_BYTES_MAX);
        assert_short(&ZERO_PAGE, HEAD_BYTES);
        assert_eq!(round_trip(&noise(1)), None);
        assert_eq!(round_trip(&[7; PAGE_BYTES]), None);
    }

    proptest! {
        #[test]
        fn pages_come_back(
            kinds in prop::collection::vec((0u8..6, any::<u64>()), 1..40), zeros in any::<u64>(), few in any::<bool>(),
        ) {
            let page = page_of(|at| {
                let (kind, seed) = kinds[at as usize % kinds.len()];
                let mixed = (seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                match kind {
                    _ if few && zeros >> (at / 8) & 1 == 0 => 0,
                    0 => 0,
                    1 => mixed & 0xff,
                    2 => mixed & 0xffff_ffff,
                    3 => seed & !0xffff | mixed & 0xffff,
                    4 => seed & !0xff_ffff | mixed & 0xff_ffff,
                    _ => seed.rotate_left(at as u32 % 3),
                }
            });
            round_trip(&page);
        }

        #[test]
        fn arbitrary_payloads_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..1700), sparse in any::<u64>()) {
            let mut page = ZERO_PAGE;
            let _ = decode(&bytes, &mut page);
            let _ = decode(&[&(sparse & sparse.rotate_left(7)).to_le_bytes(), &bytes[..]].concat(), &mut page);
        }
    }
}
