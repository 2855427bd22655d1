//! Makes pages like those of a guest: text, machine code, structures of pointers, tables, data and
//! noise.
//!
//! | kind | like | zstd -1 leaves | LZ4 leaves |
//! |---|---|---:|---:|
//! | text | files in the page cache, logs | 41 % | 75 % |
//! | code | programs and libraries | 62 % | 66 % |
//! | pointers | heaps of programs and of the kernel | 31 % | 44 % |
//! | table | arrays of records, page tables | 10 % | 29 % |
//! | sparse | unused ends, stacks | 3 % | 4 % |
//! | data | numbers: most words are random | 87 % | 93 % |
//! | noise | compressed or encrypted data | 100 % | 100 % |
//!
//! The shares imitate a recorded stream of 1,773 MB, of which deduplication left 1,170 MiB,
//! deduplication with zstd -1 586 MiB, and with zstd -1 and differences 279 MiB. Of the 1,811 MB of
//! this stream they leave 1,166, 593 and 293 MiB.

use crate::random::Random;
use keyframe_units::{PAGE_BYTES, Page};

/// The kind of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Text,
    Code,
    Pointers,
    Table,
    Sparse,
    Data,
    Noise,
}

/// The shares of the kinds among the pages that are neither zero nor copies.
pub const MIX: [(Kind, u32); 7] = [
    (Kind::Text, 18),
    (Kind::Code, 18),
    (Kind::Pointers, 26),
    (Kind::Table, 12),
    (Kind::Sparse, 15),
    (Kind::Data, 9),
    (Kind::Noise, 2),
];

/// Makes pages.
#[derive(Debug)]
pub struct PageMaker {
    words: Vec<Vec<u8>>,
    /// Frequent sequences of words.
    phrases: Vec<Vec<u8>>,
    instructions: Vec<Vec<u8>>,
    /// Frequent sequences of instructions.
    idioms: Vec<Vec<u8>>,
}

impl PageMaker {
    pub fn new() -> Self {
        let mut random = Random::new(0x6b66_7061_6765_7321);
        let word = |random: &mut Random| {
            let letters = b"etaoinshrdlucmfwypvbgk";
            let len = random.between(2, 9);
            // The first letters are the more frequent ones.
            let mut word: Vec<u8> = (0..len)
                .map(|_| letters[(random.below(22) * random.below(22) / 22) as usize])
                .collect();
            word.push(b' ');
            word
        };
        let instruction = |random: &mut Random| {
            let len = random.between(2, 5);
            (0..len).map(|_| random.next() as u8).collect()
        };
        let words: Vec<_> = (0..3000).map(|_| word(&mut random)).collect();
        let instructions: Vec<_> = (0..200).map(|_| instruction(&mut random)).collect();
        let mut joined = |count, of: &[Vec<u8>]| -> Vec<Vec<u8>> {
            let mut one = || {
                let count = random.between(3, 6);
                (0..count).flat_map(|_| random.pick(of).clone()).collect()
            };
            (0..count).map(|_| one()).collect()
        };
        let (phrases, idioms) = (joined(400, &words), joined(300, &instructions));
        Self { words, phrases, instructions, idioms }
    }

    /// Chooses a kind by its share.
    pub fn any(random: &mut Random) -> Kind {
        MIX[random.weighted(&MIX.map(|(_, share)| share))].0
    }

    /// Fills `page` with new content of a kind.
    pub fn fill(&self, kind: Kind, random: &mut Random, page: &mut Page) {
        match kind {
            Kind::Text => pieces(page, random, |random, out| {
                let from = if random.below(3) > 0 { &self.phrases } else { &self.words };
                out.extend_from_slice(frequent(random, from));
            }),
            Kind::Code => pieces(page, random, |random, out| {
                let from = if random.below(3) > 0 { &self.idioms } else { &self.instructions };
                out.extend_from_slice(frequent(random, from));
                if random.below(3) == 0 {
                    out.extend_from_slice(
                        &[random.next() as u8, 0, 0, 0][..[1, 4][random.below(2) as usize]],
                    );
                }
            }),
            Kind::Pointers => {
                let heap = 0x7f00_0000_0000 | (random.below(1 << 12) << 24);
                words(page, |_| match random.below(8) {
                    0..3 => heap | (random.below(1 << 16) << 4),
                    3 => random.below(256),
                    4 => 0xffff_ffff_8100_0000 | (random.below(512) << 6),
                    _ => 0,
                });
            }
            Kind::Table => {
                let (first, step) = (random.next() >> 16, random.between(1, 64));
                words(page, |at| match at % 4 {
                    0 => first + at * step,
                    1 => 0x8000_0000_0000_0067,
                    2 => random.below(64),
                    _ => 0,
                });
            }
            Kind::Sparse => {
                words(page, |_| 0);
                for _ in 0..random.between(4, 16) {
                    let word = random.next();
                    set_word(page, random.below(512), word);
                }
            }
            Kind::Data => {
                let heap = 0x7f00_0000_0000 | (random.below(1 << 12) << 24);
                words(page, |at| match at % 8 {
                    0..6 => random.next(),
                    _ => heap | (random.below(1 << 16) << 4),
                });
            }
            Kind::Noise => words(page, |_| random.next()),
        }
    }
}

/// Chooses one of `all`. The first ones are more frequent, like the words of a language.
fn frequent<'a>(random: &mut Random, all: &'a [Vec<u8>]) -> &'a [u8] {
    let count = all.len() as u64;
    &all[(random.below(count) * random.below(count) / count) as usize]
}

/// Changes one word as a guest does: a rising number, a flag, a pointer.
pub fn change_word(random: &mut Random, page: &mut Page) {
    let at = random.below((PAGE_BYTES / 8) as u64);
    let word = get_word(page, at);
    let changed = match random.below(4) {
        0 | 1 => word.wrapping_add(random.between(1, 200)),
        2 => (word & !0xff_ffff) | (random.below(1 << 20) << 4),
        _ => random.next(),
    };
    // The word must differ from its value before.
    set_word(page, at, if changed == word { !word } else { changed });
}

fn get_word(page: &Page, at: u64) -> u64 {
    let at = at as usize * 8;
    u64::from_le_bytes(std::array::from_fn(|byte| page[at + byte]))
}

fn set_word(page: &mut Page, at: u64, word: u64) {
    let at = at as usize * 8;
    page[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

fn words(page: &mut Page, mut word: impl FnMut(u64) -> u64) {
    for (at, bytes) in (0..).zip(page.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word(at).to_le_bytes());
    }
}

fn pieces(page: &mut Page, random: &mut Random, mut piece: impl FnMut(&mut Random, &mut Vec<u8>)) {
    let mut out = Vec::with_capacity(PAGE_BYTES + 16);
    while out.len() < PAGE_BYTES {
        piece(random, &mut out);
    }
    page.copy_from_slice(&out[..PAGE_BYTES]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_units::ZERO_PAGE;

    #[test]
    fn exactly_one_word_changes() {
        let mut random = Random::new(3);
        for _ in 0..2000 {
            let mask = random.next() as u8;
            let before: Page = std::array::from_fn(|at| at as u8 & mask);
            let mut after = before;
            change_word(&mut random, &mut after);
            let differ =
                (0..512).filter(|at| get_word(&before, *at) != get_word(&after, *at)).count();
            assert_eq!(differ, 1);
        }
    }

    #[test]
    fn each_page_differs() {
        let (pages, mut random) = (PageMaker::new(), Random::new(5));
        for (kind, _) in MIX {
            let (mut one, mut two) = (ZERO_PAGE, ZERO_PAGE);
            pages.fill(kind, &mut random, &mut one);
            pages.fill(kind, &mut random, &mut two);
            assert!(one != two && one != ZERO_PAGE, "{kind:?}");
        }
    }
}
