//! The table of tokens and its index.

use super::aligned;

/// The part of the table of tokens for the digits. Symbol names have digits, so each digit is a
/// token of its own.
pub const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00";
/// The largest table: its index has 16 bits.
pub const TABLE_BYTES_MAX: u64 = 1 << 16;
/// The length of the index.
pub const INDEX_BYTES: u64 = 512;
/// The number of tokens.
const TOKENS: usize = 256;

/// The tokens of a kernel's symbol names: the text for which each byte of a compressed name stands.
#[derive(Clone, Debug)]
pub struct TokenTable {
    /// The position of the table in memory.
    pub start: usize,
    /// The first byte after the index, relative to `start`.
    len_bytes: usize,
    texts: Vec<String>,
}

impl TokenTable {
    /// Finds the table of tokens in whose texts the token `0` begins at offset `digits` of
    /// `memory`. Returns `None` if there is none. A table is accepted only if the index after it
    /// has the position of each token, and if all tokens are printable.
    pub fn around(memory: &[u8], digits: usize) -> Option<Self> {
        // The tokens from the digits on end where the index begins.
        let mut rest = memory.get(digits..)?;
        for _ in usize::from(b'0')..TOKENS {
            let end = memchr::memchr(0, rest)?;
            rest = rest.get(end + 1..)?;
        }
        let index_at = aligned(memory.len() - rest.len());
        let index = memory.get(index_at..index_at + INDEX_BYTES as usize)?;
        let index: Vec<usize> =
            index.as_chunks::<2>().0.iter().map(|at| u16::from_le_bytes(*at).into()).collect();
        let start = digits.checked_sub(*index.get(usize::from(b'0'))?)?;
        let table = memory.get(start..index_at)?;
        let mut at = 0;
        let mut texts = Vec::with_capacity(TOKENS);
        for expected in index {
            let len = memchr::memchr(0, table.get(at..)?)?;
            let text = table.get(at..at + len)?;
            if expected != at || !text.iter().all(u8::is_ascii_graphic) {
                return None;
            }
            texts.push(std::str::from_utf8(text).ok()?.to_owned());
            at += len + 1;
        }
        let len_bytes = index_at + INDEX_BYTES as usize - start;
        let is_aligned = start.is_multiple_of(8) && aligned(start + at) == index_at;
        is_aligned.then_some(Self { start, len_bytes, texts })
    }

    /// Returns the same table at offset `start`, for another piece of memory.
    pub fn moved_to(self, start: usize) -> Self {
        Self { start, ..self }
    }

    /// Returns the offset in memory of the first byte after the table and its index.
    pub fn end(&self) -> usize {
        self.start + self.len_bytes
    }

    /// Returns the text for which the byte `token` stands.
    pub fn text(&self, token: u8) -> &str {
        self.texts.get(usize::from(token)).map_or("", String::as_str)
    }
}
